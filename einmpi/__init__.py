"""einmpi: a few lines of extended Einstein summation become a distributed program."""

from typing import TYPE_CHECKING, Any

from einmpi.api import compile, einsum, load, open_dataset, plan, program, reference, run
from einmpi.errors import EinmpiError, InputError
from einmpi.job.job import Job
from einmpi.version import __version__

if TYPE_CHECKING:
    from einmpi.compiled.dist_array import DistArray

__all__ = [
    "DistArray",
    "EinmpiError",
    "InputError",
    "Job",
    "__version__",
    "compile",
    "einsum",
    "load",
    "open_dataset",
    "plan",
    "program",
    "reference",
    "run",
]


def __getattr__(name: str) -> Any:
    """DistArray brings the runtime along: it is loaded when it is first asked for."""
    if name == "DistArray":
        from einmpi.compiled.dist_array import DistArray

        return DistArray
    raise AttributeError(f"module 'einmpi' has no attribute {name!r}")
