"""Scripts for bash, zsh and fish that complete commands, options, strategies and job files.

They are made from the table of options. Completing starts no Python.
"""

from __future__ import annotations

import argparse

from einmpi.cli.options import SUMMARIES, Option, options_of

# What to complete for the value of an option, by the start of its metavar.
_FILE = "FILE"
_FOLDER = "DIR"
_JOB_FILE = "JOB.toml"
_HELP_FLAG = Option("-h --help", "show this help message", is_switch=True)
_VERSION_FLAG = Option("--version", "show the version", is_switch=True)


def completion(options: argparse.Namespace) -> None:
    """Print the completion script of a shell."""
    print(completion_script(options.shell), end="")


def completion_script(shell: str) -> str:
    """Return the script for bash, zsh or fish."""
    writers = {"bash": _bash_script, "zsh": _zsh_script, "fish": _fish_script}
    return writers[shell]()


def _options(command: str) -> list[Option]:
    return [*options_of(command), _HELP_FLAG]


def _values(option: Option) -> tuple[str, ...]:
    """Return the words that the value of an option may be, if they are known."""
    return option.choices or option.suggestions


def _file_kind(option: Option) -> str:
    """Return which files the value of an option may name: one of the constants above, or empty."""
    for kind in (_FILE, _FOLDER, _JOB_FILE):
        if option.metavar is not None and option.metavar.startswith(kind):
            return kind
    return ""


def _short_help(option: Option) -> str:
    return option.help.split(";")[0]


# ---- bash ----------------------------------------------------------------------------------------

_BASH = """\
# bash completion for einmpi; made by: einmpi completion bash
_einmpi_files() {  # the files that match a pattern, and folders on the way to them
    local file
    compopt -o filenames 2>/dev/null
    while IFS= read -r file; do COMPREPLY+=("$file"); done < <(
        compgen -d -- "$word"
        [ -z "$1" ] || compgen -f -X "!$1" -- "$word" | while IFS= read -r file; do
            [ -d "$file" ] || echo "$file"
        done
    )
}
_einmpi() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command= k
    COMPREPLY=()
    if [ "$word" = = ]; then word=; fi  # bash splits --strategy=NAME into three words
    if [ "$before" = = ]; then before=${COMP_WORDS[COMP_CWORD-2]}; fi
    for ((k = 1; k < COMP_CWORD; k++)); do
        case ${COMP_WORDS[k]} in
            @COMMANDS@) command=${COMP_WORDS[k]}; break ;;
            -*) ;;
            *) command=run; break ;;  # a job file: it is run
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


def _bash_script() -> str:
    value_lines: dict[str, str] = {}  # by flags: a flag means the same in all commands
    flag_lists = {"": _bash_flags([*_options("run"), _VERSION_FLAG])}  # without a command it is run
    positions = []
    for command in SUMMARIES:
        options = _options(command)
        flag_lists[command] = _bash_flags(options)
        for option in options:
            if option.is_positional:
                positions.append(f"{command}:*) {_bash_action(option)} ;;")
            elif not option.is_switch:
                flags = "|".join(option.names)
                value_lines[option.flags] = f"{flags}) {_bash_action(option)}; return ;;"
    option_lines = []
    for command, flags in flag_lists.items():
        option_lines.append(f'{command}:-*) COMPREPLY=($(compgen -W "{flags}" -- "$word")) ;;')
    script = _BASH.replace("@COMMANDS@", "|".join(SUMMARIES))
    script = script.replace("@ALL@", " ".join(SUMMARIES))
    script = script.replace("@VALUES@", _indented(list(value_lines.values())))
    script = script.replace("@OPTIONS@", _indented(option_lines))
    return script.replace("@POSITIONS@", _indented(positions))


def _bash_flags(options: list[Option]) -> str:
    names: list[str] = []
    for option in options:
        if not option.is_positional:
            names += option.names
    return " ".join(names)


def _bash_action(option: Option) -> str:
    values = _values(option)
    if values:
        return f'COMPREPLY=($(compgen -W "{" ".join(values)}" -- "$word"))'
    patterns = {_FILE: "'*'", _FOLDER: "''", _JOB_FILE: "'*.toml'"}
    kind = _file_kind(option)
    return f"_einmpi_files {patterns[kind]}" if kind else ":"


# ---- zsh -----------------------------------------------------------------------------------------

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


def _zsh_script() -> str:
    command_lines = []
    option_lines = []
    for command, summary in SUMMARIES.items():
        command_lines.append(f"'{command}:{_zsh_text(summary)}'")
        options = _options(command)
        if command == "run":
            options.append(_VERSION_FLAG)
        specifications: list[str] = []
        for option in options:
            specifications += _zsh_specifications(option)
        option_lines.append(f"{command}) _arguments {' '.join(specifications)} ;;")
    script = _ZSH.replace("@COMMANDS@", _indented(command_lines))
    return script.replace("@OPTIONS@", _indented(option_lines))


def _zsh_specifications(option: Option) -> list[str]:
    files = {_FILE: "_files", _FOLDER: "_files -/", _JOB_FILE: '_files -g "*.toml"', "": " "}
    action = files[_file_kind(option)]
    if _values(option):
        action = f"({' '.join(_values(option))})"
    if option.is_positional:
        return [f"'*: :{action}'"]
    value = "" if option.is_switch else f": :{action}"
    text = _zsh_text(_short_help(option)).replace(":", "\\:")
    return [f"'{flag}[{text}]{value}'" for flag in option.names]


def _zsh_text(text: str) -> str:
    """Return the text without characters that end a quoted description."""
    return text.replace("'", "’").replace("[", "(").replace("]", ")")


# ---- fish ----------------------------------------------------------------------------------------


def _fish_script() -> str:
    lines = [
        "# fish completion for einmpi; made by: einmpi completion fish",
        "complete -c einmpi -f",
    ]
    for command, summary in SUMMARIES.items():
        lines.append(
            f"complete -c einmpi -n __fish_use_subcommand -a {command} -d {_fish_quoted(summary)}"
        )
    for option in (_VERSION_FLAG, _HELP_FLAG):
        lines.append(_fish_line("__fish_use_subcommand", option))
    others = " ".join(command for command in SUMMARIES if command != "run")
    for command in SUMMARIES:
        condition = f"__fish_seen_subcommand_from {command}"
        if command == "run":  # without a command it is run
            condition = f"not __fish_seen_subcommand_from {others}"
        lines += [_fish_line(condition, option) for option in _options(command)]
    return "\n".join(lines) + "\n"


def _fish_line(condition: str, option: Option) -> str:
    words = ["complete -c einmpi -n", _fish_quoted(condition)]
    kind = _file_kind(option)
    if not option.is_positional:
        for flag in option.names:
            words.append(_fish_flag(flag))
        if not option.is_switch:
            words.append("-r" if kind == _FILE else "-x")  # a value follows; -x: no file
    if _values(option):
        words.append(f"-a {_fish_quoted(' '.join(_values(option)))}")
    elif kind == _FILE:
        words.append("-F")
    elif kind == _FOLDER:
        words.append("-a '(__fish_complete_directories)'")
    elif kind == _JOB_FILE:
        words.append("-a '(__fish_complete_suffix .toml)'")
    if not option.is_positional:
        words.append(f"-d {_fish_quoted(_short_help(option))}")
    return " ".join(words)


def _fish_flag(flag: str) -> str:
    """Return the option of fish's `complete` for a flag: --long, -s or -old."""
    if flag.startswith("--"):
        return f"-l {flag[2:]}"
    if len(flag) == 2:
        return f"-s {flag[1:]}"
    return f"-o {flag[1:]}"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _indented(lines: list[str]) -> str:
    return "\n".join(" " * 8 + line for line in lines)
