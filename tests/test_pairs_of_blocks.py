"""Symmetric results by pairs of blocks on several ranks: values, bytes moved, memory, bounds."""

import copy
import itertools
from dataclasses import replace

import h5py
import numpy as np
import pytest
from bound_cases import is_among
from distributed import run_from_files, run_on_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi_helpers import needs_mpirun, run_mpi

import einmpi
from einmpi.api import options_of
from einmpi.comm.threads import run_threads
from einmpi.compiled.program import Compiled
from einmpi.errors import InputError
from einmpi.graph.forms.pairs import (
    MOST_BLOCKS,
    Division,
    difference_cover,
    paired_labels,
    pairs_by_distance,
    with_pairs_of_blocks,
)
from einmpi.kernels.reference import evaluate
from einmpi.planner import pairs
from einmpi.planner.lower_bound.symmetric import words_of_pairs
from einmpi.planner.make_plan import make_plan
from einmpi.planner.plan import Options
from einmpi.planner.strategies import STRATEGIES

GRAM = "C[i,k] = sum(A[i,j] * A[k,j])"
DISTANCES = "C[i,k] = max(abs(A[i,j] - A[k,j]))"


@pytest.mark.parametrize("blocks", range(1, MOST_BLOCKS + 1))
def test_covers_have_all_differences(blocks):
    cover = difference_cover(blocks)
    assert cover[0] == 0
    assert blocks % 2 or blocks // 2 in cover
    assert {(one - other) % blocks for one in cover for other in cover} == set(range(blocks))
    for distance, (first, second) in enumerate(pairs_by_distance(blocks)):
        assert {first, second} <= set(cover)
        assert (second - first) % blocks == distance


def test_covers_are_small():
    sizes = {7: 3, 8: 4, 13: 4, 16: 5, 21: 5, 31: 6, 32: 7, 57: 8, 64: 9}
    assert {blocks: len(difference_cover(blocks)) for blocks in sizes} == sizes


@given(
    st.integers(1, 12),
    st.lists(st.integers(1, 4), max_size=2),
    st.integers(0, 40),
    st.booleans(),
    st.sampled_from([1, 2, 3, 6]),
    st.sampled_from(
        [
            GRAM,
            DISTANCES,
            "C[b,k,i] = sum(T[i,b,j] * w[j] * T[k,b,j] + T[k,b,j] * w[j] * T[i,b,j])",
            "C[i,k] = sum(A[i,j] * A[k,j] * (B[i,j] + B[k,j]))",
            "C[i,k] = any(A[j,i] < A[j,k])",
        ]
    ),
)
def test_every_division_gives_the_same_values(blocks, pieces, more, pieces_first, sums, text):
    division = Division(blocks * int(np.prod(pieces)) + more, blocks, tuple(pieces), pieces_first)
    n = division.rows
    first = (6, n) if "A[j,i]" in text else (n, 6)
    shapes = {"A": first, "B": first, "T": (n, 2, 6), "w": (6,)}
    rng = np.random.default_rng(n)
    arrays = {}
    for name, shape in shapes.items():
        if name in text:  # small integers, of which sums are exact in every order
            arrays[name] = rng.integers(-9, 10, shape).astype(float)
    graph = einmpi.program(text, **arrays).graph
    if paired_labels(graph, graph["C"]) is None:
        assert "any" in text or "T" in text
        return
    form = with_pairs_of_blocks(graph, "C", division)
    wanted = evaluate(graph, arrays)["C"]
    np.testing.assert_array_equal(evaluate(form.graph, arrays)["C"], wanted)
    if sums > 1:
        division = replace(division, summed="j", sums=sums)
    form = with_pairs_of_blocks(graph, "C", division, stays=True)
    assert "C" not in form.graph.by_name and form.rest.outputs == ("C",)
    found = evaluate(form.rest, evaluate(form.graph, arrays))["C"]
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


@pytest.fixture
def small(monkeypatch):
    """Let small results be computed by pairs, too."""
    monkeypatch.setattr(pairs, "MIN_BYTES", 0)


def by_numpy(text, a):
    if text == GRAM:
        return a @ a.T
    return abs(a[:, None] - a[None]).max(-1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", [GRAM, DISTANCES])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7, 8, 12, 13, 16])
@pytest.mark.parametrize("shape", [(104, 130), (150, 33), (48, 500), (96, 120)])
def test_values_and_bytes(small, text, ranks, shape):
    a = np.random.default_rng(0).standard_normal(shape)
    outputs, _ = run_from_files(ranks, text, {"A": a})
    np.testing.assert_allclose(outputs["C"], by_numpy(text, a), rtol=1e-12, atol=1e-12)


# ---- results that stay in pairs of blocks --------------------------------------------------------


GENERATED = """
program = "C[i,k] = sum(A[i,j] * A[k,j])"
[inputs]
A = { shape = [96, 120], random = "normal", seed = 1 }
"""


@pytest.fixture
def generated(tmp_path):
    """A job whose input is on no rank before, and what it gives."""
    (tmp_path / "job.toml").write_text(GENERATED)
    job = einmpi.load(tmp_path / "job.toml")
    return job, einmpi.reference(job)["C"]


def on_ranks(job, ranks, read):
    """Run the job on threads, and return what `read` makes of the result on each rank."""

    def on_rank(comm):
        compiled = Compiled(job, comm, options_of(job))
        return read(comm, compiled()["C"], compiled)

    return run_threads(ranks, on_rank)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 6, 7, 8])
def test_a_result_moves_when_it_is_read_first(small, generated, ranks):
    job, wanted = generated

    def read(comm, array, compiled):
        ((plan, _),) = compiled.ready.values()
        assert plan.outputs == ("C",) and "stays" in plan.notes["C"]
        assert repr(array) == "DistArray(in pairs of blocks, shape=(96, 96), dtype=float64)"
        assert array.shape == wanted.shape and array.labels == ("i", "k")
        before = comm.received
        block = array.local
        moved = comm.received - before
        assert array.local is block and comm.received == before + moved
        np.testing.assert_allclose(array.gather(), wanted, rtol=1e-12, atol=1e-12)
        return compiled.measured.received, moved, plan

    found = on_ranks(job, ranks, read)
    plan = found[0][2]
    assert sum(received for received, _, _ in found) == plan.bytes_predicted
    assert sum(moved for _, moved, _ in found) == plan.unread["C"].bytes_predicted


def in_a_program(array):
    job = einmpi.program("Y[i,k] = C[i,k]", C=array.shape)
    return Compiled(job, array.own_comm, options_of(job))({"C": array})["Y"]


@pytest.mark.parametrize(
    "read",
    [
        lambda array: (array + 1).gather() - 1,
        lambda array: array[::-1].gather()[::-1],
        lambda array: array.T.gather(),
        lambda array: copy.copy(array).gather(),
        lambda array: in_a_program(array).gather(),
        lambda array: array.redistribute(array.layout).gather(),
    ],
)
def test_every_way_to_read_a_result(small, generated, read):
    job, wanted = generated
    for found in on_ranks(job, 4, lambda comm, array, compiled: read(array)):
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_compiled_job_is_called_again(small):
    job = einmpi.program(GRAM, A=(96, 120))
    first, second = np.random.default_rng(0).standard_normal((2, 96, 120))

    def on_rank(comm):
        given = [einmpi.DistArray.from_global(each, comm=comm) for each in (first, second)]
        layout = einmpi.DistArray.zeros((96, 120), comm=comm).layout
        compiled = Compiled(job, comm, options_of(job))
        results = []
        for each in (*given, *given):
            results.append(compiled({"A": each.redistribute(layout)})["C"])
        return [each.gather() for each in reversed(results)]

    for found in run_threads(3, on_rank):
        for array, a in zip(found, (second, first, second, first), strict=True):
            np.testing.assert_allclose(array, a @ a.T, rtol=1e-12, atol=1e-12)


def test_results_in_layouts_of_others_do_not_stay(small, generated):
    job, _ = generated
    assert einmpi.plan(job, ranks=4).unread
    assert not einmpi.plan(job, ranks=4, pin={"C": (2, 2)}).unread
    again = einmpi.program("C[i,k] = sum(A[i,j] * A[k,j])\nD[i,k] = C[i,k] + 1", A=(96, 120))
    assert not einmpi.plan(again, ranks=4).unread  # it is read
    loop = einmpi.program("C[i,k] = sum(B[i,j] * B[k,j])", B=(96, 96))
    assert make_plan(loop.graph, 4).unread
    assert not make_plan(loop.graph, 4, Options(carry={"B": "C"})).unread
    assert not make_plan(loop.graph, 4, Options(unread=False)).unread  # as for checkpoints


PROGRAMS = {
    "covariance": """
        M[i] = sum(X[b,i]) / 160
        C[i,k] = sum((X[b,i] - M[i]) * (X[b,k] - M[k])) / 159
        Y[i] = sum(C[i,k] * v[k])
    """,
    "kernel matrix": """
        D[i,k] = sum((X[i,b] - X[k,b])**2)
        Y[i] = sum(exp(-D[i,k] / 100) * v[k])
    """,
    "batch": "Y[b,i,k] = max(T[b,i,j] * T[b,k,j])",
    "integers": "Y[i,k] = sum(N[i,j] * N[k,j])",
}
SHAPES = {"X": (160, 120), "v": (120,), "T": (3, 120, 20), "N": (120, 90)}


def inputs_of(text):
    rng = np.random.default_rng(1)
    arrays = {name: rng.standard_normal(SHAPES[name]) for name in SHAPES if f"{name}[" in text}
    if "D[i,k]" in text:
        arrays["v"] = rng.standard_normal(160)
    if "N" in arrays:
        arrays["N"] = rng.integers(-99, 99, SHAPES["N"])
    return arrays


@pytest.mark.parametrize("ranks", [2, 3, 7, 16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_around_it(small, name, ranks):
    arrays = inputs_of(PROGRAMS[name])
    job = einmpi.program(PROGRAMS[name], **arrays)
    done = run_on_threads(job, ranks, arrays)
    assert done.moved == done.plan.bytes_predicted
    wanted = einmpi.reference(job, arrays)["Y"]
    np.testing.assert_allclose(done.outputs["Y"], wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("ranks", [3, 7])
def test_gradients_go_through_it(small, ranks):
    a = np.random.default_rng(0).standard_normal((98, 210))
    job = einmpi.program("C[i,k] = sum(A[i,j] * A[k,j])\nloss = sum(C[i,k]**2)", A=a)
    gradient = einmpi.grad(job, "loss", ["A"])
    done = run_on_threads(gradient, ranks, {"A": a})
    assert done.moved == done.plan.bytes_predicted
    (found,) = [array for array in done.outputs.values() if array.shape == a.shape]
    np.testing.assert_allclose(found, 4 * a @ a.T @ a, rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize("divisor", [1, 1.2, 1.5, 2, 3])
def test_memory_limits_hold(small, divisor):
    a = np.random.default_rng(0).standard_normal((98, 210))
    job = einmpi.program(GRAM, A=a)
    limit = int(einmpi.plan(job, ranks=7).peak_in_all / divisor)
    try:
        outputs, _ = run_from_files(7, GRAM, {"A": a}, memory=limit)
    except InputError:
        return
    np.testing.assert_allclose(outputs["C"], a @ a.T, rtol=1e-12, atol=1e-12)
    for rest in einmpi.plan(job, ranks=7, memory=limit).unread.values():
        assert rest.peak <= limit


@needs_mpirun
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_under_mpirun(ranks, tmp_path):
    a = np.random.default_rng(0).standard_normal((1008, 1200))
    with h5py.File(tmp_path / "A.h5", "w") as file:
        file["A"] = a
    code = f"""
import numpy as np, einmpi, h5py
from mpi4py import MPI
a = np.random.default_rng(0).standard_normal((1008, 1200))
job = einmpi.program("C[i,k] = sum(A[i,j] * A[k,j])", A=a)
A = einmpi.DistArray.from_global(a)
c = einmpi.run(job, A=A.redistribute(einmpi.DistArray.zeros(a.shape).layout))["C"]
assert "in pairs" in repr(c), c
c.to_hdf5("{tmp_path}/C.h5", "C")
np.testing.assert_allclose(c.gather(), a @ a.T, rtol=1e-12, atol=1e-9)
with h5py.File("{tmp_path}/C.h5") as file:
    np.testing.assert_allclose(file["C"][:], a @ a.T, rtol=1e-12, atol=1e-9)
"""
    done = run_mpi(ranks, code)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@needs_mpirun
def test_a_rank_that_reads_alone_is_told_so():
    """The others go on, and end: nobody would answer it."""
    code = """
import numpy as np, einmpi
from mpi4py import MPI
a = np.ones((704, 900))
A = einmpi.DistArray.from_global(a).redistribute(einmpi.DistArray.zeros(a.shape).layout)
c = einmpi.run("C[i,k] = sum(A[i,j] * A[k,j])", A=A)["C"]
assert "in pairs" in repr(c), c
if MPI.COMM_WORLD.rank == 0:
    try:
        c.local
    except einmpi.EinmpiError as error:
        print("told:", error)
"""
    done = run_mpi(2, code)
    assert done.returncode == 0, done.stderr
    assert "told: rank 1 has ended its program" in done.stdout


# ---- words and bounds ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "columns", "ranks", "words", "bound"),
    [
        (8192, 8192, 2, 33_558_528, 26_158_284),
        (8192, 8192, 4, 100_667_392, 59_120_817),
        (8192, 8192, 7, 134_217_728, 91_887_086),
        (8192, 8192, 8, 167_776_256, 100_651_007),
        (8192, 8192, 13, 201_326_592, 136_014_637),
        (8192, 8192, 16, 234_885_120, 152_975_768),
        (8192, 8192, 52, 302_002_176, 275_037_098),
        (3001, 4096, 52, 3 * 3001 * 4096 + 3 * 3001 * 3002 // 2, 45_234_793),
        (8192, 8192, 64, 369_111_040, 301_961_215),
        (8192, 8192, 256, 637_546_496, 538_460_870),
        (8192, 8192, 1024, 1_040_248_832, 913_880_672),
        (8192, 1024, 16, 33_554_432, 25_163_775),
        (8192, 1024, 64, 67_108_864, 58_716_159),
        (1024, 65536, 16, 7_872_000, 7_823_863),
        (1024, 65536, 64, 33_062_400, 32_965_111),
    ],
)
def test_words_and_bounds_of_products_with_the_transpose(rows, columns, ranks, words, bound):
    plan = einmpi.plan(einmpi.program(GRAM, A=(rows, columns)), ranks=ranks)
    assert plan.words_predicted <= words
    assert bound <= plan.lower_bound <= plan.words_predicted


@pytest.mark.parametrize(
    ("rows", "columns", "ranks"), [(3, 2, 2), (4, 1, 2), (4, 1, 3), (4, 2, 2), (3, 4, 3), (5, 1, 5)]
)
def test_no_division_of_all_terms_moves_less_than_the_bound(rows, columns, ranks):
    """All ways to give each rank equally many terms: every element is stored once before."""
    terms = [(i, k, j) for i in range(rows) for k in range(i) for j in range(columns)]
    each = len(terms) // ranks
    assert each * ranks == len(terms)

    def words_of(mine):
        read = {(i, j) for i, _, j in mine} | {(k, j) for _, k, j in mine}
        return len(read) + len({(i, k) for i, k, _ in mine})

    def least(left, ranks_left):
        if ranks_left == 0:
            return 0
        first, *others = left  # one rank has the first term that is left
        found = []
        for more in itertools.combinations(others, each - 1):
            rest = [term for term in others if term not in more]
            found.append(words_of((first, *more)) + least(rest, ranks_left - 1))
        return min(found)

    stored = rows * columns + rows * (rows - 1) // 2
    assert words_of_pairs(rows, columns, ranks) <= least(terms, ranks) - stored


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.sampled_from(
        [
            GRAM,
            DISTANCES,
            "C[i,k] = sum(A[i,j] * A[k,j])\nZ[i,l] = sum(C[i,k] * B[k,l])",
            "C[i,k] = sum(A[i,j] * A[k,j])\nD[j,l] = sum(A[i,j] * A[i,l])",
            "X[i,j] = exp(A[i,j])\nC[i,k] = sum(X[i,j] * X[k,j])\nZ[i] = sum(C[i,k])",
        ]
    ),
    st.integers(8, 90),
    st.integers(1, 400),
    st.sampled_from([2, 3, 4, 6, 7, 8, 9, 12, 16]),
)
def test_no_bound_is_above_any_plan(text, rows, columns, ranks):
    given_shapes = {"A": (rows, columns), "B": (rows, 5)}
    shapes = {name: shape for name, shape in given_shapes.items() if f"{name}[" in text}
    job = einmpi.program(text, **shapes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "MIN_BYTES", 0)
        plans = []
        for strategy in STRATEGIES:
            try:
                plans.append(einmpi.plan(job, ranks=ranks, strategy=strategy))
            except InputError:  # it needs roles
                continue
        used = [plan for plan in plans if plan.mesh.ranks == ranks]
        for plan, other in itertools.product(used, used):
            if is_among(other, plan):
                assert plan.lower_bound <= other.words_predicted
        again = einmpi.plan(job, ranks=ranks)
        assert again.digest == plans[list(STRATEGIES).index("eindecomp")].digest


def test_small_results_stay_as_they_are():
    plan = einmpi.plan(einmpi.program(GRAM, A=(100, 100)), ranks=7)
    assert [vertex.name for vertex in plan.graph.computed] == ["C"]
