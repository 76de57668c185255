"""The ranks of a user's own program, which must end together: if one ends alone, none may wait for
it for ever."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any

from einmpi.comm.agreement import announce_end
from einmpi.comm.base import Comm
from einmpi.comm.control_messages import finish_side_by_side
from einmpi.comm.mpi import FREED, MpiComm, comm_of
from einmpi.comm.mpi_library import abort, mpi_has_ended, world
from einmpi.errors import EinmpiError, failure, is_everywhere
from einmpi.process.abort import abort_all_ranks, abort_on_error


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
            raise failure(EinmpiError.status, FREED, everywhere=True) from error
        end_all_ranks(error)
