"""A [train] of a job file: its settings, and the program with the statements that they become."""

from __future__ import annotations

import ast

from einmpi.errors import InputError
from einmpi.job.loop import StepProgram, number_graph
from einmpi.language.syntax import Declaration, Source, Statement, parse, statements
from einmpi.language.toml_document import Document, KeyPath, get, lookup, table
from einmpi.training.settings import Training, make_training
from einmpi.training.write_out import RATE, WrittenOut

_KEYS = ("loss", "parameters", "optimizer", "accumulate", "precision", "scale", "growth")


class TrainTable:
    """A table [train], or the table train of one of [[loop]]."""

    def __init__(self, document: Document, path: KeyPath) -> None:
        self.document = document
        self.path = path
        table(document, path, _KEYS)
        self.training: Training = make_training(
            self.place,
            get(document, (*path, "loss"), str),
            get(document, (*path, "parameters"), list),
            lookup(document, (*path, "optimizer")),
            lookup(document, (*path, "accumulate")),
            lookup(document, (*path, "precision")),
            lookup(document, (*path, "scale")),
            lookup(document, (*path, "growth")),
        )

    def place(self, *keys: str | int) -> str:
        return self.document.place((*self.path, *keys))

    def rate_source(self) -> Source | None:
        """Return the rate, if it is an expression."""
        if isinstance(self.training.rate, str):
            return self.document.source((*self.path, "optimizer", "rate"))
        return None

    def statements(self, written: WrittenOut, program: Source) -> list[Statement | Declaration]:
        """Return what was written out as statements whose place is that of the table.

        They become part of a program, in whose rows places are counted.
        """
        found = statements(Source(self.document.name, written.text))
        row = self.document.line(self.path) - program.line + 1
        for item in found:
            if not isinstance(item, Statement):
                continue
            for tree in (item.node, *item.trees):
                for node in ast.walk(tree):
                    if isinstance(node, ast.expr):
                        node.lineno = row
                        node.col_offset = 0
        return found


def check_rate(program: StepProgram, place: str, source: Source) -> None:
    """Refuse a rate that is no expression of numbers."""
    body = parse(source)
    if len(body) != 1 or not isinstance(body[0], ast.Expr):
        what = f"{source.text!r:.60} is not a rate"
        raise InputError(place, what, 'a number, or an expression such as "0.1 * 0.99**step"')
    vertex = number_graph(program, source, RATE, with_inputs=True)[RATE]
    if vertex.bound or vertex.dtype.startswith(("complex", "bool")):
        what = f"the rate {source.text!r:.60} is {vertex.dtype}"
        raise InputError(place, what, "a real number")
