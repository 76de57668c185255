"""The options of the command line, one record each, for the parser and for completion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from einmpi.graph.dtypes import cpu_dtypes
from einmpi.job.backends import backend_names
from einmpi.planner.strategies import STRATEGIES

SHELLS = ("bash", "zsh", "fish")
CHECKPOINT_INTERVAL = "10min"
MACHINE_FILE = "machine.toml"
PING_SECONDS = 30.0
CALIBRATION_SECONDS = 5.0

# The groups of options in --help, in this order.
GROUPS = ("job", "ranks", "plan", "run", "output")
_WITH_JOB = ("run", "check", "plan", "verify", "sbatch")
_WITH_PLAN = ("run", "plan", "verify", "sbatch")


@dataclass(frozen=True)
class Option:
    """A flag or a positional argument of some commands."""

    names: tuple[str, ...]  # such as ("-n", "--ranks"); a positional argument has one without "-"
    group: str
    commands: tuple[str, ...]
    help: str
    metavar: str | None = None
    type: Callable[[str], Any] = str
    default: Any = None
    is_required: bool = False
    is_switch: bool = False  # no value follows
    is_list: bool = False  # may be given several times
    value_if_bare: str | None = None  # the value is optional, and this one if left out
    excludes: str = ""  # options with the same word here exclude each other
    choices: tuple[str, ...] = ()  # all possible values, checked by the parser
    suggestions: tuple[str, ...] = ()  # values to complete, checked later

    @property
    def is_positional(self) -> bool:
        return not self.names[0].startswith("-")


def options_of(command: str) -> list[Option]:
    """Return the options of a command, group by group."""
    found = [option for option in OPTIONS if command in option.commands]
    return sorted(found, key=lambda option: GROUPS.index(option.group))


OPTIONS = (
    # ---- job -------------------------------------------------------------------------------------
    Option(("job",), "job", _WITH_JOB, "the job file", metavar="JOB.toml"),
    Option(
        ("--set",),
        "job",
        _WITH_JOB,
        "replace a size of the job",
        metavar="SIZE=N",
        is_list=True,
    ),
    Option(
        ("--dtype",), "job", _WITH_JOB, "dtype of generated inputs", suggestions=tuple(cpu_dtypes())
    ),
    # ---- ranks -----------------------------------------------------------------------------------
    Option(
        ("-n", "--ranks"),
        "ranks",
        ("run", "verify", "calibrate"),
        "start this many ranks with mpirun",
        metavar="P",
        type=int,
    ),
    Option(
        ("-n", "--ranks"),
        "ranks",
        ("plan",),
        "number of ranks",
        metavar="P",
        type=int,
        is_required=True,
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
        ("--backend",),
        "ranks",
        ("run", "verify", "sbatch"),
        "numpy, or cupy for GPUs; the job's own by default",
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
    Option(("--memory",), "plan", _WITH_PLAN, "limit of a rank, such as 4GiB", metavar="BYTES"),
    Option(
        ("--machine",),
        "plan",
        _WITH_PLAN,
        "plan with the times that einmpi calibrate measured",
        metavar="FILE.toml",
    ),
    Option(
        ("--show-relations",),
        "plan",
        ("plan",),
        "join keys, aggregation groups and repartitions of a vertex",
        metavar="VERTEX",
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
    ),
    Option(
        ("--strict",),
        "job",
        _WITH_JOB,
        "only rewrites that are exact for inf and nan too",
        is_switch=True,
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
    ),
    Option(
        ("--resume",),
        "run",
        ("run",),
        "continue from the checkpoint, if there is one",
        is_switch=True,
    ),
    # ---- output ----------------------------------------------------------------------------------
    Option(("shell",), "output", ("completion",), "which shell", choices=SHELLS),
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
        ("run", "plan", "verify", "doctor", "calibrate"),
        "write the results as JSON; - is standard output",
        metavar="FILE",
    ),
    Option(
        ("--report",),
        "output",
        ("run", "plan"),
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
        ("run",),
        "write what every rank did when, for Perfetto",
        metavar="FILE.json",
    ),
    Option(
        ("--summary",),
        "output",
        ("run",),
        "print where the time went, also to a pipe",
        is_switch=True,
    ),
    Option(("--quiet",), "output", _WITH_JOB, "print errors only", is_switch=True),
)
