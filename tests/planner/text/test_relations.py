"""The tensor-relational view of a vertex: its text, and that its tiles are the right ones."""

from __future__ import annotations

import re

import numpy as np
import pytest
from paper_helpers import graph_of

from einmpi.planner.text.relations import relations

PAIR = "Y[i,k] = sum(A[i,j] * B[j,k]); Z[i,l] = sum(Y[i,k] * C[k,l])"


def test_two_products_of_8_by_8_as_in_the_papers_figures() -> None:
    graph = graph_of(PAIR, A=(8, 8), B=(8, 8), C=(8, 8))
    text = relations(graph, "Z", {"Y": (2, 2, 1), "Z": (1, 2, 2)})
    assert (
        text
        == """\
Z[i,l] ← Σ[k](Y[i,k] × C[k,l])
cut into i 1, l 2, k 2: 4 kernel calls
repartition Y[i,k]: made in [2,2], needed in [1,2], 96 elements
  Y⟨0,0⟩ ← ⟨0,0⟩ ⟨1,0⟩
  Y⟨0,1⟩ ← ⟨0,1⟩ ⟨1,1⟩
repartition C[k,l]: an input, stored in [2,2]
join Y[i,k] ⋈ C[k,l] on k, key ⟨i,l,k⟩, 192 elements
  Y⟨0,0⟩ ⋈ C⟨0,0⟩ → ⟨0,0,0⟩
  Y⟨0,1⟩ ⋈ C⟨1,0⟩ → ⟨0,0,1⟩
  Y⟨0,0⟩ ⋈ C⟨0,1⟩ → ⟨0,1,0⟩
  Y⟨0,1⟩ ⋈ C⟨1,1⟩ → ⟨0,1,1⟩
aggregate Σ over k: 2 groups of 2, 64 elements
  Z⟨0,0⟩ ← Σ ⟨0,0,0⟩ ⟨0,0,1⟩
  Z⟨0,1⟩ ← Σ ⟨0,1,0⟩ ⟨0,1,1⟩"""
    )


def test_equal_partitionings_and_uncut_aggregation() -> None:
    graph = graph_of(PAIR, A=(8, 8), B=(8, 8), C=(8, 8))
    lines = relations(graph, "Z", {"Y": (2, 1, 1), "Z": (2, 2, 1)}).splitlines()
    assert lines[2] == "repartition Y[i,k]: none, made and needed in [2,1]"
    assert lines[-1] == "aggregate nothing: k not cut; each call makes one tile of Z"


def test_elementwise_gathers_and_scalars() -> None:
    graph = graph_of(
        "Y[b,a] = W[t[b], a] + 1; n = sum(X[i]); m = n + 2",
        W=(9, 4),
        t=np.zeros(6, int),
        X=(4,),
        outputs=["Y", "n", "m"],
    )
    found = {"Y": (3, 2), "n": (2,), "m": ()}
    lines = relations(graph, "Y", found).splitlines()
    assert lines[2:5] == [
        "repartition t[b]: an input, stored in [3]",
        "repartition W[t[b],a]: an input, stored in [1,2]",
        "join t[b] ⋈ W[t[b],a], key ⟨b,a⟩, 120 elements",
    ]
    assert lines[-2:] == [
        "  t⟨2⟩ ⋈ W⟨0,1⟩ → ⟨2,1⟩",
        "aggregate nothing; each call makes one tile of Y",
    ]
    assert relations(graph, "n", found).splitlines()[-1] == "  n⟨⟩ ← Σ ⟨0⟩ ⟨1⟩"
    assert relations(graph, "m", found).splitlines()[1:] == [
        "cut into no labels: 1 kernel call",
        "repartition n: none, made and needed in []",
        "join n, key ⟨⟩, 1 element",
        "  n⟨⟩ → ⟨⟩",
        "aggregate nothing; each call makes one tile of m",
    ]


def test_long_lists_show_their_first_tuples_and_a_count() -> None:
    graph = graph_of(PAIR, A=(640, 640), B=(640, 640), C=(640, 640))
    full = relations(graph, "Z", {"Y": (1, 64, 1), "Z": (8, 8, 1)}).splitlines()
    assert sum("→" in line for line in full) == 64
    assert not any("more" in line for line in full)
    lines = relations(graph, "Z", {"Y": (4096, 1, 1), "Z": (1, 1, 4096)}).splitlines()
    assert len(lines) < 60
    assert sum("→" in line for line in lines) == 16
    assert lines.count("  … 4080 more") == 2  # tiles of Y, calls
    last = lines[-1]
    assert last.startswith("  Z⟨0,0⟩ ← Σ ⟨0,0,0⟩ ⟨0,0,1⟩ ")
    assert last.endswith("⟨0,0,15⟩ … 4080 more")


UNEVEN = [
    (e, d, w)
    for e in (1, 2, 5, 7, 8, 12)
    for d in range(1, e + 1)
    for w in range(1, e + 1)
    if d != w <= 7
]


@pytest.mark.sampled(100)
@pytest.mark.parametrize(("extent", "made", "wanted"), UNEVEN)
def test_pieces_of_a_tile_are_the_tiles_that_share_an_index_with_it(
    extent: int, made: int, wanted: int
) -> None:
    graph = graph_of(
        "Y[i,j] = sum(X[i,j,k]); Z[i,j] = exp(Y[i,j]) / sum[j](Y[i,j])", X=(2, extent, 3)
    )
    name = next(v.name for v in graph.computed if "Y" in v.inputs and len(v.einsum.labels) == 2)
    operand = graph[name].einsum.labels.index("j")
    parts = {v.name: (1,) * len(v.einsum.labels) for v in graph.computed}
    parts["Y"] = (1, made, 1)
    parts[name] = tuple(wanted if k == operand else 1 for k in range(2))
    expected = []
    for tile in range(wanted):
        indices = [i for i in range(extent) if i * wanted // extent == tile]
        pieces = sorted({i * made // extent for i in indices})
        expected.append(f"  Y⟨0,{tile}⟩ ← {' '.join(f'⟨0,{piece}⟩' for piece in pieces)}")
    assert re.findall(r"^  Y.*←.*$", relations(graph, name, parts), re.MULTILINE) == expected


def test_an_empty_tensor() -> None:
    graph = graph_of("Y[i] = sum(X[i,j]); Z[i] = Y[i] + sum(W[i,j])", X=(0, 3), W=(0, 5))
    parts = {vertex.name: (1,) * len(vertex.einsum.labels) for vertex in graph.computed}
    for vertex in graph.computed:
        assert "1 kernel call\n" in relations(graph, vertex.name, parts)
