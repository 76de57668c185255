"""Scripts for bash, zsh and fish that complete commands, options, strategies and job files.

They are made from the command line's own parser, so they know what it knows; completing starts no Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from einmpi.graph.dtypes import cpu_dtypes
from einmpi.job.job import BACKENDS
from einmpi.planner.strategies import STRATEGIES

SHELLS = ("bash", "zsh", "fish")
_WORDS = {"--strategy": STRATEGIES, "--backend": BACKENDS, "--dtype": cpu_dtypes()}
_FILES, _FOLDERS, _JOBS = "files", "folders", "jobs"
_KINDS = {"FILE": _FILES, "DIR": _FOLDERS, "JOB.toml": _JOBS}  # by metavar


@dataclass(frozen=True)
class Option:
    flags: tuple[str, ...]  # none: it stands for itself, as a job does
    help: str
    takes: bool  # whether a value follows
    words: tuple[str, ...]  # that are possible values
    kind: str  # or what kind of file


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """The script of one of SHELLS."""
    commands, options = _commands(parser)
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands, options)


def _commands(parser: argparse.ArgumentParser) -> tuple[dict[str, str], dict[str, list[Option]]]:
    """What each command is for, and its options; those of "" stand before any command."""
    (commands,) = (
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    about = {action.dest: action.help or "" for action in commands._choices_actions}
    options = {
        name: [_option(action) for action in command._actions]
        for name, command in commands.choices.items()
    }
    return about, {
        "": [_option(action) for action in parser._actions if action is not commands],
        **options,
    }


def _option(action: argparse.Action) -> Option:
    flags = tuple(action.option_strings)
    words = tuple(map(str, action.choices or _WORDS.get(flags[-1] if flags else "", ())))
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    kind = next((kind for start, kind in _KINDS.items() if metavar.startswith(start)), "")
    return Option(flags, (action.help or "").split(";")[0], action.nargs != 0, words, kind)


def _with_values(options: dict[str, list[Option]]) -> Iterator[Option]:
    """Every option that takes a value, once: an option means the same for all commands."""
    found = {
        option.flags: option
        for listed in options.values()
        for option in listed
        if option.flags and option.takes
    }
    yield from found.values()


# ---- bash -----------------------------------------------------------------------------------------------------------

_BASH = """\
# bash completion for einmpi; made by: einmpi completion bash
_einmpi_files() {  # the files that match a pattern, and folders on the way to them
    local file
    compopt -o filenames 2>/dev/null
    while IFS= read -r file; do COMPREPLY+=("$file"); done < <(
        compgen -d -- "$word"
        [ -z "$1" ] || compgen -f -X "!$1" -- "$word" | while IFS= read -r file; do [ -d "$file" ] || echo "$file"; done
    )
}
_einmpi() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command= k
    COMPREPLY=()
    if [ "$word" = = ]; then word=; fi  # bash takes --strategy=NAME for three words
    if [ "$before" = = ]; then before=${COMP_WORDS[COMP_CWORD-2]}; fi
    for ((k = 1; k < COMP_CWORD; k++)); do
        case ${COMP_WORDS[k]} in
            @COMMANDS@) command=${COMP_WORDS[k]}; break ;;
            -*) ;;
            *) command=run; break ;;  # a job: it is run
        esac
    done
    case $before in
@VALUES@
    esac
    case $command:$word in
@OPTIONS@
        :*) COMPREPLY=($(compgen -W "@ALL@" -- "$word")); _einmpi_files '*.toml' ;;
@POSITIONS@
    esac
}
complete -F _einmpi einmpi
"""


def _bash(commands: dict[str, str], options: dict[str, list[Option]]) -> str:
    def action(option: Option) -> str:
        if option.words:
            return f'COMPREPLY=($(compgen -W "{" ".join(option.words)}" -- "$word"))'
        patterns = {_FILES: "'*'", _FOLDERS: "''", _JOBS: "'*.toml'"}
        return f"_einmpi_files {patterns[option.kind]}" if option.kind else ":"

    def flags(*names: str) -> str:
        return " ".join(
            dict.fromkeys(
                flag for name in names for option in options[name] for flag in option.flags
            )
        )

    values = [
        f"{'|'.join(option.flags)}) {action(option)}; return ;;" for option in _with_values(options)
    ]
    # Before any command, options are those of run.
    listed = {"": flags("run", ""), **{name: flags(name) for name in commands}}
    lists = [
        f'{name}:-*) COMPREPLY=($(compgen -W "{text}" -- "$word")) ;;'
        for name, text in listed.items()
    ]
    positions = [
        f"{name}:*) {action(option)} ;;"
        for name in commands
        for option in options[name]
        if not option.flags
    ]
    filled = _BASH.replace("@COMMANDS@", "|".join(commands)).replace("@ALL@", " ".join(commands))
    for word, lines in (("@VALUES@", values), ("@OPTIONS@", lists), ("@POSITIONS@", positions)):
        filled = filled.replace(word, "\n".join(" " * 8 + line for line in lines))
    return filled


# ---- zsh ------------------------------------------------------------------------------------------------------------

_ZSH = """\
#compdef einmpi
# zsh completion for einmpi; made by: einmpi completion zsh
_einmpi() {
    local -a commands=(
@COMMANDS@
    )
    if (( CURRENT == 2 )) && [[ $words[2] != -* ]]; then
        _describe command commands
        _files -g '*.toml'
        return
    fi
    local command=$words[2]
    if (( ${commands[(I)$command:*]} )); then shift words; (( CURRENT-- )); else command=run; fi
    case $command in
@OPTIONS@
    esac
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then _einmpi "$@"; else compdef _einmpi einmpi; fi
"""


def _zsh(commands: dict[str, str], options: dict[str, list[Option]]) -> str:
    def specs(option: Option) -> list[str]:
        files = {_FILES: "_files", _FOLDERS: "_files -/", _JOBS: '_files -g "*.toml"'}
        values = f"({' '.join(option.words)})" if option.words else files.get(option.kind, " ")
        if not option.flags:
            return [f"'*: :{values}'"]
        meaning = (
            option.help.replace("'", "’").replace("[", "(").replace("]", ")").replace(":", "\\:")
        )
        return [
            f"'{flag}[{meaning}]{f': :{values}' if option.takes else ''}'" for flag in option.flags
        ]

    about = [f"        '{name}:{text.replace(chr(39), '’')}'" for name, text in commands.items()]
    lines = []
    for name in commands:
        own = options[name] + (options[""] if name == "run" else [])
        unique = dict.fromkeys(spec for option in own for spec in specs(option))
        lines.append(f"        {name}) _arguments {' '.join(unique)} ;;")
    return _ZSH.replace("@COMMANDS@", "\n".join(about)).replace("@OPTIONS@", "\n".join(lines))


# ---- fish -----------------------------------------------------------------------------------------------------------


def _fish(commands: dict[str, str], options: dict[str, list[Option]]) -> str:
    lines = [
        "# fish completion for einmpi; made by: einmpi completion fish",
        "complete -c einmpi -f",
    ]
    lines += [
        f"complete -c einmpi -n __fish_use_subcommand -a {name} -d {_quoted(text)}"
        for name, text in commands.items()
    ]
    others = " ".join(name for name in commands if name != "run")
    files = {
        _FILES: " -F",
        _FOLDERS: " -a '(__fish_complete_directories)'",
        _JOBS: " -a '(__fish_complete_suffix .toml)'",
    }
    for name, listed in options.items():
        condition = {
            "": "__fish_use_subcommand",
            "run": f"not __fish_seen_subcommand_from {others}",
        }.get(name, f"__fish_seen_subcommand_from {name}")
        for option in listed:
            flags = "".join(
                f" -l {flag[2:]}" if flag.startswith("--") else f" -s {flag[1:]}"
                for flag in option.flags
            )
            values = (
                f" -a {_quoted(' '.join(option.words))}"
                if option.words
                else files.get(option.kind, "")
            )
            needs = (
                (" -r" if option.kind == _FILES else " -x") if option.flags and option.takes else ""
            )
            meaning = f" -d {_quoted(option.help)}" if option.help and option.flags else ""
            lines.append(
                f"complete -c einmpi -n {_quoted(condition)}{flags}{needs}{values}{meaning}"
            )
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
