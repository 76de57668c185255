"""Contractions against numpy.matmul on matrices that lie right already, and against numpy.einsum(optimize=True).

    python bench/kernels_contract.py [--cases square scores …] [--repeat 9] [--dtype float64] [--cpu]

One row a case: median milliseconds of matmul, and what part of its rate the other two reach. 1.00 is the limit; for an
outer product that is numpy.multiply. "copied" is the part of the operands and the output that is copied. On a busy
machine, --cpu with OPENBLAS_NUM_THREADS=1 counts seconds of the processor.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from math import prod

import numpy as np

from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, Call
from einmpi.runtime.contract import contract, recognise, workspace

CASES: dict[str, tuple[str, dict[str, int]]] = {
    "square": ("ij,jk->ik", {"i": 1000, "j": 1000, "k": 1000}),
    "tall": ("ij,jk->ik", {"i": 20000, "j": 200, "k": 100}),
    "A^T B": ("ji,jk->ik", {"i": 800, "j": 1600, "k": 800}),
    "A B^T": ("ij,kj->ik", {"i": 800, "j": 1600, "k": 800}),
    "fused": ("ijb,jbk->ik", {"i": 800, "j": 40, "b": 40, "k": 800}),
    "scores": ("bshd,bthd->bhst", {"b": 2, "s": 512, "t": 512, "h": 16, "d": 64}),
    "values": ("bhst,bthd->bshd", {"b": 2, "s": 512, "t": 512, "h": 16, "d": 64}),
    "reshape": ("abcd,cdef->abef", {"a": 30, "b": 30, "c": 30, "d": 30, "e": 30, "f": 30}),
    "permuted": ("ijkl,jlmk->im", {"i": 600, "j": 16, "k": 20, "l": 20, "m": 500}),
    "interleaved": ("iaj,jbk->abik", {"i": 40, "a": 40, "j": 600, "b": 10, "k": 80}),
    "heads": ("bsa,ahd->bhsd", {"b": 4, "s": 256, "a": 1024, "h": 16, "d": 64}),
    "vector": ("ij,j->i", {"i": 6000, "j": 6000}),
    "small": ("bij,bjk->bik", {"b": 20000, "i": 16, "j": 16, "k": 16}),
    "outer": ("i,j->ij", {"i": 6000, "j": 6000}),
}


def einsum_of(subscripts: str, extent: dict[str, int]) -> EinSum:
    inputs, output = subscripts.split("->")
    first, second = (tuple(index) for index in inputs.split(","))
    summed = tuple(label for label in first if label not in output)
    extents = tuple((label, extent[label]) for label in (*output, *summed))
    function = Call("*", (Arg(0), Arg(1)))
    return EinSum(tuple(output), (first, second), function, "sum" if summed else None, summed, extents)


def candidates(subscripts: str, extent: dict[str, int], dtype: str) -> tuple[list[Callable[[], object]], float]:
    """matmul, contract and einsum on operands of this case, and the part of the data that contract copies."""
    einsum = einsum_of(subscripts, extent)
    contraction = recognise(einsum)
    assert contraction is not None
    random = np.random.default_rng(1)
    shapes = [[extent[label] for label in index] for index in einsum.operands]
    a, b = (random.standard_normal(shape).astype(dtype) for shape in shapes)
    out = np.empty(einsum.bound, dtype)
    first, second = (set(index) for index in einsum.operands)
    shared, kept = first & second, set(einsum.output)
    batch, rows, inner, columns = (
        prod(extent[label] for label in group)
        for group in (shared & kept, first - shared, shared - kept, second - shared)
    )
    x, y, z = a.reshape(batch, rows, inner), b.reshape(batch, inner, columns), out.reshape(batch, rows, columns).copy()
    limit = np.matmul if inner > 1 else np.multiply
    copied = workspace(contraction, [dtype, dtype], dtype) / (a.nbytes + b.nbytes + out.nbytes)
    return [
        lambda: limit(x, y, out=z),
        lambda: contract(contraction, (a, b), out),
        lambda: np.einsum(subscripts, a, b, out=out, optimize=True),
    ], copied


def rows(
    cases: list[str], repeat: int, dtype: str, clock: Callable[[], float]
) -> Iterator[tuple[str, str, float, float, float, float]]:
    for name in cases:
        functions, copied = candidates(*CASES[name], dtype)
        seconds: list[list[float]] = [[] for _ in functions]
        for turn in range(repeat + 1):  # interleaved, so that all see the same machine; the first turn warms up
            for function, found in zip(functions, seconds, strict=True):
                start = clock()
                function()
                if turn:
                    found.append(clock() - start)
        limit, ours, numpy = (statistics.median(found) for found in seconds)
        yield name, CASES[name][0], 1e3 * limit, limit / ours, limit / numpy, copied


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--dtype", default="float64", choices=["float32", "float64", "complex64", "complex128"])
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    clock = time.process_time if given.cpu else time.perf_counter
    print(f"{'case':12}{'subscripts':18}{'matmul ms':>10}{'contract':>10}{'einsum':>8}{'copied':>8}")
    for name, subscripts, milliseconds, ours, numpy, copied in rows(given.cases, given.repeat, given.dtype, clock):
        print(f"{name:12}{subscripts:18}{milliseconds:10.1f}{ours:10.2f}{numpy:8.2f}{copied:8.2f}", flush=True)


if __name__ == "__main__":
    main()
