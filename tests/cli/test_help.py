"""--help and --version: for every command, in 80 columns, with examples that work."""

import contextlib
import io
import re
import shlex
import subprocess
import sys

import pytest
from paths import ROOT

import einmpi
from einmpi.cli.help import EXAMPLES, WIDTH, grouped, name
from einmpi.cli.main import COMMANDS, make_parser


def help_of(command):
    with contextlib.redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit):
        make_parser().parse_args([*command.split(), "--help"])
    return shown.getvalue()


def parsers():
    parser = make_parser()
    (commands,) = (action for action in parser._actions if action.dest == "command")
    return {"": parser, **commands.choices}


def test_every_command_has_examples():
    assert list(EXAMPLES) == list(parsers())
    assert set(EXAMPLES) == {"", *COMMANDS}


@pytest.mark.parametrize("command", EXAMPLES)
def test_help_fits(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # which must not matter
    text = help_of(command)
    assert text.startswith(f"usage: einmpi {command}".rstrip()) and text.endswith("\n")
    assert max(map(len, text.split("\n"))) <= WIDTH
    assert "other options" not in text, (
        "an option is in no group: add it to GROUPS in einmpi/cli/help.py"
    )


@pytest.mark.parametrize("command", EXAMPLES)
def test_every_option_is_shown_once(command):
    actions = parsers()[command]._actions
    shown = [
        name(action) for title, found in grouped(actions) if title != "commands" for action in found
    ]
    assert sorted(shown) == sorted(name(action) for action in actions if action.dest != "command")
    for action in actions:
        assert action.dest == "command" or action.help, f"{name(action)} has no help"


@pytest.mark.parametrize(
    ("command", "line"), [(c, line) for c, lines in EXAMPLES.items() for line, _ in lines]
)
def test_examples_are_accepted(command, line):
    assert f"  {line}" in help_of(command)
    words = shlex.split(line.partition(" > ")[0])
    words = words[words.index("einmpi") + 1 :]
    for word in words:
        assert not word.endswith(".toml") or (ROOT / word).is_file()
    if words[0] not in COMMANDS:
        words.insert(0, "run")
    assert make_parser().parse_args(words).command in (command or words[0], words[0])


def version(code=""):
    script = f"import sys\n{code}\nfrom einmpi.cli.main import main\nsys.exit(main(['--version']))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    first, *rest = done.stdout.splitlines()
    assert first == f"einmpi {einmpi.__version__}"
    return {line.split()[0]: line.partition(" ")[2].strip() for line in rest}


def test_version_tells_what_einmpi_runs_on():
    found = version()
    assert list(found) == ["Python", "numpy", "MPI", "HDF5", "numba", "GPU"]
    assert re.fullmatch(r"\d+\.\d+\S*, BLAS \w+ .*", found["numpy"])
    assert re.search(r"(MPICH|Open MPI|Intel).*, mpi4py \d", found["MPI"])
    assert re.fullmatch(r"\d+\.\d+\.\d+ \((serial|parallel)\), h5py \d.*", found["HDF5"])


def test_version_starts_no_mpi():
    """The library is asked for its name only: on login nodes of clusters MPI often may not be started."""
    version(
        "import atexit\natexit.register(lambda: sys.modules['mpi4py.MPI'].Is_initialized() and print('started'))"
    )


def test_version_without_libraries():
    missing = ("mpi4py", "h5py", "numba", "threadpoolctl")
    found = version(
        f"for name in {missing}: sys.modules[name] = None\n"
        "from importlib import metadata\n"
        "known = metadata.version\n"
        "def no_numba(name):\n"
        "    if name == 'numba': raise metadata.PackageNotFoundError(name)\n"
        "    return known(name)\n"
        "metadata.version = no_numba"
    )
    for key in ("numpy", "MPI", "HDF5", "numba"):
        assert found[key].startswith("none: "), found
