"""A fixed slice of the fuzzer's inputs, and what the fuzzer itself must see."""

import os
import signal
import subprocess
import sys

import pytest
from paths import ROOT

from tests.soak import fuzz, fuzz_oracle
from tests.soak.fuzz_inputs import FuzzInput, make_input
from tests.soak.fuzz_oracle import Outcome, judge

SOUND = "program = 'Z[i] = X[i]'\ninputs.X = { shape = [2], random = 'ones' }\n"


def end(status=2, err="job.toml:1:1: wrong; expected right\n", out="", **more):
    return Outcome(status, out, err, 0.1, **{"peak_bytes": 0, **more})


@pytest.mark.parametrize(
    ("outcome", "problem"),
    [
        (end(), ""),
        (end(0, ""), ""),
        (end(1, "out.h5 cannot be written: File too large; out.h5 is unchanged\n"), ""),
        (end(-signal.SIGKILL, "", timed_out=True), "hang"),
        (end(-signal.SIGSEGV, ""), "ended by SIGSEGV"),
        (end(-signal.SIGXCPU, ""), "more than the limit of processor time"),
        (end(peak_bytes=2**33), "more than the limit of memory"),
        (end(1, "Traceback (most recent call last):\nKeyError: 'a'\n"), "traceback: KeyError: '…'"),
        (end(1, "einmpi: error: KeyError: 3\n"), "status 1: einmpi: error: KeyError: N"),
        (end(3), "status 3"),
        (end(2, "a: b; expected c\nd: e; expected f\n"), "status 2 with 2 lines"),
        (end(2, ""), "status 2 with 0 lines"),
        (end(2, "wrong\n"), "not of the form where: what; expected …: wrong"),
        (end(2, "a: \x1b[31m; expected c\n"), "control characters in what is printed"),
        (end(0, "", "\x1b]0;title\x07"), "control characters in what is printed"),
        (end(0, "warning\n"), "status 0 with other lines on standard error"),
    ],
)
def test_what_is_wrong_with_an_outcome(tmp_path, outcome, problem):
    made = FuzzInput("job", {}, ["run", "job.toml"])
    assert judge(made, outcome, {}, tmp_path) == problem


def test_files_are_judged(tmp_path):
    made = FuzzInput("job", {}, ["run", "job.toml"], expected={"z.npy": b"right"})
    (tmp_path / "z.npy").write_bytes(b"wrong")
    assert judge(made, end(0, ""), {}, tmp_path) == "status 0 with a wrong result"
    before = {"z.npy": b"before"}
    assert judge(made, end(), before, tmp_path) == "a failed command has changed a file"
    (tmp_path / ".z.npy.lock").touch()
    assert judge(made, end(), before, tmp_path) == "a draft or a lock is left"


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory):
    return fuzz.Fuzzer(tmp_path_factory.mktemp("fuzz"), seed=1)


def test_an_input_depends_on_seed_and_number_only(fuzzer):
    inputs = [make_input(fuzzer.corpus, 1, number)[0] for number in range(30)]
    again = [make_input(fuzzer.corpus, 1, number)[0] for number in range(30)]
    others = [make_input(fuzzer.corpus, 2, number)[0] for number in range(30)]
    assert inputs == again
    assert inputs != others


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


def wait():
    signal.pause()


def allocate():
    bytearray(2**27)


@pytest.mark.parametrize(
    ("breaks", "problem"),
    [
        (crash, "ended by SIGSEGV"),
        (wait, "hang"),
        (allocate, "more than the limit of memory"),
        (lambda: 1 / 0, "traceback: ZeroDivisionError: division by zero"),
    ],
)
def test_a_forked_command_that_breaks(tmp_path, monkeypatch, breaks, problem):
    if breaks is wait:
        monkeypatch.setattr(fuzz_oracle, "WALL_SECONDS", 1.0)
    monkeypatch.setattr(fuzz_oracle, "MEMORY_BYTES", 2**26)
    (tmp_path / "job.toml").write_text(SOUND)
    made = FuzzInput("job", {}, ["check", "job.toml"])
    outcome = fuzz_oracle.run_forked(tmp_path, made.command, breaks)
    before = fuzz_oracle.folder_content(tmp_path)
    assert judge(made, outcome, before, tmp_path) == problem


def test_a_large_job_is_not_run(tmp_path):
    (tmp_path / "job.toml").write_text(SOUND.replace("[2]", "[549755813888]"))
    outcome = fuzz_oracle.run_forked(tmp_path, ["run", "job.toml"])
    assert outcome.status == fuzz_oracle.STATUS_OF_LARGE_JOB


@pytest.mark.slow
def test_a_failing_input_is_made_smaller(fuzzer, monkeypatch):
    """A line that nobody may print leaves only what makes einmpi print it."""
    judged = fuzz.judge

    def judge_more(made, outcome, *arguments):
        return "named" if "unknown key" in outcome.err else judged(made, outcome, *arguments)

    monkeypatch.setattr(fuzz, "judge", judge_more)
    for number in range(1000):
        made, _ = make_input(fuzzer.corpus, 1, number)
        if made.kind == "job" and fuzzer.run_input(made)[1] == "named":
            break
    smaller = fuzzer.minimise(number, "named")
    assert len(smaller.files["job.toml"]) < min(60, len(made.files["job.toml"]))


def run_slice(tmp_path, *arguments):
    command = [sys.executable, "-m", "tests.soak", "fuzz", "--seed", "1", *arguments]
    keep = ["--keep", str(tmp_path / "failures")]
    done = subprocess.run([*command, *keep], cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


@pytest.mark.slow
def test_a_few_inputs(tmp_path):
    run_slice(tmp_path, "--count", "20")


@pytest.mark.slow
def test_many_inputs(tmp_path):
    """The first ones, and others up to the first that also runs under mpirun: every thousandth."""
    run_slice(tmp_path, "--count", "60")
    run_slice(tmp_path, "--first", "700", "--count", "301", "--jobs", "2")
