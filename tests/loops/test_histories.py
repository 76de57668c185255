"""Histories of loops in files: CSV and HDF5, one writer at a time, rows of a killed run."""

import os
import signal
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest
from mpi_helpers import environment

import einmpi
from einmpi.compiled.outputs import check_targets
from einmpi.errors import InputError
from einmpi.files.hdf5.opening import check_table, draft_table, lookup3

JOB = """
program = '''
x_next[i] = x[i] / 2 + 1.0
total = sum(x_next[i])
rounded = total > 7.99
share = total * (1 + 2j)
'''
inputs.x = {{ shape = [4], random = "ones" }}
{outputs}
[loop]
steps = {steps}
carry = {{ x = "x_next" }}
record = ["total", "rounded", "share"]
history = "{history}"
"""


def write_job(folder, history, steps=20, outputs='outputs.x = "out.h5:/x"'):
    (folder / "job.toml").write_text(JOB.format(history=history, steps=steps, outputs=outputs))
    return folder / "job.toml"


def expected(steps):
    x = np.ones(4)
    totals = []
    for _ in range(steps):
        x = x / 2 + 1
        totals.append(x.sum())
    return np.array(totals)


def einmpi_in(folder, *arguments, script=("-m", "einmpi")):
    command = [sys.executable, *script, *arguments]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)


@pytest.mark.slow
def test_a_table_in_hdf5(tmp_path):
    write_job(tmp_path, "history.h5:/runs/first")
    done = einmpi_in(tmp_path, "job.toml")
    assert done.returncode == 0, done.stderr
    write_job(tmp_path, "history.h5:/runs/second", steps=3)
    assert einmpi_in(tmp_path, "job.toml").returncode == 0
    with h5py.File(tmp_path / "history.h5") as file:
        first = file["runs/first"][...]
        np.testing.assert_array_equal(first["step"], np.arange(20))
        np.testing.assert_array_equal(first["total"], expected(20))
        np.testing.assert_array_equal(first["rounded"], expected(20) > 7.99)
        np.testing.assert_array_equal(first["share"], expected(20) * (1 + 2j))
        assert file["runs/second"]["total"].tolist() == expected(3).tolist()
    # A new run of the same name begins anew; the other one stays.
    write_job(tmp_path, "history.h5:/runs/first", steps=2)
    assert einmpi_in(tmp_path, "job.toml").returncode == 0
    with h5py.File(tmp_path / "history.h5") as file:
        assert len(file["runs/first"]) == 2 and len(file["runs/second"]) == 3
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["history.h5", "job.toml", "out.h5"]


# einmpi itself; rank 0 does something before it writes the row of a step.
PROGRAM = """
import os, signal, sys, time
from einmpi.loops import history

def make_special(kind):
    append = kind.append
    def special(self, step, row):
        if step == {step}:
            {action}
        append(self, step, row)
    kind.append = special

make_special(history.CsvHistory)
make_special(history.TableHistory)
history.SECONDS_BETWEEN_WRITES = 0.0
from einmpi.cli.main import main
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("history", ["history.csv", "history.h5:/run1"])
def test_a_killed_run_leaves_its_rows_and_continues(tmp_path, history):
    write_job(tmp_path, history)
    text = PROGRAM.format(step=13, action="os.kill(os.getpid(), signal.SIGKILL)")
    (tmp_path / "killed.py").write_text(text)
    flags = ["job.toml", "--checkpoint", "saved", "--every", "5steps", "--resume"]
    killed = einmpi_in(tmp_path, *flags, script=["killed.py"])
    assert killed.returncode == -signal.SIGKILL
    assert rows_of(tmp_path, history) == list(range(13))
    resumed = einmpi_in(tmp_path, *flags)
    assert resumed.returncode == 0, resumed.stderr
    assert "continues after step 9" in resumed.stderr
    assert rows_of(tmp_path, history) == list(range(20))
    assert not list(tmp_path.glob(".*"))


def rows_of(folder, history):
    """The numbers of the steps in a history, of a run that may have been killed."""
    if history.endswith(".csv"):
        lines = (folder / history).read_text().splitlines()
        return [int(line.split(",")[0]) for line in lines[1:]]
    file, inside = history.split(":")
    with h5py.File(folder / file, swmr=True) as handle:
        return handle[inside]["step"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("history", ["history.csv", "history.h5:/run1"])
def test_two_runs_do_not_write_the_same_history(tmp_path, history):
    write_job(tmp_path, history)
    (tmp_path / "waits.py").write_text(PROGRAM.format(step=4, action="time.sleep(600)"))
    first = subprocess.Popen(
        [sys.executable, "waits.py", "job.toml"], cwd=tmp_path, env=environment()
    )
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / history.split(":")[0]).exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        # The other run has an output of its own.
        write_job(tmp_path, history, outputs='outputs.x = "other.h5:/x"')
        second = einmpi_in(tmp_path, "job.toml")
    finally:
        first.kill()
        first.wait()
    assert second.returncode == 1
    file = history.split(":")[0]
    assert f"{file} cannot be written: another run is writing it" in second.stderr
    assert second.stderr.count("\n") == 1 and not (tmp_path / "other.h5").exists()


def test_verify_writes_no_history(tmp_path):
    write_job(tmp_path, "history.csv")
    done = einmpi_in(tmp_path, "verify", "job.toml")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "history.csv").exists()


@pytest.mark.parametrize(
    "history, outputs, message",
    [
        ("out.h5:/run1", 'outputs.x = "out.h5:/x"', "out.h5 is also the file of output x"),
        ("./in.h5:/run1", 'inputs.y = "in.h5:/y"', "in.h5 is also the file of input y"),
        ("history.txt", "", "history is 'history.txt'; expected a .csv file, or a table"),
        ("history.h5", "", "names a file but no dataset in it"),
        ("history.npy", "", "history is 'history.npy'; expected a .csv file"),
    ],
)
def test_histories_that_the_job_refuses(tmp_path, history, outputs, message):
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["y"] = np.zeros(3)
    with pytest.raises(InputError, match=message):
        einmpi.load(write_job(tmp_path, history, outputs=outputs))


def test_histories_that_cannot_be_written(tmp_path):
    def refusal(history):
        job = einmpi.load(write_job(tmp_path, history))
        with pytest.raises(InputError) as caught:
            check_targets(job)
        return str(caught.value).partition(": ")[2]

    with h5py.File(tmp_path / "old.h5", "w") as file:
        file["x"] = 3
    with h5py.File(tmp_path / "new.h5", "w", libver="v110") as file:
        file["group/table"] = 3
    whole = (tmp_path / "new.h5").read_bytes()
    (tmp_path / "cut.h5").write_bytes(whole[:100])  # HDF5 may not wait for the rest
    (tmp_path / "text.h5").write_text("step")
    (tmp_path / "folder.csv").mkdir()
    assert "older format of HDF5" in refusal("old.h5:/run1")
    assert "/group in" in refusal("new.h5:/group") and "is a group" in refusal("new.h5:/group")
    assert "is not a group" in refusal("new.h5:/group/table/run1")
    assert "cannot be opened as HDF5" in refusal("text.h5:/run1")
    assert "cannot be opened as HDF5: truncated file" in refusal("cut.h5:/run1")
    assert "is a folder" in refusal("folder.csv")
    assert "there is no folder" in refusal("missing/h.csv")


WRITER = """
import os
import numpy as np
from einmpi.files.hdf5.opening import GrowingTable, draft_table

rows = np.zeros(5, [("step", np.int64), ("loss", float)])
rows["step"] = np.arange(5)
draft_table("history.h5", "none.h5", "/group/run1", rows[:2])
table = GrowingTable("history.h5", "/group/run1")
for step in range(2, 5):
    table.append(rows[step : step + 1])
os._exit(0)  # without closing the file
"""

# Whatever HDF5 makes of a damaged file, it must not take long.
READER = """
import sys, time
import h5py
import numpy as np
from einmpi.errors import InputError
from einmpi.files.hdf5.opening import check_table, draft_table

whole = open("history.h5", "rb").read()
rows = np.zeros(1, [("step", np.int64), ("loss", float)])
refused = 0
for place in map(int, sys.argv[1:]):
    damaged = bytearray(whole)
    damaged[place] ^= 0xFF
    with open("damaged.h5", "wb") as file:
        file.write(damaged)
    start = time.monotonic()
    try:
        check_table("damaged.h5", "/group/run1", "here")
        draft_table("draft.h5", "damaged.h5", "/run2", rows)
    except InputError as error:
        assert str(error).startswith("here: damaged.h5 cannot be opened as HDF5: ") or (
            "cannot be read" in str(error)
        )
        refused += 1
    except (OSError, RuntimeError, KeyError):
        refused += 1
    assert time.monotonic() - start < 60, place
print(refused)
"""


@pytest.mark.slow
def test_a_file_that_is_neither_closed_nor_whole_is_refused_at_once(tmp_path):
    """HDF5 would read each damaged part a hundred times, and wait twice as long each time."""
    assert einmpi_in(tmp_path, script=("-c", WRITER)).returncode == 0
    with pytest.raises(OSError, match="file consistency flags"):
        h5py.File(tmp_path / "history.h5")
    size = (tmp_path / "history.h5").stat().st_size
    places = [*range(0, 48, 5), *range(48, min(size, 4096), 16)]
    done = einmpi_in(tmp_path, *map(str, places), script=("-c", READER))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20  # the others are in parts of the file that are not used


def test_a_file_that_was_not_closed_is_read_as_it_is(tmp_path):
    assert einmpi_in(tmp_path, script=("-c", WRITER)).returncode == 0
    rows = np.zeros(1, [("step", np.int64)])
    check_table(str(tmp_path / "history.h5"), "/run2", "here")
    draft_table(str(tmp_path / "draft.h5"), str(tmp_path / "history.h5"), "/run2", rows)
    with h5py.File(tmp_path / "draft.h5") as file:
        assert file["group/run1"]["step"].tolist() == [0, 1, 2, 3, 4]
        assert file["run2"].shape == (1,)
    cut = (tmp_path / "history.h5").read_bytes()[:600]
    (tmp_path / "cut.h5").write_bytes(cut)
    with pytest.raises(InputError, match=r"cut\.h5 cannot be opened as HDF5: truncated file"):
        check_table(str(tmp_path / "cut.h5"), "/run2", "here")


@pytest.mark.parametrize("values", range(1, 9))
def test_the_checksum_is_that_of_hdf5(tmp_path, values):
    with h5py.File(tmp_path / "any.h5", "w", libver=("v110", "v110")) as file:
        file["x"] = np.arange(100 * values)
    superblock = (tmp_path / "any.h5").read_bytes()[:48]
    assert lookup3(superblock[:44]) == int.from_bytes(superblock[44:], "little")


@pytest.mark.parametrize("history", ["pipe.csv", "pipe.h5:/run1", "link.csv"])
def test_only_a_regular_file_is_replaced(tmp_path, history):
    """A pipe or a device, also at the end of a link, was replaced by the history."""
    name = history.partition(":")[0]
    target = tmp_path / name
    if name == "link.csv":
        target = tmp_path / "pipe"
        (tmp_path / name).symlink_to("pipe")
    os.mkfifo(target)
    job = einmpi.load(write_job(tmp_path, history))
    with pytest.raises(InputError, match=f"{name} is not a regular file; expected a file to repl"):
        check_targets(job)
    assert target.is_fifo()


def test_a_flag_does_not_write_to_the_history(tmp_path):
    write_job(tmp_path, "history.csv")
    done = einmpi_in(tmp_path, "job.toml", "--json", "history.csv")
    assert done.returncode == 2
    assert "this is the history of the job" in done.stderr
    assert not os.path.exists(tmp_path / "history.csv")
