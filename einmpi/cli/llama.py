"""The command `einmpi llama`: text, plans and measurements of a model, as its flags ask for."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from einmpi.cli.job_options import (
    check_files,
    given_settings,
    print_or_write,
    report_details,
    write_job_report,
)
from einmpi.cli.llama_files import (
    load_model,
    prompt_shapes,
    read_prompts,
    write_arrays,
    write_job,
)
from einmpi.comm.agreement import on_first_rank, together
from einmpi.comm.base import ALONE, Comm
from einmpi.errors import InputError
from einmpi.job.settings import SETTINGS
from einmpi.models.llama import Model
from einmpi.models.sampling import (
    Sampling,
    TextStream,
    TextTokenizer,
    Tokens,
    check_sampling,
    open_tokenizer,
)
from einmpi.planner.plan import Plan
from einmpi.planner.strategies import DEFAULT_STRATEGY, STRATEGIES
from einmpi.planner.text.compare import Comparison, compare
from einmpi.planner.text.explain import as_json
from einmpi.planner.text.summary import table_lines
from einmpi.process.signals import clean_up_at_sigterm
from einmpi.report.terminal import comparison_text, plan_text
from einmpi.units import show_bytes, show_count, show_seconds


def llama(options: argparse.Namespace, comm: Comm) -> int:
    """Generate text, compute logits, measure, plan, or write a job file."""
    together(comm, lambda: check_flags(options))
    with ExitStack() as signals:
        if comm.size == 1:  # several ranks watch their signals from the start
            signals.enter_context(clean_up_at_sigterm())
        if options.plan_only:
            on_first_rank(comm, lambda: show_plans(options))
        elif options.job is not None:
            on_first_rank(comm, lambda: write_job(options))
        elif options.bench:
            measure(options, comm)
        elif options.logits is not None or options.hidden is not None:
            write_arrays(options, comm)
        else:
            write_text(options, comm)
    return 0


def check_flags(options: argparse.Namespace) -> None:
    """Refuse values out of range, and flags that do not belong together."""
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


# ---- text ----------------------------------------------------------------------------------------


def write_text(options: argparse.Namespace, comm: Comm) -> None:
    """Generate what follows the prompts, and print it. All ranks call it."""
    on_first_rank(comm, lambda: check_files(options))
    model = load_model(options, comm)
    tokenizer = None
    lengths = None
    prompts: Any
    if options.prompt:
        tokenizer = together(comm, lambda: open_tokenizer(options.model))
        prompts = [tokenizer.encode(text) for text in options.prompt]
    else:
        prompts, lengths = together(comm, lambda: read_prompts(options))
    printer = None
    is_streamed = len(prompts) == 1 and not options.quiet and options.json != "-"
    if is_streamed and comm.rank == 0 and tokenizer is not None:
        printer = StreamPrinter(tokenizer, prompts[0], options.prompt[0])
    started = time.perf_counter()
    generated = model.generate(
        prompts,
        options.new,
        options.temperature,
        options.top_k,
        options.top_p,
        options.seed,
        lengths=lengths,
        on_tokens=None if printer is None else printer.add,
    )
    seconds = time.perf_counter() - started
    if printer is not None:
        printer.finish()
    data = _as_json(options, generated, tokenizer, seconds, comm.size)

    def present() -> None:
        if printer is not None:
            options.quiet = True  # the text has been printed
        print_or_write(options, _text(options, generated, tokenizer), data)

    on_first_rank(comm, present)


class StreamPrinter:
    """Prints a prompt with its first token, and then each token's text as soon as it is known.

    A model that cannot take the prompt has printed nothing before its error.
    """

    def __init__(self, tokenizer: TextTokenizer, tokens: Sequence[int], prompt: str) -> None:
        self.stream = TextStream(tokenizer, tokens)
        self.prompt = prompt  # as long as it is not printed

    def add(self, step: Tokens) -> None:
        """Print the text of the next token."""
        self._write(self.prompt + self.stream.add(int(step[0])))
        self.prompt = ""

    def finish(self) -> None:
        """Print the rest of the text, and end the line."""
        self._write(self.stream.finish() + "\n")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _text(
    options: argparse.Namespace, generated: Sequence[Tokens], tokenizer: TextTokenizer | None
) -> str:
    """Return the prompts with what follows them; tokens on a line for prompts in tokens."""
    lines = []
    for number, tokens in enumerate(generated):
        if tokenizer is None:
            lines.append(" ".join(map(str, tokens)))
        else:
            lines.append(options.prompt[number] + tokenizer.decode(tokens))
    return "\n".join(lines)


def _as_json(
    options: argparse.Namespace,
    generated: Sequence[Tokens],
    tokenizer: TextTokenizer | None,
    seconds: float,
    ranks: int,
) -> dict[str, Any]:
    data: dict[str, Any] = {
        "model": options.model,
        "ranks": ranks,
        "tokens": [tokens.tolist() for tokens in generated],
        "seconds": seconds,
    }
    if tokenizer is not None:
        data["prompts"] = options.prompt
        data["texts"] = [tokenizer.decode(tokens) for tokens in generated]
    return data


# ---- measuring -----------------------------------------------------------------------------------


_HEAD = (
    "strategy",
    "batch",
    "sequence",
    "seconds",
    "words",
    "operations a rank",
    "received",
    "peak",
)


def measure(options: argparse.Namespace, comm: Comm) -> None:
    """Measure each strategy, batch and sequence that flags ask for. All ranks call it."""
    on_first_rank(comm, lambda: check_files(options))
    first = options.strategy or DEFAULT_STRATEGY
    others = [name for name in options.compare or () if name != first]
    data = []
    rows: list[tuple[str, ...]] = [_HEAD]
    for strategy in (first, *others):
        options.strategy = strategy
        model = load_model(options, comm)
        for batch, sequence in prompt_shapes(options, model):
            found = _measure_prefill(model, batch, sequence, options.repeat)
            data.append({"strategy": strategy, "batch": batch, "sequence": sequence, **found})
            rows.append(
                (
                    strategy,
                    str(batch),
                    str(sequence),
                    show_seconds(found["seconds"]),
                    show_count(found["words_predicted"]),
                    show_count(found["operations_max_rank"]),
                    show_bytes(found["bytes_moved"]),
                    show_bytes(found["bytes_peak"]),
                )
            )
    text = "\n".join(table_lines(rows))
    on_first_rank(comm, lambda: print_or_write(options, text, data))


def _measure_prefill(model: Model, batch: int, sequence: int, repeat: int) -> dict[str, Any]:
    """Run a prefill several times after the first one, which loads the weights."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, model.config.vocabulary, (batch, sequence))
    comm = model.comm
    model.logits(tokens)
    compiled = model.programs.last
    assert compiled is not None
    seconds = []
    for _ in range(repeat):
        comm.barrier()
        start = time.perf_counter()
        model.logits(tokens)
        compiled.backend.wait()
        comm.barrier()
        seconds.append(time.perf_counter() - start)
    plan = next(iter(compiled.ready.values()))[0]
    measured = compiled.measured
    assert measured is not None
    received = [int(text) for text in comm.allgather_text(str(measured.received))]
    peaks = [int(text) for text in comm.allgather_text(str(measured.peak))]
    return {
        "ranks": comm.size,
        "seconds": median(seconds),
        "seconds_all": seconds,
        "words_predicted": plan.words_predicted,
        "bytes_predicted": plan.bytes_predicted,
        "bytes_moved": sum(received),
        "flops": plan.graph.operations(),
        "operations_max_rank": plan.operations_busiest,
        "bytes_peak": max(peaks),
    }


# ---- plans ---------------------------------------------------------------------------------------


def show_plans(options: argparse.Namespace) -> None:
    """Print the plan for each of the shapes that flags ask for."""
    check_files(options)
    model = load_model(options, ALONE, random=True)
    shapes = prompt_shapes(options, model)
    if options.report is not None and len(shapes) > 1:
        problem = f"{len(shapes)} shapes are planned"
        raise InputError("--report", problem, "one --batch and one --sequence")
    texts = []
    data = []
    for batch, sequence in shapes:
        make = partial(_make_plan, options, model, batch, sequence)
        comparison = None
        if options.compare is not None:
            comparison = compare(make, _strategies(options))
            shown = comparison.plans[0]
            texts.append(comparison_text(comparison))
            plans = comparison.plans
        else:
            shown = make(model.settings.strategy)
            texts.append(plan_text(shown))
            plans = (shown,)
        for plan in plans:
            data.append({"batch": batch, "sequence": sequence, **as_json(plan)})
        if len(shapes) > 1:
            texts[-1] = f"batch {batch}, sequence {sequence}\n{texts[-1]}"
        if options.report is not None:
            _write_report(options, model, (batch, sequence), shown, comparison)
    print_or_write(options, "\n\n".join(texts), data)


def _make_plan(
    options: argparse.Namespace, model: Model, batch: int, sequence: int, strategy: str
) -> Plan:
    return model.plan(options.ranks, batch, sequence, strategy=strategy, machine=options.machine)


def _strategies(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the strategies to compare: the model's own first, and those that are named or all."""
    first = options.strategy or DEFAULT_STRATEGY
    others = [name for name in options.compare or STRATEGIES if name != first]
    return (first, *others)


def _write_report(
    options: argparse.Namespace,
    model: Model,
    shape: tuple[int, int],
    plan: Plan,
    comparison: Comparison | None,
) -> None:
    batch, sequence = shape
    details = report_details({"model": options.model}, f"batch={batch}  sequence={sequence}")
    write_job_report(options, model.job(batch, sequence), plan, details, comparison=comparison)
