"""CUDA graphs and inputs in host memory on a real GPU; skipped where there is none."""

from dataclasses import replace

import numpy as np
import pytest
from graph_programs import captured_steps, program_of
from paper_llama import llama_program, llama_training_program
from paths import ROOT
from run_cases import cases
from runtime.gpu.test_gpu import NO_GPU

import einmpi
from einmpi.comm.base import ALONE
from einmpi.kernels.cuda import driver
from einmpi.models.config import llama_1
from einmpi.process.environment import GRAPHS_VARIABLE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU)]
CASES = cases()
MODEL = llama_1(width=256, layers=3, heads=4, hidden=512)


def on_gpu(job):
    return replace(job, backend="cupy")


def small_numbers(shapes, dtype):
    rng = np.random.default_rng(5)
    found = {}
    for name, shape in shapes.items():
        found[name] = (rng.standard_normal(shape) / shape[0] ** 0.5).astype(dtype)
    return found


def compiled_twice(monkeypatch, job, **options):
    """Return the job compiled without graphs, and with them."""
    monkeypatch.setenv(GRAPHS_VARIABLE, "off")
    without = einmpi.compile(on_gpu(job), ALONE, **options)
    monkeypatch.setenv(GRAPHS_VARIABLE, "on")
    return without, einmpi.compile(on_gpu(job), ALONE, **options)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_graphs_give_the_same_bits(dtype, monkeypatch):
    text, shapes, _ = llama_program(MODEL, 2, 64)
    job = einmpi.program(text, outputs=["x_3"], dtype=dtype, **shapes)
    without, step = compiled_twice(monkeypatch, job)
    cupy = driver.cupy()
    given = {name: cupy.asarray(array) for name, array in small_numbers(shapes, dtype).items()}
    expected = without(given)["x_3"].gather()
    assert np.isfinite(expected).all()
    for _ in range(6):
        found = step(given)["x_3"]
        np.testing.assert_array_equal(found.gather(), expected)
        assert step.measured.peak <= next(iter(step.ready.values()))[0].peak
        del found
    graphs = program_of(step)
    assert graphs.can_repeat and captured_steps(graphs) > 30


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_training_step_in_place(dtype, monkeypatch):
    text, shapes, carry = llama_training_program(MODEL, 2, 32)
    job = einmpi.program(text, outputs=list(carry.values()), dtype=dtype, **shapes)
    without, step = compiled_twice(monkeypatch, job, carry=carry, donate=True)
    cupy = driver.cupy()
    values = small_numbers(shapes, dtype)
    found = []
    for compiled in (without, step):
        given = {name: cupy.asarray(array) for name, array in values.items()}
        for _ in range(6):
            outputs = compiled(given)
            for name, output in carry.items():
                given[name] = outputs[output]
        found.append({name: given[name].gather() for name in carry})
    for name in carry:
        np.testing.assert_array_equal(found[0][name], found[1][name])
    graphs = program_of(step)
    assert graphs.can_repeat and captured_steps(graphs) > 60
    assert max(len(each.by_addresses) for each in graphs.graphs.values()) <= 2


@pytest.mark.parametrize("name", CASES)
def test_every_case_again_and_again(name, monkeypatch):
    job, arrays = CASES[name]
    without, step = compiled_twice(monkeypatch, job)
    expected = {key: array.gather() for key, array in without(arrays).items()}
    for _ in range(4):
        for key, array in step(arrays).items():
            np.testing.assert_array_equal(array.gather(), expected[key])


def test_a_loop(monkeypatch):
    job = einmpi.load(ROOT / "jobs" / "power.toml", n=200)
    found = []
    for setting in ("off", "on"):
        monkeypatch.setenv(GRAPHS_VARIABLE, setting)
        found.append(einmpi.loop(on_gpu(job), comm=ALONE).outputs["x"].gather())
    np.testing.assert_array_equal(*found)


def test_weights_in_host_memory(monkeypatch):
    """The same bits as with the weights on the GPU, in a fraction of the memory."""
    model = llama_1(width=1024, layers=6, heads=8, hidden=2048)
    text, shapes, names = llama_program(model, 1, 64)
    job = einmpi.program(text, outputs=["x_6"], dtype="float16", **shapes)
    arrays = small_numbers(shapes, "float16")
    expected = einmpi.compile(on_gpu(job), ALONE)(arrays)["x_6"].gather()
    weights = sum(arrays[name].nbytes for name in names)
    limit = einmpi.plan(job, 1).peak + weights // 3
    step = einmpi.compile(replace(on_gpu(job), memory=limit), ALONE)
    for _ in range(4):
        found = step(arrays)["x_6"]
        np.testing.assert_array_equal(found.gather(), expected)
        assert step.measured.peak <= limit
    in_place = step.backend.copies.in_place
    assert in_place.nbytes > weights / 2
    before = in_place.nbytes
    del arrays["w1_1"]
    assert in_place.nbytes < before
