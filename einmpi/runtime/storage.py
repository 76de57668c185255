"""Where tensors come from and go: generated or in files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from einmpi.errors import InputError
from einmpi.graph.job_file import Job
from einmpi.graph.job_tensors import InputSpec, OutputSpec
from einmpi.plan.mesh import Mesh
from einmpi.runtime import hdf5
from einmpi.runtime.comm import ALONE, on_first_rank
from einmpi.runtime.datasets import Dataset
from einmpi.runtime.formats import find
from einmpi.runtime.generate import fill_box
from einmpi.runtime.reading import Reading
from einmpi.schedule.layout import Layout
from einmpi.version import __version__

if TYPE_CHECKING:
    from einmpi.runtime.dist_array import DistArray


# ---- inputs ---------------------------------------------------------------------------------------------------------


def describe(spec: InputSpec) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of an input; no values are read."""
    if spec.file is None:
        assert spec.shape is not None and spec.dtype is not None
        return spec.shape, spec.dtype
    found = find(spec)
    return found.wanted, found.dtype.name


def find_planned(spec: InputSpec, shape: tuple[int, ...], dtype: str) -> Dataset:
    """How an input lies in its file, if it has the shape and dtype that were planned for."""
    found = find(spec)
    if found.wanted != tuple(shape) or found.dtype.name != dtype:
        raise InputError(spec.place, f"{spec.name} in {spec.file} is {found.dtype.name}{list(found.wanted)} now",
                         f"{dtype}{list(shape)}, as planned")  # fmt: skip
    return found


def load(spec: InputSpec, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """The values of an input, whole."""
    array = np.empty(shape, dtype)
    if spec.file is None:
        fill_box(spec, shape, tuple(slice(0, extent) for extent in shape), array)
    else:
        layout = Layout(Mesh(1), tuple(shape) or (1,), ())
        region = layout.region(())
        Reading(find_planned(spec, shape, dtype), layout, 0, array, region, region).finish(ALONE)
    return array


# ---- outputs --------------------------------------------------------------------------------------------------------


def check_targets(job: Job) -> None:
    """Refuse output files that could not be written, before anything is computed."""
    for specs in _by_file(job.outputs).values():
        hdf5.check_target(specs[0].file, {spec.dataset: spec.place for spec in specs})


def store(job: Job, results: Mapping[str, DistArray]) -> None:
    """Write every output of the job, each file once. All ranks call it; rank 0 writes what it gathers."""
    attributes = {"einmpi_version": __version__, "einmpi_program": job.source.text, "einmpi_dtype": job.dtype}
    for specs in _by_file(job.outputs).values():
        results[specs[0].name].comm.barrier()  # a rank may still read from a file that is about to be replaced
        arrays = {spec.name: results[spec.name].gather(0) for spec in specs}
        on_first_rank(results[specs[0].name].comm, partial(_write, specs, arrays, attributes))


def _write(specs: list[OutputSpec], arrays: Mapping[str, np.ndarray], attributes: Mapping[str, str]) -> None:
    datasets = {spec.dataset: _as_stored(spec, arrays[spec.name]) for spec in specs}
    hdf5.write(specs[0].file, datasets, attributes, specs[0].place)


def _by_file(outputs: tuple[OutputSpec, ...]) -> dict[str, list[OutputSpec]]:
    files: dict[str, list[OutputSpec]] = {}
    for spec in outputs:
        files.setdefault(os.path.realpath(spec.file), []).append(spec)
    return files


def _as_stored(spec: OutputSpec, array: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    """The array in the dtype asked for, and options of the dataset. What has no elements or no dimensions has none."""
    with np.errstate(over="ignore"):  # a number too large for a smaller float is infinite there
        stored = np.asarray(array).astype(spec.dtype or np.asarray(array).dtype, copy=False)
    options: dict[str, Any] = {}
    if stored.ndim and stored.size:
        if spec.chunks is not None:
            options["chunks"] = tuple(min(pair) for pair in zip(spec.chunks, stored.shape, strict=True))
        if spec.compression is not None:
            options["compression"] = spec.compression
    return stored, options
