"""Halos that stay beside the block: what other ranks send arrives in slots of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from einmpi.comm.base import Comm
from einmpi.runtime.buffers import Buffers
from einmpi.runtime.pairs import Pairs, rounds
from einmpi.schedule.halo import HaloExchange
from einmpi.schedule.regions import Region, elements, packed
from einmpi.schedule.steps import MESSAGE_BUFFER_BYTES

Transfer: TypeAlias = Callable[[Buffers, Comm], None]  # prepared


def exchange_halo(step: HaloExchange, buffers: Buffers, comm: Comm) -> None:
    """Receive the halo of a block from other ranks, and send them theirs."""
    buffers.backend.calls.get(step, None, lambda: _prepare(step))(buffers, comm)


def _prepare(step: HaloExchange) -> Transfer:
    """Choose the messages of the exchange that this step stands for: other ranks may have that."""
    exchange = step.exchange
    moves = exchange.moves
    buffer_bytes = min(exchange.buffer_bytes, MESSAGE_BUFFER_BYTES)
    buffer_elements = buffer_bytes // np.dtype(exchange.target.dtype).itemsize
    if moves.fits_at_once(buffer_elements):
        return _prepare_at_once(step)
    pairs = []
    for slot in step.arriving:
        pairs.append(Pairs(exchange.source, slot or exchange.target, moves.group, buffer_elements))

    def exchange_in_pairs(buffers: Buffers, comm: Comm) -> None:
        for slot in step.writes:
            buffers.make(slot)
        for to, source in rounds(moves.group, moves.me):
            sent = moves.sends[to]
            received = moves.receives[source]
            place = None if received is None else packed(received)
            pairs[source].send_and_receive(to, sent, source, place, buffers, comm)

    return exchange_in_pairs


def _prepare_at_once(step: HaloExchange) -> Transfer:
    """Prepare to exchange everything with one call of the communicator."""
    exchange = step.exchange
    moves = exchange.moves
    send_counts = [_count(region) for region in moves.sends]
    receive_counts = [_count(region) for region in moves.receives]

    def exchange_at_once(buffers: Buffers, comm: Comm) -> None:
        for slot in step.writes:
            buffers.make(slot)
        with (
            buffers.message_buffer(sum(send_counts), exchange.source) as send,
            buffers.message_buffer(sum(receive_counts), exchange.source) as receive,
        ):
            start = 0
            for region, count in zip(moves.sends, send_counts, strict=True):
                if region is not None:
                    part = send[start : start + count]
                    buffers.backend.pack(buffers[exchange.source], region, part)
                start += count
            comm.alltoallv(moves.group, send, send_counts, receive, receive_counts)
            start = 0
            for arriving, count in zip(step.arriving, receive_counts, strict=True):
                if arriving is not None:
                    buffers[arriving].reshape(-1)[...] = receive[start : start + count]
                start += count

    return exchange_at_once


def _count(region: Region | None) -> int:
    return 0 if region is None else elements(region)
