"""Attention written in several ways, the chains of its kernels, and its values by numpy."""

from dataclasses import dataclass

import numpy as np

import einmpi
from einmpi.schedule.compute import Compute, Tiles
from einmpi.schedule.lower import lower

PLAIN = """
T[b,h,s,t] = sum(Q[b,s,h,d] * K[b,t,h,d]) * SCALE
A[b,h,s,t] = softmax[t](SHOWN)
O[b,s,h,d] = sum(A[b,h,s,t] * V[b,t,h,d])
"""
HEADS_FIRST = """
T[b,h,s,t] = sum(Q[b,h,s,d] * K[b,h,t,d]) * SCALE
A[b,h,s,t] = softmax[t](SHOWN)
O[b,h,s,d] = sum(A[b,h,s,t] * V[b,h,t,d])
"""
SHARED_HEADS = """
T[b,g,r,s,t] = sum(Q[b,s,g,r,d] * K[b,t,g,d]) * SCALE
A[b,g,r,s,t] = softmax[t](SHOWN)
O[b,s,g,r,d] = sum(A[b,g,r,s,t] * V[b,t,g,d])
"""
IN_FLOAT32 = """
T[b,h,s,t] = float32(sum(Q[b,s,h,d] * K[b,t,h,d])) * SCALE
A[b,h,s,t] = TYPE(softmax[t](SHOWN))
O[b,s,h,d] = sum(A[b,h,s,t] * V[b,t,h,d])
"""
IN_ONE_STATEMENT = """
O[b,s,h,d] = sum[t](softmax[t](sum[e](Q[b,s,h,e] * K[b,t,h,e]) * SCALE) * V[b,t,h,d])
"""
# The sum of float32(O) ** 2 has the gradient 2 · O, and dO is an input of the chain.
GRADIENTS = """
loss = sum(float32(O[LABELS] * G[LABELS]))
gQ[QLABELS] = grad(loss, Q[QLABELS])
gK[KLABELS] = grad(loss, K[KLABELS])
gV[VLABELS] = grad(loss, V[VLABELS])
"""


@dataclass(frozen=True)
class Case:
    """The text of a program and its sizes."""

    text: str = PLAIN
    dtype: str = "float16"
    batch: int = 1
    heads: int = 2
    members: int = 1  # rows of queries that share a head of K and V
    rows: int = 40
    columns: int = 40
    head: int = 64
    scale: float = 0.125
    mask: str = ""  # a condition; scores are seen where it holds
    fill: str = "-inf"

    @property
    def program(self) -> str:
        scores = "T[b,g,r,s,t]" if self.text == SHARED_HEADS else "T[b,h,s,t]"
        shown = f"where({self.mask}, {scores}, {self.fill})" if self.mask else scores
        text = self.text.replace("SHOWN", shown).replace("SCALE", repr(self.scale))
        return text.replace("TYPE", self.dtype)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        if self.text == HEADS_FIRST:
            queries = (self.batch, self.heads, self.rows, self.head)
            keys = (self.batch, self.heads, self.columns, self.head)
        elif self.text == SHARED_HEADS:
            queries = (self.batch, self.rows, self.heads, self.members, self.head)
            keys = (self.batch, self.columns, self.heads, self.head)
        else:
            queries = (self.batch, self.rows, self.heads, self.head)
            keys = (self.batch, self.columns, self.heads, self.head)
        return {"Q": queries, "K": keys, "V": keys}

    def labels(self) -> tuple[str, str, str]:
        """Return the labels of Q and O, K, and V."""
        if self.text == HEADS_FIRST:
            return "b,h,s,d", "b,h,t,d", "b,h,t,d"
        if self.text == SHARED_HEADS:
            return "b,s,g,r,d", "b,t,g,d", "b,t,g,d"
        return "b,s,h,d", "b,t,h,d", "b,t,h,d"

    def gradient_program(self) -> str:
        queries, keys, values = self.labels()
        text = GRADIENTS.replace("QLABELS", queries).replace("KLABELS", keys)
        return self.program + text.replace("VLABELS", values).replace("LABELS", queries)


def kernels_of(text, shapes, dtype, ranks=1, rank=0):
    """Return the kernels of a program on one rank."""
    return kernels_of_job(einmpi.program(text, dtype=dtype, **shapes), ranks, rank)


def kernels_of_job(job, ranks=1, rank=0):
    """Return the kernels of a job on one rank."""
    found = []
    for step in lower(einmpi.plan(job, ranks), rank).steps:
        found += step.kernels
    return found


def chain_of(kernels, written):
    """Return kernels as a chain that leaves the slots of some names."""
    inner = [kernel.target for kernel in kernels if kernel.target.name not in written]
    return Compute(tuple(kernels), Tiles("memory"), frozenset(inner))


def attention_chain(case, with_numbers=False):
    """Return the chain of a case, and the names of its outputs: O, and the numbers of rows."""
    kernels = kernels_of(case.program, case.shapes(), case.dtype)
    written = [kernels[-1].target.name]
    if with_numbers:
        written += number_names(kernels)
    return chain_of(kernels, written), written


def number_names(kernels):
    """Return the names of the maximum and the total of a softmax."""
    found = {}
    for kernel in kernels:
        einsum = kernel.einsum
        if einsum.aggregation in ("max", "sum") and len(kernel.operands) == 1:
            found.setdefault(einsum.aggregation, kernel.target.name)
    return [found["max"], found["sum"]]


def gradient_chain(case, given=()):
    """Return the chain of gradients and its outputs, dQ, dK and dV.

    `given` may have "statistics", the numbers of rows, and "products", the sums of weight · slope.
    """
    shapes = case.shapes()
    shapes["G"] = shapes["Q"]
    kernels = kernels_of(case.gradient_program(), shapes, case.dtype)
    after = [kernel for kernel in kernels if kernel.target.name in ("gQ", "gK", "gV")]
    needed = {kernel.target.name for kernel in after}
    for kernel in reversed(kernels):
        if kernel.target.name in needed:
            needed.update(slot.name for slot in kernel.operands)
    parts = [kernel for kernel in kernels if kernel.target.name in needed]
    names = number_names(parts)
    products = [kernel for kernel in parts if _sums_weighted_slopes(kernel)]
    left_out = set(names) if "statistics" in given else set()
    if "products" in given:
        left_out |= {kernel.target.name for kernel in products}
    # What makes dO from the loss is outside of the chain.
    (slopes,) = [k for k in parts if "V" in [slot.name for slot in k.operands] and _contracts(k)]
    (upstream,) = [slot.name for slot in slopes.operands if slot.name != "V"]
    left_out.add(upstream)
    parts = [kernel for kernel in parts if kernel.target.name not in left_out]
    reachable = {"gQ", "gK", "gV"}
    for kernel in reversed(parts):
        if kernel.target.name in reachable:
            reachable.update(slot.name for slot in kernel.operands)
    parts = [kernel for kernel in parts if kernel.target.name in reachable]
    made = {"d_o": upstream, "maxima": names[0], "totals": names[1]}
    made["products"] = products[0].target.name
    return chain_of(parts, ["gQ", "gK", "gV"]), made


def _contracts(kernel):
    return kernel.einsum.aggregation == "sum" and len(kernel.operands) == 2


def _sums_weighted_slopes(kernel):
    """Tell whether a kernel sums a product of two tensors that have all of its labels."""
    if not _contracts(kernel):
        return False
    left, right = kernel.einsum.operands
    return set(left) == set(right) == set(kernel.einsum.labels)


# ---- numpy --------------------------------------------------------------------------------------


def standard(case, name, array):
    """Return an array as batch, head, member, row, head dimension."""
    if case.text == HEADS_FIRST:
        return array[:, :, None]
    if case.text == SHARED_HEADS and name in ("K", "V"):
        return array.transpose(0, 2, 1, 3)[:, :, None]
    if case.text == SHARED_HEADS:
        return array.transpose(0, 2, 3, 1, 4)
    return array.transpose(0, 2, 1, 3)[:, :, None]


def expected_values(case, q, k, v, d_o=None):
    """Return O, maxima and totals in float64, and dQ, dK, dV if dO is given.

    Arrays are in the order of `standard`.
    """
    q, k, v = [array.astype(np.float64) for array in (q, k, v)]
    scores = case.scale * np.einsum("bgrsd,bgxtd->bgrst", q, k)
    seen = np.ones((case.rows, case.columns), bool)
    if case.mask:
        s, t = np.indices(seen.shape)
        seen = eval(case.mask, {"s": s, "t": t})
        scores = np.where(seen, scores, float(case.fill))
    maxima = scores.max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - maxima)
    totals = weights.sum(axis=-1, keepdims=True)
    weights /= totals
    o = np.einsum("bgrst,bgxtd->bgrsd", weights, v)
    found = {"O": o, "maxima": maxima[..., 0], "totals": totals[..., 0]}
    if d_o is not None:
        d_o = d_o.astype(np.float64)
        slopes = np.einsum("bgrsd,bgxtd->bgrst", d_o, v)
        products = (weights * slopes).sum(axis=-1, keepdims=True)
        slopes = np.where(seen, weights * (slopes - products), 0.0)
        found["products"] = products[..., 0]
        found["gQ"] = case.scale * np.einsum("bgrst,bgxtd->bgrsd", slopes, k)
        found["gK"] = case.scale * np.einsum("bgrst,bgrsd->bgtd", slopes, q)[:, :, None]
        found["gV"] = np.einsum("bgrst,bgrsd->bgtd", weights, d_o)[:, :, None]
    return found
