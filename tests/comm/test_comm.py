"""All comms in one table of scenarios: one process, threads, and mpirun of this file."""

import os
import re
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi_helpers import (
    OPEN_MPI,
    ROOT,
    all_three,
    exchange,
    gather,
    needs_mpirun,
    reduce,
    run_all,
    run_mpi,
)

from einmpi.comm.base import Comm, SelfComm
from einmpi.comm.threads import run_threads
from einmpi.errors import EinmpiError
from einmpi.graph.dtypes import numpy_dtypes

# ---- one process and threads ---------------------------------------------------------------------


def test_one_process():
    assert run_all(SelfComm()) == 0 == run_threads(1, run_all)[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8, 9])
def test_threads(ranks):
    assert min(run_threads(ranks, run_all)) > 0


@pytest.mark.slow
def test_many_threads():
    everyone = [tuple(range(64))]
    run_threads(
        64,
        lambda comm: all_three(
            comm, everyone, np.random.default_rng(1), most=4, dtypes=["float32"]
        ),
    )


@st.composite
def calls(draw):
    ranks = draw(st.integers(2, 9))
    group = st.permutations(range(ranks)).flatmap(
        lambda order: st.integers(1, ranks).map(lambda n: tuple(order[:n]))
    )
    count = st.one_of(st.just(0), st.integers(0, 2000))

    def one(group):
        counts = st.lists(
            st.lists(count, min_size=len(group), max_size=len(group)),
            min_size=len(group),
            max_size=len(group),
        )
        return st.tuples(
            st.sampled_from((exchange, gather, reduce)),
            st.just(group),
            st.sampled_from(numpy_dtypes()),
            counts,
        )

    return ranks, draw(st.lists(group.flatmap(one), min_size=1, max_size=6))


@settings(max_examples=60)
@given(calls())
def test_any_calls_in_any_groups(drawn):
    ranks, program = drawn
    run_threads(
        ranks, lambda comm: [call(comm, *rest) for call, *rest in program if comm.rank in rest[0]]
    )


def test_sums_are_added_in_the_order_of_the_group():
    values = np.float32([1e8, 1, -1e8])

    def total(comm):
        receive = np.zeros(1, np.float32)
        comm.reduce_scatter((2, 0, 1), np.repeat(values[comm.rank], 3), [1, 1, 1], receive)
        return float(receive[0])

    assert (
        run_threads(3, total) == [1.0] * 3
    )  # (-1e8 + 1e8) + 1; in the order of the ranks it would be 0


def fail_on_two(comm):
    if comm.rank == 2:
        raise ValueError("broken")
    comm.barrier()


def receive_one(comm):
    comm.sendrecv(None, None, 1 - comm.rank, np.zeros(1))


def send_one(comm):
    comm.sendrecv(1 - comm.rank, np.zeros(1), None, None)


# What rank 0 does, what rank 1 does, and what is said about it.
WRONG = [
    (receive_one, lambda comm: None, "rank 0 waits for rank 1 in sendrecv, but rank 1 has ended"),
    (send_one, lambda comm: None, "rank 1 has not received what rank 0 sent in sendrecv"),
    (
        lambda comm: comm.sendrecv(1, np.zeros(2, int), None, None),
        receive_one,
        "rank 0 sends 2 elements of int64 to rank 1, which expects 1 of float64",
    ),
    (
        lambda comm: comm.allgatherv((0, 1), np.zeros(5), [3, 2]),
        lambda comm: comm.allgatherv((0, 1), np.zeros(6), [4, 2]),
        "rank 0 sends 3 elements of float64 to rank 1, which expects 4",
    ),
    (
        lambda comm: comm.barrier(),
        lambda comm: comm.compare(""),
        "rank [01] expects (barrier|compare) of rank [01], which does",
    ),
    (
        lambda comm: comm.barrier(),
        receive_one,
        "rank 1 expects sendrecv of rank 0, which does barrier",
    ),
]


@pytest.mark.parametrize(("first", "second", "said"), WRONG)
def test_calls_that_do_not_match(first, second, said):
    with pytest.raises(EinmpiError, match=said):  # at once: whoever waits for long says so instead
        run_threads(2, lambda comm: (second if comm.rank else first)(comm), limit=60)


def test_a_rank_that_does_not_come():
    given_up = threading.Event()

    def on_rank(comm):
        if comm.rank:
            assert given_up.wait(60)
        try:
            receive_one(comm)
        finally:
            given_up.set()

    message = r"rank 0 waits for rank 1 in sendrecv for more than 0\.2 s"
    with pytest.raises(EinmpiError, match=message):
        run_threads(2, on_rank, limit=0.2)


def test_the_first_error_ends_all():
    with pytest.raises(
        ValueError, match="broken"
    ) as caught:  # not that somebody has waited for long
        run_threads(5, fail_on_two, limit=60)
    assert caught.value.__notes__ == ["on rank 2 of 5"]


def test_own_data_never_passes_through():
    for comm in (SelfComm(), Comm(0, 1)):
        with pytest.raises(AssertionError, match="with itself"):
            comm.alltoallv((0,), np.zeros(1), [1], np.zeros(1), [1])


# ---- MPI -----------------------------------------------------------------------------------------


@pytest.mark.mpirun
@needs_mpirun
def test_abort_says_one_line():
    done = run_mpi(
        3,
        """if True:
        import sys
        from einmpi.comm.mpi import MpiComm
        from einmpi.comm.mpi_library import abort, world
        comm = MpiComm(world())
        if comm.rank == 1:
            sys.stderr.write("einmpi: error: rank 1: broken\\n")
            abort(world(), 3)
        comm.barrier()
        """,
    )
    assert (done.returncode, done.stdout) == (3, "")
    lines = done.stderr.splitlines()
    assert lines.count("einmpi: error: rank 1: broken") == 1
    assert OPEN_MPI or len(lines) == 1, (
        done.stderr
    )  # Open MPI's mpirun adds its own account, whatever a rank does


# ---- without a launcher, or with a wrong one -----------------------------------------------------


def world_with(**environment):
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PMI", "OMPI", "MPI", "SLURM"))
    }
    code = (
        "from einmpi.comm.mpi_library import world\n"
        "try: print(world())\n"
        "except Exception as e: print(repr(e))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    return done.stdout.strip()


def test_no_launcher():
    assert world_with() == world_with(SLURM_PROCID="0", SLURM_JOB_ID="5") == "None"


def test_no_library():
    said = world_with(PMI_RANK="0", MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert (
        said.startswith("EinmpiError(") and "/nowhere/libmpi.so" in said and said.count("\n") == 0
    )


@pytest.mark.mpirun
@needs_mpirun
def test_launcher_of_another_mpi():
    foreign = (
        {"PMI_RANK": "0", "PMI_SIZE": "4"}
        if OPEN_MPI
        else {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
    )
    assert re.match(
        r"EinmpiError\(.*started 4 processes, but each is alone; .*(MPICH|Open MPI)",
        world_with(**foreign),
    )
