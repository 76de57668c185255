"""The objective on several nodes and on a measured machine, against enumeration of all states."""

import random
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from plan_oracle import Oracle, R, axes_of, layouts, moved_bytes, random_graph

import einmpi
from einmpi.errors import InputError
from einmpi.planner.factor import factor
from einmpi.planner.machine import BETWEEN, BYTES, Machine, Prices
from einmpi.planner.make_plan import make_plan
from einmpi.planner.mesh import Mesh
from einmpi.planner.plan import Options
from einmpi.planner.planning import Planning
from einmpi.planner.search import search
from einmpi.planner.solving.solver import Solver
from einmpi.planner.text.explain import as_json

MACHINE = Machine(
    latency_inside=1000,
    latency_between=20_000,
    inside=200,
    between=9000,
    multiply={"float32": 40_000_000, "float64": 80_000_000},
    element=900_000_000,
    source="made up for a test",
)
SLOW_NETWORK = replace(MACHINE, between=1_000_000, latency_between=500_000)


class PricedOracle(Oracle):
    """All states of a graph's vertices on several nodes, at the prices of a machine or of bytes."""

    def __init__(self, graph, ranks, nodes, machine=None):
        super().__init__(graph, ranks)
        self.nodes, self.factors, self.between = nodes, axes_of(ranks, nodes), len(axes_of(nodes))
        self.machine = machine
        self.states = {
            v.name: layouts(ranks, tuple(e for _, e in v.einsum.extents), nodes)
            for v in graph.computed
        }

    def own_layouts(self, name):
        return layouts(self.ranks, self.graph[name].bound, self.nodes)

    def price(self, total, across, changing):
        if self.machine is None:
            return total - across + BETWEEN * across
        m = self.machine
        inside, between = prod(changing[self.between :]), prod(changing[: self.between])
        latency = 1000 * (m.latency_inside * (inside - 1) + m.latency_between * (between - 1))
        return (total - across) * m.inside + across * m.between + self.ranks * latency

    def bytes(self, name, sources, targets):
        return np.array(
            [[self.edge(self.graph[name], s, t) for t in targets] for s in sources], np.int64
        )

    def edge(self, tensor, source, target):
        total = moved_bytes(self.factors, tensor, source, target, self.between)
        across = moved_bytes(self.factors, tensor, source[: self.between], target[: self.between])
        changing = [
            f if s not in (R, t) else 1
            for f, s, t in zip(self.factors, source, target, strict=True)
        ]
        return self.price(total, across, changing)

    def stored_once(self, name, targets):
        nbytes, found = self.graph[name].nbytes, []
        for axes in targets:
            copies = [f if symbol == R else 1 for f, symbol in zip(self.factors, axes, strict=True)]
            found.append(
                self.price(
                    (prod(copies) - 1) * nbytes, (prod(copies[: self.between]) - 1) * nbytes, copies
                )
            )
        return np.array(found, np.int64)

    def work(self, vertex):
        """Of each state: what is computed, and computed again."""
        states = self.states[vertex.name]
        if self.machine is None:
            return np.zeros(len(states), np.int64)
        product = (
            vertex.einsum.aggregation == "sum" and len(vertex.inputs) == 2 and "×" in str(vertex)
        )
        rate = (
            self.machine.multiply.get(vertex.dtype, self.machine.element)
            if product
            else self.machine.element
        )
        done = vertex.einsum.operations() * rate // 10**6
        return np.array(
            [
                done * prod(f for f, s in zip(self.factors, state, strict=True) if s == R)
                for state in states
            ],
            np.int64,
        )

    def step(self, vertex, chosen, open_):
        return super().step(vertex, chosen, open_) + self.work(vertex)

    def alone(self, vertex):
        return super().alone(vertex) + self.work(vertex)


def best(graph, ranks, nodes, machine=None):
    prices = Prices.of(machine)
    problem = factor(graph, prices=prices)
    return search(Solver(problem, Mesh(ranks, nodes), prices=prices))


@pytest.mark.parametrize(
    "machine", [None, MACHINE, SLOW_NETWORK], ids=["bytes", "seconds", "slow network"]
)
def test_search_finds_the_cheapest_plan_of_small_graphs(machine):
    rng, proved = random.Random(1), 0
    while proved < 12:
        graph = random_graph(
            rng, rng.choice((1, 2, 3)), rng.choice(((2, 4, 8, 16), (3, 6, 12, 100))), most_labels=2
        )
        ranks, nodes = rng.choice(((4, 2), (6, 2), (6, 3), (8, 2), (8, 4), (4, 4)))
        if len(graph.computed) > 5 or any(len(v.einsum.labels) > 4 for v in graph.computed):
            continue
        found = best(graph, ranks, nodes, machine)
        oracle = PricedOracle(graph, ranks, nodes, machine)
        try:
            assert found.exact and oracle.cheaper_than(found.cost, most_steps=300) is None, (
                f"{ranks} {nodes}\n{graph}"
            )
            assert oracle.cheaper_than(found.cost + 1, most_steps=300) == found.cost, (
                f"{ranks} {nodes}\n{graph}"
            )
        except TimeoutError:
            continue
        proved += found.cost > 0


def chain(s=480, t=48):
    text = "Z[i,k] = sum(A[i,j] * B[j,k]) + sum(C[i,j] * sum(D[j,l] * E[l,k]))"
    return einmpi.program(text, A=(s, t), B=(t, s), C=(s, t), D=(t, s), E=(s, s))


def test_bills_add_up_to_what_the_search_made_small():
    graph = chain().graph
    for ranks, nodes in ((8, 2), (12, 3), (4, 4)):
        options = Options(nodes=nodes, machine=MACHINE)
        plan = Planning(graph, Mesh(ranks, nodes), ranks, options).plan()
        assert (
            sum(bill.time for bill in plan.bills.values())
            == best(graph, ranks, nodes, MACHINE).cost
        )
        assert plan.seconds_predicted == pytest.approx(
            best(graph, ranks, nodes, MACHINE).cost / ranks / 1e12
        )


def test_a_plan_keeps_what_it_can_inside_nodes():
    """Another order of the axes moves as much, but more of it between nodes."""
    graph = chain().graph
    plan = make_plan(graph, 16, Options(nodes=4))
    flat = make_plan(graph, 16, Options())
    assert plan.bytes_predicted <= 1.1 * flat.bytes_predicted
    turned = best(graph, 16, 4)
    assert BETWEEN * plan.bytes_between + plan.bytes_predicted - plan.bytes_between == turned.cost
    assert plan.bytes_between < plan.bytes_predicted / 2


def test_a_slow_network_changes_the_plan():
    graph = einmpi.program("Z[i,k] = sum(A[i,j] * B[j,k])", A=(64, 4096), B=(4096, 64)).graph
    fast = make_plan(
        graph, 8, Options(nodes=2, machine=replace(MACHINE, between=200, latency_between=1000))
    )
    slow = make_plan(graph, 8, Options(nodes=2, machine=SLOW_NETWORK))
    assert slow.bytes_between <= fast.bytes_between
    assert fast.digest != slow.digest  # the machine is part of it


def test_one_node_is_as_without_nodes():
    graph = chain().graph
    assert make_plan(graph, 8, Options(nodes=1)) == make_plan(graph, 8)
    assert make_plan(graph, 8, Options(nodes=2)).digest != make_plan(graph, 8).digest
    assert make_plan(graph, 8).bytes_between == 0 and make_plan(graph, 8).seconds_predicted is None


def test_whole_nodes_are_idle():
    graph = einmpi.program("Z[i,k] = sum(A[i,j] * B[j,k])", A=(360, 360), B=(360, 360)).graph
    plan = make_plan(graph, 26, Options(nodes=13))
    assert (plan.mesh.ranks, plan.mesh.nodes, plan.nodes) == (24, 12, 13)
    assert (
        plan.bytes_between is not None
        and "26 ranks on 13 nodes (mesh 3·2·2 | 2, 2 idle)" in str(plan)
    )


def test_uneven_nodes_have_one_level():
    graph = chain().graph
    plan = make_plan(graph, 8, Options(nodes=3, uneven=True))
    assert plan.mesh == Mesh(8) and plan.bytes_between is None and plan.nodes == 3
    assert "\nnodes        they have different numbers of ranks; planned as if all ranks" in str(
        plan
    )
    assert (
        " between nodes" not in str(plan)
        and as_json(plan)["vertices"][0]["bytes_between_predicted"] is None
    )
    counted = replace(plan, counted=2048)
    assert counted.bytes_between == 2048 and "; 2.0 KiB between nodes\n" in str(counted)
    slow = make_plan(graph, 8, Options(nodes=3, uneven=True, machine=MACHINE))
    assert slow.machine.inside == MACHINE.between  # any message may go from node to node


@pytest.mark.parametrize("nodes", [0, 3, 9, "2", 2.0])
def test_wrong_numbers_of_nodes(nodes):
    with pytest.raises(
        InputError,
        match=r"^nodes: 8 ranks on .* nodes; expected a divisor of the ranks: 1, 2, 4, 8$",
    ):
        make_plan(chain().graph, 8, Options(nodes=nodes))


def test_a_machine_that_says_nothing_about_a_network():
    with pytest.raises(InputError, match="between nodes"):
        make_plan(chain().graph, 8, Options(nodes=2, machine=replace(MACHINE, between=0)))


def test_large_times_do_not_overflow():
    slowest = Machine(10**9, 10**9, 10**9, 10**9, {}, 10**12, "the slowest there can be")
    plan = make_plan(chain(2**15, 2**15).graph, 4096, Options(nodes=64, machine=slowest))
    assert 0 < plan.seconds_predicted < 1e12 and all(bill.time >= 0 for bill in plan.bills.values())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "job, sizes, ranks, nodes",
    [
        ("chain", {}, 1024, 1),
        ("chain", {}, 2048, 64),
        ("shortest_path", {}, 256, 16),
        ("attention", {}, 1024, 1),
        ("distances", {"rows": 3000, "columns": 700, "f": 100}, 4096, 128),
    ],
)
def test_labels_shorter_than_the_ranks_are_cut_as_well_as_by_other_strategies(
    job, sizes, ranks, nodes
):
    graph = einmpi.load(f"jobs/{job}.toml", **sizes).graph
    found, *others = (
        make_plan(graph, ranks, Options(strategy=strategy, nodes=nodes))
        for strategy in ("eindecomp", "eindecomp-paper", "sqrt")
    )
    cost, *costs = (
        BYTES.bytes(plan.bytes_predicted, plan.bytes_between) for plan in (found, *others)
    )
    assert cost <= min(costs)
