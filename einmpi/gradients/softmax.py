"""Tensors that are a softmax: exp(x) over its own sum, whose derivative needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from einmpi.graph.derivatives.simple import is_number
from einmpi.graph.eingraph import Vertex
from einmpi.graph.einsum import reopen
from einmpi.graph.scalar import Call, Element, Scalar, labels_of, relabel


@dataclass(frozen=True)
class Softmax:
    """A tensor that is exp(x) over its own sum.

    Attributes
    ----------
    exponent
        x, over the labels of the tensor.
    normalised
        The labels of the sum.
    numerator, total
        The tensors with exp(x) and with its sum.
    """

    exponent: Scalar
    normalised: tuple[str, ...]
    numerator: str
    total: str

    @property
    def bypassed(self) -> tuple[str, str]:
        """The tensors that no part of the adjoint goes through."""
        return self.numerator, self.total


def find_softmax(vertex: Vertex, known: Mapping[str, Vertex]) -> Softmax | None:
    """Return a vertex as a softmax, None if it is none."""
    einsum = vertex.computed_einsum
    if not einsum.is_elementwise:
        return None
    match reopen(einsum, vertex.inputs):
        case Call("*", (Element() as numerator, Call("/", (one, Element() as total)))):
            if not is_number(one, 1):
                return None
        case Call("/", (Element() as numerator, Element() as total)):
            pass
        case _:
            return None
    if sorted(map(str, numerator.index)) != sorted(einsum.output):
        return None
    exponential = known[numerator.tensor].einsum
    if exponential is None or not exponential.is_elementwise:
        return None
    exponentials = reopen(exponential, known[numerator.tensor].inputs)
    if not isinstance(exponentials, Call) or exponentials.op != "exp":
        return None
    summed = known[total.tensor].einsum
    if summed is None or summed.aggregation != "sum" or summed.scan is not None:
        return None
    if summed.segments is not None or known[total.tensor].inputs != (numerator.tensor,):
        return None
    # The same element of exp(x) above and below, with labels named as in the quotient.
    read = reopen(summed, (numerator.tensor,))
    if not isinstance(read, Element) or set(read.index) != set(summed.labels):
        return None
    if len(set(read.index)) != len(read.index):
        return None
    own_label = dict(zip(map(str, read.index), map(str, numerator.index), strict=True))
    if tuple(own_label[label] for label in summed.output) != total.index:
        return None
    normalised = tuple(own_label[label] for label in summed.aggregated)
    exponent_label = dict(zip(exponential.output, map(str, numerator.index), strict=True))
    exponent = exponentials.args[0]
    if not set(labels_of(exponent)) <= set(exponent_label):
        return None
    return Softmax(relabel(exponent, exponent_label), normalised, numerator.tensor, total.tensor)
