"""Completion: a real bash loads the scripts, and so do fish and zsh if they are installed."""

import shutil
import subprocess
import sys

import pytest
from paths import ROOT

from einmpi.cli.help import completion_script
from einmpi.cli.options import COMMANDS, SHELLS, options_of
from einmpi.job.settings import BACKENDS
from einmpi.planner.strategies import STRATEGIES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Job files and others, and the scripts, each in a file."""
    path = tmp_path_factory.mktemp("completion") / "work"
    for name in ("one.toml", "two.toml", "notes.txt", "sub/three.toml", "two words/four five.toml"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).touch()
    (path.parent / "scripts").mkdir()
    for shell in SHELLS:
        (path.parent / "scripts" / shell).write_text(completion_script(shell))
    return path


def bash(folder, *words):
    """What bash offers for the last word."""
    code = (
        'source ../scripts/bash; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _einmpi\n'
        '[ ${#COMPREPLY[@]} -eq 0 ] || printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", code, "bash", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def flags(command):
    found = {"-h", "--help"}
    for option in options_of(command):
        if not option.is_positional:
            found.update(option.names)
    return found


JOBS = {"one.toml", "two.toml", "sub", "two words"}


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ([""], {*COMMANDS, *JOBS}),
        (["p"], {"plan"}),
        (["t"], {"two.toml", "two words"}),
        (["plan", ""], JOBS),
        (["plan", "sub/"], {"sub/three.toml"}),
        (["plan", "two words/"], {"two words/four five.toml"}),
        (["plan", "one.toml", "--strategy", ""], set(STRATEGIES)),
        (["plan", "one.toml", "--strategy", "=", "ein"], {"eindecomp", "eindecomp-paper"}),
        (["plan", "one.toml", "--strategy", "="], set(STRATEGIES)),
        (["run", "one.toml", "--backend", ""], set(BACKENDS)),
        (["one.toml", "--dtype", "f"], {"float16", "float32", "float64"}),
        (["plan", "one.toml", "--json", "n"], {"notes.txt"}),
        (["plan", "one.toml", "-n", ""], set()),
        (["completion", ""], set(SHELLS)),
        (["doctor", ""], set()),
        (["help", ""], set(COMMANDS)),
        (["examples", ""], {"sub", "two words"}),
        (["new", "mine.toml", "--from", "n"], {"notes.txt"}),
        (["run", "one.toml", "-np", ""], set()),
        (["--ver"], {"--version"}),
    ],
)
def test_bash_offers(folder, words, offered):
    found = bash(folder, "einmpi", *words)
    assert sorted(found) == sorted(offered)  # each once


@pytest.mark.parametrize("command", COMMANDS)
def test_bash_offers_all_options_of_a_command(folder, command):
    assert set(bash(folder, "einmpi", command, "-")) == flags(command)


def test_bash_takes_a_job_for_a_run(folder):
    assert set(bash(folder, "einmpi", "one.toml", "--")) == {
        flag for flag in flags("run") if flag.startswith("--")
    }


def test_bash_registers_the_function(folder):
    done = subprocess.run(
        ["bash", "--norc", "-c", "source ../scripts/bash; complete -p einmpi"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "complete -F _einmpi einmpi\n"


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("einmpi p", {"plan"}),
        ("einmpi plan one.toml --strategy e", {"eindecomp", "eindecomp-paper"}),
        ("einmpi plan one.toml --comp", {"--compare"}),
        ("einmpi one.toml --repe", {"--repeat"}),
        ("einmpi check one.toml --repe", set()),
        ("einmpi completion ", set(SHELLS)),
        ("einmpi help pl", {"plan"}),
        ("einmpi plan one.toml -np", {"-np"}),
        ("einmpi plan t", {"two.toml", "two words/"}),
    ],
)
def test_fish_offers(folder, line, offered):
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source ../scripts/fish; complete -C '{line}'"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    assert {words.split("\t")[0] for words in done.stdout.splitlines()} == offered


# zsh has no command that lists completions: type one into it and print every word that it adds.
# A tab before the prompt would complete nothing.
ZSH = """
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell 'PS1= ; autoload -Uz compinit; compinit -u -D; source ../scripts/zsh'
zpty -w shell 'compadd() {
    typeset -a got; builtin compadd -A got "$@"; print -rl -- "GOT:"${^got}":"
    builtin compadd "$@" }'
zpty -w shell 'PS1=REA''DY'
zpty -r -m shell text '*READY*'
zpty -n -w shell "$1"$'\\t'
zpty -n -w shell $'\\C-u print EN''D\\n'
zpty -r -m shell text '*END*'
print -r -- $text
"""


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("einmpi p", {"plan"}),
        ("einmpi plan one.toml --strategy s", {"sqrt", "sequence"}),
        ("einmpi completion ", set(SHELLS)),
    ],
)
def test_zsh_offers(folder, line, offered):
    done = subprocess.run(
        ["zsh", "-f", "-c", ZSH, "zsh", line],
        cwd=folder,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
    )
    words = {part.split(":")[0] for part in done.stdout.split("GOT:")[1:]}
    assert offered <= words and not {"check", "notes.txt"} & words, done.stdout


def test_the_command_prints_the_script(folder):
    done = subprocess.run(
        [sys.executable, "-m", "einmpi", "completion", "bash"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (folder.parent / "scripts" / "bash").read_text()
