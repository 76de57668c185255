"""Ranks as threads of one process, for tests and for looking at a run without MPI.

Stricter than MPI: a call that does not match the other rank's call is an error that names both.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from time import monotonic
from typing import Any, TypeVar

import numpy as np

from einmpi.comm.base import (
    SUMMABLE,
    Counts,
    Group,
    allgatherv_bytes,
    alltoallv_bytes,
    count,
    pieces_of,
    placed,
    reduce_scatter_bytes,
    sendrecv_bytes,
)
from einmpi.errors import EinmpiError

Result = TypeVar("Result")
Letter = tuple[str, Any]  # what the sender was doing, and a copy of its array or its text


class _Stopped(Exception):
    """Another rank has failed."""


class _Office:
    """Where letters wait: for each rank one box, with a queue for each sender."""

    def __init__(self, ranks: int, limit: float) -> None:
        self.limit = limit
        self.boxes = [threading.Condition() for _ in range(ranks)]
        self.letters: list[dict[int, deque[Letter]]] = [defaultdict(deque) for _ in range(ranks)]
        self.ended: set[int] = set()
        self.failure: BaseException | None = None
        self._first = threading.Lock()

    def post(self, source: int, to: int, letter: Letter) -> None:
        with self.boxes[to]:
            self.letters[to][source].append(letter)
            self.boxes[to].notify_all()

    def take(self, rank: int, source: int, doing: str) -> Letter:
        end = monotonic() + self.limit
        with self.boxes[rank]:
            queue = self.letters[rank][source]
            while not queue:
                if self.failure is not None:
                    raise _Stopped
                if source in self.ended:
                    raise EinmpiError(
                        f"rank {rank} waits for rank {source} in {doing}, but rank {source} has ended"
                    )
                if monotonic() >= end:
                    raise EinmpiError(
                        f"rank {rank} has waited {self.limit:g} s for rank {source} in {doing}"
                    )
                self.boxes[rank].wait(end - monotonic())
            return queue.popleft()

    def end(self, rank: int, failure: BaseException | None) -> None:
        with self._first:
            if failure is not None and self.failure is None and not isinstance(failure, _Stopped):
                failure.add_note(f"on rank {rank} of {len(self.boxes)}")
                self.failure = failure
            self.ended.add(rank)
        for box in self.boxes:
            with box:
                box.notify_all()

    def forgotten(self) -> str | None:
        """What nobody has received, in words."""
        for rank, queues in enumerate(self.letters):
            for source, queue in queues.items():
                if queue:
                    return f"rank {rank} has not received what rank {source} sent in {queue[0][0]}"
        return None


def run_threads(
    ranks: int, function: Callable[[ThreadComm], Result], limit: float = 60.0, nodes: int = 1
) -> list[Result]:
    """What function(comm) returns on each rank. The first error of any rank ends all and is raised here.

    The ranks count what they receive as if they lay on that many nodes.
    """
    office = _Office(ranks, limit)
    results: list[Any] = [None] * ranks

    def work(rank: int) -> None:
        failure: BaseException | None = None
        try:
            results[rank] = function(ThreadComm(rank, ranks, office, nodes))
        except BaseException as error:
            failure = error
        office.end(rank, failure)

    # Daemons: a rank that computes for ever after another one's failure must not keep the process alive.
    threads = [
        threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and office.failure is None:
            thread.join(0.05)
    if office.failure is not None:
        end = monotonic() + 1
        for thread in threads:  # most are in a call and stop at once
            thread.join(max(0, end - monotonic()))
        raise office.failure
    forgotten = office.forgotten()
    if forgotten is not None:
        raise EinmpiError(forgotten)
    return results


class ThreadComm:
    """One rank of `run_threads`. Sends are copied at once, so no rank sees another one's buffers."""

    def __init__(self, rank: int, size: int, office: _Office, nodes: int = 1) -> None:
        self.rank, self.size, self.ranks_on_node, self.cores = rank, size, size, 1
        self.nodes = placed(size, nodes)
        self.received = self.received_between = 0
        self.rank_on_node, self.cuda_aware = rank, False
        self._office = office

    def alltoallv(
        self,
        group: Group,
        send: np.ndarray,
        send_counts: Counts,
        receive: np.ndarray,
        receive_counts: Counts,
    ) -> None:
        count(self, alltoallv_bytes(self, group, send, send_counts, receive, receive_counts))
        doing = f"alltoallv{group}"
        for to, piece in zip(group, pieces_of(send, send_counts), strict=True):
            if to != self.rank:
                self._send(to, doing, piece)
        for source, piece in zip(group, pieces_of(receive, receive_counts), strict=True):
            if source != self.rank:
                piece[...] = self._receive(source, doing, piece)

    def allgatherv(self, group: Group, buffer: np.ndarray, counts: Counts) -> None:
        count(self, allgatherv_bytes(self, group, buffer, counts))
        doing, pieces = f"allgatherv{group}", pieces_of(buffer, counts)
        for to in group:
            if to != self.rank:
                self._send(to, doing, pieces[group.index(self.rank)])
        for source, piece in zip(group, pieces, strict=True):
            if source != self.rank:
                piece[...] = self._receive(source, doing, piece)

    def reduce_scatter(
        self, group: Group, send: np.ndarray, counts: Counts, receive: np.ndarray
    ) -> bool:
        needed = reduce_scatter_bytes(self, group, send, counts, receive)
        if send.dtype.name not in SUMMABLE:
            return False
        count(self, needed)
        doing, pieces = f"reduce_scatter{group}", pieces_of(send, counts)
        for to, piece in zip(group, pieces, strict=True):
            if to != self.rank:
                self._send(to, doing, piece)
        for k, source in enumerate(
            group
        ):  # added in the order of the group, so that the result is always the same
            part = pieces[k] if source == self.rank else self._receive(source, doing, receive)
            receive[...] = part if k == 0 else receive + part
        return True

    def sendrecv(
        self,
        to: int | None,
        send: np.ndarray | None,
        source: int | None,
        receive: np.ndarray | None,
    ) -> None:
        count(self, sendrecv_bytes(self, to, send, source, receive))
        if to is not None and send is not None:
            self._send(to, "sendrecv", send)
        if source is not None and receive is not None:
            receive[...] = self._receive(source, "sendrecv", receive)

    def same(self, text: str) -> int | None:
        texts = self._texts("same", text)
        return next((rank for rank, other in enumerate(texts) if other != texts[0]), None)

    def allgather_text(self, text: str) -> list[str]:
        return self._texts("allgather_text", text)

    def barrier(self) -> None:
        self._texts("barrier", "")

    def free(self) -> None:
        pass

    def _texts(self, doing: str, text: str) -> list[str]:
        for to in range(self.size):
            self._office.post(self.rank, to, (doing, text))
        return [self._take(source, doing) for source in range(self.size)]

    def _send(self, to: int, doing: str, piece: np.ndarray) -> None:
        assert piece.flags.c_contiguous, f"rank {self.rank} sends strided elements in {doing}"
        if self._office.failure is not None:
            raise _Stopped
        self._office.post(self.rank, to, (doing, piece.copy()))

    def _receive(self, source: int, doing: str, piece: np.ndarray) -> np.ndarray:
        assert piece.flags.c_contiguous, f"rank {self.rank} receives strided elements in {doing}"
        sent: np.ndarray = self._take(source, doing)
        if sent.shape != piece.shape or sent.dtype != piece.dtype:
            raise EinmpiError(
                f"{doing}: rank {source} sends {sent.size} elements of {sent.dtype} to rank {self.rank}, "
                f"which expects {piece.size} of {piece.dtype}"
            )
        return sent

    def _take(self, source: int, doing: str) -> Any:
        found, content = self._office.take(self.rank, source, doing)
        if found != doing:
            raise EinmpiError(
                f"rank {self.rank} expects {doing} of rank {source}, which does {found}"
            )
        return content
