"""Programs of a model that are compiled and kept: those used last, within a memory limit."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from einmpi.api import compile as compile_job
from einmpi.job.job import Job
from einmpi.planner.planning import TooLittleMemory

if TYPE_CHECKING:
    from einmpi.comm.base import Comm
    from einmpi.compiled.program import Compiled
    from einmpi.models.programs import ModelProgram

MOST_PROGRAMS = 32  # that are kept; a plan and a schedule of a large model take megabytes
_MOST_LIMITS = 8  # that are tried, until one is enough for all programs


@dataclass(frozen=True)
class Wanted:
    """A program that is about to run: what it is known by, and how it is made."""

    key: Hashable
    make: Callable[[], ModelProgram]


class KnownPrograms:
    """The compiled programs of a model. They share its weights, which are loaded once.

    `make_job` makes the job of a program, with weights that stay loaded or not. All ranks call
    the methods in the same order, so that all of them keep the same programs.
    """

    def __init__(
        self, comm: Comm, memory: int | None, make_job: Callable[[ModelProgram, bool], Job]
    ) -> None:
        self.comm = comm
        self.memory = memory
        self.make_job = make_job
        self.weights_stay = True  # loaded between calls
        self.compiled: dict[Hashable, tuple[ModelProgram, Compiled]] = {}
        self.last: Compiled | None = None  # of the latest call

    def ready(self, *wanted: Wanted) -> list[tuple[ModelProgram, Compiled]]:
        """Return programs that run one after another, planned for calls with plain arrays.

        The program that is planned first chooses how weights are cut, and which of them stay
        loaded. If that leaves too little memory for another one, the last one chooses; and if
        that does not help either, weights are loaded in each call from then on.
        """
        try:
            return self._planned(wanted)
        except TooLittleMemory:
            if not self.weights_stay:
                raise self._refusal(wanted) from None
        self.forget()
        try:
            return self._planned(wanted[::-1])[::-1]
        except TooLittleMemory:
            self.forget()
        self.weights_stay = False
        try:
            return self._planned(wanted)
        except TooLittleMemory:
            self.forget()
            self.weights_stay = True  # shorter prompts may leave enough memory for them
            raise self._refusal(wanted) from None

    def forget(self) -> None:
        """Forget all programs, and with them the weights."""
        self.compiled.clear()
        self.last = None

    def _planned(self, wanted: Sequence[Wanted]) -> list[tuple[ModelProgram, Compiled]]:
        found = []
        for each in wanted:
            known = self.compiled.pop(each.key, None)
            program, compiled = known or self._compile(each, self.weights_stay, self.memory)
            compiled.planning.plan_for_arrays()
            self.compiled[each.key] = program, compiled  # those used last are at the end
            self.last = compiled
            found.append((program, compiled))
        for key in [*self.compiled][:-MOST_PROGRAMS]:
            del self.compiled[key]
        return found

    def _compile(
        self, wanted: Wanted, weights_stay: bool, memory: int | None
    ) -> tuple[ModelProgram, Compiled]:
        program = wanted.make()
        job = replace(self.make_job(program, weights_stay), memory=memory)
        carry = dict(program.carry)
        share = self.last if weights_stay else None  # the weights are loaded once for all programs
        return program, compile_job(job, self.comm, carry=carry, donate=bool(carry), share=share)

    def _refusal(self, wanted: Sequence[Wanted]) -> TooLittleMemory:
        """Return the error that names a limit which is enough for all of these programs."""
        assert self.memory is not None
        limit = self.memory
        for _ in range(_MOST_LIMITS):
            least = limit
            for each in wanted:
                _, compiled = self._compile(each, weights_stay=False, memory=limit)
                try:
                    compiled.planning.plan_for_arrays()
                except TooLittleMemory as error:
                    least = max(least, error.least)
            if least == limit:
                break
            limit = least
        return TooLittleMemory(self.comm.size, self.memory, limit)
