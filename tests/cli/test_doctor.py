"""`einmpi doctor` on machines that lack something: real folders and processes, fake launchers."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mpi_helpers import MPIRUN, OMPI_SETTINGS, OPEN_MPI, OUTER, needs_mpirun, run_mpi
from paths import ROOT

from einmpi.cli import doctor as doctor_module
from einmpi.cli.doctor import Finding, read_answer, start_process
from einmpi.cli.launcher import family_in

LIBRARY = {"library": "Open MPI v5.0.11" if OPEN_MPI else "MPICH 5.0.2"}
OURS, OTHER = (
    ("Open MPI", "HYDRA build details") if OPEN_MPI else ("MPICH", "mpirun (Open MPI) 4.1.4")
)


def doctor(*arguments, python=sys.executable, **environment):
    kept = {key: value for key, value in os.environ.items() if not key.startswith(OUTER)}
    environment = {**kept, **OMPI_SETTINGS, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [str(python), "-m", "einmpi", "doctor", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )


def findings(text):
    """{name: (state, text, advice)} of what is printed."""
    found, name = {}, ""
    for line in text.splitlines()[:-1]:
        if line.startswith(" "):
            found[name][2] = line.strip().removeprefix("→ ")
        else:
            state, name, text = line[:6].strip(), line[6:18].strip(), line[18:]
            found[name] = [state, text, ""]
    return found


@pytest.fixture
def bare(tmp_path):
    """The environment under test once more, but with no program beside its Python."""
    here, home = Path(sys.executable), tmp_path / "bare"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "python").symlink_to(os.path.realpath(here))
    shutil.copy(here.parents[1] / "pyvenv.cfg", home)
    (home / "lib").symlink_to(here.parents[1] / "lib")
    return home / "bin" / "python"


def made_up(folder, name, version, script=""):
    """A launcher that says this version, and otherwise does this."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{version}" && exit 0\n{script}\n')
    path.chmod(0o755)
    return path


@pytest.mark.slow
@pytest.mark.mpirun
@needs_mpirun
def test_a_machine_that_works(tmp_path):
    # Another mpirun may come first on PATH.
    path = f"{os.path.dirname(MPIRUN)}{os.pathsep}{os.environ['PATH']}"
    done = doctor("--json", str(tmp_path / "found.json"), PATH=path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\na run works here\n")
    found = findings(done.stdout)
    for name in ("Python", "numpy", "mpi4py", "h5py", "numba", "mpirun", "machine", "ping"):
        assert found[name][0] == "ok", found[name]
    assert {"GPU", "Slurm", "limits", "/dev/shm", "TMPDIR"} < set(found)
    assert OURS in found["mpi4py"][1] and found["mpirun"][1] == f"{MPIRUN}, of {OURS}"
    assert re.fullmatch(
        r"two ranks: \d+\.\d µs per message, \d+\.\d GB/s for 16 MiB; they share memory",
        found["ping"][1],
    )
    data = json.loads((tmp_path / "found.json").read_text())
    assert data["works"] is True
    assert [(one["name"], one["text"], one["advice"]) for one in data["findings"]] == [
        (name, text, advice) for name, (_, text, advice) in found.items()
    ]
    assert {one["state"] for one in data["findings"]} <= {"ok", "note", "problem"}


@pytest.mark.slow
def test_without_mpi4py(tmp_path):
    (tmp_path / "mpi4py.py").write_text(
        "raise ImportError('libmpi.so.12: cannot open shared object file')\n"
    )
    done = doctor("--json", "-", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert (done.returncode, done.stderr) == (1, "")
    data = json.loads(done.stdout)
    found = {one["name"]: one for one in data["findings"]}
    assert data["works"] is False
    assert found["mpi4py"]["state"] == "problem" and "libmpi.so.12" in found["mpi4py"]["text"]
    assert "pip install 'einmpi[mpich]'" in found["mpi4py"]["advice"]
    assert found["ping"]["text"] == "skipped: it needs mpi4py and mpirun"
    assert found["h5py"]["state"] == found["numba"]["state"] == "ok"


@pytest.mark.slow
def test_without_the_chosen_blas(tmp_path):
    """One rank does not work then, either; what is missing may be no package of pip."""
    done = doctor(EINMPI_BLAS="nvpl")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.endswith("\na run fails here: BLAS\n")
    state, text, advice = findings(done.stdout)["BLAS"]
    assert state == "FAIL" and text.startswith("EINMPI_BLAS: the BLAS nvpl is not installed")
    assert advice == "export EINMPI_BLAS=numpy, or the name or path of a library that works"


@pytest.mark.slow
def test_without_mpirun(bare, tmp_path):
    done = doctor(python=bare, PATH="/nowhere")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.endswith("\na run on several ranks fails here: mpirun\n")
    state, text, advice = findings(done.stdout)["mpirun"]
    assert (state, text) == ("FAIL", "there is no mpirun") and advice.startswith(
        "pip install 'einmpi[mpich]'"
    )
    assert findings(done.stdout)["mpi4py"][0] == "ok"


@pytest.mark.slow
@pytest.mark.mpirun
@needs_mpirun
def test_under_a_launcher():
    done = run_mpi(2, ["-m", "einmpi", "doctor"])
    assert (done.returncode, done.stderr) == (0, "")
    assert "skipped: a launcher started this process" in done.stdout
    assert done.stdout.count("ping") == 1  # one rank speaks
    assert done.stdout.endswith("\nno problems found; no test run attempted\n")


def test_bad_time_limit():
    done = doctor("--timeout", "nan")
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        "--timeout: nan seconds; expected more than 0 seconds\n",
    )


# ---- launchers -----------------------------------------------------------------------------------


def test_srun_instead_of_mpirun(monkeypatch, bare, tmp_path):
    made_up(tmp_path / "tools", "srun", "slurm 24.05")
    monkeypatch.setattr(sys, "executable", str(bare))
    monkeypatch.setenv("PATH", str(tmp_path / "tools"))
    found = doctor_module.examine_mpirun(LIBRARY)
    assert found.state == "note" and "srun -n P python -m einmpi" in found.advice


def test_the_launcher_of_another_library(monkeypatch, bare, tmp_path):
    path = made_up(tmp_path / "tools", "mpirun", OTHER)
    monkeypatch.setattr(sys, "executable", str(bare))
    monkeypatch.setenv("PATH", str(tmp_path / "tools"), prepend=os.pathsep)
    found = doctor_module.examine_mpirun(LIBRARY)
    assert (
        found.state == "problem"
        and str(path) in found.text
        and f"mpi4py has found {OURS}" in found.text
    )
    assert f"use the mpirun of {OURS}" in found.advice


@needs_mpirun
def test_another_mpirun_comes_first_on_the_path(monkeypatch, tmp_path):
    """einmpi run still starts the right one; whoever types mpirun does not."""
    path = made_up(tmp_path / "tools", "mpirun", OTHER)
    monkeypatch.setenv("PATH", str(tmp_path / "tools"), prepend=os.pathsep)
    found = doctor_module.examine_mpirun(LIBRARY)
    assert (
        found.state == "note"
        and f"the first on PATH is {path}" in found.text
        and str(MPIRUN) in found.advice
    )


def test_ranks_that_know_nothing_of_each_other(monkeypatch, bare, tmp_path):
    """A launcher of an unknown library starts them, and tells them nothing."""
    made_up(tmp_path / "tools", "mpirun", "Launcher 1.0", 'shift 2; "$@" && exec "$@"')
    monkeypatch.setattr(sys, "executable", str(bare))
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert doctor_module.examine_mpirun(LIBRARY).state == "ok"
    found = doctor_module.ping_ranks(60)
    assert (
        found.state == "problem"
        and "1 rank instead of 2: the launcher does not belong to mpi4py's library" in found.text
    )


def test_a_launcher_that_fails(monkeypatch, bare, tmp_path):
    made_up(tmp_path / "tools", "mpirun", OURS, "echo 'no hosts left' >&2; exit 7")
    monkeypatch.setattr(sys, "executable", str(bare))
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = doctor_module.ping_ranks(60)
    assert found.state == "problem" and found.text.endswith("no hosts left")
    assert "EINMPI_DEBUG=1" in found.advice


def test_ranks_that_hang_are_ended(monkeypatch, bare, tmp_path):
    seconds = f"{3000 + os.getpid() % 1000}.{time.time_ns() % 10**6}"  # to know the process by
    made_up(tmp_path / "tools", "mpirun", OURS, f"exec sleep {seconds}")
    monkeypatch.setattr(sys, "executable", str(bare))
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = doctor_module.ping_ranks(3)
    assert (found.state, found.text) == (
        "problem",
        "two ranks cannot reach each other: no answer in 3 s",
    )
    left = [
        name for name in os.listdir("/proc") if name.isdecimal() and seconds in command_of(name)
    ]
    assert not left


def command_of(pid):
    try:
        return Path("/proc", pid, "cmdline").read_text()
    except OSError:
        return ""


def test_slurm(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor_module.examine_slurm(LIBRARY).text.startswith("none")
    for name in ("srun", "sbatch"):
        made_up(tmp_path, name, "slurm 24.05")
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    assert "srun, sbatch; outside a job" in doctor_module.examine_slurm(LIBRARY).text
    for name, value in {"JOB_ID": "17", "NTASKS": "8", "JOB_NUM_NODES": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert "inside job 17: 8 tasks on 2 nodes" in doctor_module.examine_slurm(LIBRARY).text
    assert "srun --mpi=pmi2 -n P" in doctor_module.examine_slurm({"library": "MPICH 5.0.2"}).text
    assert (
        "srun --mpi=pmix -n P" in doctor_module.examine_slurm({"library": "Open MPI v5.0.11"}).text
    )


def test_families_of_libraries():
    texts = (
        "MPICH 5.0.2",
        "Open MPI v5.0.11",
        "Intel(R) MPI Library 2021.13",
        "MPI VERSION : CRAY MPICH version 8.1.28",
    )
    assert [family_in(text) for text in texts] == ["mpich", "openmpi", "intel", "mpich"]


# ---- libraries and the machine -------------------------------------------------------------------


@pytest.mark.parametrize("name", doctor_module.PROBES)
def test_a_missing_library_comes_with_advice(name):
    found = doctor_module.PROBES[name]({"error": f"No module named '{name}'"})
    if name == "cupy":  # only missed where there is a GPU
        return
    advised = "export EINMPI_BLAS" if name == "blas" else "pip install"  # not all are pip's
    assert found.state in ("note", "problem") and advised in found.advice


def test_gpus_without_cupy(monkeypatch):
    monkeypatch.setattr(doctor_module, "visible_gpus", lambda: ["NVIDIA H200"])
    found = doctor_module.PROBES["cupy"]({"error": "No module named 'cupy'"})
    assert (found.state, found.advice[:12]) == (
        "note",
        "pip install ",
    ) and "NVIDIA H200" in found.text
    answer = {"cupy": "14.2", "devices": ["NVIDIA H200 (139.8 GiB)"], "nccl": "2.28.9"}
    text = "NVIDIA H200 (139.8 GiB); cupy 14.2, NCCL 2.28.9"
    assert doctor_module.PROBES["cupy"](answer) == Finding("GPU", "ok", text)
    monkeypatch.setenv("EINMPI_CUDA_GRAPHS", "off")
    assert doctor_module.PROBES["cupy"](answer).text == f"{text}, no CUDA graphs"
    monkeypatch.setenv("EINMPI_CUDA_GRAPHS", "of")
    found = doctor_module.PROBES["cupy"](answer)
    assert (found.state, found.advice) == ("problem", "unset EINMPI_CUDA_GRAPHS")
    assert "there is no setting 'of'; expected one of on, off (did you mean off?)" in found.text


def test_packages_that_are_missing(monkeypatch):
    monkeypatch.setattr(
        doctor_module, "find_spec", lambda name: None if name == "rich" else object()
    )
    assert list(doctor_module.examine_packages()) == [
        Finding("packages", "problem", "missing: rich", "pip install rich")
    ]


def test_kernels_that_cannot_be_kept(tmp_path):
    (tmp_path / "file").touch()
    environment = {
        **os.environ,
        "EINMPI_CACHE_DIR": str(tmp_path / "file" / "folder"),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-m", "einmpi.cli.versions", "numba"],
        env=environment,
        capture_output=True,
        text=True,
    )
    found = doctor_module.PROBES["numba"](json.loads(done.stdout))
    assert found.state == "note" and found.advice.startswith("export EINMPI_CACHE_DIR=")


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("print('hello'); print('{\"a\": 1}')", {"a": 1}),
        (
            "import os; os.kill(os.getpid(), 11)",
            {"error": "it was ended by a signal: Segmentation fault"},
        ),
        ("import sys; sys.exit('one\\ntwo')", {"error": "two"}),
        ("import sys; sys.exit(3)", {"error": "it exited with status 3"}),
        ("import time; time.sleep(60)", {"error": "no answer in 0.5 s"}),
    ],
)
def test_answers_of_other_processes(code, answer):
    process = start_process([sys.executable, "-S", "-c", code])
    assert read_answer(process, 0.5 if "sleep" in code else 60) == answer


def test_folders_and_limits(monkeypatch, tmp_path):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(total=2**26, free=2**20))
    assert (
        doctor_module.examine_shared_memory().state
        == doctor_module.examine_temporary_folder().state
        == "note"
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(total=2**30, free=2**30))
    assert (
        doctor_module.examine_shared_memory().state
        == doctor_module.examine_temporary_folder().state
        == "ok"
    )
    monkeypatch.setattr(doctor_module.tempfile, "gettempdir", lambda: "/tmp/" + "x" * 80)
    assert doctor_module.examine_temporary_folder().advice == "export TMPDIR=/tmp"
    monkeypatch.setattr(doctor_module.resource, "getrlimit", lambda number: (64, 64))
    monkeypatch.setattr(doctor_module, "_has_infiniband", lambda: True)
    found = doctor_module.examine_limits()
    assert (
        found.state == "note"
        and found.advice == "ulimit -l unlimited; ulimit -n 4096; ulimit -s 8192"
    )
    monkeypatch.setattr(doctor_module, "_has_infiniband", lambda: False)
    assert "ulimit -l" not in doctor_module.examine_limits().advice
