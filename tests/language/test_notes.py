"""Notes about labels that may be misspelt, and where errors of a run are in the program."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import run_on_threads

import einmpi
from einmpi.errors import EinmpiError, nearest_of, one_of
from einmpi.language.scope import label_notes
from einmpi.report.describe import describe_job

SHAPES = {"A": (6, 5), "B": (5, 4), "C": (5,), "S": (5, 5), "n": np.zeros(5, "int64")}


def notes(text: str, **sizes: int) -> list[str]:
    used = {name: shape for name, shape in SHAPES.items() if f"{name}[" in text}
    job = einmpi.program(text, **used, **sizes)
    found = label_notes(job.source, job.written.by_name, job.sizes)
    for note in found:
        assert f"note     {note}\n" in describe_job(job)
    return found


def test_a_misspelt_label_is_noted() -> None:
    assert notes("Z[i,k] = sum(A[i,j] * B[jj,k])") == [
        "program:1:18: label j is used only once; jj has the same extent and is another label",
        "program:1:25: label jj is used only once; j has the same extent and is another label",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "T[i] = C[i]\nZ[i,k] = sum(A[i,j] * C[j] * B[jj,k])",
        "T[i] = C[i]\nZ[i] = 1 + max(A[i,j] * C[j] * B[jj,0])",
        "T[i] = C[i]\nZ[i] = C[0] + mean(A[i,j] + C[j] + C[jj])",
    ],
)
def test_one_of_several_uses_is_misspelt(text: str) -> None:
    (note,) = notes(text)
    assert note.startswith("program:2:")
    assert "label jj is used only once; j has" in note


@pytest.mark.parametrize(
    "text",
    [
        "Z[i,k] = sum(A[i,j] * B[j,k])",
        "Z[i] = sum(A[i,j])",
        "Z[i] = sum(exp(S[i,j] - C[i]))",  # j and i are in one tensor
        "Z[i,k] = sum[j,jj](A[i,j] * B[jj,k])",  # named
        "Z = sum(B[i,j] + A[k,0])",  # all extents differ
        "Z[k] = sum(B[j,k] * (j < 3))",
        "Z[i] = sum(A[i,j]) + sum(C[jj])",  # two aggregations
        "Z[i] = A[i,2] * C[0]",
        "Z[i,j] = softmax[j](A[i,j])",
        "Z[i] = C[n[i]]",
    ],
)
def test_ordinary_labels_are_not_noted(text: str) -> None:
    assert notes(text) == []


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("Z = sum(A[i,m])", "13: m in A[i, m]"),  # it stands for nothing else
        ("Z[i] = sum(A[i,m] * C[m]) / m", "16: m in A[i, m]"),  # and the number beside it
        ("Z[i] = A[i,0] * mean(A[i,m] * C[m]) + A[i,m-1]", "26: m in A[i, m]"),
    ],
)
def test_a_label_that_may_be_meant_as_a_size_is_noted(text: str, place: str) -> None:
    says = "is a label with 5 values; the size m = 3 is m+0"
    assert notes(text, m=3) == [f"program:1:{place} {says}"]
    assert notes("Z = sum(A[i,m+0])", m=3) == []


@pytest.mark.parametrize(
    "text",
    [
        "Z[i,k] = sum(A[i,m] * B[m,k])",  # the idiom: a label of two tensors
        "Z[m] = sum(A[i,m]) / m",  # bound on the left
        "Z[i] = sum[m](A[i,m]) / m",  # and by name
        "Z[i] = sum(A[i,j]) / m",
        "Z[i] = sum(softmax[m](A[i,m]) * C[m])",
    ],
)
def test_labels_called_like_a_size_are_not_noted(text: str) -> None:
    assert notes(text, m=5) == []


# ---- errors of a run ----------------------------------------------------------------------------

GIVEN = {"v": np.arange(4.0), "w": np.arange(4.0), "k": np.array([0, 1, 4]), "ok": np.arange(3)}
PLACES = {
    "Z[i] = v[k[i]]": "program:1:1: Z",
    "\n  Y[i] = v[i] + 1\n  Z[i] = 2 * Y[k[i]]": "program:3:3: Z",
    "Y[i] = v[k[i]]\nZ[i] = Y[i] + 1": "program:1:1: Z",  # fused
    "Y[i] = v[k[i]]\nX[i] = w[ok[i]]\nZ[i] = Y[i] + X[i]": "program:2:1 or program:1:1: Z",
    "Y[i] = v[i]\nZ = sum(v[k[i]] * 2) + sum(Y[i])": "program:2:1: Z_1",
    "Y[i] = v[i]\nZ[j] = sum(v[k[i]] * Y[j] * ok[i])": "program:2:1: Z_",
}


@pytest.mark.parametrize("text", PLACES)
def test_an_index_out_of_range_says_where(text: str) -> None:
    used = {name: value for name, value in GIVEN.items() if f"{name}[" in text}
    job = einmpi.program(text, **used)
    with pytest.raises(EinmpiError) as one_rank:
        einmpi.run(job, used)
    assert str(one_rank.value).startswith(PLACES[text])
    assert "is out of range; expected 0 to 3" in str(one_rank.value)
    with pytest.raises(EinmpiError, match=r"^program:[123]:[13]: [YZ]\S*: an index from 0 to 4"):
        einmpi.reference(job, used)


def test_ranks_say_where_too() -> None:
    job = einmpi.program("Y[i] = v[i]\nZ[i] = Y[k[i]]", v=GIVEN["v"], k=GIVEN["k"])
    with pytest.raises(EinmpiError, match="program:2:1: Z: an index from"):
        run_on_threads(job, 2, {"v": GIVEN["v"], "k": GIVEN["k"]})


# ---- names --------------------------------------------------------------------------------------


def test_at_most_five_names_are_listed() -> None:
    names = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "theta"]
    assert nearest_of(names[:5], "q") == "one of alpha, beta, gamma, delta, epsilon"
    assert nearest_of(names, "bata") == (
        "one of beta, zeta, alpha, gamma, delta, … (did you mean beta?)"
    )
    assert nearest_of(["alpha"], "x") == "alpha"


@pytest.mark.parametrize(
    ("wrong", "suggested"),
    [
        ("tilte", "title"),
        ("Title", "title"),
        ("mem", "memory"),
        ("argmin", ""),
        ("maximise", ""),
        ("i", ""),
        ("", ""),
    ],
)
def test_only_misspellings_are_suggested(wrong: str, suggested: str) -> None:
    expected = "one of title, memory, max, min, n"
    if suggested:
        expected += f" (did you mean {suggested}?)"
    assert one_of(["title", "memory", "max", "min", "n"], wrong) == expected
