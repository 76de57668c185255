"""Every wrong program gives a one-line InputError at the right place; hostile text does no harm."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from calls import calls_of
from graph_helpers import declared

from einmpi.errors import InputError
from einmpi.language.numpy_einsum import program_text, split_arguments
from einmpi.language.parse import build_graphs
from einmpi.language.syntax import Source

INPUTS = {
    "A": ((2, 3), "float64"),
    "B": ((3,), "float64"),
    "C": ((3,), "complex128"),
    "G": ((2, 2), "float64"),
    "M": ((3,), "int32"),
    "N": ((3,), "int64"),
    "T": ((3,), "bool"),
    "E": ((0,), "float64"),
    "F": ((2, 0), "float64"),
    "s": ((), "float64"),
}
SIZES = {"d": 4, "w": 3}

STATEMENT = "expected one statement a line: NAME[labels] = expression"
EXPRESSION = (
    "expected numbers, NAME[labels], + - * / // % **, comparisons, & | ^ ~ << >>, and functions"
)
DEPTH = "expected at most 200 levels; split it into several statements"
INTEGERS = "int8, int16, int32, int64, uint8, uint16, uint32, uint64"
DTYPES = (
    f"expected one of float16, float32, float64, complex64, complex128, {INTEGERS}, bool, bfloat16"
)
ONES_OF_65 = ",".join(f"l{k}:1" for k in range(65))  # labels of extent 1
ARITHMETIC = "expected integers, earlier sizes, + - * // % ** and brackets"
NOTHING = "expected an extent of at least 1; only sum, prod, any, all have a value there"


def aggregate(label: str) -> str:
    """Return what is expected of a label that is neither in the output nor aggregated."""
    return f"expected {label} in the output, or one of sum, prod, max, min, any, all over {label}"


def error(text: str, inputs: object = None, sizes: object = None, outputs: object = None) -> str:
    """The message a program is refused with."""
    with pytest.raises(InputError) as caught:
        build_graphs(
            Source("p", text),
            INPUTS if inputs is None else inputs,
            SIZES if sizes is None else sizes,
            outputs,
        )
    message = str(caught.value)
    assert "\n" not in message
    assert "\r" not in message
    return message


def cases(*pairs: tuple[str, str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("text", "message"), pairs, ids=[text for text, _ in pairs])


@cases(
    ("Z[i] = B[i] +", f"p:1:14: syntax error: invalid syntax; {STATEMENT}"),
    ("Z[i] = (B[i]", f"p:1:8: syntax error: '(' was never closed; {STATEMENT}"),
    ("Z[i] = B[i]]", f"p:1:12: syntax error: unmatched ']'; {STATEMENT}"),
    ("Z[i] = B[i] B[i]", f"p:1:13: syntax error: invalid syntax; {STATEMENT}"),
    ("X[i] = B[i]\n\n   Z[i] = B[i] ? 2", f"p:3:16: syntax error: invalid syntax; {STATEMENT}"),
    ("if = 1", f"p:1:4: syntax error: invalid syntax; {STATEMENT}"),
    ("", "p: the program has no statement; expected NAME[labels] = expression"),
    ("# nothing\n\n", "p: the program has no statement; expected NAME[labels] = expression"),
)
def test_syntax(text: str, message: str) -> None:
    assert error(text) == message


@cases(
    (
        "import os",
        "p:1:1: this is not a statement of the language; expected NAME[labels] = expression",
    ),
    (
        "for i in x: Z[i] = B[i]",
        "p:1:1: this is not a statement of the language; expected NAME[labels] = expression",
    ),
    (
        "Z[i] += B[i]",
        "p:1:1: this is not a statement of the language; expected NAME[labels] = expression",
    ),
    ("B[i]", "p:1:1: this is not a statement of the language; expected NAME[labels] = expression"),
    (
        "X = 1; pass",
        "p:1:8: this is not a statement of the language; expected NAME[labels] = expression",
    ),
    (
        "X = Y = 1",
        "p:1:1: this is not a statement of the language; expected NAME[labels] = expression",
    ),
    (
        "x: float64 = 3",
        "p:1:1: this is not a statement of the language; expected NAME[labels] = expression",
    ),
    ("X, Y = 1, 2", "p:1:1: this cannot be assigned to; expected NAME or NAME[labels]"),
    ("Z.x = 1", "p:1:1: this cannot be assigned to; expected NAME or NAME[labels]"),
    ("Z[i][j] = A[i,j]", "p:1:1: this cannot be assigned to; expected NAME or NAME[labels]"),
    ("Z[1] = B[0]", "p:1:3: 1 is not a label; expected a name, or name:extent"),
    ("Z[i+1] = B[i]", "p:1:3: i + 1 is not a label; expected a name, or name:extent"),
    ("Z['i'] = B[i]", "p:1:3: 'i' is not a label; expected a name, or name:extent"),
    ("Z[i:2:2] = B[i]", "p:1:3: i:2:2 is not a label; expected a name, or name:extent"),
    ("Z[i,i] = B[i]", "p:1:1: label i occurs twice in the output; expected each label once"),
)
def test_not_a_statement(text: str, message: str) -> None:
    assert error(text) == message


@cases(
    ("(y := B[i])", f"p:1:9: '(y := B[i])' is not in the language; {EXPRESSION}"),
    ("lambda: B[i]", f"p:1:8: 'lambda: B[i]' is not in the language; {EXPRESSION}"),
    ("B.T", f"p:1:8: 'B.T' is not in the language; {EXPRESSION}"),
    ("B[i] + B[i].T", f"p:1:15: 'B[i].T' is not in the language; {EXPRESSION}"),
    ("f'{B}'", f"p:1:8: \"f'{{B}}'\" is not in the language; {EXPRESSION}"),
    ("'B[i]'", f"p:1:8: \"'B[i]'\" is not in the language; {EXPRESSION}"),
    (
        "B[i] and B[i]",
        (
            "p:1:8: 'B[i] and B[i]' is not in the language; expected & and |, with brackets around"
            " comparisons"
        ),
    ),
    (
        "B[i] or B[i]",
        (
            "p:1:8: 'B[i] or B[i]' is not in the language; expected & and |, with brackets around"
            " comparisons"
        ),
    ),
    ("not B[i]", f"p:1:8: 'not B[i]' is not in the language; {EXPRESSION}"),
    (
        "B[i] if T[i] else 0",
        (
            "p:1:8: 'B[i] if T[i] else 0' is not in the language; expected where(condition, this,"
            " that)"
        ),
    ),
    (
        "B[i] @ B[i]",
        "p:1:8: 'B[i] @ B[i]' is not in the language; expected a sum of products, such as "
        "sum(A[i,j] * B[j,k])",
    ),
    ("B[i] is 2", f"p:1:8: 'B[i] is 2' is not in the language; {EXPRESSION}"),
    ("B[i] in N", f"p:1:8: 'B[i] in N' is not in the language; {EXPRESSION}"),
    ("[B[i]]", f"p:1:8: '[B[i]]' is not in the language; {EXPRESSION}"),
    ("(B[i], 1)", f"p:1:8: '(B[i], 1)' is not in the language; {EXPRESSION}"),
    ("{}", f"p:1:8: '{{}}' is not in the language; {EXPRESSION}"),
    ("None", f"p:1:8: 'None' is not in the language; {EXPRESSION}"),
    ("...", f"p:1:8: '...' is not in the language; {EXPRESSION}"),
    ("B[:]", "p:1:8: B[:] has no labels here; expected labels, such as B[:][i]"),
    ("[B[j] for j in x]", f"p:1:8: '[B[j] for j in x]' is not in the language; {EXPRESSION}"),
)
def test_not_an_expression(text: str, message: str) -> None:
    assert error(f"Z[i] = {text}") == message


@cases(
    (
        "Z[i] = sqr(B[i])",
        "p:1:8: unknown function 'sqr'; expected one of sqrt, rsqrt, sum, var, std, … "
        "(did you mean sqrt?)",
    ),
    (
        "Z[i] = argsort(B[i])",
        "p:1:8: unknown function 'argsort'; expected a function of the language; numpy's argsort "
        "takes the DistArray that a program returns",
    ),
    (
        "Z[i] = 2 * B(i)",
        "p:1:12: B is a tensor; expected B[labels]",
    ),
    ("Z[i] = B[i] + D[i]", "p:1:15: unknown tensor 'D'; expected one of A, B, C, G, M, …"),
    (
        "Z[i] = B[i]\nY[i] = Zz[i]",
        "p:2:8: unknown tensor 'Zz'; expected one of Z, A, B, C, G, …",
    ),
    ("Z[i] = B[i] * y", "p:1:15: unknown name 'y'; expected one of s, d, w, inf, nan, …"),
    (
        "Z[i] = B[i] * dd",
        "p:1:15: unknown name 'dd'; expected one of d, s, w, inf, nan, …",
    ),
    ("Z[i] = B", "p:1:8: B has no labels here; expected labels, such as B[i]"),
    ("Z[i] = sum", "p:1:8: sum is a function; expected a call: sum(expression)"),
    ("Z[i] = exp * B[i]", "p:1:8: exp is a function; expected a call: exp(x)"),
    ("Z[i] = exp[i]", "p:1:8: exp is a function; expected a call: exp(x)"),
    (
        "Z[i] = softmax[i]",
        "p:1:8: softmax is a function; expected a call: softmax[labels](expression)",
    ),
    ("Z[i] = i.__class__", f"p:1:8: 'i.__class__' is not in the language; {EXPRESSION}"),
    (
        "Z[s] = B[s] * s",
        "p:1:15: s is both a label and a tensor here; expected two different names",
    ),
)
def test_unknown(text: str, message: str) -> None:
    assert error(text) == message


def test_unknown_output() -> None:
    message = "p: unknown output 'Y'; expected one of X, Z"
    assert error("X[i] = B[i]; Z[i] = X[i]", outputs=["Y"]) == message
    message = "p: unknown output 'B'; expected one of X, Z"  # an input is not computed
    assert error("X[i] = B[i]; Z[i] = X[i]", outputs=["B"]) == message


@cases(
    (
        "Z[i] = A[i,j] * B[i]",
        (
            "p:1:19: label i has two extents: 2 in A[i, j] and 3 in B[i]; expected the same extent"
            " everywhere"
        ),
    ),
    (
        "Z = sum(A[i,j] * B[i])",
        (
            "p:1:20: label i has two extents: 2 in A[i, j] and 3 in B[i]; expected the same extent"
            " everywhere"
        ),
    ),
    (
        "Z[i] = sum(A[i,j] * max(B[i] * B[k]))",
        (
            "p:1:27: label i has two extents: 2 in A[i, j] and 3 in B[i]; expected the same extent"
            " everywhere"
        ),
    ),
    (
        "Z = sum(A[i,i])",
        (
            "p:1:13: label i has two extents: 2 in A[i, i] and 3 in A[i, i]; expected the same"
            " extent everywhere"
        ),
    ),
    (
        "Z[i:4] = B[i]",
        (
            "p:1:5: label i has two extents: 3 in B[i] and 4 in i:4; expected the same extent"
            " everywhere"
        ),
    ),
    (
        "Z = sum[i:d](B[i])",
        (
            "p:1:11: label i has two extents: 3 in B[i] and 4 in i:d; expected the same extent"
            " everywhere"
        ),
    ),
    (
        "Z[i] = A[i,N[i]]",
        (
            "p:1:14: label i has two extents: 2 in A[i, N[i]] and 3 in N[i]; expected the same"
            " extent everywhere"
        ),
    ),
)
def test_two_extents(text: str, message: str) -> None:
    assert error(text) == message


@cases(
    (
        "Z[i] = A[i,j]",
        f"p:1:12: label j is neither in the output Z[i] nor aggregated; {aggregate('j')}",
    ),
    (
        "Z = G[i,j] + G[j,j]",
        f"p:1:7: label i is neither in the output Z nor aggregated; {aggregate('i')}",
    ),
    (
        "Z[i] = sum(A[i,j]) * B[j]",
        f"p:1:24: label j is neither in the output Z[i] nor aggregated; {aggregate('j')}",
    ),
    (
        "Z[i] = B[j] + sum(A[i,j])",
        f"p:1:10: label j is neither in the output Z[i] nor aggregated; {aggregate('j')}",
    ),
    (
        "Z = sum[i](A[i,j])",
        f"p:1:16: label j is neither in the output Z nor aggregated; {aggregate('j')}",
    ),
    (
        "Z[i] = sum[i](A[i,j])",
        "p:1:1: label i is aggregated and also in the output; expected only one of the two",
    ),
    (
        "Z[i] = 1 + sum[i,j](A[i,j])",
        "p:1:1: label i is aggregated and also in the output; expected only one of the two",
    ),
    (
        "Z[j] = mean[j](A[0,j])",
        "p:1:1: label j is aggregated and also in the output; expected only one of the two",
    ),
    (
        "Z[i:3] = sum[i:3](B[i])",
        "p:1:1: label i is aggregated and also in the output; expected only one of the two",
    ),
    (
        "Z[i] = sum(B[i])",
        (
            "p:1:8: sum(...) has nothing to aggregate: every label in it also occurs outside of it;"
            " expected sum[labels](...)"
        ),
    ),
    (
        "Z[i] = B[i] + max(B[i] * 2)",
        (
            "p:1:15: max(...) has nothing to aggregate: every label in it also occurs outside of"
            " it; expected max[labels](...)"
        ),
    ),
    (
        "z = sum(sum(B[i]))",
        (
            "p:1:5: sum(...) has nothing to aggregate: every label in it is aggregated inside it;"
            " expected sum[labels](...)"
        ),
    ),
    (
        "z = sum(s)",
        "p:1:5: sum(...) has nothing to aggregate: it has no labels; expected sum[labels](...)",
    ),
    ("z = sum[k](B[i])", "p:1:5: label k does not occur in this sum; expected i"),
    ("Z[i] = 2 * max[k](B[i])", "p:1:12: label k does not occur in this max; expected i"),
    ("Z[i] = softmax[k](B[i])", "p:1:8: label k does not occur in this softmax; expected i"),
    (
        "z = sum[i](s)",
        "p:1:5: label i does not occur in this sum; expected an argument with labels",
    ),
    ("z = sum[i,i](B[i])", "p:1:5: label i occurs twice in this sum; expected each label once"),
    (
        "Z[i] = softmax[i,i](B[i])",
        "p:1:8: label i occurs twice in this softmax; expected each label once",
    ),
    (
        "Z[i] = 1",
        (
            "p:1:1: label i has no extent: no tensor here is indexed by it; expected an extent,"
            " written as i:EXTENT"
        ),
    ),
    (
        "Z[i,j] = B[i] * j",
        (
            "p:1:1: label j has no extent: no tensor here is indexed by it; expected an extent,"
            " written as j:EXTENT"
        ),
    ),
    (
        "Z[i] = B[i*i]",
        (
            "p:1:10: label i has no extent: no tensor here is indexed by it; expected an extent,"
            " written as i:EXTENT"
        ),
    ),
    ("z = sum[0](B[i])", "p:1:9: 0 is not a label; expected a name, or name:extent"),
)
def test_labels(text: str, message: str) -> None:
    assert error(text) == message


@cases(
    (
        "Z[i] = A[i]",
        "p:1:8: A[i] has the wrong number of indices; expected 2, one for each dimension of A",
    ),
    (
        "Z[i] = 1 + B[i,j]",
        "p:1:12: B[i, j] has the wrong number of indices; expected 1, one for each dimension of B",
    ),
    (
        "Z[i] = s[i]",
        "p:1:8: s[i] has the wrong number of indices; expected 0, one for each dimension of s",
    ),
    ("Z[i] = A[i,3]", "p:1:12: index 3 is out of range; expected an index from -3 to 2"),
    ("Z[i] = A[i,-4]", "p:1:12: index -4 is out of range; expected an index from -3 to 2"),
    ("Z[i] = A[i,d+0]", "p:1:12: index 4 is out of range; expected an index from -3 to 2"),
    ("Z[i] = A[i,1.0]", "p:1:12: the index 1.0 is float64; expected an integer"),
    ("Z[i] = B[B[i]]", "p:1:10: the index B[i] is float64; expected an integer"),
    ("Z[i] = A[T[i],i]", "p:1:10: the index T[i] is bool; expected an integer"),
    ("Z[i] = B[N[i] / 2]", "p:1:10: the index N[i] / 2 is float64; expected an integer"),
    (
        "z = E[0]",
        "p:1:7: index 0 is out of range; expected no index, because this dimension has extent 0",
    ),
)
def test_indices(text: str, message: str) -> None:
    assert error(text) == message


@cases(
    ("Z[i] = Z[i] + B[i]", "p:1:1: Z depends on itself: Z ← Z; expected a program without cycles"),
    ("n = n + 1", "p:1:1: n depends on itself: n ← n; expected a program without cycles"),
    (
        "X[i] = Y[i]; Y[i] = X[i]",
        "p:1:1: X depends on itself: X ← Y ← X; expected a program without cycles",
    ),
    (
        "X[i] = B[i] + Y[i]\nY[i] = W[i]\nW[i] = 2 * X[i]",
        "p:1:1: X depends on itself: X ← Y ← W ← X; expected a program without cycles",
    ),
    (
        "Q[i] = X[i]\n X[i] = Y[i]; Y[i] = X[i]",
        "p:2:2: X depends on itself: X ← Y ← X; expected a program without cycles",
    ),
    (
        "n = sum(X[i]); X[i] = B[i] * n",
        "p:1:1: n depends on itself: n ← X ← n; expected a program without cycles",
    ),
)
def test_cycles(text: str, message: str) -> None:
    assert error(text) == message


@cases(
    (
        "X[i] = B[i]; X[i] = B[i]",
        "p:1:14: X is defined twice; expected each name once",
    ),
    (
        "B[i] = N[i]",
        "p:1:1: B is an input and cannot be defined again; expected another name",
    ),
    (
        "X: float64[3]\nX[i] = B[i]",
        "p:2:1: X is an input and cannot be defined again; expected another name",
    ),
    ("d = 3", "p:1:1: d is a size and cannot name a tensor; expected another name"),
    ("Z = 1; d[i] = B[i]", "p:1:8: d is a size and cannot name a tensor; expected another name"),
    (
        "sum[i] = B[i]",
        "p:1:1: sum is a word of the language and cannot name a tensor; expected another name",
    ),
    (
        "softmax = 1",
        "p:1:1: softmax is a word of the language and cannot name a tensor; expected another name",
    ),
    (
        "exp[i] = B[i]",
        "p:1:1: exp is a word of the language and cannot name a tensor; expected another name",
    ),
    (
        "inf = 3",
        "p:1:1: inf is a word of the language and cannot name a tensor; expected another name",
    ),
    (
        "float32[i] = B[i]",
        "p:1:1: float32 is a word of the language and cannot name a tensor; expected another name",
    ),
    (
        "Σ[i] = B[i]",
        "p:1:1: Σ is a word of the language and cannot name a tensor; expected another name",
    ),
)
def test_names(text: str, message: str) -> None:
    assert error(text) == message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *(
            (
                name,
                f"{name} is a word of the language and cannot name a tensor; expected another name",
            )
            for name in ("sum", "relu", "pi", "Σ")
        ),
        ("d", "d is a size and cannot name a tensor; expected another name"),
        *(
            (name, f"{name!r} cannot name a tensor; expected a Python identifier")
            for name in ("two words", "1x", "")
        ),
    ],
)
def test_name_of_an_input(name: str, message: str) -> None:
    assert error("Z[i] = B[i]", inputs={**INPUTS, name: ((3,), "float64")}) == f"p: {message}"


@cases(
    ("Z[i] = C[i] < 1", "p:1:8: < does not take complex numbers; expected real arguments"),
    (
        "Z[i] = 1 + (0 <= C[i] <= 1)",
        "p:1:13: <= does not take complex numbers; expected real arguments",
    ),
    ("z = max(C[i])", "p:1:5: max does not take complex numbers; expected a real argument"),
    ("z = 1 + max(C[i])", "p:1:9: max does not take complex numbers; expected a real argument"),
    (
        "Z[i] = maximum(C[i], 0)",
        "p:1:8: maximum does not take complex numbers; expected real arguments",
    ),
    ("Z[i] = sign(C[i])", "p:1:8: sign does not take complex numbers; expected real arguments"),
    ("Z[i] = erf(C[i])", "p:1:8: erf does not take complex numbers; expected real arguments"),
    ("Z[i] = C[i] % 2", "p:1:8: % does not take complex numbers; expected real arguments"),
    (
        "Z[i] = float32(C[i])",
        (
            "p:1:8: float32 does not take complex numbers; expected a real argument; use real or"
            " imag first"
        ),
    ),
    (
        "Z[i] = 2 * relu(C[i])",
        "p:1:12: maximum does not take complex numbers; expected real arguments",
    ),
    (
        "Z[i] = softmax[i](C[i])",
        "p:1:8: max does not take complex numbers; expected a real argument",
    ),
    (
        "Z[i] = B[i] & B[i]",
        f"p:1:8: & does not take float64 and float64; expected one of {INTEGERS}, bool",
    ),
    (
        "Z[i] = B[i] | T[i]",
        f"p:1:8: | does not take float64 and bool; expected one of {INTEGERS}, bool",
    ),
    ("Z[i] = ~B[i]", f"p:1:8: ~ does not take float64; expected one of {INTEGERS}, bool"),
    (
        "Z[i] = -T[i]",
        (
            "p:1:8: - does not take bool; expected one of float16, float32, float64, complex64,"
            f" complex128, {INTEGERS}"
        ),
    ),
    (
        "Z[i] = T[i] - T[i]",
        (
            "p:1:8: - does not take bool and bool; expected one of float16, float32, float64,"
            " complex64, complex128, " + INTEGERS
        ),
    ),
    (
        "Z[i] = B[i] * (1.5 & 2)",
        f"p:1:16: & does not take float64 and int64; expected one of {INTEGERS}, bool",
    ),
    (
        "Z[i] = N[i] ** -1",
        (
            "p:1:8: an integer to the power -1; expected an exponent of at least 0; write -1.0 for"
            " a result in floating point"
        ),
    ),
    (
        "Z[i] = M[i] + 2**40",
        (
            "p:1:8: 1099511627776 does not fit into int32; expected a number from -2147483648 to"
            " 2147483647"
        ),
    ),
    (
        "Z[i] = where(T[i], M[i], -2**31 - 1)",
        (
            "p:1:8: -2147483649 does not fit into int32; expected a number from -2147483648 to"
            " 2147483647"
        ),
    ),
    (
        "Z[i] = N[i] + 9223372036854775808",
        "p:1:15: this integer is too large; expected an integer less than 2**63",
    ),
    (
        "Z[i] = N[i] + 2**64",
        "p:1:15: 2**64 is too large; expected an integer from -2**63 to 2**63 - 1",
    ),
    (
        "Z[i] = B[i] + 10**10**10",
        "p:1:15: 10**10000000000 is too large; expected an integer from -2**63 to 2**63 - 1",
    ),
)
def test_dtypes(text: str, message: str) -> None:
    assert error(text) == message


@cases(
    ("z = max(E[i])", f"p:1:5: max over i, which has extent 0; {NOTHING}"),
    ("Z[i] = min(F[i,j])", f"p:1:8: min over j, which has extent 0; {NOTHING}"),
    ("Z[i] = B[i] + max(E[k])", f"p:1:15: max over k, which has extent 0; {NOTHING}"),
    ("Z[i] = logsumexp(F[i,j])", f"p:1:8: logsumexp over j, which has extent 0; {NOTHING}"),
)
def test_largest_of_nothing(text: str, message: str) -> None:
    assert error(text) == message


@cases(
    (
        "Z[i:2**40] = 1",
        (
            "p:1:5: label i has extent 1099511627776; expected an extent from 0 to 2**39 ="
            " 549755813888"
        ),
    ),
    (
        "Z[i:2**39+1] = 1",
        "p:1:5: label i has extent 549755813889; expected an extent from 0 to 2**39 = 549755813888",
    ),
    (
        "Z[i:d-5] = 1",
        "p:1:5: label i has extent -1; expected an extent from 0 to 2**39 = 549755813888",
    ),
    (
        "Z[i:2**62] = 1",
        (
            "p:1:5: label i has extent 4611686018427387904; expected an extent from 0 to 2**39 ="
            " 549755813888"
        ),
    ),
    ("Z[i:2**64] = 1", "p:1:5: 2**64 is too large; expected an integer less than 2**63"),
    ("Z[i:2**-1] = 1", "p:1:5: 2**-1 is not an integer; expected an integer less than 2**63"),
    ("Z[i:d/2] = 1", f"p:1:5: d / 2 is not integer arithmetic; {ARITHMETIC}"),
    ("Z[i:1.5] = 1", f"p:1:5: 1.5 is not integer arithmetic; {ARITHMETIC}"),
    ("Z[i:D] = 1", "p:1:5: unknown size 'D'; expected one of d, w (did you mean d?)"),
    ("Z[i:d//0] = 1", "p:1:5: division by zero; expected a divisor other than 0"),
    (
        "Z[i:2**39,j:2**21] = 1.0",
        "p:1:1: Z would have 1152921504606846976 elements; expected less than 2**63 bytes",
    ),
    (
        f"Z = sum[{ONES_OF_65}](2.0)",
        (
            "p:1:1: Z is computed over 65 labels at once; expected at most 64;"
            " split it into several statements"
        ),
    ),
    (f"Z[{ONES_OF_65}] = 2.0", "p:1:1: Z has 65 dimensions; expected at most 64"),
    (
        "Z = sum[i:2**39+1](i)",
        (
            "p:1:11: label i has extent 549755813889; expected an extent from 0 to 2**39 ="
            " 549755813888"
        ),
    ),
    (
        "Z = sum[i:-1](i)",
        "p:1:11: label i has extent -1; expected an extent from 0 to 2**39 = 549755813888",
    ),
    ("X: int9[3]", f"p:1:4: dtype 'int9' of X is not supported; {DTYPES} (did you mean int8?)"),
    ("X: float32[2.5]", f"p:1:12: 2.5 is not integer arithmetic; {ARITHMETIC}"),
    (
        "X: float32[3, 2**40]",
        "p:1:4: X has extent 1099511627776; expected an extent from 0 to 2**39 = 549755813888",
    ),
    ("X: 5", "p:1:4: this is not a declaration of an input; expected NAME: dtype[extent, extent]"),
    (
        "B: float32[3]",
        "p:1:4: B is declared differently from the given input; expected B: float64[3]",
    ),
)
def test_extents_and_declarations(text: str, message: str) -> None:
    assert error(text) == message


def test_extents_of_inputs() -> None:
    for shape, what in (
        (
            (2**39 + 1,),
            "X has extent 549755813889; expected an extent from 0 to 2**39 = 549755813888",
        ),
        ((3, -1), "X has extent -1; expected an extent from 0 to 2**39 = 549755813888"),
        (
            (2**39, 2**21),
            "X would have 1152921504606846976 elements; expected less than 2**63 bytes",
        ),
    ):
        assert error("Z[i] = B[i]", inputs={**INPUTS, "X": (shape, "float64")}) == f"p: {what}"
    found = error("Z[i] = B[i]", inputs={**INPUTS, "X": ((3,), "datetime64")})
    assert found == f"p: dtype 'datetime64' of X is not supported; {DTYPES}"


def test_largest_extent_is_allowed() -> None:
    graph = build_graphs(Source("p", "Z[i] = X[i] + 1"), {"X": ((2**39,), "float64")}).rewritten
    assert graph["Z"].bound == (2**39,)
    graph = build_graphs(Source("p", "Z[i:2**39,j:2**21-1] = 1.0"), {}).rewritten
    assert graph["Z"].nbytes == 2**63 - 2**42


@cases(
    (
        "Z[i] = softmax(B[i])",
        "p:1:8: softmax is not called like this; expected softmax[labels](expression)",
    ),
    (
        "Z[i] = softmax[i](B[i], B[i])",
        "p:1:8: softmax is not called like this; expected softmax[labels](expression)",
    ),
    (
        "Z[i] = softmax[i]()",
        "p:1:8: softmax is not called like this; expected softmax[labels](expression)",
    ),
    (
        "Z[i] = softmax[i](B[i], eps=1)",
        "p:1:29: softmax has no option eps; expected no options",
    ),
    ("Z[i] = softmax[i+1](B[i])", "p:1:16: i + 1 is not a label; expected a name, or name:extent"),
    ("Z[i] = relu[i](B[i])", "p:1:8: relu is not called like this; expected relu(expression)"),
    ("Z[i] = relu()", "p:1:8: relu is not called like this; expected relu(expression)"),
    (
        "Z[i] = layernorm(B[i])",
        "p:1:8: layernorm is not called like this; expected layernorm[labels](expression)",
    ),
    (
        "Z[i] = rmsnorm[i](B[i], eps=B[i])",
        "p:1:29: the option eps of rmsnorm is not a number; expected eps=number",
    ),
    (
        "Z[i] = rmsnorm[i](B[i], ep=1)",
        "p:1:28: rmsnorm has no option ep; expected eps=number",
    ),
    ("z = mean(B[i], 2)", "p:1:5: mean is not called like this; expected mean(expression)"),
    ("z = mean()", "p:1:5: mean is not called like this; expected mean(expression)"),
    ("Z[i] = 2 * sum(B[i], N[i])", "p:1:12: sum is not called like this; expected sum(expression)"),
    (
        "z = sum(B[i], axis=0)",
        "p:1:5: sum is not called like this; expected sum(expression); labels take the place of an "
        "axis: sum[j](X[i,j])",
    ),
    ("Z[i] = exp(B[i], 2)", "p:1:8: exp is not called like this; expected exp(x)"),
    ("Z[i] = exp[i](B[i])", "p:1:8: exp is not called like this; expected exp(x)"),
    ("Z[i] = exp(x=B[i])", "p:1:8: exp is not called like this; expected exp(x)"),
    ("Z = where()", "p:1:5: where is not called like this; expected where(c, x, y)"),
    ("Z[i] = where(T[i], 1)", "p:1:8: where is not called like this; expected where(c, x, y)"),
    ("Z[i] = maximum(B[i])", "p:1:8: maximum is not called like this; expected maximum(x, y)"),
)
def test_calls(text: str, message: str) -> None:
    assert error(text) == message


@cases(
    (
        "\n\n  X[i] = B[i]\n      Z[i] = B[i] * y",
        "p:4:21: unknown name 'y'; expected one of s, d, w, inf, nan, …",
    ),
    (
        "Z[i] = (B[i]\n         * y)",
        "p:2:12: unknown name 'y'; expected one of s, d, w, inf, nan, …",
    ),
    (
        "X[i] = B[i];   Z[i] = B[i] * y",
        "p:1:30: unknown name 'y'; expected one of s, d, w, inf, nan, …",
    ),
    ("Ä[i] ← B[i] × ü", "p:1:15: unknown name 'ü'; expected one of s, d, w, inf, nan, …"),
    ("\tZ[i] = B[i] * y", "p:1:16: unknown name 'y'; expected one of s, d, w, inf, nan, …"),
)
def test_position_is_the_editors(text: str, message: str) -> None:
    assert error(text) == message


def test_position_inside_a_file() -> None:
    with pytest.raises(InputError) as caught:
        build_graphs(Source("job.toml", "X = 1; Z = y\nW = z", line=7, column=12), {})
    assert str(caught.value) == "job.toml:7:24: unknown name 'y'; expected one of X, inf, nan, pi"


@pytest.mark.parametrize("text", ["1if B[i]else 2", "B[i] is 2", "'\\d'", "B[i] * 0x1for"])
def test_python_does_not_warn_beside_the_message(text: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error(f"Z[i] = {text}")
    assert not caught


# ---- hostile text --------------------------------------------------------------------------------

DEEP = 10_000
HOSTILE = {
    "unary": "Z[i] = " + "-" * DEEP + "B[i]",
    "inverts": "Z[i] = " + "~" * DEEP + "B[i]",
    "brackets": "Z[i] = " + "(" * DEEP + "B[i]" + ")" * DEEP,
    "calls": "Z[i] = " + "exp(" * DEEP + "B[i]" + ")" * DEEP,
    "sums": "Z[i] = " + "sum(" * DEEP + "B[i]" + ")" * DEEP,
    "macros": "Z[i] = " + "softmax[i](" * DEEP + "B[i]" + ")" * DEEP,
    "indices": "Z[i] = " + "N[" * DEEP + "i" + "]" * DEEP,
    "powers": "Z[i] = " + "**".join(["B[i]"] * DEEP),
    "additions": "Z[i] = " + "+".join(["B[i]"] * DEEP),
    "comparisons": "Z[i] = " + "<".join(["B[i]"] * DEEP),
    "nots": "Z[i] = " + "not " * DEEP + "B[i]",
    "lambdas": "Z[i] = " + "lambda: " * DEEP + "1",
    "conditions": "Z[i] = " + "1 if 2 else " * DEEP + "3",
    "attributes": "Z[i] = B" + ".T" * DEEP,
    "targets": "Z" + "[i]" * DEEP + " = 1",
    "open brackets": "Z[i] = " + "[" * DEEP,
    "f-strings": "Z[i] = " + "f'{" * DEEP,
    "decimal digits": "Z[i] = B[i] * " + "7" * 100_000,
    "hexadecimal digits": "Z[i] = B[i] * 0x" + "7" * 100_000,
    "hexadecimal extent": "Z[i:0x" + "7" * 100_000 + "] = 1",
    "hexadecimal power": "Z[i:0x" + "7" * 100_000 + "**2] = 1",
    "hexadecimal index": "Z[i] = B[0x" + "7" * 100_000 + "]",
    "hexadecimal label": "Z[0x" + "7" * 100_000 + "] = 1",
    "hexadecimal indices": "Z[i] = B[i, 0x" + "7" * 100_000 + "]",
    "hexadecimal not in the language": "Z[i] = (B[i], 0x" + "7" * 100_000 + ")",
    "decimal extent": "Z[i:" + "7" * 4000 + "] = 1",
    "null byte": "Z[i] = B[i]\0",
    "null byte in a comment": "Z[i] = B[i] # \0",
    "lone surrogate": "Z[i] = B[i] + \ud800",
    "carriage return": "Z[i] = B[i]\rX[i] = y",
    "form feed": "Z[i] = B[i]\fX[i] = y",
    "line separator": "Z[i] = B[i]\u2028X[i] = y",
    "tower": "Z[i] = B[i] * 10**10**10",
    "tower of nines": "Z[i] = B[i] * 9**9**9**9",
    "tower in an extent": "Z[i:9**9**9**9] = 1",
    "system call": "Z[i] = __import__('os').system('x')",
    "subclasses": "Z[i] = ().__class__.__bases__[0].__subclasses__()",
    "long line": "Z[i] = B[i]" + " " * 1_000_000 + "* y",
    "long name": "Z[i] = B[i] * " + "y" * 100_000,
    "long unknown function": "Z[i] = " + "y" * 100_000 + "(B[i])",
    "many lines": "\n" * 100_000 + "Z[i] = y",
    "many arguments": "Z[i] = where(" + ",".join("1" * 10_000) + ")",
    "many labels": "Z[i] = B[" + ",".join("j" * 10_000) + "]",
    "many targets": "Z[" + ",".join("i" * 3000) + "] = 1",
    "huge string": "Z[i] = '" + "x" * 1_000_000 + "'",
    "walrus": "Z[i] = [y := 1, y**2]",
}


@pytest.mark.sampled(19)
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text(text: str) -> None:
    messages: list[str] = []
    calls = calls_of(lambda: messages.append(error(text)))
    assert calls < 10_000 + 100 * len(text)
    assert len(messages[0]) < 1000  # a line that a terminal can show


def test_nested_chains_of_comparisons_do_not_double() -> None:
    """a < b < c reads b twice: inside one another that must not grow as a power of two."""
    text = "Z[i] = " + "0 < (" * 16 + "B[i]" + ") < 1" * 16
    calls = calls_of(lambda: build_graphs(Source("p", text), INPUTS))
    assert calls < 2**17  # 44,000 were counted


def test_depth_allowed() -> None:
    too_deep = f"nested too deeply; {DEPTH}"
    build_graphs(Source("p", "Z[i] = " + "exp(" * 150 + "B[i]" + ")" * 150), INPUTS)
    assert error("Z[i] = " + "-" * 250 + "B[i]") == f"p:1:1: this expression is {too_deep}"
    assert error("X = 1\n  Z[i] = " + "-" * 250 + "B[i]") == f"p:2:3: this expression is {too_deep}"
    assert error("X = 1\n  Z[i] = " + "-" * DEEP + "B[i]").startswith("p:2:")


def test_deep_expression_in_a_message() -> None:
    """Messages quote what they refuse: quoting must not recurse too deeply, nor be long."""
    deep = "exp(" * 190 + "B[i]" + ")" * 190
    for text in (
        f"Z[i] = {deep} or 1",
        f"Z[i] = B[{deep}]",
        f"Z[i] = B[i, {deep}]",
        f"Z[{deep}] = 1",
        f"Z[i] = y[{deep}](1)",
    ):
        assert len(error(text)) < 1000


def test_too_many_digits_do_not_advise_on_python() -> None:
    message = error("X = 1\nZ[i] = B[i] * " + "7" * 5000)
    assert message.startswith("p:2:")
    assert "sys." not in message


# ---- numpy.einsum's grammar ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (),
            (
                "einsum: there are no subscripts; expected einsum('ij,jk->ik', a, b) or einsum(a,"
                " [0, 1], b, [1, 2], [0, 2])"
            ),
        ),
        (
            ("ij", (2,)),
            (
                "einsum: 'ij' does not fit an array with 1 dimension; expected one label for each"
                " dimension, or ..."
            ),
        ),
        (
            ("i", (2, 2)),
            (
                "einsum: 'i' does not fit an array with 2 dimensions; expected one label for each"
                " dimension, or ..."
            ),
        ),
        (("i,j", (2,)), "einsum: 'i,j' has 2 operands; expected 1, one for each array"),
        (
            ("i->j", (2,)),
            "einsum: the output 'j' is wrong at 'j'; expected labels of the operands, each once",
        ),
        (
            ("ij->ii", (2, 3)),
            "einsum: the output 'ii' is wrong at 'i'; expected labels of the operands, each once",
        ),
        (
            ("i,i", (2,), (3,)),
            "einsum: label 'i' has two extents: 2 and 3; expected the same extent, or 1",
        ),
        (
            ("ii->i", (1, 3)),
            "einsum: label 'i' has two extents: 1 and 3; "
            "expected the same extent within an operand",
        ),
        (
            ("i.j", (2, 2, 2)),
            "einsum: '.' in 'i.j' is not a label; expected letters, and ... at most once",
        ),
        (
            ("i1", (2, 2)),
            "einsum: '1' in 'i1' is not a label; expected letters, and ... at most once",
        ),
        (
            ("i...j...", (2, 2)),
            "einsum: '.' in 'i...j...' is not a label; expected letters, and ... at most once",
        ),
        (
            ("i->j->k", (2,)),
            "einsum: '-' in 'j->k' is not a label; expected letters, and ... at most once",
        ),
        (
            ("...i->i", (2, 3)),
            (
                "einsum: the output 'i' has no ...; expected ... in the output, because an operand"
                " has it"
            ),
        ),
        (((2, 3), [0, 52]), "einsum: 52 is not a label; expected a number from 0 to 51, or ..."),
        (((2, 3), [0, "i"]), "einsum: 'i' is not a label; expected a number from 0 to 51, or ..."),
    ],
    ids=str,
)
def test_einsum(arguments: tuple, message: str) -> None:
    given = [np.ones(entry) if isinstance(entry, tuple) else entry for entry in arguments]
    with pytest.raises(InputError) as caught:
        text, operands = split_arguments(given)
        program = program_text(text, [(array.shape, "float64") for array in operands], "float64")
        build_graphs(
            Source("einsum", program),
            declared({f"x{k}": operand for k, operand in enumerate(operands)}),
        )
    assert str(caught.value) == message
