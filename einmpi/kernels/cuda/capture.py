"""Whether calls are captured in a CUDA graph, not carried out, and what they may not do then."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# ---- blas ----------------------------------------------------------------------------------------
#
# cuBLAS for calls that are captured in a CUDA graph: CuPy's own functions refuse that.


# cuBLAS chooses its kernels by the size of its workspace: this is what it takes by default, by
# the major number of the GPU's compute capability.
WORKSPACE_BYTES = {9: 2**25, 10: 12 * 2**20, 12: 12 * 2**20}
DEFAULT_WORKSPACE_BYTES = 2**22
NO_REDUCED_PRECISION_SUMS = 16  # a math mode: intermediate sums are not rounded to half precision

_INT = ctypes.c_int
_POINTER = ctypes.c_void_p
_STRIDE = ctypes.c_longlong
_MATRIX = (_POINTER, _INT, _INT)  # address, type, stride of lines
_HEAD = (_POINTER, _INT, _INT, _INT, _INT, _INT, _POINTER)


class NotCapturable(Exception):
    """A call that cannot be captured."""


class CapturedBlas:
    """A handle of cuBLAS whose calls can be captured."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        handle = _POINTER()
        _check(self.library.cublasCreate_v2(ctypes.byref(handle)))
        self.handle = handle
        _check(self.library.cublasSetMathMode(handle, NO_REDUCED_PRECISION_SUMS))
        self.gemm = self.library.cublasGemmEx
        self.gemm.argtypes = [*_HEAD, *_MATRIX, *_MATRIX, _POINTER, *_MATRIX, _INT, _INT]
        self.batched_gemm = self.library.cublasGemmStridedBatchedEx
        batched = (*_MATRIX, _STRIDE)
        self.batched_gemm.argtypes = [
            *_HEAD,
            *batched,
            *batched,
            _POINTER,
            *batched,
            _INT,
            _INT,
            _INT,
        ]

    def use(self, stream: int, workspace: int, nbytes: int) -> None:
        """Let calls run on a stream, with this memory. To change the stream resets the memory."""
        _check(self.library.cublasSetStream_v2(self.handle, _POINTER(stream)))
        size = ctypes.c_size_t(nbytes)
        _check(self.library.cublasSetWorkspace_v2(self.handle, _POINTER(workspace), size))

    def multiply(self, is_batched: bool, arguments: tuple[int, ...]) -> None:
        """Compute a matrix product, or a batch of them."""
        function = self.batched_gemm if is_batched else self.gemm
        _check(function(self.handle, *arguments))


def _check(status: int) -> None:
    if status:
        raise NotCapturable(f"cuBLAS refuses the call with status {status}")


def load_blas() -> CapturedBlas | None:
    """Return a handle of the cuBLAS that this process has loaded; None if there is none."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as file:
            for line in file:
                path = line.rpartition(" ")[2].strip()
                if "/libcublas.so" in path:
                    return CapturedBlas(path)
    except (OSError, AttributeError, NotCapturable):
        pass
    return None


def workspace_bytes(compute_capability: str) -> int:
    """Return the size of the workspace that cuBLAS takes on a GPU, such as "90"."""
    return WORKSPACE_BYTES.get(int(compute_capability[:-1]), DEFAULT_WORKSPACE_BYTES)


class _State(threading.local):
    """What the calls of a thread do."""

    is_capturing = False
    blas: CapturedBlas | None = None  # for matrix products that are captured
    host_was_needed = False
    calls_were_prepared = False


_state = _State()


@contextmanager
def capturing(blas: CapturedBlas | None) -> Iterator[None]:
    """Let the calls of this thread be captured, as long as a `with` block lasts."""
    _state.is_capturing = True
    _state.blas = blas
    try:
        yield
    finally:
        _state.is_capturing = False
        _state.blas = None


def captured_blas() -> CapturedBlas | None:
    """Return what captures matrix products; None if they are carried out."""
    if _state.is_capturing and _state.blas is None:
        raise NotCapturable("there is no cuBLAS whose calls can be captured")
    return _state.blas


def need_host() -> None:
    """Say that a call reads results on the host, or sends data from there.

    Raise an error if the call is to be captured: the host would not repeat it with the graph.
    """
    if _state.is_capturing:
        raise NotCapturable("the call needs the host")
    _state.host_was_needed = True


def prepare_calls() -> None:
    """Say that calls are prepared, which may take memory that stays.

    Raise an error if calls are captured: such memory is not theirs.
    """
    if _state.is_capturing:
        raise NotCapturable("the call is not prepared yet")
    _state.calls_were_prepared = True


def take_host_was_needed() -> bool:
    """Return whether a call of this thread has needed the host since this was last asked."""
    was_needed = _state.host_was_needed
    _state.host_was_needed = False
    return was_needed


def take_calls_were_prepared() -> bool:
    """Return whether this thread has prepared calls since this was last asked."""
    were_prepared = _state.calls_were_prepared
    _state.calls_were_prepared = False
    return were_prepared
