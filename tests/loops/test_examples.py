"""The example jobs with a loop, on several ranks and by the reference, against numpy."""

import numpy as np
import pytest
from paths import ROOT

import einmpi
from einmpi.comm.threads import run_threads
from einmpi.files.load import load_array


def power(A, x):
    values, vectors = np.linalg.eigh(A + A.T)
    assert abs(values[-1]) > abs(values[0])
    return {"x": np.abs(vectors[:, -1])}


def solve(A, x, r, p):
    matrix = A @ A.T / len(A) + 0.1 * np.eye(len(A))
    return {"x": np.linalg.solve(matrix, r)}


BY_NUMPY = {"power": power, "solve": solve}
LOOPED = []
for path in sorted((ROOT / "jobs").glob("*.toml")):
    if einmpi.load(path).loop is not None:
        LOOPED.append(path.stem)


def test_every_loop_has_its_own_check():
    assert sorted(BY_NUMPY) == LOOPED


@pytest.mark.parametrize("name", LOOPED)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_loop_equals_numpy(name, ranks):
    job = einmpi.load(ROOT / "jobs" / f"{name}.toml")
    arrays = {spec.name: load_array(spec, spec.shape, spec.dtype) for spec in job.inputs}
    wanted = BY_NUMPY[name](**arrays)

    def on_rank(comm):
        result = einmpi.loop(job, comm=comm)
        assert result.is_done
        return {key: result.outputs[key].gather() for key in wanted}

    reference = einmpi.reference(job)
    for found in run_threads(ranks, on_rank):
        for key, array in wanted.items():
            # The loops end at 1e-10 and 1e-8, and no eigenvalue of the solved matrix is below 0.1.
            np.testing.assert_allclose(found[key], array, rtol=0, atol=1e-7)
            np.testing.assert_allclose(found[key], reference[key], rtol=0, atol=1e-7)
