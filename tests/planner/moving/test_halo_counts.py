"""What moves for index arithmetic is counted once for equal layers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import einmpi
from einmpi.planner.mesh import Mesh
from einmpi.planner.moving import halo
from einmpi.planner.moving.halo import equal_share_length, length, share


def _program(layers: int, extent: int) -> einmpi.Job:
    """Return layers that read what the layer before has, and its neighbours."""
    lines = []
    for layer in range(layers):
        lines.append(f"u{layer + 1}[i,j] = u{layer}[i,j] * u{layer}[i,j] + u{layer}[(i+1)%n,j]")
    return einmpi.program("\n".join(lines), n=extent, u0=(extent, 8))


def test_more_layers_are_not_counted_again(monkeypatch):
    """The indices that ranks need are counted once, however many layers there are."""
    calls = 0
    length = halo.length

    def counted_length(runs):
        nonlocal calls
        calls += 1
        return length(runs)

    monkeypatch.setattr(halo, "length", counted_length)
    calls_of_layers = []
    for layers, extent in ((4, 1000), (16, 1001)):  # other extents, which no cache knows
        calls = 0
        einmpi.plan(_program(layers, extent), 64)
        calls_of_layers.append(calls)
    assert calls_of_layers[1] <= calls_of_layers[0]


@given(ranks=st.integers(1, 48), extent=st.integers(1, 60), data=st.data())
def test_equal_shares_are_as_long_as_the_share_of_every_rank(ranks, extent, data):
    mesh = Mesh(ranks)
    axes = data.draw(st.sets(st.sampled_from(range(len(mesh.factors))))) if mesh.factors else set()
    lengths = set()
    for rank in range(ranks):
        digits = mesh.digits(rank)
        lengths.add(length(share(mesh, extent, tuple((axis, digits[axis]) for axis in axes))))
    windows = mesh.windows(extent)
    if axes.issubset({axis for window in windows for axis in window}):
        expected = equal_share_length(mesh, extent, sorted(axes))
        assert expected is None or lengths == {expected}
    if len(windows) == 1 and extent % ranks == 0:
        assert equal_share_length(mesh, extent, sorted(axes)) is not None
