"""The three costs: the paper's examples as corrected, the closed form, cases it leaves out."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from paper_helpers import chain, graph_of, matmul

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg
from einmpi.planner.paper import (
    cost_aggregate,
    cost_join,
    cost_repartition,
    decompose,
    graph_cost,
    needs,
    vertex_cost,
    viable,
)


def test_the_papers_examples_of_join_and_aggregation() -> None:
    einsum = matmul()
    assert cost_join(einsum, (4, 4, 1)) == 512
    assert cost_aggregate(einsum, (4, 4, 1)) == 0
    assert cost_aggregate(einsum, (2, 4, 2)) == 64
    assert [prod(parts) for parts in ((4, 4, 1), (2, 8, 1), (4, 2, 2), (2, 4, 2))] == [16] * 4
    assert prod((16, 4, 2)) == 128  # N(d) of d = [16, 2, 2, 4]


def test_the_papers_examples_of_repartition() -> None:
    assert cost_repartition((4, 1), (2, 4), (8, 8)) == 320
    assert cost_repartition((2, 2), (1, 1), (8, 8)) == 256
    assert cost_repartition((1, 1), (2, 2), (8, 8)) == 240
    assert cost_repartition((), (), ()) == 0


@given(
    st.lists(
        st.tuples(*[st.sampled_from([1, 2, 4, 8])] * 2, st.sampled_from([8, 16, 64])),
        min_size=1,
        max_size=4,
    )
)
def test_repartition_has_the_closed_form_of_the_notes_where_extents_divide(
    dims: list[tuple[int, int, int]],
) -> None:
    consumer, producer, bound = (tuple(column) for column in zip(*dims, strict=True))
    n, n_c, n_p = prod(bound), prod(b // c for c, _, b in dims), prod(b // p for _, p, b in dims)
    n_int = prod(min(b // p, b // c) for c, p, b in dims)
    expected = n // n_int * (n_c + n_p) - n - (n * n_p // n_c if n_p == n_int else 0)
    assert cost_repartition(consumer, producer, bound) == (0 if consumer == producer else expected)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 20)), max_size=4))
def test_repartition_where_extents_do_not_divide(dims: list[tuple[int, int, int]]) -> None:
    consumer, producer, bound = ([dim[k] for dim in dims] for k in range(3))
    n_c, n_p = prod(-(-b // c) for c, _, b in dims), prod(-(-b // p) for _, p, b in dims)
    n_int = prod(min(-(-b // p), -(-b // c)) for c, p, b in dims)
    tiles = prod(consumer)
    expected = (prod(max(1, -(-p // c)) for c, p, _ in dims) - 1) * tiles * (n_c + n_p) + (
        n_p != n_int
    ) * n_p * tiles
    assert cost_repartition(consumer, producer, tuple(bound)) == expected


def test_columns_are_priced_like_single_vectors() -> None:
    einsum, found = matmul(7, 9, 11), viable(matmul(7, 9, 11), 6)
    columns = list(np.array(found).T)
    assert list(cost_join(einsum, columns)) == [cost_join(einsum, parts) for parts in found]
    assert list(cost_aggregate(einsum, columns)) == [
        cost_aggregate(einsum, parts) for parts in found
    ]


def test_one_tensor_used_twice_counts_for_each_operand() -> None:
    graph = graph_of("B[i,j] = A[i,j] + A[j,i]", A=(8, 8))
    assert cost_join(graph["B"].einsum, (2, 1)) == 2 * (32 + 32)
    assert needs(graph["B"].einsum, 1, (2, 1)) == (1, 2)


def test_gathers_need_the_whole_dimension_and_diagonals_cut_both() -> None:
    graph = graph_of("Y[b,a] = W[t[b], a]; D[i] = X[i,i]", W=(100, 8), t=np.zeros(6, int), X=(9, 9))
    einsum, bounds = graph["Y"].einsum, [(6,), (100, 8)]
    assert cost_join(einsum, (2, 4), bounds) == 8 * (3 + 100 * 2)
    assert needs(einsum, 1, (2, 4)) == (1, 4)
    assert vertex_cost(graph, "Y", {"Y": (2, 4), "D": (3,)}).join == 8 * 203
    assert needs(graph["D"].einsum, 0, (3,)) == (3, 3)
    assert cost_join(graph["D"].einsum, (3,)) == 3 * 9


def test_unary_nullary_and_scalar_vertices() -> None:
    graph = graph_of(
        "S[i] = max(X[i,j]); T[i] = i * 2 + S[i]; n = sum(S[i]); m = n * 3",
        X=(8, 6),
        outputs=["T", "n", "m"],
    )
    found = decompose(graph, 4)
    assert all(prod(found[name]) == 4 for name in ("S", "T", "n"))
    assert found["m"] == ()
    assert cost_join(graph["S"].einsum, (2, 2)) == 4 * (4 * 3)
    assert cost_aggregate(graph["S"].einsum, (2, 2)) == 2 * 1 * 4
    iota = EinSum(("i",), (), Arg(0), None, (), (("i", 8),))
    assert (cost_join(iota, (4,)), cost_aggregate(iota, (4,))) == (0, 0)
    assert decompose(EinGraph((Vertex("i", (8,), "int64", iota),), ("i",)), 4) == {"i": (4,)}


def test_costs_of_a_graph_are_those_of_its_vertices() -> None:
    graph = chain(1)
    found = {"Z_1": (4, 4, 1), "Z_2": (1, 4, 4), "Z_3": (4, 4, 1), "Z": (16, 1)}
    costs = {vertex.name: vertex_cost(graph, vertex.name, found) for vertex in graph.computed}
    assert costs["Z"].repartition == 2 * cost_repartition((16, 1), (4, 4), (640, 640))
    assert (
        costs["Z_3"].repartition == 0 == costs["Z_1"].repartition
    )  # Z_2 is made as needed, inputs are free
    assert graph_cost(graph, found) == sum(
        cost.join + cost.aggregate + cost.repartition for cost in costs.values()
    )
