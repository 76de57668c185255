"""Reproducible runs: the same bits on any number of ranks, nodes and threads, under any limit of
memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from distributed import assert_close, run_on_threads
from hypothesis import given
from in_process import einmpi_here
from paths import JOBS
from random_programs import arrays_of, programs, settled
from run_cases import CASES

import einmpi
from einmpi.comm.threads import run_threads
from einmpi.graph.forms import summed_blocks
from einmpi.kernels.contraction import SummedBlocks
from einmpi.kernels.cpu import dispatch, map_and_folds
from einmpi.kernels.cpu.reproducible import products
from tests.soak.tree import Program, program_text

RANKS = (2, 3, 4, 5, 7, 8)
SEVERAL_NODES = ((4, 2), (6, 3), (8, 2), (12, 4))

# Jobs with loops, and how many steps are enough; the others are among the cases of `run_cases`.
LOOPS = {"factors": 20, "logistic": 100, "power": 50, "ranking": 100, "solve": 50, "tensor": 20}
OTHERS = ("paths", "points", "baskets")
LONG = {"text": 100, "digits": 1000}  # steps of training


def reproducible(name: str, steps: int | None = None) -> einmpi.Job:
    job = replace(einmpi.load(JOBS / f"{name}.toml"), reproducible=True)
    if job.loop is None or steps is None:
        return job
    return replace(job, loop=replace(job.loop, steps=steps))


def hashes(outputs: Mapping[str, np.ndarray]) -> dict[str, str]:
    """A hash of the bytes of each output; two that are equal may still be 0.0 and -0.0."""
    return {
        name: hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()
        for name, values in outputs.items()
    }


def hashes_on(
    job: einmpi.Job, ranks: int, inputs: Mapping[str, Any] | None = None, nodes: int = 1
) -> dict[str, str]:
    def on_rank(comm: Any) -> dict[str, np.ndarray]:
        outputs = einmpi.run(job, inputs or {}, comm=comm)
        return {name: np.asarray(array.gather()) for name, array in outputs.items()}

    return hashes(run_threads(ranks, on_rank, nodes=nodes)[0])


# ---- jobs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_case_has_the_same_bits_on_all_ranks(name: str) -> None:
    job, arrays = CASES[name]
    job = replace(job, reproducible=True)
    alone = run_on_threads(job, 1, arrays)
    assert_close(alone.outputs, einmpi.reference(job, arrays))
    for ranks in RANKS:
        done = run_on_threads(job, ranks, arrays)
        assert done.moved == done.plan.bytes_predicted
        assert hashes(done.outputs) == hashes(alone.outputs), ranks


@pytest.mark.parametrize("name", [*LOOPS, *OTHERS])
def test_loop_has_the_same_bits_on_all_ranks(name: str) -> None:
    job = reproducible(name, LOOPS.get(name))
    alone = hashes_on(job, 1)
    for ranks in (2, 3, 5, 8):
        assert hashes_on(job, ranks) == alone, ranks


@pytest.mark.parametrize("name", ["chain", "attention", "distances", "pca"])
def test_nodes_and_memory_change_no_bits(name: str) -> None:
    job = reproducible(name)
    alone = hashes_on(job, 1)
    for ranks, nodes in SEVERAL_NODES:
        assert hashes_on(job, ranks, nodes=nodes) == alone, (ranks, nodes)
    for ranks in (1, 3, 4):
        limit = einmpi.plan(job, ranks=ranks).peak // 2
        assert hashes_on(replace(job, memory=limit), ranks) == alone, ranks


@pytest.mark.parametrize("name", ["chain", "attention", "distances", "gcn"])
def test_threads_change_no_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = reproducible(name)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    alone = hashes_on(job, 1)
    for threads in ("2", "3"):
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", threads)
        assert hashes_on(job, 1) == alone
        assert hashes_on(job, 2) == alone


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_training_has_the_same_bits_on_all_ranks(name: str) -> None:
    job = reproducible(name, LONG[name])
    alone = hashes_on(job, 1)
    for ranks in RANKS:
        assert hashes_on(job, ranks) == alone, ranks


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [16, 64])
@pytest.mark.parametrize("name", ["chain", "attention", "gcn", "kmeans", "pca", "convolution"])
def test_many_ranks_give_the_same_bits(name: str, ranks: int) -> None:
    job = reproducible(name)
    assert hashes_on(job, ranks) == hashes_on(job, 1)


# ---- random programs -----------------------------------------------------------------------------


def check_program(program: Program, ranks: tuple[int, ...]) -> None:
    text, arrays = program_text(program), arrays_of(program)
    job = einmpi.program(text, **arrays, outputs=program.outputs, reproducible=True)
    arrays = {vertex.name: arrays[vertex.name] for vertex in job.graph.inputs}
    alone = run_on_threads(job, 1, arrays)
    assert_close(alone.outputs, einmpi.reference(job, arrays))
    for count in ranks:
        assert hashes_on(job, count, arrays) == hashes(alone.outputs), count
    limit = max(1, alone.plan.peak * 3 // 4)
    try:
        limited = hashes_on(replace(job, memory=limit), 4, arrays)
    except einmpi.InputError as error:
        assert "memory" in str(error)
    else:
        assert limited == hashes(alone.outputs)


@settled(30)
@given(programs())
def test_random_programs_have_the_same_bits(program: Program) -> None:
    check_program(program, (2, 3, 8))


@settled(6)
@given(programs())
def test_random_programs_in_small_blocks_by_compiled_loops(program: Program) -> None:
    with (
        mock.patch.object(dispatch, "WORTH_COMPILING", 64),
        mock.patch.object(map_and_folds, "WORTH_COMPILING", 64),
        mock.patch.object(summed_blocks, "VALUES_OF_BLOCK", 16),
    ):
        check_program(program, (2, 4))


# ---- products ------------------------------------------------------------------------------------


def blocks_of(depth: int, count: int, threads: int = 1) -> SummedBlocks:
    """All blocks of a summed label: index i of n is in block ⌊i·count/n⌋."""
    ends = tuple(-(-depth * number // count) for number in range(1, count + 1))
    return SummedBlocks(("j",), ends, -(-depth // count), (16, 16), threads)


def multiplied(left: np.ndarray, right: np.ndarray, blocks: SummedBlocks) -> np.ndarray:
    out = np.empty((*left.shape[:-1], right.shape[-1]), left.dtype)
    products.multiply_blocks(blocks, left, right, out)
    return out


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize(("depth", "count"), [(33, 1), (64, 4), (75, 4), (500, 8)])
def test_part_of_a_product_has_the_bits_of_the_whole(dtype: str, depth: int, count: int) -> None:
    rng = np.random.default_rng(depth)
    left = rng.standard_normal((150, depth)).astype(dtype)
    right = rng.standard_normal((depth, 130)).astype(dtype)
    blocks = blocks_of(depth, count)
    whole = multiplied(left, right, blocks)
    np.testing.assert_allclose(whole, left @ right, rtol=1e-3, atol=1e-3)
    for _ in range(30):
        first, last = sorted(rng.integers(0, 151, 2).tolist())
        start, end = sorted(rng.integers(0, 131, 2).tolist())
        rows, columns = left[first : last + 1], right[:, start : end + 1]
        part = whole[first : last + 1, start : end + 1]
        assert np.array_equal(multiplied(rows, columns, blocks), part)
        stored_otherwise = np.asfortranarray(rows), np.asfortranarray(columns)
        assert np.array_equal(multiplied(*stored_otherwise, blocks), part)
    assert np.array_equal(multiplied(left, right, blocks_of(depth, count, threads=3)), whole)


def test_tiles_give_the_bits_of_larger_calls() -> None:
    rng = np.random.default_rng(1)
    left, right = rng.standard_normal((2, 3, 90, 96))[:, :, :, :90]
    blocks = blocks_of(90, 4)
    found = multiplied(left, right, blocks)
    with mock.patch.object(products, "is_like_tiles", lambda *_: False):
        assert np.array_equal(multiplied(left, right, blocks), found)


# ---- the setting ---------------------------------------------------------------------------------


def test_setting_has_a_key_a_flag_and_a_keyword(tmp_path: Any) -> None:
    text = (JOBS / "chain.toml").read_text()
    (tmp_path / "with.toml").write_text(text + "\n[run]\nreproducible = true\n")
    (tmp_path / "without.toml").write_text(text)
    by_key = einmpi.load(tmp_path / "with.toml")
    without = einmpi.load(tmp_path / "without.toml")
    assert by_key.reproducible and not without.reproducible
    assert einmpi.plan(by_key, 8).digest == einmpi.plan(without, 8, reproducible=True).digest
    flag = einmpi_here(tmp_path, ["plan", "without.toml", "-n", "8", "--reproducible"])
    assert flag.stdout == einmpi_here(tmp_path, ["plan", "with.toml", "-n", "8"]).stdout
    by_keyword = einmpi.run(without, {}, reproducible=True)["Z"].gather()
    assert hashes({"Z": by_keyword}) == hashes_on(by_key, 3)


def test_plan_says_what_it_costs() -> None:
    job = reproducible("pca")
    plan = einmpi.plan(job, ranks=8)
    freely = einmpi.plan(replace(job, reproducible=False), ranks=8)
    (line,) = (line for line in str(plan).splitlines() if line.startswith("reproducible"))
    assert "sums in up to 8 blocks" in line and "operations more" in line
    assert f"{plan.words_predicted:,} words, {freely.words_predicted:,} otherwise" in line
    data = einmpi_here(JOBS, ["plan", "pca.toml", "-n", "8", "--reproducible", "--json", "-"])
    assert f'"words_otherwise": {freely.words_predicted}' in data.stdout
    assert "reproducible" not in str(freely)
    assert plan.digest != freely.digest


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "cupy"}, "reproducible is true with the backend cupy"),
        ({"strategy": "sqrt"}, "with sqrt, bits depend on the number of ranks"),
    ],
)
def test_what_is_not_reproducible_is_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(einmpi.InputError, match=message):
        einmpi.plan(replace(reproducible("chain"), **settings), ranks=2)


def test_sparse_tensors_are_refused() -> None:
    done = einmpi_here(JOBS, ["plan", "sparse/poisson.toml", "-n", "2", "--reproducible"])
    assert done.returncode == 2
    assert "reproducible is true, and A is sparse" in done.stderr
    assert len(done.stderr.splitlines()) == 1
