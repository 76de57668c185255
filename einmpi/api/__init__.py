"""The Python interface: load, program, plan, compile, run, loop, grad, einsum and others."""

from einmpi.api.datasets import open_dataset
from einmpi.api.einsums import einsum
from einmpi.api.gradients import grad, value_and_grad, vjp
from einmpi.api.jobs import load, program
from einmpi.api.loops import loop
from einmpi.api.planning import options_of, plan
from einmpi.api.running import compile, reference, run
from einmpi.api.training import train

__all__ = [
    "compile",
    "einsum",
    "grad",
    "load",
    "loop",
    "open_dataset",
    "options_of",
    "plan",
    "program",
    "reference",
    "run",
    "train",
    "value_and_grad",
    "vjp",
]
