"""Functions that a room calls in a room below it in docs/architecture.md, found when needed."""

from __future__ import annotations

import pkgutil
from functools import cache
from typing import Any

# Importing these would make rooms depend on each other in a circle: DistArrays compute by
# programs, which make DistArrays, and symbols in their place write programs; objects of every room
# show themselves in a notebook; and a plan for a measured machine is timed by a dry run of its
# schedule.
_FUNCTIONS = {
    "Compiled": "einmpi.compiled.program:Compiled",
    "array_namespace": "einmpi.array_api.functions:array_namespace",
    "stand_in": "einmpi.tracing.functions:stand_in",
    "call_with_sparse": "einmpi.api.tracing:call_with_sparse",
    "with_predicted_times": "einmpi.simulate.prediction:with_predicted_times",
    "plan_html": "einmpi.report.describe:plan_html",
    "job_html": "einmpi.report.describe:job_html",
    "compiled_html": "einmpi.report.describe:compiled_html",
    "array_html": "einmpi.report.describe:array_html",
}


@cache
def late(name: str) -> Any:
    """Return a function by its name in the table above."""
    return pkgutil.resolve_name(_FUNCTIONS[name])
