"""Jobs with sparse inputs: their patterns first, then a job over what is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from einmpi.arrays.dist_array import DistArray
from einmpi.arrays.products import compile_einsum
from einmpi.comm.agreement import together
from einmpi.comm.base import ALONE, Comm
from einmpi.compiled.given_inputs import as_input
from einmpi.errors import InputError, nearest_of
from einmpi.graph.sparse.coordinates import Coordinates
from einmpi.graph.sparse.desugar import Desugared, desugar
from einmpi.job.job import Job
from einmpi.kernels.reference import as_numpy
from einmpi.language.numpy_einsum import split_arguments
from einmpi.sparse_array import SparseArray, as_coordinates, is_sparse


@dataclass(frozen=True)
class StoredJob:
    """A job over what is stored, and how the results of the program follow from its own."""

    job: Job
    desugared: Desugared
    whole: Job  # the job of the user

    def inputs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of the job, from those of the user."""
        found: dict[str, Any] = {}
        for name, value in {**given, **self.desugared.arrays}.items():
            if name in self.job.graph.by_name or name not in self.whole.written.by_name:
                found[name] = value
                if name in self.desugared.formats:
                    found[name] = value.values
                elif is_sparse(value):
                    found[name] = as_coordinates(name, value).dense()
        return found

    def results(self, outputs: Mapping[str, DistArray]) -> dict[str, Any]:
        """Return the results of the user's job: sparse tensors in place of what is stored."""
        found: dict[str, Any] = {}
        for name, values in outputs.items():
            found[name] = values
            if name in self.desugared.formats:
                keys = self.desugared.patterns[name].keys
                shape = self.whole.written[name].bound
                found[name] = SparseArray(keys, values, shape, self.desugared.implicit(name))
        return found


def has_sparse(inputs: Any) -> bool:
    """Return whether one of the inputs is sparse. Small calls are to take a few microseconds.

    What is no mapping is left to the checks.
    """
    if not isinstance(inputs, Mapping):
        return False
    for value in inputs.values():
        kind = type(value)
        if kind is not np.ndarray and kind is not DistArray and is_sparse(value):
            return True
    return False


def with_coordinates(comm: Comm, job: Job, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs with sparse tensors of other libraries as keys and values, all checked."""

    def convert() -> dict[str, Any]:
        found = dict(inputs)
        for name, value in inputs.items():
            if is_sparse(value):
                tensor = value
                if not isinstance(value, SparseArray):
                    tensor = as_coordinates(name, value)
                found[name] = as_input(job, name, value, tensor)
                _check_fit(job, name, found[name])
        return found

    return together(comm, convert)


def _check_fit(job: Job, name: str, given: Any) -> None:
    """Refuse a sparse tensor that is not the input of this name."""
    vertex = job.written.by_name.get(name)
    if vertex is None or not vertex.is_input:
        known = [each.name for each in job.written.inputs]
        raise InputError("inputs", f"unknown input {name!r}", nearest_of(known, name))
    if (given.shape, given.dtype.name) != (vertex.bound, vertex.dtype):
        extents = ", ".join(map(str, given.shape))
        raise InputError("inputs", f"{name} is {given.dtype.name}[{extents}]", str(vertex))


def pattern_digest(given: Mapping[str, Any]) -> str:
    """Return a text that is the same for inputs whose sparse tensors have the same patterns."""
    texts = []
    for name, value in given.items():
        if isinstance(value, Coordinates | SparseArray):
            kind = (name, value.shape, value.dtype.name, repr(value.implicit), value.digest)
            texts.append(repr(kind))
    return " ".join(texts)


def stored_job(comm: Comm, job: Job, given: Mapping[str, Any]) -> StoredJob:
    """Return a job over what is stored of the given sparse tensors.

    All ranks call it, with the same tensors: each of them works out all patterns.
    """
    return together(comm, lambda: _stored_job(job, given), lambda _: pattern_digest(given))


def _stored_job(job: Job, given: Mapping[str, Any]) -> StoredJob:
    where = job.path or job.source.name
    if job.strict:
        raise InputError(where, "strict is true, and an input is sparse", "strict = false")
    if job.loops:
        raise InputError(where, "an input of several loops is sparse", "a job with one loop")
    formats = dict(job.formats)
    sparse = {}
    for name, value in given.items():
        if is_sparse(value) and name in job.written.by_name and formats.get(name) != "dense":
            sparse[name] = value.outline() if isinstance(value, SparseArray) else value
    desugared = desugar(job.written, sparse, formats, job.gradients)
    changed = replace(
        job,
        written=desugared.graph,
        graph=desugared.graph,
        inputs=tuple(spec for spec in job.inputs if spec.name not in sparse),
        formats={},
    )
    found = replace(changed, graph=changed.rewritten(changed.as_computed))
    if job.loop is not None:
        for start, after in job.loop.carry.items():
            _check_carried(where, desugared, start, after)
    return StoredJob(found, desugared, job)


def _check_carried(where: str, desugared: Desugared, start: str, after: str) -> None:
    """Refuse a tensor that does not keep its pattern from step to step."""
    patterns = desugared.patterns
    if patterns.get(start) is not patterns.get(after):
        what = f"{start} has another pattern than {after}, which it becomes in the next step"
        expected = f'one pattern; formats: {after} = "like {start}" makes it so if that is possible'
        if start not in patterns:
            expected = f'a dense {after}; formats: {after} = "dense"'
        raise InputError(where, what, expected)


def einsum_of_sparse(arguments: Sequence[Any], settings: Mapping[str, Any]) -> Any:
    """Evaluate the arguments of `einmpi.einsum` if some operands are sparse."""
    subscripts, operands = split_arguments(arguments)
    comm: Comm = ALONE
    for each in operands:
        if isinstance(each, DistArray | SparseArray):
            comm = (each.values if isinstance(each, SparseArray) else each).own_comm
    given: dict[str, Any] = {}

    def check_and_compile() -> Any:
        for number, each in enumerate(operands):
            name = f"x{number}"
            if is_sparse(each):
                is_own = isinstance(each, SparseArray)
                given[name] = each if is_own else as_coordinates(name, each)
            else:
                given[name] = (
                    each if isinstance(each, DistArray) else as_numpy("einsum", name, each)
                )
        return compile_einsum(subscripts, list(given.values()), comm, settings)

    compiled = together(comm, check_and_compile)
    result: Any = compiled(given)["out"]
    if any(isinstance(each, DistArray | SparseArray) for each in operands):
        return result
    return result.gather()


def as_dense_arrays(inputs: Mapping[str, Any], most_elements: int) -> dict[str, Any]:
    """Return inputs with arrays in place of sparse tensors, for the reference."""
    found: dict[str, Any] = {}
    for name, value in inputs.items():
        found[name] = value
        if is_sparse(value):
            tensor = as_coordinates(name, value)
            elements = int(np.prod(np.array(tensor.shape, dtype=object)))
            if elements > most_elements:
                what = f"{name} has {elements:,} elements, most of them not stored"
                raise InputError("reference", what, f"at most {most_elements:,}")
            found[name] = tensor.dense()
    return found
