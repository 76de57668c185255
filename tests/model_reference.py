"""The models in numpy and float64, from config.json and the tensors' own names and shapes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tiny_checkpoints import tensors_of


def normalised(x: np.ndarray, gain: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * gain


def turned(x: np.ndarray, theta: float) -> np.ndarray:
    """Rotate the halves of the last dimension by angles that grow with the position."""
    sequence, width = x.shape[1], x.shape[-1]
    frequencies = theta ** (-np.arange(0, width, 2) / width)
    angles = np.outer(np.arange(sequence), frequencies)[:, None]
    first, second = np.split(x, 2, axis=-1)
    cosine, sine = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1)


def reference_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Return the logits of every position, for models with rotary positions of the default kind."""
    config = json.loads((folder / "config.json").read_text())
    tensors = {name: array.astype(np.float64) for name, array in tensors_of(folder).items()}
    rope = config["rope_parameters"]
    assert rope["rope_type"] == "default"
    epsilon = config["rms_norm_eps"]
    heads = config["num_attention_heads"]
    groups = config["num_key_value_heads"]
    batch, sequence = tokens.shape
    later = np.triu(np.ones((sequence, sequence), bool), 1)
    x = tensors["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        own = {}
        for name, array in tensors.items():
            if name.startswith(f"model.layers.{layer}."):
                own[name.split(".", 3)[3]] = array

        def linear(values: np.ndarray, name: str, own: dict[str, np.ndarray] = own) -> np.ndarray:
            return values @ own[f"{name}.weight"].T + own.get(f"{name}.bias", 0.0)

        n = normalised(x, own["input_layernorm.weight"], epsilon)
        q = linear(n, "self_attn.q_proj").reshape(batch, sequence, heads, -1)
        k = linear(n, "self_attn.k_proj").reshape(batch, sequence, groups, -1)
        v = linear(n, "self_attn.v_proj").reshape(batch, sequence, groups, -1)
        if "self_attn.q_norm.weight" in own:
            q = normalised(q, own["self_attn.q_norm.weight"], epsilon)
            k = normalised(k, own["self_attn.k_norm.weight"], epsilon)
        q = turned(q, rope["rope_theta"])
        k = turned(k, rope["rope_theta"]).repeat(heads // groups, axis=2)
        v = v.repeat(heads // groups, axis=2)
        scores = np.einsum("bshd,bthd->bhst", q, k) / np.sqrt(q.shape[-1])
        scores[:, :, later] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        attended = np.einsum("bhst,bthd->bshd", weights, v).reshape(batch, sequence, -1)
        x = x + linear(attended, "self_attn.o_proj")
        n = normalised(x, own["post_attention_layernorm.weight"], epsilon)
        gate = linear(n, "mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(n, "mlp.up_proj"), "mlp.down_proj")
    x = normalised(x, tensors["model.norm.weight"], epsilon)
    return x @ tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).T
