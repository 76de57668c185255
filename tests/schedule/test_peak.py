"""No run counts more memory than its schedule says, and no schedule more than its plan."""

from math import prod

import pytest
from distributed import NoValues
from hypothesis import given, settings
from hypothesis import strategies as st

import einmpi
from einmpi.comm.base import Comm
from einmpi.planner.strategies import STRATEGIES
from einmpi.runtime.backend import ShapeBackend
from einmpi.runtime.program import Program
from einmpi.schedule.lower import lower
from einmpi.schedule.memory import peak_bytes

PROGRAMS = {
    "Y[l,m:b,n:c] = X[l] * 2 + m + n": {"X": "a"},
    "Y[i,k] = sum(A[i,j] * B[j,k])": {"A": "ab", "B": "bc"},
    "T[i,k] = sum(A[i,j] * B[j,k])\nY[k,i] = T[i,k] + 1": {"A": "ab", "B": "bc"},
    "Y[i,j] = A[i,j] + A[j,i]": {"A": "aa"},
    "T[i] = max[j](A[i,j])\nY[j,i] = A[i,j] - T[i]": {"A": "ab"},
}
EXTENTS = (1, 2, 3, 5, 7, 8, 12, 13, 30, 64, 100)


def check_peaks(folder, program, sizes, parts, ranks, strategy, nodes=1):
    """Compare the three figures on every rank; return False if there is no such plan."""
    lines = [f'program = """{program}"""', "[sizes]"]
    lines += [f"{name} = {size}" for name, size in sizes.items()]
    for name, shape in PROGRAMS[program].items():
        lines += [f"[inputs.{name}]", f"shape = {list(shape)}", 'random = "normal"']
    lines += ["[outputs.Y]", 'file = "Y.h5"', 'dataset = "/Y"', f"parts = {list(parts)}"]
    (folder / "job.toml").write_text("\n".join(lines))
    try:
        job = einmpi.load(folder / "job.toml")
        plan = einmpi.plan(job, ranks=ranks, strategy=strategy, nodes=nodes)
    except einmpi.InputError:
        return False
    for rank in range(ranks):
        schedule = lower(plan, rank)
        comm = Comm(rank, ranks, plan.nodes)
        _, buffers = Program(schedule, ShapeBackend(), comm).run(NoValues())
        assert buffers.peak <= peak_bytes(schedule) <= plan.peak, f"rank {rank}"
    return True


@pytest.mark.parametrize(
    ("program", "extents", "parts", "ranks", "nodes"),
    [
        (0, (8, 1300, 13), (2, 1, 1), 10, 1),
        (0, (12, 30, 100), (1, 1, 5), 10, 2),
        (0, (64, 64, 1), (1, 4, 1), 20, 1),
        (2, (100, 2, 7), (5, 1), 15, 1),
    ],
)
def test_uneven_blocks_of_which_several_ranks_need_the_same(
    tmp_path, program, extents, parts, ranks, nodes
):
    """What a rank sends, once for each of them, can be more than it has before or afterwards."""
    text = list(PROGRAMS)[program]
    sizes = dict(zip("abc", extents, strict=True))
    assert check_peaks(tmp_path, text, sizes, parts, ranks, "eindecomp-paper", nodes)


@settings(max_examples=30)
@given(data=st.data())
def test_no_run_counts_more_than_planned(tmp_path_factory, data):
    program = data.draw(st.sampled_from(list(PROGRAMS)))
    sizes = {name: data.draw(st.sampled_from(EXTENTS), name) for name in "abc"}
    ndim = 3 if "l,m" in program else 2
    parts = [data.draw(st.sampled_from((1, 2, 3, 4, 5))) for _ in range(ndim)]
    ranks = prod(parts) * data.draw(st.integers(1, 8))
    if ranks > 20:
        ranks = prod(parts)
    nodes = data.draw(st.sampled_from([n for n in (1, 2) if ranks % n == 0]))
    strategy = data.draw(st.sampled_from(list(STRATEGIES)))
    check_peaks(tmp_path_factory.mktemp("peak"), program, sizes, parts, ranks, strategy, nodes)
