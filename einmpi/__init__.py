"""einmpi: a few lines of extended Einstein summation become a distributed program."""

import importlib
from typing import TYPE_CHECKING, Any

from einmpi.errors import EinmpiError, InputError
from einmpi.version import __version__

if TYPE_CHECKING:
    from einmpi.api import (
        compile,
        einsum,
        grad,
        load,
        loop,
        open_dataset,
        plan,
        program,
        reference,
        run,
        train,
        value_and_grad,
        vjp,
    )
    from einmpi.api.tracing import fori, jit, trace
    from einmpi.arrays.dist_array import DistArray
    from einmpi.compiled.program import Compiled
    from einmpi.job.job import Job
    from einmpi.loops.running import LoopResult
    from einmpi.planner.plan import Plan
    from einmpi.sparse_array import SparseArray

__all__ = [
    "Compiled",
    "DistArray",
    "EinmpiError",
    "InputError",
    "Job",
    "LoopResult",
    "Plan",
    "SparseArray",
    "__version__",
    "compile",
    "einsum",
    "fori",
    "grad",
    "jit",
    "load",
    "loop",
    "open_dataset",
    "plan",
    "program",
    "reference",
    "run",
    "trace",
    "train",
    "value_and_grad",
    "vjp",
]
# The public names that bring numpy and most of the package along, and the modules that define them.
_MODULES = {
    "Compiled": "einmpi.compiled.program",
    "DistArray": "einmpi.arrays.dist_array",
    "Job": "einmpi.job.job",
    "LoopResult": "einmpi.loops.running",
    "Plan": "einmpi.planner.plan",
    "SparseArray": "einmpi.sparse_array",
    "compile": "einmpi.api",
    "einsum": "einmpi.api",
    "fori": "einmpi.api.tracing",
    "jit": "einmpi.api.tracing",
    "grad": "einmpi.api",
    "load": "einmpi.api",
    "loop": "einmpi.api",
    "open_dataset": "einmpi.api",
    "plan": "einmpi.api",
    "program": "einmpi.api",
    "reference": "einmpi.api",
    "run": "einmpi.api",
    "trace": "einmpi.api.tracing",
    "train": "einmpi.api",
    "value_and_grad": "einmpi.api",
    "vjp": "einmpi.api",
}


if not TYPE_CHECKING:  # type checkers know the names from above, and would accept any other

    def __getattr__(name: str) -> Any:
        """Load a public name when it is first used, so that `import einmpi` costs little."""
        if name not in _MODULES:
            raise AttributeError(f"module 'einmpi' has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})
