"""Sparse inputs as coordinates on every rank: each rank reads a share of the file, or generates."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from math import prod

import numpy as np

from einmpi.comm.agreement import abort_on_divergence, together
from einmpi.comm.base import Comm, pieces_of
from einmpi.errors import InputError
from einmpi.files.datasets import Array, Dataset, check_unchanged
from einmpi.files.formats import find_sparse, open_reader
from einmpi.files.reading import generate, words
from einmpi.files.sparse.found import SparseFile, rows_of
from einmpi.files.sparse.single_files import LINES, own_lines
from einmpi.files.specs import InputSpec
from einmpi.graph.sparse.coordinates import Coordinates

_KEYS_STREAM = 2**64  # added to a seed: no seed of values is so large


def read_sparse_input(spec: InputSpec, comm: Comm) -> Coordinates:
    """Return a sparse input of a job on every rank. All ranks call it.

    It has the shape and the dtype that the job has found before.
    """
    if spec.file is None:
        return together(comm, lambda: generate_sparse(spec))

    def find() -> SparseFile:
        found = find_sparse(spec)
        dtype = spec.convert or (None if found is None else found.dtype.name)
        if found is None or found.shape != spec.shape or dtype != spec.dtype:
            now = "dense" if found is None else f"{dtype}{list(found.shape)}"
            what = f"{spec.name} in {spec.file} is now {now}"
            raise InputError(spec.place, what, f"{spec.dtype}{list(spec.shape or ())}, as planned")
        return found

    coordinates = read_sparse(together(comm, find, SparseFile.as_read), comm)
    if spec.convert is None:
        return coordinates
    return replace(coordinates, values=coordinates.values.astype(spec.convert))


def read_sparse(found: SparseFile, comm: Comm) -> Coordinates:
    """Read a sparse tensor that was found in a file: each rank a share, which all get."""
    if found.parse is not None:
        parts = _read_lines(found, comm)
    else:
        parts = {name: _read_array(dataset, comm) for name, dataset in found.arrays.items()}

    def build() -> Coordinates:
        keys, values = found.build(found, parts)
        return Coordinates.of(keys, values, found.shape, found.implicit, found.spec.where)

    def digest(read: Coordinates) -> str:
        return str([zlib.crc32(column.tobytes()) for column in read.keys])

    return together(comm, build, digest)


def _read_lines(found: SparseFile, comm: Comm) -> dict[str, Array]:
    """Return what is in the lines of a text, of which each rank has parsed some."""
    assert found.parse is not None
    parse = found.parse

    def read() -> dict[str, Array]:
        text = found.arrays[LINES]
        lines, start = own_lines(text, comm.rank, comm.size)
        parts = parse(found, lines, start)
        check_unchanged(text)
        return dict(parts)

    own = together(comm, read)
    return {name: gather_rows(array, comm) for name, array in own.items()}


def _read_array(dataset: Dataset, comm: Comm) -> Array:
    """Return all of a dataset, of which each rank reads as many rows."""

    def read() -> Array:
        rows = dataset.shape[0]
        start = rows * comm.rank // comm.size
        stop = rows * (comm.rank + 1) // comm.size
        with closing(open_reader(dataset)) as reader:
            own = rows_of(dataset, reader, start, stop)
        check_unchanged(dataset)
        return own

    return gather_rows(together(comm, read), comm)


def gather_rows(own: Array, comm: Comm) -> Array:
    """Return the rows of all ranks, one rank after the other. All ranks call it."""
    if comm.size == 1:
        return own
    counts = [int(text) for text in comm.allgather_text(str(len(own)))]
    everything = np.empty((sum(counts), *own.shape[1:]), own.dtype)
    row_bytes = prod(own.shape[1:]) * own.itemsize
    flat = everything.reshape(-1).view(np.uint8)
    nbytes = [count * row_bytes for count in counts]
    pieces_of(flat, nbytes)[comm.rank][...] = np.ascontiguousarray(own).reshape(-1).view(np.uint8)
    with abort_on_divergence(comm):
        comm.allgatherv(tuple(range(comm.size)), flat, nbytes)
    return everything


# ---- random --------------------------------------------------------------------------------------


def generate_sparse(spec: InputSpec) -> Coordinates:
    """Return a random tensor with `spec.stored` elements, or tiles, at different places.

    It depends on the spec alone. Elements are uniform; those of dtype bool are True.
    """
    assert spec.shape is not None and spec.dtype is not None and spec.stored is not None
    keys = _random_keys(spec.seed, spec.shape[: spec.key_dimensions], spec.stored)
    shape = (spec.stored, *spec.shape[spec.key_dimensions :])
    values = np.ones(shape, spec.dtype)
    if spec.random is not None and spec.dtype != "bool":
        values = generate(replace(spec, random="uniform"), spec.dtype, 0, spec.stored)
    return Coordinates.of(keys, values, spec.shape, spec.implicit or 0, spec.place)


def _random_keys(seed: int, shape: tuple[int, ...], count: int) -> list[Array]:
    """Return different places, chosen at random: the first ones of a stream of places."""
    draw: Callable[[int, int], Array] = partial(words, seed + _KEYS_STREAM)
    total = prod(shape)
    if total <= 4 * count:  # most places are taken: all of them are shuffled
        shuffled = np.argsort(draw(0, total), kind="stable")[:count]
        return list(np.unravel_index(shuffled, shape)) if count else [shuffled] * len(shape)
    drawn = 2 * count + 16
    while True:
        table = draw(0, drawn * len(shape)).reshape(drawn, len(shape))
        columns = []
        for column, extent in zip(table.T, shape, strict=True):
            columns.append((column % np.uint64(extent)).astype(np.int64))
        order = np.lexsort(columns[::-1])
        is_new = np.zeros(drawn, bool)
        is_new[0] = True
        for column in columns:
            is_new[1:] |= np.diff(column[order]) != 0
        first = np.sort(order[is_new])[:count]  # of equal places the one that was drawn first
        if len(first) == count:
            return [column[first] for column in columns]
        drawn *= 2
