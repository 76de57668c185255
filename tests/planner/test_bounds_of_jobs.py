"""Bounds of the example jobs: of loops, too, whose tensors come back in the next step."""

import itertools

import pytest
from bound_cases import is_among
from paths import JOBS

import einmpi

NAMES = sorted(path.stem for path in JOBS.glob("*.toml"))
LOOPS = [name for name in NAMES if "[loop]" in (JOBS / f"{name}.toml").read_text()]


def steps_of(plan):
    return plan.loops or (plan,)


@pytest.mark.sampled(11)
@pytest.mark.parametrize("ranks", [*range(1, 9), 64])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "text"])  # a minute each
def test_there_is_a_bound_of_each_plan_that_moves_something(name, ranks):
    for plan in steps_of(einmpi.plan(einmpi.load(JOBS / f"{name}.toml"), ranks)):
        assert plan.lower_bound <= plan.words_predicted
        if plan.words_predicted:
            assert plan.lower_bound > 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 64])
@pytest.mark.parametrize("name", [name for name in LOOPS if name != "text"])
def test_no_plan_of_a_loop_moves_less_than_the_bound_of_another(name, ranks):
    job = einmpi.load(JOBS / f"{name}.toml")
    plans = []
    for strategy in ("eindecomp", "eindecomp-paper", "sqrt", "replicate"):
        plans.append(einmpi.plan(job, ranks, strategy=strategy))
    for plan, other in itertools.product(plans, plans):
        for step, other_step in zip(steps_of(plan), steps_of(other), strict=True):
            if is_among(other_step, step):
                assert step.lower_bound <= other_step.words_predicted
