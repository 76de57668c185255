"""The results of a benchmark as a JSON file, in one form for all of them.

A file says which benchmark, on which machine, when and by which command, and has a row for each
thing that was measured or planned. A row has names and texts, numbers, lists of numbers, or further
names.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FIELDS: dict[str, type] = {
    "bench": str,
    "machine": dict,
    "date": str,
    "command": str,
    "rows": list,
}


def write_results(file: str | os.PathLike[str], rows: list[dict[str, Any]]) -> None:
    """Write the rows of the benchmark that this process is."""
    name = Path(sys.argv[0]).stem
    write_record(file, name, shlex.join(["python", "-m", "bench", name, *sys.argv[1:]]), rows)


def write_record(
    file: str | os.PathLike[str], bench: str, command: str, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """Write rows that a command has just made on this machine, and return all that is written."""
    record = {
        "bench": bench,
        "machine": describe_machine(),
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
        "rows": rows,
    }
    check_results(record)
    # A reader never sees half a file, and a run that is killed leaves the last one that was whole.
    draft = Path(f"{file}.draft")
    draft.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    draft.replace(file)
    return record


def check_results(record: Any) -> None:
    """Raise ValueError if these are not results in the form of all benchmarks."""
    if not isinstance(record, dict) or list(record) != list(FIELDS):
        raise ValueError(f"results need exactly {', '.join(FIELDS)}")
    for name, kind in FIELDS.items():
        if not isinstance(record[name], kind):
            raise ValueError(f"{name} is no {kind.__name__}: {record[name]!r}")
    datetime.strptime(record["date"], "%Y-%m-%d")
    for row in record["rows"]:
        if not isinstance(row, dict) or not row:
            raise ValueError(f"a row is no dict of names and values: {row!r}")
        for name, value in row.items():
            check_value(name, value)


def check_value(name: str, value: Any) -> None:
    """Raise ValueError if a value of a row is neither text, a number, None, nor made of these."""
    if isinstance(value, dict):
        for inner, found in value.items():
            check_value(f"{name} {inner}", found)
    elif isinstance(value, list):
        for found in value:
            check_value(name, found)
    elif not isinstance(value, str | int | float | None):
        raise ValueError(f"{name} is {type(value).__name__}: {value!r}")


def describe_machine() -> dict[str, Any]:
    """Return what a reader of figures wants to know about this machine."""
    import einmpi  # here, as processes of peers import this module too

    return {
        "architecture": platform.machine(),
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "einmpi": einmpi.__version__,
    }


def processor_name() -> str:
    """Return the name of the processor, or of its architecture where Linux does not say it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
