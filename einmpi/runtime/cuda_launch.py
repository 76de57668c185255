"""CuPy, imported when it is needed, and what it makes of a kernel's text."""

from __future__ import annotations

from typing import Any

# numpy rounds after every operation: a product that is fused with a sum would give a·b − a·b ≠ 0. Where one rounding is
# wanted, a kernel says so.
OPTIONS = ("-std=c++17", "--fmad=false")
FAST = ("-std=c++17", "--use_fast_math")


def cupy() -> Any:
    import cupy as module  # type: ignore[import-not-found]

    return module


def compiled(text: str, fast: bool) -> Any:
    """A kernel from its text. CuPy keeps compiled ones on disk; several processes may start at once."""
    return cupy().RawModule(code=text, options=FAST if fast else OPTIONS).get_function("kernel")
