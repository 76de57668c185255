"""Files that a run reserves for itself: locked until no rank of the run can publish any more."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

from einmpi.comm.agreement import on_first_rank
from einmpi.comm.base import Comm
from einmpi.errors import is_everywhere
from einmpi.files.atomic import (
    Lock,
    NotPublished,
    acquire_lock,
    cannot_write,
    lock_path,
    new_token,
    reason_of,
    remove_path,
    taken_path,
)
from einmpi.files.journal import UNFINISHED, finish_interrupted
from einmpi.process.signals import on_abort

# Seconds. A rank that ends the run prints its line and aborts within this time.
_END_OF_RUN_SECONDS = 8.0
_PUBLISH_SECONDS = 1.0  # for another rank to finish its renames, or to clean up
_LOOK_SECONDS = 0.01


class Claim:
    """The files that a run has reserved, as one rank sees them.

    Only the rank that has made a certain hidden file may change them: rank 0 while it publishes
    results, or a rank that ends the run and removes the locks. So no rank publishes anything after
    another one has given the files up.
    """

    def __init__(self, files: Mapping[str, str], comm: Comm) -> None:
        self.comm = comm
        self.token = new_token()
        self._places = dict(files)
        self._targets = {file: os.path.realpath(file) for file in files}
        self._locks: list[Lock] = []  # only on rank 0
        # The inode and the time of change of each lock file, by which all ranks recognize it. The
        # device of a network file system has another number on each machine.
        self._lock_identities: dict[str, list[int]] = {}

    # ---- the beginning --------------------------------------------------------------------------

    def acquire(self) -> str:
        """Lock the files on rank 0, at once or not at all; return what other ranks must know.

        What killed runs have left beside files whose lock is free is finished or removed.
        """
        for file, place in self._places.items():
            with _report_failures(place, file):
                lock = acquire_lock(self._targets[file])
            self._locks.append(lock)
            if lock.supported:
                status = os.fstat(lock.descriptor)
                self._lock_identities[file] = [status.st_ino, status.st_ctime_ns]
        for file, place in self._places.items():
            with _report_failures(place, file, f"{UNFINISHED}: "):
                finish_interrupted(self._targets[file], self._locks)
        for target, lock in zip(self._targets.values(), self._locks, strict=True):
            if lock.supported:
                _remove_leftovers(target, "[0-9a-f]{16}")
        return json.dumps([self.token, self._lock_identities])

    def join(self, text: str) -> None:
        """Take over what `acquire` has returned on rank 0."""
        self.token, self._lock_identities = json.loads(text)

    # ---- the right to change the files ----------------------------------------------------------

    @property
    def _taken(self) -> str:
        """Return the path of the file that gives a rank the right to change the others."""
        return taken_path(next(iter(self._targets.values())), self.token)

    def _take(self) -> bool:
        """Try to get the right to change the files; return False if another rank has it.

        Raise OSError if no file can be made.
        """
        try:
            os.close(os.open(self._taken, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        return True

    @contextlib.contextmanager
    def publishing(self) -> Iterator[None]:
        """Keep other ranks from giving the files up in a with block on rank 0.

        Raise NotPublished if one has done that already, or if the lock was lost otherwise.
        """
        try:
            may_change = self._take()
        except OSError as error:
            raise NotPublished(reason_of(error)) from error
        if not may_change:
            _wait_for_end_of_run()
        if not self._has_locks():
            os.remove(self._taken)
            _wait_for_end_of_run()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.remove(self._taken)

    def require_locks(self) -> None:
        """Raise NotPublished on any rank if the run has lost its locks.

        Its drafts may then be gone too, which is no fault of the disk.
        """
        if not self._has_locks():
            _wait_for_end_of_run()

    def _has_locks(self) -> bool:
        return all(self._is_own_lock(file) for file in self._lock_identities)

    def _is_own_lock(self, file: str) -> bool:
        """Return whether the lock file of a file is the one that this run has locked."""
        try:
            status = os.lstat(lock_path(self._targets[file]))
        except OSError:
            return False
        return self._lock_identities.get(file) == [status.st_ino, status.st_ctime_ns]

    # ---- the end --------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Remove drafts and locks, on any rank: rank 0 may no longer be able to.

        Nothing is removed if another rank does not stop changing the files: the next run does it.
        """
        if not self._targets:
            return
        deadline = time.monotonic() + _PUBLISH_SECONDS
        try:
            while not self._take():
                if time.monotonic() > deadline:
                    return
                time.sleep(_LOOK_SECONDS)
        except OSError:  # the folder has gone, or the disk is full
            return
        for file, target in self._targets.items():
            if self._is_own_lock(file):
                with contextlib.suppress(OSError):
                    os.remove(lock_path(target))
        for target in self._targets.values():
            _remove_leftovers(target, self.token)  # the file that `_take` has made is one of them

    def release(self) -> None:
        """Release the locks of rank 0, without removing their files if others may use them."""
        for lock in self._locks:
            if lock.supported:
                lock.release()
            else:
                lock.remove()
        self._locks.clear()


@contextlib.contextmanager
def claimed(
    files: Mapping[str, str], comm: Comm, check: Callable[[], None] | None = None
) -> Iterator[Claim]:
    """Reserve files for this run to write. All ranks call it; rank 0 holds the locks.

    `files` has the place that names each. `check` may refuse the files before they are locked.
    """
    claim = Claim(files, comm)

    def acquire() -> str:
        if check is not None:
            check()
        return claim.acquire()

    try:
        claim.join(on_first_rank(comm, acquire))
        with on_abort(claim.give_up):
            try:
                yield claim
            except BaseException as error:
                if not is_everywhere(error):
                    claim.give_up()
                raise
            comm.barrier()
    finally:
        if comm.rank == 0:
            claim.give_up()
            claim.release()


def _wait_for_end_of_run() -> NoReturn:
    """Wait for the rank that has given the files up: it says why it ends, and ends this one."""
    time.sleep(_END_OF_RUN_SECONDS)
    raise NotPublished("this run no longer has the lock: a rank has ended, or it was removed")


@contextlib.contextmanager
def _report_failures(place: str, file: str, explanation: str = "") -> Iterator[None]:
    """Turn an OSError into one that names the place and the file, and explains the reason."""
    try:
        yield
    except BlockingIOError as error:
        raise cannot_write(place, file, "another run is writing it") from error
    except OSError as error:
        raise cannot_write(place, file, explanation + reason_of(error)) from error


def _remove_leftovers(target: str, token: str) -> None:
    """Remove the hidden files beside a target of runs whose tokens match a pattern."""
    folder, name = os.path.split(target)
    pattern = re.compile(rf"\.{re.escape(name)}\.{token}\.(part|old|taken|journal)")
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(folder)
    for found in names:
        if pattern.fullmatch(found):
            with contextlib.suppress(OSError):
                remove_path(os.path.join(folder, found))
