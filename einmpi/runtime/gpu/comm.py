"""Messages between arrays in GPU memory: a communicator around another one.

Messages are staged: copied through pinned host memory, piece by piece. NCCL and CUDA-aware MPI
libraries need no staging. A rank may have a tensor on its GPU while another rank has it in host
memory, so all ranks cut messages into the same pieces.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import zip_longest
from typing import Any

import numpy as np

from einmpi.comm.agreement import on_first_rank
from einmpi.comm.base import (
    SUMMABLE,
    Comm,
    Counts,
    Group,
    allgatherv_bytes,
    alltoallv_bytes,
    count_received,
    pieces_of,
    sendrecv_bytes,
)
from einmpi.kernels.cuda import driver
from einmpi.runtime.gpu.copies import DeviceCopies, Event, HostArray, as_bytes, pieces_of_bytes
from einmpi.schedule.steps import MESSAGE_BUFFER_BYTES

# Bytes of a message that MPI passes on while the GPU copies the pieces before and after it.
STAGED_PIECE_BYTES = 2**22


class StagedComm(Comm):
    """Messages through pinned host memory.

    While MPI passes on a piece, the next one is copied from the GPU and the one before to it.
    """

    def __init__(self, host: Comm, copies: DeviceCopies) -> None:
        self.host = host
        self.copies = copies
        self.serves_threads = host.serves_threads
        self.device = copies.cuda.Device()  # of the thread that starts kernels
        self.stream = copies.cuda.Stream(non_blocking=True)  # of transfers in the background

    def __getattr__(self, name: str) -> Any:
        """Return what is that of the other communicator: its size, its nodes."""
        return getattr(self.host, name)

    @property
    def pause(self) -> float:
        return self.host.pause

    @pause.setter
    def pause(self, seconds: float) -> None:
        self.host.pause = seconds

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

    def beside_kernels(self) -> AbstractContextManager[None]:
        return self._on_own_stream(self.copies.event_after_kernels())

    @contextmanager
    def _on_own_stream(self, kernels: Event) -> Iterator[None]:
        """Let the calls of a thread wait for an event, and then for nothing but each other."""
        with self.device, self.stream:
            self.stream.wait_event(kernels)
            yield
            self.stream.synchronize()

    # ---- control --------------------------------------------------------------------------------

    def lowest(self, number: int) -> int:
        return self.host.lowest(number)

    def compare(self, text: str) -> list[str] | None:
        return self.host.compare(text)

    def barrier(self) -> None:
        self.host.barrier()

    def free(self) -> None:
        self.host.free()

    # ---- payload --------------------------------------------------------------------------------

    def sendrecv(self, to: int | None, send: Any, source: int | None, receive: Any) -> None:
        outgoing = [] if to is None else pieces_of_bytes(send, STAGED_PIECE_BYTES)
        incoming = [] if source is None else pieces_of_bytes(receive, STAGED_PIECE_BYTES)

        def pass_on(send_piece: HostArray | None, receive_piece: HostArray | None) -> None:
            # One of the two messages may have more pieces than the other.
            self.host.sendrecv(
                None if send_piece is None else to,
                send_piece,
                None if receive_piece is None else source,
                receive_piece,
            )

        self._stage(list(zip_longest(outgoing, incoming)), pass_on)

    def alltoallv(
        self, group: Group, send: Any, send_counts: Counts, receive: Any, receive_counts: Counts
    ) -> None:
        itemsize = send.dtype.itemsize
        send_bytes = _scaled(send_counts, itemsize)
        receive_bytes = _scaled(receive_counts, itemsize)

        def pass_on(send_piece: Any, receive_piece: Any) -> None:
            self.host.alltoallv(group, send_piece, send_bytes, receive_piece, receive_bytes)

        # The caller has allocated both buffers, so they are small: one piece.
        self._stage([(as_bytes(send), as_bytes(receive))], pass_on)

    def allgatherv(self, group: Group, buffer: Any, counts: Counts) -> None:
        for turn, windows in enumerate(_windows(buffer, counts, len(group))):
            self._gather(group, turn, windows)
        self._delay_kernels("gather")

    def _gather(self, group: Group, turn: int, windows: Sequence[Any]) -> None:
        """Gather one window of each member, while the GPU still copies those of the last turn."""
        sizes = [window.size for window in windows]
        buffer = self.copies.pinned_buffer("gather", turn, sum(sizes))
        parts = pieces_of(buffer, sizes)
        own = group.index(self.rank)
        if driver.is_device_array(windows[own]):
            self.copies.wait_for_kernels()
            self.copies.start(windows[own], parts[own]).synchronize()
        else:
            parts[own][...] = windows[own]
        self.host.allgatherv(group, buffer, sizes)
        for member, (part, window) in enumerate(zip(parts, windows, strict=True)):
            if member == own:
                continue
            if driver.is_device_array(window):
                self.copies.start(part, window)
            else:
                window[...] = part
        uploaded = self.copies.record_event(self.copies.to_device)
        self.copies.in_use_until["gather", turn % 2] = uploaded

    def reduce_scatter(self, group: Group, send: Any, counts: Counts, receive: Any) -> bool:
        if send.dtype.name not in SUMMABLE:
            return False
        # This is used for small messages only.
        values = self.copies.download(send) if driver.is_device_array(send) else send
        summed = np.empty(receive.shape, receive.dtype)
        done = self.host.reduce_scatter(group, values, counts, summed)
        if done and driver.is_device_array(receive):
            self.copies.upload(summed, receive)
        elif done:
            receive[...] = summed
        return done

    # ---- staging --------------------------------------------------------------------------------

    def _stage(
        self,
        rounds: Sequence[tuple[Any, Any]],
        pass_on: Callable[[HostArray | None, HostArray | None], None],
    ) -> None:
        """Pass on pairs of a piece to send and a piece to receive.

        Pieces in host memory are passed on in place.
        """
        self.copies.wait_for_kernels()
        staged = self._start_send(0, rounds[0][0]) if rounds else (None, None)
        for turn, (_, receive) in enumerate(rounds):
            send, sent = staged
            if turn + 1 < len(rounds):
                staged = self._start_send(turn + 1, rounds[turn + 1][0])
            is_staged = driver.is_device_array(receive)
            buffer = receive
            if is_staged:
                buffer = self.copies.pinned_buffer("receive", turn, receive.size)
            if sent is not None:
                sent.synchronize()
            pass_on(send, buffer)
            if is_staged:
                uploaded = self.copies.start(buffer, receive)
                self.copies.in_use_until["receive", turn % 2] = uploaded
        self._delay_kernels("receive")

    def _start_send(self, turn: int, send: Any) -> tuple[HostArray | None, Event]:
        """Return from where a piece can be sent, and the event after which it can be."""
        if not driver.is_device_array(send):
            return send, None
        buffer = self.copies.pinned_buffer("send", turn, send.size)
        return buffer, self.copies.start(send, buffer)

    def _delay_kernels(self, purpose: str) -> None:
        """Let kernels wait for pieces that are on their way to the GPU."""
        for turn in (0, 1):
            if (purpose, turn) in self.copies.in_use_until:
                self.copies.delay_kernels_until(self.copies.in_use_until[purpose, turn])


class CudaAwareComm(StagedComm):
    """Messages by an MPI library that takes device memory."""

    def sendrecv(self, to: int | None, send: Any, source: int | None, receive: Any) -> None:
        self._synchronize_kernels()
        send_bytes = None if to is None else as_bytes(send)
        receive_bytes = None if source is None else as_bytes(receive)
        self.host.sendrecv(to, send_bytes, source, receive_bytes)

    def alltoallv(
        self, group: Group, send: Any, send_counts: Counts, receive: Any, receive_counts: Counts
    ) -> None:
        self._synchronize_kernels()
        itemsize = send.dtype.itemsize
        self.host.alltoallv(
            group,
            as_bytes(send),
            _scaled(send_counts, itemsize),
            as_bytes(receive),
            _scaled(receive_counts, itemsize),
        )

    def allgatherv(self, group: Group, buffer: Any, counts: Counts) -> None:
        self._synchronize_kernels()
        self.host.allgatherv(group, as_bytes(buffer), _scaled(counts, buffer.dtype.itemsize))

    def _synchronize_kernels(self) -> None:
        """Wait for the kernels that make what is sent, or still use the memory that is filled."""
        self.copies.cuda.get_current_stream().synchronize()


class NcclComm(StagedComm):
    """Messages by NCCL on the stream of the kernels, so that the host waits for nothing.

    Every rank has a GPU of its own.
    """

    def __init__(self, host: Comm, copies: DeviceCopies) -> None:
        super().__init__(host, copies)
        self.nccl: Any = driver.nccl()
        assert self.nccl is not None, "NCCL was chosen although it is missing"
        kind, numbers = json.loads(on_first_rank(host, self._unique_id))
        identity = bytes(numbers) if kind == "bytes" else tuple(numbers)
        self.members = self.nccl.NcclCommunicator(host.size, identity, host.rank)

    def _unique_id(self) -> str:
        """Return the identifier by which ranks find each other: bytes in CuPy 14, else numbers."""
        identity = self.nccl.get_unique_id()
        return json.dumps([type(identity).__name__, list(identity)])

    def sendrecv(self, to: int | None, send: Any, source: int | None, receive: Any) -> None:
        count_received(self, sendrecv_bytes(self, to, send, source, receive))
        sends = [] if to is None else [(to, as_bytes(send))]
        receives = [] if source is None else [(source, as_bytes(receive))]
        self._exchange(sends, receives)

    def alltoallv(
        self, group: Group, send: Any, send_counts: Counts, receive: Any, receive_counts: Counts
    ) -> None:
        count_received(
            self, alltoallv_bytes(self, group, send, send_counts, receive, receive_counts)
        )
        itemsize = send.dtype.itemsize
        send_pieces = pieces_of(as_bytes(send), _scaled(send_counts, itemsize))
        receive_pieces = pieces_of(as_bytes(receive), _scaled(receive_counts, itemsize))
        self._exchange(
            list(zip(group, send_pieces, strict=True)),
            list(zip(group, receive_pieces, strict=True)),
        )

    def allgatherv(self, group: Group, buffer: Any, counts: Counts) -> None:
        count_received(self, allgatherv_bytes(self, group, buffer, counts))
        own = group.index(self.rank)
        for windows in _windows(buffer, counts, len(group)):
            sends = []
            receives = []
            for rank, window in zip(group, windows, strict=True):
                if rank != self.rank:
                    sends.append((rank, windows[own]))
                    receives.append((rank, window))
            self._exchange(sends, receives)

    def _exchange(
        self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]
    ) -> None:
        """Exchange messages of bytes, all at once. Host arrays pass through device memory."""
        stream = self.copies.cuda.get_current_stream()
        outgoing = []
        for rank, piece in sends:
            if piece.size:
                outgoing.append((rank, self._on_device(piece, copy_values=True)))
        incoming = []
        for rank, piece in receives:
            if piece.size:
                incoming.append((rank, self._on_device(piece, copy_values=False), piece))
        self.nccl.groupStart()
        for rank, array in outgoing:
            self.members.send(array.data.ptr, array.size, self.nccl.NCCL_UINT8, rank, stream.ptr)
        for rank, array, _ in incoming:
            self.members.recv(array.data.ptr, array.size, self.nccl.NCCL_UINT8, rank, stream.ptr)
        self.nccl.groupEnd()
        for _, array, piece in incoming:
            if array is not piece:
                self.copies.download(array, piece)

    def _on_device(self, piece: Any, copy_values: bool) -> Any:
        """Return the piece itself, or for a host array an array of its size on the GPU."""
        if driver.is_device_array(piece):
            return piece
        array = driver.cupy().empty(piece.shape, piece.dtype)
        if copy_values:
            self.copies.upload(piece, array)
        return array


def _scaled(counts: Counts, itemsize: int) -> list[int]:
    """Return counts of elements as counts of bytes."""
    return [int(count) * itemsize for count in counts]


def _windows(buffer: Any, counts: Counts, members: int) -> list[list[Any]]:
    """Cut the pieces of all members into windows; one window of each fits a message buffer."""
    pieces = pieces_of(as_bytes(buffer), _scaled(counts, buffer.dtype.itemsize))
    longest = max(piece.size for piece in pieces)
    window_bytes = max(1, MESSAGE_BUFFER_BYTES // members)
    windows = []
    for start in range(0, longest, window_bytes):
        windows.append([piece[start : start + window_bytes] for piece in pieces])
    return windows


COMMS_BY_TRANSPORT: dict[str, Callable[[Comm, DeviceCopies], Comm]] = {
    "host": StagedComm,
    "mpi": CudaAwareComm,
    "nccl": NcclComm,
}
