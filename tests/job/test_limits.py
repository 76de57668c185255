"""Limits of job files; titles and file names that cannot control a terminal."""

import tracemalloc

import pytest
from in_process import einmpi_here

from einmpi.errors import InputError
from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.rewrite import share
from einmpi.job.job_file import read_job
from einmpi.language import toml_document
from einmpi.language.parse import build_graphs
from einmpi.language.syntax import Source

LONG_KEY = ".".join(["a"] * 40_000)


def refusal(path, text):
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_job(str(path), describe=None)
    return str(caught.value).removeprefix(f"{path}:")


@pytest.mark.parametrize(
    "line", [f"{LONG_KEY} = 1", f"[{LONG_KEY}]", f"x = {{ {LONG_KEY} = 1 }}", f"[[{LONG_KEY}]]"]
)
def test_long_dotted_keys(tmp_path, line):
    """tomllib takes quadratic time and memory for them."""
    tracemalloc.start()
    message = refusal(tmp_path / "job.toml", f'program = "Z = 1"\n{line}\n')
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "this key has too many parts; expected at most 16 names" in message
    assert peak < 50e6


def test_dots_elsewhere_are_no_key(tmp_path):
    dots = "." * 100
    path = tmp_path / "job.toml"
    path.write_text(
        f'title = "{dots}"\nprogram = """\n# {dots}\nZ = 1.5\n"""\nsizes.s = 3 # {dots}\n'
        f"[inputs]\nX = {{ shape = [1], random = 'uniform', low = 0.25, high = 1.5 }}\n"
    )
    assert read_job(str(path), describe=None).title == dots


def test_strings_that_nothing_closes_are_scanned_once(tmp_path):
    message = refusal(tmp_path / "job.toml", 'program = """' + '\\"""' * 100_000)
    assert "this is not TOML" in message


def test_large_files(tmp_path, monkeypatch):
    monkeypatch.setattr(toml_document, "MAX_FILE_BYTES", 1000)
    message = refusal(tmp_path / "job.toml", 'program = "Z = 1"\n' + "# more\n" * 1000)
    assert message == " this file is too large; expected at most 1000 bytes"


def test_many_values(tmp_path, monkeypatch):
    monkeypatch.setattr(toml_document, "MAX_TOKENS", 1000)
    message = refusal(tmp_path / "job.toml", f'program = "Z = 1"\nx = [{"1," * 1000}]\n')
    assert (
        "this file has more than 1000 names, values and signs; expected a smaller file" in message
    )


def test_many_statements(tmp_path):
    program = "\n".join(f"Z{k} = {k}" for k in range(20_001))
    message = refusal(tmp_path / "job.toml", f'program = """\n{program}\n"""\n')
    assert message == " the program has 20001 statements; expected at most 20000"


class CountedName(str):
    """A name that counts how often it is compared with another one."""

    comparisons = 0

    def __eq__(self, other):
        CountedName.comparisons += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_many_outputs_take_linear_time():
    """Each is looked up once, not compared with all others."""
    count = 500
    text = "\n".join(f"Z{k}[i:3] = i + {k}" for k in range(count))
    graph = build_graphs(Source("p", text), {}).rewritten
    outputs = tuple(CountedName(name) for name in graph.outputs)
    vertices = tuple(
        Vertex(CountedName(v.name), v.bound, v.dtype, v.einsum, v.inputs) for v in graph.vertices
    )
    CountedName.comparisons = 0
    share(EinGraph(vertices, outputs))
    assert CountedName.comparisons < 20 * count


def test_outputs_inside_one_another(tmp_path):
    files = "\n".join(f'Z{k} = "out.h5:/g{k % 7}/d{k}"' for k in range(50))
    program = "\n".join(f"Z{k} = {k}" for k in range(52))
    text = f'program = """\n{program}\n"""\n[outputs]\n{files}\n'
    path = tmp_path / "job.toml"
    path.write_text(text)
    assert len(read_job(str(path), describe=None).outputs) == 50
    for target, first, conflict in (
        ("/g3/d3", "Z3", "both be"),
        ("/g3", "Z3", "be one inside the other"),
        ("/g3/d10/x", "Z10", "be one inside the other"),
    ):
        message = refusal(path, f'{text}Z51 = "out.h5:{target}"\n')
        assert f"outputs {first} and Z51 would {conflict}" in message


def test_titles_and_file_names_do_not_control_the_terminal(tmp_path):
    (tmp_path / "job.toml").write_text(
        'title = "red \\u001b[31m\\u0007"\nprogram = "Z[i:3] = i"\n'
        '[outputs]\nZ = "o\\u001b[2J.npy"\n'
    )
    said = ""
    for arguments in (["check", "job.toml"], ["job.toml"], ["plan", "job.toml", "-n", "2"]):
        done = einmpi_here(tmp_path, arguments)
        assert done.returncode == 0
        said += done.stdout + done.stderr
    assert "\x1b" not in said and "\x07" not in said
    assert "red \\x1b[31m\\x07" in said and "o\\x1b[2J.npy" in said
    einmpi_here(tmp_path, ["plan", "job.toml", "-n", "2", "--report", "r.html"])
    page = (tmp_path / "r.html").read_text()
    assert "\x1b" not in page and "red \\x1b[31m" in page
