"""Random programs and random numpy.einsum subscripts against numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from graph_helpers import declared, reads_back
from hypothesis import given, note
from hypothesis import strategies as st
from random_programs import arrays_of, graphs, programs, rewritten, settled

from einmpi.errors import InputError
from einmpi.graph.rewrite import optimize
from einmpi.kernels import reference
from einmpi.kernels.reference import evaluate
from einmpi.language import numpy_einsum as subscripts
from einmpi.language.parse import build_graphs
from einmpi.language.syntax import Source
from tests.soak import oracle
from tests.soak.tree import LABEL_NAMES, Program, Style, program_text


@st.composite
def arrays(draw: Any, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    elements = {
        "bool": st.booleans(),
        "int64": st.integers(-3, 3),
        "int32": st.integers(-3, 3),
        "float64": st.sampled_from([1.0, 0.0, -1.0, 0.1, 2.3, -1.7, 0.5, 3.0]),
        "float32": st.sampled_from([1.0, 0.0, -1.0, 0.1, 2.3, -1.7, 0.5, 3.0]),
        "complex128": st.sampled_from([1.0, 0.0, 1j, 0.3 - 1.2j, -1.7 + 0.1j, 2.0]),
    }[dtype]
    count = int(np.prod(shape))
    return np.array(draw(st.lists(elements, min_size=count, max_size=count)), dtype).reshape(shape)


@pytest.mark.slow
@settled(120)
@given(programs())
def test_program_equals_numpy(program: Program) -> None:
    check_against_numpy(program)


@pytest.mark.slow
@settled(600)
@given(programs())
def test_more_programs_equal_numpy(program: Program) -> None:
    check_against_numpy(program)


def check_against_numpy(program: Program) -> None:
    note(program_text(program))
    wanted = oracle.evaluate(program)
    for kind, graph in graphs(program).items():
        assert set(graph.outputs) == set(program.output_names())
        for name, array in evaluate(graph, arrays_of(program)).items():
            problem = oracle.disagreement(array, wanted[name])
            assert not problem, f"{kind} {name}{problem}\n{graph}"


@pytest.mark.slow
@settled(60)
@given(programs())
def test_blocks_change_nothing(program: Program) -> None:
    note(program_text(program))
    wanted = oracle.evaluate(program)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "MAX_BLOCK_ELEMENTS", 3)
        found = evaluate(rewritten(program), arrays_of(program))
    for name, array in found.items():
        problem = oracle.disagreement(array, wanted[name])
        assert not problem, f"{name}{problem}"


@settled(60)
@given(programs())
def test_printed_graph_reads_back(program: Program) -> None:
    note(program_text(program))
    for graph in graphs(program).values():
        reads_back(graph)


@settled(60)
@given(programs())
def test_second_rewrite_changes_nothing(program: Program) -> None:
    note(program_text(program))
    graph = rewritten(program)
    assert str(optimize(graph)) == str(graph)


@settled(60)
@given(programs(), st.permutations(LABEL_NAMES))
def test_names_of_labels_do_not_matter(program: Program, names: list[str]) -> None:
    """Two texts of one program: other names, other order of statements, extents written or not."""
    other = replace(program, statements=program.statements[::-1])
    texts = [program_text(program), program_text(other, Style(tuple(names), shows_extents=True))]
    note("\n\n".join(texts))
    first, second = (evaluate(rewritten(program, text), arrays_of(program)) for text in texts)
    assert first.keys() == second.keys()
    for name, array in first.items():
        assert array.dtype == second[name].dtype
        np.testing.assert_array_equal(array, second[name])


# ---- numpy.einsum --------------------------------------------------------------------------------


@st.composite
def einsums(draw: Any) -> tuple[str, list[np.ndarray]]:
    """Subscripts with an ellipsis, repeated labels, dimensions of extent 1, with or without an
    output; their arrays.
    """
    letters = draw(st.lists(st.sampled_from("ijkABz"), min_size=1, max_size=4, unique=True))
    extent = {letter: draw(st.sampled_from([2, 3, 1, 0])) for letter in letters}
    hidden = draw(st.lists(st.sampled_from([2, 3, 1]), max_size=2))  # dimensions behind an ellipsis
    dtypes = draw(
        st.sampled_from(
            [
                ["float64"],
                ["float64", "float32"],
                ["int64", "int32"],
                ["bool"],
                ["int32"],
                ["complex128", "float64"],
                ["float32", "bool"],
                ["bool", "int32"],
            ]
        )
    )
    terms, operands, dotted = [], [], False
    for _ in range(draw(st.integers(1, 4))):
        term = draw(st.lists(st.sampled_from(letters), max_size=3))
        shape = [1 if draw(st.integers(0, 9)) == 9 else extent[letter] for letter in term]
        if draw(st.booleans()) and hidden:
            shown = hidden[draw(st.integers(0, len(hidden))) :]
            where = draw(st.integers(0, len(term)))
            shape[where:where] = [1 if draw(st.integers(0, 4)) == 4 else size for size in shown]
            term.insert(where, "...")
            dotted = True
        terms.append("".join(term))
        operands.append(draw(arrays(tuple(shape), draw(st.sampled_from(dtypes)))))
    text = ",".join(terms)
    if draw(st.booleans()):
        used = sorted({letter for term in terms for letter in term.replace("...", "")})
        output = draw(st.permutations(used))[: draw(st.integers(0, len(used)))]
        if dotted and draw(st.integers(0, 9)) < 9:
            output.insert(draw(st.integers(0, len(output))), "...")
        text += "->" + "".join(output)
    return text, operands


def interleaved(text: str, operands: Sequence[np.ndarray], numbers: dict[str, int]) -> list[Any]:
    def sublist(term: str) -> list[Any]:
        return [
            Ellipsis if entry == "." else np.int64(numbers[entry])
            for entry in term.replace("...", ".")
        ]

    left, arrow, right = text.partition("->")
    arguments: list[Any] = []
    for term, operand in zip(left.split(","), operands, strict=True):
        arguments += [operand, sublist(term)]
    return [*arguments, sublist(right)] if arrow else arguments


def our_einsum(*arguments: Any) -> np.ndarray:
    text, operands = subscripts.split_arguments(arguments)
    dtype = np.result_type(*operands).name
    given = [(operand.shape, operand.dtype.name) for operand in operands]
    program = subscripts.program_text(text, given, dtype)
    note(program)
    inputs = {f"x{k}": operand for k, operand in enumerate(operands)}
    return evaluate(
        reads_back(build_graphs(Source("einsum", program), declared(inputs)).rewritten), inputs
    )["out"]


def same(found: np.ndarray, wanted: np.ndarray, operands: Sequence[np.ndarray]) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    # Sums in another order; single-precision operands may be multiplied before they meet a double
    # one.
    rtol = 1e-4 if any(operand.dtype == np.float32 for operand in operands) else 1e-9
    scale = max(1.0, *(float(np.abs(operand).max(initial=0)) for operand in operands)) ** len(
        operands
    )
    np.testing.assert_allclose(found, wanted, rtol=rtol, atol=rtol * scale)


def numpy_einsum(*arguments: Any) -> np.ndarray | None:
    """numpy's answer; None if it has none."""
    try:
        return np.asarray(np.einsum(*arguments))
    except ValueError:
        return None


@pytest.mark.slow
@settled(150)
@given(einsums())
def test_einsum_subscripts_equal_numpy(case: tuple[str, list[np.ndarray]]) -> None:
    text, operands = case
    wanted = numpy_einsum(text, *operands)
    if wanted is None:
        with pytest.raises(InputError):
            our_einsum(text, *operands)
    else:
        same(our_einsum(text, *operands), wanted, operands)


@pytest.mark.slow
@settled(150)
@given(einsums(), st.lists(st.integers(0, 51), min_size=6, max_size=6, unique=True))
def test_interleaved_einsum_equals_numpy(
    case: tuple[str, list[np.ndarray]], order: list[int]
) -> None:
    text, operands = case
    arguments = interleaved(text, operands, dict(zip("ijkABz", order, strict=True)))
    note(str(arguments[1::2]))
    wanted = numpy_einsum(*arguments)
    if wanted is None:
        with pytest.raises(InputError):
            our_einsum(*arguments)
    else:
        same(our_einsum(*arguments), wanted, operands)
