"""Clocks of ranks compared by messages: clocks that are far apart, and that drift."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from einmpi.comm import control_messages as clocks
from einmpi.comm.control_messages import ClockReading, compare_clocks, on_first_clock
from einmpi.comm.threads import run_threads


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_clocks_that_differ_by_hours(monkeypatch, ranks):
    own = threading.local()
    shifted = SimpleNamespace(perf_counter=lambda: time.perf_counter() + own.shift)
    monkeypatch.setattr(clocks, "time", shifted)

    def on_rank(comm):
        own.shift = 5000.0 * comm.rank
        before = comm.received
        readings = compare_clocks(comm)
        assert comm.received == before
        return readings

    readings, *others = run_threads(ranks, on_rank)
    assert others == [[]] * (ranks - 1) and len(readings) == ranks
    for rank, reading in enumerate(readings):
        assert abs(reading.ahead - 5000.0 * rank) <= reading.doubt + 1e-9


def test_drift_is_spread_evenly():
    """A clock that is 2 s ahead and gains 1 ms a second: rank 0's t is 2 + 1.001 t there."""
    before, after = ClockReading(2.0, 2.0, 1e-6), ClockReading(2 + 100.1, 2.1, 1e-6)
    times = np.array([[0.0, 50.0], [50.0, 100.0]])
    np.testing.assert_allclose(on_first_clock(2 + 1.001 * times, before, after), times, atol=1e-9)


def test_what_the_messages_may_have_made_is_no_drift():
    """Else a short run between two poor readings would be stretched, or turned round."""
    before, after = ClockReading(10.0, 3.0, 0.004), ClockReading(10.001, 3.005, 0.002)
    times = np.array([10.0, 10.0005])
    np.testing.assert_array_equal(on_first_clock(times, before, after), times - 3.005)
