"""Functions during which Python does not search for garbage."""

import gc
import threading

import pytest

from einmpi.garbage import without_garbage_search


@without_garbage_search
def work(during):
    during()
    return gc.isenabled()


def test_the_search_goes_on_afterwards():
    assert gc.isenabled()
    assert work(lambda: None) is False
    assert gc.isenabled()


def test_calls_inside_and_errors():
    assert work(lambda: work(lambda: None)) is False
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        work(lambda: 1 // 0)
    assert gc.isenabled()


def test_threads_that_end_in_another_order():
    first_may_end = threading.Event()
    second_has_begun = threading.Event()
    second_may_end = threading.Event()
    first = threading.Thread(target=work, args=(first_may_end.wait,))

    def during_second():
        second_has_begun.set()
        second_may_end.wait()

    second = threading.Thread(target=work, args=(during_second,))
    first.start()
    second.start()
    second_has_begun.wait()
    first_may_end.set()
    first.join()
    assert not gc.isenabled()
    second_may_end.set()
    second.join()
    assert gc.isenabled()


def test_a_search_that_was_switched_off_stays_off():
    gc.disable()
    try:
        work(lambda: None)
        assert not gc.isenabled()
    finally:
        gc.enable()
