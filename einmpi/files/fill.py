"""The elements of tensors into a file, by all ranks: each puts together pieces in the file's order and writes them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from math import prod
from typing import Any, Protocol

import numpy as np

from einmpi.comm.base import Comm
from einmpi.files import hdf5_writing
from einmpi.files.atomic import FirstFailure, write_at
from einmpi.runtime.backend import NumpyBackend
from einmpi.runtime.buffers import Buffers
from einmpi.runtime.transfer import exchange
from einmpi.schedule.layout import Layout
from einmpi.schedule.moves import collection
from einmpi.schedule.regions import elements, flat_range, shape
from einmpi.schedule.shared_writes import Round, rounds_of_bytes, rounds_of_chunks
from einmpi.schedule.steps import Exchange, Slot

WINDOW = (
    2**24
)  # bytes that a rank puts together before it writes them; messages have buffers of that size too


class Distributed(Protocol):
    """A tensor in blocks on the ranks, as far as writing it needs to know; einmpi.DistArray is one."""

    layout: Layout
    comm: Comm

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def host(self) -> np.ndarray: ...


@dataclass(frozen=True)
class Tensor:
    """What is written to a file under a name."""

    name: str
    array: Distributed
    kind: hdf5_writing.Kind


def fill(
    draft: str, tensors: Sequence[Tensor], places: Sequence[hdf5_writing.Place], comm: Comm
) -> Exception | None:
    """Write the elements, down to the disk; what went wrong on this rank. All ranks call it."""
    attempt = FirstFailure()
    # Not made where it is missing: a rank on a machine that does not have this folder must not write to its own.
    descriptor = attempt(os.open, draft, os.O_WRONLY)
    for tensor, (offset, chunks) in zip(tensors, places, strict=True):
        if chunks is not None:
            _fill_chunks(draft, tensor, chunks, comm, attempt)
        elif offset is not None:
            _fill_bytes(descriptor, tensor, offset, comm, attempt)
    attempt(os.fsync, descriptor)
    if descriptor is not None:
        attempt.anyway(os.close, descriptor)
    return attempt.error


def _fill_bytes(
    descriptor: int | None, tensor: Tensor, offset: int, comm: Comm, attempt: FirstFailure
) -> None:
    """All ranks write at once, past the library that has made the file.

    What lies in memory as in the file is written in few large pieces: a file system lets one write in at a time, and to
    change places costs more than to wait.
    """
    bound, dtype = tensor.kind.shape or (1,), np.dtype(tensor.kind.dtype)
    local = np.ascontiguousarray(tensor.array.host)
    rounds = rounds_of_bytes(bound, dtype.itemsize, offset, comm.size, WINDOW)
    held = _raw(local)
    waiting, place = held[:0], 0  # what is not written yet, and where it goes
    for pieces, values in assembled(tensor.array, local, rounds, WINDOW // dtype.itemsize):
        if values is None:
            continue
        run = flat_range(pieces[comm.rank] or (), bound)
        assert run is not None, "a piece in the file's order is one run"
        start, data = offset + run[0] * dtype.itemsize, _raw(_converted(values, dtype))
        first = data.ctypes.data - held.ctypes.data
        if place + waiting.size == start and waiting.ctypes.data + waiting.size == data.ctypes.data:
            waiting = held[first - waiting.size : first + data.size]
            continue
        attempt(write_at, descriptor, waiting, place)
        waiting, place = (data, start) if np.may_share_memory(data, held) else (held[:0], 0)
        if not waiting.size:
            attempt(write_at, descriptor, data, start)
    attempt(write_at, descriptor, waiting, place)


def _raw(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _fill_chunks(
    draft: str, tensor: Tensor, chunks: tuple[int, ...], comm: Comm, attempt: FirstFailure
) -> None:
    """Each rank makes some chunks ready; rank 0 hands them to HDF5, one rank's after another's."""
    dtype = np.dtype(tensor.kind.dtype)
    rounds = rounds_of_chunks(tensor.kind.shape, chunks, dtype.itemsize, comm.size, WINDOW)
    with contextlib.ExitStack() as stack:
        writer = hdf5_writing.chunk_writer(draft, tensor.name)
        write: Any = attempt(stack.enter_context, writer) if comm.rank == 0 else None
        local = np.ascontiguousarray(tensor.array.host)
        for pieces, values in assembled(
            tensor.array, local, rounds, max(prod(chunks), WINDOW // dtype.itemsize)
        ):
            own: list[hdf5_writing.Chunk] = []
            if values is not None:
                own = (
                    attempt(
                        hdf5_writing.encode,
                        _converted(values, dtype),
                        chunks,
                        tensor.kind.compression,
                    )
                    or []
                )
            for rank, piece in enumerate(pieces):
                if piece is None or comm.rank not in (0, rank):
                    continue
                sides = zip(piece, chunks, strict=True)
                corners = list(product(*(range(*runs[0], chunk) for runs, chunk in sides)))
                for corner, chunk in zip(
                    corners, _handed_over(rank, own, len(corners), comm), strict=False
                ):
                    if (
                        comm.rank == 0 and chunk[1]
                    ):  # without bytes: that rank has failed, and will say so
                        attempt(write, corner, *chunk)
        attempt.anyway(stack.close)  # here HDF5 writes what it has kept back


def _handed_over(
    rank: int, own: list[hdf5_writing.Chunk], count: int, comm: Comm
) -> list[hdf5_writing.Chunk]:
    """A rank's chunks, so many, at rank 0."""
    if rank == 0:
        return own
    head = np.zeros((count, 2), np.int64)
    if comm.rank == rank:
        if own:
            head[:] = [(mask, len(data)) for mask, data in own]
        comm.sendrecv(0, head.reshape(-1), None, None)
        comm.sendrecv(0, np.frombuffer(b"".join(data for _, data in own), np.uint8), None, None)
        return []
    comm.sendrecv(None, None, rank, head.reshape(-1))
    packed = np.empty(int(head[:, 1].sum()), np.uint8)
    comm.sendrecv(None, None, rank, packed)
    ends = accumulate(head[:, 1].tolist())
    return [
        (mask, packed[end - size : end].tobytes())
        for (mask, size), end in zip(head.tolist(), ends, strict=True)
    ]


def _converted(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):  # a number too large for a smaller float is infinite there
        return values.astype(dtype, copy=False)


def assembled(
    array: Distributed, local: np.ndarray, rounds: Iterable[Round], limit: int
) -> Iterator[tuple[Round, np.ndarray | None]]:
    """Round by round: the pieces of all ranks, and the values of this rank's piece, good until the next round.

    `local` is the array's block in the host's memory. All ranks go through all rounds. No piece has more than `limit`
    elements.
    """
    comm, dtype = array.comm, array.dtype.name
    layout = Layout(array.layout.mesh, array.shape or (1,), array.layout.cuts)
    most = max(limit, min(layout.most(), limit * comm.size))
    source, buffers = Slot("held", local.shape, dtype), Buffers(NumpyBackend())
    buffers.put(source, local)
    window = np.empty(0, dtype)
    for pieces in rounds:
        own = pieces[comm.rank]
        moves = collection(layout, pieces, comm.rank, most)
        values = None
        if own is not None and moves.own is not None and elements(moves.own[1]) == elements(own):
            run = flat_range(moves.own[0], local.shape)
            if run is not None:  # it lies here as it goes into the file: no copy
                values, moves = (
                    local.reshape(-1)[slice(*run)].reshape(shape(own)),
                    replace(moves, own=None),
                )
        extents = (0,) if own is None or values is not None else shape(own)
        if prod(extents) > window.size:
            window = np.empty(max(prod(extents), min(limit, layout.most())), dtype)
        target = Slot("piece", extents, dtype)
        buffers.put(target, window[: prod(extents)].reshape(extents))
        exchange(Exchange("", source, target, moves), buffers, comm)
        yield pieces, buffers[target] if own is not None and values is None else values
        buffers.free(target)
