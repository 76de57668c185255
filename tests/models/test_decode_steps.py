"""A steady step of decoding: what it copies, allocates and computes, counted exactly."""

import tracemalloc
from collections import Counter

import numpy as np

import einmpi
from einmpi.kernels.prepared import address_of
from einmpi.models.config import Config
from einmpi.models.programs import AT, FREQUENCIES, LOGITS, TOKENS, decode_program
from einmpi.schedule.steps import Load

CONFIG = Config(
    "llama", width=256, layers=3, heads=4, groups=2, head_width=128, hidden=512, vocabulary=300
)
LENGTH = 256
# 9 products, 2 sums with what was there, 2 rows of caches, 4 of norms, 2 of rotary positions, 5 of
# softmax, 1 of silu.
KERNELS_A_LAYER = 25


def given_inputs(program, batch):
    random = np.random.default_rng(0)
    found = {}
    for name, weight in program.weights.items():
        found[name] = random.standard_normal(weight.shape, "float32") * np.float32(0.1)
    for name in program.carry:
        shape, dtype = program.inputs[name]
        found[name] = np.zeros(shape, dtype)
    found[FREQUENCIES] = CONFIG.rope.inverse_frequencies(CONFIG.head_width)
    found[TOKENS] = np.zeros(batch, int)
    found[AT] = np.zeros(batch, int)
    return found


def test_a_steady_step():
    """Weights and caches are read where they are; a step allocates less than one of them."""
    batch = 2
    program = decode_program(CONFIG, batch, LENGTH, "float32")
    inputs = given_inputs(program, batch)
    job = einmpi.program(program.text, outputs=list(program.outputs), **inputs)
    step = einmpi.compile(job, carry=program.carry, donate=True)

    def decode(caches, position):
        places = np.array([position, position // 2])
        made = step({**inputs, **caches, TOKENS: places % 300, AT: places})
        return {old: made[new] for old, new in program.carry.items()}, made[LOGITS].local

    least = min(array.nbytes for array in inputs.values() if array.ndim > 1)
    caches, _ = decode({}, 0)
    places = {}
    growth = []
    tracemalloc.start()
    try:
        for position in range(1, 16):
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            caches, _ = decode(caches, position)
            grown = tracemalloc.get_traced_memory()[1] - before
            if position == 6:  # calls are prepared by now
                places = {name: address_of(cache.local) for name, cache in caches.items()}
            if position > 6:
                growth.append(grown)
    finally:
        tracemalloc.stop()
    # Small arrays are allocated for a few steps at once.
    assert np.median(growth) < least / 4
    assert max(growth) < sum(cache.local.nbytes for cache in caches.values()) / 4
    for name, cache in caches.items():
        assert address_of(cache.local) == places[name]
    known = [call for call in step.known_calls.calls.values() if call.prepared is not None]
    assert len(known) == 1


def test_kernels_of_a_layer():
    """Every layer has the same few kernels, and every input is loaded once, where it is."""
    program = decode_program(CONFIG, 1, LENGTH, "float32")
    inputs = given_inputs(program, 1)
    job = einmpi.program(program.text, outputs=list(program.outputs), **inputs)
    step = einmpi.compile(job, carry=program.carry, donate=True)
    step(inputs)
    ((_, schedule),) = step.ready.values()
    kernels = Counter()
    for planned in schedule.steps:
        for kernel in planned.kernels:
            parts = kernel.vertex.split("_")
            is_of_layer = len(parts) > 1 and parts[0] != "nf"  # the norm at the end
            if is_of_layer and int(parts[1]) >= 1:
                kernels[parts[1]] += 1
    assert kernels["1"] == kernels["2"] == kernels["3"] == KERNELS_A_LAYER
    loads = [planned for planned in schedule.steps if isinstance(planned, Load)]
    assert len(loads) == len(inputs)
    assert all(load.kept for load in loads)
    assert not any(kernel.select for planned in schedule.steps for kernel in planned.kernels)
