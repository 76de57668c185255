"""Make tiny checkpoints with transformers, and what transformers computes with them.

    python tests/models/make_checkpoints.py

writes tests/models/checkpoints/NAME: config.json, generation_config.json, safetensors, and
golden.npz with prompts, logits of every position, and 64 greedy tokens. It needs torch and
transformers, which the tests do not.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

FOLDER = Path(__file__).resolve().parent / "checkpoints"
NEW_TOKENS = 64
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 80,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.3,
}
GROUPED = {"num_key_value_heads": 2}
# A rope whose original context is shorter than the texts: scaling matters.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Name: architecture, dtype of the weights, what differs from SIZES.
VARIANTS = {
    "llama": ("llama", "float32", {}),
    "llama3_tied": (
        "llama",
        "float32",
        {**GROUPED, "rope_parameters": LLAMA3, "tie_word_embeddings": True},
    ),
    "llama_shards": ("llama", "float32", {"num_hidden_layers": 3, **GROUPED}),
    "llama_bf16": ("llama", "bfloat16", GROUPED),
    "llama_f16": ("llama", "float16", GROUPED),
    "llama_linear": ("llama", "float32", {"rope_parameters": LINEAR}),
    "llama_yarn": ("llama", "float32", {"rope_parameters": YARN, "head_dim": 16}),
    "llama_biases": ("llama", "float32", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", "float32", {**GROUPED, "sliding_window": 7}),
    "qwen2": (
        "qwen2",
        "float32",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", "float32", {**GROUPED, "head_dim": 12}),
    "qwen3_bf16": ("qwen3", "bfloat16", {**GROUPED, "head_dim": 16, "attention_bias": True}),
}
BATCH = 3
SEQUENCE = 20


def make(name: str) -> None:
    """Make one checkpoint and its golden results."""
    architecture, dtype_name, changes = VARIANTS[name]
    dtype = getattr(torch, dtype_name)
    torch.manual_seed(sorted(VARIANTS).index(name))
    config = CONFIG_MAPPING[architecture](**{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
            elif "bias" in parameter_name:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    model = model.to(dtype)
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    shard_size = "40KB" if name == "llama_shards" else "5GB"
    model.save_pretrained(folder, max_shard_size=shard_size)
    tokens = torch.randint(0, config.vocab_size, (BATCH, SEQUENCE))
    with torch.no_grad():
        logits = model(tokens).logits
        texts = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),  # token 0 is a token like others
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
    np.savez_compressed(
        folder / "golden.npz",
        tokens=tokens.numpy().astype(np.int16),
        logits=logits.float().numpy(),
        greedy=texts[:, SEQUENCE:].numpy().astype(np.int16),
    )


if __name__ == "__main__":
    for variant in VARIANTS:
        make(variant)
        print(variant, sum(path.stat().st_size for path in (FOLDER / variant).iterdir()))
