"""einmpi.run: inputs named once, plans that are kept, the log, and arrays compared by ranks."""

import logging

import h5py
import numpy as np
import pytest
from mpi_helpers import needs_mpirun, run_mpi
from refusals import error

import einmpi
from einmpi import DistArray
from einmpi.comm.threads import run_threads
from einmpi.compiled import planning

X = np.random.default_rng(2).standard_normal((6, 5))


@pytest.fixture
def plans(monkeypatch):
    """Count the plans that are made."""
    made = []
    plan_with_files = planning.plan_with_files

    def counting(graph, ranks, options):
        made.append(graph.outputs)
        return plan_with_files(graph, ranks, options)

    monkeypatch.setattr(planning, "plan_with_files", counting)
    return made


# ---- inputs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_program_as_text_with_its_inputs(ranks):
    def on_rank(comm):
        given = DistArray.from_global(X, comm)
        plain = einmpi.run("Z[i] = scale * sum(X[i,j])", comm=comm, X=X, scale=3)["Z"]
        spread = einmpi.run("Z[i] = s * sum(X[i,j])", {"s": 3.0}, comm, X=given)["Z"]
        return plain.gather(), spread.gather()

    for found in run_threads(ranks, on_rank):
        for array in found:
            np.testing.assert_allclose(array, 3 * X.sum(1), rtol=1e-13)


def test_inputs_of_a_job_by_keyword(tmp_path):
    job = einmpi.program("Z[i] = X[i,0] + y[i]", X=X, y=(6,))
    with h5py.File(tmp_path / "y.h5", "w") as file:
        file["y"] = np.ones(6)
        found = einmpi.run(job, {"X": X}, y=file["y"])["Z"].gather()
    np.testing.assert_array_equal(found, X[:, 0] + 1)
    assert einmpi.run("n = sum(v[i])", v=[1, 2, 3])["n"].gather() == 6


def test_wrong_inputs():
    job = einmpi.program("Z[i] = X[i,0]", X=X)
    for given, message in (
        (lambda: einmpi.run(job, {"X": X}, X=X), "inputs: X is given twice; expected each input"),
        (lambda: einmpi.run(job, [X]), "inputs: list is not a mapping; expected a dict"),
        (lambda: einmpi.run(job, {3: X}), "inputs: 3 is not a name; expected names as keys"),
        (lambda: einmpi.run("Z[i] = Y[i]", X=X), "program:1:8: unknown tensor 'Y'; expected X"),
        (lambda: einmpi.run("Z[i] = X[i,n]", X=X, n=0), "run: size n is out of range; expected"),
    ):
        assert error(given).startswith(message)


# ---- plans that are kept ------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_known_job_is_not_planned_again(ranks, plans):
    job = einmpi.program("Z[i] = sum(X[i,j])", X=X)

    def on_rank(comm):
        for scale in (1, 2, 3):
            found = einmpi.run(job, {"X": scale * X}, comm)["Z"].gather()
            np.testing.assert_allclose(found, scale * X.sum(1), rtol=1e-13)
            text = einmpi.run("Y[i] = max(X[i,j])", comm=comm, X=scale * X)["Y"].gather()
            np.testing.assert_array_equal(text, scale * X.max(1))

    run_threads(ranks, on_rank)
    assert sorted(plans) == [("Y",)] * ranks + [("Z",)] * ranks


def test_other_settings_and_shapes_are_planned(plans):
    job = einmpi.program("Z[i] = sum(X[i,j])", X=X)
    for settings in ({}, {"strategy": "replicate"}, {"memory": "1 MiB"}, {"pin": {"Z": (1,)}}, {}):
        einmpi.run(job, {"X": X}, **settings)
    assert len(plans) == 4
    einmpi.run("Z[i] = sum(X[i,j])", X=X)
    einmpi.run("Z[i] = sum(X[i,j])", X=X.T)
    einmpi.run("Z[i] = sum(X[i,j])", X=X.astype("float32"))
    assert len(plans) == 7


def test_ranks_that_know_different_jobs():
    """One rank makes its job anew for each call, another keeps it: nobody waits for ever."""
    text = "Z[i] = sum(X[i,j])"

    def on_rank(comm):
        kept = [einmpi.program(text, X=X) for _ in range(2)]
        found = []
        for number in (0, 1, 0, 0, 1, 0):
            fresh = einmpi.program(text, X=X)
            job = kept[number] if comm.rank == 0 else fresh if number else kept[0]
            found.append(einmpi.run(job, {"X": X}, comm)["Z"].gather())
        return found

    for found in run_threads(3, on_rank):
        for array in found:
            np.testing.assert_allclose(array, X.sum(1), rtol=1e-13)


def test_a_file_is_read_again(tmp_path):
    (tmp_path / "job.toml").write_text(
        'program = "Z[i] = sum(X[i,j])"\n[inputs]\nX = { file = "x.npy", resident = true }\n'
    )
    for scale in (1, 2):
        np.save(tmp_path / "x.npy", scale * X)
        if scale == 1:
            job = einmpi.load(tmp_path / "job.toml")
        found = einmpi.run(job)["Z"].gather()
        np.testing.assert_allclose(found, scale * X.sum(1), rtol=1e-13)


# ---- the log ------------------------------------------------------------------------------------


def test_the_log_says_what_was_planned_and_computed(caplog):
    with caplog.at_level(logging.DEBUG, logger="einmpi"):
        einmpi.run("logged[i] = sum(X[i,j])", X=X)
    texts = [record.getMessage() for record in caplog.records if record.name == "einmpi"]
    assert texts[0].startswith("planned logged on 1 ranks in ")
    assert texts[1].startswith("computed logged in ")


def test_the_log_is_silent_by_default(capfd):
    logging.getLogger("einmpi").warning("nobody sees this")
    assert capfd.readouterr() == ("", "")


# ---- arrays that all ranks should have alike ----------------------------------------------------


def test_arrays_are_compared_on_request(monkeypatch):
    job = einmpi.program("Z[i] = sum(X[i,j])", X=X)

    def on_rank(comm):
        different = X.copy()
        different[3, 3] += 1e-300 if comm.rank != 2 else 1e-3
        messages = []
        for call in (
            lambda: einmpi.run(job, {"X": different}, comm),
            lambda: DistArray.from_global(different, comm),
        ):
            messages.append(error(call))
        same = einmpi.run(job, {"X": X}, comm)["Z"].gather()
        np.testing.assert_allclose(same, X.sum(1), rtol=1e-13)
        return messages

    monkeypatch.setenv("EINMPI_CHECK", "1")
    end = (
        " is not the same on rank 0 and on rank 2; expected an array with the same values on all "
        "ranks; use the same seed, or DistArray.from_local for different blocks"
    )
    for found in run_threads(3, on_rank):
        assert found == [f"inputs: X{end}", f"from_global: array{end}"]
    monkeypatch.setenv("EINMPI_CHECK", "yes")
    job_error = "EINMPI_CHECK: 'yes' is neither 0 nor 1; expected 1 to compare arrays, or 0"
    for found in run_threads(2, lambda comm: error(einmpi.run, job, {"X": X}, comm)):
        assert found == job_error


@needs_mpirun
@pytest.mark.slow
def test_run_on_real_ranks():
    code = (
        "import numpy as np, einmpi\n"
        "from mpi4py import MPI\n"
        "rank = MPI.COMM_WORLD.rank\n"
        "x = np.arange(6.0)\n"
        "for scale in (1, 2):\n"
        "    total = einmpi.run('n = sum(X[i])', X=scale * x)['n'].gather()\n"
        "    assert total == scale * 15, total\n"
        "try:\n"
        "    einmpi.run('n = sum(X[i])', X=x + rank)\n"
        "except einmpi.InputError as error:\n"
        "    print(error, flush=True)\n"
    )
    done = run_mpi(3, code, env={"EINMPI_CHECK": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("inputs: X is not the same on rank 0 and on rank 1") == 3


def test_inputs_of_a_compiled_job_by_name():
    job = einmpi.program("Z[i] = x[i] + y[i]", x=(3,), y=(3,))
    one, two = np.ones(3), np.full(3, 2.0)

    def on_rank(comm):
        add = einmpi.compile(job, comm)
        for result in (add(x=one, y=two), add({"x": one}, y=two), add({"x": one, "y": two})):
            assert result["Z"].gather().tolist() == [3.0] * 3
        assert error(lambda: add({"x": one}, x=two)) == (
            "inputs: x is given twice; expected each input once"
        )

    run_threads(2, on_rank)


def test_a_job_with_a_loop_is_not_compiled(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(
        'program = "y[i] = x[i] / 2"\n[inputs]\nx = { shape = [4], random = "ones" }\n'
        '[loop]\nsteps = 3\ncarry = { x = "y" }\n'
    )
    assert error(einmpi.compile, einmpi.load(path)) == (
        "compile: the job has a loop; expected a job without one; einmpi.loop and einmpi.run "
        "repeat its steps"
    )
