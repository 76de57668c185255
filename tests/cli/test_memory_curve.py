"""`einmpi plan --memory-curve`: the table, the picture and the JSON."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from xml.etree import ElementTree

import pytest

import einmpi
from einmpi.cli.main import main
from einmpi.planner.plan import Cost
from einmpi.planner.planning import TooLittleMemory
from einmpi.planner.text.compare import (
    CLOSEST_LIMITS,
    LARGEST_STEP,
    MOST_POINTS,
    memory_curve,
)

JOB = """
program = "Y[i,k] = sum(X[i,j] * W[j,k])\\nZ[i,l] = sum(Y[i,k] * V[k,l])"
inputs.X = { shape = [256, 64], random = "normal" }
inputs.W = { shape = [64, 512], random = "normal", resident = true }
inputs.V = { shape = [512, 64], random = "normal", resident = true }
"""


@pytest.mark.slow
def test_the_curve_is_printed_drawn_and_written(tmp_path, capsys):
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    picture = tmp_path / "curve.svg"
    assert main(["plan", str(path), "-n", "4", "--memory-curve", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["memory", "limit", "words", "bytes"]
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")

    assert main(["plan", str(path), "-n", "4", "--memory-curve", "--json", "-"]) == 0
    points = json.loads(capsys.readouterr().out)
    assert len(points) == len(lines) - 1
    limits = [point["memory"] for point in points]
    assert limits == sorted(limits)
    in_memory = [point["bytes"] for point in points if not point["spilled"]]
    assert in_memory == sorted(in_memory, reverse=True)
    job = einmpi.load(path)
    free = einmpi.plan(job, 4)
    assert (points[-1]["words"], points[-1]["memory"]) == (free.words_predicted, free.peak)
    # Each limit was planned for with searches that were kept, and is planned for here without.
    for point in points:
        plan = einmpi.plan(job, 4, memory=point["memory"])
        assert (plan.words_predicted, plan.peak) == (point["words"], point["peak"])
    with pytest.raises(einmpi.InputError):
        einmpi.plan(job, 4, memory=limits[0] - 1)


def test_a_curve_takes_no_limit(tmp_path, capsys):
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    assert main(["plan", str(path), "-n", "4", "--memory-curve", "--memory", "1MiB"]) == 2
    said = "--memory-curve: it cannot be combined with --memory; expected only one of them\n"
    assert capsys.readouterr().err == said
    assert main(["plan", str(path), "-n", "4", "--memory-curve", "curve.jpg"]) == 2
    assert "unknown picture format" in capsys.readouterr().err


def test_there_are_more_points_where_the_words_fall_steeply():
    """Steps are divided until they are small or their limits are close."""
    falling = [(1000, 800), (2000, 400), (3000, 380), (5000, 100), (9000, 0)]
    asked = []

    @dataclass(frozen=True)
    class Planned:
        cost_in_all: Cost
        peak_in_all: int
        spilled: int = 0
        loops: tuple = ()

    def plan_with(limit):
        asked.append(limit)
        if limit is not None and limit < 1000:
            raise TooLittleMemory(4, limit, 1000)
        words = [words for least, words in falling if limit is None or limit >= least][-1]
        return Planned(Cost(words, 8 * words), limit or 9000)

    points = memory_curve(plan_with)
    assert len(points) <= MOST_POINTS
    assert [point.limit for point in points] == sorted(set(asked[2:]))
    for point, following in itertools.pairwise(points):
        is_close = following.limit <= CLOSEST_LIMITS * point.limit
        assert point.words <= LARGEST_STEP * following.words or is_close


def test_all_loops_are_counted(tmp_path, capsys):
    loop = """[[loop]]
program = "Y[i,k] = sum(X[i,j] * X[j,k]) / 64"
carry = { X = "Y" }
steps = """
    start = 'inputs.X = { shape = [64, 64], random = "uniform" }\n'
    (tmp_path / "job.toml").write_text(f"{start}{loop}2\n{loop}3\n")
    job = str(tmp_path / "job.toml")
    assert main(["plan", job, "-n", "4", "--memory-curve", "--json", "-"]) == 0
    last = json.loads(capsys.readouterr().out)[-1]
    one, two = einmpi.plan(einmpi.load(job), 4).loops
    assert last["words"] == 2 * one.words_predicted + two.all_steps.words
    assert two.all_steps.words >= 3 * two.words_predicted > 0
    assert last["memory"] == max(one.peak, two.peak) >= last["peak"]
