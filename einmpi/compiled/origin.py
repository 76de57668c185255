"""Where a result comes from: program, sizes, inputs and versions, as attributes of its dataset."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from einmpi.errors import InputError
from einmpi.files.datasets import Dataset
from einmpi.files.formats import find, known_format
from einmpi.files.specs import InputSpec, Number, SliceEntry
from einmpi.graph.eingraph import Vertex
from einmpi.job.job import Job
from einmpi.process.software import current_date, software_versions
from einmpi.version import __version__

_MOST_PROGRAM_BYTES = 60_000


@dataclass(frozen=True, eq=False)
class Origin:
    """The run that has computed some tensors.

    `plan_digest` returns that of the plan. `given` are the inputs of the caller, with the values of
    those that are parameters. `files` says where inputs are in files; those that are missing in it
    are found by the job.
    """

    job: Job
    plan_digest: Callable[[], str]
    given: Mapping[str, Number | None] = field(default_factory=dict)
    files: Mapping[str, Dataset] = field(default_factory=dict)

    def labels_of(self, tensor: str) -> tuple[str, ...] | None:
        """Return the labels of a tensor as the program writes them, None if it has none there."""
        vertex = self.job.written.by_name.get(tensor)
        if vertex is None or vertex.einsum is None:
            return None
        return vertex.einsum.output


def attributes_of(origin: Origin | None, ranks: int) -> dict[str, str]:
    """Return the attributes of a stored tensor, each as text; without an origin only some.

    Those with several values are JSON.
    """
    attributes = {
        "einmpi_version": __version__,
        "einmpi_software": _as_json(software_versions()),
        "einmpi_ranks": str(ranks),
        "einmpi_date": current_date(),
    }
    if origin is None:
        return attributes
    job = origin.job
    loops = job.one_after_another()
    text = "\n\n".join(each.source.text for each in loops)
    program = text.encode()[:_MOST_PROGRAM_BYTES].decode(errors="ignore")
    attributes["einmpi_program"] = program
    attributes["einmpi_plan"] = origin.plan_digest()
    attributes["einmpi_dtype"] = job.dtype
    if job.path:
        attributes["einmpi_job"] = os.path.abspath(job.path)
    attributes["einmpi_sizes"] = _as_json(dict(job.sizes))
    parameters: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    specs = {spec.name: spec for spec in job.inputs}
    vertices = [vertex for each in loops for vertex in each.graph.inputs]
    for vertex in vertices:
        if job.loops and vertex.name not in specs:
            continue  # the result of another loop
        spec = specs.get(vertex.name)
        if spec is not None and spec.value is not None:
            given_value = origin.given.get(vertex.name)
            parameters[vertex.name] = _number(spec.value if given_value is None else given_value)
        else:
            inputs[vertex.name] = _input_facts(origin, vertex, spec)
    attributes["einmpi_parameters"] = _as_json(parameters)
    attributes["einmpi_inputs"] = _as_json(inputs)
    return attributes


def _as_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)


def _number(value: Number) -> bool | int | float | str:
    """Return a number as JSON can hold it; a complex one as a job file writes it."""
    if isinstance(value, complex):
        return str(value).strip("()")
    return value


def _input_facts(origin: Origin, vertex: Vertex, spec: InputSpec | None) -> dict[str, Any]:
    """Return what is known of an input: how it was generated, or where it lies in a file."""
    facts: dict[str, Any] = {"shape": list(vertex.bound), "dtype": vertex.dtype}
    if spec is not None and spec.rows is not None:
        facts["rows"] = spec.rows  # of which each step takes a batch, with the shape above
    dataset = origin.files.get(vertex.name)
    if dataset is None and (vertex.name in origin.given or spec is None):
        return {"given": True, **facts}
    if dataset is None and spec is not None and spec.file is None:
        generated: dict[str, Any] = {"random": spec.random, "seed": spec.seed}
        if spec.random == "uniform":
            generated |= {"low": spec.low, "high": spec.high}
        return {**generated, **facts}
    if dataset is None and spec is not None:
        try:
            dataset = find(spec)
        except InputError:  # a result is not lost because an input that was read is gone
            return {"file": os.path.abspath(spec.file or ""), **facts}
    assert dataset is not None
    return {**_file_facts(dataset, spec), **facts}


def _file_facts(dataset: Dataset, spec: InputSpec | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"file": os.path.abspath(dataset.file)}
    if dataset.name:
        key = "dataset" if spec is None else known_format(dataset.where, dataset.file).key
        facts[key] = dataset.name
    if spec is not None and spec.slices:
        facts["slice"] = ", ".join(_slice_text(entry) for entry in spec.slices)
    facts["header_sha256"] = dataset.header
    if dataset.sources:
        identity = dataset.sources[0].identity
        modified = datetime.fromtimestamp(identity.modified_ns // 10**9, UTC)
        facts["bytes"] = identity.size
        facts["modified"] = modified.isoformat(timespec="seconds")
    return facts


def _slice_text(entry: SliceEntry) -> str:
    """Return what is selected along a dimension, as a job file writes it."""
    if isinstance(entry, int):
        return str(entry)
    start, stop, step = entry
    text = f"{'' if start is None else start}:{'' if stop is None else stop}"
    return text if step == 1 else f"{text}:{step}"
