"""EINMPI_CHECK=1: ranks compare the arrays that all of them should have alike."""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import sha256

import numpy as np

from einmpi.comm.base import Array, Comm
from einmpi.errors import InputError
from einmpi.process.variables import CHECK_VARIABLE


def is_checking() -> bool:
    """Return whether the user wants arrays to be compared."""
    given = os.environ.get(CHECK_VARIABLE, "")
    if given not in ("", "0", "1"):
        raise InputError(
            CHECK_VARIABLE, f"{given!r} is neither 0 nor 1", "1 to compare arrays, or 0"
        )
    return given == "1"


def require_same_arrays(comm: Comm, where: str, arrays: Mapping[str, Array]) -> None:
    """Raise on all ranks if an array of some rank is not equal, bit by bit, to that of rank 0."""
    digests = {name: _digest(array) for name, array in arrays.items()}
    texts = comm.allgather_text(" ".join(digests.values()))
    for name, all_digests in zip(digests, zip(*map(str.split, texts), strict=True), strict=True):
        for rank, digest in enumerate(all_digests):
            if digest != all_digests[0]:
                error = InputError(
                    where,
                    f"{name} is not the same on rank 0 and on rank {rank}",
                    "an array with the same values on all ranks",
                    "use the same seed, or DistArray.from_local for different blocks",
                )
                error.everywhere = True
                raise error


def _digest(array: Array) -> str:
    contiguous = np.ascontiguousarray(array)
    found = sha256(f"{array.dtype} {array.shape}".encode())
    found.update(contiguous.reshape(-1).view(np.uint8).data)
    return found.hexdigest()
