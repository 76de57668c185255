"""What moves for index arithmetic is counted once for equal layers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import einmpi
from einmpi.planner.mesh import Mesh
from einmpi.planner.moving import halo_words
from einmpi.planner.moving.halo import indices_by_digits, length, share


def _program(layers: int, extent: int) -> einmpi.Job:
    """Return layers that read what the layer before has, and its neighbours."""
    lines = []
    for layer in range(layers):
        lines.append(f"u{layer + 1}[i,j] = u{layer}[i,j] * u{layer}[i,j] + u{layer}[(i+1)%n,j]")
    return einmpi.program("\n".join(lines), n=extent, u0=(extent, 8))


def test_more_layers_are_not_counted_again(monkeypatch):
    """The indices that ranks need are counted once, however many layers there are."""
    calls = 0
    shares_of = halo_words.shares_of

    def counted_shares(*args):
        nonlocal calls
        calls += 1
        return shares_of(*args)

    monkeypatch.setattr(halo_words, "shares_of", counted_shares)
    calls_of_layers = []
    for layers, extent in ((4, 1000), (16, 1001)):  # other extents, which no cache knows
        calls = 0
        einmpi.plan(_program(layers, extent), 64)
        calls_of_layers.append(calls)
    assert 0 < calls_of_layers[1] <= calls_of_layers[0]


@given(ranks=st.integers(1, 48), extent=st.integers(1, 60), data=st.data())
def test_indices_by_digits_are_those_of_the_share_of_every_rank(ranks, extent, data):
    mesh = Mesh(ranks)
    usable = sorted(axis for window in mesh.windows(extent) for axis in window)
    axes = sorted(data.draw(st.sets(st.sampled_from(usable)))) if usable else []
    lengths = indices_by_digits(mesh, extent, tuple(axes)).tolist()
    assert sum(lengths) == extent
    for rank in range(ranks):
        digits = mesh.digits(rank)
        number = 0
        for axis in axes:
            number = number * mesh.factors[axis] + digits[axis]
        own = share(mesh, extent, tuple((axis, digits[axis]) for axis in axes))
        assert lengths[number] == length(own)
