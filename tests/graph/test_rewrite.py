"""Rewrites: the order of products, sharing, fusing, what moves where, and that text and graph stay
one.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import opt_einsum
import pytest
from calls import calls_of
from graph_helpers import Inputs, as_written, build, reads_back, results
from numpy.testing import assert_allclose, assert_array_equal

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.rewrite import optimize
from einmpi.graph.scalar import walk
from einmpi.kernels.reference import evaluate
from einmpi.language.parse import build_graphs, parse_graph
from einmpi.language.syntax import Source

RANDOM = np.random.default_rng(7)


def tensors(
    dtype: str = "float64", **shapes: tuple[int, ...]
) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (shape, dtype) for name, shape in shapes.items()}


def rewritten(text: str, inputs: Inputs, outputs: list[str] | None = None) -> EinGraph:
    """The rewritten graph, which a second rewrite leaves as it is."""
    graph = build(text, inputs, outputs=outputs)
    assert str(optimize(graph)) == str(graph)
    assert optimize(graph) == graph
    return graph


def lines(graph: EinGraph) -> list[str]:
    return [str(vertex) for vertex in graph.computed]


def index_sets(vertex: Vertex) -> set[frozenset[str]]:
    """The different sets of indices that the operands of a vertex have."""
    assert vertex.einsum is not None
    return {frozenset(map(str, index)) for index in vertex.einsum.operands}


def is_contraction(vertex: Vertex) -> bool:
    """An aggregation over operands that do not all have the same indices."""
    assert vertex.einsum is not None
    return vertex.einsum.aggregation is not None and len(index_sets(vertex)) > 1


# ---- products ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_chain_costs_what_opt_einsums_best_order_costs(seed: int) -> None:
    extents = [int(extent) for extent in np.random.default_rng(seed).integers(2, 60, 5)]
    shapes = list(itertools.pairwise(extents))
    graph = rewritten(
        "Z[a,e] = sum(A[a,b] * B[b,c] * C[c,d] * D[d,e])",
        tensors(**dict(zip("ABCD", shapes, strict=True))),
    )
    arrays = [np.empty(shape) for shape in shapes]
    _, best = opt_einsum.contract_path("ab,bc,cd,de->ae", *arrays, optimize="optimal")
    cost = sum(
        2 * vertex.einsum.calls() for vertex in graph.computed if vertex.einsum
    )  # a product and a sum each
    assert cost == best.opt_cost


def test_order_of_a_skewed_chain() -> None:
    graph = rewritten(
        "Z[i,m] = sum(A[i,j]*B[j,k]*C[k,l]*D[l,m])",
        tensors(A=(10, 90), B=(90, 3), C=(3, 50), D=(50, 7)),
    )
    assert lines(graph) == [
        "Z_1[i,k] ← Σ[j](A[i,j] × B[j,k])",
        "Z_2[k,m] ← Σ[l](C[k,l] × D[l,m])",
        "Z[i,m] ← Σ[k](Z_1[i,k] × Z_2[k,m])",
    ]


PRODUCTS = [
    "Z[a] = sum(A[a,b] * B[b,c] * C[c,d] * D[d,a])",
    "z = sum(A[a,b] * B[b,c] * C[c,d] * D[d,a])",
    "Z[a,b,c,d] = sum(A[a,x] * B[b,x] * C[c,x] * D[d,x])",
    "Z[b,d] = sum(A[a,b] * B[b,c] * A[b,c] * C[c,d] * D[d,d] * A[a,a])",
    "z = sum(A[a,b] * B[c,d] * C[a,c] * D[b,d])",
    "z = sum(A[a,b] * (B[b,c] + C[b,c]) * exp(D[c,d]) * A[0,d])",
    "z = sum(A[a,b] * B[b,c] * C[c,d] * D[d,e] * A[e,f] * B[f,g] * C[g,h] * D[h,a])",
    "Z[a] = sum(A[a,b] * B[c,d] * b * d)",
]


@pytest.mark.parametrize("text", PRODUCTS)
def test_no_contraction_has_more_than_two_factors(text: str) -> None:
    inputs = {name: RANDOM.normal(size=(3, 3)) for name in "ABCD"}
    for vertex in rewritten(text, {name: inputs[name] for name in "ABCD" if name in text}).computed:
        assert not is_contraction(vertex) or len(index_sets(vertex)) == 2, str(vertex)
    results(text, inputs)  # the helper compares the numbers with those of the program as written


def test_a_product_over_the_same_labels_is_one_pass() -> None:
    graph = rewritten("z = sum(A[i] * B[i] * C[i])", tensors(A=(3,), B=(3,), C=(3,)))
    assert lines(graph) == ["z ← Σ[i](A[i] × B[i] × C[i])"]


@pytest.mark.parametrize(
    ("aggregation", "op", "dtype"),
    [
        ("min", "+", "float64"),
        ("max", "+", "float64"),
        ("any", "&", "bool"),
        ("all", "|", "bool"),
        ("max", "minimum", "float64"),
        ("min", "maximum", "int64"),
        ("max", "minimum", "int32"),
    ],
)
def test_other_semirings_split_and_stay_right(aggregation: str, op: str, dtype: str) -> None:
    arrays = {name: (RANDOM.normal(size=(3, 3)) * 3).astype(dtype) for name in "ABC"}
    parts = ("A[i,j]", "B[j,k]", "C[k,l]")
    body = (
        f"{op}({op}({parts[0]}, {parts[1]}), {parts[2]})" if op.isalpha() else f" {op} ".join(parts)
    )
    text = f"Z[i,l] = {aggregation}({body})"
    functions = {
        "+": np.add,
        "&": np.bitwise_and,
        "|": np.bitwise_or,
        "minimum": np.minimum,
        "maximum": np.maximum,
    }
    a, b, c = arrays["A"][:, :, None, None], arrays["B"][None, :, :, None], arrays["C"][None, None]
    wanted = getattr(np, aggregation)(functions[op](functions[op](a, b), c), axis=(1, 2))
    found = results(text, arrays)["Z"]
    assert found.dtype == wanted.dtype
    assert_allclose(found, wanted, rtol=1e-15)  # sums of three numbers, in another order
    assert [is_contraction(vertex) for vertex in rewritten(text, arrays).computed] == [True, True]


@pytest.mark.parametrize(
    "text",
    [
        "Z[i] = prod(A[i,j] * B[j])",
        "Z[i] = max(A[i,j] * B[j])",
        "Z[i] = sum(A[i,j] + B[j])",
        "Z[i] = max(A[i,j] - B[j])",
        "Z[i] = any((A[i,j] > 0) + (B[j] > 0))",
    ],
)
def test_what_is_not_distributive_is_not_split(text: str) -> None:
    assert len(rewritten(text, tensors(A=(3, 4), B=(4,))).computed) == 1


def test_constants_and_scalars_move_out_of_contractions() -> None:
    graph = rewritten("Z[i,k] = sum(2 * A[i,j] * c * B[j,k])", tensors(A=(3, 4), B=(4, 2), c=()))
    assert lines(graph) == ["Z_1[i,k] ← Σ[j](A[i,j] × B[j,k])", "Z[i,k] ← Z_1[i,k] × 2 × c"]
    graph = rewritten("Z[i] = max(A[i,j] + B[j] + 3)", tensors(A=(3, 4), B=(4,)))
    assert lines(graph) == ["Z_1[i] ← max[j](A[i,j] + B[j])", "Z[i] ← Z_1[i] + 3"]
    graph = rewritten("Z[i] = sum(-A[i,j] * B[j])", tensors(A=(3, 4), B=(4,)))
    assert lines(graph) == ["Z_1[i] ← Σ[j](A[i,j] × B[j])", "Z[i] ← Z_1[i] × -1"]


def test_labels_of_one_factor_are_reduced_first() -> None:
    graph = rewritten("Z[i] = sum(A[i,j] * B[j,k] * D[l])", tensors(A=(3, 4), B=(4, 2), D=(3,)))
    assert lines(graph) == [
        "Z_1[j] ← Σ[k](B[j,k])",
        "Z_2 ← Σ[l](D[l])",
        "Z_3[i] ← Σ[j](A[i,j] × Z_1[j])",
        "Z[i] ← Z_3[i] × Z_2",
    ]
    graph = rewritten("Z[i] = sum(A[i,j] / B[j,k])", tensors(A=(3, 4), B=(4, 2)))
    assert lines(graph) == ["Z_1[j] ← Σ[k](1.0 / B[j,k])", "Z[i] ← Σ[j](A[i,j] × Z_1[j])"]


@pytest.mark.parametrize(
    "text",
    [
        "Z[j] = sum(X[q] / D[q,j])",
        "Z[j] = sum(X[q] / (D[q,j] + 1))",
        "Z[k] = sum(D[i,j] / exp(D[j,k]))",
        "Z[i] = sum(-X[i] * X[j] / -D[j,i])",
        "Z[i] = sum(X[i] / D[i,j] / X[j] / 2)",
    ],
)
def test_rewriting_a_quotient_ends(text: str) -> None:
    arrays = {"X": RANDOM.uniform(1, 2, 3), "D": RANDOM.uniform(1, 2, (3, 3))}
    rewritten(text, {name: arrays[name] for name in arrays if name in text})
    results(text, arrays)


def test_rewriting_a_product_over_extents_of_one_ends() -> None:
    """Where nothing is repeated everything may be fused: splitting and fusing must not undo each
    other for ever.
    """
    inputs = {name: np.full((1, 1), 2.0) for name in "BCD"} | {
        name: np.full(1, 3.0) for name in "AE"
    }
    text = "Z[b] = sum[a](A[b] * B[b,a] * C[a,b] * D[a,b] * E[b])"
    rewritten(text, inputs)
    assert results(text, inputs)["Z"] == [72.0]


@pytest.mark.sampled(35)
@pytest.mark.parametrize("seed", range(60))
def test_rewriting_random_products_ends(seed: int) -> None:
    rng = np.random.default_rng(seed)
    extent = {label: int(rng.choice([1, 1, 2])) for label in "abcd"}
    terms, inputs = [], {}
    for name in "ABCDE"[: rng.integers(2, 6)]:
        labels = [str(label) for label in rng.choice(list("abcd"), rng.integers(1, 4))]
        inputs[name] = rng.uniform(1, 2, [extent[label] for label in labels])
        terms.append(f"{name}[{','.join(labels)}]")
    used = sorted({label for term in terms for label in term if label in extent})
    kept = used[: rng.integers(0, len(used))]
    summed = ",".join(label for label in used if label not in kept)
    text = f"Z{[*kept]} = sum[{summed}]({' * '.join(terms)})".replace("'", "").replace("Z[]", "Z")
    rewritten(text, inputs)
    results(text, inputs)


@pytest.mark.parametrize(
    "text",
    [
        "X[i:2] = b; Y[i] = sum[j:3](float32(X[i]))",
        "X[i:2] = b; Y[i] = sum[j:3](exp(X[i]) * A[j])",
        "X[i:2] = max(A[k]); Y[i,l:2] = any[j:3](X[i] > 1); Z[i] = prod(Y[i,l])",
        "W[q:3] = prod[u:0](b); Z[w:3,q] = W[q]",
    ],
)
def test_a_broadcast_into_an_aggregation_reads_back(text: str) -> None:
    arrays = {"A": np.array([1.0, 2.0, 3.0]), "b": np.array(2.0)}
    rewritten(text, arrays)
    results(text, arrays)


def test_outer_product_of_fused_statements_is_reduced_first() -> None:
    graph = rewritten("E[i,j] = A[i] * B[j]; S[i] = sum(E[i,j])", tensors(A=(3,), B=(4,)))
    assert (
        sum(vertex.einsum.calls() for vertex in graph.computed if vertex.einsum) < 3 * 4
    )  # never all of i × j


def test_a_factor_is_computed_once_for_each_of_its_labels() -> None:
    graph = rewritten("Z[i,k] = sum(exp(A[i,j]) * B[j,k])", tensors(A=(3, 4), B=(4, 2)))
    assert lines(graph) == ["Z_1[i,j] ← exp(A[i,j])", "Z[i,k] ← Σ[j](Z_1[i,j] × B[j,k])"]


def test_a_label_nobody_has_still_counts() -> None:
    inputs = {"A": RANDOM.normal(size=(2, 3)), "B": RANDOM.normal(size=(3, 2))}
    wanted = inputs["A"] @ inputs["B"]
    assert_allclose(
        results("Z[i,k] = sum[j,n:5](A[i,j] * B[j,k])", inputs)["Z"], 5 * wanted, rtol=1e-12
    )
    assert_allclose(
        results("Z[i,k] = sum[j,n:0](A[i,j] * B[j,k])", inputs)["Z"], 0 * wanted, atol=0
    )
    wanted = (inputs["A"][:, :, None] + inputs["B"][None]).max(axis=1)
    assert_array_equal(results("Z[i,k] = max[j,n:5](A[i,j] + B[j,k])", inputs)["Z"], wanted)


# ---- sharing -------------------------------------------------------------------------------------


def test_equal_statements_share_one_vertex() -> None:
    text = "X[i,k] = sum(A[i,j]*B[j,k]); Y[p,r] = sum(A[p,q]*B[q,r]); Z[i,k] = exp(X[i,k]) * Y[k,i]"
    graph = rewritten(text, tensors(A=(3, 4), B=(4, 3)))
    assert lines(graph) == ["X[i,k] ← Σ[j](A[i,j] × B[j,k])", "Z[i,k] ← exp(X[i,k]) × X[k,i]"]


def test_a_shared_tensor_is_one_operand() -> None:
    text = "X[i,k] = sum(A[i,j]*B[j,k]); Y[p,r] = sum(A[p,q]*B[q,r]); Z[i,k] = X[i,k] + Y[i,k]"
    graph = rewritten(text, tensors(A=(3, 4), B=(4, 2)))
    assert graph["Z"].inputs == ("X",)
    assert str(graph["Z"]) == "Z[i,k] ← X[i,k] + X[i,k]"


def test_two_equal_outputs_both_exist() -> None:
    arrays = {"A": RANDOM.normal(size=(3, 4)), "B": RANDOM.normal(size=(4, 2))}
    text = "X[i,k] = sum(A[i,j]*B[j,k]); Y[p,r] = sum(A[p,q]*B[q,r]); W[i] = A[i,0]; V[i] = A[i,0]"
    found = results(text, arrays)
    assert list(found) == ["X", "Y", "W", "V"]
    assert_array_equal(found["X"], found["Y"])
    assert_array_equal(found["W"], found["V"])
    graph = rewritten(text, arrays)
    assert (
        sum(vertex.einsum.aggregation is not None for vertex in graph.computed if vertex.einsum)
        == 1
    )


def test_an_output_keeps_its_name_when_shared() -> None:
    text = "X[i] = sum(A[i,j]); Y[p] = sum(A[p,q]); Z[i] = X[i] * 2"
    graph = rewritten(text, tensors(A=(3, 4)), ["Y", "Z"])
    assert lines(graph) == ["Y[i] ← Σ[j](A[i,j])", "Z[i] ← Y[i] × 2"]


@pytest.mark.parametrize(
    "text",
    [
        "X[i] = A[i,0] + 1; Y[i] = A[i,0] + 1.0",
        "X[i] = A[i,0] * 0.0; Y[i] = A[i,0] * -0.0",
        "X[i] = A[i,0]; Y[i] = A[0,i]",
        "X[i] = sum(A[i,j]); Y[j] = sum(A[i,j])",
        "X[i,j] = A[i,j] - A[j,i]; Y[j,i] = A[i,j] - A[j,i]",
        "X[i] = sum(A[i,j]); Y[i] = prod(A[i,j])",
        "X[i,j:2] = A[i,i]; Y[i,j:3] = A[i,i]",
        "X = sum[i:2](i); Y = sum[i:3](i)",
    ],
)
def test_what_differs_a_little_is_not_shared(text: str) -> None:
    graph = rewritten(text, tensors("int32", A=(3, 3)))
    assert "X" not in graph["Y"].inputs


def test_equal_aggregations_in_one_statement_are_one() -> None:
    graph = rewritten("Z[i] = sum(A[i,j]*B[j]) / (1 + sum(A[i,k]*B[k]))", tensors(A=(3, 4), B=(4,)))
    assert lines(graph) == ["Z_1[i] ← Σ[j](A[i,j] × B[j])", "Z[i] ← Z_1[i] / (1 + Z_1[i])"]
    graph = rewritten("Z[i,j] = softmax[j](A[i,j]) + softmax[j](A[i,j])", tensors(A=(3, 4)))
    assert sum("Σ" in line for line in lines(graph)) == 1


# ---- fusing --------------------------------------------------------------------------------------


def test_elementwise_work_of_one_consumer_disappears() -> None:
    graph = rewritten(
        "E[i,j] = exp(A[i,j]); F[i,j] = E[i,j] * 2; G[i,j] = F[i,j] + A[i,j]", tensors(A=(3, 4))
    )
    assert lines(graph) == ["G[i,j] ← exp(A[i,j]) × 2 + A[i,j]"]
    assert graph["G"].origin == ("E", "F", "G")
    graph = rewritten("E[i,j] = exp(A[i,j]); S[i] = sum(E[i,j])", tensors(A=(3, 4)))
    assert lines(graph) == ["S[i] ← Σ[j](exp(A[i,j]))"]
    assert graph["S"].origin == ("E", "S")


def test_an_output_is_never_fused_away() -> None:
    graph = rewritten("E[i,j] = exp(A[i,j]); S[i] = sum(E[i,j])", tensors(A=(3, 4)), ["E", "S"])
    assert lines(graph) == ["E[i,j] ← exp(A[i,j])", "S[i] ← Σ[j](E[i,j])"]
    graph = rewritten("E[i] = A[i]; F[i] = E[i]", tensors(A=(3,)), ["E", "F"])
    assert [vertex.name for vertex in graph.computed] == ["E", "F"]


def test_elementwise_work_of_two_consumers_stays() -> None:
    text = "E[i,j] = exp(A[i,j]); S[i] = sum(E[i,j]); P[i,j] = E[i,j] / S[i]"
    graph = rewritten(text, tensors(A=(3, 4)))
    assert lines(graph) == ["E[i,j] ← exp(A[i,j])", "S[i] ← Σ[j](E[i,j])", "P[i,j] ← E[i,j] / S[i]"]


def test_fusing_repeats_no_work() -> None:
    graph = rewritten("E[i] = exp(A[i]); Z[i,j] = E[i] * B[j]", tensors(A=(3,), B=(4,)))
    assert lines(graph) == ["E[i] ← exp(A[i])", "Z[i,j] ← E[i] × B[j]"]
    graph = rewritten("E[i] = exp(A[i]); Z[i,j:1] = E[i] * 2", tensors(A=(3,)))
    assert lines(graph) == ["Z[i,j:1] ← exp(A[i]) × 2"]  # an extent of 1 repeats nothing


def test_fusing_keeps_the_dtype_of_a_constant_tensor() -> None:
    graph = rewritten("C[i:3] = 2.5; Z[i] = A[i] * C[i]", tensors("float32", A=(3,)))
    assert graph["Z"].dtype == "float64"
    graph = rewritten("C[i:3] = i; Z[i] = A[i] * C[i]", tensors("float32", A=(3,)))
    assert graph["Z"].dtype == "float64"


def test_squaring_sixty_times_does_not_blow_up() -> None:
    text = "; ".join(f"A{k + 1}[i] = A{k}[i] * A{k}[i]" for k in range(60))
    graph = rewritten(text, tensors(A0=(3,)))
    assert (
        max(len(walk(vertex.einsum.function)) for vertex in graph.computed if vertex.einsum) <= 64
    )
    x = np.array([1.0, -1.0, 0.0])
    assert_array_equal(evaluate(graph, {"A0": x})["A60"], x**2)


def test_adding_transposes_sixty_times_does_not_blow_up() -> None:
    text = "; ".join(f"A{k + 1}[i,j] = A{k}[i,j] + A{k}[j,i]" for k in range(60))
    graph = rewritten(text, tensors(A0=(2, 2)))
    assert (
        max(len(walk(vertex.einsum.function)) for vertex in graph.computed if vertex.einsum) <= 64
    )
    x = np.array([[1.0, 2.0], [3.0, 4.0]])
    assert_array_equal(evaluate(graph, {"A0": x})["A60"], (x + x.T) * 2.0**59)


def test_transposes_and_copies_vanish() -> None:
    inputs = tensors(A=(3, 4), B=(4, 2))
    for text, wanted in (
        ("T[j,i] = A[i,j]; Z[i,k] = sum(T[j,i] * B[j,k])", ["Z[i,k] ← Σ[j](A[i,j] × B[j,k])"]),
        ("Y[i,k] = sum(A[i,j] * B[j,k]); Z[k,i] = Y[i,k]", ["Z[k,i] ← Σ[j](A[i,j] × B[j,k])"]),
        ("Y[i,k] = A[i,k]; X[k,i] = Y[i,k]; Z[i,k] = X[k,i]", ["Z[i,k] ← A[i,k]"]),
        ("T[j,i] = A[i,j]; Z[i,j] = T[j,i] + exp(T[j,i])", ["Z[i,j] ← A[i,j] + exp(A[i,j])"]),
        ("Y[i] = A[i,0]; X[i] = Y[i]; Z[i] = X[i]", ["Z[i] ← A[i,0]"]),
    ):
        assert (
            lines(rewritten(text, {name: inputs[name] for name in "AB" if name in text})) == wanted
        )


def test_unneeded_statements_vanish() -> None:
    graph = rewritten(
        "X[i] = A[i] + 1; Y[i] = exp(B[i]); Z[i] = X[i] * 2", tensors(A=(3,), B=(3,)), ["Z"]
    )
    assert str(graph) == "A: float64[3]\nZ[i] ← (A[i] + 1) × 2\noutputs: Z"


# ---- text, order, time ---------------------------------------------------------------------------

PROGRAM = """
Z[i,k] = sum(A[i,j] * B[j,k]) + sum(C[i,j] * sum(D[j,l] * E[l,k]))
P[i,k] = softmax[k](where(k <= i, Z[i,k] / sqrt(8), -inf))
Y[b,a] = P[tok[b], a] * 2 - mean(Z[i,a])
q = sum(A[i,j] * A[k,j] * C[i,l] * C[k,l] * D[l,m] * D[l,m])
r[i] = any((A[i,j] > 0) & (C[i,k] > 0)) | (tok[i] == 2)
h = logsumexp(P[i,k] + Y[i,k])
"""
SHAPES = (
    "A: float64[4, 3]\nB: float64[3, 4]\nC: float64[4, 5]\nD: float64[5, 6]\nE: float64[6, 4]\ntok:"
    " int64[4]\n"
)


def test_same_text_whatever_the_hash_seed() -> None:
    code = (
        "from einmpi.language.parse import build_graphs\n"
        "from einmpi.language.syntax import Source\n"
        f"print(build_graphs(Source('p', {SHAPES + PROGRAM!r}), {{}}).rewritten)"
    )
    root = str(Path(__file__).parents[2])
    texts = set()
    for seed in "012":
        env = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join(sys.path) or root,
        }
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        texts.add(done.stdout)
    assert len(texts) == 1
    reads_back(parse_graph(texts.pop()))


def test_a_long_program_rewrites_to_the_same_numbers() -> None:
    arrays = {
        name: RANDOM.normal(size=shape)
        for name, shape in {"A": (4, 3), "B": (3, 4), "C": (4, 5), "D": (5, 6), "E": (6, 4)}.items()
    }
    arrays["tok"] = np.array([3, 0, 2, 2])
    found = results(PROGRAM, arrays)
    assert list(found) == ["q", "r", "h"]
    rewritten(SHAPES + PROGRAM, {})


def test_as_written_and_rewritten_agree_on_what_they_read() -> None:
    for graph in (as_written(SHAPES + PROGRAM, {}), build(SHAPES + PROGRAM, {})):
        made = {vertex.name for vertex in graph.inputs}
        for vertex in graph.computed:
            assert set(vertex.inputs) <= made, "a tensor is used before it is made"
            made.add(vertex.name)
        assert set(graph.outputs) <= made


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "A{next}[i,k] = sum(A{k}[i,j] * W[j,k]) + 1",
        "A{next}[i,j] = A{k}[i,j] * W[j,i] + 1",
        "A{next}[i,j] = softmax[j](A{k}[i,j])",
        "A{next}[i,j] = A{k}[j,i]",
    ],
)
def test_many_statements_build_quickly(line: str) -> None:
    text = "\n".join(line.format(k=k, next=k + 1) for k in range(1000))
    graphs = []
    calls = calls_of(
        lambda: graphs.append(build_graphs(Source("p", text), tensors(A0=(4, 4), W=(4, 4))))
    )
    assert calls < 1000 * 9000  # up to 4,400 for a statement were counted
    reads_back(graphs[0].rewritten)
