"""How a model is computed: the arguments of `load`, checked."""

from __future__ import annotations

import os
from dataclasses import dataclass

from einmpi.arguments import known_name
from einmpi.errors import InputError
from einmpi.files.converting import CONVERTIBLE_DTYPES
from einmpi.job.settings import backend_names
from einmpi.models.checkpoint import check_folder
from einmpi.models.config import NAMED, Config, read_config
from einmpi.planner.strategies import DEFAULT_STRATEGY, STRATEGIES
from einmpi.units import parse_bytes


@dataclass(frozen=True)
class Settings:
    """How a model is computed: its dtype, and what its jobs say about backend and plan."""

    dtype: str
    backend: str
    memory: int | None
    strategy: str


def checked_settings(
    config: Config,
    dtype: str | None,
    backend: str,
    memory: int | str | None,
    strategy: str | None,
) -> Settings:
    """Return the settings that a caller gave; by default the dtype is that of the files."""
    return Settings(
        known_name("dtype", config.dtype if dtype is None else dtype, CONVERTIBLE_DTYPES),
        known_name("backend", backend, backend_names()),
        None if memory is None else parse_bytes(str(memory), "memory"),
        known_name("strategy", DEFAULT_STRATEGY if strategy is None else strategy, STRATEGIES),
    )


def config_of(path: str, random: bool) -> Config:
    """Return the config of a folder, or of a named size with random weights."""
    if path in NAMED and not os.path.isdir(path):
        if not random:
            problem = "a size has no weights"
            hint = "use random weights: --random, or random=True in Python"
            raise InputError(path, problem, "the folder of a checkpoint", hint)
        return NAMED[path]
    check_folder(path)
    return read_config(path)
