"""The command `einmpi examples`: copy the example jobs into a folder."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING

from einmpi.errors import InputError
from einmpi.units import counted

if TYPE_CHECKING:
    from einmpi.comm.base import Comm


def examples(options: argparse.Namespace, comm: Comm) -> int:
    """Copy the example jobs into a folder."""
    from einmpi.comm.agreement import on_first_rank

    on_first_rank(comm, lambda: _copy_examples(options.folder, options.quiet))
    return 0


def example_files() -> dict[str, bytes]:
    """Return the example jobs and scripts: their paths in the folder and what they contain."""
    folder = resources.files("einmpi").joinpath("examples")
    found = {path: file.read_bytes() for path, file in _files_in(folder, "")}
    return dict(sorted(found.items()))


def _files_in(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        path = f"{prefix}{entry.name}"
        if entry.is_dir():
            yield from _files_in(entry, f"{path}/")
        elif not entry.name.endswith(".h5"):  # results of examples that were run where they are
            yield path, entry


def _copy_examples(folder: str, quiet: bool) -> None:
    """Copy the files that are not there yet. A file that differs from its example is an error."""
    from einmpi.files.replace import replace_file

    missing = {}
    for path, content in example_files().items():
        target = os.path.join(folder, path)
        if not os.path.lexists(target):
            missing[target] = content
        elif not _has_content(target, content):
            problem = f"{target} exists and is not the example"
            raise InputError("einmpi examples", problem, "another folder")
    for target, content in missing.items():
        try:
            os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
        except OSError as error:
            problem = f"{os.path.dirname(target)}: {error.strerror}"
            raise InputError("einmpi examples", problem, "a folder to write to") from None
        replace_file(target, [content])
        if target.endswith(".sh"):
            os.chmod(target, os.stat(target).st_mode | 0o111)
    if not quiet:
        print(f"{counted(len(missing), 'file')} copied to {folder}")


def _has_content(file: str, content: bytes) -> bool:
    if not os.path.isfile(file):
        return False
    with open(file, "rb") as opened:
        return opened.read(len(content) + 1) == content
