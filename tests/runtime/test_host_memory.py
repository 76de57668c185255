"""Memory of large arrays that is used again."""

from __future__ import annotations

import itertools
import threading

import numpy as np

from einmpi.runtime.host_memory import (
    ALIGNMENT,
    ARRAYS_ALLOCATED_TOGETHER,
    MIN_RECYCLED_BYTES,
    RecycledMemory,
    SmallArrays,
)

COUNT = MIN_RECYCLED_BYTES // 8  # float64 elements of the smallest arrays that are recycled


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def kept_bytes(memory: RecycledMemory) -> int:
    return sum(block.nbytes - ALIGNMENT for block in memory.blocks)


def test_memory_of_an_array_that_is_gone_is_used_again() -> None:
    memory = RecycledMemory()
    first = memory.array((COUNT,), "float64")
    place = address(first)
    assert place % ALIGNMENT == 0
    del first
    second = memory.array((2, COUNT // 2), "int64")
    assert address(second) == place
    assert second.shape == (2, COUNT // 2) and second.dtype == np.int64


def test_memory_with_a_view_in_it_is_in_use() -> None:
    memory = RecycledMemory()
    first = memory.array((COUNT,), "float64")
    first[...] = 1.0
    view = first[3:5].reshape(2, 1)
    exported = memoryview(first)
    del first
    second = memory.array((COUNT,), "float64")
    second[...] = 2.0
    assert view.ravel().tolist() == [1.0, 1.0]
    del view
    third = memory.array((COUNT,), "float64")
    third[...] = 3.0
    assert exported[4] == 1.0
    exported.release()
    del exported
    fourth = memory.array((COUNT,), "float64")
    assert len({address(second), address(third), address(fourth)}) == 3
    assert len(memory.blocks) == 3


def test_no_more_is_kept_than_was_in_use_at_once() -> None:
    memory = RecycledMemory()
    rng = np.random.default_rng(1)
    arrays: list[np.ndarray] = []
    most = 0
    for _ in range(200):
        if arrays and rng.random() < 0.5:
            del arrays[int(rng.integers(len(arrays)))]
        else:
            arrays.append(memory.array((COUNT * int(rng.integers(1, 5)),), "float64"))
        most = max(most, sum(array.nbytes for array in arrays))
        assert kept_bytes(memory) <= most
        places = sorted((address(array), array.nbytes) for array in arrays)
        for (start, nbytes), (following, _) in itertools.pairwise(places):
            assert start + nbytes <= following


def test_small_arrays_are_not_kept() -> None:
    memory = RecycledMemory()
    memory.array((COUNT // 2,), "float64")
    assert not memory.blocks


def test_release_leaves_arrays_their_memory() -> None:
    memory = RecycledMemory()
    array = memory.array((COUNT,), "float64")
    array[...] = 7.0
    memory.release()
    other = memory.array((COUNT,), "float64")
    other[...] = 8.0
    assert np.all(array == 7.0)


def test_memory_is_released_while_another_thread_looks_for_idle_blocks() -> None:
    """Runs of one compiled job on two threads: one ends while the other takes memory."""
    memory = RecycledMemory()
    other_run = threading.Thread(target=memory.release)

    class Blocks(list[np.ndarray]):
        """Blocks at which a thread looks so slowly that another one has time to act."""

        def __getitem__(self, place):
            if not other_run.ident:
                other_run.start()
                other_run.join(0.05)
            return super().__getitem__(place)

    first = memory.array((COUNT,), "float64")
    memory.blocks = Blocks(memory.blocks)
    second = memory.array((2 * COUNT,), "float64")
    other_run.join()
    assert not np.may_share_memory(first, second)
    assert kept_bytes(memory) == 0


def test_small_arrays_that_are_allocated_together_do_not_overlap() -> None:
    for extents in ((), (1,), (3, 5), (64,), (0, 4)):
        for dtype in ("float64", "bool", "complex64"):
            small = SmallArrays(extents, np.dtype(dtype))
            arrays = [small.take() for _ in range(3 * ARRAYS_ALLOCATED_TOGETHER)]
            for array in arrays:
                assert array.shape == extents and array.dtype == dtype
                assert array.flags.c_contiguous and array.flags.writeable
                assert array.size == 0 or address(array) % ALIGNMENT == 0
            for first, second in itertools.combinations(arrays, 2):
                assert not np.shares_memory(first, second)
