"""A real Slurm cluster on this machine, for tests and for trying scripts, inside one folder.

`python tests/slurm/cluster.py up DIR` starts it and prints the variable to export; `down DIR`
ends it.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# MPICH names shared memory by the number of the job's step. Nodes of one host would share it, and
# so would clusters that count from 1: each node has its own /dev/shm, which ends with it.
OWN_MEMORY, MOUNT = ("unshare", "--mount", "sh", "-c"), "mount -t tmpfs einmpi-test /dev/shm"
NEEDED = (
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "scontrol",
    "scancel",
    "sinfo",
    "squeue",
    "unshare",
    "mount",
)
# What an outer launcher or job has set would make jobs part of it.
_OUTER = ("EINMPI", "PMI", "OMPI", "PRTE", "MPI_", "HYDI_", "HYDRA_", "SLURM", "SBATCH")
# The last one: not used on one machine, and each rank sleeps for a second when it is put away.
_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_btl": "^ofi",
}
# Over UCX, MPICH sends 4096 bytes of address, most of them whatever lies behind it in memory, in
# lines that are at times too long for Slurm: docs/slurm.md. Over libfabric its lines are short.
# Its first choice there is the provider `sockets`, over which ranks of two nodes often cannot
# connect on a busy machine.
_MPICH = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
ROOT = Path(__file__).resolve().parents[2]  # it also runs as a script

# Nodes are daemons of one host, each with a name and a port. They may have more cores than it.
# A job gets no more memory than it requests (MB): its processes are checked every second. GPUs are
# empty files, to be counted.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
ReturnToService=2
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
TmpFS={folder}/tmp/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
KillWait=10
JobRequeue=1
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} "
    "RealMemory=16000 Gres=gpu:{cpus}"
)


@dataclass(frozen=True)
class Cluster:
    folder: Path
    nodes: int

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of a job, which finds this Python and this einmpi first."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(_OUTER)}
        path = os.pathsep.join((str(Path(sys.executable).parent), kept.get("PATH", os.defpath)))
        own = {"PATH": path, "PYTHONPATH": str(ROOT), "SLURM_CONF": str(self.folder / "slurm.conf")}
        return {**kept, **_OPEN_MPI, **_MPICH, **own, **(more or {})}

    def run(
        self,
        *command: str | Path,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Return a finished command such as srun. If it hangs, cancel its jobs and fail."""
        words = [str(word) for word in command]
        try:
            return subprocess.run(
                words,
                cwd=cwd,
                env=self.environment(env),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired as error:
            self._quietly("scancel", "--full", "--user=root")
            raise AssertionError(
                f"{words} has not ended in {timeout:g} s\n{error.stdout}\n{error.stderr}"
            ) from None

    def submit(self, *words: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> int:
        """The number of a new job: `sbatch` with these words."""
        done = self.run("sbatch", "--parsable", *words, cwd=cwd, env=env)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def wait(self, *numbers: int, timeout: float = 120) -> list[dict[str, str]]:
        """Wait for jobs and return what Slurm knows of them. `sbatch --wait` checks too rarely."""

        def look() -> list[dict[str, str]]:
            shown = "".join(
                self._quietly("scontrol", "-o", "show", "job", str(number)) for number in numbers
            )
            return [
                dict(word.split("=", 1) for word in line.split() if "=" in word)
                for line in shown.splitlines()
            ]

        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        if not _until(lambda: all(job["JobState"] in ended for job in look()), timeout):
            found = "\n".join(map(str, look()))
            self._quietly("scancel", *map(str, numbers))
            raise AssertionError(f"jobs {numbers} have not ended in {timeout:g} s\n{found}")
        return look()

    def _quietly(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment(), capture_output=True, text=True, timeout=120
        )
        return done.stdout if done.returncode == 0 else ""


def why_not() -> str | None:
    """Why there can be no cluster here."""
    missing = [name for name in NEEDED if shutil.which(name, path=_path()) is None]
    if missing:
        packages = "slurm-wlm, munge and libpmix-dev"
        return f"no {', '.join(missing)} here: install Debian's packages {packages}"
    if os.geteuid() != 0:
        return "only root can start Slurm's daemons"
    done = subprocess.run([*OWN_MEMORY, MOUNT], capture_output=True, text=True)
    return f"no /dev/shm for each node: {done.stderr.strip()}" if done.returncode else None


def _path() -> str:
    return os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))


@contextlib.contextmanager
def running(folder: Path, nodes: int = 2, cpus: int = 4) -> Iterator[Cluster]:
    """A cluster until the end of the block, however it ends."""
    try:
        yield start(folder, nodes, cpus)
    finally:
        stop(folder)


def start(folder: Path, nodes: int = 2, cpus: int = 4) -> Cluster:
    """Start all daemons and wait until every node is idle; they run on after this process."""
    folder = folder.resolve()
    of_nodes = [f"{of}/n{k + 1}" for of in ("spool", "tmp") for k in range(nodes)]
    for name in ("munge", "state", "run", "log", "gpu", *of_nodes):
        (folder / name).mkdir(parents=True, exist_ok=True)
    host = socket.gethostname().split(".")[0]
    first, *ports = _free_ports(nodes + 1)
    lines = [
        NODE.format(name=f"n{k + 1}", host=host, port=port, cpus=cpus)
        for k, port in enumerate(ports)
    ]
    text = CONFIGURATION.format(folder=folder, host=host, port=first, nodes="\n".join(lines))
    (folder / "slurm.conf").write_text(text)
    for k in range(cpus):
        (folder / f"gpu/gpu{k}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu/gpu[0-{cpus - 1}]\n")
    (folder / "cgroup.conf").write_text(
        "CgroupPlugin=cgroup/v1\n"
    )  # else slurmd wants systemd, which is not here
    key = folder / "munge/key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))
    cluster = Cluster(folder, nodes)
    # munged refuses a socket below a folder that others may write to (/tmp) without --force.
    files = {
        "key-file": "key",
        "socket": "socket",
        "pid-file": "pid",
        "log-file": "log",
        "seed-file": "seed",
    }
    _daemon(
        cluster,
        "munged",
        "--force",
        *(f"--{option}={folder}/munge/{name}" for option, name in files.items()),
    )
    _daemon(cluster, "slurmctld")
    for k in range(nodes):
        _daemon(cluster, *OWN_MEMORY, f"{MOUNT} && exec slurmd -N n{k + 1}")
    ready = _until(
        lambda: cluster._quietly("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(nodes), 120
    )
    if not ready:
        logs = "\n".join(
            path.read_text(errors="replace")[-2000:] for path in sorted((folder / "log").iterdir())
        )
        raise RuntimeError(
            f"the nodes are not idle after 120 s\n{cluster._quietly('sinfo', '-N', '-l')}\n{logs}"
        )
    return cluster


def _free_ports(count: int) -> list[int]:
    """Ports that nobody uses now: all are held until the last one is found."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _daemon(cluster: Cluster, *command: str) -> None:
    """It goes into the background by itself, and notes its number in a file."""
    done = subprocess.run(
        command,
        env={**cluster.environment(), "PATH": _path()},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with status {done.returncode}: {done.stderr.strip()}"
        )


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def stop(folder: Path) -> None:
    """Cancel all jobs, then end the daemons by their pid files, and what is left of jobs."""
    folder = folder.resolve()
    cluster = Cluster(folder, 0)
    if _living(folder / "run/slurmctld.pid"):
        cluster._quietly("scancel", "--full", "--user=root")
        _until(lambda: not cluster._quietly("squeue", "-h", "-o", "%i").strip(), 60)
    files = [*sorted((folder / "run").glob("*.pid")), folder / "munge/pid"]
    for number in filter(None, map(_living, files)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGTERM)
    _until(lambda: not any(map(_living, files)), 60)
    # What jobs have left. A shell that has the setting of this cluster is no part of a job.
    mark = f"SLURM_CONF={folder}/slurm.conf".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            settings = path.read_bytes().split(b"\0")
            if mark in settings and any(
                setting.startswith(b"SLURM_JOB_ID=") for setting in settings
            ):
                os.kill(int(path.parent.name), signal.SIGKILL)


def _living(pid_file: Path) -> int | None:
    """Return the process of a pid file if it runs. A zombie has no command line."""
    with contextlib.suppress(OSError, ValueError):
        number = int(pid_file.read_text())
        return number if Path(f"/proc/{number}/cmdline").read_bytes() else None
    return None


if __name__ == "__main__":
    if reason := why_not():
        sys.exit(f"no Slurm: {reason}")
    match sys.argv[1:]:
        case ["check"]:
            pass
        case ["up", folder]:
            print(f"export SLURM_CONF={start(Path(folder)).folder / 'slurm.conf'}")
        case ["down", folder]:
            stop(Path(folder))
        case _:
            sys.exit("usage: cluster.py check | up DIR | down DIR")
