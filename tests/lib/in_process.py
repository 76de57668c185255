"""`einmpi …` in this process, as if it were one of its own: a start of Python takes longer than
most tests.
"""

import contextlib
import io
import os
import subprocess
from collections.abc import Mapping, Sequence
from unittest import mock

from mpi_helpers import OUTER

from einmpi.cli.main import main


def einmpi_here(
    folder: str | os.PathLike[str],
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    together: bool = False,
) -> subprocess.CompletedProcess[str]:
    """What the command says in a folder, and its status; `together`: standard error goes where
    standard output does.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(OUTER)}
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    err = out if together else io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    with (
        contextlib.chdir(folder),
        mock.patch.dict(os.environ, {**kept, **(environment or {})}, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            status = main(list(arguments))
        except SystemExit as end:
            status = end.code
    said = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return subprocess.CompletedProcess(arguments, status, said[0], "" if together else said[1])
