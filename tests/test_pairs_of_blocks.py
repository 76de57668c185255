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
from einmpi.graph.forms.pairs.blocks import (
    MOST_BLOCKS,
    Division,
    difference_cover,
    pairs_by_distance,
)
from einmpi.graph.forms.pairs.families import family_of, paired
from einmpi.graph.forms.pairs.graph import with_pairs_of_blocks
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
    if paired(graph, graph["C"]) is None:
        assert "any" in text or "T" in text
        return
    family = family_of(graph, "C")
    form = with_pairs_of_blocks(graph, family, division)
    wanted = evaluate(graph, arrays)["C"]
    np.testing.assert_array_equal(evaluate(form.graph, arrays)["C"], wanted)
    if sums > 1:
        division = replace(division, summed="j", sums=sums)
    form = with_pairs_of_blocks(graph, family, division, stay=("C",))
    assert "C" not in form.graph.by_name and form.rests["C"].outputs == ("C",)
    found = evaluate(form.rests["C"], evaluate(form.graph, arrays))["C"]
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
    read = "C[i,k] = sum(A[i,j] * A[k,j])\nD[i,k] = C[i,k] + i"
    assert not einmpi.plan(einmpi.program(read, A=(96, 120)), ranks=4).unread
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


# What is computed from the pairs of a symmetric result C: text, and what can be an output.
GRAM_OF_COMPLEX = "C[i,k] = sum(A[i,j] * conj(A[k,j]))"
FAMILIES = {
    "maps and aggregates": (
        GRAM
        + """
        D[i,k] = abs(C[i,k]) + 1
        s = sum(D[i,k])
        m = max(D[i,k])
        """,
        "C D s m",
    ),
    "other labels": (
        GRAM
        + """
        D[p,q] = C[p,q] * u[p] * u[q] + C[q,p]
        E[q,p] = D[p,q]**2 + D[q,p]
        Y[i] = sum(E[i,k])
        W[k] = max(E[i,k] + u[i])
        """,
        "D E Y W",
    ),
    "diagonal": (
        GRAM
        + """
        R[i,k] = where(i == k, C[i,k] + 3, C[i,k]) + C[i,i] * C[k,k]
        t = sum(R[i,k] * minimum(R[i,k], 9))
        d[i] = C[i,i]
        trace = sum(R[i,i])
        """,
        "R t d trace",
    ),
    "another matrix": (
        GRAM
        + """
        R[i,k] = C[i,k] * (M[i,k] + M[k,i])
        Y[i,l] = sum(R[i,k] * B[k,l])
        b = any(R[i,k] > 20)
        """,
        "R Y b",
    ),
    "batch": (
        "C[b,i,k] = sum(T[b,i,j] * T[b,k,j])"
        + """
        D[i,k] = sum(C[b,i,k])
        E[b] = sum(C[b,i,k])
        Y[i,b] = sum(C[b,i,k] * u[k])
        d[b,i] = C[b,i,i]
        """,
        "C D E Y d",
    ),
    "more labels": (
        "C[i,b,k] = max(abs(T[b,i,j] - T[b,k,j]))"
        + """
        D[k,b,i] = C[i,b,k] + C[k,b,i]
        Q[i,k,b,l] = C[i,b,k] * w[l]
        q[l] = sum(Q[i,k,b,l])
        """,
        "D Q q",
    ),
    "complex": (
        GRAM_OF_COMPLEX
        + """
        D[i,k] = C[i,k] * conj(C[i,k])
        E[i,k] = C[i,k] * 2
        F[i,k] = C[k,i]
        s = sum(E[i,k])
        Y[i] = sum(C[i,k] * u[k])
        X[k] = sum(C[i,k] * u[i])
        d[i] = C[i,i]
        """,
        "D E F s Y X d",
    ),
    "parts of complex numbers": (
        GRAM_OF_COMPLEX
        + """
        D[i,k] = real(C[i,k])
        E[i,k] = imag(C[i,k])**2
        s = sum(E[i,k])
        V[i,k] = imag(C[i,k])
        """,
        "C D E s V",
    ),
    "products": (
        GRAM
        + """
        p = prod(where(C[i,k] > 0, 1, -1))
        P[i] = prod(where(C[i,k] > u[k], 1, -1))
        Z[i,l] = sum(C[i,k] * B[k,l])
        """,
        "p P Z",
    ),
    "not symmetric": (
        GRAM
        + """
        N[i,k] = C[i,k] * u[k]
        D[i,k] = C[i,k]**2
        Z[i] = sum(N[i,k])
        s = sum(D[i,k] * u[i])
        """,
        "N D Z s",
    ),
}


def arrays_of(text, n, columns, seed):
    """Small integers, of which sums are exact in every order."""
    rng = np.random.default_rng(seed)
    shapes = {"A": (n, columns), "T": (2, n, columns), "B": (n, 3), "M": (n, n), "u": n, "w": 4}
    arrays = {}
    for name, shape in shapes.items():
        if f"{name}[" in text:
            arrays[name] = rng.integers(-4, 5, shape).astype(float)
            if "conj" in text:
                arrays[name] = arrays[name] + 1j * rng.integers(-4, 5, shape)
    return arrays


@given(st.data())
def test_every_division_gives_the_same_values_of_a_family(data):
    text, names = FAMILIES[data.draw(st.sampled_from(list(FAMILIES)))]
    outputs = data.draw(st.lists(st.sampled_from(names.split()), min_size=1, unique=True))
    blocks = data.draw(st.integers(1, 12))
    pieces = tuple(data.draw(st.lists(st.integers(1, 4), max_size=2)))
    n = max(2, blocks * int(np.prod(pieces)) + data.draw(st.integers(0, 30)))
    division = Division(n, blocks, pieces, data.draw(st.booleans()))
    arrays = arrays_of(text, n, 6, n)
    graph = einmpi.program(text, outputs=outputs, **arrays).graph
    kept = data.draw(st.sampled_from([(0, 1, 2), (0, 2), (1, 2), ()]))
    family = family_of(graph, "C", kept)
    may_stay = []
    for name, member in family.items():
        if member.is_square and name in outputs and set(graph.consumers[name]) <= family.keys():
            may_stay.append(name)
    stay = data.draw(st.lists(st.sampled_from(may_stay), unique=True)) if may_stay else []
    sums = data.draw(st.sampled_from([1, 2, 3, 6]))
    if sums > 1:
        division = replace(division, summed="j", sums=sums)
        if blocks == 1:
            division = replace(division, pieces=(), pieces_first=False)
    arrays = {name: arrays[name] for name in arrays if name in graph.by_name}
    wanted = evaluate(graph, arrays)
    form = with_pairs_of_blocks(graph, family, division, stay)
    found = evaluate(form.graph, arrays)
    for name in outputs:
        result = evaluate(form.rests[name], found)[name] if name in stay else found[name]
        assert result.dtype == wanted[name].dtype
        np.testing.assert_array_equal(result, wanted[name])


def of_family(name, outputs, ranks, columns, folder):
    """Return the job whose inputs are on no rank before; whole outputs of a reference are kept."""
    text, names = FAMILIES[name]
    lines = [f'program = """\n{text}\n"""', "[inputs]"]
    for each, array in arrays_of(text, 8 * ranks + 13, columns, ranks).items():
        np.save(f"{folder}/{each}.npy", array)
        lines.append(f'{each} = {{ file = "{each}.npy" }}')
    lines.append("[outputs]")
    lines += [f'{each} = "{each}.npy"' for each in outputs or names.split()]
    (folder / "job.toml").write_text("\n".join(lines))
    return einmpi.load(folder / "job.toml")


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("columns", [6, 60, 300])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 9])
def test_families_on_ranks(small, name, columns, ranks, tmp_path):
    job = of_family(name, (), ranks, columns, tmp_path)
    done = run_on_threads(job, ranks)
    assert done.moved == done.plan.bytes_predicted
    assert done.plan.lower_bound <= done.plan.words_predicted
    for output, wanted in einmpi.reference(job).items():
        np.testing.assert_array_equal(done.outputs[output], wanted)


@pytest.mark.parametrize(
    ("name", "outputs", "unread"),
    [
        ("maps and aggregates", ["s", "m"], []),
        ("maps and aggregates", ["D", "s"], ["D"]),
        ("other labels", ["E", "Y"], ["E"]),
        ("diagonal", ["R", "trace"], ["R"]),
        ("complex", ["E", "s", "Y"], ["E"]),
        ("parts of complex numbers", ["D", "s"], ["D"]),
    ],
)
def test_nothing_but_rows_and_sums_moves_for_a_family(name, outputs, unread):
    """Half of the operations for each, and no result is brought to its rows."""
    n, columns = 1407, 400
    text, _ = FAMILIES[name]
    shapes = {"A": (n, columns), "u": (n,)}
    given = {each: shape for each, shape in shapes.items() if f"{each}[" in text}
    dtype = "complex128" if "conj" in text else "float64"
    job = einmpi.program(text, outputs=outputs, **given, dtype=dtype)
    plan = einmpi.plan(job, ranks=7)
    assert list(plan.unread) == unread
    assert "from the pairs of blocks of C" in str(plan)
    rows = 2 * n * columns  # a rank has 3 blocks of them
    assert rows <= plan.words_predicted <= rows + 20 * n
    whole = sum(vertex.operations() for vertex in job.graph.computed)
    assert sum(vertex.operations() for vertex in plan.graph.computed) < 0.6 * whole


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
A = A.redistribute(einmpi.DistArray.zeros(a.shape).layout)
c = einmpi.run(job, A=A)["C"]
assert "in pairs" in repr(c), c
c.to_hdf5("{tmp_path}/C.h5", "C")
np.testing.assert_allclose(c.gather(), a @ a.T, rtol=1e-12, atol=1e-9)
with h5py.File("{tmp_path}/C.h5") as file:
    np.testing.assert_allclose(file["C"][:], a @ a.T, rtol=1e-12, atol=1e-9)
text = "C[i,k] = sum(A[i,j] * conj(A[k,j])); R[i,k] = C[i,k] / sqrt(C[i,i] * C[k,k])"
text += "; s = sum(R[i,k] * conj(R[i,k])); Y[i] = sum(R[i,k])"
found = einmpi.run(text, A=A + 1j * A[::-1])
b = a + 1j * a[::-1]
wanted = b @ b.conj().T
wanted /= np.sqrt(np.outer(np.diag(wanted), np.diag(wanted)))
np.testing.assert_allclose(found["s"].gather(), (abs(wanted) ** 2).sum(), rtol=1e-10)
np.testing.assert_allclose(found["Y"].gather(), wanted.sum(1), rtol=1e-9)
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
            "C[i,k] = sum(A[i,j] * A[k,j])\nD[i,k] = exp(-C[i,k])\ns = sum(D[i,k])",
            "C[i,k] = sum(A[i,j] * A[k,j])\nD[i,k] = C[i,k]**2\nZ[i,l] = sum(D[i,k] * B[k,l])",
            "C[i,k] = sum(A[i,j] * A[k,j])\nD[i,k] = C[i,k] / sqrt(C[i,i] * C[k,k])",
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
