"""The strategies: what each cuts, its notes, wrong roles, what a mesh can hold, registering."""

from __future__ import annotations

import itertools
from math import isqrt, prod
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_helpers import ROOT, chain, elementwise, graph_of, matmul, random_graph
from target_graphs import llama

import einmpi
from einmpi.errors import InputError
from einmpi.graph.eingraph import EinGraph
from einmpi.planner.make_plan import make_plan
from einmpi.planner.mesh import Mesh, place
from einmpi.planner.paper import decompose, viable
from einmpi.planner.plan import Options
from einmpi.planner.strategies import (
    DEFAULT_STRATEGY,
    STRATEGIES,
    Choice,
    Strategy,
    register_strategy,
)
from einmpi.planner.text.compare import compare

ROLES = {"sequence": ("s", "t"), "head": ("h",), "hidden": ("d",)}
LLAMA_ROLES = {"batch": ("b",), "sequence": ("s", "t"), "head": ("h",), "hidden": ("f",)}


def attention() -> EinGraph:
    return einmpi.load(ROOT / "jobs/attention.toml").graph


def cuts(graph: EinGraph, choice: Choice) -> dict[str, str]:
    """Only what is cut, as text."""
    found = {}
    for vertex in graph.computed:
        parts = zip(vertex.einsum.labels, choice.partitionings[vertex.name], strict=True)
        found[vertex.name] = " ".join(f"{label}{d}" for label, d in parts if d > 1)
    return found


def test_only_the_exact_planner_has_no_rule() -> None:
    without = [name for name, strategy in STRATEGIES.items() if strategy.partition is None]
    assert without == ["eindecomp"] == [DEFAULT_STRATEGY]
    assert all(name == strategy.name for name, strategy in STRATEGIES.items())


def test_a_strategy_registered_at_run_time_is_planned_with_and_listed() -> None:
    """It cuts the first label of each vertex, and needs a label with the role batch."""

    def cut_first_label(graph, ranks, roles):
        parts = {}
        for vertex in graph.computed:
            parts[vertex.name] = (ranks, *(1 for _ in vertex.einsum.labels[1:]))
        return Choice(parts, {"Z": f"cut for the batch {roles['batch'][0]}"})

    try:
        register_strategy(
            Strategy("first-label", "along its first label", cut_first_label, ("batch",))
        )
        job = einmpi.program("Z[i,k] = sum(X[i,j] * Y[j,k])", X=(8, 8), Y=(8, 8))
        with pytest.raises(InputError, match="strategy first-label needs the role batch"):
            einmpi.plan(job, 4, strategy="first-label")
        text = str(make_plan(job.graph, 4, Options("first-label", roles={"batch": ("i",)})))
        assert "strategy first-label" in text
        assert "cuts         i in 4 (Z)" in text
        assert "Z: cut for the batch i" in text
        with pytest.raises(InputError, match="replicate, first-label \\(did you mean first-label"):
            make_plan(job.graph, 4, Options("first-labl"))
        comparison = compare(lambda name: make_plan(job.graph, 4, Options(name)))
        assert "first-label: [roles]: strategy first-label needs the role batch" in comparison.text
        with pytest.raises(ValueError, match="there already is a strategy 'first-label'"):
            register_strategy(Strategy("first-label", "twice", cut_first_label))
    finally:
        STRATEGIES.pop("first-label", None)


@pytest.mark.parametrize("ranks", [1, 4, 7, 8])
def test_the_papers_algorithm(ranks: int) -> None:
    choice = STRATEGIES["eindecomp-paper"].choose_parts(chain(10), ranks, {})
    assert choice == Choice(decompose(chain(10), ranks), {})
    small = graph_of("Y[i] = X[i] + 1", X=(3,))
    assert STRATEGIES["eindecomp-paper"].choose_parts(small, 4, {}).notes == {
        "Y": "only 2 of 4 ways fit its labels"
    }


@pytest.mark.parametrize("ranks", [1, 2, 4, 7, 8, 12, 64, 100])
def test_sqrt_cuts_every_label(ranks: int) -> None:
    choice = STRATEGIES["sqrt"].choose_parts(chain(1), ranks, {})
    root = isqrt(ranks)
    assert choice.partitionings == {
        "Z_1": (root,) * 3,
        "Z_2": (root,) * 3,
        "Z_3": (root,) * 3,
        "Z": (root,) * 2,
    }
    small = graph_of("Y[i] = sum(X[i,j,k])", X=(3, 1, 5))
    assert STRATEGIES["sqrt"].choose_parts(small, ranks, {}).partitionings == {
        "Y": (min(root, 3), 1, min(root, 5))
    }


def test_replicate_cuts_nothing() -> None:
    choice = STRATEGIES["replicate"].choose_parts(attention(), 8, {})
    assert not choice.notes
    assert all(prod(parts) == 1 for parts in choice.partitionings.values())
    assert set(cuts(attention(), choice)) == set(choice.partitionings)


def test_attention_cuts_heads_and_falls_back_to_the_sequence() -> None:
    graph = attention()
    choice = STRATEGIES["attention"].choose_parts(graph, 8, ROLES)
    assert set(cuts(graph, choice).values()) == {"h8"}  # even Y adds over the heads
    assert not choice.notes
    text = "Y[s,h,d] = X[s,h,d] * 2; Z[s,a] = sum(W[s,b] * V[b,a]); n[a] = sum(U[a,c])"
    other = graph_of(text, X=(16, 8, 4), W=(16, 4), V=(4, 6), U=(6, 5))
    choice = STRATEGIES["attention"].choose_parts(other, 8, {"head": ("h",), "sequence": ("s",)})
    assert cuts(other, choice) == {"Y": "h8", "Z": "s8", "n": "a4"}
    assert choice.notes == {
        "Z": "no head label: cut sequence s",
        "n": "no head label: cut output a; only 4 of 8 ways fit its labels",
    }


def test_data_model_and_sequence_on_a_llama_layer() -> None:
    graph, _ = llama()
    for strategy, label in (("data", "b8"), ("sequence", "s8")):
        choice = STRATEGIES[strategy].choose_parts(graph, 8, LLAMA_ROLES)
        assert set(cuts(graph, choice).values()) == {label}
        assert not choice.notes
    choice = STRATEGIES["model"].choose_parts(graph, 8, LLAMA_ROLES)
    found = cuts(graph, choice)
    assert set(found.values()) == {"f8", "b8"}
    assert {name for name, cut in found.items() if cut == "b8"} == set(choice.notes)
    assert set(choice.notes.values()) == {"no hidden label: cut batch b"}


def test_megatron_cuts_heads_then_hidden_then_the_sequence() -> None:
    graph, _ = llama()
    choice = STRATEGIES["megatron"].choose_parts(graph, 8, LLAMA_ROLES)
    found = cuts(graph, choice)
    for vertex in graph.computed:
        labels = vertex.einsum.labels
        assert found[vertex.name] == ("h8" if "h" in labels else "f8" if "f" in labels else "s8")
    assert set(choice.notes.values()) == {
        "no head label: cut hidden f",
        "no head label: cut sequence s",
    }


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (4, "s4"),
        (12, "s4 t3"),  # not s3 t2, which is what comes of the largest prime first
        (16, "s4 t2"),
        (6, "s3 t2"),
        (7, ""),
        (30, "s3 t2"),
        (64, "s4 t2"),
    ],
)
def test_prime_factors_go_to_the_first_label_as_far_as_they_fit(ranks: int, expected: str) -> None:
    graph = graph_of("Y[t,s] = X[s,t] + 1", X=(4, 3))
    choice = STRATEGIES["sequence"].choose_parts(graph, ranks, {"sequence": ("s", "t")})
    assert cuts(graph, choice)["Y"] == " ".join(reversed(expected.split()))
    used = prod(choice.partitionings["Y"])
    assert choice.notes == (
        {"Y": f"only {used} of {ranks} ways fit its labels"} if used < ranks else {}
    )


def test_without_a_role_the_longest_output_label_or_the_aggregated_ones_are_cut() -> None:
    graph = graph_of(
        "Y[b] = X[b] + 1; Z[i,k] = sum(A[i,j] * B[j,k]); n = sum(A[i,j]); m = n + 1",
        X=(8,),
        A=(4, 64),
        B=(64, 32),
        outputs=["Y", "Z", "m", "n"],
    )
    choice = STRATEGIES["data"].choose_parts(graph, 64, {"batch": ("b",)})
    assert cuts(graph, choice) == {"Y": "b8", "Z": "i2 k32", "n": "j64", "m": ""}
    assert choice.notes == {
        "Y": "only 8 of 64 ways fit its labels",
        "Z": "no batch label: cut output k, i",
        "n": "no batch label: cut aggregated j",
        "m": "only 1 of 64 ways fit its labels",
    }


@pytest.mark.parametrize(
    ("strategy", "roles", "message"),
    [
        (
            "attention",
            {},
            "[roles]: strategy attention needs the role head; "
            'expected a list of labels, such as head = ["h"]',
        ),
        (
            "attention",
            {"head": ()},
            "[roles]: strategy attention needs the role head; "
            'expected a list of labels, such as head = ["h"]',
        ),
        (
            "data",
            {"head": ("h",)},
            "[roles]: strategy data needs the role batch; "
            'expected a list of labels, such as batch = ["b"]',
        ),
        (
            "model",
            {},
            "[roles]: strategy model needs the role hidden; "
            'expected a list of labels, such as hidden = ["f"]',
        ),
        (
            "sequence",
            {},
            "[roles]: strategy sequence needs the role sequence; "
            'expected a list of labels, such as sequence = ["s"]',
        ),
        (
            "megatron",
            {"sequence": ("s",)},
            "[roles]: strategy megatron needs the role head or hidden; "
            'expected a list of labels, such as head = ["h"]',
        ),
        (
            "attention",
            {"head": ("q",)},
            "[roles]: role head names the label q, which no vertex has; "
            "expected one of s, h, d, a, t",
        ),
        (
            "attention",
            {"head": ("h",), "batch": ("bb",)},
            "[roles]: role batch names the label bb, which no vertex has; "
            "expected one of s, h, d, a, t",
        ),
    ],
)
def test_roles_that_do_not_fit(
    strategy: str, roles: dict[str, tuple[str, ...]], message: str
) -> None:
    with pytest.raises(InputError) as error:
        STRATEGIES[strategy].choose_parts(attention(), 8, roles)
    assert str(error.value) == message


@pytest.mark.parametrize("seed", range(40))
def test_every_strategy_cuts_any_graph_into_at_most_as_many_parts_as_extents_allow(
    seed: int,
) -> None:
    random = Random(seed)
    graph = random_graph(random, random.randint(1, 6), tree=False)
    labels = sorted({label for vertex in graph.computed for label in vertex.einsum.labels})
    if not labels:
        return
    roles = {
        role: tuple(random.sample(labels, random.randint(1, min(3, len(labels)))))
        for role in LLAMA_ROLES
    }
    rules = [strategy for strategy in STRATEGIES.values() if strategy.partition is not None]
    for ranks, strategy in itertools.product((1, 4, 6, 30), rules):
        found = strategy.choose_parts(graph, ranks, roles).partitionings
        assert list(found) == [vertex.name for vertex in graph.computed]
        for vertex in graph.computed:
            extents = [extent for _, extent in vertex.einsum.extents]
            assert all(d <= extent for d, extent in zip(found[vertex.name], extents, strict=True))
            if strategy.name != "sqrt":
                assert ranks % prod(found[vertex.name]) == 0


# ---- what a mesh can hold ---------------------------------------------------------------------


def fit(einsum, parts, ranks):
    """The parts that are left of these cuts."""
    mesh = Mesh(ranks)
    extents = [extent for _, extent in einsum.extents]
    return mesh.parts(place(mesh, extents, parts), range(len(extents)))


@pytest.mark.parametrize(
    ("parts", "ranks", "expected"),
    [
        ((2, 2, 2), 4, (2, 2, 1)),  # SQRT at four ranks: the aggregated label gives way
        ((2, 2, 2), 8, (2, 2, 2)),
        ((2, 2, 2), 2, (2, 1, 1)),
        ((2, 2, 2), 6, (2, 1, 1)),
        ((3, 3, 3), 12, (3, 1, 1)),
        ((3, 3, 3), 9, (3, 3, 1)),
        ((4, 4, 4), 32, (4, 4, 2)),
        ((6, 6, 6), 36, (6, 6, 1)),
        ((2, 2, 2), 7, (1, 1, 1)),
        ((1, 3, 2), 4, (1, 1, 2)),
        ((5, 1, 6), 30, (5, 1, 6)),
        ((1, 1, 1), 1, (1, 1, 1)),
    ],
)
def test_fit_drops_cuts_of_aggregated_labels_first(
    parts: tuple[int, ...], ranks: int, expected: tuple[int, ...]
) -> None:
    assert fit(matmul(1000, 1000, 1000), parts, ranks) == expected


def test_a_million_ranks_are_shared_out_without_looking_at_every_set_of_axes() -> None:
    assert fit(matmul(2**20, 2**20, 2**20), (1024, 1024, 1), 2**20) == (1024, 1024, 1)
    assert fit(matmul(2**20, 2**20, 2**20), (1024, 1024, 1024), 2**20) == (1024, 1024, 1)
    # Of a label of 30 indices, windows have four axes; of one of two indices they have one.
    assert fit(elementwise(30, 2, 10**7), (16, 2, 2**17), 2**20) == (16, 2, 2**15)
    # The windows are 4·4·4·4·4 axes, and 6·6·6·2: four labels cannot have four windows.
    extents = (16, 16, 64, 64, 64)
    assert fit(elementwise(*extents), (16, 16, 64, 64, 64), 2**20) == (16, 16, 64, 64, 1)


def held(extents: tuple[int, ...], parts: tuple[int, ...], ranks: int) -> bool:
    """Return whether axes of the mesh, in one window for each label, make these parts."""
    mesh = Mesh(ranks)
    for symbols in itertools.product(range(len(extents) + 1), repeat=len(mesh.factors)):
        groups = [
            {a for a, symbol in enumerate(symbols) if symbol == k} for k in range(len(extents))
        ]
        if all(
            prod(mesh.factors[a] for a in group) == d
            and (not group or any(group <= set(window) for window in mesh.windows(extent)))
            for group, d, extent in zip(groups, parts, extents, strict=True)
        ):
            return True
    return False


def test_fit_knows_which_axes_a_short_label_has() -> None:
    assert Mesh(30).windows(10) == ((0,), (1, 2))  # 5, and 3·2: no window makes 10
    assert fit(elementwise(10, 100), (10, 3), 30) == (5, 3)
    assert fit(elementwise(10, 100), (6, 5), 30) == (6, 5)


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), max_size=3), st.integers(1, 60))
@settings(max_examples=200)
def test_fit_gives_what_a_mesh_can_hold_and_changes_nothing_it_need_not(
    dims: list[tuple[int, int]], ranks: int
) -> None:
    extents, parts = tuple(extent for extent, _ in dims), tuple(min(dim) for dim in dims)
    found = fit(elementwise(*extents), parts, ranks)
    assert ranks % prod(found) == 0
    assert all(d % f == 0 for d, f in zip(parts, found, strict=True))
    assert held(extents, found, ranks)
    assert fit(elementwise(*extents), found, ranks) == found
    assert (found == parts) == held(extents, parts, ranks)


def test_viable_vectors_of_long_labels_fit_as_they_are() -> None:
    for ranks in (4, 6, 8, 12, 30, 64):
        assert all(
            fit(matmul(100, 100, 100), parts, ranks) == parts
            for parts in viable(matmul(100, 100, 100), ranks)
        )
