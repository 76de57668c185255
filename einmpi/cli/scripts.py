"""Scripts for schedulers: what a job needs, in the words of Slurm, PBS, LSF, Flux or Kubernetes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

_SIGNAL_SECONDS = 300  # before the end of the time


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
        scheduler = self.scheduler
        lines = ["#!/bin/bash"]
        lines += [f"{scheduler.comment}{plain(note)}" for note in self.notes]
        lines += [scheduler.prefix + directive for directive in scheduler.directives(self)]
        lines.append("")
        if self.resumes:
            lines += scheduler.watch
        lines += self._environment_lines()
        lines.append("")
        if self.resumes:
            lines += self._resuming_lines()
        else:
            lines.append(self._run_line(""))
        lines.append("")
        return "\n".join(lines)

    @property
    def scheduler(self) -> Scheduler:
        """Whose script it is."""
        return SCHEDULERS[self.format]

    @property
    def ranks(self) -> int:
        return self.nodes * self.tasks_per_node

    @property
    def minutes(self) -> int:
        return -(-self.seconds // 60)

    @property
    def notice(self) -> int:
        """Seconds before the end at which a run is asked to stop.

        A vertex and a checkpoint must fit into them, but a short job must not be asked at its
        start.
        """
        return min(_SIGNAL_SECONDS, self.seconds // 4)

    @property
    def gpus(self) -> tuple[str, str]:
        """The type and the number of GPUs of a node, either of which may be empty."""
        kind, _, number = self.gpus_per_node.rpartition(":")
        return kind, number

    def site_lines(self) -> list[str]:
        """Return the options that a site defines, as its scheduler writes them."""
        written = self.scheduler.site_options
        return [written[name].format(value) for name, value in self.site_options.items()]

    def _environment_lines(self) -> list[str]:
        lines = ["# ==== YOUR SITE: load einmpi and its MPI ====", "# module load …"]
        if self.activate:
            lines.append(f"source {self._quoted([self.activate])}")
        else:
            lines.append("# source …/bin/activate")
        return [*lines, "", *self.scheduler.launcher(self)]

    def _run_line(self, prefix: str) -> str:
        python = self.scheduler.python.format(threads=self.threads)
        return f"$launch {prefix}{python} -m einmpi {self._quoted(self.command)}"

    def _quoted(self, words: Sequence[str]) -> str:
        text = shlex.join(words)
        if self.format != "slurm":
            # LSF and Flux look for their directives on all lines: no word starts a line.
            text = text.replace("\n", r"'$'\n''").replace("\r", r"'$'\r''")
        return text

    def _resuming_lines(self) -> list[str]:
        limit = self.seconds - self.notice
        return [
            "# Ranks that are still starting keep the signal for later, if env can do that "
            "(coreutils 8.31).",
            'hold="env --block-signal=USR1"',
            "$hold true 2>/dev/null || hold=",
            f"{self._run_line('$hold ')} &",
            "run=$!",
            "# The launcher passes the signal on to the ranks. It may lose one while it starts, "
            "so send it again.",
            'while kill -0 "$run" 2>/dev/null; do',
            "    sleep 2 & wait $!  # a shell handles signals while it waits, not while it sleeps",
            *(line.format(limit=limit) for line in self.scheduler.clock),
            '    [ -z "$asked" ] || kill -USR1 "$run" 2>/dev/null',
            "done",
            'wait "$run"',
            "status=$?",
            "# 75: stopped with a checkpoint. A rank that was still starting may have died of the "
            "signal.",
            'if [ $status -eq 75 ] || { [ "$asked" ] && [ $status -gt 2 ]; }; then',
            f"    {self.scheduler.again}",
            "fi",
            "exit $status",
        ]


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
    """How a scheduler is told what a job needs."""

    title: str
    submit: str  # the command, before the name of a script
    prefix: str  # of its directives
    directives: Callable[[Script], list[str]]
    site_options: Mapping[str, str]  # those that it has, and how they are written
    launcher: Callable[[Script], list[str]]  # the lines that set $launch
    has_gpu_types: bool = False
    comment: str = "# "
    # The ranks' Python. Not every launcher passes variables on to other nodes.
    python: str = 'env OMP_NUM_THREADS={threads} "$(command -v python)"'
    # A run that stops before its time is up: how the script notices, and what follows.
    watch: Sequence[str] = ("asked=", "")
    clock: Sequence[str] = ("    [ $SECONDS -lt {limit} ] || asked=yes  # the time is nearly up",)
    again: str = 'echo "submit this script again to continue from the checkpoint" >&2'


# How Slurm starts the ranks of an MPI family (see launch.mpirun).
PMI = {"mpich": "pmi2", "intel": "pmi2", "openmpi": "pmix"}


def _slurm_directives(job: Script) -> list[str]:
    options = [
        f"job-name={job_name(job.name)}",
        f"nodes={job.nodes}",
        f"ntasks-per-node={job.tasks_per_node}",
        f"cpus-per-task={job.threads}",
        *job.site_lines(),
    ]
    if job.gpus_per_node:
        options.append(f"gpus-per-node={job.gpus_per_node}")
    options += [f"mem={job.memory_mib}M", f"time={clock(job.seconds)}", "output=%x-%j.out"]
    if job.resumes:
        options += [f"signal=B:USR1@{job.notice}", "requeue", "open-mode=append"]
    return options


def _slurm_launcher(job: Script) -> list[str]:
    pmi = PMI.get(job.family)
    srun = f"srun --mpi={pmi}" if pmi else "srun"
    found = f"Found {job.library}" if pmi else f"Found no MPI here ({job.library})"
    lines = [
        f"# {plain(found)}. Use pmi2 for MPICH and its relatives, pmix for Open MPI; "
        "LAUNCH=mpirun works with both.",
    ]
    if job.family == "intel":
        lines.append("# Intel MPI also needs: export I_MPI_PMI_LIBRARY=…/libpmi2.so (of Slurm)")
    return [
        *lines,
        f"launch=${{LAUNCH:-{srun}}}",
        "export SLURM_KILL_BAD_EXIT=1  # when a rank dies, srun ends the others",
        "export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK",
    ]


def _pbs_directives(job: Script) -> list[str]:
    tasks = job.tasks_per_node
    chunk = f"ncpus={tasks * job.threads}:mpiprocs={tasks}:ompthreads={job.threads}"
    chunk += f":mem={job.memory_mib}mb"
    if job.gpus_per_node:
        chunk += f":ngpus={job.gpus_per_node}"
    return [
        f"-N {job_name(job.name)}",
        f"-l select={job.nodes}:{chunk}",
        "-l place=scatter",  # each chunk on a node of its own
        f"-l walltime={job.minutes // 60:02d}:{job.minutes % 60:02d}:00",
        *job.site_lines(),
        "-j oe",
    ]


def _lsf_directives(job: Script) -> list[str]:
    name = job_name(job.name)
    lines = [
        f"-J {name}",
        f"-n {job.ranks}",
        f'-R "span[ptile={job.tasks_per_node}]"',
        f'-R "rusage[mem={job.memory_mib}MB/host]"',
    ]
    if job.threads > 1:
        lines.append(f'-R "affinity[core({job.threads})]"')
    if job.gpus_per_node:
        kind, number = job.gpus
        model = f":gmodel={kind}" if kind else ""
        lines.append(f'-gpu "num={number}/host{model}"')
    lines += [f"-W {job.minutes}", *job.site_lines(), f"-o {name}-%J.out"]
    if job.resumes:
        lines.append('-Q "75"')  # with this exit status it returns to the queue
    return lines


def _flux_directives(job: Script) -> list[str]:
    name = job_name(job.name)
    lines = [
        f"--job-name={name}",
        f"--nodes={job.nodes}",
        f"--nslots={job.nodes}",
        f"--cores-per-slot={job.tasks_per_node * job.threads}",
    ]
    if job.gpus_per_node:
        lines.append(f"--gpus-per-slot={job.gpus_per_node}")
    return [
        *lines,
        f"--time-limit={job.minutes}m",
        *job.site_lines(),
        f"--output={name}-{{{{id}}}}.out",
    ]


def _mpirun(hosts: str) -> Callable[[Script], list[str]]:
    """Return how mpirun starts ranks on the hosts of a file with a line for each rank."""

    def lines(job: Script) -> list[str]:
        return [
            f"# Found {plain(job.library)}. LAUNCH=… replaces the launcher.",
            f"launch=${{LAUNCH:-mpirun -n {job.ranks} --hostfile {hosts}}}",
        ]

    return lines


def _flux_launcher(job: Script) -> list[str]:
    pmi = " -o pmi=pmix" if job.family == "openmpi" else ""
    gpus = f" --gpus-per-node={job.gpus_per_node}" if job.gpus_per_node else ""
    run = f"flux run{pmi} --nodes={job.nodes} --tasks-per-node={job.tasks_per_node}{gpus}"
    return [
        f"# Found {plain(job.library)}. Open MPI from version 5 needs flux-pmix and -o pmi=pmix.",
        f"# Flux does not schedule memory: a node needs {job.memory_mib} MiB.",
        f"launch=${{LAUNCH:-{run}}}",
    ]


SCHEDULERS = {
    "slurm": Scheduler(
        "Slurm",
        "sbatch",
        "#SBATCH --",
        _slurm_directives,
        {name: f"{name}={{}}" for name in ("partition", "account", "qos", "constraint")},
        _slurm_launcher,
        has_gpu_types=True,
        python="python",
        # The signal may come at any time from the start, also while modules are loaded.
        watch=(
            "trap 'asked=yes' USR1  # Slurm sends this signal before the time is up",
            "asked=",
            "",
        ),
        clock=(),
        again='scontrol requeue "$SLURM_JOB_ID"',
    ),
    "pbs": Scheduler(
        "PBS",
        "qsub",
        "#PBS ",
        _pbs_directives,
        {"partition": "-q {}", "account": "-A {}"},
        _mpirun("$PBS_NODEFILE"),
    ),
    "lsf": Scheduler(
        "LSF",
        "bsub <",
        "#BSUB ",
        _lsf_directives,
        {"partition": "-q {}", "account": "-P {}", "constraint": '-R "select[{}]"'},
        _mpirun("$LSB_DJOB_HOSTFILE"),
        has_gpu_types=True,
        again="status=75  # by -Q 75, LSF returns the job to the queue",
    ),
    "flux": Scheduler(
        "Flux",
        "flux batch",
        "#flux: ",
        _flux_directives,
        {"partition": "--queue={}", "account": "--bank={}", "constraint": '--requires="{}"'},
        _flux_launcher,
        comment="# note: ",  # Flux would take a title such as "flux: -N9" for a directive
    ),
    "mpijob": Scheduler(
        "Kubernetes",
        "kubectl apply -f",
        "",
        lambda job: [],
        {"partition": "\n  labels:\n    kueue.x-k8s.io/queue-name: '{}'"},
        lambda job: [],
    ),
}


# ---- Kubernetes ----------------------------------------------------------------------------------


_MPIJOB = """\
{notes}
# Both containers must see the files of the job: add volumes to them.
apiVersion: kubeflow.org/v2beta1
kind: MPIJob
metadata:
  name: {name}{queue}
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
                memory: {memory}Mi{gpus}
            volumeMounts:
            - name: shared-memory
              mountPath: /dev/shm
          volumes:
          - name: shared-memory  # ranks of a node exchange blocks there
            emptyDir:
              medium: Memory
"""
_RESTARTS = 6  # of a run that continues from its checkpoint


def _mpijob(job: Script) -> str:
    """Return the job for the MPI operator of Kubeflow."""
    mpi = {"openmpi": "OpenMPI", "intel": "Intel"}.get(job.family, "MPICH")
    launch = ["mpirun", "-n", str(job.ranks), "--hostfile", "/etc/mpi/hostfile"]
    if mpi == "OpenMPI":
        launch.append("--allow-run-as-root")
    words = [*launch, "env", f"OMP_NUM_THREADS={job.threads}", "python", "-m", "einmpi"]
    command = [f"            - {_yaml_string(word)}" for word in (*words, *job.command)]
    name = re.sub("[^a-z0-9]+", "-", job.name.lower()).strip("-")[:40].strip("-")
    no_image = "IMAGE  # to be replaced (--image): einmpi, its MPI and sshd, see docs/install.md"
    return _MPIJOB.format(
        notes="\n".join(f"# {plain(note)}" for note in job.notes),
        name=f"einmpi-{name}".strip("-"),
        queue="".join(job.site_lines()),
        tasks=job.tasks_per_node,
        mpi=mpi,
        restarts=_RESTARTS if job.resumes else 0,
        seconds=job.seconds,
        image=no_image if job.image is None else _yaml_string(job.image),
        command="\n".join(command),
        nodes=job.nodes,
        cores=job.tasks_per_node * job.threads,
        memory=job.memory_mib,
        gpus=f"\n                nvidia.com/gpu: {job.gpus_per_node}" if job.gpus_per_node else "",
    )


def _yaml_string(text: str) -> str:
    shown = ""
    for letter in text:
        is_plain = letter.isprintable() and letter not in '"\\'
        shown += letter if is_plain else f"\\U{ord(letter):08x}"
    return f'"{shown}"'
