"""A [loop] of a job file: what is carried from step to step, and when the steps end."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from einmpi.errors import InputError
from einmpi.files.specs import InputSpec
from einmpi.graph.eingraph import EinGraph
from einmpi.job.batches import EPOCH, ROWS, Batches, make_batches
from einmpi.job.history import HistorySpec, parse_history
from einmpi.job.loop import STEP, Loop, StepProgram, make_loop
from einmpi.job.settings import checked_recompute
from einmpi.job.train_table import ReadInputs, TrainTable
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
from einmpi.training.write_out import WrittenOut

_KEYS = (
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
        keys = _KEYS if is_alone else ("program", "train", *_KEYS)
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
