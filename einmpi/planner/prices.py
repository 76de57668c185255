"""What the planner makes small: bytes that move, or the time that a measured machine takes (docs/planner.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from einmpi.graph.eingraph import Vertex
from einmpi.graph.scalar import Arg, Call, Const, walk
from einmpi.planner.machine import Machine

# How many operations cost as much time as a byte, where no machine was measured.
FLOPS_PER_BYTE = 16
# How many bytes inside a node cost as much as one between nodes, where no machine was measured. All ranks of a node
# share its network card, and memory is faster than that: 8 ranks with 5 GB/s each, say, and a card of 5 GB/s.
BETWEEN = 8
_PRODUCT = ("*", "conj", "neg")


@dataclass(frozen=True)
class Prices:
    """Of what all ranks do, together: in bytes, or in picoseconds of all ranks where a machine was measured."""

    inside: int = 1  # a byte that stays inside a node
    between: int = BETWEEN
    message_inside: int = 0  # a message that a rank receives
    message_between: int = 0
    memory: int = 1  # a byte that would cost one if it moved
    machine: Machine | None = None

    @classmethod
    def of(cls, machine: Machine | None) -> Prices:
        if machine is None:
            return cls()
        messages = 1000 * machine.latency_inside, 1000 * machine.latency_between
        return cls(
            machine.inside,
            machine.between,
            *messages,
            max(1, machine.inside, machine.between),
            machine,
        )

    def bytes(self, total: Any, between: Any) -> Any:
        """Of bytes, some of which are between nodes."""
        return (total - between) * self.inside + between * self.between

    def messages(self, inside: Any, between: Any) -> Any:
        """Of the exchanges of a rank with one that differs from it along axes of these products."""
        return (inside - 1) * self.message_inside + (between - 1) * self.message_between

    def operation(self, vertex: Vertex) -> int:
        """Femtoseconds for each operation of a vertex."""
        assert self.machine is not None
        products = self.machine.multiply
        return (
            products.get(vertex.dtype, self.machine.element)
            if _is_product(vertex)
            else self.machine.element
        )


BYTES = Prices()


def _is_product(vertex: Vertex) -> bool:
    """Whether it is a matrix product, or many of them."""
    einsum = vertex.einsum
    if einsum is None or einsum.aggregation != "sum" or len(einsum.operands) < 2:
        return False
    nodes = walk(einsum.function)
    return all(
        isinstance(node, Arg | Const) or (isinstance(node, Call) and node.op in _PRODUCT)
        for node in nodes
    )
