"""What steps say about themselves agrees with what the schedule, the runtime and reports need."""

import pytest
from schedule_checks import places_filled, verify

import einmpi
from einmpi.kernels.cpu import map_and_folds as grouping_rule
from einmpi.runtime.actions import ACTIONS
from einmpi.schedule.groups import with_groups
from einmpi.schedule.lower import lower
from einmpi.schedule.regions import FINAL_LAYOUT, Slot, operand_role
from einmpi.schedule.steps import Free, SlotStep, Spill, Step, TensorStep

SLOT = Slot("Z", (2, 3), "float64")


def kinds_of_steps(base=Step):
    """All classes of steps, without those that only others derive from."""
    found = set()
    for kind in base.__subclasses__():
        found |= kinds_of_steps(kind)
        if kind not in (SlotStep, TensorStep):
            found.add(kind)
    return found


def chain(ranks, **options):
    job = einmpi.program(
        "Y[i,k] = sum(A[i,j] * B[j,k])\nZ[i,l] = sum(Y[i,k] * C[k,l])",
        A=(64, 32),
        B=(32, 48),
        C=(48, 40),
    )
    plan = einmpi.plan(job, ranks, **options)
    return [lower(plan, rank) for rank in range(ranks)]


def grouped_schedule():
    text = "P[s,t] = softmax[t](T[s,t] * 2)\nZ[s,t] = P[s,t] + G[s]"
    job = einmpi.program(text, T=(2000, 3000), G=(2000,))
    return lower(einmpi.plan(job, 1), 0)


def test_every_kind_of_step_has_an_action():
    assert kinds_of_steps() == set(ACTIONS)


def test_a_slot_knows_its_tensor_and_its_role():
    """Whatever the tensor is called: nothing is read out of the name."""
    assert (SLOT.name, str(SLOT), SLOT.nbytes) == ("Z", "Z[2, 3]", 48)
    assert Slot("Z", (2,), "int8", FINAL_LAYOUT).name == "Z'"
    operand = Slot("x→y'", (2,), "int8", operand_role("V", 1))
    assert (operand.tensor, operand.name) == ("x→y'", "x→y'→V.1")
    assert Slot("Z", (2,), "int8") != Slot("Z", (2,), "int8", FINAL_LAYOUT)


@pytest.mark.parametrize(
    ("step", "answers"),
    [
        (Free(SLOT), {"frees"}),
        (Spill(SLOT, "place"), {"place"}),
        (Spill(SLOT, "evict"), {"evict"}),
        (Spill(SLOT, "drop"), {"drop"}),
        (Spill(SLOT, "fetch"), {"fetch", "allocates"}),
    ],
)
def test_steps_of_memory_concern_their_slot_alone(step, answers):
    found = set()
    given = {answer: getattr(step, answer) for answer in ("reads", "writes", "keeps", "frees")}
    given |= {action: step.spills(action) for action in ("place", "evict", "drop", "fetch")}
    for answer, slots in given.items():
        if slots == (SLOT,):
            found.add(answer)
        else:
            assert slots == ()
    if step.allocates({"Z"}) == (SLOT,):
        found.add("allocates")
    assert found == answers
    assert step.manages_memory and step.vertex == "Z"


@pytest.mark.parametrize("ranks", [1, 4])
def test_every_slot_that_is_not_kept_is_freed_once(ranks):
    for schedule in chain(ranks):
        written, kept, freed = set(), set(), []
        for step in schedule.steps:
            written.update(step.writes)
            kept.update(step.keeps)
            freed += step.frees
            assert set(step.writes) <= {slot for slot, _ in places_filled(step)} | set(step.reads)
        assert len(freed) == len(set(freed))
        assert set(freed) == written - kept


def test_what_is_written_in_the_slow_tier_takes_no_memory():
    (schedule,) = chain(1, memory=20_000)
    placed = set()
    for step in schedule.steps:
        placed.update(slot.name for slot in step.spills("place"))
        in_memory = {slot.name for slot in step.allocates(placed)}
        assert not in_memory & placed or step.spills("fetch")
        assert step.is_out_of_core == (step.working_bytes > 0)
    assert placed


def test_messages_have_a_receiver_that_expects_them():
    schedules = chain(4)
    sent, expected = [], []
    for schedule in schedules:
        for step in schedule.steps:
            assert (step.transfer is None) == (step.group == ())
            if step.transfer is not None:
                sent += [(schedule.rank, to) for to, _ in step.transfer.outgoing()]
                expected += [(source, schedule.rank) for source, _ in step.transfer.incoming()]
    assert sent and sorted(sent) == sorted(expected)


def test_a_group_answers_like_its_steps_one_after_another():
    single = grouped_schedule()
    grouped = with_groups(single, grouping_rule.cpu_grouping(fast_math=False))
    verify([grouped])
    groups = [step for step in grouped.steps if len(step.kernels) > 1]
    assert groups
    for group in groups:
        written, freed = set(), set()
        for step in group.steps:
            written.update(step.writes)
            freed.update(step.frees)
        assert group.inner == written & freed
        assert set(group.writes) == written - freed
        assert set(group.frees) == freed - written
        assert not set(group.reads) & written
