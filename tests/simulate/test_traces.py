"""Traces of ranks, as text: every message is received, and the bytes are those of the plan."""

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kept_results import kept
from paths import ROOT
from rank_traces import rank_traces

import einmpi
from einmpi.planner.machine import Machine, Prices
from einmpi.simulate.dry_run import MOST_BYTES, Tag, TraceComm, parts_of

JOBS = ("chain", "attention", "ffnn", "heat", "softmax", "convolution", "pagerank", "digits")


def traces_of(job, ranks, nodes=1, shared=True, prices=None, **options):
    plan = einmpi.plan(job, ranks, nodes=nodes, **options)
    return plan, list(rank_traces(plan, prices, shared))


def check(plan, traces):
    """Every message that is sent is received with its size; the bytes are those of the plan."""
    sent = defaultdict(list)
    received = defaultdict(list)
    for trace in traces:
        assert trace.lines[0] == f"{trace.rank} init"
        assert trace.lines[-1] == f"{trace.rank} finalize"
        waiting = 0
        for line in trace.lines:
            rank, action, *words = line.split()
            assert int(rank) == trace.rank
            if action == "isend":
                to, tag, nbytes, _ = map(int, words)
                sent[trace.rank, to, tag].append(nbytes)
                waiting += 1
            elif action == "irecv":
                source, tag, nbytes, _ = map(int, words)
                received[source, trace.rank, tag].append(nbytes)
                waiting += 1
            elif action == "waitall":
                waiting = 0
            elif action == "wait":
                waiting -= 1
            else:
                assert waiting == 0, f"a rank goes on before its messages are there: {line}"
    assert sent == received
    payload = sum(sum(sizes) for (*_, tag), sizes in received.items() if tag == Tag.PAYLOAD)
    assert payload == sum(trace.received - trace.received_shared for trace in traces)
    assert sum(trace.received for trace in traces) == plan.bytes_predicted


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks, nodes", [(1, 1), (4, 1), (6, 3), (8, 2), (16, 4)])
@pytest.mark.parametrize("name", JOBS)
def test_bytes_of_traces_are_those_of_the_plan(name, ranks, nodes):
    job = einmpi.load(ROOT / "jobs" / f"{name}.toml")
    check(*traces_of(job, ranks, nodes))
    check(*traces_of(job, ranks, nodes, shared=False))


@pytest.mark.slow
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([(2, 1), (3, 1), (4, 2), (6, 2), (12, 3), (16, 2)]),
    st.sampled_from(["eindecomp", "sqrt", "eindecomp-paper"]),
)
def test_uneven_shapes(rows, columns, inner, where, strategy):
    ranks, nodes = where
    job = einmpi.program(
        "Z[i,k] = sum(A[i,j] * B[j,k]) * 2; M[k] = max(Z[i,k])",
        A=(rows, inner),
        B=(inner, columns),
    )
    check(*traces_of(job, ranks, nodes, strategy=strategy))


def test_large_tensors_in_shared_memory_need_only_barriers():
    job = einmpi.load(ROOT / "jobs" / "chain.toml", s=2000)
    plan, traces = traces_of(job, 8)
    check(plan, traces)
    shared = sum(trace.received_shared for trace in traces)
    assert shared > 0
    tags = Counter()
    for trace in traces:
        tags.update(int(line.split()[3]) for line in trace.lines if " isend " in line)
    assert tags[Tag.SIGNAL] > 0  # barriers


def test_a_measured_machine_gives_the_seconds_of_kernels():
    machine = Machine(1000, 1000, 100, 100, {"float64": 2_000_000}, 5_000_000, "here")
    job = einmpi.program("Z[i,k] = sum(A[i,j] * B[j,k])", A=(8, 8), B=(8, 8))
    _, (trace,) = traces_of(job, 1, prices=Prices.of(machine))
    assert trace.lines == ["0 init", f"0 sleep {1024 * 2e-12:.9g}", "0 finalize"]
    _, (trace,) = traces_of(job, 1)
    assert trace.lines == ["0 init", "0 compute 1024", "0 finalize"]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 16, 17])
@pytest.mark.parametrize("count", [None, 0, 1, 5, 40_000])
def test_collectives_as_messages_move_the_least_bytes(size, count):
    """Pieces of different sizes; a gather and a sum take as many bytes as they must."""
    import numpy as np

    if count is None:  # one member has the only piece
        counts = [3 * (place == size // 2) for place in range(size)]
    else:
        counts = [count + place % 3 for place in range(size)]
    group = tuple(range(size))
    for call in ("allgatherv", "reduce_scatter"):
        sent, received = Counter(), Counter()
        for rank in group:
            comm = TraceComm(rank, (0,) * size)
            buffer = np.broadcast_to(np.zeros((), "float64"), (sum(counts),))
            if call == "allgatherv":
                comm.allgatherv(group, buffer, counts)
                expected = 8 * (sum(counts) - counts[rank])
            else:
                comm.reduce_scatter(group, buffer, counts, buffer[: counts[rank]])
                expected = 8 * (size - 1) * counts[rank]
            assert comm.received == expected
            for line in comm.lines:
                words = line.split()
                if words[1] == "isend":
                    sent[rank, int(words[2]), words[4]] += 1
                elif words[1] == "irecv":
                    received[int(words[2]), rank, words[4]] += 1
        assert sent == received
        total = sum(int(nbytes) * times for (_, _, nbytes), times in sent.items())
        assert total == 8 * (size - 1) * sum(counts)


def test_messages_that_mpi_can_count():
    assert parts_of(0) == []
    assert parts_of(7) == [7]
    assert parts_of(2 * MOST_BYTES) == [MOST_BYTES] * 2
    assert parts_of(MOST_BYTES + 1) == [MOST_BYTES, 1]


def test_parts_of_a_large_message_follow_one_another():
    """Messages of one node do not share a link in SimGrid, so each part waits for the last one."""
    comm = TraceComm(0, (0, 0))
    comm.send_round((1, 2 * MOST_BYTES + 1), (1, 5))
    actions = [line.split()[1] for line in comm.lines]
    assert actions == ["irecv", "isend", "waitall", "irecv", "waitall", "irecv", "waitall"]
    comm = TraceComm(0, (0, 0))
    comm.send_together([(1, MOST_BYTES + 1)], [(1, 5)])
    actions = [line.split()[1] for line in comm.lines]
    assert actions == ["irecv", "isend", "wait", "wait", "irecv", "wait", "waitall"]


@pytest.mark.slow
def test_ranks_share_what_is_the_same_for_all():
    """Layouts are made once, and index sets once for ranks that have the same, not for each."""
    from einmpi.planner.mesh import members_along
    from einmpi.planner.moving.halo import _intersect, share
    from einmpi.schedule.lower import _layout, _pieces, lower
    from einmpi.schedule.moves import _unchanged_dimensions, middle_layout
    from einmpi.schedule.two_level import _combined

    job = einmpi.load(ROOT / "jobs" / "chain.toml")
    plan = einmpi.plan(job, 512, nodes=64)
    lower(plan, 0)
    same_for_all = (
        _layout,
        _pieces,
        middle_layout,
        members_along,
        _combined,
        _unchanged_dimensions,
    )
    before = [len(kept(function)) for function in same_for_all]
    kept(share).clear()
    kept(_intersect).clear()
    for rank in range(512):
        lower(plan, rank)
    assert [len(kept(function)) for function in same_for_all] == before
    # Ranks differ in three labels at most, and a label has fewer parts than there are ranks.
    assert len(kept(share)) < 512
    assert len(kept(_intersect)) < 5 * 512
