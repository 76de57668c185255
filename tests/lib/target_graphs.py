"""The graphs for which the planner has targets."""

from functools import cache

from paper_llama import llama_program
from paths import JOBS

import einmpi
from einmpi.graph.eingraph import EinGraph
from einmpi.models.config import NAMED


def chain(skew: int) -> EinGraph:
    return einmpi.load(JOBS / "chain.toml", s=960, skew=skew).graph


def attention() -> EinGraph:
    return einmpi.load(JOBS / "attention.toml", s=1024, a=4096, h=32).graph


@cache
def llama(
    batch: int = 8, sequence: int = 1024, layers: int = 1
) -> tuple[EinGraph, tuple[str, ...]]:
    """(graph, weights)"""
    text, shapes, weights = llama_program(NAMED["7B"], batch, sequence, layers)
    return einmpi.program(text, dtype="float32", **shapes).graph, weights
