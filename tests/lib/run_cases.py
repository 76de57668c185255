"""Jobs small enough to run on many ranks many times: those of jobs/, and programs with odd extents
and every feature.

Under mpirun tests/mpi runs them all. As a program it does so on another backend, where there is no
pytest-mpi.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from distributed import assert_close
from paths import JOBS

import einmpi
from einmpi.comm.mpi import comm_of
from einmpi.planner.strategies import STRATEGIES

# Divisible by all rank counts up to 8, 12 and 16 where it matters, and not at all.
SIZES: dict[str, dict[str, dict[str, int]]] = {
    "chain": {"even": {"s": 48}, "skewed": {"s": 48, "skew": 4}, "odd": {"s": 37}},
    "distances": {
        "even": {"rows": 48, "columns": 96, "f": 24},
        "odd": {"rows": 31, "columns": 23, "f": 17},
    },
    "softmax": {"even": {"rows": 96, "columns": 48}, "odd": {"rows": 53, "columns": 29}},
    "attention": {"even": {"s": 48, "a": 96, "h": 24}, "odd": {"s": 19, "a": 35, "h": 5}},
    "shortest_path": {"even": {"n": 48}, "odd": {"n": 23}},
    "nearest": {"odd": {"queries": 31, "points": 43, "f": 5}},
    "pca": {"odd": {"samples": 53, "f": 7}},
    "heat": {"odd": {"n": 29}},
    "kalman": {"odd": {"n": 7, "steps": 11}},
    "convolution": {"odd": {"images": 3, "pixels": 16, "filters": 5}},
    "kmeans": {"odd": {"points": 101, "f": 3, "clusters": 5}},
    "gcn": {"odd": {"n": 23, "edges": 71, "f": 5, "g": 3}},
    "pagerank": {"odd": {"n": 23, "edges": 71}},
}

PROGRAMS: dict[str, tuple[str, dict[str, tuple[tuple[int, ...], str]]]] = {
    "transposed sum": (
        "Z[k,i] = sum(A[i,j] * B[j,k]) - B[i,k]",
        {"A": ((11, 11), "float64"), "B": ((11, 13), "float64")},
    ),
    "semiring": (
        "Z[i,k] = min(A[i,j] + B[j,k])",
        {"A": ((9, 16), "float32"), "B": ((16, 5), "float32")},
    ),
    "single number": (
        "n = sum(A[i,j]**2); m = max(A[i,j]); Z[i] = n * A[i,3] - m",
        {"A": ((17, 6), "float64")},
    ),
    "recurrence": (
        "h[t,k] = tanh(sum(W[k,l] * where(t > 0, h[t-1,l], 0)) / 4 + X[t,k]); n = sum(h[t,k]**2); "
        "dW[k,l] = grad(n, W[k,l])",
        {"W": ((7, 7), "float64"), "X": ((5, 7), "float64")},
    ),
    "diagonal": (
        "D[i] = X[i,i]; t = sum(X[i,i]); Z[i,j] = X[i,j] - D[i] * t",
        {"X": ((12, 12), "float64")},
    ),
    "gather": (
        "Y[b,s,a] = W[tok[b,s],a]; Z[a] = sum(Y[b,s,a])",
        {"W": ((16, 9), "float64"), "tok": ((5, 8), "int64")},
    ),
    "picked": (
        "Z[b,l] = sum(H[b,h] * W[h,l]); y[b] = Z[b,at[b]]; "
        "v[b] = sum[l](where(at[b] == l, Z[b,l], 0))",
        {"H": ((5, 4), "float64"), "W": ((4, 53), "float64"), "at": ((5,), "int64")},
    ),
    "indices": ("Z[i,j] = where(j <= i, X[i,j], -inf) + 3 * i - j", {"X": ((16, 11), "float64")}),
    "integers": ("Z[i] = sum(A[i,j]); p[j] = prod(A[i,j] % 3 + 1)", {"A": ((12, 10), "int32")}),
    "truth": (
        "Z[i] = any(A[i,j] > 3); a = all(A[i,j] < 99); n[j] = sum(A[i,j] == 1)",
        {"A": ((8, 7), "int64")},
    ),
    "complex": (
        "Z[i,k] = sum(A[i,j] * conj(B[k,j]))",
        {"A": ((6, 8), "complex128"), "B": ((4, 8), "complex64")},
    ),
    "half": (
        "Z[i,k] = sum(A[i,j] * B[j,k])",
        {"A": ((8, 12), "float16"), "B": ((12, 6), "float16")},
    ),
    "three": (
        "Z[i,l] = sum(A[i,j] * B[j,k] * C[k,l])",
        {"A": ((8, 9), "float64"), "B": ((9, 10), "float64"), "C": ((10, 11), "float64")},
    ),
    "four dimensions": (
        "S[b,h,s,t] = sum(Q[b,s,h,d] * K[b,t,h,d])\n"
        "O[b,s,h,d] = sum(softmax[t](S[b,h,s,t]) * V[b,t,h,d])",
        dict.fromkeys("QKV", ((4, 6, 3, 5), "float64")),
    ),
    "twice": ("Z[i,k] = sum(A[i,j] * A[k,j]) + A[i,k]", {"A": ((12, 12), "float64")}),
    "nothing": (
        "Z[i,k] = sum(A[i,j] * B[j,k]); m[i] = sum(A[i,j])",
        {"A": ((5, 0), "float64"), "B": ((0, 7), "float64")},
    ),
    "no results": (
        "Z[i,k] = sum(A[i,j] * B[j,k]); m[i] = sum(A[i,j])",
        {"A": ((0, 7), "float64"), "B": ((7, 5), "float64")},
    ),
    "ones": ("Z[i,k] = sum(A[i,j] * B[j,k])", {"A": ((1, 1), "float64"), "B": ((1, 1), "float64")}),
    "broadcast": ("Z[i,j:24] = A[i] + j; w[i:12] = 2 * i", {"A": ((8,), "float64")}),
    "statistics": (
        "Y[i,j] = layernorm[j](X[i,j]); v = var(X[i,j]); m[j] = mean(X[i,j])",
        {"X": ((24, 18), "float64")},
    ),
    "stencil": (
        "Z[i:15,j:11] = u[i+1,j+0] + u[i+1,j+2] + u[i+0,j+1] + u[i+2,j+1] - 4 * u[i+1,j+1]\n"
        "G[i,j] = where((i > 0) & (i < 16), u[i-1,j] + u[i+1,j], u[i,j])",
        {"u": ((17, 13), "float64")},
    ),
    "windows": (
        "Y[i] = sum(X[i+k] * W[k]); P[i:9] = max[k:4](X[4*i+k]); R[i:38] = X[37-i]; S = X[3:30:2]",
        {"X": ((38,), "float64"), "W": ((5,), "float64")},
    ),
    "split and merged": (
        "Z[b,s] = sum[h:3,d:4](X[b,s,h*4+d] * W[h,d]); Y[b:2,p:84] = X[b, p // 12, p % 12]",
        {"X": ((2, 7, 12), "float64"), "W": ((3, 4), "float64")},
    ),
    "scans": (
        "C[i,j] = cumsum[j](X[i,j]); P[i] = cumprod[i](1 + V[i] / 9); M[i] = cummax[i](V[i])",
        {"X": ((7, 10), "float64"), "V": ((41,), "float64")},
    ),
    "scattered": (
        "Y[dst[e]:11,f] = sum(w[e] * X[src[e],f]); M[f,dst[e]:11] = max(X[src[e],f])\n"
        "H[dst[e]:5,src[e]//2:4] = sum(1); A[dst[e]:11,g] = mean(X[src[e],f] * V[f,g])",
        {
            "dst": ((31,), "int64"),
            "src": ((31,), "int32"),
            "w": ((31,), "float32"),
            "X": ((9, 6), "float32"),
            "V": ((6, 3), "float32"),
        },
    ),
    "scattered integers": (
        "Y[k:7,f] = prod(where(k == A[e,f], B[e], 1)); Z[A[e,f]:7] = min(B[e] * f);"
        " S[A[e,f]:7] = argmax(B[e] + f); T[i] = any(where(A[e,0] == i, C[i,e] > 3, False))",
        {"A": ((23, 4), "int64"), "B": ((23,), "int32"), "C": ((9, 23), "int64")},
    ),
    "places": (
        "a[i] = argmin[j](X[i,j]); b[i] = argmax[j](A[i,j]);"
        " n = norm(X[i,j]); s[j] = std[i](X[i,j])",
        {"X": ((12, 9), "float64"), "A": ((12, 9), "int32")},
    ),
    "rounded": (
        "Z[i] = floor(X[i]) + ceil(X[i]) * round(X[i]) + clip(X[i], -0.5, 0.5)\n"
        "Y[i] = sigmoid(X[i]) + tan(X[i]) + arctan2(X[i], 2)"
        " + log2(abs(X[i]) + 1); Q[i] = A[i] // 4",
        {"X": ((29,), "float64"), "A": ((29,), "int64")},
    ),
}


def array(name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    rng = np.random.default_rng(sum(name.encode()))
    if np.dtype(dtype).kind == "i":
        return rng.integers(0, 9, shape).astype(dtype)
    values = rng.standard_normal(shape)
    return (
        values + 1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else values
    ).astype(dtype)


@cache
def cases() -> dict[str, tuple[einmpi.Job, dict[str, np.ndarray]]]:
    """Every job and program, with the arrays it is given. Several files of tests share them."""
    found: dict[str, tuple[einmpi.Job, dict[str, np.ndarray]]] = {}
    for name, sizes in SIZES.items():
        for kind, chosen in sizes.items():
            found[f"{name}, {kind}"] = einmpi.load(JOBS / f"{name}.toml", dtype=None, **chosen), {}
    for name, (text, inputs) in PROGRAMS.items():
        arrays = {tensor: array(tensor, *given) for tensor, given in inputs.items()}
        found[name] = einmpi.program(text, **arrays), arrays
    return found


def strategies(job: einmpi.Job, ranks: int) -> list[str]:
    """Those that can plan the job: the ones by roles need roles."""
    able = []
    for strategy in STRATEGIES:
        try:
            einmpi.plan(job, ranks, strategy=strategy)
        except einmpi.InputError as error:
            assert needs_roles(error), error
        else:
            able.append(strategy)
    return able


def needs_roles(error: einmpi.InputError) -> bool:
    return "role" in str(error)


def check_case(name: str, strategy: str, world: Any, backend: str = "numpy") -> bool:
    """Run a case on real ranks and check values, bits, bytes and memory; all ranks call it.

    From the third run on, calls are bound to the steps.

    False if the strategy needs roles that the job does not give.
    """
    job, arrays = CASES[name]
    compiled = einmpi.compile(replace(job, backend=backend), strategy=strategy)
    try:
        results = compiled(arrays)
    except einmpi.InputError as error:
        assert needs_roles(error), error
        return False
    outputs = {key: result.gather() for key, result in results.items()}
    assert_close(outputs, einmpi.reference(job, arrays))
    for _ in range(2):
        again = {key: result.gather() for key, result in compiled(arrays).items()}
        for key, values in outputs.items():
            assert np.array_equal(values, again[key], equal_nan=True), f"{key} has other bits"
    ((plan, _),) = compiled.ready.values()
    assert compiled.measured.peak <= plan.peak
    received = comm_of(world).allgather_text(str(compiled.measured.received))
    assert sum(int(text) for text in received) == plan.bytes_predicted
    return True


CASES = cases()


def main() -> None:
    from mpi4py import MPI

    for name in CASES:
        assert check_case(name, "eindecomp", MPI.COMM_WORLD, backend=sys.argv[1])
    if MPI.COMM_WORLD.rank == 0:
        print(f"{len(CASES)} cases")


def batches_job(folder: Path) -> einmpi.Job:
    """A loop over batches of a file with chunks, the last of which is padded."""
    rng = np.random.default_rng(8)
    X = rng.normal(size=(23, 3))
    with h5py.File(folder / "train.h5", "w") as file:
        file.create_dataset("X", data=X, chunks=(5, 3))
        file["y"] = X @ np.arange(3.0)
    text = """
    program = '''
    r[i] = where(i < rows, sum(X[i,j] * w[j]) - y[i], 0.0)
    w_next[j] = w[j] - 0.1 / rows * sum(X[i,j] * r[i])
    '''
    [inputs]
    X = { file = "train.h5", dataset = "/X", batch = 4 }
    y = { file = "train.h5", dataset = "/y", batch = 4 }
    w = { shape = [3], random = "zeros" }
    [loop]
    epochs = 3
    shuffle = 2
    last = "pad"
    carry = { w = "w_next" }
    """
    (folder / "batches.toml").write_text(text)
    return einmpi.load(folder / "batches.toml")


if __name__ == "__main__":
    main()


UPDATES = """
P[b,j] = sum(X[b,i] * W[i,j]) - D[b,j]
loss = sum(P[b,j]**2)
G[i,j] = sum(X[b,i] * P[b,j])
W_next[i,j] = W[i,j] - 0.01 * G[i,j]
cache_next[u,j] = where(u == step % 7, P[0,j], cache[u,j])
m[u] = max[j](abs(M[u,j]))
M_next[u,j] = M[u,j] / (1 + m[u])
"""


def updates_job() -> tuple[einmpi.Job, dict[str, np.ndarray], dict[str, str]]:
    """A loop that updates all it carries in place: a job, its inputs, and what it carries."""
    rng = np.random.default_rng(9)
    inputs = {
        "X": rng.normal(size=(3, 40)),
        "D": rng.normal(size=(3, 12)),
        "W": rng.normal(size=(40, 12)),
        "cache": rng.normal(size=(7, 12)),
        "M": rng.normal(size=(1200, 12)),
    }
    job = einmpi.program(UPDATES, step=np.array(0), **inputs)
    return job, inputs, {"W": "W_next", "cache": "cache_next", "M": "M_next"}


def updated_by_numpy(inputs: dict[str, np.ndarray], steps: int) -> dict[str, np.ndarray]:
    """What `updates_job` carries after some steps."""
    W = inputs["W"]
    cache = inputs["cache"].copy()
    M = inputs["M"]
    for step in range(steps):
        P = inputs["X"] @ W - inputs["D"]
        W = W - 0.01 * (inputs["X"].T @ P)
        cache[step % 7] = P[0]
        M = M / (1 + abs(M).max(axis=1))[:, None]
    return {"W": W, "cache": cache, "M": M}
