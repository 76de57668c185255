"""Comms without other processes: a process alone, and one rank of a dry run."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

from einmpi.comm.base import (
    SUMMABLE,
    Array,
    Calls,
    Counts,
    Group,
    PreparesNothing,
    SharesNothing,
    allgatherv_bytes,
    alltoallv_bytes,
    count_received,
    reduce_scatter_bytes,
    sendrecv_bytes,
    split_calls,
)
from einmpi.process.environment import available_cores


@lru_cache(maxsize=16)
def spread_over_nodes(size: int, nodes: int) -> tuple[int, ...]:
    """Return the node of each rank if ranks are placed evenly, one node after the other."""
    return tuple(rank * nodes // size for rank in range(size))


class CountingComm(PreparesNothing, SharesNothing):
    """One rank of a dry run: it counts bytes but moves nothing and never looks at an element.

    Comms that do move something begin with this.
    """

    def __init__(self, rank: int, size: int, nodes: int = 1) -> None:
        self.rank = rank
        self.size = size
        self.cores = 1
        self.nodes = spread_over_nodes(size, nodes)
        self.ranks_on_node = 1
        self.rank_on_node = 0
        self.received = 0
        self.received_between = 0
        self.kept: dict[str, Any] = {}
        self.calls = Calls()

    def alltoallv(
        self,
        group: Group,
        send: Array,
        send_counts: Counts,
        receive: Array,
        receive_counts: Counts,
    ) -> None:
        received = alltoallv_bytes(self, group, send, send_counts, receive, receive_counts)
        count_received(self, received)

    def allgatherv(self, group: Group, buffer: Array, counts: Counts) -> None:
        count_received(self, allgatherv_bytes(self, group, buffer, counts))

    def reduce_scatter(self, group: Group, send: Array, counts: Counts, receive: Array) -> bool:
        received = reduce_scatter_bytes(self, group, send, counts, receive)
        if send.dtype.name not in SUMMABLE:
            return False
        count_received(self, received)
        return True

    def sendrecv(
        self, to: int | None, send: Array | None, source: int | None, receive: Array | None
    ) -> None:
        count_received(self, sendrecv_bytes(self, to, send, source, receive))

    @cached_property
    def cuda_aware(self) -> bool:
        return False

    def lowest(self, number: int) -> int:
        return number

    def compare(self, text: str) -> list[str] | None:
        return None

    def allgather_text(self, text: str) -> list[str]:
        found = self.compare(text) or [text] * self.size
        return [split_calls(each)[0] for each in found]

    def barrier(self) -> None:
        pass

    def free(self) -> None:
        pass


class SelfComm(CountingComm):
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
