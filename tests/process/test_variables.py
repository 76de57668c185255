"""The table of environment variables has all that users set, and none that nobody reads."""

import ast

from paths import ROOT

from einmpi.process import environment as variables
from einmpi.process.environment import INTERNAL_VARIABLES, VARIABLES

LISTED = [name for variable in VARIABLES for name in variable.names]
# Variables of libraries that read them themselves.
READ_BY_LIBRARIES = ("TMPDIR", "HDF5_USE_FILE_LOCKING")


def texts(path):
    """Return the strings of a module, without its docstrings."""
    tree = ast.parse(path.read_text())
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.add(id(node.value))
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in docstrings:
            yield node.value


def test_variables_of_einmpi_are_named_in_one_module():
    for path in (ROOT / "einmpi").rglob("*.py"):
        for text in texts(path):
            is_table = path.name == "environment.py"
            assert is_table or "EINMPI_" not in text, f"{path}: {text}"


def test_every_variable_of_einmpi_is_listed_or_internal():
    own = [text for text in texts(ROOT / "einmpi/process/environment.py") if "EINMPI_" in text]
    listed = [name for name in LISTED if name.startswith("EINMPI_")]
    assert sorted(own) == sorted([*listed, *INTERNAL_VARIABLES])
    assert len(LISTED) == len(set(LISTED))


def test_every_listed_variable_is_read():
    code = ""
    for path in (ROOT / "einmpi").rglob("*.py"):
        if path.name != "variables.py":
            code += path.read_text()
    readers = {name: f'"{name}"' for name in LISTED}
    for constant, value in vars(variables).items():
        if isinstance(value, str) and value in readers:
            readers[value] = constant
    readers.update(dict.fromkeys(variables.THREAD_VARIABLES, "THREAD_VARIABLES"))
    readers[variables.DEBUG_VARIABLE] = "is_debugging()"
    for name in LISTED:
        assert name in READ_BY_LIBRARIES or readers[name] in code, name
