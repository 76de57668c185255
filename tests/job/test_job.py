"""Job files: what is read, and the exact text of every error."""

import os
import pickle
import zlib
from dataclasses import replace

import pytest
from calls import calls_of
from job_text import ALL_DTYPES, EXTENT, NAME, PROGRAM, A, error, no_files, read

from einmpi.errors import InputError
from einmpi.files.specs import InputSpec, OutputSpec
from einmpi.job.job_file import read_job
from einmpi.language.toml_document import key_positions
from einmpi.planner.strategies import STRATEGIES
from einmpi.units import parse_bytes

ARITHMETIC = "expected integers, earlier sizes, + - * // % ** and brackets"
pytestmark = pytest.mark.usefixtures("in_folder")


# ---- a whole file -------------------------------------------------------------------------------

CHAIN = """title   = "Matrix chain, skewed"
dtype   = "float32"
program = \"\"\"
Z[i,k] = sum(A[i,j] * B[j,k]) + W[i,k]
V[i]   = sum(Z[i,k])
\"\"\"
[sizes]
s = 40
t = "s // 10"
[inputs]
A = { shape = ["s", "t"], random = "normal", seed = 1 }
B = "data/chain.h5:B"
W = { file = "model.safetensors", tensor = "w", resident = true }
[outputs]
V = "out.h5:/g/V"
Z = { file = "out.h5", dataset = "Z", chunks = [8, 8], compression = "gzip", dtype = "float16" }
[plan]
strategy = "eindecomp-paper"
memory   = "4 GiB"
[run]
backend  = "cupy"
fast_math = true
[roles]
batch = ["i"]
hidden = ["j", "k"]
"""


def describe_chain(spec):
    shape, dtype = {"B": ((4, 7), "float64"), "W": ((40, 7), "float32")}[spec.name]
    return replace(spec, shape=shape, dtype=dtype)


def describe_vector(spec):
    return replace(spec, shape=(2,), dtype="int32")


def test_a_whole_file():
    os.mkdir("jobs")
    job = read(CHAIN, describe_chain, "jobs/chain.toml")
    assert (job.title, job.path, job.dtype) == (
        "Matrix chain, skewed",
        "jobs/chain.toml",
        "float32",
    )
    assert job.sizes == {"s": 40, "t": 4}
    assert job.inputs == (
        InputSpec("A", (40, 4), "float32", "normal", 1, place="jobs/chain.toml:11:1"),
        InputSpec(
            "B",
            (4, 7),
            "float64",
            file="jobs/data/chain.h5",
            inside="/B",
            follow=("jobs",),
            place="jobs/chain.toml:12:1",
        ),
        InputSpec(
            "W",
            (40, 7),
            "float32",
            file="jobs/model.safetensors",
            inside="w",
            follow=("jobs",),
            resident=True,
            place="jobs/chain.toml:13:1",
        ),
    )
    assert job.outputs == (
        OutputSpec("V", "jobs/out.h5", "/g/V", place="jobs/chain.toml:15:1"),
        OutputSpec(
            "Z", "jobs/out.h5", "/Z", (8, 8), "gzip", "float16", None, "jobs/chain.toml:16:1"
        ),
    )
    assert (job.strategy, job.memory, job.backend, job.fast_math) == (
        "eindecomp-paper",
        4 * 2**30,
        "cupy",
        True,
    )
    assert job.roles == {"batch": ("i",), "hidden": ("j", "k")}
    assert job.graph.outputs == ("V", "Z")
    assert (job.graph["Z"].bound, job.graph["Z"].dtype) == ((40, 7), "float64")


def test_a_small_file_and_its_defaults():
    job = read(PROGRAM + A)
    assert (job.title, job.dtype, job.sizes, job.roles, job.outputs) == (
        "job",
        "float64",
        {},
        {},
        (),
    )
    assert (job.strategy, job.memory, job.backend, job.fast_math) == (
        "eindecomp",
        None,
        "numpy",
        False,
    )
    assert job.inputs[0].seed == zlib.crc32(b"A")
    assert job.graph.outputs == ("Z",)
    assert read(PROGRAM + A + "[outputs]\n").graph.outputs == ("Z",)


def test_a_job_travels_between_processes():
    job = read(PROGRAM + A)
    assert pickle.loads(pickle.dumps(job)) == job


def test_a_path_that_is_absolute_stays(tmp_path):
    job = read(PROGRAM + f'[inputs]\nA = "{tmp_path}/x.H5:/A"\n', describe_vector)
    assert job.inputs[0].file == f"{tmp_path}/x.H5"


def test_a_colon_in_a_name_within_a_file():
    job = read(PROGRAM + '[inputs]\nA = "m.safetensors:layer:0"\n', describe_vector)
    assert (job.inputs[0].file, job.inputs[0].inside) == ("m.safetensors", "layer:0")


def test_overrides_come_before_later_sizes():
    text = (
        PROGRAM + '[sizes]\ns = 4\nt = "2 * s"\n[inputs]\nA = { shape = ["t"], random = "ones" }\n'
    )
    assert read(text, settings={"s": 50}).graph["A"].bound == (100,)
    assert read(text, settings={"t": 3}).sizes == {"s": 4, "t": 3}
    assert read(text, dtype="int32").graph["A"].dtype == "int32"
    assert (
        error(text, settings={"r": 3})
        == "job.toml: there is no size or parameter 'r' to set; expected one of s, t"
    )
    assert error(text, settings={"s": 0}) == f"job.toml:3:1: size s is set to 0; {EXTENT}"
    assert error(PROGRAM, settings={"s": 3}) == (
        "job.toml: there is no size or parameter 's' to set; "
        "expected a job with [sizes] or [parameters]; this one has neither"
    )
    assert (
        error(text, dtype="float8")
        == f"job.toml: unknown dtype 'float8'; expected one of {ALL_DTYPES} (did you mean float16?)"
    )


def test_the_dtype_of_an_input_wins_over_the_job_file_and_the_command_line():
    text = PROGRAM + '[inputs]\nA = { shape = [2], random = "ones", dtype = "int64" }\n'
    text += 'B = { shape = [2], random = "ones" }\n'
    job = read(text, dtype="float32")
    assert job.graph["A"].dtype == "int64"
    assert {spec.name: spec.dtype for spec in job.inputs} == {"A": "int64", "B": "float32"}


def test_a_dtype_that_would_change_nothing_is_refused():
    text = PROGRAM + '[inputs]\nA = { shape = [2], random = "ones", dtype = "int64" }\n'
    with pytest.raises(InputError, match="dtype float32 would change nothing"):
        read(text, dtype="float32")


# ---- positions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, place",
    [
        ('program = """\nY[i] = A[i]\n\n  Z[i] = B[i]\n"""\n', "4:10"),
        ("program = '''\nY[i] = A[i]\nZ[i] = B[i]\n'''\n", "3:8"),
        ('program = """Y[i] = A[i]\nZ[i] = B[i]"""\n', "2:8"),
        ('title = "t"\n\n  "program"  =  "Z[i] = B[i]"\n', "3:25"),
        ("program = 'Z[i] = B[i]'\n", "1:19"),
        ('program = """Z[i] = B[i]"""\n', "1:21"),
        ('program = """\\\n   Z[i] = B[i]\n"""\n', "2:11"),
        ('program = """\nY[i] = A[i] + \\\n   1\nZ[i] = B[i]\n"""\n', "4:8"),
        ('# program = "\n[run]\nfast_math = false # """\n[plan]\n', None),
    ],
)
def test_errors_in_the_program_stand_where_they_are(text, place):
    if place is None:
        assert (
            error(text)
            == 'job.toml: there is no program; expected program = "NAME[labels] = expression"'
        )
        return
    found = error(text + A)
    assert found.startswith(f"job.toml:{place}: unknown tensor 'B'")
    assert error((text + A).replace("\n", "\r\n")) == found
    assert error("\ufeff" + text + A) == found


def test_positions_of_keys_of_every_form():
    text = """a = 1
"b c".'d' = [ 1, # ] comment
  [2, "]"], { e = 3 } ]
[ f . g ]   # [no]
h.i = { j = 1979-05-27 07:32:00, k = '''x
= "y" ''' }
[[l]]
m = \"\"\"\\"\"\"\"\"\"
n = 1.5
"""
    expected = {
        ("a",): "1:1",
        ("b c",): "2:1",
        ("b c", "d"): "2:7",
        ("b c", "d", 0): "2:15",
        ("b c", "d", 1): "3:3",
        ("b c", "d", 1, 1): "3:7",
        ("b c", "d", 2, "e"): "3:15",
        ("f", "g"): "4:7",
        ("f", "g", "h", "i"): "5:3",
        ("f", "g", "h", "i", "j"): "5:9",
        ("f", "g", "h", "i", "k"): "5:34",
        ("l",): "7:3",
        ("l", 0): "7:3",
        ("l", 0, "m"): "8:1",
        ("l", 0, "n"): "9:1",
    }
    found = {}
    for path, (offset, _) in key_positions(text).items():
        before = text[:offset].split("\n")
        found[path] = f"{len(before)}:{len(before[-1]) + 1}"
    assert {path: found.get(path) for path in expected} == expected


def test_a_long_program_is_located_quickly():
    program = "\n".join(f"Z{k}[i] = A[i] + {k}" for k in range(2000))
    text = f'program = """\n{program}\n"""\n[plan]\nmemory = 1.5\n' + A
    assert calls_of(lambda: key_positions(text)) < 1000  # 122 were counted
    wanted = 'job.toml:2004:1: memory is 1.5; expected a string such as "4 GiB" or an integer'
    assert error(text) == wanted


# ---- the file itself ----------------------------------------------------------------------------


def test_files_that_cannot_be_read(tmp_path):
    def fails(path):
        with pytest.raises(InputError) as caught:
            read_job(path, no_files)
        return str(caught.value)

    (tmp_path / "latin.toml").write_bytes(b'# one\ntitle = "caf\xe9"\n')
    assert fails("no.toml") == "no.toml: there is no such file; expected a job file in TOML"
    assert fails(tmp_path) == f"{tmp_path}: this is a folder; expected a job file in TOML"
    assert (
        fails("latin.toml")
        == "latin.toml:2:13: this is not UTF-8 text; expected a job file in TOML"
    )
    assert (
        fails("a\0b") == "a\\x00b: cannot be read: embedded null byte; expected a job file in TOML"
    )


@pytest.mark.parametrize(
    "text, place, message",
    [
        ("a = 1\nb = \n", "2:5", "Invalid value"),
        ("a = 1\nb c\n", "2:3", "Expected '=' after a key in a key/value pair"),
        ('a = """\nx\n', "2:2", "Unterminated string"),
        ("[plan]\n[plan]\n", "2:6", "Cannot declare ('plan',) twice"),
    ],
)
def test_what_is_not_toml(text, place, message):
    assert (
        error(text)
        == f"job.toml:{place}: this is not TOML: {message}; expected KEY = VALUE and [TABLE] lines"
    )


def test_toml_that_python_cannot_hold():
    deep = "x = " + "[" * 5000 + "]" * 5000
    assert (
        error(deep)
        == "job.toml: values are nested too deeply; expected a table of strings, numbers and lists"
    )
    assert error("x = " + "1" * 5000).startswith(
        "job.toml: this is not TOML: Exceeds the limit (4300 digits)"
    )


# ---- keys, types, choices -----------------------------------------------------------------------

TOP = (
    "title, dtype, program, sizes, parameters, inputs, outputs, "
    "plan, run, roles, formats, loop, train"
)


@pytest.mark.parametrize(
    "text, message",
    [
        ("titel = 3\n", f"2:1: unknown key 'titel'; expected one of {TOP} (did you mean title?)"),
        ("[output]\n", f"2:2: unknown key 'output'; expected one of {TOP} (did you mean outputs?)"),
        ("plan = 3\n", "2:1: plan is 3; expected a table"),
        ("[[inputs]]\n", "2:3: inputs is a list; expected a table"),
        ("title = ['t']\n", "2:1: title is a list; expected a string"),
        (
            'dtype = "float8"\n',
            f"2:1: unknown dtype 'float8'; expected one of {ALL_DTYPES} (did you mean float16?)",
        ),
        (
            "[plan]\n  stratgy = 1\n",
            "3:3: unknown key 'stratgy' in plan; expected one of strategy, memory, machine, "
            "recompute (did you mean strategy?)",
        ),
        (
            '[plan]\nstrategy = "eindcomp"\n',
            f"3:1: unknown strategy 'eindcomp'; expected one of {', '.join(STRATEGIES)} "
            "(did you mean eindecomp?)",
        ),
        ("[plan]\nstrategy = true\n", "3:1: strategy is true; expected a string"),
        (
            "[plan]\nmemory = true\n",
            '3:1: memory is true; expected a string such as "4 GiB" or an integer',
        ),
        ("[plan]\nmemory = 0\n", "3:1: memory of 0 bytes; expected 1 byte to 2**63 - 1 bytes"),
        (
            f"[plan]\nmemory = 0x{'F' * 5000}\n",
            "3:1: memory of far too many bytes; expected 1 byte to 2**63 - 1 bytes",
        ),
        (
            '[plan]\nmemory = "lots"\n',
            "3:1: 'lots' is not an amount of memory; "
            'expected a number and a unit, such as "4 GiB"',
        ),
        ("[run]\nfast_math = 1\n", "3:1: fast_math is 1; expected true or false"),
        (
            "[run]\nthreads = 1\n",
            "3:1: unknown key 'threads' in run; expected one of backend, fast_math, "
            "strict, reproducible, half, scratch, blas, overlap, shared",
        ),
        ('[run]\nbackend = "cuda"\n', "3:1: unknown backend 'cuda'; expected one of numpy, cupy"),
        (
            '[roles]\nbath = ["b"]\n',
            "3:1: unknown key 'bath' in roles; expected one of batch, sequence, head, "
            "hidden (did you mean batch?)",
        ),
        ('[roles]\nbatch = "b"\n', "3:1: batch is 'b'; expected a list"),
        (
            '[roles]\nbatch = ["b", "2"]\n',
            "3:15: '2' is not a label; expected a list of labels such as batch = [\"b\"]",
        ),
    ],
)
def test_wrong_keys_and_types(text, message):
    tail = "" if "inputs" in text else A
    assert error(PROGRAM + text + tail) == f"job.toml:{message}"


def test_wrong_programs():
    assert error("program = 3\n") == "job.toml:1:1: program is 3; expected a string"
    assert error('title = "t"\nprogram = "Z = 1\\u0000"\n') == (
        "job.toml:2:17: character '\\x00' in the program; expected printable characters"
    )
    assert error('program = "Z = 1\\rY = 2"\n') == (
        "job.toml:1:17: character '\\r' in the program; expected printable characters"
    )


@pytest.mark.parametrize(
    "text, size",
    [
        ("4 GiB", 4 * 2**30),
        ("4GiB", 4 * 2**30),
        (" 512MB ", 512 * 10**6),
        ("1.5 GB", 1_500_000_000),
        ("1 kB", 1000),
        ("1 KB", 1000),
        ("7 B", 7),
        ("7", 7),
        ("0.5KiB", 512),
        ("2 TiB", 2 * 2**40),
        ("3. MiB", 3 * 2**20),
        ("1 TB", 10**12),
    ],
)
def test_amounts_of_memory(text, size):
    assert parse_bytes(text, "x") == size


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "'' is not an amount of memory; expected a number and a unit, such as \"4 GiB\""),
        (
            "-4 GB",
            "'-4 GB' is not an amount of memory; expected a number and a unit, such as \"4 GiB\"",
        ),
        (
            "4 Gib",
            "unknown unit 'Gib' of memory; expected one of B, kB, KB, MB, GB, TB, KiB, "
            "MiB, GiB, TiB (did you mean GiB?)",
        ),
        ("0.1 B", "memory of 0 bytes; expected 1 byte to 2**63 - 1 bytes"),
        (
            "8388608 TiB",
            "memory of 9223372036854775808 bytes; expected 1 byte to 2**63 - 1 bytes",
        ),
    ],
)
def test_what_is_no_amount_of_memory(text, message):
    with pytest.raises(InputError) as caught:
        parse_bytes(text, "x")
    assert str(caught.value) == f"x: {message}"


# ---- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, message",
    [
        ("s = 0", f"3:1: size s is 0; {EXTENT}"),
        ("s = -3", f"3:1: size s is -3; {EXTENT}"),
        ("s = 2.5", f"3:1: size s is 2.5; {EXTENT}"),
        ("s = true", f"3:1: size s is true; {EXTENT}"),
        ("s = [1]", f"3:1: size s is [1]; {EXTENT}"),
        ("s = 1979-05-27", f"3:1: size s is 1979-05-27; {EXTENT}"),
        ("s = 1_000_000_000_000", f"3:1: size s is 1000000000000; {EXTENT}"),
        ('s = "10**12"', f"3:1: size s is 1000000000000; {EXTENT}"),
        ('s = 3\nt = "s - 3"', f"4:1: size t is 0; {EXTENT}"),
        ('s = 3\nt = "s +"', f"4:9: 's +' is not integer arithmetic; {ARITHMETIC}"),
        ('s = 3\nt = "s / 2"', f"4:6: s / 2 is not integer arithmetic; {ARITHMETIC}"),
        ('s = 3\nt = "s // 0"', "4:6: division by zero; expected a divisor other than 0"),
        ('s = 3\nt = "2 * r"', "4:10: unknown size 'r'; expected s"),
        (
            's = "t"\nt = 3',
            "3:6: unknown size 't'; expected a number, because there are no sizes yet",
        ),
        ('s = ""', "3:6: '' is not one expression; expected an expression such as s // 10"),
        (
            "s = \"__import__('os')\"",
            f"3:6: __import__('os') is not integer arithmetic; {ARITHMETIC}",
        ),
        (
            "sum = 3",
            "3:1: sum is a word of the language and cannot name a size; expected another name",
        ),
        ('"a b" = 3', f"3:1: 'a b' cannot name a size; {NAME}"),
        ("in = 3", f"3:1: 'in' cannot name a size; {NAME}"),
    ],
)
def test_wrong_sizes(text, message):
    assert error(f"{PROGRAM}[sizes]\n{text}\n") == f"job.toml:{message}"
