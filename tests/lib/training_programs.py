"""Training steps of small models as programs, for tests of order, memory and recomputation."""

from __future__ import annotations

from typing import Any

import numpy as np

import einmpi

Step = tuple[einmpi.Job, dict[str, str]]  # a job, and the output that each input becomes

BLOCK = """
n[s,a]  = rmsnorm[a](X[s,a])
Q[s,d]  = sum(n[s,a] * WQ[a,d])
K[s,d]  = sum(n[s,a] * WK[a,d])
V[s,d]  = sum(n[s,a] * WV[a,d])
P[s,t]  = softmax[t](where(t <= s, sum[d](Q[s,d] * K[t,d]), -inf))
Y[s,a]  = X[s,a] + sum[d](sum[t](P[s,t] * V[t,d]) * WO[d,a])
U[s,f]  = silu(sum(Y[s,a] * W1[a,f]))
Z[s,a]  = Y[s,a] + sum(U[s,f] * W2[f,a])
loss    = mean[s,a](Z[s,a]**2)
"""
CLASSIFIER = """
H[b,h] = relu(sum(X[b,i] * W1[i,h]) + b1[h])
Z[b,l] = sum(H[b,h] * W2[h,l]) + b2[l]
loss   = mean[b](logsumexp[l](Z[b,l]) - Z[b,y[b]])
"""


def with_descent(program: str, shapes: dict[str, Any], weights: list[str], **options: Any) -> Step:
    """Return a step of gradient descent on a loss."""
    lines = [program]
    carry = {}
    for name in weights:
        labels = ",".join("uvwx"[: len(shapes[name])])
        lines.append(
            f"{name}_next[{labels}] = {name}[{labels}] - 0.1 * grad(loss, {name}[{labels}])"
        )
        carry[name] = f"{name}_next"
    outputs = ["loss", *carry.values()]
    return einmpi.program("\n".join(lines), outputs=outputs, **shapes, **options), carry


def perceptron(
    layers: int, batch: int, width: int, function: str = "tanh", dtype: str = "float64"
) -> Step:
    """Return a step of a perceptron with layers of equal width."""
    lines = []
    shapes: dict[str, Any] = {"X": (batch, width)}
    weights = []
    before = "X"
    for number in range(1, layers + 1):
        lines.append(
            f"H{number}[b,j] = {function}(sum({before}[b,i] * W{number}[i,j]) + c{number}[j])"
        )
        shapes[f"W{number}"] = (width, width)
        shapes[f"c{number}"] = (width,)
        weights += [f"W{number}", f"c{number}"]
        before = f"H{number}"
    lines.append(f"loss = mean[b,j]({before}[b,j]**2)")
    return with_descent("\n".join(lines), shapes, weights, dtype=dtype)


def transformer_block(tokens: int, width: int, head: int, inner: int) -> Step:
    """Return a step of a transformer block with one head."""
    shapes: dict[str, Any] = {"X": (tokens, width), "WO": (head, width)}
    shapes |= dict.fromkeys(("WQ", "WK", "WV"), (width, head))
    shapes |= {"W1": (width, inner), "W2": (inner, width)}
    return with_descent(BLOCK, shapes, ["WQ", "WK", "WV", "WO", "W1", "W2"])


def classifier(batch: int, features: int, hidden: int, labels: int) -> Step:
    """Return a step of a classifier with one hidden layer."""
    shapes: dict[str, Any] = {
        "X": (batch, features),
        "W1": (features, hidden),
        "b1": (hidden,),
        "W2": (hidden, labels),
        "b2": (labels,),
        "y": np.zeros(batch, np.int64),
    }
    return with_descent(CLASSIFIER, shapes, ["W1", "b1", "W2", "b2"])


def values_for(job: einmpi.Job, seed: int = 0) -> dict[str, np.ndarray]:
    """Return inputs of a job: small random numbers, and zeros for integers."""
    rng = np.random.default_rng(seed)
    values = {}
    for vertex in job.graph.inputs:
        values[vertex.name] = np.zeros(vertex.bound, vertex.dtype)
        if np.dtype(vertex.dtype).kind == "f":
            scale = 1 / max(1, vertex.bound[0] if vertex.bound else 1)
            values[vertex.name] += rng.normal(size=vertex.bound, scale=scale**0.5)
    return values
