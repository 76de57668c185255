"""Files that a user names are replaced whole or not at all; devices and pipes stay."""

import os
import stat
import subprocess
import sys

import pytest
from mpi_helpers import ROOT

from einmpi.errors import InputError
from einmpi.files.atomic import check_replaceable, replace_file

pytestmark = pytest.mark.usefixtures("in_folder")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    (tmp_path / "real").mkdir()
    file = tmp_path / "real/run.json"
    os.symlink(file, "run.json")
    replace_file("run.json", [b"a", b"\x00"])
    file.chmod(0o600)

    def pieces():
        yield b"half"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        replace_file("run.json", pieces())
    assert file.read_bytes() == b"a\x00"
    replace_file("run.json", [b"b"])
    assert (
        file.read_bytes() == b"b"
        and stat.S_IMODE(file.stat().st_mode) == 0o600
        and os.path.islink("run.json")
    )
    assert [path.name for path in file.parent.iterdir()] == ["run.json"]


def test_a_pipe_stays_a_pipe():
    """A rename would put a file in its place, and in that of /dev/null."""
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    replace_file("pipe", [b"text"])
    assert (
        os.read(reader, 100) == b"text"
        and stat.S_ISFIFO(os.stat("pipe").st_mode)
        and os.listdir() == ["pipe"]
    )
    os.close(reader)


@pytest.mark.parametrize(
    "name, piped", [("/dev/stdout", False), ("out.txt", False), ("/dev/stdout", True)]
)
def test_what_is_printed_to_is_not_replaced(name, piped, tmp_path):
    """Else all that is printed later would be lost."""
    code = (
        "from einmpi.files.atomic import replace_file; print('one'); "
        f"replace_file({name!r}, [b'two\\n']); "
        "print('three')"
    )
    with open(tmp_path / "out.txt", "wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE if piped else out,
            check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            timeout=120,
        )
    printed = done.stdout.decode() if piped else (tmp_path / "out.txt").read_text()
    assert printed == "one\ntwo\nthree\n"


def test_what_cannot_be_written_is_known_before(tmp_path):
    (tmp_path / "file").touch()
    os.mkfifo("pipe")
    for file in ("file", "new", "pipe", "/dev/null", "/dev/stdout"):
        check_replaceable(file, "--json")
    os.symlink("circle", "circle")
    reasons = {
        ".": "Is a directory",
        "new/": "Is a directory",
        "none/x": "No such file or directory",
        "file/x": "Not a directory",
        "circle": "Too many levels of symbolic links",
    }
    for file, reason in reasons.items():
        with pytest.raises(InputError) as caught:
            check_replaceable(file, f"--json {file}")
        assert str(caught.value) == f"--json {file}: {reason}; expected a file that can be written"
        with pytest.raises(InputError) as caught:
            replace_file(file, [b""])
        assert str(caught.value) == f"{file}: {reason}; expected a file that can be written"
