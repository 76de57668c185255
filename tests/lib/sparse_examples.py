"""The files that the example jobs with sparse tensors read.

`python tests/lib/sparse_examples.py jobs/sparse` writes them.
"""

import sys

import numpy as np
import scipy.sparse

import einmpi


def web():
    """Pages that link to a few others, most of them to the first pages; some have no links."""
    rng = np.random.default_rng(1)
    source = rng.integers(0, 110, 500)
    target = (120 * rng.random(500) ** 2).astype(int)
    places = sorted({*zip(source.tolist(), target.tolist(), strict=True)})
    rows, columns = np.array([place for place in places if place[0] != place[1]]).T
    return einmpi.SparseArray.from_keys((rows, columns), np.ones(len(rows), "int64"), (120, 120))


def poisson():
    """Poisson's equation on 24 × 24 points: each has 4 neighbours, but at the border."""
    line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(24, 24))
    eye = scipy.sparse.eye_array(24)
    found = scipy.sparse.coo_array(scipy.sparse.kron(line, eye) + scipy.sparse.kron(eye, line))
    return einmpi.SparseArray.from_keys(found.coords, found.data, found.shape)


def events():
    """Counts that follow from three vectors for each dimension."""
    rng = np.random.default_rng(2)
    shape = (30, 20, 12)
    factors = [rng.random((extent, 3)) ** 3 for extent in shape]
    counts = rng.poisson(2 * np.einsum("ir,jr,kr->ijk", *factors))
    counts[-1, -1, -1] = 1  # so that the largest keys tell the shape
    keys = np.nonzero(counts)
    return einmpi.SparseArray.from_keys(keys, counts[keys], shape)


FILES = {"web.mtx": web, "poisson.npz": poisson, "events.tns": events}

if __name__ == "__main__":
    for file, make in FILES.items():
        make().save(f"{sys.argv[1]}/{file}")
