"""Compiled calls with inputs that look like earlier ones: few messages, and no less care."""

import numpy as np
import pytest
from mpi_helpers import needs_mpirun, run_mpi

import einmpi
from einmpi.comm.threads import run_threads
from einmpi.errors import EinmpiError

A = np.arange(12.0).reshape(4, 3)
B = np.arange(15.0).reshape(3, 5)
PRODUCT = "C[i,k] = sum[j](A[i,j] * B[j,k])"


class Counter:
    """Counts how often the ranks of a communicator ask each other."""

    def __init__(self, comm):
        self.asked = []
        for name in ("same", "lowest", "allgather_text"):
            self.watch(comm, name)

    def watch(self, comm, name):
        ask = getattr(comm, name)

        def counted(argument):
            self.asked.append(name)
            return ask(argument)

        setattr(comm, name, counted)

    def taken(self):
        taken = list(self.asked)
        self.asked.clear()
        return taken


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_known_call_asks_once(ranks):
    def on_rank(comm):
        product = einmpi.compile(einmpi.program(PRODUCT, A=A, B=B), comm)
        product(A=A, B=B)
        counter = Counter(comm)
        for factor in (1, 2):
            found = product(A=factor * A, B=B)["C"]
            assert counter.taken() == ["same"]
            np.testing.assert_array_equal(found.gather(), factor * A @ B)
            counter.taken()

    run_threads(ranks, on_rank)


def test_results_are_known_as_inputs_of_the_next_call():
    def on_rank(comm):
        job = einmpi.program("y[i] = x[i] / 2", x=(6,))
        halve = einmpi.compile(job, comm, carry={"x": "y"})
        value = halve(x=np.arange(6.0))["y"]
        value = halve(x=value)["y"]
        counter = Counter(comm)
        value = halve(x=value)["y"]
        assert counter.taken() == ["same"]
        np.testing.assert_array_equal(value.gather(), np.arange(6.0) / 8)

    run_threads(2, on_rank)


def test_errors_of_values_in_known_calls_are_raised_on_all_ranks():
    def on_rank(comm):
        job = einmpi.program("y[i] = x[at[i]]", x=(6,), at=np.zeros(4, "int64"))
        take = einmpi.compile(job, comm)
        x = einmpi.DistArray.from_global(np.arange(6.0), comm=comm)
        good = np.array([0, 5, 2, 1])
        for at in (good, good, np.array([0, 1, 2, 6]), good, np.array([-1, 1, 2, 3])):
            if at is good:
                np.testing.assert_array_equal(take(x=x, at=at)["y"].gather(), good)
            else:
                with pytest.raises(EinmpiError, match="out of range"):
                    take(x=x, at=at)

    run_threads(3, on_rank)


def test_ranks_whose_inputs_look_different_are_compared():
    """Only the kinds of the inputs have to agree, not their order or how arrays are stored."""

    def on_rank(comm):
        product = einmpi.compile(einmpi.program(PRODUCT, A=A, B=B), comm)
        inputs = {"A": A, "B": B}
        reversed_inputs = {"B": B, "A": A.tolist() if comm.rank else A}
        for _ in range(2):
            product(inputs)
            found = product(reversed_inputs if comm.rank else inputs)["C"]
            np.testing.assert_array_equal(found.gather(), A @ B)
        wrong = {"A": A[:2], "B": B} if comm.rank == 1 else inputs
        with pytest.raises(EinmpiError, match=r"A is float64\[2, 3\]"):
            product(wrong)
        distributed = {"A": einmpi.DistArray.from_global(A, comm=comm), "B": B}
        mixed = distributed if comm.rank == 1 else inputs
        with pytest.raises(EinmpiError, match="all ranks must do the same"):
            product(mixed)
        np.testing.assert_array_equal(product(inputs)["C"].gather(), A @ B)

    run_threads(2, on_rank)


def test_arrays_are_compared_in_known_calls_too(monkeypatch):
    def on_rank(comm):
        product = einmpi.compile(einmpi.program(PRODUCT, A=A, B=B), comm)
        product(A=A, B=B)
        product(A=A, B=B)
        with pytest.raises(EinmpiError, match="B is not the same on rank 0 and on rank 1"):
            product(A=A, B=B + comm.rank)

    monkeypatch.setenv("EINMPI_CHECK", "1")
    run_threads(2, on_rank)


ENDING = """
import numpy as np
import einmpi

double = einmpi.compile(einmpi.program("y[i] = 2 * x[i]", x=(4,)))
for number in range(3):
    y = double(x=np.ones(4))["y"]
if y.comm.rank == 0:
    double(x=np.ones(4))
"""
FAILING = """
import numpy as np
import einmpi
from einmpi.runtime.backend import NumpyBackend

double = einmpi.compile(einmpi.program("y[i] = 2 * x[i]", x=(4,)))
for number in range(3):
    y = double(x=np.ones(4))["y"]

def broken(self, *arguments):
    raise ValueError("a mistake")

if y.comm.rank == 1:
    NumpyBackend.compute_kernel = broken
double(x=np.ones(4))
y.gather()
"""


@needs_mpirun
def test_a_rank_that_ends_before_a_known_call_leaves_nobody_waiting():
    done = run_mpi(2, ENDING, timeout=120)
    assert done.returncode != 0
    assert "rank 1 has ended its program, and others go on" in done.stderr


@needs_mpirun
def test_a_mistake_in_a_known_call_ends_all_ranks_with_one_line():
    done = run_mpi(2, FAILING, timeout=120)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("einmpi: error")]
    assert len(lines) == 1 and "a mistake" in lines[0]
