"""What --help prints: options in groups, and examples that work. Unknown words are errors of one line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from einmpi.errors import InputError

WIDTH = 80  # columns, whatever the terminal has: help is for reading, and for pages

# Groups of options, in this order. A test finds an option that is in none of them.
GROUPS = {
    "the job": ("job", "--set", "--dtype"),
    "ranks": (
        "--ranks",
        "--nodes",
        "--ntasks-per-node",
        "--cpus-per-task",
        "--backend",
        "--timeout",
        "--time",
        "--seconds",
    ),
    "the plan": ("--strategy", "--compare", "--memory", "--machine", "--show-relations"),
    "the run": ("--repeat", "--fast-math", "--checkpoint", "--every", "--resume"),
    "what is printed and written": (
        "shell",
        "--out",
        "--save",
        "--json",
        "--report",
        "--plot",
        "--trace",
        "--summary",
        "--quiet",
        "--version",
        "--help",
    ),
}

# Of every command: what to type, and what it does.
EXAMPLES = {
    "": (
        ("einmpi jobs/chain.toml", "run a job in this process"),
        ("mpirun -n 4 python -m einmpi jobs/chain.toml", "on four ranks"),
        ("einmpi run jobs/chain.toml -n 4", "the same: starts mpirun itself"),
        ("einmpi verify jobs/chain.toml -n 4", "compare with the plain evaluator"),
        ("einmpi check jobs/attention.toml", "parse it, look at its files"),
        ("einmpi plan jobs/attention.toml -n 64", "how it is cut over 64 ranks"),
        ("einmpi doctor", "would a run work here?"),
    ),
    "run": (
        ("einmpi run jobs/chain.toml", "in this process"),
        ("einmpi run jobs/chain.toml -n 4", "on four ranks"),
        ("einmpi run jobs/chain.toml --set s=2000 --set skew=10", "another size"),
        ("einmpi run jobs/chain.toml -n 2 --repeat 5 --json -", "timed, as JSON"),
        ("einmpi run jobs/chain.toml -n 2 --trace run.json", "who did what when"),
        ("einmpi run jobs/chain.toml --checkpoint saved --resume", "goes on if killed"),
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
        ("einmpi verify jobs/softmax.toml --strategy sqrt", "other cuts"),
    ),
    "sbatch": (
        ("einmpi sbatch jobs/chain.toml --nodes 4 --ntasks-per-node 16", ""),
        ("einmpi sbatch jobs/chain.toml --nodes 2 --ntasks-per-node 8 --out run.sbatch", ""),
        ("einmpi sbatch jobs/chain.toml --nodes 2 --ntasks-per-node 4 --checkpoint saved", ""),
    ),
    "doctor": (
        ("einmpi doctor", "look, and let two ranks send messages"),
        ("einmpi doctor --json -", "for programs"),
    ),
    "calibrate": (
        ("einmpi calibrate", "kernels, in this process"),
        ("mpirun -n 4 python -m einmpi calibrate --save", "messages too; machine.toml"),
        ("einmpi calibrate -n 4 --save", "the same: starts mpirun itself"),
    ),
    "completion": (
        ("einmpi completion bash > ~/.local/share/bash-completion/completions/einmpi", ""),
        ("einmpi completion zsh > ~/.zfunc/_einmpi", ""),
        ("einmpi completion fish > ~/.config/fish/completions/einmpi.fish", ""),
    ),
}


class Parser(argparse.ArgumentParser):
    """Of the program, or of one of its commands."""

    def __init__(self, **options: Any) -> None:
        # Flags have one name each: what is cut short means something else when there are more of them.
        super().__init__(**{**options, "formatter_class": _Formatter, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        raise InputError("einmpi", message, f"see {self.prog} --help")

    def format_help(self) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for title, actions in grouped(self._actions):
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        command = self.prog.removeprefix("einmpi").strip()
        return formatter.format_help() + "\n" + _examples(EXAMPLES[command])


class Version(argparse.Action):
    """--version: what einmpi runs on is looked up only when somebody asks."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from einmpi.cli.versions import about

        print(about())
        parser.exit()


def grouped(actions: Sequence[argparse.Action]) -> list[tuple[str, list[argparse.Action]]]:
    """Options by group; the commands come first, under their own heading."""
    named = {name(action): action for action in actions}
    commands = named.pop("command", None)
    groups = [("commands", list(getattr(commands, "_choices_actions", ())))]
    groups += [
        (title, [named.pop(word) for word in words if word in named])
        for title, words in GROUPS.items()
    ]
    return [
        (title, found)
        for title, found in (*groups, ("other options", list(named.values())))
        if found
    ]


def name(action: argparse.Action) -> str:
    """--ranks, or job."""
    return action.option_strings[-1] if action.option_strings else action.dest


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, max_help_position=26, width=WIDTH)


def _examples(examples: Sequence[tuple[str, str]]) -> str:
    column = max(len(command) for command, _ in examples)
    lines = [f"  {command:<{column}}  {meaning}".rstrip() for command, meaning in examples]
    return "\n".join(["examples:", *lines, ""])
