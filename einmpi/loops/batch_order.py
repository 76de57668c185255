"""The order in which a loop takes the rows of its batches: a function of seed and epoch alone."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.files.generate import words
from einmpi.job.loop import Shuffle

Numbers: TypeAlias = npt.NDArray[np.int64]

WINDOW_BLOCKS = 16  # whose rows are mixed with each other


class EpochOrder:
    """The order of the rows in one epoch.

    Each block of neighbouring rows gets a random word, and the blocks are sorted by these words. If
    blocks have more than one row, then the rows of each window of WINDOW_BLOCKS blocks get words
    and are sorted by them too. The words are those of two streams of a counter-based generator, one
    for blocks and one for rows, so that all ranks find the same order without asking each other.
    """

    def __init__(self, rows: int, shuffle: Shuffle, epoch: int) -> None:
        self.rows = rows
        self.block = shuffle.block
        # Generated inputs have keys below 2**64.
        self.key_of_blocks = shuffle.seed + 2**64 * (2 * epoch + 1)
        self.key_of_rows = shuffle.seed + 2**64 * (2 * epoch + 2)
        count = -(-rows // self.block)
        self.blocks: Numbers = np.argsort(words(self.key_of_blocks, 0, count), kind="stable")
        sizes = np.full(count, self.block)
        sizes[self.blocks == count - 1] = rows - (count - 1) * self.block
        ends = np.cumsum(sizes)
        last_blocks = np.arange(WINDOW_BLOCKS - 1, count - 1, WINDOW_BLOCKS)
        # Where in the order each window begins, and where the last one ends.
        self.window_bounds: Numbers = np.concatenate([[0], ends[last_blocks], [rows]])

    def window_of(self, position: int) -> int:
        """Return the number of the window that has a position."""
        return int(np.searchsorted(self.window_bounds, position, side="right")) - 1

    def rows_of_window(self, window: int) -> Numbers:
        """Return the rows of a window, in their new order."""
        chosen = self.blocks[window * WINDOW_BLOCKS : (window + 1) * WINDOW_BLOCKS]
        if self.block == 1:
            return chosen
        ranges = []
        for block in chosen:
            first = block * self.block
            ranges.append(np.arange(first, min(first + self.block, self.rows)))
        start = int(self.window_bounds[window])
        stop = int(self.window_bounds[window + 1])
        order = np.argsort(words(self.key_of_rows, start, stop), kind="stable")
        found: Numbers = np.concatenate(ranges)[order]
        return found

    def rows_at(self, start: int, stop: int) -> Numbers:
        """Return the rows at the positions from `start` to before `stop`."""
        if self.block == 1:
            return self.blocks[start:stop]
        found = [np.arange(0)]
        position = start
        while position < stop:
            window = self.window_of(position)
            first, last = self.window_bounds[window : window + 2].tolist()
            end = min(stop, last)
            found.append(self.rows_of_window(window)[position - first : end - first])
            position = end
        return np.concatenate(found)


def rows_in_order(rows: int, shuffle: Shuffle | None, epoch: int) -> Numbers:
    """Return all rows in the order of an epoch."""
    if shuffle is None:
        return np.arange(rows)
    return EpochOrder(rows, shuffle, epoch).rows_at(0, rows)
