"""Sparse tensors in files on real ranks: each reads and writes a share."""

import numpy as np
import pytest
import scipy.sparse

import einmpi

pytestmark = pytest.mark.mpi(min_size=1)
MATRIX = scipy.sparse.random_array((37, 29), density=0.1, rng=np.random.default_rng(0))


@pytest.mark.parametrize("target", ["a.h5:/A", "a.npz", "a.mtx", "a.tns"])
def test_what_is_written_is_read(world, tmp_path_factory, target):
    folder = world.bcast(str(tmp_path_factory.mktemp("sparse")))
    file = f"{folder}/{target}"
    array = einmpi.SparseArray.from_keys(MATRIX.coords, MATRIX.data, MATRIX.shape, comm=world)
    array.save(file)
    entry = {"file": file, "shape": list(MATRIX.shape)}
    if ":" in target:
        entry["file"], _, entry["dataset"] = file.partition(":")
    job = einmpi.program("S[i,j] = 2 * A[i,j]", inputs={"A": entry})
    found = einmpi.run(job, comm=world)["S"].coordinates()
    np.testing.assert_array_equal(found.dense(), 2 * MATRIX.toarray())
