"""The programs of a job, of one loop or of several one after another, and their graphs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from einmpi.errors import InputError
from einmpi.files.specs import InputSpec, OutputSpec
from einmpi.graph.eingraph import EinGraph
from einmpi.graph.rewrite import prune
from einmpi.graph.scalar import MAX_EXTENT, unique
from einmpi.job.batches import Batches
from einmpi.job.loop import NUMBERS_OF_STEPS, STEP, Loop, StepProgram, refuse_step_as_input
from einmpi.job.loop_table import LoopTable, ReadInputs, TrainTable, check_rate, has_word
from einmpi.language.parse import Graphs, build_graphs, parse_program
from einmpi.language.syntax import Declaration, Source, Statement, statements
from einmpi.language.toml_document import Entry, kind_of
from einmpi.training.settings import Program, Training
from einmpi.training.write_out import RATE, WrittenOut, write_out


@dataclass(frozen=True)
class ProgramText:
    """A program with all that it may read; `loop_table` says how it is repeated."""

    source: Source
    inputs: tuple[InputSpec, ...]
    sizes: Mapping[str, int]
    items: Sequence[Statement | Declaration]
    parameter_types: Mapping[str, type]  # in Python
    loop_table: LoopTable | None = None
    steps: int = 1  # at most
    batches: Batches | None = None  # inputs of which each step takes some rows
    results: tuple[str, ...] | None = None  # tensors of the last step, if not all that are unused

    @property
    def words(self) -> set[str]:
        """All words in the text."""
        return set(re.findall(r"[^\W\d]\w*", self.source.text))

    @property
    def computed(self) -> tuple[str, ...]:
        """The tensors that statements compute."""
        return tuple(item.name for item in self.items if isinstance(item, Statement))

    @property
    def carried(self) -> tuple[str, ...]:
        """The inputs that a loop carries."""
        return () if self.loop_table is None else tuple(self.loop_table.carry)

    def needed_by_loop(self) -> tuple[str, ...]:
        """Return the tensors that a loop carries, records or looks at."""
        return () if self.loop_table is None else self.loop_table.needed(self.computed)

    @cached_property
    def written(self) -> EinGraph:
        """The graph of all statements, with the inputs that they read."""
        graph = parse_program(
            self.source, self._tensors(), self.sizes, None, self.items, self.parameter_types
        )
        return prune(graph)

    def graphs(self, outputs: Sequence[str] | None, strict: bool) -> Graphs:
        """Return the graphs for some outputs, by default the tensors that no statement uses."""
        return build_graphs(
            self.source,
            self._tensors(),
            self.sizes,
            outputs,
            strict,
            self.items,
            self.parameter_types,
        )

    def loop(self, written: EinGraph) -> Loop | None:
        """Return how the program is repeated, None if it is not."""
        if self.loop_table is None:
            return None
        program = StepProgram(written, self.sizes, self.inputs)
        return self.loop_table.loop(program, self.steps, self.batches)

    def _tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        found = {}
        for spec in self.inputs:
            found[spec.name] = (spec.shape or (), spec.dtype or "")
        return found


def parameter_types(inputs: Iterable[InputSpec]) -> dict[str, type]:
    """Return the inputs that are numbers, with their types in Python."""
    return {spec.name: type(spec.value) for spec in inputs if spec.value is not None}


def read_program_text(
    source: Source,
    inputs: Sequence[InputSpec],
    sizes: Mapping[str, int],
    loop_table: LoopTable | None,
    steps: int | None,
    results: Mapping[str, InputSpec] | None = None,
) -> ProgramText:
    """Return a program with its inputs and sizes; in a loop they include `step` and `steps`.

    `steps` replaces those of the loop's table. `results` are tensors of earlier loops, which take
    the place of inputs with the same name. What the program itself computes is another tensor.
    """
    items = statements(source)
    computed = {item.name for item in items if isinstance(item, Statement)}
    own_inputs = list(inputs)
    if results is not None:
        own_inputs = []
        for spec in inputs:
            # Of inputs that come in batches, a loop has only those that it reads.
            is_unread = spec.rows is not None and not has_word(source.text, spec.name)
            if spec.name not in results and not is_unread:
                own_inputs.append(spec)
        for name, spec in results.items():
            is_unread = name in NUMBERS_OF_STEPS and not has_word(source.text, name)
            if name not in computed and not is_unread:
                own_inputs.append(spec)
    types = parameter_types(own_inputs)
    if loop_table is None:
        return ProgramText(source, tuple(own_inputs), dict(sizes), items, types)
    refuse_step_as_input(own_inputs, loop_table.entry.place)
    batches = loop_table.read_batches(own_inputs, sizes)
    most_steps = loop_table.read_steps(sizes, steps, batches)
    program = ProgramText(
        source, tuple(own_inputs), dict(sizes), items, types, loop_table, most_steps, batches
    )
    if loop_table.train is None:
        return _with_numbers(program)
    return _with_numbers(_trained(program, loop_table.train, results or {}))


def _with_numbers(program: ProgramText) -> ProgramText:
    """Return the program with the numbers of steps that it reads: `step`, `steps` and others."""
    loop_table = program.loop_table
    assert loop_table is not None
    text = program.source.text
    taken = {*program.computed, *program.sizes, *(spec.name for spec in program.inputs)}
    numbers = loop_table.step_numbers(text, program.batches, taken)
    sizes = dict(program.sizes)
    if program.steps <= MAX_EXTENT and "steps" not in taken and has_word(text, "steps"):
        sizes["steps"] = program.steps
    return replace(program, inputs=(*program.inputs, *numbers), sizes=sizes)


def written_training(
    program: ProgramText,
    complete: ProgramText,
    training: Training,
    carried: Iterable[str],
    earlier: Collection[str] = (),
) -> WrittenOut:
    """Return the statements that train a program, and what they carry.

    `complete` is the same program with the numbers of steps among its inputs. `earlier` are tensors
    of earlier loops that it does not read.
    """
    if STEP in program.computed or STEP in program.sizes:
        what = f"{STEP} is not the number of the step in this program, and training needs that"
        raise InputError(training.place(), what, f"another name than {STEP} in the program")
    known = {spec.name for spec in program.inputs}.difference(earlier)

    def dtypes_of(changed_text: str) -> dict[str, str]:
        changed = replace(program.source, text=changed_text)
        items = statements(changed)
        inputs = _without(complete.inputs, items)
        graph = replace(complete, source=changed, inputs=inputs, items=items).written
        return {vertex.name: vertex.dtype for vertex in graph.vertices}

    return write_out(
        training,
        Program(
            graph=complete.written,
            items=program.items,
            taken=known.union(program.words, program.sizes),
            dtypes_of=dtypes_of,
            earlier=earlier,
            carried=tuple(carried),
            batched=() if program.batches is None else program.batches.names,
            constants=tuple(program.parameter_types),
        ),
    )


def _trained(
    program: ProgramText, train: TrainTable, results: Mapping[str, InputSpec]
) -> ProgramText:
    """Return a program with the statements that train it. `results` are those of earlier loops."""
    loop_table = program.loop_table
    assert loop_table is not None
    complete = _with_numbers(program)
    earlier = set(results) - program.words
    written = written_training(program, complete, train.training, loop_table.carry, earlier)
    _check_rates(program, train, complete)
    added = train.statements(written, program.source)
    inputs = list(_without(program.inputs, added))
    for state in written.state:
        place = train.entry.place
        inputs.append(InputSpec(state.name, state.shape, state.dtype, random="zeros", place=place))
    text = program.source.text
    items = program.items
    if written.program is not None:
        text = written.program
        items = statements(replace(program.source, text=text))
    return replace(
        program,
        source=replace(program.source, text=f"{text}\n{written.text}"),
        inputs=tuple(inputs),
        items=[*items, *added],
        loop_table=loop_table.with_training(written),
        results=complete.written.outputs,
    )


def _check_rates(program: ProgramText, train: TrainTable, complete: ProgramText) -> None:
    """Refuse a rate that is a wrong expression. `complete` has the numbers of a step as inputs."""
    for place, rate in train.rate_sources():
        # The program may not read `steps` where the rate does.
        text = f"{program.source.text}\n{rate.text}"
        with_rate = replace(program, source=replace(program.source, text=text))
        sizes = _with_numbers(with_rate).sizes
        # An earlier loop may have a rate of its own.
        readable = [spec for spec in program.inputs if spec.name != RATE]
        known = StepProgram(complete.written, sizes, readable)
        check_rate(known, place, rate)


def _without(
    inputs: Sequence[InputSpec], items: Sequence[Statement | Declaration]
) -> tuple[InputSpec, ...]:
    """Return the inputs that no statement computes.

    The others are tensors of earlier loops, of the same name as what this one writes out.
    """
    computed = {item.name for item in items if isinstance(item, Statement)}
    return tuple(spec for spec in inputs if spec.name not in computed)


# ---- several loops -------------------------------------------------------------------------------


def read_loop_texts(
    document: Entry,
    inputs: Sequence[InputSpec],
    sizes: Mapping[str, int],
    steps: int | None,
    read_others: ReadInputs,
) -> list[ProgramText]:
    """Return the programs of all [[loop]] tables, in order."""
    tables = document["loop"]
    count = len(tables.value)
    if document["program"].value is not None:
        what = "there is a program besides those of the loops"
        raise document["program"].wrong(what, "a program in each [[loop]]")
    if not count:
        raise tables.wrong("there is no loop in the list", "[[loop]]")
    programs: list[ProgramText] = []
    carried_on: dict[str, InputSpec] = {}  # what earlier loops carried or computed
    for number in range(count):
        entry = tables[number]
        if not isinstance(entry.value, dict):
            raise entry.wrong(f"loop has {kind_of(entry.value)}", "[[loop]] tables")
        loop_table = LoopTable(entry, read_others)
        if entry["program"].get(str) is None:
            expected = 'program = "NAME[labels] = expression"'
            raise entry.wrong("this loop has no program", expected)
        source = entry["program"].source
        program = read_program_text(source, inputs, sizes, loop_table, steps, carried_on)
        programs.append(program)
        carried_on |= _results_of(program)
    return programs


def _results_of(program: ProgramText) -> dict[str, InputSpec]:
    """Return the tensors of a loop as inputs of later ones: they are where the loop leaves them."""
    program.loop(program.written)  # refuses a loop that does not fit its program
    found = {}
    for name in (*program.carried, *program.computed):
        vertex = program.written[name]
        found[name] = InputSpec(name, shape=vertex.bound, dtype=vertex.dtype, resident=True)
    return found


def results_of_loops(
    programs: Sequence[ProgramText], outputs: Sequence[OutputSpec]
) -> list[tuple[str, ...]]:
    """Return the results of each loop: outputs of the job, and what later loops read.

    Without outputs of the job, the tensors that no statement uses are results.
    """
    found = []
    stored = [spec.name for spec in outputs]
    for number, program in enumerate(programs):
        later = programs[number + 1 :]
        # Of a program that is trained, statements of its own count.
        unused = program.written.outputs if program.results is None else program.results
        own = []
        for name in program.computed:
            is_wanted = name in (stored or unused)
            if is_wanted and not any(_makes(other, name) for other in later):
                own.append(name)
        read_later = [name for name in program.computed if _is_read(name, later)]
        found.append(unique(own, read_later))
    return found


def _makes(program: ProgramText, name: str) -> bool:
    return name in program.computed or name in program.carried


def _is_read(name: str, later: Sequence[ProgramText]) -> bool:
    """Return whether one of the later loops reads a tensor before another one makes it anew."""
    for program in later:
        if any(vertex.name == name for vertex in program.written.inputs):
            return True
        if _makes(program, name):
            return False
    return False


def maker_of(programs: Sequence[ProgramText], name: str) -> int:
    """Return the number of the last loop that carries or computes a tensor."""
    return max(number for number, program in enumerate(programs) if _makes(program, name))
