"""The search for the best cuts of one graph on one mesh, and the cuts that are prescribed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import NoReturn

from einmpi.errors import InputError
from einmpi.graph.eingraph import EinGraph
from einmpi.planner.factor import Factored, factor
from einmpi.planner.machine import Machine, Prices
from einmpi.planner.memory import Cuts
from einmpi.planner.mesh import Mesh, is_possible, place
from einmpi.planner.orders import Orders, digit_orders, fixed_orders, orders_agree
from einmpi.planner.plan import Options
from einmpi.planner.repetition import (
    repeated_layers,
    small_results_of_no_layer,
    vertices_alike,
)
from einmpi.planner.search import (
    EXACT_AXES,
    improve_across_windows,
    is_tangled,
    search,
    search_holding,
)
from einmpi.planner.solving.solver import SharedTables, Solution, Solver, Unreachable
from einmpi.planner.states import States, named, numbered
from einmpi.planner.strategies import DEFAULT_STRATEGY, PAPER, SQRT, STRATEGIES
from einmpi.units import counted

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
        return digit_orders(
            self.graph,
            len(self.mesh.factors),
            options.carry,
            fixed,
            options.first_axis,
            self.mesh.ranks,
            options.reproducible and self.mesh.nodes == 1,
        )

    def set_up(self) -> None:
        """Make the problem. Repeated layers share variables where no search would be exact.

        On few axes each has its own, unless those of all layers together cannot be searched.
        """
        shares = self.is_default and not self.small
        if self.exact_axes and not self.is_large:
            shares = False
        tie = self.tied() if shares else {}
        self.problem = self.factored(tie) if tie else self.with_own_variables
        self.with_shared_variables = self.problem
        self.is_tangled = bool(tie) and is_tangled(Solver(self.problem, self.mesh))
        if self.is_tangled or (shares and not tie):
            self.untangle()
        elif tie and self.exact_axes and not is_tangled(Solver(self.with_own_variables, self.mesh)):
            self.problem = self.with_own_variables
        self.shares_variables = bool(tie) and self.problem is self.with_shared_variables

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
            self.graph,
            self.resident,
            self.pinned,
            tie,
            same_layout,
            self.prices,
            self.orders,
            self.mesh.nodes,
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
        is_exact = found.exact and not weigh_work and not self.shares_variables
        return replace(found, exact=is_exact)

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
                first = self.graph[self.graph[name].computed_with or name]
                states[name] = named(found[number], first.computed_einsum.labels)
        return states, layouts
