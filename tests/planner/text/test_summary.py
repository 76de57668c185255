"""The summary in words: every claim in the text is compared with the schedules of all ranks."""

import re
from collections import Counter, defaultdict
from math import prod

import pytest
import run_cases
from paper_llama import llama_program
from step_kinds import computed_as, is_exchange, is_reduce

import einmpi
from einmpi.models.config import NAMED
from einmpi.planner.make_plan import make_plan
from einmpi.planner.plan import Options
from einmpi.planner.strategies import STRATEGIES
from einmpi.planner.text import summary as words
from einmpi.planner.text.compare import compare
from einmpi.planner.text.explain import explain
from einmpi.planner.text.summary import in_words, movements
from einmpi.schedule.lower import lower
from einmpi.units import show_bytes

# Extents that every number of ranks below divides, so that all blocks of a tensor are equal.
PRODUCT = "Z[i,k] = sum(A[i,j] * B[j,k])"
PROGRAMS = {
    "chain": (PRODUCT + " + sum(C[i,j] * sum(D[j,l] * E[l,k]))", dict.fromkeys("ABCDE", (24, 24))),
    "tall": (PRODUCT, {"A": (24, 960), "B": (960, 24)}),
    "shared": (
        "Y[i,k] = sum(A[i,j] * B[j,k])\nX[i,k] = max(C[i,j] + B[j,k])\n"
        "Z[i,k] = sum(Y[i,j] * B[j,k]) + X[i,k]",
        {"A": (48, 24), "B": (24, 24), "C": (48, 24)},
    ),
    "furthest": ("F[i] = max(X[i,j])\nn = max(F[i])\nZ[i,j] = X[i,j] / n", {"X": (24, 960)}),
    "rows": ("P[i,j] = softmax[j](X[i,j])", {"X": (96, 24)}),
    "square": ("Y[i,k] = sum(X[i,j] * X[j,k])\nZ[i,k] = sum(Y[i,j] * Y[k,j])", {"X": (24, 24)}),
    "turned": ("P[i,j] = softmax[j](X[i,j])\nQ[i,j] = softmax[i](P[i,j])", {"X": (96, 96)}),
}
ROLES = {"batch": ("i",), "hidden": ("j",)}
CASES = [
    (name, ranks, strategy)
    for name in PROGRAMS
    for ranks, strategy in (
        (2, "eindecomp"),
        (4, "eindecomp"),
        (6, "eindecomp"),
        (8, "eindecomp"),
        (4, "sqrt"),
        (8, "replicate"),
        (6, "data"),
        (8, "model"),
        (8, "eindecomp-paper"),
    )
]


def plan_of(name, ranks, strategy):
    text, shapes = PROGRAMS[name]
    return make_plan(einmpi.program(text, **shapes).graph, ranks, Options(strategy, roles=ROLES))


class Facts:
    """What the ranks do, read from their schedules alone."""

    def __init__(self, plan):
        self.kernels = defaultdict(list)  # vertex → the extents of its labels on each rank
        self.held = defaultdict(
            Counter
        )  # tensor → elements that all ranks together have after a move
        self.combined = defaultdict(set)  # tensor → (ranks that combine their results, how)
        self.bytes = Counter()
        self.shapes = defaultdict(list)  # tensor → (shape before, shape after) of rank 0's moves
        for rank in range(plan.ranks):
            moves = Counter()
            for step in self.flat(lower(plan, rank).steps):
                kernel = step.only_kernel
                if kernel is not None:
                    self.kernels[step.vertex].append(dict(kernel.einsum.extents))
                elif is_exchange(step):
                    self.held[step.tensor][moves[step.tensor]] += prod(step.target.shape)
                    moves[step.tensor] += 1
                    self.bytes[step.tensor] += step.nbytes
                    if rank == 0:
                        self.shapes[step.tensor].append((step.source.shape, step.target.shape))
                elif is_reduce(step) and len(step.group) > 1:
                    self.combined[step.tensor].add((len(step.group), step.aggregation))
                    self.bytes[step.tensor] += step.nbytes

    def flat(self, steps):
        for step in steps:
            yield from step.steps if computed_as(step) == "cache" else [step]


@pytest.fixture
def in_full(monkeypatch):
    """Nothing is left out of a list."""
    monkeypatch.setattr(words, "MOST_NAMES", 99)
    monkeypatch.setattr(words, "MOST_GROUPS", 99)


@pytest.mark.sampled(25)
@pytest.mark.parametrize(("name", "ranks", "strategy"), CASES)
def test_every_claim_is_what_the_ranks_do(name, ranks, strategy, in_full):
    plan = plan_of(name, ranks, strategy)
    facts, graph = Facts(plan), plan.graph
    said = dict(in_words(plan))
    assert len(said) <= 4
    told = set()
    for claim in said["cuts"].split("; "):
        found = re.fullmatch(r"(.*?)(?:, (?:each part|all) on (\d+) ranks)? \((.*)\)", claim)
        cuts = {}
        for labels, parts in re.findall(
            r"((?:\w+(?:, | and ))*\w+) in (\d+)", found[1].replace(" each", "")
        ):
            cuts |= dict.fromkeys(re.split(r", | and ", labels), int(parts))
        vertices = plan.states if found[3].endswith("vertices") else found[3].split(", ")
        for vertex in vertices:
            extents = dict(graph[vertex].einsum.extents)
            wanted = {label: extent // cuts.get(label, 1) for label, extent in extents.items()}
            assert facts.kernels[vertex] == [wanted] * ranks
            assert prod(cuts.values()) * int(found[2] or 1) == ranks
            told.add(vertex)
    assert told == set(plan.states)
    moved = {tensor for tensor, amount in facts.bytes.items() if amount}
    assert (said.get("sends") == "nothing: each rank has what it needs") == (not moved)
    if not moved:
        return
    told = set()
    for claim in filter(None, said.get("sends", "").split("; ")):
        if found := re.fullmatch(
            r"(all|each part) of (.*) to (\d+) ranks(?:, once for (\d+) uses)?", claim
        ):
            assert (found[1] == "all") == (int(found[3]) == ranks)
            for tensor in found[2].split(", "):
                told.add(tensor)
                assert int(found[3]) * graph[tensor].elements in facts.held[tensor].values()
                if found[4]:
                    assert sum(vertex.inputs.count(tensor) for vertex in graph.computed) == int(
                        found[4]
                    )
        else:
            names, made, wanted = re.fullmatch(
                r"(.*) anew, cut \[(.*)\] and then \[(.*)\]", claim
            ).groups()
            for tensor in names.split(", "):
                told.add(tensor)
                bound = graph[tensor].bound
                before, after = (
                    tuple(
                        extent // int(part)
                        for extent, part in zip(bound, parts.split(","), strict=True)
                    )
                    for parts in (made, wanted)
                )
                # Partial results are combined on the way: then a move starts from smaller pieces.
                moves = facts.shapes[tensor]
                assert (
                    (before, after) in moves
                    if tensor not in facts.combined
                    else after in dict(moves).values()
                )
    combined = {}
    for claim in filter(None, said.get("combines", "").split("; ")):
        names, count, operation = re.fullmatch(
            r"partial results of (.*) over (\d+) ranks \((\w+)\)", claim
        ).groups()
        combined |= {tensor: {(int(count), operation)} for tensor in names.split(", ")}
    assert combined == facts.combined
    assert told | set(combined) == moved
    names, amount = re.fullmatch(r"(.*): (.*?)(?: each)? of .*", said["moves most"]).groups()
    most = max(facts.bytes.values())
    assert names.split(", ") == [tensor for tensor in order(plan) if facts.bytes[tensor] == most]
    assert amount == show_bytes(most) and said["moves most"].endswith(
        f" of {show_bytes(sum(facts.bytes.values()))}"
    )


def order(plan):
    """Tensors that move, as they stand in the graph."""
    moved = {move.tensor for move in movements(plan)}
    return [vertex.name for vertex in plan.graph.vertices if vertex.name in moved]


def test_the_cases_make_every_kind_of_claim():
    """Or the test above would show nothing about it."""
    said = "\n".join(f"{word} {text}" for case in CASES for word, text in in_words(plan_of(*case)))
    for claim in (
        "each part on",
        ", all on",
        "sends all of",
        "each part of",
        "once for",
        "anew, cut",
        "(sum)",
        "(max)",
        "sends nothing",
    ):
        assert claim in said, claim


@pytest.mark.parametrize(("name", "ranks", "strategy"), CASES)
def test_movements_are_all_that_moves(name, ranks, strategy):
    plan = plan_of(name, ranks, strategy)
    moves = list(movements(plan))
    assert sum(move.nbytes for move in moves) == plan.bytes_predicted
    assert sum(move.words.aggregate for move in moves) == sum(
        bill.words.aggregate for bill in plan.bills.values()
    )
    assert sum(move.words.repartition for move in moves) == sum(
        bill.words.repartition for bill in plan.bills.values()
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 12])
def test_every_program_and_strategy_can_be_told(ranks):
    """Odd extents, gathers, diagonals, empty tensors, idle ranks."""
    for job, _ in run_cases.cases().values():
        for strategy in run_cases.strategies(job, ranks):
            plan = einmpi.plan(job, ranks, strategy=strategy)
            moves = list(movements(plan))
            assert sum(move.nbytes for move in moves) == plan.bytes_predicted
            assert all(move.partials > 1 for move in moves if move.words.aggregate)
            copies = [move for move in moves if move.words.join and not move.is_halo]
            assert all(move.copies > 1 for move in copies)
            said = in_words(plan)
            assert len(said) <= 5 and ("nothing" in dict(said).get("sends", "")) == (
                plan.bytes_predicted == 0
            )


def test_resident_inputs_and_pins_are_not_told_as_sent():
    job = einmpi.program(PRODUCT, A=(24, 24), B=(24, 24))
    plan = make_plan(job.graph, 4, Options(resident=("A", "B")))
    assert dict(in_words(plan))["sends"] == "nothing: each rank has what it needs"
    pinned = make_plan(job.graph, 4, Options(pins={"A": (4, 1), "B": (4, 1)}))
    assert sum(move.nbytes for move in movements(pinned)) == pinned.bytes_predicted > 0


def test_long_lists_are_counted(monkeypatch):
    assert (
        dict(in_words(plan_of("chain", 4, "eindecomp")))["sends"]
        == "each part of A, B, C, D, E, Z_2 to 2 ranks"
    )
    monkeypatch.setattr(words, "MOST_NAMES", 4)
    assert (
        dict(in_words(plan_of("chain", 4, "eindecomp")))["sends"]
        == "each part of A, B, C, D and 2 more to 2 ranks"
    )


def test_one_rank():
    assert in_words(plan_of("chain", 1, "eindecomp")) == [("cuts", "nothing: one rank does it all")]


def test_parts_of_different_length_are_told():
    """10 rows in 8 parts are two each on 5 of the ranks: 5/8 of the time is used."""
    job = einmpi.program("Z[i] = X[i] + 1", X=(10,))
    notes = dict(in_words(einmpi.plan(job, 8)))
    assert notes["balance"] == "ranks are busy 62.5 % of the time: i = 10 in 8 parts of up to 2 (Z)"
    assert "balance" not in dict(in_words(einmpi.plan(job, 5)))
    assert "balance" not in dict(in_words(einmpi.plan(job, 1)))


@pytest.mark.slow
def test_a_thousand_vertices_are_told_in_few_words():
    text, shapes, _ = llama_program(NAMED["7B"], 8, 1024, 48)
    plan = make_plan(einmpi.program(text, dtype="float32", **shapes).graph, 8)
    assert len(plan.states) > 1000
    said = in_words(plan)
    assert len(said) <= 4 and all(len(line) < 500 for _, line in said)
    assert " more" in said[0][1]


def test_compare_tells_what_the_one_does_that_moves_least():
    text, shapes = PROGRAMS["chain"]
    graph = einmpi.program(text, **shapes).graph
    comparison = compare(lambda name: make_plan(graph, 8, Options(name)))
    least = min(plan.bytes_predicted for plan in comparison.plans)
    winner = next(plan for plan in comparison.plans if plan.bytes_predicted == least)
    rest = sorted(plan.bytes_predicted for plan in comparison.plans if plan.bytes_predicted > least)
    lines = comparison.text.split("\n")
    start = next(k for k, line in enumerate(lines) if " moves least" in line)
    assert lines[start].startswith(f"{winner.strategy} moves least, {show_bytes(least)}")
    assert lines[start].endswith(f"with {show_bytes(rest[0])}")
    assert lines[start + 1 :] == explain(winner).split("\n")[-len(lines[start + 1 :]) :]
    assert len(lines) - start <= 5
    assert {line.split(":")[0] for line in lines[1:start] if ": [" in line} < set(STRATEGIES)


def test_strategies_that_move_the_same_are_named():
    graph = einmpi.program("Z[i] = X[i] + 1", X=(24,)).graph
    text = compare(lambda name: make_plan(graph, 4, Options(name))).text
    assert (
        "\neindecomp moves least, 0 B, as does eindecomp-paper; sqrt is next with 192 B\n" in text
    )
