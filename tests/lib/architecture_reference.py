"""Models of all architectures in numpy, from a Config and the inputs of its program.

Position by position and expert by expert, where the programs have labels and masks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from einmpi.models.config import Config


def activated(config: Config, x: np.ndarray) -> np.ndarray:
    if config.activation == "silu":
        return x / (1 + np.exp(-x))
    return x * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


class ArchitectureReference:
    """A model with weights of any size."""

    def __init__(self, config: Config, weights: Mapping[str, np.ndarray]) -> None:
        self.config = config
        self.weights = weights

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Return the logits of every position of one prompt."""
        config, weights = self.config, self.weights
        x = weights["emb"][tokens] * config.embedding_scale
        for k in range(1, config.layers + 1):
            x = self.layer(k, x)
        x = self.norm(x, "gf")
        found = x @ weights["emb" if config.tied else "lm"].T
        cap = config.logits_cap
        return found if cap is None else cap * np.tanh(found / cap)

    def norm(self, x: np.ndarray, gain: str) -> np.ndarray:
        """Normalise the last dimension."""
        config = self.config
        factor = self.weights[gain].reshape(-1) + (1 if config.gains_from_one else 0)
        if config.norm == "layer":
            x = x - x.mean(-1, keepdims=True)
        scaled = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.epsilon) * factor
        return scaled + self.weights[gain.replace("g", "gb")] if config.norm == "layer" else scaled

    def linear(self, x: np.ndarray, end: str) -> np.ndarray:
        """Multiply by a matrix [computed, summed], and add its bias if there is one."""
        weight = self.weights[f"w{end}"]
        product = x @ weight.reshape(-1, x.shape[-1]).T
        return product + self.weights.get(f"b{end}", np.zeros(())).reshape(-1)

    def layer(self, k: int, x: np.ndarray) -> np.ndarray:
        config = self.config
        n = self.norm(x, f"g1_{k}") if config.pre_norms else x
        change = self.attention(k, n)
        x = x + (self.norm(change, f"g3_{k}") if config.post_norms else change)
        n = self.norm(x, f"g2_{k}") if config.pre_norms else x
        change = np.stack([self.mlp(k, row) for row in n])
        return x + (self.norm(change, f"g4_{k}") if config.post_norms else change)

    def attention(self, k: int, n: np.ndarray) -> np.ndarray:
        config = self.config
        q, keys, values = (self.linear(n, f"{end}_{k}") for end in "qkv")
        if config.joint_norms:
            q, keys = self.norm(q, f"gq_{k}"), self.norm(keys, f"gk_{k}")
        q = q.reshape(len(n), config.heads, -1)
        keys, values = (array.reshape(len(n), config.groups, -1) for array in (keys, values))
        if config.head_norms:
            q, keys = self.norm(q, f"gq_{k}"), self.norm(keys, f"gk_{k}")
        q, keys = self.turned(k, q), self.turned(k, keys)
        shared = config.heads // config.groups
        out = np.empty_like(q)
        for position in range(len(n)):
            first = max(0, position + 1 - (config.window_of(k) or position + 1))
            for head in range(config.heads):
                seen = keys[first : position + 1, head // shared]
                scores = seen @ q[position, head]
                scores = scores / np.sqrt(config.attention_scalar or config.head_width)
                if config.attention_cap is not None:
                    scores = config.attention_cap * np.tanh(scores / config.attention_cap)
                if config.sinks:
                    scores = np.append(scores, self.weights[f"sink_{k}"].reshape(-1)[head])
                powers = np.exp(scores - scores.max())
                powers = (powers / powers.sum())[: len(seen)]
                out[position, head] = powers @ values[first : position + 1, head // shared]
        return self.linear(out.reshape(len(n), -1), f"o_{k}")

    def turned(self, k: int, x: np.ndarray) -> np.ndarray:
        """Turn pairs of numbers half of the turned width apart."""
        config = self.config
        is_local = config.window_rope is not None and config.window_of(k) is not None
        rope = config.window_rope if is_local else config.rope
        assert rope is not None
        frequencies = rope.inverse_frequencies(config.head_width, len(x))
        half = len(frequencies)
        out = x.copy()
        for position in range(len(x)):
            angles = np.float32(position) * frequencies
            cosine = np.cos(angles) * rope.attention_factor
            sine = np.sin(angles) * rope.attention_factor
            first, second = x[position, :, :half], x[position, :, half : 2 * half]
            out[position, :, :half] = first * cosine - second * sine
            out[position, :, half : 2 * half] = second * cosine + first * sine
        return out

    def mlp(self, k: int, n: np.ndarray) -> np.ndarray:
        """Return what the MLP makes of one position."""
        config, weights = self.config, self.weights
        if not config.experts:
            inside = activated(config, self.linear(n, f"1_{k}"))
            if config.mlp == "gated":
                inside = inside * self.linear(n, f"3_{k}")
            return self.linear(inside, f"2_{k}")
        scores = self.linear(n, f"r_{k}")
        chosen = np.argsort(-scores, kind="stable")[: config.chosen]
        shares = np.exp(scores - scores.max())
        shares = shares / shares[chosen if config.scaled_choice else slice(None)].sum()
        out = np.zeros_like(n)
        for expert in chosen:
            first, last = weights[f"w1_{k}"][expert], weights[f"w2_{k}"][expert]
            if config.mlp == "experts":
                inside = activated(config, first @ n) * (weights[f"w3_{k}"][expert] @ n)
                out += shares[expert] * (last @ inside)
                continue
            both = np.einsum("a,afz->fz", n, first) + weights[f"b1_{k}"][expert]
            gate, up = both.T
            if config.glu_limit is not None:
                gate = np.minimum(gate, config.glu_limit)
                up = np.clip(up, -config.glu_limit, config.glu_limit)
            inside = (up + 1) * gate / (1 + np.exp(-gate * config.glu_alpha))
            out += shares[expert] * (inside @ last + weights[f"b2_{k}"][expert])
        return out
