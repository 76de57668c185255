"""numpy.einsum's subscripts to a program of one statement.

Ellipsis, implicit output, repeated labels and the interleaved form are included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

from einmpi.errors import InputError, one_of
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.einsum import element_text
from einmpi.units import counted

# In the order of implicit outputs.
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_INTERLEAVED_FORM = "einsum(a, [0, 1], b, [1, 2], [0, 2])"
CASTINGS = ("no", "equiv", "safe", "same_kind", "unsafe")
ORDERS = ("C", "F", "A", "K")
_PATHS = ("greedy", "optimal")


class EinsumTypeError(InputError, TypeError):
    """An argument of einsum has the wrong type; numpy raises TypeError there."""


class EinsumPathError(InputError, RuntimeError):
    """A path that does not fit the operands; numpy raises RuntimeError there."""


def split_arguments(arguments: Sequence[Any]) -> tuple[str, list[Any]]:
    """Return (subscripts, operands) of einsum's arguments, in either of its two forms."""
    if not arguments:
        expected = f"einsum('ij,jk->ik', a, b) or {_INTERLEAVED_FORM}"
        raise InputError("einsum", "there are no subscripts", expected)
    if isinstance(arguments[0], str):
        return arguments[0], list(arguments[1:])
    if len(arguments) == 1:
        raise InputError("einsum", "an array has no list of labels", _INTERLEAVED_FORM)
    has_output = len(arguments) % 2 == 1
    pairs = arguments[:-1] if has_output else arguments
    operands = list(pairs[::2])
    subscripts = ",".join(_letters(labels) for labels in pairs[1::2])
    if has_output:
        subscripts += "->" + _letters(arguments[-1])
    return subscripts, operands


def _letters(labels: Any) -> str:
    """Return the subscripts of a list of numbers."""
    if not isinstance(labels, Iterable):
        what = f"{labels!r} is not a list of labels"
        raise EinsumTypeError("einsum", what, "a list such as [0, 1]")
    letters = []
    for label in labels:
        if label is Ellipsis:
            letters.append("...")
        elif isinstance(label, Integral) and 0 <= int(label) < len(_LETTERS):
            letters.append(_LETTERS[int(label)])
        else:
            expected = f"a number from 0 to {len(_LETTERS) - 1}, or ..."
            raise InputError("einsum", f"{label!r} is not a label", expected)
    return "".join(letters)


def program_text(subscripts: str, operands: Sequence[tuple[Sequence[int], str]], dtype: str) -> str:
    """Return the statement "out[…] = …" over operands x0, x1, … of these shapes and dtypes.

    `dtype` is the one that all operands fit into. As in numpy.einsum it is that of the result,
    and operands are converted before they are multiplied: int32 × int32 × int64 must not wrap
    around in int32. The result of small integers is the same if it is computed in 64 bits.
    """
    shapes = [shape for shape, _ in operands]
    kind = DTYPES[dtype].kind if dtype in DTYPES else ""
    product_dtype = {"i": "int64", "u": "uint64"}.get(kind, dtype)
    terms, output = parse_subscripts(subscripts, shapes)
    extents = label_extents(terms, shapes)
    reads = []
    for k, (term, shape) in enumerate(zip(terms, shapes, strict=True)):
        index = []
        for label, size in zip(term, shape, strict=True):
            # As in numpy, an operand of extent 1 is repeated along its label.
            index.append(label if size == extents[label] else "0")
        element = element_text(f"x{k}", index)
        own_dtype = operands[k][1]
        wraps_before = len(operands) > 2 and DTYPES[own_dtype].kind in "iu"
        if wraps_before and own_dtype != product_dtype:
            element = f"{product_dtype}({element})"
        reads.append(element)
    is_bool = dtype == "bool"
    body = (" & " if is_bool else " * ").join(reads)
    summed = [f"{label}:{extents[label]}" for label in extents if label not in output]
    if summed:
        aggregation = "any" if is_bool else "sum"
        body = f"{aggregation}[{','.join(summed)}]({body})"
    if product_dtype != dtype or (kind in "iu" and not summed):
        body = f"{dtype}({body})"  # numpy.einsum keeps small integers; a sum would widen them
    target = element_text("out", [f"{label}:{extents[label]}" for label in output])
    return f"{target} = {body}"


def label_extents(
    terms: Sequence[Sequence[str]], shapes: Sequence[Sequence[int]]
) -> dict[str, int]:
    """Return the extent of each label, in order of first occurrence."""
    extents: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for label, size in zip(term, shape, strict=True):
            first_size = shape[term.index(label)]
            if size != first_size:
                what = f"label {label!r} has two extents: {first_size} and {size}"
                raise InputError("einsum", what, "the same extent within an operand")
            known = extents.setdefault(label, size)
            if known == 1:
                extents[label] = size
            elif size not in (1, known):
                what = f"label {label!r} has two extents: {known} and {size}"
                raise InputError("einsum", what, "the same extent, or 1")
    return extents


def check_optimize(optimize: Any, operand_count: int) -> None:
    """Refuse what is not a value of numpy's `optimize`. The order is chosen here in any case."""
    if isinstance(optimize, bool) or optimize is None or optimize in _PATHS:
        return
    is_sequence = isinstance(optimize, list | tuple)
    if is_sequence and len(optimize) == 2 and optimize[0] in _PATHS:
        return  # with a limit of memory
    if not is_sequence or not optimize or optimize[0] != "einsum_path":
        expected = "True, False, greedy, optimal, or a path of numpy.einsum_path"
        raise EinsumTypeError("einsum", f"optimize is {optimize!r:.60}", expected)
    _check_path(optimize[1:], operand_count)


def _check_path(path: Sequence[Iterable[int]], operand_count: int) -> None:
    """Refuse a path that takes operands which are not there, or leaves more than one."""
    remaining = operand_count
    for step in path:
        positions = set(step)
        if not positions or min(positions) < 0 or max(positions) >= remaining:
            what = f"the path takes operands {step} of {remaining}"
            raise EinsumPathError("einsum", what, "positions of operands that are left")
        remaining += 1 - len(positions)
    if remaining != 1:
        what = f"the path leaves {counted(remaining, 'operand')}"
        raise EinsumPathError("einsum", what, "a path that contracts all of them")


def check_choice(name: str, given: str, choices: Sequence[str]) -> str:
    """Return one of the allowed values of an argument, in the spelling of the list."""
    for choice in choices:
        if isinstance(given, str) and given.lower() == choice.lower():
            return choice
    raise InputError("einsum", f"{name} is {given!r:.60}", one_of(choices))


def parse_subscripts(
    subscripts: str, shapes: Sequence[Sequence[int]]
) -> tuple[list[list[str]], list[str]]:
    """Return the labels of every operand and of the output.

    The dimensions of an ellipsis are named e0, e1, … from the right.
    """
    left, arrow, right = subscripts.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(shapes):
        what = f"{left!r} has {counted(len(terms), 'operand')}"
        raise InputError("einsum", what, f"{len(shapes)}, one for each array")
    labels = []
    widest = 0  # dimensions of the longest ellipsis
    for term, shape in zip(terms, shapes, strict=True):
        hidden = len(shape) - len(term.replace("...", ""))
        if hidden < 0 or (hidden > 0 and "..." not in term):
            dimensions = counted(len(shape), "dimension")
            what = f"{term!r} does not fit an array with {dimensions}"
            raise InputError("einsum", what, "one label for each dimension, or ...")
        widest = max(widest, hidden)
        labels.append(_expand(term, hidden))
    if not arrow:
        return labels, _implicit_output(labels, widest)
    output = _expand(right, widest)
    if widest and "..." not in right:
        what = f"the output {right!r} has no ..."
        raise InputError("einsum", what, "... in the output, because an operand has it")
    for label in output:
        in_operands = any(label in term for term in labels)
        if output.count(label) > 1 or not in_operands:
            what = f"the output {right!r} is wrong at {label!r}"
            raise InputError("einsum", what, "labels of the operands, each once")
    return labels, output


def _implicit_output(labels: Sequence[Sequence[str]], widest: int) -> list[str]:
    """Return the dimensions of the ellipsis, then the labels that occur once, sorted."""
    counts: Counter[str] = Counter()
    for term in labels:
        counts.update(term)
    ellipsis = _ellipsis_labels(widest)
    once = [label for label, count in counts.items() if count == 1]
    return ellipsis + sorted(label for label in once if label not in ellipsis)


def _expand(term: str, count: int) -> list[str]:
    """Return the labels of a term whose ellipsis has `count` dimensions."""
    head, dots, tail = term.partition("...")
    for label in head + tail:
        if label not in _LETTERS:
            what = f"{label!r} in {term!r} is not a label"
            raise InputError("einsum", what, "letters, and ... at most once")
    middle = _ellipsis_labels(count) if dots else []
    return [*head, *middle, *tail]


def _ellipsis_labels(count: int) -> list[str]:
    return [f"e{k}" for k in reversed(range(count))]
