"""Softmax attention and its gradients are recognised among kernels, and nothing else is."""

from math import inf

import pytest
from attention_cases import (
    HEADS_FIRST,
    IN_FLOAT32,
    IN_ONE_STATEMENT,
    PLAIN,
    SHARED_HEADS,
    Case,
    attention_chain,
    gradient_chain,
    kernels_of,
    number_names,
)

from einmpi.kernels.attention.gradients import find_gradients
from einmpi.kernels.attention.pattern import NO_BOUND, find_attention

SIZES = {"Q": (2, 12, 3, 8), "K": (2, 20, 3, 8), "V": (2, 20, 3, 8)}
ALL = (-NO_BOUND, NO_BOUND)
MASKS = {
    "t <= s": (-NO_BOUND, 0),
    "t < s": (-NO_BOUND, -1),
    "s >= t": (-NO_BOUND, 0),
    "s > t + 3": (-NO_BOUND, -4),
    "t - s >= -2": (-2, NO_BOUND),
    "t + 1 > s": (0, NO_BOUND),
    "(t <= s) & (t > s - 5)": (-4, 0),
}


def found_in(case, with_numbers=False):
    chain, written = attention_chain(case, with_numbers)
    return find_attention(chain.kernels, written)


@pytest.mark.parametrize("text", [PLAIN, HEADS_FIRST, SHARED_HEADS, IN_FLOAT32, IN_ONE_STATEMENT])
def test_attention_is_found(text):
    found = found_in(Case(text, members=3))
    assert found is not None
    assert found.scores.scale == 0.125
    assert (found.scores.band.lower, found.scores.band.upper) == ALL
    assert [found.elements[name].tensor for name in "qkv"] == ["Q", "K", "V"]
    assert found.labels.row == "s"
    assert found.divides
    assert found.labels.shared_batches == (("r",) if text == SHARED_HEADS else ())


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask):
    found = found_in(Case(mask=mask))
    assert found is not None
    assert (found.scores.band.lower, found.scores.band.upper) == MASKS[mask]
    assert found.scores.fill == -inf


def test_a_mask_may_name_what_is_not_seen():
    text = PLAIN.replace("SHOWN", "where(t > s + 2, -50.0, T[b,h,s,t])").replace("SCALE", "2.0")
    kernels = kernels_of(text, SIZES, "float16")
    found = find_attention(kernels, ["O"])
    assert found is not None
    assert (found.scores.band.lower, found.scores.band.upper) == (-NO_BOUND, 2)
    assert found.scores.fill == -50


def test_a_scaled_mask_scales_its_fill():
    text = PLAIN.replace("SHOWN", "where(t <= s, T[b,h,s,t], -8.0) / 4").replace("SCALE", "2.0")
    found = find_attention(kernels_of(text, SIZES, "float16"), ["O"])
    assert found is not None
    assert found.scores.scale == 0.5
    assert found.scores.fill == -2


def test_numbers_of_rows_may_be_wanted_too():
    chain, written = attention_chain(Case(mask="t <= s"), with_numbers=True)
    found = find_attention(chain.kernels, written)
    assert found is not None
    names = [found.elements[name].tensor for name in ("maxima", "totals")]
    assert names == number_names(chain.kernels)


def test_a_sum_that_is_divided_afterwards():
    chain, written = attention_chain(Case(IN_ONE_STATEMENT, head=8))
    found = find_attention(chain.kernels, written)
    assert found is not None
    assert found.divides
    product, inverse, result = chain.kernels[-3:]
    assert not result.einsum.aggregated
    assert not inverse.einsum.aggregated
    parts = chain.kernels[:-2]
    found = find_attention(parts, [product.target.name, number_names(parts)[1]])
    assert found is not None
    assert not found.divides
    assert "totals" in found.elements
    assert "maxima" not in found.elements


def test_indices_of_a_rank_count_from_its_first():
    """Each of two ranks has half of the rows, and compares them with all columns."""
    case = Case(mask="t <= s", batch=1, heads=1, rows=64, columns=64, head=8)
    bounds = set()
    for rank in range(2):
        kernels = kernels_of(case.program, case.shapes(), "float16", 2, rank)
        found = find_attention(kernels, [kernels[-1].target.name])
        assert found is not None
        bounds.add(found.scores.band.upper)
    assert bounds == {0, 32}


@pytest.mark.parametrize(
    "shown",
    [
        "T[b,h,s,t] + B[s,t]",
        "where(M[s,t] > 0, T[b,h,s,t], -inf)",
        "where(t <= 5, T[b,h,s,t], -inf)",
        "where((t <= s) | (t < 3), T[b,h,s,t], -inf)",
        "where(2 * t <= s, T[b,h,s,t], -inf)",
        "where(t <= s, T[b,h,s,t], inf)",
        "-T[b,h,s,t]",
        "T[b,h,s,t] ** 2",
    ],
)
def test_other_scores_are_not_attention(shown):
    text = PLAIN.replace("SHOWN", shown).replace("SCALE", "0.5")
    shapes = dict(SIZES)
    if "B[" in shown:
        shapes["B"] = (12, 20)
    if "M[" in shown:
        shapes["M"] = (12, 20)
    assert find_attention(kernels_of(text, shapes, "float16"), ["O"]) is None


@pytest.mark.parametrize(
    "text",
    [
        # A softmax over rows, no softmax, a sum of something else, products with V twice.
        "T[b,h,s,t] = sum(Q[b,s,h,d] * K[b,t,h,d])\nA[b,h,s,t] = softmax[s](T[b,h,s,t])\n"
        "O[b,s,h,d] = sum(A[b,h,s,t] * V[b,t,h,d])",
        "T[b,h,s,t] = sum(Q[b,s,h,d] * K[b,t,h,d])\nO[b,s,h,d] = sum(exp(T[b,h,s,t]) * V[b,t,h,d])",
        "T[b,h,s,t] = sum(Q[b,s,h,d] * K[b,t,h,d])\nA[b,h,s,t] = softmax[t](T[b,h,s,t])\n"
        "O[b,s,h,d] = max(A[b,h,s,t] * V[b,t,h,d])",
        "T[b,h,s,t] = sum(Q[b,s,h,d] * K[b,t,h,d])\nA[b,h,s,t] = softmax[t](T[b,h,s,t])\n"
        "O[b,s,h,d] = sum(A[b,h,s,t] * V[b,t,h,d] * V[b,t,h,d])",
        "T[b,h,s,t] = max(Q[b,s,h,d] * K[b,t,h,d])\nA[b,h,s,t] = softmax[t](T[b,h,s,t])\n"
        "O[b,s,h,d] = sum(A[b,h,s,t] * V[b,t,h,d])",
    ],
)
def test_other_programs_are_not_attention(text):
    assert find_attention(kernels_of(text, SIZES, "float16"), ["O"]) is None


def test_rounding_inside_of_a_kernel_is_kept():
    shown = "float16(T[b,h,s,t] * 3)"
    text = PLAIN.replace("SHOWN", f"{shown} * 2").replace("SCALE", "0.5")
    kernels = kernels_of(text, SIZES, "float16")
    assert any("float16(" in str(kernel.einsum) for kernel in kernels)
    assert find_attention(kernels, ["O"]) is None


def test_weights_that_are_wanted_are_not_left_out():
    kernels = kernels_of(Case().program, Case().shapes(), "float16")
    assert find_attention(kernels, ["O", "A"]) is None
    assert find_attention(kernels, ["O", "T"]) is None


@pytest.mark.parametrize("given", [(), ("statistics",)], ids=len)
@pytest.mark.parametrize("mask", ["", "t <= s"])
def test_gradients_of_a_softmax_in_float32_are_found(mask, given):
    """Its total divides each term of a difference."""
    chain, _ = gradient_chain(Case(IN_FLOAT32, mask=mask), given)
    found = find_gradients(chain.kernels, [slot.name for slot in chain.writes])
    assert found is not None
    assert found.factors == {"d_q": 0.125, "d_k": 0.125}
    assert "given" not in found.elements
    assert ("maxima" in found.elements) == bool(given)
    chain, _ = gradient_chain(Case(IN_FLOAT32), ("statistics", "products"))
    assert find_gradients(chain.kernels, [slot.name for slot in chain.writes]) is None


@pytest.mark.parametrize("given", [(), ("statistics",), ("statistics", "products")], ids=len)
@pytest.mark.parametrize("mask", ["", "t <= s", "(t <= s) & (t > s - 7)"])
@pytest.mark.parametrize("text", [PLAIN, HEADS_FIRST, SHARED_HEADS])
def test_gradients_are_found(text, mask, given):
    chain, names = gradient_chain(Case(text, mask=mask, members=3, head=16), given)
    found = find_gradients(chain.kernels, [slot.name for slot in chain.writes])
    assert found is not None
    tensors = {name: element.tensor for name, element in found.elements.items()}
    assert [tensors[name] for name in ("d_q", "d_k", "d_v")] == ["gQ", "gK", "gV"]
    assert tensors["d_o"] == names["d_o"]
    assert found.factors == {"d_q": 0.125, "d_k": 0.125}
    if "statistics" in given:
        assert tensors["maxima"] == names["maxima"]
        assert tensors["totals"] == names["totals"]
    else:
        assert "maxima" not in tensors
    assert ("given" in tensors) == ("products" in given)
    assert find_attention(chain.kernels, [slot.name for slot in chain.writes]) is None


def test_gradients_with_another_mask_are_not_found():
    """The slopes of scores that are not seen must be 0, and of no others."""
    chain, _ = gradient_chain(Case(mask="t <= s"))
    other, _ = gradient_chain(Case(mask="t <= s + 1"))
    masked = {kernel.target.name: kernel for kernel in other.kernels}
    parts = list(chain.kernels)
    for number, kernel in enumerate(parts):
        is_slope = len(kernel.operands) > 1 and "where" in str(kernel.einsum)
        if is_slope:
            parts[number] = masked[kernel.target.name]
    assert parts != list(chain.kernels)
    assert find_gradients(parts, [slot.name for slot in chain.writes]) is None


def test_some_gradients_may_be_left_out():
    chain, _ = gradient_chain(Case())
    parts = [kernel for kernel in chain.kernels if kernel.target.name != "gK"]
    found = find_gradients(parts, ["gQ", "gV"])
    assert found is not None
    assert "d_k" not in found.elements
    assert "d_v" in found.elements
