"""The options of the command line, one record each, for the parser and for completion."""

from __future__ import annotations

import argparse

from einmpi.cli.llama.options import LLAMA_OPTIONS
from einmpi.cli.option_record import GROUPS, Option
from einmpi.errors import InputError
from einmpi.graph.dtypes import DTYPES
from einmpi.job.backends import backend_names
from einmpi.job.job import SHARED_MODES
from einmpi.language.half_steps import HALF_MODES
from einmpi.planner.moving.overlap import MODES
from einmpi.planner.strategies import STRATEGIES

# The commands, in the order in which --help lists them, and what each does.
SUMMARIES = {
    "run": "run a job (the default)",
    "check": "parse a job, infer shapes, inspect its files",
    "plan": "show how a job is partitioned over ranks: EXPLAIN",
    "verify": "run a job and compare with the reference; writes no outputs",
    "sbatch": "write a Slurm script with memory and time from the plan",
    "simulate": "replay a plan on a simulated network, of any size",
    "new": "write a job file: from your answers, or for the tensors of a file",
    "llama": "run or plan a language model: from a folder to text",
    "examples": "copy the example jobs into a folder",
    "doctor": "show what is installed here, and whether a run would work",
    "calibrate": "measure this machine, for plans in seconds",
    "completion": "print a script for completion in a shell",
    "help": "show the help of a command",
}
COMMAND_NAMES = tuple(SUMMARIES)
SHELLS = ("bash", "zsh", "fish")
CHECKPOINT_INTERVAL = "10min"
MACHINE_FILE = "machine.toml"
EXAMPLES_FOLDER = "jobs"
RANKS_FLAGS = ("-n", "-np", "--ranks")
PING_SECONDS = 30.0
CALIBRATION_SECONDS = 5.0

_WITH_JOB = ("run", "check", "plan", "verify", "sbatch", "simulate")
_WITH_PLAN = ("run", "plan", "verify", "sbatch", "simulate")


def options_of(command: str) -> list[Option]:
    """Return the options of a command, group by group."""
    found = [option for option in OPTIONS if command in option.commands]
    return sorted(found, key=lambda option: GROUPS.index(option.group))


def check_together(options: argparse.Namespace) -> None:
    """Refuse an option that would do nothing because of those that are there or missing."""
    known = {option.name: option for option in options_of(options.command)}
    given = []
    for name, option in known.items():
        if getattr(options, name) != option.value_if_missing:
            given.append(name)
    for name in given:
        flag = known[name].names[0]
        needs = known[name].needs
        if needs and not set(needs).intersection(given):
            words = [known[other].words for other in needs]
            raise InputError(flag, "alone it does nothing", f"{' or '.join(words)} with it")
        for other in known[name].without:
            if other in given:
                problem = f"it cannot be combined with {known[other].names[0]}"
                raise InputError(flag, problem, "only one of them")


OPTIONS = (
    # ---- job -------------------------------------------------------------------------------------
    Option(("job",), "job", _WITH_JOB, "the job file", metavar="JOB.toml"),
    Option(("job",), "job", ("new",), "the job file to write", metavar="JOB.toml"),
    Option(
        ("--from",),
        "job",
        ("new",),
        "the file whose tensors become inputs; without it, you are asked",
        metavar="FILE",
    ),
    Option(
        ("--set",),
        "job",
        _WITH_JOB,
        "replace a size or a parameter of the job",
        metavar="NAME=N",
        is_list=True,
    ),
    Option(
        ("--steps",),
        "job",
        ("run", "check", "plan", "verify", "sbatch"),  # one step is simulated
        "replace the most steps of the job's loops",
        metavar="N",
        type=int,
    ),
    Option(("--dtype",), "job", _WITH_JOB, "dtype of generated inputs", suggestions=tuple(DTYPES)),
    # ---- ranks -----------------------------------------------------------------------------------
    Option(
        RANKS_FLAGS,
        "ranks",
        ("run", "verify", "calibrate"),
        "start this many ranks with mpirun",
        metavar="P",
        type=int,
    ),
    Option(
        RANKS_FLAGS,
        "ranks",
        ("plan", "simulate"),
        "number of ranks",
        metavar="P",
        type=int,
        is_required=True,
    ),
    Option(
        ("--cluster",),
        "ranks",
        ("simulate",),
        "nodes, cores, bw, lat, inside_bw, inside_lat, speed, topology",
        metavar="KEY=VALUE,…",
        excludes="place",
    ),
    Option(
        ("--platform",),
        "ranks",
        ("simulate",),
        "a platform file of SimGrid, instead of --cluster",
        metavar="FILE.xml",
        excludes="place",
    ),
    Option(
        ("--nodes",),
        "ranks",
        ("plan",),
        "spread the ranks evenly over N nodes",
        metavar="N",
        type=int,
        default=1,
    ),
    Option(
        ("--nodes",),
        "ranks",
        ("sbatch",),
        "number of nodes",
        metavar="N",
        type=int,
        is_required=True,
    ),
    Option(
        ("--ntasks-per-node",),
        "ranks",
        ("sbatch",),
        "ranks on each node",
        metavar="M",
        type=int,
        is_required=True,
    ),
    Option(
        ("--cpus-per-task",),
        "ranks",
        ("sbatch",),
        "threads per rank; 1 by default",
        metavar="C",
        type=int,
        default=1,
    ),
    Option(
        ("--gpus",),
        "ranks",
        ("sbatch",),
        "GPUs in all, such as 8 or a100:8; by default one for each rank",
        metavar="G",
    ),
    Option(("--partition",), "ranks", ("sbatch",), "partition of Slurm", metavar="NAME"),
    Option(("--account",), "ranks", ("sbatch",), "account of Slurm", metavar="NAME"),
    Option(("--qos",), "ranks", ("sbatch",), "quality of service of Slurm", metavar="NAME"),
    Option(
        ("--constraint",),
        "ranks",
        ("sbatch",),
        "features that the nodes need, such as gpu&ib",
        metavar="FEATURES",
    ),
    Option(
        ("--backend",),
        "ranks",
        ("run", "verify", "sbatch"),
        "numpy, or cupy for GPUs; the job's own by default",
        suggestions=backend_names(),
    ),
    Option(
        ("--backend",),
        "ranks",
        ("calibrate",),
        "what to measure: numpy, or cupy for GPUs; numpy by default",
        suggestions=backend_names(),
    ),
    Option(
        ("--timeout",),
        "ranks",
        ("doctor",),
        f"time for two ranks to answer; {PING_SECONDS:g} by default",
        metavar="SECONDS",
        type=float,
        default=PING_SECONDS,
    ),
    Option(
        ("--time",),
        "ranks",
        ("sbatch",),
        "time limit: 90min, 2:30:00, 1-00:00:00; by default from the plan",
        metavar="LIMIT",
    ),
    Option(
        ("--seconds",),
        "ranks",
        ("calibrate",),
        f"about how long to measure; {CALIBRATION_SECONDS:g} by default",
        metavar="S",
        type=float,
        default=CALIBRATION_SECONDS,
    ),
    # ---- plan ------------------------------------------------------------------------------------
    Option(
        ("--strategy",),
        "plan",
        _WITH_PLAN,
        "how to partition; the job's own by default",
        excludes="strategy",
        suggestions=tuple(STRATEGIES),
    ),
    Option(
        ("--compare",),
        "plan",
        ("plan",),
        "all strategies side by side",
        is_switch=True,
        excludes="strategy",
    ),
    Option(
        ("--compare",),
        "plan",
        ("simulate",),
        "simulate these strategies, or all of them",
        metavar="STRATEGY",
        nargs="*",
        excludes="strategy",
        without=("trace", "report"),
        suggestions=tuple(STRATEGIES),
    ),
    Option(("--memory",), "plan", _WITH_PLAN, "limit of a rank, such as 4GiB", metavar="BYTES"),
    Option(
        ("--machine",),
        "plan",
        _WITH_PLAN,
        "plan with the times that einmpi calibrate measured",
        metavar="FILE.toml",
    ),
    Option(
        ("--memory-curve",),
        "plan",
        ("plan",),
        "words and bytes under rising memory limits; FILE.svg or .png draws them",
        metavar="FILE",
        value_if_bare="",
        without=("memory", "compare", "report", "show_relations", "full", "plot"),
    ),
    Option(
        ("--full",),
        "plan",
        ("plan",),
        "every vertex of repeated layers, instead of those that differ",
        is_switch=True,
        without=("compare", "show_relations"),
    ),
    Option(
        ("--show-relations",),
        "plan",
        ("plan",),
        "join keys, aggregation groups and repartitions of a vertex",
        metavar="VERTEX",
        without=("compare",),
    ),
    # ---- run -------------------------------------------------------------------------------------
    Option(
        ("--repeat",),
        "run",
        ("run",),
        "run N times, report the median",
        metavar="N",
        type=int,
        default=1,
        without=("checkpoint",),
    ),
    Option(
        ("--strict",),
        "job",
        _WITH_JOB,
        "only rewrites that are exact for inf and nan too",
        is_switch=True,
    ),
    Option(
        ("--half",),
        "job",
        _WITH_JOB,
        "how half precision is computed: float32 or steps",
        metavar="MODE",
        suggestions=HALF_MODES,
    ),
    Option(
        ("--overlap",),
        "job",
        _WITH_JOB,
        "compute while tensors move between nodes: auto or off",
        metavar="MODE",
        suggestions=MODES,
    ),
    Option(
        ("--shared",),
        "run",
        ("run", "verify", "sbatch"),
        "memory that the ranks of a node share: auto or off",
        metavar="MODE",
        suggestions=SHARED_MODES,
    ),
    Option(
        ("--fast-math",),
        "run",
        ("run", "verify", "sbatch"),
        "faster arithmetic with larger rounding errors",
        is_switch=True,
    ),
    Option(
        ("--checkpoint",),
        "run",
        ("run", "sbatch"),
        "save finished tensors in this folder during the run",
        metavar="DIR",
    ),
    Option(
        ("--every",),
        "run",
        ("run", "sbatch"),
        f"how often: 30s, 1h, 0 for each vertex; {CHECKPOINT_INTERVAL} by default",
        metavar="TIME",
        needs=("checkpoint",),
    ),
    Option(
        ("--resume",),
        "run",
        ("run",),
        "continue from the checkpoint, if there is one",
        is_switch=True,
        needs=("checkpoint",),
    ),
    # ---- output ----------------------------------------------------------------------------------
    Option(("shell",), "output", ("completion",), "which shell", choices=SHELLS),
    Option(
        ("folder",),
        "output",
        ("examples",),
        f"the folder to copy to; {EXAMPLES_FOLDER} by default",
        metavar="DIR",
        default=EXAMPLES_FOLDER,
        is_optional=True,
    ),
    Option(
        ("topic",),
        "output",
        ("help",),
        "the command; without one, all are listed",
        metavar="COMMAND",
        is_optional=True,
        suggestions=COMMAND_NAMES,
    ),
    Option(
        ("--out",),
        "output",
        ("sbatch",),
        "write the script to this file; - or nothing prints it",
        metavar="FILE",
    ),
    Option(
        ("--save",),
        "output",
        ("calibrate",),
        f"write a machine file; {MACHINE_FILE} by default",
        metavar="FILE",
        value_if_bare=MACHINE_FILE,
    ),
    Option(
        ("--json",),
        "output",
        ("run", "plan", "verify", "simulate", "doctor", "calibrate"),
        "write the results as JSON; - is standard output",
        metavar="FILE",
    ),
    Option(
        ("--report",),
        "output",
        ("run", "plan", "simulate"),
        "write a report page for any browser",
        metavar="FILE.html",
    ),
    Option(
        ("--plot",),
        "output",
        ("plan",),
        "draw the graph and its partitioning; or FILE.png",
        metavar="FILE.svg",
    ),
    Option(
        ("--trace",),
        "output",
        ("run", "simulate"),
        "write what every rank did when, for Perfetto",
        metavar="FILE.json",
    ),
    Option(
        ("--traces",),
        "output",
        ("simulate",),
        "keep the files that SimGrid replays in a new folder",
        metavar="DIR",
    ),
    Option(
        ("--trace-steps",),
        "output",
        ("run",),
        "steps of a loop to trace, from 0; the first and the last 3 by default",
        metavar="FIRST:END",
        needs=("trace",),
    ),
    Option(
        ("--summary",),
        "output",
        ("run",),
        "print where the time went, also to a pipe",
        is_switch=True,
    ),
    Option(
        ("--quiet",),
        "output",
        ("run", "check", "plan", "verify", "simulate", "new", "examples"),
        "print errors only",
        is_switch=True,
    ),
    Option(
        ("--quiet",),
        "output",
        ("sbatch",),
        "print errors only",
        is_switch=True,
        needs=("out",),
    ),
    *LLAMA_OPTIONS,
)
