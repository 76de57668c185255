"""Batches: the inputs of a loop of which each step takes the next rows, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from einmpi.errors import InputError, one_of
from einmpi.files.specs import InputSpec
from einmpi.graph.labels import MAX_EXTENT
from einmpi.language.toml_document import show
from einmpi.units import counted

ROWS = "rows"  # the input that has the number of rows in the batch of a step, without padding
EPOCH = "epoch"  # the input that has the number of the pass over all rows, from 0
LAST = ("drop", "pad")  # what happens to the rows after the last full batch; the first by default
MOST_EPOCHS = 2**53


@dataclass(frozen=True)
class Shuffle:
    """A new order of the rows in each epoch.

    Attributes
    ----------
    seed : int
        What the orders depend on.
    block : int
        How many neighbouring rows are read together; 1 if each row moves on its own.
    """

    seed: int
    block: int


@dataclass(frozen=True)
class Batches:
    """The inputs of which each step of a loop takes the next rows.

    Attributes
    ----------
    names : tuple of str
        The inputs.
    rows : int
        The number of rows that each of them has.
    batch : int
        The number of rows that a step takes.
    pads_last : bool
        Whether the rows after the last full batch are a batch too, padded with zeros; if not they
        are left out.
    shuffle : Shuffle or None
        How the order of the rows changes; None if they keep that of the files.
    epochs : int or None
        How often all rows are taken; None if the number of steps says when the loop ends.
    """

    names: tuple[str, ...]
    rows: int
    batch: int
    pads_last: bool = False
    shuffle: Shuffle | None = None
    epochs: int | None = None

    @property
    def steps_an_epoch(self) -> int:
        """The number of batches that all rows make."""
        full = self.rows // self.batch
        return full + 1 if self.pads_last and self.rows_after_last else full

    @property
    def rows_after_last(self) -> int:
        """The number of rows after the last full batch."""
        return self.rows % self.batch

    def epoch_of(self, step: int) -> int:
        """Return the number of the pass over all rows that a step belongs to."""
        return step // self.steps_an_epoch

    def first_of(self, step: int) -> int:
        """Return how many rows of its epoch the steps before a step have taken."""
        return step % self.steps_an_epoch * self.batch

    def count_of(self, step: int) -> int:
        """Return the number of rows of a step, without padding."""
        return min(self.batch, self.rows - self.first_of(step))


def make_batches(
    place: Callable[..., str],
    specs: Iterable[InputSpec],
    epochs: Any = None,
    shuffle: Any = None,
    last: Any = None,
) -> Batches | None:
    """Return the checked batches of a loop, None if no input comes in batches.

    `place` says for messages where a key of the loop is. `shuffle` is a seed, or a mapping with
    `seed` and `block`.
    """
    specs = tuple(specs)
    batched = [spec for spec in specs if spec.rows is not None]
    if not batched:
        for key, value in (("epochs", epochs), ("shuffle", shuffle), ("last", last)):
            if value is not None:
                what = f"there is {key}, but no input comes in batches"
                raise InputError(place(key), what, 'an input with batch = "SIZE"')
        return None
    rows, batch = _rows_and_batch(batched[0])
    for spec in batched[1:]:
        other_rows, other_batch = _rows_and_batch(spec)
        if other_rows != rows:
            what = f"{spec.name} has {counted(other_rows, 'row')}"
            expected = f"{rows}, as {batched[0].name}: their batches go together"
            raise InputError(spec.place, what, expected)
        if other_batch != batch:
            what = f"the batches of {spec.name} have {counted(other_batch, 'row')}"
            expected = f"{batch}, as those of {batched[0].name}"
            raise InputError(spec.place, what, expected)
    for spec in specs:
        if spec.name in (ROWS, EPOCH):
            what = f"in a loop with batches, {spec.name} is a number of each step"
            raise InputError(spec.place, what, "another name")
    last = LAST[0] if last is None else last
    if last not in LAST:
        raise InputError(place("last"), f"last is {last!r:.60}", one_of(LAST, str(last)))
    if epochs is not None:
        _check_epochs(place, epochs)
    pads_last = last == "pad"
    if not pads_last and rows < batch:
        what = f"{batched[0].name} has {counted(rows, 'row')}, fewer than a batch of {batch}"
        raise InputError(batched[0].place, what, f"at least {batch}", 'or last = "pad"')
    names = tuple(spec.name for spec in batched)
    found_shuffle = _make_shuffle(place, shuffle, batched)
    return Batches(names, rows, batch, pads_last, found_shuffle, epochs)


def _check_epochs(place: Callable[..., str], epochs: Any) -> None:
    if type(epochs) is not int or not 1 <= epochs <= MOST_EPOCHS:
        expected = f"an integer from 1 to 2**53 = {MOST_EPOCHS}"
        raise InputError(place("epochs"), f"epochs is {epochs!r:.60}", expected)


def _rows_and_batch(spec: InputSpec) -> tuple[int, int]:
    """Return the number of rows that an input has, and of those that a step takes."""
    assert spec.rows is not None and spec.shape
    if spec.rows == 0:
        raise InputError(spec.place, f"{spec.name} has 0 rows", "at least 1, for batches")
    return spec.rows, spec.shape[0]


def _make_shuffle(
    place: Callable[..., str], shuffle: Any, batched: Sequence[InputSpec]
) -> Shuffle | None:
    """Return the checked shuffle.

    A block has by default as many rows as the largest chunk of the files.
    """
    if shuffle is None:
        return None
    keys = {"seed": shuffle, "block": None}
    if isinstance(shuffle, Mapping):
        for key in shuffle:
            if key not in keys:
                what = f"shuffle has {key!r:.60}"
                raise InputError(place("shuffle"), what, one_of(tuple(keys), str(key)))
        keys = {"seed": None, "block": None, **shuffle}
    seed = keys["seed"]
    if type(seed) is not int or not 0 <= seed < 2**64:
        what = "shuffle has no seed" if seed is None else f"the seed of shuffle is {show(seed)}"
        raise InputError(place("shuffle"), what, "an integer from 0 to 2**64 - 1")
    block = keys["block"]
    if block is None:
        block = max(spec.chunk_rows for spec in batched)
    if type(block) is not int or not 1 <= block <= MAX_EXTENT:
        expected = f"an integer from 1 to 2**39 = {MAX_EXTENT}"
        raise InputError(place("shuffle"), f"the block of shuffle is {block!r:.60}", expected)
    return Shuffle(seed, block)
