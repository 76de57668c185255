"""LLaMA prefill as a program of the language (paper, section 9.3): RMSNorm, attention, SwiGLU, residuals."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Llama:
    """The sizes of a model."""

    width: int
    layers: int
    heads: int
    hidden: int
    epsilon: float = 1e-6


MODELS = {
    "7B": Llama(4096, 32, 32, 11008),
    "13B": Llama(5120, 40, 40, 13824),
    "30B": Llama(6656, 60, 52, 17920),
    "65B": Llama(8192, 80, 64, 22016, 1e-5),
}

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


def llama_program(
    model: Llama, batch: int, sequence: int, layers: int | None = None
) -> tuple[str, dict[str, tuple[int, ...]], tuple[str, ...]]:
    """(program, shapes of its inputs, names of the weights) of the first layers of a model."""
    a, h, f = model.width, model.heads, model.hidden
    d = a // h
    count = model.layers if layers is None else layers
    text = "".join(_LAYER.format(k=k, p=k - 1, eps=model.epsilon, d=d) for k in range(1, count + 1))
    shapes: dict[str, tuple[int, ...]] = {"x_0": (batch, sequence, a)}
    for k in range(1, count + 1):
        shapes |= {f"{name}_{k}": (a, h, d) for name in ("wq", "wk", "wv")}
        shapes |= {f"wo_{k}": (h, d, a), f"w1_{k}": (a, f), f"w3_{k}": (a, f), f"w2_{k}": (f, a)}
        shapes |= {f"g1_{k}": (a,), f"g2_{k}": (a,)}
    return text, shapes, tuple(name for name in shapes if name != "x_0")
