"""The command `einmpi doctor`: prints one finding after another, and says whether a run would work."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from einmpi.cli.output_files import check_files, print_or_write
from einmpi.errors import InputError

if TYPE_CHECKING:
    from einmpi.cli.doctor.finding import Finding
    from einmpi.comm.base import Comm

_SECONDS = 30.0  # for the two ranks


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--timeout",
        type=float,
        default=_SECONDS,
        metavar="SECONDS",
        help="for the two ranks to answer; 30 by default",
    )
    command.add_argument(
        "--json", metavar="FILE", help="write what is found as JSON; - is standard output"
    )


def doctor(options: argparse.Namespace, comm: Comm) -> int:
    """what is installed here, and whether a run would work"""
    from einmpi.cli.doctor.examine import examine
    from einmpi.comm.base import on_first_rank

    findings: list[Finding] = []

    def look() -> None:
        if not options.timeout > 0:
            raise InputError("--timeout", f"{options.timeout:g} seconds", "more than 0")
        check_files(options)
        for finding in examine(options.timeout, started=comm.size > 1):
            findings.append(finding)
            if options.json != "-":
                print(_lines(finding), flush=True)
        problems = [finding.name for finding in findings if finding.state == "problem"]
        data = {"works": not problems, "findings": [asdict(finding) for finding in findings]}
        print_or_write(options, _verdict(problems, tried=findings[-1].state == "ok"), data)

    on_first_rank(comm, look)
    return int(any(finding.state == "problem" for finding in findings))


def _verdict(problems: list[str], tried: bool) -> str:
    if problems:
        return f"a run on several ranks fails here: {', '.join(problems)}"
    return "a run works here" if tried else "nothing speaks against a run here, but none was tried"


def _lines(finding: Finding) -> str:
    mark = {"ok": "ok", "note": "note", "problem": "FAIL"}[finding.state]
    advice = f"\n{'→ ':>20}{finding.advice}" if finding.advice else ""
    return f"{mark:<6}{finding.name:<12}{finding.text}{advice}"
