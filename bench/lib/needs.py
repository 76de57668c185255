"""What benchmarks need that not every machine has: a GPU, programs, two hosts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.util import find_spec

from bench.lib.catalogue import Bench, scripts


def lacks_gpu() -> str:
    """Say why nothing runs on a GPU here."""
    if find_spec("cupy") is None:
        return "it needs CuPy and a GPU, and CuPy is not installed"
    import cupy

    try:
        return "" if cupy.cuda.runtime.getDeviceCount() else "it needs a GPU"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"it needs a GPU: {error}"


def lacks_hosts() -> str:
    """Say why two hosts cannot be made of network namespaces here."""
    from tests.lib.namespaces import reason_against

    return reason_against() or ""


def lacks_program(name: str, install: str) -> Callable[[], str]:
    """Return what says that a program is not installed, and how it is."""
    return lambda: "" if shutil.which(name) else f"it needs {name}: {install}"


NEEDS: dict[str, Callable[[], str]] = {
    "gpu": lacks_gpu,
    "hosts": lacks_hosts,
    "mpirun": lacks_program("mpirun", "pip install mpich"),
    "smpirun": lacks_program("smpirun", "apt-get install libsimgrid-dev on Debian"),
    "suite": lambda: "it needs a copy of the suite: python -m bench array_api FOLDER",
}


def reason_to_skip(bench: Bench) -> str:
    """Return why a benchmark cannot run here, in one line; empty if it can."""
    if bench.script not in scripts():
        return f"there is no benchmark {bench.script!r}"
    for need in (*(("mpirun",) if bench.ranks else ()), *bench.needs):
        if reason := NEEDS[need]():
            return " ".join(reason.split())
    return ""
