"""numpy.einsum's grammar → a program of one statement: ellipsis, implicit output, repeated labels, interleaved form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

from einmpi.errors import InputError

_LETTERS = (
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"  # in the order of implicit outputs
)


def split_arguments(arguments: Sequence[Any]) -> tuple[str, list[Any]]:
    """(subscripts, operands) of einsum's arguments, the interleaved form turned into text."""
    if not arguments:
        raise InputError(
            "einsum",
            "no subscripts",
            "einsum('ij,jk->ik', a, b) or einsum(a, [0, 1], b, [1, 2], [0, 2])",
        )
    if isinstance(arguments[0], str):
        return arguments[0], list(arguments[1:])
    if len(arguments) == 1:
        raise InputError(
            "einsum", "an array without its labels", "einsum(a, [0, 1], b, [1, 2], [0, 2])"
        )
    operands, lists = list(arguments[: len(arguments) // 2 * 2 : 2]), list(arguments[1::2])
    text = ",".join(_letters(entries) for entries in lists)
    return (text + "->" + _letters(arguments[-1]) if len(arguments) % 2 else text), operands


def _letters(entries: Any) -> str:
    if not isinstance(entries, Iterable):
        raise InputError("einsum", f"{entries!r} is not a list of labels", "such as [0, 1]")
    letters = []
    for entry in entries:
        if entry is Ellipsis:
            letters.append("...")
        elif isinstance(entry, Integral) and 0 <= int(entry) < len(_LETTERS):
            letters.append(_LETTERS[int(entry)])
        else:
            raise InputError(
                "einsum", f"{entry!r} is not a label", f"0 to {len(_LETTERS) - 1}, or ..."
            )
    return "".join(letters)


def program_text(subscripts: str, shapes: Sequence[Sequence[int]], dtype: str) -> str:
    """The statement "out[…] = …" over operands x0, x1, … of these shapes, with numpy's result dtype."""
    terms, output = _parse(subscripts.replace(" ", ""), shapes)
    extent: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for label, size in zip(term, shape, strict=True):
            if size != shape[term.index(label)]:
                sizes = f"{shape[term.index(label)]} and {size}"
                raise InputError(
                    "einsum", f"label {label} has two extents: {sizes}", "one extent in an operand"
                )
            known = extent.setdefault(label, size)
            if 1 not in (known, size) and known != size:
                raise InputError(
                    "einsum",
                    f"label {label} has two extents: {known} and {size}",
                    "one extent, or 1",
                )
            extent[label] = size if known == 1 else known
    # As in numpy, an operand of extent 1 is repeated along its label.
    reads = [
        _element(
            f"x{k}",
            [
                label if size == extent[label] else "0"
                for label, size in zip(term, shape, strict=True)
            ],
        )
        for k, (term, shape) in enumerate(zip(terms, shapes, strict=True))
    ]
    body = (" & " if dtype == "bool" else " * ").join(reads)
    summed = [
        label for label in dict.fromkeys(x for term in terms for x in term) if label not in output
    ]
    if summed:
        listed = ",".join(f"{label}:{extent[label]}" for label in summed)
        body = f"any[{listed}]({body})" if dtype == "bool" else f"sum[{listed}]({body})"
    if dtype == "int32":  # numpy.einsum keeps int32, where a sum would widen it
        body = f"int32({body})"
    return f"{_element('out', [f'{label}:{extent[label]}' for label in output])} = {body}"


def _element(name: str, index: Sequence[str]) -> str:
    return f"{name}[{','.join(index)}]" if index else name


def _parse(subscripts: str, shapes: Sequence[Sequence[int]]) -> tuple[list[list[str]], list[str]]:
    """The labels of every operand and of the output; an ellipsis' dimensions are named e0, e1, … from the right."""
    left, arrow, right = subscripts.partition("->")
    terms = left.split(",")
    if len(terms) != len(shapes):
        raise InputError(
            "einsum",
            f"{left!r} has {len(terms)} operands",
            f"as many as there are arrays: {len(shapes)}",
        )
    hidden = [
        len(shape) - len(term.replace("...", "")) for term, shape in zip(terms, shapes, strict=True)
    ]
    widest = max(
        (count for term, count in zip(terms, hidden, strict=True) if "..." in term), default=0
    )
    labels = []
    for term, shape, count in zip(terms, shapes, hidden, strict=True):
        if count < 0 or (count > 0 and "..." not in term):
            raise InputError(
                "einsum",
                f"{term!r} does not fit an array with {len(shape)} dimensions",
                "one label a dimension, or ...",
            )
        labels.append(_expand(term, count))
    if arrow:
        output = _expand(right, widest)
        if widest and "..." not in right:
            raise InputError("einsum", f"the output {right!r} has no ...", "the operands have one")
        for label in output:
            if output.count(label) > 1 or not any(label in term for term in labels):
                raise InputError(
                    "einsum",
                    f"the output {right!r} is wrong at {label!r}",
                    "operands' labels, each once",
                )
        return labels, output
    counts = Counter(label for term in labels for label in term)
    ellipsis = [f"e{k}" for k in reversed(range(widest))]
    return labels, ellipsis + sorted(
        label for label, n in counts.items() if n == 1 and label not in ellipsis
    )


def _expand(term: str, count: int) -> list[str]:
    head, dots, tail = term.partition("...")
    middle = [f"e{k}" for k in reversed(range(count))] if dots else []
    for label in head + tail:
        if label not in _LETTERS:
            raise InputError(
                "einsum", f"{label!r} in {term!r} is not a label", "letters, and ... at most once"
            )
    return [*head, *middle, *tail]
