"""`einmpi calibrate`: who measures with whom, that all ranks do the same, and what is written."""

import json

import fake_cupy
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi_helpers import needs_mpirun, run_mpi

import einmpi
from einmpi.cli import calibrate as calibrate_module
from einmpi.cli.calibrate import (
    OTHER,
    PRODUCT,
    ROUNDS,
    Figure,
    MeasuredKernel,
    byte_time,
    calibrate,
    inside_and_between,
    latency,
    measure_figures,
)
from einmpi.cli.help import make_parser
from einmpi.comm.base import ALONE
from einmpi.comm.threads import run_threads
from einmpi.compiled.running import workplace_of
from einmpi.kernels.contraction import recognise_contraction
from einmpi.kernels.cuda.driver import is_device_array
from einmpi.planner.machine import PRODUCTS, read_machine
from einmpi.process.environment import TRANSPORT_VARIABLE
from einmpi.runtime.gpu.backend import TRANSPORTS
from einmpi.runtime.gpu.comm import COMMS_BY_TRANSPORT


def workplace(comm=ALONE):
    return workplace_of(einmpi.program(PRODUCT, A=(1, 1), B=(1, 1)), comm)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20))
def test_groups_are_the_same_for_all_members(nodes):
    for rank in range(len(nodes)):
        inside, between = inside_and_between(nodes, rank)
        assert inside == tuple(other for other, node in enumerate(nodes) if node == nodes[rank])
        assert all(inside_and_between(nodes, other)[1] == between for other in between)
        assert rank in between and len({nodes[other] for other in between}) == len(between)
    # All ranks of the fullest node meet the next one at once.
    assert max(map(nodes.count, nodes)) == len(
        {inside_and_between(nodes, rank)[1] for rank in range(len(nodes))}
    )


def test_ranks_repeat_equally_often():
    """Whichever is quicker: else one would wait for messages that nobody sends."""

    def on_rank(comm):
        calls = []
        length = 1 + 20_000 * comm.rank
        figure = Figure(
            comm, lambda size: lambda: calls.append(np.ones(length).sum()), float, (1, 2), 0.001
        )
        measure_figures([figure])
        return len(calls), figure.seconds

    counts, seconds = zip(*run_threads(3, on_rank), strict=True)
    assert len(set(counts)) == len(set(seconds)) == 1
    assert counts[0] >= ROUNDS * 4 and seconds[0] > 0


class FakeMachine:
    """A clock that only actions move on: by their work, and by what disturbs the machine."""

    def __init__(self, monkeypatch, is_disturbed):
        self.now = 0.0
        self.calls = 0
        self.is_disturbed = is_disturbed  # the number of a call → whether it takes far longer
        monkeypatch.setattr(calibrate_module.time, "perf_counter", lambda: self.now)

    def figure(self, comm, seconds, sizes=(1,), budget=1.0):
        """A figure of an action that takes `seconds` for each unit of its size."""

        def act(size):
            self.now += size * seconds * (20 if self.is_disturbed(self.calls) else 1)
            self.calls += 1

        return Figure(comm, lambda size: lambda: act(size), float, sizes, budget)


def disturbed_figures(monkeypatch, is_disturbed):
    """Return the sizes and figures of a quick kernel that grows, a slow one and a message."""
    machine = FakeMachine(monkeypatch, is_disturbed)

    def on_rank(comm):
        figures = [
            machine.figure(comm, 2.0**-13, sizes=(1, 2, 4, 8, 16, 64, 128, 256)),
            machine.figure(comm, 2.0**-6),
            machine.figure(comm, 2.0**-17, budget=0.25),
        ]
        measure_figures(figures)
        return [(figure.sizes[figure.place], figure.seconds) for figure in figures]

    return run_threads(1, on_rank)[0], machine.calls


def test_one_disturbance_changes_no_figure(monkeypatch):
    """Wherever it begins, and also if it lasts for a whole round or two."""
    expected, calls = disturbed_figures(monkeypatch, lambda call: False)
    assert [seconds for _, seconds in expected] == [2.0**-13, 2.0**-6, 2.0**-17]
    assert expected[0][0] == 128  # 128 units take 16 ms, 64 take 8
    for length in (1, 20, calls // ROUNDS, 2 * calls // ROUNDS):
        for first in range(0, calls, 11):
            disturbed = range(first, first + length)
            found, _ = disturbed_figures(monkeypatch, disturbed.__contains__)
            for (_, seconds), (_, expected_seconds) in zip(found, expected, strict=True):
                assert seconds == expected_seconds, (first, length)


def test_every_fourth_repeat_may_be_slow(monkeypatch):
    expected, _ = disturbed_figures(monkeypatch, lambda call: False)
    found, _ = disturbed_figures(monkeypatch, lambda call: call % 4 == 1)
    assert found == expected


def test_a_machine_that_is_always_slow_is_slow(monkeypatch):
    found, _ = disturbed_figures(monkeypatch, lambda call: True)
    assert [seconds for _, seconds in found] == [20 * 2.0**-13, 20 * 2.0**-6, 20 * 2.0**-17]


@pytest.mark.parametrize("nodes", [[0, 0, 1, 1, 1], [0, 1, 0, 1], [0, 1, 2]])
def test_messages_match(nodes):
    """Threads refuse calls that do not match, also where a rank has nobody to send to."""

    def on_rank(comm):
        place = workplace(comm)
        figures = [
            figure(place, group, 0.01)
            for group in inside_and_between(nodes, comm.rank)
            for figure in (latency, byte_time)
        ]
        measure_figures(figures)
        return [figure.seconds for figure in figures]

    found = run_threads(len(nodes), on_rank)
    assert all(times == found[0] for times in found) and all(time >= 0 for time in found[0])


@pytest.mark.parametrize("dtype", PRODUCTS)
def test_products_are_products(dtype):
    kernel = MeasuredKernel(workplace(), PRODUCT, dtype, {"A": (5, 5), "B": (5, 5)})
    kernel.compute()
    left, right = (array.astype(np.complex128) for array in kernel.operands)
    np.testing.assert_array_equal(kernel.result.astype(np.complex128), left @ right)
    assert kernel.result.dtype == dtype and kernel.result.any()
    assert kernel.step.einsum.operations() == 2 * 5**3


def test_the_other_kernel_is_no_product():
    kernel = MeasuredKernel(workplace(), OTHER, "float64", {"X": (6, 4), "C": (6,)})
    kernel.compute()
    numbers, offsets = kernel.operands
    np.testing.assert_allclose(kernel.result, np.exp(numbers - offsets[:, None]))
    assert recognise_contraction(kernel.step.einsum) is None
    assert kernel.step.einsum.operations() == 2 * 6 * 4


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_messages_and_kernels_of_gpus(transport, monkeypatch, tmp_path):
    """All is measured on arrays of the GPU."""
    fake_cupy.install(monkeypatch, gpus=2, nccl=True)
    monkeypatch.setenv(TRANSPORT_VARIABLE, transport)
    monkeypatch.setattr(calibrate_module, "_LONG_ENOUGH", 1e-9)
    monkeypatch.setattr(calibrate_module, "_EXCHANGES", (2**16,))
    moved = []
    alltoallv = COMMS_BY_TRANSPORT[transport].alltoallv

    def recording(self, group, send, *others):
        moved.append(is_device_array(send))
        alltoallv(self, group, send, *others)

    monkeypatch.setattr(COMMS_BY_TRANSPORT[transport], "alltoallv", recording)
    file = tmp_path / "gpus.toml"
    words = ["calibrate", "--backend", "cupy", "--seconds", "0.01", "--save", str(file)]
    options = make_parser().parse_args(words)
    run_threads(2, lambda comm: calibrate(options, comm))
    machine = read_machine(str(file))
    assert f"1 node × 2 ranks, Paper GPU, messages by {transport}" in machine.source
    assert machine.inside and machine.latency_inside and list(machine.multiply) == list(PRODUCTS)
    assert moved and all(moved)


@pytest.mark.slow
@pytest.mark.mpirun
@needs_mpirun
def test_what_is_saved_is_what_is_printed(tmp_path):
    (tmp_path / "machine.toml").write_text("something else")
    done = run_mpi(
        2, ["-m", "einmpi", "calibrate", "--seconds", "0.1", "--save", "--json", "-"], cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    found, machine = json.loads(done.stdout), read_machine(str(tmp_path / "machine.toml"))
    assert (found["ranks"], found["nodes"], found["threads"], found["between"]) == (2, 1, 1, None)
    assert found["measured"] == machine.source and "1 node × 2 ranks of 1 thread" in machine.source
    assert found["inside"]["latency"] == pytest.approx(machine.latency_inside / 1e9, rel=0.01)
    assert found["inside"]["bandwidth"] == pytest.approx(1e12 / machine.inside, rel=0.01)
    assert list(found["kernels"]) == [*PRODUCTS, "other"] and list(machine.multiply) == list(
        PRODUCTS
    )
    assert found["kernels"]["other"] == pytest.approx(1e18 / machine.element, rel=0.01)
    assert [path.name for path in tmp_path.iterdir()] == ["machine.toml"]


@pytest.mark.slow
@pytest.mark.mpirun
@needs_mpirun
def test_wrong_options_are_said_once(tmp_path):
    """Open MPI's mpirun adds words of its own."""
    for words, line in (
        (["--save", "none/machine.toml"], "--save none/machine.toml: No such file or directory;"),
        (["--seconds", "nan"], "--seconds: nan seconds; expected more than 0 and at most 3600"),
    ):
        done = run_mpi(2, ["-m", "einmpi", "calibrate", *words], cwd=tmp_path)
        assert (done.returncode, done.stdout.count("product"), done.stderr.count(line)) == (2, 0, 1)
