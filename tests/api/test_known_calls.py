"""Compiled calls with inputs that look like earlier ones: few messages, and no less care."""

import gc
from weakref import ref

import numpy as np
import pytest
import scipy.sparse
from counted_comm import watch
from mpi_helpers import needs_mpirun, run_mpi

import einmpi
from einmpi.comm.threads import run_threads
from einmpi.errors import EinmpiError

A = np.arange(12.0).reshape(4, 3)
B = np.arange(15.0).reshape(3, 5)
PRODUCT = "C[i,k] = sum[j](A[i,j] * B[j,k])"


ASKING = ("compare", "lowest")
MOVING = ("alltoallv", "allgatherv", "reduce_scatter", "sendrecv")


class Counter:
    """Counts how often the ranks of a communicator ask each other, or do other calls of it."""

    def __init__(self, comm, names=ASKING):
        self.asked = []
        watch(comm, names, self.asked.append)

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
            assert counter.taken() == ["compare"]
            np.testing.assert_array_equal(found.gather(), factor * A @ B)
            counter.taken()

    run_threads(ranks, on_rank)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_known_call_sends_the_messages_of_its_schedule_and_one_more(ranks):
    def on_rank(comm):
        counter = Counter(comm, (*ASKING, *MOVING))
        job = einmpi.program("y[i] = sum[j](A[i,j] * x[j])\nn = sum(y[i]**2)", A=(6, 6), x=(6,))
        compiled = einmpi.compile(job, comm)
        x = einmpi.DistArray.from_global(np.arange(6.0), comm=comm)
        matrix = np.arange(36.0).reshape(6, 6)
        found = []
        for _ in range(6):
            counter.taken()
            outputs = compiled(A=matrix, x=x)
            calls = counter.taken()
            moved = [name for name in calls if name in MOVING]
            found.append((calls, moved, compiled.measured.received))
            expected = np.sum((matrix @ np.arange(6.0)) ** 2)
            np.testing.assert_allclose(outputs["n"].gather(), expected, rtol=1e-12)
        first_moved = found[0][1]
        assert first_moved
        for calls, moved, received in found[1:]:
            assert calls == ["compare", *first_moved]
            assert moved == first_moved
            assert received == found[0][2]
        ((plan, _),) = compiled.ready.values()
        return received, plan.bytes_predicted

    results = run_threads(ranks, on_rank)
    assert sum(received for received, _ in results) == results[0][1]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_known_job_is_run_with_one_question(ranks):
    def on_rank(comm):
        job = einmpi.program(PRODUCT, A=A, B=B)
        for _ in range(3):
            einmpi.run(job, {"A": A, "B": B}, comm)
            einmpi.run(PRODUCT, comm=comm, A=A, B=B)
        counter = Counter(comm)
        for factor in (1, 2):
            for program in (job, PRODUCT):
                found = einmpi.run(program, {"A": factor * A}, comm, B=B)["C"]
                assert counter.taken() == ["compare"]
                np.testing.assert_array_equal(found.gather(), factor * A @ B)
                counter.taken()

    run_threads(ranks, on_rank)


def test_ranks_that_call_different_programs_are_told_so():
    """Both programs are known, were called equally often, and need no messages."""

    def on_rank(comm):
        double = einmpi.compile(einmpi.program("y[i] = 2 * x[i]", x=(4,)), comm)
        triple = einmpi.compile(einmpi.program("y[i] = 3 * x[i]", x=(4,)), comm)
        x = np.ones(4)
        for _ in range(4):
            double(x=x)
            triple(x=x)
        with pytest.raises(EinmpiError, match="all ranks must do the same"):
            (triple if comm.rank == 1 else double)(x=x)
        with pytest.raises(EinmpiError, match="all ranks must do the same"):
            program = f"y[i] = {comm.rank} * x[i]"
            einmpi.run(einmpi.program(program, x=(4,)), {"x": x}, comm)
        np.testing.assert_array_equal(triple(x=x)["y"].gather(), 3 * x)

    run_threads(3, on_rank)


def test_one_rank_stores_its_inputs_otherwise():
    """What a rank has prepared does not matter to the others: the call stays known."""

    def on_rank(comm):
        product = einmpi.compile(einmpi.program(PRODUCT, A=A, B=B), comm)
        other = {"A": np.asfortranarray(A), "B": B[::-1][::-1]}
        for _ in range(4):
            product(A=A, B=B)
        counter = Counter(comm)
        for number in range(6):
            is_other = comm.rank == 1 and number % 2
            found = product(other if is_other else {"A": A, "B": B})["C"]
            asked = counter.taken()
            assert asked == ["compare"] or number == 1  # the first time this rank asks the others
            np.testing.assert_array_equal(found.gather(), A @ B)
            counter.taken()
        wrong = A.astype("complex128") if comm.rank == 1 else A
        with pytest.raises(EinmpiError, match="A is complex128"):
            product(A=wrong, B=B)
        with pytest.raises(EinmpiError, match="A is complex128"):
            einmpi.run(product.job, {"A": wrong, "B": B}, comm)
        np.testing.assert_array_equal(product(A=A, B=B)["C"].gather(), A @ B)

    run_threads(2, on_rank)


def test_jobs_that_are_gone_are_not_taken_for_others():
    """A new job may get the address of one that is gone."""
    for number in range(100):
        job = einmpi.program(f"y[i] = {number} + x[i]", x=(2,))
        for _ in range(2):
            found = einmpi.run(job, x=np.zeros(2))["y"].gather()
            np.testing.assert_array_equal(found, [number, number])


def test_results_of_prepared_calls_belong_to_the_caller():
    """Arrays that are allocated together do not overlap, and later calls do not change them."""
    job = einmpi.program("s = sum(x[i])\ny[i] = x[i] + s\nz = s > 3", x=(5,))
    compiled = einmpi.compile(job)
    inputs = [np.arange(5.0) + number for number in range(12)]
    results = [compiled(x=x) for x in inputs]
    for x, outputs in zip(inputs, results, strict=True):
        np.testing.assert_array_equal(outputs["y"].local, x + x.sum())
        assert outputs["z"].local == (x.sum() > 3)
        for array in outputs.values():
            assert array.local.flags.c_contiguous and array.local.flags.writeable
            assert array.local.ctypes.data % 64 == 0
            array.local[...] = 7


def test_results_are_known_as_inputs_of_the_next_call():
    def on_rank(comm):
        job = einmpi.program("y[i] = x[i] / 2", x=(6,))
        halve = einmpi.compile(job, comm, carry={"x": "y"})
        value = halve(x=np.arange(6.0))["y"]
        value = halve(x=value)["y"]
        counter = Counter(comm)
        value = halve(x=value)["y"]
        assert counter.taken() == ["compare"]
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
from einmpi.runtime.cpu.backend import NumpyBackend

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


COUNTING = """
import numpy as np
import einmpi
from einmpi.comm.mpi import comm_of

class Counting:
    def __init__(self, communicator):
        self.communicator = communicator
        self.sent = []

    def __getattr__(self, name):
        found = getattr(self.communicator, name)
        if name not in ("Sendrecv", "Isend", "Irecv", "Iallreduce", "Ibcast", "Iallgather"):
            return found

        def counted(*arguments, **options):
            if name != "Irecv":
                self.sent.append(name)
            return found(*arguments, **options)

        return counted

comm = comm_of()
counting = comm._all = Counting(comm._all)
job = einmpi.program("y[i] = 2 * x[i]", x=(4,))
double = einmpi.compile(job)
for call in (double, lambda x: einmpi.run(job, x=x)):
    for number in range(5):
        counting.sent.clear()
        y = call(x=np.ones(4))["y"]
    assert len(counting.sent) == comm.size - 1, counting.sent
    assert set(counting.sent) <= {"Sendrecv", "Isend"}, counting.sent
    assert (y.gather() == 2).all()
print("counted")
"""


@pytest.mark.slow
@needs_mpirun
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_known_call_sends_one_message_to_every_other_rank(ranks):
    done = run_mpi(ranks, COUNTING, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("counted") == ranks


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


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_known_call_with_a_sparse_tensor_asks_once(ranks):
    def on_rank(comm):
        dense = np.diag(np.arange(1.0, 10)) + np.diag(np.ones(8), 1)
        matrix = einmpi.SparseArray.from_sparse(scipy.sparse.csr_array(dense), comm)
        job = einmpi.program("y[i] = sum(A[i,j] * x[j])", A=matrix, x=(9,))
        step = einmpi.compile(job, comm)
        counter = Counter(comm, (*ASKING, *MOVING))
        x = einmpi.DistArray.from_global(np.ones(9), comm=comm)
        found = []
        for number in range(5):
            counter.taken()
            x = step(A=matrix, x=x)["y"]
            found.append(counter.taken())
            assert found[-1].count("compare") == 1 or number == 0
            assert set(found[-1]) == set(found[1]) if number else True
            expected = np.linalg.matrix_power(dense, number + 1) @ np.ones(9)
            np.testing.assert_allclose(x.gather(), expected, rtol=1e-12)
        return found[-1]

    # One question, and the elements that the ranks lack of the vector.
    for calls in run_threads(ranks, on_rank):
        assert calls == ["compare", "alltoallv"]


def test_ranks_that_are_given_sparse_tensors_of_several_kinds():
    def on_rank(comm):
        dense = np.diag(np.arange(1.0, 6)) + np.diag(np.ones(4), 1)
        kinds = [scipy.sparse.csr_array, scipy.sparse.coo_array, scipy.sparse.csc_array]
        own = kinds[comm.rank](dense)
        same = scipy.sparse.csr_array(dense)
        job = einmpi.program("y[i] = sum(A[i,j] * x[j])", A=same, x=(5,))
        step = einmpi.compile(job, comm)
        x = np.arange(5.0)
        for matrix in (own, own, same, same, own, same, 2 * same, 2 * own):
            found = step(A=matrix, x=x)["y"].gather()
            np.testing.assert_allclose(found, matrix.toarray() @ x, rtol=1e-12)
        other = scipy.sparse.csr_array(np.eye(5))
        for _ in range(2):
            with pytest.raises(EinmpiError):
                step(A=other if comm.rank == 1 else same, x=x)
            np.testing.assert_allclose(step(A=same, x=x)["y"].gather(), dense @ x, rtol=1e-12)

    run_threads(3, on_rank)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("calls", [1, 2, 3, 4])  # from the third one on, they are prepared
def test_nothing_is_kept_of_inputs_and_results(ranks, calls):
    def on_rank(comm):
        double = einmpi.compile(einmpi.program("y[i] = 2 * x[i]", x=(6,)), comm)
        x = einmpi.DistArray.from_global(np.arange(6.0), comm=comm)
        for _ in range(calls):
            y = double(x=x)["y"]
        kept = [ref(x.local), ref(y.local), ref(x), ref(y)]
        del x, y
        gc.collect()
        assert [each() for each in kept] == [None] * 4

    run_threads(ranks, on_rank)
