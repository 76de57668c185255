"""Ranks as MPI processes: the only module that imports mpi4py, and not before it is needed."""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import hashlib
import os
import re
import sys
import termios
import time
import warnings
import zlib
from functools import cached_property
from typing import Any, NoReturn

import numpy as np

from einmpi.comm.base import (
    ALONE,
    SUMMABLE,
    Comm,
    Counts,
    Group,
    allgatherv_bytes,
    alltoallv_bytes,
    count,
    pieces_of,
    reduce_scatter_bytes,
    sendrecv_bytes,
)
from einmpi.comm.nodes import by_node, node_of
from einmpi.errors import EinmpiError, InputError, failure
from einmpi.graph.dtypes import DTYPES
from einmpi.process.environment import is_launched, launcher_size, slurm_step_tasks

_PMI = "srun --mpi=pmi2 for MPICH and its relatives, --mpi=pmix for Open MPI"

_attribute: int | None = None  # the key under which a Comm is attached to its communicator

# Counts of MPI 3 (Open MPI 5 too) have 32 bits, so nothing larger than this goes to MPI in one call.
MOST_BYTES = 2**30
# More ranks than cores: a rank that waits gives its core away this often, then sleeps, from short to long.
_YIELDS, _SHORT, _LONG = 200, 2e-5, 5e-4


def world() -> Any | None:
    """The world communicator when a launcher started this process, else None."""
    if not is_launched():
        if slurm_step_tasks() > 1:
            raise failure(
                EinmpiError.status,
                f"MPI: srun started {slurm_step_tasks()} processes without PMI, and each is "
                f"alone; {_PMI}",
                everywhere=True,
            )
        return None
    comm = _mpi().COMM_WORLD
    if comm.size == 1 and launcher_size() > 1:
        raise failure(
            EinmpiError.status,
            f"MPI: the launcher started {launcher_size()} processes, but each is alone; the "
            f"launcher must be that of mpi4py's library, {_library()}"
            f"{f'; under Slurm {_PMI}' if slurm_step_tasks() > 1 else ''}",
            everywhere=True,
        )
    return comm


def comm_of(comm: Any = None) -> Comm:
    """The Comm over a communicator of mpi4py, made once for each; None is the world, or this process alone."""
    if comm is not None and hasattr(comm, "allgather_text"):
        return comm  # type: ignore[no-any-return]
    comm = world() if comm is None else comm
    if comm is None:
        return ALONE
    if not hasattr(comm, "Get_attr"):
        raise InputError(
            "comm",
            f"{type(comm).__name__} is not a communicator",
            "a communicator of mpi4py, or None",
        )
    global _attribute
    if _attribute is None:  # MPI frees what is attached to a communicator together with it
        _attribute = _mpi().Comm.Create_keyval(delete_fn=lambda _comm, _keyval, ours: ours.free())
    ours = comm.Get_attr(_attribute)
    if ours is None:
        ours = MpiComm(comm)
        comm.Set_attr(_attribute, ours)
    return ours  # type: ignore[no-any-return]


def abort(comm: Any, status: int) -> NoReturn:
    """End all ranks at once, after this one has said why. Nothing but that line where MPI lets us."""
    try:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        _let_it_be_read()
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), 2
        )  # MPICH's own report of an abort; that of Open MPI's mpirun stays
        comm.Abort(status)
    finally:
        os._exit(status)


def _let_it_be_read() -> None:
    """A launcher that hears of an abort forgets what it has not read of a rank's last words."""
    unread = array.array("i", [0])
    with contextlib.suppress(OSError):
        for _ in range(50):  # half a second at the most
            fcntl.ioctl(2, termios.FIONREAD, unread)
            if not unread[0]:
                return
            time.sleep(0.01)


def _mpi() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "suspicious MPI"
            )  # about a foreign launcher; `world` has an error for it
            from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise EinmpiError(
            f"MPI: mpi4py: {reason:.300}; pip install 'einmpi[mpich]', or load the site's MPI"
        ) from error
    return MPI


def library() -> dict[str, str]:
    """mpi4py, how it was built, and the MPI library that it has found. MPI is not started for this, if it was not."""
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = False
    mpi, config = _mpi(), mpi4py.get_config()
    built = (
        config.get("mpicc")
        or f"a wheel, as {os.path.basename(mpi.__file__).partition('.cpython')[0]}"
    )
    device = re.search(r"Device: *(.*)", mpi.Get_library_version())
    name = _library().replace(" Version:", "")
    return {
        "mpi4py": mpi4py.__version__,
        "built": built,
        "library": name,
        "device": device[1] if device else "",
    }


def cuda_aware() -> bool:
    """Whether the MPI library in this process says that it takes buffers on a GPU. One that does not crashes on them,
    so nothing is ever tried. MPICH also ends a process that asks before MPI is started."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized():
        return False
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            loaded = {line.split()[-1] for line in file if re.search(r"/lib\w*mpi\w*\.so", line)}
    except OSError:
        return False
    # Open MPI, MPICH and their children have this function; the answer of some depends on the environment.
    queries = (
        getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None) for path in sorted(loaded)
    )
    return any(query() == 1 for query in queries if query is not None)


def _library() -> str:
    return " ".join(_mpi().Get_library_version().splitlines()[0].split(",")[0].split())


class MpiComm:
    """All ranks of the caller's communicator, over a duplicate of it, so that no message mixes with the caller's.

    Where every node has equally many ranks they are numbered node by node; rank 0 stays rank 0.
    """

    def __init__(self, comm: Any) -> None:
        if comm.Is_inter():
            raise EinmpiError(
                "MPI: this is an intercommunicator, which has two sides; an intracommunicator is needed"
            )
        self._mpi = _mpi()
        self._all, self.nodes = by_node(comm, self._mpi)
        self._all.Set_errhandler(self._mpi.ERRORS_RETURN)
        self.rank: int = self._all.rank
        self.size: int = self._all.size
        self.received = self.received_between = 0
        # A library may run out of communicators; all members of a group learn it together, and the group has None.
        self._groups: dict[Group, Any | None] = {tuple(range(self.size)): self._all}
        self.ranks_on_node, self.rank_on_node, cores = node_of(self._all, self._mpi)
        self.cores = max(1, cores // self.ranks_on_node)
        self.oversubscribed = self.ranks_on_node > cores
        self._sums = {name: getattr(self._mpi, DTYPES[name].mpi) for name in SUMMABLE}

    @cached_property
    def cuda_aware(self) -> bool:
        return cuda_aware()

    # ---- payload ----------------------------------------------------------------------------------------------------

    def alltoallv(
        self,
        group: Group,
        send: np.ndarray,
        send_counts: Counts,
        receive: np.ndarray,
        receive_counts: Counts,
    ) -> None:
        # Not MPI's own: a rank cannot know whether another one's counts are too large for it, and all have to agree.
        # Pairs without data cost nothing here, and no sub-communicator is needed.
        count(self, alltoallv_bytes(self, group, send, send_counts, receive, receive_counts))
        me, ranks, requests = group.index(self.rank), len(group), []
        incoming, outgoing = pieces_of(receive, receive_counts), pieces_of(send, send_counts)
        for k in (me - step for step in range(1, ranks)):
            requests += self._start(self._all.Irecv, incoming[k], group[k])
        for k in ((me + step) % ranks for step in range(1, ranks)):  # each starts with another one
            requests += self._start(self._all.Isend, outgoing[k], group[k])
        self._wait(requests)

    def allgatherv(self, group: Group, buffer: np.ndarray, counts: Counts) -> None:
        count(self, allgatherv_bytes(self, group, buffer, counts))
        pieces, me, ranks = pieces_of(buffer, counts), group.index(self.rank), len(group)
        comm = self._members(group) if ranks > 2 and buffer.nbytes <= MOST_BYTES else None
        if comm is not None:
            scaled = [int(count) * buffer.dtype.itemsize for count in counts]
            self._wait(
                [
                    comm.Iallgatherv(
                        self._mpi.IN_PLACE, [buffer.view(np.uint8), scaled, self._mpi.BYTE]
                    )
                ]
            )
            return
        # Around a ring: each piece passes each link once, however the ranks lie on the nodes.
        for step in range(ranks - 1):
            requests = self._start(self._all.Irecv, pieces[me - step - 1], group[me - 1])
            requests += self._start(self._all.Isend, pieces[me - step], group[(me + 1) % ranks])
            self._wait(requests)

    def reduce_scatter(
        self, group: Group, send: np.ndarray, counts: Counts, receive: np.ndarray
    ) -> bool:
        needed = reduce_scatter_bytes(self, group, send, counts, receive)
        datatype = self._sums.get(send.dtype.name)
        if datatype is None or send.nbytes > MOST_BYTES:
            return False
        if len(group) == 1:
            receive[...] = send
            return True
        comm = self._members(group)
        if comm is None:
            return False
        count(self, needed)
        self._wait(
            [
                comm.Ireduce_scatter(
                    [send, datatype], [receive, datatype], list(counts), self._mpi.SUM
                )
            ]
        )
        return True

    def sendrecv(
        self,
        to: int | None,
        send: np.ndarray | None,
        source: int | None,
        receive: np.ndarray | None,
    ) -> None:
        count(self, sendrecv_bytes(self, to, send, source, receive))
        requests: list[Any] = []
        if source is not None and receive is not None:
            requests += self._start(self._all.Irecv, receive, source)
        if to is not None and send is not None:
            requests += self._start(self._all.Isend, send, to)
        self._wait(requests)

    # ---- control ----------------------------------------------------------------------------------------------------

    def same(self, text: str) -> int | None:
        own = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
        first = own.copy()
        self._wait([self._all.Ibcast([first, self._mpi.BYTE], root=0)])
        lowest = np.array([self.size if (own == first).all() else self.rank], np.int64)
        self._wait(
            [self._all.Iallreduce(self._mpi.IN_PLACE, [lowest, self._mpi.INT64_T], self._mpi.MIN)]
        )
        return None if lowest[0] == self.size else int(lowest[0])

    def allgather_text(self, text: str) -> list[str]:
        if self.same(text) is None:  # the usual case: nothing grows with the number of ranks
            return [text] * self.size
        own = np.frombuffer(text.encode(), np.uint8)
        counts = np.empty(self.size, np.int64)
        length = np.array([own.size], np.int64)
        self._wait([self._all.Iallgather([length, self._mpi.INT64_T], [counts, self._mpi.INT64_T])])
        everything = np.empty(int(counts.sum()), np.uint8)
        self._wait(
            [
                self._all.Iallgatherv(
                    [own, self._mpi.BYTE], [everything, counts.tolist(), self._mpi.BYTE]
                )
            ]
        )
        return [piece.tobytes().decode() for piece in pieces_of(everything, counts.tolist())]

    def barrier(self) -> None:
        self._wait([self._all.Ibarrier()])

    def free(self) -> None:
        while (
            self._groups and not self._mpi.Is_finalized()
        ):  # the duplicate is the first, so it goes last
            _, comm = self._groups.popitem()
            if comm is not None:
                comm.Free()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _start(self, call: Any, piece: np.ndarray, peer: int) -> list[Any]:
        """Requests for a piece in messages that MPI can count; both sides cut alike. Nothing for no elements."""
        step = max(1, MOST_BYTES // piece.dtype.itemsize)
        parts = (
            [piece]
            if piece.size <= step
            else [piece[k : k + step] for k in range(0, piece.size, step)]
        )
        # As bytes: of bfloat16 numpy has no buffer that others could read.
        return [
            call([part.view(np.uint8), part.nbytes, self._mpi.BYTE], peer)
            for part in parts
            if part.size
        ]

    def _wait(self, requests: list[Any]) -> None:
        if not self.oversubscribed:
            self._mpi.Request.Waitall(requests)
            return
        for _ in range(_YIELDS):  # waiting inside MPI keeps the core that the others need
            if self._mpi.Request.Testall(requests):
                return
            os.sched_yield()
        pause = _SHORT
        while not self._mpi.Request.Testall(requests):
            time.sleep(pause)
            pause = min(2 * pause, _LONG)

    def _members(self, group: Group) -> Any | None:
        if group not in self._groups:
            everyone = self._all.Get_group()
            members = everyone.Incl(group)
            # Tags up to 32767 are allowed everywhere. Groups that meet at the same time rarely have the same one.
            tag = zlib.crc32(np.array(group, "<i4").tobytes()) % 32768
            try:
                self._groups[group] = self._all.Create_group(members, tag)
            except self._mpi.Exception:
                self._groups[group] = None
            everyone.Free()
            members.Free()
        return self._groups[group]
