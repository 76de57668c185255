"""A [train] of a job file: its settings, and the program with the statements that they become."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

from einmpi.errors import InputError
from einmpi.files.specs import InputSpec
from einmpi.graph.eingraph import EinGraph
from einmpi.job.batches import Batches
from einmpi.job.loop import StepProgram, number_graph
from einmpi.job.validation import Validation, make_validation
from einmpi.language.syntax import Declaration, Source, Statement, parse, statements
from einmpi.language.toml_document import Document, KeyPath, get, lookup, table
from einmpi.training.settings import Training, make_training
from einmpi.training.write_out import RATE, WrittenOut

_KEYS = (
    "loss",
    "parameters",
    "optimizer",
    "accumulate",
    "precision",
    "scale",
    "growth",
    "validation",
)
_VALIDATION_KEYS = ("inputs", "every", "record")

# Reads the table of inputs at a path, with their shapes and dtypes.
ReadInputs: TypeAlias = Callable[[KeyPath], list[InputSpec]]


class TrainTable:
    """A table [train], or the table train of one of [[loop]]."""

    def __init__(self, document: Document, path: KeyPath, read_others: ReadInputs) -> None:
        self.document = document
        self.path = path
        table(document, path, _KEYS)
        self.validation_path = (*path, "validation")
        self.has_validation = lookup(document, self.validation_path) is not None
        self.validation_inputs: list[InputSpec] = []
        if self.has_validation:
            table(document, self.validation_path, _VALIDATION_KEYS)
            self.validation_inputs = read_others((*self.validation_path, "inputs"))
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

    def validation_record(self) -> list[Any]:
        """Return the names of what is recorded of a validation, by default the loss."""
        if not self.has_validation:
            return []
        given = get(self.document, (*self.validation_path, "record"), list)
        return [self.training.loss] if given is None else given

    def validation(
        self, graph: EinGraph, batches: Batches | None, carried: Collection[str]
    ) -> Validation | None:
        """Return how the program is validated, None if it is not."""
        if not self.has_validation:
            return None
        path = self.validation_path

        def place(*keys: str | int) -> str:
            return self.document.place((*path, *keys))

        for spec in self.validation_inputs:
            entry = (*path, "inputs", spec.name)
            given = lookup(self.document, entry)
            if isinstance(given, dict) and "batch" in given:
                what = "an input of a validation has a batch"
                expected = "no batch: it is that of the steps"
                raise InputError(self.document.place((*entry, "batch")), what, expected)
        every = lookup(self.document, (*path, "every"))
        record = self.validation_record()
        inputs = self.validation_inputs
        return make_validation(place, graph, batches, inputs, every, record, carried)

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
    if any(isinstance(node, ast.Name) and node.id == RATE for node in ast.walk(body[0])):
        what = f"the rate {source.text!r:.60} is computed from itself"
        raise InputError(place, what, "an expression of other numbers")
    vertex = number_graph(program, source, RATE, with_inputs=True)[RATE]
    if vertex.bound or vertex.dtype.startswith(("complex", "bool")):
        what = f"the rate {source.text!r:.60} is {vertex.dtype}"
        raise InputError(place, what, "a real number")
