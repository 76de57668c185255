"""What a decoded token costs on CPUs: one more token of each sequence, with caches in place.

    python -m bench decode --threads 2
    mpirun -n 2 python -m bench decode --threads 1

The model has the shape of LLaMA with 110 M parameters and random weights. Where transformers is
installed, it decodes the same tokens with the same weights (sdpa, its cache, inference mode), in
turns with einmpi, in rank 0 alone; logits are compared. Times are medians in milliseconds, of rank
0, and on a busy machine those of the processor count: --cpu-time.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

import einmpi
from bench.lib.llama_peers import hugging_face_settings
from bench.lib.packages import has_package, package
from bench.lib.results import write_results
from einmpi.comm.mpi import comm_of
from einmpi.models.config import Config
from einmpi.models.programs import AT, FREQUENCIES, LOGITS, TOKENS, decode_program

Array: TypeAlias = npt.NDArray[Any]
Decode: TypeAlias = Callable[[Array, int], Array]  # tokens and their position to logits

FIRST_STEPS = 5  # in which calls are prepared
LARGEST_ERROR = 2e-4  # of logits, relative to the largest


def random_weights(config: Config, length: int, batch: int) -> dict[str, Array]:
    """Return weights as large as those of a trained model."""
    random = np.random.default_rng(0)
    found = {}
    for name, weight in decode_program(config, batch, length, "float32").weights.items():
        if len(weight.shape) == 1:
            found[name] = np.ones(weight.shape, "float32")
        else:
            found[name] = random.standard_normal(weight.shape, "float32") * np.float32(0.02)
    return found


def prepare_einmpi(config: Config, weights: dict[str, Array], batch: int, length: int) -> Decode:
    """Return a step of einmpi with caches of its own."""
    program = decode_program(config, batch, length, "float32")
    frequencies = config.rope.inverse_frequencies(config.head_width)
    inputs: dict[str, Any] = {**weights, FREQUENCIES: frequencies}
    caches: dict[str, Any] = {}
    for name in program.carry:
        shape, dtype = program.inputs[name]
        caches[name] = np.zeros(shape, dtype)
    zeros = np.zeros(batch, int)
    examples = {**inputs, **caches, TOKENS: zeros, AT: zeros}
    job = einmpi.program(program.text, outputs=list(program.outputs), **examples)
    step = einmpi.compile(job, carry=program.carry, donate=True)

    def decode(tokens: Array, position: int) -> Array:
        at = np.full(batch, position)
        made = step({**inputs, **caches, TOKENS: tokens, AT: at})
        for old, new in program.carry.items():
            caches[old] = made[new]
        logits: Array = made[LOGITS].gather()
        return logits

    return decode


def prepare_transformers(config: Config, weights: dict[str, Array], threads: int) -> Decode | None:
    """Return a step of transformers with a cache of its own; None if it is not installed."""
    if not all(has_package("transformers", name) for name in ("torch", "transformers")):
        return None
    torch = package("torch")
    transformers = package("transformers")
    torch.set_num_threads(threads)
    model = transformers.LlamaForCausalLM(hugging_face_settings(config)).eval()
    state = {}
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name, weight in decode_program(config, 1, 1, "float32").weights.items():
        state[weight.tensor] = torch.from_numpy(weights[name]).reshape(shapes[weight.tensor])
    model.load_state_dict(state, assign=True)
    cache: list[Any] = [None]

    def decode(tokens: Array, position: int) -> Array:
        with torch.inference_mode():
            made = model(
                torch.from_numpy(tokens)[:, None], past_key_values=cache[0], use_cache=True
            )
            cache[0] = made.past_key_values
            logits: Array = made.logits[:, -1].numpy()
            return logits

    return decode


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=256, help="positions of the caches")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # of compiled kernels
    threadpool_limits(options.threads)
    comm = comm_of()
    config = Config(
        model_type="llama",
        width=options.width,
        layers=options.layers,
        heads=options.heads,
        groups=options.heads,
        head_width=options.width // options.heads,
        hidden=options.hidden,
        vocabulary=options.vocabulary,
        epsilon=1e-5,
        tied=False,
    )
    steps = min(options.steps + FIRST_STEPS, options.length)
    weights = random_weights(config, options.length, options.batch)
    decoders = {"einmpi": prepare_einmpi(config, weights, options.batch, options.length)}
    peer = prepare_transformers(config, weights, options.threads) if comm.rank == 0 else None
    if peer is not None:
        decoders["transformers"] = peer
    clock = time.process_time if options.cpu_time else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in decoders}
    random = np.random.default_rng(1)
    for position in range(steps):
        tokens = random.integers(0, config.vocabulary, options.batch)
        logits = {}
        for name, decode in decoders.items():
            start = clock()
            logits[name] = decode(tokens, position)
            seconds[name].append(clock() - start)
        if peer is not None:
            error = np.abs(logits["einmpi"] - logits["transformers"]).max()
            if error > LARGEST_ERROR * np.abs(logits["transformers"]).max():
                raise SystemExit(f"logits at position {position} differ by {error}")
    if comm.rank == 0:
        kind = "processor time" if options.cpu_time else "time"
        print(f"{comm.size} ranks, {options.threads} threads each, median {kind} of a token")
        medians = {name: float(np.median(taken[FIRST_STEPS:])) for name, taken in seconds.items()}
        rows = []
        for name, median in medians.items():
            ratio = medians["einmpi"] / median
            rows.append({"way": name, "milliseconds": 1e3 * median, "ratio": ratio})
            print(f"{1e3 * median:9.2f} ms  {name:12}  einmpi takes {ratio:.2f} times as long")
        if options.json:
            write_results(options.json, rows)


if __name__ == "__main__":
    main()
