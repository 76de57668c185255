"""Scripts for schedulers: what a job needs, in the words of Slurm, PBS, LSF, Flux or Kubernetes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_SIGNAL_SECONDS = 300  # before the end of the time
# How Slurm starts the ranks of an MPI family (see launch.mpirun).
_PMI = {"mpich": "pmi2", "intel": "pmi2", "openmpi": "pmix"}
_RESTARTS = 6  # of a run that continues from its checkpoint


@dataclass(frozen=True)
class Script:
    """What a script says."""

    name: str
    notes: Sequence[str]  # lines of comment
    nodes: int
    tasks_per_node: int
    threads: int
    memory_mib: int  # per node
    seconds: int
    family: str  # of the MPI library
    library: str  # its name, or why it is unknown
    command: Sequence[str]  # the words after `python -m einmpi`
    activate: str | None = None  # the file that activates the environment of this Python
    gpus_per_node: str = ""  # such as 4 or a100:4; empty for none
    resumes: bool = False  # whether the run has a checkpoint and continues when it starts again
    site_options: Mapping[str, str] = field(default_factory=dict)  # partition, account, …
    format: str = "slurm"
    image: str | None = None  # of the containers of a Kubernetes job

    def __str__(self) -> str:
        if self.format == "mpijob":
            return _mpijob(self)
        scheduler = SCHEDULERS[self.format]
        words = self.words()
        lines = ["#!/bin/bash"]
        lines += [f"{scheduler.comment}{plain(note)}" for note in self.notes]
        directives = _filled(scheduler.directives, words)
        lines += [scheduler.prefix + directive for directive in directives]
        lines.append("")
        if self.resumes:
            lines += [*_filled(scheduler.watch, words), ""]
        lines += [*_filled(_ENVIRONMENT, words), "", *_filled(scheduler.launcher, words), ""]
        words["python"] = scheduler.python.format_map(words)
        for key in ("clock", "again"):
            words[key] = getattr(scheduler, key).format_map(words)
        lines += _filled(_RESUMING if self.resumes else _RUN, words)
        return "\n".join([*lines, ""])

    def words(self) -> dict[str, Any]:
        """Return what the texts of schedulers name; what a job does not have is empty."""
        ranks = self.nodes * self.tasks_per_node
        minutes = -(-self.seconds // 60)
        kind, _, number = self.gpus_per_node.rpartition(":")
        pmi = _PMI.get(self.family)
        written = SCHEDULERS[self.format].site_options
        site = [written[name].format(value) for name, value in self.site_options.items()]
        # A vertex and a checkpoint must fit into the time after it is asked to stop, but a short
        # job must not be asked at its start.
        notice = min(_SIGNAL_SECONDS, self.seconds // 4)
        return {
            "name": job_name(self.name),
            "nodes": self.nodes,
            "tasks": self.tasks_per_node,
            "ranks": ranks,
            "threads": self.threads,
            "has_threads": self.threads > 1,
            "cores": self.tasks_per_node * self.threads,
            "memory": self.memory_mib,
            "time": clock(self.seconds),
            "minutes": minutes,
            "walltime": f"{minutes // 60:02d}:{minutes % 60:02d}:00",
            "notice": notice,
            "limit": self.seconds - notice,
            "resumes": self.resumes,
            "site": "\n".join(site),
            "gpus": self.gpus_per_node,
            "no_gpus": not self.gpus_per_node,
            "of_gpus": number + (f"/host:gmodel={kind}" if kind else "/host"),
            "library": plain(self.library),
            "pmi": pmi,
            "no_pmi": pmi is None,
            "is_intel": self.family == "intel",
            "pmix": " -o pmi=pmix" if self.family == "openmpi" else "",
            "activate": self.activate and self._quoted([self.activate]),
            "no_activate": not self.activate,
            "command": self._quoted(self.command),
        }

    def _quoted(self, words: Sequence[str]) -> str:
        text = shlex.join(words)
        if self.format != "slurm":
            # LSF and Flux look for their directives on all lines: no word starts a line.
            text = text.replace("\n", r"'$'\n''").replace("\r", r"'$'\r''")
        return text


def _filled(text: str, words: Mapping[str, Any]) -> list[str]:
    """Return the lines of a text. One after "WORD ? " is there if this word is not empty."""
    lines = []
    for line in text.strip("\n").split("\n"):
        word, mark, rest = line.partition(" ? ")
        if not mark or words[word]:
            lines += (rest if mark else line).format_map(words).split("\n")
    return lines


def plain(text: str) -> str:
    """Return the text as one line for a comment, with ? for characters that cannot be printed."""
    one_line = " ".join(text.split())
    shown = ""
    for letter in one_line:
        shown += letter if letter.isprintable() else "?"
    return shown


def job_name(text: str) -> str:
    """Return a name of letters, digits and little else: it becomes part of file names."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")[:60] or "einmpi"


def clock(seconds: int) -> str:
    """Return the time in Slurm's notation, rounded up to whole minutes: 1-02:30:00."""
    minutes = -(-seconds // 60)
    days, minutes_of_day = divmod(minutes, 24 * 60)
    time_of_day = f"{minutes_of_day // 60:02d}:{minutes_of_day % 60:02d}:00"
    return f"{days}-{time_of_day}" if days else time_of_day


# ---- schedulers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scheduler:
    """How a scheduler is told what a job needs, in texts with the words of a `Script`."""

    title: str
    submit: str  # the command, before the name of a script
    prefix: str  # of its directives
    directives: str
    site_options: Mapping[str, str]  # those that it has, and how they are written
    launcher: str  # the lines that set $launch
    has_gpu_types: bool = False
    comment: str = "# "
    # The ranks' Python. Not every launcher passes variables on to other nodes.
    python: str = 'env OMP_NUM_THREADS={threads} "$(command -v python)"'
    # A run that stops before its time is up: how the script notices, and what follows.
    watch: str = "asked="
    clock: str = "[ $SECONDS -lt {limit} ] || asked=yes  # the time is nearly up"
    again: str = 'echo "submit this script again to continue from the checkpoint" >&2'


_ENVIRONMENT = """
# ==== YOUR SITE: load einmpi and its MPI ====
# module load …
activate ? source {activate}
no_activate ? # source …/bin/activate
"""
_RUN = "$launch {python} -m einmpi {command}"
_RESUMING = """
# Ranks that are still starting keep the signal for later, if env can do that (coreutils 8.31).
hold="env --block-signal=USR1"
$hold true 2>/dev/null || hold=
$launch $hold {python} -m einmpi {command} &
run=$!
# The launcher passes the signal on to the ranks. It may lose one while it starts, so send it again.
while kill -0 "$run" 2>/dev/null; do
    sleep 2 & wait $!  # a shell handles signals while it waits, not while it sleeps
clock ?     {clock}
    [ -z "$asked" ] || kill -USR1 "$run" 2>/dev/null
done
wait "$run"
status=$?
# 75: stopped with a checkpoint. A rank that was still starting may have died of the signal.
if [ $status -eq 75 ] || {{ [ "$asked" ] && [ $status -gt 2 ]; }}; then
    {again}
fi
exit $status
"""
_MPIRUN = """
# Found {library}. LAUNCH=… replaces the launcher.
launch=${{LAUNCH:-mpirun -n {ranks} --hostfile @HOSTS@}}
"""

_SLURM = """
job-name={name}
nodes={nodes}
ntasks-per-node={tasks}
cpus-per-task={threads}
site ? {site}
gpus ? gpus-per-node={gpus}
mem={memory}M
time={time}
output=%x-%j.out
resumes ? signal=B:USR1@{notice}
resumes ? requeue
resumes ? open-mode=append
"""
_SRUN_USE = (
    "Use pmi2 for MPICH and its relatives, pmix for Open MPI; LAUNCH=mpirun works with both."
)
_SRUN = f"""
pmi ? # Found {{library}}. {_SRUN_USE}
no_pmi ? # Found no MPI here ({{library}}). {_SRUN_USE}
is_intel ? # Intel MPI also needs: export I_MPI_PMI_LIBRARY=…/libpmi2.so (of Slurm)
pmi ? launch=${{{{LAUNCH:-srun --mpi={{pmi}}}}}}
no_pmi ? launch=${{{{LAUNCH:-srun}}}}
export SLURM_KILL_BAD_EXIT=1  # when a rank dies, srun ends the others
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
"""

# Each chunk is on a node of its own.
_PBS_CHUNK = "ncpus={cores}:mpiprocs={tasks}:ompthreads={threads}:mem={memory}mb"
_PBS = f"""
-N {{name}}
no_gpus ? -l select={{nodes}}:{_PBS_CHUNK}
gpus ? -l select={{nodes}}:{_PBS_CHUNK}:ngpus={{gpus}}
-l place=scatter
-l walltime={{walltime}}
site ? {{site}}
-j oe
"""

# With the exit status 75, LSF returns a job to the queue.
_LSF = """
-J {name}
-n {ranks}
-R "span[ptile={tasks}]"
-R "rusage[mem={memory}MB/host]"
has_threads ? -R "affinity[core({threads})]"
gpus ? -gpu "num={of_gpus}"
-W {minutes}
site ? {site}
-o {name}-%J.out
resumes ? -Q "75"
"""

_FLUX = """
--job-name={name}
--nodes={nodes}
--nslots={nodes}
--cores-per-slot={cores}
gpus ? --gpus-per-slot={gpus}
--time-limit={minutes}m
site ? {site}
--output={name}-{{{{id}}}}.out
"""
_FLUX_RUN = "flux run{pmix} --nodes={nodes} --tasks-per-node={tasks}"
_FLUX_LAUNCHER = f"""
# Found {{library}}. Open MPI from version 5 needs flux-pmix and -o pmi=pmix.
# Flux does not schedule memory: a node needs {{memory}} MiB.
gpus ? launch=${{{{LAUNCH:-{_FLUX_RUN} --gpus-per-node={{gpus}}}}}}
no_gpus ? launch=${{{{LAUNCH:-{_FLUX_RUN}}}}}
"""

SCHEDULERS = {
    "slurm": Scheduler(
        "Slurm",
        "sbatch",
        "#SBATCH --",
        _SLURM,
        {name: f"{name}={{}}" for name in ("partition", "account", "qos", "constraint")},
        _SRUN,
        has_gpu_types=True,
        python="python",
        # The signal may come at any time from the start, also while modules are loaded.
        watch="trap 'asked=yes' USR1  # Slurm sends this signal before the time is up\nasked=",
        clock="",
        again='scontrol requeue "$SLURM_JOB_ID"',
    ),
    "pbs": Scheduler(
        "PBS",
        "qsub",
        "#PBS ",
        _PBS,
        {"partition": "-q {}", "account": "-A {}"},
        _MPIRUN.replace("@HOSTS@", "$PBS_NODEFILE"),
    ),
    "lsf": Scheduler(
        "LSF",
        "bsub <",
        "#BSUB ",
        _LSF,
        {"partition": "-q {}", "account": "-P {}", "constraint": '-R "select[{}]"'},
        _MPIRUN.replace("@HOSTS@", "$LSB_DJOB_HOSTFILE"),
        has_gpu_types=True,
        again="status=75  # by -Q 75, LSF returns the job to the queue",
    ),
    "flux": Scheduler(
        "Flux",
        "flux batch",
        "#flux: ",
        _FLUX,
        {"partition": "--queue={}", "account": "--bank={}", "constraint": '--requires="{}"'},
        _FLUX_LAUNCHER,
        comment="# note: ",  # Flux would take a title such as "flux: -N9" for a directive
    ),
    "mpijob": Scheduler(
        "Kubernetes",
        "kubectl apply -f",
        "",
        "",
        {"partition": "\n  labels:\n    kueue.x-k8s.io/queue-name: '{}'"},
        "",
    ),
}


# ---- Kubernetes ----------------------------------------------------------------------------------


_MPIJOB = """\
{notes}
# Both containers must see the files of the job: add volumes to them.
apiVersion: kubeflow.org/v2beta1
kind: MPIJob
metadata:
  name: {name}{site}
spec:
  slotsPerWorker: {tasks}
  mpiImplementation: {mpi}
  runPolicy:
    cleanPodPolicy: Running
    backoffLimit: {restarts}
    activeDeadlineSeconds: {seconds}
  mpiReplicaSpecs:
    Launcher:
      replicas: 1
      template:
        spec:
          containers:
          - name: launcher
            image: {image}
            command:
{command}
    Worker:
      replicas: {nodes}
      template:
        spec:
          containers:
          - name: worker
            image: {image}
            resources:
              limits:
                cpu: {cores}
                memory: {memory}Mi
gpus ?                 nvidia.com/gpu: {gpus}
            volumeMounts:
            - name: shared-memory
              mountPath: /dev/shm
          volumes:
          - name: shared-memory  # ranks of a node exchange blocks there
            emptyDir:
              medium: Memory
"""


def _mpijob(job: Script) -> str:
    """Return the job for the MPI operator of Kubeflow."""
    words = job.words()
    mpi = {"openmpi": "OpenMPI", "intel": "Intel"}.get(job.family, "MPICH")
    launch = ["mpirun", "-n", str(words["ranks"]), "--hostfile", "/etc/mpi/hostfile"]
    if mpi == "OpenMPI":
        launch.append("--allow-run-as-root")
    python = ["env", f"OMP_NUM_THREADS={job.threads}", "python", "-m", "einmpi"]
    command = [_yaml_string(word) for word in (*launch, *python, *job.command)]
    name = re.sub("[^a-z0-9]+", "-", job.name.lower()).strip("-")[:40].strip("-")
    no_image = "IMAGE  # to be replaced (--image): einmpi, its MPI and sshd, see docs/install.md"
    words |= {
        "notes": "\n".join(f"# {plain(note)}" for note in job.notes),
        "name": f"einmpi-{name}".strip("-"),
        "mpi": mpi,
        "restarts": _RESTARTS if job.resumes else 0,
        "seconds": job.seconds,
        "image": no_image if job.image is None else _yaml_string(job.image),
        "command": "\n".join(f"            - {word}" for word in command),
    }
    return "\n".join([*_filled(_MPIJOB, words), ""])


def _yaml_string(text: str) -> str:
    shown = ""
    for letter in text:
        is_plain = letter.isprintable() and letter not in '"\\'
        shown += letter if is_plain else f"\\U{ord(letter):08x}"
    return f'"{shown}"'
