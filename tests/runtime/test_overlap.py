"""Transfers in the background: the same bits, the same bytes, and no more memory than planned."""

import json
import tempfile
import threading
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import fake_cupy
import numpy as np
import pytest
from distributed import NoValues
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_checks import verify
from step_kinds import computed_as, is_reduce

import einmpi
from einmpi.api import options_of
from einmpi.comm.base import Comm
from einmpi.comm.threads import run_threads
from einmpi.compiled.program import Compiled
from einmpi.files.reading import fill_box
from einmpi.kernels import halo_parts, index_sets
from einmpi.planner.moving import overlap
from einmpi.process.environment import TRANSPORT_VARIABLE
from einmpi.report.record import Recorder, events
from einmpi.report.times import summary_rows, vertex_times
from einmpi.runtime import background
from einmpi.runtime.backend import ShapeBackend
from einmpi.runtime.background import Background
from einmpi.runtime.cpu.backend import NumpyBackend
from einmpi.runtime.program import Program
from einmpi.schedule.lower import lower
from einmpi.schedule.memory import peak_bytes
from einmpi.schedule.overlap import with_overlap
from einmpi.schedule.steps import Await

CHAIN = "Z[i,k] = sum(A[i,j] * B[j,k]) + sum(C[i,j] * sum(D[j,l] * E[l,k]))"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Cut small transfers too."""
    monkeypatch.setattr(overlap, "PART_UNIT_BYTES", 64)
    monkeypatch.setattr(overlap, "LEAST_PART_OPERATIONS", 1)


def generated_job(program, **shapes):
    """A job whose inputs are generated: each rank makes its own part of them."""
    lines = [f'program = """\n{program}\n"""', "[inputs]"]
    for seed, (name, shape) in enumerate(shapes.items()):
        lines.append(f'{name} = {{ shape = {list(shape)}, random = "normal", seed = {seed} }}')
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "job.toml")
        file.write_text("\n".join(lines))
        return einmpi.load(file)


def generated_inputs(job):
    """The inputs of such a job as whole arrays."""
    inputs = {}
    for spec in job.inputs:
        bound = job.graph[spec.name].bound
        inputs[spec.name] = np.empty(bound)
        fill_box(spec, bound, tuple(slice(0, extent) for extent in bound), inputs[spec.name])
    return inputs


def chain_job(s=96, skew=1):
    thin, long = s // skew, s * skew
    shapes = {"A": (s, thin), "B": (thin, s), "C": (s, thin), "D": (thin, long), "E": (long, s)}
    return generated_job(CHAIN, **shapes)


def run(job, ranks, nodes, mode, inputs=None, calls=1, **options):
    """Run a job on threads; return outputs, Measured, plan and schedule of each rank."""
    job = replace(job, overlap=mode)

    def on_rank(comm):
        compiled = Compiled(job, comm, options_of(job, **options))
        for _ in range(calls):
            outputs = compiled(inputs or {})
        ((plan, schedule),) = compiled.ready.values()
        gathered = {name: array.gather() for name, array in outputs.items()}
        return gathered, compiled.measured, plan, schedule

    return run_threads(ranks, on_rank, nodes=nodes, limit=20)


def transfers_in_background(results):
    return sum(step.background for _, _, _, schedule in results for step in schedule.steps)


def check_against_off(job, ranks, nodes, inputs=None, **options):
    """Compare a run with and without transfers in the background; return the first one."""
    found = run(job, ranks, nodes, "auto", inputs, **options)
    off = run(job, ranks, nodes, "off", inputs, **options)
    assert transfers_in_background(off) == 0
    verify([schedule for _, _, _, schedule in found])
    assert sum(measured.received for _, measured, _, _ in found) == found[0][2].bytes_predicted
    for (outputs, measured, plan, schedule), (others, measured_off, _, _) in zip(
        found, off, strict=True
    ):
        for name, array in outputs.items():
            np.testing.assert_array_equal(array, others[name])
        assert measured.received == measured_off.received
        assert measured.between == measured_off.between
        assert measured.peak <= peak_bytes(schedule) <= plan.peak
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("skew", [1, 4])
@pytest.mark.parametrize(
    "ranks, nodes", [(2, 2), (3, 2), (4, 2), (4, 4), (5, 3), (6, 3), (7, 2), (8, 2), (9, 3)]
)
def test_the_chain_has_the_same_bits_and_bytes(ranks, nodes, skew):
    job = chain_job(96, skew)
    found = check_against_off(job, ranks, nodes)
    A, B, C, D, E = generated_inputs(job).values()
    np.testing.assert_allclose(found[0][0]["Z"], A @ B + C @ (D @ E), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("extents", [(7, 5, 64), (5, 9, 64), (8, 3, 64)], ids=str)
def test_all_members_send_in_parts(extents, monkeypatch):
    """Rank 0 receives less than it has, and could leave its block where it is; rank 1 could not."""
    monkeypatch.setattr(index_sets, "MIN_SPLIT_VALUES", 1)
    monkeypatch.setattr(halo_parts, "MIN_SPLIT_VALUES", 1)
    program = "U[a,b,c] = A[a,b,c] + W[a,b,c]\nS[a] = sum(A[a,b,c]**2)"
    job = generated_job(program, A=extents, W=extents)
    found = check_against_off(job, 2, 2, pin={"A": (1, 2, 1), "W": (2, 1, 1)})
    assert transfers_in_background(found)
    inputs = generated_inputs(job)
    np.testing.assert_array_equal(found[0][0]["U"], inputs["A"] + inputs["W"])


LOOP = """
program = '''
R[i,k] = sum(P[i,j] * P[j,k])
Q[i,k] = 0.5 * X[i,k] + 0.01 * sum(R[i,j] * X[k,j])
'''
[inputs]
X = { shape = [60, 60], random = "normal" }
P = { shape = [60, 60], random = "normal", seed = 1 }
[loop]
steps = 4
carry = { P = "Q" }
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", ["numpy", "cupy"])
@pytest.mark.parametrize("ranks, nodes", [(3, 2), (5, 2), (7, 3)])
def test_loops_have_the_same_bits(ranks, nodes, backend, tmp_path, monkeypatch):
    """On GPUs, kernels between the messages are launched as CUDA graphs."""
    if backend == "cupy":
        fake_cupy.install(monkeypatch, pool=fake_cupy.new_pool())
    begun = []
    begin = Background.begin

    def noted_begin(transfers, step):
        begun.append(mode)
        begin(transfers, step)

    monkeypatch.setattr(Background, "begin", noted_begin)
    (tmp_path / "job.toml").write_text(LOOP)
    job = einmpi.load(tmp_path / "job.toml")
    found = {}
    launches = {}
    for mode in ("auto", "off"):
        changed = replace(job, overlap=mode, backend=backend)

        def on_rank(comm, changed=changed):
            return einmpi.loop(changed, comm=comm).outputs["P"].gather()

        found[mode] = run_threads(ranks, on_rank, nodes=nodes)[0]
        launches[mode] = fake_cupy.Graph.launches
    np.testing.assert_array_equal(found["auto"], found["off"])
    arrays = generated_inputs(job)
    state = arrays["P"]
    for _ in range(4):
        state = 0.5 * arrays["X"] + 0.01 * state @ state @ arrays["X"].T
    np.testing.assert_allclose(found["auto"], state, rtol=1e-9)
    assert set(begun) == {"auto"}
    if backend == "cupy":
        assert launches["auto"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("transport", ["host", "nccl", "mpi"])
@pytest.mark.parametrize("ranks, nodes", [(2, 2), (4, 2), (5, 3)])
def test_gpus_compute_while_messages_travel(ranks, nodes, transport, monkeypatch):
    """The stand-in for CuPy does what is on a stream as late as possible."""
    fake_cupy.install(monkeypatch, gpus=ranks, nccl=True)
    monkeypatch.setenv(TRANSPORT_VARIABLE, transport)
    job = replace(chain_job(), backend="cupy")
    found = check_against_off(job, ranks, nodes)
    assert transfers_in_background(found)
    A, B, C, D, E = generated_inputs(job).values()
    np.testing.assert_allclose(found[0][0]["Z"], A @ B + C @ (D @ E), rtol=1e-9, atol=1e-9)


def test_kernels_work_while_parts_travel():
    schedule = run(chain_job(), 2, 2, "auto")[0][3]
    assert any(isinstance(step, Await) for step in schedule.steps)
    parts = [step for step in schedule.steps if computed_as(step) == "part"]
    # The sum is computed by BLAS, which adds a product to the other one.
    assert {len(part.kernels) for part in parts} == {1, 2}
    assert all(" for k = " in str(part) for part in parts)
    # The second input begins to travel before the first product is computed.
    names = [f"{step.kind} {step.vertex}" for step in schedule.steps]
    assert names.index("exchange E") < names.index("kernel Z_1")
    # The first part of a result is sent before the last part is computed.
    last_part = len(names) - 1 - names[::-1].index("kernel Z_2")
    assert names.index("exchange Z_2") < last_part


def test_reductions_are_done_in_parts_too():
    job = generated_job("Z[i,k] = sum(A[i,j] * B[j,k])", A=(48, 4000), B=(4000, 64))
    found = check_against_off(job, 2, 2)
    steps = found[0][3].steps
    assert any(is_reduce(step) and step.background for step in steps)


def test_nothing_is_in_the_background_on_one_node_or_when_off():
    job = chain_job()
    assert transfers_in_background(run(job, 4, 1, "auto")) == 0
    assert run(job, 4, 2, "off")[0][2].overlap == 0


def test_small_transfers_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(overlap, "PART_UNIT_BYTES", 2**19)
    found = run(chain_job(), 2, 2, "auto")
    assert transfers_in_background(found) == 0
    assert found[0][2].overlap == 0


PROGRAMS = [
    "Z[i,k] = sum(A[i,j] * B[j,k])",
    "Y[i,k] = sum(A[i,j] * B[j,k])\nZ[i,k] = sum(Y[i,j] * exp(-abs(C[j,k])))",
    "Y[j,k] = tanh(sum(A[j,i] * B[i,k]))\nZ[i,k] = max(C[i,j] + Y[j,k])",
    "Y[i,j] = sum(A[i,k] * B[k,j])\nW[j,i] = Y[i,j]\nZ[i,k] = sum(W[i,j] * C[j,k]) + Y[i,k]",
    "Y[i,k] = sum(A[i,j] * B[j,k])\nn = sum(Y[i,k] * C[i,k])\nZ[i,k] = Y[i,k] / (1 + n**2)",
    "Y[i,k] = sum(A[i,j] * B[j,k])\nZ[i,k] = sum(Y[i,j] * Y[j,k])",
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_on_two_nodes(program):
    shapes = {name: (20, 20) for name in "ABC" if f"{name}[" in program}
    check_against_off(generated_job(program, **shapes), 4, 2)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(PROGRAMS),
    st.integers(16, 70),
    st.sampled_from([(2, 2), (3, 3), (4, 2), (6, 2), (8, 4)]),
)
def test_programs_have_the_same_bits_and_bytes(program, size, ranks_and_nodes):
    shapes = {name: (size, size) for name in "ABC" if f"{name}[" in program}
    ranks, nodes = ranks_and_nodes
    check_against_off(generated_job(program, **shapes), ranks, nodes)


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 100), st.sampled_from([(2, 2), (4, 2)]))
def test_a_memory_limit_is_kept(share, ranks_and_nodes):
    """Between the least and the most memory, there is overlap where there is room for it."""
    job = chain_job()
    ranks, nodes = ranks_and_nodes
    full = einmpi.plan(job, ranks, nodes=nodes)
    least = full.peak - full.overlap
    limit = least + full.overlap * share // 100
    plan = einmpi.plan(job, ranks, nodes=nodes, memory=limit)
    assert plan.peak <= limit and not plan.spilled
    if share == 100:
        assert plan.overlapped == full.overlapped
    schedules = [with_overlap(lower(plan, rank), plan.peak) for rank in range(ranks)]
    verify(schedules)
    assert max(map(peak_bytes, schedules)) <= plan.peak
    if share % 25 == 0:
        check_against_off(job, ranks, nodes, memory=limit)


def test_a_rank_with_less_memory_waits_but_sends_the_same_parts():
    plan = einmpi.plan(chain_job(), 2, nodes=2)
    roomy = with_overlap(lower(plan, 0), plan.peak)
    tight = with_overlap(lower(plan, 1), peak_bytes(roomy) - 1)
    verify([roomy, tight])
    assert peak_bytes(tight) < peak_bytes(roomy)
    assert sum(step.background for step in tight.steps) < sum(
        step.background for step in roomy.steps
    )


def test_dry_runs_count_the_same_bytes():
    plan = einmpi.plan(chain_job(), 4, nodes=2)
    received = 0
    for rank in range(4):
        comm = Comm(rank, 4, 2)
        schedule = with_overlap(lower(plan, rank), plan.peak)
        Program(schedule, ShapeBackend(), comm).run(NoValues())
        received += comm.received
    assert received == plan.bytes_predicted


def test_later_calls_are_the_same_and_leave_no_thread():
    found = run(chain_job(), 2, 2, "auto", calls=3)
    assert transfers_in_background(found)
    for thread in threading.enumerate():
        if thread.name == "transfers":
            thread.join(60)
            assert not thread.is_alive()


def test_hidden_seconds_are_measured(monkeypatch):
    """Of three transfers, the rank waits for a half of the last one."""
    seconds = [0.0]
    last_is_half_done = threading.Event()
    rank_waits = threading.Event()

    def clock():
        found = seconds[0]
        if threading.current_thread() is threading.main_thread():
            rank_waits.set()
        return found

    def exchange(step, *_):
        seconds[0] += 0.05
        if step is transfers[-1]:
            last_is_half_done.set()
            assert rank_waits.wait(60)
        seconds[0] += 0.05

    monkeypatch.setattr(background, "perf_counter", clock)
    monkeypatch.setattr(background, "transfer", exchange)
    plan = einmpi.plan(chain_job(), 2, nodes=2)
    schedule = with_overlap(lower(plan, 0), plan.peak)
    transfers = [step for step in schedule.steps if step.background][:3]
    done = []
    comm = Comm(0, 2, 2)
    under_way = Background(NumpyBackend(), comm, lambda *spans: done.append(spans))
    with closing(under_way):
        for transfer in transfers:
            under_way.begin(transfer)
        assert last_is_half_done.wait(60)
        under_way.wait_for(transfers[-1])
        assert under_way.seconds_moving == pytest.approx(0.3)
        assert under_way.seconds_waiting == pytest.approx(0.05)
        assert under_way.seconds_hidden == pytest.approx(0.25)
    assert [step for step, _, _ in done] == transfers
    assert all(end > start for _, start, end in done)
    assert comm.pause == 0


# ---- failures ------------------------------------------------------------------------------------


def test_a_failing_kernel_ends_the_call_on_all_ranks_and_the_next_call_works():
    text = "Y[i,k] = sum(A[i,j] * B[j,k])\nZ[i,k] = sum(Y[i,j] * C[j,k])\nw[i] = Z[i, n[i]]"
    integers = np.arange(64)
    job = einmpi.program(text, A=(64, 64), B=(64, 64), C=(64, 64), n=integers)
    shapes = dict.fromkeys("ABC", (64, 64))
    job = replace(job, inputs=generated_job("Z[i,j] = A[i,j] + B[i,j] + C[i,j]", **shapes).inputs)
    inputs = generated_inputs(job)
    good = {"n": integers}
    bad = {"n": np.full(64, 99)}

    def on_rank(comm):
        compiled = Compiled(job, comm, options_of(job))
        with pytest.raises(einmpi.EinmpiError):
            compiled(bad)
        outputs = compiled(good)
        ((_, schedule),) = compiled.ready.values()
        return outputs["w"].gather(), schedule.overlaps

    for found, overlaps in run_threads(2, on_rank, nodes=2, limit=20):
        assert overlaps
        A, B, C = (inputs[name] for name in "ABC")
        np.testing.assert_allclose(found, ((A @ B) @ C)[np.arange(64), np.arange(64)], atol=1e-9)


def test_an_error_in_the_background_is_raised_where_the_rank_waits(monkeypatch):
    """The rank does not wait for ever, whatever it was doing when the transfer failed."""

    def fail(*_):
        raise RuntimeError("the network is down")

    monkeypatch.setattr(background, "transfer", fail)
    with pytest.raises(RuntimeError, match="the network is down"):
        run(chain_job(), 2, 2, "auto")


def test_a_library_that_serves_one_thread_moves_nothing_in_the_background():
    job = chain_job()
    comm = Comm(0, 2, 2)
    comm.serves_threads = False
    compiled = Compiled(job, comm, options_of(job))
    plan, schedule, _ = compiled.prepare({})
    assert plan.overlap == 0 and not schedule.overlaps


# ---- reports -------------------------------------------------------------------------------------


def test_the_trace_shows_transfers_beside_kernels():
    job = chain_job(384)

    def on_rank(comm):
        compiled = Compiled(job, comm, options_of(job))
        recorder = Recorder(comm)
        compiled.runner.on_step = recorder
        compiled.runner.on_transfer = recorder.on_transfer
        recorder.begin()
        compiled({})
        return recorder.finish(), compiled.measured

    results = run_threads(2, on_rank, nodes=2, limit=20)
    timeline, _ = results[0]
    moved = sum(span.nbytes for span in timeline.spans if span.kind in ("exchange", "reduce"))
    assert moved == sum(measured.received for _, measured in results)
    background = [span for span in timeline.spans if span.background]
    assert background
    tracks = {event["tid"] for event in events(timeline) if event["ph"] == "X"}
    assert tracks == {0, 1, 2, 3}
    for track in tracks:
        spans = [e for e in events(timeline) if e["ph"] == "X" and e["tid"] == track]
        for before, after in pairwise(spans):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6
    times = vertex_times(timeline, [vertex.name for vertex in job.graph.vertices])
    total = sum(each.hidden for each in times)
    assert total == pytest.approx(
        sum(measured.seconds_hidden for _, measured in results) / 2, rel=0.3, abs=2e-3
    )
    assert all(each.communication >= 0 and each.hidden >= 0 for each in times)
    if total:
        assert "hidden s" in summary_rows(times)[0]
        json.dumps([each.as_json() for each in times])
