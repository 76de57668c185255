"""The options of the command line, one record each, for the parser, --help and completion."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from einmpi.errors import InputError
from einmpi.files.datasets import CONVERTIBLE_DTYPES
from einmpi.graph.dtypes import DTYPES
from einmpi.job.settings import SETTINGS, SWITCH
from einmpi.planner.strategies import STRATEGIES

# The groups of options in --help, in this order.
GROUPS = ("job", "ranks", "plan", "run", "output")


class Command(NamedTuple):
    """Where the function of a command is, and what it does."""

    function: str  # in einmpi.cli; only the one that is asked for is imported
    summary: str


# The commands, in the order in which --help lists them.
_COMMANDS = """
run         run:run              run a job (the default)
check       job_options:check    parse a job, infer shapes, inspect its files
plan        plan:plan            show how a job is partitioned over ranks: EXPLAIN
verify      run:verify           run a job and compare with the reference; writes no outputs
sbatch      sbatch:sbatch        write a script for Slurm or another scheduler, from the plan
simulate    plan:simulate        replay a plan on a simulated network, of any size
new         new:new              write a job file: from your answers, or for the tensors of a file
llama       llama:llama          run or plan a language model: from a folder to text
examples    new:examples         copy the example jobs into a folder
doctor      doctor:doctor        show what is installed here, and whether a run would work
calibrate   calibrate:calibrate  measure this machine, for plans in seconds
completion  help:completion      print a script for completion in a shell
help        help:show_help       show the help of a command
"""
COMMANDS = {
    name: Command(function, summary)
    for name, function, summary in (row.split(maxsplit=2) for row in _COMMANDS[1:-1].split("\n"))
}
SHELLS = ("bash", "zsh", "fish")
FORMATS = ("slurm", "pbs", "lsf", "flux", "mpijob")  # the schedulers of `sbatch`
CHECKPOINT_INTERVAL = "10min"
MACHINE_FILE = "machine.toml"
EXAMPLES_FOLDER = "jobs"
RANKS_FLAGS = "-n -np --ranks"
PING_SECONDS = 30.0
CALIBRATION_SECONDS = 5.0
NEW_TOKENS = 64
_PROMPTS = "prompt prompts prompt_file chat"  # options of `llama` that tokens are generated for

_RUNNING = "run verify sbatch"
_WITH_PLAN = f"{_RUNNING} plan simulate"
_WITH_JOB = f"{_WITH_PLAN} check"
# The commands that have a setting as a flag, by the group of the flag.
_WITH_SETTINGS = {"job": _WITH_JOB, "plan": _WITH_PLAN, "run": _RUNNING, "ranks": _RUNNING}


@dataclass(frozen=True)
class Option:
    """A flag or a positional argument of some commands."""

    flags: str  # such as "-n --ranks"; a positional argument has a name without "-"
    help: str
    metavar: str | None = None
    type: Callable[[str], Any] = str
    default: Any = None
    group: str = ""
    commands: tuple[str, ...] = ()
    is_required: bool = False
    is_list: bool = False  # may be given several times
    nargs: str = ""  # values, if not one: "?" one or none, "+" at least one, "*" any number
    value_if_bare: str | None = None  # the value is optional, and this one if left out
    needs: str = ""  # names of options one of which must be there, or this one does nothing
    without: str = ""  # names of options beside which this one, or they, would do nothing
    choices: tuple[str, ...] = ()  # all possible values, checked by the parser
    suggestions: tuple[str, ...] = ()  # values to complete, checked later

    @property
    def names(self) -> list[str]:
        """The flags, or the name of a positional argument."""
        return self.flags.split()

    @property
    def name(self) -> str:
        """The name of its value among the parsed options."""
        return self.names[-1].lstrip("-").replace("-", "_")

    @property
    def is_switch(self) -> bool:
        """Whether no value follows: it is a flag whose value has no name, and nothing to choose."""
        has_value = self.metavar or self.choices or self.suggestions
        return not self.is_positional and not has_value

    @property
    def value_if_missing(self) -> Any:
        if self.is_switch:
            return False
        return [] if self.is_list else self.default

    @property
    def words(self) -> str:
        """What to type for it: "--trace FILE.json"."""
        return f"{self.names[0]} {self.metavar or ''}".strip()

    @property
    def is_positional(self) -> bool:
        return not self.flags.startswith("-")


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
        option = known[name]
        needs = option.needs.split()
        if needs and not set(needs).intersection(given):
            words = [known[other].words for other in needs]
            expected = f"{' or '.join(words)} with it"
            raise InputError(option.names[0], "alone it does nothing", expected)
        for other in option.without.split():
            if other in given:
                problem = f"it cannot be combined with {known[other].names[0]}"
                raise InputError(option.names[0], problem, "only one of them")


def _of(group: str, commands: str, *options: Option) -> list[Option]:
    """Return options of a group, for these commands."""
    names = tuple(commands.split())
    return [replace(option, group=group, commands=names) for option in options]


def _setting(name: str, help: str = "", **more: Any) -> Option:
    """Return the flag of a setting, with the help of the setting or another one."""
    setting = SETTINGS[name]
    metavar = setting.kind.metavar or (setting.noun or name).upper()
    return Option(
        setting.flag,
        help or setting.help,
        None if setting.kind is SWITCH else metavar,
        group=setting.group,
        commands=tuple(_WITH_SETTINGS[setting.group].split()),
        suggestions=tuple(setting.choices()),
        **more,
    )


def _settings() -> list[Option]:
    """Return the flags of all settings that have one."""
    return [_setting(name) for name, setting in SETTINGS.items() if setting.help]


_QUIET = Option("--quiet", "print errors only")
_JSON = Option("--json", "write the results as JSON; - is standard output", "FILE")

OPTIONS = (
    # ---- job -------------------------------------------------------------------------------------
    *_of(
        "job",
        _WITH_JOB,
        Option("job", "the job file", "JOB.toml"),
        Option(
            "--set", "replace a size, a parameter or a file of the job", "NAME=VALUE", is_list=True
        ),
    ),
    *_of(
        "job",
        "run check plan verify sbatch",  # one step is simulated
        Option("--steps", "replace the most steps of the job's loops", "N", int),
    ),
    *_of(
        "job",
        _WITH_JOB,
        Option("--dtype", "dtype of generated inputs", suggestions=tuple(DTYPES)),
    ),
    *_of(
        "job",
        "new",
        Option("job", "the job file to write", "JOB.toml"),
        Option("--from", "the file whose tensors become inputs; without it, you are asked", "FILE"),
    ),
    # ---- ranks -----------------------------------------------------------------------------------
    *_of(
        "ranks",
        "run verify calibrate",
        Option(RANKS_FLAGS, "start this many ranks with mpirun", "P", int),
    ),
    *_of(
        "ranks",
        "plan simulate",
        Option(RANKS_FLAGS, "number of ranks", "P", int, is_required=True),
    ),
    *_of(
        "ranks",
        "simulate",
        Option(
            "--cluster",
            "nodes, cores, bw, lat, inside_bw, inside_lat, speed, topology",
            "KEY=VALUE,…",
        ),
        Option(
            "--platform",
            "a platform file of SimGrid, instead of --cluster",
            "FILE.xml",
            without="cluster",
        ),
    ),
    *_of(
        "ranks",
        "plan",
        Option("--nodes", "spread the ranks evenly over N nodes", "N", int, 1),
    ),
    *_of(
        "ranks",
        "sbatch",
        Option("--nodes", "number of nodes", "N", int, is_required=True),
        Option("--ntasks-per-node", "ranks on each node", "M", int, is_required=True),
        Option("--cpus-per-task", "threads per rank; 1 by default", "C", int, 1),
        Option("--gpus", "GPUs in all, such as 8 or a100:8; by default one for each rank", "G"),
        Option("--partition", "partition of Slurm, or queue", "NAME"),
        Option("--account", "account, or project or bank", "NAME"),
        Option("--qos", "quality of service of Slurm", "NAME"),
        Option("--constraint", "features that the nodes need, such as gpu&ib", "FEATURES"),
        Option(
            "--time", "time limit: 90min, 2:30:00, 1-00:00:00; by default from the plan", "LIMIT"
        ),
    ),
    *_of(
        "ranks",
        "calibrate",
        _setting("backend", "what to measure: numpy, or cupy for GPUs; numpy by default"),
        Option(
            "--seconds",
            f"about how long to measure; {CALIBRATION_SECONDS:g} by default",
            "S",
            float,
            CALIBRATION_SECONDS,
        ),
    ),
    *_of(
        "ranks",
        "doctor",
        Option(
            "--timeout",
            f"time for two ranks to answer; {PING_SECONDS:g} by default",
            "SECONDS",
            float,
            PING_SECONDS,
        ),
    ),
    # ---- job, ranks, plan and run ----------------------------------------------------------------
    *_settings(),
    # ---- plan ------------------------------------------------------------------------------------
    *_of(
        "plan",
        "plan",
        Option("--compare", "all strategies side by side", without="strategy"),
        Option(
            "--memory-curve",
            "words and bytes under rising memory limits; FILE.svg or .png draws them",
            "FILE",
            value_if_bare="",
            without="memory compare report show_relations full plot",
        ),
        Option(
            "--full",
            "every vertex of repeated layers, instead of those that differ",
            without="compare show_relations",
        ),
        Option(
            "--show-relations",
            "join keys, aggregation groups and repartitions of a vertex",
            "VERTEX",
            without="compare",
        ),
    ),
    *_of(
        "plan",
        "simulate",
        Option(
            "--compare",
            "simulate these strategies, or all of them",
            "STRATEGY",
            nargs="*",
            without="strategy trace report",
            suggestions=tuple(STRATEGIES),
        ),
    ),
    # ---- run -------------------------------------------------------------------------------------
    *_of(
        "run",
        "run",
        Option("--repeat", "run N times, report the median", "N", int, 1, without="checkpoint"),
    ),
    *_of(
        "run",
        "run sbatch",
        Option("--checkpoint", "save finished tensors in this folder during the run", "DIR"),
        Option(
            "--every",
            f"how often: 30s, 1h, 0 for each vertex; {CHECKPOINT_INTERVAL} by default",
            "TIME",
            needs="checkpoint",
        ),
    ),
    *_of(
        "run",
        "run",
        Option(
            "--resume",
            "continue from the checkpoint, if there is one",
            needs="checkpoint",
        ),
    ),
    # ---- output ----------------------------------------------------------------------------------
    *_of("output", "completion", Option("shell", "which shell", choices=SHELLS)),
    *_of(
        "output",
        "examples",
        Option(
            "folder",
            f"the folder to copy to; {EXAMPLES_FOLDER} by default",
            "DIR",
            default=EXAMPLES_FOLDER,
            nargs="?",
        ),
    ),
    *_of(
        "output",
        "help",
        Option(
            "topic",
            "the command; without one, all are listed",
            "COMMAND",
            nargs="?",
            suggestions=tuple(COMMANDS),
        ),
    ),
    *_of(
        "output",
        "sbatch",
        Option("--format", "the scheduler; slurm by default", None, str, "slurm", choices=FORMATS),
        Option("--image", "image of the containers of an mpijob", "NAME"),
        Option("--out", "write the script to this file; - or nothing prints it", "FILE"),
        replace(_QUIET, needs="out"),
    ),
    *_of(
        "output",
        "calibrate",
        Option(
            "--save",
            f"write a machine file; {MACHINE_FILE} by default",
            "FILE",
            value_if_bare=MACHINE_FILE,
        ),
    ),
    *_of("output", "run plan verify simulate doctor calibrate", _JSON),
    *_of(
        "output",
        "run",
        Option("--metrics", "write the figures as OpenMetrics, for Prometheus", "FILE.prom"),
    ),
    *_of(
        "output",
        "run plan simulate",
        Option("--report", "write a report page for any browser", "FILE.html"),
    ),
    *_of(
        "output",
        "plan",
        Option("--plot", "draw the graph and its partitioning; or FILE.png", "FILE.svg"),
    ),
    *_of(
        "output",
        "run simulate",
        Option("--trace", "write what every rank did when, for Perfetto", "FILE.json"),
    ),
    *_of(
        "output",
        "simulate",
        Option("--traces", "keep the files that SimGrid replays in a new folder", "DIR"),
    ),
    *_of(
        "output",
        "run",
        Option(
            "--trace-steps",
            "steps of a loop to trace, from 0; the first and the last 3 by default",
            "FIRST:END",
            needs="trace",
        ),
        Option("--summary", "print where the time went, also to a pipe"),
    ),
    *_of("output", "run check plan verify simulate new examples", _QUIET),
    # ---- llama -----------------------------------------------------------------------------------
    *_of(
        "job",
        "llama",
        Option(
            "model", "the folder of a model; or 7B, 13B, 30B, 65B, to plan or with --random", "DIR"
        ),
        Option("--prompt", "the text to continue; several may be given", "TEXT", is_list=True),
        Option(
            "--prompt-file",
            "prompts of a file: a text, or .jsonl with a prompt or messages on each line",
            "FILE",
        ),
        Option("--chat", "each prompt is a question; without one, those you type"),
        Option(
            "--system", "what the model is told before the first question", "TEXT", needs="chat"
        ),
        Option("--prompts", "tokens [batch, position] instead of text", "FILE.h5:/PATH"),
        Option(
            "--lengths",
            "how many tokens of each of the --prompts count",
            "FILE.h5:/PATH",
            needs="prompts",
            without="job",
        ),
        Option(
            "--dtype",
            "dtype to compute in; that of the files by default",
            suggestions=CONVERTIBLE_DTYPES,
        ),
        Option(
            "--weights",
            "quantise the matrices of linear layers while they are read",
            choices=("int8", "int4"),
        ),
        Option(
            "--random",
            "random weights instead of those of the files",
            without="plan_only",
        ),
    ),
    *_of(
        "ranks",
        "llama",
        Option(
            RANKS_FLAGS,
            "start this many ranks with mpirun; with --plan-only, plan for them",
            "P",
            int,
            without="job",
        ),
        _setting(
            "backend",
            "numpy, or cupy for GPUs; numpy by default",
            default=SETTINGS["backend"].default,
        ),
    ),
    *_of(
        "plan",
        "llama",
        _setting("strategy", "how to partition; the best plan is searched by default"),
        _setting("memory", "limit of a rank, such as 16GiB"),
        _setting("machine", needs="plan_only"),
        Option(
            "--plan-only",
            "show how the model is partitioned: EXPLAIN; no MPI, no weights",
            needs="ranks",
        ),
        Option(
            "--batch",
            "prompts to plan or to measure for; 1 by default",
            "B",
            int,
            [1],
            nargs="+",
            needs="plan_only bench job",
            without="prompts",
        ),
        Option(
            "--sequence",
            "tokens in each of them; by default all positions, up to 1024",
            "S",
            int,
            [],
            nargs="+",
            needs="plan_only bench job",
            without="prompts",
        ),
        Option(
            "--compare",
            "strategies side by side; all by default",
            "NAME",
            nargs="*",
            suggestions=tuple(STRATEGIES),
            needs="plan_only bench",
        ),
    ),
    *_of(
        "run",
        "llama",
        Option(
            "--new",
            f"the most tokens to generate; {NEW_TOKENS} by default",
            "N",
            int,
            NEW_TOKENS,
            needs=_PROMPTS,
            without="logits hidden job",
        ),
        Option(
            "--temperature",
            "0 takes the likeliest token; higher is more varied; as the model says, or 0",
            "T",
            float,
            needs=_PROMPTS,
            without="logits hidden job",
        ),
        Option("--top-k", "choose among the K likeliest tokens; 0: among all", "K", int),
        Option("--top-p", "among the likeliest that have probability P together", "P", float),
        Option("--min-p", "among those at least P times as likely as the likeliest", "P", float),
        Option("--seed", "another seed, another text; 0 by default", "N", int),
        Option(
            "--repetition-penalty",
            "above 1, tokens that are in the text become less likely",
            "R",
            float,
            needs=_PROMPTS,
            without="logits hidden job",
        ),
        Option(
            "--stop-text",
            "end before this text; several may be given",
            "TEXT",
            is_list=True,
            needs="prompt prompt_file chat",
        ),
        Option("--bench", "measure prefills: seconds, words, operations"),
        Option(
            "--repeat",
            "measure N times, report the median; 3 by default",
            "N",
            int,
            3,
            needs="bench",
        ),
    ),
    *_of(
        "output",
        "llama",
        Option(
            "--logits",
            "write the logits after the --prompts instead of generating",
            "FILE.h5:/PATH",
            needs="prompts",
            without="job",
        ),
        Option(
            "--every-position",
            "logits at every position, not only at the last",
            needs="logits",
        ),
        Option(
            "--hidden",
            "write hidden states, one dataset for each of the --layers",
            "FILE.h5:/PATH",
            needs="prompts",
            without="job",
        ),
        Option(
            "--layers",
            "layers of --hidden, from 0, the embedding; the last by default",
            "N",
            int,
            [],
            nargs="+",
            needs="hidden",
        ),
        Option(
            "--before-norm",
            "the last of the --layers before the last norm, not after it",
            needs="hidden",
        ),
        Option("--job", "write the job file of a prefill, to read and to change", "FILE.toml"),
        replace(_JSON, without="job"),
        Option(
            "--report",
            "write a report page of the plan for any browser",
            "FILE.html",
            needs="plan_only",
        ),
        _QUIET,
    ),
)
