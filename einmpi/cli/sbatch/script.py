"""The text of a batch script. Words of the user are data, never commands: they are quoted for the
shell; in comments and #SBATCH lines, characters with a meaning there are replaced."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# How Slurm starts the ranks of an MPI family (see launch.mpirun).
PMI = {"mpich": "pmi2", "intel": "pmi2", "openmpi": "pmix"}
# Slurm's signal may come at any time from the start, also while modules are loaded.
_CATCH_SIGNAL = (
    "trap 'asked=yes' USR1  # Slurm sends this signal before the time is up",
    "asked=",
    "",
)
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
    resumes: bool = False  # whether the run has a checkpoint and continues when it is requeued
    site_options: Mapping[str, str] = field(default_factory=dict)  # partition, account, …

    def __str__(self) -> str:
        lines = ["#!/bin/bash"]
        lines += [f"# {plain(note)}" for note in self.notes]
        lines += self._sbatch_lines()
        lines.append("")
        if self.resumes:
            lines += _CATCH_SIGNAL
        lines += self._environment_lines()
        lines.append("")
        if self.resumes:
            lines += self._resuming_lines()
        else:
            lines.append(self._run_line(""))
        lines.append("")
        return "\n".join(lines)

    def _sbatch_lines(self) -> list[str]:
        options = [
            f"job-name={job_name(self.name)}",
            f"nodes={self.nodes}",
            f"ntasks-per-node={self.tasks_per_node}",
            f"cpus-per-task={self.threads}",
        ]
        options += [f"{name}={value}" for name, value in self.site_options.items()]
        if self.gpus_per_node:
            options.append(f"gpus-per-node={self.gpus_per_node}")
        options += [
            f"mem={self.memory_mib}M",
            f"time={clock(self.seconds)}",
            "output=%x-%j.out",
        ]
        if self.resumes:
            # A vertex and a checkpoint must fit into the rest of the time, but a short job must
            # not be asked to stop at its start.
            notice = min(_SIGNAL_SECONDS, self.seconds // 4)
            options += [f"signal=B:USR1@{notice}", "requeue", "open-mode=append"]
        return [f"#SBATCH --{option}" for option in options]

    def _environment_lines(self) -> list[str]:
        pmi = PMI.get(self.family)
        srun = f"srun --mpi={pmi}" if pmi else "srun"
        found = f"Found {self.library}" if pmi else f"Found no MPI here ({self.library})"
        lines = ["# ==== YOUR SITE: load einmpi and its MPI ====", "# module load …"]
        if self.activate:
            lines.append(f"source {shlex.quote(self.activate)}")
        else:
            lines.append("# source …/bin/activate")
        lines += [
            "",
            f"# {plain(found)}. Use pmi2 for MPICH and its relatives, pmix for Open MPI; "
            "LAUNCH=mpirun works with both.",
        ]
        if self.family == "intel":
            lines.append("# Intel MPI also needs: export I_MPI_PMI_LIBRARY=…/libpmi2.so (of Slurm)")
        lines += [
            f"launch=${{LAUNCH:-{srun}}}",
            "export SLURM_KILL_BAD_EXIT=1  # when a rank dies, srun ends the others",
            "export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK",
        ]
        return lines

    def _run_line(self, prefix: str) -> str:
        return f"$launch {prefix}python -m einmpi {shlex.join(self.command)}"

    def _resuming_lines(self) -> list[str]:
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
            '    [ -z "$asked" ] || kill -USR1 "$run" 2>/dev/null',
            "done",
            'wait "$run"',
            "status=$?",
            "# 75: stopped with a checkpoint. A rank that was still starting may have died of the "
            "signal.",
            'if [ $status -eq 75 ] || { [ "$asked" ] && [ $status -gt 2 ]; }; then',
            '    scontrol requeue "$SLURM_JOB_ID"',
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
