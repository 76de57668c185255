"""Programs whose lists of indices are known before they are planned."""

import re
from dataclasses import replace

import numpy as np

import einmpi
from einmpi.graph.eingraph import Known


def known(values):
    values = np.ascontiguousarray(values)
    return Known(values, f"{values.dtype} {values.shape} {values.tobytes().hex()}")


def program_with_known(text, lists, **inputs):
    """Return a job in which the planner knows these inputs."""
    job = einmpi.program(text, **inputs, **lists)
    changed = []
    for vertex in job.graph.vertices:
        if vertex.name in lists:
            vertex = replace(vertex, known=known(lists[vertex.name]))
        changed.append(vertex)
    return replace(job, graph=replace(job.graph, vertices=tuple(changed)))


def read_in(text, arrays):
    """Return those of some arrays that a program reads."""
    return {name: each for name, each in arrays.items() if re.search(rf"\b{name}\[", text)}
