"""Programs of checkpoints against transformers' logits and greedy tokens, on several ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_checkpoints import FOLDER, NAMES, golden, job_of, weights

import einmpi
from einmpi.comm.threads import run_threads
from einmpi.models.programs import decode_program, prefill_program

SINGLE = [name for name in NAMES if golden(name)[0].dtype == "float32"]
HALF = [name for name in NAMES if golden(name)[0].dtype != "float32"]
RANKS = (1, 2, 3, 4, 6)


@pytest.mark.parametrize("name", SINGLE)
def test_logits_of_every_position(name: str) -> None:
    config, expected = golden(name)
    batch, sequence = expected["tokens"].shape
    program = prefill_program(config, batch, sequence, "float32", every=True)
    given = {**weights(config, FOLDER / name, "float32"), "tokens": expected["tokens"]}
    logits = einmpi.run(job_of(program), given)["logits"].gather()
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)
    np.testing.assert_array_equal(logits.argmax(-1), expected["logits"].argmax(-1))


def generate(comm: Any, name: str, prompt: int, new: int) -> tuple[np.ndarray, int]:
    """Return greedy tokens of one rank, and how many caches were written where they were."""
    config, expected = golden(name)
    tokens = expected["tokens"][:, :prompt]
    batch = len(tokens)
    length = prompt + new
    given = weights(config, FOLDER / name, "float32")
    prefill = prefill_program(config, batch, prompt, "float32", caches=length)
    results = einmpi.compile(job_of(prefill), comm)({**given, "tokens": tokens})
    decode = decode_program(config, batch, length, "float32")
    step = einmpi.compile(job_of(decode), comm, carry=decode.carry, donate=True)
    caches = {cache: results[cache] for cache in decode.carry}
    found = [results["logits"].gather().argmax(-1)]
    for number in range(new - 1):
        at = np.full(batch, prompt + number)
        results = step({**given, **caches, "tokens": found[-1], "at": at})
        caches = {cache: results[output] for cache, output in decode.carry.items()}
        found.append(results["logits"].gather().argmax(-1))
    ((plan, _),) = step.ready.values()
    return np.stack(found, 1), len(plan.in_place)


@pytest.mark.parametrize(
    "name, ranks",
    [
        ("llama3_tied", 1),
        pytest.param("mistral", 1, marks=pytest.mark.slow),
        pytest.param("llama3_tied", 4, marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens(name: str, ranks: int) -> None:
    _, expected = golden(name)
    prompt = expected["tokens"].shape[1]
    for tokens, in_place in run_threads(ranks, lambda comm: generate(comm, name, prompt, 64)):
        assert in_place == 4
        np.testing.assert_array_equal(tokens, expected["greedy"])
