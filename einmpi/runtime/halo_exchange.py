"""Halos that stay beside the block: what other ranks send arrives in slots of its own."""

from __future__ import annotations

from einmpi.comm.base import Comm
from einmpi.runtime.buffers import Buffers
from einmpi.runtime.messages import AtOnce, buffer_elements, messages_of_exchange
from einmpi.runtime.pairs import Pairs, rounds
from einmpi.runtime.transfer import Transfer, exchanged
from einmpi.schedule.halo import HaloExchange
from einmpi.schedule.regions import packed


def exchange_halo(step: HaloExchange, buffers: Buffers, comm: Comm) -> None:
    """Receive the halo of a block from other ranks, and send them theirs."""
    in_shared_memory = buffers.shared.transfers_beside.get(id(step.exchange))
    if in_shared_memory is not None:
        in_shared_memory(step.arriving, buffers, comm)
        return
    for slot in step.writes:
        buffers.make(slot)
    buffers.backend.calls.get(step, None, lambda: _prepare(step))(buffers, comm)


def _prepare(step: HaloExchange) -> Transfer:
    """Prepare the messages of the exchange that this step stands for: other ranks may have that."""
    exchange = step.exchange
    moves = exchange.moves
    messages = messages_of_exchange(exchange)
    if messages is not None:
        assert isinstance(messages, AtOnce), "a halo is not the same for all ranks"
        return _prepare_at_once(step, messages)
    limit = buffer_elements(exchange, exchange.target)
    pairs = []
    for slot in step.arriving:
        pairs.append(Pairs(exchange.source, slot or exchange.target, moves.group, limit))

    def exchange_in_pairs(buffers: Buffers, comm: Comm) -> None:
        for to, source in rounds(moves.group, moves.me):
            sent = moves.sends[to]
            received = moves.receives[source]
            place = None if received is None else packed(received)
            pairs[source].send_and_receive(to, sent, source, place, buffers, comm)

    return exchange_in_pairs


def _prepare_at_once(step: HaloExchange, messages: AtOnce) -> Transfer:
    """Prepare to exchange everything with one call of the communicator."""
    source = step.exchange.source
    group = step.group

    def exchange_at_once(buffers: Buffers, comm: Comm) -> None:
        with exchanged(messages, source, source, group, buffers, comm) as receive:
            for piece in messages.received:
                slot = step.arriving[piece.member]
                assert slot is not None, "each message has a slot"
                buffers[slot].reshape(-1)[...] = receive[piece.place]

    return exchange_at_once
