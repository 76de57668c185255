"""A [loop] and a [train] of a job file: what steps carry, when they end, how they train."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from einmpi.errors import InputError
from einmpi.files.specs import InputSpec
from einmpi.graph.eingraph import EinGraph
from einmpi.job.loop import (
    EPOCH,
    ROWS,
    STEP,
    Batches,
    Loop,
    StepProgram,
    Validation,
    make_batches,
    make_loop,
    make_validation,
    number_graph,
)
from einmpi.job.outputs import HistorySpec, parse_history
from einmpi.job.settings import checked_recompute
from einmpi.language.syntax import Declaration, Source, Statement, parse, statements
from einmpi.language.toml_document import (
    Document,
    KeyPath,
    choice,
    get,
    kind_of,
    lookup,
    relative_to_document,
    show,
    table,
    whole_number,
)
from einmpi.training.settings import Training, make_training
from einmpi.training.write_out import RATE, WrittenOut

_TRAIN_KEYS = (
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
        table(document, path, _TRAIN_KEYS)
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


_LOOP_KEYS = (
    "steps",
    "epochs",
    "carry",
    "until",
    "record",
    "history",
    "on_nan",
    "shuffle",
    "last",
    "recompute",
)
_ON_NAN = ("stop", "keep")


class LoopTable:
    """A table [loop] or [[loop]], with what is needed before the program is known.

    Only one of [[loop]] has a program of its own.
    """

    def __init__(self, document: Document, path: KeyPath, read_others: ReadInputs) -> None:
        self.document = document
        self.path = path
        is_alone = len(path) == 1
        keys = _LOOP_KEYS if is_alone else ("program", "train", *_LOOP_KEYS)
        given = get(document, path, dict) or {}
        if "loop" in given:
            what = "there is a loop inside a loop"
            hint = "write [[loop]] for each of several loops that follow one another"
            raise InputError(self.place("loop"), what, "loops one after another", hint)
        table(document, path, keys)
        self.carry = self._read_carry()
        self.record = self._read_names("record")
        self.until = get(document, (*self.path, "until"), str)
        train_path = ("train",) if is_alone else (*path, "train")
        self.train: TrainTable | None = None
        if lookup(document, train_path) is not None:
            self.train = TrainTable(document, train_path, read_others)
        self.written_out = WrittenOut()  # what the training becomes

    def place(self, *keys: str | int) -> str:
        return self.document.place((*self.path, *keys))

    def _read_carry(self) -> dict[str, str]:
        found = {}
        for name in table(self.document, (*self.path, "carry")):
            output = get(self.document, (*self.path, "carry", name), str)
            assert output is not None
            found[name] = output
        return found

    def _read_names(self, key: str) -> tuple[str, ...]:
        names = get(self.document, (*self.path, key), list) or []
        for number, name in enumerate(names):
            if type(name) is not str:
                what = f"{key} has {kind_of(name)}"
                raise InputError(self.place(key, number), what, "names of tensors")
        return tuple(names)

    def needed(self, computed: Sequence[str]) -> tuple[str, ...]:
        """Return the tensors that steps have to compute for the loop, of those in `computed`."""
        words = {*self.carry.values(), *self.record}
        if self.train is not None:
            words.update(self.train.validation_record())
        words.update(re.findall(r"[^\W\d]\w*", self.until or ""))
        return tuple(name for name in computed if name in words)

    def with_training(self, written: WrittenOut) -> LoopTable:
        """Return the table with what a training carries."""
        changed = copy.copy(self)
        changed.carry = {**self.carry, **written.carry}
        changed.written_out = written
        return changed

    def step_numbers(
        self, program: str, batches: Batches | None, taken: Collection[str]
    ) -> list[InputSpec]:
        """Return the inputs with the number of the step, and with those of its batch.

        Only those that the program reads; names that are `taken` mean something else in it.
        """
        names = [STEP]
        if batches is not None:
            names += [ROWS, EPOCH]
        place = self.place()
        found = []
        for name in names:
            if name not in taken and has_word(program, name):
                found.append(
                    InputSpec(name, shape=(), dtype="int64", resident=True, place=place, value=0)
                )
        return found

    def read_batches(self, inputs: Iterable[InputSpec], sizes: Mapping[str, int]) -> Batches | None:
        """Return what comes in batches, and in which order."""
        epochs = self._read_whole_number("epochs", sizes)
        shuffle = lookup(self.document, (*self.path, "shuffle"))
        if isinstance(shuffle, dict):
            shuffle = dict(shuffle)
            for key in ("seed", "block"):
                number = whole_number(self.document, (*self.path, "shuffle", key), sizes)
                if number is not None:
                    shuffle[key] = number
        last = get(self.document, (*self.path, "last"), str)
        return make_batches(self.place, inputs, epochs, shuffle, last)

    def _read_whole_number(self, key: str, sizes: Mapping[str, int]) -> int | None:
        """Return the integer at a key, None without the key."""
        written = lookup(self.document, (*self.path, key))
        if written is None:
            return None
        number = whole_number(self.document, (*self.path, key), sizes)
        if number is None:
            what = f"{key} is {show(written)}"
            raise InputError(self.place(key), what, "an integer, or arithmetic on sizes")
        return number

    @property
    def is_single_step(self) -> bool:
        """Whether this is one of several loops that carries nothing: a step before other loops."""
        return len(self.path) > 1 and not self.carry and self.train is None

    def read_steps(
        self, sizes: Mapping[str, int], given: int | None, batches: Batches | None
    ) -> int:
        """Return the most steps; `given` replaces those of the file.

        One of several loops that carries nothing has one step in any case.
        """
        steps = self._read_whole_number("steps", sizes)
        if self.is_single_step:
            if steps not in (None, 1) or batches is not None:
                what = "nothing is carried from step to step"
                raise InputError(self.place(), what, "carry, or a single step without batches")
            return 1
        if batches is not None and batches.epochs is not None:
            if steps is not None:
                what = "there are both steps and epochs"
                raise InputError(self.place("epochs"), what, "one of the two")
            steps = batches.epochs * batches.steps_an_epoch
        if given is not None:
            return given
        if steps is None:
            raise InputError(self.place(), "there is no number of steps", "steps = 100")
        return steps

    def loop(self, program: StepProgram, steps: int, batches: Batches | None) -> Loop:
        """Return the loop over the program of a step."""
        until = None
        if self.until is not None:
            until = self.document.source((*self.path, "until"))
        loop = make_loop(
            program, self.place, steps, self.carry, until, self.record, self.is_single_step
        )
        validation = None
        if self.train is not None:
            validation = self.train.validation(program.graph, batches, self.carry)
        on_nan = choice(self.document, (*self.path, "on_nan"), _ON_NAN, "stop")
        return replace(
            loop,
            history=self._read_history(),
            stop_at_nan=on_nan == "stop",
            batches=batches,
            written_out=self.written_out.shown,
            state=tuple(state.name for state in self.written_out.state),
            validation=validation,
        )

    def read_recompute(self, written: EinGraph) -> str | tuple[str, ...] | None:
        """Return which tensors of a step are computed again; None if the table does not say."""
        given = lookup(self.document, (*self.path, "recompute"))
        if given is None:
            return None
        return checked_recompute(self.place("recompute"), given, written)

    def _read_history(self) -> HistorySpec | None:
        history = get(self.document, (*self.path, "history"), str)
        if history is None:
            return None
        place = self.place("history")
        spec = parse_history(history, place)
        if not self.record and (self.train is None or not self.train.has_validation):
            raise InputError(place, "there is nothing to write to it", 'record = ["NAME"]')
        return replace(spec, file=relative_to_document(self.document, spec.file))


def has_word(text: str, word: str) -> bool:
    """Return whether a word is anywhere in the text of a program."""
    return re.search(rf"\b{re.escape(word)}\b", text) is not None
