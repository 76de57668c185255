"""Programs that are kept: how many, for which lengths of prompts, and within a memory limit."""

import re
from pathlib import Path

import numpy as np
import pytest

from einmpi.comm.threads import run_threads
from einmpi.errors import InputError
from einmpi.models import programs as known_programs
from einmpi.models.llama import load
from einmpi.models.sampling import rounded_length
from einmpi.planner.text.explain import as_json

CHECKPOINTS = Path(__file__).parent / "checkpoints"
LLAMA = CHECKPOINTS / "llama"


def generated(ranks, memory=None, folder=LLAMA):
    def generate(comm):
        return load(folder, memory=memory, comm=comm).generate([1, 2, 3], new=2)[0].tolist()

    return run_threads(ranks, generate)


def test_lengths_are_rounded_up_by_an_eighth_at_most():
    lengths = set()
    for length in range(1, 2049):
        rounded = rounded_length(length)
        assert length <= rounded <= length * 9 / 8
        assert rounded_length(rounded) == rounded
        lengths.add(rounded)
    assert len(lengths) == 72


def test_prompts_of_similar_lengths_share_a_program():
    model = load(LLAMA)
    for length in (33, 34, 36):
        (tokens,) = model.generate([5] * length, new=3)
        logits = model.logits([5] * length).gather()
        assert tokens[0] == logits.argmax()
    kinds = [key[0] for key in model.programs.compiled]
    assert sorted(kinds) == ["decode", "prefill", "prefill", "prefill", "prefill"]


def test_the_programs_used_last_are_kept(monkeypatch):
    monkeypatch.setattr(known_programs, "MOST_PROGRAMS", 2)
    model = load(LLAMA)
    expected = {}
    for length in (1, 2, 1, 3):
        expected[length] = model.logits([7] * length).gather()
    assert [key[2] for key in model.programs.compiled] == [1, 3]
    np.testing.assert_array_equal(model.logits([7, 7]).gather(), expected[2])
    assert [key[2] for key in model.programs.compiled] == [3, 2]
    blocks = [each.residents for _, each in model.programs.compiled.values()]
    assert blocks[0] is blocks[1]


def test_a_prompt_that_fills_all_positions():
    model = load(LLAMA)
    prompt = np.arange(256) % 80
    (tokens,) = model.generate(prompt, new=1)
    assert tokens.tolist() == [model.logits(prompt).gather().argmax()]
    with pytest.raises(InputError, match="256 tokens in a prompt and 2 new ones; expected at most"):
        model.generate(prompt, new=2)


@pytest.mark.slow
def test_weights_are_loaded_in_each_call_where_steps_leave_no_memory_for_them():
    """Prompts leave room for all weights in 100 KiB; steps with the caches do not."""
    (expected,) = generated(1)
    assert generated(3, "100KiB") == [expected] * 3


@pytest.mark.slow
def test_a_refused_limit_comes_with_one_that_works():
    (expected,) = generated(1)
    with pytest.raises(InputError) as caught:
        generated(2, 3000)
    found = re.fullmatch(
        r"memory: no plan on 2 ranks was found below 3000 bytes a rank; "
        r"expected at least (\d+) bytes, or more ranks",
        str(caught.value),
    )
    assert generated(2, int(found[1])) == [expected] * 2


def test_a_limit_that_one_call_cannot_keep_does_not_end_the_model():
    model = load(LLAMA, memory="120KiB")
    first = model.logits([1, 2, 3]).gather()
    with pytest.raises(InputError, match="memory: no plan on 1 rank"):
        model.logits(np.ones((400, 200), int))
    np.testing.assert_array_equal(model.logits([1, 2, 3]).gather(), first)


def test_the_json_of_plans_says_what_stays_loaded():
    model = load(LLAMA, memory="100KiB")
    resident = as_json(model.plan(1, 2, 16))["resident"]
    assert resident["kept"] and resident["loaded_each_call"]
    names = {spec.name for spec in model.job(2, 16).inputs}
    assert {*resident["kept"], *resident["loaded_each_call"]} == names
    model.generate([1, 2], new=2)
    (_, decode) = model.programs.compiled["decode", 1, 64]
    ((plan, _),) = decode.ready.values()
    shared = as_json(plan)["shared"]
    assert shared["inputs"] and shared["words_more"] == 0


@pytest.mark.parametrize(
    ("folder", "settings", "message"),
    [
        (None, {}, "load: NoneType is not a path"),
        (b"x", {}, "load: bytes is not a path"),
        (LLAMA, {"dtype": 5}, "dtype: unknown dtype 5; expected one of"),
        (LLAMA, {"backend": None}, "backend: unknown backend None; expected one of"),
        (LLAMA, {"strategy": ["data"]}, "strategy: unknown strategy \\['data'\\]; expected one of"),
        (LLAMA, {"memory": 1.5}, "memory: '1.5' has no unit"),
        (LLAMA, {"random": "no"}, "random"),
    ],
)
def test_settings_of_a_wrong_kind(folder, settings, message):
    with pytest.raises(InputError, match=message):
        load(folder, **settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1), "batch: 0 requested; expected an integer from 1 on"),
        ((1.5, 1), "batch: 1.5 requested; expected an integer from 1 on"),
        ((1, "a"), "sequence: 'a' requested; expected an integer from 1 on"),
        ((1, True), "sequence: True requested; expected an integer from 1 on"),
    ],
)
def test_shapes_of_a_wrong_kind(arguments, message):
    model = load(LLAMA)
    with pytest.raises(InputError, match=message):
        model.job(*arguments)
    with pytest.raises(InputError, match=message):
        model.plan(2, *arguments)
