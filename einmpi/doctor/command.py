"""The command `einmpi doctor`: prints one finding after another, and says whether a run would work."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, TextIO

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
        with _opened(options.json) as file:
            for finding in examine(options.timeout, started=comm.size > 1):
                findings.append(finding)
                if file is not sys.stdout:
                    print(_lines(finding), flush=True)
            problems = [finding.name for finding in findings if finding.state == "problem"]
            if file is not None:
                data = {"works": not problems, "findings": [asdict(finding) for finding in findings]}
                file.write(json.dumps(data, indent=1) + "\n")
            if file is not sys.stdout:
                print(_verdict(problems, tried=findings[-1].state == "ok"))

    on_first_rank(comm, look)
    return int(any(finding.state == "problem" for finding in findings))


@contextlib.contextmanager
def _opened(file: str | None) -> Iterator[TextIO | None]:
    """The file for JSON, if one is wanted. It is opened before the long look, not after it."""
    if file in (None, "-"):
        yield sys.stdout if file else None
        return
    try:
        target = open(file, "w", encoding="utf-8")  # noqa: SIM115  # the try is for this alone
    except OSError as error:
        raise InputError(f"--json {file}", error.strerror or str(error), "a file to write") from None
    with target:
        yield target


def _verdict(problems: list[str], tried: bool) -> str:
    if problems:
        return f"a run on several ranks fails here: {', '.join(problems)}"
    return "a run works here" if tried else "nothing speaks against a run here, but none was tried"


def _lines(finding: Finding) -> str:
    mark = {"ok": "ok", "note": "note", "problem": "FAIL"}[finding.state]
    advice = f"\n{'→ ':>20}{finding.advice}" if finding.advice else ""
    return f"{mark:<6}{finding.name:<12}{finding.text}{advice}"
