"""Comms without other processes: a process alone, and one rank of a dry run."""

from __future__ import annotations

from einmpi.comm.base import Array, Comm, Counts, Group
from einmpi.process.environment import available_cores


class CountingComm(Comm):
    """One rank of a dry run: it counts bytes but moves nothing and never looks at an element."""


class SelfComm(Comm):
    """One process: rank 0 of 1."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.cores = len(available_cores())

    def reduce_scatter(self, group: Group, send: Array, counts: Counts, receive: Array) -> bool:
        is_summed = super().reduce_scatter(group, send, counts, receive)
        if is_summed:
            receive[...] = send
        return is_summed

    def sendrecv(
        self, to: int | None, send: Array | None, source: int | None, receive: Array | None
    ) -> None:
        super().sendrecv(to, send, source, receive)
        if source is not None and receive is not None:
            receive[...] = send


ALONE = SelfComm()
