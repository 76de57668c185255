"""CUDA kernels that compute a whole chain at once, such as attention.

Each is asked whether it can; chains that none of them computes go block by block.
"""

from __future__ import annotations

from einmpi.kernels.cuda.attention.chain import prepare_attention_chain, prepare_gradient_chain
from einmpi.kernels.cuda.capture import watch
from einmpi.kernels.cuda.chains.prepared import Arrays, PrepareChain, PreparedChain
from einmpi.kernels.cuda.launch import key_of
from einmpi.kernels.prepared import PreparedCalls
from einmpi.schedule.fused.chain import Chain

# Asked in this order.
CHAIN_KERNELS: list[PrepareChain] = [prepare_attention_chain, prepare_gradient_chain]


def compute_chain(step: Chain, arrays: Arrays, calls: PreparedCalls) -> int | None:
    """Compute a chain by the first kernel that can; return the bytes it took, None if none can."""
    key = ("chain", *(key_of(array) for array in arrays.values()))
    prepared = calls.get(step, key, lambda: _prepare(step, arrays))
    if prepared is None:
        return None
    prepared.compute(arrays)
    return prepared.workspace


def _prepare(step: Chain, arrays: Arrays) -> PreparedChain | None:
    watch.prepare_calls()
    for prepare in CHAIN_KERNELS:
        prepared = prepare(step, arrays)
        if prepared is not None:
            return prepared
    return None
