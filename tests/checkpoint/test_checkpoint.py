"""Checkpoints: a run that is killed anywhere continues, with the same bits on the same number of
ranks and up to rounding on others; damaged checkpoints are refused."""

import errno
import functools
import json
import os
import shutil
import zlib
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from checkpoint_jobs import INPUTS, PROGRAM, programs, write_job
from distributed import assert_close
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_cuts import plan_crosses_windows, random_cuts
from schedule_checks import verify

import einmpi
from einmpi.api import options_of
from einmpi.checkpoint import folder as checkpoint_module
from einmpi.checkpoint.folder import Saving
from einmpi.checkpoint.load import checksum, complete
from einmpi.checkpoint.resume import Checkpoints, prepare
from einmpi.comm.threads import run_threads
from einmpi.compiled import planning
from einmpi.compiled.inputs import Inputs
from einmpi.compiled.stored_inputs import plan_with_files
from einmpi.errors import EinmpiError, InputError, Stopped
from einmpi.graph.rewrite import needed, rest
from einmpi.kernels.cpu import map_and_folds as grouping_rule
from einmpi.planner.make_plan import make_plan
from einmpi.planner.plan import Options
from einmpi.report.describe import relative_error
from einmpi.schedule.layout import PARTIAL
from einmpi.schedule.lower import lower
from einmpi.schedule.steps import Repeat, Transfer
from einmpi.units import parse_seconds

HOUR = 3600.0


@pytest.fixture
def job(tmp_path):
    return einmpi.load(write_job(tmp_path))


@pytest.fixture(autouse=True)
def planned_once(monkeypatch):
    """Ranks that are threads share a core, and plan the same."""
    known = {}

    def plan(graph, ranks, options):
        key = str(graph), ranks, repr(options)
        if key not in known:
            known[key] = plan_with_files(graph, ranks, options)
        return known[key]

    monkeypatch.setattr(planning, "plan_with_files", plan)


class Killed(BaseException):
    """As good as SIGKILL: nothing catches it."""


def go(
    job,
    ranks,
    folder=None,
    resume=False,
    every=HOUR,
    asked=(),
    strategy=None,
    on_step=None,
    reached=None,
):
    """Run a job on threads: (its outputs, the checkpoints of rank 0, the plan)."""

    def on_rank(comm):
        checkpoints = None
        if folder is not None:
            signals = asked.get(comm.rank, ()) if isinstance(asked, dict) else asked
            saving = Saving(str(folder), every, resume=resume, asked=signals)
            checkpoints = Checkpoints(saving, comm, job)
        compiled, plan, schedule, given = prepare(
            job, comm, lambda job: options_of(job, strategy=strategy), checkpoints, {}
        )
        compiled.runner.on_step = on_step and functools.partial(on_step, comm.rank)
        if reached is not None and comm.rank == 0:
            own = checkpoints.reached
            checkpoints.reached = lambda point, buffers: (
                own(point, buffers),
                reached(point.vertex),
            )
        outputs, measured = compiled.run_schedule(
            plan, schedule, Inputs(compiled.job, given, compiled.files), checkpoints
        )
        assert measured.peak <= plan.peak
        assert measured.received == sum(
            s.nbytes for s in schedule.steps if isinstance(s, Transfer | Repeat)
        )
        return {name: array.gather() for name, array in outputs.items()}, checkpoints, plan

    return run_threads(ranks, on_rank)[0]


def snapshots(job, ranks, folder, strategy=None):
    """What a kill leaves behind each vertex, from a run that saves after all of them: (folders, the
    run's outputs)."""
    states = []

    def keep(vertex):
        states.append(folder / f"after {len(states) + 1} {vertex}")
        shutil.copytree(folder / "saved", states[-1])

    outputs, checkpoints, _ = go(
        job, ranks, folder / "saved", every=0, strategy=strategy, reached=keep
    )
    assert checkpoints.count == len(job.graph.computed) == len(states)
    shutil.rmtree(folder / "saved")
    return states, outputs


def assert_same_bits(found, wanted):
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes(), name


def assert_close_to(found, wanted):
    """Other ranks add in another order: a few roundings of 1e-16, magnified by the norms of a chain
    of products."""
    for name, array in wanted.items():
        assert relative_error(array, found[name]) <= 1e-12, name


# ---- the same numbers, wherever it is killed ----------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (4, None),
        (3, "sqrt"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (1, None),
                (2, None),
                (6, "sqrt"),
                (4, "replicate"),
                (4, "eindecomp-paper"),
                (8, None),
                (13, None),
            )
        ),
    ],
)
def test_killed_after_any_vertex(job, tmp_path, ranks, strategy):
    wanted, _, _ = go(job, ranks, strategy=strategy)
    assert_close(wanted, einmpi.reference(job))
    states, saving = snapshots(job, ranks, tmp_path, strategy)
    assert_same_bits(saving, wanted)
    for number, state in enumerate(states, 1):
        found, checkpoints, _ = go(job, ranks, state, resume=True, strategy=strategy)
        assert checkpoints.saved.done == number
        assert_same_bits(found, wanted)


@pytest.mark.parametrize("ranks", [4, 6])
def test_stencils_in_blocks_of_both_dimensions(tmp_path, ranks):
    """Digits have several orders; other ranks read what they need."""
    near = "X[i,j] + where(i>=1, X[i-1,j], 0) + where(j>=1, X[i,j-1], 0)"
    program = f"A[i:24,j:24] = {near}\nB[i,j] = A[j,i] / 2\nZ[i:24,j:24] = B[j,i] + A[i,(j+1)%24]"
    inputs = 'X = { shape = [24, 24], random = "uniform", seed = 1 }'
    job = einmpi.load(write_job(tmp_path, program, inputs, 'Z = "out.h5:/Z"'))
    plan = einmpi.plan(job, ranks)
    assert plan.orders_of("A") == (0, -1)
    states, wanted = snapshots(job, ranks, tmp_path)
    assert_close(wanted, einmpi.reference(job))
    for number, state in enumerate(states, 1):
        manifests = [path.read_text() for path in state.rglob("*.json")]
        assert any('"orders"' in text for text in manifests)
        for other in (ranks, 1, 3, 8):
            shutil.copytree(state, tmp_path / "again")
            found, checkpoints, _ = go(job, other, tmp_path / "again", resume=True)
            assert checkpoints.saved.done == number
            (assert_same_bits if other == ranks else assert_close_to)(found, wanted)
            shutil.rmtree(tmp_path / "again")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(3))
def test_killed_with_cuts_across_windows(tmp_path, monkeypatch, seed):
    """On other ranks, too, of which each reads what it needs."""
    program = "A[i,k] = sum(X[i,j] * Y[j,k])\nB[i,k] = sum(A[j,i] * X[j,k])\nZ[k] = max[i](B[i,k])"
    generated = '{ shape = [7, 7], random = "uniform" }'
    inputs = f"X = {generated}\nY = {generated}"
    job = einmpi.load(write_job(tmp_path, program, inputs, 'Z = "out.h5:/Z"'))
    random_cuts(monkeypatch, seed)
    wanted, _, plan = go(job, 8)
    assert plan_crosses_windows(plan)
    states, _ = snapshots(job, 8, tmp_path)
    for state in states:
        other = state.with_name(f"{state.name} again")
        shutil.copytree(state, other)
        assert_same_bits(go(job, 8, state, resume=True)[0], wanted)
        assert_close_to(go(job, 12, other, resume=True)[0], wanted)


@pytest.mark.slow
@pytest.mark.parametrize("part", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_killed_where_memory_is_short(job, tmp_path, part):
    """What was outside of memory is there again."""
    whole = einmpi.plan(job, 2).peak
    job = replace(job, memory=whole // part)
    wanted, _, plan = go(job, 2)
    assert plan.spilled
    assert_close(wanted, einmpi.reference(job))
    states, saving = snapshots(job, 2, tmp_path)
    assert_same_bits(saving, wanted)
    for state in states:
        assert_same_bits(go(job, 2, state, resume=True)[0], wanted)


@pytest.mark.parametrize("ranks", [2, 3])
def test_kernels_that_go_together(tmp_path, monkeypatch, ranks):
    """No run is saved in the middle of kernels that go together, on whichever rank; and the bits
    are the same."""
    monkeypatch.setattr(grouping_rule, "CACHE_BLOCK_BYTES", 1024)
    monkeypatch.setattr(grouping_rule, "MIN_BLOCKS", 4)
    monkeypatch.setattr(grouping_rule, "WORTH_COMPILING", 650)
    program = (
        "A[i,j] = softmax[j](X[i,j])\nB[i,k] = sum(A[i,j] * Y[j,k])\nZ[i,k] = layernorm[k](B[i,k])"
    )
    # On 3 ranks two have 10 rows, which are too few to go together, and one has 11.
    inputs = (
        'X = { shape = [31, 64], random = "normal" }\n'
        'Y = { shape = [64, 64], random = "normal", seed = 1 }'
    )
    job = einmpi.load(write_job(tmp_path, program, inputs, 'Z = "out.h5:/Z"'))
    wanted, _, _ = go(job, ranks)
    saved = []

    def keep(vertex):
        if not saved or checkpoints_in(tmp_path / "saved") != saved[-1][0]:
            saved.append((checkpoints_in(tmp_path / "saved"), tmp_path / f"after {vertex}"))
            shutil.copytree(tmp_path / "saved", saved[-1][1])

    outputs, checkpoints, _ = go(job, ranks, tmp_path / "saved", every=0, reached=keep)
    assert 2 <= checkpoints.count == len(saved) < len(job.graph.computed)
    assert_same_bits(outputs, wanted)
    for _, state in saved:
        assert_same_bits(go(job, ranks, state, resume=True)[0], wanted)


def checkpoints_in(folder):
    return complete(str(folder))


@pytest.mark.slow
def test_idle_ranks_take_part(job, tmp_path):
    """A plan for 13 ranks uses 12 of them. The last one, which only waits for the others, is asked
    to stop."""
    wanted, _, plan = go(job, 13)
    assert plan.mesh.ranks == 12
    asked = []
    with pytest.raises(Stopped):
        go(job, 13, tmp_path / "saved", asked={12: asked}, on_step=_ask_at("A4", asked))
    assert complete(tmp_path / "saved") in (["000007"], ["000008"])  # it may be ahead of the others
    again = shutil.copytree(tmp_path / "saved", tmp_path / "again")
    assert_same_bits(go(job, 13, tmp_path / "saved", resume=True)[0], wanted)
    assert_close_to(go(job, 4, again, resume=True)[0], wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "every"),
    [
        (4, 3, 1),
        (3, 4, 4),
        (4, 1, 4),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, 4, 1), (13, 6, 3), (8, 13, 3))
        ),
    ],
)
def test_another_number_of_ranks(job, tmp_path, before, after, every):
    states, wanted = snapshots(job, before, tmp_path, "sqrt")
    for number, state in list(enumerate(states, 1))[::every]:
        found, checkpoints, plan = go(job, after, state, resume=True)
        assert checkpoints.saved.done == number and not checkpoints.restored
        verify([lower(plan, rank) for rank in range(after)])
        assert_close_to(found, wanted)


def test_partial_results_are_saved_and_put_together(tmp_path):
    """A sum that is cut and has one reader stays in parts until it is read; the parts are what is
    saved."""
    job = einmpi.load(
        write_job(
            tmp_path,
            "Y[i,k] = sum(A[i,j] * B[j,k]); m[i] = max(A[i,j] - B[j,i])\n"
            "Z[i,l] = sum(Y[i,k] * C[k,l]); w[i] = m[i] + 1",
            "\n".join(
                f'{name} = {{ shape = {shape}, random = "normal" }}'
                for name, shape in (("A", [3, 60]), ("B", [60, 3]), ("C", [3, 3]))
            ),
            "",
        )
    )
    states, wanted = snapshots(job, 4, tmp_path)
    cuts = [tensor["cuts"] for state in states for tensor in manifest(state)["tensors"]]
    assert any(PARTIAL in cut for cut in cuts)
    for state in states:
        assert_same_bits(
            go(job, 4, shutil.copytree(state, f"{state} same"), resume=True)[0], wanted
        )
        assert_close_to(go(job, 3, state, resume=True)[0], wanted)


@pytest.mark.slow
def test_saved_again_after_another_number_of_ranks(job, tmp_path):
    """4 ranks, then 3, then 2, then 4: what was saved first goes through all of them."""
    wanted, _, _ = go(job, 4)
    for ranks, stop in ((4, "A1"), (3, "A3"), (2, "A5")):
        asked = []
        with pytest.raises(Stopped):
            go(
                job,
                ranks,
                tmp_path / "saved",
                resume=True,
                asked=asked,
                on_step=_ask_at(stop, asked),
            )
        assert complete(tmp_path / "saved") == [f"{list(job.graph.by_name).index(stop) - 2:06d}"]
    assert_close_to(go(job, 4, tmp_path / "saved", resume=True)[0], wanted)


def _ask_at(vertex, asked):
    def on_step(rank, step):
        if getattr(step, "vertex", "") == vertex and not asked:
            asked.append("SIGTERM")

    return on_step


@pytest.mark.slow
def test_killed_in_any_step(job, tmp_path):
    """What is on disk then is what the last vertex has left, whoever dies in whichever step."""
    wanted, _, plan = go(job, 4)
    steps = len(lower(plan, 2).steps)
    for fatal in range(0, steps, 9):
        count = [0]

        def die(rank, step, fatal=fatal, count=count):
            if rank == 2:
                count[0] += 1
                if count[0] > fatal:
                    raise Killed

        folder = tmp_path / str(fatal)
        with pytest.raises(Killed):
            go(job, 4, folder, every=0, on_step=die)
        assert len(complete(folder)) <= 1
        assert_same_bits(go(job, 4, folder, resume=True)[0], wanted)


def test_another_strategy_goes_on_too(job, tmp_path):
    states, wanted = snapshots(job, 4, tmp_path)
    assert_close_to(go(job, 4, states[6], resume=True, strategy="replicate")[0], wanted)


def test_scans_in_two_passes(tmp_path):
    """The planner adds vertices for totals; a checkpoint has those of the program only."""
    program = """
    y[i] = X[i] * 2
    c[i] = cumsum[i](y[i])
    Z[i] = cummax[i](c[i]) - y[i]
    """
    inputs = 'X = { shape = [50], random = "normal", seed = 1 }'
    job = einmpi.load(write_job(tmp_path, program, inputs, outputs='Z = "out.h5:/Z"'))
    states, wanted = snapshots(job, 4, tmp_path)
    for state in states:
        for ranks in (4, 3):
            folder = tmp_path / "again"
            shutil.copytree(state, folder)
            outputs, _, plan = go(job, ranks, folder, resume=True)
            shutil.rmtree(folder)
            assert_close_to(outputs, wanted)
            if ranks == 4:
                assert_same_bits(outputs, wanted)
                assert "c_totals" in plan.states


def test_killed_around_the_steps_of_a_recurrence(tmp_path):
    """A checkpoint has what is there before all steps, or after them."""
    program = """
    y[t,k] = X[t,k] * 2
    h[t,k] = tanh(sum(W[k,l] * where(t > 0, h[t-1,l], 0)) / 21 + y[t,k])
    Z[k] = sum(h[t,k] * y[t,k])
    """
    inputs = """
    X = { shape = [9, 21], random = "normal", seed = 1 }
    W = { file = "w.h5", dataset = "/W" }
    """
    job = einmpi.load(write_job(tmp_path, program, inputs, outputs='Z = "out.h5:/Z"'))
    states = {}

    def keep(vertex):
        states[vertex] = tmp_path / f"after {vertex}"
        shutil.copytree(tmp_path / "saved", states[vertex])

    wanted, _, _ = go(job, 3, tmp_path / "saved", every=0, reached=keep)
    assert_close(wanted, einmpi.reference(job))
    done = []
    for state in states.values():
        found, checkpoints, _ = go(job, 3, state, resume=True)
        assert_same_bits(found, wanted)
        done.append(checkpoints.saved.done)
    names = [vertex.name for vertex in job.graph.computed]
    steps = [names.index(vertex.name) for vertex in job.graph.computed if vertex.recurrence]
    assert set(steps[1:]).isdisjoint(done)  # the number of vertices before: not in the middle
    assert {steps[0], steps[-1] + 1} <= set(done)


def test_every_dtype_and_empty_tensors(tmp_path):
    program = """
    B[i,j] = X[i,j] > 0; C[i,j] = complex64(X[i,j]) * 1j; D[i,k] = sum(C[i,j] * conj(C[k,j]))
    H[j,i] = float16(X[i,j])
    I[i] = max(int32(B[i,j])); J = max(int64(I[i])); A[i] = any(B[i,j])
    F[i,k] = sum(float32(X[i,j]) * E[k,j])
    G[i,l] = sum(E[i,j] * N[j,l]); M[l] = sum(N[j,l])
    Z[i,k] = real(D[i,k]) + F[k,i] + I[k] * where(A[i], J, 1)
    Y[i,j] = H[j,i] + where(B[i,j], X[i,j], 0)
    """
    shapes = {"X": [9, 12], "E": [9, 12], "N": [12, 0]}
    inputs = "\n".join(
        f'{name} = {{ shape = {shape}, random = "normal" }}' for name, shape in shapes.items()
    )
    outputs = "\n".join(f'{name} = "out.h5:/{name}"' for name in "BCDHIJAFGMZY")
    job = einmpi.load(write_job(tmp_path, program, inputs, outputs))
    assert {vertex.dtype for vertex in job.graph.computed} >= {
        "bool",
        "complex64",
        "float16",
        "int32",
        "int64",
    }
    states, wanted = snapshots(job, 4, tmp_path, "sqrt")
    for state in states[5::6]:
        other = shutil.copytree(state, f"{state} other")
        assert_same_bits(go(job, 4, state, resume=True, strategy="sqrt")[0], wanted)
        assert_close(go(job, 3, other, resume=True, strategy="sqrt")[0], wanted)


@pytest.mark.slow
def test_resident_and_pinned_tensors(tmp_path):
    inputs = INPUTS.replace("seed = 2", "seed = 2, resident = true").replace(
        "seed = 1", "seed = 1, parts = [2, 1]"
    )
    job = einmpi.load(
        write_job(
            tmp_path,
            inputs=inputs,
            outputs='Z = { file = "out.h5", dataset = "/Z", parts = [1, 2] }',
        )
    )
    states, wanted = snapshots(job, 4, tmp_path)
    for state in states[::2]:
        other = shutil.copytree(state, f"{state} other")
        assert_same_bits(go(job, 4, state, resume=True)[0], wanted)
        assert_close_to(go(job, 2, other, resume=True)[0], wanted)


@pytest.mark.slow
@settings(
    max_examples=8,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_program_at_any_vertex(data, tmp_path_factory):
    program, sizes = data.draw(programs())
    folder = tmp_path_factory.mktemp("any")
    inputs = "\n".join(
        f'{name} = {{ shape = [{sizes[a]}, {sizes[b]}], random = "normal" }}'
        for name, (a, b) in {"X": "nm", "Y": "mn"}.items()
    )
    job = einmpi.load(write_job(folder, program, inputs, ""))
    ranks, strategy = (
        data.draw(st.sampled_from([2, 3, 4, 6])),
        data.draw(st.sampled_from([None, "sqrt", "replicate"])),
    )
    stop = data.draw(st.sampled_from([vertex.name for vertex in job.graph.computed]))
    wanted, _, _ = go(job, ranks, strategy=strategy)
    asked = []
    with pytest.raises(Stopped):
        go(
            job,
            ranks,
            folder / "saved",
            asked=asked,
            on_step=_ask_at(stop, asked),
            strategy=strategy,
        )
    other = shutil.copytree(folder / "saved", folder / "other")
    assert_same_bits(go(job, ranks, folder / "saved", resume=True, strategy=strategy)[0], wanted)
    assert_close(go(job, 5, other, resume=True)[0], wanted)


def test_the_rest_of_a_graph(job):
    """Finished vertices are not computed again; all needed tensors exist from the start."""
    graph = job.graph
    for done in range(1, len(graph.computed) + 1):
        left, kept = rest(graph, done), needed(graph, done)
        assert [vertex.name for vertex in left.computed] == [
            *kept,
            *(v.name for v in graph.computed[done:]),
        ]
        planned = make_plan(left, 4, Options(first=kept)).graph
        assert left.outputs == graph.outputs == planned.outputs
        assert sorted(map(str, planned.vertices)) == sorted(map(str, left.vertices))
        assert [vertex.name for vertex in planned.computed][: len(kept)] == list(kept)
        for name in kept:
            assert (left[name].bound, left[name].dtype) == (graph[name].bound, graph[name].dtype)
    assert needed(graph, 3) == ("A1", "A2", "n") and needed(graph, len(graph.computed)) == (
        "s",
        "Z",
    )


# ---- when ---------------------------------------------------------------------------------------


def test_signals_stop_all_ranks_alike(job, tmp_path):
    """On one rank, on any, on all; two different ones."""
    for number, asked in enumerate(
        [{3: ["SIGTERM"]}, {0: ["SIGUSR1"]}, ["SIGTERM"], {1: ["SIGUSR1"], 2: ["SIGTERM"]}]
    ):
        folder = tmp_path / str(number)
        with pytest.raises(Stopped) as caught:
            go(job, 4, folder, asked=asked)
        assert caught.value.status == 75 and caught.value.everywhere
        name = "SIGUSR1" if number == 1 else "SIGTERM"
        assert str(caught.value) == (
            f"{folder}: {name}: stopped after A1, 1 of 12 vertices; "
            "the same command with --resume continues"
        )
        assert complete(folder) == ["000001"]


def test_the_clock_of_rank_0_decides(job, tmp_path, monkeypatch):
    """A tick a vertex, and ranks whose clocks are wrong: a checkpoint every three ticks."""
    clock = [0.0]

    class Clock:
        monotonic = staticmethod(lambda: clock[0])

    monkeypatch.setattr(checkpoint_module, "time", Clock)
    seen = []

    def tick(vertex):
        clock[0] += 1
        seen.append(complete(tmp_path / "saved"))

    _, checkpoints, _ = go(job, 4, tmp_path / "saved", every=3, reached=tick)
    assert checkpoints.count == 3
    assert [found[-1] if found else None for found in seen] == [None] * 3 + ["000004"] * 3 + [
        "000007"
    ] * 3 + ["000010"] * 3


def test_nothing_happens_before_it_is_time(job, tmp_path):
    _, checkpoints, _ = go(job, 2, tmp_path / "saved")
    assert checkpoints.count == 0 and os.listdir(tmp_path / "saved") == []


def test_only_what_is_needed_is_saved(job, tmp_path):
    """No inputs, no copies: as many bytes as the tensors have, however many ranks hold them."""
    states, _ = snapshots(job, 4, tmp_path, "replicate")
    for number, state in enumerate(states, 1):
        found = manifest(state)
        assert [tensor["name"] for tensor in found["tensors"]] == list(needed(job.graph, number))
        size = sum(job.graph[name].nbytes for name in needed(job.graph, number))
        gaps = 64 * 4 * len(found["tensors"])
        assert size <= sum(size for size, _ in found["files"]) <= size + gaps


# ---- damaged and foreign ------------------------------------------------------------------------


def manifest(folder):
    return json.loads((folder / complete(folder)[-1] / "manifest.json").read_text())


def rewrite_manifest(path, change, sealed=True):
    data = json.loads((path / "manifest.json").read_text())
    change(data)
    if sealed:
        data.pop("checksum", None)
        data["checksum"] = checksum(data)
    (path / "manifest.json").write_text(json.dumps(data))


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


DAMAGES = {
    "a flipped bit": (
        lambda path: flip(path / "rank-00001.raw", 100),
        "rank-00001.raw has changed since",
    ),
    "a flipped last bit": (
        lambda path: flip(path / "rank-00003.raw", -1),
        "rank-00003.raw has changed since",
    ),
    "a truncated file": (
        lambda path: os.truncate(path / "rank-00002.raw", 64),
        "has 64 bytes instead of",
    ),
    "a longer file": (
        lambda path: (path / "rank-00002.raw").open("ab").write(b"x"),
        "bytes instead of",
    ),
    "an empty file": (
        lambda path: (path / "rank-00000.raw").write_bytes(b""),
        "has 0 bytes instead of",
    ),
    "a missing file": (
        lambda path: (path / "rank-00003.raw").unlink(),
        "rank-00003.raw: No such file",
    ),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json: No such file"),
    "half a manifest": (
        lambda path: os.truncate(path / "manifest.json", 200),
        "manifest.json is not a manifest",
    ),
    "an empty manifest": (
        lambda path: (path / "manifest.json").write_text(""),
        "manifest.json is not a manifest",
    ),
    "a list": (
        lambda path: (path / "manifest.json").write_text("[1]"),
        "manifest.json is not a manifest",
    ),
    "deep brackets": (
        lambda path: (path / "manifest.json").write_text("[" * 200000),
        "manifest.json is not a manifest",
    ),
    "no text": (
        lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe\0"),
        "manifest.json: it is not text",
    ),
    "a changed cut": (
        lambda path: rewrite_manifest(
            path, lambda data: data["tensors"][0].update(cuts=[1, 0]), False
        ),
        "manifest.json has changed since",
    ),
    "a number too large": (
        lambda path: rewrite_manifest(path, lambda data: data.update(done=13)),
        "does not fit",
    ),
    "a name for a number": (
        lambda path: rewrite_manifest(path, lambda data: data.update(done="5")),
        "does not fit",
    ),
    "another mesh": (
        lambda path: rewrite_manifest(path, lambda data: data.update(mesh=6)),
        "does not fit",
    ),
    "a foreign tensor": (
        lambda path: rewrite_manifest(path, lambda data: data["tensors"][0].update(name="../x")),
        "does not fit",
    ),
    "a missing tensor": (
        lambda path: rewrite_manifest(path, lambda data: data["tensors"].pop()),
        "does not fit",
    ),
    "a cut too many": (
        lambda path: rewrite_manifest(path, lambda data: data["tensors"][0]["cuts"].append(0)),
        "does not fit",
    ),
    "a cut of no dimension": (
        lambda path: rewrite_manifest(path, lambda data: data["tensors"][0].update(cuts=[7, 0])),
        "does not fit",
    ),
    "files of other ranks": (
        lambda path: rewrite_manifest(path, lambda data: data["files"].pop()),
        "does not fit",
    ),
    "another version": (
        lambda path: rewrite_manifest(path, lambda data: data.update(einmpi="0.0.0")),
        "is from einmpi 0.0.0",
    ),
    "another format": (
        lambda path: rewrite_manifest(path, lambda data: data.update(format=1)),
        "is from einmpi",
    ),
    "nodes that do not divide the ranks": (
        lambda path: rewrite_manifest(path, lambda data: data.update(nodes=3)),
        "does not fit",
    ),
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A job, and a checkpoint that it has left after five vertices on four ranks."""
    folder = tmp_path_factory.mktemp("stopped")
    job, asked = einmpi.load(write_job(folder)), []
    with pytest.raises(Stopped):
        go(job, 4, folder / "saved", asked=asked, on_step=_ask_at("A3", asked), strategy="sqrt")
    return job, folder / "saved"


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("ranks", [4, 3])
def test_damage_is_refused(stopped, tmp_path, name, ranks):
    job, saved = stopped
    damage, words = DAMAGES[name]
    folder = Path(shutil.copytree(saved, tmp_path / "saved"))
    damage(folder / "000005")
    before = {path.name: path.read_bytes() for path in (folder / "000005").iterdir()}
    with pytest.raises(InputError) as caught:
        go(job, ranks, folder, resume=True)
    message = str(caught.value)
    assert (
        caught.value.everywhere
        and message.startswith(f"{folder}/000005: the checkpoint is ")
        and words in message
    )
    assert (
        message.endswith("remove it to start again, or to continue from an older one")
        and "\n" not in message
    )
    assert {path.name: path.read_bytes() for path in (folder / "000005").iterdir()} == before


FOREIGN = {
    "program": ({"program": PROGRAM.replace("exp", "tanh")}, "the program with its sizes differs"),
    "a vertex more": (
        {"program": PROGRAM.replace("sqrt(n)", "sqrt(n + max(X[i,j]))")},
        "the program with its sizes",
    ),
    "sizes": (
        {"inputs": INPUTS.replace("21, 21", "20, 20").replace("w.h5", "w20.h5")},
        "the program with its sizes",
    ),
    "dtype": ({"dtype": "float32"}, "the program with its sizes"),
    "seed": ({"inputs": INPUTS.replace("seed = 2", "seed = 3")}, "the input Y differs"),
    "generator": (
        {"inputs": INPUTS.replace('"uniform", seed = 2', '"normal", seed = 2')},
        "the input Y differs",
    ),
    "outputs": ({"outputs": 'Z = "out.h5:/Z"'}, "the program with its sizes"),
    "no file": (
        {
            "inputs": INPUTS.replace(
                'file = "w.h5", dataset = "/W"', 'shape = [21, 21], random = "ones"'
            )
        },
        "the input W differs",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_another_job_is_refused(stopped, tmp_path, name):
    job, saved = stopped
    change, words = FOREIGN[name]
    shutil.copy2(Path(job.path).parent / "w.h5", tmp_path)
    folder = shutil.copytree(saved, tmp_path / "saved")
    with pytest.raises(InputError, match="the checkpoint is of another job: " + words):
        go(einmpi.load(write_job(tmp_path, **change)), 4, folder, resume=True)


def test_an_input_file_that_has_changed_is_refused(stopped, tmp_path):
    job, saved = stopped
    shutil.copy2(Path(job.path).parent / "w.h5", tmp_path)
    folder = shutil.copytree(saved, tmp_path / "saved")
    moved = einmpi.load(write_job(tmp_path))
    go(
        moved, 4, shutil.copytree(saved, tmp_path / "again"), resume=True
    )  # the same file in another folder will do
    with h5py.File(tmp_path / "w.h5", "r+") as file:
        file["W"][0, 0] = 7.0
    with pytest.raises(InputError, match="the input W differs"):
        go(moved, 4, folder, resume=True)


def test_other_rows_of_a_file_are_another_input(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(42.0 * 21).reshape(42, 21))
    rows = INPUTS.replace(
        '{ shape = [21, 21], random = "uniform", seed = 1 }', '{ file = "x.npy", rows = "0:21" }'
    )
    go(einmpi.load(write_job(tmp_path, inputs=rows)), 2, tmp_path / "saved", every=0)
    other = einmpi.load(write_job(tmp_path, inputs=rows.replace("0:21", "21:42")))
    with pytest.raises(InputError, match="the input X differs"):
        go(other, 2, tmp_path / "saved", resume=True)


def test_what_is_there_is_not_overwritten(stopped, tmp_path):
    """Who forgets --resume does not lose the night's work."""
    job, saved = stopped
    folder = shutil.copytree(saved, tmp_path / "saved")
    with pytest.raises(InputError) as caught:
        go(job, 4, folder, every=0)
    assert str(caught.value) == (
        f"--checkpoint {folder}: it has the checkpoint 000005 of an earlier run; "
        "expected an empty folder, or --resume to continue from the checkpoint"
    )
    assert complete(folder) == ["000005"]


# ---- while it is saved --------------------------------------------------------------------------

MOMENTS = {
    "the folder": ("os", "mkdir", 0),
    "a block": ("checkpoint", "_write_all", 0),
    "the last block": ("checkpoint", "_write_all", -1),
    "a file on its way to the disk": ("os", "fsync", 0),
    "the manifest": ("checkpoint", "checksum", 0),
    "the folder on its way to the disk": ("checkpoint", "flush_path", 0),
    "the new name": ("os", "rename", 0),
    "the folder above": ("checkpoint", "flush_path", 1),
    "the older one's name": ("os", "rename", 1),
    "the older one": ("shutil", "rmtree", 0),
}


class Trap:
    """Count calls of a function while checkpoint `turn` is saved; the n-th acts."""

    def __init__(self, monkeypatch, module, name, call, what, turn):
        owner = checkpoint_module if module == "checkpoint" else getattr(checkpoint_module, module)
        self.real, self.call, self.what = getattr(owner, name), call, what
        self.armed, self.count = False, 0
        monkeypatch.setattr(owner, name, self)
        save = Checkpoints.save

        def saving(checkpoints, done, buffers):
            if checkpoints.comm.rank == 0:
                self.armed = done == turn
            return save(checkpoints, done, buffers)

        monkeypatch.setattr(Checkpoints, "save", saving)

    def __call__(self, *arguments, **more):
        if self.armed and self.what is not None:
            self.count += 1
            if self.count - 1 == (self.call if self.call >= 0 else 3):
                raise self.what
        return self.real(*arguments, **more)


@pytest.fixture
def short(tmp_path):
    return einmpi.load(
        write_job(tmp_path, PROGRAM.partition("n =")[0] + "Z[i,k] = A1[i,k] - A2[k,i]", outputs="")
    )


@pytest.mark.sampled(3, always=["a block", "the manifest", "the new name"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_while_saving(short, tmp_path, monkeypatch, moment):
    """The newest complete checkpoint counts, and what was left half done is cleared away."""
    wanted, _, _ = go(short, 4, strategy="sqrt")
    with monkeypatch.context() as patch:
        Trap(patch, *MOMENTS[moment], Killed(), turn=2)
        with pytest.raises(Killed):
            go(short, 4, tmp_path / "saved", every=0, strategy="sqrt")
    left = complete(tmp_path / "saved")
    assert left in (["000001"], ["000001", "000002"], ["000002"])
    assert (left[-1] == "000002") == (
        list(MOMENTS).index(moment) >= list(MOMENTS).index("the folder above")
    )
    found, checkpoints, _ = go(short, 4, tmp_path / "saved", resume=True, every=0, strategy="sqrt")
    assert checkpoints.saved.done == int(left[-1]) and os.listdir(tmp_path / "saved") == ["000003"]
    assert_same_bits(found, wanted)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("moment", [m for m in MOMENTS if not m.startswith("the older one")])
def test_a_full_disk(short, tmp_path, monkeypatch, capsys, moment):
    """The run goes on, says so in one line, and keeps the checkpoint it has."""
    wanted, _, _ = go(short, 4, strategy="sqrt")
    kept = []

    def look(vertex):
        if vertex == "A2":
            kept.extend(os.listdir(tmp_path / "saved"))

    Trap(monkeypatch, *MOMENTS[moment], OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), turn=2)
    found, checkpoints, _ = go(short, 4, tmp_path / "saved", every=0, strategy="sqrt", reached=look)
    assert_same_bits(found, wanted)
    assert checkpoints.count == 2
    assert capsys.readouterr().err == (
        f"einmpi: {tmp_path}/saved: no checkpoint after A2: "
        "No space left on device; the run continues\n"
    )
    assert "000001" in kept and os.listdir(tmp_path / "saved") == ["000003"]


def test_a_full_disk_when_asked_to_stop(job, tmp_path, monkeypatch):
    """It stops, but this is no reason to try again later."""
    Trap(
        monkeypatch,
        "checkpoint",
        "_write_all",
        0,
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        turn=1,
    )
    with pytest.raises(EinmpiError) as caught:
        go(job, 4, tmp_path / "saved", asked=["SIGTERM"])
    assert (caught.value.status, caught.value.everywhere) == (1, True)
    assert str(caught.value).endswith(
        "1 of 12 vertices; it has no checkpoint: No space left on device"
    )
    assert os.listdir(tmp_path / "saved") == []


def test_a_folder_that_cannot_be(job, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        InputError, match=r"--checkpoint .*file: File exists; expected a writable folder"
    ):
        go(job, 2, tmp_path / "file")
    with pytest.raises(
        InputError, match=r"--checkpoint .*: Not a directory; expected a writable folder"
    ):
        go(job, 2, tmp_path / "file" / "below")


def test_files_are_what_the_page_says(stopped):
    _, saved = stopped
    found = manifest(saved)
    for rank, (size, check) in enumerate(found["files"]):
        data = (saved / "000005" / f"rank-{rank:05d}.raw").read_bytes()
        assert (len(data), zlib.crc32(data)) == (size, check)


# ---- other users --------------------------------------------------------------------------------

NOBODY = 65534


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777])
def test_a_folder_in_which_others_can_put_a_checkpoint_is_refused(stopped, tmp_path, mode):
    job, saved = stopped
    folder = Path(shutil.copytree(saved, tmp_path / "saved"))
    folder.chmod(mode)
    for resume in (True, False):
        with pytest.raises(InputError) as caught:
            go(job, 4, folder, resume=resume, strategy="sqrt")
        assert str(caught.value) == (
            f"--checkpoint {folder}: other users can write to it (mode {mode:o}); "
            "expected a folder of yours that only you can write to"
        )
    assert complete(folder) == ["000005"]


@pytest.mark.parametrize("name", ["manifest.json", "rank-00002.raw"])
def test_files_that_others_could_have_written_are_refused(stopped, tmp_path, name):
    job, saved = stopped
    folder = Path(shutil.copytree(saved, tmp_path / "saved"))
    file = folder / "000005" / name
    file.chmod(0o664)
    with pytest.raises(InputError) as caught:
        go(job, 4, folder, resume=True, strategy="sqrt")
    assert str(caught.value) == (
        f"{file}: other users can write to it (mode 664); "
        "expected a file of yours that only you can write to"
    )
    if os.geteuid() == 0:
        file.chmod(0o644)
        os.chown(file, NOBODY, NOBODY)
        with pytest.raises(InputError, match=r"it belongs to another user \(uid 65534\)"):
            go(job, 4, folder, resume=True, strategy="sqrt")


def test_a_file_exchanged_after_it_was_checked_is_refused(stopped, tmp_path, monkeypatch):
    """Where a folder above is shared, others can put folders of theirs in place of ours."""
    job, saved = stopped
    folder = Path(shutil.copytree(saved, tmp_path / "saved"))
    check = Checkpoints._check_files

    def check_then_exchange(checkpoints, saved):
        versions = check(checkpoints, saved)
        for file in (folder / "000005").glob("*.raw"):
            file.chmod(0o666)
        return versions

    monkeypatch.setattr(Checkpoints, "_check_files", check_then_exchange)
    for ranks in (4, 3):
        with pytest.raises(EinmpiError, match="other users can write to it"):
            go(job, ranks, folder, resume=True, strategy="sqrt")


def _replace_by_other_numbers(file):
    other = file.with_suffix(".other")
    other.write_bytes(bytes(file.stat().st_size))
    other.chmod(0o600)
    other.rename(file)


@pytest.mark.parametrize("ranks", [4, 3])
@pytest.mark.parametrize(
    "change, words",
    [
        (_replace_by_other_numbers, "has changed while it was being read"),
        (Path.unlink, "No such file or directory"),
    ],
)
def test_a_file_replaced_or_removed_after_it_was_checked_is_refused(
    stopped, tmp_path, monkeypatch, ranks, change, words
):
    job, saved = stopped
    folder = Path(shutil.copytree(saved, tmp_path / "saved"))
    check = Checkpoints._check_files

    def check_then_change(checkpoints, saved):
        versions = check(checkpoints, saved)
        if checkpoints.comm.rank == 0:
            for file in (folder / "000005").glob("*.raw"):
                change(file)
        checkpoints.comm.barrier()
        return versions

    monkeypatch.setattr(Checkpoints, "_check_files", check_then_change)
    with pytest.raises(EinmpiError, match=rf"the checkpoint is damaged: rank-\d+.raw.*{words}"):
        go(job, ranks, folder, resume=True, strategy="sqrt")


def test_a_shared_folder_above_and_a_umask_that_lets_a_group_write(tmp_path):
    """As in the folder of a project: what is saved there can be resumed."""
    job = einmpi.load(write_job(tmp_path))
    shared = tmp_path / "project"
    shared.mkdir()
    shared.chmod(0o2775)
    asked = []
    before = os.umask(0o002)
    try:
        with pytest.raises(Stopped):
            go(job, 2, shared / "saved", asked=asked, on_step=_ask_at("A3", asked))
        for path in [shared / "saved", *(shared / "saved").rglob("*")]:
            assert not path.stat().st_mode & 0o022, path
        go(job, 2, shared / "saved", resume=True)
    finally:
        os.umask(before)


# ---- times --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("30s", 30),
        ("10min", 600),
        ("1h", 3600),
        (" 1.5 h ", 5400),
        ("0s", 0),
        ("0.5min", 30),
        ("0.0", 0),
    ],
)
def test_times(text, seconds):
    assert parse_seconds(text, "x") == seconds


@pytest.mark.parametrize(
    "text", ["", "10", "-1s", "1 day", "min", "1e3s", "nan", "infs", "1h30min", "9" * 40 + "s"]
)
def test_no_times(text):
    with pytest.raises(InputError, match="time"):
        parse_seconds(text, "x")


REORDERED = """
A[i,j] = sum[k](X[i,k] * X[k,j])
B[i,j] = sum[k](A[i,k] * A[k,j])
C[i,j] = sum[k](B[i,k] * B[k,j])
D[i,j] = sum[k](C[i,k] * C[k,j])
a = sum(A[i,j]**2)
b = sum(B[i,j]**2)
c = sum(C[i,j]**2)
d = sum(D[i,j]**2)
s = log(a) + log(b) + log(c) + log(d)
"""


@pytest.mark.slow
def test_a_plan_with_vertices_in_another_order(tmp_path):
    """A checkpoint knows which vertices are done; plans for other ranks may have other orders."""
    inputs = 'X = { shape = [16, 16], random = "uniform" }'
    job = einmpi.load(write_job(tmp_path, REORDERED, inputs, ""))
    ranks = 2
    wanted, _, plan = go(job, ranks)
    order = [vertex.name for vertex in plan.graph.computed]
    assert order != [vertex.name for vertex in job.graph.computed]
    for stop in order:
        folder = tmp_path / stop
        asked = []
        with pytest.raises(Stopped):
            go(job, ranks, folder, asked=asked, on_step=_ask_at(stop, asked))
        other = shutil.copytree(folder, tmp_path / f"{stop} elsewhere")
        assert_same_bits(go(job, ranks, folder, resume=True)[0], wanted)
        assert_close(go(job, 3, other, resume=True)[0], wanted)


@pytest.mark.parametrize(
    "dropped",
    [
        "A[i,j] = tanh(sum[k](X[i,k] * X[k,j]))",
        # The copy reads v, which nothing else reads by then.
        "v[i] = sum(X[i,k]**2); A[i,j:16] = tanh(v[i] * j); u = max(A[i,j])",
    ],
)
def test_while_a_tensor_is_dropped_no_checkpoint_is_saved(tmp_path, dropped):
    """A run that computes a tensor again is saved before it drops the tensor, or after its use."""
    text = f"""
    {dropped}
    a = sum(A[i,j]**2)
    B[i,j] = sum[k](X[i,k] * X[j,k]) * a
    b = sum(exp(B[i,j] / a))
    C[i,j] = A[i,j] * b
    s = sum(C[i,j]**3)
    """
    inputs = 'X = { shape = [16, 16], random = "uniform" }\n[plan]\nrecompute = ["A"]'
    job = einmpi.load(write_job(tmp_path, text, inputs, ""))
    wanted, _, plan = go(job, 2)
    assert plan.recomputed is not None and plan.recomputed.tensors == ("A",)
    saved_after = []
    for vertex in job.graph.computed:
        folder = tmp_path / vertex.name
        asked = []
        try:
            go(job, 2, folder, asked=asked, on_step=_ask_at(vertex.name, asked))
        except Stopped:
            saved_after.append(vertex.name)
        else:
            continue
        other = shutil.copytree(folder, tmp_path / f"{vertex.name} elsewhere")
        assert_same_bits(go(job, 2, folder, resume=True)[0], wanted)
        assert_close(go(job, 3, other, resume=True)[0], wanted)
    assert saved_after
