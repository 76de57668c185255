"""`einmpi new` and `einmpi examples`: files that a user starts from."""

import io
import os
import shutil
import sys
import tomllib

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_process import einmpi_here
from paths import ROOT
from safetensors.numpy import save_file

import einmpi
from einmpi.cli.new import NewJob, example_files
from einmpi.language.toml_document import toml_text


def answer(monkeypatch, folder, lines, *words):
    """What `einmpi new` says to a user who types these lines."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return einmpi_here(folder, ["new", *words])


def assert_refused(done, message):
    assert done.returncode == 2
    assert done.stderr.startswith(message), done.stderr
    assert done.stderr.count("\n") == 1


# ---- from a file ---------------------------------------------------------------------------------


def test_all_datasets_become_inputs(tmp_path):
    (tmp_path / "data").mkdir()
    with h5py.File(tmp_path / "data" / "all.h5", "w") as file:
        file["X"] = np.arange(12.0).reshape(3, 4)
        file["group/X"] = np.ones(3, "float32")
        file["sum"] = np.ones((1,) * 7)  # a word of the language
        file["1 2"] = np.ones(2, bool)
        file["group/break"] = np.ones(2)  # a word of Python
        file["line\nbreak"] = np.ones(2)
        file["scalar"] = 2.5
        file["words"] = ["a"]
        file["i"] = np.ones((2, 2))
        file["elsewhere"] = h5py.ExternalLink("none.h5", "/X")
    done = einmpi_here(tmp_path, ["new", "job.toml", "--from", "data/all.h5"])
    assert (done.returncode, done.stderr) == (0, "")
    skipped, wrote = done.stdout.splitlines()
    assert skipped.startswith("skipped: --from data/all.h5: /words in data/all.h5 is a string")
    assert wrote == "wrote job.toml; next: einmpi check job.toml"
    job = einmpi.load(tmp_path / "job.toml")
    found = {spec.name: (spec.inside, spec.shape, spec.dtype) for spec in job.inputs}
    assert found == {
        "X": ("/X", (3, 4), "float64"),
        "group_X": ("/group/X", (3,), "float32"),
        "sum_": ("/sum", (1,) * 7, "float64"),
        "X1_2": ("/1 2", (2,), "bool"),
        "break_": ("/group/break", (2,), "float64"),
        "line_break": ("/line\nbreak", (2,), "float64"),
        "scalar": ("/scalar", (), "float64"),
        "i": ("/i", (2, 2), "float64"),
    }
    results = einmpi.run(job)
    assert len(results) == 5
    for name, array in results.items():
        spec = next(spec for spec in job.inputs if name == f"sum_of_{spec.name}")
        with h5py.File(tmp_path / "data" / "all.h5") as file:
            assert np.asarray(array.gather()) == file[spec.inside][()].sum(), name


def test_other_formats(tmp_path):
    np.save(tmp_path / "my data.npy", np.ones((2, 3)))
    done = einmpi_here(tmp_path, ["new", "one.toml", "--from", "my data.npy", "--quiet"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (spec,) = einmpi.load(tmp_path / "one.toml").inputs
    assert (spec.name, spec.shape) == ("my_data", (2, 3))
    save_file({"a.0.w": np.ones(2, "float32"), "a.1.w": np.ones(3)}, tmp_path / "m.safetensors")
    done = einmpi_here(tmp_path, ["new", "model.toml", "--from", "m.safetensors"])
    assert done.stderr == ""
    found = {spec.name: spec.shape for spec in einmpi.load(tmp_path / "model.toml").inputs}
    assert found == {"w": (2,), "a_1_w": (3,)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["old.toml"], "old.toml: this file exists already; expected the name of a new file"),
        (["job.txt"], "job.txt: this is not the name of a job file; expected JOB.toml"),
        (["none/job.toml"], "none/job.toml: No such file or directory; expected a file that"),
        (["job.toml", "--from", "none.h5"], "--from none.h5: there is no file none.h5"),
        (["job.toml", "--from", "a.csv"], "--from a.csv: 'a.csv' is not a file of a known"),
        (["job.toml", "--from", "no.h5"], "--from no.h5: it has no tensor that can be an input"),
    ],
)
def test_refused_files(tmp_path, words, message):
    (tmp_path / "old.toml").touch()
    with h5py.File(tmp_path / "no.h5", "w") as file:
        file["words"] = ["a"]
    assert_refused(einmpi_here(tmp_path, ["new", *words]), message)
    assert not (tmp_path / "job.toml").exists()
    assert (tmp_path / "old.toml").read_text() == ""


def test_names_that_are_not_text(tmp_path):
    odd = os.fsdecode(b"\xff.npy")
    np.save(tmp_path / odd, np.ones(2))
    done = einmpi_here(tmp_path, ["new", "job.toml", "--from", odd])
    assert_refused(done, "job.toml: a name for the job file is not valid UTF-8; expected names")
    assert not (tmp_path / "job.toml").exists()


# ---- by asking -----------------------------------------------------------------------------------


def test_answers_become_a_job(tmp_path, monkeypatch):
    np.save(tmp_path / "y.npy", np.arange(12.0).reshape(4, 3))
    lines = ["Mine", "Z[i,k] = a * sum(X[i,j] * Y[j,k])", "W[i:n] = max[k](Z[i,k]) + i", ""]
    lines += ["n, m", "y.npy", "2", "5", "4", "out.h5:/W"]
    done = answer(monkeypatch, tmp_path, lines, "job.toml")
    assert (done.returncode, done.stderr) == (0, "")
    job = einmpi.load(tmp_path / "job.toml")
    assert job.title == "Mine"
    assert dict(job.sizes) == {"a": 2, "n": 5, "m": 4}
    assert [(spec.name, spec.shape) for spec in job.inputs] == [("X", (5, 4)), ("Y", (4, 3))]
    assert [(spec.name, spec.inside) for spec in job.outputs] == [("W", "/W")]
    assert einmpi_here(tmp_path, ["job.toml"]).returncode == 0
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["W"].shape == (5,)


def test_wrong_answers_are_asked_again(tmp_path, monkeypatch):
    lines = ["", "Z[i] = (X[i]", "", "", "Z[i] = n * X[i]", ""]
    lines += ["a.csv", "4; 5", "2", "0", "many", "3", "out.safetensors:Z", ""]
    done = answer(monkeypatch, tmp_path, lines, "job.toml")
    assert (done.returncode, done.stderr) == (0, "")
    assert "program:1:8: syntax error" in done.stdout
    assert "there is no statement yet" in done.stdout
    assert "'a.csv'; expected FILE.h5:/DATASET" in done.stdout
    assert "'0'; expected a whole number from 1 to" in done.stdout
    assert "safetensors files can be read but not written" in done.stdout
    job = einmpi.load(tmp_path / "job.toml")
    assert (job.title, dict(job.sizes), job.inputs[0].shape) == ("job", {"n": 3}, (2,))
    assert job.outputs == ()


def test_answers_that_end(tmp_path, monkeypatch):
    done = answer(monkeypatch, tmp_path, ["title", "Z[i] = X[i]", ""], "job.toml")
    message = "einmpi new: there is no answer to 'X (FILE.h5:/DATASET, FILE.zarr:/ARRAY, FILE.npy,"
    assert_refused(done, message)
    assert not (tmp_path / "job.toml").exists()


def test_a_job_with_an_error_is_written_and_the_error_shown(tmp_path, monkeypatch):
    lines = ["", "Z[i] = X[i] + Y[i]", "", "2", "3", ""]
    done = answer(monkeypatch, tmp_path, lines, "job.toml")
    assert_refused(done, "job.toml:3:17: label i has two extents: 2 in X[i] and 3 in Y[i]")
    assert (tmp_path / "job.toml").exists()


# ---- the text ------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(TEXTS)
def test_any_text_is_a_string(text):
    assert tomllib.loads(f"x = {toml_text(text)}") == {"x": text}


@given(TEXTS, st.lists(TEXTS.filter(lambda text: "\n" not in text), max_size=3), TEXTS)
def test_words_of_the_user_stay_words(title, program, value):
    job = NewJob(title, program, {"n": 3}, {"X": value}, {"Z": value})
    found = tomllib.loads(str(job))
    assert list(found) == ["title", "program", "sizes", "inputs", "outputs"]
    assert found["title"] == title
    assert found["program"].strip("\n").split("\n") == "\n".join(program).strip("\n").split("\n")
    assert found["inputs"] == {"X": value} and found["outputs"] == {"Z": value}


# ---- examples ------------------------------------------------------------------------------------


def test_examples_are_those_of_the_project():
    here = {}
    for path in (ROOT / "jobs").rglob("*"):
        if path.is_file() and path.suffix != ".h5":
            here[str(path.relative_to(ROOT / "jobs"))] = path.read_bytes()
    assert example_files() == here
    assert "chain.toml" in here and "pipeline/covariance.toml" in here


def test_examples_are_copied(tmp_path):
    done = einmpi_here(tmp_path, ["examples"])
    count = len(example_files())
    assert (done.returncode, done.stdout) == (0, f"{count} files copied to jobs\n")
    assert (tmp_path / "jobs" / "pipeline.sh").stat().st_mode & 0o111 == 0o111
    assert einmpi_here(tmp_path, ["jobs/chain.toml"]).returncode == 0
    (tmp_path / "jobs" / "softmax.toml").unlink()
    done = einmpi_here(tmp_path, ["examples", "jobs"])
    assert done.stdout == "1 file copied to jobs\n"
    assert einmpi_here(tmp_path, ["examples", "a/b", "--quiet"]).stdout == ""
    assert (tmp_path / "a" / "b" / "pipeline" / "direction.toml").is_file()


def test_examples_replace_nothing(tmp_path):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "softmax.toml").write_text("mine")
    done = einmpi_here(tmp_path, ["examples"])
    message = "einmpi examples: jobs/softmax.toml exists and is not the example; expected another"
    assert_refused(done, message)
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["softmax.toml"]
    shutil.rmtree(tmp_path / "jobs")
    (tmp_path / "jobs").write_text("a file")
    done = einmpi_here(tmp_path, ["examples"])
    assert_refused(done, "einmpi examples: jobs: File exists; expected a folder to write to")


def test_sparse_tensors(tmp_path):
    """Files with one of them, and groups in place of the datasets that they consist of."""
    A = einmpi.SparseArray.from_keys(([0, 2], [1, 1]), [5.0, 7.0], (3, 4))
    A.save(tmp_path / "A.mtx")
    A.to_hdf5(tmp_path / "a.h5", "/graphs/A")
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["graphs/x"] = np.ones(3)
    group = 'A = "a.h5:/graphs/A"  # float64 3×4, sparse'
    inputs = {
        "A.mtx": 'A = "A.mtx"  # float64 3×4, sparse',
        "a.h5": f'{group}\nx = "a.h5:/graphs/x"  # float64 3',
    }
    for number, (file, wanted) in enumerate(inputs.items()):
        done = einmpi_here(tmp_path, ["new", f"{number}.toml", "--from", file])
        assert (done.returncode, done.stderr) == (0, "")
        assert (tmp_path / f"{number}.toml").read_text().endswith(f"[inputs]\n{wanted}\n")
        done = einmpi_here(tmp_path, [f"{number}.toml"])
        assert "sum_of_A  float64 scalar  12.0" in done.stdout
