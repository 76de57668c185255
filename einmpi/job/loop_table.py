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
from einmpi.job.batches import (
    EPOCH,
    ROWS,
    VALIDATION_KEYS,
    Batches,
    Validation,
    make_batches,
    make_validation,
)
from einmpi.job.loop import STEP, Loop, StepProgram, make_loop, number_graph
from einmpi.job.outputs import HistorySpec, parse_history
from einmpi.job.settings import checked_recompute
from einmpi.language.syntax import Declaration, Source, Statement, parse, statements
from einmpi.language.toml_document import Entry, kind_of, show
from einmpi.training.settings import Training, make_training
from einmpi.training.write_out import RATE, WrittenOut

_TRAIN_KEYS = (
    "loss",
    "parameters",
    "optimizer",
    "groups",
    "accumulate",
    "precision",
    "scale",
    "growth",
    "validation",
)

# Reads a table of inputs, with their shapes and dtypes.
ReadInputs: TypeAlias = Callable[[Entry], list[InputSpec]]


class TrainTable:
    """A table [train], or the table train of one of [[loop]]."""

    def __init__(self, entry: Entry, read_others: ReadInputs) -> None:
        self.entry = entry
        entry.table(_TRAIN_KEYS)
        self.validation_entry = entry["validation"]
        self.has_validation = self.validation_entry.value is not None
        self.validation_inputs: list[InputSpec] = []
        if self.has_validation:
            self.validation_entry.table(VALIDATION_KEYS)
            self.validation_inputs = read_others(self.validation_entry["inputs"])
        self.training: Training = make_training(
            entry.place_of,
            entry["loss"].get(str),
            entry["parameters"].get(list),
            entry["optimizer"].value,
            entry["accumulate"].value,
            entry["precision"].value,
            entry["scale"].value,
            entry["growth"].value,
            entry["groups"].value,
        )

    def validation_record(self) -> list[Any]:
        """Return the names of what is recorded of a validation, by default the loss."""
        if not self.has_validation:
            return []
        given = self.validation_entry["record"].get(list)
        return [self.training.loss] if given is None else given

    def validation(
        self, graph: EinGraph, batches: Batches | None, carried: Collection[str]
    ) -> Validation | None:
        """Return how the program is validated, None if it is not."""
        if not self.has_validation:
            return None
        entry = self.validation_entry
        for spec in self.validation_inputs:
            batch = entry["inputs"][spec.name]["batch"]
            if batch.value is not None:
                what = "an input of a validation has a batch"
                raise batch.wrong(what, "no batch: it is that of the steps")
        every = entry["every"].value
        record = self.validation_record()
        inputs = self.validation_inputs
        ending = [entry[key].value for key in ("patience", "keep", "goal")]
        return make_validation(
            entry.place_of, graph, batches, inputs, every, record, carried, *ending
        )

    def rate_sources(self) -> list[tuple[str, Source]]:
        """Return the rates that are expressions, with their places."""
        found = []
        for rule in self.training.rules:
            if isinstance(rule.rate, str):
                entry = self.entry
                for key in rule.keys:
                    entry = entry[key]
                if entry["rate"].value is None:  # that of all other parameters
                    entry = self.entry["optimizer"]
                found.append((entry.place_of("rate"), entry["rate"].source))
        return found

    def statements(self, written: WrittenOut, program: Source) -> list[Statement | Declaration]:
        """Return what was written out as statements whose place is that of the table.

        They become part of a program, in whose rows places are counted.
        """
        document = self.entry.document
        found = statements(Source(document.name, written.text))
        row = document.line(self.entry.path) - program.line + 1
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

    def __init__(self, entry: Entry, read_others: ReadInputs) -> None:
        self.entry = entry
        self.is_alone = len(entry.path) == 1
        keys = _LOOP_KEYS if self.is_alone else ("program", "train", *_LOOP_KEYS)
        given = entry.get(dict) or {}
        if "loop" in given:
            what = "there is a loop inside a loop"
            hint = "write [[loop]] for each of several loops that follow one another"
            raise entry["loop"].wrong(what, "loops one after another", hint)
        entry.table(keys)
        self.carry = self._read_carry()
        self.record = self._read_record()
        self.until = entry["until"].get(str)
        train = Entry(entry.document)["train"] if self.is_alone else entry["train"]
        self.train: TrainTable | None = None
        if train.value is not None:
            self.train = TrainTable(train, read_others)
        self.written_out = WrittenOut()  # what the training becomes

    def _read_carry(self) -> dict[str, str]:
        carry = self.entry["carry"]
        return {name: carry[name].get(str) or "" for name in carry.table()}

    def _read_record(self) -> tuple[str, ...]:
        record = self.entry["record"]
        names = record.get(list) or []
        for number, name in enumerate(names):
            if type(name) is not str:
                raise record[number].wrong(f"record has {kind_of(name)}", "names of tensors")
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
        place = self.entry.place
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
        shuffle = self.entry["shuffle"].value
        if isinstance(shuffle, dict):
            shuffle = dict(shuffle)
            for key in ("seed", "block"):
                number = self.entry["shuffle"][key].whole_number(sizes)
                if number is not None:
                    shuffle[key] = number
        last = self.entry["last"].get(str)
        return make_batches(self.entry.place_of, inputs, epochs, shuffle, last)

    def _read_whole_number(self, key: str, sizes: Mapping[str, int]) -> int | None:
        """Return the integer at a key, None without the key."""
        entry = self.entry[key]
        if entry.value is None:
            return None
        number = entry.whole_number(sizes)
        if number is None:
            what = f"{key} is {show(entry.value)}"
            raise entry.wrong(what, "an integer, or arithmetic on sizes")
        return number

    @property
    def is_single_step(self) -> bool:
        """Whether this is one of several loops that carries nothing: a step before other loops."""
        return not self.is_alone and not self.carry and self.train is None

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
                raise self.entry.wrong(what, "carry, or a single step without batches")
            return 1
        if batches is not None and batches.epochs is not None:
            if steps is not None:
                what = "there are both steps and epochs"
                raise self.entry["epochs"].wrong(what, "one of the two")
            steps = batches.epochs * batches.steps_an_epoch
        if given is not None:
            return given
        if steps is None:
            raise self.entry.wrong("there is no number of steps", "steps = 100")
        return steps

    def loop(self, program: StepProgram, steps: int, batches: Batches | None) -> Loop:
        """Return the loop over the program of a step."""
        until = None
        if self.until is not None:
            until = self.entry["until"].source
        validation = None
        if self.train is not None:
            validation = self.train.validation(program.graph, batches, self.carry)
        loop = make_loop(
            program,
            self.entry.place_of,
            steps,
            self.carry,
            until,
            self.record,
            self.is_single_step,
            validation,
        )
        on_nan = self.entry["on_nan"].choice(_ON_NAN, "stop")
        return replace(
            loop,
            history=self._read_history(),
            stop_at_nan=on_nan == "stop",
            batches=batches,
            written_out=self.written_out.shown,
            state={state.name: state.like for state in self.written_out.state},
        )

    def read_recompute(self, written: EinGraph) -> str | tuple[str, ...] | None:
        """Return which tensors of a step are computed again; None if the table does not say."""
        entry = self.entry["recompute"]
        if entry.value is None:
            return None
        return checked_recompute(entry.place, entry.value, written)

    def _read_history(self) -> HistorySpec | None:
        entry = self.entry["history"]
        history = entry.get(str)
        if history is None:
            return None
        spec = parse_history(history, entry.place)
        if not self.record and (self.train is None or not self.train.has_validation):
            raise entry.wrong("there is nothing to write to it", 'record = ["NAME"]')
        return replace(spec, file=entry.relative_path(spec.file))


def has_word(text: str, word: str) -> bool:
    """Return whether a word is anywhere in the text of a program."""
    return re.search(rf"\b{re.escape(word)}\b", text) is not None
