"""Random programs for tests of properties: those of the soak, with its oracle in numpy."""

from __future__ import annotations

import os

import numpy as np
from graph_helpers import declared
from hypothesis import Phase, settings
from hypothesis import strategies as st

from einmpi.graph.eingraph import EinGraph
from einmpi.language.parse import build_graphs, parse_program
from einmpi.language.syntax import Source
from tests.soak.generate import THEMES, Draw, ProgramMaker
from tests.soak.tree import Program, program_text

# EINMPI_EXAMPLES=5000 searches further, differently each time, and makes what it finds as small as
# it can (minutes).
MANY = int(os.environ.get("EINMPI_EXAMPLES", "0"))


def settled(examples: int) -> settings:
    return settings(
        max_examples=MANY or examples,
        phases=list(Phase) if MANY else [Phase.explicit, Phase.generate],
        print_blob=False,
    )


def random_program(number: int) -> Program:
    """Return a program that follows from a number, with values that are neither huge nor odd."""
    draw = Draw("property", number)
    maker = ProgramMaker(draw, draw.one(THEMES), strict=False)
    maker.values = "plain"
    return maker.program()


def programs() -> st.SearchStrategy[Program]:
    return st.integers(0, 2**32).map(random_program)


def arrays_of(program: Program) -> dict[str, np.ndarray]:
    return {item.name: item.values for item in program.inputs}


def rewritten(program: Program, text: str = "") -> EinGraph:
    """Return the graph of a program after all rewrites; `text` may be another text of it."""
    source = Source("p", text or program_text(program))
    return build_graphs(source, declared(arrays_of(program)), {}, program.outputs).rewritten


def graphs(program: Program) -> dict[str, EinGraph]:
    source = Source("p", program_text(program))
    plain = parse_program(source, declared(arrays_of(program)), {}, program.outputs)
    return {"as written": plain, "rewritten": rewritten(program)}
