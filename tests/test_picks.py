"""Values that an index picks: one-hot sums and gathers from cut dimensions, against numpy."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from distributed import run_on_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi_helpers import run_mpi

import einmpi
from einmpi.api import options_of
from einmpi.comm.threads import ThreadComm, run_threads
from einmpi.errors import EinmpiError
from einmpi.graph.dtypes import DTYPES
from einmpi.job.loop import StepProgram, make_loop
from einmpi.kernels.cpu import dispatch
from einmpi.loops.running import LoopRun
from einmpi.loops.stages import with_updates_in_order
from einmpi.planner.make_plan import make_plan
from einmpi.planner.plan import Options, Plan

RNG = np.random.default_rng(71)
# An index outside of the label picks nothing.
ONE_HOT = {
    "rows": ("y[b] = sum[l](where(at[b] == l, Z[b,l], 0))", lambda v: v.picked),
    "other order": ("y[b] = sum[l](where(l == at[b], Z[b,l], 0))", lambda v: v.picked),
    "function": ("y[b] = sum[l](where(at[b] == l, exp(Z[b,l]) * l, 0))", lambda v: v.function),
    "total": ("y = sum[b,l](where(at[b] == l, Z[b,l], 0))", lambda v: v.picked.sum()),
    "table": ("y[b,c] = sum[l](where(at[b] == l, T[l,c], 0))", lambda v: v.table),
    "table by table": ("y[b] = sum[l](where(at[b] == l, Z[b,p[l]], 0))", lambda v: v.permuted),
    "index of two": ("y[b] = sum[l](where(at[b] + 1 == l, Z[b,l], 0))", lambda v: v.after),
}


class Values:
    """Arrays of a program with `count` rows and `extent` values of l, and what it picks."""

    def __init__(self, count: int, extent: int, dtype: str = "float64") -> None:
        self.Z = RNG.normal(size=(count, extent)).astype(dtype)
        self.T = RNG.normal(size=(extent, 3)).astype(dtype)
        self.at = RNG.integers(-2, extent + 2, count)
        self.p = RNG.permutation(extent)
        self.rows = np.arange(count)
        self.is_inside = (self.at >= 0) & (self.at < extent)
        self.places = np.where(self.is_inside, self.at, 0)

    def inputs(self, text: str) -> dict[str, np.ndarray]:
        names = set(re.findall(r"\w+", text))
        return {name: getattr(self, name) for name in ("Z", "T", "at", "p") if name in names}

    @property
    def picked(self) -> np.ndarray:
        return np.where(self.is_inside, self.Z[self.rows, self.places], 0)

    @property
    def function(self) -> np.ndarray:
        values = np.exp(self.Z[self.rows, self.places]) * self.places
        return np.where(self.is_inside, values, 0)

    @property
    def table(self) -> np.ndarray:
        return np.where(self.is_inside[:, None], self.T[self.places], 0)

    @property
    def permuted(self) -> np.ndarray:
        return np.where(self.is_inside, self.Z[self.rows, self.p[self.places]], 0)

    @property
    def after(self) -> np.ndarray:
        extent = self.Z.shape[1]
        is_inside = (self.at + 1 >= 0) & (self.at + 1 < extent)
        return np.where(is_inside, self.Z[self.rows, np.where(is_inside, self.at + 1, 0)], 0)


@pytest.fixture(params=["compiled", "numpy"])
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Compute by compiled loops, whatever the size, or by numpy alone."""
    threshold = 0 if request.param == "compiled" else 2**62
    monkeypatch.setattr(dispatch, "WORTH_COMPILING", threshold)
    return str(request.param)


def check(job: einmpi.Job, inputs: dict[str, Any], wanted: Any, ranks: int, **options: Any) -> Any:
    """Compare y with numpy's. A picked value is read, not computed: sums of them may round."""
    done = run_on_threads(job, ranks, inputs, **options)
    assert done.moved == done.plan.bytes_predicted
    rtol = 16 * float(np.finfo(done.outputs["y"].dtype).eps)
    np.testing.assert_allclose(done.outputs["y"], wanted, rtol=rtol, atol=rtol)
    return done.plan


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ONE_HOT)
def test_one_hot_sums(name: str, method: str) -> None:
    text, wanted = ONE_HOT[name]
    values = Values(17, 11)
    job = einmpi.program(text, **values.inputs(text))
    for ranks in (1, 2, 3, 4, 6, 9):
        check(job, values.inputs(text), wanted(values), ranks)


@pytest.mark.parametrize("dtype", ["float16", "float32", "complex64", "complex128"])
def test_dtypes_of_picked_values(dtype: str, method: str) -> None:
    text, wanted = ONE_HOT["rows"]
    values = Values(17, 11, dtype)
    job = einmpi.program(text, **values.inputs(text))
    assert job.graph["y"].dtype == dtype
    check(job, values.inputs(text), wanted(values), 3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_label_is_compared_with_any_number(dtype: str, method: str) -> None:
    """A number that is no integer was taken for an index, which cannot be one."""
    text = (
        "y[b] = sum[l](where(l == at[b], Z[b,l], 0)); c[l:11] = sum(where(l == at[b], Z[b,0], 0))"
    )
    values = Values(17, 11)
    at = abs(values.at).astype(dtype)
    if DTYPES[dtype].kind in "fc":
        at[:5] = [np.nan, np.inf, -np.inf, 0.5, 3]
    job = einmpi.program(text, Z=values.Z, at=at)
    is_picked = at.astype("complex128")[:, None] == np.arange(11)
    for ranks in (1, 3):
        found = run_on_threads(job, ranks, {"Z": values.Z, "at": at}).outputs
        rtol = 1e-14  # sums of at most 17 numbers near 1
        wanted = np.where(is_picked, values.Z, 0).sum(1)
        np.testing.assert_allclose(found["y"], wanted, rtol=rtol, atol=rtol)
        wanted = np.where(is_picked, values.Z[:, :1], 0).sum(0)
        np.testing.assert_allclose(found["c"], wanted, rtol=rtol, atol=rtol)


def test_integers_are_summed_in_64_bits(method: str) -> None:
    """A sum of small integers has another dtype than they have, so they are not just read."""
    values = Values(17, 11)
    whole = (values.Z * 100).astype("int8")
    job = einmpi.program(ONE_HOT["rows"][0], Z=whole, at=values.at)
    done = run_on_threads(job, 3, {"Z": whole, "at": values.at})
    wanted = np.where(values.is_inside, whole[values.rows, values.places], 0)
    np.testing.assert_array_equal(done.outputs["y"], wanted)
    assert done.outputs["y"].dtype == np.int64


@pytest.mark.parametrize(
    ("text", "operations"),
    [
        (ONE_HOT["rows"][0], 17 * 3),  # for each row a comparison, a choice and a sum
        (ONE_HOT["table"][0], 17 * 3 * 3),
        ("y[b] = sum[l](where(at[b] <= l, Z[b,l], 0))", 17 * 11 * 3),
        ("y[b] = sum[l](where(at[b] == l, Z[b,l], 1))", 17 * 11 * 3),  # no neutral element
    ],
)
def test_operations_of_what_is_picked(text: str, operations: int) -> None:
    job = einmpi.program(text, Z=(17, 11), T=(11, 3), at=np.zeros(17, np.int64))
    assert job.graph["y"].computed_einsum.operations() == operations


def test_other_values_are_not_looked_at(method: str) -> None:
    """Neither nan nor an index that is out of range, if it belongs to another value."""
    values = Values(5, 4)
    Z = np.full((5, 4), np.nan)
    at = np.array([0, 1, 2, 3, 0])
    Z[values.rows, at] = values.rows
    job = einmpi.program(ONE_HOT["rows"][0], Z=Z, at=at)
    assert check(job, {"Z": Z, "at": at}, values.rows, 2)


# ---- gathers ------------------------------------------------------------------------------------

LOSS = "Z[b,l] = sum(H[b,h] * W[h,l]); y[b] = Z[b,at[b]] - log(sum[l](exp(Z[b,l])))"


def loss_inputs(b: int, h: int, l: int) -> dict[str, np.ndarray]:  # noqa: E741
    return {
        "H": RNG.normal(size=(b, h)),
        "W": RNG.normal(size=(h, l)),
        "at": RNG.integers(0, l, b),
    }


def loss(inputs: dict[str, np.ndarray]) -> np.ndarray:
    Z = inputs["H"] @ inputs["W"]
    return Z[np.arange(len(Z)), inputs["at"]] - np.log(np.exp(Z).sum(axis=1))


@pytest.mark.slow
def test_gathers_from_a_cut_dimension_move_what_is_picked(method: str) -> None:
    """W stays where it is, cut along l; so is Z, which never comes together."""
    inputs = loss_inputs(6, 5, 120)
    job = einmpi.program(LOSS, **inputs)
    for ranks in (2, 3, 4, 5, 8, 9):
        plan = check(job, inputs, loss(inputs), ranks, pin={"W": (1, ranks)})
        (picked,) = [vertex for vertex in plan.graph.computed if vertex.is_auxiliary]
        (label,) = picked.computed_einsum.aggregated
        assert plan.parts(picked.name)[label] > 1
        assert plan.words_predicted < plan.graph["Z"].elements


def test_gathers_from_whole_dimensions_stay_gathers() -> None:
    inputs = loss_inputs(120, 5, 6)
    job = einmpi.program(LOSS, **inputs)
    plan = check(job, inputs, loss(inputs), 4, pin={"W": (4, 1)})
    assert not any(vertex.is_auxiliary for vertex in plan.graph.computed)


@pytest.mark.parametrize("index", [120, -1, 10**12])
def test_an_index_that_no_rank_has_is_an_error(index: int, method: str) -> None:
    inputs = loss_inputs(6, 5, 120)
    inputs["at"][3] = index
    job = einmpi.program(LOSS, **inputs)
    with pytest.raises(EinmpiError, match="an index is out of range; expected 0 to 119"):
        run_on_threads(job, 4, inputs, pin={"W": (1, 4)})


def test_with_little_memory() -> None:
    inputs = loss_inputs(40, 30, 400)
    job = einmpi.program(LOSS, **inputs)
    least = int(einmpi.plan(job, ranks=4).peak * 0.8)
    check(job, inputs, loss(inputs), 4, memory=least)


SCRIPT = f"""
import numpy as np
import einmpi
from mpi4py import MPI

rng = np.random.default_rng(3)
H = rng.normal(size=(6, 5))
W = rng.normal(size=(5, 120))
at = rng.integers(0, 120, 6)
job = einmpi.program({LOSS!r}, H=H, W=W, at=at)
y = einmpi.run(job, {{"H": H, "W": W, "at": at}}, pin={{"W": (1, 3)}})["y"].gather()
Z = H @ W
wanted = Z[np.arange(6), at] - np.log(np.exp(Z).sum(axis=1))
assert np.allclose(y, wanted, rtol=1e-13), (y, wanted)
if MPI.COMM_WORLD.rank == 0:
    print("equal")
"""


@pytest.mark.slow
@pytest.mark.mpirun
def test_under_mpirun() -> None:
    assert run_mpi(3, SCRIPT).stdout == "equal\n"


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    b=st.integers(0, 9),
    h=st.integers(1, 5),
    l=st.integers(1, 40),
    ranks=st.integers(1, 9),
    is_pinned=st.booleans(),
)
def test_gathers_of_any_shape(b: int, h: int, l: int, ranks: int, is_pinned: bool) -> None:  # noqa: E741
    inputs = loss_inputs(b, h, l)
    job = einmpi.program(LOSS, **inputs)
    options = {"pin": {"W": (1, ranks)}} if is_pinned and l >= ranks else {}
    check(job, inputs, loss(inputs), ranks, **options)


# ---- a training step ----------------------------------------------------------------------------

STEP = """
A[b,h]   = sum(X[b,i] * W1[i,h]) + b1[h]
H[b,h]   = relu(A[b,h])
Z[b,l]   = sum(H[b,h] * W2[h,l]) + b2[l]
m[b]     = max(Z[b,l])
lse[b]   = log(sum[l](exp(Z[b,l] - m[b]))) + m[b]
loss     = mean[b](lse[b] - Z[b,y[b]])
dZ[b,l]  = (exp(Z[b,l] - lse[b]) - float32(y[b] == l)) / rows
dA[b,h]  = where(A[b,h] <= 0, 0, sum(dZ[b,l] * W2[h,l]))
W1_next[i,h] = W1[i,h] - 0.1 * sum(X[b,i] * dA[b,h])
b1_next[h]   = b1[h] - 0.1 * sum(dA[b,h])
W2_next[h,l] = W2[h,l] - 0.1 * sum(H[b,h] * dZ[b,l])
b2_next[l]   = b2[l] - 0.1 * sum(dZ[b,l])
"""
CARRY = {name: f"{name}_next" for name in ("W1", "b1", "W2", "b2")}


def training_step(b: int, i: int, h: int, l: int) -> einmpi.Job:  # noqa: E741
    shapes: dict[str, Any] = {"X": (b, i), "W1": (i, h), "b1": (h,), "W2": (h, l), "b2": (l,)}
    labels = np.zeros(b, np.int64)
    outputs = ["loss", *CARRY.values()]
    return einmpi.program(STEP, dtype="float32", outputs=outputs, y=labels, rows=b, **shapes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("sizes", "ranks", "words"),
    [
        ((128, 5975, 820, 1459), 4, 1_213_830),
        ((128, 597540, 8192, 14588), 4, 12_123_782),
        ((128, 597540, 8192, 14588), 8, 24_707_982),
        ((512, 597540, 8192, 14588), 4, 48_495_110),
        ((512, 597540, 8192, 14588), 8, 98_831_886),
        pytest.param((512, 597540, 8192, 14588), 16, 195_816_990, marks=pytest.mark.slow),
        pytest.param((512, 597540, 8192, 14588), 64, 691_787_390, marks=pytest.mark.slow),
        pytest.param((128, 597540, 8192, 14588), 16, 48_954_270, marks=pytest.mark.slow),
        pytest.param((128, 597540, 8192, 14588), 64, 172_946_942, marks=pytest.mark.slow),
    ],
)
def test_words_of_a_training_step(sizes: Any, ranks: int, words: int) -> None:
    """A classifier whose weights stay on the ranks; the batch arrives spread over them."""
    job = training_step(*sizes)
    options = Options(carry=CARRY, resident=("W1", "b1", "W2", "b2", "y"))
    plan = make_plan(job.graph, ranks, options)
    assert plan.words_predicted == words
    assert plan.bytes_predicted == 4 * words


def step_in_place(sizes: tuple[int, int, int, int], ranks: int) -> tuple[Plan, float]:
    """Return the plan of a step of a loop, and the bytes of the weights on each rank."""
    job = training_step(*sizes)
    graph = with_updates_in_order(job.graph, CARRY)
    resident = tuple(vertex.name for vertex in graph.inputs)
    plan = make_plan(graph, ranks, Options(carry=CARRY, resident=resident, donate=True))
    weights = sum(graph[name].nbytes for name in CARRY)
    return plan, weights / ranks


@pytest.mark.parametrize("ranks", [4, 8])
def test_memory_of_a_training_step(ranks: int) -> None:
    """The weights are updated in place, with gradients that are never there as a whole."""
    plan, weights = step_in_place((128, 597540, 8192, 14588), ranks)
    assert plan.peak < 1.2 * weights
    assert set(plan.in_place) == set(CARRY)
    assert plan.recomputed is None


@pytest.mark.slow
def test_measured_memory_of_a_training_step() -> None:
    """At a tenth of the size, gradients are small enough to be computed as a whole."""
    sizes = (13, 59754, 819, 1459)
    plan, weights = step_in_place(sizes, 4)
    assert plan.peak < 2.2 * weights
    job = training_step(*sizes)
    values = {vertex.name: np.zeros(vertex.bound, vertex.dtype) for vertex in job.graph.inputs}
    program = StepProgram(job.written, job.sizes, job.inputs)
    loop = make_loop(program, lambda *_: "loop", 2, CARRY, record=["loss"])

    def on_rank(comm: ThreadComm) -> tuple[int, int]:
        run = LoopRun(replace(job, loop=loop), comm, options_of(job))
        run.prepare(values)
        run.run()
        return run.measured.peak, run.plan.peak

    for measured, planned in run_threads(4, on_rank, limit=300.0):
        assert measured <= planned < 2.2 * weights


LAST = {
    "a constant": ("15", lambda X, lengths: X[:, 15]),
    "the end of each": (
        "lengths[b] - 1",
        lambda X, lengths: X[np.arange(len(X)), lengths - 1],
    ),
}


@pytest.mark.parametrize("name", LAST)
@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 8])
def test_the_last_position_of_a_cut_sequence(name: str, ranks: int) -> None:
    """Ranks send what the positions have, not the dimension that is cut."""
    index, by_numpy = LAST[name]
    X = RNG.normal(size=(3, 16, 10))
    L = RNG.normal(size=(5, 10))
    lengths = RNG.integers(1, 17, 3)
    text = f"last[b,a] = X[b,{index},a]\ny[b,v] = sum(last[b,a] * L[v,a])"
    inputs = {"X": X, "L": L}
    if "lengths" in index:
        inputs["lengths"] = lengths
    job = einmpi.program(text, outputs=["y", "last"], **inputs)
    pin = {"X": (1, ranks, 1)}
    done = run_on_threads(job, ranks, inputs, pin=pin)
    assert done.moved == done.plan.bytes_predicted
    expected = by_numpy(X, lengths)
    np.testing.assert_allclose(done.outputs["last"], expected)
    np.testing.assert_allclose(done.outputs["y"], expected @ L.T)
    if name == "a constant":  # it comes from the one rank that has it
        gathered = [bill.nbytes for key, bill in done.plan.bills.items() if key == "last"]
        assert sum(gathered) <= ranks * expected.nbytes
    # Each rank receives parts of this one position at most twice: to sum them, and to use them.
    others = done.plan.bills["y"].nbytes
    moved = done.plan.bytes_predicted - others
    assert moved <= 2 * ranks * (expected.nbytes + lengths.nbytes) < max(1, ranks) * X.nbytes
