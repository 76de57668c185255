"""opt_einsum and cotengra on DistArrays, unmodified; numpy's own results are right."""

import numpy as np
import opt_einsum
import pytest

from einmpi import DistArray
from einmpi.comm.threads import run_threads

EQUATIONS = [
    "ij,jk->ik",
    "ij,jk,kml,li->m",
    "bij,bjk,bk->bi",
    "ii,ij->j",
    "i,j,k->kij",
    "abc,abc->",
    "ab,cd,bd,ae->ce",
]


def cases():
    random = np.random.default_rng(3)
    for equation in EQUATIONS:
        extents = {
            letter: int(random.integers(2, 8)) for letter in sorted(set(equation) - set(",->"))
        }
        inputs = equation.split("->")[0].split(",")
        arrays = [random.normal(size=[extents[letter] for letter in each]) for each in inputs]
        yield equation, arrays, np.einsum(equation, *arrays)


def check(found, wanted):
    """Sums of at most 8 ** 5 numbers in another order."""
    assert isinstance(found, DistArray)
    np.testing.assert_allclose(found.gather(), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_opt_einsum(ranks):
    def on_rank(comm):
        for equation, arrays, wanted in cases():
            given = [DistArray.from_global(array, comm) for array in arrays]
            shapes = [array.shape for array in arrays]
            check(opt_einsum.contract(equation, *given), wanted)
            check(opt_einsum.contract(equation, *given, optimize="greedy"), wanted)
            check(opt_einsum.contract(equation, given[0], *arrays[1:]), wanted)
            check(opt_einsum.contract_expression(equation, *shapes)(*given), wanted)
            kept = opt_einsum.contract_expression(equation, given[0], *shapes[1:], constants=[0])
            check(kept(*given[1:]), wanted)

    run_threads(ranks, on_rank)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_cotengra(ranks):
    cotengra = pytest.importorskip("cotengra")
    autoray = pytest.importorskip("autoray")
    autoray.register_backend(DistArray, "numpy")

    def on_rank(comm):
        for equation, arrays, wanted in cases():
            given = [DistArray.from_global(array, comm) for array in arrays]
            shapes = [array.shape for array in arrays]
            inputs, output = equation.split("->")
            check(cotengra.einsum(equation, *given), wanted)
            check(cotengra.einsum_expression(equation, *shapes)(*given), wanted)
            labels = [tuple(each) for each in inputs.split(",")]
            check(cotengra.array_contract(given, labels, tuple(output)), wanted)

    run_threads(ranks, on_rank)


def test_a_sliced_tree_of_cotengra():
    cotengra = pytest.importorskip("cotengra")
    autoray = pytest.importorskip("autoray")
    autoray.register_backend(DistArray, "numpy")
    equation, arrays, wanted = list(cases())[1]
    tree = cotengra.einsum_tree(equation, *[array.shape for array in arrays])
    sliced = tree.slice(target_slices=4, seed=0)
    assert sliced.nslices >= 4

    def on_rank(comm):
        check(sliced.contract([DistArray.from_global(array, comm) for array in arrays]), wanted)

    run_threads(3, on_rank)
