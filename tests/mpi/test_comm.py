"""Messages of real ranks: every call in every group, next to messages of the user's own."""

import numpy as np
import pytest
from mpi_helpers import OPEN_MPI, gather, run_all

from einmpi.comm import control_messages
from einmpi.comm import mpi as comm_mpi
from einmpi.comm.threads import run_threads
from einmpi.errors import EinmpiError
from einmpi.graph.dtypes import DTYPES

pytestmark = pytest.mark.mpi(min_size=1)


@pytest.fixture
def comm(world):
    comm = comm_mpi.MpiComm(world)
    yield comm
    comm.free()


def test_every_call(comm, world):
    """Ranks receive the same bytes as threads, while a message of the caller's own is pending."""
    from mpi4py import MPI

    assert comm.ranks_on_node == comm.size == world.size
    inbox = np.zeros(1)
    pending = world.Irecv(inbox, source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)
    received = run_all(comm)
    outgoing = world.Isend(np.full(1, comm.rank + 1.0), (comm.rank + 1) % comm.size)
    MPI.Request.Waitall([outgoing, pending])
    assert inbox[0] == (comm.rank - 1) % comm.size + 1
    assert received == run_threads(comm.size, run_all)[comm.rank]


def test_messages_in_pieces(comm, monkeypatch):
    """MPI counts have 32 bits, so large messages are split: here after 7 bytes."""
    monkeypatch.setattr(comm_mpi, "MOST_BYTES", 7)
    run_all(comm)


def test_gathers_by_mpi(comm, monkeypatch):
    """Small gathers go message by message, others by MPI's own: here all of them."""
    monkeypatch.setattr(comm_mpi, "MOST_BYTES_OF_DIRECT_GATHER", -1)
    run_all(comm)
    everyone = tuple(range(comm.size))
    for count in (1, 1000):  # one member has all: a broadcast of few bytes, a gather of more
        gather(comm, everyone, "float64", [[0] * (comm.size - 1) + [count]])


def test_questions_by_mpi(comm, monkeypatch):
    """Few ranks ask each other directly, many by MPI's own calls: here all of them."""
    monkeypatch.setattr(comm_mpi, "MOST_RANKS_OF_DIRECT_MESSAGES", 0)
    monkeypatch.setattr(control_messages, "MOST_RANKS_OF_DIRECT_MESSAGES", 0)
    run_all(comm)


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_asks_something_else_gets_an_error(comm):
    """A number is not taken for a text, nor are messages of one call for those of another."""
    if comm.size > control_messages.MOST_RANKS_OF_DIRECT_MESSAGES:
        pytest.skip("MPI's own calls, which many ranks use, do not notice it")
    if comm.rank == 0:
        with pytest.raises(EinmpiError, match="ranks make different calls"):
            comm.lowest(1)
    else:
        assert comm.compare("a") == ["a number", *["a"] * (comm.size - 1)]
    comm.barrier()


@pytest.mark.mpi(min_size=2)
def test_the_other_way_to_wait(comm, world):
    """Ranks yield while they wait where there are more of them than cores, and spin elsewhere."""
    if world.size > 3:
        pytest.skip("many ranks on few cores spin for long")
    comm.oversubscribed = not comm.oversubscribed
    run_all(comm)


def test_free_gives_back_every_communicator(world):
    from mpi4py import MPI

    comm = comm_mpi.MpiComm(world)
    run_all(comm)
    held = [sub for sub in comm._communicators.values() if sub is not None]
    comm.free()
    comm.free()
    assert all(sub == MPI.COMM_NULL for sub in held)


@pytest.mark.mpi(min_size=2)
def test_make_and_free_many(world):
    if world.size > 2:
        pytest.skip("two ranks are enough")
    for _ in range(200 if OPEN_MPI else 2100):  # MPICH has 2048 communicators
        comm = comm_mpi.MpiComm(world)
        assert comm.reduce_scatter((1, 0), np.ones(2), [1, 1], np.zeros(1))
        comm.free()


@pytest.mark.mpi(min_size=3)
def test_run_out_of_communicators(world, monkeypatch):
    """If one rank has none left, the others learn it, and the groups do without."""
    from mpi4py import MPI

    monkeypatch.setattr(comm_mpi, "MOST_BYTES_OF_DIRECT_GATHER", -1)

    if world.size > 3:
        pytest.skip("three ranks are enough")
    comm, taken = comm_mpi.MpiComm(world), []
    try:
        while world.rank == 0 and len(taken) < 2100:
            taken.append(MPI.COMM_SELF.Dup())
    except MPI.Exception:
        pass
    counts = [[3, 0, 4]] * 3
    gather(comm, (2, 0, 1), "float32", counts)
    done = comm.reduce_scatter((1, 0, 2), np.ones(3), [1, 1, 1], np.zeros(1))
    assert set(world.allgather(done)) == {len(world.bcast(taken and [1] * len(taken))) == 2100}
    for each in taken:
        each.Free()
    comm.free()


@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
def test_more_than_two_gib(world):
    """More than 2**31 bytes from rank 0 to rank 1, and back as another dtype."""
    if world.size > 2:
        pytest.skip("two ranks are enough")
    comm = comm_mpi.MpiComm(world)
    count, block = 2**31 + 5, 2**20
    marks = (np.arange(count // block) % 120).astype(np.int8)
    buffer = np.zeros(count + 3, np.int8)
    if comm.rank == 0:
        buffer[: count // block * block].reshape(-1, block)[...] = marks[:, None]
        buffer[count - 5 : count] = 7
    else:
        buffer[count:] = 9
    comm.allgatherv((0, 1), buffer, [count, 3])
    assert (buffer[: count // block * block].reshape(-1, block) == marks[:, None]).all()
    assert buffer[-8:].tolist() == [7] * 5 + [9] * 3
    if comm.rank == 0:
        buffer[...] = 0
        comm.sendrecv(None, None, 1, buffer[3:].view(bool))
        assert (
            buffer[:3].tolist() == [0] * 3 and (buffer[3::block][: count // block] == marks).all()
        )
        assert buffer[-5:].tolist() == [7] * 5
    else:
        comm.sendrecv(0, buffer[:-3].view(bool), None, None)
    assert comm.received == (3 + count if comm.rank == 0 else count)
    comm.free()


@pytest.mark.parametrize("name", [name for name, record in DTYPES.items() if record.mpi])
def test_the_mpi_type_of_a_dtype_has_its_size(name):
    from mpi4py import MPI

    assert getattr(MPI, DTYPES[name].mpi).Get_size() == DTYPES[name].itemsize
