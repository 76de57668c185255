"""README.md, docs/*.md and errors_*.md are true: every fenced block is run or checked.

A page is run from top to bottom in a temporary folder with a copy of jobs/. The kinds of blocks:

    ```python    is run; a page has one namespace; after `<!-- file: NAME -->` it is saved as NAME
                 instead, for console blocks
    ```einmpi    is a program: parsed and evaluated with the inputs and sizes of the last
                 `<!-- given: KEYWORDS -->`
    ```toml      is a job file: read and evaluated, outputs included; `<!-- file: NAME -->` saves it
                 as NAME, `<!-- toml … -->` is hidden text at the start of the file
    ```text      directly after a block: what the python block prints, or the graph of the einmpi
                 block
    ```console   `$ command` lines, each followed by its output, standard error included; einmpi
                 alone, or before a filter, runs in this process; commands that start ranks need
                 mpirun, and einmpi simulate needs SimGrid
    ```errors    programs, each followed by its message, with a blank line between them
    ```job-errors  the same for job files, saved as job.toml
    ```pycon     a Python session: `>>> ` lines, each followed by its output
    ```ebnf      a grammar: every name that is used is defined
    ```sh        README's set-up commands: not run here, but checked

`<!-- python … -->` is a hidden python block. In outputs, … stands for any text; seconds, threads
and rounding errors are not compared.
"""

import ast
import contextlib
import doctest
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from configparser import ConfigParser
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from in_process import einmpi_here
from mpi_helpers import MPIRUN, OMPI_SETTINGS
from paths import ROOT

import einmpi
from einmpi.cli.options import options_of
from einmpi.comm.base import ALONE
from einmpi.compiled.outputs import check_targets, claim_outputs, store
from einmpi.errors import InputError
from einmpi.files.formats import all_formats
from einmpi.files.specs import COMPRESSIONS
from einmpi.job.inputs import RANDOM
from einmpi.language.macros import CONSTANTS
from einmpi.planner.text.explain import as_json

PAGES = {path.name: path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))}
# The errors that no page for users shows, each under what causes it.
CATALOGUES = {path.name: path for path in sorted((ROOT / "tests" / "docs").glob("errors_*.md"))}
MARKDOWN = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
ELSEWHERE = "compared in a test of its own"
STARTS_RANKS = re.compile(
    r"\bmpirun\b|\beinmpi (run|verify|calibrate|llama) .*-n |\beinmpi doctor( \||$)"
)
ALONE_HERE = re.compile(r"einmpi( [\w ./=:,'-]+)?")  # without anything that needs a shell
SHOWS_STATUS = '; echo "status $?"'
KINDS = (
    "python",
    "pycon",
    "einmpi",
    "toml",
    "text",
    "console",
    "errors",
    "job-errors",
    "ebnf",
    "sh",
)


# ---- reading a page ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fenced block, or a comment, whose kind is "<!--"."""

    kind: str
    text: str
    line: int
    follows: bool  # only blank lines are between it and the block before


def blocks(path):
    """Return the fenced blocks and the comments of a page, in order."""
    lines = path.read_text().split("\n")
    found = []
    follows = False
    k = 0
    while k < len(lines):
        line = lines[k]
        start = k + 1
        if line.startswith("```"):
            body = []
            while lines[k + 1] != "```":
                k += 1
                body.append(lines[k])
            k += 1
            found.append(Block(line[3:].strip(), "\n".join(body), start, follows))
            follows = True
        elif line.startswith("<!--"):
            body = [line.removeprefix("<!--")]
            while "-->" not in lines[k]:
                k += 1
                body.append(lines[k])
            text = "\n".join(body).replace("-->", "").strip()
            found.append(Block("<!--", text, start, follows))
            follows = False
        elif line.strip():
            follows = False
        k += 1
    return found


def test_blocks_are_all_of_a_known_kind():
    for path in (*PAGES.values(), *CATALOGUES.values()):
        for block in blocks(path):
            assert block.kind in (*KINDS, "<!--"), (
                f"{path.name}:{block.line}: unknown kind of block {block.kind!r}"
            )


# ---- running a page ------------------------------------------------------------------------------


class Page:
    """Runs the blocks of a page one after another in a folder."""

    def __init__(self, path, folder):
        self.path = path
        self.folder = folder
        self.namespace = {"__name__": "page"}
        self.given = {}  # inputs and sizes of programs
        self.hidden = ""  # text at the start of the next job file
        self.file = ""  # what the next block is saved as
        self.printed = None  # what the next text block must equal
        shutil.copytree(ROOT / "jobs", folder / "jobs")

    def run(self, skip=()):
        for block in blocks(self.path):
            here = f"{self.path.name}:{block.line}"
            if block.kind == "text":
                if self.printed is not ELSEWHERE:
                    assert block.follows and self.printed is not None, (
                        f"{here}: nothing prints this text"
                    )
                    assert_shown(block.text, self.printed, here)
                self.printed = None
            elif block.kind == "<!--":
                self.comment(block.text)
            else:
                self.printed = None
                if block.kind not in skip:
                    getattr(self, "run_" + block.kind.replace("-", "_"))(block.text, here)

    def comment(self, text):
        word, _, rest = text.partition("\n")
        key, _, value = text.partition(": ")
        if word == "python":
            self.file = ""
            self.run_python(rest, self.path.name)
        elif word == "toml":
            self.hidden = rest + "\n"
        elif key == "given":
            self.given = eval(f"dict({value})", {"np": np})
        elif key == "file":
            self.file = value
        elif key == "output of":
            self.printed = ELSEWHERE

    def run_python(self, text, here):
        if self.file:
            (self.folder / self.file).write_text(text + "\n")
            self.file = ""
            return
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(text, here, "exec"), self.namespace)
        self.printed = printed.getvalue()

    def run_pycon(self, text, here):
        names = {"np": np, "einmpi": einmpi, **self.namespace}
        session = doctest.DocTestParser().get_doctest(text + "\n", names, here, str(self.path), 0)
        report = []
        doctest.DocTestRunner(verbose=False).run(session, out=report.append)
        assert session.examples and not report, "".join(report)

    def run_einmpi(self, text, here):
        job = einmpi.program(text, **self.given)
        arrays = {
            vertex.name: sample(vertex, self.given[vertex.name]) for vertex in job.graph.inputs
        }
        einmpi.reference(job, arrays)
        self.printed = str(job.graph)

    def run_toml(self, text, here):
        path = self.folder / (self.file or "job.toml")
        path.write_text(self.hidden + text + "\n")
        self.hidden = self.file = ""
        run_and_store(einmpi.load(path))

    def run_console(self, text, here):
        environment = shell_environment(self.folder)
        for command, shown in commands(text):
            if STARTS_RANKS.search(command) and not MPIRUN.exists():
                continue
            if command.startswith("einmpi simulate ") and shutil.which("smpirun") is None:
                continue
            printed = self.printed_here(command, environment)
            if printed is None:
                printed = shell(command, self.folder, environment)
            assert_shown(shown, printed, f"{here}: $ {command}")

    def printed_here(self, command, environment):
        """Return what a command prints that starts einmpi alone, which runs in this process.

        The shell gets the rest: `| filter`, or `; echo "status $?"`. None for other commands.
        """
        alone, shows_status, _ = command.partition(SHOWS_STATUS)
        alone, pipe, rest = alone.partition(" | ")
        if not ALONE_HERE.fullmatch(alone) or STARTS_RANKS.search(command):
            return None
        words = shlex.split(alone)[1:]
        if pipe:
            done = einmpi_here(self.folder, words)
            return done.stderr + shell(rest, self.folder, environment, done.stdout)
        done = einmpi_here(self.folder, words, together=True)
        if shows_status:
            return f"{done.stdout}status {done.returncode}\n"
        return done.stdout

    def run_errors(self, text, here):
        for program, message in examples(text):
            with pytest.raises(InputError) as caught:
                einmpi.program(program, **self.given)
            assert_shown(message, str(caught.value), f"{here}: {program}")

    def run_job_errors(self, text, here):
        for job, message in examples(text):
            Path("job.toml").write_text(job + "\n")
            with pytest.raises(InputError) as caught:
                run_and_store(einmpi.load("job.toml"))
            assert_shown(message, str(caught.value), f"{here}: {job}")

    def run_ebnf(self, text, here):
        rules = dict(re.findall(r"^(\w+)\s*= (.*?) ;$", text, re.MULTILINE))
        assert len(rules) == len(text.replace("\n\n", "\n").split("\n")), here
        used = set()
        for rule in rules.values():
            used.update(re.findall(r"\w+", re.sub(r'"[^"]*"', "", rule)))
        defined = {*rules, "NAME", "NUMBER", "ANYTHING"}
        assert used - defined == set() and set(rules) - used == {next(iter(rules))}, here

    def run_sh(self, text, here):
        """Set-up commands are checked by tests of their own."""


def sample(vertex, given):
    """Return values for an input: random floats, zero integers, so that gathers stay in range."""
    if hasattr(given, "dtype"):
        return given
    return np.random.default_rng(0).random(vertex.bound).astype(vertex.dtype)


def shell(command, folder, environment, given=None):
    """Return what a command prints, its errors included."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        text=True,
        input=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    return done.stdout


def commands(text):
    """Yield (command, output) of a console block."""
    assert text.startswith("$ ")
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown


def examples(text):
    """Yield (wrong text, its message). A blank line separates examples; the message is last."""
    for example in text.split("\n\n"):
        wrong, _, message = example.rpartition("\n")
        yield wrong, message


def run_and_store(job):
    """Do what the command line does, in this process."""
    check_targets(job)
    with claim_outputs(job, ALONE) as claimed:
        store(job, einmpi.plan(job, 1).digest, einmpi.run(job), claimed)


def shell_environment(folder):
    """Return an environment whose einmpi, python and mpirun are those under test."""
    tools = folder / ".bin"
    tools.mkdir(exist_ok=True)
    # Open MPI refuses more ranks than cores, and to run as root, as is usual in containers.
    options = " --oversubscribe --bind-to none" if MPIRUN.with_name("ompi_info").exists() else ""
    for name, command in (
        ("einmpi", f'"{sys.executable}" -m einmpi'),
        ("python", f'"{sys.executable}"'),
        ("mpirun", f'"{MPIRUN}"{options}'),
    ):
        script = tools / name
        script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        script.chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if key != "EINMPI_DEBUG"}
    return {
        **kept,
        **OMPI_SETTINGS,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }


VARYING = {
    r"\b\d+\.\d\d s\b": "0.00 s",
    r"\b(plan|load|run|checkpoint|store) \d+\.\d\d\b": r"\1 0.00",
    r"\b\d+ threads? a rank \(.*?\)": "1 thread a rank (reason)",
    r"\n  startup: .* s$": "",  # what was used for the first time
    r"\berror \d\.\de[-+]\d\d\b": "error 0.0e+00",
    r"^\S+: \d+% .* left\n": "",  # how far a run is, on a slow machine
}


def assert_shown(shown, printed, here):
    """Compare up to trailing blanks, values that vary from run to run, and … for any text."""

    def clean(text):
        text = "\n".join(line.rstrip() for line in text.strip("\n").split("\n"))
        for pattern, same in VARYING.items():
            text = re.sub(pattern, same, text, flags=re.MULTILINE)
        return text

    wanted, found = clean(shown), clean(printed)
    pattern = re.escape(wanted).replace("…", ".*")
    assert re.fullmatch(pattern, found), (
        f"{here}\n--- the page shows\n{wanted}\n--- this is printed\n{found}"
    )


# They start ranks many times. Their blocks that start none are mostly of the kinds that other pages
# have, too, and those with errors are run by test_every_error_has_an_example.
SLOW_PAGES = (
    "README.md",
    "checkpoint.md",
    "command_line.md",
    "errors_of_jobs.md",
    "errors_of_machines.md",
    "errors_of_models.md",
    "experiment2.md",
    "experiments.md",
    "failures.md",
    "howto_hdf5.md",
    "howto_machine.md",
    "howto_memory.md",
    "howto_python.md",
    "job_file.md",
    "llama.md",
    "loop_examples.md",
    "loops.md",
    "planner.md",
    "reading_a_plan.md",
    "scikit_learn.md",
    "training.md",
    "training_examples.md",
    "tutorial.md",
    "xarray.md",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW_PAGES else ())
        for name in (*PAGES, *CATALOGUES)
    ],
)
def test_page(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EINMPI_DEBUG", raising=False)
    Page({**PAGES, **CATALOGUES}[name], tmp_path).run()


# ---- every error has an example ------------------------------------------------------------------


def modules_of(*rooms):
    """Return the modules of some rooms, which must exist."""
    found = []
    for room in rooms:
        modules = sorted((ROOT / "einmpi" / room).glob("*.py"))
        assert modules, f"there is no room {room}"
        found += modules
    return found


# The modules that read what users write.
READERS = (
    *modules_of("graph", "language", "training", "job"),
    ROOT / "einmpi/files/hdf5/datasets.py",
    ROOT / "einmpi/files/hdf5/opening.py",
    ROOT / "einmpi/files/hdf5/writing.py",
    ROOT / "einmpi/files/zarr/arrays.py",
    ROOT / "einmpi/files/datasets.py",
    ROOT / "einmpi/files/contiguous.py",
    ROOT / "einmpi/files/formats.py",
    ROOT / "einmpi/files/reading.py",
    ROOT / "einmpi/files/writing.py",
    ROOT / "einmpi/arrays/dist_array.py",
    ROOT / "einmpi/arrays/record.py",
    ROOT / "einmpi/arrays/creation.py",
    *modules_of("api"),
    ROOT / "einmpi/models/config.py",
    ROOT / "einmpi/models/json_values.py",
    ROOT / "einmpi/compiled/program.py",
)
# Modules whose errors are shown in console blocks, which run in other processes.
COMMAND_LINE = (
    ROOT / "einmpi/cli/main.py",
    ROOT / "einmpi/cli/plan.py",
    ROOT / "einmpi/cli/job_options.py",
    ROOT / "einmpi/cli/new.py",
    ROOT / "einmpi/cli/help.py",
    ROOT / "einmpi/cli/sbatch.py",
    ROOT / "einmpi/cli/calibrate.py",
    ROOT / "einmpi/cli/doctor.py",
    ROOT / "einmpi/cli/llama.py",
    ROOT / "einmpi/units.py",
    *modules_of("planner", "simulate"),
    ROOT / "einmpi/models/programs.py",
    ROOT / "einmpi/models/llama.py",
    ROOT / "einmpi/models/sampling.py",
)
# Parts of errors that have no example on a page, and why.
NOT_SHOWN = {
    "no permission to read": "root may read everything",
    "no permission to write": "root may write everything",
    "belongs to another user": "needs the file of another user",
    "as planned": "needs a file that changes during a run",
    "leads to more than": "needs tens of thousands of files",
    "{error.strerror or error}": "needs a file that disappears while it is looked up",
    "was replaced during the run": "needs a file that changes during a run",
    "ends before its last value": "needs a file that changes during a run",
    "cannot be read: {error.strerror}": "needs a disk that fails",
    "set TMPDIR": "needs a full disk",
    "this file is too large": "needs a file of 16 MiB",
    "larger than 64 MiB": "needs a file of 64 MiB",
    "at most {MAX_STATEMENTS}": "needs a long program",
    "is loaded by rank": "needs several ranks",
    "('from_local', problem, expected)": "needs several ranks",
    "as on rank 0": "needs several ranks",
    "shapes_of_blocks: raise InputError": "needs several ranks",
    "to run for --steps": "needs a flag of the command line",
    "a cast around the expression": "needs dtypes that take turns from every start",
    "_read_index: raise InputError": "tests/files/test_safetensors_index.py has it",
    "'a .safetensors file'": "tests/files/test_safetensors_index.py has it",
}


def raise_sites(paths=READERS):
    """Yield (file, statement, text) of every `raise InputError(…)` in a function.

    `raise entry.wrong(…)` is one too, at the place of an entry of a job file.
    """
    for path in paths:
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                text = ast.unparse(node) if isinstance(node, ast.Raise) else ""
                if "InputError(" in text or ".wrong(" in text:
                    yield path, node, f"{function.name}: {ast.unparse(node)}"


def is_excused(text):
    return any(part in text for part in NOT_SHOWN)


def test_every_error_has_an_example(tmp_path, monkeypatch):
    seen = set()

    def record(self, where, what, expected="", hint="", made=InputError.__init__):
        for frame in (sys._getframe(1), sys._getframe(2)):  # the second calls `entry.wrong`
            seen.add((Path(frame.f_code.co_filename).resolve(), frame.f_lineno))
        made(self, where, what, expected, hint)

    monkeypatch.setattr(InputError, "__init__", record)
    pages = [PAGES[name] for name in ("language.md", "job_file.md", "gradients.md")]
    for path in (*pages, *CATALOGUES.values()):
        folder = tmp_path / path.name
        folder.mkdir()
        monkeypatch.chdir(folder)
        Page(path, folder).run(skip=["console"])
    missing = []
    for path, node, text in raise_sites():
        lines = range(node.lineno, node.end_lineno + 1)
        is_shown = any((path, line) in seen for line in lines)
        if not is_shown and not is_excused(text):
            missing.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text}")
    assert not missing, "there is no example of these errors:\n" + "\n".join(missing)


def test_every_error_of_the_command_line_has_an_example():
    pages = (
        "language.md",
        "job_file.md",
        "command_line.md",
        "checkpoint.md",
        "howto_machine.md",
        "llama.md",
        "simulate.md",
        "reading_a_plan.md",
        "loops.md",
    )
    paths = [*(PAGES[name] for name in pages), *CATALOGUES.values()]
    text = "\n".join(path.read_text() for path in paths)
    missing = []
    for path, node, message in raise_sites(COMMAND_LINE):
        is_shown = re.search(message_pattern(node.exc), text)
        if not is_shown and not is_excused(message):
            missing.append(f"{path.relative_to(ROOT)}:{node.lineno}: {message}")
    assert not missing, "there is no example of these errors:\n" + "\n".join(missing)


def message_pattern(call):
    """Return a pattern for the message of `InputError(where, what, expected, hint)`."""
    names = ("where", "what", "expected", "hint")
    is_at_entry = isinstance(call.func, ast.Attribute)  # entry.wrong(what, expected, hint)
    arguments = dict(zip(names[1:] if is_at_entry else names, call.args, strict=False))
    for keyword in call.keywords:
        arguments[keyword.arg] = keyword.value
    where = ".+" if is_at_entry else text_pattern(arguments["where"])
    pattern = f"{where}: {text_pattern(arguments['what'])}"
    if "expected" in arguments:
        pattern += f"; expected {text_pattern(arguments['expected'])}"
    if "hint" in arguments:
        pattern += f"; {text_pattern(arguments['hint'])}"
    return pattern


def text_pattern(node):
    """Return a pattern for the text that an expression makes: what is constant in it."""
    pattern = ""
    for part in node.values if isinstance(node, ast.JoinedStr) else [node]:
        pattern += re.escape(part.value) if isinstance(part, ast.Constant) else ".+"
    return pattern


# ---- lists and tables equal the code -------------------------------------------------------------


def table_after(name, heading):
    """Return the cells of the first table under a heading, without its head and code marks."""
    text = PAGES[name].read_text().split(f"\n{heading}\n", 1)[1]
    rows = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)[0].strip().split("\n")[2:]
    table = []
    for row in rows:
        cells = re.split(r"(?<!\\)\|", row)[1:-1]
        table.append([cell.replace("\\|", "|").replace("`", "").strip() for cell in cells])
    return table


def test_constants_equal_the_code():
    text = PAGES["language.md"].read_text()
    listed = re.search(r"4\. (.*)\.\n", text)[1]
    assert re.findall(r"`(\w+)`", listed) == list(CONSTANTS)


def allowed_keys(tmp_path, text):
    """Return the keys that the message about an unknown key lists."""
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        einmpi.load(path)
    assert "unknown" in str(caught.value)
    return str(caught.value).split("expected one of ")[1].split(", ")


@pytest.mark.parametrize(
    ("heading", "table"),
    [
        ("## The file", "nonsense = 1"),
        ("## Plan", "plan.nonsense = 1"),
        ("## Run", "run.nonsense = 1"),
        ("## Roles", "roles.nonsense = 1"),
        ("## Loop", "loop.nonsense = 1"),
        ("## Train", "loop.steps = 1\ntrain.nonsense = 1"),
        ("## Inputs", "inputs.X.nonsense = 1"),
        ("## Outputs", "outputs.Z.nonsense = 1"),
    ],
)
def test_keys_equal_the_code(heading, table, tmp_path):
    shown = {row[0] for row in table_after("job_file.md", heading)}
    assert sorted(shown) == sorted(allowed_keys(tmp_path, f'program = "Z[i] = X[i]"\n{table}\n'))


def test_values_equal_the_code(tmp_path):
    shown = [row[0] for row in table_after("job_file.md", "### Strategies")]
    assert shown == allowed_keys(tmp_path, 'program = "Z = 1"\nplan.strategy = "nonsense"\n')
    shown = [row[0] for row in table_after("job_file.md", "<!-- table: backends -->")]
    assert shown == allowed_keys(tmp_path, 'program = "Z = 1"\nrun.backend = "nonsense"\n')
    assert [row[0] for row in table_after("job_file.md", "### Generated inputs")] == list(RANDOM)
    text = PAGES["job_file.md"].read_text()
    suffixes = [suffix for known in all_formats() for suffix in known.suffixes]
    for word in (*COMPRESSIONS, *suffixes):
        assert f"`{word}`" in text


def test_flags_of_jobs_equal_the_code():
    """The page lists every flag of the commands that take a job, with its commands."""
    taking_jobs = ("run", "check", "plan", "verify")
    listed = set()
    for flags, commands_shown, _ in table_after("command_line.md", "## Flags"):
        names = taking_jobs if commands_shown == "all" else commands_shown.split(", ")
        first_flag = flags.split(",")[0].split()[0]
        listed.update((first_flag, name) for name in names)
    known = set()
    for command in taking_jobs:
        for option in options_of(command):
            if not option.is_positional:
                known.add((option.names[0], command))
    assert listed == known


def json_keys(folder, *arguments, command="run"):
    """Return the keys of the JSON that a command prints, those inside of others with a dot."""
    command = [sys.executable, "-m", "einmpi", command, "job.toml", *arguments, "--json", "-"]
    done = subprocess.run(
        command,
        cwd=folder,
        env=shell_environment(folder),
        capture_output=True,
        text=True,
        check=True,
    )

    def keys(data, above=""):
        for key, value in data.items():
            first = value[0] if isinstance(value, list) and value else value
            if isinstance(first, dict):
                yield from keys(first, f"{above}{key}.")
            else:
                yield above + key

    return set(keys(json.loads(done.stdout)))


def test_json_keys_equal_the_code(tmp_path):
    (tmp_path / "job.toml").write_text('program = "NAME[i:n] = i"\nsizes.n = 3')
    found = json_keys(tmp_path, "--repeat", "2", "--summary")
    inputs = """
        inputs.x = { shape = [], random = "ones" }
        inputs.X = { shape = [4], random = "ones", batch = 2 }
    """
    program = 'program = "NAME = x + sum(X[i])"\n'
    loop = 'epochs = 1\ncarry = { x = "NAME" }\nrecord = ["NAME"]\n'
    (tmp_path / "job.toml").write_text(f"{program}{inputs}\n[loop]\n{loop}")
    of_loop = {key for key in json_keys(tmp_path, "--summary") if key.startswith("loop.")}
    several = f"\n[[loop]]\n{program}{loop}" * 2
    (tmp_path / "job.toml").write_text(inputs + several)
    of_loops = {key for key in json_keys(tmp_path, "--summary") if key.startswith("loops.")}
    assert of_loops == {key.replace("loop.", "loops.", 1) for key in of_loop}
    found |= {*of_loop, "loops"}
    shown = []
    for row in table_after("command_line.md", "## The JSON of a run"):
        shown += row[0].split(", ")
    assert sorted(shown) == sorted(found)


def test_json_keys_of_plans_equal_the_code(tmp_path):
    """Of a loop with batches, something computed once and again, a validation, and another loop."""
    (tmp_path / "job.toml").write_text(
        """
        inputs.NAME = { shape = [8], random = "ones" }
        inputs.w = { shape = [8], random = "ones" }
        inputs.p = { shape = [8], random = "ones" }
        inputs.X = { shape = [4, 8], random = "ones", batch = 2 }
        [[loop]]
        program = '''
        S[i] = 2 * w[i]
        H[i] = exp(NAME[i])
        total = sum(H[i])
        next[i] = NAME[i] + X[0,i] * S[i] + H[i] * total
        loss = sum(p[i] * next[i])
        '''
        epochs  = 1
        recompute = ["H"]
        carry   = { NAME = "next" }
        [loop.train]
        loss       = "loss"
        parameters = ["p"]
        optimizer  = { name = "sgd" }
        validation = { every = 1, inputs = { X = { shape = [4, 8], random = "ones" } } }
        [[loop]]
        program = "next[i] = NAME[7-i]"
        steps   = 2
        carry   = { NAME = "next" }
        """
    )
    found = json_keys(tmp_path, "-n", "2", command="plan")
    plain = {key for key in found if not key.startswith(("loop.", "recomputed."))}
    once = {key for key in found if key.startswith("loop.once.")}
    assert once == {f"loop.once.{key}" for key in plain}
    later = {key for key in found if key.startswith("loop.later.")}
    assert {key.removeprefix("loop.later.") for key in later} >= plain
    nested = ("loop.once", "loop.later", "loop.batches", "loop.validation")
    keys = {"loop.bytes_arriving.NAME"}
    found = {key for key in found if key != "loop.carry.p"}  # one name is enough
    for key in found:
        inside = [name for name in nested if key.startswith(f"{name}.")]
        keys.add(inside[0] if inside else key)
    (tmp_path / "job.toml").write_text(
        """
        program = '''
        A[i,j] = tanh(sum[k](X[i,k] * X[k,j]))
        a = sum(A[i,j]**2)
        B[i,j] = sum[k](X[i,k] * X[j,k]) * a
        s = sum(A[i,j] * sum[u,v](exp(B[u,v])))
        '''
        inputs.X = { shape = [16, 16], random = "uniform" }
        plan.recompute = ["A"]
        """
    )
    found = json_keys(tmp_path, "-n", "2", command="plan")
    keys |= {key for key in found if key.startswith("recomputed.")}
    (tmp_path / "job.toml").write_text(
        """
        program = '''
        T[s,t] = sum[d](X[s,d] * X[t,d])
        A[s,t] = exp(T[s,t] - max[t](T[s,t]))
        O[s,d] = sum[t](A[s,t] * X[t,d])
        '''
        inputs.X = { shape = [1200, 8], random = "uniform", resident = "fit" }
        """
    )
    found = json_keys(tmp_path, "-n", "1", command="plan")
    keys |= {key for key in found if key.startswith(("fused.", "resident."))}
    (tmp_path / "job.toml").write_text(
        """
        program = "y[i] = sum(A[i,j] * NAME[j])"
        inputs.A = { shape = [40, 40], random = "sparse", density = 0.05 }
        inputs.NAME = { shape = [40], random = "ones" }
        """
    )
    found = json_keys(tmp_path, "-n", "2", command="plan")
    keys |= {key.partition(".")[0] for key in found if key.startswith("stored.")}
    keys |= {key for key in found if key.startswith("ghosts.")}
    inputs = {"X": {"shape": [4], "random": "ones"}}
    job = einmpi.program("Y[i] = 2 * X[i]", inputs=inputs, resident=True)
    first = einmpi.compile(job)
    first()
    second = einmpi.compile(job, share=first)
    second()
    ((plan, _),) = second.ready.values()
    keys |= {f"shared.{key}" for key in as_json(plan)["shared"]}
    shown = []
    for row in table_after("command_line.md", "## The JSON of a plan"):
        shown += row[0].split(", ")
    assert sorted(shown) == sorted(keys)


# ---- README's commands ---------------------------------------------------------------------------


def readme_command(name):
    lines = PAGES["README.md"].read_text().split("\n")
    start = lines.index(f"<!-- {name} -->")
    assert lines[start + 1] == "```sh" and lines[start + 3] == "```", (
        f"{name}: one line in a fenced block"
    )
    return lines[start + 2]


def extras():
    project = ConfigParser()
    project.read(ROOT / "setup.cfg")
    return set(project["options.extras_require"])


@pytest.mark.parametrize("name", ["run command", "test command"])
def test_readme_commands_set_up_everything(name):
    venv, install, *commands = readme_command(name).split(" && ")
    assert venv == "python3 -m venv .venv"
    wanted = re.fullmatch(r"\.venv/bin/pip install -q -e '\.\[(.*)\]'", install)[1].split(",")
    assert set(wanted) <= extras() and "mpich" in wanted
    if name == "run command":
        (command,) = commands
        assert (ROOT / command.split()[-1]).is_file()
    else:
        fast, on_ranks = commands
        assert "test" in wanted
        assert fast.startswith(".venv/bin/python -m pytest")
        assert (
            on_ranks.startswith(".venv/bin/mpirun -n 3") and (ROOT / on_ranks.split()[-1]).is_dir()
        )


def test_extras_named_anywhere_exist():
    for path in MARKDOWN:
        for listed in re.findall(r"(?:einmpi|'\.)\[([\w,]+)\]'", path.read_text()):
            assert set(listed.split(",")) <= extras(), path.name


def test_continuous_integration_finds_the_test_command():
    script = "sed -n '/<!-- test command -->/,/^```$/p' README.md | sed '1,2d;$d'"
    assert script in (ROOT / ".ci" / "run").read_text()
    found = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == readme_command("test command")


@pytest.mark.mpirun
def test_readme_run_command_prints_what_readme_shows(tmp_path):
    if not MPIRUN.exists():
        pytest.skip("there is no mpirun next to the Python interpreter")
    command = readme_command("run command").split(" && ")[-1].replace(".venv/bin/", "")
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=shell_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    page = blocks(PAGES["README.md"])
    start = next(k for k, block in enumerate(page) if block.text == "output of: run command")
    assert_shown(page[start + 1].text, done.stdout, "README.md")


def test_pictures_need_nothing_from_elsewhere():
    for path in (ROOT / "docs").glob("*.svg"):
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http" not in text and "href" not in text and "<script" not in text
