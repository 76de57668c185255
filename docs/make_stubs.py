"""Write the stubs of einmpi.array_api and methods.py, for type checkers: python docs/make_stubs.py

They have the signature and the documentation of every public function. Most functions come from a
table, so the stubs are also where a change of a signature shows: a test compares.
"""

import inspect
import re
from pathlib import Path

import einmpi.array_api as xp
from einmpi.array_api import fft, linalg
from einmpi.arrays import methods

PACKAGE = Path(__file__).resolve().parent.parent / "einmpi"
FOLDER = PACKAGE / "array_api"
COMMENT = "# python docs/make_stubs.py writes this file: change the functions instead.\n"
AXIS = "Axis: TypeAlias = int | tuple[int, ...] | None\n"
# What the annotations of a namespace need.
IMPORTS = """
from collections.abc import Sequence
from typing import Any

from einmpi.arrays.dist_array import DistArray

"""
NAMESPACE_IMPORTS = """
import builtins
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from einmpi.array_api import fft as fft
from einmpi.array_api import linalg as linalg
from einmpi.array_api.functions import FloatInfo, IntegerInfo, NamespaceInfo
from einmpi.arrays.dist_array import DistArray
from einmpi.arrays.statistics import UniqueAll, UniqueCounts, UniqueInverse

"""
METHODS_IMPORTS = """
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from einmpi.arrays.dist_array import DistArray

"""
METHODS_NAMES = """Row: TypeAlias = tuple[Callable[..., Any], str, str]

METHODS: dict[str, Row]

"""
LINE_LENGTH = 100


def stubs():
    """Return the text of each stub by its file."""
    with_axis = IMPORTS.replace("import Any", "import Any, TypeAlias") + AXIS + "\n"
    return {
        FOLDER / "__init__.pyi": _stub(xp, NAMESPACE_IMPORTS + AXIS, "builtins.bool"),
        FOLDER / "linalg.pyi": _stub(linalg, with_axis, "bool"),
        FOLDER / "fft.pyi": _stub(fft, IMPORTS, "bool"),
        PACKAGE / "arrays" / "methods.pyi": _stub_of_methods(),
    }


def _stub_of_methods():
    """Return the stub of the class whose methods are made of a table."""
    texts = [COMMENT, METHODS_IMPORTS, AXIS, METHODS_NAMES]
    texts.append(_definition("make_functions", methods.make_functions, "bool"))
    texts.append(f'\nclass ArrayMethods:\n    """{methods.ArrayMethods.__doc__}"""\n')
    for name in methods.METHODS:
        method = _definition(name, getattr(methods.ArrayMethods, name), "bool", LINE_LENGTH - 4)
        texts.append("\n" + re.sub("^(?=.)", "    ", method, flags=re.MULTILINE))
    return "".join(texts)


def _stub(module, imports, bool_type):
    """Return the stub of a namespace; `bool_type` is what it calls the type bool."""
    values, functions = [], []
    for name in sorted(module.__all__):
        value = getattr(module, name)
        if inspect.isfunction(value):
            functions.append(_definition(name, value, bool_type))
        elif not inspect.ismodule(value):
            values.append(f"{name}: {_type_of(value)}\n")
    return COMMENT + imports + "".join([*values, "\n" * bool(values)]) + "\n".join(functions)


def _type_of(value):
    if value is None:
        return "None"
    return "np.dtype[Any]" if hasattr(value, "itemsize") else type(value).__name__


def _definition(name, function, bool_type, line_length=LINE_LENGTH):
    """Return a function without its body, in the lines that ruff would make of it."""
    signature = inspect.signature(function)
    parameters = [_with_type(text, bool_type) for text in _parameters(signature)]
    returned = _with_type(signature.return_annotation, bool_type)
    line = f"def {name}({', '.join(parameters)}) -> {returned}:"
    if len(line) > line_length:
        inner = f"    {', '.join(parameters)}"
        if len(inner) > line_length:
            inner = "\n".join(f"    {parameter}," for parameter in parameters)
        line = f"def {name}(\n{inner}\n) -> {returned}:"
    return f'{line}\n    """{function.__doc__}"""\n'


def _with_type(text, bool_type):
    return re.sub(r"\b(builtins\.)?bool\b", bool_type, text)


def _parameters(signature):
    """Return the parameters as text, with the / and the * between their kinds."""
    texts = []
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    for number, parameter in enumerate(signature.parameters.values()):
        kind = parameter.kind
        if kind is kind.KEYWORD_ONLY and not {kind, kind.VAR_POSITIONAL} & set(kinds[:number]):
            texts.append("*")
        star = "*" if kind is kind.VAR_POSITIONAL else ""
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        annotation = "" if parameter.name == "self" else f": {parameter.annotation}"
        texts.append(f"{star}{parameter.name}{annotation}{default}")
        if kind is kind.POSITIONAL_ONLY and kind not in kinds[number + 1 :]:
            texts.append("/")
    return [text.replace("'", '"') for text in texts]


if __name__ == "__main__":
    for file, text in stubs().items():
        file.write_text(text)
