"""`einmpi plan --memory-curve`: the table, the picture and the JSON."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

import einmpi
from einmpi.cli.main import main

JOB = """
program = "Y[i,k] = sum(X[i,j] * W[j,k])\\nZ[i,l] = sum(Y[i,k] * V[k,l])"
inputs.X = { shape = [256, 64], random = "normal" }
inputs.W = { shape = [64, 512], random = "normal", resident = true }
inputs.V = { shape = [512, 64], random = "normal", resident = true }
"""


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
    for point in points[:2]:
        plan = einmpi.plan(job, 4, memory=point["memory"])
        assert (plan.words_predicted, plan.peak) == (point["words"], point["peak"])
    with pytest.raises(einmpi.InputError):
        einmpi.plan(job, 4, memory=limits[0] - 1)


def test_a_curve_takes_no_limit(tmp_path, capsys):
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    assert main(["plan", str(path), "-n", "4", "--memory-curve", "--memory", "1MiB"]) == 2
    assert "--memory-curve: --memory is given as well" in capsys.readouterr().err
    assert main(["plan", str(path), "-n", "4", "--memory-curve", "--report", "page.html"]) == 2
    assert "--memory-curve: --report is given as well" in capsys.readouterr().err
    assert main(["plan", str(path), "-n", "4", "--memory-curve", "curve.jpg"]) == 2
    assert "unknown picture format" in capsys.readouterr().err
