"""A plan: the state of every vertex and the layout of every shared tensor, what that costs and how good it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from einmpi.graph.eingraph import EinGraph
from einmpi.planner.machine import Machine
from einmpi.planner.memory import MESSAGE_BUFFER_BYTES, stage_of
from einmpi.planner.mesh import Mesh
from einmpi.planner.traffic import Bill

STRATEGIES = (
    "eindecomp",
    "eindecomp-paper",
    "sqrt",
    "data",
    "model",
    "sequence",
    "attention",
    "megatron",
    "replicate",
)
DEFAULT = STRATEGIES[0]
ROLES = ("batch", "sequence", "head", "hidden")


@dataclass(frozen=True)
class Plan:
    """How a graph is cut over `ranks` ranks; `einmpi.plan` makes it, print(plan) shows it.

    For each axis of the mesh: the label a vertex cuts or None (`states`), the dimension a tensor cuts (`layouts`).
    The mesh may have fewer ranks than there are: the last ones are idle.
    `bills` say of each vertex what it moves, in `words` and `nbytes`.
    """

    graph: EinGraph
    mesh: Mesh
    ranks: int
    strategy: str
    states: Mapping[str, tuple[str | None, ...]]
    layouts: Mapping[str, tuple[int | None, ...]]
    bills: Mapping[str, Bill]  # what each vertex moves and takes
    peak: int  # bytes of tensors and message buffers on the fullest rank
    kind: str  # "exact" or "gap"
    lower_bound: int
    paper_cost: int
    notes: Mapping[str, str]
    resident: tuple[str, ...] = ()  # inputs that lie where they are wanted
    memory: int | None = None  # bytes a rank, as asked for
    spilled: int = 0  # bytes by which the peak would be higher if nothing of it were kept outside of memory at times
    nodes: int = 1  # that the ranks lie on
    uneven: bool = False  # and not equally many on each, or not one node after the other
    counted: int | None = (
        None  # bytes from node to node by the schedules of all ranks, where the mesh knows no nodes
    )
    machine: Machine | None = None  # whose time was made small; else bytes
    ahead: int = (
        0  # bytes of the peak that are there for nothing but reading files before they are wanted
    )
    seconds: float = field(default=0.0, compare=False)

    @property
    def digest(self) -> str:
        """Equal for equal plans, on every rank and every machine."""
        parts = [str(self.graph), str(self.ranks), str(self.mesh.ranks), self.strategy]
        parts += [f"{name}:{state}" for name, state in self.states.items()]
        parts += [f"{name}:{layout}" for name, layout in self.layouts.items()]
        parts += [f"{name}: resident" for name in self.resident]
        if self.mesh.nodes > 1:
            parts.append(f"{self.mesh.nodes} nodes")
        if self.machine is not None:
            parts.append(f"machine {self.machine.digest}")
        parts += [f"messages: {self.stage}"] if self.stage != MESSAGE_BUFFER_BYTES else []
        parts += [f"memory: {self.memory}"] if self.spilled else []
        return sha256("\n".join(parts).encode()).hexdigest()[:16]

    @property
    def stage(self) -> int:
        """Bytes of a buffer for messages."""
        return stage_of(self.memory)

    @property
    def words_predicted(self) -> int:
        """Elements that move between ranks, in all."""
        return sum(bill.words.total for bill in self.bills.values())

    @property
    def bytes_predicted(self) -> int:
        """The same in bytes."""
        return sum(bill.nbytes for bill in self.bills.values())

    @property
    def bytes_busiest(self) -> int:
        """Those that the busiest rank receives: all ranks do equally much, as far as can be."""
        return -(-self.bytes_predicted // self.mesh.ranks)

    @property
    def knows_nodes(self) -> bool:
        """Whether the mesh has all nodes that the ranks lie on; else the plan takes all ranks to be equally near."""
        each = self.ranks // self.nodes
        return not self.uneven and (
            self.mesh.ranks <= each or self.mesh.ranks == each * self.mesh.nodes
        )

    @property
    def bytes_between(self) -> int | None:
        """Those that go from node to node; None where the mesh does not know the nodes, until a run counts them."""
        return (
            sum(bill.between for bill in self.bills.values()) if self.knows_nodes else self.counted
        )

    @property
    def seconds_predicted(self) -> float | None:
        """How long a run takes, without loading and storing, where a machine was measured."""
        return (
            None
            if self.machine is None
            else self.seconds_of(sum(bill.time for bill in self.bills.values()))
        )

    def seconds_of(self, picoseconds: int) -> float:
        """Of one rank, from what all ranks take together, as in bills."""
        return picoseconds / self.mesh.ranks / 1e12

    def __str__(self) -> str:
        from einmpi.planner.text.explain import explain  # which describes a Plan

        return explain(self)

    def parts(self, name: str) -> dict[str, int]:
        """Into how many parts each label of a vertex is cut."""
        einsum = self.graph[name].einsum
        assert einsum is not None
        return dict(
            zip(einsum.labels, self.mesh.parts(self.states[name], einsum.labels), strict=True)
        )


@dataclass(frozen=True)
class Options:
    """What a plan is asked to respect."""

    strategy: str = DEFAULT
    memory: int | None = None  # bytes a rank
    resident: tuple[str, ...] = ()
    pins: Mapping[str, tuple[int, ...]] = field(
        default_factory=dict
    )  # tensor → parts of each dimension
    roles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mesh: Mesh | None = None  # of `given`, where there is one
    given: Mapping[str, tuple[int | None, ...]] = field(
        default_factory=dict
    )  # layouts that inputs have already
    nodes: int = 1
    uneven: bool = False  # the nodes have different numbers of ranks, or these are not in order
    machine: Machine | None = None
    files: tuple[str, ...] = ()  # inputs that can be read while kernels run
