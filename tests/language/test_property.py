"""Random programs against plain loops, and random numpy.einsum subscripts against numpy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from brute_force import (
    Agg,
    Define,
    Expr,
    Lab,
    Label,
    Num,
    Op,
    Program,
    Read,
    disagreement,
    free_labels,
    indexing,
    program_text,
    run,
)
from graph_helpers import declared, reads_back
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st

from einmpi.errors import InputError
from einmpi.graph.eingraph import EinGraph
from einmpi.graph.rewrite import optimize
from einmpi.kernels import reference
from einmpi.kernels.reference import evaluate
from einmpi.language import numpy_einsum as subscripts
from einmpi.language.parse import build_graphs, parse_program
from einmpi.language.syntax import Source

# EINMPI_EXAMPLES=5000 searches further, differently each time, and makes what it finds as small as
# it can (minutes).
MANY = int(os.environ.get("EINMPI_EXAMPLES", "0"))


def settled(examples: int) -> settings:
    return settings(
        max_examples=MANY or examples,
        phases=list(Phase) if MANY else [Phase.explicit, Phase.generate],
        print_blob=False,
    )


KINDS = "bifc"  # bool, integer, float, complex: each contains those before it
DTYPES = {"b": ["bool"], "i": ["int64", "int32"], "f": ["float64", "float32"], "c": ["complex128"]}
# (⊕, ⊗) pairs, most of them distributive, and the kinds they work on
SEMIRINGS = [
    ("sum", "*", "ifc"),
    ("min", "+", "if"),
    ("max", "+", "if"),
    ("any", "&", "b"),
    ("all", "|", "b"),
    ("max", "minimum", "if"),
    ("min", "maximum", "if"),
    ("prod", "*", "if"),
    ("max", "*", "if"),
    ("sum", "+", "ifc"),
    ("mean", "*", "f"),
]


@dataclass
class Writer:
    """Draws expressions over the tensors known so far."""

    draw: Any
    extents: Sequence[int]
    known: dict[str, tuple[tuple[int, ...], str]] = field(
        default_factory=dict
    )  # name → shape, kind
    budget: int = 40

    def pick(self, options: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(list(options)))

    def chance(self, percent: int) -> bool:
        return self.draw(st.integers(0, 99)) >= 100 - percent

    def expression(self, kind: str, seen: tuple[Label, ...], depth: int) -> Expr:
        self.budget -= 1
        if depth <= 0 or self.budget <= 0:
            return self.leaf(kind, seen)
        choice = self.pick(
            ["leaf", "contraction", "op", "product", "contraction", "aggregation", "op", "where"]
        )
        if choice == "leaf":
            return self.leaf(kind, seen)
        if choice == "where":
            sides = [
                self.expression(kind, seen, depth - 1),
                self.expression(self.below(kind), seen, depth - 1),
            ]
            sides = sides if self.chance(50) else sides[::-1]
            return Op("where", (self.expression("b", seen, depth - 1), *sides))
        if choice == "aggregation":
            return self.aggregation(kind, seen, depth)
        if choice == "product":
            return self.product(kind, seen, depth)
        if choice == "contraction":
            return self.contraction(kind, seen, depth)
        return self.operation(kind, seen, depth)

    def below(self, kind: str) -> str:
        return self.pick(KINDS[: KINDS.index(kind) + 1][::-1])

    # ---- leaves ----------------------------------------------------------------------------------

    def leaf(self, kind: str, seen: tuple[Label, ...]) -> Expr:
        fitting = [
            name
            for name, (shape, k) in self.known.items()
            if k == kind and self.readable(shape, seen)
        ]
        options = (
            ["read"] * 4 * bool(fitting) + ["number"] + ["label"] * (kind == "i" and bool(seen))
        )
        choice = self.pick(options)
        if choice == "read":
            return self.read(self.pick(fitting), seen)
        if choice == "label":
            return Lab(self.pick(seen))
        numbers = {
            "b": [True, False],
            "i": [2, 1, 0, -1, 3],
            "f": [0.5, 1.0, -2.5, 0.0],
            "c": [1j, 1 - 2j, 0.5 + 1j],
        }
        return Num(self.pick(numbers[kind]))

    def readable(self, shape: tuple[int, ...], seen: tuple[Label, ...]) -> bool:
        return all(extent > 0 or any(label.extent == 0 for label in seen) for extent in shape)

    def read(self, name: str, seen: tuple[Label, ...]) -> Read:
        return Read(name, tuple(self.index(extent, seen) for extent in self.known[name][0]))

    def index(self, extent: int, seen: tuple[Label, ...]) -> Label | Expr:
        plain = [label for label in seen if label.extent == extent]
        if plain and (extent == 0 or self.chance(80)):
            return self.pick(plain[::-1])
        choice = self.pick(
            ["constant", "gather", "gather", "backwards"] if self.budget > 0 else ["constant"]
        )
        short = [label for label in seen if label.extent <= extent]
        if choice == "backwards" and short:
            return Op("-", (Num(extent - 1), Lab(self.pick(short))))
        if choice == "constant" or choice == "backwards":
            return Num(self.draw(st.integers(0, extent - 1)))
        self.budget -= 3
        return Op("%", (self.expression("i", seen, 1), Num(extent)))

    # ---- operations ------------------------------------------------------------------------------

    def operation(self, kind: str, seen: tuple[Label, ...], depth: int) -> Expr:
        def some(kind: str) -> Expr:
            return self.expression(kind, seen, depth - 1)

        def mixed(op: str, kind: str) -> Expr:
            pair = (some(kind), some(self.below(kind)))
            return Op(op, pair if self.chance(50) else pair[::-1])

        if kind == "b":
            choice = self.pick(["compare", "logic", "not"])
            if choice == "compare":
                of = self.pick("ific")
                return mixed(
                    self.pick(["==", "!="] if of == "c" else ["<", "<=", ">", ">=", "==", "!="]), of
                )
            return (
                Op("~", (some("b"),))
                if choice == "not"
                else Op(self.pick("&|"), (some("b"), some("b")))
            )
        own = {
            "i": ["%", "**", "abs", "int64", "maximum", "minimum", "sign"],
            "f": [
                "/",
                "function",
                "**",
                "abs",
                "real",
                "float32",
                "float64",
                "maximum",
                "minimum",
                "int/int",
            ],
            "c": ["/", "conj", "exp", "complex128"],
        }
        op = self.pick(["+", "-", "*", "+", "-", "*", "neg", *own[kind]])
        if op in ("+", "-", "*", "/", "maximum", "minimum"):
            return mixed(op, kind)
        if op == "%":
            return Op("%", (some("i"), some(self.pick("ii"))))
        if op == "**":
            return Op(
                "**",
                (some(kind), Num(self.pick([2, 3, 1, 0] if kind == "i" else [2, 2.0, 0.5, 3]))),
            )
        if op == "int/int":
            return Op("/", (some("i"), some("i")))
        if op == "function":
            return Op(
                self.pick(["exp", "log", "sqrt", "tanh", "sin", "cos", "relu"]),
                (some(self.pick("fi")),),
            )
        if op == "abs":
            return Op("abs", (some(kind if kind == "i" else self.pick("fc")),))
        if op == "real":
            return Op(self.pick(["real", "imag", "abs"]), (some("c"),))
        if op in ("int64", "float32", "float64"):
            return Op(op, (some(self.pick("fib")),))
        return Op(op, (some(self.below("c") if op == "complex128" else kind),))

    # ---- aggregations ----------------------------------------------------------------------------

    def labels(self, name: str, most: int) -> tuple[Label, ...]:
        extents = [extent for extent in self.extents if extent > 0 or name not in ("max", "min")]
        return tuple(
            Label(self.pick(extents or [1])) for _ in range(self.draw(st.integers(1, most)))
        )

    def close(self, name: str, labels: Sequence[Label], body: Expr) -> Agg:
        implicit = set(labels) <= indexing(body, into_implicit=False) and self.chance(60)
        return Agg(name, tuple(labels), body, implicit)

    def aggregation(self, kind: str, seen: tuple[Label, ...], depth: int) -> Agg:
        names = {
            "b": ["any", "all"],
            "i": ["sum", "max", "min", "prod"],
            "f": ["sum", "max", "min", "prod", "mean"],
            "c": ["sum", "prod", "mean"],
        }
        name = self.pick(names[kind])
        of = self.pick({"b": "bif", "i": "ib" if name in ("sum", "prod") else "i"}.get(kind, kind))
        labels = self.labels(name, 2)
        return self.close(name, labels, self.expression(of, (*seen, *labels), depth - 1))

    def product(self, kind: str, seen: tuple[Label, ...], depth: int) -> Expr:
        """⊕ of ⊗ of two to five factors."""
        name, op, _ = self.pick([entry for entry in SEMIRINGS if kind in entry[2]])
        labels = self.labels(name, 3)
        inside = (*seen, *labels)
        count = self.draw(st.integers(2, 5))
        factors = [
            self.factor(kind if k == 0 else self.below(kind), inside, depth) for k in range(count)
        ]
        if self.chance(50):
            factors.reverse()
        body = factors[0]
        for factor in factors[1:]:
            divides = op == "*" and kind in "fc" and self.chance(10)
            body = Op("/" if divides else op, (body, factor))
        if op == "*" and self.chance(10) and kind != "b":
            body = Op("neg", (body,))
        return self.close(name, labels, body)

    def contraction(self, kind: str, seen: tuple[Label, ...], depth: int) -> Expr:
        """⊕ of ⊗ of tensors, over whatever labels they are given beside those already there."""
        fresh = tuple(Label(extent) for extent in self.extents for _ in range(2))
        kinds = [kind, *(self.below(kind) for _ in range(self.draw(st.integers(0, 3))))]
        names = [
            [name for name, (shape, k) in self.known.items() if k == wanted and shape]
            for wanted in kinds
        ]
        reads = [self.read(self.pick(fitting), (*seen, *fresh)) for fitting in names if fitting]
        used = set().union(*(free_labels(read) for read in reads))
        labels = tuple(label for label in fresh if label in used)
        if not labels or not names[0]:
            return self.product(kind, seen, depth)
        empty = any(label.extent == 0 for label in labels)
        rings = [
            ring
            for ring in SEMIRINGS
            if kind in ring[2] and not (empty and ring[0] in ("max", "min"))
        ]
        name, op, _ = self.pick(rings)
        body: Expr = reads[0]
        for read in reads[1:]:
            body = Op(op, (body, read) if self.chance(70) else (read, body))
        return self.close(name, self.draw(st.permutations(labels)), body)

    def factor(self, kind: str, seen: tuple[Label, ...], depth: int) -> Expr:
        return (
            self.leaf(kind, seen)
            if self.chance(80)
            else self.expression(kind, seen, min(depth - 1, 2))
        )


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


@st.composite
def programs(draw: Any) -> Program:
    extents = draw(st.lists(st.sampled_from([2, 3, 1, 4, 0]), min_size=1, max_size=3, unique=True))
    writer = Writer(draw, extents)
    inputs = {}
    for name, kinds in zip("ABCD", ("f", "fibc", "fibc", "ib"), strict=True):
        kind = draw(st.sampled_from(kinds))
        shape = tuple(draw(st.lists(st.sampled_from(extents), min_size=name == "A", max_size=3)))
        inputs[name] = draw(arrays(shape, draw(st.sampled_from(DTYPES[kind]))))
        writer.known[name] = shape, kind
    statements = []
    for name in "XYZW"[: draw(st.integers(1, 4))]:
        writer.budget = 40
        kind = draw(st.sampled_from("fibc"))
        labels = tuple(
            Label(draw(st.sampled_from(extents))) for _ in range(draw(st.integers(0, 3)))
        )
        value = writer.expression(kind, labels, 4)
        statements.append(Define(name, labels, value))
        writer.known[name] = tuple(label.extent for label in labels), kind
    return Program(inputs, tuple(statements))


def graphs(text: str, program: Program) -> dict[str, EinGraph]:
    inputs = declared(program.inputs)
    plain = parse_program(Source("p", text), inputs, {})
    return {"as written": plain, "rewritten": build_graphs(Source("p", text), inputs).rewritten}


def picker(data: st.DataObject) -> Any:
    return lambda options: data.draw(st.sampled_from(list(options)))


@settled(50)
@given(programs(), st.data())
def test_program_equals_plain_loops(program: Program, data: st.DataObject) -> None:
    check_against_plain_loops(program, data)


@pytest.mark.slow
@settled(150)
@given(programs(), st.data())
def test_more_programs_equal_plain_loops(program: Program, data: st.DataObject) -> None:
    check_against_plain_loops(program, data)


def check_against_plain_loops(program: Program, data: st.DataObject) -> None:
    text = program_text(program, picker(data))
    note(text)
    note(str({name: (array.dtype.name, array.tolist()) for name, array in program.inputs.items()}))
    wanted = run(program)
    for kind, graph in graphs(text, program).items():
        assert set(graph.outputs) == program.outputs()
        for name, array in evaluate(graph, program.inputs).items():
            assert not disagreement(array, wanted[name]), (
                f"{kind} {name}: {disagreement(array, wanted[name])}\n{graph}"
            )


@pytest.mark.slow
@settled(30)
@given(programs(), st.data())
def test_blocks_change_nothing(program: Program, data: st.DataObject) -> None:
    text = program_text(program, picker(data))
    note(text)
    wanted = run(program)
    graph = build_graphs(Source("p", text), declared(program.inputs)).rewritten
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "MAX_BLOCK_ELEMENTS", 3)
        found = evaluate(graph, program.inputs)
    for name, array in found.items():
        assert not disagreement(array, wanted[name]), (
            f"{name}: {disagreement(array, wanted[name])}\n{graph}"
        )


@settled(30)
@given(programs(), st.data())
def test_printed_graph_reads_back(program: Program, data: st.DataObject) -> None:
    text = program_text(program, picker(data))
    note(text)
    for graph in graphs(text, program).values():
        reads_back(graph)


@settled(30)
@given(programs(), st.data())
def test_second_rewrite_changes_nothing(program: Program, data: st.DataObject) -> None:
    text = program_text(program, picker(data))
    note(text)
    graph = build_graphs(Source("p", text), declared(program.inputs)).rewritten
    assert str(optimize(graph)) == str(graph)


@settled(30)
@given(programs(), st.data())
def test_names_of_labels_do_not_matter(program: Program, data: st.DataObject) -> None:
    """Two texts of one program: other names, other order of statements, extents written or not."""
    first, second = (program_text(program, picker(data)) for _ in range(2))
    note(f"{first}\n\n{second}")
    found = [
        evaluate(build_graphs(Source("p", t), declared(program.inputs)).rewritten, program.inputs)
        for t in (first, second)
    ]
    assert found[0].keys() == found[1].keys()
    for name, array in found[0].items():
        assert array.dtype == found[1][name].dtype
        np.testing.assert_array_equal(array, found[1][name])


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
