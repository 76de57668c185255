"""Runs on many ranks: threads for many counts, real mpirun for the counts people use."""

import numpy as np
import pytest
from distributed import assert_close, dry_run, run_on_threads
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpi_helpers import needs_mpirun, run_mpi
from paper_llama import llama_program
from run_cases import SIZES, cases, strategies

import einmpi
from einmpi.files.reading import load_array
from einmpi.kernels.cpu import dispatch
from einmpi.models.config import NAMED
from einmpi.planner.make_plan import make_plan
from einmpi.planner.plan import Options
from einmpi.runtime import transfer as messages
from einmpi.schedule.lower import lower

CASES = cases()
EVEN = [f"{name}, {kind}" for name, kinds in SIZES.items() for kind in kinds if kind != "odd"]


@pytest.fixture(scope="module")
def references():
    return {name: einmpi.reference(job, arrays) for name, (job, arrays) in CASES.items()}


# (number of ranks, whether every strategy plans for it). tests/mpi run every strategy on 2, 3 and
# 4 real ranks, and two of them on 7 and 16.
FEW_RANKS = [(1, False), (3, False), (4, False), (6, False)]
MORE_RANKS = [(5, False), (8, True), (12, False)]


@pytest.mark.sampled(4, always=["chain, odd-few", "half-few", "nothing-few", "pagerank, odd-few"])
@pytest.mark.parametrize(
    "counts", [FEW_RANKS, pytest.param(MORE_RANKS, marks=pytest.mark.slow)], ids=["few", "more"]
)
@pytest.mark.parametrize("name", CASES)
def test_every_strategy_on_threads(name, counts, references):
    job, arrays = CASES[name]
    for ranks, every_strategy in counts:
        chosen = strategies(job, ranks) if every_strategy else ["eindecomp"]
        for strategy in chosen:
            done = run_on_threads(job, ranks, arrays, strategy=strategy)
            assert_close(done.outputs, references[name])
            assert sum(dry_run(done.plan)) == done.moved
            assert done.moved == done.plan.bytes_predicted, (ranks, strategy)


@pytest.mark.sampled(2, always=["chain, even-64"])
@pytest.mark.parametrize("ranks", [24, 64])
@pytest.mark.parametrize("name", ["chain, even", "attention, odd", "four dimensions", "gather"])
def test_many_ranks_on_threads(name, ranks, references):
    job, arrays = CASES[name]
    assert_close(run_on_threads(job, ranks, arrays).outputs, references[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["chain, even", "attention, even", "diagonal", "four dimensions", "half"]
)
def test_messages_in_pieces_change_nothing(name, references, monkeypatch):
    """Large messages go in pieces that fit into a buffer: here a buffer of 256 bytes."""
    monkeypatch.setattr(messages, "MESSAGE_BUFFER_BYTES", 256)
    job, arrays = CASES[name]
    for ranks in (2, 6):
        for strategy in strategies(job, ranks):
            done = run_on_threads(job, ranks, arrays, strategy=strategy)
            assert_close(done.outputs, references[name])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", ["semiring", "diagonal", "gather", "indices", "integers", "truth", "statistics"]
)
def test_compiled_kernels_on_threads(name, references, monkeypatch):
    """Small work is left to numpy; here everything is compiled."""
    monkeypatch.setattr(dispatch, "WORTH_COMPILING", 0)
    job, arrays = CASES[name]
    for ranks in (1, 3):
        assert_close(run_on_threads(job, ranks, arrays).outputs, references[name])


def check_random_contraction(data):
    """Random labels, extents, operands and ⊕ over ⊗, against the reference evaluator."""
    ranks = data.draw(st.integers(2, 12), "ranks")
    labels = "ijkl"[: data.draw(st.integers(2, 4))]
    extent = {label: data.draw(st.sampled_from([1, 2, 3, 4, 5, 8, 12]), label) for label in labels}
    one, two = (
        "".join(
            data.draw(
                st.permutations(sorted(data.draw(st.sets(st.sampled_from(labels), min_size=1))))
            )
        )
        for _ in range(2)
    )
    used = sorted(set(one + two))
    output = "".join(data.draw(st.permutations(sorted(data.draw(st.sets(st.sampled_from(used)))))))
    head = data.draw(st.sampled_from(["sum({})", "max({})", "min({})", "prod({})", "sum(exp({}))"]))
    body = f"A[{','.join(one)}] {data.draw(st.sampled_from('+-*'))} B[{','.join(two)}]"
    aggregated = set(used) - set(output)
    expression = head.format(body) if aggregated else body
    text = f"Z[{','.join(output)}] = {expression}" if output else f"Z = {expression}"
    arrays = {
        # Equal numbers in both would cancel, and leave rounding errors to be compared.
        name: np.random.default_rng(ord(name)).standard_normal([extent[x] for x in index])
        for name, index in (("A", one), ("B", two))
    }
    job = einmpi.program(text, **arrays)
    for strategy in ("eindecomp", "eindecomp-paper", "sqrt"):
        assert_close(
            run_on_threads(job, ranks, arrays, strategy=strategy).outputs,
            einmpi.reference(job, arrays),
        )


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_contractions_on_random_ranks(data):
    check_random_contraction(data)


@pytest.mark.slow
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_more_random_contractions_on_random_ranks(data):
    check_random_contraction(data)


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["chain, even", "chain, skewed", "attention, even"])
def test_memory_stays_below_the_limit(name, references):
    """run_on_threads compares each rank's measured peak with its schedule's and that with the
    plan's.
    """
    job, arrays = CASES[name]
    for ranks in (2, 4, 6):
        free = einmpi.plan(job, ranks).peak
        for share in (0.9, 0.7, 0.6):
            try:
                done = run_on_threads(job, ranks, arrays, memory=int(free * share))
            except einmpi.InputError as error:
                assert "at least" in str(error)
                continue
            assert done.plan.peak <= free * share
            assert_close(done.outputs, references[name])


@pytest.mark.slow
def test_the_busiest_rank_moves_what_the_others_do():
    for name in EVEN:
        job, arrays = CASES[name]
        for ranks in (2, 3, 4, 6, 8, 12):
            assert run_on_threads(job, ranks, arrays).imbalance <= 1.05, (name, ranks)


def test_uneven_extents_are_balanced_where_there_is_enough_to_deal_out():
    job = einmpi.load("jobs/chain.toml", s=211)
    for ranks in (3, 4, 5, 7, 8):
        plan = einmpi.plan(job, ranks)
        received = dry_run(plan)
        assert sum(received) == plan.bytes_predicted
        assert max(received) * plan.mesh.ranks <= 1.05 * sum(received)


@pytest.mark.parametrize("ranks", [240, pytest.param(1024, marks=pytest.mark.slow)])
def test_a_dry_run_on_many_ranks(ranks):
    plan = einmpi.plan(einmpi.load("jobs/chain.toml", s=15 * 1024), ranks)
    received = dry_run(plan)
    assert sum(received) == plan.bytes_predicted
    assert max(received) * ranks <= 1.05 * sum(received)


@pytest.mark.slow
def test_a_large_model_is_lowered_for_one_rank_alone():
    """Nothing in one rank's schedule grows with ranks × vertices: moves of repeated layers are the
    same objects.
    """
    text, shapes, _ = llama_program(NAMED["7B"], batch=8, sequence=1024, layers=32)
    plan = make_plan(einmpi.program(text, **shapes).graph, 1024, Options())
    schedule = lower(plan, 77)
    assert len(schedule.steps) > 1000
    moves = {id(step.moves) for step in schedule.steps if hasattr(step, "moves")}
    assert len(moves) < 100


# ---- real mpirun ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.mpirun
@needs_mpirun
def test_two_runs_give_the_same_bits(tmp_path):
    (tmp_path / "job.toml").write_text(
        'program = "Z[i,k] = sum(A[i,j] * B[j,k]); n = sum(Z[i,k])"\n'
        'inputs.A = { shape = [30, 400], random = "normal" }\n'
        'inputs.B = { shape = [400, 20], random = "normal" }\n'
        'outputs.Z = "out.h5:/Z"\noutputs.n = "out.h5:/n"\n'
    )
    import h5py

    results = []
    for _ in range(2):
        done = run_mpi(
            3, ["-m", "einmpi", str(tmp_path / "job.toml"), "--strategy", "eindecomp-paper"]
        )
        assert (done.returncode, done.stderr) == (0, "")
        with h5py.File(tmp_path / "out.h5") as file:
            results.append((file["Z"][:].tobytes(), file["n"][()]))
    assert results[0] == results[1]


def test_ranks_with_nothing_to_load():
    """A number is loaded by one rank of many."""
    one = np.float64(3.0)
    spec = einmpi.job.inputs.InputSpec("s", (), "float64", "ones", 5)
    job = einmpi.program("Z[i] = s * X[i]", s=one, X=(2,))
    job = einmpi.job.job.Job(**{**vars(job), "inputs": (spec,)})
    for ranks in (2, 5, 8):
        assert run_on_threads(job, ranks, {"X": np.arange(2.0)}).outputs["Z"].tolist() == [0, 1]


def test_generated_inputs_do_not_depend_on_ranks():
    job = einmpi.program("Z[i,j] = X[i,j]; Y[j,i] = X[i,j]", X=(13, 11))
    spec = einmpi.job.inputs.InputSpec("X", (13, 11), "float64", "normal", 5)
    job = einmpi.job.job.Job(**{**vars(job), "inputs": (spec,)})
    whole = load_array(spec, (13, 11), "float64")
    for ranks in (1, 2, 5, 6, 8):
        done = run_on_threads(job, ranks)
        np.testing.assert_array_equal(done.outputs["Z"], whole)
        np.testing.assert_array_equal(done.outputs["Y"], whole.T)
