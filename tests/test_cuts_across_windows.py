"""Axes of several windows cut one label: what plans predict, what runs move, and the results."""

import h5py
import numpy as np
import pytest
from distributed import assert_close, dry_run, run_on_threads
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpi_helpers import needs_mpirun, run_mpi
from random_cuts import plan_crosses_windows, random_cuts

import einmpi
from einmpi.api import options_of
from einmpi.comm.threads import run_threads
from einmpi.compiled.program import Compiled

# Prime powers and products; labels are shorter than most of these numbers.
RANKS = (4, 8, 9, 12, 16, 18, 24, 27, 32, 36, 64)
EXTENTS = (2, 3, 5, 6, 7, 10, 11, 13, 20, 31)

PROGRAMS = {
    "chain": "Z[i,k] = sum(A[i,j] * B[j,k]) + sum(A[i,j] * C[j,k])",
    "three": "Z[i,l] = sum(A[i,j] * sum[k](B[j,k] * D[k,l]))",
    "tropical": "M[i,k] = max(A[i,j] + B[j,k]); Z[k] = min[i](M[i,k])",
    "rows": "S[i,j] = softmax[j](A[i,j]); Z[i,k] = sum(S[i,j] * B[j,k])",
    "three labels": "T[i,j,k] = A[i,j] * B[j,k]; Z[k,i] = sum[j](T[i,j,k]); Y[j] = max(T[i,j,k])",
    "turned": "T[j,i] = A[i,j]; Z[i,k] = sum(T[j,i] * B[j,k]); Y[i] = sum[k](Z[i,k])",
    "halo": "Z[i,j] = A[i,j] + A[(i+1)%ni,j] + A[(i-1)%ni,j]; Y[j] = sum[i](Z[i,j])",
    "scan": "Z[i,j] = cumsum[j](A[i,j]); Y[i,k] = sum(Z[i,j] * B[j,k])",
}


def job_and_arrays(text, extents, seed):
    rng = np.random.default_rng(seed)
    shapes = {
        "A": (extents["i"], extents["j"]),
        "B": (extents["j"], extents["k"]),
        "C": (extents["j"], extents["k"]),
        "D": (extents["k"], extents["l"]),
    }
    arrays = {name: rng.random(shape) for name, shape in shapes.items() if f"{name}[" in text}
    text = text.replace("ni", str(extents["i"]))
    return einmpi.program(text, **{name: array.shape for name, array in arrays.items()}), arrays


def check_random_cuts(data):
    ranks = data.draw(st.sampled_from(RANKS), "ranks")
    text = PROGRAMS[data.draw(st.sampled_from(sorted(PROGRAMS)), "program")]
    extents = {label: data.draw(st.sampled_from(EXTENTS), label) for label in "ijkl"}
    seed = data.draw(st.integers(0, 1000), "seed")
    job, arrays = job_and_arrays(text, extents, seed)
    with pytest.MonkeyPatch.context() as monkeypatch:
        random_cuts(monkeypatch, seed)
        # Inputs that ranks do not have yet move, too.
        plan = einmpi.plan(job, ranks)
        assert sum(dry_run(plan)) == plan.bytes_predicted
        done = run_on_threads(job, ranks, arrays)
        assert done.moved == done.plan.bytes_predicted
        assert_close(done.outputs, einmpi.reference(job, arrays))


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_cuts_move_what_the_plan_says(data):
    check_random_cuts(data)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_more_random_cuts_move_what_the_plan_says(data):
    check_random_cuts(data)


def test_random_cuts_are_mostly_across_windows(monkeypatch):
    """The tests above are about something."""
    crossing = 0
    for seed in range(10):
        random_cuts(monkeypatch, seed)
        job, _ = job_and_arrays(PROGRAMS["chain"], dict.fromkeys("ijkl", 7), seed)
        crossing += plan_crosses_windows(einmpi.plan(job, 8))
    assert crossing == 10


def test_a_plan_that_reaches_the_lower_bound_along_several_windows():
    """No plan with the axes of one window on each label does."""
    rng = np.random.default_rng(1)
    shapes = {"X": (60, 60, 60), "B": (60, 3), "C": (60, 3)}
    arrays = {name: rng.random(shape) for name, shape in shapes.items()}
    job = einmpi.program("Z[i,a] = sum(X[i,j,k] * B[j,a] * C[k,a])", **shapes)
    plan = einmpi.plan(job, 64)
    assert plan_crosses_windows(plan)
    assert plan.words_predicted == plan.lower_bound
    assert sum(dry_run(plan)) == plan.bytes_predicted
    expected = np.einsum("ijk,ja,ka->ia", *arrays.values())
    assert_close(run_on_threads(job, 64, arrays).outputs, {"Z": expected})
    # Memory enough for this plan makes no difference.
    assert einmpi.plan(job, 64, memory=plan.peak).words_predicted == plan.words_predicted


@pytest.mark.parametrize("ranks", [8, 12])
def test_files_and_arrays_that_lie_somewhere(tmp_path, ranks, monkeypatch):
    """Read from HDF5, given on to another program in the layout of the first, written to HDF5."""
    rng = np.random.default_rng(ranks)
    arrays = {name: rng.random((7, 7)) for name in "AB"}
    with h5py.File(tmp_path / "in.h5", "w") as file:
        for name, array in arrays.items():
            file[name] = array
    lines = ["program = 'Z[i,k] = sum(A[i,j] * B[j,k])'", "[inputs]"]
    lines += [f"{name} = {{ file = 'in.h5', dataset = '/{name}' }}" for name in arrays]
    (tmp_path / "job.toml").write_text("\n".join(lines))
    job = einmpi.load(tmp_path / "job.toml")
    second = einmpi.program("Y[k,i] = sum(Z[i,j] * B[j,k])", Z=(7, 7), B=(7, 7))
    for seed in range(3):
        random_cuts(monkeypatch, seed)

        def on_rank(comm):
            made = Compiled(job, comm, options_of(job))()
            outputs = Compiled(second, comm, options_of(second))({**made, "B": arrays["B"]})
            outputs["Y"].to_hdf5(tmp_path / "out.h5", "/Y")
            turned = (outputs["Y"].T + made["Z"]).gather()
            return made["Z"].gather(), turned

        results = run_threads(ranks, on_rank)
        product = arrays["A"] @ arrays["B"]
        for z, turned in results:
            np.testing.assert_allclose(z, product, rtol=1e-12)
            np.testing.assert_allclose(turned, product @ arrays["B"] + product, rtol=1e-12)
        with h5py.File(tmp_path / "out.h5") as file:
            np.testing.assert_allclose(file["Y"][...].T, product @ arrays["B"], rtol=1e-12)
        (tmp_path / "out.h5").unlink()


# Each argument is a seed of random cuts, or "own" for those of the planner itself.
ON_REAL_RANKS = """
import sys

import numpy as np
from random_cuts import plan_crosses_windows, random_cuts

import einmpi
from einmpi.comm.mpi import comm_of


class ForGood:
    setattr = staticmethod(setattr)


comm = comm_of()
job = einmpi.load("job.toml")
X, B, C = (np.load(f"{name}.npy") for name in "XBC")
expected = np.einsum("ijk,ja,ka->ia", X, B, C)
for seed in sys.argv[1:]:
    if seed != "own":
        random_cuts(ForGood, int(seed))
    for shared in ("auto", "off"):
        compiled = einmpi.compile(job, shared=shared)
        for _ in range(3):  # the third time, calls are bound to the steps
            np.testing.assert_allclose(compiled()["Z"].gather(), expected, rtol=1e-12)
            received = comm.allgather_text(str(compiled.measured.received))
            ((plan, _),) = compiled.ready.values()
            assert sum(map(int, received)) == plan.bytes_predicted > 0
            assert compiled.measured.peak <= plan.peak
        assert plan.mesh.ranks == comm.size and plan_crosses_windows(plan)
if comm.rank == 0:
    print(len(sys.argv) - 1, "cuts")
"""


@pytest.mark.slow  # many ranks on few cores, which with Open MPI take minutes beside other tests
@pytest.mark.mpirun
@needs_mpirun
@pytest.mark.parametrize("ranks, cuts", [(8, ["own", "1"]), (16, ["1", "2", "3"])])
def test_on_real_ranks(ranks, cuts, tmp_path):
    """Values, bytes and memory; with memory that ranks share, and with messages only."""
    rng = np.random.default_rng(ranks)
    lines = ["program = 'Z[i,a] = sum(X[i,j,k] * B[j,a] * C[k,a])'"]
    for name, shape in {"X": (5, 5, 5), "B": (5, 7), "C": (5, 7)}.items():
        np.save(tmp_path / f"{name}.npy", rng.random(shape))
        lines.append(f"inputs.{name} = '{name}.npy'")
    (tmp_path / "job.toml").write_text("\n".join(lines))
    done = run_mpi(ranks, ["-c", ON_REAL_RANKS, *cuts], cwd=tmp_path, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"{len(cuts)} cuts\n"), done.stderr


def test_axes_of_different_lengths_that_are_of_several_windows():
    """960 indices on 5·2·5·2·5·2 axes: all labels are cut into 10 parts, one along two windows."""
    shapes = dict.fromkeys("ABC", (960, 960))
    job = einmpi.program("Z[i,l] = sum(sum[j](A[i,j] * B[j,k]) * C[k,l])", **shapes)
    plan = einmpi.plan(job, 1000)
    assert plan_crosses_windows(plan)
    assert plan.words_predicted == plan.lower_bound == 6 * 9 * 960**2
