# python docs/make_stubs.py writes this file: change the functions instead.

from collections.abc import Sequence
from typing import Any

from einmpi.arrays.dist_array import DistArray

def fft(
    x: DistArray, /, *, n: int | None = None, axis: int = -1, norm: Any = "backward"
) -> DistArray:
    """Compute `numpy.fft.fft` along one dimension."""

def fftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> DistArray:
    """Return the frequencies of a transform of `n` elements, a distance `d` apart."""

def fftn(
    x: DistArray,
    /,
    *,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: Any = "backward",
) -> DistArray:
    """Compute `numpy.fft.fftn` along several dimensions."""

def fftshift(x: DistArray, /, *, axes: int | Sequence[int] | None = None) -> DistArray:
    """Return the tensor with frequency zero in the middle of its dimensions."""

def hfft(
    x: DistArray, /, *, n: int | None = None, axis: int = -1, norm: Any = "backward"
) -> DistArray:
    """Compute `numpy.fft.hfft` along one dimension."""

def ifft(
    x: DistArray, /, *, n: int | None = None, axis: int = -1, norm: Any = "backward"
) -> DistArray:
    """Compute `numpy.fft.ifft` along one dimension."""

def ifftn(
    x: DistArray,
    /,
    *,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: Any = "backward",
) -> DistArray:
    """Compute `numpy.fft.ifftn` along several dimensions."""

def ifftshift(x: DistArray, /, *, axes: int | Sequence[int] | None = None) -> DistArray:
    """Return the tensor with frequency zero at the start of its dimensions."""

def ihfft(
    x: DistArray, /, *, n: int | None = None, axis: int = -1, norm: Any = "backward"
) -> DistArray:
    """Compute `numpy.fft.ihfft` along one dimension."""

def irfft(
    x: DistArray, /, *, n: int | None = None, axis: int = -1, norm: Any = "backward"
) -> DistArray:
    """Compute `numpy.fft.irfft` along one dimension."""

def irfftn(
    x: DistArray,
    /,
    *,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: Any = "backward",
) -> DistArray:
    """Compute `numpy.fft.irfftn` along several dimensions."""

def rfft(
    x: DistArray, /, *, n: int | None = None, axis: int = -1, norm: Any = "backward"
) -> DistArray:
    """Compute `numpy.fft.rfft` along one dimension."""

def rfftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> DistArray:
    """Return the frequencies of a transform of `n` real elements, a distance `d` apart."""

def rfftn(
    x: DistArray,
    /,
    *,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: Any = "backward",
) -> DistArray:
    """Compute `numpy.fft.rfftn` along several dimensions."""
