"""A job and its results as text for people."""

from __future__ import annotations

from einmpi.graph.eingraph import Vertex
from einmpi.job.job import Job
from einmpi.units import show_bytes, show_shape


def describe_job(job: Job) -> str:
    """What `einmpi check` prints: sizes, inputs and where they come from, the graph, outputs."""
    lines = [job.title or job.source.name]
    if job.sizes:
        lines.append(
            "sizes    " + "  ".join(f"{name}={value}" for name, value in job.sizes.items())
        )
    origins = {spec.name: spec.file or spec.random or "given" for spec in job.inputs}
    for vertex in job.graph.inputs:
        lines.append(f"input    {_signature(vertex)}  {origins.get(vertex.name, 'given')}")
    for name in sorted(set(origins) - set(job.graph.by_name)):
        lines.append(f"unused   {name}")
    for vertex in job.graph.computed:
        fused = f"   (fuses {', '.join(vertex.origin[:-1])})" if len(vertex.origin) > 1 else ""
        lines.append(f"         {vertex}   {_shape(vertex)}{fused}")
    targets = {spec.name: f"  {spec.target}" for spec in job.outputs}
    for name in job.graph.outputs:
        lines.append(f"output   {_signature(job.graph[name])}{targets.get(name, '')}")
    lines.append("ok")
    return "\n".join(lines)


def _signature(vertex: Vertex) -> str:
    return f"{vertex.name} {_shape(vertex)}"


def _shape(vertex: Vertex) -> str:
    return f"{vertex.dtype} {show_shape(vertex.bound)}, {show_bytes(vertex.nbytes)}"
