"""A small slice of the fault sweep, and what the sweep itself must see."""

import numpy as np
import pytest

from tests.soak import faults, fuzz

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Return a function that sweeps one kind of fault."""
    folder = tmp_path_factory.mktemp("faults") / "case"
    fuzz.clean_environment()
    fuzz.import_everything()
    references = faults.reference_outputs(folder)

    def run(action, scenario="run", launcher=faults.run_in_fork, rank=0, stride=7):
        sweep = faults.Sweep(folder, scenario, "test", launcher, rank, action, stride)
        sweep.run(*references)
        return sweep

    return run


@pytest.mark.parametrize("action", ["full disk", "stop", "removed output", "replaced output"])
def test_one_rank(swept, action):
    sweep = swept(action)
    assert sum(sweep.results.values()) >= 5
    assert not sweep.problems


def test_checkpoints(swept):
    sweep = swept("stop and kill", "checkpoint", stride=31)
    assert sum(sweep.results.values()) >= 3
    assert not sweep.problems


@pytest.mark.mpirun
@pytest.mark.skipif(not fuzz.MPIRUN.exists(), reason="no mpirun beside the interpreter")
@pytest.mark.parametrize("launcher", [faults.under_mpirun, faults.under_own_launcher])
def test_two_ranks(swept, launcher):
    sweep = swept("full disk", launcher=launcher(2), rank=1, stride=20)
    assert sum(sweep.results.values()) >= 2
    assert not sweep.problems


def test_a_run_that_loses_its_data_is_seen(swept, monkeypatch):
    """The sweep is no test if it accepts a file that is neither old nor new."""
    read = faults.read_outputs

    def read_damaged(folder):
        found = read(folder)
        return faults.Outputs(np.full((8, 8), 7.0).tobytes(), found.m, found.keeps, found.second)

    monkeypatch.setattr(faults, "read_outputs", read_damaged)
    sweep = swept("kill", stride=30)
    assert sweep.problems and "neither old nor new" in sweep.problems[0]
