"""A training step of a transformer block on one GPU, compared with torch.

    python -m bench gpu_training [--dtypes float32 float16] [--sizes 8 1024 1024 16] [--causal]

A step is forward, backward and an update of all weights by gradient descent, with the weights on
the GPU. The block has attention, layernorms and an MLP four times as wide. torch computes
the same with `scaled_dot_product_attention`, eagerly and by `torch.compile`; the names with
`softmax` write the attention out instead. Sizes are batch, sequence, attributes and heads.
Candidates take turns; a ratio compares the medians, and is above 1 where einmpi is faster.
`--profile einmpi torch.compile` prints the kernels that these run on the GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import einmpi
from bench.gpu.gpu import Candidate, row
from bench.lib.packages import package
from bench.lib.results import write_results
from einmpi.comm.base import ALONE

cupy = package("cupy")
torch = package("torch")
functional = package("torch.nn.functional")

RATE = 0.05
BLOCK = """
U[b,s,a]   = layernorm[a](X[b,s,a]) * g1[a] + b1[a]
Q[b,s,h,d] = sum(U[b,s,a] * WQ[a,h,d])
K[b,s,h,d] = sum(U[b,s,a] * WK[a,h,d])
V[b,s,h,d] = sum(U[b,s,a] * WV[a,h,d])
T[b,h,s,t] = sum(Q[b,s,h,d] * K[b,t,h,d]) / root
A[b,h,s,t] = softmax[t](SCORES)
O[b,s,h,d] = sum(A[b,h,s,t] * V[b,t,h,d])
R[b,s,a]   = X[b,s,a] + sum(O[b,s,h,d] * WO[h,d,a])
N[b,s,a]   = layernorm[a](R[b,s,a]) * g2[a] + b2[a]
F[b,s,f]   = sum(N[b,s,a] * W1[a,f]) + c1[f]
Y[b,s,a]   = R[b,s,a] + sum(gelu(F[b,s,f]) * W2[f,a]) + c2[a]
loss       = sum(float32(Y[b,s,a] - target[b,s,a])**2) / tokens
"""
# Labels of the weights. In half precision all of the block is.
WEIGHTS = {
    "g1": "a",
    "b1": "a",
    "WQ": "a,h,d",
    "WK": "a,h,d",
    "WV": "a,h,d",
    "WO": "h,d,a",
    "g2": "a",
    "b2": "a",
    "W1": "a,f",
    "c1": "f",
    "W2": "f,a",
    "c2": "a",
}
UPDATES = "\n".join(
    f"{name}_next[{labels}] = {name}[{labels}] - {RATE} * grad(loss, {name}[{labels}])"
    for name, labels in WEIGHTS.items()
)
# By how much an update may differ from torch's in float32, relative to its largest element.
TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
UNIT_ROUNDING = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass(frozen=True)
class Sizes:
    """The sizes of a block and of its batch."""

    batch: int
    sequence: int
    attributes: int
    heads: int
    causal: bool

    @property
    def head(self) -> int:
        return self.attributes // self.heads

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors that a step is given."""
        extent = {"a": self.attributes, "h": self.heads, "d": self.head, "f": 4 * self.attributes}
        batch = (self.batch, self.sequence, self.attributes)
        found: dict[str, tuple[int, ...]] = {"X": batch, "target": batch}
        for name, labels in WEIGHTS.items():
            found[name] = tuple(extent[label] for label in labels.split(","))
        return found

    def operations(self) -> float:
        """Return the multiplications and additions of all matrix products of a step."""
        linear = 12 * self.attributes**2 * self.tokens
        attention = 2 * self.sequence * self.attributes * self.tokens
        return 3 * 2.0 * (linear + attention)


def first_values(sizes: Sizes) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(1)
    values = {}
    for name, shape in sizes.shapes().items():
        array = rng.standard_normal(shape, dtype=np.float32)
        if name in ("g1", "g2"):
            array = 1 + 0.1 * array
        elif name in WEIGHTS:
            array *= sizes.attributes**-0.5
        values[name] = array
    return values


# ---- einmpi -------------------------------------------------------------------------------------


class Step:
    """einmpi's step: a compiled program that keeps its weights from call to call."""

    def __init__(self, sizes: Sizes, dtype: str, values: Any, fast_math: bool = False) -> None:
        scores = "where(t <= s, T[b,h,s,t], -inf)" if sizes.causal else "T[b,h,s,t]"
        text = BLOCK.replace("SCORES", scores) + UPDATES
        text = text.replace("root", repr(float(sizes.head**0.5)))
        text = text.replace("tokens", str(sizes.tokens))
        job = einmpi.program(text, dtype=dtype, **sizes.shapes())
        carry = {name: f"{name}_next" for name in WEIGHTS}
        self.compiled = einmpi.compile(
            replace(job, backend="cupy"), ALONE, carry=carry, donate=True, fast_math=fast_math
        )
        self.arrays = {name: cupy.asarray(value).astype(dtype) for name, value in values.items()}

    def __call__(self) -> Any:
        found = self.compiled(self.arrays)
        for name in WEIGHTS:
            self.arrays[name] = found[f"{name}_next"]
        return found["loss"].local

    def weights(self) -> dict[str, Any]:
        found = {}
        for name in WEIGHTS:
            array = self.arrays[name]
            found[name] = cupy.asnumpy(getattr(array, "local", array).astype(np.float32))
        return found


# ---- torch --------------------------------------------------------------------------------------


def block_loss(w: Any, x: Any, target: Any, sizes: Sizes, written_out: bool) -> Any:
    """The same block by torch's functions."""
    u = functional.layer_norm(x, x.shape[-1:], w["g1"], w["b1"])
    heads = (*x.shape[:2], sizes.heads, sizes.head)
    q, k, v = ((u @ w[name].flatten(1)).view(heads).transpose(1, 2) for name in ("WQ", "WK", "WV"))
    if written_out:
        scores = q @ k.transpose(-1, -2) / sizes.head**0.5
        if sizes.causal:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
            scores = scores.masked_fill(~mask, float("-inf"))
        o = torch.softmax(scores, -1) @ v
    else:
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=sizes.causal)
    r = x + o.transpose(1, 2).flatten(2) @ w["WO"].flatten(0, 1)
    n = functional.layer_norm(r, r.shape[-1:], w["g2"], w["b2"])
    f = functional.gelu(n @ w["W1"] + w["c1"])
    y = r + f @ w["W2"] + w["c2"]
    return ((y - target).float() ** 2).sum() / sizes.tokens


class TorchStep:
    """torch's step: the loss, its gradients, and the fused update of torch.optim.SGD."""

    def __init__(
        self,
        sizes: Sizes,
        dtype: str,
        values: Any,
        compiled: bool,
        written_out: bool = False,
        mode: Any = None,
    ) -> None:
        def loss(w: Any, x: Any, target: Any) -> Any:
            return block_loss(w, x, target, sizes, written_out)

        self.loss = torch.compile(loss, mode=mode) if compiled else loss
        tensors = {
            name: torch.as_tensor(value, device="cuda").to(getattr(torch, dtype))
            for name, value in values.items()
        }
        self.batch = tensors["X"], tensors["target"]
        self.weights_by_name = {name: tensors[name].requires_grad_() for name in WEIGHTS}
        self.optimizer = torch.optim.SGD(self.weights_by_name.values(), lr=RATE, fused=True)

    def __call__(self) -> Any:
        self.optimizer.zero_grad(set_to_none=True)
        value = self.loss(self.weights_by_name, *self.batch)
        value.backward()
        self.optimizer.step()
        return value

    def weights(self) -> dict[str, Any]:
        return {
            name: tensor.detach().float().cpu().numpy()
            for name, tensor in self.weights_by_name.items()
        }


# ---- both ---------------------------------------------------------------------------------------


def is_right(name: str, step: Any, wanted: Mapping[str, Any], dtype: str) -> bool:
    """Do one step, and compare how it changes the weights with what float32 gives."""
    before = step.weights()
    value = float(step())
    worst = 0.0
    for key, after in step.weights().items():
        # Weights in half precision change by less than they are rounded to, here and there.
        rounding = float(np.abs(before[key]).max()) * UNIT_ROUNDING[dtype]
        error = float(np.abs(after - before[key] - wanted[key]).max()) - rounding
        worst = float(np.maximum(worst, error / float(np.abs(wanted[key]).max())))  # nan stays
    print(f"  {name:24} loss {value:.6f}, updates within {worst:.1e} of float32", flush=True)
    return worst < TOLERANCE[dtype]


def changes_in_float32(sizes: Sizes, values: Any) -> dict[str, Any]:
    step = TorchStep(sizes, "float32", values, compiled=False, written_out=True)
    before = step.weights()
    step()
    return {name: after - before[name] for name, after in step.weights().items()}


def compare(sizes: Sizes, dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    values = first_values(sizes)
    wanted = changes_in_float32(sizes, values)
    makers: dict[str, Callable[[], Any]] = {
        "einmpi": lambda: Step(sizes, dtype, values, options.fast_math),
        "torch": lambda: TorchStep(sizes, dtype, values, compiled=False),
        "torch.compile": lambda: TorchStep(sizes, dtype, values, compiled=True),
        "torch.compile, graphs": lambda: TorchStep(
            sizes, dtype, values, True, mode="reduce-overhead"
        ),
        "torch.compile, softmax": lambda: TorchStep(sizes, dtype, values, True, True),
    }
    candidates: dict[str, Candidate] = {}
    for name in options.candidates:
        candidate = makers[name]()
        if is_right(name, candidate, wanted, dtype):
            candidates[name] = candidate
        elif name == "einmpi":
            raise SystemExit("einmpi: updates are wrong")
        else:
            print(f"  {name} is wrong, and left out")
    shown = f"B{sizes.batch} S{sizes.sequence} D{sizes.attributes} H{sizes.heads} {dtype}"
    found = row(f"block {shown}", candidates, options.repeats, sizes.operations())
    if options.profile:
        for name in options.profile:
            if name in candidates:
                print_kernels(name, candidates[name])
    return found


def print_kernels(name: str, step: Candidate) -> None:
    """Print how long the host takes to start a step, and the kernels that run on the GPU."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if event.device_time_total]
    microseconds = sum(event.device_time_total for event in kernels)
    print(
        f"  {name}: {1e3 * host:.2f} ms on the host; {len(kernels)} kernels and copies, "
        f"{microseconds / 1e3:.2f} ms on the GPU"
    )
    for event in kernels:
        if event.device_time_total >= microseconds / 100:
            print(f"    {event.device_time_total:8.1f} µs  {event.name:.100}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtypes", nargs="*", default=["float32", "float16"])
    parser.add_argument("--sizes", type=int, nargs=4, default=[8, 1024, 1024, 16])
    names = ["einmpi", "torch", "torch.compile", "torch.compile, graphs", "torch.compile, softmax"]
    parser.add_argument("--candidates", nargs="*", default=names, choices=names)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--fast-math", action="store_true")
    parser.add_argument("--profile", nargs="*", choices=names, default=[])
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = options.fast_math
    sizes = Sizes(*options.sizes, options.causal)
    rows = [compare(sizes, dtype, options) for dtype in options.dtypes]
    if options.json:
        write_results(options.json, rows)


if __name__ == "__main__":
    main()
