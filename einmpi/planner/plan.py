"""The plan of a graph: what it records, what follows from that, and the options it is made with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from hashlib import sha256
from math import prod
from typing import NamedTuple

from einmpi.graph.eingraph import StoredForm, Vertex
from einmpi.graph.index_arithmetic import arithmetic_labels
from einmpi.late import late
from einmpi.planner.chains import CHAIN_BLOCK_BYTES, OPERATIONS_OF_A_BYTE
from einmpi.planner.machine import Machine, Weights
from einmpi.planner.memory import (
    MESSAGE_BUFFER_BYTES,
    Cuts,
    longest_shares,
    stage_of,
)
from einmpi.planner.mesh import Mesh
from einmpi.planner.moving.known_lists import list_of
from einmpi.planner.moving.volume import Bill, total_bill
from einmpi.planner.strategies import DEFAULT_STRATEGY
from einmpi.units import counted, show_bytes

# Values of the option `recompute`.
AUTO = "auto"
NONE = "none"


class Cost(NamedTuple):
    """What a plan costs if it is run once, or what all steps of a loop cost together."""

    words: int = 0
    nbytes: int = 0
    between: int = 0  # of these bytes: those between nodes, where they are known
    operations: int = 0  # of the program
    operations_busiest: int = 0  # of the busiest rank
    seconds: float | None = 0.0  # None where no machine was measured

    def plus(self, other: Cost, times: int = 1) -> Cost:
        """Return this cost with another one, so many times."""
        amounts = [own + times * more for own, more in zip(self[:-1], other[:-1], strict=True)]
        seconds = None
        if self.seconds is not None and other.seconds is not None:
            seconds = self.seconds + times * other.seconds
        return Cost(*amounts)._replace(seconds=seconds)


def cost_of_all(costs: Iterable[Cost]) -> Cost:
    """Return several costs together."""
    return reduce(Cost.plus, costs, Cost())


@dataclass(frozen=True)
class BatchPlan:
    """What the plan of a step says about inputs of which it takes some rows."""

    names: tuple[str, ...]  # of the inputs
    rows: int  # that each has
    batch: int  # rows of a step
    steps_an_epoch: int
    last: str  # "pad" or "drop": what happens to the rows after the last full batch
    seed: int | None  # of the order; None if it is that of the files
    block: int  # rows that the shuffle keeps together
    nbytes: int  # of all rows of a step
    bytes_arriving: int  # memory of a rank for the rows that it reads, before copies are sent
    bytes_ahead: int  # memory of a rank for the next batch; 0 if it is not read ahead


@dataclass(frozen=True)
class Recomputed:
    """Tensors that are dropped and computed again, and what that costs."""

    tensors: tuple[str, ...]  # that are dropped
    copies: Mapping[str, str]  # vertex → the tensor that it computes again
    operations: int  # added
    nbytes: int  # that move more between ranks
    peak_before: int  # bytes of a rank, if nothing were dropped


@dataclass(frozen=True)
class SharedInputs:
    """Inputs that another program keeps loaded, in layouts that it has chosen."""

    names: tuple[str, ...]
    words_more: int  # that move because of these layouts, compared with a free choice


@dataclass(frozen=True)
class FittedInputs:
    """Inputs that stay loaded between calls as far as the memory limit allows."""

    kept: tuple[str, ...]
    loaded: tuple[str, ...]  # again in each call


@dataclass(frozen=True)
class LoopPlan:
    """What the plan of a step says about the loop around it."""

    steps: int  # at most
    carry: Mapping[str, str]  # input → the tensor that it becomes
    once: Plan | None  # the plan of what is computed before the first step
    hoisted: tuple[str, ...]  # what that computes for the steps
    batches: BatchPlan | None = None
    # What moves of tensors before the first step, because they lie elsewhere.
    arriving: Mapping[str, Cost] = field(default_factory=dict)
    staying: tuple[str, ...] = ()  # inputs that stay as the loop before has loaded them
    bytes_kept: int = 0  # memory of a rank for tensors of earlier loops that are needed later
    later: tuple[Plan, ...] = ()  # the plans of loops that follow this one
    validation: Plan | None = None  # the plan of a batch of the validation
    validated_every: int = 0  # so many steps


@dataclass(frozen=True, kw_only=True)
class Plan(Cuts):
    """How a graph is cut over `ranks` ranks. `einmpi.plan` makes it; print(plan) explains it.

    `states` gives for each vertex the label that each axis of the mesh cuts, or None; `layouts`
    gives for each stored tensor the dimension that each axis cuts, or None. `bills` gives for each
    vertex what it moves, in `words` and `nbytes`. The mesh may have fewer ranks than there are: the
    last ranks are idle.
    """

    ranks: int
    strategy: str
    bills: Mapping[str, Bill]  # vertex → what it moves and how long it takes
    peak: int  # bytes of tensors and message buffers on the fullest rank
    kind: str  # of certificate: "exact" or "gap"
    lower_bound: int  # words
    among: str  # the plans that move no less than that, such as "cuts on this mesh"
    paper_cost: int  # words, by the paper's cost model
    notes: Mapping[str, str]  # vertex → where the strategy's rule could not be followed
    resident: tuple[str, ...] = ()  # inputs that are already where they are needed
    # input → the output that can be written over it, unless one of the tensors `nan_checked` is nan
    updatable: Mapping[str, str] = field(default_factory=dict)
    nan_checked: tuple[str, ...] = ()
    donate: bool = False  # whether it is written over it
    blocked: tuple[str, ...] = ()  # vertices computed block by block, together with the next one
    memory: int | None = None  # the limit asked for, in bytes per rank
    besides: int = 0  # bytes of the limit that the plan leaves to batches and chunks
    spilled: int = 0  # bytes by which the peak would be higher if nothing were spilled to disk
    nodes: int = 1  # that the ranks run on
    uneven: bool = False  # nodes have different numbers of ranks, or the ranks are not in order
    # Bytes between nodes counted from the schedules, where the mesh does not know the nodes.
    counted: int | None = None
    machine: Machine | None = None  # whose time is the objective; None: bytes are
    ahead: int = 0  # bytes of the peak that are used only for reading files ahead
    overlapped: tuple[str, ...] = ()  # vertices computed while tensors move between nodes
    overlap: int = 0  # bytes of the peak that are used only for that
    files: tuple[str, ...] = ()  # inputs that can be read while kernels run
    # input → bytes of it that one rank reads for another, because of how its file is stored
    passed_on: Mapping[str, int] = field(default_factory=dict)
    recomputed: Recomputed | None = None  # None if every tensor is computed once
    shared: SharedInputs | None = None  # None if no other program keeps inputs of this one
    fitted: FittedInputs | None = None  # None if the limit decides about no input
    # Outputs of the program that stay in pairs of blocks: these are outputs of the graph → the plan
    # of the graph that makes the output of them when it is read.
    unread: Mapping[str, Plan] = field(default_factory=dict)
    loop: LoopPlan | None = None  # if this is the plan of a step
    # What would be moved if bits might depend on the plan, where that was asked for.
    freely: Cost | None = None
    seconds: float = field(default=0.0, compare=False)  # that planning took

    def __str__(self) -> str:
        from einmpi.planner.text.explain import explain  # which needs plans

        return explain(self)

    def __repr__(self) -> str:
        outputs = ", ".join(self.outputs)
        moved = show_bytes(self.cost_in_all.nbytes)
        return f"<Plan of {outputs} on {counted(self.ranks, 'rank')}: {moved} to move>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        text: str = late("plan_html")(self)
        return text

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs of the program."""
        parts = {each.name for plan in self.unread.values() for each in plan.graph.inputs}
        return (*(name for name in self.graph.outputs if name not in parts), *self.unread)

    @property
    def digest(self) -> str:
        """A short hash, equal for equal plans on every rank and every machine."""
        parts = [str(self.graph), str(self.ranks), str(self.mesh.ranks), self.strategy]
        parts += [f"{name}:{state}" for name, state in self.states.items()]
        parts += [f"{name}:{layout}" for name, layout in self.layouts.items()]
        parts += [f"{name}:{orders}" for name, orders in self.orders.items()]
        parts += [f"{name}: resident" for name in self.resident]
        if self.shared is not None:
            parts += [f"{name}: shared" for name in self.shared.names]
        if self.mesh.nodes > 1:
            parts.append(f"{self.mesh.nodes} nodes")
        if self.machine is not None:
            parts.append(f"machine {self.machine.digest}")
        if self.stage != MESSAGE_BUFFER_BYTES:
            parts.append(f"messages: {self.stage}")
        parts += [f"fused: {', '.join(chain.vertices)}, {chain.block}" for chain in self.chains]
        parts += [f"{name}: {plan.digest}" for name, plan in self.unread.items()]
        if self.spilled:
            parts.append(f"memory: {self.memory}")
        if self.reproducible:
            parts.append("reproducible")
        return sha256("\n".join(parts).encode()).hexdigest()[:16]

    @property
    def reproducible(self) -> bool:
        """Whether the bits of results are those of any other plan."""
        return any(each.computed_einsum.reproducible for each in self.graph.computed)

    @property
    def in_place(self) -> Mapping[str, str]:
        """For inputs that are updated in place, the output that is written over them."""
        return self.updatable if self.donate else {}

    @property
    def gathered(self) -> tuple[str, ...]:
        """Tensors with dimensions that no plan cuts: a tensor of unknown values indexes them.

        A certificate holds only among plans in which each rank has the whole of such a dimension.
        """
        names: dict[str, None] = {}
        for vertex in self.graph.computed:
            operands = vertex.computed_einsum.operands
            for name, index in zip(vertex.inputs, operands, strict=True):
                for entry, extent in zip(index, self.graph[name].bound, strict=True):
                    if isinstance(entry, str) or arithmetic_labels(entry) is not None:
                        continue
                    if list_of(self.graph, vertex, entry, extent) is None:
                        names[name] = None
        return tuple(names)

    @property
    def stage(self) -> int:
        """Size of a message buffer, in bytes."""
        return stage_of(None if self.memory is None else self.memory - self.besides)

    @cached_property
    def total(self) -> Bill:
        """What all vertices move, and how long they take."""
        return total_bill(self.bills.values())

    @property
    def words_predicted(self) -> int:
        """Words that move between ranks, in all."""
        return self.total.words.total

    @property
    def bytes_predicted(self) -> int:
        """Bytes that move between ranks, in all."""
        return self.total.nbytes

    @property
    def bytes_busiest(self) -> int:
        """Bytes that the busiest rank receives: the total, shared equally by all ranks."""
        return -(-self.bytes_predicted // self.mesh.ranks)

    @property
    def operations_busiest(self) -> int:
        """Scalar operations of the busiest rank; what several ranks compute counts on each."""
        return sum(self.operations_of_busiest(vertex) for vertex in self.graph.computed)

    def operations_of_busiest(self, vertex: Vertex) -> int:
        """Return the operations of a rank that has the longest share of every label."""
        shares = prod(self.longest_shares(vertex).values())
        indices = prod(vertex.computed_einsum.extent.values())
        return -(-vertex.operations() * shares // max(1, indices))

    def longest_shares(self, vertex: Vertex) -> dict[str, int]:
        """Return the most indices that a rank has of each label of a vertex."""
        einsum = vertex.computed_einsum
        extents = self.sides(vertex.name)
        shares = longest_shares(self.mesh, extents, self.states[vertex.name], einsum.labels)
        return dict(zip(einsum.labels, shares, strict=True))

    @property
    def knows_nodes(self) -> bool:
        """Whether the mesh shows all nodes; if not, the plan treats all ranks as equally near."""
        if self.uneven:
            return False
        each = self.ranks // self.nodes
        on_one_node = self.mesh.ranks <= each
        return on_one_node or self.mesh.ranks == each * self.mesh.nodes

    @property
    def bytes_between(self) -> int | None:
        """Bytes that move between nodes.

        Where the mesh does not know the nodes, this is None until a run has counted them.
        """
        if self.knows_nodes:
            return self.total.between
        return self.counted

    @property
    def seconds_predicted(self) -> float | None:
        """Duration of a run without loading and storing; None where no machine was measured."""
        if self.machine is None:
            return None
        return self.seconds_of(self.total.time)

    @property
    def loops(self) -> tuple[Plan, ...]:
        """The plans of this loop and of those that follow it; empty without a loop."""
        return () if self.loop is None else (self, *self.loop.later)

    @property
    def cost(self) -> Cost:
        """What this plan costs if it is run once: of a loop, a step."""
        return Cost(
            self.words_predicted,
            self.bytes_predicted,
            self.bytes_between or 0,
            self.graph.operations(),
            self.operations_busiest,
            self.seconds_predicted,
        )

    @property
    def cost_once(self) -> Cost:
        """What is moved and computed before the first step of the loop."""
        loop = loop_plan_of(self)
        once = Cost() if loop.once is None else loop.once.cost
        return once.plus(cost_of_all(loop.arriving.values()))

    @property
    def all_steps(self) -> Cost:
        """What the loop costs if it takes all its steps, without the loops that follow it."""
        loop = loop_plan_of(self)
        found = self.cost_once.plus(self.cost, loop.steps)
        if loop.validation is None:
            return found
        times = -(-loop.steps // loop.validated_every)  # one of them after the last step
        once = loop_plan_of(loop.validation).once
        if once is not None:
            found = found.plus(once.cost, 1 - times)
        return found.plus(loop.validation.all_steps, times)

    @property
    def cost_in_all(self) -> Cost:
        """What all loops cost, or the only run of a plan without loops."""
        return cost_of_all(each.all_steps for each in self.loops) if self.loops else self.cost

    @property
    def peak_in_all(self) -> int:
        """The peak of all loops, with what they compute before their first steps.

        That of bringing results to their layouts counts, too.
        """
        peaks = [self.peak, *(each.peak for each in self.unread.values())]
        for each in self.loops:
            loop = loop_plan_of(each)
            for part in (each, loop.once, loop.validation):
                if part is not None:
                    peaks.append(part.peak)
        return max(peaks)

    def seconds_of(self, picoseconds: int) -> float:
        """Return the seconds of one rank, given picoseconds of all ranks together as in `bills`."""
        return picoseconds / self.mesh.ranks / 1e12

    def parts(self, name: str) -> dict[str, int]:
        """Return the number of parts that each label of a vertex is cut into."""
        einsum = self.graph[name].computed_einsum
        counts = self.mesh.parts(self.states[name], einsum.labels)
        return dict(zip(einsum.labels, counts, strict=True))


def loop_plan_of(plan: Plan) -> LoopPlan:
    """Return the loop of a plan that has one."""
    assert plan.loop is not None, "a plan without a loop"
    return plan.loop


@dataclass(frozen=True)
class Options:
    """What a plan has to respect."""

    strategy: str = DEFAULT_STRATEGY
    memory: int | None = None  # the limit, in bytes per rank
    resident: tuple[str, ...] = ()  # inputs that are already where they are needed
    # Inputs that are resident too, as far as the limit allows; the others are loaded in each call.
    fitting: tuple[str, ...] = ()
    # Inputs of which each rank has read a share before it starts; they take memory besides.
    batched: tuple[str, ...] = ()
    decoded: int = 0  # bytes besides, for a chunk of a file that is decoded whole
    # tensor → parts of each dimension
    pins: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    roles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # role → labels
    mesh: Mesh | None = None  # that of the tensors in `given` and `placed`, if there are any
    # input → the layout that it already has
    given: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    # Those of them that another program keeps loaded: their layouts are its choice.
    shared: tuple[str, ...] = ()
    # output → the layout that it must have
    placed: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    # The orders of the digits of dimensions in these layouts, where they are not those of the mesh.
    orders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    first_axis: int = 0  # of the digits of labels with index arithmetic
    # input → the output that it becomes in the next step of a loop; both have one layout
    carry: Mapping[str, str] = field(default_factory=dict)
    # Whether what is carried may be updated in place; and the outputs that must be computed before,
    # because the step is run again from its inputs if one of them is nan.
    donate: bool = False
    nan_checked: tuple[str, ...] = ()
    # "auto", "none", or names: tensors that are dropped and computed again
    recompute: str | tuple[str, ...] = AUTO
    chain_bytes: int = CHAIN_BLOCK_BYTES  # of a block of the tensors inside of a chain
    # That take as long as to read or write a byte of memory.
    operations_of_a_byte: int = OPERATIONS_OF_A_BYTE
    first: tuple[str, ...] = ()  # vertices that are computed before all others
    overlap: bool = True  # kernels may run while tensors move between nodes
    reproducible: bool = False  # bits may not depend on the plan
    unread: bool = True  # outputs that nothing reads may stay in pairs of blocks
    nodes: int = 1
    uneven: bool = False  # nodes have different numbers of ranks, or the ranks are not in order
    machine: Machine | None = None
    weights: Weights | None = None  # of the times of this machine in a search
    files: tuple[str, ...] = ()  # inputs that can be read while kernels run
    # Those of them that are read once for each run, if their files exist.
    stored: Mapping[str, StoredForm] = field(default_factory=dict)
    # Where a search begins: the labels or dimensions that axes cut, of vertices and of tensors.
    start: Cuts | None = None
    # tensor → where the job file prescribes its parts; the others come from the argument `pin`
    pin_places: Mapping[str, str] = field(default_factory=dict)

    @property
    def may_stay(self) -> tuple[str, ...]:
        """The inputs that stay loaded between calls, or do so if they fit."""
        return (*self.resident, *self.fitting)

    def pin_place(self, name: str) -> str:
        """Return where the parts of a tensor are prescribed, for messages."""
        return self.pin_places.get(name, "pin")
