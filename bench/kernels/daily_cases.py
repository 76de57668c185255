"""What people compute every day, as einmpi programs and as they would write it in numpy.

Each case has the words (elements of eight bytes) that a person would count between p ranks, if the
inputs are cut into blocks beforehand: a copy of n words for all ranks is (p - 1) n, a sum of n
words that all ranks get is 2 (p - 1) n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any  # of numpy, or of CuPy
Sizes = dict[str, int]
Random = np.random.Generator


@dataclass(frozen=True)
class Case:
    """A program, its inputs, the same in numpy, and the words that move.

    `by_numpy` gets the module, numpy or cupy, and the inputs, and returns the outputs in order.
    `words` gets the number of ranks and the sizes; a plan moves as many if `is_exact`, else at
    most as many. numpy takes about 0.1 s with `sizes`; tests use `small`.
    """

    program: str
    sizes: Sizes
    small: Sizes
    inputs: Callable[[Random, Sizes], dict[str, Array]]
    by_numpy: Callable[..., tuple[Array, ...]]
    peer: str
    words: Callable[[int, Sizes], int]
    is_exact: bool = True


def block(ranks: int, rank: int, extent: int) -> range:
    """Return the indices that a rank has of a dimension which all ranks share."""
    start = -(-extent * rank // ranks)
    stop = -(-extent * (rank + 1) // ranks)
    return range(start, stop)


def missing(ranks: int, extent: int, results: int, needed: Callable[[range], range]) -> int:
    """Return how many indices ranks need that are not in their own blocks.

    `needed` gives the indices that some of the results need.
    """
    total = 0
    for rank in range(ranks):
        computed = block(ranks, rank, results)
        if computed:
            total += len(set(needed(computed)) - set(block(ranks, rank, extent)))
    return total


def missing_in_grid(
    ranks: int, extent: int, results: int, needed: Sequence[Callable[[range], range]]
) -> int:
    """Return how many elements of a square the ranks of the best grid need from others.

    Every rank needs a rectangle: `needed` has a function for each dimension.
    """

    def elements(rows: int) -> int:
        everything = kept = 1
        for parts, of_results in zip((rows, ranks // rows), needed, strict=True):
            indices = [of_results(block(parts, part, results)) for part in range(parts)]
            everything *= sum(map(len, indices))
            kept *= sum(
                len(set(read) & set(block(parts, part, extent)))
                for part, read in enumerate(indices)
            )
        return everything - kept

    return min(elements(rows) for rows in range(1, ranks + 1) if ranks % rows == 0)


def window(step: int, length: int) -> Callable[[range], range]:
    """Return what results need that read `length` indices each, `step` apart."""
    return lambda computed: range(computed[0] * step, computed[-1] * step + length)


# ---- neighbours and clusters --------------------------------------------------------------------


def nearest_three(xp: Any, Q: Array, X: Array) -> tuple[Array, ...]:
    distances = (Q * Q).sum(axis=1)[:, None] - 2 * (Q @ X.T) + (X * X).sum(axis=1)
    unordered = xp.argpartition(distances, 3, axis=1)[:, :3]
    order = xp.argsort(xp.take_along_axis(distances, unordered, axis=1), axis=1)
    return (xp.take_along_axis(unordered, order, axis=1),)


K_NEAREST = Case(
    program="""
D[i,j]    = sum(Q[i,f]**2) - 2 * sum(Q[i,f] * X[j,f]) + sum(X[j,f]**2)
first[i]  = argmin[j](D[i,j])
second[i] = argmin[j](where(j == first[i], inf, D[i,j]))
third[i]  = argmin[j](where((j == first[i]) | (j == second[i]), inf, D[i,j]))
N[i,k:3]  = where(k == 0, first[i], where(k == 1, second[i], third[i]))
""",
    sizes={"queries": 1000, "points": 5000, "features": 32},
    small={"queries": 45, "points": 90, "features": 4},
    inputs=lambda rng, n: {
        "Q": rng.normal(size=(n["queries"], n["features"])),
        "X": rng.normal(size=(n["points"], n["features"])),
    },
    by_numpy=nearest_three,
    peer="a matrix product, np.argpartition",
    words=lambda p, n: (p - 1) * n["points"] * n["features"],  # all points to all ranks
    is_exact=False,
)


def kmeans_by_numpy(xp: Any, X: Array, C: Array) -> tuple[Array, ...]:
    near = ((C * C).sum(axis=1) - 2 * (X @ C.T)).argmin(axis=1)
    return (xp.stack([X[near == c].mean(axis=0) for c in range(len(C))]),)


def with_centres(rng: Random, n: Sizes) -> dict[str, Array]:
    X = rng.normal(size=(n["points"], n["features"]))
    return {"X": X, "C": X[: n["clusters"]]}


K_MEANS = Case(
    program="""
D[i,c]  = sum(C[c,f]**2) - 2 * sum(X[i,f] * C[c,f])
near[i] = argmin[c](D[i,c])
new[near[i]:clusters, f] = mean(X[i,f])
""",
    sizes={"points": 300_000, "features": 16, "clusters": 16},
    small={"points": 300, "features": 4, "clusters": 6},
    inputs=with_centres,
    by_numpy=kmeans_by_numpy,
    peer="a matrix product, argmin, a mean for each cluster",
    # The centres to all ranks; their sums and counts from all ranks, and back to all.
    words=lambda p, n: (p - 1) * (3 * n["clusters"] * n["features"] + 2 * n["clusters"]),
    is_exact=False,
)

# ---- graphs -------------------------------------------------------------------------------------


def random_edges(rng: Random, n: Sizes) -> dict[str, Array]:
    return {
        "src": rng.integers(0, n["n"], size=n["edges"]),
        "dst": rng.integers(0, n["n"], size=n["edges"]),
    }


def gcn_by_numpy(
    xp: Any, src: Array, dst: Array, weight: Array, X: Array, W: Array
) -> tuple[Array, ...]:
    if xp is np:
        import scipy.sparse as sparse
    else:
        import cupyx.scipy.sparse as sparse
    adjacency = sparse.csr_matrix((weight, (dst, src)), shape=(len(X), len(X)))
    return (xp.maximum(adjacency @ (X @ W), 0),)


GCN = Case(
    program="""
XW[v,g] = sum(X[v,f] * W[f,g])
S[dst[e]:n, g] = sum(weight[e] * XW[src[e],g])
y[v,g]  = relu(S[v,g])
""",
    sizes={"n": 50_000, "edges": 600_000, "features": 64, "g": 32},
    small={"n": 30, "edges": 90, "features": 5, "g": 4},
    inputs=lambda rng, n: {
        **random_edges(rng, n),
        "weight": rng.random(size=n["edges"]),
        "X": rng.normal(size=(n["n"], n["features"])),
        "W": rng.normal(size=(n["features"], n["g"])),
    },
    by_numpy=gcn_by_numpy,
    peer="scipy.sparse.csr_matrix @",
    # Edges are cut: W and the features of all nodes to all ranks, sums for all nodes from all.
    words=lambda p, n: (p - 1) * (n["features"] * n["g"] + 2 * n["n"] * n["g"]),
    is_exact=False,
)


def pagerank_by_numpy(xp: Any, src: Array, dst: Array, r: Array) -> tuple[Array, ...]:
    n = len(r)
    degree = xp.bincount(src, minlength=n)
    share = r / xp.maximum(degree, 1)
    flow = xp.bincount(dst, weights=share[src], minlength=n)
    lost = r[degree == 0].sum()
    return (0.15 / n + 0.85 * (flow + lost / n),)


PAGERANK = Case(
    program="""
degree[src[e]:n] = sum(1)
share[v] = r[v] / maximum(degree[v], 1)
flow[dst[e]:n] = sum(share[src[e]])
lost     = sum(where(degree[v] == 0, r[v], 0))
y[v]     = 0.15 / n + 0.85 * (flow[v] + lost / n)
""",
    sizes={"n": 500_000, "edges": 5_000_000},
    small={"n": 40, "edges": 90},
    inputs=lambda rng, n: {**random_edges(rng, n), "r": rng.random(size=n["n"])},
    by_numpy=pagerank_by_numpy,
    peer="np.bincount",
    # Degrees and flows are sums for all nodes from all ranks; all shares go to all ranks.
    words=lambda p, n: (p - 1) * (3 * n["n"] + 2),
    is_exact=False,
)

# ---- linear algebra -----------------------------------------------------------------------------


def first_component(xp: Any, X: Array) -> tuple[Array, ...]:
    centred = X - X.mean(axis=0)
    covariance = centred.T @ centred / (len(X) - 1)
    (component,) = power_iteration(xp, covariance, 5)
    return (component,)


def power_iteration(xp: Any, A: Array, steps: int) -> tuple[Array, ...]:
    v = xp.ones(len(A))
    for _ in range(steps):
        v = A @ v
        v /= xp.linalg.norm(v)
    return (v,)


def power_program(matrix: str, steps: int) -> str:
    """Return the statements of a power iteration that begins with ones."""
    lines = [f"w1[i] = sum({matrix}[i,j])", "v1[i] = w1[i] / norm[i](w1[i])"]
    for step in range(2, steps + 1):
        lines.append(f"w{step}[i] = sum({matrix}[i,j] * v{step - 1}[j])")
        lines.append(f"v{step}[i] = w{step}[i] / norm[i](w{step}[i])")
    return "\n".join(lines)


PCA = Case(
    program="centred[s,i] = X[s,i] - mean[s](X[s,i])\n"
    "C[i,j] = sum(centred[s,i] * centred[s,j]) / (samples - 1)\n" + power_program("C", 5),
    sizes={"samples": 20000, "features": 256},
    small={"samples": 200, "features": 6},
    inputs=lambda rng, n: {"X": rng.normal(size=(n["samples"], n["features"]))},
    by_numpy=first_component,
    peer="mean, a matrix product, five steps",
    # The mean and the covariance matrix are sums over samples that all ranks get.
    words=lambda p, n: 2 * (p - 1) * n["features"] * (1 + n["features"]),
    is_exact=False,
)

POWER_ITERATION = Case(
    program=power_program("A", 10),
    sizes={"n": 4500},
    small={"n": 60},
    inputs=lambda rng, n: {"A": rng.random(size=(n["n"], n["n"]))},
    by_numpy=lambda xp, A: power_iteration(xp, A, 10),
    peer="A @ v, np.linalg.norm",
    # A by rows: nine times the whole vector to all ranks, ten sums of one number.
    words=lambda p, n: (p - 1) * (9 * n["n"] + 2 * 10),
    is_exact=False,
)

# ---- neural networks ----------------------------------------------------------------------------


def mlp_by_numpy(
    xp: Any, X: Array, W1: Array, b1: Array, W2: Array, b2: Array
) -> tuple[Array, ...]:
    return (xp.maximum(X @ W1 + b1, 0) @ W2 + b2,)


MLP = Case(
    program="""
h[s,b] = relu(sum(X[s,a] * W1[a,b]) + b1[b])
y[s,c] = sum(h[s,b] * W2[b,c]) + b2[c]
""",
    sizes={"samples": 4000, "a": 256, "b": 512, "c": 128},
    small={"samples": 400, "a": 6, "b": 8, "c": 5},
    inputs=lambda rng, n: {
        "X": rng.normal(size=(n["samples"], n["a"])),
        "W1": rng.normal(size=(n["a"], n["b"])),
        "b1": rng.normal(size=n["b"]),
        "W2": rng.normal(size=(n["b"], n["c"])),
        "b2": rng.normal(size=n["c"]),
    },
    by_numpy=mlp_by_numpy,
    peer="@, np.maximum",
    # Samples are cut, all weights go to all ranks.
    words=lambda p, n: (p - 1) * (n["a"] * n["b"] + n["b"] + n["b"] * n["c"] + n["c"]),
)


def attention_by_numpy(xp: Any, Q: Array, K: Array, V: Array) -> tuple[Array, ...]:
    scores = Q.transpose(1, 0, 2) @ K.transpose(1, 2, 0) / 8
    scores -= scores.max(axis=-1, keepdims=True)
    xp.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return ((scores @ V.transpose(1, 0, 2)).transpose(1, 0, 2),)


ATTENTION = Case(
    program="""
T[h,s,t] = sum(Q[s,h,d] * K[t,h,d]) / 8
y[s,h,d] = sum(softmax[t](T[h,s,t]) * V[t,h,d])
""",
    sizes={"s": 640, "h": 8, "d": 64},
    small={"s": 20, "h": 18, "d": 4},
    inputs=lambda rng, n: {
        name: rng.normal(size=(n["s"], n["h"], n["d"])) for name in ("Q", "K", "V")
    },
    by_numpy=attention_by_numpy,
    peer="@ on heads, np.exp",
    words=lambda p, n: 0,  # heads are independent
)


def convolve_images(xp: Any, x: Array, w: Array) -> tuple[Array, ...]:
    windows = xp.lib.stride_tricks.sliding_window_view(x, w.shape[2:], axis=(2, 3))
    return (xp.tensordot(windows, w, axes=((1, 4, 5), (1, 2, 3))).transpose(0, 3, 1, 2),)


CONVOLUTION_LAYER = Case(
    program="y[n,o,i,j] = sum(x[n,c,i+a,j+b] * w[o,c,a,b])",
    sizes={"images": 16, "c": 16, "pixels": 66, "o": 32, "k": 3},
    small={"images": 18, "c": 2, "pixels": 12, "o": 3, "k": 3},
    inputs=lambda rng, n: {
        "x": rng.normal(size=(n["images"], n["c"], n["pixels"], n["pixels"])),
        "w": rng.normal(size=(n["o"], n["c"], n["k"], n["k"])),
    },
    by_numpy=convolve_images,
    peer="sliding_window_view, np.tensordot",
    # Images are cut, all weights go to all ranks.
    words=lambda p, n: (p - 1) * n["o"] * n["c"] * n["k"] ** 2,
)


def pool_by_numpy(xp: Any, x: Array) -> tuple[Array, ...]:
    images, rows, columns = x.shape
    return (x.reshape(images, rows // 2, 2, columns // 2, 2).max(axis=(2, 4)),)


POOLING = Case(
    program="y[n,i,j] = max[a:2,b:2](x[n,2*i+a,2*j+b])",
    sizes={"images": 96, "pixels": 256},
    small={"images": 18, "pixels": 12},
    inputs=lambda rng, n: {"x": rng.normal(size=(n["images"], n["pixels"], n["pixels"]))},
    by_numpy=pool_by_numpy,
    peer="reshape, max(axis=(2, 4))",
    words=lambda p, n: 0,  # images are independent
)

# ---- signals and grids --------------------------------------------------------------------------

CONVOLUTION = Case(
    program="y[i] = sum(x[i+k] * w[k])",
    sizes={"n": 2_000_000, "k": 64},
    small={"n": 2000, "k": 5},
    inputs=lambda rng, n: {"x": rng.normal(size=n["n"]), "w": rng.normal(size=n["k"])},
    by_numpy=lambda xp, x, w: (xp.convolve(x, w[::-1], "valid"),),
    peer="np.convolve",
    words=lambda p, n: (
        missing(p, n["n"], n["n"] - n["k"] + 1, window(1, n["k"])) + (p - 1) * n["k"]
    ),
)


def filter_by_numpy(xp: Any, x: Array, w: Array) -> tuple[Array, ...]:
    windows = xp.lib.stride_tricks.sliding_window_view(x, w.shape)
    return (xp.einsum("ijab,ab->ij", windows, w),)


FILTER = Case(
    program="y[i,j] = sum(x[i+a,j+b] * w[a,b])",
    sizes={"n": 1400, "k": 5},
    small={"n": 45, "k": 3},
    inputs=lambda rng, n: {
        "x": rng.normal(size=(n["n"], n["n"])),
        "w": rng.normal(size=(n["k"], n["k"])),
    },
    by_numpy=filter_by_numpy,
    peer="sliding_window_view, np.einsum",
    words=lambda p, n: (
        n["n"] * missing(p, n["n"], n["n"] - n["k"] + 1, window(1, n["k"])) + (p - 1) * n["k"] ** 2
    ),
    is_exact=False,  # blocks of both dimensions move less than these stripes
)


def heat_by_numpy(xp: Any, u: Array) -> tuple[Array, ...]:
    y = u.copy()
    around = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
    y[1:-1, 1:-1] += 0.1 * (around - 4 * u[1:-1, 1:-1])
    return (y,)


def fewest_borders(ranks: int) -> int:
    """Return how many borders the blocks of the best grid have, both dimensions counted."""
    return min(rows + ranks // rows - 2 for rows in range(1, ranks + 1) if ranks % rows == 0)


STENCIL = Case(
    program="""
y[i,j] = where((i > 0) & (i < n-1) & (j > 0) & (j < n-1),
               u[i,j] + 0.1 * (u[i-1,j] + u[i+1,j] + u[i,j-1] + u[i,j+1] - 4 * u[i,j]),
               u[i,j])
""",
    sizes={"n": 3500},
    small={"n": 40},
    inputs=lambda rng, n: {"u": rng.normal(size=(n["n"], n["n"]))},
    by_numpy=heat_by_numpy,
    peer="slices",
    words=lambda p, n: 2 * n["n"] * fewest_borders(p),  # both sides of each border
)

# ---- parts of arrays ----------------------------------------------------------------------------

CONCATENATION = Case(
    program="y[i,j:2*n] = where(j < n, a[i,j], b[i,j-n])",
    sizes={"m": 30000, "n": 1000},
    small={"m": 45, "n": 10},
    inputs=lambda rng, n: {
        "a": rng.normal(size=(n["m"], n["n"])),
        "b": rng.normal(size=(n["m"], n["n"])),
    },
    by_numpy=lambda xp, a, b: (xp.concatenate([a, b], axis=1),),
    peer="np.concatenate",
    words=lambda p, n: 0,  # rows stay where they are
)

JOINED_VECTORS = Case(
    program="y[i:2*n] = where(i < n, a[i], b[i-n])",
    sizes={"n": 40_000_000},
    small={"n": 90},
    inputs=lambda rng, n: {"a": rng.normal(size=n["n"]), "b": rng.normal(size=n["n"])},
    by_numpy=lambda xp, a, b: (xp.concatenate([a, b]),),
    peer="np.concatenate",
    # Blocks of a and of b become blocks of y, where the first half is a. Beside that, a rank whose
    # results come from one vector alone reads one element of the other.
    words=lambda p, n: (
        missing(p, n["n"], 2 * n["n"], lambda r: range(r[0], min(r[-1] + 1, n["n"])))
        + missing(
            p, n["n"], 2 * n["n"], lambda r: range(max(r[0], n["n"]) - n["n"], r[-1] + 1 - n["n"])
        )
        + p
    ),
    is_exact=False,
)

SLICES = Case(
    program="y[i,j] = u[1:-1, 2:][i,j] - u[:-2, :-2][i,j]",
    sizes={"n": 9000},
    small={"n": 40},
    inputs=lambda rng, n: {"u": rng.normal(size=(n["n"], n["n"]))},
    by_numpy=lambda xp, u: (u[1:-1, 2:] - u[:-2, :-2],),
    peer="slices",
    # Blocks of a grid need their neighbours' borders; some corners are read by nobody.
    words=lambda p, n: missing_in_grid(p, n["n"], n["n"] - 2, (window(1, 2), window(1, 3))),
    is_exact=False,
)

EVERY_SECOND = Case(
    program="y = u[::2, 1::2]",
    sizes={"n": 14000},
    small={"n": 40},
    inputs=lambda rng, n: {"u": rng.normal(size=(n["n"], n["n"]))},
    by_numpy=lambda xp, u: (u[::2, 1::2].copy(),),
    peer="slices, copy",
    words=lambda p, n: n["n"] // 2 * missing(p, n["n"], n["n"] // 2, window(2, 1)),
    is_exact=False,
)

REVERSAL = Case(
    program="y = x[::-1]",
    sizes={"n": 60_000_000},
    small={"n": 200},
    inputs=lambda rng, n: {"x": rng.normal(size=n["n"])},
    by_numpy=lambda xp, x: (x[::-1].copy(),),
    peer="slice, copy",
    # Everything moves, except in the middle.
    words=lambda p, n: missing(
        p, n["n"], n["n"], lambda r: range(n["n"] - 1 - r[-1], n["n"] - r[0])
    ),
)

# ---- statistics ---------------------------------------------------------------------------------

RUNNING_SUM = Case(
    program="y[i] = cumsum[i](x[i])",
    sizes={"n": 30_000_000},
    small={"n": 900},
    inputs=lambda rng, n: {"x": rng.normal(size=n["n"])},
    by_numpy=lambda xp, x: (xp.cumsum(x),),
    peer="np.cumsum",
    words=lambda p, n: p * (p - 1),  # the sum of each block to all ranks
    is_exact=False,
)

RUNNING_SUMS = Case(
    program="y[i,j] = cumsum[j](x[i,j])",
    sizes={"m": 5000, "n": 6000},
    small={"m": 45, "n": 30},
    inputs=lambda rng, n: {"x": rng.normal(size=(n["m"], n["n"]))},
    by_numpy=lambda xp, x: (xp.cumsum(x, axis=1),),
    peer="np.cumsum",
    words=lambda p, n: 0,  # rows are independent
)

ARGMIN = Case(
    program="y[i] = argmin[j](x[i,j])",
    sizes={"m": 16000, "n": 6000},
    small={"m": 45, "n": 30},
    inputs=lambda rng, n: {"x": rng.normal(size=(n["m"], n["n"]))},
    by_numpy=lambda xp, x: (x.argmin(axis=1),),
    peer="argmin",
    words=lambda p, n: 0,  # rows are independent
)

ARGMIN_OF_ALL = Case(
    program="y = argmin(x[i])",
    sizes={"n": 100_000_000},
    small={"n": 400},
    inputs=lambda rng, n: {"x": rng.normal(size=n["n"])},
    by_numpy=lambda xp, x: (x.argmin(),),
    peer="argmin",
    words=lambda p, n: 2 * 2 * (p - 1),  # the least value, and where it is, to all ranks
)


def with_gaps(rng: Random, n: Sizes) -> dict[str, Array]:
    x = rng.normal(size=(n["m"], n["n"]))
    x[x > 1] = np.nan
    return {"x": x}


MEAN_WITHOUT_NANS = Case(
    program="y[j] = sum[i](where(isnan(x[i,j]), 0, x[i,j])) / count[i](~isnan(x[i,j]))",
    sizes={"m": 8000, "n": 2000},
    small={"m": 45, "n": 18},
    inputs=with_gaps,
    by_numpy=lambda xp, x: (xp.nanmean(x, axis=0),),
    peer="np.nanmean",
    words=lambda p, n: 0,  # columns are independent
)

CASES = {
    "k nearest neighbours": K_NEAREST,
    "k-means step": K_MEANS,
    "GCN layer": GCN,
    "PageRank step": PAGERANK,
    "principal component": PCA,
    "power iteration": POWER_ITERATION,
    "MLP": MLP,
    "attention": ATTENTION,
    "convolution layer": CONVOLUTION_LAYER,
    "pooling": POOLING,
    "1-D convolution": CONVOLUTION,
    "2-D convolution": FILTER,
    "5-point stencil": STENCIL,
    "concatenation": CONCATENATION,
    "joined vectors": JOINED_VECTORS,
    "slices": SLICES,
    "every second": EVERY_SECOND,
    "reversal": REVERSAL,
    "cumsum": RUNNING_SUM,
    "cumsum of rows": RUNNING_SUMS,
    "argmin": ARGMIN,
    "argmin of all": ARGMIN_OF_ALL,
    "mean without nans": MEAN_WITHOUT_NANS,
}
