"""The import rule: a module imports only from its own layer or from layers left of it, and the package stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted((ROOT / "einmpi").rglob("*.py"))
# From left to right; a layer is a folder or a module of einmpi.
LAYERS = (("errors", "units", "version"), ("graph",), ("models",), ("plan",), ("schedule",), ("runtime",), ("report",),
          ("compiled", "checkpointed"), ("api",), ("launch", "launch_output", "process", "versions"),
          ("doctor", "completion", "help", "flag_files", "job_options", "commands", "sbatch"), ("calibrate",),
          ("cli",), ("__main__",))  # fmt: skip
# `import einmpi` itself gives what api gives.
POSITION = {"__init__": 8, **{name: k for k, names in enumerate(LAYERS) for name in names}}
# Packages that few modules may import.
ONLY = {"mpi4py": {"einmpi/runtime/comm_mpi.py"}, "cupy": {"einmpi/runtime/gpus.py"},
        "h5py": {"einmpi/runtime/hdf5.py", "einmpi/runtime/hdf5_writing.py"}}  # fmt: skip
HEAVY = ("mpi4py", "cupy", "h5py", "numba", "scipy", "matplotlib", "rich", "opt_einsum", "safetensors", "ml_dtypes")


def layer(path):
    """The name in LAYERS that a file belongs to."""
    return path.relative_to(ROOT / "einmpi").parts[0].removesuffix(".py")


def imported(path):
    """(line, full name) of everything a module imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(), path.name)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            # `from einmpi import api` imports a module, `from einmpi.api import load` a name of one.
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def test_modules_are_found():
    assert len(MODULES) > 20
    for path in MODULES:
        assert layer(path) in POSITION, f"{path.relative_to(ROOT)} is in no layer: add it to LAYERS in this file"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_layers(path):
    for line, name in imported(path):
        parts = name.split(".")
        if parts[0] != "einmpi":
            continue
        target = parts[1] if len(parts) > 1 and parts[1] in POSITION else "__init__"
        assert POSITION[target] <= POSITION[layer(path)], (
            f"{path.relative_to(ROOT)}:{line}: {layer(path)} may not import {name}; its own layer and those left of it"
        )


@pytest.mark.parametrize("package", ONLY)
def test_few_modules_import(package):
    users = {str(path.relative_to(ROOT)) for path in MODULES for _, name in imported(path)
             if name.split(".")[0] == package}  # fmt: skip
    assert users == ONLY[package]


def test_graph_uses_no_files_of_tensors_and_no_processes():
    """graph and plan say what and how, they do not do it."""
    for path in MODULES:
        if layer(path) in ("errors", "graph", "models", "plan"):
            used = {name.split(".")[0] for _, name in imported(path)}
            assert not used & {"h5py", "mpi4py", "cupy", "numba", "safetensors", "subprocess"}, path.name


@pytest.mark.parametrize("statement", ["import einmpi", "import einmpi.cli"])
def test_import_is_light(statement):
    code = f"{statement}, sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "einmpi" in done.stdout.split()
    assert not set(done.stdout.split()) & set(HEAVY)
