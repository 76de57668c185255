"""Results take the places of old files all or none, and never those of another run's results."""

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest
from mpi_helpers import environment, finished, needs_mpirun, run_mpi
from paths import ROOT

import einmpi
from einmpi.arrays.dist_array import DistArray
from einmpi.cli.main import main
from einmpi.comm.base import ALONE
from einmpi.comm.threads import run_threads
from einmpi.errors import EinmpiError
from einmpi.files import claims
from einmpi.files import writing as fill
from einmpi.files import writing as outputs
from einmpi.files.claims import claimed
from einmpi.files.formats import HDF5
from einmpi.files.hdf5 import writing as hdf5_writing

pytestmark = pytest.mark.usefixtures("in_folder")
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can do this")


def save(array, file="o.h5", dataset="/Z"):
    DistArray.from_global(np.asarray(array), ALONE).to_hdf5(file, dataset)


def datasets(file="o.h5"):
    with h5py.File(file) as handle:
        return {name: handle[name][()].tolist() for name in handle}


def python(code, *arguments, **settings):
    """Run code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment(**settings),
        capture_output=True,
        text=True,
        timeout=120,
    )


def in_child(function, *arguments):
    """Call a function in a copy of this process; return its exit status, negative for a signal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads only wait
        child = os.fork()
    if child == 0:
        try:
            os._exit(function(*arguments))
        finally:
            os._exit(70)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# ---- two runs and a signal ----------------------------------------------------------------------

SHARED = 'program = "Z[i:4] = i + {}"\noutputs.Z = "o.h5:/{}"\n'
# Rank 1 gets SIGTERM when the results are stored, and does not end before the other run has.
TERMINATED = """
import os, signal, sys, time
from einmpi.comm.mpi_library import world
from einmpi.compiled import outputs
from einmpi.files.hdf5 import writing as hdf5_writing
from einmpi.process import signals as abort
from einmpi.cli.main import main

moment = os.environ["MOMENT"]

def touch(name):
    open(name, "w").close()

def wait_for(name):
    deadline = time.monotonic() + 60
    while not os.path.exists(name) and time.monotonic() < deadline:
        time.sleep(0.02)

def others_turn():
    touch("their-turn")
    wait_for("our-turn")

if world().rank == 0:
    make_draft, replace = hdf5_writing.make_draft, os.replace
    def make_draft_late(*arguments):
        wait_for("terminated")
        touch("their-turn")
        wait_for("their-draft")
        make_draft(*arguments)
        touch("our-draft")
        wait_for("our-turn")
    def replace_late(source, target):
        if target.endswith("o.h5"):
            touch("publishing")
            wait_for("terminated")
            others_turn()
        replace(source, target)
    if moment == "drafting":
        hdf5_writing.make_draft = make_draft_late
    else:
        os.replace = replace_late
else:
    abort._ABORT_TIME = 120
    tensor_of, print_last_line = outputs.tensor_of, abort.print_last_line
    def terminate():
        if moment == "publishing":
            wait_for("publishing")
        os.kill(os.getpid(), signal.SIGTERM)
    def tensor_of_terminated(*arguments):
        import threading
        threading.Thread(target=terminate, daemon=True).start()
        return tensor_of(*arguments)
    def print_late(*arguments):
        touch("terminated")
        wait_for("our-turn")
        time.sleep(1)  # for rank 0 to do what it can
        print_last_line(*arguments)
    outputs.tensor_of = tensor_of_terminated
    abort.print_last_line = print_late
sys.exit(main(["a.toml", "--quiet"]))
"""
# The other run: each makes its draft before the other one publishes.
OTHER = """
import os, sys, time
from einmpi.files.hdf5 import writing as hdf5_writing
from einmpi.cli.main import main
lay_out = hdf5_writing.lay_out
def lay_out_first(*arguments):
    places = lay_out(*arguments)
    open("their-draft", "w").close()
    deadline = time.monotonic() + 60
    while not os.path.exists("our-draft") and time.monotonic() < deadline:
        time.sleep(0.02)
    return places
if os.environ["MOMENT"] == "drafting":
    hdf5_writing.lay_out = lay_out_first
sys.exit(main(["b.toml"]))
"""
LAUNCH = """
import sys
from einmpi.cli.launcher import launch
sys.exit(launch(2, [], (sys.executable, "terminated.py")))
"""


@pytest.mark.slow
@pytest.mark.mpirun
@needs_mpirun
@pytest.mark.parametrize("launcher", ["mpirun", "einmpi"])
@pytest.mark.parametrize("moment", ["drafting", "publishing"])
def test_a_terminated_run_does_not_overwrite_another(tmp_path, launcher, moment):
    """No run that ends with status 0 loses its data, and the line names the signal."""
    save(np.zeros(3), dataset="/old")
    (tmp_path / "a.toml").write_text(SHARED.format(10, "A"))
    (tmp_path / "b.toml").write_text(SHARED.format(20, "B"))
    (tmp_path / "terminated.py").write_text(TERMINATED)
    first = []

    def run_first():
        if launcher == "mpirun":
            done = run_mpi(2, ["terminated.py"], env={"MOMENT": moment}, cwd=tmp_path)
        else:
            command = [sys.executable, "-c", LAUNCH]
            done = finished(command, env={"MOMENT": moment}, cwd=tmp_path)
        first.append(done)
        (tmp_path / "their-turn").touch()

    thread = threading.Thread(target=run_first)
    thread.start()
    while not (tmp_path / "their-turn").exists():
        thread.join(0.02)
    assert not first, first
    other = python(OTHER, MOMENT=moment)
    (tmp_path / "our-turn").touch()
    thread.join()
    stored = datasets()
    assert first[0].returncode != 0 or "A" in stored, first
    assert other.returncode == 0 or "another run is writing it" in other.stderr
    assert stored["old"] == [0, 0, 0]
    assert other.returncode != 0 or stored.get("B") == [20, 21, 22, 23]
    lines = [line for line in first[0].stderr.splitlines() if line.startswith(("einmpi", "a.toml"))]
    assert len(lines) == 1 and "rank 1: terminated by SIGTERM in storing the results" in lines[0]
    main(["b.toml", "--quiet"])
    assert [name for name in os.listdir() if name.startswith(".")] == []


def test_a_rank_that_gives_up_keeps_rank_0_from_publishing(monkeypatch):
    """Another run may have written the file since then."""
    monkeypatch.setattr(claims, "_END_OF_RUN_SECONDS", 0)
    save(np.zeros(3), dataset="/old")

    def on_rank(comm):
        made = DistArray.from_global(np.ones(4), comm)
        with claimed({"o.h5": ""}, comm) as claim:
            if comm.rank == 1:
                claim.give_up()
                assert os.listdir() == ["o.h5"]
                save(np.arange(4.0), dataset="/B")
            comm.barrier()
            tensor = outputs.tensor_of(made, "/A")
            outputs.write([outputs.OutputFile("o.h5", "", HDF5, [tensor])], dict, claim)

    with pytest.raises(EinmpiError, match="this run no longer has the lock"):
        run_threads(2, on_rank)
    assert datasets() == {"old": [0, 0, 0], "B": [0, 1, 2, 3]}
    assert os.listdir() == ["o.h5"]


def test_a_lock_file_that_somebody_removes(monkeypatch):
    monkeypatch.setattr(claims, "_END_OF_RUN_SECONDS", 0)
    lay_out = hdf5_writing.lay_out
    others: list[int] = []

    def others_turn(*arguments):
        places = lay_out(*arguments)
        if not others:
            others.append(1)
            os.remove(".o.h5.lock")
            save(np.arange(4.0), dataset="/B")
        return places

    monkeypatch.setattr(hdf5_writing, "lay_out", others_turn)
    with pytest.raises(EinmpiError, match="this run no longer has the lock"):
        save(np.ones(4), dataset="/A")
    assert datasets() == {"B": [0, 1, 2, 3]} and os.listdir() == ["o.h5"]


def test_a_file_that_another_program_changes(monkeypatch):
    """Without this check its data would be lost: the draft has a copy of the file as it was."""
    save(np.zeros(3), dataset="/old")
    lay_out = hdf5_writing.lay_out

    def others_turn(*arguments):
        places = lay_out(*arguments)
        with h5py.File("o.h5", "a") as file:
            file["B"] = [1.0, 2.0]
        return places

    monkeypatch.setattr(hdf5_writing, "lay_out", others_turn)
    with pytest.raises(EinmpiError) as caught:
        save(np.ones(4), dataset="/A")
    assert str(caught.value) == (
        "o.h5: o.h5 cannot be written: another program has changed it while the results were being "
        "written; nothing was written"
    )
    assert datasets() == {"old": [0, 0, 0], "B": [1, 2]}


def test_sigterm_leaves_nothing_of_one_process(tmp_path, capfd):
    (tmp_path / "a.toml").write_text(SHARED.format(10, "A"))
    save(np.zeros(3), dataset="/old")

    def run_and_terminate():
        def terminated(*arguments):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

        fill.write_at = terminated
        return main(["a.toml"])

    assert in_child(run_and_terminate) == -signal.SIGTERM
    assert capfd.readouterr().err == ""
    assert datasets() == {"old": [0, 0, 0]}
    assert sorted(os.listdir()) == ["a.toml", "o.h5"]


# ---- several files ------------------------------------------------------------------------------

TWO = """
program = "a[i:3] = i + 1; b[i:3] = i + 2"
outputs.a = "a.npy"
outputs.b = "sub/b.npy"
"""
OLD = {"a": [0, 0, 0], "b": [0, 0, 0]}
NEW = {"a": [1, 2, 3], "b": [2, 3, 4]}
# Rank 0 is killed at a rename of a file.
KILLED_RANK = """
import sys
from einmpi.process.environment import launcher_rank
from test_publishing import run_and_die
from einmpi.cli.main import main
if launcher_rank() == 0:
    run_and_die("b.npy")
sys.exit(main(["two.toml", "--quiet"]))
"""


def run_and_die(killed_at):
    """Run the job until a file would get this name."""
    replace = os.replace

    def replace_or_die(source, target):
        if target.endswith(killed_at):
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = replace_or_die
    return main(["two.toml", "--quiet"])


@pytest.fixture
def two(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "two.toml").write_text(TWO)
    for name in ("a.npy", "sub/b.npy"):
        np.save(name, np.zeros(3))
    return tmp_path


def values():
    return {"a": np.load("a.npy").tolist(), "b": np.load("sub/b.npy").tolist()}


def leftovers():
    return [name for name in os.listdir() + os.listdir("sub") if name.startswith(".")]


def read_second_file():
    assert einmpi.open_dataset("sub/b.npy").gather().tolist() in (OLD["b"], NEW["b"])


def read_both_files_on_ranks():
    def on_rank(comm):
        return einmpi.open_dataset("a.npy", comm=comm).gather().tolist()

    assert run_threads(3, on_rank) == [NEW["a"]] * 3


def write_first_file():
    with claimed({"a.npy": ""}, ALONE):
        pass


def write_second_file():
    with claimed({"sub/b.npy": ""}, ALONE):
        pass


@pytest.mark.parametrize(
    "next_run", [read_second_file, read_both_files_on_ranks, write_first_file, write_second_file]
)
def test_the_next_run_finishes_what_a_killed_one_began(two, next_run):
    assert in_child(run_and_die, "/b.npy") == -signal.SIGKILL
    next_run()
    assert values() == NEW
    assert leftovers() == []


@pytest.mark.parametrize(
    "killed_at, expected", [(".a.npy.journal", OLD), (".b.npy.journal", OLD), ("/a.npy", NEW)]
)
def test_a_run_killed_at_another_rename(two, killed_at, expected):
    assert in_child(run_and_die, killed_at) == -signal.SIGKILL
    assert values() == OLD
    write_second_file()
    write_first_file()
    assert values() == expected and leftovers() == []


@pytest.mark.slow
@pytest.mark.mpirun
@needs_mpirun
def test_rank_0_is_killed_between_two_renames(two):
    folders = [ROOT, ROOT / "tests/lib", ROOT / "tests/files"]
    search = {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    done = run_mpi(2, KILLED_RANK, env=search, cwd=two)
    assert done.returncode != 0
    read_second_file()
    assert values() == NEW and leftovers() == []


def test_a_file_changed_since_the_kill_is_kept(two):
    assert in_child(run_and_die, "/b.npy") == -signal.SIGKILL
    np.save("sub/b.npy", np.full(3, 7.0))
    read_second_file_values = einmpi.open_dataset("sub/b.npy").gather().tolist()
    assert read_second_file_values == [7, 7, 7]
    assert values() == {"a": NEW["a"], "b": [7, 7, 7]} and leftovers() == []


def test_a_folder_renamed_since_the_kill(two, monkeypatch):
    assert in_child(run_and_die, "/b.npy") == -signal.SIGKILL
    renamed = two.rename(two.with_name("renamed"))
    monkeypatch.chdir(renamed)
    read_second_file()
    assert values() == NEW and leftovers() == []


@pytest.mark.parametrize("planted", ["mode", "link", "elsewhere", "not a journal"])
def test_a_journal_that_others_may_have_written_is_not_used(two, planted):
    assert in_child(run_and_die, "/b.npy") == -signal.SIGKILL
    journal = two / ".a.npy.journal"
    if planted == "mode":
        journal.chmod(0o666)
    elif planted == "link":
        journal.rename("moved")
        journal.symlink_to("moved")
    elif planted == "elsewhere":
        content = json.loads(journal.read_text())
        content["token"] = "../../x"
        journal.write_text(json.dumps(content))
    else:
        journal.write_text("[" * 100_000)
    read_second_file()
    assert values() == {"a": NEW["a"], "b": OLD["b"]}


class FailingReplace:
    """os.replace, which fails for one target."""

    def __init__(self, monkeypatch, failing):
        self.replace = os.replace
        self.failing = failing
        monkeypatch.setattr(os, "replace", self)

    def __call__(self, source, target):
        if target.endswith(self.failing):
            raise PermissionError(errno.EPERM, "no")
        self.replace(source, target)


@pytest.mark.parametrize("exists", [True, False])
def test_a_rename_that_fails_undoes_the_others(two, monkeypatch, capsys, exists):
    if not exists:
        os.remove("a.npy")
        os.remove("sub/b.npy")
    FailingReplace(monkeypatch, "/b.npy")
    assert main(["two.toml"]) == 1
    state = "all 2 output files are unchanged" if exists else "nothing was written"
    line = "two.toml:4:9: sub/b.npy cannot be written: Operation not permitted; " + state
    assert capsys.readouterr().err == line + "\n"
    if exists:
        assert values() == OLD
    else:
        assert sorted(os.listdir()) == ["sub", "two.toml"]
    assert leftovers() == []


def test_a_disk_that_fails_when_a_folder_is_flushed(two, monkeypatch, capsys):
    """Before the journal counts, nothing changes; after the renames, status 0 would be a lie."""
    fsync = os.fsync
    remaining = 0  # folders that can still be flushed

    def fail_for_folders(descriptor):
        nonlocal remaining
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            remaining -= 1
            if remaining < 0:
                raise OSError(errno.EIO, "no")
        fsync(descriptor)

    ends = []
    for remaining_at_first in range(10):
        np.save("a.npy", np.zeros(3))
        np.save("sub/b.npy", np.zeros(3))
        remaining = remaining_at_first
        with monkeypatch.context() as failing:
            failing.setattr(os, "fsync", fail_for_folders)
            status = main(["two.toml", "--quiet"])
        line = capsys.readouterr().err
        if status == 0:
            assert line == "" and values() == NEW
            break
        assert line.startswith("two.toml:3:9: a.npy cannot be written: Input/output error; ")
        end = line.rpartition("; ")[2].strip()
        ends.append(end)
        is_new = end == "a.npy, sub/b.npy may be old again after a restart"
        assert is_new or end == "all 2 output files are unchanged"
        assert values() == (NEW if is_new else OLD)
        assert main(["two.toml", "--quiet"]) == 0
        assert values() == NEW and leftovers() == []
    assert status == 0 and len(set(ends)) == 2


def test_without_links_the_message_says_which_file_is_new(two, monkeypatch, capsys):
    """No backup can be made of a file there, so it cannot be put back."""

    def no_links(*arguments, **options):
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(os, "link", no_links)
    FailingReplace(monkeypatch, "/b.npy")
    assert main(["two.toml"]) == 1
    assert capsys.readouterr().err == (
        "two.toml:4:9: sub/b.npy cannot be written: Operation not permitted; a.npy could not be "
        "put back and is new; sub/b.npy is as it was\n"
    )
    assert values() == {"a": NEW["a"], "b": OLD["b"]} and leftovers() == []


@is_root
@pytest.mark.skipif(shutil.which("chattr") is None, reason="there is no chattr")
@pytest.mark.parametrize("name", ["a.npy", "sub/b.npy"])
def test_a_file_that_cannot_be_changed(two, capsys, name):
    if subprocess.run(["chattr", "+i", name], capture_output=True).returncode:
        pytest.skip("the file system does not know immutable files")
    try:
        status = main(["two.toml"])
    finally:
        subprocess.run(["chattr", "-i", name], check=True)
    assert status == 1
    said = capsys.readouterr().err
    assert said.endswith("Operation not permitted; all 2 output files are unchanged\n")
    assert f" {name} cannot be written" in said
    assert values() == OLD and leftovers() == []


# ---- folders that users share -------------------------------------------------------------------


def as_another_user(*arguments):
    os.setgid(54321)
    os.setuid(54321)
    return main(list(arguments))


@pytest.fixture
def sticky_folder():
    """A folder such as /tmp, which all users can reach."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@is_root
def test_another_users_file_in_a_sticky_folder(sticky_folder, capfd):
    job = sticky_folder / "job.toml"
    job.write_text(f'program = "Z[i:3] = i"\noutputs.Z = "{sticky_folder}/z.npy"\n')
    np.save(sticky_folder / "z.npy", np.zeros(3))
    os.chmod(sticky_folder / "z.npy", 0o666)
    os.chmod(job, 0o644)
    os.chown(sticky_folder / "z.npy", 12345, 12345)
    (sticky_folder / "warm.toml").write_text(
        f'program = "Z[i:3] = i"\noutputs.Z = "{sticky_folder}/warm.npy"\n'
    )
    main(["run", "--quiet", str(sticky_folder / "warm.toml")])  # imports what a run needs
    assert capfd.readouterr().err == ""
    assert in_child(as_another_user, "run", str(job)) == 2
    assert capfd.readouterr().err == (
        f"{job}:2:9: {sticky_folder}/z.npy belongs to another user, and its folder has the sticky "
        "bit; expected a file of your own, or another folder\n"
    )
    os.chown(sticky_folder / "z.npy", 54321, 54321)
    # A lock that another user's killed run has left locks nothing, but only its owner removes it.
    (sticky_folder / ".z.npy.lock").touch()
    os.chown(sticky_folder / ".z.npy.lock", 12345, 12345)
    assert in_child(as_another_user, "run", str(job), "--quiet") == 0
    assert capfd.readouterr().err == ""
    assert np.load(sticky_folder / "z.npy").tolist() == [0, 1, 2]


@is_root
def test_another_users_json_file_in_a_sticky_folder_is_written_in_place(sticky_folder):
    job = sticky_folder / "job.toml"
    job.write_text('program = "Z[i:3] = i"\n')
    os.chmod(job, 0o644)
    file = sticky_folder / "run.json"
    file.write_text("{}")
    os.chmod(file, 0o666)
    os.chown(file, 12345, 12345)
    main(["run", "--quiet", str(job), "--json", "own.json"])  # imports what a run needs
    assert in_child(as_another_user, "run", str(job), "--quiet", "--json", str(file)) == 0
    assert "Z" in json.loads(file.read_text())["outputs"]
    assert file.stat().st_uid == 12345
