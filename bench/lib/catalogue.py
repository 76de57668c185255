"""What `python -m bench all` runs: each benchmark with its arguments, its needs and its plots."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench import ROOT


@dataclass(frozen=True)
class Bars:
    """A bar for each row: the columns that name it, and the column that it shows.

    There is a plot for each combination of the columns `per`; rows without these have no bar. If
    `inside` is a column with further names, each of these is a bar.
    """

    names: tuple[str, ...]
    value: str
    per: tuple[str, ...] = ()
    unit: str = ""  # of the numbers, where the name of the column does not say it
    inside: str = ""
    in_order: bool = False  # of the rows; otherwise the smallest number comes first
    is_ratio: bool = False  # there is a line at 1
    subject: str = ""  # for the titles, where the columns `per` are not enough


@dataclass(frozen=True)
class Lines:
    """A plot for each combination of the columns `per`, with a line for each value of `name`."""

    per: tuple[str, ...]
    name: str
    x: str
    y: str
    unit: str = ""  # of the vertical axis, as that of Bars


@dataclass(frozen=True)
class Bench:
    """A run of a script."""

    name: str  # of the run, and of its file of results
    script: str
    title: str = ""
    reading: str = ""  # how to read the plots
    full: str = ""  # arguments
    quick: str = ""  # arguments of --quick
    ranks: int = 0  # that mpirun starts; 0: one process without it
    needs: tuple[str, ...] = ()  # of NEEDS
    plots: tuple[Bars | Lines, ...] = ()
    is_of_paper: bool = False  # one of the paper's experiments


def scripts() -> dict[str, Path]:
    """Return the files that can be run, by name."""
    found = {}
    for file in sorted(ROOT.glob("bench/*/*.py"), key=lambda file: file.stem):
        if '\nif __name__ == "__main__":' in file.read_text(encoding="utf-8"):
            found[file.stem] = file
    return found


def first_sentence(file: Path) -> str:
    """Return what a module says about itself, up to the first full stop."""
    text = file.read_text(encoding="utf-8").split('"""')[1]
    return " ".join(text.split(".\n")[0].split())


# ---- the benchmarks ------------------------------------------------------------------------------

LESS_IS_BETTER = "Less is better."
RATIO_TO_PEER = "einmpi's time divided by the peer's"

BENCHES = (
    Bench(
        "experiment1",
        "experiment1",
        "Experiment 1: a chain of matrix products",
        "(A·B) + (C·(D·E)) on ranks, uniform with s × s matrices and skewed with thin and wide "
        "ones, under einmpi's strategies and by other programs; then products and contractions of "
        "several tensors. Words are the numbers that ranks receive from each other, counted by a "
        "layer under MPI; those of einmpi are also what its plans predict, or else this benchmark "
        "fails. Seconds are medians. Less is better in all plots.",
        full="--repeat 3 --count-ranks 2 4 8",
        quick="--parts words --count-ranks 2 4",
        needs=("mpirun",),
        plots=(
            Bars(
                ("peer",),
                "words",
                per=("kind", "ranks"),
                unit="words received by all ranks",
                subject="chain",
            ),
            Bars(("peer",), "seconds", per=("kind", "size", "dtype"), subject="chain"),
            Bars(
                ("contraction",),
                "words",
                per=("ranks",),
                unit="words received by all ranks",
                in_order=True,
                subject="contractions",
            ),
            Bars(
                ("contraction",),
                "ratio",
                unit="einmpi's time divided by that of opt_einsum, which has as many threads",
                in_order=True,
                is_ratio=True,
            ),
        ),
        is_of_paper=True,
    ),
    Bench(
        "experiment2",
        "experiment2",
        "Experiment 2: training a wide classifier",
        "A step of gradient descent of a network with one hidden layer, smaller than the paper's; "
        "the rows have its extents. eindecomp, model and data are strategies of einmpi, torch and "
        "JAX are one process, ddp is torch's data parallelism. " + LESS_IS_BETTER,
        quick="--batch 32 --sizes 600 80 146 --steps 3 --repeat 1",
        ranks=2,
        plots=(
            Bars(("way",), "median", per=("form", "batch"), unit="milliseconds of a step, median"),
        ),
        is_of_paper=True,
    ),
    Bench(
        "experiment3-plans",
        "experiment3",
        "Experiment 3: the first token of LLaMA, planned",
        "The prefill of a batch of prompts on servers like the paper's: model, number of GPUs, and "
        "memory of each. Seconds are predicted by the planner from the data sheet of the GPUs, not "
        "measured. A strategy without a bar needs more memory than a GPU has. " + LESS_IS_BETTER,
        full="--models 7B 13B --cases 8x1024 --machine bench/machines/v100x8.toml",
        quick="--models tiny --cases 8x64 --devices 4x10MB 8x10MB "
        "--machine bench/machines/v100x8.toml",
        plots=(
            Bars(
                ("strategy",),
                "seconds",
                per=("model", "ranks", "memory"),
                unit="seconds, predicted",
            ),
            Bars(
                ("strategy",),
                "words",
                per=("model", "ranks", "memory"),
                unit="words received by all ranks, planned",
            ),
        ),
        is_of_paper=True,
    ),
    Bench(
        "experiment3-runs",
        "experiment3",
        "Experiment 3: the first token of a small LLaMA, run",
        "The same program with a small model on the cores of this machine: all strategies compute "
        "the same logits. " + LESS_IS_BETTER,
        full="--run --cases 4x128 8x128",
        quick="--run --layers 2 --cases 4x32 --repeat 2",
        ranks=4,
        plots=(
            Bars(("strategy",), "seconds", per=("batch", "sequence")),
            Bars(
                ("strategy",),
                "words",
                per=("batch", "sequence"),
                unit="words received by all ranks",
            ),
        ),
        is_of_paper=True,
    ),
    Bench(
        "experiment4-plans",
        "experiment4",
        "Experiment 4: weights in host memory, planned",
        "The prefill of LLaMA on several GPUs that read its weights from the host's memory. "
        + LESS_IS_BETTER,
        full="--plan --models 7B --sequences 1024",
        quick="--plan --models tiny --sequences 64 --batches 4 --devices 4x5MB",
        plots=(
            Bars(
                ("strategy",),
                "words",
                per=("model", "batch", "sequence"),
                unit="words received by all ranks, planned",
            ),
        ),
        is_of_paper=True,
    ),
    Bench(
        "experiment4-runs",
        "experiment4",
        "Experiment 4: weights in host memory, run",
        "The prefill of a small LLaMA on this machine, beside packages that also keep weights "
        "elsewhere. " + LESS_IS_BETTER,
        full="--backend numpy --dtype float32 --model tiny --batches 1 4 --sequences 64 256",
        quick="--backend numpy --dtype float32 --model tiny --layers 2 --batches 1 "
        "--sequences 32 --repeat 1",
        plots=(Bars(("way",), "seconds", per=("batch", "sequence")),),
        is_of_paper=True,
    ),
    Bench(
        "chain",
        "chain",
        "The matrix chain beside numpy",
        "einmpi's strategies on two ranks with a thread each, and numpy in one process with two. "
        + LESS_IS_BETTER,
        quick="--size 300 --repeats 2",
        ranks=2,
        plots=(Bars(("way",), "seconds", per=("chain",)),),
    ),
    Bench(
        "node",
        "node",
        "One node at full speed",
        "The chain (skew 1 is uniform), calls with 10 × 10 matrices and attention with all cores "
        "of this machine. Names are followed by the number of ranks. " + LESS_IS_BETTER,
        full="--sizes 2000 --repeat 3",
        quick="--sizes 300 --repeat 1 --calls 20 --sequence 128",
        needs=("mpirun",),
        plots=(
            Bars(("peer", "ranks"), "seconds", per=("case", "skew")),
            Bars(("peer", "ranks"), "seconds", per=("case", "sequence")),
            Bars(("peer", "ranks"), "seconds", per=("case", "matrices")),
        ),
    ),
    Bench(
        "kernels",
        "kernels",
        "Operations of one rank",
        "Each beside what one would write instead. Above 1, einmpi is faster.",
        full="--repeat 3",
        quick="--scale 0.05 --repeat 2 --threads 1",
        plots=(
            Bars(
                ("kernel",),
                "ratio",
                per=("dtype", "threads"),
                unit="time of the peer divided by einmpi's",
                inside="peers",
                in_order=True,
                is_ratio=True,
            ),
        ),
    ),
    Bench(
        "daily",
        "daily",
        "Daily work on one rank",
        "What people compute every day, beside what they would write in numpy. Below 1, einmpi is "
        "faster.",
        quick="--small --repeat 2",
        plots=(
            Bars(
                ("case",),
                "ratio",
                unit="einmpi's time divided by numpy's",
                in_order=True,
                is_ratio=True,
            ),
        ),
    ),
    Bench(
        "sparse",
        "sparse",
        "Sparse tensors in one process",
        "Products of sparse tensors, beside scipy and numpy: the matrix of a 5-point stencil, and "
        "places as Zipf's law has them. Below 1, einmpi is faster.",
        quick="--small --repeat 2",
        plots=(
            Bars(
                ("case",),
                "ratio",
                per=("dtype",),
                unit="einmpi's time divided by the peer's",
                in_order=True,
                is_ratio=True,
            ),
        ),
    ),
    Bench(
        "loops",
        "loops",
        "Loops on two ranks",
        "k-means, Jacobi's method and conjugate gradients, beside scikit-learn, numba with mpi4py, "
        "and scipy. Below 1, einmpi is faster.",
        quick="--size small --repeat 1",
        ranks=2,
        plots=(Bars(("case", "peer"), "ratio", unit=RATIO_TO_PEER, in_order=True, is_ratio=True),),
    ),
    Bench(
        "hdf5",
        "hdf5",
        "Reading and writing one large file",
        "All ranks read or write one dataset in the page cache. More is better.",
        full="--size 512MiB",
        quick="--size 16MiB --repeats 2",
        ranks=2,
        plots=(Bars(("way",), "GB/s", per=("what", "blocks"), in_order=True),),
    ),
    Bench(
        "planning",
        "planning",
        "The time that planning takes",
        "For each graph and strategy, over the number of ranks that a plan is for. "
        + LESS_IS_BETTER,
        full="--ranks 8 64 1024 --repeat 1",
        quick="--ranks 8 --graphs chain chain-skewed attention --repeat 1",
        plots=(Lines(("graph",), "strategy", "ranks", "seconds"),),
    ),
    Bench(
        "step",
        "step",
        "The cost of small work",
        LESS_IS_BETTER,
        quick="--steps 500 --repeat 3 --calls 50",
        plots=(Bars(("what",), "microseconds", in_order=True),),
    ),
    Bench(
        "factorisations",
        "factorisations",
        "Factorisations of one matrix",
        "On two ranks, beside scipy with two threads. " + LESS_IS_BETTER,
        full="--size 4000",
        quick="--size 600 --repeat 2",
        ranks=2,
        plots=(Bars(("case",), "ratio", is_ratio=True),),
    ),
    Bench(
        "arrays",
        "arrays",
        "numpy's functions on distributed arrays",
        "Calls that move elements between two ranks. " + LESS_IS_BETTER,
        quick="--size 10000 --repeat 2",
        ranks=2,
        plots=(Bars(("call",), "milliseconds", in_order=True),),
    ),
    Bench(
        "spill",
        "spill",
        "The matrix chain with less memory",
        "The limit is a part of the memory that the chain needs; what does not fit goes to files. "
        + LESS_IS_BETTER,
        quick="--size 300 --repeat 2",
        plots=(Bars(("limit",), "seconds", in_order=True),),
    ),
    Bench(
        "tracing",
        "tracing",
        "The cost of recording a run",
        "How much longer the matrix chain takes if a timeline of it is recorded.",
        quick="--size 300 --repeat 3",
        ranks=2,
        plots=(Bars(("what",), "percent", unit="percent more time", in_order=True),),
    ),
    Bench(
        "decode",
        "decode",
        "A decoded token on CPUs",
        "One more token of a small LLaMA with caches, beside transformers. " + LESS_IS_BETTER,
        quick="--width 64 --layers 2 --heads 4 --hidden 128 --vocabulary 500 --length 32 --steps 8",
        plots=(Bars(("way",), "milliseconds", unit="milliseconds of a token, median"),),
    ),
    Bench(
        "report",
        "report",
        "The page of a plan",
        "How long it takes to write the page and to open it in a browser.",
        quick="--layers 2 --ranks 4 --repeat 1",
    ),
    Bench(
        "scaling",
        "scaling",
        "Scaling on simulated networks",
        "Seconds that SimGrid simulates for plans on many ranks. " + LESS_IS_BETTER,
        full="--ranks 8 64 512 --curves strong weak --networks fat-tree dragonfly",
        quick="--ranks 8 16 --works chain --strategies eindecomp sqrt",
        needs=("smpirun",),
        plots=(
            Lines(
                ("work", "curve", "network"),
                "strategy",
                "ranks",
                "seconds",
                unit="seconds, simulated",
            ),
        ),
    ),
    Bench(
        "hosts",
        "hosts",
        "Two hosts with a slow network",
        "The skewed chain on two hosts, made of network namespaces, 1 Gbit/s between them. "
        + LESS_IS_BETTER,
        quick="--size 200 --repeat 2 --ranks 1",
        needs=("hosts",),
        plots=(Bars(("strategy",), "seconds", per=("ranks",)),),
    ),
    Bench(
        "scikit_learn",
        "scikit_learn",
        "scikit-learn on arrays of several libraries",
        "The rows say which estimators and metrics have numpy's results.",
        quick="--libraries numpy einmpi --ranks 2 --cases PCA Ridge confusion_matrix",
        needs=("mpirun",),
    ),
    Bench("array_api", "array_api", "The array API standard", needs=("suite",)),
    Bench("gpu", "gpu", "Whole jobs on one GPU", needs=("gpu",)),
    Bench("gpu_kernels", "gpu_kernels", "Kernels on a GPU", needs=("gpu",)),
    Bench("gpu_llama", "gpu_llama", "LLaMA's prefill on one GPU", needs=("gpu",)),
    Bench("gpu_model", "gpu_model", "A whole model on one GPU", needs=("gpu",)),
    Bench("gpu_training", "gpu_training", "A training step on one GPU", needs=("gpu",)),
)
