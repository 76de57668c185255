"""A whole model of the form of LLaMA on one GPU: prompts and decoded tokens, beside transformers.

    python -m bench gpu_model [--model 7B] [--batches 1 8] [--sequence 1024] [--new 64]

Weights are random, on the GPU, and the same arrays for both; transformers computes with sdpa. Both
take turns, logits are compared, and times are medians of whole calls from the tokens on the host to
the logits on the GPU. "prefill" computes the logits of the last position of each prompt. "decode"
computes one more token of each sequence, with caches of `sequence` + `new` positions.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

import einmpi
from bench.gpu.gpu_llama import print_kernels
from bench.lib.llama_jobs import MODELS, model_of
from bench.lib.llama_peers import hugging_face_settings
from bench.lib.packages import Missing, package
from bench.lib.results import write_results
from einmpi.comm.base import ALONE
from einmpi.models.config import Config
from einmpi.models.programs import (
    AT,
    FREQUENCIES,
    LOGITS,
    TOKENS,
    ModelProgram,
    decode_program,
    prefill_program,
    weights_of,
)

cupy = package("cupy")
torch = package("torch")
transformers = package("transformers")

FIRST_TURNS = 4  # which compile kernels and capture graphs
LARGEST_ERROR = 0.03  # of float16 logits, relative to the largest: both round in every layer

Array = npt.NDArray[Any]
Call = Callable[[Array, int], Any]  # tokens and their position to logits on the GPU


@dataclass(frozen=True)
class Case:
    """What is computed: by which model, for how many sequences of which length."""

    config: Config
    weights: dict[str, Any]  # by the names of a program's inputs, on the GPU
    batch: int
    sequence: int
    new: int
    dtype: str

    @property
    def length(self) -> int:
        """The positions of the caches."""
        return self.sequence + self.new


def random_weights(config: Config, dtype: str) -> dict[str, Any]:
    """Return weights on the GPU, as large as those of a trained model."""
    random = cupy.random.default_rng(0)
    found = {}
    for name, weight in weights_of(config).items():
        if len(weight.shape) == 1:
            found[name] = cupy.ones(weight.shape, dtype)
        else:
            values = random.standard_normal(weight.shape, dtype=np.float32)
            found[name] = (values * np.float32(0.02)).astype(dtype)
    return found


# ---- einmpi -------------------------------------------------------------------------------------


def compiled_program(case: Case, program: ModelProgram) -> tuple[Any, dict[str, Any]]:
    """Return a compiled program and those of its inputs that stay the same."""
    frequencies = case.config.rope.inverse_frequencies(case.config.head_width)
    inputs = {**case.weights, FREQUENCIES: cupy.asarray(frequencies)}
    given = {
        name: np.broadcast_to(np.zeros((), dtype), shape)
        for name, (shape, dtype) in program.inputs.items()
    }
    shapes = {name: weight.shape for name, weight in program.weights.items()}
    job = einmpi.program(
        program.text, dtype=case.dtype, outputs=list(program.outputs), **{**shapes, **given}
    )
    job = replace(job, backend="cupy")
    carry = dict(program.carry)
    compiled = einmpi.compile(job, ALONE, carry=carry, donate=bool(carry))
    return compiled, inputs


def einmpi_prefill(case: Case) -> Call:
    program = prefill_program(case.config, case.batch, case.sequence, case.dtype)
    compiled, inputs = compiled_program(case, program)
    return lambda tokens, _: compiled({**inputs, TOKENS: tokens})[LOGITS].local


def einmpi_decode(case: Case) -> Call:
    program = decode_program(case.config, case.batch, case.length, case.dtype)
    compiled, inputs = compiled_program(case, program)
    caches: dict[str, Any] = {}
    for name in program.carry:
        shape, dtype = program.inputs[name]
        caches[name] = cupy.zeros(shape, dtype)

    def decode(tokens: Array, position: int) -> Any:
        at = np.full(case.batch, position)
        made = compiled({**inputs, **caches, TOKENS: tokens, AT: at})
        for old, new in program.carry.items():
            caches[old] = made[new]
        return made[LOGITS].local

    return decode


# ---- transformers -------------------------------------------------------------------------------


def transformers_model(case: Case) -> Any:
    """Return transformers' model, whose weights are the same arrays."""
    config = case.config
    settings = hugging_face_settings(config)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(settings)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    state = {}
    for name, weight in weights_of(config).items():
        tensor = torch.from_dlpack(case.weights[name])
        state[weight.tensor] = tensor.reshape(shapes[weight.tensor])
    model.load_state_dict(state, assign=True)
    # Inverse frequencies are no weights, and are made anew because "meta" has no numbers.
    model.model.rotary_emb = type(model.model.rotary_emb)(settings).to("cuda")
    return model.eval().requires_grad_(False)


def transformers_prefill(case: Case) -> Call:
    model = transformers_model(case)

    def prefill(tokens: Array, _: int) -> Any:
        given = torch.from_numpy(tokens).to("cuda")
        with torch.inference_mode():
            return model(given, use_cache=False, logits_to_keep=1).logits[:, -1]

    return prefill


def transformers_decode(case: Case) -> Call:
    model = transformers_model(case)
    cache: list[Any] = [None]

    def decode(tokens: Array, position: int) -> Any:
        given = torch.from_numpy(tokens)[:, None].to("cuda")
        with torch.inference_mode():
            made = model(given, past_key_values=cache[0], use_cache=True)
            cache[0] = made.past_key_values
            return made.logits[:, -1]

    return decode


# ---- measuring ----------------------------------------------------------------------------------

PARTS: dict[str, dict[str, Callable[[Case], Call]]] = {
    "prefill": {"einmpi": einmpi_prefill, "transformers": transformers_prefill},
    "decode": {"einmpi": einmpi_decode, "transformers": transformers_decode},
}


def tokens_of(part: str, case: Case, turn: int) -> Array:
    """Return the tokens of a turn, which are the same for all."""
    shape = (case.batch, case.sequence) if part == "prefill" else (case.batch,)
    return np.random.default_rng(turn).integers(0, case.config.vocabulary, shape)


def measure(part: str, case: Case, turns: int, profile: bool) -> list[dict[str, Any]]:
    """Return a row for each of those that are installed; all compute the same tokens in turns."""
    ways = dict(PARTS[part])
    if isinstance(torch, Missing) or isinstance(transformers, Missing):
        del ways["transformers"]
    calls = {name: prepare(case) for name, prepare in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(FIRST_TURNS + turns):
        tokens = tokens_of(part, case, turn)
        logits = {}
        for name, call in calls.items():
            cupy.cuda.Device().synchronize()
            start = time.perf_counter()
            made = call(tokens, turn)
            cupy.cuda.Device().synchronize()
            times[name].append(time.perf_counter() - start)
            logits[name] = np.asarray(cupy.asarray(made).get(), np.float64)
        check_logits(logits)
    rows = []
    for name, taken in times.items():
        after = taken[FIRST_TURNS:]
        rows.append(
            {
                "part": part,
                "batch": case.batch,
                "way": name,
                "seconds": statistics.median(after),
                "fastest": min(after),
            }
        )
    if profile:
        print_kernels(lambda: calls["einmpi"](tokens, FIRST_TURNS + turns))
    return rows


def check_logits(logits: dict[str, Array]) -> None:
    """Raise SystemExit if two ways do not agree."""
    first = logits["einmpi"]
    for name, found in logits.items():
        error = np.abs(found - first).max() / np.abs(first).max()
        if not error <= LARGEST_ERROR:
            raise SystemExit(f"{name}: logits differ by {error:.1e} of the largest")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(MODELS), default="7B")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--profile", action="store_true", help="show the kernels of einmpi")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    given = parser.parse_args()
    config = model_of(given.model, given.layers)
    weights = random_weights(config, given.dtype)
    rows = []
    for part in given.parts:
        for batch in given.batches:
            case = Case(config, weights, batch, given.sequence, given.new, given.dtype)
            found = measure(part, case, given.repeat, given.profile)
            own = found[0]["seconds"]
            for row in found:
                rows.append({**row, "ratio": row["seconds"] / own})
                print(
                    f"{part} B{batch}  {row['way']:12}  {1e3 * row['seconds']:8.2f} ms, "
                    f"fastest {1e3 * row['fastest']:8.2f}  {row['seconds'] / own:.2f} × einmpi",
                    flush=True,
                )
    if given.json:
        write_results(given.json, rows)


if __name__ == "__main__":
    main()
