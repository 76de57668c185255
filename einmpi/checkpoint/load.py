"""Read checkpoints: a folder with a manifest, and the blocks of each rank in a file.

A block that several ranks hold is in the file of the first of them. Its place there follows from
the layouts and the rank, so the manifest has only the size and checksum of each rank's file.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np

from einmpi.errors import InputError
from einmpi.files.datasets import Array, identity_from
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.rewrite import in_order, needed
from einmpi.job.batches import MOST_STEPS
from einmpi.job.loop import Loop
from einmpi.planner.make_plan import MAX_RANKS
from einmpi.planner.mesh import Mesh
from einmpi.process.environment import UntrustedFileError, open_own_file
from einmpi.runtime.host_memory import ALIGNMENT
from einmpi.schedule.layout import PARTIAL, Layout, axes_that_cut, digits_along, rank_of
from einmpi.schedule.regions import Box, elements, locate, paired_boxes, shape
from einmpi.schedule.shared_reads import holders_of_copy
from einmpi.units import counted
from einmpi.version import __version__

# ---- contents ------------------------------------------------------------------------------------
#
# What a checkpoint holds after some vertices of a graph, or after some steps of a loop.


class HistoryKind(NamedTuple):
    """The recorded values of a loop in a checkpoint: their name, shape and dtype."""

    name: str
    bound: tuple[int, ...]
    dtype: str


class EndedLoop(NamedTuple):
    """A loop that has ended before the one of a checkpoint."""

    steps: int
    is_done: bool  # whether its condition held


class GraphContents:
    """After the first vertices of a graph: the tensors that later vertices and outputs need.

    Checkpoints are numbered by what is done, up to `most`. `order` is that of the vertices, if they
    are not in the order of the program.
    """

    ended: tuple[EndedLoop, ...] = ()

    def __init__(self, graph: EinGraph, order: Sequence[str] = ()) -> None:
        self.graph = graph
        self.order = tuple(order)
        self.most = len(graph.computed)

    def at(self, ended: Sequence[EndedLoop], order: Sequence[str]) -> GraphContents:
        """Return what checkpoints hold after these loops, if vertices come in this order.

        Without an order they come as they are. Raise ValueError if that cannot be: there are no
        loops, or vertices cannot be computed in this order.
        """
        if ended:
            raise ValueError("the job has no loops")
        if not order or list(order) == [vertex.name for vertex in self.graph.computed]:
            return self
        return GraphContents(in_order(self.graph, order), order)

    def tensors(self, done: int) -> Sequence[Vertex]:
        """Return the tensors of a checkpoint, in order."""
        return [self.graph[name] for name in needed(self.graph, done)]

    def place(self, done: int) -> str:
        """Return what was done last, for messages: "Z" or "step 99"."""
        return self.graph.computed[done - 1].name

    def progress(self, done: int) -> str:
        """Return how far the run was: "3 of 7 vertices"."""
        return f"{done} of {counted(self.most, 'vertex', 'vertices')}"


class LoopKinds(NamedTuple):
    """What a loop adds to a checkpoint."""

    loop: Loop
    graph: EinGraph  # of a step, as written
    kept: tuple[Vertex, ...]  # results of earlier loops that are still needed


class LoopContents:
    """After some steps of a loop: what is carried, and the values that were recorded.

    Of several loops, also what is still needed of those that have ended, and their records. The
    steps of all loops are counted together.
    """

    most = MOST_STEPS
    order: tuple[str, ...] = ()

    def __init__(self, loops: Sequence[LoopKinds], ended: Sequence[EndedLoop] = ()) -> None:
        self.loops = loops
        self.ended = tuple(ended)
        self.steps_before = sum(each.steps for each in ended)
        self.current = loops[len(self.ended)]

    def at(self, ended: Sequence[EndedLoop], order: Sequence[str]) -> LoopContents:
        if order or len(ended) >= len(self.loops):
            raise ValueError("the job has fewer loops, or the order of a step would matter")
        return LoopContents(self.loops, ended)

    def tensors(self, done: int) -> Sequence[Vertex | HistoryKind]:
        loop = self.current.loop
        carried = [self.current.graph[name] for name in loop.carry]
        if loop.validation is not None and done - self.steps_before >= loop.validation.every:
            for name in loop.kept_best:
                carried.append(replace(self.current.graph[name], name=best_name(name)))
        steps = [*(each.steps for each in self.ended), done - self.steps_before]
        histories = []
        for number, count in enumerate(steps):
            loop, graph, _ = self.loops[number]
            for name in loop.columns:
                # Numbers of the validation are float64.
                dtype = graph[name].dtype if name in loop.record else "float64"
                histories.append(HistoryKind(history_name(name, number), (count,), dtype))
        return [*carried, *self.current.kept, *histories]

    def place(self, done: int) -> str:
        step = f"step {done - self.steps_before - 1}"
        return step if len(self.loops) == 1 else f"{step} of loop {len(self.ended) + 1}"

    def progress(self, done: int) -> str:
        steps = counted(self.current.loop.steps, "step")
        return f"{done - self.steps_before} of at most {steps}"


Contents: TypeAlias = GraphContents | LoopContents  # what checkpoints hold


def best_name(name: str) -> str:
    """Return the name under which the values of the best validation are saved."""
    return f"best of {name}"


def history_name(name: str, loop: int) -> str:
    """Return the name under which the values of a recorded tensor are saved; no tensor has it."""
    return f"history of {name} in loop {loop + 1}"


FORMAT = 3
MANIFEST = "manifest.json"
PIECE_BYTES = 16 * 2**20  # read or written, and checked, at a time
REMOVE_HINT = "remove it to start again, or to continue from an older one"
_COMPLETE = re.compile(r"[0-9]{6,16}")

# What makes two jobs give the same numbers: the name of each part, and a text that must be equal.
Identity: TypeAlias = Mapping[str, str]
FileVersion: TypeAlias = tuple[int, int, int]  # as of a FileIdentity


@dataclass(frozen=True)
class Block:
    """A tensor in a checkpoint. The layout of a number has one dimension of extent 1."""

    name: str
    dtype: str
    layout: Layout

    def nbytes(self, rank: int) -> int:
        """Return the bytes of the tensor in the rank's file."""
        block = self.layout.block(rank)
        if block is None or not self.layout.owns(rank):
            return 0
        return elements(block) * np.dtype(self.dtype).itemsize

    def keeper(self, rank: int) -> int:
        """Return the rank whose file has this rank's block."""
        digits = []
        for digit, cut in zip(self.layout.mesh.digits(rank), self.layout.cuts, strict=True):
            digits.append(0 if cut is None else digit)
        return rank_of(self.layout.mesh, digits)


def places(blocks: Sequence[Block], rank: int) -> Iterator[tuple[int, int]]:
    """Give the offset and bytes of each block in a rank's file, aligned like arrays in memory."""
    start = 0
    for block in blocks:
        count = block.nbytes(rank)
        yield start, count
        start += -(-count // ALIGNMENT) * ALIGNMENT


def file_name(rank: int) -> str:
    """Return the name of a rank's file. A rank without blocks to keep has none."""
    return f"rank-{rank:05d}.raw"


def complete(folder: str) -> list[str]:
    """Return the names of the checkpoints in a folder, the newest last.

    A name is the number of vertices or steps that are done.
    """
    names = [name for name in os.listdir(folder) if _COMPLETE.fullmatch(name)]
    return sorted(names, key=int)


def checksum(manifest: Mapping[str, Any]) -> int:
    """Return the checksum of a manifest."""
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def damaged(path: str, what: str) -> InputError:
    """Return the error for a checkpoint that is damaged."""
    return InputError(path, f"the checkpoint is damaged: {what}", hint=REMOVE_HINT)


@contextmanager
def _opened(path: str, name: str) -> Iterator[IO[bytes]]:
    """Open a file of a checkpoint; refuse one that other users could have written."""
    try:
        with open(open_own_file(os.path.join(path, name)), "rb", buffering=0) as file:
            yield file
    except UntrustedFileError as error:
        expected = "a file of yours that only you can write to"
        raise InputError(f"{path}/{name}", str(error), expected) from None
    except OSError as error:
        raise damaged(path, f"{name}: {error.strerror or error}") from None


# ---- a checkpoint -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint, made after the first `done` vertices or steps."""

    path: str
    plan: str  # the digest of the plan that made it
    ranks: int
    done: int
    place: str  # what was done last
    blocks: Mapping[str, Block]
    files: tuple[tuple[int, int], ...]  # the bytes and checksum of each rank's
    ended: tuple[EndedLoop, ...] = ()  # loops before the one in which it was made
    order: tuple[str, ...] = ()  # of vertices, if they are not in the order of the program
    # The files that were checked, by rank. No other ones in their places are read.
    versions: Mapping[int, FileVersion] = field(default_factory=dict)

    def check_file(self, rank: int) -> FileVersion | None:
        """Refuse a rank's file if it is damaged; return which file it is, None if there is none.

        CRC-32 finds what disks and copies do to files, and is as fast as a disk.
        """
        name = file_name(rank)
        size, expected_check = self.files[rank]
        if not size:
            return None
        check = 0
        with _opened(self.path, name) as file:
            identity = identity_from(os.fstat(file.fileno()))
            if identity.size != size:
                what = f"{name} has {counted(identity.size, 'byte')} instead of {size}"
                raise damaged(self.path, what)
            while piece := file.read(PIECE_BYTES):
                check = zlib.crc32(piece, check)
        if check != expected_check:
            raise damaged(self.path, f"{name} has changed since it was written")
        return identity.version

    def mapped(self, name: str, rank: int) -> Array:
        """Map the block of a tensor in a rank's file into memory.

        The mapping stays valid after the file is removed.
        """
        block = self.blocks[name]
        number = list(self.blocks).index(name)
        all_places = list(places(list(self.blocks.values()), rank))
        start, count = all_places[number]
        region = block.layout.block(rank)
        assert region is not None
        if not count:
            return np.empty(shape(region), block.dtype)
        with _opened(self.path, file_name(rank)) as file:
            version = identity_from(os.fstat(file.fileno())).version
            if self.versions.get(rank, version) != version:
                raise damaged(self.path, f"{file_name(rank)} has changed while it was being read")
            return np.memmap(file, block.dtype, "r", start, shape(region))

    def fill(self, name: str, rank: int, target: Array) -> None:
        """Put a rank's block as it was, partial results included, into an array."""
        target[...] = self.mapped(name, self.blocks[name].keeper(rank)).reshape(target.shape)


class SavedTensor:
    """A tensor of a checkpoint, read box by box like a dataset; partial results are combined."""

    def __init__(
        self, saved: Saved, name: str, bound: tuple[int, ...], aggregation: str | None
    ) -> None:
        self.saved = saved
        self.block = saved.blocks[name]
        self.shape = bound
        self.dtype = np.dtype(self.block.dtype)
        self.combine: Any = aggregation and AGGREGATIONS[aggregation].combine

    def __getitem__(self, box: Box) -> Array:
        layout = self.block.layout
        bounds = [(side.start, side.stop) for side in box] or [(0, 1)]
        found = np.empty([stop - start for start, stop in bounds], self.dtype)
        partial = axes_that_cut(layout.cuts, PARTIAL)
        # Partial results come in the order of their ranks, so that every reader combines them in
        # the same order.
        for number, digits in enumerate(digits_along(layout.mesh, partial, layout.mesh.digits(0))):
            first = rank_of(layout.mesh, digits)
            for rank, region in holders_of_copy(layout, tuple(bounds), first):
                block = self.saved.mapped(self.block.name, rank)
                in_block = tuple(map(locate, region, layout.block(rank) or ()))
                in_box = tuple(map(locate, region, [(side,) for side in bounds]))
                for there, here in paired_boxes(in_block, in_box):
                    values = block[there]
                    if number:
                        with np.errstate(all="ignore"):
                            values = self.combine(found[here], values)
                    found[here] = values
        return found if box else found.reshape(())


# ---- the manifest -------------------------------------------------------------------------------


def read_manifest(path: str) -> str:
    """Return the text of a checkpoint's manifest."""
    try:
        with _opened(path, MANIFEST) as file:
            return file.read().decode()
    except UnicodeDecodeError:
        raise damaged(path, f"{MANIFEST}: it is not text") from None


def parse_manifest(
    path: str, text: str, contents: Contents, identity: Identity | None = None
) -> Saved:
    """Return a checkpoint; refuse one that is damaged, or of another version or job.

    Without `identity` it is not compared with the job.
    """
    try:
        data = json.loads(text)
        given = data.pop("checksum")
        made_by = str(data["einmpi"])
        job = dict(data["job"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise damaged(path, f"{MANIFEST} is not a manifest") from None
    if given != checksum(data):
        raise damaged(path, f"{MANIFEST} has changed since it was written")
    if data.get("format") != FORMAT or made_by != __version__:
        raise InputError(
            path,
            f"the checkpoint is from einmpi {made_by}, format {data.get('format')}",
            f"einmpi {__version__}, format {FORMAT}",
            REMOVE_HINT,
        )
    if identity is not None:
        for what, expected in identity.items():
            if job.get(what) != expected:
                raise InputError(
                    path, f"the checkpoint is of another job: {what} differs", hint=REMOVE_HINT
                )
        if len(job) > len(identity):
            raise InputError(
                path, "the checkpoint is of another job: it has other inputs", hint=REMOVE_HINT
            )
    try:
        return _parse_saved(path, data, contents)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        raise damaged(path, f"{MANIFEST} does not fit the job") from None


def _parse_saved(path: str, data: dict[str, Any], contents: Contents) -> Saved:
    """Return the checkpoint; raise ValueError or the like if something does not fit."""
    ended = []
    for steps, is_done in data["ended"]:
        ended.append(EndedLoop(_between(steps, 1, contents.most), bool(is_done)))
    contents = contents.at(ended, [str(name) for name in data.get("order", ())])
    done = _between(data["done"], 1, contents.most)
    mesh_ranks = _between(data["mesh"], 1, MAX_RANKS)
    mesh = Mesh(mesh_ranks, _between(data["nodes"], 1, mesh_ranks))
    if mesh_ranks % mesh.nodes:
        raise ValueError("nodes")
    blocks = {}
    for kind, tensor in zip(contents.tensors(done), data["tensors"], strict=True):
        name = kind.name
        dtype = kind.dtype
        bound = kind.bound or (1,)
        if (tensor["name"], tensor["dtype"], tuple(tensor["shape"])) != (name, dtype, bound):
            raise ValueError(name)
        cuts: list[int | None] = []
        for cut in tensor["cuts"]:
            cuts.append(None if cut is None else _between(cut, PARTIAL, len(bound) - 1))
        if len(cuts) != len(mesh.factors):
            raise ValueError(name)
        axes = len(mesh.factors)
        orders = [_between(each, -max(bound), axes) for each in tensor.get("orders", ())]
        if len(orders) not in (0, len(bound)):
            raise ValueError(name)
        blocks[name] = Block(name, dtype, Layout(mesh, bound, tuple(cuts), (), tuple(orders)))
    files = []
    for size, check in data["files"]:
        files.append((_between(size, 0, 2**63), _between(check, 0, 2**32)))
    if len(files) != mesh.ranks:
        raise ValueError("files")
    return Saved(
        path=path,
        plan=str(data["plan"]),
        ranks=_between(data["ranks"], mesh.ranks, MAX_RANKS),
        done=done,
        place=contents.place(done),
        ended=contents.ended,
        order=contents.order,
        blocks=blocks,
        files=tuple(files),
    )


def _between(number: Any, least: int, most: int) -> int:
    if type(number) is not int or not least <= number <= most:
        raise ValueError(number)
    return number
