"""The paper's experiment 2: the job with sparse features against numpy, and its plans."""

import re
import shutil
from dataclasses import replace

import h5py
import numpy as np
import pytest
from loops.test_batches import SPECIAL, alone
from paths import ROOT
from step_kinds import computed_as

import einmpi
from einmpi.api import options_of
from einmpi.comm.threads import run_threads
from einmpi.files.reading import load_array
from einmpi.loops.arrival import plan_loop
from einmpi.loops.running import LoopRun

STEPS = 4
WEIGHTS = ("W1", "b1", "W2", "b2")
FULL = {"samples": 1_186_239, "k": 72, "f": 597_540, "h": 8192, "l": 14_588}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The example jobs, and the file that one of them writes for the other."""
    copied = tmp_path_factory.mktemp("experiment2") / "jobs"
    shutil.copytree(ROOT / "jobs", copied, ignore=shutil.ignore_patterns("*.h5"))
    made = einmpi.run(einmpi.load(copied / "baskets.toml"))
    with h5py.File(copied / "baskets.h5", "w") as file:
        for name in ("index", "value", "y"):
            file[name] = made[name].gather()
    return copied


def job_in_order(folder):
    """The job for a few steps, with batches in the order of the file."""
    job = einmpi.load(folder / "ffnn.toml")
    batches = replace(job.loop.batches, shuffle=None, epochs=None)
    return replace(job, loop=replace(job.loop, steps=STEPS, batches=batches))


def by_numpy(job, folder):
    """Train with whole gradients in float64; return the losses and the weights."""
    with h5py.File(folder / "baskets.h5") as file:
        data = {name: file[name][:] for name in ("index", "value", "y")}
    weights = {}
    for spec in job.inputs:
        if spec.name in WEIGHTS:
            weights[spec.name] = load_array(spec, spec.shape, spec.dtype).astype(float)
    rate = 3.0
    batch = job.sizes["b"]
    losses = []
    for step in range(STEPS):
        rows = slice(step * batch, (step + 1) * batch)
        index, value, y = data["index"][rows], data["value"][rows].astype(float), data["y"][rows]
        X = np.zeros((batch, len(weights["W1"])))
        np.add.at(X, (np.arange(batch)[:, None], index), value)
        A = X @ weights["W1"] + weights["b1"]
        H = np.maximum(A, 0)
        Z = H @ weights["W2"] + weights["b2"]
        powers = np.exp(Z - Z.max(axis=1, keepdims=True))
        P = powers / powers.sum(axis=1, keepdims=True)
        losses.append(-np.log(P[np.arange(batch), y]).mean())
        P[np.arange(batch), y] -= 1
        dZ = P / batch
        dA = np.where(A > 0, dZ @ weights["W2"].T, 0)
        weights["W1"] -= rate * (X.T @ dA)
        weights["b1"] -= rate * dA.sum(axis=0)
        weights["W2"] -= rate * (H.T @ dZ)
        weights["b2"] -= rate * dZ.sum(axis=0)
    return losses, weights


RANKS = [1, 2, 3]
for number in (4, 6):
    RANKS.append(pytest.param(number, marks=pytest.mark.slow))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", RANKS)
def test_the_job_equals_numpy(folder, ranks):
    job = job_in_order(folder)
    losses, weights = by_numpy(job, folder)

    def on_rank(comm):
        received = []
        run = LoopRun(job, comm, options_of(job))
        run.on_row = lambda number, row: received.append(comm.received)
        run.prepare({})
        result = run.run()
        outputs = {name: result.outputs[name].gather() for name in WEIGHTS}
        steps = np.diff(received)
        return steps, result.history["loss"], outputs, run.plan, run.schedule

    results = run_threads(ranks, on_rank)
    _, history, outputs, plan, schedule = results[0]
    assert set(sum(steps for steps, *_ in results)) == {plan.bytes_predicted}
    assert any(computed_as(step) == "scattered" for step in schedule.steps)
    assert set(plan.in_place) == set(WEIGHTS)
    np.testing.assert_allclose(history, losses, rtol=2e-6)
    for name in WEIGHTS:
        np.testing.assert_allclose(outputs[name], weights[name], rtol=2e-4, atol=2e-6)


def full_size_plan(ranks, batch, strategy="eindecomp"):
    job = einmpi.load(ROOT / "jobs" / "ffnn.toml", b=batch, **FULL)
    return plan_loop(job, ranks, options_of(job, strategy=strategy), {})


def test_full_size_on_four_ranks():
    """At most 2.2 times a rank's share of the weights; it is 1.01 times."""
    plan = full_size_plan(4, 128)
    share = sum(plan.graph[name].nbytes for name in WEIGHTS) / 4
    assert plan.words_predicted == 5_887_884
    assert share <= plan.peak < 1.05 * share


def table():
    """The table of the page: for a number of ranks, its cells as lists of numbers."""
    page = (ROOT / "docs" / "experiment2.md").read_text()
    rows = {}
    for line in page.split("<!-- words of experiment 2 -->")[1].split("\n\n")[1].splitlines()[2:]:
        ranks, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        numbers = []
        for cell in cells:
            numbers.append([float(text) for text in re.findall(r"[\d.]+", cell.replace(",", ""))])
        rows[int(ranks)] = numbers
    return rows


CASES = []
for ranks in (4, 8, 16, 64):
    marks = () if ranks == 4 else pytest.mark.slow
    CASES.append(pytest.param(ranks, marks=marks))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", CASES)
def test_words_of_the_page(ranks):
    sparse, _, model, data, _, _ = table()[ranks]
    for number, batch in enumerate((128, 512)):
        plan = full_size_plan(ranks, batch)
        assert round(plan.words_predicted / 1e6, 1) == sparse[number]
        share = sum(plan.graph[name].nbytes for name in WEIGHTS) / ranks
        assert plan.peak < (1.1 if batch == 128 else 1.2) * share
        plan = full_size_plan(ranks, batch, "model")
        assert round(plan.words_predicted / 1e6, 1) == model[number]
    assert round(full_size_plan(ranks, 128, "data").words_predicted / 1e6) == data[0]


def test_columns_of_the_page_by_formula():
    """Those of dense batches are in tests/test_picks.py; data parallel is 2 (p - 1) |W|."""
    weights = 597_540 * 8192 + 8192 + 8192 * 14_588 + 14_588
    for ranks, (_, dense, _, _, by_hand, _) in table().items():
        assert by_hand == [round(2 * (ranks - 1) * weights / 1e6)]
        words = {4: 12_123_782, 8: 24_707_982, 16: 48_954_270, 64: 172_946_942}[ranks]
        assert dense[0] == round(words / 1e6, 1)


@pytest.mark.slow
def test_training_goes_on_from_a_checkpoint(folder, tmp_path):
    """A killed run that is resumed gives the bits of one that was never stopped."""
    jobs = shutil.copytree(folder, tmp_path / "jobs")
    whole = alone(jobs, "-m", "einmpi", "ffnn.toml", "--quiet")
    assert whole.returncode == 0, whole.stderr
    with h5py.File(jobs / "ffnn.h5") as file:
        wanted = {name: file[name][:] for name in WEIGHTS}
    (jobs / "ffnn.h5").unlink()
    kill = SPECIAL.format(step=31, rank=0, action="os.kill(os.getpid(), signal.SIGKILL)")
    (jobs / "killed.py").write_text(kill)
    flags = ["ffnn.toml", "--checkpoint", "saved", "--every", "7steps", "--resume"]
    assert alone(jobs, "killed.py", *flags).returncode == -9
    resumed = alone(jobs, "-m", "einmpi", *flags)
    assert resumed.returncode == 0, resumed.stderr
    assert "continues after step 27" in resumed.stderr
    with h5py.File(jobs / "ffnn.h5") as file:
        for name in WEIGHTS:
            assert file[name][:].tobytes() == wanted[name].tobytes()
