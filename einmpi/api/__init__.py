"""The Python interface: load, program, plan, compile, run, loop, grad, einsum and others."""

from einmpi.api.gradients import grad, value_and_grad, vjp
from einmpi.api.jobs import load, open_dataset, program
from einmpi.api.loops import loop, train
from einmpi.api.running import compile, einsum, plan, reference, run
from einmpi.job.job import options_of

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
