"""What DistArrays compute, as statements over symbols; and calls between two programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import numpy as np

from einmpi.arrays import functions, indexing, linalg, products
from einmpi.arrays.indexing import Group, Key
from einmpi.comm.base import Comm
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.einsum import element_text
from einmpi.language.numpy_einsum import program_text, split_arguments
from einmpi.tracing.statements import Node, header_of, labels_of
from einmpi.tracing.symbols import (
    TEXTS,
    Leaves,
    Symbol,
    Trace,
    broadcast_index,
    elementwise,
    flatten,
    is_number,
    number_text,
    refuse,
    symbol_of,
    trace_of,
    users_line,
)

# ---- functions of elements -----------------------------------------------------------------------


def on_blocks(
    where: str, function: Callable[..., Any], operands: Sequence[Any], fails_by_value: bool = False
) -> Any:
    """Return a function of elements; one that the language does not have is called between."""
    options: Mapping[str, Any] = {}
    if isinstance(function, partial):
        options = function.keywords
        function = function.func
    found = None
    if function in TEXTS and set(options) <= {"dtype", "casting"}:
        with np.errstate(all="ignore"):
            found = function(*map(_without_elements, operands), **options)
    if found is None or found.dtype.name not in DTYPES:
        return call_between(function, tuple(operands), options)
    trace = trace_of(operands)
    values = [np.bool_(value) if isinstance(value, bool) else value for value in operands]
    if options.get("dtype") is not None:
        for place, value in enumerate(values):
            if not is_number(value):
                values[place] = cast(symbol_of(trace, value), np.dtype(options["dtype"]))
    return elementwise(trace, TEXTS[function], values, found.dtype)


def _without_elements(value: Any) -> Any:
    """Return what numpy has to know of an operand to find the dtype of a result."""
    if isinstance(value, Symbol) and value.is_weak:
        return 1j if value.dtype.kind == "c" else 1.0
    if isinstance(value, int | float | complex) and not isinstance(value, np.generic):
        return value
    return np.empty(0, value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype)


def cast(symbol: Symbol, dtype: np.dtype[Any]) -> Symbol:
    """Return the elements in another dtype."""
    if symbol.dtype == dtype and not symbol.is_weak:
        return Symbol(symbol.own_trace, symbol.node)
    text = "{0}"
    if symbol.dtype.kind == "c" and dtype.kind != "c":
        text = "({0} != 0)" if dtype.kind == "b" else "real({0})"
    return elementwise(symbol.own_trace, f"{dtype.name}({text})", [symbol], dtype)


def clipped(array: Any, lowest: Any, highest: Any) -> Any:
    """Limit the elements to a range, either end of which may be None."""
    if lowest is not None:
        array = np.maximum(array, lowest)
    return array if highest is None else np.minimum(array, highest)


def filled(source: Symbol, bound: Sequence[int], value: Any) -> Symbol:
    """Return a tensor of equal elements."""
    text = f"{header_of(bound)} = {number_text(value)}"
    return source.own_trace.symbol(text, {})


# ---- elements by index ---------------------------------------------------------------------------


def selected(key: Key) -> Symbol:
    """Return the elements that a key selects."""
    trace = trace_of([key.array, *key.indices])
    operands = {"x": symbol_of(trace, key.array).node}
    index: list[str] = ["0"] * key.array.ndim
    labels = iter(labels_of(key.shape))
    for group in key.groups:
        own = [next(labels) for _ in group.extents]
        for dimension in group.dimensions:
            chosen = key.indices[dimension]
            if isinstance(chosen, int):
                index[dimension] = str(chosen)
            elif isinstance(chosen, range):
                index[dimension] = _counted(own[0], chosen, key.array.shape[dimension])
            else:
                table = _from_the_start(trace, chosen, key.array.shape[dimension])
                operands[f"p{dimension}"] = table.node
                place = broadcast_index(table.shape, own, group.extents)
                index[dimension] = element_text(f"p{dimension}", place)
    return trace.symbol(f"{header_of(key.shape)} = {element_text('x', index)}", operands)


def _from_the_start(trace: Trace, chosen: Any, extent: int) -> Symbol:
    """Return indices that do not count from the end. Those of arrays never do."""
    table = symbol_of(trace, chosen)
    if isinstance(chosen, Symbol) and chosen.dtype.kind == "i":
        return elementwise(trace, f"where({{0}} < 0, {{0}} + {extent}, {{0}})", [table])
    return table


def select_elements(array: Symbol, chosen: Sequence[Any]) -> Symbol:
    """Return the elements at some indices of each dimension."""
    groups = [Group((dimension,), (len(part),)) for dimension, part in enumerate(chosen)]
    return selected(Key(array, list(chosen), groups))


def select_by_mask(array: Any, mask: Any) -> Any:
    """Return the elements at which a mask is true that is known now."""
    if isinstance(mask, Symbol):
        hint = "an aggregation takes np.where(mask, x, 0)"
        refuse("a mask selects as many values as are true", "np.where(mask, x, y)", hint)
    return array[np.nonzero(mask)] if mask.ndim else array[None][[0] * bool(mask)]


def _counted(label: str, chosen: range, extent: int) -> str:
    """Return the indices of a slice as arithmetic on a label."""
    if len(chosen) == extent and chosen.step == 1:
        return label
    if chosen.step == 1:
        return f"{label} + {chosen.start}"
    factor = "" if abs(chosen.step) == 1 else f"{abs(chosen.step)} * "
    if chosen.step < 0:
        return f"{chosen.start} - {factor}{label}"
    return f"{factor}{label} + {chosen.start}"


def assign_by_mask(array: Any, mask: Any, value: Any) -> None:
    """Replace the elements at which a mask is true: by a number, if the mask is computed."""
    if prod(value.shape) == 1:
        _replace(array, np.where(mask, value.reshape(()), array))
    elif isinstance(mask, Symbol):
        refuse("assigns values to a mask", "one number", "np.where(mask, values, x)")
    else:
        array[np.nonzero(mask)] = value


def assign_by_key(key: Key, value: Any) -> None:
    """Replace the elements that a key selects."""
    array = key.array
    value = indexing._without_first_ones(value, len(key.shape))
    np.broadcast_to(np.broadcast_to(np.int8(0), value.shape), key.shape)  # or raise numpy's error
    if not prod(key.shape):
        return
    if any(not isinstance(chosen, int | range) and chosen.ndim for chosen in key.indices):
        _replace(array, _scattered(key, value))
        return
    trace = trace_of([array, value, *key.indices])
    operands: dict[str, Node] = {}
    labels = labels_of(array.shape)
    conditions: list[str] = []
    index: list[str] = []
    for group in key.groups:
        if not group.dimensions:
            index += ["0"] * len(group.extents)
        for dimension in group.dimensions:
            chosen = key.indices[dimension]
            label = labels[dimension]
            if isinstance(chosen, range):
                chosen, place = _place(label, chosen)
                index.append(place)
                conditions += _conditions(label, chosen, array.shape[dimension])
                continue
            if not isinstance(chosen, int):
                found = _from_the_start(trace, chosen, array.shape[dimension])
                chosen = f"p{dimension}"
                operands[chosen] = found.node
            conditions.append(f"({label} == {chosen})")
    if is_number(value):
        text = number_text(value.astype(array.dtype))
    else:
        values = cast(symbol_of(trace, value), array.dtype)
        operands["y"] = values.node
        text = element_text("y", broadcast_index(values.shape, index, key.shape))
    if conditions:
        operands["x"] = symbol_of(trace, array).node
        text = f"where({' & '.join(conditions)}, {text}, {element_text('x', labels)})"
    _replace(array, trace.symbol(f"{header_of(array.shape)} = {text}", operands))


def _scattered(key: Key, value: Any) -> Any:
    """Return a tensor with other elements at tables of indices; of equal ones, the last counts."""
    array = key.array
    trace = trace_of([array, value, *key.indices])
    places: Any = np.int64(0)  # in row-major order
    tables = indexing.tables_of(key)
    for table, extent in zip(tables, array.shape, strict=True):
        if isinstance(table, Symbol):
            table = _from_the_start(trace, table, extent).astype(np.int64)
            if array.ndim > 1:  # what is out of range must not become a place in another row
                table = np.where((table >= 0) & (table < extent), table, -array.size)
        places = places * extent + table
    vector = np.reshape(np.broadcast_to(places, key.shape), (-1,))
    text = f"out[p[i]:{array.size}] = max(i)"
    writer = evaluate_program(trace.comm, text, {"p": symbol_of(trace, vector)})
    last = np.reshape(writer, array.shape)
    values = np.reshape(np.broadcast_to(symbol_of(trace, value), key.shape), (-1,))
    return np.where(last < 0, array, values[np.maximum(last, 0)].astype(array.dtype))


def _replace(array: Any, values: Any) -> None:
    if not isinstance(array, Symbol):
        hint = "np.zeros_like(x) makes a tensor that can be written into"
        refuse("stores a symbol in an array", "x = ... instead", hint)
    array.replace(cast(values, array.dtype).node)


def _place(label: str, chosen: range) -> tuple[range, str]:
    """Return a slice in ascending order, and where a label is in it as it was."""
    if chosen.step < 0:
        ascending = chosen[::-1]
        return ascending, f"({chosen.start} - {label}) // {-chosen.step}"
    place = f"{label} - {chosen.start}" if chosen.start else label
    return chosen, place if chosen.step == 1 else f"({place}) // {chosen.step}"


def _conditions(label: str, chosen: range, extent: int) -> list[str]:
    found = []
    if chosen.start > 0:
        found.append(f"({label} >= {chosen.start})")
    if chosen.step > 1:
        found.append(f"(({label} - {chosen.start}) % {chosen.step} == 0)")
    last = chosen[-1] if chosen else -1
    if last < extent - 1 and (chosen.step == 1 or last + chosen.step < extent or not chosen):
        found.append(f"({label} <= {last})")
    return found


# ---- shapes --------------------------------------------------------------------------------------


def reshape(array: Symbol, shape: Any) -> Symbol:
    """Return the elements, in row-major order, in another shape.

    A group of dimensions becomes another one.
    """
    bound = np.broadcast_to(np.int8(0), array.shape).reshape(shape).shape
    if not prod(bound):
        return filled(array, bound, np.zeros((), array.dtype))
    labels = labels_of(bound)
    index: list[str] = []
    for old, new in _groups(array.shape, bound):
        extents = [array.shape[dimension] for dimension in old]
        terms = []
        for position, dimension in enumerate(new):
            stride = prod(bound[each] for each in new[position + 1 :])
            if bound[dimension] > 1:
                terms.append(f"{labels[dimension]} * {stride}" if stride > 1 else labels[dimension])
        place = " + ".join(terms) or "0"
        for position, extent in enumerate(extents):
            stride = prod(extents[position + 1 :])
            if extent == 1:
                index.append("0")
            elif len(extents) == 1:
                index.append(place)
            else:
                quotient = f"({place}) // {stride}" if stride > 1 else f"({place})"
                index.append(quotient if position == 0 else f"({quotient}) % {extent}")
    return _moved(array, bound, index)


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return which dimensions become which: each group has as many elements before and after."""
    found: list[tuple[list[int], list[int]]] = []
    first_old = first_new = 0
    while first_old < len(old) or first_new < len(new):
        last_old = min(first_old + 1, len(old))
        last_new = min(first_new + 1, len(new))
        while prod(old[first_old:last_old]) != prod(new[first_new:last_new]):
            if prod(old[first_old:last_old]) < prod(new[first_new:last_new]):
                last_old += 1
            else:
                last_new += 1
        found.append((list(range(first_old, last_old)), list(range(first_new, last_new))))
        first_old, first_new = last_old, last_new
    return found


def rearranged(array: Symbol, order: Sequence[int | None]) -> Symbol:
    """Return a tensor with these of the old dimensions; None is a new one of extent 1."""
    bound = [1 if old is None else array.shape[old] for old in order]
    labels = labels_of(bound)
    index = [labels[order.index(old)] if old in order else "0" for old in range(array.ndim)]
    return _moved(array, bound, index)


def broadcast_to(array: Symbol, shape: Any) -> Symbol:
    """Return the tensor with its elements repeated along dimensions of extent 1."""
    bound = np.broadcast_to(np.broadcast_to(np.int8(0), array.shape), shape).shape
    return _moved(array, bound, broadcast_index(array.shape, labels_of(bound), bound))


def _moved(array: Symbol, bound: Sequence[int], index: Sequence[str]) -> Symbol:
    text = f"{header_of(bound)} = {element_text('x', index)}"
    return array.own_trace.symbol(text, {"x": array.node})


def all_distributed(arrays: Sequence[Any]) -> list[Symbol]:
    trace = trace_of(arrays)
    return [symbol_of(trace, array) for array in arrays]


# ---- statements of others ------------------------------------------------------------------------


def evaluate_program(comm: Comm, text: str, arrays: Mapping[str, Any]) -> Symbol:
    """Return the tensor `out` of a statement."""
    return evaluate_programs(comm, [text], arrays)[0]


def evaluate_programs(comm: Comm, texts: Sequence[str], arrays: Mapping[str, Any]) -> list[Symbol]:
    """Return the tensors of statements."""
    trace = trace_of(list(arrays.values()))
    operands = {name: symbol_of(trace, array).node for name, array in arrays.items()}
    return [trace.symbol(text, operands) for text in texts]


def product(where: str, subscripts: str, *operands: Any) -> Symbol:
    """Return an einsum of operands."""
    return _einsum(subscripts, operands, None)


def einsum(*arguments: Any, dtype: Any = None, optimize: Any = False, **options: Any) -> Symbol:
    """Return an einsum, as `numpy.einsum`."""
    for name, value in options.items():
        if value is not None and value not in ("K", "safe"):
            refuse(f"einsum does not take {name} here", "subscripts and operands")
    subscripts, operands = split_arguments(arguments)
    return _einsum(subscripts, operands, dtype)


def _einsum(subscripts: str, operands: Sequence[Any], dtype: Any) -> Symbol:
    trace = trace_of(operands)
    symbols = [symbol_of(trace, operand) for operand in operands]
    if dtype is not None:
        symbols = [cast(symbol, np.dtype(dtype)) for symbol in symbols]
    kinds = [(symbol.shape, symbol.dtype.name) for symbol in symbols]
    common = products._common_dtype([symbol.dtype for symbol in symbols])
    text = program_text(subscripts, kinds, common)
    return evaluate_program(trace.comm, text, {f"x{k}": symbol for k, symbol in enumerate(symbols)})


def of_single_elements(name: str, array: Symbol, dtype: Any) -> Symbol:
    """Aggregate every element alone, which may still convert it."""
    sample = getattr(np, name)(np.ones(1, array.dtype), axis=())
    text = "abs({0} - {0})" if name in ("var", "std") else "{0}"
    return elementwise(array.own_trace, text, [array], np.asarray(sample, dtype).dtype)


# ---- calls between two programs ------------------------------------------------------------------


@dataclass(eq=False)
class Call:
    """A call of a function that no statement can express, between two programs."""

    function: Callable[..., Any]
    leaves: Leaves  # of its arguments, with nodes in place of symbols
    rebuild: Callable[[Leaves], Any]  # returns the arguments by position and by name
    results: list[Node] = field(default_factory=list)

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", "call")

    @property
    def operands(self) -> list[Node]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Node)]


def call_between(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    options: Mapping[str, Any],
    found: Any = None,
) -> Any:
    """Note a call that is made between two programs, and return symbols for its results.

    `found` are arrays of their shapes and dtypes; without it, the function is called with samples.
    """
    named_leaves, rebuild = flatten((tuple(arguments), dict(options)))
    leaves = [leaf for _, leaf in named_leaves]
    trace = trace_of(leaves)
    samples: Leaves = []
    for place, leaf in enumerate(leaves):
        samples.append(leaf)
        if isinstance(leaf, Symbol):
            samples[place] = _sample(leaf)
            leaves[place] = symbol_of(trace, leaf).node
    if found is None:
        given, named = rebuild(samples)
        with np.errstate(all="ignore"):
            found = function(*given, **named)
    call = Call(function, leaves, rebuild)
    level = 1 + max(operand.level for operand in call.operands)
    kinds, rebuild_results = flatten(found)
    for _, kind in kinds:
        trace.note_statement()
        node = Node(np.shape(kind), np.asarray(kind).dtype, call=call, level=level)
        node.line = users_line()
        call.results.append(node)
    return rebuild_results([Symbol(trace, node) for node in call.results])


def _sample(symbol: Symbol) -> Any:
    """Return an array of the shape and dtype of a symbol, on which most functions are defined."""
    shape = symbol.shape
    is_stack = len(shape) >= 2 and shape[-1] == shape[-2]
    values = np.eye(shape[-1], dtype=symbol.dtype) if is_stack else np.zeros((), symbol.dtype)
    return np.broadcast_to(values, shape).copy()


# numpy's functions of whole rows, or in the order of values; other functions are statements.
_CALLED_BETWEEN = {
    *functions._named(np, "sort argsort searchsorted median quantile percentile digitize isin"),
    *functions._named(np, "take_along_axis interp nanmedian nanpercentile nanquantile"),
    *functions._named(np.linalg, functions._OF_STACKS),
    *functions._named(np.fft, functions._TRANSFORMS),
}
_DEPENDS_ON_VALUES = {
    *functions._named(np, "unique unique_all unique_counts unique_inverse unique_values"),
    *functions._named(np, "nonzero argwhere histogram bincount"),
}
# What takes the place of functions of `arrays` if there are symbols.
STAND_INS: dict[str, Callable[..., Any]] = {
    "on_blocks": on_blocks,
    "converted": cast,
    "clipped": clipped,
    "filled": filled,
    "_selected": selected,
    "select_elements": select_elements,
    "_select_by_mask": select_by_mask,
    "_assign_by_mask": assign_by_mask,
    "_assign_by_key": assign_by_key,
    "reshape": reshape,
    "rearranged": rearranged,
    "broadcast_to": broadcast_to,
    "all_distributed": all_distributed,
    "evaluate_programs": evaluate_programs,
    "product": product,
    "einsum_of_arrays": einsum,
    "of_single_elements": of_single_elements,
}


def apply_function(
    function: Callable[..., Any], arguments: Sequence[Any], options: dict[str, Any]
) -> Any:
    """Evaluate a function of numpy on symbols."""
    is_of_matrices = function in linalg.STATEMENTS
    if function in _CALLED_BETWEEN or (
        is_of_matrices and not linalg.has_statement(function, arguments, options)
    ):
        return call_between(function, tuple(arguments), options)
    if function in _DEPENDS_ON_VALUES:
        what = f"{function.__name__} has as many results as the values say"
        refuse(what, "functions whose results have a known shape", "call it outside")
    return functions.apply_function(function, arguments, options)


def stand_in(name: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Call what takes the place of a function of `arrays` if there are symbols."""
    return STAND_INS[name](*arguments, **options)
