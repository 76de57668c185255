"""The options of the command `einmpi llama`."""

from __future__ import annotations

from einmpi.cli.option_record import Option
from einmpi.files.converting import CONVERTIBLE_DTYPES
from einmpi.job.backends import backend_names
from einmpi.planner.strategies import STRATEGIES

NEW_TOKENS = 64
_COMMAND = ("llama",)
_RANKS_FLAGS = ("-n", "-np", "--ranks")

LLAMA_OPTIONS = (
    # ---- job -------------------------------------------------------------------------------------
    Option(
        ("model",),
        "job",
        _COMMAND,
        "the folder of a model; or 7B, 13B, 30B, 65B, to plan or with --random",
        metavar="DIR",
    ),
    Option(
        ("--prompt",),
        "job",
        _COMMAND,
        "the text to continue; several may be given",
        metavar="TEXT",
        is_list=True,
    ),
    Option(
        ("--prompts",),
        "job",
        _COMMAND,
        "tokens [batch, position] instead of text",
        metavar="FILE.h5:/PATH",
    ),
    Option(
        ("--lengths",),
        "job",
        _COMMAND,
        "how many tokens of each of the --prompts count",
        metavar="FILE.h5:/PATH",
    ),
    Option(
        ("--dtype",),
        "job",
        _COMMAND,
        "dtype to compute in; that of the files by default",
        suggestions=CONVERTIBLE_DTYPES,
    ),
    Option(
        ("--random",),
        "job",
        _COMMAND,
        "random weights instead of those of the files",
        is_switch=True,
    ),
    # ---- ranks -----------------------------------------------------------------------------------
    Option(
        _RANKS_FLAGS,
        "ranks",
        _COMMAND,
        "start this many ranks with mpirun; with --plan-only, plan for them",
        metavar="P",
        type=int,
    ),
    Option(
        ("--backend",),
        "ranks",
        _COMMAND,
        "numpy, or cupy for GPUs; numpy by default",
        default=backend_names()[0],
        suggestions=backend_names(),
    ),
    # ---- plan ------------------------------------------------------------------------------------
    Option(
        ("--strategy",),
        "plan",
        _COMMAND,
        "how to partition; the best plan is searched by default",
        suggestions=tuple(STRATEGIES),
    ),
    Option(("--memory",), "plan", _COMMAND, "limit of a rank, such as 16GiB", metavar="BYTES"),
    Option(
        ("--machine",),
        "plan",
        _COMMAND,
        "plan with the times that einmpi calibrate measured",
        metavar="FILE.toml",
    ),
    Option(
        ("--plan-only",),
        "plan",
        _COMMAND,
        "show how the model is partitioned: EXPLAIN; no MPI, no weights",
        is_switch=True,
    ),
    Option(
        ("--batch",),
        "plan",
        _COMMAND,
        "prompts to plan or to measure for; 1 by default",
        metavar="B",
        type=int,
        nargs="+",
        default=[1],
    ),
    Option(
        ("--sequence",),
        "plan",
        _COMMAND,
        "tokens in each of them; by default all positions, up to 1024",
        metavar="S",
        type=int,
        nargs="+",
        default=[],
    ),
    Option(
        ("--compare",),
        "plan",
        _COMMAND,
        "strategies side by side; all by default",
        metavar="NAME",
        nargs="*",
        suggestions=tuple(STRATEGIES),
    ),
    # ---- run -------------------------------------------------------------------------------------
    Option(
        ("--new",),
        "run",
        _COMMAND,
        f"the most tokens to generate; {NEW_TOKENS} by default",
        metavar="N",
        type=int,
        default=NEW_TOKENS,
    ),
    Option(
        ("--temperature",),
        "run",
        _COMMAND,
        "0, the default, takes the likeliest token; higher is more varied",
        metavar="T",
        type=float,
        default=0.0,
    ),
    Option(
        ("--top-k",),
        "run",
        _COMMAND,
        "choose among the K likeliest tokens; 0, the default, among all",
        metavar="K",
        type=int,
        default=0,
    ),
    Option(
        ("--top-p",),
        "run",
        _COMMAND,
        "among the likeliest that have probability P together; 1 by default",
        metavar="P",
        type=float,
        default=1.0,
    ),
    Option(
        ("--seed",),
        "run",
        _COMMAND,
        "another seed, another text; 0 by default",
        metavar="N",
        type=int,
        default=0,
    ),
    Option(
        ("--bench",),
        "run",
        _COMMAND,
        "measure prefills: seconds, words, operations",
        is_switch=True,
    ),
    Option(
        ("--repeat",),
        "run",
        _COMMAND,
        "measure N times, report the median; 3 by default",
        metavar="N",
        type=int,
        default=3,
    ),
    # ---- output ----------------------------------------------------------------------------------
    Option(
        ("--logits",),
        "output",
        _COMMAND,
        "write the logits after the --prompts instead of generating",
        metavar="FILE.h5:/PATH",
    ),
    Option(
        ("--every-position",),
        "output",
        _COMMAND,
        "logits at every position, not only at the last",
        is_switch=True,
    ),
    Option(
        ("--hidden",),
        "output",
        _COMMAND,
        "write hidden states, one dataset for each of the --layers",
        metavar="FILE.h5:/PATH",
    ),
    Option(
        ("--layers",),
        "output",
        _COMMAND,
        "layers of --hidden, from 0, the embedding; the last by default",
        metavar="N",
        type=int,
        nargs="+",
        default=[],
    ),
    Option(
        ("--job",),
        "output",
        _COMMAND,
        "write the job file of a prefill, to read and to change",
        metavar="FILE.toml",
    ),
    Option(
        ("--json",),
        "output",
        _COMMAND,
        "write the results as JSON; - is standard output",
        metavar="FILE",
    ),
    Option(
        ("--report",),
        "output",
        _COMMAND,
        "write a report page of the plan for any browser",
        metavar="FILE.html",
    ),
    Option(("--quiet",), "output", _COMMAND, "print errors only", is_switch=True),
)
