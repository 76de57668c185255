"""Programs of checkpoints on a real GPU; skipped where there is none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from model_reference import reference_logits
from runtime.gpu.test_gpu import NO_GPU
from tiny_checkpoints import FOLDER, NAMES, golden, job_of, weights

import einmpi
from einmpi.comm.base import ALONE
from einmpi.models.programs import decode_program, prefill_program

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU)]


@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str) -> None:
    config, expected = golden(name)
    batch, sequence = expected["tokens"].shape
    program = prefill_program(config, batch, sequence, config.dtype, every=True)
    job = replace(job_of(program), backend="cupy")
    inputs = {**weights(config, FOLDER / name, config.dtype), "tokens": expected["tokens"]}
    logits = einmpi.run(job, inputs)["logits"].gather()
    if config.dtype == "float32":
        np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)
        return
    exact = reference_logits(FOLDER / name, expected["tokens"])
    own_error = np.sqrt(np.mean((logits.astype(np.float64) - exact) ** 2))
    error = np.sqrt(np.mean((expected["logits"] - exact) ** 2))
    assert own_error <= 1.2 * error  # float32 totals, where a CPU has float64


@pytest.mark.parametrize("name", ["llama3_tied", "mistral", "qwen3"])
def test_steps_equal_longer_prompts(name: str) -> None:
    config, expected = golden(name)
    tokens = expected["tokens"]
    batch, length = tokens.shape
    prompt = length // 2
    inputs = weights(config, FOLDER / name, "float32")
    program = prefill_program(config, batch, prompt, "float32", caches=length)
    prefill = replace(job_of(program), backend="cupy")
    results = einmpi.run(prefill, {**inputs, "tokens": tokens[:, :prompt]})
    decode = decode_program(config, batch, length, "float32")
    job = replace(job_of(decode), backend="cupy")
    step = einmpi.compile(job, ALONE, carry=decode.carry, donate=True)
    caches = {cache: results[cache] for cache in decode.carry}
    for position in range(prompt, length):
        at = np.full(batch, position)
        results = step({**inputs, **caches, "tokens": tokens[:, position], "at": at})
        caches = {old: results[new] for old, new in decode.carry.items()}
        logits = results["logits"].gather()
        np.testing.assert_allclose(logits, expected["logits"][:, position], rtol=0, atol=1e-4)
