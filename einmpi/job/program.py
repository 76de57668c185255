"""The text of a program becomes a Job, without a job file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from einmpi.files.specs import InputSpec
from einmpi.job.backends import backend_names
from einmpi.job.job import Job
from einmpi.language.parse import build_graphs
from einmpi.language.statements import Inputs
from einmpi.language.syntax import Source
from einmpi.planner.strategies import DEFAULT_STRATEGY


def program_job(
    text: str,
    inputs: Inputs,
    sizes: Mapping[str, int],
    dtype: str,
    outputs: Sequence[str] | None,
    parameters: Sequence[InputSpec] = (),
) -> Job:
    """Return the job of a program with these inputs, by shape and dtype, sizes and parameters."""
    source = Source("program", text)
    tensors = dict(inputs)
    types = {}
    for spec in parameters:
        tensors[spec.name] = (), spec.dtype or ""
        types[spec.name] = type(spec.value)
    graphs = build_graphs(source, tensors, sizes, outputs, parameters=types)
    return Job(
        title="",
        path="",
        source=source,
        dtype=dtype,
        sizes=sizes,
        inputs=tuple(parameters),
        outputs=(),
        strategy=DEFAULT_STRATEGY,
        memory=None,
        backend=backend_names()[0],
        fast_math=False,
        roles={},
        graph=graphs.rewritten,
        written=graphs.written,
    )
