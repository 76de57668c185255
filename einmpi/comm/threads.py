"""Ranks as threads of one process, for tests and for looking at a run without MPI.

Stricter than MPI: a call that does not match the other rank's call is an error that names both, and
a rank goes on only when what it sent has been received.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any, NamedTuple, TypeVar

from einmpi.comm.base import (
    Array,
    Counts,
    Group,
    MessageComm,
    Messages,
    Received,
    aligned_bytes,
    count_received,
    pieces_of,
)
from einmpi.errors import EinmpiError

Result = TypeVar("Result")
_ENDING_SECONDS = 1.0  # for the other threads to end after an error


class _Message(NamedTuple):
    """What the sender was doing, and a copy of its array or its text."""

    call: str
    content: Any


class _Stopped(Exception):
    """Another rank has failed."""


class _Mailboxes:
    """The messages that wait for each rank, in a queue for each sender."""

    def __init__(self, ranks: int, limit: float) -> None:
        self.limit = limit  # seconds to wait for a message
        self.arrivals = [threading.Condition() for _ in range(ranks)]
        self.queues: list[dict[int, deque[_Message]]] = [defaultdict(deque) for _ in range(ranks)]
        self.ended: set[int] = set()
        self.failure: BaseException | None = None
        self._lock = threading.Lock()

    def send(self, source: int, to: int, message: _Message) -> None:
        with self.arrivals[to]:
            self.queues[to][source].append(message)
            self.arrivals[to].notify_all()

    def receive(self, rank: int, source: int, call: str) -> _Message:
        deadline = monotonic() + self.limit
        with self.arrivals[rank]:
            queue = self.queues[rank][source]
            while not queue:
                waiting = f"rank {rank} waits for rank {source} in {call}"
                if self.failure is not None:
                    raise _Stopped
                if source in self.ended:
                    raise EinmpiError(f"{waiting}, but rank {source} has ended")
                if monotonic() >= deadline:
                    raise EinmpiError(f"{waiting} for more than {self.limit:g} s")
                self.arrivals[rank].wait(deadline - monotonic())
            message = queue.popleft()
            self.arrivals[rank].notify_all()  # the sender may be waiting for this
            return message

    def wait_until_received(self, source: int, to: int, call: str) -> None:
        """Wait until a rank has received all that another one sent it.

        If it ends without that, `describe_unreceived` says so after all ranks.
        """
        deadline = monotonic() + self.limit
        with self.arrivals[to]:
            while self.queues[to][source] and to not in self.ended:
                if self.failure is not None:
                    raise _Stopped
                if monotonic() >= deadline:
                    raise EinmpiError(
                        f"rank {to} has not received what rank {source} sent in {call} "
                        f"for more than {self.limit:g} s"
                    )
                self.arrivals[to].wait(deadline - monotonic())

    def end(self, rank: int, failure: BaseException | None) -> None:
        """Note that a rank has ended, and why if it failed. The first failure counts."""
        with self._lock:
            is_own_failure = failure is not None and not isinstance(failure, _Stopped)
            if is_own_failure and self.failure is None:
                assert failure is not None
                failure.add_note(f"on rank {rank} of {len(self.arrivals)}")
                self.failure = failure
            self.ended.add(rank)
        for arrival in self.arrivals:
            with arrival:
                arrival.notify_all()

    def describe_unreceived(self) -> str | None:
        """Describe a message that was sent but not received, if there is one."""
        for rank, queues in enumerate(self.queues):
            for source, queue in queues.items():
                if queue:
                    call = queue[0].call
                    return f"rank {rank} has not received what rank {source} sent in {call}"
        return None


def run_threads(
    ranks: int, function: Callable[[ThreadComm], Result], limit: float = 60.0, nodes: int = 1
) -> list[Result]:
    """Call function(comm) on each rank and return the results.

    The first error of any rank ends all ranks and is raised here. A rank that waits for a message
    for more than `limit` seconds fails. Bytes are counted as if the ranks were on this many nodes.
    """
    mailboxes = _Mailboxes(ranks, limit)
    results: list[Any] = [None] * ranks

    def run_rank(rank: int) -> None:
        failure: BaseException | None = None
        try:
            results[rank] = function(ThreadComm(rank, ranks, mailboxes, nodes))
        except BaseException as error:
            failure = error
        mailboxes.end(rank, failure)

    threads = []
    for rank in range(ranks):
        # Daemons: a rank that computes on after a failure must not keep the process alive.
        thread = threading.Thread(target=run_rank, args=(rank,), name=f"rank {rank}", daemon=True)
        threads.append(thread)
        thread.start()
    for thread in threads:
        while thread.is_alive() and mailboxes.failure is None:
            thread.join(0.05)
    if mailboxes.failure is not None:
        deadline = monotonic() + _ENDING_SECONDS
        for thread in threads:  # most are in a call and stop at once
            thread.join(max(0, deadline - monotonic()))
        raise mailboxes.failure
    unreceived = mailboxes.describe_unreceived()
    if unreceived is not None:
        raise EinmpiError(unreceived)
    return results


class ThreadComm(MessageComm):
    """One rank of `run_threads`. Sent arrays are copied, so no rank sees another one's buffers."""

    def __init__(self, rank: int, size: int, mailboxes: _Mailboxes, nodes: int = 1) -> None:
        super().__init__(rank, size, nodes)
        self.ranks_on_node = size
        self.rank_on_node = rank
        self._mailboxes = mailboxes

    def prepare_exchange(
        self, call: str, receives: Messages, sends: Messages, received: Received
    ) -> Callable[[], None]:
        def exchange_all() -> None:
            count_received(self, received)
            for to, piece in sends:
                self._send(to, call, piece)
            for source, piece in receives:
                piece[...] = self._receive(source, call, piece)
            self._finish_sending([to for to, _ in sends], call)

        return exchange_all

    def reduce_scatter(self, group: Group, send: Array, counts: Counts, receive: Array) -> bool:
        if not super().reduce_scatter(group, send, counts, receive):
            return False
        call = f"reduce_scatter{group}"
        pieces = pieces_of(send, counts)
        for to, piece in zip(group, pieces, strict=True):
            if to != self.rank:
                self._send(to, call, piece)
        # Added in the order of the group, so that the result is always the same.
        for place, source in enumerate(group):
            is_own = source == self.rank
            part = pieces[place] if is_own else self._receive(source, call, receive)
            receive[...] = part if place == 0 else receive + part
        self._finish_sending(group, call)
        return True

    def share_memory(self, group: Group, nbytes: int) -> Array:
        call = f"share_memory{group}"
        if self.rank != group[0]:
            memory: Array = self._receive_content(group[0], call)
            assert memory.nbytes == nbytes, f"{nbytes} bytes of {memory.nbytes} in {call}"
            return memory
        memory = aligned_bytes(nbytes)
        for to in group[1:]:
            self._mailboxes.send(self.rank, to, _Message(call, memory))
        return memory

    def barrier_among(self, group: Group) -> None:
        self._gather(f"barrier_among{group}", "", group)

    def lowest(self, number: int) -> int:
        return min(int(text) for text in self._gather("lowest", str(number)))

    def compare(self, text: str) -> list[str] | None:
        texts = self._gather("compare", self.calls.after(text))
        if len(set(texts)) > 1:
            return texts
        self.calls.forget()
        return None

    def barrier(self) -> None:
        self._gather("barrier", "")

    def _gather(self, call: str, text: str, group: Group | None = None) -> list[str]:
        """Return the texts of all members of a group, or of all ranks."""
        members = range(self.size) if group is None else group
        for to in members:
            self._mailboxes.send(self.rank, to, _Message(call, text))
        return [self._receive_content(source, call) for source in members]

    def _send(self, to: int, call: str, piece: Array) -> None:
        assert piece.flags.c_contiguous, f"rank {self.rank} sends strided elements in {call}"
        if self._mailboxes.failure is not None:
            raise _Stopped
        self._mailboxes.send(self.rank, to, _Message(call, piece.copy()))

    def _finish_sending(self, group: Iterable[int], call: str) -> None:
        """Wait for the receivers: as many copies as they are behind would take up memory."""
        for to in group:
            if to != self.rank:
                self._mailboxes.wait_until_received(self.rank, to, call)

    def _receive(self, source: int, call: str, piece: Array) -> Array:
        assert piece.flags.c_contiguous, f"rank {self.rank} receives strided elements in {call}"
        sent: Array = self._receive_content(source, call)
        if sent.shape != piece.shape or sent.dtype != piece.dtype:
            raise EinmpiError(
                f"{call}: rank {source} sends {sent.size} elements of {sent.dtype} to rank "
                f"{self.rank}, which expects {piece.size} of {piece.dtype}"
            )
        return sent

    def _receive_content(self, source: int, call: str) -> Any:
        message = self._mailboxes.receive(self.rank, source, call)
        if message.call != call:
            raise EinmpiError(
                f"rank {self.rank} expects {call} of rank {source}, which does {message.call}"
            )
        return message.content
