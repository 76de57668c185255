"""Plans of a model, for any number of ranks: no MPI is started and no weights are read."""

from __future__ import annotations

import argparse
import platform
from functools import partial
from typing import TYPE_CHECKING

from einmpi.cli.llama.models import load_model, prompt_shapes
from einmpi.cli.output_files import check_files, print_or_write
from einmpi.errors import InputError

if TYPE_CHECKING:
    from einmpi.models.llama import Model
    from einmpi.planner.plan import Plan
    from einmpi.planner.text.compare import Comparison


def show_plans(options: argparse.Namespace) -> None:
    """Print the plan for each of the shapes that flags ask for."""
    from einmpi.comm.local import ALONE
    from einmpi.planner.text.compare import compare
    from einmpi.planner.text.plan_json import as_json
    from einmpi.report.terminal import comparison_text, plan_text

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
    from einmpi.planner.strategies import DEFAULT_STRATEGY, STRATEGIES

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
    from einmpi.process.software import current_date
    from einmpi.report.html import write_report

    batch, sequence = shape
    job = model.job(batch, sequence)
    details = {
        "model": options.model,
        "date": current_date(),
        "host": platform.node(),
        "sizes": f"batch={batch}  sequence={sequence}",
    }
    write_report(
        options.report,
        plan,
        program=job.source.text.strip("\n"),
        title=job.title,
        details=details,
        comparison=comparison,
    )
