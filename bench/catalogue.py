"""What `python -m bench all` runs: each benchmark with its arguments, its needs and its plots."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Bars:
    """A bar for each row: the columns that name it, and the column that it shows.

    There is a plot for each combination of the columns `per`; rows without these have no bar.
    """

    names: tuple[str, ...]
    value: str
    per: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lines:
    """A plot for each combination of the columns `per`, with a line for each value of `name`."""

    per: tuple[str, ...]
    name: str
    x: str
    y: str


@dataclass(frozen=True)
class Bench:
    """A run of a script."""

    name: str  # of the run, and of its file of results
    script: str
    full: str = ""  # arguments
    quick: str = ""  # arguments of --quick
    ranks: int = 0  # that mpirun starts; 0: one process without it
    needs: tuple[str, ...] = ()  # of NEEDS
    plots: tuple[Bars | Lines, ...] = ()


def first_sentence(file: Path) -> str:
    """Return what a module says about itself, up to the first full stop."""
    text = file.read_text(encoding="utf-8").split('"""')[1]
    return " ".join(text.split(".\n")[0].split())


# ---- what a benchmark needs ----------------------------------------------------------------------


def lacks_gpu() -> str:
    """Say why nothing runs on a GPU here."""
    if find_spec("cupy") is None:
        return "it needs CuPy and a GPU, and CuPy is not installed"
    import cupy

    try:
        return "" if cupy.cuda.runtime.getDeviceCount() else "it needs a GPU"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"it needs a GPU: {error}"


def lacks_hosts() -> str:
    """Say why two hosts cannot be made of network namespaces here."""
    sys.path.insert(0, str(FOLDER.parent / "tests"))
    from namespaces import reason_against

    return reason_against() or ""


def lacks_program(name: str) -> Callable[[], str]:
    """Return what says that a program is not installed."""
    return lambda: "" if shutil.which(name) else f"it needs {name}, which is not installed"


def lacks_package(name: str) -> Callable[[], str]:
    """Return what says that a package is not installed."""
    return lambda: "" if find_spec(name) else f"it needs {name}, which is not installed"


NEEDS: dict[str, Callable[[], str]] = {
    "gpu": lacks_gpu,
    "hosts": lacks_hosts,
    "mpirun": lacks_program("mpirun"),
    "smpirun": lacks_program("smpirun"),
    "sklearn": lacks_package("sklearn"),
    "suite": lambda: "it needs a copy of the suite: python -m bench array_api FOLDER",
}


def reason_to_skip(bench: Bench) -> str:
    """Return why a benchmark cannot run here, in one line; empty if it can."""
    if not (FOLDER / f"{bench.script}.py").exists():
        return f"there is no bench/{bench.script}.py"
    for need in (*(("mpirun",) if bench.ranks else ()), *bench.needs):
        if reason := NEEDS[need]():
            return " ".join(reason.split())
    return ""


# ---- the benchmarks ------------------------------------------------------------------------------

BENCHES = (
    Bench(
        "experiment1",
        "experiment1",
        quick="--parts words --count-ranks 2 4",
        plots=(
            Bars(("peer",), "words", per=("kind", "ranks")),
            Bars(("peer",), "seconds", per=("kind", "size", "dtype")),
        ),
    ),
    Bench(
        "experiment2",
        "experiment2",
        quick="--batch 32 --sizes 600 80 146 --steps 3 --repeat 1",
        ranks=2,
        plots=(Bars(("way",), "median", per=("form", "batch")),),
    ),
    Bench(
        "experiment3-plans",
        "experiment3",
        full="--models 7B 13B --cases 8x1024 --machine bench/machines/v100x8.toml",
        quick="--models tiny --cases 8x64 --devices 4x10MB 8x10MB "
        "--machine bench/machines/v100x8.toml",
        plots=(Bars(("strategy",), "seconds", per=("model", "ranks", "memory")),),
    ),
    Bench(
        "experiment3-runs",
        "experiment3",
        full="--run --cases 4x128 8x128",
        quick="--run --layers 2 --cases 4x32 --repeat 2",
        ranks=4,
        plots=(Bars(("strategy",), "seconds", per=("batch", "sequence")),),
    ),
    Bench(
        "experiment4-plans",
        "experiment4",
        full="--plan --models 7B --sequences 1024",
        quick="--plan --models tiny --sequences 64 --batches 4 --devices 4x5MB",
        plots=(Bars(("strategy",), "words", per=("model", "sequence")),),
    ),
    Bench(
        "experiment4-runs",
        "experiment4",
        full="--backend numpy --dtype float32 --model tiny --batches 1 4 --sequences 64 256",
        quick="--backend numpy --dtype float32 --model tiny --layers 2 --batches 1 "
        "--sequences 32 --repeat 1",
        plots=(Bars(("way",), "seconds", per=("batch", "sequence")),),
    ),
    Bench(
        "chain",
        "chain",
        quick="--size 300 --repeats 2",
        ranks=2,
        plots=(Bars(("way",), "seconds", per=("chain",)),),
    ),
    Bench(
        "node",
        "node",
        full="--sizes 2000 --repeat 3",
        quick="--sizes 300 --repeat 1 --calls 20 --sequence 128",
        needs=("mpirun",),
        plots=(Bars(("peer", "ranks", "skew"), "seconds", per=("case",)),),
    ),
    Bench(
        "kernels",
        "kernels",
        quick="--scale 0.05 --repeat 2 --threads 1",
        plots=(Bars(("kernel",), "seconds", per=("dtype", "threads")),),
    ),
    Bench(
        "daily",
        "daily",
        quick="--small --repeat 2",
        plots=(Bars(("case",), "ratio"),),
    ),
    Bench(
        "loops",
        "loops",
        quick="--size small --repeat 1",
        ranks=2,
        needs=("sklearn",),
        plots=(Bars(("case",), "ratio"),),
    ),
    Bench(
        "hdf5",
        "hdf5",
        full="--size 512MiB",
        quick="--size 16MiB --repeats 2",
        ranks=2,
        plots=(Bars(("way",), "GB/s", per=("what", "blocks")),),
    ),
    Bench(
        "planning",
        "planning",
        full="--ranks 8 64 1024",
        quick="--ranks 8 --graphs chain chain-skewed attention --repeat 1",
        plots=(Lines(("graph",), "strategy", "ranks", "seconds"),),
    ),
    Bench(
        "step",
        "step",
        quick="--steps 500 --repeat 3 --calls 50",
        plots=(Bars(("what",), "microseconds"),),
    ),
    Bench(
        "arrays",
        "arrays",
        quick="--size 10000 --repeat 2",
        ranks=2,
        plots=(Bars(("call",), "milliseconds"),),
    ),
    Bench("spill", "spill", quick="--size 300 --repeat 2", plots=(Bars(("limit",), "seconds"),)),
    Bench(
        "tracing",
        "tracing",
        quick="--size 300 --repeat 3",
        ranks=2,
        plots=(Bars(("what",), "percent"),),
    ),
    Bench(
        "decode",
        "decode",
        quick="--width 64 --layers 2 --heads 4 --hidden 128 --vocabulary 500 --length 32 --steps 8",
        plots=(Bars(("way",), "milliseconds"),),
    ),
    Bench("report", "report", quick="--layers 2 --ranks 4 --repeat 1"),
    Bench(
        "scaling",
        "scaling",
        full="--ranks 8 64 512 --curves strong weak --networks fat-tree dragonfly",
        quick="--ranks 8 16 --works chain --strategies eindecomp sqrt",
        needs=("smpirun",),
        plots=(Lines(("work", "curve", "network"), "strategy", "ranks", "seconds"),),
    ),
    Bench(
        "hosts",
        "hosts",
        quick="--size 200 --repeat 2 --ranks 1",
        needs=("hosts",),
        plots=(Bars(("strategy",), "seconds", per=("ranks",)),),
    ),
    Bench("array_api", "array_api", needs=("suite",)),
    Bench("gpu", "gpu", needs=("gpu",)),
    Bench("gpu_kernels", "gpu_kernels", needs=("gpu",)),
    Bench("gpu_llama", "gpu_llama", needs=("gpu",)),
    Bench("gpu_model", "gpu_model", needs=("gpu",)),
    Bench("gpu_training", "gpu_training", needs=("gpu",)),
)
