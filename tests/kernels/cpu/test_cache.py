"""The cache of compiled kernels: numba unpickles it, so nobody else may have written to it."""

import hashlib
import json
import os
import pickle
import signal

import numba
import pytest
from mpi_helpers import needs_mpirun, run_mpi

from einmpi.kernels.cpu import cache
from einmpi.process.names import NAMES

NOBODY = 65534

SOURCE = "def kernel(address):\n    return\n"
RUN = """
from einmpi.kernels.cpu.cache import build_kernel
build_kernel("def kernel(address):\\n    return\\n")
"""
REPORT = "other users can write to it (mode {:o}); kernels are compiled without a cache"


class Attack:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder for kernels that only this user can write to."""
    monkeypatch.setattr(cache, "_REPORTED", [])
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    NAMES.release_all()
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o700)
    yield folder
    NAMES.release_all()


@pytest.fixture
def build(folder, monkeypatch, capsys):
    """A function that compiles or loads a kernel and returns which, and the lines printed."""

    def build(where=folder):
        monkeypatch.setenv("EINMPI_CACHE_DIR", str(where))
        kernel, was_on_disk = cache.build_kernel(SOURCE)
        kernel(0)
        return "loaded" if was_on_disk else "compiled", capsys.readouterr().err.splitlines()

    return build


def plant(folder, attacked):
    """Put an attack in place of the index of each kernel, with a digest that agrees."""
    for index in folder.rglob("*.nbi"):
        index.write_bytes(pickle.dumps(Attack(attacked)))
        kernel = index.name.partition(".")[0]
        (sums,) = folder.rglob(f"{kernel}.sum")
        digests = json.loads(sums.read_text())
        digests[str(index)] = hashlib.sha256(index.read_bytes()).hexdigest()
        sums.write_text(json.dumps(digests))


def test_a_planted_kernel_would_run_without_the_checks(build, folder, tmp_path):
    """The attack of the other tests works: what this user has written is loaded."""
    assert build() == ("compiled", [])
    assert build() == ("loaded", [])
    plant(folder, tmp_path / "attacked")
    assert build() == ("compiled", [])  # the attack is no index, so the kernel is compiled
    assert (tmp_path / "attacked").exists()


@pytest.mark.parametrize("mode", [0o770, 0o707])
@pytest.mark.parametrize("place", ["folder", "above", "__pycache__"])
def test_nothing_is_loaded_from_a_folder_that_others_can_write(
    build, folder, tmp_path, place, mode
):
    assert build() == ("compiled", [])
    plant(folder, tmp_path / "attacked")
    opened = {
        "folder": folder,
        "above": folder.parent,
        "__pycache__": next(folder.rglob("__pycache__")),
    }[place]
    opened.chmod(mode)
    source, lines = build()
    assert source == "compiled" and not (tmp_path / "attacked").exists()
    assert len(lines) == 1 and lines[0].startswith(f"einmpi: {opened}: {REPORT.format(mode)}")


def test_nothing_is_written_to_a_folder_that_others_can_write(build, folder):
    folder.chmod(0o777)
    assert build(folder / "below")[0] == "compiled"
    assert list(folder.iterdir()) == []


def test_files_that_others_can_write_are_compiled_again(build, folder, tmp_path):
    """They may be left from a time when the folder was open."""
    assert build() == ("compiled", [])
    plant(folder, tmp_path / "attacked")
    (index,) = folder.rglob("*.nbi")
    if os.geteuid() == 0:
        os.chown(index, NOBODY, NOBODY)
    else:
        index.chmod(0o666)
    assert build() == ("compiled", [])
    assert build() == ("loaded", [])
    assert not (tmp_path / "attacked").exists()


def test_an_index_that_no_digest_names_is_not_loaded(build, folder, tmp_path):
    assert build() == ("compiled", [])
    (sums,) = folder.rglob("*.sum")
    (index,) = folder.rglob("*.nbi")
    digests = json.loads(sums.read_text())
    del digests[str(index)]
    sums.write_text(json.dumps(digests))
    index.write_bytes(pickle.dumps(Attack(tmp_path / "attacked")))
    assert build() == ("compiled", [])
    assert not (tmp_path / "attacked").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_nothing_is_loaded_from_a_folder_of_another_user(build, folder, tmp_path):
    assert build() == ("compiled", [])
    plant(folder, tmp_path / "attacked")
    os.chown(folder, NOBODY, NOBODY)
    source, lines = build()
    assert source == "compiled" and not (tmp_path / "attacked").exists()
    assert len(lines) == 1 and f"it belongs to another user (uid {NOBODY})" in lines[0]


def test_the_folder_that_numba_is_told_to_use_is_checked_too(build, tmp_path, monkeypatch):
    elsewhere = tmp_path / "numba"
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(elsewhere))
    source, lines = build()
    assert source == "compiled"
    assert len(lines) == 1 and lines[0].startswith(f"einmpi: {elsewhere}: {REPORT.format(0o777)}")


def test_a_umask_that_lets_a_group_write_does_not_open_the_cache(build, tmp_path):
    below = tmp_path / "cache" / "below"
    before = os.umask(0o002)
    try:
        assert build(below) == ("compiled", [])
        assert build(below) == ("loaded", [])
    finally:
        os.umask(before)
    for path in [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]:
        assert not path.stat().st_mode & 0o022 or path.suffix == ".lock", path


def test_a_pipe_in_the_place_of_a_lock_is_not_waited_for(build, folder):
    assert build() == ("compiled", [])
    (lock,) = folder.rglob("*.lock")
    (sums,) = folder.rglob("*.sum")
    sums.unlink()  # so the kernel must be compiled again
    lock.unlink()
    os.mkfifo(lock)
    signal.alarm(60)  # ends the process if it waits
    assert build() == ("compiled", [])
    signal.alarm(0)


@pytest.mark.slow
@needs_mpirun
def test_one_rank_of_a_machine_reports_it(folder):
    folder.chmod(0o777)
    done = run_mpi(3, RUN, env={"EINMPI_CACHE_DIR": str(folder)})
    assert done.returncode == 0
    assert done.stderr.count("kernels are compiled without a cache") == 1, done.stderr
