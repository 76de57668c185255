"""The planner's objective: bytes that move, or the time on a measured machine (docs/planner.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from einmpi.graph.eingraph import Vertex
from einmpi.graph.scalar import Arg, Call, Const, walk
from einmpi.planner.machine import Machine

# Operations that are taken to cost as much time as one byte, where no machine was measured.
FLOPS_PER_BYTE = 16
# Operations that are taken to last as long as a short message, about a microsecond.
OPERATIONS_OF_A_MESSAGE = 4096
# Bytes inside a node that are taken to cost as much as one byte between nodes, where no machine
# was measured. All ranks of a node share its network card, and memory is faster than that: say, 8
# ranks with 5 GB/s each and a card of 5 GB/s.
BETWEEN = 8
ATTOSECONDS_OF_A_PICOSECOND = 10**6
_PRODUCT_OPERATIONS = ("*", "conj", "neg")


PER_MILLE = 1000


@dataclass(frozen=True)
class Weights:
    """How a search counts the times of a machine.

    What a message takes depends on what else is on its way, and on what ranks share. A search adds
    up a price for each byte and each message instead. Plans that are found with several weights are
    compared by the times of their schedules.
    """

    inside: int = PER_MILLE  # thousandths of the time of what moves inside nodes
    between: int = PER_MILLE
    latency: str = "message"  # it counts for each "message", or for each "exchange"


@dataclass(frozen=True)
class Prices:
    """The price of what all ranks do together.

    The unit is a byte, or a picosecond of all ranks together where a machine was measured.
    """

    inside: int = 1  # a byte that stays inside a node
    between: int = BETWEEN  # a byte between nodes
    message_inside: int = 0  # a message that a rank receives
    message_between: int = 0
    memory: int = 1  # a byte of memory, at a memory price of one byte moved
    machine: Machine | None = None
    each_message: bool = True  # every message has a price, not only every exchange

    @classmethod
    def of(cls, machine: Machine | None, weights: Weights | None = None) -> Prices:
        """Return the prices of a measured machine, or those of bytes if it is None."""
        if machine is None:
            return cls()
        weights = weights or Weights()
        return cls(
            inside=-(-machine.inside * weights.inside // PER_MILLE),
            between=-(-machine.between * weights.between // PER_MILLE),
            # Latencies are nanoseconds and prices are picoseconds: a thousandth of a weight.
            message_inside=machine.latency_inside * weights.inside,
            message_between=machine.latency_between * weights.between,
            memory=max(1, machine.inside, machine.between),
            machine=machine,
            each_message=weights.latency == "message",
        )

    def bytes(self, total: Any, between: Any) -> Any:
        """Return the price of `total` bytes, of which `between` move between nodes.

        The amounts are whole numbers, or numpy arrays of them.
        """
        return (total - between) * self.inside + between * self.between

    def messages(self, inside: Any, between: Any) -> Any:
        """Return the price of the messages of an exchange for one rank.

        `inside` and `between` are the products of the axes that change on each level: a rank gets
        a message from each other rank.
        """
        others_inside = inside - 1
        others_between = between - 1
        if not self.each_message:
            others_inside = (inside > 1) * 1
            others_between = (between > 1) * 1
        return others_inside * self.message_inside + others_between * self.message_between

    def operation(self, vertex: Vertex) -> int:
        """Return the attoseconds that one operation of a vertex takes."""
        assert self.machine is not None, "no machine was measured"
        if _is_product(vertex):
            dtype = "int64" if vertex.dtype == "uint64" else vertex.dtype
            return self.machine.multiply.get(dtype, self.machine.element)
        return self.machine.element


BYTES = Prices()


def _is_product(vertex: Vertex) -> bool:
    """Return whether a vertex is a matrix product, or a batch of them."""
    einsum = vertex.einsum
    if einsum is None or einsum.aggregation != "sum" or len(einsum.operands) < 2:
        return False
    for node in walk(einsum.function):
        if isinstance(node, Call):
            if node.op not in _PRODUCT_OPERATIONS:
                return False
        elif not isinstance(node, Arg | Const):
            return False
    return True
