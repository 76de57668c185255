"""The parser of the command line, what --help prints, and completion in shells."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn

from einmpi.cli.options import COMMANDS, GROUPS, Option, options_of
from einmpi.errors import InputError, one_of

WIDTH = 80  # columns on every terminal: help is for reading, and for pages

# What to type for each command, and what it does; "" is the program without a command.
EXAMPLES = {
    "": """
  einmpi examples                               copy the example jobs to jobs/
  einmpi jobs/chain.toml                        run a job in this process
  mpirun -n 4 python -m einmpi jobs/chain.toml  on four ranks
  einmpi run jobs/chain.toml -n 4               the same: starts mpirun itself
  einmpi verify jobs/chain.toml -n 4            compare with the reference
  einmpi check jobs/attention.toml              parse it, inspect its files
  einmpi plan jobs/attention.toml -n 64         its partitioning over 64 ranks
  einmpi doctor                                 would a run work here?""",
    "run": """
  einmpi run jobs/chain.toml                              in this process
  einmpi run jobs/chain.toml -n 4                         on four ranks
  einmpi run jobs/chain.toml --set s=2000 --set skew=10   another size
  einmpi run jobs/chain.toml -n 2 --repeat 5 --json -     timed, as JSON
  einmpi run jobs/chain.toml -n 2 --trace run.json        a timeline
  einmpi run jobs/chain.toml --checkpoint saved --resume  can continue""",
    "check": """
  einmpi check jobs/attention.toml           shapes, dtypes, files
  einmpi check jobs/chain.toml --set s=2000  with another size""",
    "plan": """
  einmpi plan jobs/attention.toml -n 64                  no MPI, no data
  einmpi plan jobs/chain.toml -n 8 --compare             all strategies
  einmpi plan jobs/chain.toml -n 64 --nodes 8            on 8 nodes
  einmpi plan jobs/chain.toml -n 8 --memory 4MiB         with little memory
  einmpi plan jobs/chain.toml -n 4 --show-relations Z_1  one vertex""",
    "verify": """
  einmpi verify jobs/chain.toml -n 4               on four ranks
  einmpi verify jobs/softmax.toml --strategy sqrt  another strategy""",
    "sbatch": """
  einmpi sbatch jobs/chain.toml --nodes 4 --ntasks-per-node 16
  einmpi sbatch jobs/chain.toml --nodes 2 --ntasks-per-node 8 --out run.sbatch
  einmpi sbatch jobs/chain.toml --nodes 2 --ntasks-per-node 4 --checkpoint saved
  einmpi sbatch jobs/chain.toml --nodes 2 --ntasks-per-node 4 --partition long
  einmpi sbatch jobs/chain.toml --nodes 2 --ntasks-per-node 4 --format pbs""",
    "simulate": """
  einmpi simulate jobs/chain.toml -n 1024 --cluster nodes=128,cores=8,bw=12.5GB
  einmpi simulate jobs/chain.toml -n 64 --cluster topology=torus --compare
  einmpi simulate jobs/chain.toml -n 64 --platform cluster.xml""",
    "new": """
  einmpi new mine.toml                 asks for program, inputs and outputs
  einmpi new mine.toml --from data.h5  all datasets as inputs""",
    "llama": """
  einmpi llama DIR --prompt 'Once upon a time'            text, as it comes
  einmpi llama DIR --prompt Hello -n 4 --new 100          on four ranks
  einmpi llama DIR --prompts in.h5:/t --logits out.h5:/l  logits in HDF5
  einmpi llama 7B --plan-only -n 8 --compare              needs no weights
  einmpi llama DIR --job llama.toml                       to read and to change""",
    "examples": """
  einmpi examples                to the folder jobs
  einmpi examples ~/einmpi-jobs  to another folder""",
    "doctor": """
  einmpi doctor           also sends messages between two ranks
  einmpi doctor --json -  for programs""",
    "calibrate": """
  einmpi calibrate                               kernels, in this process
  mpirun -n 4 python -m einmpi calibrate --save  messages too; machine.toml
  einmpi calibrate -n 4 --save                   the same: starts mpirun itself
  einmpi calibrate -n 4 --backend cupy --save    for GPUs""",
    "completion": """
  einmpi completion bash > ~/.local/share/bash-completion/completions/einmpi
  einmpi completion zsh > ~/.zfunc/_einmpi
  einmpi completion fish > ~/.config/fish/completions/einmpi.fish""",
    "help": """
  einmpi help       all commands
  einmpi help plan  the same as einmpi plan --help""",
}


def make_parser() -> Parser:
    """Return the parser of the whole command line."""
    parser = Parser(
        prog="einmpi",
        usage="einmpi [--version] [-h] COMMAND ...",
        description="Extended Einstein summation over MPI.",
    )
    # Commands without these flags behave as if they had not been given.
    parser.set_defaults(checkpoint=None, machine=None, repeat=1, quiet=False, steps=None)
    # The description lists the commands: argparse's own list is narrow and wraps their names.
    commands = parser.add_subparsers(
        title="commands",
        description="\n".join(f"{name:<10}  {each.summary}" for name, each in COMMANDS.items()),
        prog="einmpi",
        dest="command",
        metavar="COMMAND",
        required=True,
        help=argparse.SUPPRESS,
    )
    for name, each in COMMANDS.items():
        command = commands.add_parser(name, description=each.summary)
        _add_options(command, options_of(name))
        parser.command_parsers[name] = command
    output = parser.add_argument_group("output")
    what = "of einmpi and of what it runs on"
    output.add_argument("--version", action=_Version, nargs=0, default=argparse.SUPPRESS, help=what)
    _add_help_flag(output)
    return parser


def show_help(options: argparse.Namespace) -> None:
    """Print what --help prints for a command, or for the whole program without one."""
    parser = make_parser()
    command = options.topic
    if command is None:
        parser.print_help()
    elif command in COMMANDS:
        parser.command_parsers[command].print_help()
    else:
        what = f"unknown command {command!r}"
        raise InputError("einmpi help", what, one_of(COMMANDS, command))


class Parser(argparse.ArgumentParser):
    """The parser of the program or of one of its commands. An error raises InputError."""

    def __init__(self, **settings: Any) -> None:
        command = settings["prog"].removeprefix("einmpi").strip()
        settings["formatter_class"] = partial(
            argparse.RawDescriptionHelpFormatter, max_help_position=26, width=WIDTH
        )
        settings["epilog"] = f"examples:{EXAMPLES[command]}"
        settings["add_help"] = False  # the flag belongs to a group
        # No abbreviations: a new flag could give another meaning to one.
        settings["allow_abbrev"] = False
        super().__init__(**settings)
        self.command_parsers: dict[str, argparse.ArgumentParser] = {}  # of the whole program

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown flags here: argparse leaves those of a command to the whole program."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        raise InputError("einmpi", message, hint=f"see {self.prog} --help")


class _Version(argparse.Action):
    """The flag --version. What einmpi runs on is looked up only if it is given."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from einmpi.cli.versions import describe_versions

        print(describe_versions())
        parser.exit()


def _add_options(command: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    groups: dict[str, Any] = {}
    for option in options:
        if option.group not in groups:
            groups[option.group] = command.add_argument_group(option.group)
        _add_option(groups[option.group], option)
    last = GROUPS[-1]
    _add_help_flag(groups[last] if last in groups else command.add_argument_group(last))


def _add_option(target: Any, option: Option) -> None:
    settings: dict[str, Any] = {"help": option.help, "default": option.value_if_missing}
    if option.is_switch or option.is_list:
        settings["action"] = "store_true" if option.is_switch else "append"
    if not option.is_switch:
        settings |= {"metavar": option.metavar, "type": option.type}
    if option.is_required:
        settings["required"] = True
    if option.choices:
        settings["choices"] = option.choices
    if option.nargs:
        settings["nargs"] = option.nargs
    if option.value_if_bare is not None:
        settings |= {"nargs": "?", "const": option.value_if_bare}
    target.add_argument(*option.names, **settings)


def _add_help_flag(target: Any) -> None:
    target.add_argument("-h", "--help", action="help", help="show this help message and exit")


# ---- completion ----------------------------------------------------------------------------------
#
# Scripts for bash, zsh and fish, made from the table of options. Completing starts no Python.


# What to complete for the value of an option, by the start of its metavar.
_FILE = "FILE"
_FOLDER = "DIR"
_JOB_FILE = "JOB.toml"
_HELP_FLAG = Option("-h --help", "show this help message")
_VERSION_FLAG = Option("--version", "show the version")


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
    for command in COMMANDS:
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
    script = _BASH.replace("@COMMANDS@", "|".join(COMMANDS))
    script = script.replace("@ALL@", " ".join(COMMANDS))
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
    for command, each in COMMANDS.items():
        command_lines.append(f"'{command}:{_zsh_text(each.summary)}'")
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
    for command, each in COMMANDS.items():
        summary = _fish_quoted(each.summary)
        lines.append(f"complete -c einmpi -n __fish_use_subcommand -a {command} -d {summary}")
    for option in (_VERSION_FLAG, _HELP_FLAG):
        lines.append(_fish_line("__fish_use_subcommand", option))
    others = " ".join(command for command in COMMANDS if command != "run")
    for command in COMMANDS:
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
