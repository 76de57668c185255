"""Architectures with more modules: experts, soft caps, norms after modules, joined weights, sinks.

Logits, greedy tokens and half precision against transformers, on several ranks.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architecture_reference import ArchitectureReference
from distributed import run_on_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import FOLDER, golden, job_of, weights

import einmpi
from einmpi.comm.base import ALONE
from einmpi.comm.threads import run_threads
from einmpi.errors import InputError
from einmpi.models.config import Config
from einmpi.models.llama import Model, Settings, load
from einmpi.models.programs import FREQUENCIES, decode_program, prefill_program, weights_of
from einmpi.models.rope import Rope

NAMES = [
    "mixtral",
    "qwen3_moe",
    "qwen3_moe_unscaled",
    "gemma2",
    "gemma3",
    "phi3",
    "phi3_longrope",
    "olmo2",
    "starcoder2",
    "gpt_oss",
]
WEIGHTS = "model.safetensors"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name, ranks", [(name, 1 + NAMES.index(name) % 4) for name in NAMES])
def test_logits_of_every_position(name: str, ranks: int) -> None:
    config, expected = golden(name)
    batch, sequence = expected["tokens"].shape
    program = prefill_program(config, batch, sequence, "float32", every=True)
    inputs = weights(config, FOLDER / name, "float32", sequence)
    done = run_on_threads(job_of(program), ranks, {**inputs, "tokens": expected["tokens"]})
    assert done.moved == done.plan.bytes_predicted
    np.testing.assert_allclose(done.outputs["logits"], expected["logits"], rtol=0, atol=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name, ranks", [(name, 1 + NAMES.index(name) % 3) for name in NAMES])
def test_greedy_tokens_equal_those_of_transformers(name: str, ranks: int) -> None:
    expected = golden(name)[1]

    def generate(comm: Any) -> list[np.ndarray]:
        return load(FOLDER / name, comm=comm).generate(expected["tokens"], new=64)

    for generated in run_threads(ranks, generate):
        np.testing.assert_array_equal(np.stack(generated), expected["greedy"])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("strategy", ["megatron", "data", "sequence", "sqrt"])
def test_logits_by_strategies(name: str, strategy: str) -> None:
    expected = golden(name)[1]

    def logits(comm: Any) -> np.ndarray:
        model = load(FOLDER / name, strategy=strategy, comm=comm)
        return model.logits(expected["tokens"], every=True).gather()

    for found in run_threads(4, logits):
        np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=1e-4)


def test_bfloat16_is_at_least_as_close_as_transformers() -> None:
    """A factor, gains that are added to 1, and norms around modules, in bfloat16."""
    folder = FOLDER / "gemma3_bf16"
    expected = golden("gemma3_bf16")[1]
    exact = load(folder, dtype="float64").logits(expected["tokens"], every=True).gather()
    own = load(folder).logits(expected["tokens"], every=True).gather().astype(np.float64)
    errors = np.abs(expected["logits"] - exact)
    assert np.sqrt(np.mean((own - exact) ** 2)) <= np.sqrt(np.mean(errors**2))


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_models_of_any_size(data: st.DataObject) -> None:
    """Modules in any combination, of sizes that nothing divides, on several ranks."""

    def size(name: str, most: int) -> int:
        return data.draw(st.integers(1, most), name)

    def maybe(name: str, value: Any) -> Any:
        return data.draw(st.sampled_from([None, value]), name)

    def truth(name: str) -> bool:
        return data.draw(st.booleans(), name)

    mlp = data.draw(st.sampled_from(["gated", "plain", "experts", "joined experts"]), "mlp")
    experts = size("experts", 5) if "experts" in mlp else 0
    groups = size("groups", 2)
    width = 2 * size("half a head", 3)
    norms = data.draw(st.sampled_from([(True, False), (True, True), (False, True)]), "norms")
    of_heads = data.draw(st.sampled_from([(False, False), (True, False), (False, True)]), "heads")
    config = Config(
        "llama",
        width=size("width", 7),
        layers=2,
        heads=groups * size("heads of a group", 2),
        groups=groups,
        head_width=width,
        hidden=size("hidden", 6),
        vocabulary=size("vocabulary", 9),
        tied=truth("tied"),
        rope=Rope(partial=data.draw(st.sampled_from([1.0, 2 / width]), "share")),
        qkv_bias=truth("qkv_bias"),
        output_bias=truth("output_bias"),
        mlp_bias=truth("mlp_bias"),
        pre_norms=norms[0],
        post_norms=norms[1],
        head_norms=of_heads[0],
        joint_norms=of_heads[1],
        norm=data.draw(st.sampled_from(["rms", "layer"]), "norm") if not any(of_heads) else "rms",
        gains_from_one=truth("gains_from_one"),
        mlp=mlp,
        activation=data.draw(st.sampled_from(["silu", "gelu_tanh"]), "activation"),
        experts=experts,
        chosen=data.draw(st.integers(1, experts), "chosen") if experts else 0,
        scaled_choice=truth("scaled_choice"),
        glu_limit=maybe("glu_limit", 0.7),
        glu_alpha=1.3,
        embedding_scale=data.draw(st.sampled_from([1.0, 2.5]), "embedding_scale"),
        attention_scalar=maybe("attention_scalar", 3.0),
        attention_cap=maybe("attention_cap", 1.5),
        logits_cap=maybe("logits_cap", 2.0),
        sinks=truth("sinks"),
        window=size("window", 5),
        window_layers=(2,),
        window_rope=maybe("window_rope", Rope(theta=50.0)),
    )
    if norms[1] and norms[0]:
        config = replace(config, model_type="gemma2")  # which names the tensors of these norms
    elif norms[1]:
        config = replace(config, model_type="olmo2")
    if norms[1] and config.norm == "layer":
        config = replace(config, norm="rms")
    batch, sequence = size("batch", 2), size("sequence", 6)
    rng = np.random.default_rng(5)
    arrays = {name: rng.normal(size=each.shape) for name, each in weights_of(config).items()}
    tokens = rng.integers(0, config.vocabulary, (batch, sequence))
    reference = ArchitectureReference(config, arrays)
    expected = np.stack([reference.logits(row) for row in tokens])
    program = prefill_program(config, batch, sequence, "float64", every=True)
    given_arrays = {**arrays, FREQUENCIES: config.frequencies(), "tokens": tokens}
    done = run_on_threads(job_of(program), size("ranks", 4), given_arrays)
    assert done.moved == done.plan.bytes_predicted
    np.testing.assert_allclose(done.outputs["logits"], expected, rtol=0, atol=1e-4)


# ---- experts ------------------------------------------------------------------------------------


def mixture(experts: int = 8, chosen: int = 2) -> Config:
    return Config(
        "mixtral",
        width=256,
        layers=1,
        heads=8,
        groups=2,
        head_width=32,
        hidden=512,
        vocabulary=100,
        mlp="experts",
        experts=experts,
        chosen=chosen,
    )


@pytest.mark.slow
def test_experts_are_cut_over_ranks() -> None:
    """Where ranks cannot keep all experts, each keeps some, and positions come to all of them.

    With as many chosen experts as ranks that is what moves if each position is sent to each of its
    experts by hand, and back. With more memory, two ranks keep the same experts.
    """
    ranks, batch, config = 4, 8, mixture(experts=8, chosen=4)
    by_hand = 2 * batch * config.chosen * config.width * (ranks - 1) // ranks
    for memory, parts, most in ((6, (1, 4), by_hand), (8, (2, 2), by_hand // 3)):
        settings = Settings("float32", "numpy", memory * 2**20, "eindecomp")
        model = Model("mixture", config, settings, ALONE, random=True)
        job = model.make_job(decode_program(config, batch, 64, "float32"))
        plan = einmpi.plan(job, ranks)
        assert (plan.parts("u_1")["b"], plan.parts("u_1")["e"]) == parts
        norms_and_logits = 8 * batch
        assert plan.words_predicted <= most + norms_and_logits
        megatron = einmpi.plan(job, ranks, strategy="megatron")
        assert megatron.parts("u_1")["e"] == ranks
        assert plan.words_predicted < megatron.words_predicted


def test_equal_scores_choose_the_first_experts() -> None:
    config, expected = golden("mixtral")
    program = prefill_program(config, 1, 3, "float32", hidden=(1,))
    inputs = weights(config, FOLDER / "mixtral", "float32")
    inputs["wr_1"] = np.zeros_like(inputs["wr_1"])  # all experts have the same score
    tokens = expected["tokens"][:1, :3]
    first = run_on_threads(job_of(program), 2, {**inputs, "tokens": tokens}).outputs["x_1"]
    for name in ("w1_1", "w2_1", "w3_1"):
        inputs[name] = inputs[name].copy()
        inputs[name][2:] = np.nan_to_num(inputs[name][2:]) * 3  # those that are not chosen
    again = run_on_threads(job_of(program), 1, {**inputs, "tokens": tokens}).outputs["x_1"]
    np.testing.assert_allclose(first, again, rtol=1e-5, atol=1e-5)


# ---- tensors of a checkpoint --------------------------------------------------------------------


def copy_of(name: str, folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    made = folder / name
    shutil.copytree(FOLDER / name, made)
    return made, load_file(made / WEIGHTS)


def refused(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        load(folder)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_experts_in_several_files(tmp_path: Path) -> None:
    folder, tensors = copy_of("mixtral", tmp_path)
    (folder / WEIGHTS).unlink()
    files = {}
    for part in range(3):
        file = f"model-{part}.safetensors"
        own = {name: tensors[name] for name in sorted(tensors)[part::3]}
        save_file(own, folder / file)
        files.update(dict.fromkeys(own, file))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    expected = golden("mixtral")[1]

    def logits(comm: Any) -> np.ndarray:
        return load(folder, comm=comm).logits(expected["tokens"][:, :6], every=True).gather()

    for found in run_threads(2, logits):
        np.testing.assert_allclose(found, expected["logits"][:, :6], rtol=0, atol=1e-4)
    entry = {"file": str(index), "tensor": "model.layers.0.*.experts.0.w1.weight"}
    with pytest.raises(InputError, match=r"there is no tensor model\.layers\.0\.0\.experts"):
        einmpi.program("Z[f,a] = sum(W[e,f,a])", inputs={"W": entry})


def test_experts_that_are_missing_or_differ(tmp_path: Path) -> None:
    folder, tensors = copy_of("mixtral", tmp_path)
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    save_file({**tensors, name: np.zeros((32, 15), np.float32)}, folder / WEIGHTS)
    assert f"{name} in {folder}/{WEIGHTS} has another shape or dtype than" in refused(folder)
    del tensors[name]
    save_file(tensors, folder / WEIGHTS)
    assert refused(folder).startswith(f"{folder}: there is no tensor {name}; expected")


def test_rows_of_a_tensor_that_are_missing(tmp_path: Path) -> None:
    folder, tensors = copy_of("phi3", tmp_path)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    save_file({**tensors, name: tensors[name][:60].copy()}, folder / WEIGHTS)
    text = refused(folder)
    assert (
        f"{name} has shape 60×32; expected dimensions that split into 2×8×32 in rows 48:64" in text
    )


def test_a_job_file_of_rows_and_experts(tmp_path: Path) -> None:
    from in_process import einmpi_here

    for name in ("phi3", "mixtral"):
        shutil.copytree(FOLDER / name, tmp_path / name)
        words = ["llama", name, "--job", f"{name}.toml", "--batch", "1", "--sequence", "4"]
        assert einmpi_here(tmp_path, words).returncode == 0
        done = einmpi_here(tmp_path, ["run", f"{name}.toml"])
        assert (done.returncode, done.stderr) == (0, "")
    assert 'rows = "32:48"' in (tmp_path / "phi3.toml").read_text()
    assert "experts.*.w1.weight" in (tmp_path / "mixtral.toml").read_text()


# ---- rotary positions ---------------------------------------------------------------------------


def test_frequencies_of_short_and_long_prompts() -> None:
    expected = golden("phi3_longrope")[1]
    model = load(FOLDER / "phi3_longrope")
    length = expected["short"].shape[1]
    found = model.logits(expected["tokens"][:, :length], every=True).gather()
    np.testing.assert_allclose(found, expected["short"], rtol=0, atol=1e-4)
    assert len(model.generate([1] * 12, new=5)[0]) == 5
    with pytest.raises(InputError, match="expected at most 17 in all, or a longer prompt"):
        model.generate([1] * 12, new=6)
