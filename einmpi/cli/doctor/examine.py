"""All that the doctor looks at, in order."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib.util import find_spec

from einmpi.cli.doctor.finding import Finding, answer_of, start
from einmpi.cli.doctor.libraries import PROBES, numpy_and_blas, packages
from einmpi.cli.doctor.machine import limits, machine, shared_memory, temporary
from einmpi.cli.doctor.ranks import NO_MPIRUN, launcher, ping, slurm

_SECONDS = 60.0  # for a library to load


def examine(seconds: float, started: bool = False) -> Iterator[Finding]:
    """One finding after another. `started`: by a launcher, so that no ranks can be started from here."""
    # All at once: importing takes long. cupy is rarely there, and need not be looked for in vain.
    names = [name for name in PROBES if name != "cupy" or find_spec("cupy")]
    probes = {name: start([sys.executable, "-m", "einmpi.cli.versions", name]) for name in names}
    yield Finding("Python", "ok", f"{platform.python_version()}, {sys.executable}")
    yield numpy_and_blas()
    yield from packages()
    answers = {}
    for name, tell in PROBES.items():
        answers[name] = (
            answer_of(probes[name], _SECONDS)
            if name in probes
            else {"error": "it is not installed"}
        )
        yield tell(answers[name])
    starter = launcher(answers["mpi"])
    yield starter
    yield slurm(answers["mpi"])
    yield machine()
    yield limits()
    yield shared_memory()
    yield temporary()
    if started:
        yield Finding(
            "ping",
            "note",
            "left out: a launcher has started this process",
            "einmpi doctor, without mpirun",
        )
    elif "error" in answers["mpi"] or starter.state == "problem" or starter.text == NO_MPIRUN:
        yield Finding("ping", "note", "left out: it needs mpi4py and mpirun")
    else:
        yield ping(seconds)
