"""The recipes in docs/packaging: their syntax, and that they need what the package needs."""

import ast
import configparser
import os
import re
import subprocess
import sys
import tomllib

import pytest
import yaml
from mpi_helpers import ROOT

import einmpi

FOLDER = ROOT / "docs/packaging"


@pytest.fixture(scope="module")
def package():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def least(text, separator):
    """Return {name: least version} of lines such as numpy>=2.1."""
    found = {}
    for line in text:
        name, _, version = line.partition(separator)
        assert name.strip() not in found and re.fullmatch(r"[\d.]+", version), line
        found[name.strip()] = version
    return found


@pytest.fixture(scope="module")
def needs(package):
    found = least(package["options"]["install_requires"].split(), ">=")
    return found | least([f"python{package['options']['python_requires']}"], ">=")


@pytest.fixture(scope="module")
def build_needs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return least(project["build-system"]["requires"], ">=")


def test_all_recipes_are_checked_and_named_on_the_page():
    names = {path.name for path in FOLDER.iterdir()}
    assert names == {"recipe.yaml", "package.py", "einmpi.def", "Containerfile"}
    page = (ROOT / "docs/install.md").read_text()
    assert all(f"(packaging/{name})" in page for name in names)


# ---- conda-forge ---------------------------------------------------------------------------------


def recipe():
    """Return the recipe with the values of its context, as rattler-build renders it."""
    text = (FOLDER / "recipe.yaml").read_text()
    context = {**yaml.safe_load(text)["context"], "PYTHON": "python"}
    for name, value in context.items():
        text = text.replace(f"${{{{ {name} }}}}", value)
    assert "${{" not in text
    return yaml.safe_load(text)


def test_conda(package, needs, build_needs):
    found = recipe()
    assert found.pop("context") and found["schema_version"] == 1
    assert set(found) == {
        "schema_version",
        "package",
        "source",
        "build",
        "requirements",
        "tests",
        "about",
    }
    assert found["package"] == {"name": "einmpi", "version": einmpi.__version__}
    assert (FOLDER / found["source"]["path"]).resolve() == ROOT
    entry = package["options.entry_points"]["console_scripts"].strip()
    assert found["build"]["python"]["entry_points"] == [entry]
    assert least(found["requirements"]["run"], " >=") == needs
    host = found["requirements"]["host"]
    assert host[:2] == [f"python {needs['python']}.*", "pip"]
    assert least(host[2:], " >=") == build_needs
    assert found["about"]["license"] == package["metadata"]["license_expression"]
    assert (ROOT / found["about"]["license_file"]).exists()


# ---- Spack ---------------------------------------------------------------------------------------


def test_spack(package, needs, build_needs):
    tree = ast.parse((FOLDER / "package.py").read_text())
    (made,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert made.name == "PyEinmpi" and [base.id for base in made.bases] == ["PythonPackage"]
    assert ast.get_docstring(made)
    calls = [node for node in ast.walk(made) if isinstance(node, ast.Call)]
    assert {call.func.id for call in calls} == {
        "license",
        "version",
        "variant",
        "depends_on",
        "default_args",
    }
    always, optional = [], []
    for call in calls:
        first = ast.literal_eval(call.args[0]) if call.args else None
        words = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
        if call.func.id == "license":
            assert first == package["metadata"]["license_expression"]
        if call.func.id == "depends_on":
            name, _, version = first.removesuffix(":").partition("@")
            line = f"{name.removeprefix('py-').replace('-', '_')}@{version}"
            assert first.endswith(":")
            (optional if "when" in words else always).append(line)
    assert least(always, "@") == needs | build_needs
    cupy = package["options.extras_require"]["cuda12"].rpartition(">=")[2]
    assert optional == [f"cupy@{cupy}"]


# ---- containers ----------------------------------------------------------------------------------

SECTIONS = ("files", "post", "environment", "runscript", "test", "help")


def sections():
    """Return the header and the sections of the definition, as Apptainer reads them."""
    found = {"": []}
    name = ""
    for line in (FOLDER / "einmpi.def").read_text().splitlines():
        matched = re.fullmatch(r"%(\w+)", line)
        if matched:
            name = matched[1]
            assert name in SECTIONS and name not in found
            found[name] = []
        else:
            assert not line or not name or line.startswith("    "), line
            found[name].append(line)
    return {name: "\n".join(lines) for name, lines in found.items()}


def check_base(image, package):
    version = re.fullmatch(r"python:(\d+\.\d+)-slim", image)[1]
    assert f"Programming Language :: Python :: {version}" in package["metadata"]["classifiers"]


def check_extras(text, package):
    extras = re.findall(r"/opt/einmpi\[(\w+)\]", text)
    assert extras and all(extra in package["options.extras_require"] for extra in extras)


def test_apptainer(package):
    found = sections()
    header = [line for line in found[""].splitlines() if line and not line.startswith("#")]
    keys = dict(line.split(": ") for line in header)
    assert keys.pop("Bootstrap") == "docker"
    check_base(keys.pop("From"), package)
    assert not keys
    for name in ("post", "environment", "runscript", "test"):
        assert subprocess.run(["sh", "-n", "-c", found[name]]).returncode == 0
    check_extras(found["post"], package)


def test_the_image_for_kubernetes(package):
    text = (FOLDER / "Containerfile").read_text().replace("\\\n", "")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    steps = [line.split(maxsplit=1) for line in lines]
    assert [name for name, _ in steps] == ["FROM", "RUN", "RUN", "COPY", "RUN"]
    check_base(steps[0][1], package)
    for name, command in steps:
        if name == "RUN":
            assert subprocess.run(["sh", "-n", "-c", command]).returncode == 0
    check_extras(text, package)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["apptainer", "conda"])
def test_what_a_package_does_to_test_itself(which, tmp_path):
    commands = sections()["test"]
    if which == "conda":
        (script,) = [test["script"] for test in recipe()["tests"] if "script" in test]
        commands = "\n".join(script)
    assert "jobs/chain.toml" in commands
    place = os.path.dirname(sys.executable)
    variables = {"PATH": f"{place}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        ["sh", "-ec", commands],
        cwd=tmp_path,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert einmpi.__version__ in done.stdout
