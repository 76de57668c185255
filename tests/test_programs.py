"""Users' own programs under mpirun in which one rank fails: nobody waits for ever."""

import numpy as np
import pytest
from mpi_helpers import needs_mpirun, run_mpi
from step_kinds import computed_as

import einmpi
from einmpi.comm.threads import run_threads
from einmpi.kernels.cpu import map_and_folds as grouping_rule
from einmpi.runtime.cpu.backend import NumpyBackend

LIMIT = 200  # seconds: a few suffice, and what hangs, hangs for ever

# A rank that crashes prints its Python stack, and then Open MPI prints that of the libraries: only
# if Python's handler comes after its own, so it is not installed before MPI has started.
START = """
import faulthandler, sys
import numpy as np
from mpi4py import MPI
faulthandler.enable()
import einmpi

rank = MPI.COMM_WORLD.rank
I = np.array([0, 1, 2, 7])
job = einmpi.program("G[i] = T[I[i]]\\nZ[k] = sum(G[i] * B[i,k])", T=(8,), I=I, B=(4, 3))
good = {"T": np.arange(8.0), "I": I, "B": np.ones((4, 3))}
step = einmpi.compile(job)
"""

# Each line is one call. Rank 1 alone has a wrong argument or meets a wrong value.
CATCHING = (
    START
    + """
def attempt(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"

class Unreadable:
    shape, dtype = (8,), np.dtype(float)
    def __getitem__(self, key):
        if rank == 1:
            raise KeyError("no such row")
        return good["T"][key]

D = einmpi.DistArray.from_global(np.ones((4, 3)))
wrong = {**good, "I": I + 90 * rank}
calls = [
    lambda: step(wrong),
    lambda: einmpi.run(job, wrong),
    lambda: step({**good, "T": Unreadable()}),
    lambda: step({**good, "B": np.ones((4, 3 + rank))}),
    lambda: einmpi.compile(job, memory=["1 GiB", "much"][rank]),
    lambda: einmpi.open_dataset(["X.npy", "none.npy"][rank]),
    lambda: einmpi.DistArray.from_global(np.ones((4, 3)), parts=[2 + rank, 1]),
    lambda: einmpi.DistArray.from_global(np.ones((4 + rank, 3))),
    lambda: D.to_hdf5(["a.h5", "b.h5"][rank], "/D"),
    lambda: D.gather(root=2 * rank),
    lambda: einmpi.einsum(["ij,jk->ik", "ij,jk->iq"][rank], D, np.ones((3, 2))),
]
if rank == 0:
    np.save("X.npy", np.ones(3))
D.own_comm.barrier()
results = [attempt(call) for call in calls]
assert (step(good)["Z"].gather() == 10).all()
assert np.array_equal(einmpi.einsum("ij,jk->ik", D, np.ones((3, 2))).gather(), np.full((4, 2), 3.0))
for text in D.own_comm.allgather_text("|".join(results)):
    if rank == 0:
        print(text.replace("|", "\\n"), flush=True)
"""
)
INDEX = "program:1:1: G: an index from 90 to 97 is out of range; expected 0 to 7"
ON_RANK_0 = [f"EinmpiError: rank 1: {INDEX}"] * 2 + ["EinmpiError: rank 1: KeyError: 'no such row'"]
ON_RANK_1 = [f"EinmpiError: {INDEX}"] * 2 + ["KeyError: 'no such row'"]
ON_BOTH = [
    "InputError: inputs: B is float64[4, 4]",
    "InputError: memory: 'much' is not",
    "InputError: none.npy: there is no file",
    "InputError: parts: 4×3 cannot be cut 3×1",
    "EinmpiError: einmpi: rank 1 has another command",
    "EinmpiError: einmpi: rank 1 has another command",
    "InputError: gather: there is no rank 2",
    "InputError: einsum: the output 'iq' is wrong",
]


@pytest.mark.slow
@pytest.mark.mpirun
@needs_mpirun
def test_all_ranks_raise_and_can_go_on(tmp_path):
    done = run_mpi(2, CATCHING, timeout=LIMIT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    expected = [*ON_RANK_0, *ON_BOTH, *ON_RANK_1, *ON_BOTH]
    assert len(lines) == len(expected)
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(start)


FREES = """
other = MPI.COMM_WORLD.Dup()
einmpi.DistArray.from_global(np.ones((2, 2)), other)
other.Free()
"""
SWITCHES = """
other = MPI.COMM_WORLD.Dup()
def step(inputs):
    return einmpi.run(job, inputs, other)
step(good)
"""
BEFORE = {"freed communicator": FREES, "exit among communicators": SWITCHES}
ENDS = {
    "exception": ("1 / 0", "einmpi: error: rank 1: ZeroDivisionError: division by zero"),
    "freed communicator": (
        "1 / 0",
        "einmpi: error: rank 1: ZeroDivisionError: division by zero",
    ),
    "exit": (
        "sys.exit(3)",
        "einmpi: error: rank 0: rank 1 has ended its program, and others go on; all ranks must "
        "make the same calls",
    ),
    # Its other ranks use another communicator than the first one.
    "exit among communicators": (
        "sys.exit(3)",
        "einmpi: error: rank 0: rank 1 has ended its program, and others go on; all ranks must "
        "make the same calls",
    ),
    "interrupted": ("raise KeyboardInterrupt", "einmpi: error: rank 1: interrupted"),
    "memory": (
        "from einmpi.runtime.cpu.backend import NumpyBackend\n"
        "    def exhausted(*_): raise MemoryError('no more')\n"
        "    NumpyBackend.compute_kernel = exhausted\n"
        "    try: step(good)\n"
        "    except einmpi.EinmpiError: pass",
        "einmpi: error: rank 1: program:1:1: G: no more",
    ),
}


@pytest.mark.mpirun
@needs_mpirun
@pytest.mark.parametrize(
    "case",
    [
        "exception",
        "exit",
        "freed communicator",
        "exit among communicators",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("interrupted", "memory")),
    ],
)
def test_one_rank_ends(case):
    code, line = ENDS[case]
    before = BEFORE.get(case, "")
    program = (
        f"{START}\nstep(good)\n{before}if rank == 1:\n    {code}\nwhile True:\n    step(good)\n"
    )
    done = run_mpi(2, program, timeout=LIMIT)
    # All of standard error is shown, because a rank that crashed says there where.
    assert done.returncode != 0, done.stderr
    assert done.stderr.count("einmpi: error:") == 1, done.stderr
    assert line in done.stderr.splitlines(), done.stderr
    assert ("Traceback" in done.stderr) == (case != "memory"), done.stderr


SUBSETS = f"""{START}
step(good)
some = MPI.COMM_WORLD.Split(rank < 2)
if rank < 2:
    einmpi.run(job, good, some)
print("end", flush=True)
"""


@pytest.mark.slow
@pytest.mark.mpirun
@needs_mpirun
def test_ranks_that_used_different_communicators_last_end():
    done = run_mpi(3, SUBSETS, timeout=LIMIT)
    assert (done.returncode, done.stdout.count("end")) == (0, 3), done.stderr


INTERRUPTED = """
import sys
from mpi4py import MPI
import einmpi.comm.agreement
from einmpi.cli.main import main
from step_kinds import computed_as

def interrupted(comm):
    raise KeyboardInterrupt

if MPI.COMM_WORLD.rank == 1:
    einmpi.comm.agreement.require_same_version = interrupted
sys.exit(main(["--version"]))
"""


@pytest.mark.mpirun
@needs_mpirun
def test_the_command_line_is_interrupted_while_ranks_connect():
    done = run_mpi(2, INTERRUPTED, timeout=LIMIT)
    assert done.returncode != 0, done.stderr
    assert "einmpi: error: rank 1: interrupted" in done.stderr.splitlines(), done.stderr
    assert "Traceback" not in done.stderr, done.stderr


PROGRAM = """
G[i,j] = T[I[i,j]]
P[i,j] = exp(G[i,j] - max[j](G[i,j]))
S[i,j] = P[i,j] / sum[j](P[i,j])
Z[i,k] = sum(S[i,j] * B[j,k])
n      = sum(Z[i,k])
"""


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("memory, kind", [(None, "kernel"), ("40KiB", "slow"), (None, "cache")])
def test_later_calls_are_right(monkeypatch, failing, memory, kind):
    """Messages, buffers and slots are as if the call had not been, also in the slow tier."""
    if kind == "cache":  # small kernels are grouped, but computed one by one, without a compiler
        monkeypatch.setattr(grouping_rule, "WORTH_COMPILING", 1)
        monkeypatch.setattr(grouping_rule, "CACHE_BLOCK_BYTES", 2**11)
        monkeypatch.setattr(NumpyBackend, "_by_group", lambda *_: None)
    generator = np.random.default_rng(1)
    good = {
        "T": generator.normal(size=20),
        "I": generator.integers(0, 20, (64, 128)),
        "B": generator.normal(size=(128, 6)),
    }
    job = einmpi.program(PROGRAM, outputs=["Z", "n"], **good)
    wanted = einmpi.reference(job, good)

    def on_rank(comm):
        step = einmpi.compile(job, comm, memory=memory)
        wrong = {**good, "I": good["I"] + 100} if comm.rank == failing else good
        messages = []
        for _ in range(2):
            with pytest.raises(einmpi.EinmpiError) as raised:
                step(wrong)
            messages.append(str(raised.value))
            outputs = step(good)
            np.testing.assert_allclose(outputs["Z"].gather(), wanted["Z"])
            np.testing.assert_allclose(outputs["n"].gather(), wanted["n"])
        ((_, schedule),) = step.ready.values()
        assert any(computed_as(each) == kind for each in schedule.steps)
        return messages

    for rank, messages in enumerate(run_threads(4, on_rank)):
        who = "" if rank == failing else f"rank {failing}: "
        assert len(set(messages)) == 1
        assert messages[0].startswith(f"{who}program:2:1: G: an index from ")
