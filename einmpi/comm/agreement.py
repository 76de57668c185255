"""Ranks that act together: an error on one becomes an error on all, and all want the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from einmpi.comm.base import Comm
from einmpi.comm.control_messages import Steps
from einmpi.comm.mpi import MpiComm
from einmpi.errors import EinmpiError, failure, on_one_line
from einmpi.version import __version__

Result = TypeVar("Result")
_ERROR = "error "  # what a rank with an error says begins with this
_ENDED = "ended"  # what a rank says that makes no more calls
# What a communicator keeps if it has lost a rank: which one. Calls would wait for it for ever.
_ENDED_RANK = "ended rank"


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
    """Call a function on every rank; if it fails on some, raise an error on all.

    A rank that fails raises its own error, the others that of the first rank that fails.
    `fingerprint` makes a text of the result that must be equal on all ranks.
    """
    text = "ok"
    try:
        result = function()
        if comm.size > 1 and fingerprint is not None:  # a process alone does not need it
            text = fingerprint(result)
    except Exception as error:
        agree(comm, "", error)
        raise  # agree has raised already
    if comm.size > 1:
        agree(comm, text)
    return result


def require_same_version(comm: Comm) -> None:
    """Raise if ranks have different versions of einmpi.

    This is the first thing ranks ask each other: other versions need not understand anything else.
    """
    versions = comm.differing_texts(__version__) if isinstance(comm, MpiComm) else None
    if versions is not None:
        different = next(rank for rank, text in enumerate(versions) if text != versions[0])
        raise failure(
            EinmpiError.status,
            f"einmpi: rank {different} has version {versions[different]}, rank 0 has "
            f"{versions[0]}; all ranks must have the same",
            everywhere=True,
        )


def agree(comm: Comm, fingerprint: str, error: Exception | None = None) -> None:
    """Raise on all ranks if one of them has an error or another fingerprint than rank 0."""
    if _ENDED_RANK in comm.kept:
        raise _error_of_ended_rank(comm)
    text = fingerprint if error is None else f"{_ERROR}{_status(error)} {describe_error(error)}"
    different = comm.same(text)
    if different is None:
        if error is not None:
            raise _marked(error)
        return
    found = comm.allgather_text(text)
    failed = [rank for rank, said in enumerate(found) if said.startswith(_ERROR)]
    if _ENDED in found:
        comm.kept[_ENDED_RANK] = found.index(_ENDED)
        raise _error_of_ended_rank(comm)
    if error is not None:
        error.add_note(f"on rank {comm.rank}")
        raise _marked(error)
    if failed:
        _, status, message = found[failed[0]].split(" ", 2)
        other_error = failure(int(status), message, everywhere=True)
        other_error.add_note(f"on rank {failed[0]}")
        raise other_error
    raise failure(
        EinmpiError.status,
        f"einmpi: rank {different} has another command, job, BLAS or version of einmpi than "
        "rank 0; all ranks must do the same",
        everywhere=True,
    )


def all_say(comm: Comm, text: str, ask: Callable[[], bool]) -> bool:
    """Return on all ranks whether they say the same; raise if one of them has ended its program.

    `ask` is `comm.prepare_same(text)`.
    """
    if _ENDED_RANK in comm.kept:
        raise _error_of_ended_rank(comm)
    if ask():
        return True
    found = comm.allgather_text(text)
    if _ENDED in found:
        comm.kept[_ENDED_RANK] = found.index(_ENDED)
        raise _error_of_ended_rank(comm)
    return False


def _error_of_ended_rank(comm: Comm) -> EinmpiError:
    problem = f"rank {comm.kept[_ENDED_RANK]} has ended its program, and others go on"
    return failure(
        EinmpiError.status, f"{problem}; all ranks must make the same calls", everywhere=True
    )


def find_first_failure(comm: Comm, error: Exception | None, order: int) -> Exception | None:
    """Return the error that this rank has to raise at the end of a call, None if no rank failed.

    A rank that failed raises its own error. The others raise one that names the rank that failed
    first by `order`. If all goes well this takes one small message.
    """
    nobody = 2**62
    first = comm.lowest(nobody if error is None else order * comm.size + comm.rank)
    if first == nobody:
        return None
    found = comm.allgather_text("" if error is None else describe_error(error))
    if error is not None:
        return _marked(error)
    rank = first % comm.size
    return failure(EinmpiError.status, f"rank {rank}: {found[rank]}", everywhere=True)


def announce_end(comm: MpiComm) -> Steps[None]:
    """Tell the other ranks that this one makes no more calls.

    It is done when all others end too, or when they have learnt of it in `together`.
    """
    if _ENDED_RANK in comm.kept:  # it has ended before, and waits for nothing
        return
    different = yield from comm.same_in_steps(_ENDED)
    if different is not None:
        yield from comm.allgather_text_in_steps(_ENDED)


def describe_error(error: BaseException) -> str:
    """Return an error as one line, with its type if it is not one that einmpi raises."""
    name = "" if isinstance(error, EinmpiError) else f"{type(error).__name__}: "
    return on_one_line(f"{name}{error}")


def _status(error: Exception) -> int:
    return error.status if isinstance(error, EinmpiError) else EinmpiError.status


def _marked(error: Exception) -> Exception:
    """Note in an error that all ranks raise one."""
    error.everywhere = True  # type: ignore[attr-defined]  # exceptions take any attribute
    return error
