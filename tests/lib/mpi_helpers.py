"""Helpers that start a real mpirun, of MPICH or of Open MPI, and what every Comm must do."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from paths import ROOT

from einmpi.comm import mpi as comm_mpi
from einmpi.comm.base import SUMMABLE, Comm, split_calls
from einmpi.graph.dtypes import numpy_dtypes

MPIRUN = Path(sys.executable).parent / "mpirun"
OPEN_MPI = MPIRUN.with_name("ompi_info").exists()
NO_MPIRUN = None if MPIRUN.exists() else "there is no mpirun beside the Python interpreter"

STARTS = 3  # how often a run is started at most, if it breaks down before anything is tested

needs_mpirun = pytest.mark.skipif(NO_MPIRUN is not None, reason=str(NO_MPIRUN))

# What an outer launcher has set would make the inner one part of its own job.
OUTER = ("EINMPI", "PMI", "OMPI", "PRTE", "MPI_", "HYDI_", "HYDRA_", "SLURM")
_OPTIONS = ("--oversubscribe", "--bind-to", "none") if OPEN_MPI else ()
MPIRUN_WITH_OPTIONS = " ".join([str(MPIRUN), *_OPTIONS])  # for more ranks than cores
OMPI_SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # Not used on one machine, and each rank sleeps for a second at its end.
    "OMPI_MCA_btl": "^ofi",
}
_SETTINGS = {
    **OMPI_SETTINGS,
    "OPENBLAS_NUM_THREADS": "1",  # threads of many ranks on few cores hide everything else
    "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests" / "lib"))),
    # Unbuffered, print writes a line and its end apart, and lines of ranks are mixed.
    "PYTHONUNBUFFERED": "",
    # Whether UCX warns depends on the network of the machine, and tests compare what is printed.
    "UCX_LOG_LEVEL": "error",
}


def environment(**more: str) -> dict[str, str]:
    """For a process that starts ranks, or is one."""
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith(OUTER)},
        **_SETTINGS,
        **more,
    }


def run_mpi(
    ranks: int,
    code_or_args: str | Sequence[str],
    env: dict[str, str] | None = None,
    timeout: float = 300,
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Return the finished `mpirun -n ranks python …` with code or arguments. Fails if it hangs."""
    arguments = ["-c", code_or_args] if isinstance(code_or_args, str) else list(code_or_args)
    return finished(mpi_command(ranks, arguments), env, timeout, cwd)


def mpi_command(ranks: int, arguments: Sequence[str]) -> list[str]:
    """Return the command `mpirun -n ranks python …`."""
    return [str(MPIRUN), *_OPTIONS, "-n", str(ranks), sys.executable, *arguments]


def finished(
    command: Sequence[str],
    env: dict[str, str] | None = None,
    timeout: float = 300,
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """The finished command, which starts ranks. Fails if it hangs."""
    return started_again(lambda: _finished_once(command, env, timeout, cwd))


def started_again(
    start: Callable[[], subprocess.CompletedProcess[str]],
) -> subprocess.CompletedProcess[str]:
    """Return what `start` returns; call it again where Open MPI crashed before the program began.

    On a busy machine Open MPI's MPI_Init crashes now and then, and says where.
    """
    done = start()
    for _ in range(STARTS - 1):
        if not crashed_in_mpi_init(done.stderr):
            break
        done = start()
    return done


def crashed_in_mpi_init(text: str) -> bool:
    """Whether a rank's stack, which Open MPI prints when it crashes, shows it in MPI_Init."""
    return "*** Process received signal ***" in text and "PMPI_Init_thread+" in text


def _finished_once(
    command: Sequence[str],
    env: dict[str, str] | None,
    timeout: float,
    cwd: str | os.PathLike[str] | None,
) -> subprocess.CompletedProcess[str]:
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd or ROOT,
        env=environment(**(env or {})),
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()  # mpirun ends its ranks; killed at once, it could not
            try:
                out, err = process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
            raise AssertionError(
                f"mpirun has not ended in {timeout:g} s\n{out[-2000:]}\n{err[-2000:]}"
            ) from None
    # Open MPI's mpirun prints this now and then when ranks end: a race in its event library.
    err = "".join(
        line for line in err.splitlines(keepends=True) if not line.startswith("[warn] Epoll")
    )
    return subprocess.CompletedProcess(command, process.returncode, out, err)


# ---- one call, its expected result, its bytes ----------------------------------------------------


def piece(dtype, count, *key):
    """Small whole numbers, so that every order of adding gives the same; alike on every rank."""
    numbers = (np.arange(count) * 7 + sum(13 ** (k + 1) * part for k, part in enumerate(key))) % 50
    return (
        (numbers + 1j * numbers[::-1]).astype(dtype)
        if np.dtype(dtype).kind == "c"
        else numbers.astype(dtype)
    )


def joined(dtype, pieces):
    return np.concatenate([np.empty(0, dtype), *pieces])


def unset(dtype, count):
    return np.full(count, 77, dtype)


def check(comm, call, arrays, expected, received):
    """Make the call and compare the arrays; a dry run without values must count the same bytes."""
    before, dry = comm.received, Comm(comm.rank, comm.size)
    done = call(comm, *arrays)
    for array, wanted in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(array, wanted)
    if done is not False:
        assert (
            call(dry, *(np.broadcast_to(array.dtype.type(0), array.shape) for array in arrays))
            == done
        )
        assert comm.received - before == received == dry.received
    else:
        assert comm.received == before


def exchange(comm, group, dtype, counts):
    """alltoallv with counts[member][member]."""
    me = group.index(comm.rank)
    out = [0 if k == me else counts[me][k] for k in range(len(group))]
    back = [0 if k == me else counts[k][me] for k in range(len(group))]
    send = joined(dtype, (piece(dtype, n, group[me], k) for k, n in zip(group, out, strict=True)))
    wanted = joined(
        dtype, (piece(dtype, n, k, group[me]) for k, n in zip(group, back, strict=True))
    )
    # The second time, some ranks prepare their calls and others do not.
    for prepares in (False, comm.rank % 2 == 0):

        def call(c, s, r, prepares=prepares):
            if prepares:
                return c.prepare_alltoallv(group, s, out, r, back)()
            return c.alltoallv(group, s, out, r, back)

        check(
            comm,
            call,
            [send, unset(dtype, sum(back))],
            [send.copy(), wanted],
            sum(back) * send.itemsize,
        )


def gather(comm, group, dtype, counts):
    me, counts = group.index(comm.rank), counts[0]
    pieces = [piece(dtype, n, k) for k, n in zip(group, counts, strict=True)]
    for prepares in (False, comm.rank % 2 == 0):
        buffer = joined(
            dtype, (part if k == me else unset(dtype, part.size) for k, part in enumerate(pieces))
        )

        def call(c, b, prepares=prepares):
            if prepares:
                return c.prepare_allgatherv(group, b, counts)()
            return c.allgatherv(group, b, counts)

        check(
            comm,
            call,
            [buffer],
            [joined(dtype, pieces)],
            (sum(counts) - counts[me]) * buffer.itemsize,
        )


def reduce(comm, group, dtype, counts):
    me, counts = group.index(comm.rank), counts[0]
    parts = {
        k: joined(dtype, (piece(dtype, n, k, t) for t, n in zip(group, counts, strict=True)))
        for k in group
    }
    own = slice(sum(counts[:me]), sum(counts[: me + 1]))
    possible = dtype in SUMMABLE and parts[comm.rank].nbytes <= comm_mpi.MOST_BYTES
    wanted = np.sum([part[own] for part in parts.values()], axis=0, dtype=dtype)
    send, receive = parts[comm.rank], unset(dtype, counts[me])
    check(
        comm,
        lambda c, s, r: c.reduce_scatter(group, s, counts, r),
        [send, receive],
        [send.copy(), wanted if possible else receive.copy()],
        (len(group) - 1) * receive.nbytes,
    )


def message(comm, to, source, dtype, size_of, turn=0):
    """sendrecv; `size_of` says how many elements a rank sends."""
    me = comm.rank
    send = None if to is None else piece(dtype, size_of(me), me, turn)
    receive = None if source is None else unset(dtype, size_of(source))
    given = [array for array in (send, receive) if array is not None]
    wanted = [] if send is None else [send.copy()]
    wanted += [] if source is None else [piece(dtype, size_of(source), source, turn)]

    def call(c, *arrays):
        parts = iter(arrays)
        return c.sendrecv(
            to, None if to is None else next(parts), source, None if source is None else next(parts)
        )

    check(comm, call, given, wanted, 0 if source in (None, me) else receive.nbytes)


def all_three(comm, groups, rng, most=40, dtypes=None):
    """Run every collective in each group of this rank. All ranks draw the same numbers."""
    for group in groups:
        dtype = str(rng.choice(dtypes or numpy_dtypes()))
        counts = (
            rng.integers(0, most + 1, (len(group),) * 2) * rng.integers(0, 2, (len(group),) * 2)
        ).tolist()
        if comm.rank in group:
            for call in (exchange, gather, reduce):
                call(comm, group, dtype, counts)


# ---- scenarios: functions of a comm and a generator that is alike on all ranks -------------------


def every_dtype(comm, rng):
    for dtype in numpy_dtypes():
        all_three(comm, [tuple(range(comm.size))] * 2, rng, dtypes=[dtype])


def groups_at_once(comm, rng):
    for _ in range(3):  # the ranks in random order, cut into groups
        order = [int(rank) for rank in rng.permutation(comm.size)]
        cuts = sorted({0, comm.size, *(int(cut) for cut in rng.integers(0, comm.size + 1, 2))})
        mine = next(group for a, b in pairwise(cuts) if comm.rank in (group := tuple(order[a:b])))
        all_three(comm, [mine] * 2, np.random.default_rng(mine))


def overlapping_groups(comm, rng):
    """Neighbours, forward and backward: the same ranks in another order are another group."""
    ring = [
        tuple((start + k) % comm.size for k in range(min(3, comm.size)))
        for start in range(comm.size)
    ]
    for groups in (ring, ring[::-1], [group[::-1] for group in ring], ring):
        all_three(comm, groups, rng)


def without_elements(comm, rng):
    everyone = tuple(range(comm.size))
    all_three(comm, [everyone], rng, most=0)
    counts = np.zeros((comm.size,) * 2, int)
    counts[0, -1] = 5
    exchange(comm, everyone, "float32", counts.tolist())
    gather(comm, everyone, "float16", counts.tolist())
    all_three(comm, [(rank,) for rank in everyone], rng)


def messages(comm, rng):
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for dtype in numpy_dtypes():
        for turn in range(2):  # in order: the second must not overtake the first
            message(comm, after, before, dtype, lambda rank: 9 + rank, turn)
    message(comm, after, before, "bool", lambda rank: 0)
    message(comm, after, before, "float64", lambda rank: 3 * (rank % 2))
    message(comm, comm.rank, comm.rank, "int32", lambda rank: 4)
    message(comm, None, None, "int32", lambda rank: 4)
    if comm.size > 1:  # one way, along a chain
        to, source = (
            (None if comm.rank == comm.size - 1 else after),
            (None if comm.rank == 0 else before),
        )
        message(comm, to, source, "complex64", lambda rank: 6)


def texts(comm, rng):
    before = comm.received
    own = [f"rank {rank}: é{'x' * (rank % 3)}" if rank else "" for rank in range(comm.size)]
    assert comm.allgather_text(own[comm.rank]) == own
    assert comm.allgather_text("alike") == ["alike"] * comm.size
    assert comm.compare("é" * 1000) is None
    for odd in range(1, comm.size):
        said = ["b" if rank >= odd else "a" for rank in range(comm.size)]
        assert comm.compare(said[comm.rank]) == said
    ask_a = comm.prepare_compare("a")
    ask_b = comm.prepare_compare("b")
    for odd in range(comm.size + 1):  # some ranks prepare their question, others do not
        is_odd = comm.rank == odd
        assert (ask_a() if is_odd else comm.compare("a")) is None
        are_same = (ask_b() if is_odd else ask_a()) is None
        assert are_same == (comm.size == 1 or odd == comm.size)
        comm.calls.note("a call")
        if is_odd:
            comm.calls.note("another call")
        found = ask_a() if is_odd else comm.compare("a")
        are_same = comm.size == 1 or odd == comm.size
        assert (found is None) == are_same
        assert are_same or split_calls(found[odd]) == ["a", "a call", "another call"]
        comm.calls.forget()
        assert comm.lowest(-7 if is_odd else 2**62) == (-7 if odd < comm.size else 2**62)
    comm.barrier()
    assert comm.received == before


SCENARIOS = (every_dtype, groups_at_once, overlapping_groups, without_elements, messages, texts)


def run_all(comm):
    for k, scenario in enumerate(SCENARIOS):
        scenario(comm, np.random.default_rng(k))
    return comm.received
