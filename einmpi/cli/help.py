"""The parser of the command line and what --help prints: options in groups, examples that work."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, Protocol

from einmpi.cli.options import GROUPS, SUMMARIES, Option, options_of
from einmpi.errors import InputError, one_of

WIDTH = 80  # columns on every terminal: help is for reading, and for pages

# What to type for each command, and what it does; "" is the program without a command.
EXAMPLES = {
    "": (
        ("einmpi examples", "copy the example jobs to jobs/"),
        ("einmpi jobs/chain.toml", "run a job in this process"),
        ("mpirun -n 4 python -m einmpi jobs/chain.toml", "on four ranks"),
        ("einmpi run jobs/chain.toml -n 4", "the same: starts mpirun itself"),
        ("einmpi verify jobs/chain.toml -n 4", "compare with the reference"),
        ("einmpi check jobs/attention.toml", "parse it, inspect its files"),
        ("einmpi plan jobs/attention.toml -n 64", "its partitioning over 64 ranks"),
        ("einmpi doctor", "would a run work here?"),
    ),
    "run": (
        ("einmpi run jobs/chain.toml", "in this process"),
        ("einmpi run jobs/chain.toml -n 4", "on four ranks"),
        ("einmpi run jobs/chain.toml --set s=2000 --set skew=10", "another size"),
        ("einmpi run jobs/chain.toml -n 2 --repeat 5 --json -", "timed, as JSON"),
        ("einmpi run jobs/chain.toml -n 2 --trace run.json", "a timeline"),
        ("einmpi run jobs/chain.toml --checkpoint saved --resume", "can continue"),
    ),
    "check": (
        ("einmpi check jobs/attention.toml", "shapes, dtypes, files"),
        ("einmpi check jobs/chain.toml --set s=2000", "with another size"),
    ),
    "plan": (
        ("einmpi plan jobs/attention.toml -n 64", "no MPI, no data"),
        ("einmpi plan jobs/chain.toml -n 8 --compare", "all strategies"),
        ("einmpi plan jobs/chain.toml -n 64 --nodes 8", "on 8 nodes"),
        ("einmpi plan jobs/chain.toml -n 8 --memory 4MiB", "with little memory"),
        ("einmpi plan jobs/chain.toml -n 4 --show-relations Z_1", "one vertex"),
    ),
    "verify": (
        ("einmpi verify jobs/chain.toml -n 4", "on four ranks"),
        ("einmpi verify jobs/softmax.toml --strategy sqrt", "another strategy"),
    ),
    "sbatch": (
        ("einmpi sbatch jobs/chain.toml --nodes 4 --ntasks-per-node 16", ""),
        ("einmpi sbatch jobs/chain.toml --nodes 2 --ntasks-per-node 8 --out run.sbatch", ""),
        ("einmpi sbatch jobs/chain.toml --nodes 2 --ntasks-per-node 4 --checkpoint saved", ""),
        ("einmpi sbatch jobs/chain.toml --nodes 2 --ntasks-per-node 4 --partition long", ""),
    ),
    "simulate": (
        ("einmpi simulate jobs/chain.toml -n 1024 --cluster nodes=128,cores=8,bw=12.5GB", ""),
        ("einmpi simulate jobs/chain.toml -n 64 --cluster topology=torus --compare", ""),
        ("einmpi simulate jobs/chain.toml -n 64 --platform cluster.xml", ""),
    ),
    "new": (
        ("einmpi new mine.toml", "asks for program, inputs and outputs"),
        ("einmpi new mine.toml --from data.h5", "all datasets as inputs"),
    ),
    "llama": (
        ("einmpi llama DIR --prompt 'Once upon a time'", "text, as it comes"),
        ("einmpi llama DIR --prompt Hello -n 4 --new 100", "on four ranks"),
        ("einmpi llama DIR --prompts in.h5:/t --logits out.h5:/l", "logits in HDF5"),
        ("einmpi llama 7B --plan-only -n 8 --compare", "needs no weights"),
        ("einmpi llama DIR --job llama.toml", "to read and to change"),
    ),
    "examples": (
        ("einmpi examples", "to the folder jobs"),
        ("einmpi examples ~/einmpi-jobs", "to another folder"),
    ),
    "doctor": (
        ("einmpi doctor", "also sends messages between two ranks"),
        ("einmpi doctor --json -", "for programs"),
    ),
    "calibrate": (
        ("einmpi calibrate", "kernels, in this process"),
        ("mpirun -n 4 python -m einmpi calibrate --save", "messages too; machine.toml"),
        ("einmpi calibrate -n 4 --save", "the same: starts mpirun itself"),
        ("einmpi calibrate -n 4 --backend cupy --save", "for GPUs"),
    ),
    "completion": (
        ("einmpi completion bash > ~/.local/share/bash-completion/completions/einmpi", ""),
        ("einmpi completion zsh > ~/.zfunc/_einmpi", ""),
        ("einmpi completion fish > ~/.config/fish/completions/einmpi.fish", ""),
    ),
    "help": (
        ("einmpi help", "all commands"),
        ("einmpi help plan", "the same as einmpi plan --help"),
    ),
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
        description=_format_columns(SUMMARIES.items()),
        prog="einmpi",
        dest="command",
        metavar="COMMAND",
        required=True,
        help=argparse.SUPPRESS,
    )
    for name, summary in SUMMARIES.items():
        command = commands.add_parser(name, description=summary)
        _add_options(command, options_of(name))
        parser.command_parsers[name] = command
    output = parser.add_argument_group("output")
    output.add_argument("--version", action=_Version, help="of einmpi and of what it runs on")
    _add_help_flag(output)
    return parser


def help_text(command: str | None) -> str:
    """Return what --help prints for a command, or for the whole program without one."""
    parser = make_parser()
    if command is None:
        return parser.format_help()
    if command not in SUMMARIES:
        raise InputError("einmpi help", f"unknown command {command!r}", one_of(SUMMARIES, command))
    return parser.command_parsers[command].format_help()


def show_help(options: argparse.Namespace) -> None:
    """Print the help of a command or of the whole program."""
    print(help_text(options.topic), end="")


class Parser(argparse.ArgumentParser):
    """The parser of the program or of one of its commands. An error raises InputError."""

    def __init__(self, **settings: Any) -> None:
        command = settings["prog"].removeprefix("einmpi").strip()
        settings["formatter_class"] = _make_formatter
        settings["epilog"] = _format_examples(EXAMPLES[command])
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

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **settings)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from einmpi.cli.versions import describe_versions

        print(describe_versions())
        parser.exit()


class _ArgumentContainer(Protocol):
    """A parser or a group of argparse."""

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action: ...


def _add_options(command: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    groups: dict[str, Any] = {}
    for option in options:
        if option.group not in groups:
            groups[option.group] = command.add_argument_group(option.group)
        _add_option(groups[option.group], option)
    last = GROUPS[-1]
    _add_help_flag(groups[last] if last in groups else command.add_argument_group(last))


def _add_option(target: _ArgumentContainer, option: Option) -> None:
    settings: dict[str, Any] = {"help": option.help}
    if option.is_switch:
        target.add_argument(*option.names, action="store_true", **settings)
        return
    settings["metavar"] = option.metavar
    settings["type"] = option.type
    if option.choices:
        settings["choices"] = option.choices
    if option.is_positional:
        if option.is_optional:
            settings["nargs"] = "?"
            settings["default"] = option.default
        target.add_argument(*option.names, **settings)
        return
    settings["required"] = option.is_required
    if option.is_list:
        target.add_argument(*option.names, action="append", default=[], **settings)
        return
    if option.value_if_bare is not None:
        settings["nargs"] = "?"
        settings["const"] = option.value_if_bare
    if option.nargs:
        settings["nargs"] = option.nargs
    target.add_argument(*option.names, default=option.default, **settings)


def _add_help_flag(target: _ArgumentContainer) -> None:
    target.add_argument("-h", "--help", action="help", help="show this help message and exit")


def _make_formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=26, width=WIDTH)


def _format_columns(rows: Iterable[tuple[str, str]]) -> str:
    """Return two columns as text: commands and what they do."""
    rows = list(rows)
    width = max(len(command) for command, _ in rows)
    return "\n".join(f"{command:<{width}}  {meaning}".rstrip() for command, meaning in rows)


def _format_examples(examples: Sequence[tuple[str, str]]) -> str:
    lines = _format_columns(examples).split("\n")
    return "\n".join(["examples:", *(f"  {line}" for line in lines)])
