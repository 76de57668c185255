"""A small slice of the fault sweep, and what the sweep itself must see."""

import os
import subprocess
import sys
import uuid
from threading import Thread

import numpy as np
import pytest

from tests.soak import faults, faults_bench, faults_oracle, fuzz
from tests.soak.faults_files import Outputs

pytestmark = pytest.mark.slow


def sweep(*words):
    """Run the command line of the sweep, which mounts file systems where only it sees them."""
    environment = {**os.environ, "PYTHONPATH": str(fuzz.ROOT)}
    command = [sys.executable, "-m", "tests.soak", "faults", *words]
    done = subprocess.run(command, cwd=fuzz.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_one_rank():
    said = sweep("--ranks", "1", "--scenario", "run", "--faults", "20", "--seed", "5")
    assert "20 have hit, 0 with a wrong end" in said


def test_checkpoints():
    actions = ("kill", "replaced checkpoint", "removed checkpoint", "read-only mount")
    chosen = [word for action in actions for word in ("--action", action)]
    said = sweep("--ranks", "1", "--scenario", "resume", "--faults", "10", *chosen)
    assert "10 have hit, 0 with a wrong end" in said


@pytest.mark.mpirun
@pytest.mark.skipif(not fuzz.MPIRUN.exists(), reason="no mpirun beside the interpreter")
@pytest.mark.parametrize("options", [(), ("--new-interpreters",)])
def test_two_ranks(options):
    said = sweep("--ranks", "2", "--scenario", "run", "--faults", "3", *options)
    assert " 0 with a wrong end" in said


@pytest.fixture(scope="module")
def bench():
    with faults.bench(has_mounts=False) as made:
        yield made


def test_every_fault_is_there_and_every_part_of_a_run_is_reached(bench):
    for scenario in faults.SCENARIOS:
        way = faults.Way(scenario, faults.ALONE, 1, 0)
        phases = {phase for phase, _ in bench.steps_of(way)}
        expected = {"load", "run", "store", "start and end"}
        if scenario != "run":
            expected.add("checkpoint")
        assert phases == expected
        if scenario != "run":
            bench.impossible.clear()
            possible = faults.possible_actions(bench, way, list(faults.ACTIONS))
            assert possible == list(faults.ACTIONS)


def test_ranks_that_are_forks_are_found_until_they_end(bench):
    """A rank that was killed may hold its locks for a moment after mpirun has returned."""
    way = faults.Way("run", faults.ALONE, 1, 0)
    bench.prepare(way.scenario, bench.memory)
    fault = bench.fault(way, "kill", faults_bench.NO_STEP, bench.memory)
    mark = str(uuid.uuid4())
    seen = []
    run = Thread(target=bench.run, args=(way, bench.memory, fault, mark))
    run.start()
    while run.is_alive():
        seen += faults_oracle._marked_processes(mark)
    run.join()
    bench.take_note()
    assert len(set(seen)) == 1
    assert faults_oracle._are_gone(mark)


def test_a_run_that_loses_its_data_is_seen(bench, monkeypatch):
    """The sweep is no test if it accepts a file that is neither old nor new."""
    read = faults_oracle.read_outputs

    def read_damaged(folder):
        found = read(folder)
        return Outputs(np.full((8, 8), 7.0).tobytes(), found.m, found.keeps, found.second)

    monkeypatch.setattr(faults_oracle, "read_outputs", read_damaged)
    result = faults.inject(bench, faults.Way("run", faults.ALONE, 1, 0), "kill", 30)
    assert "neither old nor new" in result.problem


def test_a_run_that_says_nothing_is_seen(bench, monkeypatch):
    run = bench.run

    def run_silently(*arguments):
        outcome = run(*arguments)
        return type(outcome)(1, "", "", 0.0, 0)

    monkeypatch.setattr(bench, "run", run_silently)
    result = faults.inject(bench, faults.Way("run", faults.ALONE, 1, 0), "removed input", 10)
    assert "status 1 with 0 lines" in result.problem
