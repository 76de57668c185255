"""Random programs, their text, and their value by plain loops, without any einmpi code."""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

import numpy as np

# The error of one floating-point operation, relative to the magnitude of its operands.
LOSS = {"float32": 1e-4, "complex64": 1e-4, "float64": 1e-9, "complex128": 1e-9}
HUGE = {"float32": 1e18, "complex64": 1e18, "float64": 1e100, "complex128": 1e100}
NAMES = (*"ijklmnqrstuvw", *(f"{letter}{k}" for letter in "ij" for k in range(30)))
RISKY = ("/", "log", "exp", "**", "sqrt", "where")
INFIX = ("+", "-", "*", "/", "%", "**", "<", "<=", ">", ">=", "==", "!=", "&", "|")


@dataclass(frozen=True, eq=False)
class Label:
    """A label, bound by a statement or an aggregation; it gets its name when printed."""

    extent: int


@dataclass(frozen=True, eq=False)
class Num:
    value: bool | int | float | complex


@dataclass(frozen=True, eq=False)
class Lab:
    label: Label


@dataclass(frozen=True, eq=False)
class Read:
    name: str
    index: tuple[Label | Expr, ...]


@dataclass(frozen=True, eq=False)
class Op:
    """An infix operator, "neg", "~", or a function."""

    op: str
    args: tuple[Expr, ...]


@dataclass(frozen=True, eq=False)
class Agg:
    name: str
    labels: tuple[Label, ...]
    body: Expr
    implicit: bool


Expr: TypeAlias = Num | Lab | Read | Op | Agg
Pick: TypeAlias = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True, eq=False)
class Define:
    name: str
    labels: tuple[Label, ...]
    value: Expr


@dataclass(frozen=True, eq=False, repr=False)
class Program:
    inputs: Mapping[str, np.ndarray]
    statements: tuple[Define, ...]  # each after those it reads

    def outputs(self) -> set[str]:
        """The tensors no statement uses."""
        used = {
            node.name
            for item in self.statements
            for node in walk(item.value)
            if isinstance(node, Read)
        }
        return {item.name for item in self.statements} - used


def parts(node: Expr) -> tuple[Expr, ...]:
    if isinstance(node, Op):
        return node.args
    if isinstance(node, Agg):
        return (node.body,)
    return (
        tuple(e for e in node.index if not isinstance(e, Label)) if isinstance(node, Read) else ()
    )


def walk(node: Expr) -> Iterator[Expr]:
    yield node
    for part in parts(node):
        yield from walk(part)


def indexing(node: Expr, into_implicit: bool = True) -> set[Label]:
    """The labels that stand alone as an index."""
    if isinstance(node, Agg) and node.implicit and not into_implicit:
        return set()
    own = (
        {entry for entry in node.index if isinstance(entry, Label)}
        if isinstance(node, Read)
        else set()
    )
    return own.union(*(indexing(part, into_implicit) for part in parts(node)))


def free_labels(node: Expr) -> set[Label]:
    own = {node.label} if isinstance(node, Lab) else set()
    if isinstance(node, Read):
        own = {entry for entry in node.index if isinstance(entry, Label)}
    found = own.union(*(free_labels(part) for part in parts(node)))
    return found - set(node.labels) if isinstance(node, Agg) else found


# ---- text -------------------------------------------------------------------------------------


def program_text(program: Program, pick: Pick) -> str:
    """Return the program as text.

    `pick` chooses names of labels, the order of statements, and whether to write optional parts.
    """
    left, lines = list(program.statements), []
    while left:
        item = left.pop(pick(range(len(left))))
        lines.append(define_text(item, pick))
    return "\n".join(lines)


def define_text(item: Define, pick: Pick) -> str:
    names: dict[Label, str] = {}
    for label in item.labels:
        names[label] = pick([name for name in NAMES if name not in names.values()])
    target = item.name
    if item.labels:
        target += (
            f"[{', '.join(label_text(label, names, item.value, pick) for label in item.labels)}]"
        )
    return ast.unparse(ast.parse(f"{target} = {text(item.value, names, item, pick)}"))


def label_text(label: Label, names: Mapping[Label, str], body: Expr, pick: Pick) -> str:
    known = label in indexing(body)
    return f"{names[label]}:{label.extent}" if not known or pick([False, True]) else names[label]


def text(node: Expr, names: Mapping[Label, str], item: Define, pick: Pick) -> str:
    if isinstance(node, Num):
        return f"({node.value!r})"
    if isinstance(node, Lab):
        return names[node.label]
    if isinstance(node, Read):
        index = [
            names[e] if isinstance(e, Label) else text(e, names, item, pick) for e in node.index
        ]
        return f"{node.name}[{', '.join(index)}]" if index else node.name
    if isinstance(node, Op):
        args = [text(arg, names, item, pick) for arg in node.args]
        if node.op in INFIX:
            return f"({args[0]} {node.op} {args[1]})"
        return (
            f"({'-' if node.op == 'neg' else '~'}{args[0]})"
            if node.op in ("neg", "~")
            else call(node.op, args)
        )
    inner = dict(names)
    if node.implicit:  # only names that nothing around it has
        refused = set(names.values())
    else:  # may hide a label that its body does not need, unless that one then stands nowhere
        refused = {names[label] for label in free_labels(node)}
        refused |= {names[label] for label in item.labels if label not in indexing(item.value)}
    for label in node.labels:
        inner[label] = pick([name for name in NAMES if name not in refused])
        refused.add(inner[label])
    head = node.name
    if not node.implicit:
        head += f"[{', '.join(label_text(label, inner, node.body, pick) for label in node.labels)}]"
    return call(head, [text(node.body, inner, item, pick)])


def call(head: str, args: Sequence[str]) -> str:
    return f"{head}({', '.join(args)})"


# ---- value ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Value:
    """A scalar, the error that another order of operations may have, and whether it is unsure."""

    value: Any
    error: float = 0.0
    unsure: bool = False

    @property
    def size(self) -> float:
        return magnitude(self.value)


def magnitude(value: Any) -> float:
    return float(np.abs(np.complex128(value)))


@dataclass(frozen=True)
class Tensor:
    values: np.ndarray
    errors: np.ndarray
    unsure: np.ndarray

    @classmethod
    def exact(cls, values: np.ndarray) -> Tensor:
        return cls(values, np.zeros(values.shape), np.zeros(values.shape, bool))


def run(program: Program) -> dict[str, Tensor]:
    """Every tensor of a program, scalar by scalar."""
    tensors = {name: Tensor.exact(values) for name, values in program.inputs.items()}
    with np.errstate(all="ignore"):
        for item in program.statements:
            tensors[item.name] = Evaluator(tensors).define(item)
    return tensors


class Evaluator:
    def __init__(self, tensors: Mapping[str, Tensor], sample: bool = False) -> None:
        self.tensors = tensors
        self.sample = (
            sample  # every element is 1 and every aggregation has one term: only the dtype counts
        )
        self.memory: dict[tuple[Any, ...], Value] = {}
        self.dtypes: dict[Expr, np.dtype] = {}

    def define(self, item: Define) -> Tensor:
        shape = tuple(label.extent for label in item.labels)
        values = np.zeros(shape, self.dtype(item.value, item.labels))
        result = Tensor(values, np.zeros(shape), np.zeros(shape, bool))
        for position in itertools.product(*(range(extent) for extent in shape)):
            found = self.value(item.value, dict(zip(item.labels, position, strict=True)))
            result.values[position] = found.value
            result.errors[position], result.unsure[position] = found.error, found.unsure
        return result

    def dtype(self, node: Expr, labels: Iterable[Label]) -> np.dtype:
        if node not in self.dtypes:
            sampled = Evaluator(self.tensors, sample=True).value(node, dict.fromkeys(labels, 0))
            self.dtypes[node] = np.asarray(sampled.value).dtype
        return self.dtypes[node]

    def value(self, node: Expr, at: Mapping[Label, int]) -> Value:
        if isinstance(node, Num):
            return Value(node.value)
        if isinstance(node, Lab):
            return Value(np.int64(at[node.label]))
        if isinstance(node, Read):
            return self.read(node, at)
        if isinstance(node, Op):
            return OPERATIONS.get(node.op, smooth)(
                node.op, [self.value(arg, at) for arg in node.args]
            )
        key = (node, *(at[label] for label in sorted(free_labels(node), key=id)))
        if key not in self.memory:
            self.memory[key] = self.aggregate(node, at)
        return self.memory[key]

    def read(self, node: Read, at: Mapping[Label, int]) -> Value:
        tensor = self.tensors[node.name]
        found = [Value(at[e]) if isinstance(e, Label) else self.value(e, at) for e in node.index]
        if self.sample:
            return Value(tensor.values.dtype.type(1))
        place = tuple(int(entry.value) for entry in found)
        assert all(0 <= k < extent for k, extent in zip(place, tensor.values.shape, strict=True)), (
            "generator's fault"
        )
        unsure = bool(tensor.unsure[place]) or any(entry.unsure for entry in found)
        return Value(tensor.values[place], float(tensor.errors[place]), unsure)

    def aggregate(self, node: Agg, at: Mapping[Label, int]) -> Value:
        ranges = [range(1) if self.sample else range(label.extent) for label in node.labels]
        terms = []
        for position in itertools.product(*ranges):
            term = self.value(node.body, {**at, **dict(zip(node.labels, position, strict=True))})
            terms.append(Value(np.asarray(term.value)[()], term.error, term.unsure))
        dtype = terms[0].value.dtype if self.sample else self.dtype(node.body, (*at, *node.labels))
        result = REDUCTIONS[node.name](terms, dtype)
        unsure = result.unsure or self.may_be_taken_apart(node, terms)
        return Value(result.value, result.error, unsure)

    def may_be_taken_apart(self, node: Agg, terms: Sequence[Value]) -> bool:
        """Return whether inf or nan could meet each other or a zero in another order."""
        body = node.body
        if not isinstance(body, Read) and not (
            isinstance(body, Op) and body.op in ("*", "/", "neg", "+")
        ):
            return False
        if node.name in ("max", "min"):
            return any(np.isnan(term.value) for term in terms)
        if not terms:
            return any(isinstance(part, Op) and part.op in RISKY for part in walk(body)) or not all(
                np.isfinite(self.tensors[part.name].values).all()
                for part in walk(body)
                if isinstance(part, Read)
            )
        return any(not np.isfinite(term.value) for term in terms)


def is_weak(value: Any) -> bool:
    return type(value) in (bool, int, float, complex)


def settle(
    value: Any, error: float, args: Sequence[Value], steps: float = 1.0, size: float | None = None
) -> Value:
    """Return the value of an operation with its error; unsure where the error is too large."""
    unsure = any(arg.unsure for arg in args)
    dtype = np.asarray(value).dtype
    if dtype.kind in "fc":
        size = magnitude(value) if size is None else size
        if math.isfinite(magnitude(value)):
            error += LOSS[dtype.name] * size * steps
            unsure |= size > HUGE[dtype.name] or not math.isfinite(error)
        else:  # an infinity is reliable if no doubtful number led to it; complex ones never are
            unsure |= dtype.kind == "c" or (
                error > 0 and any(math.isfinite(arg.size) for arg in args)
            )
            error = 0.0
    else:
        error = 0.0
    return Value(value, error if math.isfinite(error) else 0.0, unsure)


def numpy_value(function: Callable[..., Any], args: Sequence[Value]) -> Any:
    """Return numpy's scalar; of constants alone a constant, whose type adapts to its neighbour."""
    result = function(*(arg.value for arg in args))
    return result.item() if all(is_weak(arg.value) for arg in args) else result


_UFUNC = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.true_divide,
    "%": np.remainder,
    "**": np.power,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
    "==": np.equal,
    "!=": np.not_equal,
    "&": np.bitwise_and,
    "|": np.bitwise_or,
    "~": np.invert,
    "neg": np.negative,
    "abs": np.absolute,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "sign": np.sign,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "conj": np.conjugate,
    "real": lambda x: np.real(np.asarray(x))[()],
    "imag": lambda x: np.imag(np.asarray(x))[()],
}


def wraps(op: str, value: Any, args: Sequence[Value]) -> bool:
    """Whether an integer result has overflowed."""
    if np.asarray(value).dtype.kind != "i" or any(
        np.asarray(arg.value).dtype.kind not in "bi" for arg in args
    ):
        return False
    numbers = [int(arg.value) for arg in args]
    exact = {
        "+": sum,
        "-": lambda n: n[0] - n[1],
        "*": math.prod,
        "**": lambda n: n[0] ** n[1],
        "neg": lambda n: -n[0],
        "abs": lambda n: abs(n[0]),
    }
    return op in exact and exact[op](numbers) != int(value)


def smooth(op: str, args: Sequence[Value]) -> Value:
    """Operations whose result moves no more than its slope times its arguments' errors."""
    if op == "relu":
        return smooth("maximum", [args[0], Value(0)])
    value = numpy_value(_UFUNC[op], args)
    x, error = args[0].size, args[0].error
    y, other = (args[1].size, args[1].error) if len(args) > 1 else (0.0, 0.0)
    size = None
    if op in ("+", "-"):
        error, size = error + other, x + y
    elif op == "*":
        error = x * other + y * error + error * other
    elif op == "/":
        error = (
            (error + x * other / y) / (y - other)
            if y > other
            else (math.inf if error + other > 0 else 0.0)
        )
    elif op == "exp":
        error = magnitude(value) * math.expm1(min(error, 700))
    elif op in ("log", "sqrt"):
        slope = (
            (1 / (x - error) if op == "log" else 1 / math.sqrt(x - error))
            if x > error
            else math.inf
        )
        error = error * slope if error else 0.0
        size = 1 + magnitude(value)
    elif op == "**":
        power = args[1].size
        steep = float(power * np.float64(x + error) ** max(power - 1, 0))
        error = steep * error if power != 0.5 else smooth("sqrt", args[:1]).error
    elif op in ("maximum", "minimum"):
        error = max(error, other)
    result = settle(
        value, error, args, size=size if size is not None and math.isfinite(size) else None
    )
    return Value(result.value, result.error, result.unsure or wraps(op, value, args))


def jump(op: str, args: Sequence[Value]) -> Value:
    """Operations that jump: nothing is known where their arguments' errors could decide."""
    value = numpy_value(_UFUNC[op], args)
    error = sum(arg.error for arg in args)
    gap = (
        magnitude(complex(args[0].value) - complex(args[1].value))
        if len(args) > 1
        else args[0].size
    )
    doubtful = error > 0 and (op == "%" or not gap > error)
    return Value(value, 0.0, doubtful or any(arg.unsure for arg in args))


def choose(op: str, args: Sequence[Value]) -> Value:
    condition, this, that = args
    value = numpy_value(lambda *given: np.where(*given)[()], args)
    taken = this if condition.value else that
    doubtful = condition.unsure or (condition.error > 0 and condition.size <= condition.error)
    return Value(value, taken.error, doubtful or taken.unsure)


def cast(op: str, args: Sequence[Value]) -> Value:
    (arg,) = args
    value = np.asarray(arg.value).astype(op)[()]
    if (
        op == "int64" and np.asarray(arg.value).dtype.kind == "f"
    ):  # cuts off: a jump at every whole number
        finite = math.isfinite(arg.value) and abs(arg.value) < 2**31
        near = finite and abs(arg.value - round(float(arg.value))) <= arg.error and arg.error > 0
        return Value(value, 0.0, arg.unsure or near or not finite)
    return settle(value, arg.error, args)


OPERATIONS: dict[str, Callable[[str, Sequence[Value]], Value]] = {
    **dict.fromkeys(("<", "<=", ">", ">=", "==", "!=", "%", "sign", "&", "|", "~"), jump),
    **dict.fromkeys(("float32", "float64", "int64", "complex128"), cast),
    "where": choose,
}


def _sum(terms: Sequence[Value], dtype: np.dtype) -> Value:
    unsure = any(term.unsure for term in terms)
    if dtype.kind in "bi":
        total = sum(int(term.value) for term in terms)
        return (
            Value(np.int64(total), 0.0, unsure)
            if abs(total) < 2**63
            else Value(np.int64(0), 0.0, True)
        )
    wide = np.complex128 if dtype.kind == "c" else np.float64
    total = reduce(np.add, (term.value for term in terms), wide(0))
    size = sum(term.size for term in terms)
    error = sum(term.error for term in terms)
    return settle(dtype.type(total), error, terms, size=size if math.isfinite(size) else None)


def _prod(terms: Sequence[Value], dtype: np.dtype) -> Value:
    unsure = any(term.unsure for term in terms)
    if dtype.kind in "bi":
        total = math.prod(int(term.value) for term in terms)
        return (
            Value(np.int64(total), 0.0, unsure)
            if abs(total) < 2**63
            else Value(np.int64(0), 0.0, True)
        )
    wide = np.complex128 if dtype.kind == "c" else np.float64
    total = reduce(np.multiply, (term.value for term in terms), wide(1))
    most = math.prod(term.size + term.error for term in terms)
    error = most - math.prod(term.size for term in terms)
    result = settle(
        dtype.type(total), error if math.isfinite(error) else 0.0, terms, steps=max(1, len(terms))
    )
    return Value(
        result.value,
        result.error,
        result.unsure or not math.isfinite(most) or most > HUGE[dtype.name],
    )


def _extreme(ufunc: Callable[..., Any]) -> Callable[[Sequence[Value], np.dtype], Value]:
    def aggregate(terms: Sequence[Value], dtype: np.dtype) -> Value:
        value = reduce(ufunc, (term.value for term in terms))
        return Value(value, max(term.error for term in terms), any(term.unsure for term in terms))

    return aggregate


def _truth(
    decide: Callable[[Iterator[bool]], bool],
) -> Callable[[Sequence[Value], np.dtype], Value]:
    def aggregate(terms: Sequence[Value], dtype: np.dtype) -> Value:
        unsure = any(
            term.unsure or (term.error > 0 and not term.size > term.error) for term in terms
        )
        return Value(np.bool_(decide(bool(term.value != 0) for term in terms)), 0.0, unsure)

    return aggregate


def _mean(terms: Sequence[Value], dtype: np.dtype) -> Value:
    return smooth("/", [_sum(terms, dtype), Value(len(terms))])


REDUCTIONS: dict[str, Callable[[Sequence[Value], np.dtype], Value]] = {
    "sum": _sum,
    "prod": _prod,
    "max": _extreme(np.maximum),
    "min": _extreme(np.minimum),
    "any": _truth(any),
    "all": _truth(all),
    "mean": _mean,
}


def disagreement(got: np.ndarray, want: Tensor) -> str:
    """What is wrong with `got`, or ""."""
    if got.dtype != want.values.dtype or got.shape != want.values.shape:
        return (
            f"{got.dtype}{list(got.shape)} instead of {want.values.dtype}{list(want.values.shape)}"
        )
    for place in np.ndindex(got.shape):
        a, b, error = got[place], want.values[place], want.errors[place]
        if want.unsure[place] or a == b or (np.isnan(a) and np.isnan(b)):
            continue
        if not abs(complex(a) - complex(b)) <= error + 1e-30:
            return f"{a} instead of {b} ± {error} at {list(place)}"
    return ""
