"""float16 and bfloat16 on CPUs: computed in float32 and rounded once a statement, or rounded after
every operation; on several ranks, from and to files.
"""

import h5py
import ml_dtypes
import numpy as np
import pytest
from distributed import run_on_threads
from hypothesis import given
from hypothesis import strategies as st
from in_process import einmpi_here
from random_programs import settled

import einmpi
from einmpi.errors import InputError
from einmpi.graph.dtypes import DTYPES

HALVES = ("float16", "bfloat16")
# Text, and the same in numpy on arrays of any dtype; c(v) is a constant beside them.
CHAINS = {
    "x[i,j] * x[i,j] + y[j] - 1": lambda x, y, c: x * x + y - c(1),
    "(x[i,j] + y[j]) * 0.1 / (1.5 + y[j] * y[j])": lambda x, y, c: (
        (x + y) * c(0.1) / (c(1.5) + y * y)
    ),
    "where(x[i,j] > 0.3, x[i,j] * 3, -y[j]) ** 2": lambda x, y, c: (
        np.where(x > c(0.3), x * c(3), -y) ** c(2)
    ),
    "sqrt(abs(x[i,j])) - maximum(x[i,j], y[j]) / 7": lambda x, y, c: (
        np.sqrt(np.abs(x)) - np.maximum(x, y) / c(7)
    ),
}


def numbers(dtype, shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def bits(array):
    return array.view(np.uint16)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("text", CHAINS)
def test_chains_are_rounded_once(text, dtype):
    x = numbers(dtype, (6, 50))
    y = numbers(dtype, 50, seed=2)
    wanted = CHAINS[text](x.astype("float32"), y.astype("float32"), np.float32).astype(dtype)
    job = einmpi.program(f"Z[i,j] = {text}", x=x, y=y)
    inputs = {"x": x, "y": y}
    np.testing.assert_array_equal(bits(einmpi.reference(job, inputs)["Z"]), bits(wanted))
    for ranks in (1, 4):
        done = run_on_threads(job, ranks, inputs)
        assert done.outputs["Z"].dtype == dtype
        np.testing.assert_array_equal(bits(done.outputs["Z"]), bits(wanted))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("text", CHAINS)
def test_steps_are_those_of_numpy(text, dtype):
    x = numbers(dtype, (6, 50))
    y = numbers(dtype, 50, seed=2)
    wanted = CHAINS[text](x, y, np.dtype(dtype).type).astype(dtype)
    job = einmpi.program(f"Z[i,j] = {text}", x=x, y=y)
    found = einmpi.run(job, {"x": x, "y": y}, half="steps")["Z"].gather()
    np.testing.assert_array_equal(bits(found), bits(wanted))
    other = einmpi.run(job, {"x": x, "y": y})["Z"].gather()
    assert (bits(other) != bits(wanted)).any()  # or the switch would do nothing


@settled(12)
@given(
    st.sampled_from(HALVES),
    st.sampled_from(["sum", "prod", "max", "min"]),
    st.integers(1, 9),
    st.booleans(),
)
def test_aggregations_on_ranks(dtype, name, ranks, is_chain):
    x = numbers(dtype, (5, 12))
    element = "x[i,j] * x[i,j] + 1" if is_chain else "x[i,j]"
    job = einmpi.program(f"Z[i] = {name}({element}); n = {name}({element})", x=x)
    wide = x.astype("float32")
    values = wide * wide + np.float32(1) if is_chain else wide
    wanted = getattr(np, name)(values.astype("float64"), axis=1)
    done = run_on_threads(job, ranks, {"x": x})
    assert done.moved == done.plan.bytes_predicted
    eps = float(ml_dtypes.finfo(dtype).eps)
    rtol = 0 if name in ("max", "min") else 4 * eps  # ranks exchange rounded parts
    rounded = wanted.astype(dtype).astype("float64")
    np.testing.assert_allclose(
        done.outputs["Z"].astype("float64"), rounded, rtol=rtol, atol=12 * rtol
    )
    np.testing.assert_array_equal(
        bits(einmpi.reference(job, {"x": x})["Z"]), bits(wanted.astype(dtype))
    )


@pytest.mark.parametrize("dtype", HALVES)
def test_products(dtype):
    a = numbers(dtype, (20, 30))
    b = numbers(dtype, (30, 10), seed=2)
    job = einmpi.program("Z[i,k] = sum(A[i,j] * B[j,k])", A=a, B=b)
    exact = a.astype("float64") @ b.astype("float64")
    for ranks in (1, 3):
        found = run_on_threads(job, ranks, {"A": a, "B": b}).outputs["Z"]
        eps = float(ml_dtypes.finfo(dtype).eps)
        np.testing.assert_allclose(found.astype("float64"), exact, rtol=2 * eps, atol=8 * eps)


@pytest.mark.parametrize("dtype", HALVES)
def test_products_with_every_dtype(dtype):
    """bfloat16 with integers or float16 raised DTypePromotionError, which is numpy's."""
    rng = np.random.default_rng(3)
    for other in DTYPES:
        arrays = {name: rng.integers(0, 4, (3, 3)) for name in "AB"}
        a, b = arrays["A"].astype(dtype), arrays["B"].astype(other)
        common = np.result_type("float16", "float16" if other == "bfloat16" else other)
        if common == "float16" and "bfloat16" in (dtype, other):
            common = np.dtype("bfloat16" if {dtype, other} != set(HALVES) else "float32")
        # Small whole numbers, which every dtype holds.
        wanted = arrays["A"] @ (arrays["B"] if other != "bool" else arrays["B"] > 0)
        for text in ("sum(A[i,j] * B[j,k])", "sum(B[j,k] * A[i,j])", "3 * mean(A[i,j] * B[j,k])"):
            job = einmpi.program(f"Z[i,k] = {text}", A=a, B=b)
            found = einmpi.run(job, {"A": a, "B": b})["Z"].gather()
            assert found.dtype == common, (dtype, other, text)
            # The mean is rounded, to 8 bits in bfloat16.
            rtol = 2 * float(ml_dtypes.finfo(common).eps) if "mean" in text else 0
            np.testing.assert_allclose(found.astype("complex128"), wanted, rtol=rtol)


def test_small_integers_are_computed_in_float32():
    """numpy computes the square root of int8 in float16, step by step."""
    x = np.arange(100, dtype="int8")
    job = einmpi.program("Z[i] = sqrt(x[i]) * 3 + 1", x=x)
    wanted = (np.sqrt(x.astype("float32")) * 3 + 1).astype("float16")
    for found in (einmpi.reference(job, {"x": x}), einmpi.run(job, {"x": x})):
        array = found["Z"] if isinstance(found["Z"], np.ndarray) else found["Z"].gather()
        np.testing.assert_array_equal(bits(array), bits(wanted))
    steps = einmpi.run(job, {"x": x}, half="steps")["Z"].gather()
    np.testing.assert_array_equal(bits(steps), bits(np.sqrt(x) * np.float16(3) + np.float16(1)))


@pytest.mark.parametrize("dtype", HALVES)
def test_macros_scans_and_arguments(dtype):
    x = numbers(dtype, (4, 30))
    wide = x.astype("float64")
    exponentials = np.exp(wide - wide.max(axis=1, keepdims=True))
    programs = {
        "Z[i,j] = softmax[j](x[i,j])": exponentials / exponentials.sum(axis=1, keepdims=True),
        "Z[i,j] = cumsum[j](x[i,j])": np.cumsum(wide, axis=1),
        "Z[i,j] = cummax[j](x[i,j])": np.maximum.accumulate(wide, axis=1),
        "Z[i] = mean(x[i,j])": wide.mean(axis=1),
    }
    eps = float(ml_dtypes.finfo(dtype).eps)
    for text, wanted in programs.items():
        job = einmpi.program(text, x=x)
        found = run_on_threads(job, 2, {"x": x}).outputs["Z"]
        assert found.dtype == dtype
        np.testing.assert_allclose(
            found.astype("float64"), wanted, rtol=4 * eps, atol=4 * eps, err_msg=text
        )
    job = einmpi.program("Z[i] = argmax(x[i,j] * 3 + x[i,j])", x=x)
    chosen = run_on_threads(job, 2, {"x": x}).outputs["Z"]
    np.testing.assert_array_equal(chosen, x.astype("float32").argmax(axis=1))


def test_parameters_and_casts():
    x = numbers("bfloat16", 20)
    job = einmpi.program("Z[i] = rate * x[i] + float16(x[i])", x=x, rate=0.1)
    assert job.graph["Z"].dtype == "float32"
    job = einmpi.program("Z[i] = bfloat16(rate * x[i]) + 1", x=x, rate=0.5)
    found = einmpi.run(job, {"x": x}, rate=0.25)["Z"].gather()
    wanted = (0.25 * x.astype("float32")).astype("bfloat16").astype("float32") + 1
    np.testing.assert_array_equal(bits(found), bits(wanted.astype("bfloat16")))


@pytest.mark.usefixtures("in_folder")
def test_files_and_the_command_line():
    """bfloat16 from safetensors; files hold it as float32, exactly. The job file has the switch."""
    safetensors = pytest.importorskip("safetensors.numpy")
    x = numbers("bfloat16", (6, 4))
    safetensors.save_file({"x": x}, "in.safetensors")
    text = """
program = "Z[i,j] = x[i,j] * x[i,j] + x[i,j]; g[i] = u[i] * 3 + 1"
inputs.x = "in.safetensors:x"
inputs.u = { shape = [50], random = "normal", dtype = "float16", seed = 1 }
outputs.Z = "out.h5:/Z"
outputs.g = "out.h5:/g"
"""
    wide = x.astype("float32")
    results = {}
    for mode in ("float32", "steps"):
        with open("job.toml", "w") as file:
            file.write(text + f'run.half = "{mode}"\n')
        assert einmpi_here(".", ["job.toml", "--quiet"]).returncode == 0
        with h5py.File("out.h5") as file:
            results[mode] = file["Z"][...]
            assert file["g"].dtype == np.float16
    once = (wide * wide + wide).astype("bfloat16")
    assert results["float32"].dtype == np.float32
    np.testing.assert_array_equal(results["float32"], once.astype("float32"))
    np.testing.assert_array_equal(results["steps"], (x * x + x).astype("float32"))
    assert einmpi_here(".", ["verify", "job.toml", "--half", "float32"]).returncode == 0
    assert einmpi_here(".", ["verify", "job.toml"]).returncode == 0
    shown = einmpi_here(".", ["check", "job.toml"]).stdout
    assert "half     float16 and bfloat16 rounded after every operation" in shown
    done = einmpi_here(".", ["check", "job.toml", "--half", "double"])
    assert (done.returncode, done.stderr) == (
        2,
        "--half: unknown mode 'double'; expected one of float32, steps\n",
    )


def test_wrong_modes():
    job = einmpi.program("Z[i] = x[i]", x=(3,))
    with pytest.raises(
        InputError, match="half: unknown mode 'double'; expected one of float32, steps"
    ):
        einmpi.compile(job, half="double")


def test_dist_arrays():
    x = numbers("bfloat16", (6, 4))
    array = einmpi.DistArray.from_global(x)
    np.testing.assert_array_equal(bits((array + array).gather()), bits(x + x))
    total = array.sum()
    assert total.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(float(total), x.astype("float64").sum(), rtol=2**-7)
    assert array.astype("float16").gather().dtype == np.float16
    product = einmpi.einsum("ij,kj->ik", array, x)
    assert product.dtype == ml_dtypes.bfloat16
