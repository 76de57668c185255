"""The command `einmpi doctor`: print the findings and whether a run would work."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from einmpi.cli.doctor.finding import Finding
from einmpi.cli.output_files import check_files, print_or_write
from einmpi.errors import InputError

if TYPE_CHECKING:
    from einmpi.comm.base import Comm

# Findings without which one rank works.
_NEEDED_BY_SEVERAL_RANKS = frozenset(("mpi4py", "mpirun", "ping"))
_MARKS = {"ok": "ok", "note": "note", "problem": "FAIL"}


def doctor(options: argparse.Namespace, comm: Comm) -> int:
    """Examine what is installed here and test whether a run would work."""
    from einmpi.cli.doctor.examine import examine
    from einmpi.comm.agreement import on_first_rank

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
