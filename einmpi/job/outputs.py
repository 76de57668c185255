"""The [outputs] of a job file and the histories of its loops: where results go."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from einmpi.errors import InputError, nearest_of, one_of
from einmpi.files.formats import all_formats, known_format, split_short_form, suffix_of
from einmpi.files.specs import InputSpec, OutputSpec
from einmpi.graph.dtypes import DTYPES, numpy_dtypes
from einmpi.graph.eingraph import EinGraph
from einmpi.job.inputs import (
    check_file,
    check_parts,
    positive_integers,
    read_dtype,
    read_short_form,
)
from einmpi.language.toml_document import Entry, kind_of, show


def read_outputs(entry: Entry, computed: tuple[str, ...]) -> tuple[OutputSpec, ...]:
    """Return the outputs in the order of the file.

    `computed` are the tensors that the program computes.
    """
    known = dict.fromkeys(computed)
    outputs: list[OutputSpec] = []
    stored: dict[tuple[str, str], OutputSpec] = {}  # by the file and the path inside it
    first: dict[tuple[str, str], OutputSpec] = {}  # the same of the first one there, or inside
    for name in entry.table():
        spec = _read_output(entry[name], name, known)
        if spec.inside == "/" and known_format(spec.place, spec.file).default_name != "/":
            expected = "the path of a dataset or of a group in it"
            raise InputError(spec.place, f"{spec.target} is all of a file", expected)
        path = spec.inside.rstrip("/")
        here = spec.file, path
        around = [(spec.file, path[:end]) for end, letter in enumerate(path) if letter == "/"]
        for other in (first.get(here), *map(stored.get, around)):
            if other is not None:
                raise _not_separate(other, spec)
        stored[here] = spec
        for place in (here, *around):
            first.setdefault(place, spec)
        outputs.append(spec)
    return tuple(outputs)


def _not_separate(other: OutputSpec, new: OutputSpec) -> InputError:
    """Return the error for an output that would overwrite another one, or be inside or around."""
    conflict = f"be one inside the other in {new.file}"
    if other.target.rstrip("/") == new.target.rstrip("/"):
        conflict = f"both be {new.target}"
    what = f"outputs {other.name} and {new.name} would {conflict}"
    return InputError(new.place, what, "a separate dataset for each output")


def _read_output(entry: Entry, name: str, computed: Mapping[str, None]) -> OutputSpec:
    place = entry.place
    given = entry.value
    if name not in computed:
        raise entry.wrong(f"unknown output {show(name)}", nearest_of(computed, name))
    if isinstance(given, str):
        file, inside = read_short_form(place, given, writable=True)
        return OutputSpec(name, entry.relative_path(file), inside, place=place)
    if not isinstance(given, dict):
        raise entry.wrong(
            f"output {name} is {kind_of(given)}", 'a table or a string such as "FILE.h5:/Z"'
        )
    entry.table(_all_keys())
    file = _required(entry, "file", 'file = "FILE.h5", dataset = "/NAME"')
    file_format = check_file(place, file, writable=True)
    methods = file_format.write
    assert methods is not None
    name_key = file_format.key
    keys = ("file", name_key, *methods.options, "dtype", "parts")
    allowed = list(filter(None, keys))  # without a key for the name, if there is none
    for key in given:
        if key not in allowed:
            what = f"{key} cannot be combined with a {suffix_of(file)} file"
            raise entry[key].wrong(what, one_of(allowed))
    inside = ""
    if name_key:
        name_in_file = entry[name_key].get(str) or file_format.default_name
        if not name_in_file:
            name_in_file = _required(entry, name_key, f'{name_key} = "{file_format.example_name}"')
        inside = file_format.check_name(place, name_in_file)
    compression = entry["compression"].choice(methods.compressions, "") or None
    if compression is not None:
        methods.check_compression(entry["compression"].place, compression)
    return OutputSpec(
        name,
        entry.relative_path(file),
        inside,
        chunks=positive_integers(entry["chunks"]),
        compression=compression,
        dtype=_stored_dtype(entry["dtype"]),
        parts=positive_integers(entry["parts"]),
        place=place,
    )


def _all_keys() -> list[str]:
    """Return the keys that outputs have, over all formats that can be written."""
    names: list[str] = []
    options: list[str] = []
    for file_format in all_formats():
        if file_format.write is not None:
            names.append(file_format.key)
            options.extend(file_format.write.options)
    keys = dict.fromkeys(("file", *names, *options, "dtype", "parts"))
    return [key for key in keys if key]


def _required(entry: Entry, key: str, example: str) -> str:
    value = entry[key].get(str)
    if value is None:
        raise entry.wrong(f"output {entry.key} has no {key}", example)
    return value


def _stored_dtype(entry: Entry) -> str | None:
    name = entry.get(str)
    if name in DTYPES and DTYPES[name].file_dtype != name:
        raise entry.wrong(f"files have no {name}", one_of(numpy_dtypes()))
    return read_dtype(entry)


def check_outputs(outputs: tuple[OutputSpec, ...], graph: EinGraph) -> None:
    """Check what can be checked only when shapes and dtypes are known."""
    for spec in outputs:
        vertex = graph[spec.name]
        own = DTYPES[vertex.dtype].file_dtype
        stored = np.dtype(spec.dtype or own)
        if not np.can_cast(own, stored, "same_kind"):
            allowed = [dtype for dtype in numpy_dtypes() if np.can_cast(own, dtype, "same_kind")]
            raise InputError(
                spec.place,
                f"{spec.name} is {vertex.dtype} and cannot be stored as {stored.name}",
                one_of(allowed),
            )
        methods = known_format(spec.place, spec.file, writable=True).write
        assert methods is not None
        if len(vertex.bound) > methods.max_ndim:
            raise InputError(
                spec.place,
                f"{spec.name} has {len(vertex.bound)} dimensions",
                f"at most {methods.max_ndim} in a {suffix_of(spec.file)} file",
            )
        check_parts(spec, len(vertex.bound))
        if spec.chunks is None:
            continue
        if len(spec.chunks) != len(vertex.bound):
            raise InputError(
                spec.place,
                f"chunks of {spec.name} has length {len(spec.chunks)}",
                f"{len(vertex.bound)}, the number of its dimensions",
            )
        chunk_bytes = prod(spec.chunks) * stored.itemsize
        if chunk_bytes > methods.max_chunk_bytes:
            most = 4 if methods.max_chunk_bytes >= 2**31 else 2
            raise InputError(
                spec.place,
                f"a chunk of {spec.name} would have {chunk_bytes} bytes",
                f"less than {most} GiB",
            )


def refuse_what_is_carried(outputs: Iterable[OutputSpec], carry: Mapping[str, str]) -> None:
    """Refuse a tensor of a step that becomes an input: the loop has its last value as that."""
    inputs = {tensor: name for name, tensor in carry.items()}
    for spec in outputs:
        if spec.name in inputs:
            name = inputs[spec.name]
            what = f"{spec.name} becomes {name} after each step"
            raise InputError(spec.place, what, f"{name}, which is its last value")


# ---- histories -----------------------------------------------------------------------------------


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
