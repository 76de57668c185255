"""The search for the best cuts of one graph on one mesh: exact, or by freeing a few axes at a time.

docs/planner.md, "The search", describes the steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import NoReturn

from einmpi.errors import InputError
from einmpi.graph.eingraph import EinGraph
from einmpi.planner.factor import Factored, factor
from einmpi.planner.machine import Machine, Prices
from einmpi.planner.memory import Cuts
from einmpi.planner.mesh import Mesh, groupings, is_possible, place
from einmpi.planner.orders import Orders, digit_orders, fixed_orders, orders_agree
from einmpi.planner.plan import Options
from einmpi.planner.repetition import (
    repeated_layers,
    small_results_of_no_layer,
    vertices_alike,
)
from einmpi.planner.solving.elimination import Limits
from einmpi.planner.solving.solver import SharedTables, Solution, Solver, Unreachable
from einmpi.planner.states import Groups, States, named, numbered
from einmpi.planner.strategies import DEFAULT_STRATEGY, PAPER, SQRT, STRATEGIES
from einmpi.units import counted

EXACT_AXES = 3  # up to so many axes, all states are searched at once
MAX_STATES = 300  # of a variable, for an exact search over more axes
MAX_MERGED_SHAPES = 3  # ways to merge the axes that are tried
MANY_VARIABLES = 500  # too many to merge axes: one axis at a time
# Work is counted in cells of joined tables, which bounds the time without looking at a clock.
EXACT_BUDGET_CELLS = 40_000_000
DESCENT_BUDGET_CELLS = 8_500_000
MERGED_LIMITS = Limits(1 << 22, 30_000_000, 1 << 15)
MOVE_LIMITS = Limits(1 << 18, 5_000_000, 1 << 12)
# In a tangled graph one axis is freed at a time, never two.
TANGLED_LIMITS = Limits(1 << 23, 60_000_000, 1 << 16)
TANGLED_BUDGET_CELLS = 30_000_000


def search(
    solver: Solver, start: States | None = None, other_starts: Sequence[States] = ()
) -> Solution:
    """Return the best states found.

    `start` is needed where parts are prescribed and the mesh has many axes. `other_starts` are
    further states to start from, where no parts are prescribed and the search is not exact.
    """
    best = None
    if solver.is_tangled:
        best = _one_axis_at_a_time(solver, start)
    elif _few_states(solver, start is not None):
        every_axis = [(axis,) for axis in range(len(solver.mesh.factors))]
        solver = replace(solver, across_windows=True)
        best = solver.solve(every_axis, limits=Limits(budget=EXACT_BUDGET_CELLS))
        if best.exact:
            return best
    elif start is not None:
        best = solver.solve([], start)
    else:
        best = _cheapest(_merged_solutions(solver))
    best = _descend(solver, best)
    if other_starts:
        # Which start leads farther does not show before the descent.
        found = []
        for groups in _groups_along_windows(solver):
            found.append(solver.solve(groups, limits=MERGED_LIMITS))
        for states in other_starts:
            found.append(_one_axis_at_a_time(solver, states))
        best = _cheapest([best, _descend(solver, _cheapest(found))])
    return replace(best, exact=False)


def search_holding(solver: Solver, held: Mapping[int, tuple[int, ...]]) -> Solution:
    """Return the best states found while some layouts are held as they are.

    Without them, the axes can be merged: every shape is solved, and improved on its own, because
    which one leads farthest does not show before. In the end the layouts are set free, unless it
    costs nothing to have the tensors there.
    """
    holding = replace(solver, fixed={**solver.fixed, **held})
    found = []
    shapes = merged_shapes(solver.mesh)
    if len(solver.mesh.factors) <= EXACT_AXES:
        shapes = shapes[:1]  # few axes are not merged
    for groups in shapes:
        merged = holding.solve(groups, limits=MERGED_LIMITS)
        found.append(_descend(holding, merged, most_axes=1))
    best = _cheapest(found)
    if any(_cost_of_layout(solver, number, best.states) for number in held):
        best = _descend(solver, best, most_axes=1)
    return replace(best, exact=False)


def _cost_of_layout(solver: Solver, layout: int, states: States) -> int:
    """Return what it costs to bring a computed tensor into its layout."""
    total = 0
    for edge in solver.problem.edges:
        if edge.target == layout and edge.source is not None:
            total += solver.edge_cost(edge, states[edge.source], states[layout])
    return total


def improve_across_windows(
    solver: Solver, best: Solution, held: Mapping[int, tuple[int, ...]]
) -> Solution:
    """Improve a solution by axes of several windows on one label.

    Each axis is freed once. Only if that saves a two-hundredth, the search goes on. Layouts that
    were held in the search before stay as they are.
    """
    staying = {number: best.states[number] for number in held}
    solver = replace(solver, across_windows=True, fixed={**solver.fixed, **staying})
    improved = best
    for groups in _moves(solver, best.states, 1):
        improved = _cheapest([improved, solver.solve(groups, improved.states, _limits(solver))])
    if best.cost - improved.cost > best.cost // 200:
        improved = _descend(solver, improved, most_axes=1 if held else 2)
    return replace(improved, exact=False)


def is_tangled(solver: Solver) -> bool:
    """Return whether the axes, merged into three, cannot be searched at once.

    Repeated layers should share their variables: the answer is the same, and comes sooner.
    """
    limit = Limits().first
    return solver.largest_join(merged_shapes(solver.mesh)[0], limit) > limit


def _few_states(solver: Solver, has_start: bool) -> bool:
    """Return whether all states of all axes can be searched at once."""
    axes = len(solver.mesh.factors)
    if axes <= EXACT_AXES:
        return True
    most_symbols = 1
    for number, variable in enumerate(solver.problem.variables):
        if number not in solver.prescribed:
            most_symbols = max(most_symbols, len(variable.extents) + 1)
    most_states = 4 * MAX_STATES if has_start else MAX_STATES
    states: int = most_symbols**axes
    return states <= most_states


def _cheapest(found: Iterable[Solution]) -> Solution:
    """Return the solution with the least cost; of equal ones the first."""
    return min(found, key=lambda solution: solution.cost)


def _merged_solutions(solver: Solver) -> Iterator[Solution]:
    """Yield solutions with the axes merged into at most three, balanced shapes first."""
    if len(solver.problem.variables) > MANY_VARIABLES:
        yield _one_axis_at_a_time(solver)
        return
    for groups in merged_shapes(solver.mesh):
        found = solver.solve(groups, limits=MERGED_LIMITS)
        yield found
        if not found.exact:  # too tangled for this: smaller steps do better
            yield _one_axis_at_a_time(solver)
            return
        if solver.memo.cells > EXACT_BUDGET_CELLS:
            return


def merged_shapes(mesh: Mesh) -> Sequence[Groups]:
    """Return ways to merge the axes into at most three groups.

    Where there are several nodes, the first ways have no group with axes of both levels.
    """
    if mesh.nodes == 1:
        return groupings(mesh.factors, EXACT_AXES)[:MAX_MERGED_SHAPES]
    shapes: list[Groups] = []
    for groups_between in (1, EXACT_AXES - 1):
        groups_inside = EXACT_AXES - groups_between
        between = groupings(mesh.factors[: mesh.node_axes], groups_between)[0]
        inside = groupings(mesh.factors[mesh.node_axes :], groups_inside)[0]
        shifted = tuple(tuple(mesh.node_axes + axis for axis in group) for group in inside)
        shape = (*between, *shifted)
        if shape not in shapes:
            shapes.append(shape)
    shapes.append(groupings(mesh.factors, EXACT_AXES)[0])
    return shapes[:MAX_MERGED_SHAPES]


def _groups_along_windows(solver: Solver) -> list[Groups]:
    """Return three groups of axes that short labels can take; nothing without short labels.

    A label shorter than the number of ranks can take a group of axes only from one of its windows.
    The groups lie between borders of windows; those of the labels with the heaviest tensors come
    first.
    """
    mesh = solver.mesh
    weights: dict[int, int] = {}  # extent of a short label → bytes of the tensors that have it
    for edge in solver.problem.edges:
        for extent in set(edge.bound):
            if 1 < extent < mesh.ranks:
                weights[extent] = weights.get(extent, 0) + edge.weight * edge.nbytes
    if not weights:
        return []
    borders = {0, len(mesh.factors)}
    for extent in sorted(weights, key=lambda extent: (-weights[extent], extent)):
        for window in mesh.windows(extent):
            for border in (min(window), max(window) + 1):
                if len(borders) <= EXACT_AXES:
                    borders.add(border)
    while len(borders) <= EXACT_AXES:  # halve the longest group
        pairs = itertools.pairwise(sorted(borders))
        first, last = max(pairs, key=lambda pair: pair[1] - pair[0])
        borders.add((first + last) // 2)
    groups = [tuple(range(*pair)) for pair in itertools.pairwise(sorted(borders))]
    return [groups]


def _limits(solver: Solver) -> Limits:
    return TANGLED_LIMITS if solver.is_tangled else MOVE_LIMITS


def _one_axis_at_a_time(solver: Solver, start: States | None = None) -> Solution:
    """Free each axis once, first to last; without a start, from states that cut nothing."""
    found = Solution(0, start or solver.uncut(), False)
    for axis in range(len(solver.mesh.factors)):
        found = solver.solve([(axis,)], found.states, _limits(solver))
    return found


def _descend(solver: Solver, best: Solution, most_axes: int = 2) -> Solution:
    """Improve a solution by freeing one axis at a time as long as that saves a hundredth.

    Then two axes are freed at a time, if so many are allowed; if that saves a hundredth, single
    axes are tried again.
    """
    budget = TANGLED_BUDGET_CELLS if solver.is_tangled else DESCENT_BUDGET_CELLS
    solver.memo.cells = 0
    free_axes = 1
    while solver.memo.cells <= budget:
        cost_before = best.cost
        for groups in _moves(solver, best.states, free_axes):
            if solver.memo.cells <= budget:
                best = _cheapest([best, solver.solve(groups, best.states, _limits(solver))])
        saves = cost_before - best.cost > best.cost // 100
        if saves:
            free_axes = 1
        elif free_axes < most_axes and not solver.is_tangled:
            free_axes += 1
        else:
            return best
    return best


def _moves(solver: Solver, states: States, free_axes: int) -> Sequence[Groups]:
    """Return the sets of one or two axes to free.

    Axes of equal length and level that cut everything alike are interchangeable: one of them, or
    one pair of them, is tried. They are not where digits have several orders: there each axis alone
    is tried.
    """
    mesh = solver.mesh
    has_orders = any(variable.orders for variable in solver.problem.variables)
    alike: dict[tuple[int, ...], list[int]] = {}
    for axis, length in enumerate(mesh.factors):
        symbols = [state[axis] for state in states]
        which = axis if has_orders and free_axes == 1 else -1
        alike.setdefault((length, axis < mesh.node_axes, which, *symbols), []).append(axis)
    classes = list(alike.values())
    if free_axes == 1:
        return [((axes[0],),) for axes in classes]
    moves = [((axes[0],), (axes[1],)) for axes in classes if len(axes) > 1]
    for first, second in itertools.combinations(classes, 2):
        moves.append(((first[0],), (second[0],)))
    return moves


# ---- one graph -----------------------------------------------------------------------------------
#
# The search for the best cuts of one graph on one mesh, and the cuts that are prescribed.


# Up to so many vertices, layers are not tied together, and the search also starts from the cuts of
# other strategies.
FEW_VERTICES = 16
# With more vertices than this, a search that is not exact takes long unless layers share variables.
MANY_VERTICES = 300


@dataclass
class CutSearch:
    """The search on one mesh. Its problem is set up once, and solved for each price of memory."""

    graph: EinGraph
    mesh: Mesh
    options: Options
    tables: SharedTables = field(default_factory=SharedTables)

    def __post_init__(self) -> None:
        # What a loop carries is already where the previous step has left it.
        in_place = dict.fromkeys((*self.options.given, *self.options.carry))
        not_listed = [name for name in in_place if name not in self.options.resident]
        self.resident = (*self.options.resident, *not_listed)
        carried_outputs = set(self.options.carry.values())
        pins = [name for name in self.options.pins if name not in carried_outputs]
        self.pinned = (*in_place, *pins)
        self.prices = Prices.of(self.machine(), self.options.weights)
        # Variable → its state, until the others are found without a price of memory.
        self.held: dict[int, tuple[int, ...]] = {}
        self.orders = self.digit_orders()
        self.set_up()
        self.notes: dict[str, str] = {}
        self.prescribed: dict[int, tuple[int, ...]] = {}  # variable → its parts, where prescribed
        self.fixed: dict[int, tuple[int, ...]] = {}  # variable → its state, where given
        self.start: States | None = None  # states with the parts that are prescribed
        # The parts that the strategy asks for; None if it searches itself.
        self.partitionings: Mapping[str, tuple[int, ...]] | None = None
        self.prescribe()

    def digit_orders(self) -> Orders:
        """Return the orders of digits: those of layouts that are given or prescribed are kept.

        Where they do not go together, nothing is prescribed: the caller moves such results.
        """
        options = self.options
        fixed = fixed_orders(options.given, options.orders)
        prescribed = {**fixed, **fixed_orders(options.placed, options.orders)}
        if orders_agree(self.graph, options.carry, prescribed):
            fixed = prescribed
        else:
            self.options = replace(options, placed={})
        axes = len(self.mesh.factors)
        return digit_orders(self.graph, axes, options.carry, fixed, options.first_axis)

    def set_up(self) -> None:
        """Make the problem. Repeated layers share variables where no search would be exact."""
        shares = self.is_default and not self.small
        if self.exact_axes and not self.is_large:
            shares = False
        tie = self.tied() if shares else {}
        self.problem = self.factored(tie) if tie else self.with_own_variables
        self.with_shared_variables = self.problem
        self.is_tangled = bool(tie) and is_tangled(Solver(self.problem, self.mesh))
        if self.is_tangled or (shares and not tie):
            self.untangle()
        elif tie and self.exact_axes:
            self.problem = self.with_own_variables

    def untangle(self) -> None:
        """Let layers share variables whatever results they all read, if the search gets easier.

        A result that all layers read, such as the cosines of positions, hides that they repeat. If
        it is small, it is held on all ranks until the rest is found. This is not done at a price of
        memory, nor where layouts are prescribed.
        """
        if self.pinned or self.options.placed:
            return
        held = small_results_of_no_layer(self.graph, self.mesh.ranks)
        tie = repeated_layers(self.graph, results_of_none=True) if held else {}
        if not tie:
            return
        problem = self.factored(self.alike(tie))
        axes = len(self.mesh.factors)
        for name in held:
            ndim = len(self.graph[name].bound)
            self.held[problem.number["tensor", name]] = (ndim,) * axes
        if is_tangled(Solver(problem, self.mesh, fixed=self.held)):
            self.held = {}
        else:
            self.problem = problem

    @cached_property
    def with_own_variables(self) -> Factored:
        """The problem in which every layer has variables of its own."""
        return self.factored({})

    def problem_at(self, price: int) -> Factored:
        """Return the problem that is solved at a price of memory.

        Where memory has a price, many prices are tried, so that repeated layers share variables in
        a large graph even if the search is exact without that.
        """
        if price and not self.prescribed:
            return self.with_shared_variables
        return self.problem

    def factored(self, tie: Mapping[str, str]) -> Factored:
        """Return the problem; `tie` has the vertices that share variables."""
        # An output that becomes an input of the next step has the layout of that input.
        same_layout = {output: name for name, output in self.options.carry.items()}
        same_layout.update(self.graph.carried)
        return factor(
            self.graph, self.resident, self.pinned, tie, same_layout, self.prices, self.orders
        )

    @cached_property
    def marks(self) -> dict[str, object]:
        """What is special about inputs and outputs: those that share variables have the same."""
        found: dict[str, object] = {}
        for name in self.resident:
            found[name] = "resident"
        for layouts in (self.options.pins, self.options.given, self.options.placed):
            found.update(layouts)
        return found

    def tied(self) -> dict[str, str]:
        """Return vertices and inputs of repeated layers → those whose variables they share."""
        tie = repeated_layers(self.graph)
        if not tie and self.is_large:
            tie = vertices_alike(self.graph, self.marks)
        return self.alike(tie)

    def alike(self, tie: Mapping[str, str]) -> dict[str, str]:
        """Return the vertices and inputs that nothing prescribed keeps from sharing variables."""
        marks = self.marks
        return {name: model for name, model in tie.items() if marks.get(name) == marks.get(model)}

    @property
    def is_default(self) -> bool:
        """Whether the exact planner chooses the cuts."""
        return self.options.strategy == DEFAULT_STRATEGY

    @property
    def exact_axes(self) -> bool:
        """Whether the mesh has so few axes that the search is exact."""
        return len(self.mesh.factors) <= EXACT_AXES

    @property
    def is_large(self) -> bool:
        """Whether the graph has many vertices."""
        return len(self.graph.vertices) > MANY_VERTICES

    @property
    def small(self) -> bool:
        """Whether the graph has few vertices."""
        return len(self.graph.computed) <= FEW_VERTICES

    def machine(self) -> Machine | None:
        """Return the machine to plan for.

        If the mesh does not show the nodes, any message may go from node to node.
        """
        machine = self.options.machine
        if machine is None or self.options.nodes == 1 or self.mesh.nodes > 1:
            return machine
        return replace(machine, inside=machine.between, latency_inside=machine.latency_between)

    # ---- prescribed cuts ------------------------------------------------------------------------

    def prescribe(self) -> None:
        """Collect the parts that pins and the strategy ask for, and find axes that make them."""
        for name, parts in self.options.pins.items():
            number = self.problem.number["tensor", name]
            if self.prescribed.setdefault(number, parts) != parts:
                other = "×".join(map(str, self.prescribed[number]))
                raise InputError(
                    self.options.pin_place(name),
                    f"{name} is cut {'×'.join(map(str, parts))}",
                    f"{other}, because what is carried has one layout",
                )
        for name, cuts in (*self.options.given.items(), *self.options.placed.items()):
            number = self.problem.number["tensor", name]
            ndim = len(self.graph[name].bound)
            self.fixed[number] = numbered(cuts, range(ndim))
            self.prescribed[number] = self.mesh.parts(cuts, range(ndim))
        if not self.is_default:
            strategy = STRATEGIES[self.options.strategy]
            choice = strategy.choose_parts(self.graph, self.mesh.ranks, self.options.roles)
            self.notes = dict(choice.notes)
            self.partitionings = choice.partitionings
            for name, parts in choice.partitionings.items():
                self.prescribe_vertex(name, parts)
        if self.options.start is not None and not self.options.pins:
            self.start = self.started(self.options.start)
        elif self.prescribed:
            self.start = self.placed(self.prescribed)
        if self.start is not None:
            for number, state in self.fixed.items():
                self.start[number] = state

    def prescribe_vertex(self, name: str, parts: tuple[int, ...]) -> None:
        """Ask for these parts of a vertex's labels, as far as the mesh can make them."""
        einsum = self.graph[name].computed_einsum
        number = self.problem.number["vertex", name]
        extents = self.problem.variables[number].sides
        fitting = self.mesh.parts(place(self.mesh, extents, parts), range(len(extents)))
        self.prescribed[number] = fitting
        if fitting == tuple(parts):
            return
        cuts = []
        for label, count in zip(einsum.labels, fitting, strict=True):
            if count > 1:
                cuts.append(f"{label}:{count}")
        shown = " ".join(cuts) or "nothing"
        ranks = counted(self.mesh.ranks, "rank")
        note = f"{prod(parts)} parts do not fit {ranks}: cut {shown}"
        if name in self.notes:
            note = f"{self.notes[name]}; {note}"
        self.notes[name] = note

    def placed(self, parts: Mapping[int, tuple[int, ...]]) -> States:
        """Return states with these parts of some variables; the others are not cut."""
        states = []
        for number, variable in enumerate(self.problem.variables):
            uncut = (1,) * len(variable.extents)
            states.append(place(self.mesh, variable.sides, parts.get(number, uncut)))
        return states

    def started(self, start: Cuts) -> States:
        """Return states with the cuts that are given; what has none is not cut.

        Where other axes cut a label because of the order of its digits, it has as many parts.
        """
        states = Solver(self.problem, self.mesh).uncut()
        for number, variable in enumerate(self.problem.variables):
            known = start.states if variable.kind == "vertex" else start.layouts
            if variable.name not in known:
                continue
            state = start.symbols(variable.kind, variable.name)
            if not is_possible(self.mesh, variable.sides, state):
                parts = self.mesh.parts(state, range(len(variable.sides)))
                state = place(self.mesh, variable.sides, parts)
            states[number] = state
        return states

    @cached_property
    def other_starts(self) -> list[States]:
        """The cuts of strategies that need no roles, as further starts of the search.

        Where labels are shorter than the number of ranks, a search that starts from axes merged in
        equal parts can end far from the best. This is done only where it takes little time.
        """
        if not self.small or self.prescribed or self.exact_axes:
            return []
        has_short_label = False
        for variable in self.problem.variables:
            if any(1 < extent < self.mesh.ranks for extent in variable.extents):
                has_short_label = True
        if not has_short_label:
            return []
        starts = []
        for strategy in (PAPER, SQRT):
            choice = strategy.choose_parts(self.graph, self.mesh.ranks, {})
            parts_of = {}
            for name, parts in choice.partitionings.items():
                parts_of[self.problem.number["vertex", name]] = parts
            starts.append(self.placed(parts_of))
        return starts

    # ---- solving --------------------------------------------------------------------------------

    def solve(self, price: int) -> Solution:
        """Return the states with the least time, or without a measured machine the fewest bytes.

        Computing the same on many ranks moves no bytes. So, where bytes are counted, repeated work
        gets a price as soon as there is much of it; where the search is not exact in any case, it
        has a price from the start.
        """
        bytes_only = self.is_default and self.prices.machine is None
        weigh_work = bytes_only and (not self.exact_axes or self.is_tangled)
        try:
            found = self.search(price, weigh_work)
        except Unreachable as error:
            self.refuse_pin(error.args[0])
        if bytes_only and not weigh_work and self.repeats_work(found.states, price):
            weigh_work = True
            found = self.search(price, weigh_work)
        if price == 0 and not found.exact and self.may_cut_across_windows:
            found = improve_across_windows(self.solver(price, weigh_work), found, self.held)
        return replace(found, exact=found.exact and not weigh_work)

    def search(self, price: int, weigh_work: bool) -> Solution:
        """Return the best states at this price of memory, with a price on repeated work or not."""
        solver = self.solver(price, weigh_work)
        if self.holds(solver.problem):
            return search_holding(solver, self.held)
        return search(solver, self.start, self.other_starts)

    def solver(self, price: int, weigh_work: bool) -> Solver:
        """Return what finds the least costs at this price of memory."""
        problem = self.problem_at(price)
        solver = Solver(
            problem,
            self.mesh,
            self.prescribed,
            self.fixed,
            price,
            weigh_work,
            self.prices,
            self.is_tangled and not self.holds(problem),
        )
        self.tables.use_for(solver)
        return solver

    def holds(self, problem: Factored) -> bool:
        """Return whether layouts of this problem are held until the others are found."""
        return bool(self.held) and problem is self.problem

    @property
    def may_cut_across_windows(self) -> bool:
        """Whether axes of several windows can cut a label, where the planner chooses the cuts."""
        variables = self.problem.variables
        can_mix = any(self.mesh.mixes_windows(variable.sides) for variable in variables)
        return self.is_default and can_mix

    def repeats_work(self, states: States, price: int) -> bool:
        """Return whether ranks repeat more than a tenth of all operations."""
        problem = self.problem_at(price)
        needed = sum(problem.operations)
        done = 0
        for number, variable in enumerate(problem.variables):
            replicas = self.mesh.parts(states[number], [len(variable.extents)])[0]
            done += problem.operations[number] * replicas
        return 10 * done > 11 * needed

    def refuse_pin(self, variable: int) -> NoReturn:
        """Raise InputError: the parts that are prescribed for this variable cannot be made."""
        name = self.problem.variables[variable].name
        parts = "×".join(map(str, self.prescribed[variable]))
        ranks = counted(self.mesh.ranks, "rank")
        raise InputError(
            self.options.pin_place(name),
            f"{name} cannot be cut {parts} over {ranks}",
            self.mesh.possible_parts(self.problem.variables[variable].sides),
        )

    def named(
        self, found: States, problem: Factored | None = None
    ) -> tuple[dict[str, tuple[str | None, ...]], dict[str, tuple[int | None, ...]]]:
        """Return (states with labels, layouts with dimensions), repeated layers included.

        The variables of the problem have numbers for both, and a number past the last for R.
        `problem` is the one that the states belong to, if that is not the one of the search.
        """
        states: dict[str, tuple[str | None, ...]] = {}
        layouts: dict[str, tuple[int | None, ...]] = {}
        for (kind, name), number in (problem or self.problem).number.items():
            if kind == "tensor":
                layouts[name] = named(found[number], range(len(self.graph[name].bound)))
            else:
                states[name] = named(found[number], self.graph[name].computed_einsum.labels)
        return states, layouts
