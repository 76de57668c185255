"""`einmpi sbatch`: a script with the figures of the plan, in which words of the user are data."""

import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import einmpi
from einmpi.cli import sbatch as command
from einmpi.cli.help import make_parser
from einmpi.cli.main import main
from einmpi.cli.sbatch import (
    MARGIN,
    MIB,
    OVERHEAD_BYTES,
    START_SECONDS,
    estimate,
    make_script,
    parse_limit,
)
from einmpi.cli.scripts import Script, clock, job_name, plain
from einmpi.errors import InputError

JOB = """
program = "Z[i,k] = sum(A[i,j] * B[j,k])"
[sizes]
n = 64
[inputs]
A = { shape = ["n", "n"], random = "normal", seed = 1 }
B = { shape = ["n", "n"], random = "normal", seed = 2 }
"""
MACHINE = """
measured = "on a machine"
[inside]
latency = "1 us"
bandwidth = "5 GB/s"
[between]
latency = "10 us"
bandwidth = "1 GB/s"
[kernels]
float64 = "10 Gflop/s"
other = "1 Gop/s"
"""
NASTY = [
    "a b",
    "it's",
    'say "hi"',
    "two\nlines",
    "x\n#SBATCH --exclusive\n",
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned;",
    "-n",
    "*",
    "%j",
    "tab\there",
    "ünï",
    "\\",
    "&",
    "# no",
]
OPTIONS = {
    "job-name",
    "nodes",
    "ntasks-per-node",
    "cpus-per-task",
    "gpus-per-node",
    "mem",
    "time",
    "output",
    "signal",
    "requeue",
    "open-mode",
    "partition",
    "account",
    "qos",
    "constraint",
}


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_mpi", lambda: ("mpich", "MPICH 5.0"))  # asking takes a second
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "machine.toml").write_text(MACHINE)
    return tmp_path / "job.toml"


def script(*words):
    return str(make_script(make_parser().parse_args(["sbatch", *map(str, words)])))


def sbatch_options(text):
    """What Slurm reads: it looks at lines up to the first command."""
    found = {}
    for line in text.split("\n"):
        if line.startswith("#SBATCH "):
            name, _, value = line.removeprefix("#SBATCH --").partition("=")
            found[name] = value
        elif line and not line.startswith("#"):
            break
    return found


def run(text, folder, status=0):
    """The words of the run when a shell runs the script, with an srun that only tells them."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name, does in {
        "srun": f"printf '%s\\0' \"$@\" > told; exit {status}",
        "scontrol": "echo $* > requeued",
        "env": "exit 0",  # it has the option
        "sleep": "exec /bin/sleep 0.01",
    }.items():
        (tools / name).write_text(f"#!/bin/bash\ncd '{folder}'\n{does}\n")
        (tools / name).chmod(0o755)
    (folder / "run.sbatch").write_bytes(text.encode(errors="surrogateescape"))
    variables = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_JOB_ID": "7",
    }
    done = subprocess.run(
        ["bash", "run.sbatch"], cwd=folder, env={**os.environ, **variables}, capture_output=True
    )
    assert done.returncode == status, done.stderr
    return [os.fsdecode(word) for word in (folder / "told").read_bytes().split(b"\0")[:-1]]


def test_figures_of_the_plan(job):
    text = script(
        job, "--nodes", 2, "--ntasks-per-node", 4, "--cpus-per-task", 3, "--set", "n=4000"
    )
    plan = einmpi.plan(einmpi.load(job, n=4000), 8, nodes=2)
    found = sbatch_options(text)
    assert (found["nodes"], found["ntasks-per-node"], found["cpus-per-task"]) == ("2", "4", "3")
    memory = int(found["mem"].removesuffix("M"))
    assert memory - 1 < 4 * (plan.peak + OVERHEAD_BYTES) / MIB <= memory
    computing, moving = 2 * 4000**3 / 8 / 3e9, plan.bytes_predicted / 8 / 1e8
    files = 3 * 4000**2 * 8 / 2 / 1e8
    minutes = (MARGIN * (computing + moving + files) + START_SECONDS) / 60
    assert clock(int(minutes * 60)) == found["time"]
    assert "einmpi calibrate" in text


def test_memory_for_what_is_read_ahead(tmp_path):
    """Up to a limit above the peak, but never more than there is to read."""
    (tmp_path / "job.toml").write_text(
        'program = "Y[i,k] = sum(A[i,j] * B[j,k]); Z = sum(Y[i,j] * C[i,j])"\n'
        + "\n".join(f'inputs.{name} = "{name}.npy"' for name in "ABC")
    )
    for name in "ABC":
        np.save(tmp_path / f"{name}.npy", np.zeros((1024, 1024)))
    job = einmpi.load(tmp_path / "job.toml")
    peak = einmpi.plan(job, 1).peak
    for limit, tensors in ((None, peak), (peak + 2**20, peak + 2**20), (2**40, peak + 8 * 2**20)):
        found = estimate(einmpi.plan(job, 1, memory=limit), "numpy", 1).memory_mib
        assert found == -(-(tensors + OVERHEAD_BYTES) // MIB)


def test_a_measured_machine(job):
    text = script(
        job, "--nodes", 2, "--ntasks-per-node", 4, "--set", "n=8000", "--machine", "machine.toml"
    )
    plan = einmpi.plan(einmpi.load(job, n=8000), 8, nodes=2, machine="machine.toml")
    assert (
        plan.seconds_predicted
        and estimate(plan, "numpy", 1).seconds > START_SECONDS + 2 * plan.seconds_predicted
    )
    assert "from measured times: on a machine" in text and "einmpi calibrate" not in text
    assert f"--machine {job.parent / 'machine.toml'}" in text


def test_what_is_passed_on(job):
    words = [
        "--set",
        "n=32",
        "--dtype",
        "float32",
        "--strategy",
        "sqrt",
        "--memory",
        "4GiB",
        "--backend",
        "numpy",
        "--fast-math",
    ]
    assert run(script("job.toml", "--nodes", 1, "--ntasks-per-node", 2, *words), job.parent) == [
        "--mpi=pmi2",
        "python",
        "-m",
        "einmpi",
        str(job),
        *words,
    ]


@pytest.mark.parametrize(
    ("family", "launch"),
    [
        ("mpich", "srun --mpi=pmi2"),
        ("intel", "srun --mpi=pmi2"),
        ("openmpi", "srun --mpi=pmix"),
        ("other", "srun"),
    ],
)
def test_the_launcher_belongs_to_the_mpi(family, launch):
    text = str(Script("x", (), 1, 1, 1, 1, 60, family, "a library", ["job.toml"]))
    assert f"\nlaunch=${{LAUNCH:-{launch}}}\n" in text and "a library" in text


def test_the_whole_script():
    """Byte by byte, with everything that a script may have."""
    words = ["/x y/job.toml", "--resume"]
    site = {"partition": "long", "qos": "high"}
    text = Script(
        "a b",
        ["a note"],
        2,
        4,
        3,
        1234,
        100000,
        "mpich",
        "MPICH 5.0",
        words,
        "/env/bin/activate",
        "a100:2",
        True,
        site,
    )
    assert str(text) == Path(__file__).with_name("long.sbatch").read_text()


def test_the_mpi_of_this_python():
    family, library = command._mpi()
    assert (family, library.split()[0]) in {("mpich", "MPICH"), ("openmpi", "Open")}


def test_gpus(job):
    found = sbatch_options(script(job, "--nodes", 1, "--ntasks-per-node", 4, "--backend", "cupy"))
    assert found["gpus-per-node"] == "4"
    assert "gpus-per-node" not in sbatch_options(script(job, "--nodes", 1, "--ntasks-per-node", 4))


@pytest.mark.parametrize(
    ("status", "requeued"), [(0, False), (1, False), (2, False), (75, True), (138, False)]
)
def test_checkpoints(job, status, requeued):
    """Status 138 means a signal, but without one to the script nobody asked the ranks to stop."""
    text = script(
        job,
        "--nodes",
        1,
        "--ntasks-per-node",
        2,
        "--checkpoint",
        "saved",
        "--every",
        "1h",
        "--time",
        "1h",
    )
    found = sbatch_options(text)
    assert (found["signal"], found["requeue"], found["open-mode"]) == ("B:USR1@300", "", "append")
    words = run(text, job.parent, status)
    assert words[-5:] == ["--every", "1h", "--checkpoint", str(job.parent / "saved"), "--resume"]
    assert (job.parent / "requeued").exists() == requeued


@settings(max_examples=15)
@given(data=st.data())
def test_words_of_the_user_are_data(tmp_path_factory, data):
    words = st.sampled_from(NASTY) | st.text(
        st.characters(blacklist_categories=["Cs"], blacklist_characters="\0/"), max_size=20
    )
    name, title, folder = (data.draw(st.lists(words, max_size=3).map("".join)) for _ in range(3))
    place = tmp_path_factory.mktemp("job")
    notes, command_words = [title, folder], [f"/{folder}/{name}.toml", "--checkpoint", f"/{folder}"]
    resumes = data.draw(st.booleans())
    text = str(
        Script(name, notes, 1, 1, 1, 1, 3600, "mpich", title, command_words, resumes=resumes)
    )
    hold = ["env", "--block-signal=USR1"] * resumes
    assert run(text, place) == ["--mpi=pmi2", *hold, "python", "-m", "einmpi", *command_words]
    assert set(sbatch_options(text)) <= OPTIONS and sbatch_options(text)["output"] == "%x-%j.out"
    assert sorted(path.name for path in place.iterdir()) == ["run.sbatch", "told", "tools"]
    assert re.fullmatch(r"[A-Za-z0-9_.-]+", job_name(name)) and "\n" not in plain(title)


def test_a_file_name_that_is_no_text(job, capfdbinary):
    odd = os.fsdecode(os.fsencode(job.parent) + b"/\xff $(touch pwned).toml")
    os.rename(job, odd)
    assert main(["sbatch", odd, "--nodes", "1", "--ntasks-per-node", "1"]) == 0
    printed = os.fsdecode(capfdbinary.readouterr().out)
    assert (
        main(
            [
                "sbatch",
                odd,
                "--nodes",
                "1",
                "--ntasks-per-node",
                "1",
                "--out",
                "it's.sbatch",
                "--quiet",
            ]
        )
        == 0
    )
    assert os.fsdecode((job.parent / "it's.sbatch").read_bytes()) == printed
    assert run(printed, job.parent)[-1] == odd


def test_an_environment_is_activated_by_its_quoted_name(job, monkeypatch):
    prefix = job.parent / "it's an $(environment)"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin/activate").write_text("touch activated\n")
    monkeypatch.setattr(command, "sys", SimpleNamespace(prefix=str(prefix), base_prefix="/usr"))
    run(script(job, "--nodes", 1, "--ntasks-per-node", 1), job.parent)
    assert (job.parent / "activated").exists()


def test_the_script_is_printed_or_goes_to_a_file_of_its_own(job, capfd):
    words = ["sbatch", "job.toml", "--nodes", "1", "--ntasks-per-node", "1"]
    assert main([*words, "--out", "-"]) == 0 and not os.path.exists("-")
    assert "1 rank on 1 node;" in capfd.readouterr().out
    assert main([*words, "--out", "./job.toml"]) == 2 and job.read_text() == JOB
    assert (
        capfd.readouterr().err
        == "--out ./job.toml: this is the job file; expected another file to write\n"
    )


def test_a_job_of_many_years_needs_a_limit(job):
    words = [job, "--nodes", 1, "--ntasks-per-node", 1, "--set", "n=999999"]
    with pytest.raises(InputError, match=r"the plan predicts \d\d,\d{3} days on 1 rank on 1 node"):
        script(*words)
    assert sbatch_options(script(*words, "--time", "1h"))["time"] == "01:00:00"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("1:30:00", 5400),
        ("1-00", 86400),
        ("1-2:03", 93780),
        ("1-0:0:5", 86405),
        ("90min", 5400),
        ("2h", 7200),
        ("1.5h", 5400),
    ],
)
def test_limits(text, seconds):
    assert parse_limit(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "soon", "1:2:3:4", "-5", "0", "5s", "99999999999h", "1-", "٣", "10 $(id)", "600-0"]
)
def test_wrong_limits(text):
    with pytest.raises(InputError, match="--time: "):
        parse_limit(text)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(60, "00:01:00"), (61, "00:02:00"), (86400, "1-00:00:00")]
)
def test_clock(seconds, shown):
    assert clock(seconds) == shown


# ---- what a site defines -------------------------------------------------------------------------


def test_names_of_the_site(job):
    words = ["--partition", "long,short", "--account", "physics", "--qos", "high"]
    text = script(job, "--nodes", 2, "--ntasks-per-node", 4, *words, "--constraint", "[a|b]&ib*2")
    found = sbatch_options(text)
    assert found["partition"] == "long,short"
    assert found["account"] == "physics"
    assert found["qos"] == "high"
    assert found["constraint"] == "[a|b]&ib*2"
    plain_options = sbatch_options(script(job, "--nodes", 2, "--ntasks-per-node", 4))
    assert set(found) - set(plain_options) == {"partition", "account", "qos", "constraint"}


@pytest.mark.sampled(35)
@pytest.mark.parametrize("flag", ["partition", "account", "qos", "constraint"])
@pytest.mark.parametrize("value", [*NASTY, "", "-x", "a b", "a\n#SBATCH --exclusive", "a'", "a#b"])
def test_names_of_the_site_are_names(job, flag, value):
    with pytest.raises(InputError, match=f"--{flag}: "):
        script(job, "--nodes", 1, "--ntasks-per-node", 1, f"--{flag}={value}")


@pytest.mark.parametrize(
    ("words", "requested"),
    [([], "4"), (["--gpus", "4"], "2"), (["--gpus", "a100:2"], "a100:1"), (["--gpus", "8"], "4")],
)
def test_gpus_in_all(job, words, requested):
    text = script(job, "--nodes", 2, "--ntasks-per-node", 4, "--backend", "cupy", *words)
    assert sbatch_options(text)["gpus-per-node"] == requested


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "3", "--backend", "cupy"], "3 GPUs on 2 nodes"),
        (["--gpus", "1", "--backend", "cupy"], "1 GPU on 2 nodes"),
        (["--gpus", "2"], "the backend numpy uses no GPU"),
        (["--gpus", "0", "--backend", "cupy"], "'0' is not a number of GPUs"),
        (["--gpus", "a b:2", "--backend", "cupy"], "'a b:2' is not a number of GPUs"),
        (["--gpus", "x:2\n#", "--backend", "cupy"], "is not a number of GPUs"),
    ],
)
def test_wrong_numbers_of_gpus(job, words, message):
    with pytest.raises(InputError, match=message):
        script(job, "--nodes", 2, "--ntasks-per-node", 4, *words)


def test_each_rank_has_room_for_all_of_a_sparse_input():
    """With 4,000,000 of them a run held 421 MB on each of 2 ranks, with 1000 it held 117."""
    text = "y[i] = sum(A[i,j] * x[j])"
    spec = {"random": "sparse", "shape": (10**6, 10**6)}
    needed = []
    for stored in (1000, 200_000):
        job = einmpi.program(text, x=(10**6,), inputs={"A": {**spec, "nnz": stored}})
        needed.append(estimate(einmpi.plan(job, 2), "numpy", 1))
    more = (needed[1].memory_mib - needed[0].memory_mib) * 2**20
    assert more > 2 * 199_000 * (421 - 117) / 4
    assert "MiB to read sparse inputs and 512" in needed[1].explanation[0]
    assert needed[1].seconds - needed[0].seconds == 2
