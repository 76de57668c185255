"""The inputs of a run: given arrays, DistArrays and datasets, files, generators."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.arrays.creation import block_of
from einmpi.arrays.dist_array import DistArray
from einmpi.comm.base import Comm, SharingError, all_agree
from einmpi.files.datasets import Dataset
from einmpi.files.reading import Reading, fill_box
from einmpi.job.job import Job
from einmpi.kernels.cuda.driver import is_device_array
from einmpi.kernels.fixed_lists import fix
from einmpi.kernels.prepared import address_of, stored_as
from einmpi.runtime.backend import NOTHING_SHARED
from einmpi.runtime.host_memory import ALIGNMENT, aligned_empty
from einmpi.runtime.sharing.inputs import SharedInput
from einmpi.schedule.layout import Layout
from einmpi.schedule.regions import Region, boxes, locate, packed, shape
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Load, Numbers, numbered

Array: TypeAlias = npt.NDArray[Any]
# The blocks of inputs, by the name and the layout: all ranks have loaded the same ones.
Blocks: TypeAlias = dict[tuple[str, Layout | Numbers], Array]


class _KnownView(NamedTuple):
    """The view of a given array that a load has used before."""

    array: Array
    load: Load
    block: Array


class OnDevice(NamedTuple):
    """A given array, or DistArray, and the block of it that a GPU has."""

    given: Any
    block: Any


class Inputs:
    """The inputs of the runs of one rank.

    `given` are those of the caller, `files` says where the job's other inputs are in files.
    With `keep`, blocks that were loaded stay in `resident` for the next run. Those of inputs that
    are `changing` from run to run do not. Given DistArrays in `overwritable` are not used by
    anyone after the run. With `given_stay`, an array that is given again has the same values,
    unless its input is changing; what was copied to a GPU is then in `on_device`.
    """

    array_type: type[Any] = np.ndarray

    def __init__(
        self,
        job: Job,
        given: Mapping[str, Any],
        files: Mapping[str, Dataset],
        resident: Blocks | None = None,
        keep: bool = False,
        changing: Collection[str] = (),
        given_stay: bool = False,
    ) -> None:
        self.job = job
        self.given = given
        self.files = files
        self.resident = {} if resident is None else resident
        self.keep = keep
        self.changing = changing
        self.given_stay = given_stay
        self.on_device: dict[tuple[str, Layout | Numbers], OnDevice] = {}
        self.overwritable: set[str] = set()
        self.sharing = NOTHING_SHARED  # what ranks share in the run that is under way
        self.views: dict[str, _KnownView] = {}  # of given arrays, by the input
        self.shuffled = 0  # bytes received from other ranks that read them
        self.shuffled_between = 0  # those of them that came from other nodes
        self.begun: dict[str, Reading] = {}
        self.background: ThreadPoolExecutor | None = None
        self.reader_threads = 1

    # ---- for the execute loop -------------------------------------------------------------------

    def begin(
        self, step: Load, make: Callable[[], Array], comm: Comm, outside: bool = False
    ) -> None:
        """Start to read a file in the background, into the array that `make` returns.

        It makes no difference to files whether that array is in the slow tier, `outside`.
        """
        dataset = self.dataset(step.tensor)
        if dataset is not None and not self.keep:
            reading = Reading(dataset, step.layout, comm.rank, make(), step.region, step.place)
            reading.begin(self.pool())
            self.begun[step.tensor] = reading

    def fill(self, step: Load, target: Array, comm: Comm) -> None:
        """Put a region of an input at a place in an array. All ranks of the layout call it."""
        if not self.keep or step.tensor in self.given:
            self.read(step, target, step.place, comm)
            return
        kept = self.kept(step, comm)
        if kept.size:
            in_target = boxes(step.region, step.place)
            in_kept = boxes(step.region, packed(step.region))
            for (_, here), (_, there) in zip(in_target, in_kept, strict=True):
                _as_vector(target)[here] = _as_vector(kept)[there]

    def block(self, step: Load, comm: Comm) -> Array:
        """Return a region of an input that stays on the rank, and is only read unless it says so.

        All ranks of the layout call it.
        """
        self.sharing.ranks_sharing.pop(step.slot.name, None)
        if step.numbers is not None:
            values = step.numbers.values
            fix(values)
            return self.resident.setdefault(resident_key(self.job, step), values)
        if step.overwritten:
            return self.own_block(step, comm)
        given = self.given.get(step.tensor)
        if isinstance(given, DistArray):
            return np.asarray(given.local, order="C")
        if isinstance(given, np.ndarray):
            return self.block_of_given(step, given)
        return self.kept(step, comm)

    def block_of_given(self, step: Load, given: Array) -> Array:
        """Return a region of an array that every rank has: a view of it, if that is possible."""
        is_stored_alike = given.flags.c_contiguous and given.dtype.isnative
        if is_stored_alike and given.shape == step.slot.shape:
            return given
        known = self.views.get(step.tensor)
        if known is not None and known.array is given and known.load is step:
            return known.block
        block = block_of(given, step.region, step.slot.dtype).reshape(step.slot.shape)
        if np.may_share_memory(block, given):
            self.views[step.tensor] = _KnownView(given, step, block)
        return block

    def own_block(self, step: Load, comm: Comm) -> Array:
        """Return a region of an input that this run may write over."""
        given = self.given.get(step.tensor)
        block: Array
        if isinstance(given, DistArray):
            block = given.local
            if step.tensor in self.overwritable and is_own_memory(block):
                return block
        block = aligned_empty(step.slot.shape, step.slot.dtype)
        if isinstance(given, DistArray):
            block[...] = given.local
        else:
            self.read(step, block, packed(step.region), comm)
        return block

    def bytes_on_device(self, schedule: Schedule) -> int:
        """Return the bytes of a schedule's slots that are arrays which were given on a GPU."""
        total = 0
        for _, load in numbered(schedule.steps, Load):
            given = self.given.get(load.tensor)
            may_be_used = load.kept and not load.overwritten
            block: Any = given
            if isinstance(given, DistArray):
                block = given.local
                may_be_used = load.kept and (may_be_used or load.tensor in self.overwritable)
            if not may_be_used or not is_device_array(block):
                continue
            if block.shape == load.slot.shape and block.flags.c_contiguous:
                total += load.slot.nbytes
        return total

    def takes_messages(self, step: Load) -> bool:
        """Return whether ranks may send messages to load: if they read a file, or share memory."""
        return self.dataset(step.tensor) is not None or step.slot.name in self.sharing.inputs

    def close(self) -> None:
        """End what runs in the background."""
        for reading in self.begun.values():
            reading.close()
        self.begun.clear()
        if self.background is not None:
            self.background.shutdown()
            self.background = None

    # ---- inside ---------------------------------------------------------------------------------

    def dataset(self, tensor: str) -> Dataset | None:
        """Return where an input is in a file, None if it does not come from one."""
        given = self.given.get(tensor)
        if given is None:
            return self.files.get(tensor)
        if isinstance(given, Dataset):
            return given
        return None

    def pool(self) -> ThreadPoolExecutor:
        """Return the threads that read in the background."""
        if self.background is None:
            self.background = ThreadPoolExecutor(self.reader_threads, "reading")
        return self.background

    def kept(self, step: Load, comm: Comm) -> Array:
        """Return a block that was loaded before, or load it now."""
        known = self.resident
        if step.tensor in self.given or step.tensor in self.changing:
            known = {}  # the next run may be given another one
        key = resident_key(self.job, step)
        shared = self.sharing.inputs.get(step.slot.name)
        if shared is not None and known is self.resident:
            if key not in known:
                known[key] = self.load_together(step, shared, comm)
            self.sharing.ranks_sharing[step.slot.name] = len(shared.group)
        elif key not in known:
            is_number = not step.slot.shape  # its region still has one dimension
            array = np.empty(() if is_number else shape(step.region), step.slot.dtype)
            self.read(step, array, packed(step.region), comm)
            known[key] = array
        return known[key]

    def load_together(self, step: Load, shared: SharedInput, comm: Comm) -> Array:
        """Return a block in memory of a group, of which each member loads a part."""
        memory = None
        problem = "there is none on another node"
        try:
            memory = comm.share_memory(shared.group, max(1, step.slot.nbytes))
        except SharingError as error:
            problem = str(error)
        # Ranks of other nodes may read the same file together with this one: all of them fail.
        ranks = tuple(range(step.layout.mesh.ranks))  # not those that are idle
        everyone_has_memory = all_agree(comm, ranks, memory is not None)
        if memory is None or not everyone_has_memory:
            raise SharingError(
                f"no memory for the input {step.tensor}, which the ranks of a node share: "
                f'{problem}; set shared = "off" in [run]'
            )
        block: Array = np.ndarray(step.slot.shape, step.slot.dtype, memory)
        piece = shared.pieces.region(shared.pieces.mesh.digits(comm.rank))
        place = tuple(map(locate, piece, step.region))
        try:
            self.read(replace(step, region=piece, layout=shared.pieces), block, place, comm)
        finally:
            comm.barrier_among(shared.group)  # the others wait, also for a rank that has failed
        return block

    def read(self, step: Load, target: Array, place: Region, comm: Comm) -> None:
        """Read from a file, a generator, or an array that every rank has."""
        dataset = self.dataset(step.tensor)
        if dataset is not None:
            received = comm.received
            received_between = comm.received_between
            reading = self.begun.pop(step.tensor, None)
            if reading is None:
                reading = Reading(dataset, step.layout, comm.rank, target, step.region, place)
            reading.finish(comm, self.pool())
            self.shuffled += comm.received - received
            self.shuffled_between += comm.received_between - received_between
            return
        bound = self.job.graph[step.tensor].bound
        given: Any = self.given.get(step.tensor)
        if isinstance(given, DistArray):
            assert given.layout == step.layout  # each rank has just what it loads
            given = given.local
            own_boxes = boxes(step.region, packed(step.region))
            for (_, here), (_, there) in zip(boxes(step.region, place), own_boxes, strict=True):
                target[here] = given[there]
            return
        spec = None
        if given is None:
            spec = next(spec for spec in self.job.inputs if spec.name == step.tensor)
        for box, here in boxes(step.region, place):
            there = box if bound else ()
            part: Array = _as_vector(target)[here]
            if spec is None:
                part[...] = given[there]
            else:
                fill_box(spec, bound, there, part if bound else part.reshape(()))


def resident_key(job: Job, step: Load) -> tuple[str, Layout | Numbers]:
    """Return what the block of an input that stays loaded is known by, in all jobs that share it.

    A parameter may have another value in another job, so it is known by its value too.
    """
    if step.numbers is not None:
        return step.tensor, step.numbers
    if not step.slot.shape:
        for spec in job.inputs:
            if spec.name == step.tensor and spec.value is not None:
                return f"{spec.dtype} {spec.name} = {spec.value!r}", step.layout
    return step.tensor, step.layout


def _as_vector(array: Array) -> Array:
    """Return a number as a vector of one element, any other array unchanged."""
    return np.atleast_1d(array)


def is_own_memory(array: Array) -> bool:
    """Return whether an array can take the place of one that `aligned_empty` has made."""
    flags = array.flags
    is_aligned = address_of(array) % ALIGNMENT == 0
    return bool(flags.writeable and flags.c_contiguous) and is_aligned


# ---- blocks of arrays that are given again and again --------------------------------------------

TakeBlock: TypeAlias = Callable[[Any], Array]  # this rank's block of a given input
# Returns what takes the block of a load from inputs like this one; None if nothing can.
PrepareTaking: TypeAlias = Callable[[Load, Any], TakeBlock | None]


def taking_on_host(step: Load, given: Any) -> TakeBlock | None:
    """Return what takes a block of an input; None if it is not on the host."""
    if isinstance(given, DistArray):
        is_usable = type(given.local) is np.ndarray and given.local.flags.c_contiguous
        return attrgetter("local") if is_usable else None
    if type(given) is not np.ndarray:
        return None
    if given.flags.c_contiguous and given.dtype.isnative and given.shape == step.slot.shape:
        return _whole
    block = block_of(given, step.region, step.slot.dtype).reshape(step.slot.shape)
    if given.ndim and all(len(runs) == 1 for runs in step.region):
        part = itemgetter(tuple(slice(*runs[0]) for runs in step.region))
        view = part(given)
        is_same = view.shape == block.shape and stored_as((view,)) == stored_as((block,))
        if is_same and address_of(view) == address_of(block):
            return part
    return lambda array: block_of(array, step.region, step.slot.dtype).reshape(step.slot.shape)


def _whole(array: Array) -> Array:
    return array
