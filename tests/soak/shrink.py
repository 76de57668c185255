"""Make a failing case smaller while it still fails in the same way, within a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from .case import Case
from .generate import without_unused_inputs
from .gradients_oracle import evaluate
from .looping import evaluate_loop
from .oracle import Invalid, Value
from .tree import (
    KEEPING,
    Aggregation,
    Define,
    Expression,
    Input,
    Label,
    Number,
    Operation,
    Position,
    Program,
    Read,
    rebuilt,
    tensors_read,
    walk,
)


def shrink(case: Case, still_fails: Callable[[Case], bool], seconds: float) -> Case:
    """Return the smallest case found that still fails."""
    deadline = time.monotonic() + seconds
    improved = True
    while improved:
        improved = False
        for candidate in candidates(case):
            if time.monotonic() > deadline:
                return case
            if _size(candidate) < _size(case) and _is_valid(candidate) and still_fails(candidate):
                case = candidate
                improved = True
                break
    return case


def _is_valid(case: Case) -> bool:
    try:
        if case.program.loop is None:
            evaluate(case.program, case.strict)
        else:
            evaluate_loop(case.program, case.strict)
    except (Invalid, ValueError, IndexError, KeyError):
        return False
    return True


def _size(case: Case) -> tuple[float, ...]:
    """Return how large a case is: what matters most to a reader comes first."""
    program = case.program
    nodes = 0
    letters = 0
    for statement in program.statements:
        nodes += sum(1 for _ in walk(statement.value)) + len(statement.labels)
        for node in walk(statement.value):
            if isinstance(node, Aggregation):
                nodes += len(node.labels)
            if isinstance(node, Number):
                letters += len(repr(node.value))
            if isinstance(node, Operation):
                letters += len(node.name)
    elements = sum(item.values.size for item in program.inputs)
    texts = sum(len(str(item.values.tolist())) for item in program.inputs)
    switches = sum(
        (
            case.strategy != "eindecomp",
            case.memory is not None,
            case.stop_at is not None,
            case.files,
            case.compiled,
            case.verify,
            case.strict,
            case.shared,
            program.outputs is not None,
        )
    )
    switches += len(case.pins) + len(case.distributed)
    switches += sum(layout != "plain" for layout in case.layouts.values())
    complexity = len(program.statements) * 10 + nodes + switches + len(program.inputs)
    return complexity + 0.3 * case.ranks, sum(program.sizes.values()), elements, texts + letters


# ---- candidates, those that save most first -----------------------------------------------------


def candidates(case: Case) -> Iterator[Case]:
    yield from _fewer_statements(case)
    yield from _simpler_runs(case)
    yield from _smaller_extents(case)
    yield from _simpler_expressions(case)
    yield from _fewer_labels(case)
    yield from _simpler_values(case)


def _with_program(case: Case, program: Program) -> Case:
    program = without_unused_inputs(program)
    known = {item.name for item in program.inputs}
    defined = {item.name for item in program.statements}
    return replace(
        case,
        program=program,
        pins={name: parts for name, parts in case.pins.items() if name in known | defined},
        distributed={name: cut for name, cut in case.distributed.items() if name in known},
        layouts={name: layout for name, layout in case.layouts.items() if name in known},
    )


def _fewer_statements(case: Case) -> Iterator[Case]:
    program = case.program
    names = program.output_names()
    for name in names:
        if len(names) == 1 and len(program.statements) == 1:
            break
        yield _with_program(case, _only(program, name))
    for place, statement in enumerate(program.statements[:-1]):
        values = _values(program).get(statement.name)
        if values is None:
            continue
        dimensions = tuple(label.size for label in statement.labels)
        made = Input(statement.name, dimensions, np.array(values.value))
        kept = program.statements[:place] + program.statements[place + 1 :]
        outputs = program.outputs
        if outputs is not None:
            outputs = tuple(name for name in outputs if name != statement.name) or None
        changed = replace(program, inputs=(*program.inputs, made), statements=kept, outputs=outputs)
        yield _with_program(case, changed)
    if program.outputs is not None:
        yield _with_program(case, replace(program, outputs=None))


def _values(program: Program) -> dict[str, Value]:
    try:
        return evaluate(program)
    except (Invalid, ValueError, IndexError, KeyError):
        return {}


def _only(program: Program, name: str) -> Program:
    """Return what a single output needs."""
    needed = {name}
    kept: list[Define] = []
    for statement in reversed(program.statements):
        if statement.name in needed:
            kept.insert(0, statement)
            needed |= tensors_read(statement.value)
    return replace(program, statements=tuple(kept), outputs=None)


def _simpler_runs(case: Case) -> Iterator[Case]:
    for ranks in (1, 2, 3, 4, case.ranks // 2, case.ranks - 1):
        if 0 < ranks < case.ranks:
            yield replace(case, ranks=ranks, pins={}, distributed={})
            yield replace(case, ranks=ranks)
    if case.strategy != "eindecomp":
        yield replace(case, strategy="eindecomp")
    if case.stop_at is not None:
        yield replace(case, stop_at=None)
    if case.memory is not None:
        yield replace(case, memory=None)
    if case.files:
        yield replace(case, files=False, stop_at=None)
    if case.pins:
        yield replace(case, pins={})
        for name in case.pins:
            yield replace(case, pins={key: cut for key, cut in case.pins.items() if key != name})
    if case.distributed:
        yield replace(case, distributed={})
        for name in case.distributed:
            left = {key: cut for key, cut in case.distributed.items() if key != name}
            yield replace(case, distributed=left)
    if any(layout != "plain" for layout in case.layouts.values()):
        yield replace(case, layouts={})
    for name, layout in case.layouts.items():
        if layout != "plain":
            yield replace(case, layouts={**case.layouts, name: "plain"})
    if case.compiled:
        yield replace(case, compiled=False)
    if case.verify:
        yield replace(case, verify=False)
    if case.strict:
        yield replace(case, strict=False)
    if case.shared:
        yield replace(case, shared=False)


def _smaller_extents(case: Case) -> Iterator[Case]:
    program = case.program
    for size, extent in program.sizes.items():
        for smaller in dict.fromkeys((1, 2, 3, extent // 2, extent - 1)):
            if 0 < smaller < extent:
                yield replace(case, program=_resized(program, {**program.sizes, size: smaller}))
    used = set()
    for statement in program.statements:
        for node in walk(statement.value):
            if isinstance(node, Aggregation):
                used.update(label.size for label in node.labels)
        used.update(label.size for label in statement.labels)
    for item in program.inputs:
        used.update(item.dimensions)
    kept = {size: extent for size, extent in program.sizes.items() if size in used}
    if len(kept) < len(program.sizes):
        yield replace(case, program=replace(program, sizes=kept))


def _resized(program: Program, sizes: dict[str, int]) -> Program:
    """Return the program with smaller extents: arrays keep their first elements."""
    inputs = []
    for item in program.inputs:
        places = tuple(slice(sizes[size]) for size in item.dimensions)
        values = item.values[places].copy()
        if item.indexes is not None:
            values = (values % sizes[item.indexes]).astype(values.dtype)
        inputs.append(replace(item, values=values))
    dimensions = {item.name: item.dimensions for item in inputs}
    for statement in program.statements:
        dimensions[statement.name] = tuple(label.size for label in statement.labels)

    def bounded(node: Expression) -> Expression:
        """A constant index stays below the extent."""
        node = rebuilt(node, bounded)
        if not isinstance(node, Read) or not node.index:
            return node
        index: list[Label | Expression] = []
        for entry, size in zip(node.index, dimensions[node.tensor], strict=True):
            if isinstance(entry, Number):
                entry = Number(min(int(entry.value.real), sizes[size] - 1))
            index.append(entry)
        return replace(node, index=tuple(index))

    statements = tuple(replace(item, value=bounded(item.value)) for item in program.statements)
    return replace(program, sizes=sizes, inputs=tuple(inputs), statements=statements)


def _simpler_expressions(case: Case) -> Iterator[Case]:
    program = case.program
    for place, statement in enumerate(program.statements):
        for value in _simplified(statement.value):
            changed = replace(statement, value=value)
            statements = (*program.statements[:place], changed, *program.statements[place + 1 :])
            yield _with_program(case, replace(program, statements=statements))


def _simplified(node: Expression) -> Iterator[Expression]:
    """Yield the expression with one node replaced by a child or by a number."""
    if isinstance(node, Operation):
        yield from node.arguments
    if isinstance(node, Aggregation):
        if node.name in KEEPING:
            yield node.body
        if node.implicit:
            yield replace(node, implicit=False)
        for label in node.labels:
            if node.name in KEEPING:
                continue
            rest = tuple(other for other in node.labels if other != label)
            body = _at_zero(node.body, label)
            yield replace(node, labels=rest, body=body, implicit=False) if rest else body
    if isinstance(node, Number) and node.value != 1:
        yield Number(1)
    if isinstance(node, Read) and not node.index:
        yield Number(1)
    for child, put in _children_with_places(node):
        for simpler in _simplified(child):
            yield put(simpler)


def _children_with_places(
    node: Expression,
) -> Iterator[tuple[Expression, Callable[[Expression], Expression]]]:
    if isinstance(node, Aggregation):
        yield node.body, lambda new: replace(node, body=new, implicit=False)
    if isinstance(node, Operation):
        for place, argument in enumerate(node.arguments):

            def put_argument(new: Expression, place: int = place) -> Expression:
                arguments = (*node.arguments[:place], new, *node.arguments[place + 1 :])
                return replace(node, arguments=arguments)

            yield argument, put_argument
    if isinstance(node, Read):
        for place, entry in enumerate(node.index):
            if isinstance(entry, Label):
                continue

            def put_index(new: Expression, place: int = place) -> Expression:
                return replace(node, index=(*node.index[:place], new, *node.index[place + 1 :]))

            yield Number(0), put_index
            yield entry, put_index


def _at_zero(node: Expression, label: Label) -> Expression:
    """Return the expression at index 0 of a label."""
    if isinstance(node, Position) and node.label == label:
        return Operation("int64", (Number(0),))
    if isinstance(node, Read):
        index: list[Label | Expression] = []
        for entry in node.index:
            if isinstance(entry, Label):
                index.append(Number(0) if entry == label else entry)
            else:
                index.append(_at_zero(entry, label))
        return replace(node, index=tuple(index))
    if isinstance(node, Aggregation) and label in node.labels:
        rest = tuple(other for other in node.labels if other != label)
        body = _at_zero(node.body, label)
        return replace(node, labels=rest, body=body) if rest else body
    return rebuilt(node, lambda child: _at_zero(child, label))


def _fewer_labels(case: Case) -> Iterator[Case]:
    """Drop a dimension of a tensor that a statement defines, and of what reads it."""
    program = case.program
    for place, statement in enumerate(program.statements):
        for axis, label in enumerate(statement.labels):
            rest = tuple(other for other in statement.labels if other != label)
            changed = replace(statement, labels=rest, value=_at_zero(statement.value, label))
            statements = list(program.statements)
            statements[place] = changed
            for later in range(place + 1, len(statements)):
                value = _without_axis(statements[later].value, statement.name, axis)
                statements[later] = replace(statements[later], value=value)
            pins = {name: parts for name, parts in case.pins.items() if name != statement.name}
            smaller = replace(program, statements=tuple(statements))
            yield _with_program(replace(case, pins=pins), smaller)
    for item in program.inputs:
        for axis in range(len(item.dimensions)):
            if not item.values.shape[axis]:
                continue
            dimensions = item.dimensions[:axis] + item.dimensions[axis + 1 :]
            values = np.array(item.values.take(0, axis=axis))
            inputs = []
            for other in program.inputs:
                same = other.name == item.name
                inputs.append(
                    replace(other, dimensions=dimensions, values=values) if same else other
                )
            statements = []
            for statement in program.statements:
                value = _without_axis(statement.value, item.name, axis)
                statements.append(replace(statement, value=value))
            smaller = replace(program, inputs=tuple(inputs), statements=tuple(statements))
            pins = {name: cut for name, cut in case.pins.items() if name != item.name}
            spread = {name: cut for name, cut in case.distributed.items() if name != item.name}
            yield _with_program(replace(case, pins=pins, distributed=spread), smaller)


def _without_axis(node: Expression, tensor: str, axis: int) -> Expression:
    node = rebuilt(node, lambda child: _without_axis(child, tensor, axis))
    if isinstance(node, Read) and node.tensor == tensor:
        node = replace(node, index=node.index[:axis] + node.index[axis + 1 :])
    return node


def _simpler_values(case: Case) -> Iterator[Case]:
    program = case.program
    for place, item in enumerate(program.inputs):
        for values in _simpler_arrays(item.values):
            inputs = list(program.inputs)
            inputs[place] = replace(item, values=values)
            yield replace(case, program=replace(program, inputs=tuple(inputs)))


def _simpler_arrays(array: np.ndarray) -> Iterator[np.ndarray]:
    yield np.zeros_like(array)
    yield np.ones_like(array)
    if array.size > 64:
        return
    flat = array.reshape(-1)
    for place, value in enumerate(flat.tolist()):
        for simpler in (0, 1):
            if value != simpler:
                changed = flat.copy()
                changed[place] = simpler
                yield changed.reshape(array.shape)
