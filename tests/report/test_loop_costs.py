"""Loops: what a step and what all steps cost, the same numbers in JSON, as text and on the page."""

import re

import pytest

import einmpi
from einmpi.checkpoint.resume import LoopCheckpoints
from einmpi.cli.help import make_parser
from einmpi.cli.run import run_job
from einmpi.comm.threads import run_threads
from einmpi.errors import EinmpiError
from einmpi.report.html import page
from einmpi.units import show_bytes

ONCE = """
program = '''
y[i] = sum(B[i,j] * x[j]) + sum(A[j,k] * A[k,i])
change = sum(abs(y[i] - x[i]))
'''
[sizes]
n = 12
[inputs]
A = { shape = ["n", "n"], random = "uniform", seed = 1 }
B = { shape = ["n", "n"], random = "uniform", seed = 2 }
x = { shape = ["n"], random = "ones" }
[loop]
steps = 30
carry = { x = "y" }
until = "step >= 4"
"""

SEVERAL = """
sizes = { n = 12, m = 8 }
[inputs]
A = { shape = ["n", "n"], random = "uniform", seed = 1 }
X = { shape = ["n", "m"], random = "uniform", seed = 2 }
Z = { shape = ["m", "m"], random = "ones" }
[[loop]]
program = "Y[i,k] = sum(A[i,j] * X[j,k]) / n"
steps = 3
carry = { X = "Y" }
[[loop]]
program = "W[k,l] = sum(X[i,k] * X[i,m]) / n + sum(Z[k,m] * Z[m,l]) / m; least = min(W[k,l])"
steps = 9
carry = { Z = "W" }
until = "step >= 4"
"""

TRAINED = """
program = "p[i] = sum(X[i,j] * w[j]); loss = mean((p[i] - y[i])**2)"
[inputs]
X = { shape = [20, 4], random = "uniform", seed = 1, batch = 5 }
y = { shape = [20], random = "uniform", seed = 2, batch = 5 }
w = { shape = [4], random = "zeros" }
[train]
loss = "loss"
parameters = ["w"]
optimizer = "adam"
[loop]
epochs = 2
[train.validation]
every = 3
[train.validation.inputs]
X = { shape = [10, 4], random = "uniform", seed = 3 }
y = { shape = [10], random = "uniform", seed = 4 }
"""


def reported(folder, ranks, nodes, *words):
    """Return the report of a run on thread ranks, and the figures of its page."""
    options = make_parser().parse_args(["run", str(folder / "job.toml"), "--quiet", *words])
    report = run_threads(ranks, lambda comm: run_job(options, comm), nodes=nodes)[0]
    shown = page(report.plan, measured=report.as_json())
    return report, re.search('<div class="figures">.*', shown)[0]


def check(report, figures):
    """All ways to show a run agree with what was counted while it ran."""
    data = report.as_json()
    text = str(report)
    assert data["bytes_predicted"] == data["bytes_moved"] > 0
    assert data["bytes_between_predicted"] == data["bytes_between"]
    assert data["bytes_peak_predicted"] >= data["bytes_peak"]
    assert f"moved {show_bytes(data['bytes_moved'])} (as planned)" in text
    assert '<span class="good">as planned</span>' in figures and "bad" not in figures
    assert f"{show_bytes(data['bytes_peak_predicted'])} planned" in figures
    assert f"(planned {show_bytes(data['bytes_peak_predicted'])})" in text
    if report.plan.nodes > 1:
        between = show_bytes(data["bytes_between"])
        assert f"{between} of it between the 2 nodes (as planned" in text
        assert f"between the 2 nodes; {between} planned" in figures
    rate = data["flops"] / data["seconds"]["run"] / 1e9
    assert f"{rate:.3g} Gop/s" in figures
    in_all = flops = 0
    for loop, plan in zip(data.get("loops") or [data["loop"]], report.plan.loops, strict=True):
        steps = loop["steps"] - loop["steps_before"]
        in_all += loop["bytes_once"] + steps * loop["bytes_a_step"] + loop["bytes_validation"]
        flops += steps * loop["flops_a_step"]
        assert loop["flops_a_step"] == plan.graph.operations()
        assert f"{show_bytes(loop['bytes_a_step'])} a step" in text
        assert f"{show_bytes(loop['bytes_a_step'])} a step" in figures
    assert in_all == data["bytes_predicted"] and flops <= data["flops"]
    return data


@pytest.mark.sampled(5)
@pytest.mark.parametrize("ranks, nodes", [(2, 1), (4, 2), (3, 2)])
@pytest.mark.parametrize("job", [ONCE, SEVERAL, TRAINED], ids=["once", "several", "trained"])
def test_all_steps_cost_what_was_planned(tmp_path, job, ranks, nodes):
    (tmp_path / "job.toml").write_text(job)
    data = check(*reported(tmp_path, ranks, nodes))
    if job is ONCE:
        loop = data["loop"]
        assert loop["steps"] == 5 and loop["bytes_once"] > 0
        # The vector sum(A·A) is computed once: n² products and sums twice, and no more than that.
        once = data["flops"] - 5 * loop["flops_a_step"]
        assert 2 * 12 * 12 <= once <= 2 * 2 * 12**3 + 12
    if job is TRAINED:
        assert data["loop"]["bytes_validation"] > 0


def test_a_resumed_loop_counts_its_own_steps(tmp_path, monkeypatch):
    (tmp_path / "job.toml").write_text(ONCE)
    words = ["--checkpoint", str(tmp_path / "saved"), "--every", "2 steps"]
    save = LoopCheckpoints.save

    def save_and_stop(checkpoints, *arguments):
        save(checkpoints, *arguments)
        raise EinmpiError("stopped")

    with monkeypatch.context() as patch, pytest.raises(EinmpiError, match="stopped"):
        patch.setattr(LoopCheckpoints, "save", save_and_stop)
        reported(tmp_path, 2, 1, *words)
    data = check(*reported(tmp_path, 2, 1, *words, "--resume"))
    assert (data["loop"]["steps"], data["loop"]["steps_before"]) == (5, 2)


@pytest.mark.parametrize("job", [ONCE, SEVERAL, TRAINED], ids=["once", "several", "trained"])
def test_a_plan_costs_what_all_steps_move(tmp_path, job):
    (tmp_path / "job.toml").write_text(re.sub("until.*", "", job))
    report, _ = reported(tmp_path, 3, 1)
    plan = einmpi.plan(report.job, 3)
    assert plan.cost_in_all == report.planned
    assert plan.peak_in_all == report.peak_planned
    figures = re.search('<div class="figures">.*', page(plan))[0]
    assert f"<b>{show_bytes(report.totals.received)}</b>" in figures
    assert f"{show_bytes(plan.bytes_predicted)} a step" in figures
