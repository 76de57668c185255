"""A batch script as text. Words of the user are data: quoted for the shell, and in comments and #SBATCH lines only
such characters that mean nothing there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

# The family of an MPI, by launch.family_in, and how Slurm starts its ranks.
PMI = {"mpich": "pmi2", "intel": "pmi2", "openmpi": "pmix"}
_ASKED = (
    "trap 'asked=yes' USR1  # at any time from now on, also while modules are loaded",
    "asked=",
    "",
)


@dataclass(frozen=True)
class Script:
    """What a script says. `command` are the words behind `python -m einmpi`, `notes` lines of comment."""

    name: str
    notes: Sequence[str]
    nodes: int
    tasks: int  # a node
    threads: int
    memory: int  # MiB a node
    seconds: int
    family: str  # of the MPI
    library: str  # its name, or why it is not known
    command: Sequence[str]
    activate: str | None = None  # the file that activates the environment of this Python
    gpus: bool = False
    resumes: bool = False  # a checkpoint was asked for

    def __str__(self) -> str:
        notes = [f"# {plain(note)}" for note in self.notes]
        asked, run = (_ASKED, self._patient()) if self.resumes else ((), [self._run("")])
        return "\n".join(
            ["#!/bin/bash", *notes, *self._sbatch(), "", *asked, *self._environment(), "", *run, ""]
        )

    def _sbatch(self) -> list[str]:
        options = [
            f"job-name={job_name(self.name)}",
            f"nodes={self.nodes}",
            f"ntasks-per-node={self.tasks}",
            f"cpus-per-task={self.threads}",
            f"mem={self.memory}M",
            f"time={clock(self.seconds)}",
            "output=%x-%j.out",
        ]
        if self.gpus:
            options.insert(4, f"gpus-per-node={self.tasks}")
        if self.resumes:
            # A vertex and a checkpoint must fit into what is left; a short job must not be asked at its start.
            options += [
                f"signal=B:USR1@{min(300, self.seconds // 4)}",
                "requeue",
                "open-mode=append",
            ]
        return [f"#SBATCH --{option}" for option in options]

    def _environment(self) -> list[str]:
        pmi = PMI.get(self.family)
        launch = f"srun --mpi={pmi}" if pmi else "srun"
        known = f"Found {self.library}" if pmi else f"No MPI was found here ({self.library})"
        lines = ["# ==== YOUR SITE: whatever brings einmpi and its MPI ====", "# module load …"]
        lines += (
            [f"source {shlex.quote(self.activate)}"]
            if self.activate
            else ["# source …/bin/activate"]
        )
        lines += [
            "",
            f"# {plain(known)}. pmi2 is for MPICH and its relatives, pmix for Open MPI, mpirun for either.",
        ]
        if self.family == "intel":
            lines.append(
                "# Intel MPI also wants to know Slurm's library: export I_MPI_PMI_LIBRARY=…/libpmi2.so"
            )
        return [
            *lines,
            f"launch=${{LAUNCH:-{launch}}}",
            "export SLURM_KILL_BAD_EXIT=1  # when a rank dies, srun ends the others",
            "export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK",
        ]

    def _run(self, hold: str) -> str:
        return f"$launch {hold}python -m einmpi {shlex.join(self.command)}"

    def _patient(self) -> list[str]:
        return [
            "# A rank that is still starting keeps the signal for later, if env can tell it so (coreutils 8.31).",
            'hold="env --block-signal=USR1"',
            "$hold true 2>/dev/null || hold=",
            f"{self._run('$hold ')} &",
            "run=$!",
            "# Launchers pass the signal on to ranks. One that is itself starting may lose it: it is sent again.",
            'while kill -0 "$run" 2>/dev/null; do',
            "    sleep 2 & wait $!  # in the background: a shell handles signals only while it waits",
            '    [ -z "$asked" ] || kill -USR1 "$run" 2>/dev/null',
            "done",
            'wait "$run"',
            "status=$?",
            "# 75: stopped in good order. Whoever was starting may have died of the signal: that counts as well.",
            'if [ $status -eq 75 ] || { [ "$asked" ] && [ $status -gt 2 ]; }; then',
            '    scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            "exit $status",
        ]


def plain(text: str) -> str:
    """One line for a comment; what cannot be printed is a question mark."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


def job_name(text: str) -> str:
    """Letters, digits and little else: file names and Slurm's patterns are made of it."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")[:60] or "einmpi"


def clock(seconds: int) -> str:
    """As Slurm writes times, in whole minutes: 1-02:30:00."""
    minutes = -(-seconds // 60)
    days, rest = divmod(minutes, 24 * 60)
    return f"{f'{days}-' if days else ''}{rest // 60:02d}:{rest % 60:02d}:00"
