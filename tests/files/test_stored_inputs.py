"""Plans know how inputs are stored: what one rank reads for another is predicted, and avoided."""

from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_programs import settled

import einmpi
from einmpi.comm.threads import run_threads
from einmpi.compiled.stored_inputs import _factorisations
from einmpi.planner.text.explain import as_json
from einmpi.schedule import shared_reads

pytestmark = pytest.mark.usefixtures("in_folder")


@pytest.fixture
def small(monkeypatch):
    """Cells and runs so small that small tensors have many."""
    monkeypatch.setattr(shared_reads, "MIN_CELL_BYTES", 64)
    monkeypatch.setattr(shared_reads, "LONG_RUN_BYTES", 64)


def job_of(text, chunks=None, **arrays):
    """Return the job of a program whose inputs are datasets, stored in these chunks."""
    with h5py.File("inputs.h5", "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, chunks=chunks)
    lines = [f'program = "{text}"']
    lines += [f'inputs.{name} = "inputs.h5:/{name}"' for name in arrays]
    Path("job.toml").write_text("\n".join(lines), encoding="utf-8")
    return einmpi.load("job.toml")


def run(job, ranks):
    """Return the outputs, what ranks have read for each other, and what they have moved."""

    def on_rank(comm):
        compiled = einmpi.compile(job, comm)
        outputs = {name: array.gather() for name, array in compiled().items()}
        return outputs, compiled.measured

    found = run_threads(ranks, on_rank)
    shuffled = sum(measured.shuffled for _, measured in found)
    moved = sum(measured.received for _, measured in found)
    return found[0][0], shuffled, moved


@pytest.mark.usefixtures("small")
@settled(25)
@given(
    ranks=st.integers(1, 7),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    chunks=st.none() | st.tuples(st.integers(1, 9), st.integers(1, 9)),
    text=st.sampled_from(["Z[j] = sum(A[i,j])", "Z[i] = sum(A[i,j])", "Z[j,i] = A[i,j] + A[i,0]"]),
)
def test_what_is_predicted_is_what_is_read_for_others(ranks, shape, chunks, text):
    values = np.arange(np.prod(shape), dtype="float64").reshape(shape)
    chunks = chunks and tuple(map(min, chunks, shape))
    job = job_of(text, chunks, A=values)
    plan = einmpi.plan(job, ranks)
    outputs, shuffled, moved = run(job, ranks)
    assert shuffled == sum(plan.passed_on.values())
    assert moved == plan.bytes_predicted
    wanted = {"Z[j] =": values.sum(0), "Z[i] =": values.sum(1)}.get(text[:6])
    np.testing.assert_array_equal(
        outputs["Z"], (values + values[:, :1]).T if wanted is None else wanted
    )


def test_a_plan_cuts_an_input_as_its_file_is():
    """Cut by columns nothing would move, but every row would be read by one rank for others."""
    values = np.random.default_rng(0).normal(size=(4096, 64))
    job = job_of("Z[j] = sum(A[i,j])", A=values)
    plan = einmpi.plan(job, 4)
    assert plan.parts("Z") == {"j": 1, "i": 4}
    assert (plan.passed_on, plan.words_predicted) == ({}, 3 * 64)
    assert (plan.kind, plan.lower_bound) == ("gap", 0)
    avoided = "1.5 MiB would be read by one rank for another"
    assert f"A: cut as its file is stored, otherwise {avoided}\n" in str(plan)
    generated = einmpi.plan(einmpi.program("Z[j] = sum(A[i,j])", A=(4096, 64)), 4)
    assert (generated.parts("Z"), generated.words_predicted) == ({"j": 4, "i": 1}, 0)
    outputs, shuffled, moved = run(job, 4)
    assert (shuffled, moved) == (0, plan.bytes_predicted)
    np.testing.assert_allclose(outputs["Z"], values.sum(0), rtol=1e-12, atol=1e-9)


def test_a_plan_keeps_its_cuts_where_the_file_suits_them():
    job = job_of("Z[j] = sum(A[i,j])", (512, 16), A=np.ones((4096, 64)))
    plan = einmpi.plan(job, 4)
    assert (plan.parts("Z"), plan.passed_on, plan.words_predicted) == ({"j": 4, "i": 1}, {}, 0)


def test_explain_says_what_is_read_for_others_and_which_chunks_avoid_it():
    """Both inputs lie by rows, and one of them is needed by columns."""
    ones = np.ones((512, 512))
    job = job_of("Z[i,k] = sum(A[i,j] * B[j,k])", (1, 512), A=ones, B=ones)
    plan = einmpi.plan(job, 4, pin={"A": (4, 1), "B": (1, 4), "Z": (4, 1)})
    nbytes = 3 * ones.nbytes // 4
    assert plan.passed_on == {"B": nbytes}
    note = "1.5 MiB of B are read by one rank for another"
    assert f"{note}, nothing if its file had chunks of 512×128" in str(plan)
    assert as_json(plan)["bytes_shuffled_loading"] == {"B": nbytes}


def test_factorisations():
    assert list(_factorisations(6, 2)) == [(6, 1), (3, 2), (2, 3), (1, 6)]
    assert list(_factorisations(5, 0)) == []
    assert len(list(_factorisations(2**6, 3))) == 28
