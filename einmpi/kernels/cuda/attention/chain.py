"""A chain that is softmax attention, computed by a kernel for tensor cores."""

from __future__ import annotations

from einmpi.kernels.attention.pattern import Attention, find_attention
from einmpi.kernels.cuda.attention.launches import MAX_COUNT, Scores, prepare_attention, supports
from einmpi.kernels.cuda.attention.storage import store_attention
from einmpi.kernels.cuda.chains.prepared import Arrays, PreparedChain
from einmpi.schedule.fused.chain import Chain


def prepare_attention_chain(step: Chain, arrays: Arrays) -> PreparedChain | None:
    """Prepare a chain that computes attention; None if it is no attention, or not supported."""
    attention = find_attention(step.parts, [slot.name for slot in step.writes])
    if attention is None:
        return None
    stored = store_attention(attention, arrays)
    scores = scores_of(attention)
    if stored is None or not supports(stored, scores):
        return None
    q, k, v, o = stored
    launch = prepare_attention(q, k, v, o, scores)
    elements = (attention.q, attention.k, attention.v, attention.o)
    names = [element.tensor for element in elements]

    def compute(arrays: Arrays) -> None:
        launch([*(arrays[name].data.ptr for name in names), 0])

    return PreparedChain(compute)


def scores_of(attention: Attention) -> Scores:
    """Return scale and mask as the kernels take them: their fill is not scaled yet."""
    band = attention.band
    return Scores(
        scale=attention.scale,
        lower=max(band.lower, -MAX_COUNT),
        upper=min(band.upper, MAX_COUNT),
        fill=attention.fill / attention.scale,
    )
