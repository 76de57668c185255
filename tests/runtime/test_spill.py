"""Jobs that do not fit into memory: same results, no more memory than allowed, no files left."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoint_jobs import programs, write_job
from distributed import assert_close, dry_run, run_on_threads
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpi_helpers import needs_mpirun, run_mpi
from paths import ROOT
from run_cases import cases

import einmpi
from einmpi.comm.base import ALONE
from einmpi.report import results as figures
from einmpi.runtime import host_memory as scratch_module
from einmpi.runtime.buffers import Buffers
from einmpi.runtime.compute import compute
from einmpi.runtime.cpu.backend import NumpyBackend
from einmpi.runtime.host_memory import Scratch
from einmpi.schedule.lower import lower
from einmpi.schedule.spill import out_of_core

CASES = cases()


def least_memory(job, ranks, arrays=None):
    """Return the least memory, as the error of a plan without enough names it."""
    with pytest.raises(einmpi.InputError) as caught:
        run_on_threads(job, ranks, arrays, memory=1)
    return int(re.search(r"at least (\d+) bytes", str(caught.value))[1])


def between(least, most, part):
    """Return a limit between the least that suffices (0) and all that a plan wants (1)."""
    return round(least * (most / least) ** part)


def with_files(job, arrays, folder):
    """Return the same job with its inputs in files."""
    text = [f'program = """{job.source.text}"""']
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
        text.append(f'inputs.{name} = {{ file = "{name}.npy" }}')
    (folder / "job.toml").write_text("\n".join(text))
    return einmpi.load(folder / "job.toml")


# ---- the same results ---------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name",
    [
        "gather",
        "scattered",
        "diagonal",
        "four dimensions",
        "chain, odd",
        *(pytest.param(name, marks=pytest.mark.slow) for name in CASES),
    ],
)
def test_every_case_with_little_memory(name, tmp_path):
    job, arrays = CASES[name]
    wanted = einmpi.reference(job, arrays)
    filed = with_files(job, arrays, tmp_path) if arrays else job
    for ranks, part in ((1, 0.6), (2, 0.7), (3, 0.4)):
        memory = between(least_memory(filed, ranks), einmpi.plan(filed, ranks).peak, part)
        done = run_on_threads(filed, ranks, memory=memory)
        assert_close(done.outputs, wanted)
        assert max(done.peaks) <= memory
        assert sum(dry_run(done.plan)) == done.moved
        if arrays:  # given to every rank, they stay where they are
            free = run_on_threads(job, ranks, arrays)
            memory = between(least_memory(job, ranks, arrays), free.plan.peak, 0.5)
            assert_close(run_on_threads(job, ranks, arrays, memory=memory).outputs, wanted)


def check_random_program(data, folder):
    program, sizes = data.draw(programs())
    inputs = "\n".join(
        f'{name} = {{ shape = [{sizes[a]}, {sizes[b]}], random = "normal" }}'
        for name, (a, b) in {"X": "nm", "Y": "mn"}.items()
    )
    job = einmpi.load(write_job(folder, program, inputs, ""))
    ranks = data.draw(st.integers(1, 4))
    memory = between(
        least_memory(job, ranks), einmpi.plan(job, ranks).peak, data.draw(st.floats(0, 1))
    )
    done = run_on_threads(job, ranks, memory=memory)
    assert_close(done.outputs, einmpi.reference(job))
    assert max(done.peaks) <= memory


@settings(
    max_examples=8,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_random_programs_with_any_limit(data, tmp_path_factory):
    check_random_program(data, tmp_path_factory.mktemp("any"))


@pytest.mark.slow
@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_many_random_programs_with_any_limit(data, tmp_path_factory):
    check_random_program(data, tmp_path_factory.mktemp("any"))


def test_the_same_limit_gives_the_same_bits():
    job, arrays = CASES["chain, odd"]
    memory = einmpi.plan(job, 2).peak // 4
    one, two = (run_on_threads(job, 2, arrays, memory=memory).outputs["Z"] for _ in range(2))
    assert one.tobytes() == two.tobytes()


def test_ranks_that_compute_the_same_get_the_same_bits():
    """Even if they hold parts of an input that differ in size. run_on_threads compares the bits."""
    numbers = np.random.default_rng(1).standard_normal((13, 7, 17))
    job = einmpi.program("n = sum(A[i,j,k]); Z[k] = sum(A[i,j,k])", A=numbers)
    done = run_on_threads(job, 8, {"A": numbers}, strategy="replicate", memory=4000)
    assert done.spilled and done.peaks[0] > min(done.peaks)
    np.testing.assert_allclose(done.outputs["n"], numbers.sum())


def test_figures_of_large_results(monkeypatch):
    """Results may be larger than memory: figures are computed piece by piece."""
    job, arrays = CASES["complex"]
    wanted = np.linalg.norm(einmpi.reference(job, arrays)["Z"])
    monkeypatch.setattr(figures, "NORM_BLOCK_ELEMENTS", 5)
    outputs = einmpi.run(job, arrays)
    assert figures.figures(ALONE, outputs)["Z"].norm == pytest.approx(wanted, rel=1e-12)


# ---- kernels in passes --------------------------------------------------------------------------

AGGREGATED = [
    f"Z[i] = {aggregation}(X[i,j] {comparison})"
    for aggregation, comparison in (
        ("sum", ""),
        ("prod", ""),
        ("max", ""),
        ("min", ""),
        ("any", "> 3"),
        ("all", "< 8"),
        ("mean", ""),
    )
]
SHAPED = [
    "Z[i,k] = sum(X[i,j] * Y[j,k])",
    "Z[i] = X[i,i] + i",
    "t = sum(X[i,i] * i)",
    "Z[k,i] = max(X[i,j] - Y[j,k])",
    "Z[i,j] = where(i < j, X[i,j], X[j,i] * i)",
    "Z[i,k] = sum(X[n[i],j] * Y[j,k])",
]


def as_passes(kernel, arrays, memory, kept):
    """Compute a kernel in passes, with its arrays outside or, if kept, in memory.

    Return the result and the step.
    """
    inside = tuple(k for k, slot in enumerate(kernel.operands) if slot.tensor in kept)
    step = out_of_core(kernel, memory, inside)
    if step is None:
        return None, None
    buffers = Buffers(NumpyBackend())
    for slot in dict.fromkeys(kernel.operands):
        if slot.tensor in kept:
            buffers.put(slot, arrays[slot.name])
        else:
            buffers.place(slot)
            buffers[slot][...] = arrays[slot.name]
    before = buffers.bytes_in_use
    buffers.peak = 0
    buffers.place(kernel.target)
    compute(step, buffers, None)
    assert buffers.peak - before <= step.working_bytes <= memory
    assert (buffers.fetched, buffers.bytes_in_use) == (step.tiles.fetched, before)
    return buffers[kernel.target], step


SLOW_DTYPES = [
    pytest.param(x, marks=pytest.mark.slow)
    for x in ("float32", "complex128", "int64", "int32", "float16")
]


@pytest.mark.parametrize("dtype", ["float64", "bool", *SLOW_DTYPES])
def test_every_aggregation_and_dtype_in_passes(dtype):
    rng = np.random.default_rng(5)
    numbers = rng.integers(0, 3, (17, 17)).astype(dtype)
    for text in AGGREGATED + SHAPED:
        given = {"X": numbers, "Y": numbers[:, :5].copy(), "n": rng.integers(0, 17, 17)}
        try:
            job = einmpi.program(
                text, **{name: array for name, array in given.items() if f"{name}[" in text}
            )
        except einmpi.InputError:
            continue  # such as the greatest of complex numbers
        for rank in range(2):
            for kernel in (
                kernel for step in lower(einmpi.plan(job, 2), rank).steps for kernel in step.kernels
            ):
                arrays = {
                    slot.name: rng.integers(0, 3, slot.shape).astype(slot.dtype)
                    for slot in kernel.operands
                }
                wanted = np.empty(kernel.target.shape, kernel.target.dtype)
                NumpyBackend().compute_kernel(
                    kernel, [arrays[slot.name] for slot in kernel.operands], wanted
                )
                cut = 0
                for memory in (300, 1000):
                    for kept in ((), ("X",)):
                        found, step = as_passes(kernel, arrays, memory, kept)
                        if step is not None:
                            np.testing.assert_array_equal(found, wanted, err_msg=f"{text}: {step}")
                            cut += any(
                                size < kernel.einsum.extent[label]
                                for (label,), size in zip(
                                    step.tiles.rows, step.tiles.block, strict=True
                                )
                            )
                assert (
                    cut or sum(slot.nbytes for slot in (*kernel.operands, kernel.target)) < 1000
                ), text


def test_an_error_in_a_pass_names_the_vertex(tmp_path):
    arrays = {"W": np.zeros((8, 40)), "n": np.full(40, 8)}
    job = with_files(einmpi.program("Z[i,j] = W[n[i],j]", **arrays), arrays, tmp_path)
    with pytest.raises(
        einmpi.EinmpiError,
        match=r"job.toml:1:14: Z: an index from 8 to 8 is out of range; expected 0 to 7$",
    ):
        einmpi.run(job, memory=4000)


# ---- scratch files ------------------------------------------------------------------------------


def test_scratch_files_have_no_names_and_last_as_long_as_their_arrays(tmp_path):
    scratch = Scratch(str(tmp_path))
    free = os.statvfs(tmp_path).f_bavail
    array = scratch.array((3, 1 << 20), "float32")
    array[1] = 7
    assert list(tmp_path.iterdir()) == [] and array.sum() == 7 << 20
    mapped = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line
    ]
    assert len(mapped) == 1 and free >= 0
    del array
    assert not [
        line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line
    ]


def test_the_limit_on_open_files_is_raised(tmp_path):
    """Each mapped file counts as open."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 20
    scratch_module._allow_many_files.cache_clear()
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
    try:
        arrays = [Scratch(str(tmp_path)).array((10,), "float64") for _ in range(40)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
    assert len(arrays) == 40


def test_copies_are_done_in_order(tmp_path):
    scratch = Scratch(str(tmp_path))
    slow, fast = (
        scratch.array((1000, 1000), "float64"),
        np.random.default_rng(0).standard_normal((1000, 1000)),
    )
    back = np.empty_like(fast)
    scratch.begin_copy(fast, slow)
    scratch.begin_copy(slow[:, ::2], back[:, ::2])
    scratch.begin_copy(slow[:, 1::2], back[:, 1::2]).wait()
    np.testing.assert_array_equal(back, fast)


JOB = """
program = "Z[i,k] = sum(A[i,j] * B[j,k])"
inputs.A = { shape = [300, 300], random = "normal" }
inputs.B = { shape = [300, 300], random = "normal", seed = 2 }
plan.memory = "600 kB"
"""


def einmpi_command(folder, *arguments, before="", job=JOB, **environment):
    (folder / "job.toml").write_text(job)
    command = f"{before} exec {sys.executable} -m einmpi job.toml {' '.join(arguments)}"
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "EINMPI_SCRATCH": "", **environment},
    )


def test_a_full_disk_is_reported_in_one_line(tmp_path):
    """Files are limited to 100 KiB here."""
    done = einmpi_command(
        tmp_path,
        before="ulimit -f 100;",
        EINMPI_SCRATCH=str(tmp_path),
        PYTHONDONTWRITEBYTECODE="1",  # of large files, a part would be left
    )
    assert (done.returncode, done.stderr) == (1, f"scratch file in {tmp_path}: File too large\n")


def test_an_impossible_folder_is_reported_in_one_line(tmp_path):
    job = tmp_path / "odd.toml"
    job.write_text(JOB + 'run.scratch = "a\\u0000b"\n')
    with pytest.raises(
        einmpi.InputError,
        match=r"odd.toml: '.*a\\x00b': embedded null byte; expected a folder to write to$",
    ):
        einmpi.run(einmpi.load(job))


@pytest.mark.parametrize("mode", [0o777, 0o2775])
def test_a_scratch_folder_that_is_open_to_others_is_refused(tmp_path, monkeypatch, mode):
    (tmp_path / "job.toml").write_text(JOB)
    job = einmpi.load(tmp_path / "job.toml")
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.setenv("EINMPI_SCRATCH", str(folder))
    with pytest.raises(einmpi.InputError) as caught:
        einmpi.run(job)
    assert str(caught.value) == (
        f"EINMPI_SCRATCH: {folder}: other users can write to it (mode {mode:o}); "
        "expected a folder that only you can write to, or one with the sticky bit like /tmp"
    )
    folder.chmod(mode | 0o1000)
    einmpi.run(job)


def test_scratch_files_never_have_names_where_the_system_allows_that(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError("a name was needed")

    monkeypatch.setattr(scratch_module.tempfile, "mkstemp", refuse)
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_RDWR))
    except (AttributeError, OSError):
        pytest.skip("this file system has no files without names")
    array = Scratch(str(tmp_path)).array((1000,), "float64")
    array[:] = 1.0
    assert list(tmp_path.iterdir()) == []


def test_json_and_text_report_what_was_spilled(tmp_path):
    done = einmpi_command(tmp_path, "--json run.json")
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "run.json").read_text())
    assert data["bytes_spilled"] == data["bytes_spilled_predicted"] == 3 * 300 * 300 * 8
    assert data["bytes_peak"] <= data["bytes_peak_predicted"] == 600_000
    assert data["bytes_fetched"] >= 2 * 300 * 300 * 8
    assert "2.1 MiB were written to scratch files" in done.stdout


def test_a_loop_reports_what_its_steps_spill(tmp_path):
    job = """
program = '''
T[i,k] = sum(A[i,j] * B[j,k])
U[i,k] = sum(T[i,j] * A[j,k])
Z[i,k] = U[i,k] + T[i,k]
'''
inputs.A = { shape = [300, 300], random = "normal" }
inputs.B = { shape = [300, 300], random = "normal", seed = 2 }
plan = { memory = "1800 kB", recompute = "none" }
loop = { steps = 3, carry = { B = "Z" } }
"""
    done = einmpi_command(tmp_path, "--json run.json", job=job)
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "run.json").read_text())
    assert data["bytes_spilled"] == data["bytes_spilled_predicted"] >= 3 * 300 * 300 * 8
    assert data["bytes_peak"] <= data["bytes_peak_predicted"] <= 1_800_000
    assert "were written to scratch files" in done.stdout


def test_a_run_that_is_killed_leaves_no_files(tmp_path):
    code = (
        "import os, signal, einmpi\nfrom einmpi.runtime import compute\n"
        "def kill(*_): os.kill(os.getpid(), signal.SIGKILL)\n"
        "compute._compute_out_of_core = kill\neinmpi.run(einmpi.load('job.toml'))"
    )
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "scratch").mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "EINMPI_SCRATCH": str(tmp_path / "scratch"),
    }
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.slow
@needs_mpirun
@pytest.mark.mpirun
def test_on_real_ranks(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    done = run_mpi(2, ["-m", "einmpi", "verify", "job.toml", "--memory", "300kB"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    job = einmpi.load(tmp_path / "job.toml")
    assert any(
        s.is_out_of_core
        for s in lower(einmpi.plan(replace(job, memory=None), 2, memory="300kB"), 0).steps
    )


@pytest.mark.slow
def test_a_process_stays_near_its_limit(tmp_path):
    """Its own memory, without the files it maps, is limited: 288 MB of tensors in 48 MB."""
    (tmp_path / "job.toml").write_text(JOB.replace("300", "3000"))
    most = {}
    for limit in ("48MB", "1GB"):
        command = [sys.executable, "-m", "einmpi", "job.toml", "--memory", limit, "--quiet"]
        with subprocess.Popen(
            command,
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
        ) as process:
            most[limit] = 0
            while process.poll() is None:
                text = Path(f"/proc/{process.pid}/status").read_text()
                found = re.search(r"RssAnon:\s+(\d+) kB", text)
                most[limit] = max(most[limit], int(found[1]) * 1024 if found else 0)
                time.sleep(0.01)
        assert process.returncode == 0
    assert most["1GB"] - most["48MB"] >= 216e6 - 48e6 - 64 * 2**20
