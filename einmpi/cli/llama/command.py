"""The command `einmpi llama`: what it does follows from its flags."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import TYPE_CHECKING

from einmpi.cli.job_options import given_settings
from einmpi.errors import InputError
from einmpi.job.settings import SETTINGS

if TYPE_CHECKING:
    from einmpi.comm.base import Comm


def is_run_on_ranks(options: argparse.Namespace) -> bool:
    """Return whether -n P starts ranks: not if a command only plans for them."""
    if options.command != "llama":
        return True
    return not options.plan_only and options.job is None


def llama(options: argparse.Namespace, comm: Comm) -> int:
    """Generate text, compute logits, measure, plan, or write a job file."""
    from einmpi.comm.agreement import on_first_rank, together
    from einmpi.process.signals import clean_up_at_sigterm

    together(comm, lambda: check_flags(options))
    with ExitStack() as signals:
        if comm.size == 1:  # several ranks watch their signals from the start
            signals.enter_context(clean_up_at_sigterm())
        if options.plan_only:
            from einmpi.cli.llama.plans import show_plans

            on_first_rank(comm, lambda: show_plans(options))
        elif options.job is not None:
            from einmpi.cli.llama.job_file import write_job

            on_first_rank(comm, lambda: write_job(options))
        elif options.bench:
            from einmpi.cli.llama.bench import measure

            measure(options, comm)
        elif options.logits is not None or options.hidden is not None:
            from einmpi.cli.llama.arrays import write_arrays

            write_arrays(options, comm)
        else:
            from einmpi.cli.llama.text import write_text

            write_text(options, comm)
    return 0


def check_flags(options: argparse.Namespace) -> None:
    """Refuse values out of range, and flags that do not belong together."""
    from einmpi.models.sampling import Sampling, check_sampling

    _check_goal(options)
    for flag in ("batch", "sequence"):
        for number in getattr(options, flag):
            if number < 1:
                raise InputError(f"--{flag}", f"{number} requested", "a number from 1 on")
    if options.new < 1:
        raise InputError("--new", f"{options.new} tokens requested", "1 or more")
    if options.repeat < 1:
        raise InputError("--repeat", f"{options.repeat} runs requested", "1 or more")
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    check_sampling(sampling, as_flags=True)
    for name in options.compare or ():
        SETTINGS["strategy"].check("--compare", name)
    for name, value in given_settings(options).items():
        SETTINGS[name].check(SETTINGS[name].flag, value)


def _check_goal(options: argparse.Namespace) -> None:
    """Refuse flags that leave open what to do."""
    goals = []
    if options.prompt:
        goals.append("--prompt")
    if options.prompts is not None:
        goals.append("--prompts")
    for flag in ("plan_only", "bench"):
        if getattr(options, flag):
            goals.append("--" + flag.replace("_", "-"))
    if options.job is not None:
        goals.append("--job")
    expected = "one of --prompt, --prompts, --plan-only, --bench, --job"
    if not goals:
        raise InputError("einmpi llama", "nothing to do is given", expected)
    if len(goals) > 1 and goals != ["--prompts", "--job"]:
        raise InputError("einmpi llama", f"{' and '.join(goals)} are given", expected)
