"""The LLaMA of the paper (section 9.3): the prefill of a prompt, and a step of training."""

from __future__ import annotations

from einmpi.models.config import Config

_LAYER = """
n1_{k}[b,s,a]   = rmsnorm[a](x_{p}[b,s,a], eps={eps}) * g1_{k}[a]
q_{k}[b,s,h,d]  = sum(n1_{k}[b,s,a] * wq_{k}[a,h,d])
k_{k}[b,s,h,d]  = sum(n1_{k}[b,s,a] * wk_{k}[a,h,d])
v_{k}[b,s,h,d]  = sum(n1_{k}[b,s,a] * wv_{k}[a,h,d])
t_{k}[b,h,s,t]  = sum(q_{k}[b,s,h,d] * k_{k}[b,t,h,d])
p_{k}[b,h,s,t]  = softmax[t](where(t <= s, t_{k}[b,h,s,t] / sqrt({d}), -inf))
o_{k}[b,s,h,d]  = sum(p_{k}[b,h,s,t] * v_{k}[b,t,h,d])
y_{k}[b,s,a]    = x_{p}[b,s,a] + sum(o_{k}[b,s,h,d] * wo_{k}[h,d,a])
n2_{k}[b,s,a]   = rmsnorm[a](y_{k}[b,s,a], eps={eps}) * g2_{k}[a]
u_{k}[b,s,f]    = silu(sum(n2_{k}[b,s,a] * w1_{k}[a,f])) * sum(n2_{k}[b,s,a] * w3_{k}[a,f])
x_{k}[b,s,a]    = y_{k}[b,s,a] + sum(u_{k}[b,s,f] * w2_{k}[f,a])
"""

# The labels of each weight of a layer.
_WEIGHTS = {
    "wq": "ahd",
    "wk": "ahd",
    "wv": "ahd",
    "wo": "hda",
    "w1": "af",
    "w3": "af",
    "w2": "fa",
    "g1": "a",
    "g2": "a",
}


def llama_program(
    model: Config, batch: int, sequence: int, layers: int | None = None
) -> tuple[str, dict[str, tuple[int, ...]], tuple[str, ...]]:
    """Return the program of the first layers of a model, or of all.

    The result is the text of the program, the shapes of its inputs, and the names of the weights.
    """
    extents = {"a": model.width, "h": model.heads, "d": model.head_width, "f": model.hidden}
    count = model.layers if layers is None else layers
    text = ""
    weights: dict[str, tuple[int, ...]] = {}
    for k in range(1, count + 1):
        text += _LAYER.format(k=k, p=k - 1, eps=model.epsilon, d=model.head_width)
        for name, labels in _WEIGHTS.items():
            weights[f"{name}_{k}"] = tuple([extents[label] for label in labels])
    shapes = {"x_0": (batch, sequence, model.width), **weights}
    return text, shapes, tuple(weights)


def llama_training_program(
    model: Config, batch: int, sequence: int, layers: int | None = None, rate: float = 1e-3
) -> tuple[str, dict[str, tuple[int, ...]], dict[str, str]]:
    """Return a step of gradient descent on the first layers of a model, or on all.

    The loss is the mean squared distance of what the last layer computes to `target`. The result is
    the text of the program, the shapes of its inputs, and what a loop carries: for each weight the
    output that it becomes in the next step.
    """
    text, shapes, weights = llama_program(model, batch, sequence, layers)
    count = model.layers if layers is None else layers
    text += f"\nloss = mean((x_{count}[b,s,a] - target[b,s,a])**2)\n"
    carry = {}
    for name in weights:
        labels = ",".join("ijk"[: len(shapes[name])])
        carry[name] = f"{name}_next"
        text += (
            f"{name}_next[{labels}] = {name}[{labels}] - {rate} * grad(loss, {name}[{labels}])\n"
        )
    shapes["target"] = shapes["x_0"]
    return text, shapes, carry
