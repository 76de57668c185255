"""Turn the parts that a strategy asks for into a state that the axes of the mesh can hold."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import gcd

import numpy as np

from einmpi.planner.mesh import Mesh, allowed_masks
from einmpi.planner.paper.viable import divisors


def place(mesh: Mesh, extents: Sequence[int], parts: Sequence[int]) -> tuple[int, ...]:
    """Return a state that cuts each label into its `parts`, as far as the axes of the mesh allow.

    The state has one entry per axis: the number of the label that the axis cuts, or len(extents)
    where the axis cuts none. Axes that cut the same label must lie in one window (Mesh.windows).
    The labels are served from first to last, and each keeps the largest divisor of its parts for
    which axes are left. So the last labels, which are the aggregated ones of an EinSum, are the
    first to lose their cuts: on 4 ranks, parts (2, 2, 2) become (2, 2, 1).
    """
    return _place(mesh, tuple(extents), tuple(parts))


@cache
def _place(mesh: Mesh, extents: tuple[int, ...], parts: tuple[int, ...]) -> tuple[int, ...]:
    axes = range(len(mesh.factors))
    # A set of axes is a bit mask. `products[mask]` is the product of its axes' lengths.
    masks = np.arange(1 << len(mesh.factors))
    products = np.ones_like(masks)
    for axis, factor in enumerate(mesh.factors):
        products[masks >> axis & 1 == 1] *= factor

    # Forwards: the sets of axes that the labels up to each one can use together.
    own_of: list[dict[int, int]] = []  # per label: axes used so far → those of this label
    used = masks[:1]
    for extent, count in zip(extents, parts, strict=True):
        for cut in reversed(divisors(gcd(count, mesh.ranks))):
            own = masks[allowed_masks(mesh.factors, extent) & (products == cut)]
            i, j = np.nonzero(used[:, None] & own == 0)  # pairs of sets without a common axis
            if len(i):
                together = used[i] | own[j]
                own_of.append(dict(zip(together.tolist(), own[j].tolist(), strict=True)))
                used = np.unique(together)
                break

    # Backwards: read off the axes of each label.
    state = [len(extents)] * len(mesh.factors)
    remaining = int(used[0])
    for label in reversed(range(len(extents))):
        own_axes = own_of[label][remaining]
        for axis in axes:
            if own_axes >> axis & 1:
                state[axis] = label
        remaining &= ~own_axes
    return tuple(state)
