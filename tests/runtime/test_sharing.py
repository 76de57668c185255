"""Memory that the ranks of a node share: the same bits, fewer bytes in memory, exact counts."""

from __future__ import annotations

import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from distributed import assert_close
from hypothesis import example, given, settings
from hypothesis import strategies as st

import einmpi
from einmpi.api import options_of
from einmpi.comm.base import PROBE_BYTES, SharingError, sharing_problem
from einmpi.comm.threads import ThreadComm, run_threads
from einmpi.compiled import inputs
from einmpi.compiled.program import Compiled
from einmpi.errors import EinmpiError, InputError
from einmpi.kernels.prepared import address_of
from einmpi.planner.make_plan import make_plan
from einmpi.runtime.sharing import inputs as sharing_inputs
from einmpi.runtime.sharing import memory as sharing_memory
from einmpi.runtime.sharing import memory as sharing_transfers
from einmpi.runtime.sharing.memory import scheduled_bytes
from einmpi.runtime.sharing.slots import find_shared_slots
from einmpi.schedule.lower import lower
from einmpi.schedule.memory import peak_bytes
from einmpi.schedule.regions import indices, paired_boxes

CHAIN = """
T[i,k] = sum(A[i,j] * B[j,k])
U[i,k] = sum(T[i,j] * C[j,k])
V[k,i] = U[i,k] * T[i,k]
Z[k,l] = sum(V[k,i] * T[i,l])
"""
# With the extents of their inputs. Long sums are partial results on several ranks.
PROGRAMS = {
    "chain": (CHAIN, {"A": (24, 20), "B": (20, 18), "C": (18, 18)}),
    "sums": (
        "S[i,k] = sum(A[j,i] * B[j,k])\nM[i] = max(S[i,k])\nZ[i,k] = S[i,k] / M[i]\n",
        {"A": (96, 6), "B": (96, 6)},
    ),
    "softmax": (
        "E[i,j] = exp(A[i,j])\nN[i] = sum(E[i,j])\nZ[j,i] = E[i,j] / N[i]\n",
        {"A": (18, 30)},
    ),
    "rows": (
        "T[i,k] = sum(A[i,j] * B[j,k])\nZ[i,k] = sum(C[i,j] * T[j,k])\n",
        {"A": (256, 40), "B": (40, 24), "C": (512, 256)},
    ),
}


@pytest.fixture(autouse=True)
def share_everything(monkeypatch):
    """Share slots of any size, so that small tensors do."""
    monkeypatch.setattr(sharing_inputs, "MIN_SHARED_BYTES", 1)


def run_times(
    job: einmpi.Job, ranks: int, tensors: dict[str, Any], nodes: int = 1, **options: Any
) -> list[tuple[list[dict[str, np.ndarray]], Compiled]]:
    """Run a job on threads three times: in the ordinary way, then with all bound to its steps."""

    def on_rank(comm: ThreadComm) -> tuple[list[dict[str, np.ndarray]], Compiled]:
        compiled = Compiled(job, comm, options_of(job, **options))
        results = []
        for _ in range(3):
            outputs = compiled(tensors)
            results.append({name: array.gather() for name, array in outputs.items()})
        return results, compiled

    return run_threads(ranks, on_rank, nodes=nodes)


def compare_modes(
    job: einmpi.Job,
    ranks: int,
    tensors: dict[str, Any],
    nodes: int = 1,
    limited: bool = True,
    **options: Any,
) -> int:
    """Check a job with shared memory against the same without; return the bytes shared."""
    alone = run_times(replace(job, shared="off"), ranks, tensors, nodes, **options)
    shared = run_times(replace(job, shared="auto"), ranks, tensors, nodes, **options)
    total = 0
    for (expected, by_messages), (found, in_memory) in zip(alone, shared, strict=True):
        for one, other in zip(expected, found, strict=True):
            for name, array in one.items():
                np.testing.assert_array_equal(array, other[name], strict=True)
        ((plan, schedule),) = in_memory.ready.values()
        assert [plan.digest] == [each.digest for each, _ in by_messages.ready.values()]
        measured = in_memory.measured
        assert measured.received == by_messages.measured.received
        assert measured.between == by_messages.measured.between
        assert measured.shared == measured.shared_planned
        assert by_messages.measured.shared == by_messages.measured.shared_planned == 0
        total += measured.shared
        memory = in_memory.runner.shared_memory(schedule)
        if memory is not None and not memory.inputs:
            scheduled = scheduled_bytes(schedule, memory.found)
            assert measured.peak <= scheduled
            if limited:
                assert scheduled <= peak_bytes(schedule) <= plan.peak
    return total


def job_of(name: str, folder: Path) -> einmpi.Job:
    """Return a program whose inputs are generated, so that no rank has them before."""
    text, shapes = PROGRAMS[name]
    lines = [f"program = '''\n{text}'''", "[inputs]"]
    for tensor, shape in shapes.items():
        lines.append(f'{tensor} = {{ shape = {list(shape)}, random = "uniform" }}')
    Path(folder, f"{name}.toml").write_text("\n".join(lines))
    return einmpi.load(f"{folder}/{name}.toml")


@pytest.mark.slow
@pytest.mark.parametrize("limited", [True, False], ids=["within the plan", "without a limit"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_have_the_same_bits(name, limited, tmp_path, monkeypatch):
    if not limited:
        monkeypatch.setattr(sharing_memory, "peak_bytes", lambda _: 2**60)
    job = job_of(name, tmp_path)
    for ranks in (2, 3, 4, 6, 7):
        for strategy in ("eindecomp", "sqrt"):
            compare_modes(job, ranks, {}, strategy=strategy, limited=limited)
    assert compare_modes(job, 4, {}, strategy="sqrt", limited=limited) > 0


@pytest.mark.slow
def test_all_kinds_of_transfers_are_shared(tmp_path, monkeypatch):
    monkeypatch.setattr(sharing_memory, "peak_bytes", lambda _: 2**60)
    kinds = set()
    for name in PROGRAMS:
        for ranks in (4, 6):
            for _, compiled in run_times(job_of(name, tmp_path), ranks, {}, strategy="sqrt"):
                for _, memory in compiled.runner.shared.values():
                    for step in memory.found.steps if memory is not None else ():
                        gathers = step.kind == "exchange" and step.moves.same_to_all
                        kinds.add("gather" if gathers else step.kind)
    assert kinds == {"gather", "exchange", "reduce"}


@pytest.mark.parametrize("ranks", [2, 4])
def test_pieces_are_computed_where_others_read_them(ranks, tmp_path, monkeypatch):
    """All ranks need all of B and T, and load and compute some rows each: nothing is copied."""
    copies = []
    copy = sharing_transfers._copy

    def noted(source, target, pairs):
        copies.append(target.shape)
        copy(source, target, pairs)

    monkeypatch.setattr(sharing_transfers, "_copy", noted)
    elements = 40 * 24 + 256 * 24  # of B and T
    shared = compare_modes(job_of("rows", tmp_path), ranks, {})
    assert shared == elements * 8 * (ranks - 1)
    assert copies == []


# Some tensors are needed in two layouts each, so that several groups could share them.
PROGRAMS_OF_GROUPS = [
    f"{CHAIN}Y[i,l] = sum(T[i,k] * D[k,l])",
    "T[i,k] = exp(A[i,k])\nU[i,k] = sum(T[i,j] * T[j,k])\n"
    "Z[i,k] = sum(U[i,j] * T[j,k]) + sum(T[i,j] * U[j,k])",
    "T[i,k] = sum(A[i,j] * B[j,k])\nV[i,k] = sum(D[i,j] * T[j,k])\nU[i,k] = sum(T[i,j] * C[j,k])\n"
    "W[k,i] = exp(T[i,k]) * A[k,i]\nZ[i,k] = sum(U[i,j] * V[j,k]) * W[i,k]",
]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(PROGRAMS_OF_GROUPS),
    st.integers(1, 40) | st.integers(200, 300),
    st.lists(st.integers(0, 1), min_size=2, max_size=9),
    st.sampled_from(["eindecomp", "sqrt", "eindecomp-paper"]),
    st.booleans(),
    st.sampled_from([1, 500, 2000, 2**17]),
    st.none() | st.floats(0.5, 1),
)
@example(PROGRAMS_OF_GROUPS[1], 19, [1, 0, 1, 1], "sqrt", False, 1, None)
@example(PROGRAMS_OF_GROUPS[2], 256, [0, 0, 0, 1], "eindecomp", True, 2**17, None)
@example(PROGRAMS_OF_GROUPS[0], 7, [0] * 5, "eindecomp", False, 1, 0.72)
def test_members_find_the_same_slots(
    program, extent, node_of_rank, strategy, are_resident, least_bytes, share_of_peak
):
    """Whatever their other groups share, also if they have no piece of their own, and if some have
    to keep slots outside of memory and others need not."""
    job = einmpi.program(program, **dict.fromkeys("ABCD", (extent, extent)))
    options = options_of(job, strategy=strategy)
    if are_resident:
        options = replace(options, resident=tuple(vertex.name for vertex in job.graph.inputs))
    plan = make_plan(job.graph, len(node_of_rank), options)
    if share_of_peak is not None:
        options = replace(options, memory=int(plan.peak * share_of_peak))
        try:
            plan = make_plan(job.graph, len(node_of_rank), options)
        except InputError:
            return  # no plan takes so little
    with mock.patch.object(sharing_inputs, "MIN_SHARED_BYTES", least_bytes):
        found = [find_shared_slots(lower(plan, rank), node_of_rank) for rank in range(plan.ranks)]
    for shared_slots in found:
        for name, shared in shared_slots.slots.items():
            place = (shared.group, shared.area_bytes, shared.first, shared.last)
            for member in shared.group:
                other = found[member].slots[name]
                assert (other.group, other.area_bytes, other.first, other.last) == place
        for group in shared_slots.groups:
            steps = [step.writes[0].name for step in shared_slots.of_group(group).steps]
            for member in group:
                others = found[member].of_group(group).steps
                assert [step.writes[0].name for step in others] == steps
        for piece in shared_slots.pieces.values():
            end = piece.offset + piece.slot.nbytes
            assert end <= shared_slots.slots[piece.exchange.target.name].nbytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "extents", "memory"),
    [(5, (178, 254, 318), 579765), (8, (372, 328, 244), 581692), (8, (211, 181, 452), 421740)],
)
def test_some_ranks_spill_and_others_do_not(ranks, extents, memory, tmp_path, monkeypatch):
    """None of them shares memory then. The sizes are large enough for that without a limit."""
    monkeypatch.setattr(sharing_inputs, "MIN_SHARED_BYTES", 2**17)
    n, m, k = extents
    random = np.random.default_rng(0)
    a = random.random((n, m))
    b = random.random((m, k))
    np.save(tmp_path / "A.npy", a)
    np.save(tmp_path / "B.npy", b)
    text = "H[i,k] = sum(A[i,j] * B[j,k])\nZ[i,k] = H[i,k] / max(H[a,b])"
    files = {name: {"file": str(tmp_path / f"{name}.npy")} for name in "AB"}
    job = einmpi.program(text, inputs=files)
    results = run_times(replace(job, scratch=str(tmp_path)), ranks, {}, memory=memory)
    are_spilling = set()
    for found, compiled in results:
        ((_, schedule),) = compiled.ready.values()
        are_spilling.add(any(step.spills("place", "evict") for step in schedule.steps))
        for outputs in found:
            assert_close(outputs, {"Z": a @ b / (a @ b).max()})
    assert are_spilling == {True, False}


def test_an_idle_rank_waits_for_no_shared_input(tmp_path):
    """Ten of eleven ranks share inputs that stay; the last one has no steps."""
    text = "T[i,k] = sum(A[i,j] * B[j,k])\nU[i,k] = sum(T[i,j] * B[j,k])\n"
    text += "Z[i,k] = sum(U[i,j] * T[j,k])"
    lines = [f"program = '''\n{text}'''"]
    for name, resident in (("A", "false"), ("B", "true")):
        spec = f'{{ shape = [40, 40], random = "normal", resident = {resident} }}'
        lines.append(f"inputs.{name} = {spec}")
    (tmp_path / "job.toml").write_text("\n".join(lines))
    job = einmpi.load(tmp_path / "job.toml")
    results = run_times(job, 11, {})
    ((plan, _),) = results[0][1].ready.values()
    assert plan.mesh.ranks == 10
    assert any(memory.inputs for _, memory in results[0][1].runner.shared.values())
    for found, _ in results:
        for outputs in found:
            assert_close(outputs, einmpi.reference(job))


JOB = """
program = '''
T[i,k] = sum(A[i,j] * B[j,k])
Z[i,j] = sum(T[i,k] * T[j,k]) + W[i,j]
'''
[sizes]
n = {n}
m = {m}
k = {k}
[inputs]
A = {{ shape = ["n", "m"], random = "normal" }}
B = {{ shape = ["m", "k"], random = "normal", resident = {resident} }}
W = {{ file = "W.npy", resident = {resident} }}
"""


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(
    st.integers(2, 7),
    st.tuples(*[st.integers(1, 23)] * 3),
    st.sampled_from(["eindecomp", "sqrt", "eindecomp-paper", "replicate"]),
    st.integers(1, 2),
    st.booleans(),
)
def test_inputs_that_are_loaded(ranks, extents, strategy, nodes, resident):
    """Ranks load their pieces straight into the block that all of them read."""
    n, m, k = extents
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/W.npy", np.random.default_rng(1).random((n, n)))
        text = JOB.format(n=n, m=m, k=k, resident=str(resident).lower())
        Path(folder, "job.toml").write_text(text)
        job = einmpi.load(f"{folder}/job.toml")
        compare_modes(job, ranks, {}, nodes, strategy=strategy)
        expected = einmpi.reference(job)
        (results, _), *_ = run_times(job, ranks, {}, nodes, strategy=strategy)
    for found in results:
        assert_close(found, expected)


def test_an_input_that_stays_exists_once_a_node(tmp_path):
    np.save(tmp_path / "W.npy", np.ones((40, 40)))
    (tmp_path / "job.toml").write_text(JOB.format(n=40, m=8, k=8, resident="true"))
    job = einmpi.load(tmp_path / "job.toml")
    results = run_times(job, 4, {}, nodes=2, strategy="replicate")
    addresses = {}
    for rank, (_, compiled) in enumerate(results):
        for (tensor, _), block in compiled.resident.items():
            node = rank // 2
            addresses.setdefault((tensor, node), set()).add(address_of(block))
    assert {tensor for tensor, _ in addresses} == {"B", "W"}
    assert all(len(found) == 1 for found in addresses.values())
    assert addresses["W", 0] != addresses["W", 1]
    alone = run_times(replace(job, shared="off"), 4, {}, nodes=2, strategy="replicate")
    for (_, shared), (_, single) in zip(results, alone, strict=True):
        saved = (40 * 40 + 8 * 8) * 8 // 2
        assert single.measured.peak - shared.measured.peak >= saved


def test_a_rank_that_fails_to_read_keeps_nobody_waiting(tmp_path, monkeypatch):
    np.save(tmp_path / "W.npy", np.ones((40, 40)))
    (tmp_path / "job.toml").write_text(JOB.format(n=40, m=8, k=8, resident="true"))
    job = einmpi.load(tmp_path / "job.toml")
    fill_box = inputs.fill_box

    def fail_on_last_rank(*arguments: Any) -> None:
        if threading.current_thread().name == "rank 3":
            raise ValueError("no numbers left")
        fill_box(*arguments)

    monkeypatch.setattr(inputs, "fill_box", fail_on_last_rank)

    def on_rank(comm: ThreadComm) -> np.ndarray:
        compiled = Compiled(job, comm, options_of(job, strategy="replicate"))
        with pytest.raises(Exception, match="no numbers left"):
            compiled()
        comm.barrier()
        monkeypatch.setattr(inputs, "fill_box", fill_box)
        comm.barrier()
        return compiled()["Z"].gather()

    for found in run_threads(4, on_rank, limit=20):
        assert_close({"Z": found}, einmpi.reference(job))


def test_a_rank_that_fails_goes_on_with_the_others():
    """It takes part in barriers, and further calls are possible."""
    text = "T[i,k] = sum(A[i,j] * B[j,k])\nG[i,k] = T[i,N[k]]\nZ[i,j] = sum(G[i,k] * G[j,k])\n"
    job = einmpi.program(text, A=(24, 12), B=(12, 16), N=np.zeros(16, np.int64))
    random = np.random.default_rng(0)
    tensors = {"A": random.random((24, 12)), "B": random.random((12, 16))}
    good = np.arange(16)[::-1].copy()
    wrong = good.copy()
    wrong[3] = 99

    def on_rank(comm: ThreadComm) -> np.ndarray:
        compiled = Compiled(job, comm, options_of(job))
        for numbers in (wrong, good, wrong, good, wrong):
            if numbers is wrong:
                with pytest.raises(EinmpiError, match="99"):
                    compiled({**tensors, "N": numbers})
            else:
                found = compiled({**tensors, "N": numbers})["Z"].gather()
        return found

    gathered = (tensors["A"] @ tensors["B"])[:, good]
    for ranks in (2, 3, 4):
        for found in run_threads(ranks, on_rank, limit=20):
            assert_close({"Z": found}, {"Z": gathered @ gathered.T})


def test_ranks_that_cannot_share_send_messages(monkeypatch):
    """One rank of the second node fails: only the first node shares."""

    def fail_on_second_node(comm: ThreadComm, group: tuple[int, ...], nbytes: int) -> np.ndarray:
        memory = share_memory(comm, group, nbytes)
        if 3 in group:
            raise SharingError("too many files")
        return memory

    share_memory = ThreadComm.share_memory
    monkeypatch.setattr(ThreadComm, "share_memory", fail_on_second_node)
    random = np.random.default_rng(0)
    tensors = {"A": random.random((24, 20)), "B": random.random((20, 18))}
    tensors["C"] = random.random((18, 18))
    job = einmpi.program(CHAIN, **{name: array.shape for name, array in tensors.items()})
    (found, *_), compiled = run_times(job, 4, tensors, nodes=2)[3]
    product = tensors["A"] @ tensors["B"]
    rest = (product @ tensors["C"]) * product
    assert_close(found, {"Z": rest.T @ product})
    assert compiled.measured.shared == compiled.measured.shared_planned == 0
    assert sharing_problem(compiled.comm) == "too many files"
    results = run_times(job, 4, tensors, nodes=1)
    assert all(compiled.measured.shared == 0 for _, compiled in results)


def test_memory_that_is_given_back_is_got_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sharing_memory, "MOST_KEPT_BYTES", 0)
    assert compare_modes(job_of("chain", tmp_path), 4, {}) > 0


@pytest.mark.parametrize("node_of_rank", [(0, 0, 1, 1), (0, 0, 1, 2), (0, 0, 0, 0)], ids=str)
def test_all_ranks_fail_if_memory_cannot_be_had_again(tmp_path, monkeypatch, node_of_rank):
    """Also those of other nodes, and those that share with nobody. Later calls are possible."""
    monkeypatch.setattr(sharing_memory, "MOST_KEPT_BYTES", 0)
    share_memory = ThreadComm.share_memory
    comms_without_memory: set[ThreadComm] = set()

    def fail_on_first_node(comm: ThreadComm, group: tuple[int, ...], nbytes: int) -> np.ndarray:
        memory = share_memory(comm, group, nbytes)
        if comm in comms_without_memory:
            raise SharingError("too many files")
        return memory

    monkeypatch.setattr(ThreadComm, "share_memory", fail_on_first_node)
    job = job_of("chain", tmp_path)

    def on_rank(comm: ThreadComm) -> int:
        comm.nodes = node_of_rank
        compiled = Compiled(job, comm, options_of(job, strategy="sqrt"))
        total = 0
        for _ in range(3):
            expected = compiled()["Z"].gather()
            total += compiled.measured.shared
            if comm.nodes[comm.rank] == 0:
                comms_without_memory.add(comm)
            for _ in range(2):
                with pytest.raises(EinmpiError, match=r'no memory .* set shared = "off"') as caught:
                    compiled()
                assert caught.value.everywhere
            comms_without_memory.discard(comm)
            np.testing.assert_array_equal(compiled()["Z"].gather(), expected)
        return total

    shared = run_threads(4, on_rank, limit=20)
    assert shared[0] > 0
    assert (shared[3] == 0) == (node_of_rank[3] == 2)


def test_ranks_agree_on_memory_only_when_some_was_given_back(tmp_path, monkeypatch):
    """Also a rank that shares with nobody asks the others, or does not, when they do."""
    counts: dict[int, int] = {}
    lowest = ThreadComm.lowest

    def counted_lowest(comm: ThreadComm, number: int) -> int:
        counts[comm.rank] = counts.get(comm.rank, 0) + 1
        return lowest(comm, number)

    monkeypatch.setattr(ThreadComm, "lowest", counted_lowest)
    job = job_of("chain", tmp_path)

    def on_rank(comm: ThreadComm) -> list[int]:
        comm.nodes = (0, 0, 1, 2)
        compiled = Compiled(job, comm, options_of(job, strategy="sqrt"))
        found = []
        for limit in (2**28, 2**28, 2**28, 0, 0, 2**28, 2**28):
            comm.barrier()
            monkeypatch.setattr(sharing_memory, "MOST_KEPT_BYTES", limit)
            before = counts.get(comm.rank, 0)
            compiled()
            found.append(counts.get(comm.rank, 0) - before)
        return found

    first, *others = run_threads(4, on_rank, limit=20)
    assert all(counts == first for counts in others)
    steady = first[1]
    assert first[1:] == [steady, steady, steady, steady + 1, steady + 1, steady]


def test_programs_use_the_memory_of_a_group_in_turn(monkeypatch):
    """A large one gives back what a small one has used before."""
    monkeypatch.setattr(sharing_memory, "MOST_KEPT_BYTES", 20_000)
    text = "T[i,k] = sum(A[i,j] * B[j,k])\nZ[i,j] = sum(T[i,k] * T[j,k])\n"
    random = np.random.default_rng(0)

    def on_rank(comm: ThreadComm) -> None:
        programs = []
        for size in (12, 80):
            job = einmpi.program(text, A=(size, size), B=(size, size))
            programs.append(Compiled(job, comm, options_of(job, strategy="sqrt")))
        for program in (0, 0, 0, 1, 0, 1, 1, 0):
            one, other = matrices[program]
            found = programs[program]({"A": one, "B": other})["Z"].gather()
            assert_close({"Z": found}, {"Z": (one @ other) @ (one @ other).T})
            measured = programs[program].measured
            assert measured.shared == measured.shared_planned > 0

    matrices = [random.random((2, size, size)) for size in (12, 80)]
    run_threads(4, on_rank, limit=20)


def test_a_loop_gives_back_memory_at_its_end(monkeypatch):
    monkeypatch.setattr(sharing_memory, "MOST_KEPT_BYTES", 0)
    text = "T[i,k] = sum(A[i,j] * B[j,k])\nZ[i,j] = sum(T[i,k] * T[j,k]) / 100\n"
    job = einmpi.program(text, A=(24, 24), B=(24, 24))
    matrices = np.random.default_rng(0).random((2, 24, 24))
    arrays = dict(zip("AB", matrices, strict=True))

    def on_rank(comm: ThreadComm) -> list[int]:
        einmpi.loop(job, arrays, steps=3, carry={"A": "Z"}, strategy="sqrt", comm=comm)
        return [memory.nbytes for memory in comm.kept["memory of groups"].values()]

    for sizes in run_threads(4, on_rank, limit=20):
        assert sizes == []


@pytest.mark.parametrize("nodes", [1, 2])
def test_all_ranks_fail_if_a_node_has_no_memory_for_an_input(tmp_path, monkeypatch, nodes):
    """Ranks of the other node would wait for what these ranks read of the file."""

    def fail_on_last_node(comm: ThreadComm, group: tuple[int, ...], nbytes: int) -> np.ndarray:
        memory = share_memory(comm, group, nbytes)
        if 3 in group and nbytes != PROBE_BYTES:
            raise SharingError("too many files")
        return memory

    share_memory = ThreadComm.share_memory
    monkeypatch.setattr(ThreadComm, "share_memory", fail_on_last_node)
    np.save(tmp_path / "W.npy", np.ones((40, 40)))
    (tmp_path / "job.toml").write_text(JOB.format(n=40, m=8, k=8, resident="true"))
    job = einmpi.load(tmp_path / "job.toml")

    def on_rank(comm: ThreadComm) -> None:
        compiled = Compiled(job, comm, options_of(job, strategy="replicate"))
        for _ in range(2):
            with pytest.raises(EinmpiError, match='set shared = "off"'):
                compiled()
        replaced = Compiled(replace(job, shared="off"), comm, compiled.options)
        assert_close({"Z": replaced()["Z"].gather()}, einmpi.reference(job))

    run_threads(4, on_rank, nodes=nodes, limit=20)


def test_donated_blocks_are_never_shared():
    """What a step writes over an input stays on its rank."""
    text = "Y[i,j] = X[i,j] - 0.1 * sum(X[i,k] * M[k,j])"
    job = einmpi.program(text, X=(20, 12), M=(12, 12))
    random = np.random.default_rng(0)
    start = random.random((20, 12))
    matrix = random.random((12, 12))
    expected = start
    for _ in range(4):
        expected = expected - 0.1 * expected @ matrix

    def on_rank(comm: ThreadComm) -> np.ndarray:
        step = einmpi.compile(job, comm, carry={"X": "Y"}, donate=True)
        state = step({"X": start, "M": matrix})["Y"]
        for _ in range(3):
            state = step({"X": state, "M": matrix})["Y"]
        return state.gather()

    for ranks in (2, 3, 4, 6):
        for found in run_threads(ranks, on_rank):
            assert_close({"Y": found}, {"Y": expected})


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_loops_share(tmp_path, ranks):
    text = """
program = '''
R[i,k] = sum(X[i,j] * P[j,k])
Q[j,k] = P[j,k] + 0.01 * sum(X[i,j] * R[i,k])
'''
[inputs]
X = { shape = [30, 14], random = "normal" }
P = { shape = [14, 10], random = "normal" }
[loop]
steps = 5
carry = { P = "Q" }
"""
    (tmp_path / "job.toml").write_text(text)
    job = einmpi.load(tmp_path / "job.toml")
    found = {}
    for mode in ("auto", "off"):
        changed = replace(job, shared=mode)

        def on_rank(comm: ThreadComm, changed: einmpi.Job = changed) -> np.ndarray:
            return einmpi.loop(changed, comm=comm).outputs["P"].gather()

        found[mode] = run_threads(ranks, on_rank)[0]
    np.testing.assert_array_equal(found["auto"], found["off"])


def test_paired_boxes_are_the_same_elements():
    one = (((0, 3), (5, 8)), ((2, 4),))
    two = (((1, 2), (4, 9)), ((0, 1), (6, 7)))
    source = np.arange(80).reshape(10, 8)
    target = np.zeros((10, 8), int)
    for there, here in paired_boxes(one, two):
        target[here] = source[there]
    expected = np.zeros((10, 8), int)
    rows = [indices(runs) for runs in one]
    expected[np.ix_(*map(indices, two))] = source[np.ix_(*rows)]
    np.testing.assert_array_equal(target, expected)


def test_unknown_mode():
    with pytest.raises(
        einmpi.InputError, match="shared: unknown mode 'maybe'; expected one of auto, off"
    ):
        einmpi.program("Y[i] = X[i]", X=(3,), shared="maybe")
