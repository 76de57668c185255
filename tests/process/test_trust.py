"""What other users could change: folders, the folders above them, and open files."""

import os
import threading

import pytest

from einmpi.process.environment import (
    UntrustedFileError,
    make_private_folders,
    open_own_file,
    why_not_trusted,
)

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder two levels below the home folder, all of them private."""
    monkeypatch.setenv("HOME", str(tmp_path))
    below = tmp_path / "above" / "folder"
    make_private_folders(str(below))
    return below


def test_a_private_folder_is_trusted(folder):
    assert why_not_trusted(folder) == ""
    assert why_not_trusted(folder / "not" / "yet") == ""


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o2770])
@pytest.mark.parametrize("place", ["", "above", "above/folder"])
def test_no_folder_up_to_home_may_be_open_to_others(folder, tmp_path, place, mode):
    opened = tmp_path / place
    opened.chmod(mode)
    problem = f"{opened}: other users can write to it (mode {mode:o})"
    assert why_not_trusted(folder) == problem
    assert why_not_trusted(folder / "not" / "yet") == problem


def test_folders_above_home_are_the_systems_business(folder, tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    assert why_not_trusted(folder)
    monkeypatch.setenv("HOME", str(tmp_path / "above"))
    assert why_not_trusted(folder) == ""
    monkeypatch.setenv("HOME", str(tmp_path / "elsewhere"))
    assert why_not_trusted(folder)


def test_sticky_folders_are_safe_above_but_not_as_the_folder_itself(folder, tmp_path):
    (tmp_path / "above").chmod(0o1777)
    assert why_not_trusted(folder) == ""
    assert "mode 1777" in why_not_trusted(tmp_path / "above")


def test_links_are_resolved_first(folder, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (folder / "link").symlink_to(shared)
    assert why_not_trusted(folder / "link").startswith(f"{shared}: ")
    (shared / "link").symlink_to(folder)
    assert why_not_trusted(shared / "link") == ""  # what is there is private


@needs_root
@pytest.mark.parametrize("place", ["above", "above/folder"])
def test_no_folder_may_belong_to_another_user(folder, tmp_path, place):
    os.chown(tmp_path / place, NOBODY, NOBODY)
    problem = f"{tmp_path / place}: it belongs to another user (uid {NOBODY})"
    assert why_not_trusted(folder) == problem


def test_private_folders_do_not_depend_on_the_umask(tmp_path):
    before = os.umask(0)
    try:
        make_private_folders(str(tmp_path / "a" / "b"))
    finally:
        os.umask(before)
    for name in ("a", "a/b"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_private_folders(str(tmp_path / "file"))


def test_only_own_regular_files_are_opened(tmp_path):
    file = tmp_path / "file"
    file.write_text("text")
    file.chmod(0o644)
    with open(open_own_file(str(file))) as opened:
        assert opened.read() == "text"
    file.chmod(0o664)
    with pytest.raises(UntrustedFileError, match=r"other users can write to it \(mode 664\)"):
        open_own_file(str(file))
    if os.geteuid() == 0:
        file.chmod(0o644)
        os.chown(file, NOBODY, NOBODY)
        with pytest.raises(UntrustedFileError, match="it belongs to another user"):
            open_own_file(str(file))


def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    found = []

    def attempt():
        with pytest.raises(OSError, match="it is not a regular file"):
            open_own_file(str(tmp_path / "pipe"))
        found.append(True)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(60)
    assert found
