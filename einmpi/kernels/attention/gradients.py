"""The gradients of softmax attention among the kernels of a chain that computes weights again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from einmpi.graph.scalar import Call, Element, Scalar
from einmpi.kernels.attention.expansion import (
    Expansion,
    Factors,
    NoMatchError,
    factors_of,
    number_of,
)
from einmpi.kernels.attention.pattern import (
    Labels,
    aggregated_extents,
    sort_labels,
    weighted_sum,
)
from einmpi.kernels.attention.softmax import (
    COLUMN_LABEL,
    CONTRACTED_LABEL,
    Mask,
    Scores,
    Weights,
    two_elements,
    weights_of,
)
from einmpi.schedule.step import Kernel

VALUE_LABEL = "value label"  # of V, which the slopes of weights sum over


@dataclass(frozen=True)
class Gradient:
    """A gradient that a chain leaves: the kernel's result is `factor` times the gradient."""

    element: Element
    factor: float


@dataclass(frozen=True)
class AttentionGradients:
    """dQ, dK and dV of attention, from Q, K, V and dO.

    The maximum and total of each row, and its sum of weight · slope, are given or not.
    """

    q: Element
    k: Element
    v: Element
    d_o: Element
    d_q: Gradient
    d_k: Gradient | None
    d_v: Gradient | None
    maximum: Element | None
    total: Element | None
    products: Element | None
    scores: Scores
    labels: Labels


@dataclass(frozen=True)
class _Slopes:
    """The slopes of scores, as a product, and what they are made of."""

    factors: Counter[Scalar]
    weights: Weights
    slopes: Element  # of the weights
    products: Element  # the sum of weight · slope of each row
    is_divided: bool  # whether it is so; else it is the sum of exponential · slope
    other: Element  # what the product is multiplied by
    number: float


def find_gradients(kernels: Sequence[Kernel], written: Sequence[str]) -> AttentionGradients | None:
    """Return the gradients that a chain computes; None if it computes anything else."""
    expansion = Expansion(kernels)
    for name in written:
        try:
            return _match(expansion, name, [other for other in written if other != name])
        except NoMatchError:
            continue
    return None


def _match(expansion: Expansion, name: str, others: Sequence[str]) -> AttentionGradients:
    """Return the gradients if the slot `name` is dQ, and the others are dK and dV."""
    kernel = expansion.producers[name]
    found = _slopes_of(expansion, weighted_sum(expansion, kernel))
    weights = found.weights
    product = factors_of(expansion.aggregation(found.slopes, "sum", (VALUE_LABEL,)))
    d_o, v = two_elements(expansion, product, COLUMN_LABEL)
    if product.number != 1 or VALUE_LABEL not in {*d_o.index} & {*v.index}:
        raise NoMatchError
    _check_products(expansion, found)
    # The slopes are multiplied by K: its last label is that of dQ, which scores contract.
    names = _renaming(found.other, weights.k)
    d_q = Element(name, tuple([names.get(label, label) for label in kernel.einsum.output]))
    if set(d_q.index) != set(weights.q.index):
        raise NoMatchError
    extents = dict(kernel.einsum.extents)
    extents.update(aggregated_extents(expansion, weights))
    slope_kernel = expansion.producers[found.slopes.tensor]
    extents[VALUE_LABEL] = slope_kernel.einsum.extent[slope_kernel.einsum.aggregated[0]]
    maximum = None
    total = None
    if expansion.is_given(weights.maximum):
        maximum = weights.maximum
        total = weights.total
    products = None
    if expansion.is_given(found.products):
        products = found.products
    gradients = AttentionGradients(
        q=weights.q,
        k=weights.k,
        v=v,
        d_o=d_o,
        d_q=Gradient(d_q, found.number),
        d_k=None,
        d_v=None,
        maximum=maximum,
        total=total,
        products=products,
        scores=weights.scores,
        labels=sort_labels(weights, v, d_o, extents),
    )
    for other in others:
        gradients = _with_column_gradient(expansion, gradients, found, other)
    return gradients


def _slopes_of(expansion: Expansion, product: Factors) -> _Slopes:
    """Recognise weight · (slope of the weight − products) times an element.

    The total may divide all of it, or each term: then products are divided by it once more.
    """
    elements = [part for part in product.numerators if isinstance(part, Element)]
    if len(elements) != 1:
        raise NoMatchError
    (other,) = elements
    inside, mask = _unmasked(_without(product, other))
    differences = [part for part in inside.numerators if _is_sum(part)]
    exponentials = [part for part in inside.numerators if not _is_sum(part)]
    if len(differences) != 1 or len(exponentials) != 1:
        raise NoMatchError
    slope, subtracted = _difference(differences[0])
    if len(slope.numerators) != 1 or len(subtracted.numerators) != 1:
        raise NoMatchError
    slopes = slope.numerators[0]
    products = subtracted.numerators[0]
    if not isinstance(slopes, Element) or not isinstance(products, Element):
        raise NoMatchError
    denominators = inside.denominators + slope.denominators
    weights = weights_of(expansion, exponentials[0], denominators)
    below_products = list(inside.denominators + subtracted.denominators)
    is_divided = below_products == [weights.total]
    if not is_divided and below_products != [weights.total, weights.total]:
        raise NoMatchError
    if mask != weights.scores.mask or weights.total is None or not expansion.is_given(other):
        raise NoMatchError
    factors = Counter([*inside.numerators, *inside.denominators])
    return _Slopes(factors, weights, slopes, products, is_divided, other, inside.number)


def _is_sum(node: Scalar) -> bool:
    return isinstance(node, Call) and node.op in ("+", "-")


def _difference(node: Scalar) -> tuple[Factors, Factors]:
    """Return the two products of a difference, which may be written as a sum."""
    assert isinstance(node, Call)
    first, second = [factors_of(part) for part in node.args]
    if node.op == "+":
        second = replace(second, number=-second.number)
    if (first.number, second.number) == (-1, -1):
        first, second = second, first
        first = replace(first, number=1.0)
        second = replace(second, number=1.0)
    if (first.number, second.number) != (1, 1):
        raise NoMatchError
    return first, second


def _without(product: Factors, factor: Scalar) -> Factors:
    numerators = tuple([part for part in product.numerators if part != factor])
    return replace(product, numerators=numerators)


def _unmasked(product: Factors) -> tuple[Factors, Mask | None]:
    """Return a product in which no mask makes slopes 0, and the mask."""
    if len(product.numerators) != 1:
        return product, None
    match product.numerators[0]:
        case Call("where", (condition, seen, other)) if number_of(other) == 0:
            mask = condition, False
        case Call("where", (condition, other, seen)) if number_of(other) == 0:
            mask = condition, True
        case _:
            return product, None
    inner = factors_of(seen)
    number = product.number * inner.number
    denominators = product.denominators + inner.denominators
    return Factors(number, inner.numerators, denominators), mask


def _check_products(expansion: Expansion, found: _Slopes) -> None:
    """Check that products are sums over columns of weight · slope, unless they are given."""
    if expansion.is_given(found.products):
        if not found.is_divided:
            raise NoMatchError
        return
    product = factors_of(expansion.aggregation(found.products, "sum", (COLUMN_LABEL,)))
    weights = found.weights
    expected = Counter([weights.exponential, found.slopes])
    if product.number != 1 or Counter(product.numerators) != expected:
        raise NoMatchError
    if list(product.denominators) != ([weights.total] if found.is_divided else []):
        raise NoMatchError


def _renaming(element: Element, wanted: Element) -> dict[str, str]:
    """Return the names that make an element of a tensor another element of it."""
    if element.tensor != wanted.tensor:
        raise NoMatchError
    names = {}
    for label, name in zip(element.index, wanted.index, strict=True):
        assert isinstance(label, str)
        assert isinstance(name, str)
        names[label] = name
    changed = {label for label, name in names.items() if label != name}
    if [names[label] for label in changed] != [CONTRACTED_LABEL]:
        raise NoMatchError
    return names


def _with_column_gradient(
    expansion: Expansion, gradients: AttentionGradients, slopes: _Slopes, name: str
) -> AttentionGradients:
    """Return the gradients with the slot `name` as dV or dK, whichever it is."""
    try:
        d_v = _value_gradient(expansion, gradients, slopes.weights, name)
    except NoMatchError:
        d_k = _key_gradient(expansion, gradients, slopes, name)
        if gradients.d_k is not None:
            raise
        return replace(gradients, d_k=d_k)
    if gradients.d_v is not None:
        raise NoMatchError
    return replace(gradients, d_v=d_v)


def _value_gradient(
    expansion: Expansion, gradients: AttentionGradients, weights: Weights, name: str
) -> Gradient:
    """Return a slot as dV: the sum over rows of weights times dO."""
    d_o = gradients.d_o
    summed, number, output = _summed(expansion, name, [weights.scores.element, d_o])
    has_weights = Counter(summed.numerators) == Counter([weights.exponential, d_o])
    if not has_weights or list(summed.denominators) != [weights.total]:
        raise NoMatchError
    if number * summed.number != 1 or set(output) != set(gradients.v.index):
        raise NoMatchError
    return Gradient(Element(name, output), 1.0)


def _key_gradient(
    expansion: Expansion, gradients: AttentionGradients, slopes: _Slopes, name: str
) -> Gradient:
    """Return a slot as dK: the sum over rows of slopes of scores times Q."""
    scores = slopes.weights.scores
    summed, number, output = _summed(expansion, name, [scores.element, gradients.q])
    inside, mask = _unmasked(_without(summed, gradients.q))
    if Counter([*inside.numerators, *inside.denominators]) != slopes.factors:
        raise NoMatchError
    if mask != scores.mask or set(output) != set(gradients.k.index):
        raise NoMatchError
    return Gradient(Element(name, output), number * inside.number)


def _summed(
    expansion: Expansion, name: str, anchors: Sequence[Element]
) -> tuple[Factors, float, tuple[str, ...]]:
    """Return what the kernel of a slot sums, a factor after the sum, and the slot's labels."""
    kernel = expansion.producers[name]
    number = 1.0
    summing = kernel
    outer = {label: label for label in kernel.einsum.output}
    if not kernel.einsum.aggregated:
        outside = factors_of(expansion.body(kernel, outer))
        if len(outside.numerators) != 1 or outside.denominators:
            raise NoMatchError
        element = outside.numerators[0]
        if not isinstance(element, Element) or expansion.is_given(element):
            raise NoMatchError
        number = outside.number
        summing = expansion.producers[element.tensor]
        pairs = zip(element.index, summing.einsum.output, strict=True)
        outer = {label: own for label, own in pairs if isinstance(label, str)}
    if summing.einsum.aggregation != "sum":
        raise NoMatchError
    body, names = expansion.anchored(summing, anchors)
    output = tuple([names[outer[label]] for label in kernel.einsum.output])
    return factors_of(body), number, output
