"""One matrix on real ranks: factors, and errors that all of them raise."""

import matrix_cases
import numpy as np
import pytest
from matrix_cases import MOST, definite_matrix_of, matrix_of

import einmpi
from einmpi.planner import orders

pytestmark = pytest.mark.mpi(min_size=2)
EXTENT = 380  # more than 1 MiB


@pytest.fixture(autouse=True)
def _narrow_panels(monkeypatch):
    monkeypatch.setattr(orders, "LEAST_BLOCK", 8)


@pytest.mark.parametrize("kind", ["random", "complex"])
def test_factors(world, kind):
    a, definite = matrix_of(kind, EXTENT, EXTENT), definite_matrix_of(kind, EXTENT)
    b = matrix_of(kind, EXTENT, 3, 1)
    x, y = (einmpi.DistArray.from_global(each, world) for each in (a, definite))
    lower = np.linalg.cholesky(y)
    assert lower.local.size < a.size
    assert matrix_cases.of_cholesky(definite, lower.gather()) < MOST
    assert matrix_cases.of_solution(a, b, np.linalg.solve(x, b).gather()) < MOST
    assert matrix_cases.of_inverse(a, np.linalg.inv(x).gather()) < MOST
    q, r = np.linalg.qr(x)
    assert matrix_cases.of_qr(a, q.gather(), r.gather()) < MOST
    sign, logarithm = np.linalg.slogdet(x)
    expected = np.linalg.slogdet(a)
    np.testing.assert_allclose([sign.item(), logarithm.item()], tuple(expected), rtol=1e-9)


@pytest.mark.parametrize("statement", ["L[i,j] = cholesky(A[i,j])", "X[j,i] = inv(A[i,j])"])
def test_words_are_those_of_the_plan(world, statement):
    a = definite_matrix_of("random", EXTENT)
    step = einmpi.compile(einmpi.program(statement, A=a), world)
    step(A=a)
    ((plan, _),) = step.ready.values()
    assert world.allreduce(step.measured.received) == plan.bytes_predicted > 0
    assert step.measured.peak <= plan.peak


def test_all_ranks_say_the_same(world):
    a = definite_matrix_of("random", EXTENT)
    a[200, 200] = -1
    x = einmpi.DistArray.from_global(a, world)
    with pytest.raises(np.linalg.LinAlgError) as caught:
        np.linalg.cholesky(x)
    assert str(caught.value) == "the leading minor of order 201 is not positive definite"
    a[:, 100] = 0
    with pytest.raises(np.linalg.LinAlgError, match="singular matrix: element 100 "):
        np.linalg.inv(einmpi.DistArray.from_global(a, world))
    assert world.allreduce(1) == world.size
