"""Inputs in host memory that do not fit on the GPU, on the stand-in for CuPy: they are pinned where
they are, and copied while kernels run."""

import gc
import threading
import time
from dataclasses import replace

import fake_cupy
import numpy as np
import pytest
from distributed import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from run_cases import cases
from runtime.test_spill import with_files

import einmpi
from einmpi.comm.base import ALONE
from einmpi.comm.threads import run_threads
from einmpi.compiled import gpu_inputs
from einmpi.files.reading import Reading
from einmpi.runtime.gpu import copies as gpu_copies
from einmpi.runtime.gpu import copies as pinned

LAYERS = 6
SIZE = 16


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """Install the stand-in, and take arrays of 1 KiB for large ones."""
    fake_cupy.install(monkeypatch)
    monkeypatch.setattr(gpu_inputs, "MAX_SMALL_BYTES", 2**10)
    monkeypatch.setattr(pinned, "MIN_PINNED_IN_PLACE_BYTES", 2**10)


def layers_job(memory=None):
    lines = []
    shapes = {"x_0": (4, SIZE)}
    for k in range(1, LAYERS + 1):
        lines.append(f"x_{k}[b,j] = tanh(sum(x_{k - 1}[b,i] * w_{k}[i,j]) + c_{k}[j])")
        shapes[f"w_{k}"] = (SIZE, SIZE)
        shapes[f"c_{k}"] = (SIZE,)
    job = einmpi.program("\n".join(lines), outputs=[f"x_{LAYERS}"], **shapes)
    return replace(job, backend="cupy", memory=memory), shapes


def layers_inputs(seed=0):
    rng = np.random.default_rng(seed)
    _, shapes = layers_job()
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def by_numpy(arrays):
    x = arrays["x_0"]
    for k in range(1, LAYERS + 1):
        x = np.tanh(x @ arrays[f"w_{k}"] + arrays[f"c_{k}"])
    return x


MEMORY = 3 * SIZE * SIZE * 8 + 4096  # three of the six matrices


def test_arrays_are_pinned_when_they_are_given_again(monkeypatch):
    step = einmpi.compile(layers_job(MEMORY)[0], ALONE)
    arrays = layers_inputs()
    expected = by_numpy(arrays)
    pinned_after_each = []
    for _ in range(3):
        found = step(arrays)[f"x_{LAYERS}"].gather()
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        pinned_after_each.append(len(fake_cupy._registered))
        assert step.measured.peak <= MEMORY
    assert pinned_after_each == [0, LAYERS, LAYERS]
    del arrays["w_1"], arrays["w_2"]
    gc.collect()
    assert len(fake_cupy._registered) == LAYERS - 2, "memory that is gone is not pinned any more"


def test_copies_of_pinned_arrays_begin_before_the_kernels_that_wait_for_them():
    step = einmpi.compile(layers_job(MEMORY)[0], ALONE)
    arrays = layers_inputs()
    for _ in range(2):
        step(arrays)
    started = []
    storage = gpu_inputs.DeviceInputs
    begin_copies = storage._begin_copies

    def noted(self, load, given, make):
        begin_copies(self, load, given, make)
        if load.tensor in self.copying:
            started.append(load.tensor)

    storage._begin_copies = noted
    try:
        step(arrays)
    finally:
        storage._begin_copies = begin_copies
    begun = [name for name in started if name.startswith("w")]
    assert begun == [f"w_{k}" for k in range(1, LAYERS + 1)]
    _, schedule = next(iter(step.ready.values()))
    first_kernel = next(n for n, found in enumerate(schedule.steps) if found.kernels)
    before = [str(found) for found in schedule.steps[:first_kernel]]
    assert sum(line.startswith("begin     w") for line in before) >= 2


def test_arrays_may_change_as_soon_as_a_call_returns():
    step = einmpi.compile(layers_job(MEMORY)[0], ALONE)
    arrays = layers_inputs()
    for seed in range(4):
        for name, values in layers_inputs(seed).items():
            arrays[name][...] = values
        expected = by_numpy(arrays)
        found = step(arrays)[f"x_{LAYERS}"]
        for array in arrays.values():
            array[...] = np.nan
        np.testing.assert_allclose(found.gather(), expected, rtol=1e-12)


def test_views_foreign_memory_and_other_orders():
    """Views are pinned with the array that owns their memory; other memory is copied."""
    step = einmpi.compile(layers_job(MEMORY)[0], ALONE)
    arrays = layers_inputs()
    expected = by_numpy(arrays)
    whole = np.zeros((2, SIZE, SIZE))
    whole[1] = arrays["w_1"]
    arrays["w_1"] = whole[1]
    arrays["w_2"] = np.asfortranarray(arrays["w_2"])
    arrays["w_3"] = np.frombuffer(arrays["w_3"].tobytes()).reshape(SIZE, SIZE)
    for _ in range(4):
        found = step(arrays)[f"x_{LAYERS}"].gather()
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert whole.ctypes.data in fake_cupy._registered
    assert len(fake_cupy._registered) == LAYERS - 2


def test_memory_that_cannot_be_pinned_is_copied(monkeypatch):
    def refused(*_):
        raise fake_cupy.CUDARuntimeError("not this memory")

    cuda = gpu_copies.driver.cupy().cuda
    monkeypatch.setattr(cuda.runtime, "hostRegister", refused)
    step = einmpi.compile(layers_job(MEMORY)[0], ALONE)
    arrays = layers_inputs()
    for _ in range(3):
        found = step(arrays)[f"x_{LAYERS}"].gather()
        np.testing.assert_allclose(found, by_numpy(arrays), rtol=1e-12)
    assert not fake_cupy._registered


def test_half_of_the_hosts_memory_is_left(monkeypatch):
    monkeypatch.setattr("einmpi.runtime.gpu.backend._physical_bytes", lambda: 2 * 5000)
    step = einmpi.compile(layers_job(MEMORY)[0], ALONE)
    arrays = layers_inputs()
    for _ in range(3):
        found = step(arrays)[f"x_{LAYERS}"].gather()
        np.testing.assert_allclose(found, by_numpy(arrays), rtol=1e-12)
    assert len(fake_cupy._registered) == 2  # of 2 KiB each


@pytest.mark.parametrize("name", ["chain, odd", "four dimensions", "semiring", "gather"])
def test_cases_on_ranks_that_have_parts_of_the_arrays(name):
    job, arrays = cases()[name]
    expected = einmpi.reference(job, arrays)
    memory = einmpi.plan(job, 3).peak

    def on_rank(comm):
        step = einmpi.compile(replace(job, backend="cupy", memory=memory), comm)
        for _ in range(3):
            found = step(arrays)
            assert_close({name: array.gather() for name, array in found.items()}, expected)
            assert step.measured.peak <= memory

    run_threads(3, on_rank)


def test_files_are_read_by_several_threads(tmp_path, monkeypatch):
    names = set()
    read_own_block = Reading._read_own_block

    def noted(reading):
        names.add(threading.current_thread().name)
        time.sleep(0.002)  # so that others have a turn
        read_own_block(reading)

    monkeypatch.setattr(Reading, "_read_own_block", noted)
    arrays = layers_inputs()
    job = with_files(layers_job(MEMORY)[0], arrays, tmp_path)
    step = einmpi.compile(replace(job, backend="cupy", memory=MEMORY), ALONE)
    for _ in range(2):
        found = step()[f"x_{LAYERS}"].gather()
        np.testing.assert_allclose(found, by_numpy(arrays), rtol=1e-12)
        assert step.measured.peak <= MEMORY
    assert len(names - {"MainThread"}) > 1


@settings(max_examples=50)
@given(st.integers(0, 5000), st.integers(1, 9), st.integers(1, 700))
def test_threads_copy_all_of_a_piece(size, threads, share):
    with pytest.MonkeyPatch.context() as patch:
        fake_cupy.install(patch)
        patch.setattr(gpu_copies, "MIN_BYTES_PER_THREAD", share)
        patch.setattr(gpu_copies, "PINNED_BUFFER_BYTES", 1500)
        values = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        copies = gpu_copies.DeviceCopies(threads)
        target = gpu_copies.driver.cupy().empty(size, np.uint8)
        copies.upload(values, target)
        np.testing.assert_array_equal(target.values, values)
