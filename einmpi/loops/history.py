"""The history of a loop in a file: a row of recorded values for every step, written at once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from einmpi.errors import EinmpiError


class HistoryFile:
    """A table in CSV that grows by a row a step. What is written survives the end of the process.

    Only rank 0 has it.
    """

    def __init__(self, path: str, names: Sequence[str]) -> None:
        self.path = path
        self.names = names
        self.descriptor: int | None = None

    def start(self) -> None:
        """Begin a new table; a table of an earlier run is replaced."""
        self._open(os.O_TRUNC)
        self._write(",".join(["step", *self.names]))

    def append(self, step: int, row: Mapping[str, npt.NDArray[Any]]) -> None:
        """Add the row of a step."""
        values = [str(step)]
        for name in self.names:
            values.append(_number_text(row[name]))
        self._write(",".join(values))

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def _open(self, mode: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | mode
        try:
            self.descriptor = os.open(self.path, flags, 0o666)
        except OSError as error:
            raise self._failure(error) from None

    def _write(self, line: str) -> None:
        """Write a line with one call, so that a row is never without its end for long."""
        assert self.descriptor is not None
        try:
            os.write(self.descriptor, f"{line}\n".encode())
        except OSError as error:
            raise self._failure(error) from None

    def _failure(self, error: OSError) -> EinmpiError:
        return EinmpiError(f"{self.path}: {error.strerror or error}")


def _number_text(value: npt.NDArray[Any]) -> str:
    """Return a number with all its digits, a truth value as 0 or 1."""
    number = value.item()
    if isinstance(number, bool):
        number = int(number)
    return repr(number)
