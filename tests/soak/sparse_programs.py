"""Random programs over sparse and dense tensors, and what they give if all tensors are dense.

A program has one to three statements. Sparse operands have one to three keys, dense tiles, implicit
values of all kinds, from nothing to everything stored, stored zeros, and all dtypes. The oracle is
the reference evaluator on dense tensors: it knows nothing of what is stored.
"""

import random
import re
import traceback
import warnings
import zlib
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np

import einmpi
from einmpi.comm.threads import run_threads
from einmpi.errors import EinmpiError
from einmpi.graph.sparse.coordinates import Coordinates
from einmpi.kernels import reference as reference_evaluator

from .running import Outcome

EXTENT = 4
LABELS = "ijkf"
SPARSE = {  # name: keys, dimensions, dtype, implicit values
    "A": (2, 2, "float64", (0.0,)),
    "B": (2, 2, "float64", (0.0,)),
    "C": (2, 2, "float32", (0.0, 1.0)),
    "W": (2, 2, "float64", (np.inf, -np.inf, 1.0)),
    "T": (3, 3, "float64", (0.0,)),
    "K": (2, 3, "float64", (0.0,)),
    "R": (1, 2, "float64", (0.0,)),
    "N": (2, 2, "int64", (0, 2)),
    "U": (2, 2, "uint8", (0, 3)),
    "L": (2, 2, "bool", (False, True)),
    "V": (2, 2, "complex128", (0.0,)),
}
DENSE = {"D": (2, "float64"), "x": (1, "float64"), "y": (1, "float32"), "m": (1, "int64")}
KINDS = {"float": "ABCWTKRDxy", "integer": "NUm", "bool": "L", "complex": "V"}
AGGREGATIONS = {
    "float": ("sum", "sum", "sum", "min", "max", "prod"),
    "integer": ("sum", "sum", "min", "max", "prod"),
    "bool": ("any", "all", "sum"),
    "complex": ("sum", "sum", "prod"),
}


@dataclass
class Program:
    """A program, its inputs as they are given, and formats that are asked for."""

    text: str
    inputs: dict = field(default_factory=dict)
    formats: dict = field(default_factory=dict)

    @property
    def dense(self):
        """All inputs as arrays."""
        return {
            name: given.dense() if isinstance(given, Coordinates) else given
            for name, given in self.inputs.items()
        }


class Maker:
    """Draws the statements of one program."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.rng = np.random.default_rng(seed)
        self.kind = self.draw.choice(["float"] * 5 + ["integer", "bool", "complex"])
        self.earlier = {}  # tensors of earlier statements: their labels

    def program(self):
        lines = []
        count = self.draw.choice((1, 1, 1, 2, 2, 3))
        for number in range(count):
            lines.append(self.statement("Z" if number == count - 1 else f"Y{number}"))
        text = "\n".join(lines)
        names = [name for name in (*SPARSE, *DENSE) if re.search(rf"\b{name}\[", text)]
        inputs = {name: self.tensor(name) for name in names}
        formats = {}
        if self.draw.random() < 0.08:
            formats["Z"] = self.draw.choice(("dense", "sparse"))
        sparse = [name for name in names if name in SPARSE]
        if sparse and self.draw.random() < 0.05:
            formats[self.draw.choice(sparse)] = "dense"
        return Program(text, inputs, formats)

    def statement(self, name):
        body = self.expression(self.draw.choice((1, 2, 2, 3)))
        used = [label for label in LABELS if self.has(body, label)]
        if not used:
            body, used = f"({body} * {self.one('D[i,j]')})", ["i", "j"]
        output = [label for label in used if self.draw.random() < 0.55]
        if self.draw.random() < 0.3:
            self.draw.shuffle(output)
        gone = [label for label in used if label not in output]
        if gone:
            aggregation = self.draw.choice(AGGREGATIONS[self.kind])
            if self.draw.random() < 0.2 and len(gone) > 1:
                inner, outer = gone[:1], gone[1:]
                body = f"{aggregation}[{inner[0]}]({body})"
                gone = outer
            body = f"{aggregation}[{','.join(gone)}]({body})"
            if self.draw.random() < 0.25 and output:
                body = f"{self.one('D[i,j]', output)} * {body}"
        target = f"{name}[{','.join(output)}]" if output else name
        self.earlier[name] = len(output)
        return f"{target} = {body}"

    def one(self, usual, within=None):
        """A tensor to multiply by, over given labels."""
        if within is None:
            return (
                {"float": usual, "integer": "m[i] * m[j]"}.get(self.kind, "V[i,j]")
                if (self.kind != "bool")
                else "L[i,j]"
            )
        label = within[0]
        if len(within) > 1 and self.kind == "float":
            return f"A[{within[0]},{within[1]}]"
        return {"float": f"x[{label}]", "integer": f"m[{label}]"}.get(self.kind, "1")

    def has(self, body, label):
        padded = "".join(character if character.isalnum() else " " for character in body)
        return label in padded.split()

    def leaf(self):
        if self.earlier and self.draw.random() < 0.35:
            name = self.draw.choice(list(self.earlier))
            return self.element(name, self.earlier[name])
        if self.draw.random() < 0.12:
            number = {"float": "2.5", "integer": "3", "bool": "True", "complex": "2"}
            return number[self.kind] if self.kind != "bool" else "(i <= j)"
        if self.kind in ("float", "integer") and self.draw.random() < 0.04:
            return "i" if self.kind == "integer" else "float64(j)"
        name = self.draw.choice(KINDS[self.kind])
        return self.element(name, SPARSE[name][1] if name in SPARSE else DENSE[name][0])

    def element(self, name, dimensions):
        if not dimensions:
            return name
        labels = [self.draw.choice(LABELS[:3]) for _ in range(dimensions)]
        if self.draw.random() < 0.7 and dimensions <= 3:
            labels = list("ijk"[:dimensions])
            if self.draw.random() < 0.4:
                self.draw.shuffle(labels)
            if dimensions == 2 and self.draw.random() < 0.3:
                labels = ["j", "k"]
        if name in ("K", "R"):
            labels[-1] = self.draw.choice("fffk")
        return f"{name}[{','.join(labels)}]"

    def expression(self, depth):
        if depth == 0 or self.draw.random() < 0.15:
            return self.leaf()
        a, b = self.expression(depth - 1), self.expression(depth - 1)
        if self.kind == "bool":
            return self.draw.choice((f"({a} & {b})", f"({a} | {b})", f"(~{a})", f"({a} & {b})"))
        forms = [f"({a} * {b})"] * 4 + [f"({a} + {b})"] * 2 + [f"({a} - {b})", f"-{a}"]
        if self.kind != "complex":
            forms += [f"maximum({a}, {b})", f"abs({a})", f"where({self.leaf()} > 1, {a}, {b})"]
            forms += [f"where({self.leaf()} != 0, {a}, {b})"]
        if self.kind == "float":
            forms += [f"exp(minimum({a}, 3))", f"({a})**2", f"({a} / (1.5 + abs({b})))"]
            forms += [f"float64({a} <= {b})", f"minimum({a}, {b})", f"tanh({a})"]
        if self.kind == "complex":
            forms += [f"conj({a})"]
        return self.draw.choice(forms)

    def tensor(self, name):
        if name in DENSE:
            dimensions, dtype = DENSE[name]
            values = np.round(self.rng.random((EXTENT,) * dimensions) * 3 + 0.5, 1)
            return values.astype(dtype)
        keys, dimensions, dtype, implicit = SPARSE[name]
        implicit = implicit[self.draw.randrange(len(implicit))]
        density = self.draw.choice((0.0, 0.1, 0.3, 0.3, 0.8, 1.0))
        columns = np.nonzero(self.rng.random((EXTENT,) * keys) < density)
        shape = (len(columns[0]), *(EXTENT,) * (dimensions - keys))
        values = np.round(self.rng.random(shape) * 4 - (0 if dtype == "uint8" else 2), 1)
        if dtype == "complex128":
            values = values + 1j * np.round(self.rng.random(shape), 1)
        values = values.astype(dtype)
        values[self.rng.random(shape) < 0.15] = implicit if np.isfinite(implicit) else 0
        return Coordinates.of(columns, values, (EXTENT,) * dimensions, implicit)


def draw_program(seed):
    """Return a program that the language accepts, and its value by the reference.

    None if this seed gives none, one that only has nan, or one that may compare nan: a product with
    an implicit 0 is 0, whatever the other factor is, so other numbers are compared there.
    """
    program = Maker(seed).program()
    dense = program.dense
    try:
        job = einmpi.program(program.text, outputs=["Z"], **dense)
        with np.errstate(all="ignore"), warnings.catch_warnings(), operations_on_nan() as found:
            warnings.simplefilter("ignore")
            wanted = einmpi.reference(job, dense)["Z"]
    except EinmpiError:
        return None
    is_sparse = any(isinstance(given, Coordinates) for given in program.inputs.values())
    is_sure = not found or re.search("[<>=]=|[<>]|!=", program.text.replace(" = ", "")) is None
    return (program, wanted) if is_sparse and is_sure and not np.isnan(wanted).all() else None


@contextmanager
def operations_on_nan():
    """Give a list of the operations of the reference evaluator that make nan, as they are found."""
    found = []

    def watched(function):
        def call(*arguments):
            with np.errstate(invalid="call", call=lambda *what: found.append(what)):
                return function(*arguments)

        return call

    with ExitStack() as stack:
        for name in ("apply", "reduce_block"):
            function = watched(getattr(reference_evaluator, name))
            stack.enter_context(patch.object(reference_evaluator, name, function))
        yield found


# ---- cases of the soak ---------------------------------------------------------------------------


@dataclass(frozen=True)
class SparseCase:
    """A program on some ranks, and the value that it must have."""

    seed: int
    number: int
    ranks: int
    program: Program
    wanted: np.ndarray

    @property
    def name(self):
        return f"seed {self.seed}, case {self.number}"

    @property
    def themes(self):
        return sorted(name for name in self.program.inputs if name in SPARSE)

    @property
    def dtypes(self):
        return sorted({given.dtype.name for given in self.program.inputs.values()})


def make_case(seed, number, ranks=None):
    """Return the case of a seed and a number."""
    for attempt in range(10_000):
        text = f"sparse {seed} {number} {attempt}"
        drawn = draw_program(zlib.crc32(text.encode()))
        if drawn is not None:
            return SparseCase(seed, number, ranks or (1, 2, 3, 4)[number % 4], *drawn)
    raise AssertionError("no program in so many attempts")


def check_on_threads(case):
    """Run a case on threads and return what was wrong."""
    try:
        return run_threads(case.ranks, lambda comm: _check(case, comm), limit=80.0)[0]
    except Exception as error:
        outcome = Outcome()
        outcome.fail("error", "".join(traceback.format_exception(error))[-1500:])
        return outcome


def check_on_mpi(case, comm, folder):
    """Run a case on the ranks of a communicator, which all call this."""
    return _check(case, comm)


def _check(case, comm):
    outcome = Outcome()
    program = case.program
    outcome.elements = case.wanted.size
    inputs = dict(program.inputs)
    try:
        job = einmpi.program(program.text, outputs=["Z"], formats=program.formats, **inputs)
        compiled = einmpi.compile(job, comm)
        found = compiled(inputs)["Z"]
    except einmpi.InputError as error:
        outcome.notes.append(f"refused: {_reason(str(error))}")
        return outcome
    if isinstance(found, einmpi.SparseArray):
        outcome.notes.append("sparse result")
        whole = found.coordinates().dense()
    else:
        whole = found.gather()
    wanted = case.wanted
    sure = ~np.isnan(wanted)
    if whole.shape == wanted.shape:  # a sum of differences from infinity is nan, as documented
        sure &= ~(np.isinf(wanted) & np.isnan(whole))
    outcome.compared = int(sure.sum())
    if whole.dtype != wanted.dtype or whole.shape != wanted.shape:
        outcome.fail("value", f"{whole.dtype}{whole.shape} for {wanted.dtype}{wanted.shape}")
    elif not _is_close(whole[sure], wanted[sure], case.dtypes):
        outcome.fail("value", f"{whole.tolist()} for {wanted.tolist()}")
    return outcome


def _is_close(found, wanted, dtypes):
    """Whether values are equal; sums in another order and float32 round differently."""
    if wanted.dtype.kind in "biu":
        return np.array_equal(found, wanted)
    digits = 1e-4 if "float32" in dtypes else 1e-8
    return np.allclose(found, wanted, rtol=digits, atol=digits, equal_nan=True)


def _reason(message):
    reasons = ("not stored", "would be sparse", "same keys", "at all", "has no pattern")
    return next((reason for reason in reasons if reason in message), message)


def shrink(case, still_fails, seconds):
    """Return the case: a program has few statements anyway."""
    return case


def failure_text(case, smaller, failures):
    """Return what failed, with all that it takes to see it again."""
    lines = [f"{case.name} on {case.ranks} ranks", case.program.text, repr(case.program.formats)]
    for name, given in case.program.inputs.items():
        lines.append(f"{name} = {given!r}")
    lines += [f"{check}: {text}" for check, text in failures]
    return "\n".join(lines)
