"""The models in numpy and float64, from config.json and the tensors' own names and shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
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
    values = json.loads((folder / "config.json").read_text())
    assert values["rope_parameters"]["rope_type"] == "default"
    assert not values.get("sliding_window")
    model = ReferenceModel(
        tensors=tensors_of(folder),
        layers=values["num_hidden_layers"],
        heads=values["num_attention_heads"],
        groups=values["num_key_value_heads"],
        epsilon=values["rms_norm_eps"],
        theta=values["rope_parameters"]["rope_theta"],
    )
    return model.logits(tokens)


@dataclass(frozen=True)
class ReferenceModel:
    """A model by its tensors, which have the names and shapes of a checkpoint."""

    tensors: Mapping[str, np.ndarray]
    layers: int
    heads: int
    groups: int
    epsilon: float
    theta: float
    window: int | None = None
    window_layers: tuple[int, ...] = ()  # counted from 1

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Return the logits of every position."""
        embedding = self.tensors["model.embed_tokens.weight"].astype(np.float64)
        x = embedding[tokens]
        for layer in range(1, self.layers + 1):
            x = self.after_layer(layer, x)
        x = normalised(x, self.tensors["model.norm.weight"].astype(np.float64), self.epsilon)
        return x @ self.tensors.get("lm_head.weight", embedding).astype(np.float64).T

    def after_layer(self, layer: int, x: np.ndarray) -> np.ndarray:
        own = {}
        for name, array in self.tensors.items():
            if name.startswith(f"model.layers.{layer - 1}."):
                own[name.split(".", 3)[3]] = array.astype(np.float64)

        def linear(values: np.ndarray, name: str) -> np.ndarray:
            return values @ own[f"{name}.weight"].T + own.get(f"{name}.bias", 0.0)

        batch, sequence, _ = x.shape
        n = normalised(x, own["input_layernorm.weight"], self.epsilon)
        q = linear(n, "self_attn.q_proj").reshape(batch, sequence, self.heads, -1)
        k = linear(n, "self_attn.k_proj").reshape(batch, sequence, self.groups, -1)
        v = linear(n, "self_attn.v_proj").reshape(batch, sequence, self.groups, -1)
        if "self_attn.q_norm.weight" in own:
            q = normalised(q, own["self_attn.q_norm.weight"], self.epsilon)
            k = normalised(k, own["self_attn.k_norm.weight"], self.epsilon)
        q = turned(q, self.theta)
        k = turned(k, self.theta).repeat(self.heads // self.groups, axis=2)
        v = v.repeat(self.heads // self.groups, axis=2)
        scores = np.einsum("bshd,bthd->bhst", q, k) / np.sqrt(q.shape[-1])
        scores[:, :, self.unseen(layer, sequence)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        attended = np.einsum("bhst,bthd->bshd", weights, v).reshape(batch, sequence, -1)
        x = x + linear(attended, "self_attn.o_proj")
        n = normalised(x, own["post_attention_layernorm.weight"], self.epsilon)
        gate = linear(n, "mlp.gate_proj")
        return x + linear(gate / (1 + np.exp(-gate)) * linear(n, "mlp.up_proj"), "mlp.down_proj")

    def unseen(self, layer: int, sequence: int) -> np.ndarray:
        """Return which positions (columns) each position (row) does not see."""
        distance = np.subtract.outer(np.arange(sequence), np.arange(sequence))
        unseen = distance < 0
        if self.window is not None and layer in self.window_layers:
            unseen |= distance >= self.window
        return unseen
