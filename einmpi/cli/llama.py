"""The command `einmpi llama`: text, plans and measurements of a model, as its flags ask for."""

from __future__ import annotations

import argparse
import io
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from einmpi.cli.job_options import (
    check_files,
    given_settings,
    print_or_write,
    report_details,
    write_job_report,
)
from einmpi.cli.llama_text import generate_text, given_sampling, sampling_of
from einmpi.comm.agreement import on_first_rank, together
from einmpi.comm.base import ALONE, Comm
from einmpi.errors import InputError, one_of
from einmpi.files.atomic import check_replaceable, replace_file
from einmpi.files.formats import HDF5, format_with_suffix, known_format, split_short_form, suffix_of
from einmpi.files.reading import describe, load_array
from einmpi.files.specs import InputSpec
from einmpi.files.writing import check_target
from einmpi.job.job import Job
from einmpi.job.job_file import job_text
from einmpi.job.settings import SETTINGS
from einmpi.models.llama import Model, load
from einmpi.models.programs import FREQUENCIES, LOGITS, TOKENS
from einmpi.models.sampling import Sampling, check_sampling
from einmpi.planner.plan import Plan
from einmpi.planner.strategies import DEFAULT_STRATEGY, STRATEGIES
from einmpi.planner.text.compare import Comparison, compare
from einmpi.planner.text.explain import as_json
from einmpi.planner.text.summary import table_lines
from einmpi.process.signals import clean_up_at_sigterm
from einmpi.report.terminal import comparison_text, plan_text
from einmpi.units import show_bytes, show_count, show_seconds, show_shape


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
    given = given_sampling(options)
    # Whether tokens are chosen at random is known when the model's own settings have been read.
    check_sampling(Sampling(**{"temperature": 1.0, **given}), as_flags=True)
    if "" in options.stop_text:
        raise InputError("--stop-text", "it is empty", "a text before which the answer ends")
    for name in options.compare or ():
        SETTINGS["strategy"].check("--compare", name)
    for name, value in given_settings(options).items():
        SETTINGS[name].check(SETTINGS[name].flag, value)


# What the command can do, each the name of an option.
_GOALS = ("prompt", "prompts", "prompt_file", "chat", "plan_only", "bench", "job")


def _check_goal(options: argparse.Namespace) -> None:
    """Refuse flags that leave open what to do."""
    flags = {name: "--" + name.replace("_", "-") for name in _GOALS}
    given = [name for name in _GOALS if getattr(options, name) not in (None, False, [])]
    if "chat" in given and {"prompt", "prompt_file"}.intersection(given):
        given.remove("chat")  # it says what the prompts are
    expected = one_of(tuple(flags.values()))
    if not given:
        raise InputError("einmpi llama", "nothing to do is given", expected)
    if len(given) > 1 and given != ["prompts", "job"]:
        shown = " and ".join(flags[name] for name in given)
        raise InputError("einmpi llama", f"{shown} are given", expected)


# ---- text ----------------------------------------------------------------------------------------


def write_text(options: argparse.Namespace, comm: Comm) -> None:
    """Generate what follows the prompts, and print it. All ranks call it."""
    on_first_rank(comm, lambda: check_files(options))
    model = load_model(options, comm)
    if options.prompts is None:
        generate_text(options, model, comm)
        return
    prompts, lengths = together(comm, lambda: read_prompts(options))
    sampling = together(comm, lambda: sampling_of(options))
    started = time.perf_counter()
    generated = model.generate(prompts, options.new, lengths=lengths, **sampling)
    data = {
        "model": options.model,
        "ranks": comm.size,
        "tokens": [tokens.tolist() for tokens in generated],
        "seconds": time.perf_counter() - started,
    }
    text = "\n".join([" ".join(map(str, tokens)) for tokens in generated])
    on_first_rank(comm, lambda: print_or_write(options, text, data))


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
    data = []
    rows: list[tuple[str, ...]] = [_HEAD]
    for strategy in _strategies(options, ()):
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
            comparison = compare(make, _strategies(options, STRATEGIES))
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


def _strategies(options: argparse.Namespace, default: Iterable[str]) -> list[str]:
    """Return the strategies to compare: the model's own first, and those that are named."""
    first = options.strategy or DEFAULT_STRATEGY
    return list(dict.fromkeys([first, *(options.compare or default)]))


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


# ---- files ---------------------------------------------------------------------------------------
#
# The model and its files: tokens, logits, hidden states, a job file.


_USUAL_SEQUENCE = 1024


def load_model(options: argparse.Namespace, comm: Comm, random: bool = False) -> Model:
    """Return the model of a command line. All ranks call it."""
    return load(
        options.model,
        dtype=options.dtype,
        backend=options.backend,
        memory=options.memory,
        strategy=options.strategy,
        comm=comm,
        random=random or options.random,
        weights=options.weights,
    )


def prompt_shapes(options: argparse.Namespace, model: Model) -> list[tuple[int, int]]:
    """Return the batches and sequences that --batch and --sequence ask for, one by one."""
    sequences = options.sequence or [min(model.config.positions, _USUAL_SEQUENCE)]
    found = []
    for batch in options.batch:
        for sequence in sequences:
            found.append((batch, sequence))
    return found


def read_prompts(
    options: argparse.Namespace,
) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
    """Return the tokens and the lengths that flags name."""
    tokens = _read("--prompts", options.prompts)
    lengths = None
    if options.lengths is not None:
        lengths = _read("--lengths", options.lengths)
    return tokens, lengths


def _read(flag: str, text: str) -> npt.NDArray[Any]:
    spec = describe(file_input(flag, text))
    return load_array(spec, spec.shape or (), spec.dtype or "")


def file_input(flag: str, text: str, name: str = "tokens") -> InputSpec:
    """Return the input that a flag names in the short form of job files."""
    place = f"{flag} {text}"
    file, inside = split_short_form(text)
    file_format = known_format(place, file)
    if file_format.key and not inside:
        raise InputError(place, f"the {file_format.key} is missing", "FILE.h5:/PATH")
    return InputSpec(name, file=file, inside=inside, place=place)


def write_arrays(options: argparse.Namespace, comm: Comm) -> None:
    """Compute logits and hidden states and write them to HDF5 files. All ranks call it."""
    on_first_rank(comm, lambda: check_files(options))
    logits_target = together(comm, lambda: _target("--logits", options.logits))
    hidden_target = together(comm, lambda: _target("--hidden", options.hidden))
    tokens, lengths = together(comm, lambda: read_prompts(options))
    model = load_model(options, comm)
    layers = []
    if hidden_target is not None:
        layers = list(options.layers) or [model.config.layers]
    together(comm, lambda: _check_separate(options, logits_target, hidden_target, layers))
    logits, states = model.prefill(
        tokens, lengths, options.every_position, layers, options.before_norm
    )
    targets = {}
    if logits_target is not None:
        file, dataset = logits_target
        logits.to_hdf5(file, dataset)
        targets["logits"] = (f"{file}:{dataset}", logits)
    if hidden_target is not None:
        file, folder = hidden_target
        for layer, state in zip(layers, states, strict=True):
            dataset = _dataset_of(folder, layer)
            state.to_hdf5(file, dataset)
            targets[f"layer {layer}"] = (f"{file}:{dataset}", state)
    lines = []
    data = {}
    for name, (target, array) in targets.items():
        lines.append(f"{name}  {show_shape(array.shape)} {array.dtype}  {target}")
        shape = list(array.shape)
        data[name] = {"shape": shape, "dtype": str(array.dtype), "target": target}
    on_first_rank(comm, lambda: print_or_write(options, "\n".join(lines), data))


def _dataset_of(folder: str, layer: int) -> str:
    """Return the path of a layer's hidden states in a file."""
    return f"{folder.rstrip('/')}/{layer}"


def _check_separate(
    options: argparse.Namespace,
    logits_target: tuple[str, str] | None,
    hidden_target: tuple[str, str] | None,
    layers: Sequence[int],
) -> None:
    """Refuse results that would replace tokens or each other, or would have to lie in them."""
    used: dict[str, str] = {}  # a file and the path in it → what is there
    for flag, text in (("--prompts", options.prompts), ("--lengths", options.lengths)):
        if text is not None:
            spec = file_input(flag, text)
            used[_file_and_path(str(spec.file), spec.inside)] = flag
    results = []
    if logits_target is not None:
        results.append((f"--logits {options.logits}", "the logits", *logits_target))
    if hidden_target is not None:
        file, folder = hidden_target
        place = f"--hidden {options.hidden}"
        for layer in layers:
            results.append((place, f"layer {layer}", file, _dataset_of(folder, layer)))
    for place, content, file, path in results:
        own = _file_and_path(file, path)
        for other, what in used.items():
            if own.startswith(other) or other.startswith(own):
                problem = f"{content} and {what} would be the same dataset, or one in the other"
                raise InputError(place, problem, "separate datasets")
        used[own] = content


def _file_and_path(file: str, path: str) -> str:
    return f"{os.path.realpath(file)}:/{path.strip('/')}/"


def _target(flag: str, text: str | None) -> tuple[str, str] | None:
    """Return the file and the path that a flag names, if they can be written."""
    if text is None:
        return None
    place = f"{flag} {text}"
    file, inside = split_short_form(text)
    if format_with_suffix(suffix_of(file)) is not HDF5 or not inside:
        raise InputError(place, "this names no dataset of an HDF5 file", "FILE.h5:/PATH")
    check_target(os.path.abspath(file), {inside: place}, HDF5)
    return file, inside


# ---- the job file --------------------------------------------------------------------------------


def write_job(options: argparse.Namespace) -> None:
    """Write the job file, and beside it the inverse frequencies of the model."""
    place = f"--job {options.job}"
    if not options.job.endswith(".toml"):
        raise InputError(place, "this is not the name of a job file", "FILE.toml")
    check_replaceable(options.job, place)
    model = load_model(options, ALONE)
    if options.prompts is not None:
        tokens = describe(file_input("--prompts", options.prompts))
        shape = tokens.shape or ()
        dtype = tokens.dtype or ""
        if len(shape) != 2 or not dtype.startswith(("int", "uint")):
            problem = f"this is {dtype}{list(shape)}"
            raise InputError(tokens.place, problem, "integers [batch, position]")
        batch, sequence = shape
    else:
        shapes = prompt_shapes(options, model)
        if len(shapes) > 1:
            raise InputError(place, f"{len(shapes)} shapes are given", "one --batch and --sequence")
        batch, sequence = shapes[0]
        vocabulary = model.config.vocabulary
        tokens = InputSpec(TOKENS, (batch, sequence), "int64", "uniform", high=vocabulary)
    job = model.job(batch, sequence)
    stem = options.job.removesuffix(".toml")
    frequencies_file = f"{stem}.frequencies.npy"
    outputs = {LOGITS: f"{os.path.basename(stem)}.h5:/{LOGITS}"}
    text = _job_text(model, job, tokens, frequencies_file, outputs, os.path.dirname(options.job))
    stored = io.BytesIO()
    np.save(stored, model.config.frequencies(sequence))
    replace_file(frequencies_file, [stored.getvalue()])
    replace_file(options.job, [text.encode()])
    if not options.quiet:
        print(f"wrote {options.job} and {frequencies_file}; run it: einmpi run {options.job}")


def _job_text(
    model: Model,
    job: Job,
    tokens: InputSpec,
    frequencies_file: str,
    outputs: dict[str, str],
    folder: str,
) -> str:
    """Return the job file. Paths in it are relative to its own folder."""
    inputs: dict[str, Any] = {TOKENS: _input_value(tokens, folder)}
    inputs[FREQUENCIES] = os.path.basename(frequencies_file)
    for spec in job.inputs:
        inputs[spec.name] = _input_value(spec, folder)
    plan = {"strategy": job.strategy}
    if job.memory is not None:
        plan["memory"] = f"{job.memory} B"
    tables = {
        "inputs": inputs,
        "outputs": outputs,
        "roles": job.roles,
        "plan": plan,
        "run": {"backend": job.backend},
    }
    entries = {"title": job.title, "dtype": model.settings.dtype}
    return job_text(entries, job.source.text.strip(), tables)


def _input_value(spec: InputSpec, folder: str) -> dict[str, Any]:
    """Return an input as a job file has it: from its file, or generated."""
    shape, dtype = spec.shape, spec.dtype
    entries: dict[str, Any] = {}
    if spec.file is not None:
        file = os.path.relpath(spec.file, folder or ".")
        entries["file"] = file
        if spec.inside:
            entries[known_format(spec.place, file).key] = spec.inside
        shape, dtype = spec.declared_shape, spec.declared_dtype
    else:
        entries["random"] = spec.random
        if spec.random == "uniform":
            entries |= {"seed": spec.seed, "low": spec.low, "high": spec.high}
    for rows in spec.slices:
        assert isinstance(rows, tuple)
        entries["rows"] = f"{rows[0]}:{rows[1]}"
    entries |= {"shape": shape, "dtype": dtype, "convert": spec.convert}
    if spec.resident:
        entries["resident"] = spec.resident
    return {key: value for key, value in entries.items() if value is not None}
