"""`optimize` of einsum: paths and path optimizers of numpy, opt_einsum and cotengra."""

import random

import numpy as np
import opt_einsum
import pytest

import einmpi
from einmpi import DistArray
from einmpi.arrays.products import compile_einsum
from einmpi.comm.base import ALONE
from einmpi.comm.threads import run_threads

CHAIN = "ij,jk,kl,lm->im"
NAMES = ["greedy", "optimal", "auto", "auto-hq", "dp", "random-greedy", "random-greedy-128"]


def arrays_of(equation, seed=0):
    generator = np.random.default_rng(seed)
    letters = sorted(set(equation) - set(",->"))
    extents = {letter: int(generator.integers(1, 6)) for letter in letters}
    terms = equation.split("->")[0].split(",")
    return [generator.normal(size=[extents[letter] for letter in term]) for term in terms]


def random_path(count, generator):
    """Return a path of steps that take one to three operands each."""
    path = []
    while count > 1:
        taken = generator.sample(range(count), generator.randint(1, min(3, count)))
        path.append(tuple(taken))
        count += 1 - len(taken)
    return path


def operations(equation, arrays, path=()):
    return compile_einsum(equation, arrays, ALONE, None, path).job.graph.operations()


EQUATIONS = [
    CHAIN,
    "ab,cd,bd,ae->ce",
    "i,j,k->kij",
    "bij,bjk,bk,b->bi",
    "ii,ij,j,jk->k",
    "a,a,ab,bc->",
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_paths_compute_what_numpy_does(equation, ranks):
    arrays = arrays_of(equation)
    wanted = np.einsum(equation, *arrays)
    generator = random.Random(equation)
    paths = [random_path(len(arrays), generator) for _ in range(4)]
    paths += [opt_einsum.contract_path(equation, *arrays, optimize="greedy")[0]]
    paths += [np.einsum_path(equation, *arrays, optimize="optimal")[0]]

    def on_rank(comm):
        given = [DistArray.from_global(array, comm) for array in arrays]
        for optimize in (*paths, *NAMES, True, None):
            found = einmpi.einsum(equation, *given, optimize=optimize).gather()
            np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)

    run_threads(ranks, on_rank)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64", "bool", "float32", "complex64"])
def test_paths_of_arrays_have_the_dtype_of_numpy(dtype):
    arrays = [(each * 40).astype(dtype) for each in arrays_of(CHAIN, 1)]
    wanted = np.einsum(CHAIN, *arrays)
    for path in ([(0, 1), (0, 1), (0, 1)], [(2, 3), (1, 2), (0, 1)], [(0, 3), (0, 1), (1, 0)]):
        found = einmpi.einsum(CHAIN, *arrays, optimize=path)
        assert found.dtype == wanted.dtype
        if wanted.dtype.kind in "fc":
            np.testing.assert_allclose(found, wanted, rtol=1e-4)
        else:
            np.testing.assert_array_equal(found, wanted)


def test_operands_are_converted_before_the_first_step():
    large = np.full((2, 2), 2**20, "int32")
    arrays = [large, large, np.ones((2, 2), "int64")]
    found = einmpi.einsum("ij,jk,kl", *arrays, optimize=[(0, 1), (0, 1)])
    np.testing.assert_array_equal(found, np.full((2, 2), 2**42))
    third = np.float32(1) / np.full((2, 2), 3, "float32")
    arrays = [third, third, np.ones((2, 2))]
    found = einmpi.einsum("ij,jk,kl", *arrays, optimize=[(0, 1), (0, 1)])
    np.testing.assert_allclose(found, np.einsum("ij,jk,kl", *arrays), rtol=1e-15)


def test_operands_of_extent_1_and_ellipses():
    generator = np.random.default_rng(2)
    arrays = [generator.normal(size=shape) for shape in ((5, 1, 4), (1, 4, 1), (1, 4), (6,))]
    for path in ([(1, 2), (0, 2), (0, 1)], [(0, 3), (0, 1), (0, 1)], [(3,), (0, 1, 2, 3)]):
        found = einmpi.einsum("...ij,...jk,...j,k", *arrays, optimize=path)
        wanted = np.einsum("...ij,...jk,...j,k", *arrays)
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_path_decides_how_many_operations_there_are():
    arrays = [np.ones(shape) for shape in ((2, 30), (30, 40), (40, 50), (50, 3))]
    from_left = ((0, 1), (0, 2), (0, 1))
    chosen = operations(CHAIN, arrays)
    assert operations(CHAIN, arrays, from_left) == chosen
    middle_first = operations(CHAIN, arrays, ((1, 2), (1, 2), (0, 1)))
    # A pair of matrices takes as many multiplications as additions.
    assert middle_first == 2 * (30 * 40 * 50 + 30 * 50 * 3 + 2 * 30 * 3)
    assert middle_first > 5 * chosen


def test_the_path_is_part_of_what_is_kept():
    arrays = [np.ones(shape) for shape in ((2, 30), (30, 40), (40, 50), (50, 3))]
    paths = ((), ((0, 1), (0, 2), (0, 1)), ((1, 2), (1, 2), (0, 1)))
    compiled = [compile_einsum(CHAIN, arrays, ALONE, None, path) for path in paths]
    assert len(set(map(id, compiled))) == 3
    assert compile_einsum(CHAIN, arrays, ALONE, None, paths[2]) is compiled[2]


def test_two_operands_have_one_order():
    a, b = np.ones((2, 3)), np.ones((3, 4))
    np.testing.assert_array_equal(einmpi.einsum("ij,jk", a, b, optimize=fails), a @ b)
    np.testing.assert_array_equal(einmpi.einsum("ij,jk", a, b, optimize=[(0, 1)]), a @ b)
    np.testing.assert_array_equal(einmpi.einsum(a, [0, 1], optimize=fails), a)


class RandomPaths(opt_einsum.paths.PathOptimizer):
    """Finds another path on each rank and in each call."""

    def __init__(self, seed):
        self.generator = random.Random(seed)
        self.found = []

    def __call__(self, inputs, output, size_dict, memory_limit=None):
        assert memory_limit is None
        assert set().union(*inputs) == set(size_dict) >= set(output)
        self.found.append(random_path(len(inputs), self.generator))
        return self.found[-1]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_ranks_take_the_path_that_rank_0_finds(ranks):
    arrays = arrays_of(CHAIN, 3)
    wanted = np.einsum(CHAIN, *arrays)

    def on_rank(comm):
        given = [DistArray.from_global(array, comm) for array in arrays]
        optimizers = [RandomPaths(comm.rank), opt_einsum.RandomGreedy(max_repeats=4)]
        for optimizer in (*optimizers, opt_einsum.DynamicProgramming(), opt_einsum.paths.greedy):
            for _ in range(3):
                found = einmpi.einsum(CHAIN, *given, optimize=optimizer).gather()
                np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)
        return len(optimizers[0].found)

    assert run_threads(ranks, on_rank) == [3] + [0] * (ranks - 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_optimizers_of_cotengra(ranks):
    cotengra = pytest.importorskip("cotengra")
    arrays = arrays_of(CHAIN, 4)
    wanted = np.einsum(CHAIN, *arrays)

    def on_rank(comm):
        given = [DistArray.from_global(array, comm) for array in arrays]
        optimizers = [
            cotengra.HyperOptimizer(methods=["greedy"], max_repeats=2, parallel=False),
            cotengra.GreedyOptimizer(),
            cotengra.einsum_tree(CHAIN, *[array.shape for array in arrays]).get_path(),
        ]
        for optimizer in optimizers:
            found = einmpi.einsum(CHAIN, *given, optimize=optimizer).gather()
            np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)

    run_threads(ranks, on_rank)


def fails(inputs, output, size_dict, memory_limit=None):
    raise ZeroDivisionError("nothing\nfound")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("optimize", "problem"),
    [
        ("best", "optimize is 'best'; expected True, False, a name that opt_einsum knows, a path"),
        ([], r"optimize is \[\]; expected True"),
        ([("i", "j")], r"optimize is \[\('i', 'j'\)\]; expected True"),
        (["path", (0, 1)], r"optimize is \['path', \(0, 1\)\]; expected True"),
        ([(0, 1.5), (0, 1)], "optimize is .* expected True"),
        ([(0, 4)], r"takes operands \(0, 4\) of 4; expected positions of operands that are left"),
        ([(0, -1)], r"takes operands \(0, -1\) of 4; expected positions"),
        ([(1, 1)], r"takes operands \(1, 1\) of 4; expected positions"),
        ([()], r"takes operands \(\) of 4; expected positions"),
        ([(0, 1), (0, 1)], "the path leaves 2 operands; expected a path that contracts all"),
        (fails, "optimize finds no path: ZeroDivisionError: nothing found; expected a function"),
        (lambda *_: 3, "optimize finds no path: TypeError: .*; expected a function"),
        (lambda *_: [(0, 1)], "the path leaves 3 operands; expected a path"),
    ],
)
def test_wrong_paths(optimize, problem, ranks):
    arrays = arrays_of(CHAIN)

    def on_rank(comm):
        given = [DistArray.from_global(array, comm) for array in arrays]
        with pytest.raises(einmpi.InputError, match=f"einsum: .*{problem}") as error:
            einmpi.einsum(CHAIN, *given, optimize=optimize)
        assert "\n" not in str(error.value)

    run_threads(ranks, on_rank)


@pytest.mark.parametrize(
    "other", [True, [(0, 1), (0, 1), (0, 1)]], ids=["chosen here", "another path"]
)
@pytest.mark.parametrize("first", [fails, [(2, 3), (1, 2), (0, 1)]], ids=["optimizer", "path"])
def test_ranks_with_different_values_are_told(first, other):
    arrays = [np.ones(shape) for shape in ((2, 30), (30, 40), (40, 50), (50, 3))]

    def on_rank(comm):
        given = [DistArray.from_global(array, comm) for array in arrays]
        optimize = other if comm.rank else first
        with pytest.raises(einmpi.EinmpiError, match="all ranks must"):
            einmpi.einsum(CHAIN, *given, optimize=optimize)

    run_threads(2, on_rank)
