"""Contractions of experiment1.py: the ten kernels on which Deinsum was measured, and four
terms of coupled-cluster theory, by einmpi on ranks and by opt_einsum in one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import einmpi
from bench.lib.node_peers import blocks_of_plan, timed_on_ranks

TENSORS = "ABCDE"  # the operands' names
LEAST_EXTENT = 2


@dataclass(frozen=True)
class Contraction:
    """A sum of products, as numpy.einsum takes it, and the extent of each label."""

    name: str
    spec: str
    extents: dict[str, int]

    @property
    def operands(self) -> list[str]:
        return self.spec.partition("->")[0].split(",")

    def shape(self, labels: str) -> tuple[int, ...]:
        return tuple(self.extents[label] for label in labels)

    def scaled(self, scale: float) -> Contraction:
        """Return it with all extents multiplied."""
        extents = {}
        for label, extent in self.extents.items():
            extents[label] = max(LEAST_EXTENT, round(extent * scale))
        return replace(self, extents=extents)

    def job(self, shared: str = "auto") -> einmpi.Job:
        """Return it as a program of einmpi."""
        output = self.spec.partition("->")[2]
        factors = []
        inputs = {}
        for name, labels in zip(TENSORS, self.operands, strict=False):
            factors.append(f"{name}[{','.join(labels)}]")
            shape = list(self.shape(labels))
            inputs[name] = {"shape": shape, "dtype": "float64", "random": "normal"}
        text = f"Z[{','.join(output)}] = sum({' * '.join(factors)})"
        return replace(einmpi.program(text, inputs=inputs), shared=shared)


def _contraction(name: str, spec: str, **extents: int) -> Contraction:
    """Return a contraction; `rest` is the extent of all labels that are not given."""
    rest = extents.pop("rest", 0)
    labels = sorted(set(spec) - set(",->"))
    return Contraction(name, spec, {label: extents.get(label, rest) for label in labels})


_ALL = (
    _contraction("1MM", "ij,jk->ik", rest=1200),
    _contraction("2MM", "ij,jk,kl->il", rest=1000),
    _contraction("3MM", "ij,jk,kl,lm->im", rest=800),
    _contraction("MTTKRP-03-M0", "ijk,ja,ka->ia", rest=240, a=24),
    _contraction("MTTKRP-03-M1", "ijk,ia,ka->ja", rest=240, a=24),
    _contraction("MTTKRP-03-M2", "ijk,ia,ja->ka", rest=240, a=24),
    _contraction("MTTKRP-05-M0", "ijklm,ja,ka,la,ma->ia", rest=24, a=24),
    _contraction("MTTKRP-05-M2", "ijklm,ia,ja,la,ma->ka", rest=24, a=24),
    _contraction("MTTKRP-05-M4", "ijklm,ia,ja,ka,la->ma", rest=24, a=24),
    _contraction("TTMc-05-M0", "ijklm,jb,kc,ld,me->ibcde", rest=24, b=8, c=8, d=8, e=8),
    # Of coupled cluster with doubles: i, j, k, l are occupied, a, b, c, d virtual orbitals.
    _contraction("CCD ladder", "abcd,cdij->abij", rest=40, i=12, j=12),
    _contraction("CCD hole ladder", "klij,abkl->abij", rest=40, i=12, j=12, k=12, l=12),
    _contraction("CCD ring", "kbcj,acik->abij", rest=40, i=12, j=12, k=12),
    _contraction("CCD quadratic", "klcd,acik,bdjl->abij", rest=24, i=10, j=10, k=10, l=10),
)
CONTRACTIONS = {contraction.name: contraction for contraction in _ALL}


def elements(name: str, *places: Any) -> Any:
    """Return the elements of a tensor at some indices of each dimension: the same for all peers."""
    seed = 1 + TENSORS.index(name)
    found: Any = np.ones(())
    for dimension, indices in enumerate(places):
        factors = np.sin((np.asarray(indices, float) + seed) * (0.7 + 0.31 * dimension)) + 0.5
        found = np.multiply.outer(found, factors)
    return found


def opt_einsum_contraction(contraction: Contraction) -> Callable[[], tuple[float, float]]:
    """Return it by opt_einsum with numpy, along a path that is found beforehand."""
    import opt_einsum

    shapes = [contraction.shape(labels) for labels in contraction.operands]
    call = opt_einsum.contract_expression(contraction.spec, *shapes, optimize="optimal")
    arrays = []
    for name, shape in zip(TENSORS, shapes, strict=False):
        arrays.append(elements(name, *map(range, shape)))

    def compute() -> tuple[float, float]:
        start = time.perf_counter()
        result = call(*arrays)
        return time.perf_counter() - start, float(result.sum())

    return compute


def einmpi_contraction(contraction: Contraction, shared: str) -> Callable[[], tuple[float, float]]:
    """Return it by einmpi on the ranks of mpirun."""
    step = einmpi.compile(contraction.job(shared))
    inputs = blocks_of_plan(step, elements)
    return timed_on_ranks(lambda: step(inputs)["Z"].local)
