"""Write tensors to files: all ranks write to a draft of a file, which then takes its place."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import Any, Protocol, TypeAlias

import numpy as np

from einmpi.comm.agreement import on_first_rank, together
from einmpi.comm.base import Comm, pieces_of
from einmpi.errors import EinmpiError, InputError, one_of
from einmpi.files.atomic import (
    FAILURES,
    FirstFailure,
    NotPublished,
    cannot_write,
    draft_path,
    is_of_another_user,
    reason_of,
    remove_path,
    write_at,
)
from einmpi.files.claims import Claim, claimed
from einmpi.files.datasets import Array, Dataset, DType, FileIdentity, identity_at
from einmpi.files.formats import FileFormat, OpenChunkWriter
from einmpi.files.hdf5 import writing as hdf5_writing
from einmpi.files.journal import Draft, publish_all
from einmpi.files.specs import Place, StorageSpec
from einmpi.graph.dtypes import DTYPES
from einmpi.runtime.buffers import Buffers
from einmpi.runtime.cpu.backend import NumpyBackend
from einmpi.runtime.transfer import transfer
from einmpi.schedule.layout import Layout
from einmpi.schedule.moves import collection
from einmpi.schedule.regions import Slot, elements, flat_range, shape, whole
from einmpi.schedule.shared_reads import Round, rounds_of_bytes, rounds_of_chunks
from einmpi.schedule.steps import Transfer

# ---- fill ----------------------------------------------------------------------------------------
#
# Write the elements of tensors to a file: each rank assembles pieces in the file's order.


# Bytes that a rank assembles before it writes them; message buffers have this size too.
WINDOW_BYTES = 2**24


class Distributed(Protocol):
    """A tensor in blocks on the ranks, as much of it as writing needs; a DistArray is one."""

    layout: Layout
    own_comm: Comm

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def host(self) -> Array: ...


@dataclass(frozen=True)
class Tensor:
    """A tensor to write to a file: its name there, its blocks, and how it is stored."""

    name: str
    array: Distributed
    storage: StorageSpec


def fill(
    draft: str,
    tensors: Sequence[Tensor],
    places: Sequence[Place],
    comm: Comm,
    open_writer: OpenChunkWriter | None = None,
) -> Exception | None:
    """Write the elements and flush them to disk; return what failed on this rank.

    All ranks call it. `open_writer` is that of a format in which each chunk is a file.
    """
    attempt = FirstFailure()
    # The draft is opened but never created here: a rank on a machine that does not share the
    # folder must not write to a folder of its own.
    descriptor = None if open_writer else attempt(os.open, draft, os.O_WRONLY)
    for tensor, (offset, chunks) in zip(tensors, places, strict=True):
        if open_writer is not None and chunks is not None:
            _fill_chunk_files(draft, tensor, chunks, comm, attempt, open_writer)
        elif chunks is not None:
            _fill_chunks(draft, tensor, chunks, comm, attempt)
        elif offset is not None:
            _fill_bytes(descriptor, tensor, offset, comm, attempt)
    if descriptor is not None:
        attempt(os.fsync, descriptor)
        attempt.call_anyway(os.close, descriptor)
    return attempt.error


# ---- contiguous tensors -------------------------------------------------------------------------


class _CoalescingWriter:
    """Writes pieces of a file; those that are adjacent in the file and in memory in one call.

    A file system admits one writer at a time, and switching between writers costs more than
    waiting: few large writes are faster.
    """

    def __init__(self, descriptor: int | None, memory: Array, attempt: FirstFailure) -> None:
        self.descriptor = descriptor
        self.memory = memory  # the bytes of this rank's block
        self.attempt = attempt
        self.pending = memory[:0]  # bytes of `memory` that are not written yet
        self.offset = 0  # of the pending bytes in the file

    def write(self, data: Array, offset: int) -> None:
        first = data.ctypes.data - self.memory.ctypes.data
        follows_in_file = self.offset + self.pending.size == offset
        end_of_pending = self.pending.ctypes.data + self.pending.size
        if follows_in_file and end_of_pending == data.ctypes.data:
            self.pending = self.memory[first - self.pending.size : first + data.size]
            return
        self.flush()
        if np.may_share_memory(data, self.memory):
            self.pending = data
            self.offset = offset
        if not self.pending.size:
            self.attempt(write_at, self.descriptor, data, offset)

    def flush(self) -> None:
        self.attempt(write_at, self.descriptor, self.pending, self.offset)
        self.pending = self.memory[:0]
        self.offset = 0


def _fill_bytes(
    descriptor: int | None, tensor: Tensor, offset: int, comm: Comm, attempt: FirstFailure
) -> None:
    """Write a contiguous tensor: all ranks at once, without the library that made the file."""
    bound = tensor.storage.shape or (1,)
    dtype = np.dtype(tensor.storage.dtype)
    local = np.ascontiguousarray(tensor.array.host)
    rounds = rounds_of_bytes(bound, dtype.itemsize, offset, comm.size, WINDOW_BYTES)
    writer = _CoalescingWriter(descriptor, _as_bytes(local), attempt)
    for pieces, values in assembled(tensor.array, local, rounds, WINDOW_BYTES // dtype.itemsize):
        if values is None:
            continue
        piece = flat_range(pieces[comm.rank] or (), bound)
        assert piece is not None, "a piece in the file's order is contiguous"
        start = offset + piece[0] * dtype.itemsize
        writer.write(_as_bytes(_converted(values, dtype)), start)
    writer.flush()


def _as_bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _converted(values: Array, dtype: DType) -> Array:
    with np.errstate(over="ignore"):  # a number too large for a smaller float becomes infinite
        return values.astype(dtype, copy=False)


# ---- chunked tensors ----------------------------------------------------------------------------


def _fill_chunks(
    draft: str, tensor: Tensor, chunks: tuple[int, ...], comm: Comm, attempt: FirstFailure
) -> None:
    """Write a chunked tensor: each rank encodes some chunks, and rank 0 hands them to HDF5."""
    with contextlib.ExitStack() as stack:
        write_chunk: Any = None
        if comm.rank == 0:
            writer = hdf5_writing.chunk_writer(draft, tensor.name)
            write_chunk = attempt(stack.enter_context, writer)
        for pieces, values in _assembled_chunks(tensor, chunks, comm):
            own: list[hdf5_writing.Chunk] = []
            if values is not None:
                compression = tensor.storage.compression
                own = attempt(hdf5_writing.encode, values, chunks, compression) or []
            for rank, piece in enumerate(pieces):
                if piece is None or comm.rank not in (0, rank):
                    continue
                corners = list(hdf5_writing.corners_of(piece, chunks))
                received = _send_to_first_rank(rank, own, len(corners), comm)
                # A rank that has failed to encode its chunks has none; it will report that.
                for corner, (mask, data) in zip(corners, received, strict=False):
                    if comm.rank == 0 and data:
                        attempt(write_chunk, corner, mask, data)
        attempt.call_anyway(stack.close)  # HDF5 writes what it has buffered


def _assembled_chunks(
    tensor: Tensor, chunks: tuple[int, ...], comm: Comm
) -> Iterator[tuple[Round, Array | None]]:
    """Yield what `assembled` yields, in pieces of whole chunks and in the dtype of the file."""
    dtype = np.dtype(tensor.storage.dtype)
    bound = tensor.storage.shape or (1,)
    rounds = rounds_of_chunks(bound, chunks, dtype.itemsize, comm.size, WINDOW_BYTES)
    most_elements = max(prod(chunks), WINDOW_BYTES // dtype.itemsize)
    local = np.ascontiguousarray(tensor.array.host)
    for pieces, values in assembled(tensor.array, local, rounds, most_elements):
        yield pieces, None if values is None else _converted(values, dtype)


def _send_to_first_rank(
    rank: int, own: list[hdf5_writing.Chunk], count: int, comm: Comm
) -> list[hdf5_writing.Chunk]:
    """Send the `count` chunks of a rank to rank 0, and return them there.

    A message with the masks and sizes comes first, then one with all bytes.
    """
    if rank == 0:
        return own
    header = np.zeros((count, 2), np.int64)
    if comm.rank == rank:
        if own:
            header[:] = [(mask, len(data)) for mask, data in own]
        packed = np.frombuffer(b"".join(data for _, data in own), np.uint8)
        comm.sendrecv(0, header.reshape(-1), None, None)
        comm.sendrecv(0, packed, None, None)
        return []
    comm.sendrecv(None, None, rank, header.reshape(-1))
    masks, sizes = header.T.tolist()
    packed = np.empty(sum(sizes), np.uint8)
    comm.sendrecv(None, None, rank, packed)
    pieces = pieces_of(packed, sizes)
    return [(mask, piece.tobytes()) for mask, piece in zip(masks, pieces, strict=True)]


# ---- a file for each chunk ----------------------------------------------------------------------


def _fill_chunk_files(
    draft: str,
    tensor: Tensor,
    chunks: tuple[int, ...],
    comm: Comm,
    attempt: FirstFailure,
    open_writer: OpenChunkWriter,
) -> None:
    """Write and flush the chunks of a tensor, each by one rank."""
    if not tensor.array.size:
        return
    extents = chunks or (1,)  # a number is one chunk, whose index has no dimensions
    writer = attempt(open_writer, draft, tensor.name, tensor.storage, chunks)
    for pieces, values in _assembled_chunks(tensor, extents, comm):
        piece = pieces[comm.rank]
        if values is None or piece is None or writer is None:
            continue
        in_tensor = hdf5_writing.corners_of(piece, extents)
        in_piece = hdf5_writing.corners_of(map(whole, values.shape), extents)
        for corner, inside in zip(in_tensor, in_piece, strict=True):
            chunk = hdf5_writing.chunk_at(values, inside, extents)
            index = [start // extent for start, extent in zip(corner, extents, strict=True)]
            attempt(writer.write, index[: len(chunks)], chunk)
    if writer is not None:
        attempt(writer.flush)


# ---- pieces in the file's order -----------------------------------------------------------------


def assembled(
    array: Distributed, local: Array, rounds: Iterable[Round], limit: int
) -> Iterator[tuple[Round, Array | None]]:
    """Give, round by round, the pieces of all ranks and the values of this rank's piece.

    The values are valid until the next round. `local` is the array's block in host memory. All
    ranks go through all rounds. No piece has more than `limit` elements.
    """
    comm = array.own_comm
    dtype = array.dtype.name
    layout = replace(array.layout, bound=array.shape or (1,))
    most = max(limit, min(layout.max_elements(), limit * comm.size))
    source = Slot("block", local.shape, dtype)
    buffers = Buffers(NumpyBackend())
    buffers.put(source, local)
    window = np.empty(0, dtype)
    for pieces in rounds:
        own = pieces[comm.rank]
        moves = collection(layout, pieces, comm.rank, most)
        values = None
        if own is not None and moves.own is not None and elements(moves.own[1]) == elements(own):
            run = flat_range(moves.own[0], local.shape)
            if run is not None:  # the block already has the piece in the file's order: no copy
                first, last = run
                values = local.reshape(-1)[first:last].reshape(shape(own))
                moves = replace(moves, own=None)
        extents: tuple[int, ...] = (0,)
        if own is not None and values is None:
            extents = shape(own)
        size = prod(extents)
        if size > window.size:
            window = np.empty(max(size, min(limit, layout.max_elements())), dtype)
        target = Slot("piece", extents, dtype)
        buffers.put(target, window[:size].reshape(extents))
        transfer(Transfer("", source, target, moves), buffers, comm)
        if own is not None and values is None:
            values = buffers[target]
        yield pieces, values
        buffers.free(target)


# Returns the attributes of tensors that are written.
Describe: TypeAlias = Callable[[], Mapping[str, str]]


def tensor_of(
    array: Distributed,
    name: str,
    dtype: str | None = None,
    chunks: Sequence[int] | None = None,
    compression: str | None = None,
    labels: tuple[str, ...] | None = None,
    tensor: str = "",
    inputs: Iterable[Dataset] = (),
) -> Tensor:
    """Return a tensor to write, with its own dtype unless another is given.

    Files have no bfloat16: it becomes float32. A tensor without elements or dimensions is stored
    without chunks; larger chunks are cut to the tensor's shape. `labels` name the dimensions, and
    `tensor` is the name in the program. It takes over the coordinates of the `inputs`.
    """
    if dtype is None:
        dtype = DTYPES[array.dtype.name].file_dtype
    if not array.ndim or not array.size:
        chunks = None
        compression = None
    fitting = None
    if chunks is not None:
        fitting = tuple(map(min, chunks, array.shape))
    storage = StorageSpec(array.shape, dtype, fitting, compression, labels, tensor, tuple(inputs))
    return Tensor(name, array, storage)


def save(
    array: Distributed,
    where: str,
    file_format: FileFormat,
    file: str,
    dataset: str,
    chunks: Sequence[int] | None,
    compression: str | None,
    describe: Describe,
    labels: tuple[str, ...] | None = None,
    tensor: str = "",
) -> None:
    """Write a DistArray to a file of a format that has chunks. All ranks call it.

    `where` is the function that messages name.
    """

    def check_arguments() -> Tensor:
        if not isinstance(dataset, str) or not (dataset.strip("/") or file_format.default_name):
            raise InputError(
                where, f"{dataset!r} is not the path of a dataset", "a path such as /Z or /group/Z"
            )
        name = file_format.check_name(where, dataset)
        check_compression(where, file_format, compression)
        if chunks is not None and not _are_chunks(chunks, array.ndim):
            raise InputError(where, f"chunks are {chunks!r}", f"{array.ndim} positive integers")
        return tensor_of(array, name, None, chunks, compression, labels, tensor)

    def fingerprint(found: Tensor) -> str:
        return repr((file, found.name, found.storage))

    checked = together(array.own_comm, check_arguments, fingerprint)
    check = partial(check_target, file, {checked.name: ""}, file_format)
    with claimed({file: ""}, array.own_comm, check) as claim:
        write([OutputFile(file, "", file_format, [checked])], describe, claim)


def check_compression(where: str, file_format: FileFormat, compression: str | None) -> None:
    """Refuse a compression that a format does not have."""
    methods = file_format.write
    if compression is None or methods is None:
        return
    if not isinstance(compression, str) or compression not in methods.compressions:
        raise InputError(
            where,
            f"unknown compression {compression!r}",
            one_of(methods.compressions, str(compression)),
        )
    methods.check_compression(where, compression)


def _are_chunks(given: object, ndim: int) -> bool:
    if not isinstance(given, Sequence) or len(given) != ndim:
        return False
    return all(type(extent) is int and extent >= 1 for extent in given)


# ---- a file -------------------------------------------------------------------------------------


def check_target(file: str, names: Mapping[str, str], file_format: FileFormat) -> None:
    """Refuse a file that could not be written.

    `names` are those of the tensors, with the place of each in the job file.
    """
    check_folder_of(file, next(iter(names.values()), "") or file)
    if os.path.exists(file):
        assert file_format.write is not None
        file_format.write.check_target(file, names)


def check_folder_of(file: str, where: str) -> None:
    """Refuse a file that could not be replaced."""
    target = os.path.realpath(file)
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        raise InputError(where, f"there is no folder for {file}", "a folder that exists")
    exists = os.path.exists(target)
    # To replace a file takes only the permission of its folder, but a user who has made a file
    # read-only wants to keep it.
    read_only = exists and not os.stat(target).st_mode & 0o222
    if read_only or not os.access(folder, os.W_OK):
        raise InputError(
            where, f"there is no permission to write {file}", "a writable file and folder"
        )
    if is_of_another_user(target):
        raise InputError(
            where,
            f"{file} belongs to another user, and its folder has the sticky bit",
            "a file of your own, or another folder",
        )


@dataclass(frozen=True)
class OutputFile:
    """A file to write: its path and place in the job file, its format and tensors."""

    file: str
    place: str
    file_format: FileFormat
    tensors: Sequence[Tensor]


def write(files: Sequence[OutputFile], describe: Describe, claim: Claim) -> None:
    """Write tensors to files, to all of them or to none; their other contents stay.

    All ranks call it, within `claimed`. Rank 0 calls `describe` for the attributes of the tensors.
    """
    if not files:
        return
    attributes = cache(describe)  # the same in all files
    with contextlib.ExitStack() as stack:
        drafts = [stack.enter_context(_drafted(file, attributes, claim)) for file in files]

        def publish_drafts() -> None:
            try:
                with claim.publishing():
                    publish_all(drafts, claim.token)
            except NotPublished as error:
                targets = [draft.target for draft in drafts]
                concerned = targets.index(error.target) if error.target else 0
                raise _cannot_write(files[concerned], str(error), error.state) from error

        on_first_rank(claim.comm, publish_drafts)  # only when all drafts are complete


@contextlib.contextmanager
def _drafted(output: OutputFile, attributes: Describe, claim: Claim) -> Iterator[Draft]:
    """Write tensors to a draft of a file. A draft that is not published is removed at the end."""
    methods = output.file_format.write
    assert methods is not None
    comm = claim.comm
    target = os.path.realpath(output.file)  # a link stays a link
    draft = draft_path(target, claim.token)
    replaced: FileIdentity | None = None  # known to rank 0

    def failure_of(error: BaseException) -> EinmpiError:
        existed = os.path.exists(target)
        state = f"{output.file} is unchanged" if existed else "nothing was written"
        try:
            claim.require_locks()
        except NotPublished as lost:
            return _cannot_write(output, str(lost), lost.state)
        return _cannot_write(output, reason_of(error), state)

    def make_draft_file() -> str:
        nonlocal replaced
        specs = {tensor.name: tensor.storage for tensor in output.tensors}
        try:
            replaced = identity_at(target)
            return json.dumps(methods.lay_out(draft, target, specs, attributes()))
        except InputError:  # it says all there is to say
            raise
        except FAILURES as error:
            raise failure_of(error) from error

    def fill_draft() -> None:
        error = fill(draft, output.tensors, places, comm, methods.open_chunk_writer)
        if error is not None:
            raise failure_of(error) from error

    try:
        places = []
        for offset, chunks in json.loads(on_first_rank(comm, make_draft_file)):
            places.append((offset, None if chunks is None else tuple(chunks)))
        together(comm, fill_draft)  # after this no rank reads the old file
        yield Draft(output.file, target, draft, replaced)
    finally:
        if comm.rank == 0:
            # It is gone once it is published, or the old folder has its name. On a disk that has
            # become read-only it stays, and what is being raised says so.
            with contextlib.suppress(OSError):
                remove_path(draft)


def _cannot_write(output: OutputFile, reason: str, state: str) -> EinmpiError:
    return cannot_write(output.place, output.file, f"{reason}; {state}")
