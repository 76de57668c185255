"""The text of a program becomes a Job, without a job file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from einmpi.job.backends import backend_names
from einmpi.job.job import Job
from einmpi.language.parse import build_graphs
from einmpi.language.statements import Inputs
from einmpi.language.syntax import Source
from einmpi.planner.strategies import DEFAULT_STRATEGY


def program_job(
    text: str, inputs: Inputs, sizes: Mapping[str, int], dtype: str, outputs: Sequence[str] | None
) -> Job:
    """Return the job of a program with these inputs, by shape and dtype, and these sizes."""
    source = Source("program", text)
    graphs = build_graphs(source, inputs, sizes, outputs)
    return Job(
        title="",
        path="",
        source=source,
        dtype=dtype,
        sizes=sizes,
        inputs=(),
        outputs=(),
        strategy=DEFAULT_STRATEGY,
        memory=None,
        backend=backend_names()[0],
        fast_math=False,
        roles={},
        graph=graphs.rewritten,
        written=graphs.written,
    )
