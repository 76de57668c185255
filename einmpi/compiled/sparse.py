"""Jobs with sparse inputs: their patterns first, then a job over what is stored."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
import numpy.typing as npt

from einmpi.arrays.dist_array import DistArray
from einmpi.arrays.products import compile_einsum
from einmpi.comm.agreement import together
from einmpi.comm.base import ALONE, Comm
from einmpi.compiled.given_inputs import as_input, outline_of
from einmpi.compiled.prepared_runs import KnownCall
from einmpi.errors import InputError, nearest_of
from einmpi.files.specs import InputSpec
from einmpi.graph.eingraph import Vertex
from einmpi.graph.rewrite import prune
from einmpi.graph.sparse.background import same_number
from einmpi.graph.sparse.coordinates import Blocks, Coordinates, digest_of
from einmpi.graph.sparse.desugar import Desugared, desugar, implicit_value
from einmpi.graph.sparse.formats import Format
from einmpi.graph.sparse.patterns import Pattern
from einmpi.job.batches import Validation
from einmpi.job.job import Job
from einmpi.kernels.cpu.key_loops import starts_in
from einmpi.kernels.fixed_lists import fix
from einmpi.kernels.reference import as_numpy
from einmpi.language.numpy_einsum import split_arguments
from einmpi.sparse_array import SparseArray, as_coordinates, is_sparse

if TYPE_CHECKING:
    from einmpi.compiled.program import Compiled


@dataclass(frozen=True)
class StoredJob:
    """A job over what is stored, and how the results of the program follow from its own.

    `given` has the patterns of the sparse inputs of the user's job, and `arrays` the inputs that it
    does not have. `tensors` are those of its program, and `formats` and `patterns` say which of
    them are sparse: of several loops, as they are after the last one.
    """

    job: Job
    given: Mapping[str, Pattern]
    arrays: Mapping[str, Vertex]
    tensors: Mapping[str, Vertex]
    formats: Mapping[str, Format]
    patterns: Mapping[str, Pattern]

    def inputs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of the job, from those of the user."""
        read = {name for each in self.job.one_after_another() for name in each.graph.by_name}
        known = self.tensors.keys() - read
        found = {name: value for name, value in given.items() if name not in known}
        return _stored_inputs(found, self.given, self.arrays)

    def values(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is stored of sparse tensors that an earlier run of the job has left."""
        found = dict(tensors)
        for name, tensor in tensors.items():
            if isinstance(tensor, SparseArray):
                pattern = self.patterns[name]
                if tensor.digest != digest_of(pattern.keys):
                    what = f"start has another pattern of {name}"
                    raise InputError("loop", what, "the result of a call with the same arguments")
                found[name] = tensor.in_blocks(pattern.blocks)
        return found

    def results(self, outputs: Mapping[str, DistArray]) -> dict[str, Any]:
        """Return the results of the user's job: sparse tensors in place of what is stored."""
        found: dict[str, Any] = {}
        for name, values in outputs.items():
            found[name] = values
            if name in self.formats:
                pattern = self.patterns[name]
                shape = self.tensors[name].bound
                implicit = implicit_value(name, self.formats[name])
                found[name] = SparseArray(pattern.keys, values, shape, implicit, pattern.blocks)
        return found

    def outline(self, name: str) -> Coordinates:
        """Return a sparse tensor of the program without its values."""
        return _outline(self.tensors[name], self.formats[name], self.patterns[name])


def _stored_inputs(
    given: Mapping[str, Any], patterns: Mapping[str, Pattern], arrays: Mapping[str, Vertex]
) -> dict[str, Any]:
    """Return what is stored of given tensors, dense ones as they are, and further inputs."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        found[name] = value
        if name in patterns:
            found[name] = value.in_blocks(patterns[name].blocks)
        elif is_sparse(value):
            found[name] = as_coordinates(name, value).dense()
    for name, vertex in arrays.items():
        assert vertex.known is not None
        found[name] = vertex.known.values
    return found


def _outline(vertex: Vertex, of: Format, pattern: Pattern) -> Coordinates:
    """Return a sparse tensor without its values."""
    shape = (pattern.stored, *vertex.bound[len(pattern.keys) :])
    values = np.broadcast_to(np.zeros((), vertex.dtype), shape)
    return Coordinates(pattern.keys, values, vertex.bound, implicit_value(vertex.name, of))


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
    """Return inputs with sparse tensors of other libraries as keys and values, all checked.

    All ranks must have the same patterns.
    """

    def convert() -> dict[str, Any]:
        found = dict(inputs)
        for name, value in inputs.items():
            if is_sparse(value):
                tensor = value
                if not isinstance(value, SparseArray):
                    tensor = as_coordinates(name, value)
                reader = _reader_of(job, name)
                found[name] = as_input(reader, name, value, tensor)
                _check_fit(reader, name, found[name])
        return found

    return together(comm, convert, pattern_digest)


def _reader_of(job: Job, name: str) -> Job:
    """Return the first loop of a job that reads an input, or the job if there is none."""
    for each in job.one_after_another():
        if name in each.written.by_name and each.written[name].is_input:
            return each
    return job


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


def stored_job(
    comm: Comm,
    job: Job,
    given: Mapping[str, Any],
    ranks: int | None = None,
    validated: Sequence[Mapping[str, Any]] = (),
    assumed: Collection[str] = (),
) -> StoredJob:
    """Return a job over what is stored of the given sparse tensors.

    All ranks call it, with the same tensors: each of them works out all patterns.

    Parameters
    ----------
    comm
        The ranks that call it.
    job, given
        The job of the user, and its inputs.
    ranks
        So many will run it, if these are not those that call.
    validated
        The inputs that are given for the validation of each loop.
    assumed
        Tensors whose keys are made up.
    """

    def make() -> StoredJob:
        for tensors in (given, *validated):
            _refuse_sparse(job, tensors)
        making = _Making(job, comm.size if ranks is None else ranks, frozenset(assumed))
        return making.over_stored(given, validated)

    digest = " ".join(map(pattern_digest, (given, *validated)))
    return together(comm, make, lambda _: digest)


def _refuse_sparse(job: Job, given: Mapping[str, Any]) -> None:
    """Refuse sparse tensors in a job that promises values or bits which lists of keys do not give.

    Values that are not stored are no nan, and ranks add those that are in an order of their own.
    """
    for name, value in given.items():
        if not is_sparse(value) or job.formats.get(name) == "dense":
            continue
        for setting in ("strict", "reproducible"):
            if getattr(job, setting):
                what = f"{setting} is true, and {name} is sparse"
                expected = f'{setting} = false; formats: {name} = "dense" if that is wanted'
                raise InputError(job.path or job.source.name, what, expected)


class _Making:
    """Makes a job over what is stored, loop by loop."""

    def __init__(self, job: Job, ranks: int, assumed: frozenset[str]) -> None:
        self.job = job
        self.ranks = ranks
        self.assumed = assumed
        self.where = job.path or job.source.name
        self.loops = job.one_after_another()
        self.taken = {name for each in self.loops for name in each.written.by_name}
        self.arrays: dict[str, Vertex] = {}  # inputs of loops that the program does not have
        self.tensors: dict[str, Vertex] = {}  # of the program, after the loops so far
        self.formats: dict[str, Format] = {}
        self.patterns: dict[str, Pattern] = {}

    def over_stored(
        self, given: Mapping[str, Any], validated: Sequence[Mapping[str, Any]]
    ) -> StoredJob:
        """Return the whole job. Loops read what earlier ones leave, as they leave it."""
        found: list[Job] = []
        own: dict[str, Pattern] = {}  # patterns of given tensors
        outlines = self.outlines(given)
        for number, each in enumerate(self.loops):
            sparse = {name: outlines[name] for name in outlines if name not in self.tensors}
            for name in self.formats:
                sparse[name] = _outline(self.tensors[name], self.formats[name], self.patterns[name])
            if each.loop is not None:
                for name, parameter in each.loop.state.items():
                    if parameter in sparse and name not in (*given, *sparse):
                        sparse[name] = replace(sparse[parameter], implicit=0)
            changed, desugared = self.one(each, sparse, self.arrays)
            if each.loop is not None:
                for start, after in each.loop.carry.items():
                    _check_carried(self.where, desugared, start, after)
                others = validated[number] if number < len(validated) else {}
                validation = self.validation(each, sparse, others)
                changed = replace(changed, loop=replace(each.loop, validation=validation))
            found.append(changed)
            self.arrays |= {name: desugared.graph[name] for name in desugared.arrays}
            for name, pattern in desugared.patterns.items():
                if name in outlines and name not in self.tensors:
                    own[name] = pattern
            self.add_results(each, desugared)
        whole = found[0]
        if self.job.loops:
            known = {spec.name for spec in self.job.inputs} | self.arrays.keys()
            inputs = {spec.name: spec for each in found for spec in each.inputs}
            specs = tuple(spec for name, spec in inputs.items() if name in known)
            whole = replace(whole, inputs=specs, outputs=self.job.outputs, loops=tuple(found))
        return StoredJob(whole, own, self.arrays, self.tensors, self.formats, self.patterns)

    def outlines(self, given: Mapping[str, Any]) -> dict[str, Coordinates]:
        """Return the given tensors that stay sparse; keys are all that matters of them."""
        found = {}
        for name, value in given.items():
            if is_sparse(value) and name in self.taken and self.job.formats.get(name) != "dense":
                found[name] = value.outline() if isinstance(value, SparseArray) else value
        return found

    def add_results(self, job: Job, desugared: Desugared) -> None:
        """Note what a loop leaves: its tensors take the places of those of the same names."""
        for vertex in job.written.vertices:
            self.tensors[vertex.name] = vertex
            self.formats.pop(vertex.name, None)
            known = desugared.formats.get(vertex.name)
            if known is not None and known.implicit is not None:
                self.formats[vertex.name] = known
                self.patterns[vertex.name] = desugared.patterns[vertex.name]

    def one(
        self, job: Job, sparse: Mapping[str, Coordinates], arrays: Mapping[str, Vertex]
    ) -> tuple[Job, Desugared]:
        """Return a loop, or a job without loops, over what is stored of its sparse inputs."""
        own = [vertex.name for vertex in job.written.inputs if vertex.name in sparse]
        formats = {name: job.formats[name] for name in job.formats if name in job.written.by_name}
        desugared = desugar(
            job.written,
            {name: sparse[name] for name in own},
            formats,
            job.gradients,
            self.ranks,
            arrays,
            self.taken,
            finds_pairs=job.backend == "numpy",
        )
        for array in desugared.arrays.values():
            fix(array)
        vertices = []
        for vertex in desugared.graph.vertices:
            if vertex.name in self.assumed and vertex.stored is not None:
                vertex = replace(vertex, stored=vertex.stored._replace(is_assumed=True))
            vertices.append(vertex)
        graph = replace(desugared.graph, vertices=tuple(vertices))
        inputs = []
        for spec in job.inputs:
            if spec.name not in own and (spec.name in graph.by_name or not spec.key_dimensions):
                inputs.append(spec)
        kept = {spec.name: spec for spec in job.inputs}
        for name in (*own, *desugared.arrays):
            if name in graph.by_name:
                spec = kept.get(name, InputSpec(name))
                is_state = job.loop is not None and name in job.loop.state  # it starts with zeros
                random = spec.random if is_state else None
                vertex = graph[name]
                inputs.append(
                    InputSpec(name, vertex.bound, vertex.dtype, random, resident=spec.resident)
                )
        changed = replace(job, written=graph, graph=graph, inputs=tuple(inputs), formats={})
        return replace(changed, graph=changed.rewritten(changed.as_computed)), desugared

    def validation(
        self, job: Job, sparse: Mapping[str, Coordinates], given: Mapping[str, Any]
    ) -> Validation | None:
        """Return the validation of a loop over what is stored of its own inputs."""
        assert job.loop is not None
        found = job.loop.validation
        if found is None:
            return None
        replaced = {spec.name: spec for spec in found.inputs}
        outlines = self.outlines(given)
        if not outlines and replaced.keys().isdisjoint(sparse):
            return replace(found, given=_stored_inputs(given, {}, {}))
        own = {name: sparse[name] for name in sparse if name not in replaced} | outlines
        specs = tuple(replaced.get(spec.name, spec) for spec in job.inputs)
        graph = prune(replace(job.written, outputs=found.record))
        changed, desugared = self.one(replace(job, written=graph, inputs=specs), own, {})
        known = {name: desugared.patterns[name] for name in outlines if name in desugared.patterns}
        arrays = {name: desugared.graph[name] for name in desugared.arrays}
        inputs = tuple(spec for spec in changed.inputs if spec.name in replaced)
        values = _stored_inputs(given, known, arrays)
        return replace(found, inputs=inputs, written=changed.written, given=values)


def _check_carried(where: str, desugared: Desugared, start: str, after: str) -> None:
    """Refuse a tensor that does not keep its pattern from step to step."""
    patterns = desugared.patterns
    if patterns.get(start) is not patterns.get(after):
        what = f"{start} has another pattern than {after}, which it becomes in the next step"
        expected = f'one pattern; formats: {after} = "like {start}" makes it so if that is possible'
        if start not in patterns:
            expected = f'a dense {after}; formats: {after} = "dense"'
        raise InputError(where, what, expected)
    if start in patterns:
        values = [implicit_value(name, desugared.formats[name]) for name in (start, after)]
        if not same_number(*values):
            what = (
                f"{start} is {values[0]} where nothing is stored, and {after}, which it becomes in "
                f"the next step, {values[1]}"
            )
            raise InputError(
                where, what, f'one value; formats: {start} = "dense" if that is wanted'
            )


# ---- the same sparse inputs again ----------------------------------------------------------------


class _GivenRows:
    """A matrix of scipy in CSR that was given: whether another one has the same pattern.

    It may be the same matrix, of which the caller has changed the arrays.
    """

    def __init__(self, given: Coordinates, blocks: Blocks) -> None:
        self.kind = given.shape, given.dtype
        self.columns = given.keys[1]
        fix(given.keys[0])
        self.starts = starts_in(given.keys[0], given.shape[0])
        self.blocks = blocks

    def values_of(self, matrix: Any) -> npt.NDArray[Any] | None:
        """Return the stored elements of a matrix in blocks; None if it has another pattern."""
        if getattr(matrix, "format", "") != "csr" or (matrix.shape, matrix.dtype) != self.kind:
            return None
        for found, own in ((matrix.indptr, self.starts), (matrix.indices, self.columns)):
            if found.dtype.itemsize == own.dtype.itemsize:
                found = found.view(own.dtype)  # as they would be compared if their signs differed
            if not np.array_equal(found, own):
                return None
        if len(matrix.data) != len(self.columns):
            return None
        return self.blocks.spread(matrix.data, empty=0)


class SparseCall:
    """A call with sparse inputs: what it has found out holds for the same sparse inputs again.

    `inputs` are those of the caller, `given` the same with all sparse ones as keys and values, and
    `used` those of the job over what is stored, which `compiled` runs.
    """

    def __init__(
        self,
        stored: StoredJob,
        compiled: Compiled,
        inputs: Mapping[str, Any],
        given: Mapping[str, Any],
        used: Mapping[str, Any],
    ) -> None:
        self.stored = stored
        self.compiled = compiled
        # None for dense inputs. SparseArrays may be given up by the caller.
        self.known: dict[str, ref[SparseArray] | _GivenRows | None] = {}
        for name, value in inputs.items():
            self.known[name] = None
            if not is_sparse(value):
                continue
            is_stored = name in stored.given
            placed = getattr(value, "_placed", None)  # of a SparseArray
            if is_stored and placed is not None and used.get(name, placed) is placed:
                self.known[name] = ref(value)
            elif is_stored and getattr(value, "format", "") == "csr":
                self.known[name] = _GivenRows(given[name], stored.given[name].blocks)
            else:  # all ranks ask each other all the same: not all need be given this kind
                self.known = {}
                break
        # What is used besides what the caller gives, and what may differ from call to call.
        self.own = {name: value for name, value in used.items() if name not in inputs}
        self.changing = [name for name in used if name in inputs]
        self.last: tuple[Hashable, KnownCall | None] = (None, None)  # what inputs looked like

    def find(self, inputs: Any) -> tuple[KnownCall | None, dict[str, Any]]:
        """Return the earlier call with inputs that look like these, and what is used for them.

        None if sparse ones are not the same, or not all ranks know that call: they ask each other
        once, as `KnownCalls` do.
        """
        used = self._used(inputs)
        known = None if used is None else self._own_known(used)
        return self.compiled.known_calls.agreed(known), used or {}

    def _used(self, inputs: Any) -> dict[str, Any] | None:
        """Return what is used for these inputs; None if sparse ones are not the same."""
        is_mapping = type(inputs) is dict or isinstance(inputs, Mapping)
        if not is_mapping or inputs.keys() != self.known.keys():
            return None
        found = {}
        for name, value in inputs.items():
            known = self.known[name]
            if known is None:
                if type(value) is not np.ndarray and type(value) is not DistArray:
                    return None
            elif isinstance(known, _GivenRows):
                value = known.values_of(value)
            else:
                is_same = value is not None and known() is value
                value = value._placed if is_same else None
            if value is None:
                return None
            found[name] = value
        return {name: found[name] for name in self.changing} | self.own

    def _own_known(self, used: Mapping[str, Any]) -> KnownCall | None:
        """Return the earlier call that this rank knows. What callers do not give is as it was."""
        calls = self.compiled.known_calls
        outline = outline_of({name: used[name] for name in self.changing}, calls.comm)
        if self.last[1] is None or outline is None or outline != self.last[0]:
            self.last = outline, calls.find_own(used)
        return self.last[1]


def einsum_of_sparse(arguments: Sequence[Any], settings: Mapping[str, Any]) -> Any:
    """Evaluate the arguments of `einmpi.einsum` if some operands are sparse."""
    subscripts, operands = split_arguments(arguments)
    comm: Comm = ALONE
    for each in operands:
        if isinstance(each, DistArray | SparseArray):
            comm = each.own_comm
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


def places_of_gradients(job: Job, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return where the gradients by sparse tensors may be something else than 0: for the reference.

    Elements that are not stored are constants.
    """
    found = {}
    for each in job.one_after_another():
        for name, by in each.gradients.items():
            if is_sparse(inputs.get(by)) and job.formats.get(by) != "dense":
                tensor = as_coordinates(by, inputs[by])
                is_stored = np.ones(tensor.values.shape, bool)
                found[name] = replace(tensor, values=is_stored, implicit=False).dense()
    return found
