"""Where tensors come from: generated, HDF5, safetensors. One table by suffix."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from einmpi.errors import InputError, one_of
from einmpi.graph.job_tensors import HDF5_SUFFIXES, InputSpec
from einmpi.graph.scalar import DTYPES
from einmpi.runtime import hdf5
from einmpi.runtime.generate import fill_box
from einmpi.schedule.regions import Box

_SAFETENSORS_DTYPES = {"F16": "float16", "F32": "float32", "F64": "float64", "C64": "complex64", "I32": "int32",
                       "I64": "int64", "BOOL": "bool"}  # fmt: skip


Boxes: TypeAlias = Iterable[tuple[Box, Box]]  # of a tensor, and where they go in an array


@dataclass(frozen=True)
class Format:
    """How to look at an input in a file, and how to read it."""

    describe: Callable[[InputSpec], tuple[tuple[int, ...], str]]
    read: Callable[[InputSpec, np.ndarray, Boxes], None]


def describe(spec: InputSpec) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of an input; no values are read."""
    if spec.file is None:
        assert spec.shape is not None and spec.dtype is not None
        return spec.shape, spec.dtype
    return _format(spec).describe(spec)


def load(spec: InputSpec, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """The values of an input, whole."""
    array = np.empty(shape, dtype)
    everything = tuple(slice(0, extent) for extent in shape)
    fill(spec, array, [(everything, everything)], shape)
    return array


def fill(spec: InputSpec, target: np.ndarray, boxes: Boxes, shape: tuple[int, ...]) -> None:
    """Boxes of an input of this shape into boxes of an array; the array has the dtype planned for."""
    if spec.file is None:
        for there, here in boxes:
            fill_box(spec, shape, there, _view(target, here))
        return
    found_shape, found_dtype = _format(spec).describe(spec)
    if found_shape != tuple(shape) or found_dtype != target.dtype.name:
        found = f"{found_dtype}{list(found_shape)}"
        raise InputError(spec.place, f"{spec.name} in {spec.file} is {found} now",
                         f"{target.dtype.name}{list(shape)}, as planned")  # fmt: skip
    _format(spec).read(spec, target, boxes)


def _view(array: np.ndarray, box: Box) -> np.ndarray:
    """A box of an array, an array itself even where it is a single element."""
    place: Any = (*box, ...)
    view: np.ndarray = array[place]
    return view


def _format(spec: InputSpec) -> Format:
    assert spec.file is not None
    suffix = os.path.splitext(spec.file)[1].lower()
    if suffix not in FORMATS:
        raise InputError(spec.place, f"{spec.file} is not a file of a known kind", one_of(FORMATS))
    return FORMATS[suffix]


def _describe_hdf5(spec: InputSpec) -> tuple[tuple[int, ...], str]:
    return hdf5.describe(spec.file or "", spec.dataset or "", spec.place)


def _read_hdf5(spec: InputSpec, target: np.ndarray, boxes: Boxes) -> None:
    hdf5.read(spec.file or "", spec.dataset or "", spec.place, target, boxes)


def _describe_safetensors(spec: InputSpec) -> tuple[tuple[int, ...], str]:
    with _safetensors(spec) as handle:
        entry = handle.get_slice(spec.tensor)
        code = entry.get_dtype()
        if code == "BF16":
            raise InputError(spec.place, f"{spec.tensor} in {spec.file} is bfloat16, which needs a GPU backend and is "
                             "not available here", one_of(DTYPES))  # fmt: skip
        if code not in _SAFETENSORS_DTYPES:
            raise InputError(spec.place, f"{spec.tensor} in {spec.file} is {code}, which is not supported",
                             one_of(DTYPES))  # fmt: skip
        return tuple(entry.get_shape()), _SAFETENSORS_DTYPES[code]


def _read_safetensors(spec: InputSpec, target: np.ndarray, boxes: Boxes) -> None:
    with _safetensors(spec) as handle:
        for there, here in boxes:
            # A number has no slices in that library.
            values = handle.get_slice(spec.tensor)[there] if there else handle.get_tensor(spec.tensor)
            target[here] = values.reshape(target[here].shape)


@contextlib.contextmanager
def _safetensors(spec: InputSpec) -> Iterator[Any]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise InputError(spec.place, f"{spec.file} needs the package safetensors",
                         "pip install 'einmpi[models]'") from None  # fmt: skip
    if not os.path.isfile(spec.file or ""):
        raise InputError(spec.place, f"there is no file {spec.file}", "paths are relative to the job file")
    try:
        with safe_open(spec.file, framework="numpy") as handle:
            names = sorted(handle.keys())
            if spec.tensor not in names:
                listed = one_of(names[:8], spec.tensor or "") + (", …" if len(names) > 8 else "")
                raise InputError(spec.place, f"there is no tensor {spec.tensor} in {spec.file}", listed)
            yield handle
    except (SafetensorError, OSError) as error:
        raise InputError(spec.place, f"{spec.file} cannot be read as safetensors: {error}") from None


FORMATS: dict[str, Format] = {
    **dict.fromkeys(HDF5_SUFFIXES, Format(_describe_hdf5, _read_hdf5)),
    ".safetensors": Format(_describe_safetensors, _read_safetensors),
}
