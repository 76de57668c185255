"""The reference evaluator: an EinGraph in one process, by broadcasting over blocks of indices.

It is slow and plain on purpose: everything else is compared with it.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.errors import EinmpiError, InputError
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.dtypes import DTYPES, computed_dtype
from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.einsum import EinSum
from einmpi.graph.recurrences import Group, in_groups, vertex_at
from einmpi.graph.scalar import Arg, Call, labels_in
from einmpi.kernels.matrices import results_of_matrices
from einmpi.kernels.operands import check_index_range
from einmpi.kernels.prepared import apply, in_float32, reduce_block

MAX_BLOCK_ELEMENTS = 2**21  # of a temporary array

Array: TypeAlias = npt.NDArray[Any]
Block: TypeAlias = Mapping[str, range]  # the indices of each label


def evaluate(
    graph: EinGraph, inputs: Mapping[str, Array], kept: Mapping[str, Array] | None = None
) -> dict[str, Array]:
    """Return the outputs of a graph, computed in this process.

    Tensors in `kept` are 0 but where that says.
    """
    tensors = {vertex.name: np.asarray(inputs[vertex.name]) for vertex in graph.inputs}
    for part in in_groups(graph.vertices):
        vertices = part.vertices if isinstance(part, Group) else (part,)
        if isinstance(part, Group):
            _evaluate_group(part, tensors)
        elif part.einsum is not None:
            tensors[part.name] = _evaluate_at(part, part.einsum, part.inputs, tensors)
            if kept and part.name in kept:
                whole = tensors[part.name]
                tensors[part.name] = np.where(kept[part.name], whole, whole.dtype.type(0))
        for vertex in vertices:
            for name in graph.last_reads[vertex.name]:
                del tensors[name]
    return {name: tensors[name] for name in graph.outputs}


def _evaluate_group(group: Group, tensors: dict[str, Array]) -> None:
    """Compute tensors that read each other, one index of their label after another."""
    for vertex in group.vertices:
        tensors[vertex.name] = np.zeros(vertex.bound, vertex.dtype)
    for index in group.indices:
        for vertex in group.vertices:
            einsum, inputs = vertex_at(group, vertex, index)
            rows = np.moveaxis(tensors[vertex.name], group.along[vertex.name], 0)
            rows[index] = _evaluate_at(vertex, einsum, inputs, tensors)


def _evaluate_at(
    vertex: Vertex, einsum: EinSum, inputs: Sequence[str], tensors: Mapping[str, Array]
) -> Array:
    """Return the value of an EinSum of a vertex, which an error names."""
    operands = [tensors[name] for name in inputs]
    try:
        if einsum.matrix is not None:
            return results_of_matrices([einsum], operands)[0].astype(vertex.dtype)
        result = _whole_scan(einsum, operands, vertex.dtype)
        if result is None:
            result = _long_product(einsum, operands, vertex.dtype)
        if result is None:
            result = evaluate_einsum(einsum, operands, vertex.dtype)
        return result
    except (ValueError, IndexError, MemoryError) as error:
        raise EinmpiError(f"{vertex.located_name}: {error}") from error


def memory_needed(graph: EinGraph) -> int:
    """Return the most bytes of tensors that `evaluate` holds at once."""
    in_use = sum(vertex.nbytes for vertex in graph.inputs)
    peak = in_use
    for vertex in graph.computed:
        in_use += vertex.nbytes
        peak = max(peak, in_use)
        in_use -= sum(graph[name].nbytes for name in graph.last_reads[vertex.name])
    return peak


def _long_product(einsum: EinSum, operands: Sequence[Array], dtype: str) -> Array | None:
    """Return a sum of products of three or more tensors by opt_einsum; None for all else.

    Computed as written, four matrices of n rows would take n⁵ steps. The order of a product only
    changes the rounding if nothing overflows, and nothing at all in int64 and uint64.
    """
    factors = _plain_factors(einsum, operands)
    if einsum.aggregation != "sum" or len(factors) <= 2 or einsum.calls() == 0:
        return None
    arrays = [in_float32(array) for array, _ in factors]
    product = np.result_type(*arrays)
    if product.kind in "fc":
        bound = float(einsum.calls())
        for array in arrays:
            largest_value = float(np.abs(array).max())
            if not math.isfinite(largest_value):
                return None
            bound *= max(1.0, largest_value)
        if bound > float(np.finfo(product).max):
            return None
    elif any(array.dtype != dtype for array in arrays):
        return None
    arguments: list[Any] = []
    for array, (_, index) in zip(arrays, factors, strict=True):
        arguments.append(array.astype(DTYPES[dtype].accumulator, copy=False))
        arguments.append(list(index))
    from opt_einsum import contract  # slow to import, and few programs need it

    return np.asarray(contract(*arguments, list(einsum.output))).astype(dtype)


def _whole_scan(einsum: EinSum, operands: Sequence[Array], dtype: str) -> Array | None:
    """Return a cumulative sum, product, maximum or minimum by numpy; None for all else.

    Computed as written, n values would take n² steps.
    """
    scan = einsum.scan
    if scan is None or einsum.aggregation is None or einsum.calls() == 0:
        return None
    record = AGGREGATIONS[einsum.aggregation]
    entries = einsum.operands[0]
    order = [scan.scanned if label == scan.along else label for label in einsum.output]
    values = operands[0].transpose([entries.index(label) for label in order])
    wide_dtype = DTYPES[dtype].accumulator if record.is_rounded else dtype
    wide = values.astype(computed_dtype(np.dtype(wide_dtype)))
    axis = einsum.output.index(scan.along)
    with np.errstate(all="ignore"):
        result = np.asarray(record.combine.accumulate(wide, axis=axis))
        before_last = [slice(None)] * result.ndim
        before_last[axis] = slice(0, -1)
        place = tuple(before_last)
        result[place] = record.combine(result[place], wide.dtype.type(scan.masked))
        return result.astype(dtype)


def _plain_factors(
    einsum: EinSum, operands: Sequence[Array]
) -> list[tuple[Array, tuple[str, ...]]]:
    """Return the factors of a product of operands indexed by labels; none for anything else.

    All labels must be in some factor. A product of integers inside a product of floats wraps
    around on its own, so such a product has no factors here.
    """
    factors = []
    used: set[str] = set()
    waiting = [einsum.function]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Call) and node.op == "*":
            waiting.extend(reversed(node.args))
            continue
        if not isinstance(node, Arg):
            return []
        index = einsum.operands[node.position]
        labels = labels_in(index)
        if len(labels) < len(index):
            return []
        used.update(labels)
        factors.append((operands[node.position], labels))
    kinds = {array.dtype.kind for array, _ in factors}
    mixes_integers = len(kinds) > 1 and not kinds.isdisjoint("iu")
    if mixes_integers or used != set(einsum.labels):
        return []
    return factors


def evaluate_einsum(einsum: EinSum, operands: Sequence[Array], dtype: str) -> Array:
    """Return the result of one EinSum, block by block of the output."""
    result = np.empty(einsum.bound, dtype)
    with np.errstate(all="ignore"):
        for outer in blocks(einsum, einsum.output):
            if einsum.aggregation is None:
                values: Any = evaluate_block(einsum, operands, outer)
            else:
                values = _aggregate(einsum, einsum.aggregation, operands, outer, dtype)
            place = tuple(slice(index.start, index.stop) for index in outer.values())
            result[place] = values
    return result


def _aggregate(
    einsum: EinSum, aggregation: str, operands: Sequence[Array], outer: Block, dtype: str
) -> Any:
    """Return ⊕ over blocks of the aggregated labels of ⊗, for a block of the output."""
    record = AGGREGATIONS[aggregation]
    axes = tuple(range(len(einsum.output), len(einsum.labels)))
    total: Any = None
    for inner in blocks(einsum, einsum.aggregated):
        values = evaluate_block(einsum, operands, {**outer, **inner})
        part = reduce_block(aggregation, values, axes, dtype)
        total = part if total is None else record.combine(total, part)
    # There is no block if an aggregated label has extent 0.
    return record.empty if total is None else total


def blocks(einsum: EinSum, labels: Sequence[str]) -> Iterator[Block]:
    """Yield boxes that cover the ranges of the labels.

    Over all labels of the EinSum each box has at most MAX_BLOCK_ELEMENTS elements.
    """
    step = {label: max(1, extent) for label, extent in einsum.extents}
    while math.prod(step.values()) > MAX_BLOCK_ELEMENTS:
        widest = max(step, key=lambda label: step[label])
        step[widest] = -(-step[widest] // 2)
    cuts = []
    for label in labels:
        whole = range(einsum.extent[label])
        starts = whole[:: step[label]]
        cuts.append([whole[start : start + step[label]] for start in starts])
    for box in itertools.product(*cuts):
        yield dict(zip(labels, box, strict=True))


def evaluate_block(einsum: EinSum, operands: Sequence[Array], block: Block) -> Array:
    """Return ⊗ on a block, with an axis for each label: the output's, then the aggregated ones."""
    positions = {}
    for label, index in block.items():
        shape = [-1 if other == label else 1 for other in einsum.labels]
        positions[label] = np.arange(index.start, index.stop).reshape(shape)
    values: list[Any] = []
    for operand, entries in zip(operands, einsum.operands, strict=True):
        places: list[Any] = []
        for entry, extent in zip(entries, operand.shape, strict=True):
            if isinstance(entry, str):
                place: Any = positions[entry]
            else:
                place = apply(entry, values, positions)
            if np.size(place):
                check_index_range(np.min(place), np.max(place), extent)
            places.append(place)
        values.append(operand[tuple(places)])
    result = apply(einsum.function, values, positions)
    return np.broadcast_to(result, [len(block[label]) for label in einsum.labels])


# ---- given ---------------------------------------------------------------------------------------
#
# Arrays that are only values become numpy arrays; those that mean more are refused.


def plain_array(where: str, name: str, given: Any) -> Any:
    """Return an array or column of any library in host memory as a plain numpy array.

    One that would lose something is refused, also in a list: units, masked or missing elements,
    names of columns, the form of a sparse array. All else is returned as it is.
    """
    if type(given) in (np.ndarray, np.memmap):
        return given
    if isinstance(given, list | tuple):
        for item in given:
            # Most lists hold numbers, perhaps many.
            if not isinstance(item, int | float | complex | str):
                plain_array(where, name, item)
        return given
    more, hint = _more_than_values(given)
    if more:
        what = f"{name} is {more}, {type(given).__name__}"
        raise InputError(where, what, "an array of numbers alone", hint)
    if isinstance(given, np.ndarray) or is_of_other_library(given):
        return _as_numpy(where, name, given)
    return given


def as_numpy(where: str, name: str, given: Any, dtype: Any = None) -> npt.NDArray[Any]:
    """Return what a caller gave as a numpy array, of a dtype if there is one."""
    return _as_numpy(where, name, plain_array(where, name, given), dtype)


def is_of_other_library(given: Any) -> bool:
    """Return whether this is another library's array in host memory, or a column of a table."""
    kind = type(given)
    if hasattr(kind, "__dlpack__"):  # torch and JAX have it on any device
        return not hasattr(given, "__cuda_array_interface__")
    return hasattr(kind, "to_numpy") and not hasattr(kind, "dims")  # xarray's are read by boxes


def _as_numpy(where: str, name: str, given: Any, dtype: Any = None) -> npt.NDArray[Any]:
    try:
        # Neither numpy's DLPack nor torch's arrays of numpy know bfloat16. To view a tensor as
        # integers would drop its gradient without a word, where torch refuses all others.
        if str(getattr(given, "dtype", "")) == "torch.bfloat16" and not given.requires_grad:
            bits = given.view(sys.modules["torch"].uint16)
            return np.asarray(np.from_dlpack(bits).view("bfloat16"), dtype)
        if hasattr(type(given), "__dlpack__") and not hasattr(type(given), "__array__"):
            given = np.from_dlpack(given)
        return np.asarray(given, dtype)
    except (ValueError, TypeError, RuntimeError, BufferError) as error:
        raise InputError(where, f"{name} is not an array: {error}", "an array of numbers") from None


def _more_than_values(given: Any) -> tuple[str, str]:
    """Return what an array is that has more than values, and what to write instead; else "".

    Packages are never imported for this: their types are known by what they have.
    """
    kind = type(given)
    if hasattr(kind, "toarray"):
        return "a sparse array", "convert it with .toarray()"
    if hasattr(kind, "columns") or hasattr(kind, "__dataframe__"):
        return "a table", "give its columns one by one, or all of them with .to_numpy()"
    if hasattr(kind, "to_numpy"):
        if _missing_values(given):
            return "a column with missing values", "replace them by fillna(VALUE), fill_null(VALUE)"
        return "", ""
    is_array = isinstance(given, np.ndarray)
    if is_array and np.any(getattr(given, "mask", False)):
        hint = "fill masked elements with filled(VALUE), or use where() with the mask as an input"
        return "a masked array", hint
    has_units = given if is_array else kind  # attributes of a file's data may have these names
    if hasattr(has_units, "unit") or hasattr(has_units, "units"):
        return "an array with units", "give its numbers in a unit that you choose, .to_value(UNIT)"
    return "", ""


def _missing_values(column: Any) -> int:
    """Return how many elements are missing; nan is a value, unless pandas keeps a mask."""
    nulls = getattr(column, "null_count", 0)  # a method of polars, a number of pyarrow
    if hasattr(column, "isna") and not isinstance(column.dtype, np.dtype):
        nulls = column.isna().sum()
    return int(nulls() if callable(nulls) else nulls)
