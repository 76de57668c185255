"""The record of a fused chain in a plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FusedChain:
    """Vertices that are computed together, one block of rows at a time.

    They follow one another in the order of the plan's graph.
    """

    vertices: tuple[str, ...]  # in the order in which they are computed
    inner: tuple[str, ...]  # those of which only one block exists at a time
    rows: tuple[tuple[str, ...], ...]  # for each row, the label that it is in each vertex
    block: tuple[int, ...]  # how many indices of each row at a time
    nbytes: int  # of all blocks that a rank has at once, at most
    saved: int  # bytes of a rank that the inner tensors would take if they were whole

    @property
    def outer(self) -> tuple[str, ...]:
        """The vertices whose results are whole in the end."""
        return tuple(name for name in self.vertices if name not in self.inner)
