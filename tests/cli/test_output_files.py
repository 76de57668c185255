"""Files that flags name: each has its own, none takes the place of another file of the command."""

import os

import h5py
import numpy as np
import pytest

from einmpi.cli import sbatch as command
from einmpi.cli.job_options import FLAGS
from einmpi.cli.main import main
from einmpi.cli.options import OPTIONS

JOB = """
program = "Z[i] = A[i] + 1"
inputs.A = "in.h5:/A"
outputs.Z = "out.h5:/Z"
"""
PLAN = ["plan", "job.toml", "-n", "2"]
SBATCH = ["sbatch", "job.toml", "--nodes", "1", "--ntasks-per-node", "1"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_mpi", lambda: ("mpich", "MPICH 5.0"))  # asking takes a second
    (tmp_path / "job.toml").write_text(JOB)
    with h5py.File("in.h5", "w") as file:
        file["A"] = np.arange(4.0)


def test_all_flags_that_name_a_file_to_write_are_known():
    named = {option.names[-1] for option in OPTIONS if str(option.metavar).startswith("FILE")}
    read = {"--machine", "--platform", "--from", "--prompt-file", "--prompts", "--lengths"}
    checked_by_llama = {"--logits", "--hidden", "--job"}  # datasets of a file; a file beside it
    written = named - read - checked_by_llama
    assert written == {f"--{flag}" for flag in FLAGS}


@pytest.mark.parametrize(
    "words, what",
    [
        (
            ["calibrate", "--save", "./x.toml", "--json", "x.toml"],
            "--save ./x.toml: this is also the file of --json",
        ),
        (
            ["run", "job.toml", "--json", "x", "--trace", "y/../x"],
            "--trace y/../x: this is also the file of --json",
        ),
        (
            ["run", "job.toml", "--report", "out.h5"],
            "--report out.h5: this is the file of Z in the job",
        ),
        (
            ["verify", "job.toml", "--json", "in.h5"],
            "--json in.h5: this is the file of A in the job",
        ),
        (
            ["run", "job.toml", "--checkpoint", "x", "--json", "x"],
            "--json x: this is the folder of --checkpoint",
        ),
        (
            [*PLAN, "--json", "x.html", "--report", "link.html"],
            "--report link.html: this is also the file of --json",
        ),
        (
            [*PLAN, "--machine", "m.toml", "--json", "m.toml"],
            "--json m.toml: this is the file of --machine",
        ),
        ([*SBATCH, "--out", "out.h5"], "--out out.h5: this is the file of Z in the job"),
    ],
)
def test_two_outputs_in_one_file_are_refused(words, what, capfd):
    os.mkdir("y")
    os.symlink("x.html", "link.html")
    before = sorted(os.listdir())
    assert main(words) == 2
    assert capfd.readouterr() == ("", f"{what}; expected another file to write\n")
    assert sorted(os.listdir()) == before


def test_nowhere_has_room_for_all(capfd):
    assert main([*PLAN, "--json", "/dev/null", "--report", "/dev/null"]) == 0
    assert not os.path.isfile("/dev/null")


@pytest.mark.parametrize(
    "words, file",
    [
        ([*PLAN, "--plot"], "x.png"),
        ([*PLAN, "--plot"], "x.svg"),
        ([*SBATCH, "--out"], "x"),
        ([*PLAN, "--json"], "x"),
    ],
)
def test_what_is_there_stays_until_the_new_file_is_whole(words, file, capfd, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")

    def cut(descriptor):
        raise OSError(28, "No space left on device")

    with open(file, "w") as old:
        old.write("as it was")
    before = sorted(os.listdir())
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", cut)
        assert main([*words, file]) == 2
    problem = "No space left on device; expected a file that can be written"
    assert capfd.readouterr().err == f"{file}: {problem}\n"
    with open(file) as old:
        assert old.read() == "as it was" and sorted(os.listdir()) == before
    assert (
        main([*words, file]) == 0 and os.path.getsize(file) > 100 and sorted(os.listdir()) == before
    )
