"""What numpy's functions mean as statements, for symbols; and calls between two programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from einmpi.arrays import functions, indexing, products
from einmpi.arrays.indexing import Key
from einmpi.comm.base import Comm
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.einsum import element_text
from einmpi.language.numpy_einsum import program_text, split_arguments
from einmpi.tracing.statements import Node
from einmpi.tracing.symbols import (
    Symbol,
    Trace,
    broadcast_index,
    elementwise,
    is_number,
    number_text,
    operation_text,
    refuse,
    symbol_of,
    trace_of,
)


def _labels(ndim: int) -> list[str]:
    return [f"i{number}" for number in range(ndim)]


def _header(shape: Sequence[int]) -> str:
    """Return "out" with a label for each dimension, and its extent."""
    labels = _labels(len(shape))
    extents = [f"{label}:{size}" for label, size in zip(labels, shape, strict=True)]
    return element_text("out", extents)


# ---- functions of elements -----------------------------------------------------------------------


def apply_ufunc(
    ufunc: np.ufunc, method: str, inputs: Sequence[Any], options: dict[str, Any]
) -> Any:
    """Apply a numpy ufunc to symbols, arrays and numbers."""
    targets = options.pop("out", ())
    if method != "__call__" or ufunc.signature is not None:
        if targets:
            refuse(f"{ufunc.__name__} does not take out= here", "x = ... instead")
        return functions.apply_ufunc(ufunc, method, inputs, options)
    trace = trace_of([*inputs, *targets])
    dtype = options.pop("dtype", None)
    options.pop("casting", None)
    text = operation_text(ufunc)
    kinds = [_kind(value) for value in inputs]
    result = _result_dtype(ufunc, kinds, dtype)
    for name in options:
        refuse(
            f"{ufunc.__name__} does not take {name}= here", "operands", "np.where chooses values"
        )
    if text is None or result is None or result.name not in DTYPES:
        found = call_between(ufunc, inputs, {"dtype": dtype} if dtype else {})
    else:
        values = list(inputs)
        if dtype is not None:
            values = [
                value if is_number(value) else symbol_of(trace, value).astype(dtype)
                for value in inputs
            ]
        found = elementwise(trace, text, values, result)
    if not targets:
        return found
    (target,) = targets
    if not isinstance(target, Symbol):
        hint = "np.zeros_like(x) makes a tensor that can be written into"
        refuse("stores a symbol in an array of numpy", "x = ... instead", hint)
    if not np.can_cast(found.dtype, target.dtype, "same_kind"):
        raise TypeError(f"cannot cast {found.dtype} to {target.dtype} with casting same_kind")
    if found.shape != target.shape:
        raise ValueError(f"a result of shape {found.shape} does not fit {target.shape}")
    target.replace(cast(found, target.dtype).node)
    return target


def _kind(value: Any) -> Any:
    """Return what numpy has to know of an operand to find the dtype of a result."""
    if isinstance(value, Symbol) and value.is_weak:
        return complex if value.dtype.kind == "c" else float
    if isinstance(value, bool):
        return np.dtype(bool)
    if isinstance(value, int | float | complex) and not isinstance(value, np.generic):
        return type(value)
    if hasattr(value, "dtype"):
        return value.dtype
    return np.asarray(value).dtype


def _result_dtype(ufunc: np.ufunc, kinds: Sequence[Any], dtype: Any) -> np.dtype[Any] | None:
    """Return the dtype of a result; None for several results."""
    if ufunc.nout != 1:
        return None
    if dtype is not None:
        kinds = [np.dtype(dtype) for _ in kinds]
    found: np.dtype[Any] = ufunc.resolve_dtypes((*kinds, None))[-1]
    return found


def cast(symbol: Symbol, dtype: np.dtype[Any]) -> Symbol:
    """Return the elements in another dtype."""
    if symbol.dtype == dtype and not symbol.is_weak:
        return Symbol(symbol.own_trace, symbol.node)
    text = "{0}"
    if symbol.dtype.kind == "c" and dtype.kind != "c":
        text = "({0} != 0)" if dtype.kind == "b" else "real({0})"
    return elementwise(symbol.own_trace, f"{dtype.name}({text})", [symbol], dtype)


def where(condition: Any, x: Any = None, y: Any = None, /) -> Any:
    """Return elements of `x` where the condition is true, and of `y` elsewhere."""
    trace = trace_of([condition, x, y])
    if x is None or y is None:
        refuse("where(condition) has as many values as are true", "where(condition, x, y)")
    kinds = [_kind(value) for value in (x, y)]
    dtype = np.result_type(
        *(0.0 if kind is float else kind(0) if isinstance(kind, type) else kind for kind in kinds)
    )
    if is_number(condition):
        condition = np.asarray([condition])[0]
    return elementwise(trace, "where({0}, {1}, {2})", [condition, x, y], dtype)


def clip(array: Any, /, a_min: Any = None, a_max: Any = None, **options: Any) -> Any:
    """Limit the elements to a range."""
    lowest = options.pop("min", a_min)
    highest = options.pop("max", a_max)
    found = array
    if lowest is not None:
        found = np.maximum(found, lowest)
    return found if highest is None else np.minimum(found, highest)


def _round(array: Symbol, /, decimals: int = 0, **_: Any) -> Any:
    if decimals:
        return call_between(np.round, (array,), {"decimals": decimals})
    return elementwise(array.own_trace, "round({0})", [array], array.dtype)


def _part(name: str) -> Callable[[Symbol], Symbol]:
    """Return numpy's function `real` or `imag`: a view, which is not written into if complex."""

    def view(array: Symbol, /) -> Symbol:
        if name == "real" and array.dtype.kind != "c":
            return Symbol.view_of(array, lambda node: node, ...)
        dtype = np.empty(0, array.dtype).real.dtype.name

        def read(node: Node) -> Node:
            part = elementwise(
                array.own_trace, f"{name}({{0}})", [Symbol(array.own_trace, node)], dtype
            )
            return part.node

        return Symbol.view_of(array, read)

    return view


def _filled(value: Any) -> Callable[..., Symbol]:
    def like(array: Symbol, /, dtype: Any = None, device: Any = None) -> Symbol:
        return full_like(array, value, dtype)

    return like


def full_like(array: Symbol, value: Any, /, dtype: Any = None, device: Any = None) -> Symbol:
    """Return a tensor of equal elements."""
    kind = np.dtype(array.dtype if dtype is None else dtype)
    if not is_number(value):
        refuse("full_like with a tensor", "a number")
    text = f"{_header(array.shape)} = {kind.name}({number_text(value)})"
    return Symbol(array.own_trace, array.own_trace.add(text, {}))


def isclose(a: Any, b: Any, /, rtol: Any = 1e-5, atol: Any = 1e-8, equal_nan: bool = False) -> Any:
    """Return, for each element, whether two tensors are close to each other."""
    near = (abs(a - b) <= atol + rtol * abs(b)) & np.isfinite(b)
    found = near | np.equal(a, b)
    return found | (np.isnan(a) & np.isnan(b)) if equal_nan else found


# ---- elements by index ---------------------------------------------------------------------------


def select(array: Symbol, key: Any) -> Symbol:
    """Return the elements that a key selects: a view of them, if numpy has one."""
    trace = trace_of(list(_leaves((array, key))))
    array = symbol_of(trace, array)
    if indexing.is_basic(key):
        fixed = indexing.fixed_key(key)
        are_integers = all(isinstance(part, int | np.integer) for part in fixed)
        if array.ndim and len(fixed) == array.ndim and are_integers:  # a number, which is no view
            return Symbol(trace, _selected(trace, array.node, fixed))
        # Numbers of numpy have no views, but arrays without dimensions do: none is written into.
        written = fixed if array.ndim else None
        return Symbol.view_of(array, lambda node: _selected(trace, node, fixed), written)
    return Symbol(trace, _selected(trace, array.node, key))


def _selected(trace: Trace, node: Node, key: Any) -> Node:
    found = _read_key(Symbol(trace, node), key)
    assert isinstance(found.array, Symbol)
    operands = {"x": found.array.node}
    return trace.add(f"{_header(found.shape)} = {_element(trace, found, operands)}", operands)


def _read_key(array: Symbol, key: Any) -> Key:
    for part in key if isinstance(key, tuple) else (key,):
        if isinstance(part, Symbol) and part.dtype.kind == "b":
            refuse(
                "a mask selects as many values as are true",
                "np.where(mask, x, y)",
                "an aggregation takes np.where(mask, x, 0)",
            )
    return indexing.read_key(array, key)


def _element(trace: Trace, key: Key, operands: dict[str, Node]) -> str:
    """Return the element of `x` that a key selects for the labels of the result."""
    index: list[str] = ["0"] * key.array.ndim
    labels = iter(_labels(len(key.shape)))
    for group in key.groups:
        own = [next(labels) for _ in group.extents]
        for dimension in group.dimensions:
            chosen = key.indices[dimension]
            if isinstance(chosen, int):
                index[dimension] = str(chosen)
            elif isinstance(chosen, range):
                index[dimension] = _counted(own[0], chosen, key.array.shape[dimension])
            else:
                name = f"p{dimension}"
                table = symbol_of(trace, chosen)
                if isinstance(chosen, Symbol) and chosen.dtype.kind == "i":  # from the end
                    extent = key.array.shape[dimension]
                    table = elementwise(
                        trace, f"where({{0}} < 0, {{0}} + {extent}, {{0}})", [table]
                    )
                operands[name] = table.node
                place = broadcast_index(table.shape, own, group.extents)
                index[dimension] = element_text(name, place)
    return element_text("x", index)


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


def assign(array: Symbol, key: Any, value: Any) -> None:
    """Replace the elements that a key selects."""
    trace = trace_of([array])
    is_own_view = isinstance(value, Symbol) and value.base is array and indexing.is_basic(key)
    if is_own_view and value.key == indexing.fixed_key(key):
        return  # x[1:] += 1 has written into the view already
    if isinstance(key, Symbol) and key.dtype.kind == "b" and key.shape == array.shape:
        if not is_number(value):
            refuse("assigns values to a mask", "one number", "np.where(mask, values, x)")
        array.replace(cast(where(key, value, array), array.dtype).node)
        return
    if not indexing.is_basic(key):
        refuse("assigns by a table of indices", "integers and slices", "np.where chooses by values")
    found = indexing.read_key(array, indexing.fixed_key(key))
    if not prod(found.shape):
        return
    values: Any = value
    if not is_number(value):
        values = broadcast_to(symbol_of(trace, value), found.shape)
    labels = _labels(array.ndim)
    conditions: list[str] = []
    index: list[str] = []
    for group in found.groups:
        if not group.dimensions:
            index += ["0"] * len(group.extents)
        for dimension in group.dimensions:
            chosen = found.indices[dimension]
            label = labels[dimension]
            if isinstance(chosen, int):
                conditions.append(f"({label} == {chosen})")
                continue
            chosen, place = _place(label, chosen)
            index.append(place)
            conditions += _conditions(label, chosen, array.shape[dimension])
    operands = {"x": array.node}
    new = number_text(value) if is_number(value) else element_text("y", index)
    if not is_number(value):
        operands["y"] = values.node
    text = f"{array.dtype.name}({new})"
    if not is_number(value) and values.dtype == array.dtype:
        text = new
    if conditions:
        text = f"where({' & '.join(conditions)}, {text}, {element_text('x', labels)})"
    array.replace(trace.add(f"{_header(array.shape)} = {text}", operands))


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


def reshape(array: Symbol, shape: Any, copy: bool | None = None) -> Symbol:
    """Return the elements, in row-major order, in another shape."""
    bound = np.broadcast_to(np.int8(0), array.shape).reshape(shape).shape
    return Symbol.view_of(array, lambda node: _reshaped(array.own_trace, node, bound))


def _reshaped(trace: Trace, node: Node, bound: tuple[int, ...]) -> Node:
    """Return the elements in another shape: a group of dimensions becomes another one."""
    if not prod(bound):
        return trace.add(f"{_header(bound)} = {node.dtype.name}(0)", {})
    labels = _labels(len(bound))
    index: list[str] = []
    for old, new in _groups(node.shape, bound):
        extents = [node.shape[dimension] for dimension in old]
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
    return trace.add(f"{_header(bound)} = {element_text('x', index)}", {"x": node})


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


def with_dimensions(array: Symbol, order: Sequence[int | None]) -> Symbol:
    """Return a view with these of the old dimensions; None is a new one of extent 1."""
    labels = _labels(len(order))
    bound = [1 if old is None else array.shape[old] for old in order]
    index = [labels[order.index(old)] if old in order else "0" for old in range(array.ndim)]
    text = f"{_header(bound)} = {element_text('x', index)}"
    return Symbol.view_of(array, lambda node: array.own_trace.add(text, {"x": node}))


def broadcast_to(array: Symbol, shape: Any) -> Symbol:
    """Return the tensor with its elements repeated along dimensions of extent 1."""
    bound = (shape,) if isinstance(shape, int) else tuple(shape)
    if np.broadcast_shapes(array.shape, bound) != bound:
        raise ValueError(f"a tensor of shape {array.shape} cannot be broadcast to {bound}")
    index = broadcast_index(array.shape, _labels(len(bound)), bound)
    text = f"{_header(bound)} = {element_text('x', index)}"
    return Symbol.view_of(array, lambda node: array.own_trace.add(text, {"x": node}))


def concatenate(
    arrays: Sequence[Any], axis: int | None = 0, dtype: Any = None, casting: Any = "same_kind"
) -> Symbol:
    """Join tensors along a dimension; without one, their elements as vectors."""
    trace = trace_of(arrays)
    tensors: list[Any] = [symbol_of(trace, array) for array in arrays]
    if axis is None:
        tensors = [reshape(tensor, (-1,)) for tensor in tensors]
        axis = 0
    kind = np.dtype(dtype) if dtype else np.result_type(*(tensor.dtype for tensor in tensors))
    joined = normalize_axis_index(axis, tensors[0].ndim)
    with_elements = [tensor for tensor in tensors if tensor.shape[joined]]
    tensors = [cast(tensor, kind) for tensor in with_elements or tensors[:1]]
    for tensor in tensors:
        if [*tensor.shape[:joined], *tensor.shape[joined + 1 :]] != [
            *tensors[0].shape[:joined],
            *tensors[0].shape[joined + 1 :],
        ]:
            raise ValueError("the tensors differ in other dimensions than the one that is joined")
    labels = _labels(tensors[0].ndim)
    label = labels[joined]
    text = ""
    operands: dict[str, Node] = {}
    end = sum(tensor.shape[joined] for tensor in tensors)
    bound = [*tensors[0].shape[:joined], end, *tensors[0].shape[joined + 1 :]]
    for number in reversed(range(len(tensors))):
        end -= tensors[number].shape[joined]
        operands[f"x{number}"] = tensors[number].node
        index = list(labels)
        index[joined] = f"{label} - {end}" if end else label
        element = element_text(f"x{number}", index)
        after = end + tensors[number].shape[joined]
        text = f"where({label} < {after}, {element}, {text})" if text else element
    return Symbol(trace, trace.add(f"{_header(bound)} = {text}", operands))


def select_elements(array: Symbol, chosen: Sequence[Any]) -> Symbol:
    """Return the elements at some indices of each dimension."""
    operands = {"x": array.node}
    index = []
    for dimension, (label, part) in enumerate(zip(_labels(array.ndim), chosen, strict=True)):
        if isinstance(part, range):
            index.append(_counted(label, part, array.shape[dimension]))
        else:
            operands[f"p{dimension}"] = symbol_of(array.own_trace, np.asarray(part)).node
            index.append(element_text(f"p{dimension}", [label]))
    bound = [len(part) for part in chosen]
    text = f"{_header(bound)} = {element_text('x', index)}"
    return Symbol(array.own_trace, array.own_trace.add(text, operands))


def roll(array: Symbol, shift: Any, axis: Any = None) -> Symbol:
    """Return the tensor with elements shifted along dimensions; the last become the first."""
    if axis is None:
        return reshape(roll(reshape(array, (-1,)), shift, 0), array.shape)
    index = _labels(array.ndim)
    for one_shift, one_axis in np.broadcast(shift, axis):
        dimension = normalize_axis_index(one_axis, array.ndim)
        extent = max(array.shape[dimension], 1)
        distance = -int(one_shift) % extent
        if distance:
            index[dimension] = f"({index[dimension]} + {distance}) % {extent}"
    text = f"{_header(array.shape)} = {element_text('x', index)}"
    return Symbol(array.own_trace, array.own_trace.add(text, {"x": array.node}))


def pad(array: Symbol, pad_width: Any, mode: str = "constant", constant_values: Any = 0) -> Symbol:
    """Return the tensor with a border: of a constant, or of elements as `mode` says."""
    if mode not in ("constant", "edge", "reflect", "symmetric", "wrap"):
        refuse(
            f"pad does not take mode={mode!r} here", "constant, edge, reflect, symmetric or wrap"
        )
    if not is_number(constant_values) or isinstance(pad_width, dict):
        refuse("pad takes one number, and widths as pairs, here", "np.concatenate for others")
    widths = np.broadcast_to(np.asarray(pad_width), (array.ndim, 2)).tolist()
    if np.min(widths, initial=0) < 0:
        raise ValueError("a border is not negative")
    bound = []
    conditions = []
    index = []
    operands = {"x": array.node}
    border: Any = np.pad  # numpy declares only literal names of modes
    for dimension, ((before, after), extent) in enumerate(zip(widths, array.shape, strict=True)):
        label = f"i{dimension}"
        bound.append(before + extent + after)
        if mode == "constant":
            conditions += [f"({label} >= {before})"] * bool(before)
            conditions += [f"({label} < {before + extent})"] * bool(after)
            index.append(f"{label} - {before}" if before else label)
        else:
            table = border(np.arange(extent), (before, after), mode=mode)
            operands[f"p{dimension}"] = symbol_of(array.own_trace, table).node
            index.append(element_text(f"p{dimension}", [label]))
    text = element_text("x", index)
    if conditions:
        value = f"{array.dtype.name}({number_text(constant_values)})"
        text = f"where({' & '.join(conditions)}, {text}, {value})"
    return Symbol(array.own_trace, array.own_trace.add(f"{_header(bound)} = {text}", operands))


# ---- statements of others ------------------------------------------------------------------------


def evaluate_program(comm: Comm, text: str, arrays: Mapping[str, Any]) -> Symbol:
    """Return the tensor `out` of a statement."""
    trace = trace_of(list(arrays.values()))
    operands = {name: symbol_of(trace, array).node for name, array in arrays.items()}
    return Symbol(trace, trace.add(text, operands))


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
    nodes = {f"x{number}": symbol.node for number, symbol in enumerate(symbols)}
    return Symbol(trace, trace.add(text, nodes))


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
    arguments: Sequence[Any]  # with nodes in place of symbols
    options: Mapping[str, Any]
    operands: list[Node] = field(default_factory=list)
    results: list[Node] = field(default_factory=list)


def call_between(
    function: Callable[..., Any],
    arguments: Any,
    options: Mapping[str, Any],
    results: Sequence[tuple[Sequence[int], Any]] | None = None,
) -> Any:
    """Note a call that is made between two programs, and return symbols for its results.

    Without their shapes and dtypes, the function is called with zeros to find out.
    """
    trace = trace_of(list(_leaves(arguments)))
    arguments = _mapped(arguments, lambda value: symbol_of(trace, value), [])
    call = Call(function, (), dict(options))
    call.arguments = _mapped(arguments, lambda value: value.node, call.operands)
    level = 1 + max([operand.level for operand in call.operands], default=0)
    found: Any = results
    if results is None:
        with np.errstate(all="ignore"):
            found = function(*_mapped(arguments, _sample, []), **options)
        results = [(np.shape(value), np.asarray(value).dtype) for value in _several(found)]
    several = isinstance(found, list | tuple) and len(found) > 1
    for shape, dtype in results:
        trace.note_statement()
        name = f"result{trace.count}"
        call.results.append(Node(tuple(shape), np.dtype(dtype), name, call=call, level=level))
    symbols = [Symbol(trace, node) for node in call.results]
    if not several:
        return symbols[0]
    return type(found)(*symbols) if hasattr(found, "_fields") else tuple(symbols)


def _several(found: Any) -> Sequence[Any]:
    return found if isinstance(found, tuple) else (found,)


def _leaves(value: Any) -> Any:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _mapped(value: Any, function: Callable[[Symbol], Any], nodes: list[Node]) -> Any:
    """Return arguments with something else in place of symbols, whose nodes are noted."""
    if isinstance(value, Symbol):
        nodes.append(value.node)
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(each, function, nodes) for each in value)
    return value


def _sample(symbol: Symbol) -> Any:
    """Return an array of the shape and dtype of a symbol, on which most functions are defined."""
    shape = symbol.shape
    is_stack = len(shape) >= 2 and shape[-1] == shape[-2]
    values = np.eye(shape[-1], dtype=symbol.dtype) if is_stack else np.zeros((), symbol.dtype)
    return np.broadcast_to(values, shape).copy()


# numpy's functions of whole rows, or in the order of values; other functions are statements.
_CALLED_BETWEEN = {
    *functions._named(np, "sort argsort searchsorted median quantile percentile digitize isin"),
    *functions._named(np, "take_along_axis angle nan_to_num"),
    *functions._named(np, "interp nanmedian nanpercentile nanquantile sinc"),
    *functions._named(np.linalg, f"{functions._OF_MATRICES} solve"),
    *functions._named(np.fft, functions._TRANSFORMS),
}
_DEPENDS_ON_VALUES = {
    *functions._named(np, "unique unique_all unique_counts unique_inverse unique_values"),
    *functions._named(np, "nonzero argwhere histogram bincount"),
}
_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    **functions.FUNCTIONS,
    np.where: where,
    np.clip: clip,
    np.round: _round,
    np.around: _round,
    np.real: _part("real"),
    np.imag: _part("imag"),
    np.copy: lambda array, /: Symbol(array.own_trace, array.node),
    np.zeros_like: _filled(0),
    np.empty_like: _filled(0),
    np.ones_like: _filled(1),
    np.full_like: full_like,
    np.isclose: isclose,
    np.diagonal: products.diagonal,
    np.reshape: lambda array, shape, /, order="C", copy=None: reshape(array, shape),
    np.ravel: lambda array, /, order="C": reshape(array, (-1,)),
    np.broadcast_to: lambda array, shape, /: broadcast_to(array, shape),
    np.astype: lambda array, dtype, /, copy=True, device=None: cast(array, np.dtype(dtype)),
    np.einsum: einsum,
}
# Functions of `arrays` that move or compute elements, for symbols.
STAND_INS: dict[str, Callable[..., Any]] = {
    "reshape": reshape,
    "as_numpy_reshapes": reshape,
    "with_dimensions": with_dimensions,
    "broadcast_to": broadcast_to,
    "concatenate": concatenate,
    "select_elements": select_elements,
    "roll": roll,
    "pad": pad,
    "evaluate_program": evaluate_program,
    "product": product,
    "einsum_of_arrays": einsum,
    "of_single_elements": of_single_elements,
    "select": select,
}


def apply_function(
    function: Callable[..., Any], arguments: Sequence[Any], options: dict[str, Any]
) -> Any:
    """Evaluate a function of numpy on symbols."""
    if function in _CALLED_BETWEEN:
        return call_between(function, tuple(arguments), options)
    if function in _DEPENDS_ON_VALUES:
        what = f"{function.__name__} has as many results as the values say"
        refuse(what, "functions whose results have a known shape", "call it outside")
    return functions.apply_function(function, arguments, options, _FUNCTIONS)


def stand_in(name: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Call what takes the place of a function of `arrays` if there are symbols."""
    return STAND_INS[name](*arguments, **options)
