"""Generated tokens against those of transformers; prompts, seeds, stop tokens, jobs and plans."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from model_reference import normalised

import einmpi
from einmpi.comm.threads import run_threads
from einmpi.errors import InputError
from einmpi.models.llama import ENDED, load

CHECKPOINTS = Path(__file__).parent / "checkpoints"
LLAMA = CHECKPOINTS / "llama"


def golden(name="llama"):
    with np.load(CHECKPOINTS / name / "golden.npz") as found:
        return {key: found[key].astype(found[key].dtype.newbyteorder("=")) for key in found}


@pytest.fixture(scope="module")
def model():
    return load(LLAMA)


@pytest.mark.parametrize(
    "name", ["llama", "llama_shards", pytest.param("qwen3", marks=pytest.mark.slow)]
)
def test_greedy_tokens_equal_those_of_transformers(name):
    expected = golden(name)
    generated = load(CHECKPOINTS / name).generate(expected["tokens"], new=64)
    np.testing.assert_array_equal(np.stack(generated), expected["greedy"])


@pytest.mark.slow
def test_greedy_tokens_on_four_ranks():
    expected = golden()

    def generate(comm):
        return load(LLAMA, comm=comm).generate(expected["tokens"], new=64)

    for generated in run_threads(4, generate):
        np.testing.assert_array_equal(np.stack(generated), expected["greedy"])


def test_logits_and_hidden_states(model):
    expected = golden()
    tokens = expected["tokens"]
    every, states = model.prefill(tokens, every=True, layers=[2, 0])
    np.testing.assert_allclose(every.gather(), expected["logits"], rtol=0, atol=1e-4)
    last = model.logits(tokens).gather()
    np.testing.assert_allclose(last, expected["logits"][:, -1], rtol=0, atol=1e-4)
    embedding = einmpi.open_dataset(LLAMA / "model.safetensors", "model.embed_tokens.weight")
    np.testing.assert_array_equal(states[1].gather(), embedding.gather()[tokens])
    np.testing.assert_array_equal(model.hidden(tokens, [2])[0].gather(), states[0].gather())


def test_the_last_hidden_states_are_those_of_transformers(model):
    # In transformers the last one is after the model's norm: the logits are its product alone.
    expected = golden()
    tokens = expected["tokens"]
    tensors = {}
    for name in ("lm_head.weight", "model.norm.weight"):
        tensors[name] = einmpi.open_dataset(LLAMA / "model.safetensors", name).gather()
    one, last = (state.gather() for state in model.hidden(tokens, [1, 2]))
    logits = last @ tensors["lm_head.weight"].T
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)
    same, plain = (state.gather() for state in model.hidden(tokens, [1, 2], before_norm=True))
    np.testing.assert_array_equal(one, same)
    normed = normalised(plain, tensors["model.norm.weight"], model.config.epsilon)
    # float32 in another order: 32 terms of about 1.
    np.testing.assert_allclose(normed, last, rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="before_norm: layer 2 is not asked for"):
        model.hidden(tokens, [1], before_norm=True)


@pytest.mark.slow
def test_prompts_of_different_lengths_equal_single_prompts(model):
    tokens = golden()["tokens"]
    lengths = [20, 3, 11]
    together = model.generate(tokens, new=12, lengths=lengths)
    as_lists = model.generate([row[:n] for row, n in zip(tokens, lengths, strict=True)], new=12)
    last = model.logits(tokens, lengths).gather()
    for number, length in enumerate(lengths):
        prompt = tokens[number, :length]
        (alone,) = model.generate(prompt, new=12)
        np.testing.assert_array_equal(together[number], alone)
        np.testing.assert_array_equal(as_lists[number], alone)
        np.testing.assert_allclose(last[number], model.logits(prompt).gather()[0], atol=1e-5)


class Tensor:
    """Tokens as torch has them, whose `gather` is not that of a DistArray."""

    def __init__(self, values):
        self.values = values

    def gather(self, dim, index):
        raise AssertionError("nobody asks")

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()


def test_tokens_of_other_libraries(model):
    tokens = golden()["tokens"].astype(np.int64)
    expected = model.logits(tokens).gather()
    for given in (Tensor(tokens), einmpi.DistArray.from_global(tokens)):
        np.testing.assert_array_equal(model.logits(given).gather(), expected)


@pytest.mark.slow
def test_a_seed_gives_the_same_tokens_on_any_number_of_ranks(model):
    tokens = golden()["tokens"][:2, :6]
    settings = {"new": 5, "temperature": 1.3, "top_k": 40, "top_p": 0.95}
    expected = np.stack(model.generate(tokens, seed=5, **settings))
    assert (expected != np.stack(model.generate(tokens, seed=6, **settings))).any()
    for ranks in (2, 3):
        for found in run_threads(
            ranks, lambda comm: load(LLAMA, comm=comm).generate(tokens, seed=5, **settings)
        ):
            np.testing.assert_array_equal(np.stack(found), expected)


def test_generation_ends_at_stop_tokens(model):
    expected = golden()
    greedy = expected["greedy"]
    stop = int(greedy[0, 4])
    steps = list(model.stream(expected["tokens"], new=64, stop=[stop]))
    generated = model.generate(expected["tokens"], new=64, stop=[stop])
    for row, tokens in zip(greedy, generated, strict=True):
        ends = np.flatnonzero(row == stop)
        count = ends[0] + 1 if len(ends) else 64
        np.testing.assert_array_equal(tokens, row[:count])
    assert len(steps) == max(map(len, generated))
    columns = np.stack(steps, axis=1)
    for column, tokens in zip(columns, generated, strict=True):
        assert (column[len(tokens) :] == ENDED).all()


def test_the_models_own_stop_tokens(tmp_path):
    expected = golden()
    folder = tmp_path / "model"
    shutil.copytree(LLAMA, folder)
    settings = json.loads((folder / "generation_config.json").read_text())
    stop = int(expected["greedy"][1, 2])
    settings["eos_token_id"] = [stop, 79]
    (folder / "generation_config.json").write_text(json.dumps(settings))
    (generated,) = load(folder).generate(expected["tokens"][1], new=20)
    count = int(np.flatnonzero(np.isin(expected["greedy"][1], [stop, 79]))[0]) + 1
    np.testing.assert_array_equal(generated, expected["greedy"][1, :count])


def test_no_new_tokens(model):
    assert list(model.stream([[1, 2], [3]], new=0)) == []
    generated = model.generate([[1, 2], [3]], new=0)
    assert [tokens.tolist() for tokens in generated] == [[], []]
    assert [tokens.dtype for tokens in generated] == [np.int64, np.int64]


def test_tokens_are_given_to_a_callback_step_by_step(model):
    seen = []
    (generated,) = model.generate([1, 2, 3], new=5, on_tokens=lambda step: seen.append(step[0]))
    assert seen == generated.tolist()


def test_caches_are_updated_in_place(model):
    model.generate([1, 2, 3], new=3)
    decode = model.programs.compiled["decode", 1, 64][1]
    ((plan, _),) = decode.ready.values()
    assert len(plan.in_place) == 2 * model.config.layers


@pytest.mark.parametrize("random", [False, True])
def test_all_programs_of_a_model_share_the_weights(random):
    found = load(LLAMA, random=random)
    found.generate([1, 2, 3], new=2)
    found.logits([[1, 2]])
    first, *others = [compiled.residents.blocks for _, compiled in found.programs.compiled.values()]
    assert len(others) == 2 and len(first) == 9 * found.config.layers + 3
    for blocks in others:
        assert blocks.keys() == first.keys()
        for name, block in blocks.items():
            assert block is first[name]


def test_less_memory_than_the_weights_need():
    expected = golden()
    model = load(LLAMA, memory="120KiB")
    generated = model.generate(expected["tokens"], new=6)
    np.testing.assert_array_equal(np.stack(generated), expected["greedy"][:, :6])
    for _, compiled in model.programs.compiled.values():
        assert 0 < len(compiled.residents.blocks) < 9 * model.config.layers + 3
        assert compiled.measured.peak <= 120 * 1024


def test_half_precision_and_random_weights():
    expected = golden("llama_bf16")
    logits = load(CHECKPOINTS / "llama_bf16").logits(expected["tokens"], every=True).gather()
    difference = np.abs(logits.astype(np.float64) - expected["logits"]).max()
    assert difference < 0.1 * np.abs(expected["logits"]).max()
    random = load(LLAMA, random=True)
    (generated,) = random.generate([1, 2], new=4)
    assert len(generated) == 4 and generated.max() < 80


@pytest.mark.parametrize("name", ["llama_bf16", "llama_f16"])
def test_weights_are_converted_while_they_are_read(name):
    expected = golden(name)
    model = load(CHECKPOINTS / name, dtype="float32")
    logits = model.logits(expected["tokens"], every=True).gather()
    assert logits.dtype == np.float32
    difference = np.abs(logits - expected["logits"]).max()
    assert difference < 0.05 * np.abs(expected["logits"]).max()
    exact = load(CHECKPOINTS / name, dtype="float64").logits(expected["tokens"], every=True)
    np.testing.assert_allclose(logits, exact.gather(), rtol=0, atol=1e-4)


def test_the_plan_and_the_job_of_a_model(model):
    job = model.job(2, 16)
    assert job.graph["logits"].bound == (2, 80)
    plan = model.plan(4, 2, 16, strategy="megatron")
    assert (plan.ranks, plan.strategy) == (4, "megatron")
    assert model.plan(4, 2, 16).words_predicted <= plan.words_predicted


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": [1, 80]}, "tokens: token 80 is outside of the vocabulary"),
        ({"tokens": [-1]}, "tokens: token -1 is outside of the vocabulary"),
        ({"tokens": []}, "tokens: there are no prompts"),
        ({"tokens": [[1], []]}, "tokens: prompt 1 is empty"),
        ({"tokens": [1.5]}, "tokens: a prompt is float64"),
        ({"tokens": [1] * 200, "new": 58}, "tokens: 200 tokens in a prompt and 58 new ones"),
        ({"tokens": [[1, 2]], "lengths": [3]}, "lengths: prompt 0 has length 3"),
        ({"tokens": [[1, 2]], "lengths": [1, 2]}, "lengths: they are int64[2]"),
        ({"tokens": [1], "new": -1}, "new: -1 tokens requested"),
        ({"tokens": [1], "top_p": 0}, "top_p: 0 requested"),
        ({"tokens": [1], "top_k": -1}, "top_k: -1 tokens requested"),
        ({"tokens": [1], "temperature": float("nan")}, "temperature: nan requested"),
        ({"tokens": [1], "top_p": 0.5}, "top_p: the likeliest token is chosen"),
        ({"tokens": [1], "seed": -1}, "seed: -1 requested"),
        ({"tokens": [1], "seed": 1.5}, "seed: 1.5 requested"),
        ({"tokens": 5}, "tokens: a prompt is int64 with 0 dimensions"),
        ({"tokens": None}, "tokens: a prompt is object with 0 dimensions"),
        ({"tokens": [1], "stop": 2}, "stop: 2 requested"),
        ({"tokens": [1], "stop": ["end"]}, "stop: ['end'] requested"),
        ({"tokens": [1], "stop": [[1], [2, 3]]}, "stop: [[1], [2, 3]] requested"),
    ],
)
def test_wrong_arguments(model, settings, message):
    with pytest.raises(InputError) as caught:
        model.generate(**settings)
    assert str(caught.value).startswith(message)


def test_wrong_layers_and_settings(model):
    for layers, message in (([3], "layers: there is no layer 3"), ([1, 1], "layers: [1, 1]")):
        with pytest.raises(InputError) as caught:
            model.hidden([1], layers)
        assert str(caught.value).startswith(message)
    for settings, message in (
        ({"dtype": "int8"}, "dtype: unknown dtype 'int8'"),
        ({"backend": "torch"}, "backend: unknown backend 'torch'"),
        ({"strategy": "best"}, "strategy: unknown strategy 'best'"),
        ({"memory": "much"}, "memory: "),
    ):
        with pytest.raises(InputError) as caught:
            load(LLAMA, **settings)
        assert str(caught.value).startswith(message)


def test_numbers_of_numpy_are_taken(model):
    settings = {"new": np.int64(3), "seed": np.int64(2), "temperature": np.float32(0.5)}
    plain = model.generate([1, 2], new=3, seed=2, temperature=0.5)
    np.testing.assert_array_equal(model.generate(range(1, 3), **settings)[0], plain[0])


@pytest.mark.parametrize("stop", [[10], (10,), np.array([10], np.uint8)])
def test_a_sequence_ends_at_once(model, stop):
    assert model.generate([1, 2], new=3, stop=stop)[0].tolist() == [10]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"tokens": [[[1, 2], [3]]]}, "tokens: numbers and lists"),
        ({"tokens": [1, [2]]}, "tokens: numbers and lists"),
        ({"tokens": np.array([[2**63 + 3]], np.uint64)}, "tokens: token 9223372036854775811 is"),
        ({"lengths": [[1], [2, 3]]}, "lengths: numbers and lists"),
        ({"stop": "abc"}, "stop: 'abc' requested"),
        ({"stop": [1.5]}, r"stop: \[1.5\] requested"),
        ({"stop": [None]}, r"stop: \[None\] requested"),
    ],
)
def test_arguments_of_a_wrong_kind(model, arguments, message):
    with pytest.raises(InputError, match=message):
        model.generate(**{"tokens": [[1, 2]], "new": 1, **arguments})


@pytest.mark.parametrize("layers", [1, ["a"], [1.5]])
def test_layers_of_a_wrong_kind(model, layers):
    with pytest.raises(InputError, match=r"layers: .* requested; expected a list of integers"):
        model.hidden([1, 2], layers)
