"""Make tiny checkpoints with transformers, and what transformers computes with them.

    python tests/models/make_checkpoints.py [NAME …]

writes tests/models/checkpoints/NAME: config.json, generation_config.json, safetensors, and
golden.npz with prompts, logits of every position, and 64 greedy tokens. It needs torch and
transformers, which the tests do not.
"""

from __future__ import annotations

import shutil
import sys
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
# Architectures with more modules. Their seeds do not depend on what is above.
EXPERTS = {"num_experts_per_tok": 2, "intermediate_size": 16}
GEMMA = {**GROUPED, "head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 12}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.0, 2.0, 5.0],
    "partial_rotary_factor": 0.75,
}
LOCAL_AND_GLOBAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0},
}
LATER = {
    "mixtral": ("mixtral", "float32", {**GROUPED, **EXPERTS, "num_local_experts": 5}),
    "qwen3_moe": (
        "qwen3_moe",
        "float32",
        {
            **GROUPED,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "num_experts": 6,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe_unscaled": (
        "qwen3_moe",
        "float32",
        {
            **GROUPED,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "num_experts": 4,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 9,
        },
    ),
    "gemma2": (
        "gemma2",
        "float32",
        # Caps that are felt.
        {
            **GEMMA,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "gemma3_text",
        "float32",
        {
            **GEMMA,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": LOCAL_AND_GLOBAL,
        },
    ),
    "phi3": ("phi3", "float32", {**GROUPED, "sliding_window": 9}),
    "phi3_longrope": (
        "phi3",
        "float32",
        {
            **GROUPED,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 16,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("olmo2", "float32", GROUPED),
    "starcoder2": (
        "starcoder2",
        "float32",
        {**GROUPED, "sliding_window": 7, "norm_epsilon": 1e-5, "tie_word_embeddings": True},
    ),
    "gpt_oss": (
        "gpt_oss",
        "float32",
        {
            **GROUPED,
            **EXPERTS,
            "num_local_experts": 4,
            "head_dim": 8,
            "sliding_window": 7,
            "swiglu_limit": 1.5,
        },
    ),
    "gemma3_bf16": (
        "gemma3_text",
        "bfloat16",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": LOCAL_AND_GLOBAL,
            "intermediate_size": 32,
        },
    ),
}
EVERY = {**VARIANTS, **LATER}
BATCH = 3
SEQUENCE = 20
SHORT = 12
PENALISED = 16


def make(name: str) -> None:
    """Make one checkpoint and its golden results."""
    architecture, dtype_name, changes = EVERY[name]
    dtype = getattr(torch, dtype_name)
    is_first = name in VARIANTS
    torch.manual_seed(sorted(VARIANTS).index(name) if is_first else 100 + [*LATER].index(name))
    config = CONFIG_MAPPING[architecture](**{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
            elif "bias" in parameter_name:
                parameter.copy_(0.2 * torch.randn_like(parameter))
            elif "sinks" in parameter_name or "router" in parameter_name:
                parameter.copy_(torch.randn_like(parameter))
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
        more = {}
        if name == "phi3_longrope":  # shorter than where its frequencies change
            more["short"] = model(tokens[:, :SHORT]).logits.numpy()
        if name == "olmo2":
            penalised = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=PENALISED,
                do_sample=False,
                pad_token_id=0,
                repetition_penalty=1.4,
            )
            more["penalised"] = penalised[:, SEQUENCE:].numpy().astype(np.int16)
    np.savez_compressed(
        folder / "golden.npz",
        tokens=tokens.numpy().astype(np.int16),
        logits=logits.float().numpy(),
        greedy=texts[:, SEQUENCE:].numpy().astype(np.int16),
        **more,
    )


if __name__ == "__main__":
    for variant in sys.argv[1:] or EVERY:
        make(variant)
        print(variant, sum(path.stat().st_size for path in (FOLDER / variant).iterdir()))
