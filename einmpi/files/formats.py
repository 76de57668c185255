"""The kinds of files that tensors come from: one table by suffix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from einmpi.errors import InputError, one_of
from einmpi.files import hdf5
from einmpi.files.datasets import Dataset, RawReader, Reader
from einmpi.files.raw import find_npy, find_safetensors
from einmpi.files.specs import HDF5_SUFFIXES, InputSpec, suffix_of

Find: TypeAlias = Callable[
    [str, str, str], Dataset
]  # file, name of the tensor in it, place in the job file

FORMATS: dict[str, Find] = {
    **dict.fromkeys(HDF5_SUFFIXES, hdf5.find),
    ".safetensors": find_safetensors,
    ".npy": find_npy,
}


def find(spec: InputSpec) -> Dataset:
    """How an input lies in its file; no values are read."""
    assert spec.file is not None
    suffix = suffix_of(spec.file)
    if suffix not in FORMATS:
        raise InputError(
            spec.place or spec.file, f"{spec.file} is not a file of a known kind", one_of(FORMATS)
        )
    found = FORMATS[suffix](spec.file, spec.dataset or spec.tensor or "", spec.place)
    return found if spec.rows is None else found.select(spec.rows)


def open_reader(dataset: Dataset) -> Reader:
    """The dataset opened, if it is still as it was found."""
    # What a caller has opened with h5py may have any suffix.
    found = FORMATS.get(suffix_of(dataset.file), hdf5.find)(
        dataset.file, dataset.name, dataset.place
    )
    if replace(found, first_row=dataset.first_row, rows=dataset.rows) != dataset:
        raise InputError(
            dataset.where,
            f"{dataset.title} was replaced during the run",
            "a file that stays as it is",
        )
    return hdf5.Hdf5Reader(dataset) if dataset.offset is None else RawReader(dataset)
