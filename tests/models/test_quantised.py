"""Weights in 8 and 4 bits: logits are those of the dequantised weights, from plain checkpoints and
from those that come quantised, which are written here by the published layouts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tiny_checkpoints import tensors_of

from einmpi.comm.threads import run_threads
from einmpi.errors import InputError
from einmpi.files.formats import find
from einmpi.models.llama import load

CHECKPOINTS = Path(__file__).parent / "checkpoints"
TOKENS = [[1, 17, 4, 9, 30, 2, 8], [5, 3, 70, 11, 12, 6, 44]]
CODES = {"float32": "F32", "float16": "F16", "int32": "I32", "int8": "I8", "bfloat16": "BF16"}
CODES["float8_e4m3fn"] = "F8_E4M3"
Tensors = dict[str, np.ndarray]


def write_tensors(file: Path, tensors: Tensors) -> None:
    header: dict[str, Any] = {}
    start = 0
    for name, array in tensors.items():
        place = [start, start + array.nbytes]
        header[name] = {
            "dtype": CODES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": place,
        }
        start = place[1]
    text = json.dumps(header).encode()
    parts = [np.ascontiguousarray(array).tobytes() for array in tensors.values()]
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def write_model(folder: Path, tensors: Tensors, source: Path, **config: Any) -> Path:
    """Write a checkpoint with these tensors, and the config of another one with more keys."""
    folder.mkdir(exist_ok=True)
    values = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **config}))
    write_tensors(folder / "model.safetensors", tensors)
    return folder


def is_matrix(name: str) -> bool:
    return name.endswith("_proj.weight")


def rounded(weights: np.ndarray, group: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return integers and scales, group by group."""
    integers = np.empty(weights.shape, int)
    scales = np.empty((weights.shape[0], weights.shape[1] // group), np.float32)
    for row, values in enumerate(weights.astype(np.float32)):
        for first in range(0, len(values), group):
            part = values[first : first + group]
            scale = np.float32(abs(part).max()) / np.float32(most)
            scales[row, first // group] = scale
            integers[row, first : first + group] = np.rint(part / scale) if scale else 0
    return integers, scales


def logits(folder: Path, ranks: int = 1, **settings: Any) -> np.ndarray:
    def compute(comm: Any) -> np.ndarray:
        model = load(folder, dtype="float32", comm=comm, **settings)
        found: np.ndarray = model.logits(TOKENS).gather()
        return found

    return run_threads(ranks, compute)[0]


def assert_same_logits(found: np.ndarray, folder: Path) -> None:
    wanted = logits(folder)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * abs(wanted).max())


# ---- quantised while they are read ---------------------------------------------------------------


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_logits_of_dequantised_weights(weights: str, name: str, tmp_path: Path) -> None:
    source = CHECKPOINTS / name
    tensors = tensors_of(source)
    head_width = json.loads((source / "config.json").read_text())["head_dim"]
    for tensor in filter(is_matrix, tensors):
        last = head_width if "o_proj" in tensor else tensors[tensor].shape[1]
        integers, scales = rounded(tensors[tensor], gcd(64, last), 127 if weights == "int8" else 7)
        whole = integers * np.repeat(scales, gcd(64, last), axis=1)
        tensors[tensor] = whole.astype(np.float32)
    plain = write_model(tmp_path / "plain", tensors, source)
    assert_same_logits(logits(source, weights=weights), plain)
    assert_same_logits(logits(source, ranks=3, weights=weights), plain)
    model = load(source, dtype="float32", weights=weights)
    wanted = load(plain, dtype="float32").generate(TOKENS, new=6)
    np.testing.assert_array_equal(model.generate(TOKENS, new=6), wanted)


def test_ranks_hold_small_integers() -> None:
    def held(weights: str | None) -> int:
        model = load(CHECKPOINTS / "llama", dtype="float32", weights=weights)
        model.logits(TOKENS)
        last = model.programs.last
        assert last is not None
        return sum(block.nbytes for key, block in last.resident.items() if key[0][0] == "w")

    matrices = {
        name: array.size
        for name, array in tensors_of(CHECKPOINTS / "llama").items()
        if is_matrix(name)
    }
    count = sum(matrices.values())
    scales = sum(
        size // (8 if "o_proj" in name else 16 if "down" in name else 32)
        for name, size in matrices.items()
    )
    assert held(None) == 4 * count
    assert held("int8") == count + 4 * scales
    assert held("int4") == count // 2 + 4 * scales


def test_half_precision(tmp_path: Path) -> None:
    """Scales are rounded to the dtype, and integers are those for the rounded scales."""
    wanted = load(CHECKPOINTS / "llama_bf16").logits(TOKENS).gather().astype(np.float32)
    found = load(CHECKPOINTS / "llama_bf16", weights="int8").logits(TOKENS).gather()
    assert found.dtype.name == "bfloat16"
    assert abs(found.astype(np.float32) - wanted).max() < 0.15 * abs(wanted).max()


def test_random_weights() -> None:
    for weights in ("int8", "int4"):
        plan = load("7B", random=True, weights=weights, dtype="float32").job(1, 1)
        named = {spec.name: spec for spec in plan.inputs}
        assert named["wq_1"].dtype == ("int8" if weights == "int8" else "uint8")
        assert named["wq_1_scale"].shape == (32, 1, 128, 64)


# ---- checkpoints that come quantised -------------------------------------------------------------


def packed_words(numbers: np.ndarray) -> np.ndarray:
    """Return words of eight 4-bit numbers, which are in the last dimension, the first lowest."""
    words = np.zeros(numbers.shape[:-1], np.uint32)
    for place in range(8):
        words |= numbers[..., place].astype(np.uint32) << np.uint32(4 * place)
    return words.view(np.int32)


def asymmetric(weights: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return integers from 0 to 15, zeros and scales [group, row], as float16 keeps them."""
    rows, columns = weights.shape
    parts = weights.reshape(rows, -1, group)
    low, high = np.minimum(parts.min(2), 0), np.maximum(parts.max(2), 0)
    scales = ((high - low) / 15).astype(np.float16).astype(np.float32)
    zeros = np.clip(np.rint(-low / scales), 1, 15).astype(int)
    integers = np.clip(np.rint(parts / scales[..., None]) + zeros[..., None], 0, 15).astype(int)
    return integers.reshape(rows, columns), zeros.T, scales.T


def symmetric(weights: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    integers, scales = rounded(weights, group, 7)
    return integers + 8, np.full(scales.T.shape, 8), scales.astype(np.float16).astype("float32").T


def dequantised(integers: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> np.ndarray:
    group = integers.shape[1] // len(zeros)
    zero = np.repeat(zeros.T, group, axis=1)
    return ((integers - zero) * np.repeat(scales.T, group, axis=1)).astype(np.float32)


def gptq(integers: np.ndarray, zeros: np.ndarray, scales: np.ndarray, less: int = 1) -> Tensors:
    rows, columns = integers.shape
    by_word = integers.T.reshape(columns // 8, 8, rows)
    return {
        "qweight": packed_words(by_word.transpose(0, 2, 1)),
        "qzeros": packed_words((zeros - less).reshape(len(zeros), rows // 8, 8)),
        "scales": scales.astype(np.float16),
        "g_idx": (np.arange(columns) // (columns // len(zeros))).astype(np.int32),
    }


def awq(integers: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> Tensors:
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    rows, columns = integers.shape
    return {
        "qweight": packed_words(integers.T.reshape(columns, rows // 8, 8)[..., order]),
        "qzeros": packed_words(zeros.reshape(len(zeros), rows // 8, 8)[..., order]),
        "scales": scales.astype(np.float16),
    }


def four_bits(
    folder: Path, pack: Callable[..., Tensors], quantise: Callable[..., Any], **config: Any
) -> tuple[Path, Path]:
    """Return a checkpoint with matrices in 4 bits, and one with the same matrices as floats."""
    source = CHECKPOINTS / "llama"
    tensors = tensors_of(source)
    plain = dict(tensors)
    for name in filter(is_matrix, list(tensors)):
        found = quantise(tensors.pop(name), 16)
        plain[name] = dequantised(*found)
        stem = name.removesuffix("weight")
        tensors.update({stem + part: array for part, array in pack(*found).items()})
    config = {"bits": 4, "group_size": 16, **config}
    stored = write_model(folder / "stored", tensors, source, quantization_config=config)
    return stored, write_model(folder / "plain", plain, source)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("quantise", [symmetric, asymmetric])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2", "awq"])
def test_gptq_and_awq(form: str, quantise: Callable[..., Any], ranks: int, tmp_path: Path) -> None:
    is_symmetric = quantise is symmetric
    config: dict[str, Any] = {"quant_method": "awq", "zero_point": not is_symmetric}
    pack: Callable[..., Tensors] = awq
    if form != "awq":
        config = {"quant_method": "gptq", "sym": is_symmetric, "checkpoint_format": form}
        config["desc_act"] = False

        def pack(*found: np.ndarray) -> Tensors:
            return gptq(*found, less=int(form == "gptq"))

    stored, plain = four_bits(tmp_path, pack, quantise, **config)
    assert_same_logits(logits(stored, ranks), plain)
    dtype = load(stored).job(1, 1).graph["wq_1"].dtype
    assert dtype == ("uint8" if is_symmetric else "int8")


@pytest.mark.parametrize("scales", ["channel", "tensor", "group"])
def test_compressed_tensors_of_int8(scales: str, tmp_path: Path) -> None:
    source = CHECKPOINTS / "llama"
    tensors = tensors_of(source)
    plain = dict(tensors)
    for name in filter(is_matrix, list(tensors)):
        weights = tensors[name]
        group = 16 if scales == "group" else weights.shape[1]
        integers, factors = rounded(weights, group, 127)
        if scales == "tensor":
            factors = np.array([abs(weights).max() / 127], np.float32)
            integers = np.rint(weights / factors)
        tensors[name] = integers.astype(np.int8)
        tensors[f"{name}_scale"] = factors
        factor = factors if scales == "tensor" else np.repeat(factors, group, axis=1)
        plain[name] = (integers * factor).astype(np.float32)
    config = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    stored = write_model(tmp_path / "stored", tensors, source, quantization_config=config)
    write_model(tmp_path / "plain", plain, source)
    assert_same_logits(logits(stored), tmp_path / "plain")
    assert_same_logits(logits(stored, ranks=2), tmp_path / "plain")
    assert load(stored).job(1, 1).graph["w2_1"].dtype == "int8"


@pytest.mark.parametrize("scales", ["tensor", "channel", "block"])
def test_eight_bit_floats(scales: str, tmp_path: Path) -> None:
    source = CHECKPOINTS / "llama"
    tensors = tensors_of(source)
    plain = dict(tensors)
    config: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    if scales == "block":
        config = {"quant_method": "fp8", "weight_block_size": [24, 20]}
    for name in filter(is_matrix, list(tensors)):
        weights = tensors[name]
        rows, columns = weights.shape
        shape = {"tensor": (rows, columns), "channel": (1, columns), "block": (24, 20)}[scales]
        factor = np.empty_like(weights)
        factors = np.empty((-(-rows // shape[0]), -(-columns // shape[1])), np.float32)
        for i, j in np.ndindex(*factors.shape):
            part = (
                slice(i * shape[0], (i + 1) * shape[0]),
                slice(j * shape[1], (j + 1) * shape[1]),
            )
            factors[i, j] = factor[part] = np.float32(abs(weights[part]).max() / 448)
        tensors[name] = (weights / factor).astype(ml_dtypes.float8_e4m3fn)
        ending = "_scale_inv" if scales == "block" else "_scale"
        tensors[name + ending] = factors.ravel() if scales == "tensor" else factors
        tensors[f"{name.removesuffix('weight')}input_scale"] = np.ones(1, np.float32)
        plain[name] = tensors[name].astype(np.float32) * factor
    stored = write_model(tmp_path / "stored", tensors, source, quantization_config=config)
    write_model(tmp_path / "plain", plain, source)
    assert_same_logits(logits(stored), tmp_path / "plain")
    assert_same_logits(logits(stored, ranks=2), tmp_path / "plain")
    assert load(stored).job(1, 1).graph["wq_1"].dtype == "float32"


# ---- refusals ------------------------------------------------------------------------------------


def refused(folder: Path, **settings: Any) -> str:
    with pytest.raises(InputError) as caught:
        load(folder, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(folder), "DIR")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "DIR/config.json: the weights are quantized by 'bitsandbytes'; expected gptq or awq",
        ),
        (
            {"quant_method": "gptq", "bits": 3},
            "DIR/config.json: the weights are quantized by 'gptq'",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "desc_act": True},
            "DIR/config.json: quantization_config.desc_act is true; expected false",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            'DIR/config.json: quantization_config.format is "pack-quantized"; expected one of',
        ),
        (
            {"quant_method": "awq", "bits": 4, "version": "gemv"},
            'DIR/config.json: quantization_config.version is "gemv"; expected "gemm"',
        ),
        ([], "DIR/config.json: quantization_config is []; expected an object"),
    ],
)
def test_unknown_quantisation(config: Any, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(CHECKPOINTS / "llama", folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": config}))
    assert refused(folder).startswith(message)


def test_wrong_requests(tmp_path: Path) -> None:
    source = CHECKPOINTS / "llama"
    assert "int3" in refused(source, weights="int3")
    stored, _ = four_bits(tmp_path, awq, symmetric, quant_method="awq", zero_point=False)
    message = refused(stored, weights="int8")
    assert message == "weights: 'int8' requested, and the checkpoint has quantized weights"
    tensors = tensors_of(source)
    found = gptq(*symmetric(tensors["model.layers.0.self_attn.q_proj.weight"], 16))
    found["g_idx"] = found["g_idx"][::-1].copy()
    for name in filter(is_matrix, list(tensors)):
        own = gptq(*symmetric(tensors.pop(name), 16))
        own["g_idx"] = own["g_idx"][::-1].copy()
        stem = name.removesuffix("weight")
        tensors.update({stem + part: array for part, array in own.items()})
    config = {"quant_method": "gptq", "bits": 4}
    stored = write_model(tmp_path / "other", tensors, source, quantization_config=config)
    assert "g_idx has columns in another order; expected columns by groups" in refused(stored)


def test_damaged_recipes_of_job_files() -> None:
    """What a job file says as the name of a tensor is refused in one line unless it is right."""
    job = load(CHECKPOINTS / "llama", dtype="float32", weights="int4").job(1, 1)
    good = next(spec for spec in job.inputs if spec.name == "wq_1")
    find(good)
    values = json.loads(good.inside)
    texts = ["{", "{}", "{[]}", good.inside.replace("rounded", "awq"), good.inside[:-1]]
    changes: list[dict[str, Any]] = [
        {"group": 0},
        {"group": 7},
        {"columns": 4},
        {"columns": "a"},
        {"shape": [4000, 1, 8, 32]},
        {"shape": [4, 1, 8, -32]},
        {"make": "int5"},
        {"parts": {}},
        {"parts": {"weight": ["x"]}},
        {"first": -2},
        {"dtype": "float8"},
        {"form": []},
        {"more": 1},
    ]
    texts += [json.dumps({**values, **change}) for change in changes]
    for text in texts:
        with pytest.raises(InputError, match="not what a tensor is made of"):
            find(replace(good, inside=text))


def test_integers_that_are_not_symmetric(tmp_path: Path) -> None:
    """The zeros of a file decide, not what config.json says about them."""
    stored, _ = four_bits(tmp_path, awq, asymmetric, quant_method="awq", zero_point=False)
    with pytest.raises(InputError, match=r"qweight has integers of more than 4 bits"):
        load(stored).logits(TOKENS)
