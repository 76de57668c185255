"""Steps of training a wide classifier (the paper's experiment 2), compared with torch and JAX.

    mpirun -n 2 python -m bench experiment2 [--form dense sparse] [--batch 128 256 512]
                                            [--sizes 5975 820 1459] [--values 72] [--repeat 5]
                                            [--steps 10] [--strategies eindecomp data model]
                                            [--peers torch jax ddp cuda products]
                                            [--backend numpy] [--json FILE]

A row is a way to compute a step: forward, backward, and gradient descent, in float32. --sizes are
features, hidden units and labels. Of a dense batch all features are given, of a sparse one
--values of them a row. Times are medians and least times of a step, in milliseconds; all ways take
turns. torch and JAX are processes of their own with as many threads as there are ranks, ddp is
torch's DistributedDataParallel on as many processes with one thread each, by gloo; cuda is torch on
a GPU, for --backend cupy. products are the five matrix products of a dense step alone, each rank's
share by numpy into arrays that exist: no step that multiplies by numpy takes less. Bytes are what
all ranks together receive in a step, those of ddp by the formula 2 (p − 1) |weights|. Ranks must
not be bound to single cores, and all should have as many cores as there are ranks:
taskset -c 0,1 mpirun -n 2 --bind-to none …
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from bench.lib.packages import has_package
from bench.lib.results import write_results

Array = Any  # of numpy
RATE = 0.1
SECONDS_BETWEEN_LOOKS = 0.001  # of ranks that wait for others
LOSS_TOLERANCE = 2e-3  # of losses in float32, after all steps of a turn
# Packages of peers; those of numpy are here.
PACKAGES = {"torch": "torch", "ddp": "torch", "cuda": "torch", "jax": "jax", "products": "numpy"}
WEIGHTS = ("W1", "b1", "W2", "b2")

PROGRAM = """
A[b,h] = {first} + b1[h]
H[b,h] = relu(A[b,h])
Z[b,l] = sum(H[b,h] * W2[h,l]) + b2[l]
loss   = mean[b](logsumexp[l](Z[b,l]) - Z[b,y[b]])
W1_next[i,h] = W1[i,h] - rate * grad(loss, W1[i,h])
b1_next[h]   = b1[h] - rate * grad(loss, b1[h])
W2_next[h,l] = W2[h,l] - rate * grad(loss, W2[h,l])
b2_next[l]   = b2[l] - rate * grad(loss, b2[l])
"""
FIRST = {
    "dense": "sum(X[b,i] * W1[i,h])",
    "sparse": "sum[k](value[b,k] * W1[index[b,k],h])",
}


@dataclass(frozen=True)
class Case:
    """A form of the batch and all extents."""

    form: str
    batch: int
    features: int
    hidden: int
    labels: int
    values: int  # of a row of a sparse batch

    def inputs(self) -> dict[str, Array]:
        """Return the same weights and the same batch in every process."""
        rng = np.random.default_rng(0)
        scale = np.float32(0.05)
        found = {
            "W1": rng.standard_normal((self.features, self.hidden), np.float32) * scale,
            "b1": np.zeros(self.hidden, np.float32),
            "W2": rng.standard_normal((self.hidden, self.labels), np.float32) * scale,
            "b2": np.zeros(self.labels, np.float32),
            "y": rng.integers(0, self.labels, self.batch),
        }
        if self.form == "dense":
            found["X"] = rng.standard_normal((self.batch, self.features), np.float32) * scale
        else:
            shape = (self.batch, self.values)
            found["index"] = rng.integers(0, self.features, shape)
            found["value"] = rng.random(shape, np.float32)
        return found

    @property
    def weights(self) -> int:
        """The number of all weights."""
        return (self.features + 1) * self.hidden + (self.hidden + 1) * self.labels


# ---- peers ---------------------------------------------------------------------------------------


def torch_step(
    case: Case, threads: int, rank: int = 0, port: int = 0, device: str = "cpu"
) -> Callable[[], float]:
    """Return a function that makes a step by torch and returns the loss."""
    import torch

    torch.set_num_threads(threads)
    inputs = case.inputs()
    is_sparse = case.form == "sparse"

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in WEIGHTS:
                setattr(self, name, torch.nn.Parameter(torch.from_numpy(inputs[name])))

        def forward(self, *given: Any) -> Any:
            if is_sparse:
                index, value = given
                first = torch.nn.functional.embedding_bag(
                    index, self.W1, per_sample_weights=value, mode="sum", sparse=True
                )
            else:
                first = given[0] @ self.W1
            return torch.relu(first + self.b1) @ self.W2 + self.b2

    names = ("index", "value") if is_sparse else ("X",)
    ranks = 1
    model: Any = Net().to(device)
    if port:
        ranks = int(os.environ["BENCH_RANKS"])
        torch.distributed.init_process_group(
            "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
        )
        model = torch.nn.parallel.DistributedDataParallel(model)
    rows = slice(case.batch * rank // ranks, case.batch * (rank + 1) // ranks)
    given = [torch.from_numpy(inputs[name][rows]).to(device) for name in names]
    y = torch.from_numpy(inputs["y"][rows]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(model(*given), y)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def jax_step(case: Case) -> Callable[[], float]:
    """Return a function that makes a step by JAX and returns the loss."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_platforms", "cpu")
    inputs = case.inputs()
    names = ("index", "value") if case.form == "sparse" else ("X",)
    given = [jnp.asarray(inputs[name]) for name in names]
    y = jnp.asarray(inputs["y"])
    state = {name: jnp.asarray(inputs[name]) for name in WEIGHTS}

    def loss_of(weights: Any, given: Any, y: Any) -> Any:
        if case.form == "sparse":
            index, value = given
            first = jnp.einsum("bk,bkh->bh", value, weights["W1"][index])
        else:
            first = given[0] @ weights["W1"]
        Z = jax.nn.relu(first + weights["b1"]) @ weights["W2"] + weights["b2"]
        picked = jnp.take_along_axis(Z, y[:, None], 1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(Z, axis=1) - picked)

    def update(weights: Any, given: Any, y: Any) -> Any:
        loss, slopes = jax.value_and_grad(loss_of)(weights, given, y)
        return jax.tree.map(lambda w, g: w - RATE * g, weights, slopes), loss

    compiled = jax.jit(update, donate_argnums=0)

    def step() -> float:
        nonlocal state
        state, loss = compiled(state, given, y)
        jax.block_until_ready(state)
        return float(loss)

    return step


def serve(peer: str, case: Case, threads: int, rank: int, port: int) -> None:
    """Make steps as asked on standard input: a number of steps a line, answered by their times."""
    if peer == "jax":
        step = jax_step(case)
    else:
        device = "cuda" if peer == "cuda" else "cpu"
        step = torch_step(case, threads, rank, port, device)
    for line in sys.stdin:
        times = []
        losses = []
        for _ in range(int(line)):
            start = time.perf_counter()
            losses.append(step())
            times.append(time.perf_counter() - start)
        print(json.dumps({"times": times, "losses": losses}), flush=True)


class Peer:
    """A process that makes steps when asked."""

    def __init__(self, name: str, case: Case, threads: int, rank: int, ranks: int, port: int):
        self.name = name
        environment = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("PMI", "MPI", "HYD", "OMPI", "PMIX", "OPENBLAS", "OMP_"))
        }
        environment["BENCH_RANKS"] = str(ranks)
        environment["OMP_NUM_THREADS"] = str(threads)
        arguments = [name, *vars(case).values(), threads, rank, port]
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def make_steps(self, count: int) -> tuple[list[float], list[float]]:
        """Return the times and the losses of some steps."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        while line and not line.startswith("{"):
            line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} has ended without an answer")
        answer = json.loads(line)
        return answer["times"], answer["losses"]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


# ---- einmpi --------------------------------------------------------------------------------------


class Own:
    """A step by einmpi with one strategy, ready to run; all ranks make one."""

    def __init__(self, case: Case, strategy: str, steps: int, backend: str, comm: Any) -> None:
        import einmpi
        from einmpi.api import options_of
        from einmpi.job.loop import StepProgram, make_loop
        from einmpi.loops.running import LoopRun

        inputs = case.inputs()
        text = PROGRAM.format(first=FIRST[case.form])
        roles = {"batch": ("b",), "hidden": ("h",)}
        written = einmpi.program(text, dtype="float32", rate=RATE, **inputs)
        job = replace(written, roles=roles, backend=backend)
        carry = {name: f"{name}_next" for name in WEIGHTS}
        program = StepProgram(job.written, job.sizes, job.inputs)
        loop = make_loop(program, lambda *_: "loop", steps, carry, None, ["loss"])
        options = options_of(job, strategy=strategy)
        self.make_run = partial(LoopRun, replace(job, loop=loop), comm, options, on_row=self.note)
        self.inputs = inputs
        self.ends: list[float] = []
        self.losses: list[float] = []

    def note(self, number: int, row: Any) -> None:
        self.ends.append(time.perf_counter())
        self.losses.append(float(row["loss"]))

    def make_steps(self) -> tuple[list[float], list[float], int]:
        """Return the times of all steps but the first, the losses, and the bytes of a step."""
        self.ends.clear()
        self.losses.clear()
        run = self.make_run()
        run.prepare(self.inputs)
        run.run()
        times = [float(seconds) for seconds in np.diff(self.ends)]
        return times, list(self.losses), run.plan.bytes_predicted


class Products:
    """The matrix products of a dense step alone: what a rank multiplies if h and l are cut."""

    def __init__(self, case: Case, steps: int, ranks: int) -> None:
        rng = np.random.default_rng(0)
        self.steps = steps
        hidden = case.hidden // ranks
        labels = case.labels // ranks

        def matrix(rows: int, columns: int) -> Array:
            return rng.standard_normal((rows, columns), np.float32)

        X = matrix(case.batch, case.features)
        W1 = matrix(case.features, hidden)
        A = matrix(case.batch, hidden)
        H = matrix(case.batch, case.hidden)
        W2 = matrix(case.hidden, labels)
        Z = matrix(case.batch, labels)
        self.products = [
            (X, W1, A),
            (H, W2, Z),
            (Z, W2.T, matrix(case.batch, case.hidden)),
            (H.T, Z, matrix(case.hidden, labels)),
            (X.T, A, matrix(case.features, hidden)),
        ]

    def make_steps(self) -> list[float]:
        """Return the times of all steps but the first."""
        ends = []
        for _ in range(self.steps):
            for left, right, out in self.products:
                np.matmul(left, right, out=out)
            ends.append(time.perf_counter())
        return [float(seconds) for seconds in np.diff(ends)]


# ---- measuring -----------------------------------------------------------------------------------


def measure(case: Case, given: argparse.Namespace, world: Any) -> list[dict[str, Any]]:
    """Measure all ways of one case; they take turns, and the first turn warms up."""
    from einmpi.comm.mpi import comm_of

    comm = comm_of(world)
    own = {
        strategy: Own(case, strategy, given.steps + 1, given.backend, comm)
        for strategy in given.strategies
    }
    peers: dict[str, Peer] = {}
    port = world.bcast(20_000 + os.getpid() % 20_000)
    for name in given.peers:
        if name == "products":
            continue
        if name == "ddp":
            peers[name] = Peer(name, case, 1, world.rank, world.size, port)
        elif world.rank == 0:
            peers[name] = Peer(name, case, world.size, 0, 1, 0)
    products = None
    if "products" in given.peers and case.form == "dense":
        products = Products(case, given.steps + 1, world.size)
    names = world.bcast([*own, *peers, *(["products"] if products else [])])
    rows = {name: {"way": name, **vars(case), "times": [], "bytes": None} for name in names}
    losses = {}
    for turn in range(given.repeat + 1):
        for name in names:
            times: list[float] = []
            world.Barrier()
            if name in own:
                times, losses[name], rows[name]["bytes"] = own[name].make_steps()
            elif name == "products":
                assert products is not None
                times = products.make_steps()
            elif name in peers:
                times, found = peers[name].make_steps(given.steps + 1)
                losses.setdefault(name, found)
            done = world.Ibarrier()
            while not done.Test():
                time.sleep(SECONDS_BETWEEN_LOOKS)
            if turn:
                rows[name]["times"] += times
    for peer in peers.values():
        peer.close()
    if "ddp" in rows:
        rows["ddp"]["bytes"] = 2 * (world.size - 1) * case.weights * 4
    if world.rank == 0:
        wanted = losses[given.strategies[0]]
        for name, found in losses.items():
            if name != "ddp":  # its loss is that of a part of the batch
                np.testing.assert_allclose(found, wanted, LOSS_TOLERANCE, err_msg=name)
        for row in rows.values():
            row["median"] = 1e3 * statistics.median(row["times"])
            row["least"] = 1e3 * min(row["times"])
    return list(rows.values())


def shown(row: dict[str, Any], first: dict[str, Any]) -> str:
    """Return a row of the printed table; ratios are those of einmpi's first strategy to it."""
    received = "" if row["bytes"] is None else f"{row['bytes']:,}"
    ratios = f"{first['median'] / row['median']:8.2f}{first['least'] / row['least']:8.2f}"
    head = f"{row['form']:8}{row['batch']:6}  {row['way']:12}"
    return f"{head}{row['median']:10.2f}{row['least']:10.2f}{ratios}{received:>16}"


def main() -> None:
    from mpi4py import MPI

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--form", nargs="+", choices=list(FIRST), default=["dense"])
    parser.add_argument("--batch", nargs="+", type=int, default=[128, 256, 512])
    parser.add_argument("--sizes", nargs=3, type=int, default=[5975, 820, 1459])
    parser.add_argument("--values", type=int, default=72)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--strategies", nargs="+", default=["eindecomp", "data", "model"])
    parser.add_argument(
        "--peers", nargs="*", choices=list(PACKAGES), default=["torch", "jax", "ddp"]
    )
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    given = parser.parse_args()
    world = MPI.COMM_WORLD
    if world.rank == 0:
        given.peers = [name for name in given.peers if has_package(name, PACKAGES[name])]
    given.peers = world.bcast(given.peers)
    if world.rank == 0:
        head = f"{'form':8}{'batch':>6}  {'way':12}{'median ms':>10}{'least':>10}"
        print(f"{head}{'ratio':>8}{'least':>8}{'bytes':>16}", flush=True)
    found = []
    try:
        for form in given.form:
            for batch in given.batch:
                rows = measure(Case(form, batch, *given.sizes, given.values), given, world)
                found += rows
                if world.rank == 0:
                    for row in rows:
                        print(shown(row, rows[0]), flush=True)
        if given.json and world.rank == 0:
            write_results(given.json, found)
    except BaseException:
        traceback.print_exc()
        world.Abort(1)  # the other ranks wait for this one


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        name, form, *numbers = sys.argv[2:]
        whole = [int(number) for number in numbers]
        serve(name, Case(form, *whole[:5]), *whole[5:])
    else:
        main()
