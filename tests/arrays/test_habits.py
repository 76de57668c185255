"""Expressions as people write them with numpy, on DistArrays: numpy's own results are right."""

import numpy as np
import pytest
from numpy_expressions import EXPRESSIONS, REFUSED, names

import einmpi.array_api as xp
from einmpi import DistArray
from einmpi.comm.threads import run_threads


def value_of(expression, given):
    scope = {"np": np, **given}
    *statements, last = expression.rsplit("; ", 1)
    for statement in statements:
        exec(statement, scope)
    return eval(last, scope)


def distributed_names(comm):
    return {name: DistArray.from_global(array, comm) for name, array in names().items()}


def test_there_are_enough():
    listed = [expression for kind in EXPRESSIONS.values() for expression in kind]
    assert len(set(listed)) == len(listed) >= 350
    assert set(REFUSED) < set(listed) and len(listed) - len(REFUSED) >= 330


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", EXPRESSIONS)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_results_are_those_of_numpy(kind, ranks):
    """Sums of fewer than a hundred numbers in another order; solved systems are not singular."""

    def on_rank(comm):
        for expression in EXPRESSIONS[kind]:
            if expression in REFUSED:
                continue
            wanted = np.asarray(value_of(expression, names()))
            result = value_of(expression, distributed_names(comm))
            assert not isinstance(result, np.ndarray), expression
            found = np.asarray(result.gather() if isinstance(result, DistArray) else result)
            assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), expression
            np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9, err_msg=expression)

    run_threads(ranks, on_rank)


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_refused_says_so(ranks):
    def on_rank(comm):
        for expression, message in REFUSED.items():
            with pytest.raises((TypeError, AttributeError), match=message):
                value_of(expression, distributed_names(comm))

    run_threads(ranks, on_rank)


def test_files_of_numpy(tmp_path):
    whole = names()["m"]

    def on_rank(comm):
        np.save(tmp_path / "whole", DistArray.from_global(whole, comm).T)

    run_threads(3, on_rank)
    np.testing.assert_array_equal(np.load(tmp_path / "whole.npy"), whole.T)


def test_targets_that_cannot_take_a_result():
    def on_rank(comm):
        given = distributed_names(comm)
        for call, error in (
            ("np.sum(m, axis=0, out=np.zeros(5))", TypeError),
            ("np.matmul(m, w, out=np.zeros((7, 3)))", TypeError),
            ("np.sum(m, axis=0, out=a)", ValueError),
            ("np.cumsum(a, out=i)", ValueError),
            ("np.copyto(j, a)", TypeError),
            ("np.copyto(np.zeros(11), a)", TypeError),
            ("np.add.at(j, [0], 0.5)", TypeError),
            ("np.add.at(np.zeros(11), i, a[:9])", TypeError),
            ("np.arctan2.at(a, i, 1.0)", TypeError),
            ("np.save(__import__('io').BytesIO(), a)", TypeError),
            ("np.convolve(a, m)", ValueError),
            ("np.convolve(a, b, 'most')", ValueError),
            ("np.gradient(a, edge_order=3)", ValueError),
            ("np.gradient(a, [1.0, 2.0])", ValueError),
            ("np.gradient(m, 1, 2, 3)", TypeError),
            ("np.partition(a, 11)", ValueError),
            ("np.diag(t)", ValueError),
            ("np.fill_diagonal(t, 1)", ValueError),
            ("np.cross(m, m)", ValueError),
            ("np.select([], [])", ValueError),
            ("np.lib.stride_tricks.sliding_window_view(a, 12)", ValueError),
            ("np.nanargmax(d * np.nan)", ValueError),
            ("a.item(11)", IndexError),
            ("np.copyto(j, 2.5)", TypeError),
            ("np.copyto(k, 1)", TypeError),
            ("np.nanquantile(d, -0.5)", ValueError),
            ("np.nanpercentile(d, 130, axis=0)", ValueError),
            ("np.lib.stride_tricks.sliding_window_view(a, -1)", ValueError),
            ("np.insert(a, 12, 5)", IndexError),
        ):
            with pytest.raises(error):
                value_of(call, given)
        with pytest.raises(TypeError, match=r"negative\.at does not take a DistArray"):
            np.negative.at(given["a"], [0, 1])

    run_threads(2, on_rank)


def test_newer_functions_of_the_array_api():
    x = xp.asarray([[2.0, 1.0], [0.0, 3.0]])
    assert xp.isin(x, xp.asarray([1.0, 2.0])).tolist() == [[True, True], [False, False]]
    assert xp.broadcast_shapes((3, 1), (4,)) == (3, 4)
    assert sorted(xp.linalg.eigvals(x).real.tolist()) == [2, 3]
    values, vectors = xp.linalg.eig(x)
    np.testing.assert_allclose((x @ vectors).gather(), (vectors * values).gather(), atol=1e-12)
