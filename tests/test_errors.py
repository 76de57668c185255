"""Exceptions travel: they are pickled and copied with all that they say."""

import ast
import builtins
import copy
import importlib
import inspect
import pickle

import pytest
from paths import ROOT

from einmpi.errors import InputError, failure


def exceptions():
    """All exception classes of the package, found in its source so that little is imported."""
    bases_of = {}
    for path in sorted((ROOT / "einmpi").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                bases_of[module, node.name] = [ast.unparse(base) for base in node.bases]
    known = {name for name, value in vars(builtins).items() if is_exception(value)}
    found = []
    while new := [key for key, bases in bases_of.items() if key not in found and known & {*bases}]:
        found += new
        known |= {name for _, name in new}
    return found


def is_exception(value):
    return isinstance(value, type) and issubclass(value, BaseException)


def made(kind):
    """An exception of a class, with a value for each argument."""
    if kind.__init__ in (Exception.__init__, OSError.__init__):
        return kind("what is wrong")
    parameters = [*inspect.signature(kind).parameters.values()]
    return kind(*(7 if item.annotation == "int" else f"the {item.name}" for item in parameters))


EXCEPTIONS = exceptions()


def test_the_search_finds_them():
    names = {name for _, name in EXCEPTIONS}
    assert {"InputError", "TooLittleMemory", "ReplayEnded", "NotPublished", "_Stopped"} <= names


@pytest.mark.parametrize("module, name", EXCEPTIONS)
def test_pickles_and_copies(module, name):
    error = made(getattr(importlib.import_module(module), name))
    error.everywhere = True
    error.add_note("a note")
    again = [pickle.loads(pickle.dumps(error, protocol)) for protocol in range(2, 6)]
    for other in [*again, copy.copy(error), copy.deepcopy(error)]:
        assert type(other) is type(error) and str(other) == str(error)
        assert other.args == error.args and vars(other) == vars(error)


def test_the_message_of_another_rank():
    text = "job.toml: " + "x" * 400 + "; expected " + "y" * 400
    error = failure(text, InputError.status)
    other = pickle.loads(pickle.dumps(error))
    assert str(other) == text and other.where == "job.toml" and other.everywhere
