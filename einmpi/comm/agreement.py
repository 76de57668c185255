"""Ranks that act together: an error on one becomes an error on all, and all want the same."""

from __future__ import annotations

import atexit
import os
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from hashlib import sha256
from itertools import zip_longest
from types import NoneType, TracebackType
from typing import Any, TypeVar

import numpy as np

from einmpi.caches import bounded_cache
from einmpi.comm.base import Array, Comm, split_calls
from einmpi.comm.control_messages import Steps, finish_side_by_side
from einmpi.comm.mpi import FREED, MpiComm, comm_of
from einmpi.comm.mpi_library import abort, mpi_has_ended, world
from einmpi.errors import EinmpiError, InputError, failure, is_everywhere, on_one_line
from einmpi.process.environment import CHECK_VARIABLE
from einmpi.process.signals import abort_all_ranks, abort_on_error
from einmpi.version import __version__

Result = TypeVar("Result")
_ERROR = "error "  # what a rank with an error says begins with this
_ENDED = "ended"  # what a rank says that makes no more calls
# What a communicator keeps if it has lost a rank: which one. Calls would wait for it for ever.
_ENDED_RANK = "ended rank"
KNOWN = "known "  # what ranks say begins with this if they may know different things
# After so many calls without messages ranks compare what they have called.
MOST_NOTED_CALLS = 64
MOST_COMPARED_BYTES = 4096  # of an array in a call
MOST_SHOWN_ITEMS = 64  # of a list
_PLAIN_TYPES = frozenset((bool, int, float, complex, str, NoneType))


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
        raise failure(text, int(status))
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
            f"einmpi: rank {different} has version {versions[different]}, rank 0 has "
            f"{versions[0]}; all ranks must have the same"
        )


def agree(comm: Comm, fingerprint: str, error: Exception | None = None) -> None:
    """Raise on all ranks if one of them has an error or another fingerprint than rank 0."""
    if _ENDED_RANK in comm.kept:
        raise _error_of_ended_rank(comm)
    text = fingerprint if error is None else f"{_ERROR}{_status(error)} {describe_error(error)}"
    found = comm.compare(text)
    if found is not None:
        raise _error_of_ranks(comm, found, error)
    if error is not None:
        raise _marked(error)


def agree_on_calls(comm: Comm) -> None:
    """Raise on all ranks if they have noted different calls. They ask before they send anything."""
    if comm.calls.texts:
        agree(comm, "")


def all_say(comm: Comm, ask: Callable[[], list[str] | None]) -> bool:
    """Return on all ranks whether they know the same; raise if one of them does something else.

    `ask` compares a text that begins with KNOWN and a word, on all ranks the same one.
    """
    if _ENDED_RANK in comm.kept:
        raise _error_of_ended_rank(comm)
    found = ask()
    if found is None:
        return True
    said = {(*text.split(" ")[:2], *calls) for text, *calls in map(split_calls, found)}
    if len(said) > 1 or not found[0].startswith(KNOWN):
        raise _error_of_ranks(comm, found, None)
    return False


def _error_of_ranks(comm: Comm, found: Sequence[str], own: Exception | None) -> Exception:
    """Return what a rank raises, given what all of them say and that it is not the same."""
    comm.calls.forget()
    texts = []
    all_calls = []
    for text, *calls in map(split_calls, found):
        texts.append(text)
        all_calls.append(calls)
    failed = [rank for rank, text in enumerate(texts) if text.startswith(_ERROR)]
    if _ENDED in texts:
        comm.kept[_ENDED_RANK] = texts.index(_ENDED)
        return _error_of_ended_rank(comm)
    if own is not None:
        own.add_note(f"on rank {comm.rank}")
        return _marked(own)
    if failed:
        _, status, message = texts[failed[0]].split(" ", 2)
        other_error = failure(message, int(status))
        other_error.add_note(f"on rank {failed[0]}")
        return other_error
    for rank, calls in enumerate(all_calls):
        for expected, call in zip_longest(all_calls[0], calls):
            if call != expected:
                made = [f"rank 0 calls {expected}", f"rank {rank} calls {call}"]
                if expected is None:
                    made = [made[1], "rank 0 does not"]
                elif call is None:
                    made[1] = f"rank {rank} does not"
                problem = f"einmpi: {', '.join(made)}; all ranks must make the same calls"
                return failure(problem)
    different = next(rank for rank, text in enumerate(texts) if text != texts[0])
    return failure(
        f"einmpi: rank {different} has another command, job, BLAS or version of einmpi than "
        "rank 0; all ranks must do the same"
    )


# ---- calls of functions that all ranks call alike ------------------------------------------------


def call_alike(
    comm: Comm, name: str, shown: Sequence[Any], function: Callable[..., Result], *arguments: Any
) -> Result:
    """Call a function that all ranks call with the same arguments, and note that.

    The ranks compare their calls when they next send each other something, or after many calls.
    """
    calls = comm.calls
    if comm.size == 1 or calls.is_inside:
        return function(*arguments)
    calls.note(f"{name}({', '.join(map(describe_argument, shown))})")
    if len(calls.texts) >= MOST_NOTED_CALLS:
        agree_on_calls(comm)
    calls.is_inside = True
    try:
        return function(*arguments)
    finally:
        calls.is_inside = False


def describe_argument(value: Any) -> str:
    """Return an argument as a text that is equal on ranks that mean the same.

    Arrays have shapes and dtypes; small ones also a code of their values.
    """
    if type(value) in _PLAIN_TYPES:
        return repr(value)
    if hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, type):
        if isinstance(value, np.generic):
            is_plain = isinstance(value, float | complex | np.integer | np.bool_)
            return repr(value.item() if is_plain else value)
        text = _describe_array(value.dtype, value.shape)
        is_small = isinstance(value, np.ndarray) and value.nbytes <= MOST_COMPARED_BYTES
        if is_small and not value.dtype.hasobject:
            text += f" {zlib.crc32(value.tobytes()):x}"
        return text
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        shown = ["" if part is None else describe_argument(part) for part in parts]
        return ":".join(shown if shown[2] else shown[:2])
    if isinstance(value, dict):
        return ", ".join([f"{key}={describe_argument(each)}" for key, each in value.items()])
    if isinstance(value, list | tuple):
        shown = list(map(describe_argument, value[:MOST_SHOWN_ITEMS]))
        if len(value) > MOST_SHOWN_ITEMS:
            rest = repr(value[MOST_SHOWN_ITEMS:])
            shown.append(f"… {len(value)} items {zlib.crc32(rest.encode()):x}")
        return f"[{', '.join(shown)}]"
    if isinstance(value, int | float | str | range):  # of a type of their own, such as IntEnum
        return repr(value)
    return getattr(value, "__name__", type(value).__name__)


@bounded_cache(1024)  # small operations would notice how long it takes
def _describe_array(dtype: Any, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"


def _error_of_ended_rank(comm: Comm) -> EinmpiError:
    problem = f"rank {comm.kept[_ENDED_RANK]} has ended its program, and others go on"
    return failure(f"{problem}; all ranks must make the same calls")


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
    return failure(f"rank {rank}: {found[rank]}")


def announce_end(comm: MpiComm) -> Steps[None]:
    """Tell the other ranks that this one makes no more calls.

    It is done when all others end too, or when they have learnt of it in `together`.
    """
    if _ENDED_RANK in comm.kept:  # it has ended before, and waits for nothing
        return
    yield from comm.compare_in_steps(_ENDED)


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


# ---- programs ------------------------------------------------------------------------------------
#
# The ranks of a user's own program, which must end together: if one ends alone, none may wait
# for it for ever.


class _Program:
    """What is done when this program ends, once it uses a communicator of several ranks."""

    def __init__(self) -> None:
        self._comms: list[MpiComm] = []  # all that were used, in the order of their first uses
        self._pid = 0  # of the rank; 0 as long as nothing is watched
        self._previous_hook = sys.excepthook

    def watch(self, comm: MpiComm) -> None:
        if not self._pid:
            self._pid = os.getpid()
            self._previous_hook = sys.excepthook
            sys.excepthook = self._end_all_ranks
            atexit.register(self._announce_end)
        if comm not in self._comms:
            self._comms = [known for known in self._comms if not known.is_freed]
            self._comms.append(comm)

    def _end_all_ranks(
        self,
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        """Print an exception that leaves the program as usual, then end all ranks."""
        self._previous_hook(kind, error, traceback)
        if self._is_own_process() and not mpi_has_ended():
            end_all_ranks(error)

    def _announce_end(self) -> None:
        """Tell ranks that wait in a call for this one that it has ended.

        MPI itself would let them wait, and this rank as well. They may wait on any communicator,
        or end and have used other ones.
        """
        if self._is_own_process():
            comms = [comm for comm in self._comms if not comm.is_freed]
            finish_side_by_side([announce_end(comm) for comm in comms])

    def _is_own_process(self) -> bool:
        """Return whether this is the rank itself, not a child process of it."""
        return os.getpid() == self._pid


_program = _Program()


def comm_of_program(comm: Any = None) -> Comm:
    """Return the Comm of a user's communicator; from now on all ranks end if one ends alone."""
    found = comm_of(comm)
    if isinstance(found, MpiComm) and found.size > 1:
        _program.watch(found)
    return found


def end_all_ranks(error: BaseException) -> None:
    """Print why this rank has failed, in one line, and abort all ranks of the world."""
    communicator = world()
    if communicator is None:  # not started by a launcher
        return
    rank = communicator.rank
    abort_all = partial(abort, communicator)
    if isinstance(error, KeyboardInterrupt):
        abort_all_ranks(rank, "interrupted", 130, abort_all)
    abort_on_error(rank, error, abort_all)


def abort_on_divergence(comm: Comm) -> AbstractContextManager[None]:
    """End all ranks if this one leaves the `with` block with an error.

    The other ranks are in the middle of an exchange with it and cannot be told otherwise.
    """
    return _AbortOnDivergence(comm)


class _AbortOnDivergence:
    """The context manager of `abort_on_divergence`: a class, since a generator takes longer."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            return
        comm = self.comm
        if not isinstance(comm, MpiComm) or comm.size == 1 or is_everywhere(error):
            return
        if comm.is_freed:
            raise failure(FREED) from error
        end_all_ranks(error)


# ---- same arrays ---------------------------------------------------------------------------------
#
# EINMPI_CHECK=1: ranks compare the arrays that all of them should have alike.


def is_checking() -> bool:
    """Return whether the user wants arrays to be compared."""
    given = os.environ.get(CHECK_VARIABLE, "")
    if given not in ("", "0", "1"):
        raise InputError(
            CHECK_VARIABLE, f"{given!r} is neither 0 nor 1", "1 to compare arrays, or 0"
        )
    return given == "1"


def require_same_arrays(comm: Comm, where: str, arrays: Mapping[str, Array]) -> None:
    """Raise on all ranks if an array of some rank is not equal, bit by bit, to that of rank 0."""
    digests = {name: _digest(array) for name, array in arrays.items()}
    texts = comm.allgather_text(" ".join(digests.values()))
    for name, all_digests in zip(digests, zip(*map(str.split, texts), strict=True), strict=True):
        for rank, digest in enumerate(all_digests):
            if digest != all_digests[0]:
                error = InputError(
                    where,
                    f"{name} is not the same on rank 0 and on rank {rank}",
                    "an array with the same values on all ranks",
                    "use the same seed, or DistArray.from_local for different blocks",
                )
                error.everywhere = True
                raise error


def _digest(array: Array) -> str:
    contiguous = np.ascontiguousarray(array)
    found = sha256(f"{array.dtype} {array.shape}".encode())
    found.update(contiguous.reshape(-1).view(np.uint8).data)
    return found.hexdigest()
