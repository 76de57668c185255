"""The linear algebra extension of the array API standard."""

from einmpi.array_api import functions, table
from einmpi.arrays.methods import make_functions

_WRITTEN = ("cross", "eig", "eigvals", "matrix_rank", "pinv")
_FUNCTIONS = make_functions(table.LINALG, __name__)
_FUNCTIONS.update((name, getattr(functions, name)) for name in _WRITTEN)
globals().update(_FUNCTIONS)
__all__ = list(_FUNCTIONS)
