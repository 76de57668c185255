"""Schedules that are launched as CUDA graphs, on the stand-in for CuPy: which calls are captured,
when they are captured again, and that nothing else changes."""

import weakref
from dataclasses import replace

import fake_cupy
import numpy as np
import pytest
from distributed import assert_close
from graph_programs import captured_steps, program_of
from hypothesis import given, settings
from hypothesis import strategies as st
from run_cases import JOBS, cases

import einmpi
from einmpi.comm.base import ALONE
from einmpi.comm.threads import run_threads
from einmpi.compiled.gpu_inputs import DeviceInputs
from einmpi.kernels.cuda import driver
from einmpi.process.environment import GRAPHS_VARIABLE
from einmpi.runtime.gpu import graphs as gpu_graphs
from einmpi.runtime.gpu.graphs import ArenaLayout, GraphProgram, Place, aligned
from einmpi.runtime.program import Program

CASES = cases()
LAYERS = """
H[i,k] = tanh(sum(X[i,j] * V[j,k]))
G[i,k] = H[i,k] + sum(H[i,l] * W[l,k])
Y[i,k] = sum(G[i,l] * W[l,k]) / 2
loss = sum(Y[i,k]**2)
"""


@pytest.fixture
def pool(monkeypatch):
    """Install a CuPy whose pool uses memory again, so that addresses come again."""
    memory = fake_cupy.new_pool()
    fake_cupy.install(monkeypatch, pool=memory)
    return memory


def on_gpu(job):
    return replace(job, backend="cupy")


def on_device(values):
    array = driver.cupy().empty(values.shape, values.dtype)
    array.values[...] = values
    return array


def numbers(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape)


def layers_job(outputs=("Y", "loss")):
    return einmpi.program(LAYERS, outputs=list(outputs), X=(6, 5), V=(5, 4), W=(4, 4))


def layers_inputs(seed=1):
    return {
        "X": numbers(6, 5, seed=seed),
        "V": numbers(5, 4, seed=seed + 1),
        "W": numbers(4, 4, seed=seed + 2),
    }


def planned_peak(compiled):
    ((plan, _),) = compiled.ready.values()
    return plan.peak


def test_from_the_fourth_run_on_graphs_are_launched(pool):
    step = einmpi.compile(on_gpu(layers_job()), ALONE)
    arrays = layers_inputs()
    expected = einmpi.reference(layers_job(), arrays)
    given = {name: on_device(array) for name, array in arrays.items()}
    launches = []
    for _ in range(6):
        found = step(given)
        assert_close({name: array.gather() for name, array in found.items()}, expected)
        assert step.measured.peak <= planned_peak(step)
        del found
        launches.append(fake_cupy.Graph.launches)
    per_run = launches[-1] - launches[-2]
    assert launches[:3] == [0, 0, per_run] and 1 <= per_run <= 2
    graphs = program_of(step)
    assert captured_steps(graphs) >= 5
    assert all(len(each.by_addresses) <= 2 for each in graphs.graphs.values())


def test_messages_that_travel_during_a_capture_are_not_part_of_the_graph(pool, monkeypatch):
    """A thread takes memory for a message while a graph is captured, and gives it back later."""
    message = 10**6
    capture = GraphProgram._capture
    end_capture = fake_cupy.Stream.end_capture

    def capture_meanwhile(program, run, stretch, address):
        def take_and_end(stream):
            run.buffers.grow(message)
            return end_capture(stream)

        with monkeypatch.context() as patch:
            patch.setattr(fake_cupy.Stream, "end_capture", take_and_end)
            captured = capture(program, run, stretch, address)
        run.buffers.shrink(message)
        return captured

    monkeypatch.setattr(GraphProgram, "_capture", capture_meanwhile)
    step = einmpi.compile(on_gpu(layers_job()), ALONE)
    given = {name: on_device(array) for name, array in layers_inputs().items()}
    peaks = []
    for _ in range(8):
        step(given)
        peaks.append(step.measured.peak)
    assert max(peaks) > message
    assert peaks[-1] == peaks[0]


def test_graphs_compute_with_the_values_of_their_run(pool):
    """Inputs that change in place, at the same addresses."""
    step = einmpi.compile(on_gpu(layers_job(["Y"])), ALONE)
    given = {name: on_device(array) for name, array in layers_inputs().items()}
    for seed in range(6):
        arrays = layers_inputs(seed)
        for name, array in arrays.items():
            given[name].values[...] = array
        found = step(given)["Y"]
        assert_close({"Y": found.gather()}, einmpi.reference(layers_job(["Y"]), arrays))
        del found
    assert fake_cupy.Graph.launches >= 4


def test_results_that_are_kept_are_not_written_over(pool):
    """Outputs belong to the caller: those of later runs have other addresses, and new graphs."""
    step = einmpi.compile(on_gpu(layers_job()), ALONE)
    kept = []
    for seed in range(8):
        arrays = layers_inputs(seed)
        given = {name: on_device(array) for name, array in arrays.items()}
        kept.append((step(given), einmpi.reference(layers_job(), arrays)))
    for found, expected in kept:
        assert_close({name: array.gather() for name, array in found.items()}, expected)
    graphs = program_of(step)
    most = gpu_graphs.MOST_GRAPHS_OF_A_STRETCH
    assert all(len(each.by_addresses) <= most for each in graphs.graphs.values())


def test_addresses_that_never_come_again_end_the_capturing(pool, monkeypatch):
    monkeypatch.setattr(gpu_graphs, "MOST_CAPTURES_WITHOUT_LAUNCH", 3)
    step = einmpi.compile(on_gpu(layers_job()), ALONE)
    arrays = layers_inputs()
    expected = einmpi.reference(layers_job(), arrays)
    kept = []
    for _ in range(9):
        kept.append(step({name: on_device(array) for name, array in arrays.items()}))
        assert_close({name: array.gather() for name, array in kept[-1].items()}, expected)
    assert not program_of(step).can_repeat
    assert fake_cupy.Graph.launches <= 2 * 4


def test_results_that_alternate_use_two_graphs(pool):
    step = einmpi.compile(on_gpu(layers_job()), ALONE)
    arrays = layers_inputs()
    given = {name: on_device(array) for name, array in arrays.items()}
    found = None
    for _ in range(12):
        found = step(given)  # the results of the run before are there until now
    assert_close(
        {name: array.gather() for name, array in found.items()},
        einmpi.reference(layers_job(), arrays),
    )
    graphs = program_of(step)
    assert graphs.can_repeat
    assert {len(each.by_addresses) for each in graphs.graphs.values()} <= {0, 1, 2}


def test_graphs_keep_no_memory_of_the_caller_and_no_block(pool):
    step = einmpi.compile(on_gpu(layers_job()), ALONE)
    given = {name: on_device(array) for name, array in layers_inputs().items()}
    for _ in range(5):
        found = step(given)
    inputs = [weakref.ref(array) for array in given.values()]
    outputs = [weakref.ref(array.local) for array in found.values()]
    del found, given
    assert all(reference() is None for reference in (*inputs, *outputs))
    block = program_of(step).block_bytes
    assert any(size > block for size, blocks in pool.unused.items() if blocks), "it is free now"


def test_a_step_in_place_keeps_its_addresses(pool):
    """Weights that are updated in place: all runs after the third one use one graph."""
    text = "E[i] = sum(A[i,j] * w[j]) - b[i]\nw_next[j] = w[j] - 0.01 * sum(A[i,j] * E[i])"
    job = einmpi.program(text, outputs=["w_next"], A=(8, 5), b=(8,), w=(5,))
    step = einmpi.compile(on_gpu(job), ALONE, carry={"w": "w_next"}, donate=True)
    matrix = numbers(8, 5)
    wanted = np.zeros(5)
    given = {"A": on_device(matrix), "b": on_device(np.ones(8)), "w": on_device(wanted)}
    for _ in range(9):
        given["w"] = step(given)["w_next"]
        wanted = wanted - 0.01 * matrix.T @ (matrix @ wanted - 1)
        np.testing.assert_allclose(given["w"].gather(), wanted, rtol=1e-12)
    graphs = program_of(step)
    assert graphs.can_repeat and fake_cupy.Graph.launches >= 6
    assert sum(len(each.by_addresses) for each in graphs.graphs.values()) <= 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_every_case_again_and_again(name, pool):
    job, arrays = CASES[name]
    expected = einmpi.reference(job, arrays)

    def on_rank(comm):
        step = einmpi.compile(on_gpu(job), comm)
        for _ in range(4):
            found = step(arrays)
            assert_close({name: array.gather() for name, array in found.items()}, expected)
            assert step.measured.peak <= planned_peak(step)
            del found

    for ranks in (1, 3):
        run_threads(ranks, on_rank)


def test_messages_are_not_captured(pool):
    """As many bytes are sent as predicted, with graphs and without."""
    job = on_gpu(einmpi.load(JOBS / "chain.toml", s=24))
    predicted = einmpi.plan(job, 4).bytes_predicted

    def on_rank(comm):
        step = einmpi.compile(job, comm)
        received = []
        for _ in range(5):
            step()
            received.append(step.measured.received)
        return received

    totals = [sum(received) for received in zip(*run_threads(4, on_rank), strict=True)]
    assert totals == [predicted] * 5 and predicted > 0


def test_steps_that_need_the_host_are_left_out(pool):
    """An index that is out of range is reported in every run, also between graphs."""
    text = "H[i] = tanh(x[i]) * 2\nG[i] = H[i] + x[i]\nZ[k] = G[at[k]]\nY[k] = Z[k] + Z[k]"
    job = einmpi.program(
        text + "\nV[k] = Y[k] * Z[k]", outputs=["V"], x=(5,), at=np.zeros(3, np.int64)
    )
    step = einmpi.compile(on_gpu(job), ALONE)
    x = numbers(5)
    for run in range(6):
        at = np.array([run % 5, 4, 0])
        z = (2 * np.tanh(x) + x)[at]
        found = step({"x": on_device(x), "at": on_device(at)})["V"]
        np.testing.assert_allclose(found.gather(), 2 * z * z)
        with pytest.raises(einmpi.EinmpiError):
            step({"x": on_device(x), "at": on_device(np.array([0, 9, 0]))})


STEP = """
s_next[i] = s[i] + sum(A[i,j] * x[j])
t[i] = tanh(s_next[i]) * factor
"""


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("donate", [False, True])
def test_prepared_calls_take_blocks_at_once(ranks, donate, pool, monkeypatch):
    """Inputs on the GPU, on the host and left by the last call; nothing is loaded step by step."""
    loaded = []
    block = DeviceInputs.block

    def counted_block(inputs, step, comm):
        loaded.append(step.tensor)
        return block(inputs, step, comm)

    monkeypatch.setattr(DeviceInputs, "block", counted_block)
    A = numbers(6, 6)
    outputs = ["s_next", "t"]
    job = on_gpu(einmpi.program(STEP, outputs=outputs, A=A, x=(6,), s=(6,), factor=()))

    def on_rank(comm):
        step = einmpi.compile(job, comm, carry={"s": "s_next"}, donate=donate)
        given = on_device(A)
        s, state = np.zeros(6), on_device(np.zeros(6))
        for turn in range(8):
            x = numbers(6, seed=turn)
            if turn == 6:
                loaded.clear()
            found = step({"A": given, "x": x, "s": state, "factor": np.array(float(turn))})
            state = found["s_next"]
            s = s + A @ x
            np.testing.assert_allclose(state.gather(), s, rtol=1e-12)
            np.testing.assert_allclose(found["t"].gather(), np.tanh(s) * turn, rtol=1e-12)
            assert step.measured.peak <= planned_peak(step)
        ((call,),) = [[each for each in step.known_calls.calls.values() if each.prepared]]
        return call.prepared

    assert all(run_threads(ranks, on_rank))
    assert set(loaded) <= ({"s"} if donate else set())


def test_prepared_calls_take_arrays_that_are_stored_otherwise(pool):
    step = einmpi.compile(on_gpu(layers_job()), ALONE)
    arrays = layers_inputs()
    expected = einmpi.reference(layers_job(), arrays)
    given = {name: on_device(array) for name, array in arrays.items()}
    for turn in range(8):
        if turn == 6:
            given["X"] = fake_cupy.ndarray(np.asfortranarray(arrays["X"]))
            assert not given["X"].flags.c_contiguous
        found = step(given)
        assert_close({name: array.gather() for name, array in found.items()}, expected)


def test_too_little_memory_for_the_block(pool):
    step = einmpi.compile(on_gpu(layers_job()), ALONE)
    arrays = layers_inputs()
    expected = einmpi.reference(layers_job(), arrays)
    given = {name: on_device(array) for name, array in arrays.items()}
    for run in range(5):
        if run == 2:
            pool.limit = 4096
        found = step(given)
        assert_close({name: array.gather() for name, array in found.items()}, expected)
    assert not program_of(step).can_repeat and fake_cupy.Graph.launches == 0


def test_what_cannot_be_captured_is_launched(pool, monkeypatch):
    def fails(stream):
        raise fake_cupy.CUDARuntimeError("no captures here")

    monkeypatch.setattr(fake_cupy.Stream, "begin_capture", fails)
    step = einmpi.compile(on_gpu(layers_job()), ALONE)
    arrays = layers_inputs()
    expected = einmpi.reference(layers_job(), arrays)
    for _ in range(5):
        found = step({name: on_device(array) for name, array in arrays.items()})
        assert_close({name: array.gather() for name, array in found.items()}, expected)
    assert not program_of(step).can_repeat and fake_cupy.Graph.launches == 0


def test_graphs_can_be_turned_off(pool, monkeypatch):
    monkeypatch.setenv(GRAPHS_VARIABLE, "off")
    step = einmpi.compile(on_gpu(layers_job()), ALONE)
    for _ in range(5):
        step(layers_inputs())
    assert type(program_of(step)) is Program and fake_cupy.Graph.launches == 0
    assert step.work.text.endswith(", no CUDA graphs")
    monkeypatch.setenv(GRAPHS_VARIABLE, "never")
    with pytest.raises(einmpi.InputError, match="expected one of on, off"):
        einmpi.compile(on_gpu(layers_job()), ALONE)


def test_chains_are_captured(pool):
    """Attention as one chain of kernels, which is computed block by block."""
    text = "T[h,s,t] = sum(Q[s,h,d] * K[t,h,d])\nY[s,h,d] = sum(softmax[t](T[h,s,t]) * V[t,h,d])"
    shapes = dict.fromkeys("QKV", (24, 2, 4))
    job = einmpi.program(text, outputs=["Y"], **shapes)
    arrays = {name: numbers(*shape, seed=ord(name)) for name, shape in shapes.items()}
    expected = einmpi.reference(job, arrays)
    step = einmpi.compile(on_gpu(job), ALONE)
    given = {name: on_device(array) for name, array in arrays.items()}
    for _ in range(5):
        found = step(given)["Y"]
        assert_close({"Y": found.gather()}, expected)
        assert step.measured.peak <= planned_peak(step)
        del found
    assert fake_cupy.Graph.launches >= 2


def test_a_loop_launches_graphs(pool):
    job = einmpi.load(JOBS / "power.toml", n=24)
    expected = einmpi.reference(job)["x"]
    result = einmpi.loop(on_gpu(job), comm=ALONE)
    np.testing.assert_allclose(result.outputs["x"].gather(), expected, rtol=0, atol=1e-9)
    assert fake_cupy.Graph.launches >= result.steps - 6


# ---- the block ----------------------------------------------------------------------------------


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 7)), max_size=40))
def test_places_in_use_never_overlap(wishes):
    """Each wish is a size, and how many allocations later it is released."""
    layout = ArenaLayout()
    in_use = []
    for number, (nbytes, lifetime) in enumerate(wishes):
        for entry in [entry for entry in in_use if entry[0] <= number]:
            in_use.remove(entry)
            layout.release(entry[1])
        place = Place(nbytes, layout.take(nbytes))
        assert place.offset + aligned(nbytes) <= layout.total
        for _, other in in_use:
            before = other.offset + aligned(other.nbytes) <= place.offset
            assert before or place.offset + aligned(nbytes) <= other.offset
        in_use.append((number + 1 + lifetime, place))
    for _, place in in_use:
        layout.release(place)
    assert layout.gaps == ([(0, layout.total)] if wishes else [])
    assert layout.in_use == 0 and layout.most_in_use <= layout.total
