"""Where a tensor comes from and where a result goes: what a job says of its files and generated inputs."""

from __future__ import annotations

import os
from dataclasses import dataclass

# What names a tensor inside a file, by the file's suffix; nothing where the file is the tensor.
INSIDE = {
    ".h5": "dataset",
    ".hdf5": "dataset",
    ".he5": "dataset",
    ".safetensors": "tensor",
    ".npy": "",
}
HDF5_SUFFIXES = tuple(suffix for suffix, key in INSIDE.items() if key == "dataset")
COMPRESSIONS = ("gzip", "lzf")


@dataclass(frozen=True)
class InputSpec:
    """A tensor the job starts from: generated (`random`) or in a file. `place` is its position in the job file."""

    name: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    random: str | None = None
    seed: int = 0
    low: int | float = 0
    high: int | float = 1
    file: str | None = None
    dataset: str | None = None
    tensor: str | None = None
    rows: tuple[int | None, int | None] | None = None
    resident: bool = False
    parts: tuple[int, ...] | None = None
    place: str = ""


@dataclass(frozen=True)
class OutputSpec:
    """A tensor the job stores. Without a dtype the tensor keeps its own. An .npy file has no datasets."""

    name: str
    file: str
    dataset: str = ""
    chunks: tuple[int, ...] | None = None
    compression: str | None = None
    dtype: str | None = None
    parts: tuple[int, ...] | None = None
    place: str = ""

    @property
    def target(self) -> str:
        """As the short form has it."""
        return f"{self.file}:{self.dataset}" if self.dataset else self.file


def suffix_of(file: str) -> str:
    """What says of which kind a file is."""
    return os.path.splitext(file)[1].lower()
