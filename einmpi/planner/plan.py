"""The plan of a graph, and the options that it is made with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from einmpi.late import late
from einmpi.planner.chains import CHAIN_BLOCK_BYTES, OPERATIONS_OF_A_BYTE
from einmpi.planner.machine import Machine, Weights
from einmpi.planner.mesh import Mesh
from einmpi.planner.plan_data import PlanData
from einmpi.planner.saving_memory.recompute import AUTO
from einmpi.planner.strategies import DEFAULT_STRATEGY
from einmpi.planner.text.explain import explain
from einmpi.units import counted, show_bytes


@dataclass(frozen=True)
class Plan(PlanData):
    """How a graph is cut over `ranks` ranks. `einmpi.plan` makes it; print(plan) explains it.

    `states` gives for each vertex the label that each axis of the mesh cuts, or None; `layouts`
    gives for each stored tensor the dimension that each axis cuts, or None. `bills` gives for each
    vertex what it moves, in `words` and `nbytes`. The mesh may have fewer ranks than there are: the
    last ranks are idle.
    """

    def __str__(self) -> str:
        return explain(self)

    def __repr__(self) -> str:
        outputs = ", ".join(self.graph.outputs)
        moved = show_bytes(self.cost_in_all.nbytes)
        return f"<Plan of {outputs} on {counted(self.ranks, 'rank')}: {moved} to move>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        text: str = late("plan_html")(self)
        return text


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
    nodes: int = 1
    uneven: bool = False  # nodes have different numbers of ranks, or the ranks are not in order
    machine: Machine | None = None
    weights: Weights | None = None  # of the times of this machine in a search
    files: tuple[str, ...] = ()  # inputs that can be read while kernels run
    # tensor → where the job file prescribes its parts; the others come from the argument `pin`
    pin_places: Mapping[str, str] = field(default_factory=dict)

    @property
    def may_stay(self) -> tuple[str, ...]:
        """The inputs that stay loaded between calls, or do so if they fit."""
        return (*self.resident, *self.fitting)

    def pin_place(self, name: str) -> str:
        """Return where the parts of a tensor are prescribed, for messages."""
        return self.pin_places.get(name, "pin")
