"""Programs of this Python's environment, mpirun above all, before those of the system: mpi4py is
made for that one, and `.venv/bin/python -m bench node` need not have the environment activated."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def prefer_own_programs() -> None:
    """Let this process and those that it starts find programs beside its Python first."""
    folder = str(Path(sys.executable).parent)
    os.environ["PATH"] = os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])
