"""Inputs that callers give: arrays, DistArrays and datasets, checked and as plans see them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.arguments import named_values
from einmpi.arrays.dist_array import DistArray
from einmpi.comm.base import Comm
from einmpi.errors import InputError, nearest_of
from einmpi.files.datasets import Dataset
from einmpi.files.hdf5.datasets import find_given
from einmpi.graph import matrices
from einmpi.graph.dtypes import DTYPES, dtype_name
from einmpi.graph.eingraph import EinGraph
from einmpi.job.job import Job
from einmpi.kernels.cuda.driver import cupy, is_device_array
from einmpi.kernels.reference import as_numpy, plain_array
from einmpi.planner.mesh import REVERSED, Mesh
from einmpi.planner.orders import fixed_orders, orders_agree
from einmpi.planner.plan import Options
from einmpi.runtime.gpu.copies import on_host
from einmpi.schedule.layout import Layout, even_layout


@dataclass(frozen=True)
class GivenArray:
    """An input given as an array that every rank has."""

    on_gpu: bool


@dataclass(frozen=True)
class GivenDataset:
    """An input given as a dataset in a file or as an object that is read box by box."""

    as_read: str


# How each input is given, by name; a DistArray by its layout.
InputKind: TypeAlias = Layout | GivenArray | GivenDataset
Kinds: TypeAlias = tuple[tuple[str, InputKind], ...]
_USED_AS_THEY_ARE: set[type] = {np.ndarray, DistArray}  # and CuPy's, once there is one


def checked_inputs(job: Job, comm: Comm, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Kinds]:
    """Return the given inputs as arrays of some kind, and how each is given."""
    given = {}
    for name, value in named_values("inputs", inputs).items():
        given[name] = as_input(job, name, value, as_array(name, value))
    if job.backend == "numpy":
        given = {name: on_host(array) for name, array in given.items()}
    kinds = check_inputs(job, given)
    for name, array in given.items():
        if isinstance(array, DistArray) and array.own_comm is not comm:
            raise InputError(
                "inputs",
                f"{name} is on another communicator",
                "DistArrays on the ranks of this run",
            )
    return given, kinds


def check_inputs(job: Job, given: Mapping[str, Any]) -> Kinds:
    """Return how each input is given; refuse missing, unknown and unsuitable ones.

    Inputs that come in batches are given with all their rows.
    """
    graph = job.graph
    specs = {spec.name for spec in job.inputs}
    rows = {spec.name: spec.rows for spec in job.inputs if spec.rows is not None}
    for name in given:
        is_input = name in graph.by_name and graph[name].is_input
        if name not in specs and not is_input:
            expected = nearest_of([vertex.name for vertex in graph.inputs], name)
            raise InputError("inputs", f"unknown input {name!r}", expected)
    kinds: list[tuple[str, InputKind]] = []
    for vertex in graph.inputs:
        if vertex.name not in given:
            if vertex.name not in specs:
                raise InputError("inputs", f"input {vertex.name} is not given", str(vertex))
            continue
        array = given[vertex.name]
        if vertex.name in rows:
            vertex = replace(vertex, bound=(rows[vertex.name], *vertex.bound[1:]))
        if tuple(array.shape) != vertex.bound or dtype_name(array.dtype) != vertex.dtype:
            extents = ", ".join(str(extent) for extent in array.shape)
            found = f"{dtype_name(array.dtype)}[{extents}]"
            hint = ""
            if tuple(array.shape) == vertex.bound:
                hint = f'convert it with .astype("{vertex.dtype}"), which may change values'
                if not hasattr(array, "astype"):
                    hint = "give an array, or convert the elements in the program"
            raise InputError("inputs", f"{vertex.name} is {found}", str(vertex), hint)
        kinds.append((vertex.name, kind_of(array)))
    return tuple(kinds)


def as_input(job: Job, name: str, value: Any, array: Any) -> Any:
    """Return a given array in the dtype of the input, if numpy calls a cast to it safe.

    `value` is what the caller gave. A number of Python adapts, as constants in programs do: an
    integer is a real number too.
    """
    vertex = job.graph.by_name.get(name)
    if vertex is None or not vertex.is_input or not hasattr(array, "astype"):
        return array
    if dtype_name(array.dtype) == vertex.dtype:
        return array
    wanted = np.dtype(vertex.dtype)
    if type(value) in (bool, int, float, complex):
        return _as_number_of(name, value, wanted, array)
    if not np.can_cast(np.dtype(array.dtype), wanted, "safe"):
        return array  # check_inputs refuses it
    return array.astype(wanted)


def _as_number_of(
    name: str, value: complex, dtype: np.dtype[Any], array: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Return a number of Python in a dtype that can hold its kind, else the array as it is."""
    kinds = "biufc"
    number_kind = {bool: "b", int: "i", float: "f", complex: "c"}[type(value)]
    kind = DTYPES[dtype.name].kind
    if kinds.index(number_kind) > kinds.index(kind):
        return array
    if kind in "iu" and type(value) is int:
        limits = np.iinfo(dtype)
        if not limits.min <= value <= limits.max:
            what = f"{name} is {value}, which does not fit into {dtype.name}"
            raise InputError("inputs", what, f"a number from {limits.min} to {limits.max}")
    with np.errstate(over="ignore"):
        return np.asarray(value).astype(dtype)


def is_array(given: Any) -> bool:
    """Return whether this is an array of numpy or CuPy."""
    return isinstance(given, np.ndarray) or is_device_array(given)


def outline_of(given: Mapping[str, Any], comm: Comm) -> Hashable:
    """Return all that checks and plans depend on, and how arrays on the host are stored.

    Return None if the inputs are not just arrays and DistArrays.
    """
    found: list[Hashable] = []
    for name, array in given.items():
        if type(array) is np.ndarray:
            stored = (array.shape, array.strides, array.dtype, array.flags.aligned)
            found.append((name, stored))
        elif isinstance(array, DistArray):
            if array.own_comm is not comm or array._is_given_away:
                return None  # the checks say what is wrong
            local = array.local
            stored_local: Hashable = None
            if type(local) is np.ndarray:
                stored_local = (local.strides, local.flags.aligned)
            found.append((name, array.layout, type(local), local.dtype, stored_local))
        elif is_device_array(array) or isinstance(array, np.ndarray):
            found.append((name, type(array), array.shape, array.dtype))
        else:
            return None
    return tuple(found)


def kind_of(array: Any) -> InputKind:
    if isinstance(array, DistArray):
        return array.layout
    if is_array(array):
        return GivenArray(on_gpu=is_device_array(array))
    if isinstance(array, Dataset):
        return GivenDataset(array.as_read())
    return GivenDataset("")


def as_array(name: str, given: Any) -> Any:
    """Return what a caller gave as an array of numpy or CuPy, a DistArray or a dataset.

    An h5py dataset becomes one that every rank can read.
    """
    given = as_plain_array(name, given)
    if is_array(given) or isinstance(given, DistArray):
        return given
    dataset = find_given(given)
    if dataset is not None:
        return dataset
    if hasattr(given, "shape") and isinstance(getattr(given, "dtype", None), np.dtype):
        return given
    return as_numpy("inputs", name, given)


def as_plain_array(name: str, given: Any) -> Any:
    """Return another library's array as one of numpy or CuPy, and all else as it is."""
    if type(given) in _USED_AS_THEY_ARE or isinstance(given, DistArray):
        return given
    if not is_device_array(given):
        return plain_array("inputs", name, given)
    array = cupy().asarray(given)
    if array is given:
        _USED_AS_THEY_ARE.add(type(given))
    return array


def as_plain_arrays(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return inputs with other libraries' arrays as those of numpy, so that the call is known.

    Wrong ones are left to the checks that all ranks do together.
    """
    try:
        for given in inputs.values():
            if type(given) not in _USED_AS_THEY_ARE:
                return {name: as_plain_array(name, given) for name, given in inputs.items()}
    except (AttributeError, InputError):
        pass
    return inputs


def with_inputs(options: Options, kinds: Kinds, backend: str) -> Options:
    """Return the options of a plan for inputs that are given in this way.

    An array is on every rank already, a DistArray is in its layout. The host's arrays may not fit
    on a GPU: if its memory is limited they are loaded when they are needed, ahead of the kernels
    that use them, like files.
    """
    host_arrays_stay = backend == "numpy" or options.memory is None
    layouts = {}
    orders = {}
    everywhere = []
    loaded_ahead = []
    mesh = options.mesh
    for name, kind in kinds:
        if isinstance(kind, Layout):
            layouts[name] = kind.cuts
            orders[name] = kind.orders
            if mesh is None:
                mesh = kind.mesh
        elif isinstance(kind, GivenDataset):
            loaded_ahead.append(name)
        elif (kind.on_gpu or host_arrays_stay) and name not in options.resident:
            everywhere.append(name)
        elif name not in options.resident:
            loaded_ahead.append(name)
    given_names = {name for name, _ in kinds}
    return replace(
        options,
        resident=(*(name for name in options.resident if name not in layouts), *everywhere),
        fitting=tuple(name for name in options.fitting if name not in given_names),
        pins={name: parts for name, parts in options.pins.items() if name not in layouts},
        given=layouts,
        orders={**options.orders, **orders},
        mesh=mesh,
        files=(*(name for name in options.files if name not in given_names), *loaded_ahead),
        stored={name: form for name, form in options.stored.items() if name not in given_names},
    )


def inputs_for_grids(graph: EinGraph, given: Mapping[str, Any]) -> list[str]:
    """Return DistArrays that plans put where functions of large matrices need them.

    Ranks have blocks in turns there: these lie otherwise, and move before they are used.
    """
    found = []
    for vertex in graph.computed:
        matrix = vertex.computed_einsum.matrix
        if matrix is None or not matrix.record.on_grid:
            continue
        if len(vertex.computed_einsum.operands[0]) > 2:
            continue
        is_large = graph[vertex.inputs[0]].nbytes >= matrices.LARGE_BYTES
        for name in vertex.inputs if is_large else ():
            array = given.get(name)
            if isinstance(array, DistArray) and not any(k < REVERSED for k in array.layout.orders):
                found.append(name)
    return found


def update_views(given: Mapping[str, Any]) -> None:
    """Read views again whose tensors have changed, on all ranks: not all may use the blocks."""
    for array in given.values():
        if isinstance(array, DistArray):
            array._update()


def move_to_one_mesh(given: dict[str, Any], mesh: Mesh | None, graph: EinGraph) -> bool:
    """Redistribute DistArrays to a mesh, by default that of the first; return whether any moved.

    Where the orders of their digits do not go together in a program, those move that are not in the
    order of the mesh.
    """
    moved = False
    layouts = {name: each.layout for name, each in given.items() if isinstance(each, DistArray)}
    orders = {name: layout.orders for name, layout in layouts.items()}
    fixed = fixed_orders({name: layout.cuts for name, layout in layouts.items()}, orders)
    agree = orders_agree(graph, {}, fixed)
    for name, array in given.items():
        if not isinstance(array, DistArray):
            continue
        if mesh is None:
            mesh = array.layout.mesh
        if array.layout.mesh != mesh or (array.layout.orders and not agree):
            given[name] = array.redistribute(even_layout(mesh, array.shape))
            moved = True
    return moved
