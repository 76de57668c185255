"""Ranks that act together: an error on one becomes the same error on all, and all want the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from einmpi.comm.base import Comm
from einmpi.errors import EinmpiError, failure
from einmpi.version import __version__

Result = TypeVar("Result")


def on_first_rank(comm: Comm, action: Callable[[], str | None]) -> str:
    """Do something on rank 0 and return its text on all ranks. If it fails, all ranks raise."""
    # A status and a text. The usual one is the same on all ranks, which is cheap to gather.
    message = "0 "
    if comm.rank == 0:
        try:
            message += action() or ""
        except EinmpiError as error:
            message = f"{error.status} {error}"
    status, _, text = comm.allgather_text(message)[0].partition(" ")
    if int(status):
        raise failure(int(status), text, everywhere=True)
    return text


def together(
    comm: Comm,
    function: Callable[[], Result],
    fingerprint: Callable[[Result], str] | None = None,
) -> Result:
    """Call a function on every rank; if it fails on some, raise the same error on all.

    `fingerprint` makes a text of the result that must be equal on all ranks.
    """
    try:
        result = function()
    except EinmpiError as error:
        agree(comm, "", error)
        raise  # agree has raised already
    if comm.size > 1:  # a process alone does not need the fingerprint
        agree(comm, fingerprint(result) if fingerprint is not None else "ok")
    return result


def require_same_version(comm: Comm) -> None:
    """Raise if ranks have different versions of einmpi.

    This is the first thing ranks ask each other: other versions need not understand anything else.
    """
    different = comm.same(__version__)
    if different is not None:
        versions = comm.allgather_text(__version__)
        raise failure(
            EinmpiError.status,
            f"einmpi: rank {different} has version {versions[different]}, rank 0 has "
            f"{versions[0]}; all ranks must have the same",
            everywhere=True,
        )


def agree(comm: Comm, fingerprint: str, error: EinmpiError | None = None) -> None:
    """Raise on all ranks if one of them has an error or another fingerprint than rank 0."""
    text = fingerprint if error is None else f"error {error.status} {error}"
    different = comm.same(text)
    if different is not None:
        error = EinmpiError(
            f"einmpi: rank {different} has another command, job or version of einmpi than rank 0; "
            "all ranks must do the same"
        )
        for rank, found in enumerate(comm.allgather_text(text)):
            if found.startswith("error "):
                _, status, message = found.split(" ", 2)
                error = failure(int(status), message)
                error.add_note(f"on rank {rank}")
                break
    if error is not None:
        error.everywhere = True
        raise error
