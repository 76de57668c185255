"""Kernels that write rows into an operand, checked on a GPU and with a stand-in on the CPU."""

import numpy as np

import einmpi
from einmpi.kernels.cuda import dispatch
from einmpi.kernels.cuda.row_writes import prepare_row_writes
from einmpi.schedule.lower import lower

PLACES = [
    "u == at[b]",
    "at[b] == u",
    "u == (at[b] + 1) % 4",
    "u == shift",
    "u == where(at[b] > 1, 0, 9)",
]
VALUES = [
    "row[b,d]",
    "turned[d,b]",
    "row[b,d] * 2 + b",
    "row[at[b] % n,d]",
    "cache[b,0,d] + 1",
    "cache[b,1,d]",
    "other[d]",
]
BATCH, POSITIONS, WIDTH = 3, 5, 4


def check_row_writes(cupy, place, value, dtype="float32", at_dtype="int64", run=None):
    """Compare with the kernel that computes the whole tensor; return whether rows were written.

    `run` is the part of u that the rank has; values must not read the cache then.
    """
    rng = np.random.default_rng(1)
    arrays = {
        "cache": rng.integers(0, 99, (BATCH, POSITIONS, WIDTH)).astype(dtype),
        "row": rng.integers(0, 99, (BATCH, WIDTH)).astype(dtype),
        "turned": rng.integers(0, 99, (WIDTH, BATCH)).astype(dtype),
        "other": rng.integers(0, 99, WIDTH).astype(dtype),
        "at": np.array([2, -1, 4]).astype(at_dtype),
        "shift": np.array(3, at_dtype),
    }
    text = f"next[b,u,d] = where({place}, {value}, cache[b,u,d])"
    arrays = {name: array for name, array in arrays.items() if name in text}
    job = einmpi.program(text, dtype=dtype, n=BATCH, **arrays)
    expected = einmpi.reference(job, arrays)["next"]
    (kernel,) = (kernel for step in lower(einmpi.plan(job, 1), 0).steps for kernel in step.kernels)
    if run is not None:
        kernel = kernel.restricted_to({"u": (run,)})
        arrays["cache"] = arrays["cache"][:, slice(*run)].copy()
        expected = expected[:, slice(*run)]
    on_device = {name: cupy.asarray(array) for name, array in arrays.items()}
    operands = [on_device[slot.tensor] for slot in kernel.operands]
    target = on_device["cache"]

    def compute(einsum, operands, target, index):
        dispatch.compute_einsum(einsum, operands, target, index)

    write = prepare_row_writes(kernel, operands, target, compute)
    if write is None:
        return False
    write(operands, target)
    np.testing.assert_array_equal(target.get(), expected)
    return True


def check_all_row_writes(cupy, places=PLACES, values=VALUES):
    for place in places:
        for value in values:
            assert check_row_writes(cupy, place, value), (place, value)
    for dtype in ("bool", "int16", "float64", "complex128"):
        assert check_row_writes(cupy, "u == at[b]", "row[b,d]", dtype)
    for at_dtype in ("int32", "uint8"):
        assert check_row_writes(cupy, "u == at[b]", "row[b,d]", at_dtype=at_dtype)
    for run in ((0, 3), (3, 5), (1, 2)):
        assert check_row_writes(cupy, "u == at[b]", "row[b,d]", run=run)
    for place in ("u == at[b] / 2", "u == 1.5"):
        assert not check_row_writes(cupy, place, "row[b,d]")
