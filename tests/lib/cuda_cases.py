"""Kernels of a GPU against the reference: cases for a real GPU and for tests/lib/cupy_on_cpu.py."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from kernels.cpu.test_compiled import NAMED, awkward, close, random_arrays, vertex
from kernels.cpu.test_distance import assert_within_bound, numbers

import einmpi
from einmpi.graph.arithmetic import infer
from einmpi.graph.dtypes import numpy_dtypes
from einmpi.graph.einsum import EinSum
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import Arg, Call
from einmpi.graph.two_pass_scans import with_scans_in_blocks
from einmpi.kernels import reference
from einmpi.kernels.cuda import dispatch, group, scan
from einmpi.kernels.cuda.scalar_source import STORED, Steps, stored
from einmpi.schedule.groups import with_groups
from einmpi.schedule.lower import lower
from einmpi.schedule.regions import indices, length

CONTRACTIONS = (
    "ij,jk->ik",
    "ij,kj->ik",
    "ji,jk->ki",
    "bshd,bthd->bhst",
    "bhst,bthd->bshd",
    "ijb,jbk->ik",
    "iaj,jbk->abik",
    "ijkl,jlmk->im",
    "bij,bjk->bik",
    "iij,jk->ik",
    "ijl,jk->ik",
    "ij,j->i",
    "i,j->ij",
    "ij,ij->",
    "bij,jk->kbi",
)


def compute(cupy, einsum, dtype, operands, index=(), **options):
    """Compute an EinSum of numpy arrays on the device, and return the result as a numpy array.

    The target starts with a value of no use, so that every element has to be written.
    """
    target = cupy.asarray(np.full(einsum.bound, 77, dtype))
    dispatch.compute_einsum(
        einsum, [on_device(cupy, array) for array in operands], target, index, **options
    )
    return target.get()


def on_device(cupy, array):
    """Return a copy with the same strides, if the array is a view of a contiguous one."""
    if issubclass(cupy.ndarray, np.ndarray):  # without a GPU
        return array.view(cupy.ndarray)
    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    if base is array or base.dtype != array.dtype or not base.flags.c_contiguous:
        return cupy.asarray(array)
    offset = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return cupy.ndarray(
        array.shape, array.dtype, cupy.asarray(base).data + offset, strides=array.strides
    )


def check_named(cupy, name, size):
    text, dtype, labels = NAMED[name]
    arrays = random_arrays(
        dtype, {x: tuple(size[label] for label in index) for x, index in labels.items()}
    )
    einsum, kind, operands = vertex(text, arrays)
    close(
        compute(cupy, einsum, kind, operands),
        reference.evaluate_einsum(einsum, operands, kind),
        [dtype],
    )


def check_contraction(cupy, subscripts, dtype, conj=False):
    (first, second), output = subscripts.split("->")[0].split(","), subscripts.split("->")[1]
    extent = {label: 3 + 2 * k for k, label in enumerate(sorted({*first, *second}))}
    product = f"A[{','.join(first)}] * B[{','.join(second)}]"
    inner = tuple(label for label in dict.fromkeys(first + second) if label not in output)
    node = Call("*", (Call("conj", (Arg(0),)) if conj else Arg(0), Arg(1)))
    extents = tuple((label, extent[label]) for label in (*output, *inner))
    einsum = EinSum(
        tuple(output), (tuple(first), tuple(second)), node, "sum" if inner else None, inner, extents
    )
    rng = np.random.default_rng(5)
    operands = []
    for index in (first, second):
        values = rng.normal(size=[extent[label] for label in index])
        values = (
            values + 1j * rng.normal(size=values.shape) if dtype.startswith("complex") else values
        )
        operands.append(values.astype(dtype))
    wide = [
        array.astype("complex128" if dtype.startswith("complex") else "float64")
        for array in operands
    ]
    wanted = reference.evaluate_einsum(einsum, wide, wide[0].dtype.name)
    found = compute(cupy, einsum, dtype, operands).astype(wanted.dtype)
    rtol = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-6, "complex64": 2e-6}.get(dtype, 1e-13)
    np.testing.assert_allclose(
        found, wanted, rtol=rtol, atol=rtol * abs(wanted).max(), err_msg=product
    )


DISTANCES = (  # text, dtypes of X and Y, shapes, and whether cuBLAS computes it
    ("Z[i,k] = sum((X[i,j] - Y[k,j])**2)", ("float32", "float32"), ((20, 70), (30, 70)), True),
    (
        "Z[k,b,i] = sum(abs(Y[l,b,j,k] - X[b,i,j,l])**2)",
        ("float64", "float64"),
        ((3, 5, 9, 8), (8, 3, 9, 4)),
        True,
    ),
    (
        "Z[i,k] = sum((X[i,j] - Y[j,k]) * (X[i,j] - Y[j,k]))",
        ("complex64", "complex64"),
        ((6, 64), (64, 9)),
        True,
    ),
    (
        "Z[i,k] = sum(abs(X[i,j] - Y[j,k])**2)",
        ("complex64", "complex64"),
        ((6, 64), (64, 9)),
        False,
    ),
    ("Z[i,k] = sum((X[i,j] - Y[k,j])**2)", ("float32", "float64"), ((20, 70), (30, 70)), False),
    ("Z[i,k] = sum((X[i,j] - Y[k,j])**2)", ("float32", "float32"), ((20, 7), (30, 7)), False),
)


def check_distance(cupy, monkeypatch, text, dtypes, shapes, by_blas):
    """With fast_math, results are within the bound that holds for CPUs."""
    made, prepare = [], dispatch.prepare_sum_with_product
    monkeypatch.setattr(
        dispatch,
        "prepare_sum_with_product",
        lambda *given: made.append(prepare(*given)) or made[-1],
    )
    x, y = (
        numbers(shape, dtype, seed)
        for seed, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    )
    if by_blas and x.dtype.kind == "f":
        x.flat[: y.shape[-1]] = y.flat[: y.shape[-1]]  # near points
    einsum, kind, operands = vertex(text, {"X": x, "Y": y})
    found = compute(cupy, einsum, kind, operands, fast_math=True)
    assert_within_bound(found, einsum, operands, "abs" in text)
    assert [each is not None for each in made] == [by_blas]
    if kind.startswith("f"):
        assert found.min() >= 0
        x[(0,) * x.ndim] = np.nan
        found = compute(cupy, einsum, kind, operands, fast_math=True)
        assert np.isnan(found).any() and not np.isnan(found).all()


WEIGHTED_DIFFERENCES = (  # text, dtype, extents of i, j and k, and whether cuBLAS computes it
    ("Z[i,k] = sum[j](W[i,j] * (X[i,k] - Y[j,k]))", "float32", (20, 70, 9), True),
    ("Z[k,i] = sum[j]((Y[j,k] - X[i,k]) * W[i,j])", "float64", (7, 65, 9), True),
    ("Z[i,k] = sum[j](W[i,j] * (X[i,k] - Y[j,k]))", "float32", (20, 7, 9), False),
    ("Z[i,k] = sum[j](W[i,j] * (X[i,k] - Y[j,k]))", "float16", (20, 70, 9), False),
)


def check_weighted_difference(cupy, monkeypatch, text, dtype, extents, by_blas):
    made, prepare = [], dispatch.prepare_sum_with_product
    monkeypatch.setattr(
        dispatch,
        "prepare_sum_with_product",
        lambda *given: made.append(prepare(*given)) or made[-1],
    )
    i, j, k = extents
    shapes = {"W": (i, j), "X": (i, k), "Y": (j, k)}
    arrays = {
        name: numbers(shape, dtype, seed) for seed, (name, shape) in enumerate(shapes.items())
    }
    einsum, kind, operands = vertex(text, arrays)
    found = compute(cupy, einsum, kind, operands, fast_math=True)
    wide = [array.astype("float64") for array in operands]
    wanted = reference.evaluate_einsum(einsum, wide, "float64")
    atol = 4 * j * float(np.finfo(dtype).eps) * max(abs(array).max() for array in wide) ** 2
    np.testing.assert_allclose(found.astype("float64"), wanted, rtol=0, atol=atol)
    assert [each is not None for each in made] == [by_blas]


def check_alignment(cupy):
    """A row may be aligned although its array is not: alignment is part of a call's key."""
    einsum, kind, _ = vertex("Z[i] = X[1,i] + 1", {"X": np.zeros((2, 64), "float32")})
    numbers, before = np.arange(200, dtype="float32"), len(dispatch.CALLS.entries)
    # The row begins at byte 4 + 268, which is aligned, then at byte 8 + 268, which is not.
    for first in (1, 2):
        x = numbers[first : first + 134].reshape(2, 67)[:, :64]
        np.testing.assert_array_equal(compute(cupy, einsum, kind, [x]), x[1] + 1)
    assert len(dispatch.CALLS.entries) == before + 2


def check_gathers(cupy):
    rng = np.random.default_rng(0)
    arrays = {
        "W": rng.normal(size=(50, 36)),
        "t": rng.integers(0, 50, (7, 9)),
        "X": rng.normal(size=(7, 36)),
    }
    for text in (
        "Y[b,s,a] = W[t[b,s],a] + W[3,a]",
        "Y[b,s] = sum(W[t[b,s],a] * X[b,a] + a)",
    ):  # packs of a
        einsum, kind, operands = vertex(text, arrays)
        wanted = reference.evaluate_einsum(einsum, operands, kind)
        np.testing.assert_allclose(compute(cupy, einsum, kind, operands), wanted, rtol=1e-12)
    arrays["p"] = np.array([0, 3, 3.5, np.nan, np.inf, -1, 35], "float32")
    for text in (  # picked and scattered by a number that need not be an integer
        "Y[b] = sum[a](where(a == p[b], X[b,a], 0))",
        "Y[a:36] = sum(where(a == p[b], X[b,0], 0))",
    ):
        einsum, kind, operands = vertex(text, arrays)
        is_picked = arrays["p"][:, None] == np.arange(36)
        chosen = arrays["X"] if text.startswith("Y[b]") else arrays["X"][:, :1]
        wanted = np.where(is_picked, chosen, 0).sum(int(text.startswith("Y[b]")))
        np.testing.assert_array_equal(compute(cupy, einsum, kind, operands), wanted)
    einsum, kind, operands = vertex("Y[b,s] = t[b,s] + 10 * s", arrays)
    for runs in (((3, 6), (8, 13), (35, 36)), ((1000, 1009),)):
        found = compute(cupy, einsum, kind, operands, (("s", runs),))
        np.testing.assert_array_equal(found, arrays["t"] + 10 * indices(runs))


def check_arithmetic_indices(cupy, shift, extent, dtype):
    """Read elements at indices that are arithmetic on a label, in packs where these allow it."""
    rng = np.random.default_rng(shift + extent)
    arrays = {
        "x": rng.normal(size=(5, extent)).astype(dtype),
        "w": rng.normal(size=(5, extent)).astype(dtype),
    }
    for text in (
        f"y[i,d] = w[i,d] * x[i,(d+{shift})%{extent}]",
        f"y[i,d] = w[i,d] - x[i,({shift}+d-4)%{extent}] + x[i,(d+8)%{extent}]",
        f"y[i] = sum(w[i,d] * x[i,(d+{shift})%{extent}] + d)",
    ):
        einsum, kind, operands = vertex(text, arrays)
        wanted = reference.evaluate_einsum(einsum, operands, kind)
        close(compute(cupy, einsum, kind, operands), wanted, [dtype])


SCATTERED = (
    "y[dst[e]:n, f] = sum(w[e] * h[src[e], f])",
    "y[f, dst[e]:n] = max(x[e,f])",
    "y[dst[e]:n] = sum(1)",
    "y[dst[e]//4:n, src[e]:9] = sum(w[e])",
    "y[place[e,f]:n, f] = prod(x[e,f])",
    "y[place[e,f]:n] = min(x[e,f] * f + e)",
    "y[k:n] = max(where(dst[e] == k, w[e], 0.25))",
    "y[k:n, f] = sum(where(k == dst[e], x[e,f] - b[k], 0))",
    "y[dst[e]:n] = any(x[e,f] > 1)",
    "y[k:n] = min(where(w[e] == k, e, -inf))",
    "y[dst[e]:1] = sum(w[e])",
    "y[k:n, f] = sum(where(k == f, x[e,f], 0))",
)


def check_scatter(cupy, text, edges=60, nodes=13, features=5, dtype="float64"):
    """Compare a scattered vertex with the reference; a second run has the same bits."""
    rng = np.random.default_rng(edges)
    arrays = {
        "dst": rng.integers(-3, nodes + 3, edges),
        "src": rng.integers(0, 9, edges).astype("int32"),
        "place": rng.integers(-2, nodes + 2, (edges, features)),
        "w": np.round(rng.normal(size=edges) * 4).astype(dtype),
        "x": rng.normal(size=(edges, features)).astype(dtype),
        "h": rng.normal(size=(9, features)).astype(dtype),
        "b": rng.normal(size=nodes).astype(dtype),
    }
    used = {name: array for name, array in arrays.items() if f"{name}[" in text.partition("=")[2]}
    for name in ("dst", "src", "place"):
        if f"{name}[" in text:
            used[name] = arrays[name]
    einsum, kind, operands = vertex(text.replace(":n", f":{nodes}"), used)
    assert einsum.segments is not None
    wanted = reference.evaluate_einsum(einsum, operands, kind)
    found = compute(cupy, einsum, kind, operands)
    close(found, wanted, [dtype])
    assert found.tobytes() == compute(cupy, einsum, kind, operands).tobytes()


def check_scattered_shares(cupy):
    """A rank's places, and its values, need not begin at 0 or be in one piece."""
    rng = np.random.default_rng(5)
    dst = rng.integers(0, 40, 30)
    x = rng.normal(size=(30, 4))
    text = "y[k:9,f] = sum(where(dst[e] == k, x[e,f] * e - k, 0))"
    einsum, kind, operands = vertex(text, {"dst": dst, "x": x})
    for places in (((20, 29),), ((3, 6), (8, 11), (35, 38))):
        values = ((5, 15), (20, 40))
        found = compute(cupy, einsum, kind, operands, (("k", places), ("e", values)))
        wanted = np.zeros((40, 4))
        np.add.at(wanted, dst, x * indices(values)[:, None] - dst[:, None])
        np.testing.assert_allclose(found, wanted[indices(places)], rtol=1e-12, atol=1e-12)


def check_out_of_range(cupy, bad):
    t = np.arange(12) + 3
    t[5] = bad
    einsum, kind, operands = vertex("Y[s,a] = W[t[s],a]", {"W": np.ones((50, 3)), "t": t})
    with pytest.raises(IndexError) as wanted:
        reference.evaluate_einsum(einsum, operands, kind)
    with pytest.raises(IndexError) as found:
        compute(cupy, einsum, kind, operands)
    assert str(found.value) == str(wanted.value)


GROUPS = {
    "softmax": ("Z[i,j] = softmax[j](x[i,j])", {"x": (70, 72)}),
    "odd": ("Z[i,j] = softmax[j](x[i,j])", {"x": (70, 71)}),
    "causal": (
        "Z[h,s,t] = softmax[t](where(t <= s, x[h,s,t] / sqrt(7), -inf))",
        {"x": (2, 40, 40)},
    ),
    "turned": ("Z[h,s,t] = softmax[t](x[h,s,t] + y[t,s])", {"x": (2, 9, 72), "y": (72, 9)}),
    "long": ("Z[i,j] = layernorm[j](x[i,j])", {"x": (3, 2600)}),
    "two dimensions": ("Z[i,j,k] = rmsnorm[j,k](x[i,j,k])", {"x": (9, 8, 7)}),
    "rows only": ("Z[i] = logsumexp[j](x[i,j])", {"x": (30, 40)}),
    # No operand depends on what is inside a row.
    "equal values": ("Z[i] = min[j:64](x[i] * 2) + 1", {"x": (40,)}),
    # F is also a factor of a matrix product, so that no vertex is fused with another. Q needs more
    # memory than the group.
    "maps": (
        "F[i,j] = x[i,j] + c[j]; Z[i,j] = tanh(F[i,j]) * F[i,j]; "
        "P[i,k] = sum(F[i,j] * Z[k,j]); Q[i,k,l] = P[i,k] * y[l]",
        {"x": (9, 264), "c": (264,), "y": (200,)},
    ),
    "maps of rows": (
        "F[k,i,j] = x[k,i,j] + c[i]; Z[i,k,j] = F[k,i,j] / 3; "
        "P[k,l] = sum(F[k,i,j] * Z[i,l,j]); Q[k,l,m] = P[k,l] * y[m]",
        {"x": (2, 9, 301), "c": (9,), "y": (8000,)},
    ),
    "matrix and vector": (
        "Z[b,a] = r[b,a] + sum(o[b,g,d] * w[a,g,d]); Q[i,k] = y[i] * y[k]",
        {"r": (1, 50), "o": (1, 9, 24), "w": (50, 9, 24), "y": (400,)},
    ),
    "matrices and a vector": (
        "Z[b,f] = silu(sum(x[b,a] * v[f,a])) * sum(x[b,a] * w[f,a]); Q[i,k] = y[i] * y[k]",
        {"x": (1, 301), "v": (40, 301), "w": (40, 301), "y": (400,)},
    ),
    "matrices and a vector, by warps": (
        "Z[b,f] = silu(sum(x[b,a] * v[f,a])) * sum(x[b,a] * w[f,a]); Q[i,k] = y[i] * y[k]",
        {"x": (1, 2600), "v": (9, 2600), "w": (9, 2600), "y": (400,)},
    ),
}


def check_group(cupy, name, dtype, monkeypatch):
    """One kernel computes all vertices of the group, with the reference's result."""
    if name.endswith("warps"):
        monkeypatch.setattr(group, "BUSY_THREADS", 1)
    text, shapes = GROUPS[name]
    arrays = random_arrays(dtype, shapes)
    outputs = [output for output in "ZQ" if f"{output}[" in text]
    job = einmpi.program(text, outputs=outputs, **arrays)
    schedule = with_groups(lower(einmpi.plan(job, ranks=1), 0), group.RULE)
    (step,) = [step for step in schedule.steps if len(step.kernels) > 1]
    assert {step.vertex for step in schedule.steps if step.only_kernel} <= {"P", "Q"}
    slots = {slot.name: cupy.asarray(arrays[slot.name]) for slot in step.reads}
    slots |= {slot.name: cupy.asarray(np.full(slot.shape, 77, dtype)) for slot in step.writes}
    group.prepare_group(step, slots)(slots)
    wanted = reference.evaluate(
        job.graph, {key: array.astype("float64") for key, array in arrays.items()}
    )["Z"]
    rtol = {"float16": 4e-3, "float32": 2e-6}.get(dtype, 1e-13)
    np.testing.assert_allclose(
        slots["Z"].get().astype("float64"), wanted, rtol=rtol, atol=rtol * abs(wanted).max()
    )


def check_first_extreme(cupy, dtype, monkeypatch):
    """Both passes of argmax see the same values, also if they are computed and never stored."""
    arrays = random_arrays(dtype, {"x": (70, 72), "y": (72,)})
    job = einmpi.program("Z[i] = argmax(x[i,j] * 3 + x[i,j] * y[j])", **arrays)
    schedule = with_groups(lower(einmpi.plan(job, ranks=1), 0), group.RULE)
    slots = {name: cupy.asarray(array) for name, array in arrays.items()}
    for step in schedule.steps:
        if step.kernels:
            for slot in step.writes:
                slots[slot.name] = cupy.asarray(np.full(slot.shape, 77, slot.dtype))
        kernel = step.only_kernel
        if len(step.kernels) > 1:
            used = {slot.name: slots[slot.name] for slot in (*step.reads, *step.writes)}
            group.prepare_group(step, used)(used)
        elif kernel is not None:
            operands = [slots[slot.name] for slot in kernel.operands]
            target = slots[kernel.target.name]
            dispatch.compute_einsum(kernel.einsum, operands, target, kernel.index)
    found = slots["Z"].get()
    assert ((found >= 0) & (found < 72)).all()
    x, y = (arrays[name].astype("float64") for name in "xy")
    values = x * 3 + x * y
    chosen = np.take_along_axis(values, found[:, None], 1)[:, 0]
    tolerance = 8 * float(np.finfo(dtype).eps) * np.abs(values).max()
    np.testing.assert_allclose(chosen, values.max(axis=1), atol=tolerance, rtol=0)


def operations(mixed=True):
    """Yield each operation with dtypes of its operands: (EinSum, result's dtype, operands).

    They are all combinations of dtypes, or the same dtype for all operands.
    """
    for op in OPERATIONS:
        record = OPERATIONS[op]
        counts = [record.arity, record.arity + 1] if record.takes_more else [record.arity]
        for dtypes in itertools.chain(
            *(itertools.product(numpy_dtypes(), repeat=count) for count in counts)
        ):
            if not mixed and len(set(dtypes)) > 1:
                continue
            if op == "where" and dtypes[0] not in ("bool", "float64"):
                continue
            if op in ("clip", "where") and dtypes[1] != dtypes[2]:
                continue
            node = Call(op, tuple(Arg(k) for k in range(len(dtypes))))
            try:
                kind = np.dtype(
                    infer(node, lambda leaf, dtypes=dtypes: np.dtype(dtypes[leaf.position]))
                )
            except TypeError:
                continue
            grid = np.meshgrid(*(awkward(dtype) for dtype in dtypes), indexing="ij")
            operands = [np.ascontiguousarray(part.ravel()) for part in grid]
            if op == "**" and kind.kind in "iu":
                operands[1] = abs(operands[1].astype("int64") % 50).astype(
                    operands[1].dtype
                )  # numpy takes no others
            extents = (("i", operands[0].size),)
            yield EinSum(("i",), (("i",),) * len(dtypes), node, None, (), extents), kind, operands


def expression_source(function, types, dtype):
    """Return ⊗ alone, as a function of one element of each operand as it is stored in memory."""
    steps = Steps(types, lambda operand: f"load(x{operand})")
    value = steps.value(function, dtype)
    arguments = ", ".join(f"{STORED[kind]} x{operand}" for operand, kind in enumerate(types))
    lines = [
        f"FN {STORED[dtype]} otimes({arguments}) {{",
        *steps.lines,
        f"return {stored(value, dtype, dtype)};",
        "}",
    ]
    return "\n".join([*lines, ""])


def operation_functions(cases):
    """Return ⊗ of each case in a namespace of its own, so that one compilation serves all."""
    texts = []
    for number, (einsum, kind, operands) in enumerate(cases):
        types = [array.dtype.name for array in operands]
        texts.append(
            f"namespace k{number} {{ {expression_source(einsum.function, types, kind.name)} }}"
        )
    return "\n".join(texts) + "\n"


def operation_signature(kind, operands):
    """Return the parameters of a function that loops over all elements, and the args of ⊗."""
    types = [STORED[array.dtype.name] for array in operands]
    given = ", ".join(
        [
            *(f"const {kind}* x{k}" for k, kind in enumerate(types)),
            f"{STORED[kind.name]}* y",
            "Long n",
        ]
    )
    return given, ", ".join(f"x{k}[i]" for k in range(len(types)))


def operation_agrees(einsum, kind, operands, found):
    """Compare with numpy, within a few units in the last place.

    Where numpy computes in half precision, compare with its result in single precision.
    """
    op = einsum.function.op
    halves = any(array.dtype == np.float16 for array in operands)
    wide = [array.astype("float32") if array.dtype == np.float16 else array for array in operands]
    wanted = reference.evaluate_einsum(
        einsum, wide, "float32" if halves and kind == np.float16 else kind.name
    )
    with np.errstate(all="ignore"):
        wanted = wanted.astype(kind)
    if kind.kind == "c":  # a part of it may be nan in one and infinite in the other
        usable = np.isfinite(wanted) & np.isfinite(found)
        if op == "**":
            # The angle of a power is the exponent times the logarithm: large ones lose digits.
            base = abs(operands[0].astype("complex128"))
            usable &= ((base == 0) | ((base > 1e-3) & (base < 1e3))) & (
                abs(operands[1].astype("complex128")) < 10
            )
        found, wanted = found[usable], wanted[usable]
    rtol = 8 * float(np.finfo(kind).eps) if kind.kind in "fc" else 0
    if op == "**" and kind.kind == "c":
        rtol *= 8  # of the logarithm: numpy's own is no better, and worse for great exponents
    atol = rtol if kind.kind == "c" else 0  # one part of a complex number may cancel
    if kind == "f4" or kind == "c8":
        atol += 2e-38  # numbers that are nearly zero
    np.testing.assert_allclose(
        found, wanted, rtol=rtol, atol=atol, err_msg=f"{op} {[x.dtype for x in operands]}"
    )


# ---- scans --------------------------------------------------------------------------------------

SCANS = (
    "every aggregation and dtype",
    "inf and nan",
    "dimensions in any order",
    "a thread for each line",
    "shares of a rank",
    "another number after an index",
    "second passes",
)


def check_scan(cupy, case, monkeypatch):
    """Compare scans with the reference. A chunk has 2048 values; lines are longer and shorter."""
    rng = np.random.default_rng(len(case))
    if case == "every aggregation and dtype":
        for name, dtype in (
            ("cumsum", "float16"),
            ("cumsum", "bool"),
            ("cumprod", "complex64"),
            ("cummax", "float16"),
            ("cummin", "int64"),
        ):
            x = rng.integers(-1, 2, (2, 2500)).astype(dtype)
            scan_agrees(cupy, f"Z[i,j] = {name}[j](x[i,j])", x)
    elif case == "inf and nan":
        x = rng.choice([np.inf, -np.inf, np.nan, 0.0, -0.0, 1.0], (6, 40))
        for name in ("cumsum", "cumprod", "cummax", "cummin"):
            scan_agrees(cupy, f"Z[i,j] = {name}[j](x[i,j])", x)
    elif case == "dimensions in any order":
        x = rng.integers(-9, 9, (3, 50, 4))
        for text in ("Z[i,j,k] = cumsum[j](x[i,j,k])", "Z[k,i,j] = cumsum[k](x[i,j,k])"):
            scan_agrees(cupy, text, x)
            scan_agrees(cupy, text, x[:, ::2, ::-1])
    elif case == "a thread for each line":
        monkeypatch.setattr(scan, "LINES_FOR_ALL_THREADS", 1)
        x = rng.integers(-9, 9, (30, 300))
        scan_agrees(cupy, "Z[i,j] = cumsum[i](x[i,j])", x)
        scan_agrees(cupy, "Z[j,i] = cummin[i](x[i,j])", x)
        for einsum, operands, wanted in blocked_scans(rng.integers(-9, 9, (30, 70)), 4):
            np.testing.assert_array_equal(compute(cupy, einsum, "int64", operands), wanted)
    elif case == "shares of a rank":
        x = rng.integers(-9, 9, 3000)
        einsum = einmpi.program("Z[i] = cumsum[i](x[i])", x=x).graph["Z"].einsum
        for taken, wanted in (
            (((0, 3000),), ((1000, 2500),)),
            (((7, 90), (1000, 2900)), ((0, 50), (80, 2000))),
            (((500, 501),), ((0, 3000),)),
        ):
            lengths = (length(wanted), length(taken))
            extents = tuple(zip(einsum.labels, lengths, strict=True))
            index = tuple(zip(einsum.labels, (wanted, taken), strict=True))
            local = replace(einsum, extents=extents)
            found = compute(cupy, local, "int64", [x[indices(taken)]], index)
            summed = np.zeros(3000, "int64")
            summed[indices(taken)] = x[indices(taken)]
            np.testing.assert_array_equal(found, summed.cumsum()[indices(wanted)])
    elif case == "another number after an index":
        x = -rng.random(2100)
        scan_agrees(cupy, "Z[i:2100] = max[k](where(k <= i, x[k], -0.25))", x)
    else:
        for einsum, operands, wanted in blocked_scans(rng.integers(-9, 9, (9000, 2)), 3):
            np.testing.assert_array_equal(compute(cupy, einsum, "int64", operands), wanted)


def scan_agrees(cupy, text, x):
    job = einmpi.program(text, x=x)
    vertex = job.graph["Z"]
    found = compute(cupy, vertex.einsum, vertex.dtype, [x])
    wanted = einmpi.reference(job, {"x": x})["Z"]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def blocked_scans(x, count):
    """Yield both passes of a scan of columns in two passes."""
    graph = einmpi.program("Z[i,j] = cumsum[i](x[i,j])", x=x).graph
    blocked = with_scans_in_blocks(graph, ["Z"], count)
    totals = np.add.reduceat(x, [-(-b * len(x) // count) for b in range(count)], axis=0).T
    offsets = totals.cumsum(1)
    yield blocked["Z_totals"].einsum, [x], totals
    yield blocked["Z"].einsum, [offsets, x], x.cumsum(0)
