"""A stand-in for CuPy without a GPU: memory, copies, streams and messages, on numpy.

It runs no kernels: numpy computes instead. Kernels are tested with cupy_on_cpu. It is stricter than
a GPU: its arrays never become numpy arrays implicitly, and copies on streams of their own are done
as late as possible, so that code that forgets to wait sees old values. A graph repeats the captured
calls on the addresses that they were captured with.
"""

from __future__ import annotations

import ctypes
import queue
import sys
import threading
import types
from collections import defaultdict
from contextlib import contextmanager
from typing import Any

import numpy as np

from einmpi.graph.scalar import gathers_in
from einmpi.kernels.cuda import capture as watch
from einmpi.schedule.regions import indices

_alive: list[Any] = []  # keeps all memory: a late copy must not write into a newer array


def _pointer(values):
    """The address of an array, and that of the memory that it is a part of."""
    whole = values
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    memory = types.SimpleNamespace(ptr=whole.ctypes.data)
    return types.SimpleNamespace(ptr=values.ctypes.data, mem=memory)


class ndarray:
    """An array on the device."""

    __array_priority__ = 100

    def __init__(self, values: np.ndarray, owns_memory: bool = True) -> None:
        self.values = values
        if owns_memory:
            _alive.append(values)

    shape = property(lambda self: self.values.shape)
    dtype = property(lambda self: self.values.dtype)
    ndim = property(lambda self: self.values.ndim)
    size = property(lambda self: self.values.size)
    nbytes = property(lambda self: self.values.nbytes)
    strides = property(lambda self: self.values.strides)
    flags = property(lambda self: self.values.flags)
    data = property(lambda self: _pointer(self.values))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return dict(self.values.__array_interface__)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def reshape(self, *shape: Any) -> ndarray:
        found = self.values.reshape(*shape)
        assert found.size == 0 or np.may_share_memory(found, self.values), "reshape makes a copy"
        return ndarray(found)

    def view(self, dtype: Any) -> ndarray:
        return ndarray(self.values.view(dtype))

    def astype(self, dtype: Any) -> ndarray:
        return ndarray(self.ready().astype(dtype))

    def copy(self) -> ndarray:
        return ndarray(self.ready().copy())

    def ready(self) -> np.ndarray:
        """The values, after all that the current stream was told to wait for."""
        _current_stream().synchronize()
        return self.values

    def __getitem__(self, place: Any) -> ndarray:
        found = np.asarray(self.ready()[_place(place)])
        if not np.may_share_memory(found, self.values):
            _refuse_in_capture("an array of indices")
        return ndarray(found)

    def __setitem__(self, place: Any, values: ndarray) -> None:
        assert isinstance(values, ndarray), f"a GPU array is filled with {type(values).__name__}"
        _launch(lambda to, source: to.__setitem__(_place(place), source), self, values)


def _place(place: Any) -> Any:
    sides = place if isinstance(place, tuple) else (place,)
    for side in sides:
        assert isinstance(side, slice | ndarray | int | type(...)), (
            f"a GPU array is indexed with {type(side).__name__}"
        )
    return tuple(side.values if isinstance(side, ndarray) else side for side in sides)


class Stream:
    """Work that is done when something waits for it; the null stream works at once."""

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        self.null, self.work, self.ptr = null, [], id(self)
        self.captured: list[Any] | None = None
        _streams[self.ptr] = self

    def __enter__(self) -> Stream:
        _thread.streams.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _thread.streams.pop()

    def begin_capture(self) -> None:
        assert not self.null, "the null stream cannot be captured"
        self.captured = []

    def end_capture(self) -> Graph:
        captured, self.captured = self.captured, None
        return Graph(captured)

    def wait_event(self, event: Event) -> None:
        self.add(event.synchronize)

    def add(self, action: Any) -> None:
        if self.null:  # all threads share it, so no work is left in it
            action()
        else:
            self.work.append(action)

    def run(self, count: int) -> None:
        for number in range(count):
            action, self.work[number] = self.work[number], None
            if action is not None:
                action()

    def synchronize(self) -> None:
        self.run(len(self.work))


class Graph:
    """Captured calls; `launches` counts how often all graphs were launched."""

    launches = 0

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def launch(self, stream: Stream) -> None:
        assert stream.null
        Graph.launches += 1
        for call in self.calls:
            call()


class _Thread(threading.local):
    """The streams and allocators that a thread uses; the last one counts."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.allocators: list[Any] = []


_thread = _Thread()


def _current_stream() -> Stream:
    return _thread.streams[-1] if _thread.streams else _null


def _launch(action: Any, *arrays: ndarray) -> None:
    """Work on the values of arrays, or capture that. A graph has only their addresses."""
    captured = _current_stream().captured
    if captured is None:
        action(*(array.ready() for array in arrays))
    else:
        views = [_without_owner(array.values) for array in arrays]
        captured.append(lambda: action(*views))


def _without_owner(values: np.ndarray) -> np.ndarray:
    """Return the same elements, without keeping their memory."""
    if values.size == 0:
        return values
    assert all(stride >= 0 for stride in values.strides)
    extent = zip(values.shape, values.strides, strict=True)
    nbytes = values.itemsize + sum((size - 1) * stride for size, stride in extent)
    memory = (ctypes.c_uint8 * nbytes).from_address(values.ctypes.data)
    return np.ndarray(values.shape, values.dtype, memory, 0, values.strides)


def _refuse_in_capture(what: str) -> None:
    if _current_stream().captured is not None:
        raise CUDARuntimeError(f"{what} cannot be captured")


class MemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset


class UnownedMemory:
    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        assert ptr and size > 0
        self.ptr, self.size, self.owner = ptr, size, owner


class _Pool:
    """Memory that is used again, the block that was given back last first."""

    def __init__(self) -> None:
        self.unused: dict[int, list[np.ndarray]] = defaultdict(list)
        self.limit: int | None = None  # bytes of one allocation

    def malloc(self, nbytes: int) -> MemoryPointer:
        if self.limit is not None and nbytes > self.limit:
            raise MemoryError
        blocks = self.unused[nbytes]
        return MemoryPointer(
            _Block(self, blocks.pop() if blocks else _garbage(nbytes + 1, "u1")), 0
        )


class _Block:
    def __init__(self, pool: _Pool, values: np.ndarray) -> None:
        self.pool, self.values, self.ptr = pool, values, values.ctypes.data

    def __del__(self) -> None:
        self.values[...] = 0x5B  # nobody relies on what it had
        self.pool.unused[self.values.size - 1].append(self.values)


def _new_array(pool: _Pool | None, shape: Any, dtype: Any) -> ndarray:
    """Return an array with arbitrary values, from the allocator in use."""
    if not _thread.allocators and pool is None:
        return ndarray(_garbage(shape, dtype))
    allocate = _thread.allocators[-1] if _thread.allocators else pool.malloc
    shape = (shape,) if isinstance(shape, int) else shape
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    if nbytes == 0:
        return ndarray(_garbage(shape, dtype))
    pointer = allocate(nbytes)
    memory = (ctypes.c_uint8 * nbytes).from_address(pointer.ptr)
    memory.pointer = pointer  # as long as there is an array in it, or a view
    return ndarray(np.frombuffer(memory, np.uint8).view(dtype).reshape(shape), owns_memory=False)


def _pinned_memory(nbytes: int) -> memoryview:
    """Return memory that takes no pages before it is written, and that has no values.

    Like that of CuPy it is no array: views of an array on top of it keep that array alive.
    """
    return memoryview(np.empty(max(nbytes, 1), np.uint8))


@contextmanager
def _using_allocator(allocator: Any) -> Any:
    _thread.allocators.append(allocator)
    try:
        yield
    finally:
        _thread.allocators.pop()


class Event:
    def __init__(self, disable_timing: bool = False) -> None:
        self.stream, self.count = None, 0

    def record(self, stream: Stream) -> None:
        self.stream, self.count = stream, len(stream.work)

    def synchronize(self) -> None:
        self.stream.run(self.count)

    @property
    def done(self) -> bool:
        return not any(self.stream.work[: self.count])


class Device:
    """A GPU, which a thread uses in a `with` block."""

    compute_capability = "75"

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: Any) -> None: ...


_streams: dict[int, Stream] = {}
_null = Stream(null=True)


class CUDARuntimeError(RuntimeError):
    pass


_registered: list[int] = []  # the addresses of host memory that is pinned where it is


def _register(address: int, nbytes: int, flags: int) -> None:
    if address in _registered:
        raise CUDARuntimeError("the memory is registered already")
    _registered.append(address)


def _copy(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
    _refuse_in_capture("a copy between host and GPU")
    _streams[stream].add(lambda: ctypes.memmove(target, source, nbytes))


def _copy_rows(
    target: int, pitch: int, source: int, other: int, width: int, rows: int, kind: int, stream: int
) -> None:
    assert pitch >= width and other >= width
    for row in range(rows):
        _copy(target + row * pitch, source + row * other, width, kind, stream)


_boxes: Any = defaultdict(queue.Queue)
_boxes_lock = threading.Lock()


def _box(*key: Any) -> Any:
    """Return the messages from one rank to another. Both make it, in threads of their own."""
    with _boxes_lock:
        return _boxes[key]


class NcclCommunicator:
    """Messages between threads."""

    def __init__(self, size: int, identity: tuple[int, ...], rank: int) -> None:
        self.identity, self.rank = identity, rank

    def send(self, pointer: int, count: int, _: Any, peer: int, stream: int) -> None:
        _streams[stream].synchronize()
        _box(self.identity, self.rank, peer).put(ctypes.string_at(pointer, count))

    def recv(self, pointer: int, count: int, _: Any, peer: int, stream: int) -> None:
        found = _box(self.identity, peer, self.rank).get(timeout=60)
        assert len(found) == count, f"{len(found)} bytes sent, {count} expected"
        ctypes.memmove(pointer, found, count)


_identities = iter(range(10**9))


def make(
    gpus: int = 1, nccl: bool = False, memory: int = 2**33, pool: _Pool | None = None
) -> dict[str, types.ModuleType]:
    """Return the modules of a CuPy that sees this many GPUs.

    With a pool, memory is used again. Without one, each array has memory of its own.
    """
    cupy: Any = types.ModuleType("cupy")
    modules: dict[str, types.ModuleType] = {}
    cupy.__path__ = []
    cupy.ndarray = ndarray
    cupy.empty = lambda shape, dtype=np.float64: _new_array(pool, shape, dtype)

    def asarray(values: Any) -> ndarray:
        if isinstance(values, ndarray):
            return values
        _refuse_in_capture("a copy from the host")
        return ndarray(np.array(values))

    cupy.asarray = asarray
    cupy.ascontiguousarray = lambda array: ndarray(np.ascontiguousarray(array.ready()))
    cupy.asnumpy = lambda array: array.ready().copy()
    cupy.lib = types.SimpleNamespace(stride_tricks=types.SimpleNamespace(as_strided=_as_strided))
    cupy.get_default_memory_pool = lambda: types.SimpleNamespace(free_bytes=lambda: 0)
    for name in ("add", "multiply", "maximum", "minimum", "logical_or", "logical_and"):
        ufunc = getattr(np, name)
        setattr(
            cupy,
            name,
            lambda one, two, ufunc=ufunc: ndarray(np.asarray(ufunc(one.ready(), two.ready()))),
        )
    runtime = types.SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=lambda: gpus,
        setDevice=lambda number: None,
        getDeviceProperties=lambda number: {
            "name": b"Paper GPU",
            "totalGlobalMem": memory,
            "uuid": bytes([number]),
        },
        memcpyAsync=_copy,
        memcpy2DAsync=_copy_rows,
        memcpyHostToDevice=1,
        memcpyDeviceToHost=2,
        hostRegister=_register,
        hostUnregister=_registered.remove,
    )
    cupy.cuda = types.ModuleType("cupy.cuda")
    cupy.cuda.__path__ = []
    vars(cupy.cuda).update(
        runtime=runtime,
        Stream=Stream,
        Event=Event,
        get_current_stream=_current_stream,
        Device=Device,
        MemoryPointer=MemoryPointer,
        UnownedMemory=UnownedMemory,
        get_allocator=lambda: (
            _thread.allocators[-1] if _thread.allocators else (pool or _Pool()).malloc
        ),
        using_allocator=_using_allocator,
        alloc_pinned_memory=_pinned_memory,
    )
    # Like the real module, it is no attribute of cupy.cuda before it is imported.
    vars(modules.setdefault("cupy.cuda.nccl", types.ModuleType("cupy.cuda.nccl"))).update(
        available=nccl,
        NcclCommunicator=NcclCommunicator,
        NCCL_UINT8=1,
        groupStart=lambda: None,
        groupEnd=lambda: None,
        get_unique_id=lambda: next(_identities).to_bytes(8),
    )
    return {"cupy": cupy, "cupy.cuda": cupy.cuda, **modules}


def _as_strided(array: ndarray, shape: Any, strides: Any) -> ndarray:
    return ndarray(np.lib.stride_tricks.as_strided(array.values, shape, strides))


def _garbage(shape: Any, dtype: Any) -> np.ndarray:
    """Return new memory with arbitrary values."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[...] = 0x5B
    return array


def compute(
    einsum: Any,
    operands: Any,
    target: Any,
    index: Any,
    fast_math: bool = False,
    tf32: bool = False,
    strict: bool = False,
) -> None:
    """Stand in for einmpi.kernels.cuda.dispatch.compute_einsum, with numpy."""
    from einmpi.kernels.cpu.dispatch import compute_einsum as on_host

    is_gathered = any(map(gathers_in, einsum.operands))
    if is_gathered or einsum.pick is not None or einsum.segments is not None:
        watch.need_host()  # it checks the indices
    numbers = {label: indices(runs) for label, runs in index}
    _launch(lambda to, *given: on_host(einsum, given, to, numbers), target, *operands)


def prepare(*given: Any) -> Any:
    """Stand in for einmpi.kernels.cuda.dispatch.prepare_einsum, with numpy."""
    einsum, _, _, options = given
    return lambda operands, target: compute(einsum, operands, target, *options)


def prepare_group(step: Any, arrays: Any, fast_math: bool = False) -> Any:
    """Stand in for einmpi.kernels.cuda.group.prepare_group: one launch, by numpy."""

    def compute_group(arrays: Any) -> int:
        known = dict(arrays)
        for slot in step.inner:
            known[slot.name] = ndarray(_garbage(slot.shape, slot.dtype))
        for kernel in step.kernels:
            operands = [known[slot.name] for slot in kernel.operands]
            compute(kernel.einsum, operands, known[kernel.target.name], kernel.index)
        return 0

    return compute_group


def install(monkeypatch: Any, **settings: Any) -> None:
    """Pretend that CuPy is installed; numpy computes instead of kernels."""
    from einmpi.kernels.cuda import dispatch, group
    from einmpi.runtime.gpu import backend

    for name, module in make(**settings).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(dispatch, "compute_einsum", compute)
    monkeypatch.setattr(dispatch, "prepare_einsum", prepare)
    monkeypatch.setattr(group, "prepare_group", prepare_group)
    monkeypatch.setattr(backend, "prepare_row_writes", lambda *_: None)
    monkeypatch.setattr(backend, "_contexts", {})
    monkeypatch.setattr(Graph, "launches", 0)
    _alive.clear()
    _registered.clear()


def new_pool() -> _Pool:
    return _Pool()
