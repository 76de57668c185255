"""Attention kernels compiled for the GPU at hand, and what a launch of one needs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from einmpi.kernels.cuda import driver
from einmpi.process.first_use import COMPILING, first_use

COMPILE_OPTIONS = ("-std=c++17",)
WARPGROUP_ARCHITECTURE = "sm_90a"  # wgmma is in this one alone, not in sm_90


@dataclass(frozen=True)
class AttentionLaunch:
    """A kernel with all of its arguments; names stand for the addresses of arrays."""

    kernel: Any
    blocks: int
    threads: int
    shared_bytes: int
    arguments: Sequence[int | float | str]

    def __call__(self, addresses: Mapping[str, int]) -> None:
        """Launch the kernel; arrays without an address are left out."""
        values = [addresses.get(x, 0) if isinstance(x, str) else x for x in self.arguments]
        self.kernel((self.blocks,), (self.threads,), tuple(values), shared_mem=self.shared_bytes)


@lru_cache(maxsize=256)
def compiled_attention(text: str, warpgroups: bool, shared_bytes: int, device: int) -> Any:
    """Compile the function `kernel` of a text for the current GPU, whose number is `device`."""
    cupy = driver.cupy()
    with first_use(COMPILING):
        if warpgroups:
            module = cupy.RawModule(path=str(_warpgroup_binary(text)))
        else:
            module = cupy.RawModule(code=text, options=COMPILE_OPTIONS)
        kernel = module.get_function("kernel")
    kernel.max_dynamic_shared_size_bytes = shared_bytes
    return kernel


def _warpgroup_binary(text: str) -> Path:
    """Return the file of a text that is compiled for sm_90a, which CuPy itself never asks for.

    Files are in the folder of CuPy's own compiled kernels. Several processes may write one.
    """
    cupy = driver.cupy()
    compiler = cupy.cuda.nvrtc
    kind = f"{WARPGROUP_ARCHITECTURE} {COMPILE_OPTIONS} {compiler.getVersion()}"
    name = sha256(f"{kind}\n{text}".encode()).hexdigest()
    folder = Path(os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache").expanduser()
    path = folder / f"einmpi_{name}.cubin"
    if path.exists():
        return path
    program = compiler.createProgram(text, "attention.cu", (), ())
    try:
        compiler.compileProgram(program, (f"-arch={WARPGROUP_ARCHITECTURE}", *COMPILE_OPTIONS))
        binary = compiler.getCUBIN(program)
    except compiler.NVRTCError as error:
        raise RuntimeError(compiler.getProgramLog(program)) from error
    finally:
        compiler.destroyProgram(program)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        file.write(binary)
    os.replace(file.name, path)
    return path
