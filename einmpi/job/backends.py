"""The backends a job can ask for: one record each.

`register_backend` adds one; job files, the command line and the documentation follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from einmpi.planner.chains.blocks import CHAIN_BLOCK_BYTES, OPERATIONS_OF_A_BYTE


@dataclass(frozen=True)
class BackendRecord:
    """A backend.

    Parameters
    ----------
    name : str
        The value of ``backend`` in a job file and of ``--backend``.
    documentation : str
        One line for the table of backends.
    workplace : str
        ``"package.module:function"``: a function of a Job and a Comm that returns a
        ``einmpi.compiled.backends.Workplace``. As with an entry point of a package, the module is
        imported when a run needs it: reading and planning a job load no library of a GPU.
    chain_bytes : int
        The memory that the blocks of a fused chain may take: what fits into a CPU's cache, or
        what gives a GPU enough to do at a time.
    operations_of_a_byte : int
        How many operations of a matrix product take as long as to read or write a byte of memory.
    is_on_host : bool
        Whether arrays are in the memory of the host, which the ranks of a node can share.
    """

    name: str
    documentation: str
    workplace: str
    chain_bytes: int = CHAIN_BLOCK_BYTES
    operations_of_a_byte: int = OPERATIONS_OF_A_BYTE
    is_on_host: bool = False


_BACKENDS: dict[str, BackendRecord] = {}


def register_backend(new: BackendRecord) -> None:
    """Add a backend. Raise ValueError if its name is taken."""
    if new.name in _BACKENDS:
        raise ValueError(f"there is a backend {new.name!r} already")
    _BACKENDS[new.name] = new


def unregister_backend(name: str) -> None:
    """Remove a backend that `register_backend` has added."""
    del _BACKENDS[name]


def all_backends() -> tuple[BackendRecord, ...]:
    """Return all backends in the order in which they were registered; the first is the default."""
    return tuple(_BACKENDS.values())


def backend_names() -> tuple[str, ...]:
    """Return the names of all backends."""
    return tuple(_BACKENDS)


def backend_record(name: str) -> BackendRecord:
    """Return the backend with this name."""
    return _BACKENDS[name]


register_backend(
    BackendRecord(
        name="numpy",
        documentation="CPUs: NumPy, BLAS and compiled loops",
        workplace="einmpi.compiled.backends:on_host",
        is_on_host=True,
    )
)
register_backend(
    BackendRecord(
        name="cupy",
        documentation="[GPUs](gpu.md) of NVIDIA: CuPy, cuBLAS and compiled kernels",
        workplace="einmpi.compiled.backends:on_gpu",
        chain_bytes=2**28,
        operations_of_a_byte=64,
    )
)
