"""Programs that several threads read at once."""

import gc
import sys
import threading

import pytest

from einmpi.language.syntax import Source, parse

TEXT = "\n".join(f"Z{k}[i] = sum((X[i,j] + {k}) * (Y[j] - {k}))" for k in range(20))


class Cycle:
    """Garbage whose collection, in the middle of parsing, lets other threads run."""

    def __init__(self):
        self.own = self

    def __del__(self):
        sum(range(50))


@pytest.fixture
def many_switches():
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-5)
    gc.set_threshold(10)
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*threshold)


def test_threads_parse_at_once(many_switches):
    errors = []

    def read():
        try:
            for _ in range(10):
                Cycle()
                assert len(parse(Source("program", TEXT))) == 20
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
