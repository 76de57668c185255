"""The gradients of softmax attention among the kernels of a chain that computes weights again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from einmpi.graph.scalar import Call, Element, Scalar, labels_in
from einmpi.kernels.attention.expansion import (
    Expansion,
    Factors,
    NoMatchError,
    element_of,
    factors_of,
    number_of,
    only,
    require,
)
from einmpi.kernels.attention.pattern import (
    COLUMN_LABEL,
    CONTRACTED_LABEL,
    Attention,
    Mask,
    Weights,
    aggregated_extents,
    sort_labels,
    two_elements,
    weighted_sum,
    weights_of,
)
from einmpi.schedule.compute import Kernel

VALUE_LABEL = "value label"  # of V, which the slopes of weights sum over


@dataclass(frozen=True)
class _Slopes:
    """The slopes of scores, as a product, and what they are made of."""

    product: Factors
    weights: Weights
    slopes: Element  # of the weights
    products: Element  # the sum of weight · slope of each row
    is_divided: bool  # whether it is so; else it is the sum of exponential · slope
    other: Element  # what the product is multiplied by


def find_gradients(kernels: Sequence[Kernel], written: Sequence[str]) -> Attention | None:
    """Return the gradients that a chain computes; None if it computes anything else."""
    expansion = Expansion(kernels)
    for name in written:
        try:
            return _match(expansion, name, [other for other in written if other != name])
        except NoMatchError:
            continue
    return None


def _match(expansion: Expansion, name: str, others: Sequence[str]) -> Attention:
    """Return the gradients if the slot `name` is dQ, and the others are dK and dV."""
    kernel = expansion.producers[name]
    found = _slopes_of(expansion, weighted_sum(expansion, kernel))
    weights = found.weights
    product = factors_of(expansion.aggregation(found.slopes, "sum", VALUE_LABEL))
    d_o, v = two_elements(expansion, product)
    require(product.number == 1 and VALUE_LABEL in {*d_o.index} & {*v.index})
    _check_products(expansion, found)
    # The slopes are multiplied by K: its last label is that of dQ, which scores contract.
    names = _renaming(found.other, weights.k)
    d_q = Element(name, tuple([names.get(label, label) for label in kernel.einsum.output]))
    require(set(d_q.index) == set(weights.q.index))
    slope_einsum = expansion.producers[found.slopes.tensor].einsum
    extents = {**kernel.einsum.extent, **aggregated_extents(expansion, weights)}
    extents[VALUE_LABEL] = slope_einsum.extent[slope_einsum.aggregated[0]]
    elements = {"q": weights.q, "k": weights.k, "v": v, "d_o": d_o, "d_q": d_q}
    if weights.total is not None and expansion.is_given(weights.maximum):
        elements |= {"maxima": weights.maximum, "totals": weights.total}
    if expansion.is_given(found.products):
        elements["given"] = found.products
    factors = {"d_q": found.product.number}
    for other in others:
        try:
            gradient = "d_v"
            element = _value_gradient(expansion, elements, weights, other)
        except NoMatchError:
            gradient = "d_k"
            element, factors["d_k"] = _key_gradient(expansion, elements, found, other)
        require(gradient not in elements)
        elements[gradient] = element
    labels = sort_labels(weights, v, d_o, extents)
    return Attention(elements, weights.scores, labels, factors=factors)


def _slopes_of(expansion: Expansion, product: Factors) -> _Slopes:
    """Recognise weight · (slope of the weight − products) times an element.

    The total may divide all of it, or each term: then products are divided by it once more.
    """
    other = only([part for part in product.numerators if isinstance(part, Element)])
    inside, mask = _unmasked(_without(product, other))
    difference = only([part for part in inside.numerators if _is_sum(part)])
    exponential = only([part for part in inside.numerators if not _is_sum(part)])
    slope, subtracted = _difference(difference)
    slopes = element_of(only(slope.numerators))
    products = element_of(only(subtracted.numerators))
    weights = weights_of(expansion, exponential, inside.denominators + slope.denominators)
    below_products = list(inside.denominators + subtracted.denominators)
    is_divided = below_products == [weights.total]
    require(is_divided or below_products == [weights.total, weights.total])
    require(mask == weights.scores.mask and weights.total is not None)
    require(expansion.is_given(other))
    return _Slopes(inside, weights, slopes, products, is_divided, other)


def _is_sum(node: Scalar) -> bool:
    return isinstance(node, Call) and node.op in ("+", "-")


def _difference(node: Scalar) -> tuple[Factors, Factors]:
    """Return the two products of a difference, which may be written as a sum."""
    assert isinstance(node, Call)
    first, second = [factors_of(part) for part in node.args]
    signs = first.number, second.number if node.op == "-" else -second.number
    if signs == (-1, -1):
        return second, first
    require(signs == (1, 1))
    return first, second


def _without(product: Factors, factor: Scalar) -> Factors:
    numerators = tuple([part for part in product.numerators if part != factor])
    return replace(product, numerators=numerators)


def _unmasked(product: Factors) -> tuple[Factors, Mask | None]:
    """Return a product in which no mask makes slopes 0, and the mask."""
    match product.numerators:
        case (Call("where", (condition, seen, other)),) if number_of(other) == 0:
            mask = condition, False
        case (Call("where", (condition, other, seen)),) if number_of(other) == 0:
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
        require(found.is_divided)
        return
    product = factors_of(expansion.aggregation(found.products, "sum", COLUMN_LABEL))
    weights = found.weights
    require(product.number == 1)
    require(Counter(product.numerators) == Counter([weights.exponential, found.slopes]))
    require(list(product.denominators) == ([weights.total] if found.is_divided else []))


def _renaming(element: Element, wanted: Element) -> dict[str, str]:
    """Return the names that make an element of a tensor another element of it."""
    require(element.tensor == wanted.tensor)
    names = dict(zip(labels_in(element.index), labels_in(wanted.index), strict=True))
    require([name for label, name in names.items() if label != name] == [CONTRACTED_LABEL])
    return names


def _value_gradient(
    expansion: Expansion, elements: Mapping[str, Element], weights: Weights, name: str
) -> Element:
    """Return a slot as dV: the sum over rows of weights times dO."""
    d_o = elements["d_o"]
    summed, number, element = _summed(expansion, name, [weights.scores.element, d_o])
    require(Counter(summed.numerators) == Counter([weights.exponential, d_o]))
    require(list(summed.denominators) == [weights.total])
    require(number * summed.number == 1 and set(element.index) == set(elements["v"].index))
    return element


def _key_gradient(
    expansion: Expansion, elements: Mapping[str, Element], slopes: _Slopes, name: str
) -> tuple[Element, float]:
    """Return a slot as dK, which is the sum over rows of slopes of scores times Q, and a factor."""
    scores = slopes.weights.scores
    q = elements["q"]
    summed, number, element = _summed(expansion, name, [scores.element, q])
    inside, mask = _unmasked(_without(summed, q))
    require(_parts(inside) == _parts(slopes.product))
    require(mask == scores.mask and set(element.index) == set(elements["k"].index))
    return element, number * inside.number


def _parts(product: Factors) -> Counter[Scalar]:
    return Counter([*product.numerators, *product.denominators])


def _summed(
    expansion: Expansion, name: str, anchors: Sequence[Element]
) -> tuple[Factors, float, Element]:
    """Return what the kernel of a slot sums, a factor after the sum, and the slot's element."""
    output = expansion.producers[name].einsum.output
    outside, element = expansion.split_sum(expansion.producers[name])
    require(not outside.denominators and not expansion.is_given(element))
    kernel = expansion.producers[element.tensor]
    require(kernel.einsum.aggregation == "sum")
    body, names = expansion.anchored(kernel, anchors)
    inner = dict(zip(labels_in(element.index), kernel.einsum.output, strict=True))
    index = tuple([names[inner[label]] for label in output])
    return factors_of(body), outside.number, Element(name, index)
