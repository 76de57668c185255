"""The programs of the paper's LLaMA: a step of training lowers the loss by right gradients."""

from __future__ import annotations

import numpy as np
from distributed import run_on_threads
from paper_llama import llama_training_program

import einmpi
from einmpi.models.config import llama_1

SMALL = llama_1(width=8, layers=2, heads=2, hidden=12)


def inputs_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(4)
    return {name: rng.normal(size=shape) / 2 for name, shape in shapes.items()}


def test_a_training_step_goes_down_the_gradient():
    rate = 0.05
    text, shapes, carry = llama_training_program(SMALL, batch=2, sequence=3, rate=rate)
    assert len(carry) == 2 * 9 and set(carry) < set(shapes)
    job = einmpi.program(text, outputs=["loss", *carry.values()], **shapes)
    inputs = inputs_of(shapes)
    done = run_on_threads(job, 2, inputs)
    assert done.moved == done.plan.bytes_predicted

    def loss(name: str, values: np.ndarray) -> float:
        return float(einmpi.run(job, {**inputs, name: values})["loss"].gather())

    step = 1e-6
    for name in ("wq_1", "w2_2", "g1_1"):
        place = (1,) * len(shapes[name])
        above = inputs[name].copy()
        above[place] += step
        below = inputs[name].copy()
        below[place] -= step
        slope = (loss(name, above) - loss(name, below)) / (2 * step)
        moved = inputs[name][place] - done.outputs[carry[name]][place]
        np.testing.assert_allclose(moved, rate * slope, rtol=1e-5, atol=1e-10)


def test_the_loss_falls_in_a_loop():
    text, shapes, carry = llama_training_program(SMALL, batch=2, sequence=3, layers=1, rate=0.02)
    job = einmpi.program(text, outputs=["loss", *carry.values()], **shapes)
    result = einmpi.loop(job, inputs_of(shapes), carry=carry, steps=20, record=["loss"])
    losses = result.history["loss"]
    assert losses[-1] < 0.9 * losses[0]
