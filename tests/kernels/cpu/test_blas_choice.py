"""The choice of a BLAS library, and products by other libraries than numpy's."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.cpu.test_blas import arrays_of, einsum_of
from mpi_helpers import run_mpi

import einmpi
from einmpi.cli import doctor as libraries
from einmpi.errors import InputError
from einmpi.kernels.contraction import recognise_contraction
from einmpi.kernels.cpu.blas import compute_by_blas
from einmpi.kernels.cpu.blas_library import choice as blas_choice
from einmpi.kernels.cpu.blas_library import choice as products
from einmpi.kernels.cpu.blas_library import records
from einmpi.kernels.cpu.blas_library.choice import (
    BlasChoice,
    matrix_product,
    one_blas_thread,
    prepare_product,
    set_blas_threads,
    use_blas,
)
from einmpi.kernels.cpu.blas_library.records import (
    BLAS_LIBRARIES,
    FoundFile,
    UnusableLibraryError,
    find_file,
    load_blas,
)
from einmpi.kernels.cpu.product_updates import add_product

OPENBLAS = next(library for library in BLAS_LIBRARIES if library.name == "openblas")
ROOT = Path(__file__).resolve().parents[3]
DTYPES = ("float32", "float64", "complex64", "complex128")

# Plain loops with the interface of a BLAS library, which counts its calls.
SOURCE = """
#include <complex.h>
int calls_of_one = 0, calls_of_many = 0, threads = 0;
void SETTER(int count) { threads = count; }
#define PRODUCT(LETTER, TYPE, NUMBER, VALUE) \\
void NAME(LETTER, gemm)(int order, int left_is, int right_is, INT m, INT n, INT k, NUMBER alpha, \\
        const TYPE *a, INT lda, const TYPE *b, INT ldb, NUMBER beta, TYPE *c, INT ldc) { \\
    calls_of_one++; \\
    for (INT i = 0; i < m; i++) for (INT j = 0; j < n; j++) { \\
        TYPE sum = 0; \\
        for (INT l = 0; l < k; l++) { \\
            int left_rows = (order == 101) == (left_is == 111); \\
            int right_rows = (order == 101) == (right_is == 111); \\
            TYPE x = left_rows ? a[i * lda + l] : a[l * lda + i]; \\
            TYPE y = right_rows ? b[l * ldb + j] : b[j * ldb + l]; \\
            sum += x * y; \\
        } \\
        TYPE *target = order == 101 ? &c[i * ldc + j] : &c[j * ldc + i]; \\
        *target = VALUE(alpha) * sum WRONG; \\
    } \\
} \\
void NAME(LETTER, gemm_batch_strided)(int order, int left_is, int right_is, INT m, INT n, INT k, \\
        NUMBER alpha, const TYPE *a, INT lda, INT sa, const TYPE *b, INT ldb, INT sb, \\
        NUMBER beta, TYPE *c, INT ldc, INT sc, INT count) { \\
    for (INT p = 0; p < count; p++) NAME(LETTER, gemm)(order, left_is, right_is, m, n, k, alpha, \\
        a + p * sa, lda, b + p * sb, ldb, beta, c + p * sc, ldc); \\
    calls_of_one -= count; calls_of_many++; \\
}
#define NUMBER_ITSELF(x) (x)
#define FLOAT_THERE(x) (*(const float complex *)(x))
#define DOUBLE_THERE(x) (*(const double complex *)(x))
PRODUCT(s, float, float, NUMBER_ITSELF)
PRODUCT(d, double, double, NUMBER_ITSELF)
PRODUCT(c, float complex, const void *, FLOAT_THERE)
PRODUCT(z, double complex, const void *, DOUBLE_THERE)
"""


def compile_library(folder, naming, integer="int", wrong="", setter="openblas_set_num_threads"):
    """Compile a small BLAS library; skip the test where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = folder / "fake.c"
    source.write_text(SOURCE)
    library = folder / "libfake.so"
    before, after = naming
    pasted = f"{before}cblas_##LETTER##FUNCTION"
    if after:
        pasted += f"##{after}"
    options = [f"-DINT={integer}", f"-DWRONG={wrong}", f"-DSETTER={setter}"]
    name = f"-DNAME(LETTER,FUNCTION)={pasted}"
    command = [compiler, "-shared", "-fPIC", "-O1", "-w", name, *options, "-o", str(library)]
    subprocess.run([*command, str(source)], check=True)
    return library


@pytest.fixture(scope="module")
def openblas():
    """Return the OpenBLAS of scipy, which is not the one of numpy."""
    file = find_file(OPENBLAS)
    if file is None:
        pytest.skip("scipy has no OpenBLAS of its own")
    return load_blas(OPENBLAS, file.path)


@pytest.fixture
def unchosen(monkeypatch):
    """Let this process choose its BLAS anew, and numpy's again after the test."""
    monkeypatch.setattr(blas_choice, "_choice", blas_choice._Choice())
    monkeypatch.delenv("EINMPI_BLAS", raising=False)
    return monkeypatch


def random_array(random, shape, dtype):
    values = random.standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        values = values + 1j * random.standard_normal(shape)
    return values.astype(dtype)


@st.composite
def stacks(draw):
    """Draw the shapes of a product of stacks, and how the last two axes of each are stored."""
    rows, depth, columns = (draw(st.integers(2, 6)) for _ in range(3))
    stack = draw(st.lists(st.integers(1, 3), max_size=3))
    repeated = [draw(st.booleans()) for _ in stack]
    kinds = [draw(st.sampled_from(["rows", "columns", "part", "every other"])) for _ in range(3)]
    return rows, depth, columns, tuple(stack), repeated, kinds


def stored(random, shape, dtype, kind):
    """Return a random array of this shape, with its last two axes stored in some way."""
    *stack, rows, columns = shape
    if kind == "columns":
        return random_array(random, (*stack, columns, rows), dtype).swapaxes(-1, -2)
    if kind == "part":
        return random_array(random, (*stack, rows + 1, columns + 2), dtype)[..., 1:, 2:]
    if kind == "every other":  # BLAS cannot read it
        return random_array(random, (*stack, rows, 2 * columns), dtype)[..., ::2]
    return random_array(random, shape, dtype)


@settings(max_examples=50, deadline=None)
@given(stacks(), st.sampled_from(DTYPES))
def check_products(library, drawn, dtype):
    rows, depth, columns, stack, repeated, kinds = drawn
    random = np.random.default_rng(rows + 7 * depth)
    short = tuple(1 if once else extent for extent, once in zip(stack, repeated, strict=True))
    left = stored(random, (*stack, rows, depth), dtype, kinds[0])
    right = stored(random, (*short, depth, columns), dtype, kinds[1])
    out = stored(random, (*stack, rows, columns), dtype, kinds[2])
    multiply = prepare_product(library, left, right, out)
    multiply(left, right, out)
    tolerance = 1e-4 if dtype in ("float32", "complex64") else 1e-12
    np.testing.assert_allclose(out, left @ right, atol=tolerance)


def test_products_by_another_library_are_those_of_numpy(openblas, monkeypatch):
    monkeypatch.setattr(products, "MIN_MULTIPLICATIONS", 0)
    check_products(openblas)


@pytest.mark.parametrize(
    ("naming", "integer"),
    [(("", ""), "int"), (("", "_64"), "long long"), (("scipy_", "64_"), "long long")],
)
def test_libraries_with_other_names_and_integers(tmp_path, monkeypatch, naming, integer):
    path = compile_library(tmp_path, naming, integer)
    library = load_blas(OPENBLAS, str(path))
    assert library.largest_extent == (2**31 - 1 if integer == "int" else 2**63 - 1)
    monkeypatch.setattr(products, "MIN_MULTIPLICATIONS", 0)
    check_products(library)


def test_a_stack_is_one_call_where_the_library_can(tmp_path, monkeypatch):
    path = compile_library(tmp_path, ("", ""))
    library = load_blas(OPENBLAS, str(path))
    in_library = ctypes.CDLL(str(path))
    one = ctypes.c_int.in_dll(in_library, "calls_of_one")
    many = ctypes.c_int.in_dll(in_library, "calls_of_many")
    random = np.random.default_rng(0)
    left = random.standard_normal((2, 3, 64, 128))
    right = random.standard_normal((2, 3, 128, 64))
    out = np.empty((2, 3, 64, 64))
    before = one.value
    prepare_product(library, left, right, out)(left, right, out)
    assert (one.value - before, many.value) == (0, 1)
    np.testing.assert_allclose(out, left @ right, atol=1e-11)
    monkeypatch.setattr(products, "MIN_MULTIPLICATIONS", 2**19)
    repeated = right[:1]  # the same matrices for both halves of the stack: one by one
    prepare_product(library, left, repeated, out)(left, repeated, out)
    assert (one.value - before, many.value) == (6, 1)
    np.testing.assert_allclose(out, left @ repeated, atol=1e-11)


def test_what_stays_with_numpy(openblas):
    def product(left, right, dtype="float64"):
        out = np.empty((*left.shape[:-1], right.shape[-1]), dtype)
        return prepare_product(openblas, left, right, out)

    large = np.ones((200, 200))
    assert product(large, np.ones((200, 200))) is not np.matmul
    assert product(large, large) is not np.matmul
    assert product(large, large.T) is np.matmul
    assert product(np.ones((20, 20)), np.ones((20, 20))) is np.matmul
    assert product(np.ones((1, 3000)), np.ones((3000, 3000))) is np.matmul
    assert product(large[::2, ::2], np.ones((100, 300))) is np.matmul
    assert product(large.astype(int), large.astype(int), "int64") is np.matmul


@pytest.mark.parametrize("subscripts", ["ij,jk->ik", "ij,kj->ki", "bij,bjk->bik", "ija,ajk->ik"])
def test_contractions_use_the_chosen_library(openblas, unchosen, subscripts):
    calls = []
    functions = openblas.functions["float64"]

    def multiply(*arguments):
        calls.append(arguments)
        functions.multiply(*arguments)

    noting = replace(openblas, functions={"float64": replace(functions, multiply=multiply)})
    unchosen.setattr(blas_choice._choice, "made", BlasChoice(noting, "for this test"))
    einsum = einsum_of(subscripts, i=140, j=150, k=160, a=3, b=2)
    arrays = arrays_of(einsum, ("float64", "float64"))
    out = np.empty(einsum.bound)
    compute_by_blas(recognise_contraction(einsum), arrays, out)
    assert calls
    np.testing.assert_allclose(out, np.einsum(subscripts, *arrays), atol=1e-10)


def test_products_that_are_added_use_the_chosen_library(tmp_path, unchosen):
    path = compile_library(tmp_path, ("", ""))
    calls = ctypes.c_int.in_dll(ctypes.CDLL(str(path)), "calls_of_one")
    unchosen.setenv("EINMPI_BLAS", str(path))
    use_blas()
    before = calls.value
    out = np.zeros((2, 2))
    add_product(np.ones((2, 3)), np.ones((3, 2)), out, 2.0, 0.0)
    assert calls.value == before + 1
    np.testing.assert_array_equal(out, 6.0)


# ---- threads -------------------------------------------------------------------------------------


def test_threads_of_the_library(tmp_path, unchosen):
    path = compile_library(tmp_path, ("", ""))
    threads = ctypes.c_int.in_dll(ctypes.CDLL(str(path)), "threads")
    unchosen.setenv("EINMPI_BLAS", str(path))
    use_blas()
    set_blas_threads(3)
    assert threads.value == 3
    with one_blas_thread():
        assert threads.value == 1
    assert threads.value == 3


def test_two_threads_that_want_one_thread_of_the_library(tmp_path, unchosen):
    """The limit lasts until the last of them has finished, and is lifted then."""
    path = compile_library(tmp_path, ("", ""))
    threads = ctypes.c_int.in_dll(ctypes.CDLL(str(path)), "threads")
    unchosen.setenv("EINMPI_BLAS", str(path))
    use_blas()
    set_blas_threads(3)
    first = one_blas_thread()
    second = one_blas_thread()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert threads.value == 1
    second.__exit__(None, None, None)
    assert threads.value == 3


def test_two_threads_that_want_one_thread_of_numpys_blas(unchosen):
    limits = blas_choice._threadpools()
    with limits.limit(limits=2):
        before = [each["num_threads"] for each in limits.info()]
        first = one_blas_thread()
        second = one_blas_thread()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert all(each["num_threads"] == 1 for each in limits.info())
        second.__exit__(None, None, None)
        assert [each["num_threads"] for each in limits.info()] == before == [2] * len(before)


# ---- the choice ----------------------------------------------------------------------------------


def with_records(monkeypatch, *records):
    monkeypatch.setattr(blas_choice, "BLAS_LIBRARIES", records)


def test_auto_takes_a_library_that_suits_the_machine(openblas, unchosen):
    with_records(unchosen, replace(OPENBLAS, name="best", suits=lambda: True))
    choice = use_blas("auto", "job.toml")
    assert str(choice) == f"best {openblas.version}" and choice.reason == f"found {openblas.path}"
    left = np.ones((200, 200))
    assert matrix_product(left, np.ones((200, 200)), left) is not np.matmul


def test_auto_leaves_libraries_for_other_machines(unchosen):
    with_records(unchosen, replace(OPENBLAS, suits=lambda: False))
    choice = use_blas("auto", "job.toml")
    assert choice.library is None and choice.problem == ""
    left = np.ones((200, 200))
    assert matrix_product(left, np.ones((200, 200)), left) is np.matmul


def test_auto_stays_with_a_numpy_that_has_the_library(unchosen):
    unchosen.setattr(
        blas_choice, "loaded_blas", lambda: {"internal_api": "mkl", "version": "2026.2"}
    )
    with_records(unchosen, replace(OPENBLAS, suits=lambda: True))
    choice = use_blas()
    assert choice.library is None and choice.reason == "numpy has mkl 2026.2"


def test_auto_leaves_a_library_that_cannot_be_used(tmp_path, unchosen):
    broken = tmp_path / "libbroken.so"
    broken.write_text("not a library")
    unchosen.setattr(blas_choice, "find_file", lambda library: FoundFile(str(broken)))
    with_records(unchosen, replace(OPENBLAS, name="best", suits=lambda: True))
    choice = use_blas()
    assert choice.library is None and str(broken) in choice.problem


def test_a_library_in_a_folder_of_others_is_not_used(tmp_path, unchosen):
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / "libopenblas.so").touch()
    folder.chmod(0o777)
    unchosen.setenv("OPENBLAS_ROOT", str(tmp_path))
    record = replace(OPENBLAS, name="best", suits=lambda: True, files=("libopenblas.so",))
    with_records(unchosen, replace(record, packages=()))
    choice = use_blas()
    assert choice.library is None
    assert choice.problem == f"{folder}: other users can write to it (mode 777)"


def test_wrong_products_are_noticed(tmp_path):
    path = compile_library(tmp_path, ("", ""), wrong="+1")
    with pytest.raises(UnusableLibraryError, match="its product of float32 matrices is wrong"):
        load_blas(OPENBLAS, str(path))


def test_a_library_without_the_functions(tmp_path):
    path = compile_library(tmp_path, ("my_", ""))
    with pytest.raises(UnusableLibraryError, match="it has no function cblas_dgemm"):
        load_blas(OPENBLAS, str(path))


def test_a_process_has_one_blas(unchosen):
    assert use_blas("numpy", "job.toml").library is None
    assert use_blas("auto", "job.toml").library is None
    with pytest.raises(InputError) as error:
        use_blas("openblas", "job.toml")
    assert str(error.value) == (
        "job.toml: blas is 'openblas', but this process multiplies with numpy already; expected "
        "'numpy' or 'auto'; a process has one BLAS; EINMPI_BLAS chooses it"
    )


def test_another_path_later_is_refused(tmp_path, unchosen):
    """A path that leads to the library in use is not another one."""
    path = compile_library(tmp_path, ("", ""))
    unchosen.setenv("EINMPI_BLAS", str(path))
    choice = use_blas()
    link = tmp_path / "link.so"
    link.symlink_to(path)
    for same in (path, link):
        unchosen.setenv("EINMPI_BLAS", str(same))
        assert use_blas() is choice
    unchosen.setenv("EINMPI_BLAS", "/other/libblas.so")
    with pytest.raises(InputError) as error:
        use_blas()
    assert str(error.value) == (
        f"EINMPI_BLAS: blas is '/other/libblas.so', but this process multiplies with {path} "
        f"already; expected {str(path)!r} or 'auto'; a process has one BLAS; EINMPI_BLAS chooses it"
    )


def test_a_path_after_numpys_own_blas_is_refused(unchosen):
    use_blas("numpy", "job.toml")
    unchosen.setenv("EINMPI_BLAS", "/other/libblas.so")
    with pytest.raises(InputError, match="this process multiplies with numpy already"):
        use_blas()


def test_the_place_of_a_library_that_is_not_installed(tmp_path, unchosen):
    unchosen.setattr(blas_choice, "find_file", lambda library: None)
    text = 'program = "Z[i] = A[i]"\n[inputs]\nA = { shape = [4], random = "normal" }\n'
    file = tmp_path / "job.toml"
    file.write_text(f'{text}[run]\nblas = "mkl"\n')
    with pytest.raises(InputError, match=r"job.toml:5:1: the BLAS mkl is not installed"):
        einmpi.run(einmpi.load(file))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "opnblas",
            "EINMPI_BLAS: there is no BLAS 'opnblas'; expected one of auto, numpy, mkl, aocl, "
            "nvpl, accelerate, blis, openblas (did you mean openblas?)",
        ),
        ("/no/lib.so", "EINMPI_BLAS: there is no file '/no/lib.so'; expected the path of a BLAS"),
        (str(ROOT / "README.md"), "cannot be used: "),
    ],
)
def test_wrong_values_of_the_variable(unchosen, value, message):
    unchosen.setenv("EINMPI_BLAS", value)
    with pytest.raises(InputError) as error:
        use_blas()
    assert message in str(error.value)


def test_a_library_that_is_not_installed(unchosen):
    unchosen.setattr(blas_choice, "find_file", lambda library: None)
    with pytest.raises(InputError) as error:
        use_blas("mkl", "job.toml")
    assert str(error.value) == (
        "job.toml: the BLAS mkl is not installed; expected an installed library; pip install mkl"
    )


def test_a_job_cannot_name_a_path(tmp_path, unchosen):
    with pytest.raises(InputError) as error:
        use_blas(str(tmp_path / "lib.so"), "job.toml")
    assert "the environment variable EINMPI_BLAS takes paths" in str(error.value)


def test_a_path_that_others_can_write(tmp_path, unchosen):
    path = tmp_path / "libblas.so"
    path.touch()
    path.chmod(0o666)
    unchosen.setenv("EINMPI_BLAS", str(path))
    with pytest.raises(InputError) as error:
        use_blas()
    assert "other users can write to it (mode 666)" in str(error.value)


def test_where_files_are_looked_for(tmp_path, monkeypatch):
    library = next(library for library in BLAS_LIBRARIES if library.name == "mkl")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.delenv("MKLROOT", raising=False)
    assert find_file(library) is None
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libmkl_rt.so.2").touch()
    (tmp_path / "lib" / "libmkl_rt.so.3").touch()
    assert find_file(library) == FoundFile(str(tmp_path / "lib" / "libmkl_rt.so.3"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("MKLROOT", str(tmp_path))
    assert find_file(library).variable == "MKLROOT"


def test_the_threads_of_mkl_clash_with_no_other_library(tmp_path, monkeypatch):
    class OpenMP:
        def kmp_set_blocktime(self, milliseconds):
            self.milliseconds = milliseconds

    openmp = OpenMP()
    loaded = []

    def load(path):
        loaded.append(path)
        return openmp

    monkeypatch.delenv("KMP_BLOCKTIME", raising=False)
    monkeypatch.setattr(records, "_load", load)
    monkeypatch.setattr(records, "_loaded_libraries", lambda: {"libomp.so"})
    assert records._mkl_threading_layer(str(tmp_path)) == 1 and not loaded
    (tmp_path / "libmkl_gnu_thread.so.3").touch()
    assert records._mkl_threading_layer(str(tmp_path)) == 3
    monkeypatch.setattr(records, "_loaded_libraries", lambda: {"libiomp5.so"})
    assert records._mkl_threading_layer(str(tmp_path)) == 0
    monkeypatch.setattr(records, "_loaded_libraries", set)
    assert records._mkl_threading_layer(str(tmp_path)) == 0
    assert loaded == ["libgomp.so.1", "libiomp5.so", str(tmp_path / "libiomp5.so")]
    assert openmp.milliseconds == 1


# ---- runs ----------------------------------------------------------------------------------------


def test_a_run_with_another_library(openblas, tmp_path):
    report = tmp_path / "run.json"
    command = [sys.executable, "-m", "einmpi", "run", "jobs/chain.toml", "--set", "s=200"]
    environment = {**os.environ, "EINMPI_BLAS": "openblas"}
    done = subprocess.run(
        [*command, "--json", str(report)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"BLAS openblas {openblas.version}" in done.stdout
    assert json.loads(report.read_text())["blas"] == f"openblas {openblas.version}"


@pytest.mark.slow
def test_ranks_with_different_libraries(openblas):
    program = """
import os
from mpi4py import MPI
import einmpi
os.environ["EINMPI_BLAS"] = "numpy" if MPI.COMM_WORLD.rank else "openblas"
try:
    einmpi.run(einmpi.load("jobs/chain.toml", s=20))
except einmpi.EinmpiError as error:
    print(error)
"""
    done = run_mpi(2, program)
    expected = "einmpi: rank 1 has another command, job, BLAS or version of einmpi than rank 0"
    assert done.stdout.count(expected) == 2, done.stderr


# ---- the doctor ----------------------------------------------------------------------------------


def test_what_the_doctor_says():
    examine = libraries.PROBES["blas"]
    used = {"blas": "mkl 2026.2", "path": "/lib/libmkl_rt.so.3", "reason": "", "problem": ""}
    found = examine(used)
    assert (found.state, found.text) == ("ok", "mkl 2026.2, /lib/libmkl_rt.so.3")
    refused = {"blas": "numpy's own", "path": "", "reason": "mkl is not used", "problem": "broken"}
    found = examine(refused)
    assert (found.state, found.text) == ("note", "numpy's own; mkl is not used: broken")
    assert found.advice == "mend it, or export EINMPI_BLAS=numpy"
