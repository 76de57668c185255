"""A checkpoint on disk: a folder with a manifest, and the blocks of each rank in a file. How it is read.

A block that several ranks hold alike is in the file of the first of them. Where it lies there follows from the layouts
and the rank: the manifest needs two numbers a rank, its file's size and checksum, however many tensors there are.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from einmpi.errors import InputError
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.eingraph import EinGraph
from einmpi.graph.remainder import needed
from einmpi.planner.make_plan import MAX_RANKS
from einmpi.planner.mesh import Mesh
from einmpi.runtime.backend import ALIGNMENT
from einmpi.schedule.layout import PARTIAL, Layout
from einmpi.schedule.regions import Box, Runs, boxes, elements, intersect, locate, shape
from einmpi.version import __version__

FORMAT = 2
MANIFEST = "manifest.json"
PIECE = 16 * 2**20  # bytes that are read or written, and checked, at a time
ALLOWED = "remove it to start again, or to go on from an older one"
_COMPLETE = re.compile(r"[0-9]{6,9}")

Identity = Mapping[
    str, str
]  # what makes two jobs give the same numbers, part by part: what it is → a text


@dataclass(frozen=True)
class Block:
    """A tensor in a checkpoint. The layout of a tensor without dimensions has one of extent 1."""

    name: str
    dtype: str
    layout: Layout

    def nbytes(self, rank: int) -> int:
        """Bytes in the rank's file."""
        block = self.layout.block(rank)
        if block is None or not self.layout.owns(rank):
            return 0
        return elements(block) * np.dtype(self.dtype).itemsize

    def keeper(self, rank: int) -> int:
        """The rank whose file has this rank's block."""
        digits = zip(self.layout.mesh.digits(rank), self.layout.cuts, strict=True)
        return rank_of(self.layout.mesh, [0 if cut is None else digit for digit, cut in digits])


def rank_of(mesh: Mesh, digits: Sequence[int]) -> int:
    rank = 0
    for digit, factor in zip(digits, mesh.factors, strict=True):
        rank = rank * factor + digit
    return rank


def places(blocks: Sequence[Block], rank: int) -> Iterator[tuple[int, int]]:
    """(start, bytes) of each block in a rank's file; each starts where an array may lie in memory."""
    start = 0
    for block in blocks:
        yield start, block.nbytes(rank)
        start += -(-block.nbytes(rank) // ALIGNMENT) * ALIGNMENT


def file_name(rank: int) -> str:
    """A rank that has no blocks to keep has no file."""
    return f"rank-{rank:05d}.raw"


def complete(folder: str) -> list[str]:
    """The checkpoints in a folder, named by how many vertices are done; the newest last."""
    return sorted(filter(_COMPLETE.fullmatch, os.listdir(folder)), key=int)


def checksum(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


# ---- reading --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint: everything after the first `done` vertices is still to do."""

    path: str
    plan: str  # the digest of the plan that made it
    ranks: int
    done: int
    vertex: str
    blocks: Mapping[str, Block]
    files: tuple[tuple[int, int], ...]  # bytes and checksum of each rank's

    def damaged(self, what: str) -> InputError:
        return InputError(self.path, f"the checkpoint is damaged: {what}", ALLOWED)

    def check_file(self, rank: int) -> None:
        """CRC-32 finds what disks and copying do to files; it is in the standard library and no slower than a disk."""
        path = os.path.join(self.path, file_name(rank))
        size, check = self.files[rank]
        if not size:
            return
        try:
            found = os.path.getsize(path)
            if found != size:
                raise self.damaged(f"{file_name(rank)} has {found} bytes instead of {size}")
            with open(path, "rb", buffering=0) as file:
                got = 0
                while piece := file.read(PIECE):
                    got = zlib.crc32(piece, got)
        except OSError as error:
            raise self.damaged(f"{file_name(rank)}: {error.strerror or error}") from None
        if got != check:
            raise self.damaged(f"{file_name(rank)} has changed since it was written")

    def mapped(self, name: str, rank: int) -> np.ndarray:
        """The block of a tensor in a rank's file, not yet read. Who keeps it keeps the file, even a removed one."""
        number, block = list(self.blocks).index(name), self.blocks[name]
        start, count = list(places(list(self.blocks.values()), rank))[number]
        region = block.layout.block(rank)
        assert region is not None
        if not count:
            return np.empty(shape(region), block.dtype)
        return np.memmap(
            os.path.join(self.path, file_name(rank)), block.dtype, "r", start, shape(region)
        )

    def fill(self, name: str, rank: int, target: np.ndarray) -> None:
        """A rank's block as it was, partial results included."""
        target[...] = self.mapped(name, self.blocks[name].keeper(rank)).reshape(target.shape)


class SavedTensor:
    """A tensor of a checkpoint, read box by box as from a dataset; partial results are put together on the way."""

    def __init__(
        self, saved: Saved, name: str, bound: tuple[int, ...], aggregation: str | None
    ) -> None:
        self.saved, self.block, self.shape = saved, saved.blocks[name], bound
        self.dtype = np.dtype(self.block.dtype)
        self.aggregation = aggregation

    def __getitem__(self, box: Box) -> np.ndarray:
        layout = self.block.layout
        wanted = [((part.start, part.stop),) for part in box] if box else [((0, 1),)]
        found = np.empty([runs[0][1] - runs[0][0] for runs in wanted], self.dtype)
        choices = [self._holders(dimension, runs) for dimension, runs in enumerate(wanted)]
        partial = [axis for axis, cut in enumerate(layout.cuts) if cut == PARTIAL]
        # Partial results come in the order of their ranks, so that every reader adds them up alike.
        for number, digits in enumerate(
            itertools.product(*(range(layout.mesh.factors[axis]) for axis in partial))
        ):
            for held in itertools.product(*choices):
                at = dict(zip(partial, digits, strict=True))
                for axes, *_ in held:
                    at.update(axes)
                rank = rank_of(
                    layout.mesh, [at.get(axis, 0) for axis in range(len(layout.mesh.factors))]
                )
                block = self.saved.mapped(self.block.name, rank)
                for there, here in boxes(tuple(h[1] for h in held), tuple(h[2] for h in held)):
                    found[here] = self._added(found[here], block[there]) if number else block[there]
        return found if box else found.reshape(())

    def _holders(self, dimension: int, wanted: Runs) -> list[tuple[dict[int, int], Runs, Runs]]:
        """Who has some of the indices of a dimension: (digits on its axes, where in the block, where in the box)."""
        layout, holders = self.block.layout, []
        axes = layout.axes_of(dimension)
        for digits in itertools.product(*(range(layout.mesh.factors[axis]) for axis in axes)):
            at = dict(zip(axes, digits, strict=True))
            own = layout.runs(
                dimension, [at.get(axis, 0) for axis in range(len(layout.mesh.factors))]
            )
            if common := intersect(own, wanted):
                # Run by run: two runs that touch in the block may lie apart in the box.
                holders += [(at, locate((run,), own), locate((run,), wanted)) for run in common]
        return holders

    def _added(self, one: np.ndarray, two: np.ndarray) -> np.ndarray:
        assert self.aggregation is not None
        ufunc = AGGREGATIONS[self.aggregation].combine
        with np.errstate(all="ignore"):
            return ufunc(one, two)


def read_manifest(path: str) -> str:
    try:
        with open(os.path.join(path, MANIFEST), encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InputError(
            path, f"the checkpoint is damaged: {MANIFEST}: {reason}", ALLOWED
        ) from None


def parse_manifest(
    path: str, text: str, graph: EinGraph, identity: Identity | None = None
) -> Saved:
    """The checkpoint, if it is whole, of this version, and of a job with this graph and identity."""
    try:
        data = json.loads(text)
        given = data.pop("checksum")
        made_by, job = str(data["einmpi"]), dict(data["job"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise InputError(
            path, f"the checkpoint is damaged: {MANIFEST} is no manifest", ALLOWED
        ) from None
    if given != checksum(data):
        raise InputError(
            path, f"the checkpoint is damaged: {MANIFEST} has changed since it was written", ALLOWED
        )
    if (data.get("format"), made_by) != (FORMAT, __version__):
        raise InputError(
            path,
            f"the checkpoint is of einmpi {made_by}",
            f"one of einmpi {__version__}; {ALLOWED}",
        )
    for what, wanted in (identity or {}).items():
        if job.get(what) != wanted:
            raise InputError(path, f"the checkpoint is of another job: {what} differs", ALLOWED)
    if identity is not None and len(job) > len(identity):
        raise InputError(path, "the checkpoint is of another job: it has other inputs", ALLOWED)
    try:
        return _saved(path, data, graph)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        raise InputError(
            path, f"the checkpoint is damaged: {MANIFEST} does not fit the job", ALLOWED
        ) from None


def _saved(path: str, data: dict[str, Any], graph: EinGraph) -> Saved:
    """ValueError and the like where something is not as it must be."""
    done, ranks = (
        _between(data["done"], 1, len(graph.computed)),
        _between(data["mesh"], 1, MAX_RANKS),
    )
    mesh = Mesh(ranks, _between(data["nodes"], 1, ranks))
    if ranks % mesh.nodes:
        raise ValueError("nodes")
    blocks = {}
    for name, tensor in zip(needed(graph, done), data["tensors"], strict=True):
        vertex = graph[name]
        bound = vertex.bound or (1,)
        if (tensor["name"], tensor["dtype"], tuple(tensor["shape"])) != (name, vertex.dtype, bound):
            raise ValueError(name)
        cuts = [
            cut if cut is None else _between(cut, PARTIAL, len(bound) - 1) for cut in tensor["cuts"]
        ]
        if len(cuts) != len(mesh.factors):
            raise ValueError(name)
        blocks[name] = Block(name, vertex.dtype, Layout(mesh, bound, tuple(cuts)))
    files = tuple(
        (_between(size, 0, 2**63), _between(check, 0, 2**32)) for size, check in data["files"]
    )
    if len(files) != mesh.ranks:
        raise ValueError("files")
    return Saved(
        path,
        str(data["plan"]),
        _between(data["ranks"], mesh.ranks, MAX_RANKS),
        done,
        graph.computed[done - 1].name,
        blocks,
        files,
    )


def _between(number: Any, least: int, most: int) -> int:
    if type(number) is not int or not least <= number <= most:
        raise ValueError(number)
    return number
