"""The strategies: the exact planner, the paper's algorithm, and the rules it is compared with.

Each is one record. `register_strategy` adds a new one (paper, section 9).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import isqrt, prod

from einmpi.errors import InputError, nearest_of
from einmpi.graph.eingraph import EinGraph
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import unique
from einmpi.planner.paper import Parts, decompose, fullest

Roles = Mapping[str, tuple[str, ...]]  # name of a role → the labels that have it


@dataclass(frozen=True)
class Choice:
    """The parts of every computed vertex's labels, and notes where a rule could not be followed."""

    partitionings: Mapping[str, Parts]
    notes: Mapping[str, str]


Partitioner = Callable[[EinGraph, int, Roles], Choice]


# ---- records ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Role:
    """What a label can stand for. A strategy that cuts by role is told the labels of each role."""

    name: str  # the key in the table [roles] of a job file
    description: str  # one line of documentation
    example: str  # a label that often has this role


ROLES: dict[str, Role] = {
    role.name: role
    for role in (
        Role("batch", "samples that are independent of each other", "b"),
        Role("sequence", "positions in a sequence", "s"),
        Role("head", "attention heads", "h"),
        Role("hidden", "hidden features", "f"),
    )
}


@dataclass(frozen=True)
class Strategy:
    """One way to choose how each vertex of a graph is cut."""

    name: str  # as in job files and on the command line
    description: str  # completes the sentence "each vertex is cut …"
    partition: Partitioner | None  # None: the exact planner searches for the cuts itself
    roles: tuple[str, ...] = ()  # at least one of these roles must have a label; (): needs none

    def choose_parts(self, graph: EinGraph, ranks: int, roles: Roles) -> Choice:
        """Return the parts of every vertex, after checking that the labels' roles are given."""
        assert self.partition is not None, f"{self.name} has no rule: the planner searches"
        if self.roles:
            self._check_roles(graph, roles)
        return self.partition(graph, ranks, roles)

    def _check_roles(self, graph: EinGraph, roles: Roles) -> None:
        """Raise InputError if no label has a needed role, or if a role names an unknown label."""
        if not any(roles.get(role) for role in self.roles):
            first = self.roles[0]
            raise InputError(
                "[roles]",
                f"strategy {self.name} needs the role {' or '.join(self.roles)}",
                f'a list of labels, such as {first} = ["{ROLES[first].example}"]',
            )
        known = unique(*(einsum.labels for _, einsum in _einsums(graph)))
        for role, labels in roles.items():
            for label in labels:
                if label not in known:
                    raise InputError(
                        "[roles]",
                        f"role {role} names the label {label}, which no vertex has",
                        nearest_of(known, label),
                    )


STRATEGIES: dict[str, Strategy] = {}


def register_strategy(strategy: Strategy) -> None:
    """Make a strategy known by its name: to job files, the command line, and `einmpi.plan`."""
    if strategy.name in STRATEGIES:
        raise ValueError(f"there already is a strategy {strategy.name!r}")
    STRATEGIES[strategy.name] = strategy


# ---- the rules ----------------------------------------------------------------------------------


def cut_by_paper(graph: EinGraph, ranks: int, roles: Roles) -> Choice:
    """Cut as the paper's algorithm does."""
    partitionings = decompose(graph, ranks)
    notes = {}
    for name, parts in partitionings.items():
        if prod(parts) < ranks:
            notes[name] = _too_few_parts(parts, ranks)
    return Choice(partitionings, notes)


def cut_all_labels(graph: EinGraph, ranks: int, roles: Roles) -> Choice:
    """Cut every label, aggregated ones too, into ⌊√ranks⌋ parts.

    A vertex with three labels then has more kernel calls than there are ranks.
    """
    root = isqrt(ranks)
    partitionings = {}
    for name, einsum in _einsums(graph):
        partitionings[name] = tuple(min(root, max(extent, 1)) for _, extent in einsum.extents)
    return Choice(partitionings, {})


def cut_nothing(graph: EinGraph, ranks: int, roles: Roles) -> Choice:
    """Cut nothing: every rank computes everything."""
    return Choice({name: (1,) * len(einsum.labels) for name, einsum in _einsums(graph)}, {})


def cut_by_role(wanted: tuple[str, ...], graph: EinGraph, ranks: int, roles: Roles) -> Choice:
    """Cut each vertex along its labels of the first of the `wanted` roles that it has.

    The prime factors of `ranks` go to these labels in the order given; the first label takes as
    many as fit, and a prime that fits none of them is left out. A vertex without such a label is
    cut along those of the first role that it does have of batch, sequence, head, hidden. A vertex
    with none of these is cut along its output labels, the longest first, or along its aggregated
    labels if every output label has extent 1.
    """
    order = unique(wanted, ROLES)
    partitionings: dict[str, Parts] = {}
    notes: dict[str, str] = {}
    for name, einsum in _einsums(graph):
        kind, labels = _labels_to_cut(einsum, order, roles)
        extents = tuple(einsum.extent[label] for label in labels)
        cuts = dict(zip(labels, fullest(extents, ranks), strict=True))
        parts = tuple(cuts.get(label, 1) for label in einsum.labels)
        partitionings[name] = parts
        remarks = []
        if kind != wanted[0] and labels:
            cut_labels = tuple(label for label in labels if cuts[label] > 1)
            if not cut_labels:
                cut_labels = labels
            remarks.append(f"no {wanted[0]} label: cut {kind} {', '.join(cut_labels)}")
        if prod(parts) < ranks:
            remarks.append(_too_few_parts(parts, ranks))
        if remarks:
            notes[name] = "; ".join(remarks)
    return Choice(partitionings, notes)


def _labels_to_cut(
    einsum: EinSum, order: tuple[str, ...], roles: Roles
) -> tuple[str, tuple[str, ...]]:
    """Return (role, "output" or "aggregated"; the labels to cut, the first to be cut first)."""
    for role in order:
        labels_of_role = unique(roles.get(role, ()))
        found = tuple(label for label in labels_of_role if label in einsum.labels)
        if found:
            return role, found
    extent = einsum.extent
    kind, labels = "output", einsum.output
    if all(extent[label] <= 1 for label in labels):
        kind, labels = "aggregated", einsum.aggregated
    longest_first = sorted(labels, key=lambda label: (-extent[label], einsum.labels.index(label)))
    return kind, tuple(longest_first)


def _einsums(graph: EinGraph) -> list[tuple[str, EinSum]]:
    """Return (name, EinSum) of every computed vertex."""
    return [(vertex.name, vertex.computed_einsum) for vertex in graph.computed]


def _too_few_parts(parts: Parts, ranks: int) -> str:
    """Return the note for a vertex whose labels are too short for all ranks."""
    return f"only {prod(parts)} of {ranks} ways fit its labels"


# ---- the strategies that come with einmpi -------------------------------------------------------

EXACT = Strategy(
    "eindecomp",
    "so that the whole graph moves the fewest bytes, counted exactly; "
    "the plan says whether that is proven",
    None,
)
PAPER = Strategy("eindecomp-paper", "by the algorithm of the paper, with its costs", cut_by_paper)
SQRT = Strategy("sqrt", "along every label into ⌊√ranks⌋ parts", cut_all_labels)
DEFAULT_STRATEGY = EXACT.name

_OF_ONE_ROLE = {"data": "batch", "model": "hidden", "sequence": "sequence", "attention": "head"}
for _strategy in (
    EXACT,
    PAPER,
    SQRT,
    *(
        Strategy(
            name,
            f"along its labels with the role `{role}`",
            partial(cut_by_role, (role,)),
            roles=(role,),
        )
        for name, role in _OF_ONE_ROLE.items()
    ),
    Strategy(
        "megatron",
        "along its labels with the role `head`, else `hidden`, else `sequence`",
        partial(cut_by_role, ("head", "hidden", "sequence")),
        roles=("head", "hidden"),
    ),
    Strategy("replicate", "not at all: every rank computes everything", cut_nothing),
):
    register_strategy(_strategy)
