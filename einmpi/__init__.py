"""einmpi: a few lines of extended Einstein summation become a distributed program."""

from einmpi.api import einsum, load, plan, program, reference
from einmpi.errors import EinmpiError, InputError
from einmpi.graph.job_file import Job
from einmpi.version import __version__

__all__ = ["EinmpiError", "InputError", "Job", "__version__", "einsum", "load", "plan", "program", "reference"]
