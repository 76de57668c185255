"""The checkpoints of tests/models/checkpoints as arrays, and jobs made of programs and arrays."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401
import numpy as np

import einmpi
from einmpi.models.config import Config, read_config
from einmpi.models.programs import FREQUENCIES, ModelProgram, weights_of

FOLDER = Path(__file__).resolve().parents[1] / "models" / "checkpoints"
NAMES = sorted(path.name for path in FOLDER.iterdir())
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """Return all tensors of the safetensors files in a folder."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, last = (8 + length + offset for offset in entry["data_offsets"])
            values = np.frombuffer(content[first:last], np.dtype(DTYPES[entry["dtype"]]))
            found[name] = values.reshape(entry["shape"])
    return found


def weights(config: Config, folder: Path, dtype: str, length: int = 0) -> dict[str, np.ndarray]:
    """Return the weights of a checkpoint as inputs of its programs, for texts of some length."""
    tensors = tensors_of(folder)
    used = {}
    named = set()
    for name, weight in weights_of(config).items():
        arrays = [tensors[tensor] for tensor in weight.tensors]
        array = np.stack(arrays) if "*" in weight.tensor else arrays[0]
        if weight.rows is not None:
            array = array[slice(*weight.rows)]
        used[name] = array.reshape(weight.shape).astype(dtype)
        named.update(weight.tensors)
    assert named == set(tensors) - {"lm_head.weight"} | (named & {"lm_head.weight"})
    used[FREQUENCIES] = config.frequencies(length)
    return used


def golden(name: str) -> tuple[Config, dict[str, np.ndarray]]:
    """Return a checkpoint's configuration, and what transformers computed with it."""
    with np.load(FOLDER / name / "golden.npz") as found:
        arrays = dict(found)
    arrays["tokens"] = arrays["tokens"].astype(np.int64)
    return read_config(FOLDER / name), arrays


def job_of(program: ModelProgram) -> einmpi.Job:
    """Return the job of a program whose inputs are all given as arrays."""
    tensors: dict[str, Any] = {}
    for name, weight in program.weights.items():
        tensors[name] = shape_only(weight.shape, program.dtype)
    for name, (shape, dtype) in program.inputs.items():
        tensors[name] = shape_only(shape, dtype)
    job = einmpi.program(program.text, outputs=program.outputs, **tensors)
    return replace(job, roles=program.roles)


def shape_only(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return an array of zeros that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)
