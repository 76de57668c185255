"""The Python interface: load, program, plan, compile, run, loop, reference, einsum and others."""

from einmpi.api.datasets import open_dataset
from einmpi.api.einsums import einsum
from einmpi.api.jobs import load, program
from einmpi.api.loops import loop
from einmpi.api.planning import options_of, plan
from einmpi.api.running import compile, reference, run

__all__ = [
    "compile",
    "einsum",
    "load",
    "loop",
    "open_dataset",
    "options_of",
    "plan",
    "program",
    "reference",
    "run",
]
