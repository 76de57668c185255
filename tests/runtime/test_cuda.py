"""The text of CUDA kernels, run on the CPU by tests/cupy_on_cpu.py, against the reference; compiled by nvcc if it is there."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

if shutil.which("g++") is None:
    pytest.skip("no g++", allow_module_level=True)

import cupy_on_cpu
from cuda_cases import (
    CONTRACTIONS,
    GROUPS,
    check_contraction,
    check_group,
    check_named,
    compute,
    operation_agrees,
    operation_functions,
    operation_signature,
    operations,
)
from runtime.test_fused import NAMED, SIZES, vertex

from einmpi.runtime import cuda, reference
from einmpi.runtime.cuda_words import COMMON

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
NVCC = shutil.which("nvcc") or next((str(p) for p in Path("/usr/local/cuda/bin").glob("nvcc")), None)
OFTEN = ("farthest", "distances", "columns", "softmax", "turned")


@pytest.fixture
def cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    yield cupy_on_cpu.install()
    cuda.kernel_of.cache_clear()


@pytest.mark.parametrize("name", OFTEN)
def test_named(cupy, name):
    check_named(cupy, name, SIZES[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_every_name_and_size(cupy, name):
    for size in SIZES:
        check_named(cupy, name, size)


def operations_agree(cases):
    text = operation_functions(cases)
    for number, (_, kind, operands) in enumerate(cases):
        given, args = operation_signature(kind, operands)
        text += f'extern "C" void run{number}({given}) {{ for (Long i = 0; i < n; ++i) y[i] = k{number}::otimes({args}); }}\n'
    wrong = []
    library = cupy_on_cpu.build(cupy_on_cpu.HOST + COMMON + text)
    for number, (einsum, kind, operands) in enumerate(cases):
        found = np.empty(operands[0].shape, kind)
        addresses = [cupy_on_cpu.address_of(array) for array in (*operands, found)]
        cupy_on_cpu.call(library[f"run{number}"], *addresses, found.size)
        try:
            operation_agrees(einsum, kind, operands, found)
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(text[:700] for text in wrong[:12])


def test_operations_with_equal_dtypes():
    operations_agree([case for case in operations() if len({array.dtype for array in case[2]}) == 1])


@pytest.mark.slow
def test_every_operation_in_every_dtype():
    cases = list(operations())
    for start in range(0, len(cases), 200):
        operations_agree(cases[start : start + 200])


@pytest.mark.parametrize("name", ["softmax"])
def test_groups(cupy, monkeypatch, name):
    check_group(cupy, name, "float16", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPS)
def test_every_group(cupy, monkeypatch, name):
    check_group(cupy, name, "float32", monkeypatch)
