"""A job and its results as text for people."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from einmpi.graph.eingraph import Vertex
from einmpi.graph.job_file import Job
from einmpi.units import show_bytes


def describe_job(job: Job) -> str:
    """What `einmpi check` prints: sizes, inputs and where they come from, the graph, outputs."""
    lines = [job.title or job.source.name]
    if job.sizes:
        lines.append("sizes    " + "  ".join(f"{name}={value}" for name, value in job.sizes.items()))
    origins = {spec.name: spec.file or spec.random or "given" for spec in job.inputs}
    for vertex in job.graph.inputs:
        lines.append(f"input    {_signature(vertex)}  {origins.get(vertex.name, 'given')}")
    for name in sorted(set(origins) - set(job.graph.by_name)):
        lines.append(f"unused   {name}")
    for vertex in job.graph.computed:
        fused = f"   (fuses {', '.join(vertex.origin[:-1])})" if len(vertex.origin) > 1 else ""
        lines.append(f"         {vertex}   {_shape(vertex)}{fused}")
    targets = {spec.name: f"  {spec.file}:{spec.dataset}" for spec in job.outputs}
    for name in job.graph.outputs:
        lines.append(f"output   {_signature(job.graph[name])}{targets.get(name, '')}")
    lines.append("ok")
    return "\n".join(lines)


def _signature(vertex: Vertex) -> str:
    return f"{vertex.name} {_shape(vertex)}"


def _shape(vertex: Vertex) -> str:
    return f"{vertex.dtype} {'×'.join(map(str, vertex.bound)) or 'scalar'}, {show_bytes(vertex.nbytes)}"


def describe_results(job: Job, results: Mapping[str, np.ndarray], seconds: float) -> str:
    """One line an output: shape, norm, least and greatest value, or where it was written."""
    lines = [f"{job.title or job.source.name}: {seconds:.2f} s in one process"]
    targets = {spec.name: f"{spec.file}:{spec.dataset}" for spec in job.outputs}
    for name, array in results.items():
        shape = "×".join(map(str, array.shape)) or "scalar"
        lines.append(f"  {name}  {array.dtype} {shape}  {_summary(array)}{_written(targets.get(name))}")
    return "\n".join(lines)


def _summary(array: np.ndarray) -> str:
    if array.size == 0:
        return "empty"
    with np.errstate(all="ignore"):
        norm = np.linalg.norm(array.astype(np.complex128 if array.dtype.kind == "c" else np.float64).ravel())
    if array.dtype.kind == "c":
        return f"norm {norm:.6g}"
    return f"norm {norm:.6g}  min {array.min():.6g}  max {array.max():.6g}"


def _written(target: str | None) -> str:
    return f"  → {target}" if target else ""
