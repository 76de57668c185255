"""A file that somebody names, beside a job's results: replaced whole or not at all, by one process."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterable

from einmpi.errors import InputError
from einmpi.files.atomic import begin, new_draft, publish
from einmpi.process.abort import on_abort


def check_replaceable(file: str, place: str) -> None:
    """Refuse a file that could not be written: before hours of work, not after them."""
    target = os.path.realpath(file)
    folder = os.path.dirname(target)
    number = 0
    if os.path.isdir(target) or file.endswith(os.sep):
        number = errno.EISDIR
    elif os.path.islink(target):  # realpath follows all others
        number = errno.ELOOP
    elif not os.path.exists(file) and not os.path.isdir(folder):
        number = errno.ENOTDIR if os.path.exists(folder) else errno.ENOENT
    elif not os.access(file if os.path.exists(file) else folder, os.W_OK):
        number = errno.EACCES
    if number:
        raise _cannot_write(place, OSError(number, os.strerror(number)))


def replace_file(file: str | os.PathLike[str], pieces: Iterable[bytes]) -> None:
    """Put these bytes, piece after piece, in the file's place.

    What is no plain file, such as a pipe or /dev/null, is only written to: a rename would put a file in its place. So
    is a file in a folder where no draft can be made, and one to which this process prints.
    """
    check_replaceable(os.fspath(file), os.fspath(file))
    plain = os.path.isfile(file) or not os.path.exists(file)
    stream = _printed_to(file)
    try:
        if plain and stream is None and os.access(os.path.dirname(os.path.realpath(file)), os.W_OK):
            _replace(os.path.realpath(file), pieces)
            return
        with open(file if stream is None else stream, "wb", closefd=stream is None) as opened:
            opened.writelines(pieces)
    except OSError as error:
        raise _cannot_write(os.fspath(file), error) from None


def _replace(target: str, pieces: Iterable[bytes]) -> None:
    draft = new_draft(target)

    def drop() -> None:
        with contextlib.suppress(FileNotFoundError):
            os.remove(draft)

    try:
        with on_abort(drop):
            begin(draft, target, None)
            with open(draft, "wb") as opened:
                opened.writelines(pieces)
                opened.flush()
                os.fsync(opened.fileno())
            publish(draft, target)
    finally:
        drop()


def _printed_to(file: str | os.PathLike[str]) -> int | None:
    """Standard output or error, where it goes to this file: it is /dev/stdout, or a shell has opened it by its name."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            descriptor: int = stream.fileno()
            if os.path.samestat(os.stat(file), os.fstat(descriptor)):
                stream.flush()
                return descriptor
    return None


def _cannot_write(place: str, error: OSError) -> InputError:
    return InputError(place, error.strerror or str(error), "a file to write")
