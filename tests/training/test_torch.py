"""Optimisers against torch: losses and parameters of 20 steps in float64.

Golden numbers of torch, and torch itself where it is installed.
"""

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


@pytest.mark.parametrize(
    ("name", "in_torch", "options"),
    [
        ("rmsprop", "RMSprop", {}),
        ("rmsprop", "RMSprop", {"weight_decay": 0.1}),
        ("adafactor", "Adafactor", {}),
        ("adafactor", "Adafactor", {"weight_decay": 0.1}),
        ("muon", "Muon", {}),
    ],
)
def test_equal_to_installed_torch(name, in_torch, options):
    """torch orthogonalises in bfloat16, with 8 bits: its Muon agrees to some hundredths a step."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch.optim, in_torch):
        pytest.skip(f"this torch has no {in_torch}")
    rng = np.random.default_rng(4)
    wanted, first = rng.normal(size=(2, 6, 4))
    W = torch.tensor(first, requires_grad=True)
    optimizer = getattr(torch.optim, in_torch)([W], lr=0.02, **options)
    steps = 10
    for _ in range(steps):
        optimizer.zero_grad()
        ((W - torch.tensor(wanted)) ** 4).sum().backward()
        optimizer.step()
    decay = {"decay": options["weight_decay"]} if options else {}
    found = einmpi.train(
        einmpi.program("loss = sum((W[i,j] - T[i,j])**4)", W=(6, 4), T=(6, 4)),
        {"W": first, "T": wanted},
        loss="loss",
        parameters=["W"],
        optimizer={"name": name, "rate": 0.02, **decay},
        steps=steps,
    )
    atol = 0.02 * steps * 0.05 if name == "muon" else 1e-12
    np.testing.assert_allclose(found.outputs["W"].gather(), W.detach().numpy(), atol=atol)
