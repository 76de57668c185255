"""Other files for inputs and outputs: `--set X=other.h5:/X`, `einmpi.load(job, X="other.npy")`."""

import os

import h5py
import numpy as np
import pytest

import einmpi
from einmpi.cli.main import main

JOB = """
program = "Z[i] = sum(X[i,j] * y[j])"
[inputs]
X = { file = "first.h5", dataset = "/X", rows = "0:2" }
y = { shape = [3], random = "ones" }
[outputs]
Z = "Z.h5:/Z"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The job is in another folder than the program runs in, with the files."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "job.toml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    with h5py.File("jobs/first.h5", "w") as file:
        file["X"] = np.zeros((4, 3))
    with h5py.File("second.h5", "w") as file:
        file["group/X"] = np.arange(15.0).reshape(5, 3)
    np.save("y.npy", np.array([1.0, 10, 100]))
    return tmp_path


def test_files_on_the_command_line(folder, capsys):
    settings = ["X=second.h5:/group/X", "y=y.npy", "Z=out.npy"]
    words = [word for setting in settings for word in ("--set", setting)]
    main(["jobs/job.toml", *words])
    rows = np.arange(15.0).reshape(5, 3)[:2]  # which rows are read stays as the job says
    np.testing.assert_array_equal(np.load("out.npy"), rows @ [1, 10, 100])
    assert not os.path.exists("jobs/Z.h5")


def test_files_from_python(folder):
    job = einmpi.load("jobs/job.toml", X="second.h5:/group/X")
    found = einmpi.run(job)["Z"].gather()
    np.testing.assert_array_equal(found, np.arange(15.0).reshape(5, 3)[:2].sum(1))


@pytest.mark.parametrize(
    ("name", "file", "message"),
    (
        ("W", "a.npy", "there is no input or output 'W' to set to a file; expected one of X, y, Z"),
        ("X", "a.txt", "a.txt"),
        ("X", "second.h5", "names a file but no dataset in it"),
        ("X", "y.npy", "X[i, j] has the wrong number of indices"),
        ("y", "none.npy", "there is no file"),
    ),
)
def test_wrong_files(folder, name, file, message):
    with pytest.raises(einmpi.InputError) as error:
        einmpi.load("jobs/job.toml", **{name: file})
    assert message in str(error.value)
