"""Which labels of a result can be swapped without changing it, as i and k in Σ[j](A[i,j] × A[k,j]):
one of C[i,k] and C[k,i] is then computed, and copied to the other."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from einmpi.caches import bounded_cache
from einmpi.graph.arithmetic import infer_over
from einmpi.graph.einsum import EinSum
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import Arg, Call, Const, Index, IndexEntries, Scalar, rebuild, relabel

COMMUTATIVE = frozenset({"==", "!=", "&", "|", "^", "maximum", "minimum"})
# f(conj(x)) is conj(f(x)). Of functions with a branch cut this is not true everywhere.
CONJUGATED = frozenset({"+", "-", "*", "/", "neg", "where", "exp", "sin", "cos"})
REAL = frozenset({"&", "|", "^", "~"})

Swap = tuple[tuple[str, str], ...]  # the pairs of labels that are swapped at the same time
# An expression in a form that is equal for equal values; if True, the value is minus the form.
Signed = tuple[Scalar, bool]


class Symmetry(NamedTuple):
    """Labels of an output that can be swapped, and whether that conjugates the result."""

    swap: Swap
    conjugates: bool


def find_symmetry(
    einsum: EinSum, tensors: Sequence[Hashable], dtypes: Sequence[str]
) -> Symmetry | None:
    """Return labels of the output that can be swapped; None if the result is not symmetric.

    Swapping has to map operands and expression onto themselves, or onto their conjugates, where
    arguments of commutative operations may change places, and what is squared may change its sign.

    Parameters
    ----------
    einsum
        The EinSum.
    tensors
        What each operand is an element of: equal objects for the same tensor.
    dtypes
        Of these.

    Example: (("i", "k"),) for C[i,k] ← Σ[j](A[i,j] × A[k,j]), and the same for a conjugated A[k,j],
    which conjugates C.
    """
    for one, other in itertools.combinations(range(len(tensors)), 2):
        if tensors[one] != tensors[other]:
            continue
        swap = _swap_of(einsum.operands[one], einsum.operands[other], einsum.output)
        if swap is not None:
            conjugates = symmetry_under(swap, einsum, tensors, dtypes)
            if conjugates is not None:
                return Symmetry(swap, conjugates)
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


def symmetry_under(
    swap: Swap,
    einsum: EinSum,
    tensors: Sequence[Hashable],
    dtypes: Sequence[str],
    known: Mapping[str, bool] | None = None,
) -> bool | None:
    """Return whether an EinSum is conjugated if these labels are swapped.

    Return None if it neither stays the same nor is conjugated. `known` has tensors that are the
    same, or conjugated if it says so, wherever one index is swapped.
    """
    names = dict((*swap, *(pair[::-1] for pair in swap)))
    extent = einsum.extent
    if any(extent[first] != extent[second] for first, second in swap):
        return None
    found = _operands_before_and_after(einsum, tensors, names, known or {})
    if found is None:
        return None
    own, swapped = found
    types = tuple(dtypes)
    wanted = _signed(relabel(_with_operands(einsum.function, swapped), names), types)
    for conjugate in (False, True):
        if wanted == _signed(_with_operands(einsum.function, own), types, conjugate):
            return conjugate
    return None


def _operands_before_and_after(
    einsum: EinSum,
    tensors: Sequence[Hashable],
    names: Mapping[str, str],
    known: Mapping[str, bool],
) -> tuple[list[Scalar], list[Scalar]] | None:
    """Return what each operand is, and what it becomes where labels have these other names.

    Both are numbers of operands, or conjugates of these. None if it becomes none of them.
    """
    numbers = {key: number for number, key in enumerate(zip(tensors, einsum.operands, strict=True))}
    own: list[Scalar] = []
    swapped: list[Scalar] = []
    for number, (tensor, index) in enumerate(zip(tensors, einsum.operands, strict=True)):
        if any(not isinstance(entry, str) for entry in index):
            return None
        found = numbers.get((tensor, tuple(names.get(str(entry), entry) for entry in index)))
        if tensor in known and names.keys() <= set(index):
            first = Arg(number if found is None else min(number, found))
            mirrored = Call("conj", (first,)) if known[str(tensor)] else first
            is_first = first.position == number
            own.append(first if is_first else mirrored)
            swapped.append(mirrored if is_first else first)
        elif found is None:
            return None
        else:
            own.append(Arg(number))
            swapped.append(Arg(found))
    return own, swapped


def _with_operands(function: Scalar, operands: Sequence[Scalar]) -> Scalar:
    def leaf(node: Scalar) -> Scalar:
        return operands[node.position] if isinstance(node, Arg) else node

    return rebuild(function, leaf)


@bounded_cache(4096)
def _signed(node: Scalar, dtypes: tuple[str, ...], conjugate: bool = False) -> Signed:
    """Return the form of an expression or of its conjugate, and whether it is minus that.

    Arguments of commutative operations are sorted, and those of sums and products of several
    rounded numbers, too. Of x - y and y - x one is minus the other; the sign is lost in squares and
    absolute values. Operands and unknown functions are conjugated.
    """
    if not isinstance(node, Call):
        return _conjugated(node) if conjugate else node, False
    if node.op == "conj":
        return _signed(node.args[0], dtypes, not conjugate)
    unsigned = any(dtype.startswith("u") for dtype in dtypes)
    if node.op in ("real", "imag") or (node.op == "abs" and not unsigned):
        return _signed_real(node, dtypes)
    conjugate = conjugate and node.op not in REAL and not OPERATIONS[node.op].is_comparison
    goes_inside = node.op in CONJUGATED or (node.op == "**" and _is_multiple(node.args[1], 1))
    parts = []
    for part, is_minus in _operands(node, dtypes):
        form, is_minus_form = _signed(part, dtypes, conjugate and goes_inside)
        parts.append((form, is_minus != is_minus_form))
    form, is_minus = _signed_call(node, parts)
    return _conjugated(form) if conjugate and not goes_inside else form, is_minus


def _operands(node: Call, dtypes: tuple[str, ...]) -> list[Signed]:
    """Return the arguments of a call, and whether each is subtracted.

    Those of a sum or product in another one are among them, if both are rounded alike.
    """
    ops = ("+", "-") if node.op in ("+", "-") else ("*",)
    dtype = np.dtype(infer_over(node, dtypes))
    found = []
    for number, arg in enumerate(node.args):
        inner: list[Signed] = [(arg, False)]
        is_nested = isinstance(arg, Call) and node.op in ops and arg.op in ops
        if is_nested and dtype.kind in "fc" and np.dtype(infer_over(arg, dtypes)) == dtype:
            assert isinstance(arg, Call)
            inner = _operands(arg, dtypes)
        is_subtracted = node.op == "-" and number == 1
        found += [(part, is_minus != is_subtracted) for part, is_minus in inner]
    return found


def _signed_real(node: Call, dtypes: tuple[str, ...]) -> Signed:
    """Return the form of a real function of a complex number: that of x or of conj(x)."""
    plain, mirrored = (_signed(node.args[0], dtypes, conjugate) for conjugate in (False, True))
    chosen = min(plain, mirrored, key=lambda signed: repr(signed[0]))
    is_minus = chosen[1] != (node.op == "imag" and chosen is mirrored)
    return Call(node.op, (chosen[0],)), is_minus and node.op != "abs"


def _signed_call(node: Call, parts: list[Signed]) -> Signed:
    """Return the form of a call, given those of its operands."""
    form, is_minus = parts[0]
    if node.op == "neg":
        return form, not is_minus
    if node.op == "*":
        forms = sorted((form for form, _ in parts), key=repr)
        return Call("*", tuple(forms)), sum(is_minus for _, is_minus in parts) % 2 == 1
    if node.op in ("+", "-"):
        parts.sort(key=repr)
        is_minus = parts[0][1]
        return Call(
            "+", tuple(_with_sign((form, minus != is_minus)) for form, minus in parts)
        ), is_minus
    if node.op == "**" and _is_multiple(node.args[1], 2):
        return Call("**", (form, node.args[1])), False
    arguments = list(map(_with_sign, parts))
    if node.op in COMMUTATIVE:
        arguments.sort(key=repr)
    return Call(node.op, tuple(arguments)), False


def _conjugated(form: Scalar) -> Scalar:
    if isinstance(form, Const) and isinstance(form.value, complex):
        return Const(form.value.conjugate())
    return form if isinstance(form, Const | Index) else Call("conj", (form,))


def _with_sign(signed: Signed) -> Scalar:
    form, is_minus = signed
    return Call("neg", (form,)) if is_minus else form


def _is_multiple(node: Scalar, divisor: int) -> bool:
    if not isinstance(node, Const) or isinstance(node.value, complex):
        return False
    return node.value % divisor == 0
