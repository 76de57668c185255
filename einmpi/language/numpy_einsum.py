"""numpy.einsum's subscripts to a program: one statement, or one for each step of a path.

Ellipsis, implicit output, repeated labels and the interleaved form are included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from numbers import Integral
from operator import index
from typing import Any, TypeAlias

from einmpi.errors import InputError, one_of
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.einsum import element_text
from einmpi.units import counted

# In the order of implicit outputs.
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_INTERLEAVED_FORM = "einsum(a, [0, 1], b, [1, 2], [0, 2])"
CASTINGS = ("no", "equiv", "safe", "same_kind", "unsafe")
ORDERS = ("C", "F", "A", "K")
_NAMES = ("greedy", "optimal")  # that numpy knows
# Each step takes operands out of the list at these positions, and adds their product at its end.
Path: TypeAlias = tuple[tuple[int, ...], ...]


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


def program_text(
    subscripts: str,
    operands: Sequence[tuple[Sequence[int], str]],
    dtype: str,
    path: Path = (),
) -> str:
    """Return the statement "out[…] = …" over operands x0, x1, … of these shapes and dtypes.

    `dtype` is the one that all operands fit into. As in numpy.einsum it is that of the result,
    and operands are converted before they are multiplied: int32 × int32 × int64 must not wrap
    around in int32. The result of small integers is the same if it is computed in 64 bits.

    A path makes a statement of each of its steps, named like further operands.
    """
    shapes = [shape for shape, _ in operands]
    kind = DTYPES[dtype].kind if dtype in DTYPES else ""
    product_dtype = {"i": "int64", "u": "uint64"}.get(kind, dtype)
    terms, output = parse_subscripts(subscripts, shapes)
    extents = label_extents(terms, shapes)
    queue = []  # the operands that are left: their labels and how they are read
    for k, (term, shape) in enumerate(zip(terms, shapes, strict=True)):
        entries = []
        for label, size in zip(term, shape, strict=True):
            # As in numpy, an operand of extent 1 is repeated along its label.
            entries.append(label if size == extents[label] else "0")
        element = element_text(f"x{k}", entries)
        own_dtype = operands[k][1]
        wraps_before = len(operands) > 2 and DTYPES[own_dtype].kind in "iu"
        if (path or wraps_before) and own_dtype != product_dtype:
            element = f"{product_dtype}({element})"
        queue.append(([label for label in entries if label != "0"], element))

    times = " & " if dtype == "bool" else " * "
    aggregation = "any" if dtype == "bool" else "sum"
    steps = path or (tuple(range(len(operands))),)
    lines: list[str] = []
    for step in steps:
        taken = [queue[position] for position in sorted(step)]
        queue = [queue[position] for position in range(len(queue)) if position not in step]
        needed_later = set(output).union(*(labels for labels, _ in queue))
        body = times.join(element for _, element in taken)
        joined = [label for label in extents if any(label in labels for labels, _ in taken)]
        summed = [f"{label}:{extents[label]}" for label in joined if label not in needed_later]
        if summed:
            body = f"{aggregation}[{','.join(summed)}]({body})"
        name = f"x{len(operands) + len(lines)}"
        kept = [label for label in joined if label in needed_later]
        if len(lines) == len(steps) - 1:
            name, kept = "out", output
            if product_dtype != dtype or (kind in "iu" and not summed):
                # numpy.einsum keeps small integers; a sum would widen them
                body = f"{dtype}({body})"
        target = element_text(name, [f"{label}:{extents[label]}" for label in kept])
        lines.append(f"{target} = {body}")
        queue.append((kept, element_text(name, kept)))
    return "\n".join(lines)


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


def numbered_terms(
    subscripts: str, shapes: Sequence[Sequence[int]]
) -> tuple[list[frozenset[int]], frozenset[int], dict[int, int]]:
    """Return what a path optimizer takes: labels of the operands and the output, and extents.

    Numbers instead of letters: the order of a set of strings differs from run to run.
    """
    terms, output = parse_subscripts(subscripts, shapes)
    extents = label_extents(terms, shapes)
    number = {label: k for k, label in enumerate(extents)}
    inputs = [frozenset(number[label] for label in term) for term in terms]
    sizes = {number[label]: extents[label] for label in extents}
    return inputs, frozenset(number[label] for label in output), sizes


def path_of(optimize: Any, operand_count: int) -> Path:
    """Return the path that numpy's `optimize` gives; empty if the order is chosen here."""
    if isinstance(optimize, bool) or optimize is None or _is_name(optimize):
        return ()
    is_sequence = isinstance(optimize, list | tuple)
    if is_sequence and len(optimize) == 2 and optimize[0] in _NAMES:
        return ()  # with a limit of memory
    steps = list(optimize) if is_sequence else []
    if steps and isinstance(steps[0], str) and steps[0] == "einsum_path":
        steps = steps[1:]
    try:
        path = tuple(tuple(index(position) for position in step) for step in steps)
    except TypeError:
        path = ()
    if not path:
        what = f"optimize is {optimize!r:.60}"
        expected = "True, False, a name that opt_einsum knows, a path such as [(0, 1), (0, 1)]"
        raise EinsumTypeError("einsum", what, expected, "or a path optimizer")
    _check_path(path, operand_count)
    # Of two operands there is only one order.
    return path if operand_count > 2 else ()


def _is_name(optimize: Any) -> bool:
    """Return whether a text names a way to find a path in numpy or opt_einsum."""
    if not isinstance(optimize, str) or optimize in _NAMES:
        return isinstance(optimize, str)
    from opt_einsum.paths import get_path_fn  # slow to import, and few programs need it

    try:
        get_path_fn(optimize)
    except KeyError:
        return False
    return True


def _check_path(path: Path, operand_count: int) -> None:
    """Refuse a path that takes operands which are not there, or leaves more than one."""
    remaining = operand_count
    for step in path:
        is_valid = len(set(step)) == len(step) > 0 and min(step) >= 0 and max(step) < remaining
        if not is_valid:
            what = f"the path takes operands {step} of {remaining}"
            raise EinsumPathError("einsum", what, "positions of operands that are left")
        remaining += 1 - len(step)
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
