"""The [loop] of a job file: what is carried from step to step, and when the steps end."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from einmpi.errors import InputError
from einmpi.files.specs import InputSpec
from einmpi.job.history import HistorySpec, parse_history
from einmpi.job.loop import STEP, Loop, StepProgram, make_loop
from einmpi.language.toml_document import (
    Document,
    choice,
    get,
    kind_of,
    lookup,
    relative_to_document,
    show,
    table,
    whole_number,
)

_KEYS = ("steps", "carry", "until", "record", "history", "on_nan")
_ON_NAN = ("stop", "keep")


class LoopTable:
    """The table [loop], with what is needed before the program is known."""

    def __init__(self, document: Document) -> None:
        self.document = document
        table(document, ("loop",), _KEYS)
        self.carry = self._read_carry()
        self.record = self._read_names("record")
        self.until = get(document, ("loop", "until"), str)

    def place(self, *keys: str | int) -> str:
        return self.document.place(("loop", *keys))

    def _read_carry(self) -> dict[str, str]:
        found = {}
        for name in table(self.document, ("loop", "carry")):
            output = get(self.document, ("loop", "carry", name), str)
            assert output is not None
            found[name] = output
        return found

    def _read_names(self, key: str) -> tuple[str, ...]:
        names = get(self.document, ("loop", key), list) or []
        for number, name in enumerate(names):
            if type(name) is not str:
                what = f"{key} has {kind_of(name)}"
                raise InputError(self.place(key, number), what, "names of tensors")
        return tuple(names)

    def needed(self, computed: Sequence[str]) -> tuple[str, ...]:
        """Return the tensors that steps have to compute for the loop, of those in `computed`."""
        words = {*self.carry.values(), *self.record}
        words.update(re.findall(r"[^\W\d]\w*", self.until or ""))
        return tuple(name for name in computed if name in words)

    def step_number(self, program: str) -> list[InputSpec]:
        """Return the input with the number of the step, if the program reads one."""
        if not re.search(rf"\b{STEP}\b", program):
            return []
        place = self.place()
        return [InputSpec(STEP, shape=(), dtype="int64", resident=True, place=place, value=0)]

    def read_steps(self, sizes: Mapping[str, int], given: int | None) -> int:
        """Return the most steps; `given` replaces those of the file."""
        if given is not None:
            return given
        written = lookup(self.document, ("loop", "steps"))
        if written is None:
            raise InputError(self.place(), "there is no number of steps", "steps = 100")
        steps = whole_number(self.document, ("loop", "steps"), sizes)
        if steps is None:
            what = f"steps is {show(written)}"
            raise InputError(self.place("steps"), what, "an integer, or arithmetic on sizes")
        return steps

    def loop(self, program: StepProgram, steps: int) -> Loop:
        """Return the loop over the program of a step."""
        until = None
        if self.until is not None:
            until = self.document.source(("loop", "until"))
        loop = make_loop(program, self.place, steps, self.carry, until, self.record)
        on_nan = choice(self.document, ("loop", "on_nan"), _ON_NAN, "stop")
        return replace(loop, history=self._read_history(), stop_at_nan=on_nan == "stop")

    def _read_history(self) -> HistorySpec | None:
        history = get(self.document, ("loop", "history"), str)
        if history is None:
            return None
        place = self.place("history")
        spec = parse_history(history, place)
        if not self.record:
            raise InputError(place, "there is nothing to write to it", 'record = ["NAME"]')
        return replace(spec, file=relative_to_document(self.document, spec.file))
