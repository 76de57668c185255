"""The import rule: a room imports only from itself and rooms above it; the package stays light."""

import ast
import runpy
import subprocess
import sys
from functools import cache

import pytest
from paths import ROOT

import einmpi

PACKAGE = ROOT / "einmpi"
MODULES = sorted(PACKAGE.rglob("*.py"))
# The rooms in order, from the table in docs/architecture.md. Rooms in one row know nothing of each
# other. A room inside a room is named by its path; "kernels" means the modules directly in it.
ROOMS = runpy.run_path(str(ROOT / "docs" / "make_modules.py"), run_name="docs")["rooms"]()
POSITION = {room: number for number, row in enumerate(ROOMS) for room in row}
# Rooms that get all they need from the steps of a schedule, and know no plan.
WITHOUT_PLANS = (
    "kernels",
    "kernels/cpu",
    "kernels/cuda",
    "process",
    "comm",
    "runtime",
    "runtime/gpu",
    "files",
)
# Rooms that say what and how, and do nothing.
PURE = ("errors", "graph", "language", "training", "planner", "schedule")
EFFECTS = {"h5py", "mpi4py", "cupy", "numba", "safetensors", "subprocess"}
# Packages that few modules may import.
ONLY = {
    "mpi4py": {"comm/mpi_library.py"},
    "cupy": {"kernels/cuda/driver.py"},
    "h5py": {
        "files/hdf5/datasets.py",
        "files/hdf5/opening.py",
        "files/hdf5/sparse_groups.py",
        "files/hdf5/writing.py",
    },
}
HEAVY = (
    "mpi4py",
    "cupy",
    "h5py",
    "numba",
    "scipy",
    "matplotlib",
    "rich",
    "opt_einsum",
    "safetensors",
)


def name_of(path):
    return str(path.relative_to(PACKAGE))


def room_of(parts):
    """The innermost room that holds the module with these parts of a path or of a dotted name."""
    names = ["/".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((name for name in names if name in POSITION), "__init__")


def room_of_file(path):
    return room_of(path.relative_to(PACKAGE).with_suffix("").parts)


@cache
def imported(path):
    """(line, full name) of everything a module imports, also inside functions and `if` blocks."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(), path.name)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            # `from einmpi import api` imports a module, `from einmpi.api import load` a name.
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def test_every_module_is_in_a_room():
    assert len(MODULES) > 100 and len(ROOMS) > 15
    for path in MODULES:
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        assert parts == ("__init__",) or room_of(parts) != "__init__", (
            f"{name_of(path)}: add its room to docs/architecture.md"
        )


@pytest.mark.sampled(112)
@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_rooms(path):
    own = room_of_file(path)
    for line, name in imported(path):
        parts = name.split(".")
        if parts[0] != "einmpi":
            continue
        target = room_of(parts[1:])
        allowed = target == own or POSITION[target] < POSITION[own]
        assert allowed, (
            f"{name_of(path)}:{line}: {own} may not import {name}; expected a room above it"
        )


@pytest.mark.parametrize(
    "path", [path for path in MODULES if room_of_file(path) in WITHOUT_PLANS], ids=name_of
)
def test_what_runs_knows_no_plan(path):
    assert not [name for _, name in imported(path) if name.startswith("einmpi.planner")]


@pytest.mark.parametrize("package", ONLY)
def test_few_modules_import(package):
    users = {
        name_of(path)
        for path in MODULES
        for _, name in imported(path)
        if name.split(".")[0] == package
    }
    assert users == ONLY[package]


@pytest.mark.parametrize(
    "path", [path for path in MODULES if room_of_file(path) in PURE], ids=name_of
)
def test_pure_rooms_touch_nothing(path):
    assert not {name.split(".")[0] for _, name in imported(path)} & EFFECTS


def test_no_room_is_crowded():
    """At most about 20 modules side by side, and no folder with more than a fifth of the code."""
    folders, lines = {}, {}
    for path in MODULES:
        folder = path.parent
        folders[folder] = folders.get(folder, 0) + 1
        lines[folder] = lines.get(folder, 0) + len(path.read_text().splitlines())
    whole = sum(lines.values())
    for folder, count in folders.items():
        assert count <= 21, f"{name_of(folder)} has {count} modules"
        assert lines[folder] <= whole / 5, f"{name_of(folder)} has {lines[folder]} of {whole} lines"


def test_a_room_can_be_imported_by_name():
    code = (
        "import einmpi.planner.mesh as m, einmpi; print(m.Mesh(8).factors, callable(einmpi.plan))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "(2, 2, 2) True\n"


@pytest.mark.parametrize(
    "statement, heavy",
    [("import einmpi", {*HEAVY, "numpy"}), ("import einmpi.cli.main", set(HEAVY))],
)
def test_import_is_light(statement, heavy):
    code = f"{statement}, sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "einmpi" in done.stdout.split()
    assert not set(done.stdout.split()) & heavy


def test_models_are_imported_by_their_users_only():
    code = "import einmpi.cli.main, sys; print('einmpi.models' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_public_names_are_loaded_when_they_are_used():
    code = "import einmpi; print(all(name in dir(einmpi) for name in einmpi.__all__));"
    code += "from einmpi import *; print(load is einmpi.api.load, Job is einmpi.job.job.Job)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\nTrue True\n"
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        einmpi.lode  # noqa: B018
