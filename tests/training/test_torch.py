"""Optimisers against torch: losses and parameters of 20 steps in float64."""

import json

import numpy as np
import pytest
from paths import ROOT
from training_jobs import NAMES, PROGRAM, run_on

import einmpi

GOLDEN = json.loads((ROOT / "tests/training/golden/torch.json").read_text())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", GOLDEN["cases"])
def test_equal_to_torch(tmp_path, case):
    wanted = GOLDEN["cases"][case]
    arrays = {"X": GOLDEN["X"], "y": GOLDEN["y"], **dict(zip(NAMES, GOLDEN["first"], strict=True))}
    inputs = ""
    for name, values in arrays.items():
        np.save(tmp_path / f"{name}.npy", np.array(values))
        batch = ", batch = 8" if name in "Xy" else ""
        inputs += f'{name} = {{ file = "{name}.npy"{batch} }}\n'
    options = "".join(f", {key} = {value}" for key, value in wanted["options"].items())
    (tmp_path / "job.toml").write_text(
        f"program = '''{PROGRAM}'''\n[inputs]\n{inputs}\n[loop]\nsteps = {len(wanted['losses'])}\n"
        'record = ["loss"]\n[train]\nloss = "loss"\nparameters = ["W1", "b1", "w2"]\n'
        f'optimizer = {{ name = "{wanted["name"]}", rate = {GOLDEN["rate"]}{options} }}\n'
    )
    found, outputs, _ = run_on(1, einmpi.load(tmp_path / "job.toml"))
    np.testing.assert_allclose(found.history["loss"], wanted["losses"], rtol=1e-12)
    for name, values in zip(NAMES, wanted["last"], strict=True):
        np.testing.assert_allclose(outputs[name], values, rtol=1e-12, atol=1e-14)
