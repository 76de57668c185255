"""Whether calls are captured in a CUDA graph, not carried out, and what they may not do then."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from einmpi.kernels.cuda.capture.blas import CapturedBlas, NotCapturable


class _State(threading.local):
    """What the calls of a thread do."""

    is_capturing = False
    blas: CapturedBlas | None = None  # for matrix products that are captured
    host_was_needed = False
    calls_were_prepared = False


_state = _State()


@contextmanager
def capturing(blas: CapturedBlas | None) -> Iterator[None]:
    """Let the calls of this thread be captured, as long as a `with` block lasts."""
    _state.is_capturing = True
    _state.blas = blas
    try:
        yield
    finally:
        _state.is_capturing = False
        _state.blas = None


def captured_blas() -> CapturedBlas | None:
    """Return what captures matrix products; None if they are carried out."""
    if _state.is_capturing and _state.blas is None:
        raise NotCapturable("there is no cuBLAS whose calls can be captured")
    return _state.blas


def need_host() -> None:
    """Say that a call reads results on the host, or sends data from there.

    Raise an error if the call is to be captured: the host would not repeat it with the graph.
    """
    if _state.is_capturing:
        raise NotCapturable("the call needs the host")
    _state.host_was_needed = True


def prepare_calls() -> None:
    """Say that calls are prepared, which may take memory that stays.

    Raise an error if calls are captured: such memory is not theirs.
    """
    if _state.is_capturing:
        raise NotCapturable("the call is not prepared yet")
    _state.calls_were_prepared = True


def take_host_was_needed() -> bool:
    """Return whether a call of this thread has needed the host since this was last asked."""
    was_needed = _state.host_was_needed
    _state.host_was_needed = False
    return was_needed


def take_calls_were_prepared() -> bool:
    """Return whether this thread has prepared calls since this was last asked."""
    were_prepared = _state.calls_were_prepared
    _state.calls_were_prepared = False
    return were_prepared
