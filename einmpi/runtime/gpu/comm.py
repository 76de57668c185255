"""Messages between slots on GPUs: a Comm around another one. Through pinned host memory, by NCCL, or as they are.

A rank may hold a tensor on its GPU while another has it in host memory, so all cut messages alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from einmpi.comm.base import (
    SUMMABLE,
    Comm,
    Counts,
    Group,
    allgatherv_bytes,
    alltoallv_bytes,
    count,
    on_first_rank,
    pieces_of,
    sendrecv_bytes,
)
from einmpi.kernels.cuda import driver
from einmpi.runtime.gpu.copies import DeviceCopies, as_bytes, cut
from einmpi.schedule.steps import MESSAGE_BUFFER_BYTES

PIECE = 2**22  # bytes of a message on their way through the host while the next ones are copied


class DeviceComm:
    """Through pinned host memory: while a piece is passed on, the next one comes from the GPU and the one before goes
    to it."""

    def __init__(self, host: Comm, copies: DeviceCopies) -> None:
        self.host, self.copies = host, copies
        self.rank, self.size, self.cores, self.nodes = host.rank, host.size, host.cores, host.nodes
        self.ranks_on_node, self.rank_on_node, self.cuda_aware = (
            host.ranks_on_node,
            host.rank_on_node,
            host.cuda_aware,
        )

    @property
    def received(self) -> int:
        return self.host.received

    @received.setter
    def received(self, amount: int) -> None:
        self.host.received = amount

    @property
    def received_between(self) -> int:
        return self.host.received_between

    @received_between.setter
    def received_between(self, amount: int) -> None:
        self.host.received_between = amount

    # ---- payload ----------------------------------------------------------------------------------------------------

    def sendrecv(self, to: int | None, send: Any, source: int | None, receive: Any) -> None:
        outgoing = cut(send, PIECE) if to is not None else []
        incoming = cut(receive, PIECE) if source is not None else []

        def pass_on(number: int, out: np.ndarray | None, into: np.ndarray | None) -> None:
            self.host.sendrecv(
                to if out is not None else None, out, source if into is not None else None, into
            )

        self._through_host(list(zip_longest(outgoing, incoming)), pass_on)

    def alltoallv(
        self, group: Group, send: Any, send_counts: Counts, receive: Any, receive_counts: Counts
    ) -> None:
        size = send.dtype.itemsize
        outgoing, incoming = _scaled(send_counts, size), _scaled(receive_counts, size)
        # The caller has made the two buffers, so they are small: one piece.
        self._through_host(
            [(as_bytes(send), as_bytes(receive))],
            lambda number, out, into: self.host.alltoallv(group, out, outgoing, into, incoming),
        )

    def allgatherv(self, group: Group, buffer: Any, counts: Counts) -> None:
        for number, windows in enumerate(_windows(buffer, counts, len(group))):
            self._gather(group, number, windows)
        self._landed("gather")

    def _gather(self, group: Group, number: int, windows: Sequence[Any]) -> None:
        """A part of each member's piece. Those of the round before are still on their way to the GPU."""
        sizes = [window.size for window in windows]
        buffer = self.copies.pinned("gather", number, sum(sizes))
        parts, me = pieces_of(buffer, sizes), group.index(self.rank)
        if driver.is_device_array(windows[me]):
            self.copies.after_kernels()
            self.copies.start_down(windows[me], parts[me]).synchronize()
        else:
            parts[me][...] = windows[me]
        self.host.allgatherv(group, buffer, sizes)
        for member, (part, window) in enumerate(zip(parts, windows, strict=True)):
            if member != me and driver.is_device_array(window):
                self.copies.start_up(part, window)
            elif member != me:
                window[...] = part
        self.copies.busy["gather", number % 2] = self.copies.event(self.copies.up)

    def reduce_scatter(self, group: Group, send: Any, counts: Counts, receive: Any) -> bool:
        if send.dtype.name not in SUMMABLE:
            return False
        # It is used for small messages only.
        values = self.copies.download(send) if driver.is_device_array(send) else send
        summed = np.empty(receive.shape, receive.dtype)
        done = self.host.reduce_scatter(group, values, counts, summed)
        if done and driver.is_device_array(receive):
            self.copies.upload(summed, receive)
        elif done:
            receive[...] = summed
        return done

    # ---- control ----------------------------------------------------------------------------------------------------

    def same(self, text: str) -> int | None:
        return self.host.same(text)

    def allgather_text(self, text: str) -> list[str]:
        return self.host.allgather_text(text)

    def barrier(self) -> None:
        self.host.barrier()

    def free(self) -> None:
        self.host.free()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _through_host(
        self, rounds: Sequence[tuple[Any, Any]], pass_on: Callable[..., None]
    ) -> None:
        """Round by round what is sent and what is received; what lies in host memory already is not copied."""
        self.copies.after_kernels()
        fetched = self._fetched(0, rounds[0][0]) if rounds else (None, None)
        for number, (_, receive) in enumerate(rounds):
            (out, event), fetched = fetched, (None, None)
            if number + 1 < len(rounds):
                fetched = self._fetched(number + 1, rounds[number + 1][0])
            staged = driver.is_device_array(receive)
            into = self.copies.pinned("receive", number, receive.size) if staged else receive
            if event is not None:
                event.synchronize()
            pass_on(number, out, into)
            if staged:
                self.copies.busy["receive", number % 2] = self.copies.start_up(into, receive)
        self._landed("receive")

    def _fetched(self, number: int, send: Any) -> tuple[np.ndarray | None, Any]:
        """(where it can be sent from, the event after which it is there)."""
        if not driver.is_device_array(send):
            return send, None
        buffer = self.copies.pinned("send", number, send.size)
        return buffer, self.copies.start_down(send, buffer)

    def _landed(self, kind: str) -> None:
        """Kernels wait for what is on its way to the GPU."""
        for number in (0, 1):
            if (kind, number) in self.copies.busy:
                self.copies.before_kernels(self.copies.busy[kind, number])


class AwareComm(DeviceComm):
    """An MPI library that takes device memory gets it."""

    def sendrecv(self, to: int | None, send: Any, source: int | None, receive: Any) -> None:
        self._wait_for_kernels()
        self.host.sendrecv(
            to,
            None if to is None else as_bytes(send),
            source,
            None if source is None else as_bytes(receive),
        )

    def alltoallv(
        self, group: Group, send: Any, send_counts: Counts, receive: Any, receive_counts: Counts
    ) -> None:
        self._wait_for_kernels()
        size = send.dtype.itemsize
        self.host.alltoallv(
            group,
            as_bytes(send),
            _scaled(send_counts, size),
            as_bytes(receive),
            _scaled(receive_counts, size),
        )

    def allgatherv(self, group: Group, buffer: Any, counts: Counts) -> None:
        self._wait_for_kernels()
        self.host.allgatherv(group, as_bytes(buffer), _scaled(counts, buffer.dtype.itemsize))

    def _wait_for_kernels(self) -> None:
        self.copies.cuda.get_current_stream().synchronize()


class NcclComm(DeviceComm):
    """NCCL, on the stream of the kernels: the host waits for nothing. All ranks have GPUs of their own."""

    def __init__(self, host: Comm, copies: DeviceCopies) -> None:
        super().__init__(host, copies)
        self.nccl: Any = driver.nccl()
        assert self.nccl is not None, "the way was chosen without it"
        kind, numbers = json.loads(on_first_rank(host, self._unique_id))
        identity = bytes(numbers) if kind == "bytes" else tuple(numbers)
        self.members = self.nccl.NcclCommunicator(host.size, identity, host.rank)

    def _unique_id(self) -> str:
        """With which ranks find each other. CuPy 14 has bytes for it, older ones have numbers."""
        found = self.nccl.get_unique_id()
        return json.dumps([type(found).__name__, list(found)])

    def sendrecv(self, to: int | None, send: Any, source: int | None, receive: Any) -> None:
        count(self, sendrecv_bytes(self, to, send, source, receive))
        self._exchange(
            [] if to is None else [(to, as_bytes(send))],
            [] if source is None else [(source, as_bytes(receive))],
        )

    def alltoallv(
        self, group: Group, send: Any, send_counts: Counts, receive: Any, receive_counts: Counts
    ) -> None:
        count(self, alltoallv_bytes(self, group, send, send_counts, receive, receive_counts))
        size = send.dtype.itemsize
        self._exchange(
            list(zip(group, pieces_of(as_bytes(send), _scaled(send_counts, size)), strict=True)),
            list(
                zip(group, pieces_of(as_bytes(receive), _scaled(receive_counts, size)), strict=True)
            ),
        )

    def allgatherv(self, group: Group, buffer: Any, counts: Counts) -> None:
        count(self, allgatherv_bytes(self, group, buffer, counts))
        me = group.index(self.rank)
        for windows in _windows(buffer, counts, len(group)):
            others = [
                (rank, window)
                for rank, window in zip(group, windows, strict=True)
                if rank != self.rank
            ]
            self._exchange([(rank, windows[me]) for rank, _ in others], others)

    def _exchange(
        self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]
    ) -> None:
        """Messages of bytes, all at once. What lies in host memory goes through the GPU's."""
        stream = self.copies.cuda.get_current_stream()
        outgoing = [
            (rank, self._on_device(piece, filled=True)) for rank, piece in sends if piece.size
        ]
        incoming = [
            (rank, self._on_device(piece, filled=False), piece)
            for rank, piece in receives
            if piece.size
        ]
        self.nccl.groupStart()
        for rank, piece in outgoing:
            self.members.send(piece.data.ptr, piece.size, self.nccl.NCCL_UINT8, rank, stream.ptr)
        for rank, piece, _ in incoming:
            self.members.recv(piece.data.ptr, piece.size, self.nccl.NCCL_UINT8, rank, stream.ptr)
        self.nccl.groupEnd()
        for _, arrived, piece in incoming:
            if arrived is not piece:
                self.copies.download(arrived, piece)

    def _on_device(self, piece: Any, filled: bool) -> Any:
        if driver.is_device_array(piece):
            return piece
        array = driver.cupy().empty(piece.shape, piece.dtype)
        if filled:
            self.copies.upload(piece, array)
        return array


def _scaled(counts: Counts, itemsize: int) -> list[int]:
    return [int(count) * itemsize for count in counts]


def _windows(buffer: Any, counts: Counts, members: int) -> list[list[Any]]:
    """All members' pieces a part at a time, so that a round of them fits into a buffer for messages."""
    pieces = pieces_of(as_bytes(buffer), _scaled(counts, buffer.dtype.itemsize))
    most, at_a_time = max(piece.size for piece in pieces), max(1, MESSAGE_BUFFER_BYTES // members)
    return [
        [piece[start : start + at_a_time] for piece in pieces]
        for start in range(0, most, at_a_time)
    ]


COMMS: dict[str, Callable[[Comm, DeviceCopies], Comm]] = {
    "host": DeviceComm,
    "mpi": AwareComm,
    "nccl": NcclComm,
}
