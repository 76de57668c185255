"""The inputs of the fuzzer: sound jobs and files, and what input number N of a seed is."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import struct
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from .fuzz_mutations import (
    ODD_TEXTS,
    ODD_WORDS,
    TomlEntries,
    json_bytes,
    mutate_bytes,
    mutate_entries,
    mutate_json,
    mutate_program,
    mutate_text,
    toml_bytes,
    toml_string,
)

# A checkpoint fits only input files with the same time of modification.
FILE_TIME = 1_700_000_000

# ---- sound jobs ---------------------------------------------------------------------------------

_MATRICES: TomlEntries = [
    ("sizes.s", "6"),
    ("sizes.t", '"s // 2"'),
    ("inputs.A", '{ shape = ["s", "t"], random = "normal", seed = 1 }'),
    ("inputs.B", '{ shape = ["t", 4], random = "uniform", low = -1, high = 2.5, seed = 2 }'),
]
JOBS: dict[str, tuple[str, TomlEntries]] = {
    "chain": (
        "Z[i,k] = sum(A[i,j] * B[j,k]) + sum(C[i,j] * sum(D[j,l] * E[l,k]))",
        [
            ("title", '"Chain"'),
            ("dtype", '"float32"'),
            ("sizes.s", "5"),
            *((f"inputs.{name}", '{ shape = ["s", 5], random = "normal" }') for name in "ABCDE"),
            ("plan.strategy", '"eindecomp"'),
            ("plan.memory", '"1 MiB"'),
        ],
    ),
    "stored": (
        "Z[i,k] = sum(A[i,j] * B[j,k])\nm[i] = max(Z[i,k])",
        [
            *_MATRICES,
            (
                "outputs.Z",
                '{ file = "out.h5", dataset = "/Z", chunks = [2, 2], compression = "gzip" }',
            ),
            ("outputs.m", '{ file = "m.npy", dtype = "float32" }'),
            ("run.backend", '"numpy"'),
            ("run.fast_math", "true"),
        ],
    ),
    "files": (
        "Z[i,j] = X[i,j] * 2 + sum(Y[i]) + where(i < j, W[i,j], -inf)",
        [
            ("inputs.X", '{ file = "x.h5", dataset = "/A", rows = "0:3" }'),
            ("inputs.Y", '"y.npy"'),
            ("inputs.W", '{ file = "w.safetensors", tensor = "A", resident = true }'),
            ("outputs.Z", '"out.h5:/group/Z"'),
        ],
    ),
    "attention": (
        "T[h,s,t] = sum(Q[s,h,d] * K[t,h,d])\n"
        "P[h,s,t] = softmax[t](where(t <= s, T[h,s,t] / sqrt(d), -inf))\n"
        "O[s,h,d] = sum(P[h,s,t] * V[t,h,d])",
        [
            ("sizes.s", "4"),
            ("sizes.h", "2"),
            ("sizes.d", "3"),
            *(
                (f"inputs.{name}", '{ shape = ["s", "h", "d"], random = "normal" }')
                for name in "QKV"
            ),
            ("roles.sequence", '["s", "t"]'),
            ("roles.head", '["h"]'),
            ("plan.strategy", '"megatron"'),
        ],
    ),
    "gather": (
        "Y[b,a] = W[K[b], a]; D[i] = M[i,i]; n = sum(M[i,j]**2) + sum(Y[b,a])",
        [
            ("inputs.W", '{ shape = [8, 3], random = "arange", dtype = "float64" }'),
            ("inputs.K", '{ shape = [8], random = "uniform", dtype = "int32", low = 0, high = 8 }'),
            (
                "inputs.M",
                '{ shape = [4, 4], random = "ones", dtype = "complex128", parts = [2, 1] }',
            ),
            ("outputs.D", '"d.npy"'),
            ("outputs.n", '"out.h5:/n"'),
        ],
    ),
    "numbers": (
        "Z[i] = prod(I[i,j] % 3) + any(B[i,j] & ~B[j,i]); L[i,j] = i * 2 - j + I[i,j] // 2",
        [
            ("dtype", '"int64"'),
            ("sizes.i", "4"),
            ("inputs.I", '{ shape = ["i", "i"], random = "uniform", low = -100, high = 100 }'),
            ("inputs.B", '{ shape = ["i", "i"], random = "uniform", dtype = "bool" }'),
        ],
    ),
}
MACHINE: TomlEntries = [
    ("measured", '"2 nodes × 2 ranks"'),
    ("inside.latency", '"1.2 us"'),
    ("inside.bandwidth", '"5.1 GB/s"'),
    ("between.latency", '"3 us"'),
    ("between.bandwidth", '"1.5 GB/s"'),
    ("kernels.float64", '"20 Gflop/s"'),
    ("kernels.float32", '"40 Gflop/s"'),
    ("kernels.other", '"1.2 Gop/s"'),
]
# A job of six vertices whose run is stopped in the middle, for checkpoints.
CHECKPOINT_JOB = """
program = '''
A1[i,k] = sum(X[i,j] * W[j,k])
n = sum(A1[i,k]**2)
A2[i,k] = sum(A1[i,j] * A1[j,k]) / n
m[i] = max(A2[i,k])
Z[i,k] = exp(A2[i,k] - m[i]) + sum(A1[i,j] * W[j,k])
'''
inputs.X = { shape = [6, 6], random = "normal", seed = 1 }
inputs.W = "w.npy"
outputs.Z = "z.npy"
"""
# Every file is read by this job; `{}` is where it is.
READING_JOB = "program = 'Z[{0}] = X[{0}] + 1'\ninputs.X = {1}\noutputs.Z = 'z.npy'\n"
# The existing target of this job may be damaged.
WRITING_JOB = (
    "program = 'Z[i,j] = X[i,j] + 1'\ninputs.X = { shape = [3, 4], random = 'normal' }\n"
    "outputs.Z = { file = 'x.h5', dataset = '/A'%s }\n"
)


def job_entries(name: str) -> TomlEntries:
    """Return a sound job as TOML entries."""
    program, entries = JOBS[name]
    return [("program", toml_string(program)), *entries]


# ---- sound files --------------------------------------------------------------------------------

VALUES = np.arange(12.0).reshape(3, 4)


def hdf5_files() -> dict[str, bytes]:
    """Return HDF5 files that store /A, 3×4, in every way."""
    options: dict[str, dict[str, Any]] = {
        "contiguous": {"data": VALUES},
        "gzip": {"data": VALUES, "chunks": (2, 2), "compression": "gzip", "shuffle": True},
        "lzf": {"data": VALUES, "chunks": (2, 3), "compression": "lzf", "fletcher32": True},
        "growing": {"data": VALUES, "chunks": (1, 4), "maxshape": (None, None)},
        "big endian": {"data": VALUES.astype(">f4")},
        "scale offset": {"data": VALUES.astype("i4"), "chunks": (3, 4), "scaleoffset": 0},
        "half": {"data": VALUES.astype("f2"), "fillvalue": 1},
        "complex": {"data": VALUES.astype("c16")},
        "bool": {"data": VALUES > 5},
    }
    files = {}
    for name, arguments in options.items():
        for version in ("earliest", "latest"):
            made = io.BytesIO()
            with h5py.File(made, "w", libver=version) as file:
                file.create_dataset("A", **arguments).attrs["unit"] = "m"
                file["group/B"] = np.zeros(2)
                file["link"] = h5py.SoftLink("/A")
            files[f"{name}, {version}"] = made.getvalue()
    made = io.BytesIO()
    with h5py.File(made, "w") as file:
        layout = h5py.VirtualLayout((3, 4), "f8")
        layout[:] = h5py.VirtualSource("source.h5", "/A", (3, 4))
        file.create_virtual_dataset("A", layout)
    files["virtual"] = made.getvalue()
    made = io.BytesIO()
    with h5py.File(made, "w") as file:
        file["A"] = h5py.ExternalLink("source.h5", "/A")
    files["external link"] = made.getvalue()
    made = io.BytesIO()
    with h5py.File(made, "w") as file:
        file.create_dataset("A", (3, 4), "f8", external=[("values.raw", 0, 96)])
    files["external values"] = made.getvalue()
    return files


def npy_bytes(array: np.ndarray[Any, Any]) -> bytes:
    """Return an array as an .npy file."""
    made = io.BytesIO()
    np.save(made, array)
    return made.getvalue()


def safetensors_bytes(header: bytes, data: bytes) -> bytes:
    """Return a safetensors file."""
    return struct.pack("<Q", len(header)) + header + data


SAFETENSORS_HEADER = {
    "__metadata__": {"format": "pt"},
    "A": {"dtype": "F64", "shape": [3, 4], "data_offsets": [0, 96]},
    "B": {"dtype": "BF16", "shape": [2], "data_offsets": [96, 100]},
}
SAFETENSORS_DATA = VALUES.tobytes() + bytes(4)


@dataclass(frozen=True)
class Corpus:
    """The sound files that inputs are made from."""

    hdf5: Mapping[str, bytes]
    npy: Mapping[str, bytes]
    checkpoint: Mapping[str, bytes]  # path in the folder of the job → content
    checkpoint_output: bytes  # what the run of that job gives if it is not stopped

    @property
    def companions(self) -> dict[str, bytes]:
        """Return the files that the sound jobs read."""
        return {
            "x.h5": self.hdf5["gzip, earliest"],
            "source.h5": self.hdf5["contiguous, earliest"],
            "values.raw": VALUES.tobytes(),
            "y.npy": npy_bytes(np.arange(3.0)),
            "w.safetensors": safetensors_bytes(
                json.dumps(SAFETENSORS_HEADER).encode(), SAFETENSORS_DATA
            ),
            "machine.toml": toml_bytes(MACHINE),
        }


def make_corpus(run_command: Callable[[Path, list[str], bool], object], folder: Path) -> Corpus:
    """Make the sound files.

    `run_command` runs a command in a folder, in a new process that calls
    `stop_in_the_fourth_kernel` first if its last argument is true.
    """
    arrays = {
        "C order": VALUES,
        "Fortran order": np.asfortranarray(VALUES),
        "big endian": VALUES.astype(">i2"),
        "complex": VALUES.astype("c8"),
        "bool": VALUES > 3,
        "no dimensions": np.float32(2),
        "empty": np.zeros((0, 3)),
    }
    npy = {name: npy_bytes(np.asarray(array)) for name, array in arrays.items()}
    folder.mkdir()
    write_files(folder, {"job.toml": CHECKPOINT_JOB.encode(), "w.npy": npy_bytes(np.eye(6) * 0.5)})
    run_command(folder, ["run", "job.toml", "--quiet"], False)
    output = (folder / "z.npy").read_bytes()
    (folder / "z.npy").unlink()
    run_command(folder, ["run", "job.toml", "--checkpoint", "saved", "--every", "0"], True)
    checkpoint = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            checkpoint[str(path.relative_to(folder))] = path.read_bytes()
    assert any(name.endswith("manifest.json") for name in checkpoint), sorted(checkpoint)
    return Corpus(hdf5_files(), npy, checkpoint, output)


def stop_in_the_fourth_kernel() -> None:
    """Make this process receive the signal that asks for a checkpoint."""
    from einmpi.runtime.cpu.backend import NumpyBackend

    compute = NumpyBackend.compute_kernel
    count = 0

    def compute_and_stop(self: Any, *arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 4:
            os.kill(os.getpid(), signal.SIGUSR1)
        return compute(self, *arguments)

    NumpyBackend.compute_kernel = compute_and_stop  # type: ignore[method-assign]


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files whose names are paths in a folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, (FILE_TIME, FILE_TIME))


# ---- one input ----------------------------------------------------------------------------------


@dataclass
class FuzzInput:
    """A folder of files and a command line."""

    kind: str
    files: dict[str, bytes]
    command: list[str]
    odd_files: dict[str, str] = field(default_factory=dict)  # name → fifo, folder, loop
    # If the command succeeds in spite of the mutations, the output must be this one.
    expected: Mapping[str, bytes] = field(default_factory=dict)
    main_file: str = "job.toml"  # the one that was mutated

    def write(self, folder: Path) -> None:
        """Create the files."""
        write_files(folder, self.files)
        for name, what in self.odd_files.items():
            path = folder / name
            if path.exists() or path.is_symlink():
                path.unlink()
            if what == "fifo":
                os.mkfifo(path)
            elif what == "folder":
                path.mkdir()
            else:
                path.symlink_to(path.name)


class Steps:
    """The mutations of one input. Each has its own generator, so that any can be left out."""

    def __init__(self, seed: int, number: int, kept: Collection[int] | None) -> None:
        self.draw = random.Random(f"{seed}:{number}")
        self.count = self.draw.choice((1, 1, 1, 1, 2, 2, 3, 5))
        self._seed = f"{seed}:{number}"
        self._kept = kept

    def apply(self, value: Any, mutate: Callable[[Any, random.Random], Any]) -> Any:
        """Return the value after all mutations that are not left out."""
        for step in range(self.count):
            if self._kept is None or step in self._kept:
                value = mutate(value, random.Random(f"{self._seed}:{step}"))
        return value


def make_input(
    corpus: Corpus, seed: int, number: int, kept: Collection[int] | None = None
) -> tuple[FuzzInput, int]:
    """Return input `number` of a seed and how many mutations it has.

    With `kept`, only these of its mutations are applied.
    """
    steps = Steps(seed, number, kept)
    kinds = list(_MAKERS)
    weights = [weight for weight, _ in _MAKERS.values()]
    kind = steps.draw.choices(kinds, weights)[0]
    made = _MAKERS[kind][1](corpus, steps)
    made.kind = kind
    return made, steps.count


def _job_command(draw: random.Random) -> list[str]:
    """Return one of the commands that read a job."""
    ranks = str(draw.choice((1, 2, 3, 4, 6, 16)))
    return draw.choice(
        (
            ["run", "job.toml"],
            ["run", "job.toml", "--quiet"],
            ["run", "job.toml", "--json", "-"],
            ["run", "job.toml", "--summary", "--report", "r.html", "--trace", "t.json"],
            ["check", "job.toml"],
            ["plan", "job.toml", "-n", ranks],
            ["plan", "job.toml", "-n", ranks, "--compare"],
            ["verify", "job.toml"],
            ["sbatch", "job.toml", "--nodes", "2", "--ntasks-per-node", ranks],
        )
    )


def _odd_files(draw: random.Random) -> dict[str, str]:
    if draw.random() < 0.8:
        return {}
    return {"fifo.h5": "fifo", "fifo.npy": "fifo", "folder.h5": "folder", "loop.npy": "loop"}


def _make_job(corpus: Corpus, steps: Steps) -> FuzzInput:
    entries = job_entries(steps.draw.choice(list(JOBS)))
    command = _job_command(steps.draw)
    odd_files = _odd_files(steps.draw)
    as_text = steps.draw.random() < 0.2
    if as_text:
        content = steps.apply(toml_bytes(entries), mutate_bytes)
    else:
        content = toml_bytes(steps.apply(entries, mutate_entries))
    files = {**corpus.companions, "job.toml": content}
    return FuzzInput("", files, command, odd_files)


def _make_program(corpus: Corpus, steps: Steps) -> FuzzInput:
    program, entries = JOBS[steps.draw.choice(list(JOBS))]
    command = _job_command(steps.draw)
    text = steps.apply(program, mutate_program)
    content = toml_bytes([*entries, ("program", toml_string(text))])
    return FuzzInput("", {**corpus.companions, "job.toml": content}, command)


def _make_hdf5(corpus: Corpus, steps: Steps) -> FuzzInput:
    content = steps.apply(corpus.hdf5[steps.draw.choice(list(corpus.hdf5))], mutate_bytes)
    job = READING_JOB.format("i,j", "'x.h5:/A'")
    return _file_input(corpus, steps, job, "x.h5", content)


def _make_target(corpus: Corpus, steps: Steps) -> FuzzInput:
    content = steps.apply(corpus.hdf5[steps.draw.choice(list(corpus.hdf5))], mutate_bytes)
    more = steps.draw.choice(
        ("", ", chunks = [2, 2]", ", compression = 'gzip'", ", dtype = 'float32'")
    )
    return _file_input(corpus, steps, WRITING_JOB % more, "x.h5", content)


def _make_npy(corpus: Corpus, steps: Steps) -> FuzzInput:
    name = steps.draw.choice(list(corpus.npy))
    in_header = steps.draw.random() < 0.5

    def mutate_header(data: bytes, draw: random.Random) -> bytes:
        start = 10
        stop = start + int.from_bytes(data[8:10], "little")
        header = mutate_text(data[start:stop].decode("latin1"), draw).encode(errors="replace")[
            :65535
        ]
        return data[:8] + struct.pack("<H", len(header)) + header + data[stop:]

    content = steps.apply(corpus.npy[name], mutate_header if in_header else mutate_bytes)
    labels = {"no dimensions": "i"}.get(name, "i,j")
    return _file_input(corpus, steps, READING_JOB.format(labels, "'x.npy'"), "x.npy", content)


def _make_safetensors(corpus: Corpus, steps: Steps) -> FuzzInput:
    if steps.draw.random() < 0.4:
        sound = safetensors_bytes(json.dumps(SAFETENSORS_HEADER).encode(), SAFETENSORS_DATA)
        content = steps.apply(sound, mutate_bytes)
    else:
        header = json_bytes(steps.apply(SAFETENSORS_HEADER, mutate_json), steps.draw)
        content = safetensors_bytes(header, SAFETENSORS_DATA)
    job = READING_JOB.format("i,j", "'x.safetensors:A'")
    return _file_input(corpus, steps, job, "x.safetensors", content)


def _file_input(corpus: Corpus, steps: Steps, job: str, name: str, content: bytes) -> FuzzInput:
    companions = {**corpus.companions, name: content, "job.toml": job.encode()}
    command = steps.draw.choice((["run", "job.toml", "--quiet"],) * 4 + (["check", "job.toml"],))
    return FuzzInput("", companions, command, main_file=name)


def _make_checkpoint(corpus: Corpus, steps: Steps) -> FuzzInput:
    files = dict(corpus.checkpoint)
    saved = sorted(name for name in files if name.startswith("saved/"))
    manifest = next(name for name in saved if name.endswith("manifest.json"))
    name = steps.draw.choice([manifest, manifest, *saved])
    odd_files = {}
    expected = {"z.npy": corpus.checkpoint_output}
    what = steps.draw.choice(("bytes", "json", "json", "signed", "odd"))
    if what == "odd":
        kind = steps.draw.choice(("fifo", "folder", "loop", "removed"))
        del files[name]
        if kind != "removed":
            odd_files[name] = kind
    elif what == "bytes" or name != manifest:
        files[name] = steps.apply(files[name], mutate_bytes)
    else:
        content = steps.apply(json.loads(files[manifest]), mutate_json)
        if what == "signed" and isinstance(content, dict):
            content.pop("checksum", None)
            text = json.dumps(content, sort_keys=True).encode()
            content["checksum"] = zlib.crc32(text)
            expected = {}  # the checksum says that this was intended
        files[manifest] = json_bytes(content, steps.draw)
    command = ["run", "job.toml", "--checkpoint", "saved", "--resume", "--quiet"]
    return FuzzInput("", files, command, odd_files, expected, main_file=name)


def _make_machine(corpus: Corpus, steps: Steps) -> FuzzInput:
    if steps.draw.random() < 0.2:
        content = steps.apply(toml_bytes(MACHINE), mutate_bytes)
    else:
        content = toml_bytes(steps.apply(MACHINE, mutate_entries))
    files = {"job.toml": toml_bytes(job_entries("chain")), "machine.toml": content}
    ranks = steps.draw.choice(("2", "4", "6"))
    command = steps.draw.choice(
        (
            ["plan", "job.toml", "--machine", "machine.toml", "-n", ranks, "--nodes", "2"],
            ["plan", "job.toml", "--machine", "machine.toml", "-n", ranks],
            ["run", "job.toml", "--machine", "machine.toml"],
        )
    )
    return FuzzInput("", files, command, main_file="machine.toml")


_FLAGS = (
    *(
        "--set",
        "--set s",
        "--set s=",
        "--set s=0",
        "--set s=-1",
        "--set s=1e3",
        "--set s=99999999999",
    ),
    *(
        "--set =3",
        "--set s=3 --set s=4",
        "--set q=1",
        "--set s=é",
        "--dtype int8",
        "--dtype float1",
    ),
    *(
        "--strategy sqrt",
        "--strategy",
        "--strategy é",
        "--memory 1B",
        "--memory 20KiB",
        "--memory -1",
    ),
    *("--memory nan", "--machine machine.toml", "--machine none.toml", "--machine /dev/null"),
    *(
        "--repeat 0",
        "--repeat -1",
        "--repeat 2",
        "--repeat x",
        "--fast-math",
        "--checkpoint",
        "--resume",
    ),
    *(
        "--checkpoint saved",
        "--checkpoint x.h5",
        "--checkpoint saved --every 0",
        "--every -1",
        "--every é",
    ),
    *(
        "--json -",
        "--json none/a",
        "--json x.h5",
        "--json .",
        "--json job.toml",
        "--report /dev/full",
    ),
    *(
        "--json /dev/full",
        "--trace job.toml",
        "--summary",
        "--quiet",
        "--help",
        "--version",
        "-n 0",
    ),
    *("-n -3", "-n 1", "-n 99999", "-n x", "--nodes 3", "--compare", "--show-relations Z"),
    *(
        "--show-relations é",
        "--plot x.txt",
        "--backend cupy",
        "--backend x",
        "--",
        "-",
        "--seconds",
    ),
)


def _make_command(corpus: Corpus, steps: Steps) -> FuzzInput:
    def mutate(words: list[str], draw: random.Random) -> list[str]:
        kind = draw.choice(("flag", "flag", "flag", "odd", "remove", "text"))
        at = draw.randrange(1, len(words) + 1)
        if kind == "flag":
            return [*words[:at], *draw.choice(_FLAGS).split(" "), *words[at:]]
        if kind == "odd":
            odd = draw.choice((*ODD_WORDS, *ODD_TEXTS)).replace("\0", "")[:1000]
            return [*words[:at], odd, *words[at:]]
        if kind == "remove":
            return words[:at]
        # The first word stays a command that starts no other processes.
        return [words[0], *(mutate_text(word, draw).replace("\0", "")[:1000] for word in words[1:])]

    draw = steps.draw
    command = draw.choice((["run"], ["check"], ["plan", "-n", "4"], ["verify"], ["sbatch"]))
    command = steps.apply([*command, "job.toml"], mutate)
    files = {**corpus.companions, "job.toml": toml_bytes(job_entries("stored"))}
    return FuzzInput("", files, command)


_MAKERS: dict[str, tuple[int, Callable[[Corpus, Steps], FuzzInput]]] = {
    "job": (28, _make_job),
    "program": (24, _make_program),
    "hdf5": (14, _make_hdf5),
    "target": (6, _make_target),
    "npy": (6, _make_npy),
    "safetensors": (7, _make_safetensors),
    "checkpoint": (8, _make_checkpoint),
    "machine": (5, _make_machine),
    "command": (4, _make_command),
}
