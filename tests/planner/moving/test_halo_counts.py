"""What moves for index arithmetic is counted once for equal layers."""

from __future__ import annotations

import einmpi
from einmpi.planner.moving import halo_counts


def _program(layers: int, extent: int) -> einmpi.Job:
    """Return layers that read what the layer before has, and its neighbours."""
    lines = []
    for layer in range(layers):
        lines.append(f"u{layer + 1}[i,j] = u{layer}[i,j] * u{layer}[i,j] + u{layer}[(i+1)%n,j]")
    return einmpi.program("\n".join(lines), n=extent, u0=(extent, 8))


def test_more_layers_are_not_counted_again(monkeypatch):
    """The indices that ranks need are counted once, however many layers there are."""
    calls = 0
    length = halo_counts.length

    def counted_length(runs):
        nonlocal calls
        calls += 1
        return length(runs)

    monkeypatch.setattr(halo_counts, "length", counted_length)
    calls_of_layers = []
    for layers, extent in ((4, 1000), (16, 1001)):  # other extents, which no cache knows
        calls = 0
        einmpi.plan(_program(layers, extent), 64)
        calls_of_layers.append(calls)
    assert calls_of_layers[1] <= calls_of_layers[0]
