"""The Fourier transforms of the array API standard."""

from einmpi.array_api import functions, table
from einmpi.arrays.methods import make_functions

_FUNCTIONS = make_functions(table.FFT, __name__)
_FUNCTIONS.update((name, getattr(functions, name)) for name in ("fftfreq", "rfftfreq"))
globals().update(_FUNCTIONS)
__all__ = list(_FUNCTIONS)
