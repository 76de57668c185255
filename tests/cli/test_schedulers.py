"""`einmpi sbatch --format`: each script by a strict reading of its scheduler's grammar, and run."""

import os
import re
import shlex
import subprocess
import sys

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from einmpi.cli import sbatch as command
from einmpi.cli.help import make_parser
from einmpi.cli.main import main
from einmpi.cli.options import FORMATS
from einmpi.cli.sbatch import make_script
from einmpi.cli.scripts import SCHEDULERS, Script
from einmpi.errors import InputError

JOB = """
title = "flux: -N9"
program = "Z[i,k] = sum(A[i,j] * B[j,k])"
sizes.n = 64
[inputs]
A = { shape = ["n", "n"], random = "normal", seed = 1 }
B = { shape = ["n", "n"], random = "normal", seed = 2 }
"""
SHELL_FORMATS = ("pbs", "lsf", "flux")
# The only forms of a directive that a script may have, from the manuals of the schedulers.
NAME = r"[A-Za-z0-9_.-]{1,60}"
SITE = r"[A-Za-z0-9_.,:@+-]+"
GRAMMAR = {
    "pbs": (
        rf"-N (?P<name>{NAME})",
        r"-l select=(?P<nodes>\d+):ncpus=(?P<cores>\d+):mpiprocs=(?P<tasks>\d+)"
        r":ompthreads=(?P<threads>\d+):mem=(?P<memory>\d+)mb(:ngpus=(?P<gpus>\d+))?",
        r"-l place=scatter",
        r"-l walltime=(?P<hours>\d{2,}):(?P<minutes>[0-5]\d):00",
        rf"-q (?P<queue>{SITE})",
        rf"-A (?P<account>{SITE})",
        r"-j oe",
    ),
    "lsf": (
        rf"-J (?P<name>{NAME})",
        r"-n (?P<ranks>\d+)",
        r'-R "span\[ptile=(?P<tasks>\d+)\]"',
        r'-R "rusage\[mem=(?P<memory>\d+)MB/host\]"',
        r'-R "affinity\[core\((?P<threads>\d+)\)\]"',
        r'-gpu "num=(?P<gpus>\d+)/host(:gmodel=(?P<gpu>[A-Za-z0-9_.-]+))?"',
        r"-W (?P<minutes>\d+)",
        rf"-q (?P<queue>{SITE})",
        rf"-P (?P<account>{SITE})",
        r'-R "select\[(?P<constraint>[^"\s]+)\]"',
        rf"-o {NAME}-%J\.out",
        r'-Q "(?P<requeue>75)"',
    ),
    "flux": (
        rf"--job-name=(?P<name>{NAME})",
        r"--nodes=(?P<nodes>\d+)",
        r"--nslots=(?P<slots>\d+)",
        r"--cores-per-slot=(?P<cores>\d+)",
        r"--gpus-per-slot=(?P<gpus>\d+)",
        r"--time-limit=(?P<minutes>\d+)m",
        rf"--queue=(?P<queue>{SITE})",
        rf"--bank=(?P<account>{SITE})",
        r'--requires="(?P<constraint>[^"\s]+)"',
        rf"--output={NAME}-\{{\{{id\}}\}}\.out",
    ),
}
# What each scheduler takes for a directive. PBS stops at the first command, others look further.
SENTINELS = {"pbs": r"#PBS(.*)", "lsf": r"\s*#\s*BSUB(.*)", "flux": r"[^\w]*(?:flux|FLUX):(.*)"}
WORDS = ["--nodes", "2", "--ntasks-per-node", "4"]


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_mpi", lambda: ("mpich", "MPICH 5.0"))  # asking takes a second
    monkeypatch.setattr(command, "_activate_file", lambda: None)  # it would hide the tools below
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path / "job.toml"


def script(*words):
    return str(make_script(make_parser().parse_args(["sbatch", *map(str, words)])))


def directives(format, text):
    """Return what the scheduler reads, by name; anything unknown is an error."""
    found = {}
    for line in re.split("\r\n|\r|\n", text):
        matched = re.match(SENTINELS[format], line)
        if matched is None:
            if format == "pbs" and line and not line.startswith("#"):
                break
            continue
        value = matched[1].strip()
        assert line == SCHEDULERS[format].prefix + value
        shlex.split(value)  # quotes are closed
        forms = [re.fullmatch(form, value) for form in GRAMMAR[format]]
        (form,) = [form for form in forms if form is not None]
        named = {name: value for name, value in form.groupdict().items() if value is not None}
        assert not found.keys() & named.keys()
        found |= named
    return found


def run(format, text, folder, launcher="exit 0", status=0, seconds=0):
    """Run a script with launchers that tell their words, some seconds after the job started."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    tells = f"cd '{folder}'\nprintf '%s\\0' \"$@\" > told\n{launcher}"
    for name, does in {"mpirun": tells, "flux": tells, "sleep": "exec /bin/sleep 0.05"}.items():
        (tools / name).write_text(f"#!/bin/bash\n{does}\n")
        (tools / name).chmod(0o755)
    (folder / "clock").write_text(f"SECONDS={seconds}\n")
    (folder / "run.sh").write_bytes(text.encode(errors="surrogateescape"))
    assert subprocess.run(["bash", "-n", "run.sh"], cwd=folder).returncode == 0
    variables = {
        "PATH": f"{tools}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
        "BASH_ENV": str(folder / "clock"),
        "PBS_NODEFILE": "hosts",
        "LSB_DJOB_HOSTFILE": "hosts",
    }
    done = subprocess.run(
        ["bash", "run.sh"], cwd=folder, env={**os.environ, **variables}, capture_output=True
    )
    assert done.returncode == status, done.stderr
    words = (folder / "told").read_bytes().split(b"\0")[:-1]
    return [os.fsdecode(word) for word in words], done.stderr.decode()


LAUNCH = {
    "pbs": ["-n", "8", "--hostfile", "hosts"],
    "lsf": ["-n", "8", "--hostfile", "hosts"],
    "flux": ["run", "--nodes=2", "--tasks-per-node=4"],
}


def test_every_format_has_an_entry():
    assert tuple(SCHEDULERS) == FORMATS and set(GRAMMAR) == set(SHELL_FORMATS)


@pytest.mark.parametrize("format", SHELL_FORMATS)
def test_figures_of_the_plan(format, job):
    words = [job, *WORDS, "--cpus-per-task", "3", "--time", "30:30:00", "--format", format]
    site = ["--partition", "long", "--account", "physics"]
    found = directives(format, script(*words, *site))
    slurm = script(*words[:-1], "slurm")
    memory = re.search(r"#SBATCH --mem=(\d+)M", slurm)[1]
    known = {
        "name": "job",
        "nodes": "2",
        "slots": "2",
        "tasks": "4",
        "ranks": "8",
        "threads": "3",
        "cores": "12",
        "memory": memory,
        "hours": "30",
        "minutes": "30" if format == "pbs" else "1830",
        "queue": "long",
        "account": "physics",
    }
    assert found == {name: known[name] for name in found}
    required = {"pbs": {"nodes", "cores", "memory"}, "lsf": {"ranks", "tasks", "memory"}}
    assert required.get(format, {"nodes", "slots", "cores"}) <= found.keys()


@pytest.mark.parametrize("format", SHELL_FORMATS)
def test_gpus_and_constraints(format, job):
    words = [job, *WORDS, "--format", format, "--backend", "cupy"]
    assert directives(format, script(*words))["gpus"] == "4"
    assert directives(format, script(*words, "--gpus", "2"))["gpus"] == "1"
    if format == "lsf":
        found = directives(format, script(*words, "--gpus", "a100:2"))
        assert (found["gpus"], found["gpu"]) == ("1", "a100")
    if format == "flux":
        assert "flux run --nodes=2 --tasks-per-node=4 --gpus-per-node=4}" in script(*words)
    if format != "pbs":
        found = directives(format, script(*words, "--constraint", "a100&(ib|roce)"))
        assert found["constraint"] == "a100&(ib|roce)"


@pytest.mark.parametrize("format", SHELL_FORMATS)
def test_a_script_runs(format, job):
    words, _ = run(format, script(job, *WORDS, "--set", "n=3", "--format", format), job.parent)
    threads, python, *rest = words[len(LAUNCH[format]) :][1:]
    assert words[: len(LAUNCH[format])] == LAUNCH[format]
    assert (threads, os.path.basename(python)) == ("OMP_NUM_THREADS=1", "python")
    assert rest == ["-m", "einmpi", str(job), "--set", "n=3"]


@pytest.mark.parametrize("family", ["mpich", "openmpi"])
def test_flux_tells_open_mpi_by_pmix(family):
    made = Script("x", (), 1, 1, 1, 1, 60, family, "a library", ["j.toml"], format="flux")
    assert ("flux run -o pmi=pmix --nodes=1" in str(made)) == (family == "openmpi")


@pytest.mark.parametrize("format", SHELL_FORMATS)
@pytest.mark.parametrize("ending", ["in time", "when asked"])
def test_a_checkpoint_before_the_time_is_up(format, ending, job):
    """The script asks the launcher to stop 300 seconds before its hour is up, not earlier."""
    text = script(job, *WORDS, "--format", format, "--checkpoint", "saved", "--time", "1h")
    launcher = "trap 'exit 75' USR1\nfor k in {1..15}; do /bin/sleep 0.1; done\nexit 0"
    if ending == "in time":
        words, errors = run(format, text, job.parent, launcher, 0, 3000)
        assert "submit" not in errors
    else:
        words, errors = run(format, text, job.parent, launcher, 75, 3300)
        assert ("submit this script again" in errors) == (format != "lsf")
    assert words[-3:] == ["--checkpoint", str(job.parent / "saved"), "--resume"]
    assert ("requeue" in directives(format, text)) == (format == "lsf")


NASTY = ["it's", "x\n#PBS -l place=excl\n", "\n#BSUB -n 99\n", "\r#flux: -N9\r", "\nflux: -N9\n"]


@pytest.mark.parametrize("format", SHELL_FORMATS)
@settings(max_examples=10)
@given(data=st.data())
def test_words_of_the_user_are_data(format, tmp_path_factory, data):
    letters = st.characters(blacklist_categories=["Cs"], blacklist_characters="\0/")
    words = st.sampled_from(NASTY) | st.text(letters, max_size=20)
    name, title, folder = (data.draw(st.lists(words, max_size=3).map("".join)) for _ in range(3))
    place = tmp_path_factory.mktemp("job")
    told = [f"/{folder}/{name}.toml", "--checkpoint", f"/{folder}"]
    notes = [title, folder]
    made = Script(name, notes, 2, 4, 1, 1, 60, "mpich", title, told, format=format)
    assert {"name", "minutes"} <= directives(format, str(made)).keys()
    assert run(format, str(made), place)[0][-3:] == told
    assert {path.name for path in place.iterdir()} == {"run.sh", "told", "tools", "clock"}


@pytest.mark.slow
@pytest.mark.parametrize("format", ["pbs", "lsf"])
def test_mpirun_takes_the_hosts_of_the_scheduler(format, job):
    """With the real mpirun, on a file of hosts as PBS and LSF write it."""
    (job.parent / "hosts").write_text("localhost\n" * 2)
    text = script(job, "--nodes", 1, "--ntasks-per-node", 2, "--format", format)
    variables = {
        "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
        "PBS_NODEFILE": "hosts",
        "LSB_DJOB_HOSTFILE": "hosts",
        "OPENBLAS_NUM_THREADS": "",  # the script sets OMP_NUM_THREADS, which comes after it
    }
    done = subprocess.run(
        ["bash", "-c", text], env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert " on 2 ranks " in done.stdout and "1 thread a rank (OMP_NUM_THREADS)" in done.stdout


def test_the_command_that_submits(job, capfd):
    for format, said in {"slurm": "sbatch", "pbs": "qsub", "lsf": "bsub <"}.items():
        words = ["sbatch", "job.toml", *WORDS, "--format", format, "--out", "it's"]
        assert main(words) == 0
        assert capfd.readouterr().out == f"""{said} 'it'"'"'s'\n"""


# ---- Kubernetes ----------------------------------------------------------------------------------

# The fields of an MPIJob (kubeflow.org/v2beta1) that a job may have, and their types.
POD = {
    "template": {
        "spec": {
            "containers": [
                {
                    "name": str,
                    "image": str,
                    "command": [str],
                    "resources": {"limits": {"cpu": int, "memory": str, "nvidia.com/gpu": int}},
                    "volumeMounts": [{"name": str, "mountPath": str}],
                }
            ],
            "volumes": [{"name": str, "emptyDir": {"medium": str}}],
        }
    },
    "replicas": int,
}
MPIJOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "labels": {"kueue.x-k8s.io/queue-name": str}},
    "spec": {
        "slotsPerWorker": int,
        "mpiImplementation": str,
        "runPolicy": {"cleanPodPolicy": str, "backoffLimit": int, "activeDeadlineSeconds": int},
        "mpiReplicaSpecs": {"Launcher": POD, "Worker": POD},
    },
}


def check_fields(value, expected, where="job"):
    if isinstance(expected, type):
        assert type(value) is expected, where
    elif isinstance(expected, list):
        assert isinstance(value, list) and value, where
        for k, each in enumerate(value):
            check_fields(each, expected[0], f"{where}[{k}]")
    else:
        assert isinstance(value, dict) and value and set(value) <= set(expected), where
        for name, each in value.items():
            check_fields(each, expected[name], f"{where}.{name}")


def mpijob(text):
    found = yaml.safe_load(text)
    check_fields(found, MPIJOB)
    assert (found["apiVersion"], found["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    assert re.fullmatch("[a-z]([a-z0-9-]{0,61}[a-z0-9])?", found["metadata"]["name"])
    replicas = found["spec"]["mpiReplicaSpecs"]
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    (worker,) = replicas["Worker"]["template"]["spec"]["containers"]
    return found, launcher, worker


def test_an_mpijob(job):
    words = [job, *WORDS, "--cpus-per-task", 2, "--time", "1h", "--format", "mpijob"]
    found, launcher, worker = mpijob(script(*words, "--partition", "yes"))
    assert found["metadata"] == {
        "name": "einmpi-job",
        "labels": {"kueue.x-k8s.io/queue-name": "yes"},
    }
    spec = found["spec"]
    assert (spec["slotsPerWorker"], spec["mpiReplicaSpecs"]["Worker"]["replicas"]) == (4, 2)
    assert spec["runPolicy"]["activeDeadlineSeconds"] == 3600
    assert spec["runPolicy"]["backoffLimit"] == 0
    assert worker["resources"]["limits"]["cpu"] == 8 and worker["image"] == "IMAGE"
    assert launcher["command"][:5] == ["mpirun", "-n", "8", "--hostfile", "/etc/mpi/hostfile"]
    assert launcher["command"][5:] == [
        "env",
        "OMP_NUM_THREADS=2",
        "python",
        "-m",
        "einmpi",
        str(job),
    ]
    more = ["--backend", "cupy", "--image", "here/einmpi:1", "--checkpoint", "saved"]
    found, launcher, worker = mpijob(script(*words, *more))
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert launcher["image"] == worker["image"] == "here/einmpi:1"
    assert found["spec"]["runPolicy"]["backoffLimit"] > 0 and launcher["command"][-1] == "--resume"


@pytest.mark.parametrize(
    ("family", "named"),
    [("mpich", "MPICH"), ("intel", "Intel"), ("openmpi", "OpenMPI"), ("other", "MPICH")],
)
def test_the_mpi_of_an_mpijob(family, named):
    made = Script("9 Ü", (), 1, 1, 1, 1, 60, family, "a library", ["j.toml"], format="mpijob")
    found, launcher, _ = mpijob(str(made))
    assert found["spec"]["mpiImplementation"] == named and found["metadata"]["name"] == "einmpi-9"
    assert ("--allow-run-as-root" in launcher["command"]) == (named == "OpenMPI")


@given(words=st.lists(st.text(st.characters(blacklist_categories=["Cs"])), min_size=1, max_size=3))
def test_words_of_the_user_are_strings_of_yaml(words):
    made = Script(words[0], words, 1, 1, 1, 1, 60, "mpich", "", words, format="mpijob")
    _, launcher, _ = mpijob(str(made))
    assert launcher["command"][-len(words) :] == words


# ---- what a scheduler does not have --------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--format pbs --qos high", "--qos: PBS has none; expected only --partition, --account"),
        ("--format pbs --constraint ib", "--constraint: PBS has none"),
        ("--format lsf --qos high", "--qos: LSF has none"),
        (
            "--format mpijob --account x",
            "--account: Kubernetes has none; expected only --partition",
        ),
        ("--format flux --backend cupy --gpus a100:2", "--gpus: Flux knows no types of GPUs"),
        ("--image x", "--image: a script for Slurm has no containers; expected --format mpijob"),
        ("--format flux --partition a'b", "is not a name of Flux"),
        ("--format condor", "invalid choice: 'condor'"),
    ],
)
def test_what_a_scheduler_does_not_have(words, message, job):
    with pytest.raises(InputError, match=re.escape(message)):
        script(job, *WORDS, *words.split())
