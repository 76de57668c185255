"""einmpi: a few lines of extended Einstein summation become a distributed program."""

# isort: off
# The package einmpi.plan is loaded before the function einmpi.plan is bound: a first load later would replace it.
import einmpi.plan  # noqa: F401
from einmpi.api import einsum, load, plan, program, reference

# isort: on
from einmpi.errors import EinmpiError, InputError
from einmpi.graph.job_file import Job
from einmpi.version import __version__

__all__ = ["EinmpiError", "InputError", "Job", "__version__", "einsum", "load", "plan", "program", "reference"]
