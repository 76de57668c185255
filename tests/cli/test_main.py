"""The command line as people use it: what it prints, where to, its exit status."""

import json
import os
import re
import shutil
import subprocess
import sys

import h5py
import numpy as np
import pytest
from in_process import einmpi_here
from mpi_helpers import OPEN_MPI, environment, needs_mpirun, run_mpi
from paths import ROOT

import einmpi
from einmpi.cli.help import make_parser
from einmpi.cli.main import _without_ranks, main
from einmpi.files.reading import load_array

JOBS = sorted(path.name for path in (ROOT / "jobs").glob("*.toml"))


@pytest.fixture
def folder(tmp_path):
    """A folder with the example jobs."""
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs")
    return tmp_path


def run(folder, *arguments):
    return einmpi_here(folder, arguments)


def process(folder, *arguments, **more):
    """The finished process of `python -m einmpi …`."""
    return subprocess.run(
        [sys.executable, "-m", "einmpi", *arguments],
        cwd=folder,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "words", [["jobs/chain.toml"], ["check", "jobs/softmax.toml"], ["jobs/none.toml"], ["plan"]]
)
def test_a_process_says_what_it_says_here(folder, words):
    """The other tests are quicker without one."""
    there, here = process(folder, *words), run(folder, *words)
    assert (there.returncode, there.stderr) == (here.returncode, here.stderr)
    assert without_times(there.stdout) == without_times(here.stdout)


def without_times(text):
    """Return the lines of a run's output except the first and those about the startup."""
    return [line for line in text.splitlines()[1:] if not line.startswith("  startup: ")]


def assert_refused(done, message):
    """Status 2, nothing on standard output, exactly this one line on standard error."""
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("\n") and done.stderr.count("\n") == 1, done.stderr
    assert re.fullmatch(re.escape(message).replace("…", ".*"), done.stderr[:-1]), done.stderr


# ---- the example jobs ----------------------------------------------------------------------------


def chain(A, B, C, D, E):
    return {"Z": A @ B + C @ (D @ E)}


def softmax(X):
    return {"Y": softmax_rows(X)}


def softmax_rows(X):
    E = np.exp(X - X.max(axis=-1, keepdims=True))
    return E / E.sum(axis=-1, keepdims=True)


def attention(Q, K, V, WQ, WK, WV, WO):
    QH, KH, VH = (np.einsum("sa,ahd->hsd", x, w) for x, w in ((Q, WQ), (K, WK), (V, WV)))
    heads = softmax_rows(QH @ KH.transpose(0, 2, 1) / np.sqrt(QH.shape[-1])) @ VH
    return {"Y": np.einsum("hsd,ahd->sa", heads, WO)}


def distances(X, Y):
    difference = X[:, :, None] - Y[None, :, :]
    return {"L2": np.square(difference).sum(axis=1), "Linf": np.abs(difference).max(axis=1)}


def shortest_path(W):
    """Floyd and Warshall's algorithm; 64 steps are enough for 64 points."""
    D = np.where(np.eye(len(W)) == 1, 0.0, W)
    for k in range(len(W)):
        D = np.minimum(D, D[:, k, None] + D[None, k, :])
    return {"D64": D}


def nearest(Q, P):
    distances = np.square(Q[:, None, :] - P[None, :, :]).sum(axis=2)
    return {"N": np.argsort(distances, axis=1)[:, :3]}


def pca(X):
    """The leading eigenvector of the covariance matrix, nearly: after four steps."""
    C = np.cov(X.T)
    v = np.linalg.matrix_power(C, 4) @ np.ones(len(C))
    v /= np.linalg.norm(v)
    return {"variance": (X @ v).var(ddof=1)}


def heat(U, rate):
    for _ in range(2):
        around = U[:-2, 1:-1] + U[2:, 1:-1] + U[1:-1, :-2] + U[1:-1, 2:]
        new = U.copy()
        new[1:-1, 1:-1] += rate * (around - 4 * U[1:-1, 1:-1])
        U = new
    return {"W": U}


def convolution(X, F, bias):
    windows = np.lib.stride_tricks.sliding_window_view(X, F.shape[2:], axis=(2, 3))
    conv = np.einsum("ncijab,ocab->noij", windows, F) + bias[:, None, None]
    rows = conv.shape[2] // 2
    squares = np.maximum(conv, 0).reshape(*conv.shape[:2], rows, 2, rows, 2)
    return {"pooled": squares.max(axis=(3, 5))}


def kmeans(X, C):
    near = np.square(X[:, None, :] - C[None, :, :]).sum(axis=2).argmin(axis=1)
    return {"new": np.array([X[near == c].mean(axis=0) for c in range(len(C))])}


def gcn(src, dst, X, W):
    adjacency = np.zeros((len(X), len(X)))
    np.add.at(adjacency, (dst.astype(int), src.astype(int)), 1)
    scale = np.diag(1 / np.sqrt(np.maximum(adjacency.sum(axis=1), 1)))
    return {"H": np.maximum(scale @ adjacency @ scale @ X @ W, 0)}


def pagerank(src, dst, R, damping):
    links = np.zeros((len(R), len(R)))
    np.add.at(links, (dst.astype(int), src.astype(int)), 1)
    links[:, links.sum(axis=0) == 0] = 1  # a page without links gives to all
    links /= links.sum(axis=0)
    for _ in range(2):
        R = (1 - damping) / len(R) + damping * links @ R
    return {"R2": R}


def points(noise, middle, group):
    return {"X": noise + 4 * middle[group.astype(int)]}


def baskets(labels_of_rows, word, any_feature, own, length, times):
    features = np.where(own < 0.6, 20 * labels_of_rows[:, None] + word, any_feature)
    is_present = np.arange(own.shape[1]) < 4 + length[:, None]
    counts = np.where(is_present, 1 + times, 0)
    return {
        "index": features.astype("int64"),
        "value": np.float32(counts / 4),
        "y": labels_of_rows.astype("int64"),
    }


def kalman(C, seen, r):
    n = len(C)
    moves = 0.95 * np.eye(n) + 0.1 * np.eye(n, k=1)
    noise = 0.01 * np.eye(n)
    state, covariance = np.zeros(n), noise
    states, uncertainties = [], []
    for step, value in enumerate(seen):
        if step:
            state, covariance = moves @ state, moves @ covariance @ moves.T
        covariance = covariance + noise
        gain = covariance @ C / (C @ covariance @ C + r)
        state = state + gain * (value - C @ state)
        covariance = covariance - np.outer(gain, covariance @ C)
        states.append(state)
        uncertainties.append(np.sqrt(np.trace(covariance)))
    return {"m": np.array(states), "uncertainty": np.array(uncertainties)}


BY_NUMPY = {
    "chain": chain,
    "softmax": softmax,
    "attention": attention,
    "distances": distances,
    "shortest_path": shortest_path,
    "nearest": nearest,
    "pca": pca,
    "heat": heat,
    "convolution": convolution,
    "kmeans": kmeans,
    "gcn": gcn,
    "pagerank": pagerank,
    "points": points,
    "baskets": baskets,
    "kalman": kalman,
}


# Jobs with a loop are compared with numpy in tests/loops/test_examples.py.
PLANNED_JOBS = []
for name in JOBS:
    takes_seconds = name in ("digits.toml", "text.toml")  # with their gradients
    PLANNED_JOBS.append(pytest.param(name, marks=pytest.mark.slow) if takes_seconds else name)
PLAIN_JOBS = [name for name in JOBS if einmpi.load(ROOT / "jobs" / name).loop is None]


def test_every_job_has_its_own_check():
    assert {name.removesuffix(".toml") for name in PLAIN_JOBS} == set(BY_NUMPY)


def test_every_job_is_listed():
    page = (ROOT / "docs" / "command_line.md").read_text()
    listed = re.findall(r"^\| `(\w+\.toml)` \|", page, re.MULTILINE)
    assert sorted(listed) == sorted(JOBS)


def summaries(text):
    """{name: (dtype, shape, norm, min, max)} of what a run prints."""
    number = r"(-?[\d.e+-]+)"
    figures = rf"norm {number}  min {number}  max {number}"
    lines = re.findall(
        rf"^  (\w+)  (\w+) ([\d×]+|scalar)  (?:{figures}|{number})(?:  → .*)?$", text, re.MULTILINE
    )
    found = {}
    for name, dtype, shape, *numbers, value in lines:
        norm, least, greatest = map(float, numbers) if not value else [float(value)] * 3
        found[name] = dtype, shape, abs(norm), least, greatest
    return found


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", PLAIN_JOBS)
def test_run_equals_numpy(name, folder):
    job = einmpi.load(ROOT / "jobs" / name)
    arrays = {
        spec.name: load_array(spec, spec.shape, spec.dtype).astype("float64") for spec in job.inputs
    }
    wanted = BY_NUMPY[name.removesuffix(".toml")](**arrays)
    done = run(folder, f"jobs/{name}")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(
        rf"{re.escape(job.title)}: \d+\.\d\d s on 1 rank \(plan .*, load .*, run .*, store .*\); "
        r"\d+ threads? a rank \([^)]*\)",
        done.stdout.split("\n")[0],
    )
    found = summaries(done.stdout)
    assert list(found) == list(wanted)
    assert len(without_times(done.stdout)) == len(wanted)
    for tensor, array in wanted.items():
        dtype, shape, norm, least, greatest = found[tensor]
        # Inputs were given to numpy in float64; other dtypes are those that a program asks for.
        assert dtype == (job.dtype if array.dtype == "float64" else array.dtype)
        assert shape == ("×".join(map(str, array.shape)) or "scalar")
        scale = np.abs(array).max()
        np.testing.assert_allclose(norm, np.linalg.norm(array.ravel()), rtol=1e-4)
        np.testing.assert_allclose(
            [least, greatest], [array.min(), array.max()], rtol=1e-4, atol=1e-5 * scale
        )


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", PLAIN_JOBS)
def test_reference_equals_numpy(name):
    job = einmpi.load(ROOT / "jobs" / name)
    arrays = {
        spec.name: load_array(spec, spec.shape, spec.dtype).astype("float64") for spec in job.inputs
    }
    results = einmpi.reference(job)
    tolerance = 1e-10 if job.dtype == "float64" else 2e-3
    for tensor, array in BY_NUMPY[name.removesuffix(".toml")](**arrays).items():
        np.testing.assert_allclose(
            results[tensor], array, rtol=tolerance, atol=tolerance * np.abs(array).max()
        )


@pytest.mark.parametrize("name", PLAIN_JOBS)
def test_check(name, folder):
    job = einmpi.load(ROOT / "jobs" / name)
    done = run(folder, "check", f"jobs/{name}")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.split("\n")
    assert lines[0] == job.title and lines[-2:] == ["ok", ""]
    assert [line.split()[1] for line in lines if line.startswith("input ")] == [
        v.name for v in job.graph.inputs
    ]
    assert [line.split()[1] for line in lines if line.startswith("output ")] == list(
        job.graph.outputs
    )
    for vertex in job.graph.computed:
        assert any(line.startswith(f"         {vertex}   {vertex.dtype} ") for line in lines), (
            vertex.name
        )


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", PLANNED_JOBS)
def test_plan_is_that_of_the_python_interface(name, folder):
    done = run(folder, "plan", f"jobs/{name}", "-n", "8")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{einmpi.plan(einmpi.load(ROOT / 'jobs' / name), ranks=8)}\n"


def test_plan_of_the_chain_is_the_picture_in_the_readme(folder):
    done = run(folder, "plan", "jobs/chain.toml", "-n", "8", "--json", "-")
    assert (done.returncode, done.stderr) == (0, "")
    plan = json.loads(done.stdout)
    cuts = {vertex["name"]: vertex["partitioning"] for vertex in plan["vertices"]}
    assert cuts == {
        "Z_1": {"i": 2, "k": 2, "j": 2},
        "Z_2": {"j": 2, "k": 2, "l": 2},
        "Z_3": {"i": 2, "k": 2, "j": 2},
        "Z": {"i": 4, "k": 2},
    }
    moved = {vertex["name"]: sum(vertex["words"].values()) for vertex in plan["vertices"]}
    assert moved == {"Z_1": 3 * 480**2, "Z_2": 3 * 480**2, "Z_3": 3 * 480**2, "Z": 0}
    assert plan["words_predicted"] == 9 * 480**2 == plan["certificate"]["lower_bound_words"]


def test_plan_writes_json(folder):
    done = run(folder, "plan", "jobs/softmax.toml", "-n", "6", "--compare", "--json", "plans.json")
    assert (done.returncode, done.stderr) == (0, "")
    plans = json.loads((folder / "plans.json").read_text())
    assert [plan["strategy"] for plan in plans] == [
        "eindecomp",
        "eindecomp-paper",
        "sqrt",
        "replicate",
    ]
    wanted = {
        "ranks",
        "strategy",
        "certificate",
        "digest",
        "words_predicted",
        "bytes_predicted",
        "bytes_peak_predicted",
        "paper_cost",
        "seconds_planning",
        "vertices",
    }
    for plan in plans:
        assert wanted <= set(plan) and f"\n{plan['strategy']} " in done.stdout


# ---- flags ---------------------------------------------------------------------------------------


def test_run_is_the_default_command(folder):
    short, long = (run(folder, *words, "jobs/softmax.toml") for words in ((), ("run",)))
    assert summaries(short.stdout) == summaries(long.stdout) != {}


def test_set_replaces_sizes_and_those_computed_from_them(folder):
    done = run(folder, "check", "jobs/chain.toml", "--set", "s=100", "--set", "skew=10")
    assert "sizes    s=100  skew=10  thin=10  long=1000" in done.stdout.split("\n")


def test_dtype_is_that_of_generated_inputs(folder):
    done = run(folder, "jobs/softmax.toml", "--dtype", "float64")
    assert summaries(done.stdout)["Y"][0] == "float64"


@pytest.mark.parametrize("command", [["run"], ["check"], ["plan", "-n", "4"]])
def test_quiet(command, folder):
    done = run(folder, *command, "jobs/softmax.toml", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["-h"], ["run", "--help"], ["check", "--help"], ["plan", "--help"]]
)
def test_help(arguments, folder):
    done = run(folder, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: einmpi")


def test_help_shows_commands_and_examples_that_work(folder):
    text = run(folder, "--help").stdout
    for command in ("run", "check", "plan"):
        assert re.search(rf"^ +{command} +\w", text, re.MULTILINE)
    for job in re.findall(r"jobs/\w+\.toml", text):
        assert (folder / job).is_file()


def test_outputs_go_to_files(folder):
    (folder / "job.toml").write_text(
        'program = "Z[i] = 2 * X[i]"\n'
        'inputs.X = { shape = [4], random = "arange" }\n'
        'outputs.Z = "out.h5:/group/Z"\n'
    )
    done = run(folder, "job.toml")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("  Z  float64 4  norm 7.48331  min 0  max 6  → out.h5:/group/Z\n")
    (folder / "again.toml").write_text('program = "Y[i] = Z[i]"\ninputs.Z = "out.h5:/group/Z"\n')
    assert run(folder, "again.toml").stdout.endswith("  Y  float64 4  norm 7.48331  min 0  max 6\n")
    assert sorted(os.listdir(folder)) == ["again.toml", "job.toml", "jobs", "out.h5"]


# ---- bad input -----------------------------------------------------------------------------------

TITLE = 'title = "t"\n'
BAD_JOBS = {
    "not TOML": (
        "a = 1\nb = = 2\n",
        "bad.toml:2:5: this is not TOML: …; expected KEY = VALUE and [TABLE] lines",
    ),
    "no program": (
        TITLE,
        'bad.toml: there is no program; expected program = "NAME[labels] = expression"',
    ),
    "unknown key": (
        TITLE + 'program = "Z = 1"\n[plan]\nmemroy = 3\n',
        "bad.toml:4:1: unknown key 'memroy' in plan; expected one of strategy, memory, machine, "
        "recompute (did you mean memory?)",
    ),
    "unknown table": (
        TITLE + 'program = "Z = 1"\n[sise]\ns = 3\n',
        "bad.toml:3:2: unknown key 'sise'; expected one of title, dtype, program, sizes, "
        "parameters, inputs, outputs, plan, run, roles, formats, loop, train (did you mean sizes?)",
    ),
    "syntax": (
        TITLE + 'program = """\nY[i:3] = i\n  Z[i] = Y[i\n"""\n',
        "bad.toml:4:11: syntax error: '[' was never closed; "
        "expected one statement a line: NAME[labels] = expression",
    ),
    "unknown tensor": (
        TITLE + 'program = "Y[i:3] = i; Z[i] = Q[i]"\n',
        "bad.toml:2:31: unknown tensor 'Q'; expected Y",
    ),
    "label left over": (
        TITLE + "program = '''\nY[i:3,j:3] = i\n\nZ[i] = Y[i,j]\n'''\n",
        "bad.toml:5:12: label j is neither in the output Z[i] nor aggregated; "
        "expected j in the output, or one of sum, prod, max, min, any, all over j",
    ),
    "no such input file": (
        TITLE + 'program = "Z[i] = X[i]"\n[inputs]\nX = "none.h5:/X"\n',
        "bad.toml:4:1: there is no file none.h5; expected an HDF5 file; "
        "paths are relative to the job file",
    ),
    "dtype of an input": (
        TITLE
        + 'program = "Z[i:3] = X[i]"\n[inputs]\n'
        + 'X = { shape = [3], random = "ones", dtype = "uint7" }\n',
        "bad.toml:4:37: unknown dtype 'uint7'; expected one of …",
    ),
}


@pytest.mark.parametrize("command", ["run", "check"])
@pytest.mark.parametrize("name", BAD_JOBS)
def test_a_bad_job_is_one_line(name, command, folder):
    text, message = BAD_JOBS[name]
    (folder / "bad.toml").write_text(text)
    assert_refused(run(folder, command, "bad.toml"), message)


CHAIN = "jobs/chain.toml"
SIZES = "expected one of s, skew, thin, long"
BAD_ARGUMENTS = {
    "nothing": ([], "einmpi: the following arguments are required: COMMAND; see einmpi --help"),
    "no job": (
        ["check"],
        "einmpi: the following arguments are required: JOB.toml; see einmpi check --help",
    ),
    "unknown flag": (
        ["check", CHAIN, "--fast"],
        "einmpi: unrecognized arguments: --fast; see einmpi check --help",
    ),
    "unknown command": (
        ["rum", CHAIN],
        "einmpi: unknown command 'rum'; expected one of run, check, plan, verify, sbatch, "
        "simulate, new, llama, examples, doctor, calibrate, completion, help (did you mean run?)",
    ),
    "no ranks": (
        ["plan", CHAIN],
        "einmpi: the following arguments are required: -n/-np/--ranks; see einmpi plan --help",
    ),
    "too many ranks": (
        ["plan", CHAIN, "-n", "1048577"],
        "ranks: 1048577 ranks requested; expected an integer from 1 to 1048576",
    ),
    "missing file": (
        ["jobs/none.toml"],
        "jobs/none.toml: there is no such file; expected a job file in TOML",
    ),
    "a folder": (["check", "jobs"], "jobs: this is a folder; expected a job file in TOML"),
    "set without a number": (
        [CHAIN, "--set", "s"],
        "--set s: '' is no number and no file; expected NAME=NUMBER or NAME=FILE",
    ),
    "set to a word": (
        [CHAIN, "--set", "s=ten"],
        "--set s=ten: 'ten' is no number and no file; expected NAME=NUMBER or NAME=FILE",
    ),
    "set to two signs": (
        [CHAIN, "--set", "s=--5"],
        "--set s=--5: '--5' is no number and no file; expected NAME=NUMBER or NAME=FILE",
    ),
    "set to half": (
        [CHAIN, "--set", "s=1.5"],
        "jobs/chain.toml:…: size s is set to 1.5; expected an integer from 1 to …",
    ),
    "set nothing": (
        [CHAIN, "--set", "=5"],
        f"jobs/chain.toml: there is no size or parameter '' to set; {SIZES}",
    ),
    "set unknown": (
        [CHAIN, "--set", "S=5"],
        f"jobs/chain.toml: there is no size or parameter 'S' to set; {SIZES} (did you mean s?)",
    ),
    "set zero": (
        ["check", CHAIN, "--set", "s=0"],
        "jobs/chain.toml:10:1: size s is set to 0; "
        "expected an integer from 1 to 2**39 = 549755813888",
    ),
    "a computed size becomes zero": (
        [CHAIN, "--set", "skew=1000"],
        "jobs/chain.toml:12:1: size thin is 0; expected an integer from 1 to 2**39 = 549755813888",
    ),
    "dtype": (
        ["check", CHAIN, "--dtype", "double"],
        "jobs/chain.toml: unknown dtype 'double'; expected one of …",
    ),
    "too large": (
        [CHAIN, "--set", "s=1000000"],
        "jobs/chain.toml: this needs … GiB on this machine; expected at most the … GiB it has; "
        "use smaller sizes, more machines, or a memory limit",
    ),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments_are_one_line(name, folder):
    arguments, message = BAD_ARGUMENTS[name]
    assert_refused(run(folder, *arguments), message)


def test_a_failed_run_is_one_line_and_status_1(folder):
    (folder / "job.toml").write_text(
        'program = "Z[i] = X[int64(X[i])]"\n'
        'inputs.X = { shape = [4], random = "uniform", low = 7, high = 8 }\n'
    )
    done = run(folder, "job.toml")
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr == "job.toml:1:12: Z: an index from 7 to 7 is out of range; expected 0 to 3\n"
    )


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_computed(folder):
    (folder / "job.toml").write_text(
        'program = "Z[i] = X[int64(X[i])]"\n'
        'inputs.X = { shape = [4], random = "uniform", low = 7, high = 8 }\n'
        'outputs.Z = "none/out.h5:/Z"\n'
    )
    assert_refused(
        run(folder, "job.toml"),
        "job.toml:3:9: there is no folder for none/out.h5; expected a folder that exists",
    )


def test_debug_shows_the_traceback(folder):
    done = process(folder, "jobs/none.toml", EINMPI_DEBUG="1")
    assert done.returncode != 0 and done.stdout == ""
    assert done.stderr.startswith("Traceback")
    assert done.stderr.strip().endswith(
        "InputError: jobs/none.toml: there is no such file; expected a job file in TOML"
    )


# ---- under mpirun --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.mpirun
@needs_mpirun
def test_four_ranks_print_one_summary(folder):
    done = run_mpi(4, ["-m", "einmpi", "jobs/chain.toml"], cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    alone = run(folder, "jobs/chain.toml")
    assert summaries(done.stdout) == summaries(alone.stdout) != {}
    # What was moved, what of it was shared, and the result.
    assert len(without_times(done.stdout)) == 2 + len(without_times(alone.stdout)) == 3
    assert re.search(r"^  5\.3 MiB of it shared inside nodes, .*planned\)$", done.stdout, re.M)
    assert re.search(
        r"^  moved 10\.5 MiB \(as planned\), 2\.6 MiB to the busiest rank; peak memory ",
        done.stdout,
        re.M,
    )


@pytest.mark.slow
@pytest.mark.mpirun
@needs_mpirun
@pytest.mark.parametrize("name", ["not TOML", "unknown key", "label left over"])
def test_four_ranks_refuse_a_bad_job_with_one_line(name, folder):
    text, message = BAD_JOBS[name]
    (folder / "bad.toml").write_text(text)
    done = run_mpi(4, ["-m", "einmpi", "bad.toml"], cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    pattern = re.escape(message).replace("…", ".*")
    assert sum(re.fullmatch(pattern, line) is not None for line in lines) == 1, done.stderr
    assert (
        OPEN_MPI or len(lines) == 1
    )  # Open MPI's mpirun adds a block of its own, before or after it


def test_an_error_nobody_foresaw_is_one_line_and_status_1() -> None:
    """A stand-in for a bug: the planner is made to fail."""
    script = (
        "import sys, einmpi.api\n"
        "def broken(*args, **options): raise ZeroDivisionError('two\\nlines')\n"
        "einmpi.api.plan = broken\n"
        "from einmpi.cli.main import main\n"
        "sys.exit(main(['plan', 'jobs/chain.toml', '-n', '4']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    expected = "einmpi: error: ZeroDivisionError: two lines; EINMPI_DEBUG=1 shows the traceback\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", expected)


@pytest.mark.parametrize("words", [["-n", "2"], ["-n2"], ["-n=2"], ["--ranks", "2"], ["--ranks=2"]])
def test_ranks_do_not_see_how_many_they_are(words):
    assert make_parser().parse_args(["run", "a.toml", *words]).ranks == 2
    assert _without_ranks(["run", "a.toml", *words, "--set", "n=2"]) == [
        "run",
        "a.toml",
        "--set",
        "n=2",
    ]


def test_flags_are_not_cut_short(capfd):
    """This process and its ranks would both take --rank for --ranks."""
    assert main(["run", "a.toml", "--rank", "2"]) == 2
    assert "unrecognized arguments: --rank 2" in capfd.readouterr().err


OUTPUT_JOB = """
program = "Z[i,k] = sum(A[i,j] * A[k,j])"
inputs.A = { shape = [20, 30], random = "normal", seed = 1 }
outputs.Z = "z.h5:/Z"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, closed",
    [
        ("1", ">&-"),
        ("1", "2>&-"),
        pytest.param("2", ">&- 2>&- <&-", marks=[pytest.mark.mpirun, needs_mpirun]),
    ],
)
def test_closed_streams(tmp_path, ranks, closed):
    """Nothing is printed into the files that would get their numbers."""
    (tmp_path / "job.toml").write_text(OUTPUT_JOB)
    words = [sys.executable, "-m", "einmpi", "run", "job.toml", "-n", ranks]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *words],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) == (closed == "2>&-")
    with h5py.File(tmp_path / "z.h5") as file:
        assert file["Z"].shape == (20, 20)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["check", "a\x1b[31mb\u202e.toml"],
            "a\\x1b[31mb\\u202e.toml: there is no such file; expected a job file in TOML\n",
        ),
        (
            ["check", "job.toml", "a\x7f"],
            "einmpi: unrecognized arguments: a\\x7f; see einmpi check --help\n",
        ),
    ],
)
def test_names_do_not_control_the_terminal(tmp_path, arguments, line):
    """Escape codes in the name of a file are shown, not obeyed."""
    assert run(tmp_path, *arguments).stderr == line


def test_compare_where_no_strategy_applies(tmp_path):
    job = "program = 'Z[i,j] = X[i,j]'\ninputs.X = { shape = [4, 4], random = 'ones', parts = [2] }"
    (tmp_path / "job.toml").write_text(job)
    done = run(tmp_path, "plan", "job.toml", "-n", "2", "--compare")
    alone = run(tmp_path, "plan", "job.toml", "-n", "2")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", alone.stderr)


def test_a_long_message_keeps_what_is_expected(tmp_path):
    job = f"program = 'Z[i] = X[i]'\ninputs.X = {{ shape = ['{'x' * 1000}'], random = 'ones' }}"
    (tmp_path / "job.toml").write_text(job)
    line = run(tmp_path, "check", "job.toml").stderr
    assert line.count("\n") == 1 and "…; expected " in line


def test_an_empty_name(tmp_path):
    line = "'': there is no such file; expected a job file in TOML\n"
    assert run(tmp_path, "check", "").stderr == line


# ---- what happens once ---------------------------------------------------------------------------


@pytest.mark.slow
def test_first_uses_are_not_billed_to_the_run(folder):
    """Compiling takes seconds, the kernel itself milliseconds."""
    words = ["jobs/distances.toml", "--set", "rows=600", "--set", "columns=600", "--summary"]
    done = process(folder, *words, "--json", "first.json", EINMPI_CACHE_DIR=str(folder / "cache"))
    assert (done.returncode, done.stderr) == (0, "")
    line = done.stdout.split("\n")[1]
    found = re.fullmatch(r"  startup: 2 kernels compiled (\d+\.\d\d) s, generators .* s", line)
    first = json.loads((folder / "first.json").read_text())
    assert f"{first['startup']['seconds_kernels']:.2f}" == found[1]
    assert first["startup"]["kernels_compiled"] == 2
    parts = first["startup"]["seconds_kernels"] + first["startup"]["seconds_generators"]
    assert first["seconds"]["startup"] == pytest.approx(parts)
    computing = sum(vertex["seconds_kernel"] for vertex in first["vertices"])
    assert computing <= first["seconds"]["run"] * 1.01
    assert first["seconds"]["run"] < first["startup"]["seconds_kernels"] / 2
    phases = ("plan", "load", "run", "store", "startup")
    assert sum(first["seconds"][phase] for phase in phases) <= first["seconds"]["total"] * 1.01


def test_json_says_what_ran(folder):
    done = run(folder, "jobs/chain.toml", "--set", "s=60", "--json", "-")
    data = json.loads(done.stdout)
    assert (data["title"], data["job"]) == ("Matrix chain", "jobs/chain.toml")
    assert data["sizes"]["s"] == 60
    assert data["versions"]["einmpi"] == einmpi.__version__
    assert data["versions"]["numpy"] == np.__version__
    assert data["threads"] >= 1 and data["backend"] == "numpy" and data["blas"]
    results = einmpi.reference(einmpi.load(ROOT / "jobs/chain.toml", s=60))["Z"]
    assert data["outputs"]["Z"]["min"] == pytest.approx(results.min())
    assert data["outputs"]["Z"]["max"] == pytest.approx(results.max())


def test_json_has_no_infinity_and_no_nan(folder):
    (folder / "odd.toml").write_text('program = "A[i:2] = i / 0; B[i:2] = i - 0.5j; C[i:0] = i"\n')
    data = json.loads(run(folder, "odd.toml", "--json", "-").stdout)
    for name in "ABC":
        assert (data["outputs"][name]["min"], data["outputs"][name]["max"]) == (None, None), name


def test_the_report_names_job_date_sizes_and_host(folder):
    assert run(folder, "plan", "jobs/chain.toml", "-n", "4", "--report", "r.html").returncode == 0
    text = (folder / "r.html").read_text()
    details = dict(re.findall(r"<dt>(\w+)</dt><dd>(.*?)</dd>", text))
    assert list(details) == ["job", "date", "host", "sizes"]
    assert details["job"] == "jobs/chain.toml"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", details["date"])
    assert details["sizes"].startswith("s=480")
