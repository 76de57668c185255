"""Sparse tensors on real ranks: the golden cases, and one plan on all ranks."""

import numpy as np
import pytest
from sparse_cases import NAMES, read_case

import einmpi

pytestmark = pytest.mark.mpi(min_size=1)


@pytest.mark.parametrize("name", NAMES)
def test_case(world, name):
    case = read_case(name)
    if case.record["refused"]:
        with pytest.raises(einmpi.InputError, match=case.record["refused"]):
            case.run()
        return
    results = case.run()
    case.check(results)
    digests = []
    for found in results.values():
        values = found.values if isinstance(found, einmpi.SparseArray) else found
        digests.append(values.origin.plan_digest())
    assert len({tuple(each) for each in world.allgather(digests)}) == 1


def test_patterns_that_differ_between_ranks_are_refused(world):
    keys = [0, 1 + (world.rank == world.size - 1)]
    given = einmpi.SparseArray.from_keys((keys, keys), np.ones(2), (4, 4), comm=world)
    if world.size > 1:
        with pytest.raises(einmpi.EinmpiError):
            einmpi.run("y[i] = sum(A[i,j])", A=given)
