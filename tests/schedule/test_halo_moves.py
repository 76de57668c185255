"""What ranks send each other of a halo, and the bound on it that all of them know."""

import pytest
from paths import ROOT
from runtime.test_halos_beside import PROGRAMS

import einmpi
from einmpi.schedule.lower import lower


def halos(job, ranks):
    """Return the moves of all halos, by rank."""
    plan = einmpi.plan(job, ranks)
    found = []
    for rank in range(ranks):
        moves = [step.transfer for step in lower(plan, rank).steps if step.transfer is not None]
        found.append([each for each in moves if each.is_halo])
    return found


@pytest.mark.sampled(36)
@pytest.mark.parametrize("n", [23, 40, 64])
@pytest.mark.parametrize("ranks", [2, 3, 6, 7, 16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_member_moves_more_than_the_bound(name, ranks, n):
    shapes = {"U": (n, n)}
    if name == "other_operands":
        shapes |= {"W": (n, n), "c": (n,)}
    text = PROGRAMS[name].replace("n//", f"{n}//").replace("n-", f"{n}-")
    found = halos(einmpi.program(text, **shapes), ranks)
    for moves in zip(*found, strict=True):
        assert len({(each.max_elements, each.fits_at_once(100)) for each in moves}) == 1
        assert max(each.words for each in moves) <= moves[0].max_elements
        assert max(each.words_sent for each in moves) <= moves[0].max_elements


def test_the_border_of_a_block_is_sent_at_once_however_large_the_block_is():
    (moves, *_), *_ = halos(einmpi.load(ROOT / "jobs" / "plate.toml", n=4000), 16)
    assert moves.max_elements == 1002**2 - 1000**2
    assert moves.fits_at_once(2**19)
