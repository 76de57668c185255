"""Fourier transforms, by the names of the array API standard.

The transformed dimensions are whole on a rank; others are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from einmpi.array_api.calls import call
from einmpi.array_api.devices import check_device
from einmpi.compiled.dist_array import DistArray


def _of_one_dimension(function: Any) -> Callable[..., DistArray]:
    """Return the transform along one dimension."""

    def transform(
        x: DistArray, /, *, n: int | None = None, axis: int = -1, norm: Any = "backward"
    ) -> DistArray:
        return call(function, x, n=n, axis=axis, norm=norm)

    transform.__name__ = function.__name__
    transform.__doc__ = f"Compute `numpy.fft.{function.__name__}` along one dimension."
    return transform


def _of_several_dimensions(function: Any) -> Callable[..., DistArray]:
    """Return the transform along several dimensions."""

    def transform(
        x: DistArray,
        /,
        *,
        s: Sequence[int] | None = None,
        axes: Sequence[int] | None = None,
        norm: Any = "backward",
    ) -> DistArray:
        return call(function, x, s=s, axes=axes, norm=norm)

    transform.__name__ = function.__name__
    transform.__doc__ = f"Compute `numpy.fft.{function.__name__}` along several dimensions."
    return transform


fft = _of_one_dimension(np.fft.fft)
ifft = _of_one_dimension(np.fft.ifft)
rfft = _of_one_dimension(np.fft.rfft)
irfft = _of_one_dimension(np.fft.irfft)
hfft = _of_one_dimension(np.fft.hfft)
ihfft = _of_one_dimension(np.fft.ihfft)
fftn = _of_several_dimensions(np.fft.fftn)
ifftn = _of_several_dimensions(np.fft.ifftn)
rfftn = _of_several_dimensions(np.fft.rfftn)
irfftn = _of_several_dimensions(np.fft.irfftn)


def fftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> DistArray:
    """Return the frequencies of a transform of `n` elements, a distance `d` apart."""
    check_device(device)
    frequencies = np.fft.fftfreq(n, d)
    return DistArray.from_global(frequencies.astype("float64" if dtype is None else dtype))


def rfftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> DistArray:
    """Return the frequencies of a transform of `n` real elements, a distance `d` apart."""
    check_device(device)
    frequencies = np.fft.rfftfreq(n, d)
    return DistArray.from_global(frequencies.astype("float64" if dtype is None else dtype))


def fftshift(x: DistArray, /, *, axes: int | Sequence[int] | None = None) -> DistArray:
    """Return the tensor with frequency zero in the middle of its dimensions."""
    return call(np.fft.fftshift, x, axes=axes)


def ifftshift(x: DistArray, /, *, axes: int | Sequence[int] | None = None) -> DistArray:
    """Return the tensor with frequency zero at the start of its dimensions."""
    return call(np.fft.ifftshift, x, axes=axes)
