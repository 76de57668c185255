"""Every setting of the table: as a key of a job file, as a flag and as a keyword."""

import inspect
from pathlib import Path

import numpy as np
import pytest
from refusals import error

import einmpi
from einmpi.cli.help import make_parser
from einmpi.cli.job_options import load_job
from einmpi.job import settings
from einmpi.job.job import with_settings
from einmpi.job.settings import CHOICE, SETTINGS, compared_settings, read_settings, setting

DOCS = Path(__file__).parents[2] / "docs"
PROGRAM = "H[i,k] = sum(A[i,j] * B[j,k])\nZ[i] = max(H[i,k])"
JOB = f"""\
program = \"\"\"
{PROGRAM}
\"\"\"
inputs.A = {{ random = "normal", shape = [8, 6] }}
inputs.B = {{ random = "normal", shape = [6, 4] }}
"""
# A value of each setting that is not the default, as Python and TOML write it, and a wrong one.
VALUES = {
    "strategy": ("sqrt", '"sqrt"', "best"),
    "memory": ("1 GiB", '"1 GiB"', "much"),
    "machine": ("machine.toml", '"machine.toml"', None),  # any text names a file
    "recompute": (["H"], '["H"]', "often"),
    "pin": ({"Z": (2,)}, None, 3),
    "backend": ("cupy", '"cupy"', "abacus"),
    "fast_math": (True, "true", None),  # a switch takes no value
    "strict": (True, "true", None),
    "reproducible": (True, "true", None),
    "half": ("steps", '"steps"', "double"),
    "scratch": ("folder", '"folder"', None),
    "blas": ("numpy", '"numpy"', "mine"),
    "overlap": ("off", '"off"', "sometimes"),
    "shared": ("off", '"off"', "perhaps"),
}
# A value that is wrong in Python and in a job file, for settings whose flags take any text.
OF_WRONG_TYPE = (3.5, "3.5")
FUNCTIONS = (
    einmpi.program,
    einmpi.plan,
    einmpi.compile,
    einmpi.run,
    einmpi.loop,
    einmpi.train,
    einmpi.einsum,
)
MACHINE = """\
measured = "by hand"
[inside]
latency = "1 us"
bandwidth = "1 GB/s"
[between]
latency = "1 us"
bandwidth = "1 GB/s"
[kernels]
float64 = "1 Gop/s"
other = "1 Gop/s"
"""


def with_key(name, text):
    """Return the job whose file has a setting."""
    Path("job.toml").write_text(f"{JOB}{SETTINGS[name].table}.{name} = {text}\n")
    return einmpi.load("job.toml")


def with_flag(name, value):
    """Return the job with a setting that the command line gives."""
    Path("job.toml").write_text(JOB)
    words = ["run", "job.toml", SETTINGS[name].flag]
    if value is not True:
        words.append(value)
    return load_job(make_parser().parse_args(words))


def with_keyword(name, value):
    Path("job.toml").write_text(JOB)
    return with_settings(einmpi.load("job.toml"), {name: value})


def test_every_setting_has_an_example():
    assert set(VALUES) == set(SETTINGS)


@pytest.mark.usefixtures("in_folder")
@pytest.mark.parametrize("name", SETTINGS)
def test_three_ways_to_set_it_give_the_same_job(name):
    value, text, _ = VALUES[name]
    Path("machine.toml").write_text(MACHINE)
    found = with_keyword(name, value)
    assert getattr(found, name) != SETTINGS[name].default
    jobs = [found]
    if SETTINGS[name].table:
        jobs.append(with_key(name, text))
    if SETTINGS[name].help:
        jobs.append(with_flag(name, value))
    for job in jobs:
        for other in SETTINGS:
            assert getattr(job, other) == getattr(found, other), other
        assert job.graph == found.graph
    if name != "machine":  # which the example does not describe completely
        digests = {einmpi.plan(job, 4).digest for job in jobs}
        assert len(digests) == 1


@pytest.mark.usefixtures("in_folder")
@pytest.mark.parametrize("name", SETTINGS)
def test_wrong_values_are_refused_in_all_ways(name):
    wrong = VALUES[name][2]
    in_python, in_toml = OF_WRONG_TYPE if wrong is None else (wrong, f'"{wrong}"')
    assert error(lambda: with_keyword(name, in_python)).startswith(f"{name}: ")
    if SETTINGS[name].table:
        assert error(lambda: with_key(name, in_toml)).startswith("job.toml:7:")
    if SETTINGS[name].help and wrong is not None:
        assert error(lambda: with_flag(name, wrong)).startswith(f"{SETTINGS[name].flag}: ")


@pytest.mark.parametrize("name", SETTINGS)
def test_every_function_takes_it(name):
    for function in FUNCTIONS:
        shown = inspect.signature(function).parameters[name]
        assert shown.kind is inspect.Parameter.KEYWORD_ONLY and shown.default is None
        assert name in function.__doc__
    wrong = OF_WRONG_TYPE[0] if VALUES[name][2] is None else VALUES[name][2]
    x = np.ones((3, 3))
    job = einmpi.program("Z[i] = sum(X[i,j])", X=x)
    step = einmpi.program("y = x / 2", x=())
    loss = einmpi.program("loss = sum(w[i]**2)", w=(2,))
    training = {"loss": "loss", "parameters": ["w"], "optimizer": "sgd", "steps": 1}
    for call in (
        lambda **given: einmpi.program("Z[i] = sum(X[i,j])", X=x, **given),
        lambda **given: einmpi.plan(job, 2, **given),
        lambda **given: einmpi.compile(job, **given),
        lambda **given: einmpi.run(job, {"X": x}, **given),
        lambda **given: einmpi.run("Z[i] = sum(X[i,j])", X=x, **given),
        lambda **given: einmpi.loop(step, {"x": 1.0}, carry={"x": "y"}, steps=2, **given),
        lambda **given: einmpi.train(loss, {"w": np.ones(2)}, **training, **given),
        lambda **given: einmpi.einsum("ij,jk->ik", x, x, **given),
    ):
        call(**{name: None})
        assert error(lambda call=call: call(**{name: wrong})).startswith(f"{name}: ")


def test_unknown_keywords_are_refused_as_by_python():
    job = einmpi.program("Z[i] = X[i]", X=(3,))
    for function, arguments in ((einmpi.plan, (job, 2)), (einmpi.compile, (job,))):
        with pytest.raises(TypeError, match="unexpected keyword argument 'strategie'"):
            function(*arguments, strategie="sqrt")


def test_a_name_that_the_program_uses_is_a_tensor():
    job = einmpi.program("Z[i] = memory * half[i]", half=(3,), memory=2.5, shared="off")
    assert [vertex.name for vertex in job.graph.inputs] == ["half", "memory"]
    assert (job.half, job.memory, job.shared) == ("float32", None, "off")


def test_backend_is_a_keyword():
    """It took dataclasses.replace."""
    assert einmpi.program("Z[i] = X[i]", X=(3,), backend="cupy").backend == "cupy"
    job = einmpi.program("Z[i] = X[i]", X=(3,))
    assert einmpi.compile(job, backend="numpy").job.backend == "numpy"


def test_the_documentation_lists_every_setting():
    page = (DOCS / "job_file.md").read_text()
    for name, each in SETTINGS.items():
        if each.table:
            assert f"| `{name}` | {each.kind.in_files} | " in page
        if each.help:
            assert f"| `{each.flag}` | {each.documentation} |" in page
    assert all(name in (DOCS / "python_api.md").read_text() for name in SETTINGS)


def test_what_ranks_compare_has_all_but_paths():
    job = einmpi.program("Z[i] = X[i]", X=(3,))
    assert set(SETTINGS) - set(compared_settings(job)) == {"machine", "scratch"}


def test_every_loop_has_the_settings_of_its_job(tmp_path):
    """Those that a change of the whole job gives, and its own recompute."""
    first = '[[loop]]\nprogram = "b[i] = a[i] + 1"\n'
    second = '[[loop]]\nprogram = "c[i] = 2 * x[i]"\ncarry.x = "c"\nsteps = 2\n'
    inputs = "".join(f'inputs.{name} = {{ random = "ones", shape = [4] }}\n' for name in "ax")
    (tmp_path / "job.toml").write_text(f"{inputs}{first}{second}")
    job = einmpi.load(tmp_path / "job.toml")
    values = {"strategy": "sqrt", "memory": 2**30, "strict": True, "shared": "off"}
    for each in with_settings(job, values).one_after_another():
        assert {name: getattr(each, name) for name in values} == values


def test_one_entry_makes_a_setting(monkeypatch):
    """A key, a flag, a keyword with checks, and its documentation."""
    entry = setting(
        "loud", CHOICE, "how much it says", table="run", choices=lambda: ("loud", "low")
    )
    record = settings.Setting("voice", entry.default, **entry.metadata)
    monkeypatch.setitem(SETTINGS, "voice", record)
    assert record.flag == "--voice"
    assert error(lambda: record.check("voice", "shy")) == (
        "voice: unknown voice 'shy'; expected one of loud, low"
    )
    assert "voice" in settings.settings_in("run")

    @settings.takes_settings
    def function(**settings):
        """Do it.

        Parameters
        ----------
        {settings}
        """

    assert "voice" in inspect.signature(function).parameters
    assert "How much it says" in function.__doc__


def test_reading_gives_the_defaults(tmp_path):
    from einmpi.language.toml_document import read_document

    (tmp_path / "job.toml").write_text(JOB)
    found = read_settings(read_document(str(tmp_path / "job.toml")))
    assert found == {name: each.default for name, each in SETTINGS.items() if each.table}
