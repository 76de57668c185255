"""--help and --version: for every command, in 80 columns, with examples that work."""

import contextlib
import io
import re
import shlex
import subprocess
import sys

import pytest
from in_process import einmpi_here
from paths import ROOT

import einmpi
from einmpi.cli.help import EXAMPLES, WIDTH, make_parser
from einmpi.cli.options import COMMANDS, GROUPS, OPTIONS, options_of


def help_of(command):
    with contextlib.redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit):
        make_parser().parse_args([*command.split(), "--help"])
    return shown.getvalue()


def test_every_command_has_a_summary_and_examples():
    assert all(command.summary for command in COMMANDS.values())
    assert list(EXAMPLES) == ["", *COMMANDS] and all(map(str.strip, EXAMPLES.values()))


def test_every_option_belongs_to_commands_and_a_group():
    for option in OPTIONS:
        assert option.group in GROUPS, option.names
        assert set(option.commands) <= set(COMMANDS) and option.commands, option.names
        assert option.help, option.names


@pytest.mark.parametrize("command", EXAMPLES)
def test_help_fits(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # which must not matter
    text = help_of(command)
    assert text.startswith(f"usage: einmpi {command}".rstrip()) and text.endswith("\n")
    assert max(map(len, text.split("\n"))) <= WIDTH
    for heading in ("positional arguments:", "options:"):  # argparse's own groups
        assert heading not in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_shown_once_in_its_group(command):
    text = help_of(command).partition("\n\n")[2]  # without the usage
    shown = {}
    for section in text.split("\n\n"):
        heading, _, lines = section.partition(":\n")
        shown[heading] = re.findall(r"^  (?:-\w+(?: \w+)?, )*(\S+)", lines, re.MULTILINE)
    for group in GROUPS:
        names = []
        for option in options_of(command):
            if option.group == group:
                if option.choices and option.is_positional:
                    names.append("{bash,zsh,fish}")
                else:
                    names.append(option.metavar if option.is_positional else option.names[-1])
        if group == "output":
            names.append("--help")
        assert shown.get(group, []) == names


@pytest.mark.parametrize("command", EXAMPLES)
def test_the_command_help_shows_the_same(command, tmp_path):
    done = einmpi_here(tmp_path, ["help", *command.split()])
    assert (done.returncode, done.stderr, done.stdout) == (0, "", help_of(command))


def test_help_of_an_unknown_command(tmp_path):
    done = einmpi_here(tmp_path, ["help", "plann"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("einmpi help: unknown command 'plann'; expected one of run, ")
    assert done.stderr.endswith("(did you mean plan?)\n")


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (command, line.strip().partition("  ")[0])
        for command, text in EXAMPLES.items()
        for line in text.strip().split("\n")
    ],
)
def test_examples_are_accepted(command, line):
    assert f"  {line}" in help_of(command)
    words = shlex.split(line.partition(" > ")[0])
    words = words[words.index("einmpi") + 1 :]
    for word in words:
        is_read = word.endswith(".toml") and words[0] not in ("new", "llama")
        assert not is_read or (ROOT / word).is_file()
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
    """The library is only asked for its name: login nodes of clusters often forbid to start MPI."""
    version(
        "import atexit\n"
        "def check():\n"
        "    if sys.modules['mpi4py.MPI'].Is_initialized(): print('started')\n"
        "atexit.register(check)"
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
