"""Checkpoints of a run: when all ranks save what they have, how that is written, where a run goes on.

A folder is filled under a hidden name, its manifest last, and renamed when all of it is on disk: it is whole or not
there. An older checkpoint goes after that.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, BinaryIO

import numpy as np

from einmpi.checkpoint.load import (
    FORMAT,
    MANIFEST,
    PIECE,
    Block,
    Identity,
    Saved,
    checksum,
    complete,
    file_name,
    parse_manifest,
    places,
    read_manifest,
)
from einmpi.comm.agreement import on_first_rank
from einmpi.comm.base import Comm
from einmpi.errors import EinmpiError, InputError, Stopped, failure
from einmpi.files.atomic import claimed
from einmpi.graph.eingraph import EinGraph
from einmpi.graph.remainder import needed
from einmpi.process.notes import activity_writer
from einmpi.process.terminal import clear_line
from einmpi.runtime.buffers import Buffers
from einmpi.schedule.schedule import SavePoint
from einmpi.version import __version__

_HIDDEN = re.compile(r"\.[0-9]{6,9}\.[0-9a-f]{16}\.part")
_SAVE = "save"  # what a rank may wish for; or it is the name of a signal


def claim_folder(folder: str, comm: Comm) -> AbstractContextManager[None]:
    """Inside, no other run may have its checkpoints in this folder. All ranks call it."""
    return claimed(
        {os.path.join(folder, "checkpoint"): f"--checkpoint {folder}"},
        comm,
        lambda: _make_folder(folder),
    )


def _make_folder(folder: str) -> None:
    place = f"--checkpoint {folder}"
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise InputError(place, error.strerror or str(error), "a folder to write to") from None
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise InputError(place, "it may not be written to", "a folder with write permission")


class Checkpoints:
    """Those of one run. Every rank has this object; what it decides is the same on all of them.

    `folder` is on a file system that all ranks see, `every` are seconds by the clock of rank 0, `asked` fills up with
    the names of signals that this rank got, `identity` says what makes another run give the same numbers.
    """

    def __init__(
        self,
        folder: str,
        every: float,
        comm: Comm,
        graph: EinGraph,
        identity: Identity,
        asked: Sequence[str] = (),
        quiet: bool = False,
    ) -> None:
        self.folder, self.every, self.comm, self.graph = folder, every, comm, graph
        self.identity, self.asked, self.quiet = identity, asked, quiet
        self.number = {vertex.name: number for number, vertex in enumerate(graph.computed, 1)}
        self.plan = ""  # the digest of the run's plan
        self.saved: Saved | None = None  # where the run goes on
        self.restored: tuple[SavePoint, ...] = ()  # of it what lies in slots when the run begins
        self.points: dict[str, SavePoint] = {}  # of the vertices so far
        self.open: set[str] = set()  # the vertices after which all ranks can save
        self.count, self.seconds, self.last = 0, 0.0, time.monotonic()

    # ---- where a run goes on ----------------------------------------------------------------------------------------

    def find(self, resume: bool) -> None:
        """Look for the newest checkpoint; an error on all ranks where it cannot be used."""
        found = ["", ""]  # its name, its manifest

        def look() -> None:
            found[0] = self._newest(resume)
            if found[0]:
                found[1] = read_manifest(self._path(found[0]))
                parse_manifest(self._path(found[0]), found[1], self.graph, self.identity)

        on_first_rank(self.comm, look)
        name, manifest = json.loads(self.comm.allgather_text(json.dumps(found))[0])
        if name:
            self.saved = parse_manifest(self._path(name), manifest, self.graph)
            self._check_files(self.saved)
            self._tell(f"goes on after {self.saved.vertex}, {self._of(self.saved.done)}")
        elif resume:
            self._tell("there is no checkpoint; starts from the beginning")

    def _newest(self, resume: bool) -> str:
        """The newest checkpoint, or nothing. What killed runs have left half done is removed."""
        _make_folder(self.folder)
        for name in filter(_HIDDEN.fullmatch, os.listdir(self.folder)):
            shutil.rmtree(self._path(name), ignore_errors=True)
        found = complete(self.folder)
        if found and not resume:
            raise InputError(
                f"--checkpoint {self.folder}",
                f"it has the checkpoint {found[-1]} of an earlier run",
                "an empty folder, or --resume to continue from the checkpoint",
            )
        return found[-1] if found else ""

    def _check_files(self, saved: Saved) -> None:
        """Each rank checks a share of the files. What one finds all of them raise."""
        problem = ""
        try:
            for rank in range(self.comm.rank, len(saved.files), self.comm.size):
                saved.check_file(rank)
        except InputError as error:
            problem = str(error)
        problem = next(filter(None, self.comm.allgather_text(problem)), "")
        if problem:
            raise failure(InputError.status, problem, everywhere=True)

    def restore(self, rank: int, buffers: Buffers) -> None:
        """Put what was saved into its slots."""
        for point in self.restored:
            self.points[point.vertex] = point
            if self.saved is not None and point.layout.block(rank) is not None:
                array = buffers.make(point.slot)
                values = buffers.backend.to_host(array)
                self.saved.fill(point.vertex, rank, values)
                buffers.backend.from_host(values, array)

    def starts(self, plan: str, points: Sequence[SavePoint]) -> None:
        """A run is about to start. Find out after which vertices all ranks can save: which kernels go together depends
        on a rank's extents."""
        self.plan = plan
        own = json.dumps([point.vertex for point in points if not point.inside])
        texts = [own] if self.comm.same(own) is None else self.comm.allgather_text(own)
        self.open = set.intersection(*(set(json.loads(text)) for text in texts))

    # ---- when to save -----------------------------------------------------------------------------------------------

    def reached(self, point: SavePoint, buffers: Buffers) -> None:
        """A vertex is done: save if it is time to, or if any rank is asked to stop."""
        self.points[point.vertex] = point
        done = self.number[point.vertex]
        if point.vertex not in self.open or (self.saved is not None and done <= self.saved.done):
            return  # in the middle of kernels that go together, or a copy of what was saved
        start = time.monotonic()
        due = self.comm.rank == 0 and start - self.last >= self.every
        wish = self.asked[0] if self.asked else _SAVE if due else ""
        wishes = {text for text in self.comm.allgather_text(wish) if text}
        if wishes:
            activity_writer(self.comm.rank)(f"saving a checkpoint after {point.vertex}")
            problem = self.save(done, buffers)
            self.last = time.monotonic()
            self.seconds += self.last - start
            signals = sorted(wishes - {_SAVE})
            if signals:
                self._stop(signals[0], done, problem)
            if problem:
                self._tell(
                    f"no checkpoint after {point.vertex}: {problem}; the run goes on", problem=True
                )

    def _stop(self, signal: str, done: int, problem: str) -> None:
        where = f"{self.folder}: {signal}: stopped after {self.graph.computed[done - 1].name}, {self._of(done)}"
        if not problem:
            raise Stopped(f"{where}; the same command with --resume goes on")
        raise failure(
            EinmpiError.status, f"{where}; there is no checkpoint of it: {problem}", everywhere=True
        )

    # ---- saving -----------------------------------------------------------------------------------------------------

    def save(self, done: int, buffers: Buffers) -> str:
        """Save what is still needed after the first `done` vertices. What went wrong, or nothing: a checkpoint is a
        help, and that it cannot be written is no reason to end."""
        points = [self.points[name] for name in needed(self.graph, done)]
        blocks = [Block(point.vertex, point.slot.dtype, point.layout) for point in points]
        draft, problem = self._path(f".{done:06d}.{secrets.token_hex(8)}.part"), ""
        if self.comm.rank == 0:
            _, problem = _attempt(lambda: os.mkdir(draft))
        draft, problem = json.loads(self.comm.allgather_text(json.dumps([draft, problem]))[0])
        if problem:
            return str(problem)
        slots = [buffers[point.slot] if point.slot.name in buffers else None for point in points]
        arrays = [None if array is None else buffers.backend.to_host(array) for array in slots]
        written = _attempt(lambda: _write_blocks(draft, blocks, arrays, self.comm.rank))
        texts = self.comm.allgather_text(json.dumps(written))
        if self.comm.rank == 0:
            files = [json.loads(text) for text in texts]
            problem = next((found for _, found in files if found), "")
            if not problem:
                manifest = self._manifest(done, blocks, [file for file, _ in files])
                _, problem = _attempt(lambda: self._publish(draft, done, manifest))
            if problem:
                shutil.rmtree(draft, ignore_errors=True)
        problem = self.comm.allgather_text(problem)[0]
        self.count += not problem
        return str(problem)

    def _manifest(self, done: int, blocks: Sequence[Block], files: Sequence[Any]) -> dict[str, Any]:
        mesh = self.points[self.graph.computed[done - 1].name].layout.mesh
        tensors = [
            {
                "name": block.name,
                "dtype": block.dtype,
                "shape": list(block.layout.bound),
                "cuts": list(block.layout.cuts),
            }
            for block in blocks
        ]
        return {
            "format": FORMAT,
            "einmpi": __version__,
            "job": dict(self.identity),
            "plan": self.plan,
            "ranks": self.comm.size,
            "done": done,
            "mesh": mesh.ranks,
            "nodes": mesh.nodes,
            "tensors": tensors,
            "files": files[: mesh.ranks],
        }

    def _publish(self, draft: str, done: int, manifest: Mapping[str, Any]) -> None:
        """The draft has the files of all ranks and becomes the checkpoint; then older ones go."""
        with open(os.path.join(draft, MANIFEST), "x", encoding="utf-8") as file:
            json.dump({**manifest, "checksum": checksum(manifest)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(draft)
        os.rename(draft, self._path(f"{done:06d}"))
        _sync_folder(self.folder)
        self._discard(complete(self.folder)[:-1])

    def remove(self) -> None:
        """The results are safe, so the checkpoint goes. All ranks call it."""
        if self.comm.rank == 0 and (self.count or self.saved is not None):
            _, problem = _attempt(lambda: self._discard(complete(self.folder)))
            self._tell(
                f"the checkpoint is still there: {problem}"
                if problem
                else "done; the checkpoint is removed"
            )

    def _discard(self, names: Sequence[str]) -> None:
        """Remove checkpoints. They lose their names first: what is removed halfway is no checkpoint."""
        for name in names:
            hidden = self._path(f".{name}.{secrets.token_hex(8)}.part")
            os.rename(self._path(name), hidden)
            shutil.rmtree(hidden, ignore_errors=True)

    # ---- words ------------------------------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def _of(self, done: int) -> str:
        return f"{done} of {len(self.number)} vertices"

    def _tell(self, text: str, problem: bool = False) -> None:
        """A line beside the results."""
        if self.comm.rank == 0 and (problem or not self.quiet):
            line = " ".join(f"einmpi: {self.folder}: {text}".split())
            sys.stdout.flush()  # what was said before stands before it, also where both go into one file
            print(f"{clear_line(sys.stderr)}{line}\n", end="", file=sys.stderr, flush=True)


# ---- files ----------------------------------------------------------------------------------------------------------


def _attempt(action: Callable[[], Any]) -> tuple[Any, str]:
    """(what it returns, nothing), or (None, what the system says)."""
    try:
        return action(), ""
    except OSError as error:
        return None, error.strerror or str(error) or type(error).__name__


def _write_blocks(
    draft: str, blocks: Sequence[Block], arrays: Sequence[np.ndarray | None], rank: int
) -> tuple[int, int]:
    """Write what this rank keeps, straight from where it is, and wait until it is on disk: (bytes, checksum)."""
    size = check = 0
    found = [*zip(places(blocks, rank), arrays, strict=True)]
    if not any(count for (_, count), _ in found):
        return 0, 0
    with open(os.path.join(draft, file_name(rank)), "xb", buffering=0) as file:
        for (start, count), array in found:
            if count and array is not None:
                for piece in _pieces(start - size, array):
                    check = zlib.crc32(piece, check)
                    _write(file, piece)
                size = start + count
        os.fsync(file.fileno())
    return size, check


def _pieces(gap: int, array: np.ndarray) -> Iterator[memoryview]:
    yield memoryview(bytes(gap))
    data = array.reshape(-1).view(np.uint8).data
    for start in range(0, len(data), PIECE):
        yield data[start : start + PIECE]


def _write(file: BinaryIO, piece: memoryview) -> None:
    while piece:  # a call may write less than it is given
        piece = piece[file.write(piece) :]


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
