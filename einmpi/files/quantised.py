"""Quantised weights of safetensors files, in the layouts of several tools, and floats that are
quantised while they are read: as integers with a scale for each group of a row.

A recipe, which is written as the name of a tensor, says what a tensor is made of. It stands for a
matrix of `rows` and `columns`, whose last dimension is in groups: integers from −127 to 127 in
int8, integers from −8 to 7 in pairs in uint8 (the first in the low bits, both + 8), the scales of
the groups, or the floats that integers times scales are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from einmpi.errors import InputError
from einmpi.files.contiguous import SAFETENSORS_DTYPES, find_safetensors, open_tensor
from einmpi.files.datasets import (
    CONVERTIBLE_DTYPES,
    Array,
    Dataset,
    DType,
    RawReader,
    Reader,
    SourceFile,
    strips,
)

if TYPE_CHECKING:
    from einmpi.schedule.regions import Box

STORED_DTYPES = {**SAFETENSORS_DTYPES, "F8_E4M3": "float8_e4m3fn"}

_MOST = {"int8": 127, "int4": 7}  # of integers that floats become
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs has bits 4k to 4k + 3


@dataclass(frozen=True)
class Recipe:
    """What a tensor is made of.

    Attributes
    ----------
    make : str
        "int8", "int4", "scales" or "floats".
    form : str
        How the tensors are stored, a key of FORMS.
    shape, columns : tuple of int, int
        The shape of the matrix, dimensions split, and how many of its last dimensions are columns.
    group : int
        How many columns share a scale here; it divides the last dimension.
    dtype : str
        That of scales and floats.
    parts : mapping of str to (file, tensor)
        The tensors of the file, by what they are.
    bits : int
        Of the integers, if floats become some.
    block : tuple of int, optional
        How many rows and columns share a scale in the file, in the form "scaled".
    first : int
        The first row of the matrix in the file, which may have others too.
    """

    make: str
    form: str
    shape: tuple[int, ...]
    columns: int
    group: int
    dtype: str
    parts: Mapping[str, tuple[str, str]]
    bits: int = 8
    block: tuple[int, int] | None = None
    first: int = 0

    @property
    def text(self) -> str:
        """The recipe as the name of a tensor."""
        return json.dumps(self.__dict__, sort_keys=True)

    @property
    def pack(self) -> int:
        """How many columns an element stands for."""
        return {"int4": 2, "scales": self.group}.get(self.make, 1)

    @property
    def result(self) -> tuple[tuple[int, ...], str]:
        """The shape and the dtype of what is made."""
        dtype = {"int8": "int8", "int4": "uint8"}.get(self.make, self.dtype)
        return (*self.shape[:-1], self.shape[-1] // self.pack), dtype


def find_weight(file: str, tensor: str, place: str) -> Dataset:
    """Look up a tensor of a safetensors file, or what a recipe makes of some."""
    if not tensor.startswith("{"):
        return find_safetensors(file, tensor, place)
    recipe = _recipe(tensor)
    sources: dict[SourceFile, None] = {}
    digest = hashlib.sha256(tensor.encode())
    for path, name in recipe.parts.values():
        part = find_safetensors(path, name, place, STORED_DTYPES)
        digest.update(part.header.encode())
        sources |= dict.fromkeys(part.sources)
    shape, dtype = recipe.result
    found = Dataset(file, tensor, place, shape, dtype, header=digest.hexdigest())
    return replace(found, sources=tuple(sources))


def open_weight(dataset: Dataset) -> Reader:
    """Open what `find_weight` has found."""
    if dataset.name.startswith("{"):
        return QuantisedReader(_recipe(dataset.name))
    return open_tensor(dataset)


def _recipe(text: str) -> Recipe:
    """Return the recipe that a text is; raise InputError if it cannot be one."""
    try:
        values = json.loads(text)
        for key in ("shape", "block"):
            values[key] = values[key] and tuple(values[key])
        recipe = Recipe(**values)
        rows, columns = prod(recipe.shape[: -recipe.columns]), prod(recipe.shape[-recipe.columns :])
        sizes = (*recipe.shape, recipe.columns, recipe.group, *(recipe.block or ()))
        stored = {part: stored_matrix(*where).shape for part, where in recipe.parts.items()}
        needed = {
            "rounded": {"weight": (rows, columns)},
            "scaled": {"weight": (rows, columns), "scale": (1, 1)},
            "awq": {"qweight": (columns, rows // 8), "qzeros": (1, rows // 8), "scales": (1, rows)},
        }.get(recipe.form, {"qweight": (columns // 8, rows), "qzeros": (1, 1), "scales": (1, rows)})
        is_right = (
            recipe.form in FORMS
            and recipe.make in ("int8", "int4", "scales", "floats")
            and recipe.bits in (4, 8)
            and all(type(size) is int and size > 0 for size in (*sizes, recipe.first + 1))
            and recipe.columns < len(recipe.shape)
            and recipe.shape[-1] % recipe.group == recipe.shape[-1] % recipe.pack == 0
            and stored.keys() == needed.keys()
            and (recipe.form == "scaled") == (recipe.block is not None)
            and all(len(stored[part]) == 2 for part in needed)
            and all(
                have >= want
                for part, shape in needed.items()
                for have, want in zip(stored[part], shape, strict=True)
            )
            and recipe.dtype in CONVERTIBLE_DTYPES
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        is_right = False
    if not is_right:
        raise InputError(f"{text:.60}", "this is not what a tensor is made of", "a tensor's name")
    return recipe


class QuantisedReader:
    """Makes boxes of a tensor by a recipe, strip by strip."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.tensors = {part: stored_matrix(*where) for part, where in recipe.parts.items()}

    def close(self) -> None:
        for tensor in self.tensors.values():
            tensor.close()

    def read(self, there: Box, target: Array, here: Box) -> None:
        """Make a box, and put it into a box of the target."""
        place: Any = (*here, ...)
        for box, part in strips(there, target[place], 8 * self.recipe.pack):
            if part.size:
                part[...] = self._box(box).reshape(part.shape)

    def _box(self, box: Box) -> Array:
        """Return a box of the tensor: rows and columns of the part of the matrix that covers it."""
        recipe = self.recipe
        indices = [np.arange(side.start, side.stop, side.step or 1) for side in box]
        shape = recipe.result[0]
        split = len(shape) - recipe.columns
        rows = _flat(indices[:split], shape[:split])
        columns = _flat(indices[split:], shape[split:])
        first, last = int(columns.min()) * recipe.pack, (int(columns.max()) + 1) * recipe.pack
        # Whole groups, and whole words of eight numbers.
        unit = int(np.lcm(recipe.group, 8)) if prod(recipe.shape[split:]) % 8 == 0 else recipe.group
        start, stop = first // unit * unit, -(-last // unit) * unit
        top, bottom = int(rows.min()), int(rows.max()) + 1
        own = slice(top + recipe.first, bottom + recipe.first)
        made = self._made(own, slice(start, stop))
        found: Array = made[np.ix_(rows - top, columns - start // recipe.pack)]
        return found

    def _made(self, rows: slice, columns: slice) -> Array:
        recipe = self.recipe
        integers, scales = FORMS[recipe.form](self.tensors, recipe, rows, columns)
        if recipe.make == "scales":
            return scales.astype(recipe.dtype)
        if recipe.make == "floats":
            floats: Array = integers * np.repeat(scales, recipe.group, axis=1)
            return floats.astype(recipe.dtype)
        if recipe.make == "int8":
            return integers.astype(np.int8)
        shifted = (integers + 8).astype(np.uint8)
        if integers.min() < -8 or integers.max() > 7:
            tensor = next(iter(recipe.parts.values()))
            raise InputError(tensor[0], f"{tensor[1]} has integers of more than 4 bits")
        packed: Array = shifted[:, ::2] | shifted[:, 1::2] << 4
        return packed


def _flat(indices: list[Array], shape: tuple[int, ...]) -> Array:
    """Return the numbers of the elements of a box in a tensor that is laid out in one row."""
    grid = np.meshgrid(*indices, indexing="ij")
    flat: Array = np.ravel_multi_index(tuple(part.ravel() for part in grid), shape)
    return flat


@dataclass(frozen=True)
class StoredMatrix:
    """A tensor of a file as a matrix, which is read part by part."""

    dataset: Dataset

    @property
    def shape(self) -> tuple[int, ...]:
        return self.dataset.shape

    @property
    def dtype(self) -> DType:
        return self.dataset.stored_dtype

    @cached_property
    def reader(self) -> RawReader:
        return RawReader(self.dataset)

    def close(self) -> None:
        """Close the file, if it has been opened."""
        if "reader" in self.__dict__:
            self.reader.close()

    def part(self, rows: slice, columns: slice) -> Array:
        """Return some rows and columns."""
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        found = np.empty(shape, self.dtype)
        self.reader.read((rows, columns), found, (slice(0, shape[0]), slice(0, shape[1])))
        return found

    @cached_property
    def whole(self) -> Array:
        """All of it."""
        return self.part(slice(0, self.shape[0]), slice(0, self.shape[1]))


def stored_matrix(file: str, tensor: str) -> StoredMatrix:
    """Look up a tensor with at most two dimensions as a matrix; a vector is a single row."""
    dataset = find_safetensors(file, tensor, file, STORED_DTYPES)
    return StoredMatrix(replace(dataset, shape=(1,) * (2 - len(dataset.shape)) + dataset.shape))


# ---- forms ---------------------------------------------------------------------------------------
#
# Each returns some rows and columns as numbers, and the scale of each group of columns.


_Tensors = Mapping[str, StoredMatrix]
_Numbers = tuple[Array, Array]


def _rounded(tensors: _Tensors, recipe: Recipe, rows: slice, columns: slice) -> _Numbers:
    """Round floats to the nearest integers, so that the greatest of a group is the greatest one.

    Integers are those for the scale as it is rounded to its dtype.
    """
    floats = tensors["weight"].part(rows, columns).astype(np.float32)
    groups = floats.reshape(len(floats), -1, recipe.group)
    most = _MOST[f"int{recipe.bits}"]
    scales = (np.abs(groups).max(axis=2) / np.float32(most)).astype(recipe.dtype).astype(np.float32)
    with np.errstate(all="ignore"):
        integers = np.where(scales[..., None] > 0, np.rint(groups / scales[..., None]), 0)
    return np.clip(integers, -most, most).reshape(floats.shape).astype(np.int8), scales


def _scaled(tensors: _Tensors, recipe: Recipe, rows: slice, columns: slice) -> _Numbers:
    """Take integers or 8-bit floats as they are; scales are of blocks of rows and columns."""
    numbers = tensors["weight"].part(rows, columns)
    if "float8" in numbers.dtype.name:
        numbers = numbers.astype(np.float32)
    scales = tensors["scale"].whole.astype(np.float32)
    shape = tensors["weight"].shape
    if scales.size == shape[0] and scales.shape[0] == 1:
        scales = scales.T  # one for each row
    assert recipe.block is not None
    tall, wide = recipe.block
    row = np.arange(rows.start, rows.stop) // tall
    column = np.arange(columns.start, columns.stop, recipe.group) // wide
    return numbers, scales[np.ix_(row, column)]


def _gptq(tensors: _Tensors, recipe: Recipe, rows: slice, columns: slice) -> _Numbers:
    """Unpack 4-bit numbers: eight columns of the matrix in a word. Its zeros are 1 less."""
    words = tensors["qweight"].part(slice(columns.start // 8, -(-columns.stop // 8)), rows)
    numbers = _nibbles(words).transpose(0, 2, 1).reshape(-1, words.shape[1]).T
    zeros, scales = _groups(tensors, recipe, rows, columns, tuple(range(8)))
    return numbers - zeros - (recipe.form == "gptq"), scales


def _awq(tensors: _Tensors, recipe: Recipe, rows: slice, columns: slice) -> _Numbers:
    """Unpack 4-bit numbers: eight rows of the matrix in a word, first those with even numbers."""
    wide = slice(rows.start // 8, -(-rows.stop // 8))
    numbers = _in_order(tensors["qweight"].part(columns, wide), _AWQ_ORDER)
    own = slice(rows.start - wide.start * 8, rows.stop - wide.start * 8)
    zeros, scales = _groups(tensors, recipe, rows, columns, _AWQ_ORDER)
    return numbers[:, own].T - zeros, scales


def _groups(
    tensors: _Tensors, recipe: Recipe, rows: slice, columns: slice, order: tuple[int, ...]
) -> _Numbers:
    """Return the zero of each number of the matrix, and the scale of each group of columns."""
    inputs = prod(recipe.shape[-recipe.columns :])
    wide = inputs // tensors["scales"].shape[0]
    scales = tensors["scales"].whole[:, rows].T.astype(np.float32)
    zeros = _in_order(tensors["qzeros"].whole, order)[:, rows].T
    each = np.arange(columns.start, columns.stop) // wide
    return zeros[:, each], scales[:, each[:: recipe.group]]


def _in_order(words: Array, order: tuple[int, ...]) -> Array:
    """Return the numbers of words, eight beside one another; `order` says which has which bits."""
    numbers = np.empty((*words.shape, 8), np.int16)
    numbers[..., order] = _nibbles(words)
    return numbers.reshape(len(words), -1)


def _nibbles(words: Array) -> Array:
    """Return the eight 4-bit numbers of each word in a dimension after it, the lowest first."""
    bits: Array = words.view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    return bits.astype(np.int16)


FORMS = {"rounded": _rounded, "scaled": _scaled, "gptq": _gptq, "gptq_v2": _gptq, "awq": _awq}
