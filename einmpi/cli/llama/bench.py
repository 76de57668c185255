"""Measure prefills of a model on the ranks that are there: seconds, words, operations."""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from einmpi.cli.llama.models import load_model, prompt_shapes
from einmpi.cli.output_files import check_files, print_or_write
from einmpi.units import show_bytes, show_count, show_seconds

if TYPE_CHECKING:
    from einmpi.comm.base import Comm
    from einmpi.models.llama import Model

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
    from einmpi.comm.agreement import on_first_rank
    from einmpi.planner.strategies import DEFAULT_STRATEGY
    from einmpi.planner.text.tables import table_lines

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
