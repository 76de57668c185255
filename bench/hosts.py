"""The skewed matrix chain on two hosts with a slow network between them, under every strategy.

    python bench/hosts.py [--size 1200] [--rate 1gbit] [--rounds 3] [--repeat 3]

The hosts are network namespaces of this machine (tests/namespaces.py), each with half of its cores. Strategies take
turns; seconds are the median of all runs. The machine is calibrated first, so that predicted seconds stand beside the
measured ones. Needs root, ip and tc.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import einmpi
from einmpi.plan.explain import compare
from einmpi.units import show_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from namespaces import ROOT, hosts, reason_against

# Roles, so that data and model parallelism apply too: rows of the result, and the long label that is summed over.
ROLES = '\n[roles]\nbatch = ["i"]\nhidden = ["l"]\n'

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def answer(run: Run, per_host: int, *arguments: str) -> dict[str, Any]:
    """The JSON that a command prints."""
    done = run(per_host, ["-m", "einmpi", *arguments, "--json", "-"], timeout=600)
    if done.returncode:
        raise SystemExit(f"einmpi {' '.join(arguments)}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def measure(run: Run, per_host: int, job: Path, options: argparse.Namespace) -> None:
    settings = ["--set", f"s={options.size}", "--set", "skew=10"]
    machine = str(job.with_name(f"machine{per_host}.toml"))
    rates = answer(run, per_host, "calibrate", "--save", machine)
    loaded = einmpi.load(job, s=options.size, skew=10)
    plans = compare(lambda name: einmpi.plan(loaded, 2 * per_host, strategy=name, nodes=2)).plans
    names = [plan.strategy for plan in plans]
    times: dict[str, list[float]] = {name: [] for name in names}
    found: dict[str, dict[str, Any]] = {}
    for _ in range(options.rounds):
        for name in names:
            flags = ["--strategy", name, "--repeat", str(options.repeat + 1), "--machine", machine]
            found[name] = answer(run, per_host, "run", str(job), *settings, *flags)
            times[name] += found[name]["seconds_all"][1:]  # the first one makes the connections
    print(f"chain, skewed, s = {options.size}, 2 hosts × {per_host} ranks, {options.rate} between them; medians of "
          f"{options.rounds * options.repeat}")  # fmt: skip
    print(f"  a rank gets {rates['between']['bandwidth'] / 1e6:.0f} MB/s from the other host")
    base = statistics.median(times[names[0]])
    print(f"  {'strategy':16}{'between hosts':>14}{'counted':>12}{'seconds':>10}{'predicted':>11}{'ratio':>7}")
    for name, data in found.items():
        median = statistics.median(times[name])
        same = data["bytes_between"] == data["bytes_between_predicted"]
        print(f"  {name:16}{show_bytes(data['bytes_between_predicted']):>14}"
              f"{'the same' if same else show_bytes(data['bytes_between']):>12}{median:>10.3f}"
              f"{data['seconds_predicted']:>11.3f}{median / base:>7.2f}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1200)
    parser.add_argument("--rate", default="1gbit", help="of the network, as tc takes it")
    parser.add_argument("--rounds", type=int, default=3, help="how often strategies take turns")
    parser.add_argument("--repeat", type=int, default=3, help="runs of a strategy each time")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2], help="on each host")
    options = parser.parse_args()
    if reason := reason_against():
        sys.exit(f"bench/hosts.py: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the hosts are taken down on the way out
    with tempfile.TemporaryDirectory() as folder, hosts(options.rate) as run:
        job = Path(folder, "chain.toml")
        job.write_text((ROOT / "jobs" / "chain.toml").read_text() + ROLES)
        for per_host in options.ranks:
            measure(run, per_host, job, options)


if __name__ == "__main__":
    main()
