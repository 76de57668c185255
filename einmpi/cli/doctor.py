"""The command `einmpi doctor`: does a run work on this machine, and what to do if not."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Any, NamedTuple

from einmpi.cli.job_options import check_files, print_or_write
from einmpi.cli.launcher import family_in, family_of, mpirun_command
from einmpi.cli.versions import describe_blas, visible_gpus
from einmpi.comm.agreement import on_first_rank
from einmpi.comm.base import Comm
from einmpi.errors import InputError
from einmpi.process.environment import (
    BLAS_VARIABLE,
    CACHE_VARIABLE,
    DEBUG_VARIABLE,
    GRAPHS_VARIABLE,
    available_cores,
    graphs_are_on,
    python_command,
)
from einmpi.process.names import stale_segments
from einmpi.units import counted, show_bytes

# Findings without which one rank works.
_NEEDED_BY_SEVERAL_RANKS = frozenset(("mpi4py", "mpirun", "ping"))
_MARKS = {"ok": "ok", "note": "note", "problem": "FAIL"}


def doctor(options: argparse.Namespace, comm: Comm) -> int:
    """Examine what is installed here and test whether a run would work."""
    findings: list[Finding] = []

    def examine_and_print() -> None:
        if not options.timeout > 0:
            raise InputError("--timeout", f"{options.timeout:g} seconds", "more than 0 seconds")
        check_files(options)
        for finding in examine(options.timeout, is_launched=comm.size > 1):
            findings.append(finding)
            if options.json != "-":
                print(_show(finding), flush=True)
        problems = _names_of_problems(findings)
        data = {"works": not problems, "findings": [asdict(finding) for finding in findings]}
        was_tested = findings[-1].state == "ok"  # the last one sends messages between two ranks
        print_or_write(options, _verdict(problems, was_tested), data)

    on_first_rank(comm, examine_and_print)
    return 1 if _names_of_problems(findings) else 0


def _names_of_problems(findings: list[Finding]) -> list[str]:
    return [finding.name for finding in findings if finding.state == "problem"]


def _verdict(problems: list[str], was_tested: bool) -> str:
    if problems:
        works_on_one_rank = _NEEDED_BY_SEVERAL_RANKS.issuperset(problems)
        runs = "a run on several ranks" if works_on_one_rank else "a run"
        return f"{runs} fails here: {', '.join(problems)}"
    if was_tested:
        return "a run works here"
    return "no problems found; no test run attempted"


def _show(finding: Finding) -> str:
    text = f"{_MARKS[finding.state]:<6}{finding.name:<12}{finding.text}"
    if finding.advice:
        text += f"\n{'→ ':>20}{finding.advice}"
    return text


_LOADING_SECONDS = 60.0  # for a library


def examine(ping_seconds: float, is_launched: bool = False) -> Iterator[Finding]:
    """Yield one finding after another.

    `is_launched` says that a launcher started this process, which then cannot start ranks itself.
    """
    # All libraries are loaded at the same time because that takes long.
    processes = {}
    for name in PROBES:
        if name == "cupy" and find_spec("cupy") is None:
            continue
        command = [*python_command(), "-m", "einmpi.cli.versions", name]
        processes[name] = start_process(command)
    yield Finding("Python", "ok", f"{platform.python_version()}, {sys.executable}")
    yield examine_numpy()
    yield from examine_packages()
    answers = {}
    for name, make_finding in PROBES.items():
        if name in processes:
            answers[name] = read_answer(processes[name], _LOADING_SECONDS)
        else:
            answers[name] = {"error": "it is not installed"}
        yield make_finding(answers[name])
    mpirun = examine_mpirun(answers["mpi"])
    yield mpirun
    yield examine_slurm(answers["mpi"])
    yield examine_machine()
    yield examine_limits()
    yield examine_shared_memory()
    yield examine_temporary_folder()
    can_start_ranks = mpirun.state != "problem" and mpirun.text != NO_MPIRUN
    if is_launched:
        reason = "skipped: a launcher started this process"
        yield Finding("ping", "note", reason, "run einmpi doctor without mpirun")
    elif "error" in answers["mpi"] or not can_start_ranks:
        yield Finding("ping", "note", "skipped: it needs mpi4py and mpirun")
    else:
        yield ping_ranks(ping_seconds)


# ---- findings, and questions to other processes --------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """The result of one examination.

    `state` is "ok", "note" (a run works, perhaps with a restriction) or "problem" (a run fails,
    perhaps only on several ranks).
    """

    name: str
    state: str
    text: str
    advice: str = ""  # what to do about it


def start_process(command: list[str]) -> subprocess.Popen[str]:
    """Start a process whose answer `read_answer` reads later."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def read_answer(process: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    """Return the JSON object that a process prints, or {"error": why there is none}."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _end(process)
        return {"error": f"no answer in {seconds:g} s"}
    for line in out.splitlines():  # a library may print as well
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if isinstance(answer, dict):
            return answer
    if process.returncode < 0:
        return {"error": f"it was ended by a signal: {signal.strsignal(-process.returncode)}"}
    lines = [line.strip() for line in (err or out).splitlines() if line.strip()]
    if not lines:
        return {"error": f"it exited with status {process.returncode}"}
    return {"error": lines[-1][:300]}


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()  # a launcher ends its ranks then
    try:
        process.communicate(timeout=15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


# ---- libraries: each is loaded in a process of its own, as it may crash --------------------------


INSTALL_MPI = (
    "pip install 'einmpi[mpich]', or load your site's MPI (module load …) and pip install mpi4py"
)
_OTHER_PACKAGES = ("scipy", "opt_einsum", "rich", "threadpoolctl")


def examine_numpy() -> Finding:
    version = metadata.version("numpy")
    try:
        blas = describe_blas()
    except ImportError:  # of threadpoolctl, which `examine_packages` reports
        blas = ""
    if blas:
        return Finding("numpy", "ok", f"{version}, BLAS {blas}")
    problem = f"{version}, unknown BLAS: ranks may use more threads than they have cores"
    return Finding("numpy", "note", problem, "export OMP_NUM_THREADS=1")


def examine_packages() -> Iterator[Finding]:
    """Report required packages that are not installed."""
    missing = [name for name in _OTHER_PACKAGES if find_spec(name) is None]
    if missing:
        problem = f"missing: {', '.join(missing)}"
        yield Finding("packages", "problem", problem, f"pip install {' '.join(missing)}")


def _examine_blas(answer: dict[str, Any]) -> Finding:
    if "error" in answer:
        advice = f"export {BLAS_VARIABLE}=numpy, or the name or path of a library that works"
        return Finding("BLAS", "problem", answer["error"], advice)
    if answer["path"]:
        return Finding("BLAS", "ok", f"{answer['blas']}, {answer['path']}")
    text = f"{answer['blas']}; {answer['reason']}"
    if answer["problem"]:
        advice = f"mend it, or export {BLAS_VARIABLE}=numpy"
        return Finding("BLAS", "note", f"{text}: {answer['problem']}", advice)
    return Finding("BLAS", "ok", text)


def _examine_mpi(answer: dict[str, Any]) -> Finding:
    if "error" in answer:
        problem = answer["error"].removeprefix("MPI: mpi4py: ").split("; pip")[0]
        return Finding("mpi4py", "problem", problem, INSTALL_MPI)
    text = f"{answer['mpi4py']}, built as {answer['built']}; found {answer['library']}"
    if answer["device"]:
        text += f" ({answer['device']})"
    return Finding("mpi4py", "ok", text)


def _examine_hdf5(answer: dict[str, Any]) -> Finding:
    if "error" in answer:
        return Finding("h5py", "problem", answer["error"], "pip install h5py")
    kind = "parallel" if answer["parallel"] else "serial (sufficient)"
    return Finding("h5py", "ok", f"{answer['h5py']}, HDF5 {answer['hdf5']}, {kind}")


def _examine_numba(answer: dict[str, Any]) -> Finding:
    if "error" in answer:
        return Finding("numba", "problem", answer["error"], "pip install numba")
    if not answer["folder"]:
        consequence = "kernels cannot be cached, so each run compiles them again"
        problem = f"{answer['numba']}; {consequence}: {answer['problem']}"
        advice = f"export {CACHE_VARIABLE}=FOLDER, with a folder that only you can write to"
        return Finding("numba", "note", problem, advice)
    return Finding("numba", "ok", f"{answer['numba']}; kernels are cached in {answer['folder']}")


def _examine_cupy(answer: dict[str, Any]) -> Finding:
    if "error" not in answer and answer["devices"]:
        nccl = f"NCCL {answer['nccl']}" if answer.get("nccl") else "no NCCL"
        devices = ", ".join(answer["devices"])
        text = f"{devices}; cupy {answer['cupy']}, {nccl}"
        try:
            return Finding("GPU", "ok", text if graphs_are_on() else f"{text}, no CUDA graphs")
        except InputError as error:
            return Finding("GPU", "problem", f"{text}; {error}", f"unset {GRAPHS_VARIABLE}")
    gpus = visible_gpus()
    if not gpus:
        return Finding("GPU", "ok", "none; everything runs on CPUs")
    reason = answer.get("error", "it sees no GPU")
    problem = f"{', '.join(gpus)}, but cupy does not work: {reason}"
    advice = "pip install 'einmpi[cuda13]', or 'einmpi[cuda12]' with an older driver"
    return Finding("GPU", "note", problem, advice)


# How to turn the answer of einmpi.cli.versions into a finding.
PROBES: dict[str, Callable[[dict[str, Any]], Finding]] = {
    "blas": _examine_blas,
    "mpi": _examine_mpi,
    "hdf5": _examine_hdf5,
    "numba": _examine_numba,
    "cupy": _examine_cupy,
}


# ---- the machine: cores, memory, limits, folders -------------------------------------------------


# The path of a socket may have 107 characters, and MPI adds to TMPDIR.
_LONGEST_TMPDIR = 60
_SMALLEST_SHARED_MEMORY = 2**28  # bytes
_SMALLEST_FREE_SPACE = 2**28  # bytes in TMPDIR


class _Limit(NamedTuple):
    """A limit of the system on processes: its number, what is enough, how to raise it."""

    number: int
    enough: int
    advice: str


_LOCKED_MEMORY = "locked memory"
_OPEN_FILES = "open files"
_LIMITS = {
    _LOCKED_MEMORY: _Limit(resource.RLIMIT_MEMLOCK, 2**30, "ulimit -l unlimited"),
    _OPEN_FILES: _Limit(resource.RLIMIT_NOFILE, 1024, "ulimit -n 4096"),
    "stack": _Limit(resource.RLIMIT_STACK, 2**23, "ulimit -s 8192"),
}


def examine_machine() -> Finding:
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    memory = show_bytes(os.sysconf("SC_PHYS_PAGES") * page_bytes)
    unused = show_bytes(os.sysconf("SC_AVPHYS_PAGES") * page_bytes)
    cores = f"{len(available_cores())} of {counted(os.cpu_count() or 1, 'core')}"
    text = f"{cores}; {memory} of memory, {unused} of it unused{_memory_allowance()}"
    return Finding("machine", "ok", text)


def _memory_allowance() -> str:
    """Say how much of the memory a container or a batch system allows."""
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="utf-8") as file:
            return f"; this group of processes may use {show_bytes(int(file.read()))}"
    except (OSError, ValueError):  # without a limit it says "max"
        return ""


def examine_limits() -> Finding:
    shown = []
    low = []
    for name, limit in _LIMITS.items():
        value = resource.getrlimit(limit.number)[0]
        shown.append(f"{name} {_show_limit(name, value)}")
        # Only InfiniBand and its like need locked memory.
        matters = name != _LOCKED_MEMORY or _has_infiniband()
        if matters and value != resource.RLIM_INFINITY and value < limit.enough:
            low.append(name)
    text = ", ".join(shown)
    if not low:
        return Finding("limits", "ok", text)
    advice = "; ".join(_LIMITS[name].advice for name in low)
    return Finding("limits", "note", f"{text}; too low: {', '.join(low)}", advice)


def _show_limit(name: str, value: int) -> str:
    if value == resource.RLIM_INFINITY:
        return "unlimited"
    return str(value) if name == _OPEN_FILES else show_bytes(value)


def _has_infiniband() -> bool:
    try:
        return bool(os.listdir("/sys/class/infiniband"))
    except OSError:
        return False


def examine_shared_memory() -> Finding:
    """Examine /dev/shm, through which MPI passes messages between the ranks of a machine."""
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        return Finding("/dev/shm", "note", "missing: messages on one machine may be slow")
    text = show_bytes(size)
    advice = []
    if size < _SMALLEST_SHARED_MEMORY:
        text += " may be too small for messages between many ranks"
        advice.append("mount -o remount,size=2G /dev/shm, or docker run --shm-size=2g")
    stale = stale_segments()
    if stale:
        stale_bytes = show_bytes(sum(segment.nbytes for segment in stale))
        text += f"; failed runs have left {counted(len(stale), 'file')} with {stale_bytes}"
        advice.append("einmpi removes them when it starts ranks: einmpi run JOB.toml -n 2")
    return Finding("/dev/shm", "note" if advice else "ok", text, "; ".join(advice))


def examine_temporary_folder() -> Finding:
    use_another = "export TMPDIR=FOLDER, with a folder that has free space"
    try:
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding("TMPDIR", "problem", str(error.strerror or error), use_another)
    text = f"{folder}, {show_bytes(free)} free"
    if len(folder) > _LONGEST_TMPDIR:
        problem = f"{text}; the path is too long for the sockets of some MPI libraries"
        return Finding("TMPDIR", "note", problem, "export TMPDIR=/tmp")
    if free < _SMALLEST_FREE_SPACE:
        return Finding("TMPDIR", "note", f"{text}, which is little", use_another)
    return Finding("TMPDIR", "ok", text)


# ---- ranks ---------------------------------------------------------------------------------------


NO_MPIRUN = "there is no mpirun"
_FAMILY_NAMES = {
    "mpich": "MPICH",
    "openmpi": "Open MPI",
    "intel": "Intel MPI",
    "other": "an unknown library",
}
_PMI_OF_FAMILY = {"mpich": "pmi2", "openmpi": "pmix"}


def examine_mpirun(mpi: dict[str, Any]) -> Finding:
    """Examine whether mpirun belongs to the MPI library that mpi4py has found."""
    try:
        path = mpirun_command(2)[0]
    except InputError:
        if shutil.which("srun"):
            advice = "start ranks with srun -n P python -m einmpi JOB.toml"
            return Finding("mpirun", "note", NO_MPIRUN, advice)
        return Finding("mpirun", "problem", NO_MPIRUN, INSTALL_MPI)
    family = family_of(path)
    library_family = family_in(mpi.get("library", ""))
    text = f"{path}, of {_FAMILY_NAMES[family]}"
    if family != library_family and "other" not in (family, library_family):
        library = _FAMILY_NAMES[library_family]
        problem = f"{text}, but mpi4py has found {library}"
        advice = f"use the mpirun of {library}: put its folder first on PATH, or load its module"
        return Finding("mpirun", "problem", problem, advice)
    first = shutil.which("mpirun")
    if first is not None and not os.path.samefile(first, path):
        problem = f"{text}; but the first on PATH is {first}, of {_FAMILY_NAMES[family_of(first)]}"
        advice = f"einmpi run JOB.toml -n P, or {path} -n P python -m einmpi JOB.toml"
        return Finding("mpirun", "note", problem, advice)
    return Finding("mpirun", "ok", text)


def examine_slurm(mpi: dict[str, Any]) -> Finding:
    commands = [name for name in ("srun", "sbatch") if shutil.which(name)]
    if not commands:
        return Finding("Slurm", "ok", "none; mpirun starts the ranks")
    job = os.environ.get("SLURM_JOB_ID")
    where = "outside a job"
    if job is not None:
        tasks = os.environ.get("SLURM_NTASKS", "?")
        nodes = os.environ.get("SLURM_JOB_NUM_NODES", "?")
        task_noun = "task" if tasks == "1" else "tasks"
        node_noun = "node" if nodes == "1" else "nodes"
        where = f"inside job {job}: {tasks} {task_noun} on {nodes} {node_noun}"
    pmi = _PMI_OF_FAMILY.get(family_in(mpi.get("library", "")))
    srun = f"srun --mpi={pmi}" if pmi else "srun"
    usage = f"{srun} -n P python -m einmpi JOB.toml"
    return Finding("Slurm", "ok", f"{', '.join(commands)}; {where}; {usage}")


def ping_ranks(seconds: float) -> Finding:
    """Let two ranks send messages to each other."""
    process = start_process([*python_command(), "-m", "einmpi.cli.ping", "start"])
    answer = read_answer(process, seconds)
    if "error" in answer:
        problem = f"two ranks cannot reach each other: {answer['error']}"
        advice = f"{DEBUG_VARIABLE}=1 python -m einmpi.cli.ping start shows all output of mpirun"
        return Finding("ping", "problem", problem, advice)
    latency = answer["latency"] * 1e6
    bandwidth = answer["bandwidth"] / 1e9
    text = f"two ranks: {latency:.1f} µs per message, {bandwidth:.1f} GB/s for 16 MiB"
    if answer["not_shared"]:
        advice = "exchanges inside a node go by messages, which is slower and takes more memory"
        return Finding(
            "ping", "note", f"{text}; they share no memory: {answer['not_shared']}", advice
        )
    return Finding("ping", "ok", f"{text}; they share memory")
