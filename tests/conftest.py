"""On several workers (`pytest -n 2 --dist loadgroup`) one of them has all tests that start ranks: they need the cores."""

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("mpi"):
            item.add_marker(pytest.mark.xdist_group("ranks"))
