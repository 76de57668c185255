"""What the system counts for a process: the planned peak and a constant bound how much it grows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import h5py
import pytest
from paths import ROOT

MIB = 2**20
# What docs/howto_memory.md states: 64 MiB for kernels and 64 MiB for files.
UNPLANNED_BYTES = 128 * MIB

RUN = """
import gc, json, sys
import einmpi

def status(key):
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(key):
                return int(line.split()[1]) * 1024

def compute(job):
    outputs = einmpi.run(job)
    for spec in job.outputs:
        outputs[spec.name].to_hdf5(spec.file, spec.inside, spec.chunks, spec.compression)

for job in map(einmpi.load, sys.argv[2:]):
    if sys.argv[1] == "warm":
        compute(job)  # libraries are loaded and kernels are compiled
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts anew
    before = status("VmRSS:")
    compute(job)
    print(json.dumps([einmpi.plan(job, 1).peak, status("VmHWM:") - before]), flush=True)
"""

MATRICES = """
inputs.A = {{ shape = [{0}, {0}], random = "normal" }}
inputs.B = {{ shape = [{0}, {0}], random = "normal" }}
"""
CASES = {
    "product": ("Z[i,k] = sum(A[i,j] * B[j,k])", 1500),
    "copied operands": ("Z[k,i] = sum(A[j,i] * B[k,j] * (A[i,j] > 0))", 800),
    "distances": ("Z[i,k] = sum((A[i,j] - B[j,k])**2)", 800),
    "compiled": ("Z[i,k] = max(abs(A[i,j] - B[j,k]))", 400),
    "elementwise": ("Z[i,j] = exp(A[i,j]) * B[j,i] + i", 2000),
    "aggregated": ("Z[j] = max[i](abs(A[i,j] + B[j,i]))", 2000),
}


def can_reset_the_peak():
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def measure(folder, programs, lines="", start="warm"):
    """Run jobs in a process; return the planned peak of each, and by how much the process grew."""
    files = []
    for number, (program, extent) in enumerate(programs):
        file = folder / f"job{number}.toml"
        file.write_text(f'program = "{program}"\n{MATRICES.format(extent)}{lines}')
        files.append(str(file))
    # Freed arrays go back to the system at once.
    settings = {"OPENBLAS_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, start, *files],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **settings},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


needs_peak = pytest.mark.skipif(not can_reset_the_peak(), reason="the peak cannot be reset here")


@pytest.mark.slow
@needs_peak
def test_a_process_grows_by_the_planned_peak_and_a_constant(tmp_path):
    for name, (planned, grown) in zip(CASES, measure(tmp_path, CASES.values()), strict=True):
        assert planned / 2 <= grown <= planned + UNPLANNED_BYTES, (name, planned, grown)


@needs_peak
@pytest.mark.parametrize(
    "compression",
    ["", pytest.param('compression = "gzip", ', id="gzip", marks=pytest.mark.slow)],
)
def test_tiny_chunks_take_little_memory(tmp_path, compression):
    """HDF5 needs kilobytes for each chunk that is in memory, however small it is."""
    output = f'file = "Z.h5", dataset = "/Z", {compression}chunks = [1, 1]'
    # The first job loads the libraries. Small pieces of memory are kept for later once they have
    # been used, so the second one must not have run before.
    programs = [("Z[i,j] = A[i,j] + B[i,j]", 10), ("Z[i,j] = A[i,j] + B[i,j]", 150)]
    _, (planned, grown) = measure(tmp_path, programs, f"outputs.Z = {{ {output} }}\n", "cold")
    with h5py.File(tmp_path / "Z.h5") as file:
        assert file["Z"].chunks == (1, 1)
    assert grown <= planned + 48 * MIB, (planned, grown)
