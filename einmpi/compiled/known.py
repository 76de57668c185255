"""Compiled jobs that ranks keep, so that a call that was made before plans nothing."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from einmpi.comm.agreement import KNOWN, all_say
from einmpi.comm.base import Comm
from einmpi.compiled.program import Compiled
from einmpi.job.job import Job, options_of

MOST_JOBS = 32
MOST_PROGRAMS = 256


@dataclass(frozen=True)
class _Entry:
    source: Any  # what it was compiled from; kept alive, because the key may have its id
    number: int  # the same on all ranks that compiled it together
    compiled: Compiled


class KnownJobs:
    """The jobs that the ranks of a communicator have compiled, those used last.

    Ranks must find the same: a rank that compiles waits for the others.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._compiled_so_far = 0
        self._lock = threading.RLock()  # of threads of one process that is alone

    def known(self, key: Hashable, source: Any) -> Compiled | None:
        """Return what this rank has compiled for a key and from this. Nothing is sent."""
        entry = self._entries.get(key)
        return None if entry is None or entry.source is not source else entry.compiled

    def find(
        self, comm: Comm, key: Hashable, source: Any, make: Callable[[], Compiled]
    ) -> Compiled:
        """Return what was compiled for a key if all ranks have it, else compile it now."""
        with self._lock:
            entry = self._entries.get(key)
            own_number = 0 if entry is None else entry.number
            is_known = all_say(comm, comm.prepare_compare(f"{KNOWN}job {own_number}"))
            if entry is None or not is_known:
                compiled = make()
                self._compiled_so_far += 1
                entry = _Entry(source, self._compiled_so_far, compiled)
                self._entries[key] = entry
            self._entries.move_to_end(key)
            if len(self._entries) > MOST_JOBS:
                self._entries.popitem(last=False)
            return entry.compiled


def known_jobs(comm: Comm) -> KnownJobs:
    """Return the jobs that the ranks of a communicator have compiled."""
    known: KnownJobs | None = comm.kept.get("jobs")
    if known is None:
        known = comm.kept.setdefault("jobs", KnownJobs())
    return known


def compiled_once(comm: Comm, key: Hashable, make_job: Callable[[], Job]) -> Compiled:
    """Return the compiled job that a key stands for; `make_job` makes it for the first call.

    All ranks ask for the same in the same order, so all have compiled the same.
    """
    known: OrderedDict[Hashable, Compiled] = comm.kept.setdefault("programs", OrderedDict())
    compiled = known.pop(key, None)
    if compiled is None:
        job = make_job()
        compiled = Compiled(job, comm, options_of(job))
    known[key] = compiled
    if len(known) > MOST_PROGRAMS:
        known.popitem(last=False)
    return compiled
