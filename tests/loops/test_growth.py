"""Ten thousand steps on two ranks leave memory, open files and communicators as they are."""

import json

import pytest
from mpi_helpers import needs_mpirun, run_mpi

PROGRAM = """
import gc, json, os, sys, tracemalloc
from dataclasses import replace
import numpy as np
import einmpi
from einmpi.api import options_of
from einmpi.comm.mpi import comm_of
from einmpi.job.loop import Loop
from einmpi.loops.running import LoopRun

STEPS = {steps}
WARM = {warm}
TRACED = {traced}
comm = comm_of()
random = np.random.default_rng(0)
job = einmpi.program('''
y[i]      = sum(S[i,j] * x[j])
value     = sum(x[i] * y[i])
x_next[i] = y[i] / norm(y[k])
turned    = norm(x_next[i] - sign(value) * x[i])
''', S=(100, 100), x=(100,))
found = []

def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def look(number, row):
    if number in (WARM, STEPS - 1):
        gc.collect()
        found.append({{
            "files": len(os.listdir("/proc/self/fd")),
            "communicators": len(comm._communicators),
            "kept": len(comm.kept),
            "objects": len(gc.get_objects()),
            "blocks": sys.getallocatedblocks(),
            "bytes": tracemalloc.get_traced_memory()[0],
            "resident": resident_bytes(),
            "prepared": len(run.step.backend.calls.entries),
        }})

loop = Loop(STEPS, {{"x": "x_next"}}, record=("value", "turned"))
run = LoopRun(replace(job, loop=loop), comm, options_of(job), on_row=look)
run.prepare({{"S": random.random((100, 100)), "x": np.ones(100)}})
if TRACED:
    tracemalloc.start()
result = run.run()
assert result.steps == STEPS
print(json.dumps(found))
"""


def check(steps, warm, traced):
    """Compare what a rank has after `warm` steps and after all of them.

    With `traced`, allocated bytes are counted exactly, and a step takes twenty times as long.
    """
    done = run_mpi(2, PROGRAM.format(steps=steps, warm=warm, traced=traced), timeout=900)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        before, after = json.loads(line)
        for name in ("files", "communicators", "kept", "prepared"):
            assert after[name] == before[name], name
        assert after["objects"] <= before["objects"] + 8  # `found` itself has grown
        # What is recorded grows: two numbers a step, 32 bytes each and 8 in a list, which has room
        # for an eighth more.
        recorded = 2 * (steps - warm) * (32 + 9)
        if traced:
            assert after["bytes"] - before["bytes"] <= recorded + 65_536
        else:
            assert after["blocks"] - before["blocks"] <= 2 * (steps - warm) + 200
            assert after["resident"] - before["resident"] <= recorded + 2_097_152


@pytest.mark.slow
@needs_mpirun
def test_steps_leave_nothing_behind():
    check(steps=300, warm=100, traced=True)


@pytest.mark.slow
@needs_mpirun
def test_ten_thousand_steps_leave_nothing_behind():
    check(steps=10_000, warm=1_000, traced=False)
