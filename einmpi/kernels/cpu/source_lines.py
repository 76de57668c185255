"""Lines of source, nested loops, and how values are kept in memory: what the sources of all
compiled CPU kernels share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from einmpi.graph.dtypes import DTYPES

# Outer loops of the output, and as many aggregated ones, that are written one inside another. With
# the six loops of tiles and lanes these are 20, the most that Python allows.
MAX_NESTED_LOOPS = 7


@dataclass
class SourceLines:
    """Lines of source with their indentation."""

    lines: list[str] = field(default_factory=list)
    depth: int = 1

    def add(self, *lines: str) -> None:
        self.lines += ["    " * self.depth + line for line in lines]

    def open(self, line: str) -> None:
        """Add a line that begins a block."""
        self.add(line)
        self.depth += 1

    def close(self) -> None:
        """End the innermost block."""
        self.depth -= 1

    def add_lane_loop(self, count: str | int, *lines: str) -> None:
        """Add a loop over lanes; {v} in its lines stands for the lane.

        Every loop has a variable of its own: numba compiles that fastest.
        """
        variable = f"v{len(self.lines)}"
        self.open(f"for {variable} in range({count}):")
        self.add(*(line.replace("{v}", variable) for line in lines))
        self.close()


def open_loops(loops: Sequence[int], text: SourceLines) -> None:
    """Open loops, one inside another; if there are too many, one loop counts for the outermost.

    The digits of its counter, in the mixed radix of the extents, are the indices of those loops.
    """
    surplus = len(loops) - MAX_NESTED_LOOPS
    counted = loops[: surplus + 1] if surplus > 0 else []
    nested = loops[len(counted) :]
    if counted:
        for loop in counted:
            text.add(f"e{loop} = b{loop}_0 - a{loop}_0")
        counter = f"q{counted[0]}"
        total = " * ".join(f"e{loop}" for loop in counted)
        text.open(f"for {counter} in range({total}):")
        text.add(f"{counter}_left = {counter}")
        for loop in reversed(counted):
            text.add(f"i{loop} = a{loop}_0 + {counter}_left % e{loop}")
            text.add(f"{counter}_left //= e{loop}")
    for loop in nested:
        text.open(f"for i{loop} in range(a{loop}_0, b{loop}_0):")


def stored_dtype(dtype: str) -> str:
    """Return the dtype in which numbers are kept in memory."""
    return DTYPES[dtype].numba_stored


def loaded(text: str, dtype: str) -> str:
    """Return a value from memory; truth values are kept as bytes."""
    return f"({text} != 0)" if dtype == "bool" else text


def stored(text: str, dtype: str) -> str:
    """Return a value as it is kept in memory."""
    return f"uint8({text})" if dtype == "bool" else text
