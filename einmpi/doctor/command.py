"""The command `einmpi doctor`: prints one finding after another, and says whether a run would work."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from einmpi.errors import InputError

if TYPE_CHECKING:
    from einmpi.doctor.finding import Finding
    from einmpi.runtime.comm import Comm

_SECONDS = 30.0  # for the two ranks


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--timeout", type=float, default=_SECONDS, metavar="SECONDS",
                         help="for the two ranks to answer; 30 by default")  # fmt: skip
    command.add_argument("--json", metavar="FILE", help="write what is found as JSON; - is standard output")


def doctor(options: argparse.Namespace, comm: Comm) -> int:
    """what is installed here, and whether a run would work"""
    from einmpi.doctor.examine import examine
    from einmpi.runtime.comm import on_first_rank

    findings: list[Finding] = []

    def look() -> None:
        if not options.timeout > 0:
            raise InputError("--timeout", f"{options.timeout:g} seconds", "more than 0")
        for finding in examine(options.timeout, started=comm.size > 1):
            findings.append(finding)
            if options.json != "-":
                print(_lines(finding), flush=True)
        _finish(findings, options.json)

    on_first_rank(comm, look)
    return int(any(finding.state == "problem" for finding in findings))


def _lines(finding: Finding) -> str:
    mark = {"ok": "ok", "note": "note", "problem": "FAIL"}[finding.state]
    advice = f"\n      {'':<12}→ {finding.advice}" if finding.advice else ""
    return f"{mark:<6}{finding.name:<12}{finding.text}{advice}"


def _finish(findings: list[Finding], file: str | None) -> None:
    problems = [finding.name for finding in findings if finding.state == "problem"]
    if file is not None:
        text = json.dumps({"works": not problems, "findings": [asdict(finding) for finding in findings]}, indent=1)
        if file == "-":
            print(text)
            return
        try:
            with open(file, "w", encoding="utf-8") as target:
                target.write(text + "\n")
        except OSError as error:
            raise InputError(f"--json {file}", error.strerror or str(error), "a file to write") from None
    print(f"a run on several ranks fails here: {', '.join(problems)}" if problems else "a run works here")
