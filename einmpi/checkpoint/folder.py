"""The folder of a run's checkpoints: which one a run continues from, how one is written.

A checkpoint is a folder that is filled under a hidden name, its manifest last, and renamed when it
is all on disk: it is complete or absent. Older checkpoints are removed after that.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, BinaryIO

import numpy as np

from einmpi.checkpoint.load import (
    FORMAT,
    MANIFEST,
    PIECE_BYTES,
    Block,
    Contents,
    FileVersion,
    Identity,
    Saved,
    checksum,
    complete,
    file_name,
    parse_manifest,
    places,
    read_manifest,
)
from einmpi.comm.agreement import on_first_rank, together
from einmpi.comm.base import Comm
from einmpi.errors import InputError, Stopped, failure
from einmpi.files.atomic import acquire_lock, flush_path, new_token
from einmpi.files.claims import Claim, claimed
from einmpi.files.datasets import Array, Dataset, SourceFile
from einmpi.files.formats import find
from einmpi.files.specs import InputSpec
from einmpi.job.job import Job
from einmpi.process.environment import (
    OWN_FOLDER_MODE,
    open_for_own_writing,
    print_notice,
    why_not_own,
)
from einmpi.process.signals import activity_writer
from einmpi.version import __version__

_HIDDEN = re.compile(r"\.[0-9]{6,16}\.[0-9a-f]{16}\.part")
_CLAIMED_NAME = "checkpoint"  # the folder's lock is that of a file with this name in it
SAVE = "save"  # what a rank may ask for; otherwise it is the name of a signal


def claim_folder(folder: str, comm: Comm) -> AbstractContextManager[Claim]:
    """Keep other runs from using this folder in a with block. All ranks call it."""
    return claimed(
        {os.path.join(folder, _CLAIMED_NAME): f"--checkpoint {folder}"},
        comm,
        lambda: _make_folder(folder),
    )


def _make_folder(folder: str) -> None:
    """Create the folder if need be; refuse one in which other users could put a checkpoint.

    Folders above it may be shared: another folder in its place would not belong to this user, and
    neither would the files of a checkpoint, which are checked one by one when they are read.
    """
    place = f"--checkpoint {folder}"
    try:
        os.makedirs(folder, OWN_FOLDER_MODE, exist_ok=True)
        problem = why_not_own(os.stat(folder))
    except OSError as error:
        raise InputError(place, error.strerror or str(error), "a writable folder") from None
    if problem:
        raise InputError(place, problem, "a folder of yours that only you can write to")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise InputError(place, "there is no permission to write to it", "a writable folder")


@dataclass(frozen=True)
class Saving:
    """Where and when a run saves checkpoints.

    `folder` is on a file system that all ranks see. `every` is in seconds by the clock of rank 0;
    a loop saves after every so many steps instead, if `every_steps` is not 0. With `resume`, the
    run continues from the newest checkpoint, if there is one. `asked` receives the names of
    signals that this rank gets. `claim` is the run's claim to the folder. If inputs are sparse,
    `identity` is what must be equal for two runs; otherwise it follows from the job.
    """

    folder: str
    every: float
    every_steps: int = 0
    resume: bool = False
    asked: Sequence[str] = ()
    quiet: bool = False
    claim: Claim | None = None
    identity: Identity = field(default_factory=dict)


class CheckpointFolder:
    """The checkpoints of one run. Every rank has this object, and all decide the same."""

    def __init__(self, saving: Saving, comm: Comm, contents: Contents, job: Job) -> None:
        self.saving = saving
        self.folder = saving.folder
        self.comm = comm
        self.contents = contents
        self.identity = saving.identity or together(comm, lambda: identity(job))
        self.plan = ""  # the digest of the run's plan
        self.saved: Saved | None = None  # the checkpoint from which the run continues
        self.count = 0  # checkpoints that this run has saved
        self.seconds = 0.0  # spent on saving
        self.last = time.monotonic()  # when the last checkpoint was saved
        self._find()

    # ---- where a run continues ------------------------------------------------------------------

    def _find(self) -> None:
        """Look for the newest checkpoint; raise an error on all ranks if it cannot be used."""

        def look() -> str:
            name = self._newest()
            manifest = ""
            if name:
                manifest = read_manifest(self._path(name))
                parse_manifest(self._path(name), manifest, self.contents, self.identity)
            return f"{new_token()} {name} {manifest}"

        self.token, name, manifest = on_first_rank(self.comm, look).split(" ", 2)
        if name:
            self.saved = parse_manifest(self._path(name), manifest, self.contents)
            self.saved = replace(self.saved, versions=self._check_files(self.saved))
            self.contents = self.contents.at(self.saved.ended, self.saved.order)
            progress = self.contents.progress(self.saved.done)
            self._report(f"continues after {self.saved.place}, {progress}")
        elif self.saving.resume:
            self._report("there is no checkpoint; starts from the beginning")

    def _newest(self) -> str:
        """Return the name of the newest checkpoint, or "".

        Incomplete ones that killed runs have left are removed.
        """
        _make_folder(self.folder)
        for name in os.listdir(self.folder):
            if _HIDDEN.fullmatch(name):
                shutil.rmtree(self._path(name), ignore_errors=True)
        names = complete(self.folder)
        if not names:
            return ""
        if not self.saving.resume:
            raise InputError(
                f"--checkpoint {self.folder}",
                f"it has the checkpoint {names[-1]} of an earlier run",
                "an empty folder, or --resume to continue from the checkpoint",
            )
        return names[-1]

    def _check_files(self, saved: Saved) -> dict[int, FileVersion]:
        """Check the files, a share on each rank; return which files they are, by their ranks.

        Raise an error on all ranks if one is damaged.
        """
        own_ranks = range(self.comm.rank, len(saved.files), self.comm.size)
        own = together(self.comm, lambda: [(rank, saved.check_file(rank)) for rank in own_ranks])
        versions: dict[int, FileVersion] = {}
        for text in self.comm.allgather_text(json.dumps(own)):
            for rank, version in json.loads(text):
                if version is not None:
                    versions[rank] = tuple(version)
        return versions

    # ---- when to save ---------------------------------------------------------------------------

    def request(self) -> str:
        """Return what this rank asks for: a checkpoint, to stop for a signal, or nothing."""
        if self.saving.asked:
            return self.saving.asked[0]
        if self.comm.rank == 0 and time.monotonic() - self.last >= self.saving.every:
            return SAVE
        return ""

    def finish(self, done: int, requests: Collection[str], start: float, problem: str) -> None:
        """Note that a checkpoint was saved or not, and stop if a signal asked for it."""
        self.last = time.monotonic()
        self.seconds += self.last - start
        signals = sorted(set(requests) - {SAVE})
        if signals:
            self._stop(signals[0], done, problem)
        if problem:
            text = f"no checkpoint after {self.contents.place(done)}: {problem}; the run continues"
            self._report(text, problem=True)

    def _stop(self, signal: str, done: int, problem: str) -> None:
        place = self.contents.place(done)
        progress = self.contents.progress(done)
        where = f"{self.folder}: {signal}: stopped after {place}, {progress}"
        if not problem:
            raise Stopped(f"{where}; the same command with --resume continues")
        raise failure(f"{where}; it has no checkpoint: {problem}")

    # ---- saving ---------------------------------------------------------------------------------

    def write(self, done: int, blocks: Sequence[Block], arrays: Sequence[Array | None]) -> str:
        """Write a checkpoint; return what failed, or "".

        `arrays` are this rank's blocks in host memory, None for those that it does not have. A run
        does not end because a checkpoint cannot be written.
        """
        activity_writer(self.comm.rank)(f"saving a checkpoint after {self.contents.place(done)}")
        draft = self._hidden(f"{done:06d}")
        problem = ""
        if self.comm.rank == 0:
            _, problem = _attempt(lambda: os.mkdir(draft, OWN_FOLDER_MODE))
        problem = self.comm.allgather_text(problem)[0]
        if problem:
            return problem
        written = _attempt(lambda: _write_blocks(draft, blocks, arrays, self.comm.rank))
        texts = self.comm.allgather_text(json.dumps(written))
        if self.comm.rank == 0:
            files = []
            for text in texts:
                file, rank_problem = json.loads(text)
                files.append(file)
                problem = problem or rank_problem
            if not problem:
                manifest = self._manifest(done, blocks, files)
                _, problem = _attempt(lambda: self._publish(draft, done, manifest))
            if problem:
                shutil.rmtree(draft, ignore_errors=True)
        problem = self.comm.allgather_text(problem)[0]
        if not problem:
            self.count += 1
        return problem

    def _manifest(self, done: int, blocks: Sequence[Block], files: Sequence[Any]) -> dict[str, Any]:
        mesh = blocks[0].layout.mesh
        tensors = []
        for block in blocks:
            tensor = {
                "name": block.name,
                "dtype": block.dtype,
                "shape": list(block.layout.bound),
                "cuts": list(block.layout.cuts),
            }
            if block.layout.orders:
                tensor["orders"] = list(block.layout.orders)
            tensors.append(tensor)
        return {
            "format": FORMAT,
            "einmpi": __version__,
            "job": dict(self.identity),
            "plan": self.plan,
            "ranks": self.comm.size,
            "done": done,
            "ended": [list(each) for each in self.contents.ended],
            "order": list(self.contents.order),
            "mesh": mesh.ranks,
            "nodes": mesh.nodes,
            "tensors": tensors,
            "files": files[: mesh.ranks],
        }

    def _publish(self, draft: str, done: int, manifest: Mapping[str, Any]) -> None:
        """Turn a draft with the files of all ranks into a checkpoint; remove older ones."""
        path = os.path.join(draft, MANIFEST)
        with open(path, "x", encoding="utf-8", opener=open_for_own_writing) as file:
            json.dump({**manifest, "checksum": checksum(manifest)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        flush_path(draft)
        # If another rank has given the folder up, it may belong to another run now.
        claim = self.saving.claim
        with nullcontext() if claim is None else claim.publishing():
            os.rename(draft, self._path(f"{done:06d}"))
            flush_path(self.folder)
            self._discard(complete(self.folder)[:-1])

    def remove(self) -> None:
        """Remove the checkpoint once the results are stored. All ranks call it."""
        if self.comm.rank == 0 and (self.count or self.saved is not None):
            _, problem = _attempt(self._discard_all)
            if problem:
                self._report(f"the checkpoint could not be removed: {problem}")
            else:
                self._report("done; the checkpoint is removed")

    def _discard_all(self) -> None:
        """Remove all checkpoints, unless another run uses the folder in the meantime."""
        try:
            lock = acquire_lock(os.path.realpath(self._path(_CLAIMED_NAME)))
        except BlockingIOError:
            raise OSError("another run uses the folder now") from None
        try:
            self._discard(complete(self.folder))
        finally:
            lock.remove()

    def _discard(self, names: Sequence[str]) -> None:
        """Remove checkpoints. Each loses its name first: one removed halfway is no checkpoint."""
        for name in names:
            os.rename(self._path(name), self._hidden(name))
            shutil.rmtree(self._hidden(name), ignore_errors=True)

    # ---- texts ----------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def _hidden(self, name: str) -> str:
        """Return the path of a checkpoint before it is complete, and while it is removed."""
        return self._path(f".{name}.{self.token}.part")

    def _report(self, text: str, problem: bool = False) -> None:
        """Print a line to standard error on rank 0."""
        if self.comm.rank == 0 and (problem or not self.saving.quiet):
            print_notice(f"einmpi: {self.folder}: {text}")


# ---- files --------------------------------------------------------------------------------------


def _attempt(action: Callable[[], Any]) -> tuple[Any, str]:
    """Return the result and "", or None and what the system says."""
    try:
        return action(), ""
    except OSError as error:
        return None, error.strerror or str(error) or type(error).__name__


def _write_blocks(
    draft: str, blocks: Sequence[Block], arrays: Sequence[Array | None], rank: int
) -> tuple[int, int]:
    """Write the blocks that this rank keeps and flush them to disk; return bytes and checksum."""
    kept = []
    for (start, count), array in zip(places(blocks, rank), arrays, strict=True):
        if count:
            kept.append((start, count, array))
    if not kept:
        return 0, 0
    size = 0
    check = 0
    path = os.path.join(draft, file_name(rank))
    with open(path, "xb", buffering=0, opener=open_for_own_writing) as file:
        for start, count, array in kept:
            if array is None:
                continue
            for piece in _pieces(start - size, array):
                check = zlib.crc32(piece, check)
                _write_all(file, piece)
            size = start + count
        os.fsync(file.fileno())
    return size, check


def _pieces(gap_bytes: int, array: Array) -> Iterator[memoryview]:
    """Give zeros to fill a gap, then the bytes of an array, piece by piece."""
    yield memoryview(bytes(gap_bytes))
    data = array.reshape(-1).view(np.uint8).data
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]


def _write_all(file: BinaryIO, piece: memoryview) -> None:
    while piece:  # a call may write less than it is given
        piece = piece[file.write(piece) :]


# ---- what makes another run give the same numbers ------------------------------------------------


def identity(job: Job) -> Identity:
    """Return what must be equal for two runs to give the same numbers, up to rounding.

    The number of ranks, the strategy and the threads may differ.
    """
    programs = job.one_after_another()
    text = ""
    for each in programs:
        text += f"{each.graph}\n{job.fast_math}\n{job.strict}"
        if job.reproducible:
            text += "\nreproducible"
        if each.loop is not None:
            # The number of steps may change: a loop may go on for longer than was first thought.
            text += f"\n{each.loop.carry}\n{each.loop.record}"
            if each.loop.validation is not None:
                text += f"\n{each.loop.validation.identity}"
            if each.loop.batches is not None:
                text += f"\n{replace(each.loop.batches, epochs=None)}"
    parts = {"the program with its sizes": sha256(text.encode()).hexdigest()}
    for spec in job.inputs:
        if any(spec.name in each.graph.by_name for each in programs):
            if spec.key_dimensions:
                continue  # what is read of a sparse tensor is compared, not its file
            dataset = None if spec.file is None else find(spec)
            parts[_part_of_input(spec)] = _describe_input(spec, dataset)
    return parts


def _part_of_input(spec: InputSpec) -> str:
    return f"the input {spec.name}"


def _describe_input(spec: InputSpec, dataset: Dataset | None) -> str:
    """Return a text about an input.

    A file counts as the same until it is written to; it may be found in another folder.
    """
    tensor = f"{spec.dtype}{list(spec.shape or ())}"
    if spec.value is not None:
        return f"parameter {spec.value!r} {tensor}"
    if dataset is None:
        return f"{spec.random} {tensor}, seed {spec.seed}, {spec.low} to {spec.high}"
    first, *linked = dataset.sources
    text = (
        f"{os.path.basename(dataset.file)}:{spec.inside or None} rows {spec.slices or None} "
        f"{tensor}, {_written(first)}"
    )
    if linked:
        lines = [f"{os.path.basename(source.path)}, {_written(source)}" for source in linked]
        text += f", and {len(linked)} linked files {sha256(repr(lines).encode()).hexdigest()}"
    return text


def _written(source: SourceFile) -> str:
    return f"{source.identity.size} bytes, written at {source.identity.modified_ns} ns"


def check_inputs_stayed(job: Job, files: Mapping[str, Dataset], found: Identity) -> None:
    """Refuse input files that have changed since the checkpoint was compared with them."""
    for spec in job.inputs:
        dataset = files.get(spec.name)
        if dataset is not None and _describe_input(spec, dataset) != found[_part_of_input(spec)]:
            raise InputError(
                spec.place,
                f"{dataset.title} was replaced during the run",
                "a file that stays unchanged",
            )
