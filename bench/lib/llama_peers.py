"""The prefill of LLaMA by other packages, with weights in host memory: peers of experiment 4.

Each peer is a function that takes a `Prepared` and returns a function of tokens, or raises Skipped.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy.typing as npt

from einmpi.models.config import Config

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

Array = npt.NDArray[Any]
Call = Callable[[Array], Array]  # tokens → logits of the last position, in float32


class Skipped(Exception):
    """A peer that cannot run here; the text says why."""


@dataclass(frozen=True)
class Prepared:
    """What all peers start from: the model's sizes, and its weights in host memory."""

    config: Config
    weights: Mapping[str, Array]  # by the names in a checkpoint, in the shapes of a checkpoint
    dtype: str
    device: str  # "cpu" or "cuda"


def need(*packages: str) -> None:
    """Raise Skipped if a package is not installed."""
    for name in packages:
        if find_spec(name) is None:
            raise Skipped(f"{name} is not installed")


def need_gpu(prepared: Prepared) -> None:
    """Raise Skipped if there is no GPU to compute on."""
    if prepared.device != "cuda":
        raise Skipped("it needs a GPU")


def hugging_face_settings(config: Config) -> Any:
    """Return a model's configuration as transformers has it."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.groups,
        intermediate_size=config.hidden,
        vocab_size=config.vocabulary,
        rms_norm_eps=config.epsilon,
        max_position_embeddings=8192,
        attn_implementation="sdpa",
        tie_word_embeddings=False,
    )


def hugging_face_model(prepared: Prepared) -> Any:
    """Return transformers' model on the CPU; its weights are the arrays themselves, not copies."""
    need("torch", "transformers")
    import torch
    from transformers import LlamaForCausalLM

    settings = hugging_face_settings(prepared.config)
    with torch.device("meta"):
        model = LlamaForCausalLM(settings)
    tensors = {name: torch.from_numpy(array) for name, array in prepared.weights.items()}
    model.load_state_dict(tensors, assign=True)
    # Inverse frequencies are no weights, and are made anew because "meta" has no numbers.
    model.model.rotary_emb = type(model.model.rotary_emb)(settings)
    return model.eval().requires_grad_(False)


def call_of(model: Any, device: str) -> Call:
    """Return the function that computes logits by a model of transformers."""
    import torch

    def call(tokens: Array) -> Array:
        given = torch.from_numpy(tokens).to(device)
        with torch.inference_mode():
            found = model(given, use_cache=False, logits_to_keep=1).logits[:, -1]
        logits: Array = found.float().cpu().numpy()
        return logits

    return call


def on_device(prepared: Prepared) -> Call:
    """transformers with all weights on the device: what none of the others can be faster than."""
    model = hugging_face_model(prepared)
    return call_of(model.to(prepared.device), prepared.device)


def accelerate_cpu(prepared: Prepared) -> Call:
    """accelerate's cpu_offload: each module's weights are copied when it runs."""
    need("accelerate")
    from accelerate import cpu_offload

    model = hugging_face_model(prepared)
    cpu_offload(model, execution_device=prepared.device)
    return call_of(model, prepared.device)


def accelerate_disk(prepared: Prepared) -> Call:
    """accelerate's disk_offload: the weights are files, which are mapped into memory."""
    need("accelerate")
    from accelerate import disk_offload

    model = hugging_face_model(prepared)
    folder = tempfile.TemporaryDirectory(prefix="experiment4-")
    disk_offload(model, folder.name, execution_device=prepared.device)
    call = call_of(model, prepared.device)

    def with_folder(tokens: Array, folder: Any = folder) -> Array:  # it stays as long as this does
        return call(tokens)

    return with_folder


def zero_inference(prepared: Prepared) -> Call:
    """DeepSpeed's ZeRO-Inference: stage 3 with parameters in pinned host memory."""
    need("deepspeed")
    need_gpu(prepared)
    import deepspeed

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20_000 + os.getpid() % 20_000)}
    for name, value in {**alone, **address}.items():
        os.environ.setdefault(name, value)
    settings = {
        "fp16": {"enabled": prepared.dtype == "float16"},
        "bf16": {"enabled": prepared.dtype == "bfloat16"},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": True},
        },
        "train_micro_batch_size_per_gpu": 1,
    }
    engine = deepspeed.initialize(model=hugging_face_model(prepared), config=settings)[0]
    return call_of(engine.module.eval(), prepared.device)


def flexgen(prepared: Prepared) -> Call:
    """FlexGen, whose published versions have the models of OPT only."""
    if find_spec("flexgen") is None and find_spec("flexllmgen") is None:
        raise Skipped("flexgen is not installed")
    raise Skipped("the newest FlexGen on PyPI, 0.1.8, has the models of OPT and no LLaMA")


def prefetched(prepared: Prepared) -> Call:
    """torch by hand: layers in pinned memory, the next one copied while one computes."""
    need_gpu(prepared)
    model = hugging_face_model(prepared)
    import torch

    layers = list(model.model.layers)
    size = sum(weight.numel() for weight in layers[0].parameters())
    dtype = next(layers[0].parameters()).dtype
    buffers = [torch.empty(size, dtype=dtype, device="cuda") for _ in range(2)]
    pinned = []
    for number, layer in enumerate(layers):
        on_host = torch.empty(size, dtype=dtype, pin_memory=True)
        start = 0
        for weight in layer.parameters():
            end = start + weight.numel()
            on_host[start:end].copy_(weight.data.reshape(-1))
            weight.data = buffers[number % 2][start:end].view(weight.shape)
            start = end
        pinned.append(on_host)
    for module in (model.model.embed_tokens, model.model.norm, model.model.rotary_emb):
        module.to("cuda")
    model.lm_head.to("cuda")
    side = torch.cuda.Stream()
    arrived = [torch.cuda.Event() for _ in layers]

    def copy(number: int) -> None:
        """Copy a layer as soon as what was launched so far, which uses its buffer, is done."""
        launched = torch.cuda.Event()
        launched.record()
        with torch.cuda.stream(side):
            side.wait_event(launched)
            buffers[number % 2].copy_(pinned[number], non_blocking=True)
            arrived[number].record(side)

    def hook_of(number: int) -> Callable[..., None]:
        def before(*_: Any) -> None:
            if number == 0:
                copy(0)
            torch.cuda.current_stream().wait_event(arrived[number])
            if number + 1 < len(layers):
                copy(number + 1)

        return before

    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(hook_of(number))
    return call_of(model, "cuda")


PEERS: dict[str, Callable[[Prepared], Call]] = {
    "accelerate-cpu": accelerate_cpu,
    "accelerate-disk": accelerate_disk,
    "zero-inference": zero_inference,
    "flexgen": flexgen,
    "torch-prefetch": prefetched,
    "transformers": on_device,
}
