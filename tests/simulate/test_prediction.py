"""Predicted times of messages: by hand, and beside those that SimGrid replays."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import ROOT

import einmpi
from einmpi.planner.machine import Machine, NodeGroups, read_machine
from einmpi.planner.make_plan import _plan, make_plan
from einmpi.planner.plan import Options
from einmpi.simulate.cluster import make_cluster
from einmpi.simulate.prediction import TimedComm, with_predicted_times
from einmpi.simulate.simulation import Place, simulate_plan

CLUSTER = read_machine(str(ROOT / "bench" / "platforms" / "cluster.toml"))
# In picoseconds: 2 for a byte inside a node, 10 between nodes; latencies 100 and 1000.
PLAIN = Machine(100, 1000, 2, 10, {"float64": 1_000_000}, 1_000_000, "made up for a test")
INSIDE, BETWEEN = 100_000, 1_000_000  # latencies in picoseconds

needs_simgrid = pytest.mark.skipif(
    shutil.which("smpirun") is None, reason="SimGrid is not installed"
)

# ---- by hand -------------------------------------------------------------------------------------


def timed_call(nodes, machine, call):
    comm = TimedComm(0, nodes, machine)
    call(comm)
    return comm.inside.total, comm.between.total


def gather(ranks, count):
    def call(comm):
        buffer = np.broadcast_to(np.zeros((), "uint8"), (len(ranks) * count,))
        comm.allgatherv(tuple(ranks), buffer, [count] * len(ranks))

    return call


def test_messages_to_other_nodes_are_on_their_way_together():
    found = timed_call((0, 1, 2, 3), PLAIN, gather(range(4), 100))
    assert found == (0, BETWEEN + 3 * 100 * 10)


def test_messages_inside_a_node_follow_one_another():
    found = timed_call((0, 0, 0), PLAIN, gather(range(3), 100))
    assert found == (2 * (INSIDE + 100 * 2), 0)


def test_messages_inside_a_node_pass_while_others_are_on_their_way():
    """Of rank 0, one message stays on the node and two leave it."""
    found = timed_call((0, 0, 1, 1), PLAIN, gather(range(4), 100))
    assert found == (0, BETWEEN + 2 * 100 * 10)


def test_a_large_gather_goes_around_a_ring():
    """On 3 × 2 ranks, one rank of a node sends to the next node and has its link alone."""
    found = timed_call((0, 0, 1, 1, 2, 2), PLAIN, gather(range(6), 100_000))
    assert found == (0, 5 * (BETWEEN + 100_000 * 10 // 2))


def test_groups_of_nodes_share_a_link():
    """Groups of two nodes: all of what two ranks send to two others passes one link."""
    machine = replace(PLAIN, groups=(NodeGroups(2, 5000, 40),))
    found = timed_call((0, 1, 2, 3), machine, gather(range(4), 100))
    assert found == (0, 5 * BETWEEN + 2 * 100 * 2 * 40)
    # Around a ring, one node of a group sends to the other group.
    found = timed_call((0, 1, 2, 3), machine, gather(range(4), 200_000))
    assert found == (0, 3 * (5 * BETWEEN + 200_000 * 40))
    # Where only neighbours exchange something, nothing leaves a group.
    found = timed_call((0, 1, 2, 3), machine, gather(range(2), 100))
    assert found == (0, BETWEEN + 100 * 10)


@pytest.mark.parametrize(
    "distance, senders",
    [
        (1, 1),  # the last rank of a group sends to the next group
        (3, 3),
        (4, 4),  # all send to the next group
        (5, 3),  # three to the next group, and one to the one after it
        (6, 2),
        (8, 4),
        (15, 1),
    ],
)
def test_ranks_send_to_those_at_a_distance(distance, senders):
    """A rank on each of 16 nodes, in groups of four, sends to the one that comes so many later."""
    machine = replace(PLAIN, groups=(NodeGroups(4, 5000, 40),))
    piece = np.zeros(100, "uint8")

    def call(comm):
        comm.sendrecv(distance, piece, 16 - distance, piece)

    found = timed_call(tuple(range(16)), machine, call)
    assert found == (0, 5 * BETWEEN + 100 * senders * 40)


def test_what_ranks_share_takes_barriers_only():
    """All ranks of a node need all of B; with shared memory they read it where it is."""
    job = einmpi.program("Z[i,k] = sum(A[i,j] * B[j,k])", A=(8000, 100), B=(100, 1000))
    moving = []
    for shared in (True, False):
        plan = make_plan(job.graph, 4, Options(machine=replace(PLAIN, shared=shared)))
        assert plan.bytes_predicted == 3 * 100 * 1000 * 8
        moving.append(sum(bill.moving_inside for bill in plan.bills.values()) // 4)
    in_memory, by_messages = moving
    assert in_memory < 10 * INSIDE
    # Two rounds: a quarter of the matrix, then a half.
    assert by_messages >= 600_000 * 2


def test_times_are_those_of_an_average_rank():
    """Five rows on two ranks: the first rank has three and gets two, the other gets three."""
    job = einmpi.program(
        "Z[i,k] = sum(A[i,j] * B[j,k])", A=(100, 5), B=(5, 5), roles={"batch": ("i",)}
    )
    plan = einmpi.plan(job, 2, nodes=2, strategy="data")
    (bill,) = with_predicted_times(plan, PLAIN).bills.values()
    assert plan.bytes_predicted == 5 * 5 * 8
    assert bill.moving_between == 2 * BETWEEN + plan.bytes_predicted * 10


def test_a_vertex_takes_as_long_as_its_largest_share():
    """Seven rows on two ranks: the other rank waits while the first one computes four of them."""
    job = einmpi.program(
        "Z[i,k] = sum(A[i,j] * B[j,k])", A=(7, 10), B=(10, 3), roles={"batch": ("i",)}
    )
    plan = einmpi.plan(job, 2, strategy="data", machine=PLAIN)
    (bill,) = plan.bills.values()
    assert bill.computing == 2 * (2 * 4 * 10 * 3)  # a picosecond for each operation


def test_messages_inside_a_node_leave_one_after_another():
    piece, nothing = np.zeros(100, "uint8"), np.zeros(0, "uint8")

    def send_to_all(comm):
        comm.alltoallv((0, 1, 2), np.concatenate([piece, piece]), [0, 100, 100], nothing, [0] * 3)

    assert timed_call((0, 0, 0), PLAIN, send_to_all) == (2 * (INSIDE + 100 * 2), 0)


# ---- the fastest plan ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("ranks, nodes", [(4, 1), (8, 2), (12, 3), (16, 16)])
@pytest.mark.parametrize("name", ["chain", "attention", "ffnn", "convolution", "softmax"])
def test_no_plan_is_slower_than_that_of_one_search(name, ranks, nodes):
    graph = einmpi.load(ROOT / "jobs" / f"{name}.toml").graph
    options = Options(nodes=nodes, machine=CLUSTER)
    first = with_predicted_times(_plan(graph, ranks, options), CLUSTER)
    plan = make_plan(graph, ranks, options)
    assert plan.seconds_predicted <= first.seconds_predicted
    assert plan.digest == make_plan(graph, ranks, options).digest


def plans_of_small_tensors():
    """Return the plan for the fewest bytes and that for the least time."""
    job = einmpi.load(ROOT / "jobs" / "chain.toml", s=64)
    return einmpi.plan(job, 256, nodes=32), einmpi.plan(job, 256, nodes=32, machine=CLUSTER)


@pytest.mark.slow
def test_the_fewest_bytes_take_longer_where_tensors_are_small():
    least_bytes, plan = plans_of_small_tensors()
    timed = with_predicted_times(least_bytes, CLUSTER)
    # Kernels were not timed for a plan without a machine.
    of_kernels = sum(bill.computing for bill in plan.bills.values())
    of_messages = sum(bill.time for bill in plan.bills.values()) - of_kernels
    assert of_messages < sum(bill.time for bill in timed.bills.values())


@needs_simgrid
@pytest.mark.slow
def test_fewer_messages_win_where_tensors_are_small():
    least_bytes, plan = plans_of_small_tensors()
    cluster = make_cluster("cores=8,topology=flat", 256, CLUSTER)
    place = Place(cluster.platform(), cluster.hosts()[:32], CLUSTER)
    fewer = simulate_plan(plan, place)
    more = simulate_plan(least_bytes, place)
    assert fewer.messages < more.messages
    assert fewer.seconds < 0.95 * more.seconds


def test_uneven_nodes_are_not_timed():
    """It is not known which ranks are on which node."""
    graph = einmpi.load(ROOT / "jobs" / "chain.toml").graph
    plan = make_plan(graph, 6, Options(nodes=4, uneven=True, machine=CLUSTER))
    assert plan.seconds_predicted > 0


# ---- beside SimGrid ------------------------------------------------------------------------------


def compare(job, ranks, spec, strategy):
    """Return predicted seconds divided by simulated ones."""
    cluster = make_cluster(spec, ranks, CLUSTER)
    machine = replace(CLUSTER, groups=cluster.groups())
    nodes = -(-ranks // cluster.cores)
    plan = einmpi.plan(job, ranks, nodes=nodes, strategy=strategy, machine=machine)
    done = simulate_plan(plan, Place(cluster.platform(), cluster.hosts()[:nodes], machine))
    return plan.seconds_predicted / done.seconds


@needs_simgrid
@pytest.mark.sampled(5)
@pytest.mark.parametrize("strategy", ["eindecomp", "sqrt", "data", "megatron"])
@pytest.mark.parametrize("ranks, spec", [
    (8, "cores=8"),
    (64, "cores=8,topology=flat"),
    (64, "cores=4,topology=dragonfly"),
    (32, "cores=1,topology=flat"),
    (32, "cores=1,topology=dragonfly"),
])  # fmt: skip
def test_equal_blocks_take_the_simulated_time(ranks, spec, strategy):
    """Extents divide, so all ranks do the same; SimGrid adds headers of a few bytes."""
    job = einmpi.program(
        "Z[i,k] = sum(A[i,j] * B[j,k]) + sum(C[i,j] * sum(D[j,l] * E[l,k]))",
        roles={"batch": ("i",), "hidden": ("l",)},
        **dict.fromkeys("ABCDE", (512, 512)),
    )
    assert compare(job, ranks, spec, strategy) == pytest.approx(1, abs=0.05)


@needs_simgrid
@pytest.mark.slow
@given(
    st.integers(150, 400),
    st.integers(150, 400),
    st.sampled_from([(6, "cores=6"), (16, "cores=4,topology=flat"), (30, "cores=1,topology=flat")]),
    st.sampled_from(["eindecomp", "sqrt"]),
)
def test_other_blocks_take_about_the_simulated_time(rows, columns, where, strategy):
    """Ranks have different shares, and wait for each other where the prediction has averages."""
    job = einmpi.program(
        "Z[i,k] = sum(A[i,j] * B[j,k])", A=(rows, 2 * columns), B=(2 * columns, columns)
    )
    assert compare(job, *where, strategy) == pytest.approx(1, abs=0.4)
