"""The mesh of ranks: its axes, the digits of ranks and indices, the axes that may cut a label."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import gcd, prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from einmpi.caches import bounded_cache

Grouping = tuple[tuple[int, ...], ...]  # axes of a mesh, in groups
MOST_AXES_OF_A_TABLE = 12  # of their 4,096 sets all are looked at once
Masks = npt.NDArray[np.int64]  # sets of axes

REVERSED = -1
WHOLE = 2**20  # no axis cuts it


class Side(NamedTuple):
    """A label or dimension whose digits are not in the order of the mesh, or that is summed.

    Order k: axis k is the first digit, then those after it, and then the axes before it. REVERSED:
    the last axis is the first digit. Order -k, from -2 on: in the order of the mesh, after a first
    digit below k that belongs to no axis. So ranks have blocks in turns, k of them: a cycle each.
    With `blocks`, a power of two, axes that cut it halve it again and again, into at most so many
    parts, each of which follows on the one before.
    """

    extent: int
    order: int
    blocks: int = 0


Extent = int | Side


def sides(
    extents: Sequence[int], orders: Sequence[int], blocks: Sequence[int] = ()
) -> tuple[Extent, ...]:
    """Return extents with their orders; missing ones are that of the mesh."""
    found: list[Extent] = list(extents)
    for number, (order, count) in enumerate(itertools.zip_longest(orders, blocks, fillvalue=0)):
        if order or count:
            found[number] = Side(extents[number], order, count)
    return tuple(found)


def shown_orders(orders: Sequence[int]) -> tuple[int, ...]:
    """Return orders as records have them: nothing if all are that of the mesh."""
    return tuple(orders) if any(orders) else ()


def length_of(extent: Extent) -> int:
    """Return the number of indices."""
    return extent.extent if isinstance(extent, Side) else extent


def cycles_of(extent: Extent) -> int:
    """Return how often all ranks have their turn along a label or dimension."""
    return max(1, -extent.order) if isinstance(extent, Side) else 1


@cache
def prime_factors(number: int) -> tuple[int, ...]:
    """Return the prime factors of a number, the largest first: 12 → (3, 2, 2)."""
    factors = []
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    if number > 1:
        factors.append(number)
    return tuple(reversed(factors))


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number in rising order."""
    found = {1}
    for prime in prime_factors(number):
        found |= {divisor * prime for divisor in found}
    return tuple(sorted(found))


@dataclass(frozen=True)
class Mesh:
    """`ranks` as a product of prime axes, the slowest first.

    A rank has one digit on each axis, in that mixed radix: on 3·2·2 axes, rank 7 has the digits
    1, 1, 1. The ranks lie on `nodes` nodes, equally many on each and one node after the other, so
    the first axes are between nodes. `twos_first` says that of others axes of length 2 come first.
    """

    ranks: int
    nodes: int = 1
    twos_first: bool = False

    @cached_property
    def factors(self) -> tuple[int, ...]:
        """The length of each axis.

        Different primes take turns, so that neighbouring axes make many different products.
        """
        between = _take_turns(prime_factors(self.nodes))
        inside = _take_turns(prime_factors(self.ranks // self.nodes))
        if self.twos_first:
            between.sort()
            inside.sort()
        return (*between, *inside)

    @cached_property
    def node_axes(self) -> int:
        """How many of the axes, the first ones, are between nodes."""
        return len(prime_factors(self.nodes))

    def parts(self, cuts: Sequence[Hashable], symbols: Iterable[Hashable]) -> tuple[int, ...]:
        """Return the number of parts of each symbol, given the symbol that each axis cuts."""
        counts: dict[Hashable, int] = {}
        for factor, cut in zip(self.factors, cuts, strict=True):
            counts[cut] = counts.get(cut, 1) * factor
        return tuple(counts.get(symbol, 1) for symbol in symbols)

    def digits(self, rank: int) -> tuple[int, ...]:
        """Return the digit of a rank on each axis."""
        return _digits_of_rank(rank, self.factors)

    def windows(self, extent: Extent) -> tuple[tuple[int, ...], ...]:
        """Return the windows of a label: groups of neighbouring axes whose product fits `extent`.

        Axes that cut a label at the same time lie in one window, or slice different digits of the
        same numbers (see `places`). Windows are disjoint, and an axis slices the same digit of the
        index whichever other axes cut the label too: so an axis on a label means the same data for
        every tensor. A label with extent ≥ ranks has one window. On 5·3·2 axes, extent 10 has the
        windows (0,) and (1, 2).

        The axes of a window are in the order of the digits that they slice. Lengths that many of
        the windows have come first, so that axes of several windows slice digits of the same
        numbers: on 3·2·2 axes, extent 10 has the windows (1, 0) and (2,).
        """
        return _windows(self.factors, extent)

    def places(self, extent: Extent) -> dict[int, tuple[int, ...]]:
        """Return for each axis of a window the digit of a label that it slices.

        The digit is given by the lengths of the window's axes up to this one: index i has the digit
        ⌊i·m/extent⌋ mod f, where m is their product, and f the last of them; a digit that belongs
        to no axis comes first. So axes of different
        windows may slice the same digit, or different digits of the same numbers. On 2·2·2 axes,
        extent 7 has the windows (0, 1) and (2,). Axis 1 slices the digit (2, 2), axes 0 and 2 slice
        (2,): axes 1 and 2 can cut a label together, and axes 0 and 2 cannot.
        """
        return _places(self.factors, extent)

    def mixes_windows(self, extents: Sequence[Extent]) -> bool:
        """Return whether axes of several windows can cut one of some labels together."""
        return any(_mixes_windows(self.factors, extent) for extent in extents)

    def possible_parts(self, bound: Sequence[Extent]) -> str:
        """Return into how many parts each dimension of a tensor can be cut, for messages."""
        lists = []
        for extent in bound:
            counts = {1}
            for window in self.windows(extent):
                products = {1}
                for axis in window:
                    products |= {product * self.factors[axis] for product in products}
                counts |= products
            lists.append(", ".join(map(str, sorted(counts))))
        if not self.factors:
            return "1 part of each dimension, because there is 1 rank"
        axes = "·".join(map(str, self.factors))
        counts_text = " × ".join(f"({listed})" for listed in lists)
        return f"parts out of {counts_text}, each of the factors {axes} used at most once"


def _take_turns(primes: tuple[int, ...]) -> list[int]:
    """Return the primes in turns: (5, 5, 5, 2, 2, 2) → 5, 2, 5, 2, 5, 2."""
    seen: dict[int, int] = {}
    turns = []
    for prime in primes:
        seen[prime] = seen.get(prime, 0) + 1
        turns.append((seen[prime], prime))
    turns.sort(key=lambda turn: turn[0])  # stable: in one turn the larger prime stays first
    return [prime for _, prime in turns]


@bounded_cache(8192)
def _digits_of_rank(rank: int, factors: tuple[int, ...]) -> tuple[int, ...]:
    digits = []
    for factor in reversed(factors):
        digits.append(rank % factor)
        rank //= factor
    return tuple(reversed(digits))


@bounded_cache(256)
def members_along(mesh: Mesh, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks with the digit 0 on all other axes; the digit of the last axis is fastest.

    Other ranks that differ on these axes only are as far from each other.
    """
    ranks = np.zeros(1, int)
    for axis in axes:
        along_axis = np.arange(mesh.factors[axis]) * prod(mesh.factors[axis + 1 :])
        ranks = (ranks[:, None] + along_axis).ravel()
    return tuple(ranks.tolist())


@cache
def _windows(factors: tuple[int, ...], side: Extent) -> tuple[tuple[int, ...], ...]:
    if isinstance(side, Side) and side.order == WHOLE:
        return ()
    if isinstance(side, Side) and side.blocks:
        return (_halving_axes(factors, side),)
    windows: list[tuple[int, ...]] = []
    current: tuple[int, ...] = ()
    product = cycles = cycles_of(side)
    extent = length_of(side)
    for axis in _in_order(len(factors), side):
        factor = factors[axis]
        if cycles * factor > extent:
            continue
        if product * factor > extent:
            windows.append(current)
            current = ()
            product = cycles
        current = (*current, axis)
        product *= factor
    if current:
        windows.append(current)
    if len(windows) < 2:
        return tuple(windows)
    return _shared_lengths_first(factors, windows)


def _halving_axes(factors: tuple[int, ...], side: Side) -> tuple[int, ...]:
    """Return the axes that may halve a label, the first of them first."""
    found: list[int] = []
    for axis in next(iter(_windows(factors, side._replace(blocks=0))), ()):
        if factors[axis] != 2 or 2 ** (len(found) + 1) > side.blocks:
            break
        found.append(axis)
    return tuple(found)


def _in_order(axes: int, side: Extent) -> list[int]:
    """Return the axes in the order of the digits that they slice."""
    in_order = list(range(axes))
    if isinstance(side, Side):
        if side.order == REVERSED:
            return in_order[::-1]
        first = max(0, side.order)
        return in_order[first:] + in_order[:first]
    return in_order


def _shared_lengths_first(
    factors: tuple[int, ...], windows: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """Return the windows with the lengths first that most of them have; lengths take turns."""
    lengths_of = [[factors[axis] for axis in window] for window in windows]
    ordered = []
    for window in windows:
        keys = {}
        seen: dict[int, int] = {}
        for axis in window:
            length = factors[axis]
            turn = seen[length] = seen.get(length, 0) + 1
            sharing = sum(lengths.count(length) >= turn for lengths in lengths_of)
            keys[axis] = (-sharing, turn, -length)
        ordered.append(tuple(sorted(window, key=keys.__getitem__)))
    return tuple(ordered)


@cache
def _places(factors: tuple[int, ...], extent: Extent) -> dict[int, tuple[int, ...]]:
    places = {}
    for window in _windows(factors, extent):
        lengths = [factors[axis] for axis in window]
        first = [] if cycles_of(extent) == 1 else [cycles_of(extent)]
        for number, axis in enumerate(window, 1):
            places[axis] = (*first, *lengths[:number])
    return places


def may_cut(
    factors: tuple[int, ...], extent: Extent, masks: Masks, across_windows: bool = False
) -> npt.NDArray[np.bool_]:
    """Return for sets of axes, given as bit masks, whether each may cut a label of this extent.

    Axes of several windows are allowed only `across_windows`, if they slice different digits of
    the same numbers.
    """
    if len(factors) <= MOST_AXES_OF_A_TABLE:
        return _may_cut_table(factors, extent, across_windows)[masks]
    return _may_cut(factors, extent, masks, across_windows)


@cache
def _may_cut_table(
    factors: tuple[int, ...], extent: Extent, across_windows: bool
) -> npt.NDArray[np.bool_]:
    """Return for every set of axes whether it may cut a label of this extent."""
    return _may_cut(factors, extent, np.arange(1 << len(factors)), across_windows)


def _may_cut(
    factors: tuple[int, ...], extent: Extent, masks: Masks, across_windows: bool
) -> npt.NDArray[np.bool_]:
    allowed: npt.NDArray[np.bool_] = masks == 0
    if isinstance(extent, Side) and extent.blocks:
        for halving in _windows(factors, extent):
            for count in range(1, len(halving) + 1):
                allowed |= masks == sum(1 << axis for axis in halving[:count])
        return allowed
    for window in _windows(factors, extent):
        if across_windows:
            axes_of_digits = _axes_of_digits(factors, extent, window)
        else:
            axes_of_digits = [[axis] for axis in window]
        inside = sum(1 << axis for axes in axes_of_digits for axis in axes)
        fits = masks & ~inside == 0
        for axes in axes_of_digits:
            if len(axes) > 1:
                fits &= sum(masks >> axis & 1 for axis in axes) <= 1
        allowed |= fits
    return allowed


def _axes_of_digits(
    factors: tuple[int, ...], extent: Extent, window: tuple[int, ...]
) -> list[list[int]]:
    """Return for each digit of a window the axes, of any window, that slice it."""
    places = _places(factors, extent)
    found = []
    for axis in window:
        found.append([other for other, place in places.items() if place == places[axis]])
    return found


@cache
def _mixes_windows(factors: tuple[int, ...], extent: Extent) -> bool:
    """Return whether two axes of different windows slice different digits of the same numbers."""
    windows = _windows(factors, extent)
    window_of = {axis: number for number, window in enumerate(windows) for axis in window}
    for window in windows:
        axes_of_digits = _axes_of_digits(factors, extent, window)
        for some, others in itertools.combinations(axes_of_digits, 2):
            if len({window_of[axis] for axis in (*some, *others)}) > 1:
                return True
    return False


def divided(count: int, parts: int) -> Iterator[list[tuple[int, int]]]:
    """Yield all ways to divide so many things, in order, into parts: start and end of each."""
    for borders in itertools.combinations_with_replacement(range(count + 1), parts - 1):
        yield list(itertools.pairwise((0, *borders, count)))


@cache
def groupings(factors: tuple[int, ...], most: int) -> tuple[Grouping, ...]:
    """Return all ways to put the axes into at most `most` groups, the most balanced way first.

    Of several ways with the same products, one is returned. The axes of equal length are
    interchangeable, so each prime's axes are divided up in order: 2·2 into two groups gives
    (0, 1) | (), (0,) | (1,) and () | (0, 1).
    """
    groupings_so_far: list[Grouping] = [((),) * most]
    for prime in sorted(set(factors), reverse=True):
        axes = [axis for axis, factor in enumerate(factors) if factor == prime]
        extended = []
        for grouping in groupings_so_far:
            for parts in divided(len(axes), most):
                groups = []
                for group, (start, end) in zip(grouping, parts, strict=True):
                    groups.append((*group, *axes[start:end]))
                extended.append(tuple(groups))
        groupings_so_far = extended

    by_products: dict[tuple[int, ...], Grouping] = {}
    for grouping in groupings_so_far:
        groups_in_use = tuple(group for group in grouping if group)
        products = []
        for group in groups_in_use:
            products.append(prod(factors[axis] for axis in group))
        by_products.setdefault(tuple(sorted(products, reverse=True)), groups_in_use)
    return tuple(by_products[products] for products in sorted(by_products))


def is_possible(mesh: Mesh, extents: Sequence[Extent], state: Sequence[int]) -> bool:
    """Return whether axes cut labels as a search may do it: each one by axes of one window."""
    for label, extent in enumerate(extents):
        axes = {axis for axis, cut in enumerate(state) if cut == label}
        if axes and not any(axes <= set(window) for window in mesh.windows(extent)):
            return False
    return True


# ---- placement -----------------------------------------------------------------------------------
#
# Turn the parts that a strategy asks for into a state that the axes of the mesh can hold.


def place(mesh: Mesh, extents: Sequence[Extent], parts: Sequence[int]) -> tuple[int, ...]:
    """Return a state that cuts each label into its `parts`, as far as the axes of the mesh allow.

    The state has one entry per axis: the number of the label that the axis cuts, or len(extents)
    where the axis cuts none. Axes that cut the same label must lie in one window (Mesh.windows).
    The labels are served from first to last, and each keeps the largest divisor of its parts for
    which axes are left. So the last labels, which are the aggregated ones of an EinSum, are the
    first to lose their cuts: on 4 ranks, parts (2, 2, 2) become (2, 2, 1).
    """
    return _place(mesh, tuple(extents), tuple(parts))


@cache
def _place(mesh: Mesh, extents: tuple[Extent, ...], parts: tuple[int, ...]) -> tuple[int, ...]:
    cuts = [gcd(count, mesh.ranks) for count in parts]
    state = _state_with(mesh, extents, cuts)
    if state is None:
        kept = [1] * len(cuts)
        for label, most in enumerate(cuts):
            for cut in reversed(divisors(most)):  # the last one is 1, which is always possible
                kept[label] = cut
                state = _state_with(mesh, extents, kept)
                if state is not None:
                    break
    assert state is not None
    return state


def _state_with(
    mesh: Mesh, extents: Sequence[Extent], cuts: Sequence[int]
) -> tuple[int, ...] | None:
    """Return a state that cuts each label into just so many parts; None if there is none.

    The axes are given away one after another. What is known of those before is how many parts each
    label still lacks: so the sets of axes, of which there may be a million, are not looked at one
    by one. The first axes are taken if there is a choice, and the last label has the first ones.
    """
    if mesh.ranks % prod(cuts):
        return None
    labels = [label for label, cut in enumerate(cuts) if cut > 1]
    windows = [mesh.windows(extents[label]) for label in labels]
    begins = []  # for each label, the axes that are in another window than the one before
    for windows_of_label in windows:
        window_of = {axis: window for window in windows_of_label for axis in window}
        pairs = itertools.pairwise(sorted(window_of))
        begins.append({axis for before, axis in pairs if window_of[before] != window_of[axis]})
    # The parts that each label lacks → axes as bit masks: all that are used, then those of each
    # label, the last one first.
    wanted = tuple(cuts[label] for label in labels)
    found = {wanted: (0,) * (1 + len(labels))}
    for axis, length in enumerate(mesh.factors):
        beginning = []  # the labels of which a window begins here
        inside = []
        for number, windows_of_label in enumerate(windows):
            if axis in begins[number]:
                beginning.append(number)
            if any(axis in window for window in windows_of_label):
                inside.append(number)
        before = found
        found = {}
        for lacking, masks in before.items():
            # A label that is cut in an earlier window only in part cannot be cut further.
            if any(1 < lacking[number] < wanted[number] for number in beginning):
                continue
            choices = [(lacking, masks)]
            for number in inside:
                if lacking[number] % length == 0:
                    fewer = list(lacking)
                    fewer[number] //= length
                    more = list(masks)
                    more[0] |= 1 << axis
                    more[-1 - number] |= 1 << axis
                    choices.append((tuple(fewer), tuple(more)))
            for key, value in choices:
                found[key] = min(value, found.get(key, value))
    masks_found = found.get((1,) * len(labels))
    if masks_found is None:
        return None
    state = [len(extents)] * len(mesh.factors)
    for label, mask in zip(labels, reversed(masks_found), strict=False):
        for axis in range(len(mesh.factors)):
            if mask >> axis & 1:
                state[axis] = label
    return tuple(state)
