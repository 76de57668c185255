"""Gradients of functions of whole matrices, against differences of the loss."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import run_from_files
from matrix_cases import definite_matrix_of, matrix_of

import einmpi
from einmpi.graph import matrices
from einmpi.planner import orders

PROGRAMS = {
    "cholesky": "L[i,j] = cholesky(A[i,j])\nl = sum(sin(L[i,j] * (i + 2 * j + 1)))",
    "solve": "X[j,k] = solve(A[i,j], B[i,k])\nl = sum(X[j,k]**2 * (j + 1))",
    "solve a vector": "v[i] = B[i,1]\nX[j] = solve(A[i,j], v[i])\nl = sum(sin(X[j]) * (j + 1))",
    "inv": "X[j,i] = inv(A[i,j])\nl = sum(sin(X[j,i]) * (j + 2 * i))",
    "qr": "Q[i,k], R[k,j] = qr(A[i,j])\n"
    "l = sum(sin(Q[i,k]) * (i + k)) + sum(cos(R[k,j]) * (j + 1))",
    "q alone": "Q[i,k] = qr_q(A[i,j])\nl = sum(sin(Q[i,k]) * (i + 3 * k))",
    "r alone": "R[k,j] = qr_r(A[i,j])\nl = sum(cos(R[k,j]) * (j + 2 * k))",
    "triangles": "X[j,k] = solve_lower(A[i,j], B[i,k])\nY[j,k] = solve_upper(A[i,j], X[i,k])\n"
    "l = sum(Y[j,k]**2 * (j + 1))",
}


def compare_with_differences(text, ranks=1, **inputs):
    names = [name for name in inputs if f"{name}[" in text]
    inputs = {name: inputs[name] for name in names}
    job = einmpi.program(text, **inputs)
    labels = {"A": "b,i,j"[-2 * inputs["A"].ndim + 1 :], "B": "i,k"}
    gradients = [f"d{name}[{labels[name]}] = grad(l, {name}[{labels[name]}])" for name in names]
    found = run_from_files(ranks, "\n".join([text, *gradients]), inputs)[0]
    rng = np.random.default_rng(3)
    for name in names:
        direction = rng.standard_normal(inputs[name].shape)
        losses = []
        for step in (1e-6, -1e-6):
            moved = {**inputs, name: inputs[name] + step * direction}
            losses.append(float(einmpi.run(job, moved)["l"].item()))
        expected = (losses[0] - losses[1]) / 2e-6
        assert np.sum(found[f"d{name}"] * direction) == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("case", PROGRAMS)
def test_gradients_of_one_matrix(case):
    rows = 9 if case in ("qr", "q alone", "r alone") else 6
    a = matrix_of("random", rows, 6) if rows == 9 else definite_matrix_of("random", 6)
    compare_with_differences(PROGRAMS[case], A=a, B=matrix_of("random", 6, 2, 1))


def test_gradients_of_stacks():
    a = np.stack([definite_matrix_of("random", 5) + k * np.eye(5) for k in range(3)])
    b = matrix_of("random", 5, 2, 1)
    text = "L[b,i,j] = cholesky(A[b,i,j])\nX[b,j,k] = solve(L[b,i,j], B[i,k])\nl = sum(X[b,j,k]**3)"
    compare_with_differences(text, A=a, B=b)


@pytest.mark.parametrize("case", ["cholesky", "solve", "qr"])
def test_gradients_on_ranks(case, monkeypatch):
    monkeypatch.setattr(matrices, "LARGE_BYTES", 1)
    monkeypatch.setattr(orders, "LEAST_BLOCK", 4)
    a = definite_matrix_of("random", 24) if case != "qr" else matrix_of("random", 40, 24)
    compare_with_differences(PROGRAMS[case], 4, A=a, B=matrix_of("random", 24, 2, 1))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "w[j], V[i,j] = eigh(A[i,j])\nl = sum(w[j])",
            "the derivative of eigh_values is not known",
        ),
        ("X[i] = lu_diagonal(A[i,j])\nl = sum(X[i])", "the derivative of lu_diagonal is not known"),
        ("R[k,j] = qr_r(A[i,j])\nl = sum(R[k,j])", "more columns than rows"),
    ],
)
def test_what_has_no_gradient(text, said):
    shape = (3, 5) if "qr" in text else (5, 5)
    with pytest.raises(einmpi.InputError, match=said) as caught:
        einmpi.program(f"{text}\nG[i,j] = grad(l, A[i,j])", A=shape, dtype="float64")
    assert "\n" not in str(caught.value)
