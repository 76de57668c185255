"""Attention and its gradients on a real GPU, against numpy in float64."""

from dataclasses import replace

import numpy as np
import pytest
from attention_cases import (
    HEADS_FIRST,
    IN_FLOAT32,
    IN_ONE_STATEMENT,
    PLAIN,
    SHARED_HEADS,
    Case,
    attention_chain,
    expected_values,
    gradient_chain,
    number_names,
    standard,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import einmpi
from einmpi.kernels.cuda.attention import launches
from einmpi.kernels.cuda.attention.chain import prepare_attention_chain, prepare_gradient_chain
from einmpi.planner import chains as find


def _missing():
    try:
        import cupy

        if not cupy.cuda.runtime.getDeviceCount():
            return "no GPU"
        return "" if launches.capability() >= launches.MIN_CAPABILITY else "an older GPU"
    except Exception as error:  # CuPy raises all kinds of errors if it does not work
        return f"no CuPy or no GPU: {type(error).__name__}"


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(_missing()), reason=_missing() or "-"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

CASES = {
    "plain": Case(rows=128, columns=128, head=128),
    "several tiles": Case(rows=512, columns=640, head=64, batch=2, heads=3),
    "bfloat16": Case(dtype="bfloat16", rows=256, columns=384, head=128),
    "odd sizes": Case(rows=77, columns=301, head=64),
    "one row": Case(rows=1, columns=1000, head=64),
    "one column": Case(rows=100, columns=1, head=32),
    "few columns": Case(rows=300, columns=5, head=32),
    "heads first": Case(HEADS_FIRST, rows=513, columns=129, head=128, batch=2),
    "causal": Case(rows=300, columns=300, head=128, mask="t <= s"),
    "causal, bfloat16": Case(dtype="bfloat16", rows=300, columns=300, mask="t <= s"),
    "offset mask": Case(rows=200, columns=500, mask="s >= t - 300"),
    "window": Case(rows=400, columns=400, mask="(t <= s + 3) & (t > s - 90)"),
    "future only": Case(rows=130, columns=330, mask="t > s + 5"),
    "rows that see nothing": Case(rows=200, columns=300, mask="t < s - 50"),
    "finite fill": Case(rows=130, columns=200, mask="t <= s", fill="-3.0"),
    "shared heads": Case(SHARED_HEADS, rows=200, columns=260, members=3, head=96),
    "shared heads, causal": Case(SHARED_HEADS, rows=150, columns=150, members=4, mask="t <= s"),
    "head 8": Case(rows=70, columns=90, head=8),
    "head 40": Case(rows=70, columns=90, head=40),
    "head 80": Case(rows=70, columns=90, head=80, scale=0.3),
    "softmax in float32": Case(IN_FLOAT32, rows=140, columns=190, mask="t <= s + 60"),
    "one statement": Case(IN_ONE_STATEMENT, rows=140, columns=190),
}
# With one column, dQ and dK are 0: the difference of two numbers that are rounded.
WITH_GRADIENTS = [name for name in CASES if name not in ("one statement", "one column")]
UNIT_ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-18}


@pytest.fixture(params=["tensor cores of this GPU", "mma.sync"])
def products(request, monkeypatch):
    """Use the instructions of this GPU, or those that all GPUs from 8.0 on have."""
    if request.param == "mma.sync":
        monkeypatch.setattr(launches, "has_warpgroups", lambda: False)


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


def values_of(cupy, case, names):
    """Return arrays on the GPU, and the same in float64."""
    rng = np.random.default_rng(len(names) + case.rows)
    shapes = case.shapes()
    on_gpu = {}
    exact = {}
    for name in names:
        values = rng.normal(size=shapes.get(name, shapes["Q"]))
        on_gpu[name] = cupy.asarray(values.astype(np.float32)).astype(case.dtype)
        exact[name] = cupy.asnumpy(on_gpu[name].astype(np.float32)).astype(np.float64)
    return on_gpu, exact


def outputs_of(cupy, chain, arrays):
    """Add arrays for what a chain writes, full of a number that is wrong."""
    for slot in chain.writes:
        arrays[slot.name] = cupy.full(slot.shape, 77, np.float32).astype(slot.dtype)


def compute(prepare, chain, arrays):
    prepared = prepare(chain, arrays)
    assert prepared is not None
    prepared.compute(arrays)


def check(cupy, found, expected, units):
    """Compare with `units` of rounding of the largest value; what is not a number must agree."""
    rounding = UNIT_ROUNDING[found.dtype.name]
    values = cupy.asnumpy(found.astype(np.float32)).astype(np.float64)
    assert values.shape == expected.shape
    assert np.array_equal(np.isnan(values), np.isnan(expected))
    finite = np.isfinite(expected)
    assert np.array_equal(values[~finite], expected[~finite], equal_nan=True)
    if finite.any():
        largest = np.abs(expected[finite]).max()
        error = np.abs(values[finite] - expected[finite]).max()
        assert error <= units * rounding * largest + 1e-6


@pytest.mark.parametrize("name", CASES)
def test_attention(cupy, products, name):
    case = CASES[name]
    chain, written = attention_chain(case)
    arrays, exact = values_of(cupy, case, "QKV")
    outputs_of(cupy, chain, arrays)
    compute(prepare_attention_chain, chain, arrays)
    given = [standard(case, letter, exact[letter]) for letter in "QKV"]
    expected = expected_values(case, *given)["O"]
    check(cupy, standard(case, "O", arrays[written[0]]), expected, 3)


@settings(max_examples=10, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(300, 600),
    st.integers(300, 600),
    st.sampled_from([32, 64]),
    st.sampled_from(["float16", "bfloat16"]),
    st.sampled_from(["", "t <= s + 40"]),
)
def test_fusing_changes_results_by_two_units_times_the_root_of_the_terms(
    batch, heads, rows, columns, head, dtype, mask
):
    """Units in the last place of the largest result; the unfused one is computed by cuBLAS."""
    case = Case(
        dtype=dtype, batch=batch, heads=heads, rows=rows, columns=columns, head=head, mask=mask
    )
    job = einmpi.program(case.program, dtype=dtype, **case.shapes())
    job = replace(job, backend="cupy")
    rng = np.random.default_rng(rows)
    arrays = {}
    for name, shape in case.shapes().items():
        arrays[name] = rng.normal(size=shape).astype(np.dtype(job.graph[name].dtype))
    choose = find.choose_block

    def choose_small_block(members, inner, rows, least_sizes, _):
        return choose(members, inner, rows, [1] * len(least_sizes), 2**16)

    found = []
    for least_bytes in (0, 2**60):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(find, "MIN_INNER_BYTES", least_bytes)
            patch.setattr(find, "choose_block", choose_small_block)
            assert bool(einmpi.plan(job, ranks=1).chains) == (least_bytes == 0)
            found.append(einmpi.run(job, arrays)["O"].gather().astype(np.float64))
    fused, whole = found
    unit = 2 * UNIT_ROUNDING[dtype]
    bound = 2 * unit * np.sqrt(columns) * np.abs(whole).max()
    assert np.abs(fused - whole).max() <= bound


@pytest.mark.parametrize("name", ["several tiles", "causal, bfloat16", "softmax in float32"])
def test_numbers_of_rows(cupy, products, name):
    case = CASES[name]
    chain, _ = attention_chain(case, with_numbers=True)
    arrays, exact = values_of(cupy, case, "QKV")
    outputs_of(cupy, chain, arrays)
    compute(prepare_attention_chain, chain, arrays)
    given = [standard(case, letter, exact[letter]) for letter in "QKV"]
    expected = expected_values(case, *given)
    maxima, totals = [arrays[name] for name in number_names(chain.kernels)]
    check(cupy, standard(case, "O", arrays["O"]), expected["O"], 3)
    check(cupy, maxima, expected["maxima"][:, :, 0], 2)
    # A total is relative to the maximum as it is stored.
    stored = cupy.asnumpy(maxima.astype(np.float32)).astype(np.float64)
    ratio = np.exp(expected["maxima"][:, :, 0] - stored)
    check(cupy, totals, expected["totals"][:, :, 0] * ratio, 2)


@pytest.mark.parametrize("given", [(), ("statistics",), ("statistics", "products")], ids=len)
@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_gradients(cupy, products, name, given):
    case = CASES[name]
    if case.text == IN_FLOAT32 and "products" in given:
        pytest.skip("this program divides its sums of slopes otherwise")
    chain, names = gradient_chain(case, given)
    read = [slot.name for slot in chain.reads]
    arrays, exact = values_of(cupy, case, ["Q", "K", "V", names["d_o"]])
    standards = [standard(case, letter, exact[letter]) for letter in "QKV"]
    d_o = standard(case, "O", exact[names["d_o"]])
    expected = expected_values(case, *standards, d_o)
    for number in ("maxima", "totals", "products"):
        if names[number] in read:
            slot = next(slot for slot in chain.reads if slot.name == names[number])
            values = expected[number].reshape(slot.shape)
            arrays[slot.name] = cupy.asarray(values.astype(np.float32)).astype(slot.dtype)
    outputs_of(cupy, chain, arrays)
    compute(prepare_gradient_chain, chain, arrays)
    for gradient in ("gQ", "gK", "gV"):
        array = standard(case, gradient[1], arrays[gradient])
        check(cupy, array, expected[gradient], 8)


def test_results_are_the_same_bits_in_every_run(cupy, products):
    case = replace(CASES["causal"], rows=700, columns=700)
    chain, names = gradient_chain(case)
    arrays, _ = values_of(cupy, case, ["Q", "K", "V", names["d_o"]])
    bits = []
    for _ in range(3):
        outputs_of(cupy, chain, arrays)
        compute(prepare_gradient_chain, chain, arrays)
        bits.append([arrays[name].tobytes() for name in ("gQ", "gK", "gV")])
    assert bits[0] == bits[1] == bits[2]


def test_long_sequences_take_little_memory(cupy):
    """The scores would take 2 GiB."""
    case = Case(PLAIN, heads=1, rows=32768, columns=32768, head=128)
    chain, written = attention_chain(case)
    arrays, exact = values_of(cupy, case, "QKV")
    outputs_of(cupy, chain, arrays)
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()
    compute(prepare_attention_chain, chain, arrays)
    assert pool.used_bytes() == before
    rows = slice(0, 32768, 1111)
    q, k, v = [standard(case, letter, exact[letter]) for letter in "QKV"]
    expected = expected_values(replace(case, rows=30), q[:, :, :, rows], k, v)["O"]
    check(cupy, standard(case, "O", arrays[written[0]])[:, :, :, rows], expected, 3)
