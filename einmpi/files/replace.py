"""Replace a single file that the user names, by one process: whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterable

from einmpi.errors import InputError
from einmpi.files.atomic import (
    draft_path,
    is_of_another_user,
    make_draft,
    new_token,
    publish,
)
from einmpi.process.abort import on_abort


def check_replaceable(file: str, place: str) -> None:
    """Refuse a file that could not be written, before hours of work rather than after them."""
    target = os.path.realpath(file)
    folder = os.path.dirname(target)
    exists = os.path.exists(file)
    number = 0
    if os.path.isdir(target) or file.endswith(os.sep):
        number = errno.EISDIR
    elif os.path.islink(target):  # realpath follows all links but those in a circle
        number = errno.ELOOP
    elif not exists and not os.path.exists(folder):
        number = errno.ENOENT
    elif not exists and not os.path.isdir(folder):
        number = errno.ENOTDIR
    elif not os.access(file if exists else folder, os.W_OK):
        number = errno.EACCES
    if number:
        raise _cannot_write(place, OSError(number, os.strerror(number)))


def replace_file(file: str | os.PathLike[str], pieces: Iterable[bytes]) -> None:
    """Put these bytes, piece after piece, in the file's place.

    Some files are written in place instead: a pipe or a device, where a rename would put a file in
    its place; a file in a folder where no draft can be made or take its place; a file to which this
    process prints.
    """
    path = os.fspath(file)
    check_replaceable(path, path)
    target = os.path.realpath(path)
    regular = os.path.isfile(path) or not os.path.exists(path)
    replaceable = os.access(os.path.dirname(target), os.W_OK) and not is_of_another_user(target)
    stream = _printed_to(path)
    try:
        if stream is not None:
            with open(stream, "wb", closefd=False) as opened:
                opened.writelines(pieces)
        elif regular and replaceable:
            _replace(target, pieces)
        else:
            with open(path, "wb") as opened:
                opened.writelines(pieces)
    except OSError as error:
        raise _cannot_write(path, error) from None


def _replace(target: str, pieces: Iterable[bytes]) -> None:
    draft = draft_path(target, new_token())

    def remove_draft() -> None:
        with contextlib.suppress(FileNotFoundError):
            os.remove(draft)

    try:
        with on_abort(remove_draft):
            make_draft(draft, target, None)
            with open(draft, "wb") as opened:
                opened.writelines(pieces)
                opened.flush()
                os.fsync(opened.fileno())
            publish(draft, target)
    finally:
        remove_draft()


def _printed_to(file: str) -> int | None:
    """Return the descriptor of standard output or error if it goes to this file.

    The file is then /dev/stdout, or a shell has opened it under its name.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        with contextlib.suppress(OSError, ValueError):
            descriptor: int = stream.fileno()
            if os.path.samestat(os.stat(file), os.fstat(descriptor)):
                stream.flush()
                return descriptor
    return None


def _cannot_write(place: str, error: OSError) -> InputError:
    return InputError(place, error.strerror or str(error), "a file that can be written")
