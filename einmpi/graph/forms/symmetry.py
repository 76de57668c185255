"""Which labels of a result can be swapped without changing it, as i and k in Σ[j](A[i,j] × A[k,j]):
one of C[i,k] and C[k,i] is then computed, and copied to the other."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, Call, Const, IndexEntries, Scalar, rebuild, relabel

COMMUTATIVE = frozenset({"+", "==", "!=", "&", "|", "^", "maximum", "minimum"})
ODD = frozenset({"conj", "real", "imag"})  # f(-x) is -f(x)

Swap = tuple[tuple[str, str], ...]  # the pairs of labels that are swapped at the same time
# An expression in a form that is equal for equal values; if True, the value is minus the form.
Signed = tuple[Scalar, bool]


def find_swap(einsum: EinSum, tensors: Sequence[Hashable], unsigned: bool = False) -> Swap | None:
    """Return labels of the output that can be swapped; None if the result is not symmetric.

    Swapping has to map operands and expression onto themselves, where arguments of commutative
    operations may change places, and what is squared may change its sign.

    Parameters
    ----------
    einsum
        The EinSum.
    tensors
        What each operand is an element of: equal objects for the same tensor.
    unsigned
        Whether there are unsigned integers, for which abs(x - y) is not abs(y - x).

    Example: (("i", "k"),) for C[i,k] ← Σ[j](A[i,j] × A[k,j]).
    """
    for one, other in itertools.combinations(range(len(tensors)), 2):
        if tensors[one] != tensors[other]:
            continue
        swap = _swap_of(einsum.operands[one], einsum.operands[other], einsum.output)
        if swap is not None and is_symmetric(einsum, tensors, swap, unsigned):
            return swap
    return None


def _swap_of(one: IndexEntries, other: IndexEntries, output: Sequence[str]) -> Swap | None:
    """Return the swap that makes one index the other one; None if there is none."""
    partner: dict[str, str] = {}
    for left, right in zip(one, other, strict=True):
        if left == right:
            continue
        if not isinstance(left, str) or not isinstance(right, str):
            return None
        if partner.setdefault(left, right) != right or partner.setdefault(right, left) != left:
            return None
    if not partner or not partner.keys() <= set(output):
        return None
    pairs = {tuple(sorted(pair, key=output.index)) for pair in partner.items()}
    first_labels = sorted(pairs, key=lambda pair: output.index(pair[0]))
    return tuple((first, second) for first, second in first_labels)


def is_symmetric(
    einsum: EinSum, tensors: Sequence[Hashable], swap: Swap, unsigned: bool = False
) -> bool:
    """Return whether an EinSum gives the same if these labels are swapped."""
    names = dict((*swap, *(pair[::-1] for pair in swap)))
    extent = einsum.extent
    if any(extent[first] != extent[second] for first, second in swap):
        return False
    numbers = {key: number for number, key in enumerate(zip(tensors, einsum.operands, strict=True))}
    swapped_number = {}
    for number, (tensor, index) in enumerate(zip(tensors, einsum.operands, strict=True)):
        if any(not isinstance(entry, str) for entry in index):
            return False
        swapped_index = tuple(names.get(str(entry), entry) for entry in index)
        found = numbers.get((tensor, swapped_index))
        if found is None:
            return False
        swapped_number[number] = found

    def renumber(leaf: Scalar) -> Scalar:
        return Arg(swapped_number[leaf.position]) if isinstance(leaf, Arg) else leaf

    swapped = relabel(rebuild(einsum.function, renumber), names)
    return _signed(swapped, unsigned) == _signed(einsum.function, unsigned)


def _signed(node: Scalar, unsigned: bool) -> Signed:
    """Return the form of an expression, and whether the expression is minus that.

    Arguments of commutative operations are sorted. Of x - y and y - x one is minus the other; the
    sign is lost in squares and absolute values.
    """
    if not isinstance(node, Call):
        return node, False
    parts = [_signed(arg, unsigned) for arg in node.args]
    if node.op == "neg":
        form, is_minus = parts[0]
        return form, not is_minus
    if node.op == "*":
        forms = sorted((form for form, _ in parts), key=repr)
        return Call("*", tuple(forms)), parts[0][1] != parts[1][1]
    if node.op == "-":
        left, right = map(_with_sign, parts)
        if repr(left) <= repr(right):
            return Call("-", (left, right)), False
        return Call("-", (right, left)), True
    if node.op == "**" and _is_even(node.args[1]):
        return Call("**", (parts[0][0], node.args[1])), False
    if node.op == "abs" and not unsigned:
        return Call("abs", (parts[0][0],)), False
    if node.op in ODD:
        form, is_minus = parts[0]
        return Call(node.op, (form,)), is_minus
    arguments = list(map(_with_sign, parts))
    if node.op in COMMUTATIVE:
        arguments.sort(key=repr)
    return Call(node.op, tuple(arguments)), False


def _with_sign(signed: Signed) -> Scalar:
    form, is_minus = signed
    return Call("neg", (form,)) if is_minus else form


def _is_even(node: Scalar) -> bool:
    if not isinstance(node, Const) or isinstance(node.value, complex):
        return False
    return node.value % 2 == 0
