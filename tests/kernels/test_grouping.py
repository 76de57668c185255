"""Groups of kernels, computed one block of rows at a time: the results of the reference evaluator
in less memory.
"""

import numpy as np
import pytest
from distributed import run_on_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from step_kinds import computed_as, is_exchange

import einmpi
from einmpi.errors import EinmpiError
from einmpi.kernels.cpu import compiled_group
from einmpi.kernels.cpu import map_and_folds as grouping_rule
from einmpi.kernels.reference import evaluate as reference
from einmpi.process.environment import THREAD_VARIABLES
from einmpi.schedule.steps import Load, SavePoint, numbered

PROGRAMS = {
    "softmax": ("Z[i,j] = softmax[j](X[i,j])", {"X": (37, 23)}),
    "softmax of columns": ("Z[i,j] = softmax[i](X[i,j])", {"X": (37, 23)}),
    "softmax, turned": ("Z[j,i] = softmax[j](X[i,j])", {"X": (37, 23)}),
    "rmsnorm": ("Z[b,s,a] = rmsnorm[a](X[b,s,a]) * W[a]", {"X": (3, 17, 23), "W": (23,)}),
    "layernorm": ("Z[i,j] = layernorm[j](X[i,j])", {"X": (37, 23)}),
    "argmax": ("Z[i] = argmax[j](exp(X[i,j]) * 3 + X[i,j])", {"X": (137, 23)}),
    "logsumexp": ("Z[i] = logsumexp[j](X[i,j])", {"X": (137, 23)}),
    "masked": (
        "S[h,s,t] = where(t <= s, X[h,s,t], -inf)\nZ[h,s,t] = softmax[t](S[h,s,t])",
        {"X": (5, 11, 11)},
    ),
    "two results": (
        "E[i,j] = exp(X[i,j])\nS[i] = sum(E[i,j])\nZ[i,j] = E[i,j] / S[i]\nY[i] = max(E[i,j])",
        {"X": (37, 23)},
    ),
    "a reduced row": (
        "E[i,j] = exp(X[i,j])\nS[j] = max(E[i,j])\nZ[i,j] = E[i,j] / S[j]",
        {"X": (37, 23)},
    ),
    "a diagonal": (
        "S[i,j] = max[k](X[i,j,k])\nD[i,j,k] = X[i,j,k] - S[i,j]\nZ[i] = tanh(S[i,i])",
        {"X": (19, 19, 7)},
    ),
    "other labels": (
        "E[a,b] = exp(X[a,b])\nM[c] = max[d](E[c,d])\nZ[q,p] = E[q,p] - M[q]",
        {"X": (37, 23)},
    ),
}


@pytest.fixture(autouse=True)
def tiny_blocks(monkeypatch):
    """Cut small tensors into blocks as if they were large."""
    monkeypatch.setattr(grouping_rule, "CACHE_BLOCK_BYTES", 1024)
    monkeypatch.setattr(grouping_rule, "MIN_BYTES_SIDE_BY_SIDE", 1)
    monkeypatch.setattr(grouping_rule, "WORTH_COMPILING", 1)


def values(shapes, seed=0, dtype="float64"):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def compiled(program, inputs, threads=1):
    with pytest.MonkeyPatch.context() as patch:
        for variable in THREAD_VARIABLES:
            patch.setenv(variable, str(threads))
        made = einmpi.compile(einmpi.program(program, **inputs))
    return made, {name: array.gather() for name, array in made(inputs).items()}


def steps_of(made):
    schedule = next(iter(made.ready.values()))[1]
    return [step for step in schedule.steps if not isinstance(step, SavePoint)]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_equal_to_the_reference(name, threads):
    program, shapes = PROGRAMS[name]
    inputs = values(shapes)
    made, found = compiled(program, inputs, threads)
    wanted = reference(made.job.graph, inputs)
    for output in found:
        # Sums of at most 400 terms in another order.
        np.testing.assert_allclose(found[output], wanted[output], rtol=1e-13, atol=1e-13)
    assert any(computed_as(step) == "cache" for step in steps_of(made))


def test_nothing_between_is_whole():
    """Only the input and the output are allocated: what a softmax computes in between is not."""
    inputs = values({"X": (640, 64)})
    made, _ = compiled("Z[i,j] = softmax[j](X[i,j])", inputs)
    assert [step.kind for step in steps_of(made)] == ["load", "kernel", "store"]
    assert made.measured.peak == 2 * inputs["X"].nbytes


def test_a_group_may_use_memory_that_others_need_later():
    """H waits until the group is done, which is no more than what the last product needs."""
    program = """
    H[i,j] = sum(X[i,l] * Y[l,j])
    R[i,j] = H[i,j] + 1
    Z[i,j] = R[i,j] - max[j](R[i,j])
    P[i,k] = sum(Z[i,j] * B[j,k]) + sum(R[i,j] * C[j,k])
    """
    inputs = values({"X": (64, 9), "Y": (9, 32), "B": (32, 400), "C": (32, 400)})
    made, found = compiled(program, inputs)
    (group,) = [step for step in steps_of(made) if computed_as(step) == "cache"]
    assert [kernel.vertex for kernel in group.kernels] == ["R", "Z_1", "Z"]
    wanted = reference(made.job.graph, inputs)
    for output in found:
        np.testing.assert_allclose(found[output], wanted[output], rtol=1e-12, atol=1e-13)
    ((plan, _),) = made.ready.values()
    assert made.measured.peak <= plan.peak


def test_one_by_one_if_it_must_be(monkeypatch):
    """Kernels that cannot be computed in blocks are computed one by one."""
    monkeypatch.setattr(compiled_group.PreparedGroup, "is_possible", False)
    inputs = values({"X": (37, 23)})
    made, found = compiled("Z[i,j] = softmax[j](X[i,j])", inputs)
    np.testing.assert_allclose(found["Z"], reference(made.job.graph, inputs)["Z"], rtol=1e-13)


@pytest.mark.parametrize(
    "program, is_grouped",
    [
        ("Z[i,j] = X[i,j] - mean[i](X[i,j])", False),
        ("Z[i,j] = X[i,j] - mean[j](X[i,j])", True),
        ("Z[j,i] = X[i,j] - mean[j](X[i,j])", False),
    ],
)
def test_a_few_columns_of_many_rows_are_no_block(monkeypatch, program, is_grouped):
    """They lie in small pieces all over memory: whole passes are faster."""
    monkeypatch.setattr(grouping_rule, "MIN_BYTES_SIDE_BY_SIDE", 256)
    monkeypatch.setattr(grouping_rule, "CACHE_BLOCK_BYTES", 2**14)
    inputs = values({"X": (300, 310)})
    made, found = compiled(program, inputs)
    assert any(computed_as(step) == "cache" for step in steps_of(made)) == is_grouped
    wanted = reference(made.job.graph, inputs)
    np.testing.assert_allclose(found["Z"], wanted["Z"], rtol=1e-13, atol=1e-13)


def test_a_gather_in_a_group():
    inputs = {**values({"X": (37, 23), "W": (9,)}), "P": np.arange(37) % 9}
    program = "E[i,j] = exp(X[i,j] - W[P[i]] - j)\nM[i] = max(E[i,j])\nZ[i,j] = E[i,j] / M[i]"
    made, found = compiled(program, inputs)
    assert [kernel.vertex for kernel in steps_of(made)[-2].kernels] == ["E", "M", "Z"]
    np.testing.assert_allclose(found["Z"], reference(made.job.graph, inputs)["Z"], rtol=1e-13)
    inputs["P"][30] = 9
    with pytest.raises(
        EinmpiError, match=r"^program:1:1: E: an index from 0 to 9 is out of range; expected 0 to 8"
    ):
        made(inputs)


def test_a_label_may_have_the_name_of_a_slot_of_its_group():
    """The values of the label e change from block to block; the inner slot e stays in place."""
    inputs = values({"X": (37, 23)})
    program = "e[i,j] = exp(X[i,j])\nM[i] = max(e[i,j])\nZ[e,j] = e[e,j] / M[e] + e"
    made, found = compiled(program, inputs)
    (group,) = [step for step in steps_of(made) if computed_as(step) == "cache"]
    assert "e" in {slot.name for slot in group.inner}
    np.testing.assert_allclose(found["Z"], reference(made.job.graph, inputs)["Z"], rtol=1e-13)


def test_matrix_products_stay_alone():
    inputs = values({"A": (32, 16), "B": (16, 32)})
    made, _ = compiled("C[i,k] = sum(A[i,j] * B[j,k])\nZ[i,k] = softmax[k](C[i,k])", inputs)
    kernels = [step for step in steps_of(made) if step.kernels]
    assert list(map(computed_as, kernels)) == ["kernel", "cache"]


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_on_several_ranks(ranks):
    """A group ends where ranks must exchange data."""
    inputs = values({"X": (64, 40)})
    for strategy in ("eindecomp", "sqrt"):
        job = einmpi.program("Z[i,j] = softmax[j](X[i,j])", **inputs)
        found = run_on_threads(job, ranks, inputs, strategy=strategy).outputs
        np.testing.assert_allclose(found["Z"], reference(job.graph, inputs)["Z"], rtol=1e-13)


@settings(max_examples=40)
@given(data=st.data())
def test_random_chains(data):
    """Random chains of maps and reductions, on several threads, against the reference."""
    ndim = data.draw(st.integers(1, 3))
    shape = tuple(data.draw(st.integers(1, 40)) for _ in range(ndim))
    labels = "ijk"[:ndim]
    everything, lines = ",".join(labels), [f"T0[{','.join(labels)}] = X[{','.join(labels)}] * 2"]
    for number in range(data.draw(st.integers(1, 4))):
        kept = [x for x in labels if data.draw(st.booleans())]
        op = data.draw(st.sampled_from(["max", "sum", "min"]))
        dropped = [x for x in labels if x not in kept]
        inner = f"T{number}[{everything}]"
        left = f"R{number}[{','.join(kept)}]" if kept else f"R{number}"
        lines.append(
            f"{left} = {op}[{','.join(dropped)}]({inner})" if dropped else f"{left} = tanh({inner})"
        )
        lines.append(f"T{number + 1}[{everything}] = {inner} - {left} / 3")
    inputs = values({"X": shape}, data.draw(st.integers(0, 99)))
    made, found = compiled("\n".join(lines), inputs, data.draw(st.integers(1, 3)))
    wanted = reference(made.job.graph, inputs)
    for output in found:
        # Sums of up to 64,000 terms of size 10 in another order, four times.
        np.testing.assert_allclose(found[output], wanted[output], rtol=1e-9, atol=1e-8)
    assert not any(is_exchange(step) for step in steps_of(made))


# ---- matrix products that lead a group -----------------------------------------------------------

NEAREST = "D[p,c] = sum(C[c,f]**2) - 2 * sum(X[p,f] * C[c,f])\nnear[p] = argmin[c](D[p,c])"
LED = {
    "nearest centres": (NEAREST, {"X": (1001, 7), "C": (24, 7)}),
    "rows of the second factor": (
        "m[p] = max[c](sum(C[f,c] * X[p,f]))",
        {"X": (1001, 7), "C": (7, 24)},
    ),
    "transposed": ("m[p] = max[c](sum(X[f,p] * C[f,c]))", {"X": (7, 1001), "C": (7, 24)}),
    "two contracted": (
        "m[p] = max[c](sum(X[p,f,g] * C[f,c,g]))",
        {"X": (990, 3, 4), "C": (3, 24, 4)},
    ),
    "two rows": ("m[p,q] = max[c](sum(X[p,q,f] * C[c,f]))", {"X": (40, 33, 5), "C": (24, 5)}),
    "float32": ("m[p] = max[c](sum(X[p,f] * C[c,f]))", {"X": (1001, 7), "C": (24, 7)}),
}


@pytest.fixture
def tiny_products(monkeypatch):
    monkeypatch.setattr(grouping_rule, "CACHE_BLOCK_BYTES", 2**14)
    monkeypatch.setattr(grouping_rule, "MIN_PRODUCT_ROWS", 8)


def led_groups(made):
    groups = [step for step in steps_of(made) if computed_as(step) == "cache"]
    return [group for group in groups if grouping_rule.is_product(group.kernels[0])]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", LED)
def test_a_product_is_computed_block_by_block(monkeypatch, tiny_products, name, threads):
    program, shapes = LED[name]
    inputs = values(shapes, dtype="float32" if name == "float32" else "float64")
    made, found = compiled(program, inputs, threads)
    (group,) = led_groups(made)
    assert group.kernels[0].target in group.inner
    wanted = reference(made.job.graph, inputs)
    for output, array in found.items():
        tolerance = 1e-5 if array.dtype == np.float32 else 1e-13
        np.testing.assert_allclose(array, wanted[output], rtol=tolerance, atol=tolerance)
    _, found_again = compiled(program, inputs, 5 - threads)  # 4 or 2 threads
    for output, array in found.items():
        assert np.array_equal(array, found_again[output])
    # New arrays, and the same prepared calls.
    inputs = {name: array + 1 for name, array in inputs.items()}
    found = {name: array.gather() for name, array in made(inputs).items()}
    monkeypatch.setattr(grouping_rule, "MAX_PRODUCT_TERMS", 0)
    alone, wanted = compiled(program, inputs)
    assert not led_groups(alone)
    for output, array in found.items():
        np.testing.assert_allclose(array, wanted[output], rtol=1e-5, atol=1e-4)


def test_a_product_that_is_needed_whole_is_computed_whole(tiny_products):
    inputs = values({"X": (1001, 7), "C": (24, 7)})
    program = "D[p,c] = sum(X[p,f] * C[c,f])\nZ[p,c] = softmax[c](D[p,c])"
    made, _ = compiled(program, inputs)
    assert not led_groups(made)
    made, _ = compiled(
        "D[p,c] = sum(X[p,f] * C[c,f])\nm[p] = max[c](D[p,c])\nt = sum(D[p,c])", inputs
    )
    assert not led_groups(made)


def test_a_product_with_long_sums_is_computed_whole(tiny_products):
    inputs = values({"X": (600, 300), "C": (24, 300)})
    made, _ = compiled("m[p] = max[c](sum(X[p,f] * C[c,f]))", inputs)
    assert not led_groups(made)


def test_threads_of_blas_are_restored(tiny_products):
    threadpoolctl = pytest.importorskip("threadpoolctl")
    inputs = values({"X": (1001, 7), "C": (24, 7)})
    with threadpoolctl.threadpool_limits(2, "blas"):
        before = [library["num_threads"] for library in threadpoolctl.threadpool_info()]
        compiled(NEAREST, inputs, 3)
        after = [library["num_threads"] for library in threadpoolctl.threadpool_info()]
    assert before == after


@pytest.mark.parametrize(
    ("program", "shapes"),
    [
        ("Z[b,s,a] = rmsnorm[a](X[b,s,a]) * W[a]", {"X": (3, 17, 23), "W": (23,)}),
        (
            "Z[i,j] = softmax[j](X[i,j]) * W[j] + V[j]",
            {"X": (37, 23), "W": (23,), "V": (23,)},
        ),
    ],
)
def test_what_is_loaded_between_kernels_is_loaded_before_their_group(program, shapes, tmp_path):
    """Inputs from files are loaded where they are first used, in the middle of a softmax."""
    inputs = values(shapes)
    files = {}
    for name, array in inputs.items():
        np.save(tmp_path / f"{name}.npy", array)
        files[name] = {"file": str(tmp_path / f"{name}.npy")}
    job = einmpi.program(program, inputs=files)
    made = einmpi.compile(job)
    found = made()["Z"].gather()
    wanted = reference(job.graph, inputs)["Z"]
    np.testing.assert_allclose(found, wanted, rtol=1e-13, atol=1e-13)
    assert list(filter(None, map(computed_as, steps_of(made)))) == ["cache"]
    assert len(list(numbered(steps_of(made), Load))) == len(inputs)
    ((plan, _),) = made.ready.values()
    assert made.measured.peak <= plan.peak
    for ranks in (2, 4):
        done = run_on_threads(job, ranks, inputs)
        assert done.moved == done.plan.bytes_predicted
        np.testing.assert_allclose(done.outputs["Z"], wanted, rtol=1e-13, atol=1e-13)
