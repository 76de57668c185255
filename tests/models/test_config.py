"""Configurations of checkpoints: keys of old and new files, missing values, rotary positions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoints import FOLDER, NAMES, tensors_of

import einmpi
from einmpi.models.config import ARCHITECTURES, NAMED, Config, read_config
from einmpi.models.programs import weights_of
from einmpi.models.rope import KINDS

SIZES = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 80,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def config_of(folder: Path, **changes: Any) -> Config:
    """Return the configuration of a folder with a config.json that has these changes."""
    (folder / "config.json").write_text(json.dumps({**SIZES, **changes}))
    return read_config(folder)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_all_tensors_of_the_files(name: str) -> None:
    tensors = tensors_of(FOLDER / name)
    config = read_config(FOLDER / name)
    weights = weights_of(config)
    assert {tensor for weight in weights.values() for tensor in weight.tensors} == set(tensors)
    numbers = 0
    for weight in weights.values():
        first = tensors[weight.tensors[0]]
        numbers += np.prod(weight.shape)
        if "*" in weight.tensor:
            assert weight.shape[1:] == first.shape
        elif weight.rows is None:
            assert np.prod(weight.shape) == first.size
            assert weight.shape[0] <= first.shape[0]
    assert numbers == sum(array.size for array in tensors.values())
    assert config.dtype == next(iter(tensors.values())).dtype


def test_missing_values_are_those_of_transformers(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert (config.groups, config.head_width, config.epsilon) == (4, 16, 1e-6)
    assert (config.dtype, config.positions) == ("float32", 2048)
    assert (config.stop_tokens, config.first_token) == ((2,), 1)
    assert config.rope.kind == "default" and config.rope.theta == 10000
    assert not (config.tied or config.qkv_bias or config.mlp_bias or config.head_norms)
    assert config_of(tmp_path, eos_token_id=None).stop_tokens == ()
    mistral = config_of(tmp_path, model_type="mistral", num_key_value_heads=2)
    assert (mistral.window, mistral.window_layers) == (4096, (1, 2, 3))
    without = config_of(tmp_path, model_type="mistral", num_key_value_heads=2, sliding_window=None)
    assert without.window is None and without.window_layers == ()
    qwen2 = config_of(tmp_path, model_type="qwen2", num_key_value_heads=None)
    assert qwen2.qkv_bias and not qwen2.output_bias and qwen2.window is None
    qwen3 = config_of(tmp_path, model_type="qwen3", num_key_value_heads=1)
    assert qwen3.head_norms and qwen3.head_width == 128 and not qwen3.qkv_bias


def test_windows_of_some_layers(tmp_path: Path) -> None:
    values = {"model_type": "qwen2", "num_key_value_heads": 4, "sliding_window": 5}
    assert config_of(tmp_path, **values).window is None
    values["use_sliding_window"] = True
    assert config_of(tmp_path, **values, max_window_layers=1).window_layers == (2, 3)
    assert config_of(tmp_path, **values, max_window_layers=9).window_layers == ()
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = config_of(tmp_path, **values, layer_types=kinds)
    assert [config.window_of(layer) for layer in (1, 2, 3)] == [5, None, 5]


def test_stop_tokens_of_generation_come_first(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert config_of(tmp_path, eos_token_id=3).stop_tokens == (7, 9)
    (tmp_path / "generation_config.json").write_text("{}")
    assert config_of(tmp_path, eos_token_id=3).stop_tokens == (3,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(einmpi.InputError, match=r"generation_config\.json: eos_token_id is"):
        config_of(tmp_path)


@pytest.mark.parametrize(
    "kind, parameters",
    [
        ("default", {}),
        ("linear", {"factor": 4.0}),
        ("llama3", LLAMA3),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 64}),
        ("yarn", {"factor": 8.0, "beta_fast": 16, "beta_slow": 2, "truncate": False}),
        ("yarn", {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8}),
        ("yarn", {"factor": 2.0, "attention_factor": 1.25}),
    ],
)
def test_old_and_new_keys_of_rope(tmp_path: Path, kind: str, parameters: dict[str, Any]) -> None:
    old_keys = {"rope_theta": 5000.0, "rope_scaling": {"type": kind, **parameters}}
    new_keys = {"rope_type": kind, "rope_theta": 5000.0, **parameters}
    old = config_of(tmp_path, torch_dtype="bfloat16", **old_keys)
    new = config_of(tmp_path, dtype="bfloat16", rope_parameters=new_keys)
    assert old == new
    assert old.rope.kind == kind and kind in KINDS


def test_llama3_rope_keeps_short_waves_and_stretches_long_ones(tmp_path: Path) -> None:
    plain = config_of(tmp_path).rope.inverse_frequencies(64).astype(np.float64)
    config = config_of(tmp_path, rope_scaling={"rope_type": "llama3", **LLAMA3})
    scaled = config.rope.inverse_frequencies(64)
    waves = 2 * np.pi / plain
    np.testing.assert_array_equal(scaled[waves < 16], plain[waves < 16].astype(np.float32))
    np.testing.assert_allclose(scaled[waves > 64], plain[waves > 64] / 8, rtol=1e-6)
    between = (waves > 16) & (waves < 64)
    assert between.any()
    share = (64 / waves[between] - 1) / 3
    expected = plain[between] * (share + (1 - share) / 8)
    np.testing.assert_allclose(scaled[between], expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rope_equals_that_of_transformers(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": 20000.0}
    if kind != "default":
        parameters["factor"] = 6.0
    if kind == "llama3":
        parameters.update(LLAMA3)
    if kind == "yarn":
        parameters["original_max_position_embeddings"] = 128
    config = config_of(tmp_path, rope_parameters=parameters, max_position_embeddings=2048)
    their_config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=2048,
        rope_parameters=parameters,
    )
    theirs = LlamaRotaryEmbedding(their_config)
    own = config.rope.inverse_frequencies(config.head_width)
    np.testing.assert_allclose(own, theirs.inv_freq.numpy(), rtol=3e-7)
    assert config.rope.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "mamba"}, 'model_type is "mamba"; expected one of llama, mistral'),
        ({"model_type": None}, "model_type is missing; expected one of llama, mistral"),
        ({"vocab_size": True}, "vocab_size is true; expected a positive integer"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0; expected a positive integer"),
        ({"rms_norm_eps": "small"}, 'rms_norm_eps is "small"; expected a positive number'),
        ({"num_hidden_layers": 10**9}, "is 1000000000; expected an integer from 1 to 1000"),
        ({"hidden_size": 10**400}, "expected an integer from 1 to"),
        ({"rms_norm_eps": 10**400}, "expected a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN; expected a positive number"),
        ({"rope_theta": 1}, "rope_theta is 1; expected a number above 1"),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            "rope_scaling.high_freq_factor is 1.0; expected a number above low_freq_factor",
        ),
        ({"hidden_act": "relu"}, 'hidden_act is "relu"; expected one of silu, gelu_pytorch_tanh'),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "is true; expected false"),
        (
            {"model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 4}
            | {"mlp_only_layers": [0]},
            "mlp_only_layers is [0]; expected []",
        ),
        (
            {"model_type": "qwen3_moe", "num_key_value_heads": 4, "decoder_sparse_step": 2},
            "decoder_sparse_step is 2; expected 1",
        ),
        (
            {"model_type": "mixtral", "num_key_value_heads": 4, "num_experts_per_tok": 9},
            "num_experts_per_tok is 9; expected an integer from 1 to 8",
        ),
        (
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor is 0.5; expected 1",
        ),
        (
            {"model_type": "phi3", "partial_rotary_factor": 0.2},
            "partial_rotary_factor is 0.2; expected a share of a head that is an even number",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}},
            "rope_scaling.short_factor is [1]; expected a list of 8 positive numbers",
        ),
        ({"rope_parameters": {"rope_type": 3}}, "rope_parameters.rope_type is 3; expected one of"),
    ],
)
def test_wrong_values(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(einmpi.InputError) as caught:
        config_of(tmp_path, **changes)
    assert message in str(caught.value)
    assert "did you mean" not in str(caught.value)  # no person has written config.json
    assert str(caught.value).startswith(f"{tmp_path}/config.json: ")


def test_a_file_of_brackets(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 10**6)
    with pytest.raises(einmpi.InputError, match="it is not JSON"):
        read_config(tmp_path)


def test_named_models() -> None:
    assert set(NAMED) == {"7B", "13B", "30B", "65B"}
    for billions, config in zip((6.7, 13.0, 32.5, 65.3), NAMED.values(), strict=True):
        numbers = sum(np.prod(weight.shape) for weight in weights_of(config).values())
        assert numbers / 1e9 == pytest.approx(billions, abs=0.05)
        assert config.model_type in ARCHITECTURES


@pytest.mark.parametrize("key", ["beta_fast", "beta_slow"])
def test_a_beta_of_yarn_is_positive(tmp_path, key):
    rope = {"rope_type": "yarn", "factor": 4.0, key: 0}
    with pytest.raises(einmpi.InputError, match=f"{key} is 0; expected a positive number"):
        config_of(tmp_path, rope_parameters=rope)


def test_a_stop_token_too_large(tmp_path):
    with pytest.raises(
        einmpi.InputError, match=r"eos_token_id is 1000.*; expected a token's number"
    ):
        config_of(tmp_path, eos_token_id=10**30)
