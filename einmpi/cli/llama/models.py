"""The model of a command line, and the shapes of prompts that it is planned for."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from einmpi.comm.base import Comm
    from einmpi.models.llama import Model

_USUAL_SEQUENCE = 1024


def load_model(options: argparse.Namespace, comm: Comm, random: bool = False) -> Model:
    """Return the model of a command line. All ranks call it."""
    from einmpi.models.llama import load

    return load(
        options.model,
        dtype=options.dtype,
        backend=options.backend,
        memory=options.memory,
        strategy=options.strategy,
        comm=comm,
        random=random or options.random,
    )


def prompt_shapes(options: argparse.Namespace, model: Model) -> list[tuple[int, int]]:
    """Return the batches and sequences that --batch and --sequence ask for, one by one."""
    sequences = options.sequence or [min(model.config.positions, _USUAL_SEQUENCE)]
    found = []
    for batch in options.batch:
        for sequence in sequences:
            found.append((batch, sequence))
    return found
