"""Where the history of a loop goes: a CSV file, or a table in an HDF5 file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from einmpi.errors import InputError
from einmpi.files.formats import split_short_form
from einmpi.files.specs import InputSpec, OutputSpec
from einmpi.job.inputs import read_short_form
from einmpi.language.toml_document import show

_TABLE_SUFFIXES = (".h5", ".hdf5")


@dataclass(frozen=True)
class HistorySpec:
    """The file of a history; `inside` is the path of the table in an HDF5 file, empty for CSV.

    `place` is the position in the job file.
    """

    file: str
    inside: str = ""
    place: str = ""

    @property
    def target(self) -> str:
        """Return the target as the job file writes it."""
        return f"{self.file}:{self.inside}" if self.inside else self.file


def parse_history(text: str, place: str) -> HistorySpec:
    """Return what the key `history` says, with the file as it is written there."""
    expected = 'a .csv file, or a table in an HDF5 file such as "history.h5:/run1"'
    if text.endswith(".csv") and "\0" not in text:
        return HistorySpec(text, place=place)
    file = split_short_form(text)[0]
    if not file.lower().endswith(_TABLE_SUFFIXES):
        raise InputError(place, f"history is {show(text)}", expected)
    file, inside = read_short_form(place, text, writable=True)
    return HistorySpec(file, inside, place)


def check_separate_histories(
    histories: Sequence[HistorySpec], inputs: Iterable[InputSpec], outputs: Iterable[OutputSpec]
) -> None:
    """Refuse a history in the file of an input or an output, or at the place of another one."""
    uses: dict[str, str] = {}
    for source in inputs:
        if source.file is not None:
            uses[os.path.realpath(source.file)] = f"input {source.name}"
    for target in outputs:
        uses[os.path.realpath(target.file)] = f"output {target.name}"
    known: set[tuple[str, str]] = set()
    for history in histories:
        file = os.path.realpath(history.file)
        if (file, history.inside) in known:
            what = f"{history.target} is also the history of another loop"
            raise InputError(history.place, what, "a separate history for each loop")
        known.add((file, history.inside))
        if file in uses:
            what = f"{history.file} is also the file of {uses[file]}"
            raise InputError(history.place, what, "a file of its own for the history")
