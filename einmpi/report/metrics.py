"""The figures of a run as OpenMetrics: the text that Prometheus and its relatives read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from einmpi.errors import printable

# Tables of the JSON whose entries are told apart by a label, and the name of the label.
_LABELS = {
    "seconds": "phase",
    "sizes": "size",
    "outputs": "output",
    "vertices": "vertex",
    "loops": "loop",
    "history": "name",
}
_INFO = ("title", "job", "strategy", "digest", "backend", "blas", "host")


def metrics_text(data: Mapping[str, Any]) -> str:
    """Return a gauge for every number of the JSON of a run; labels of one metric name the run."""
    families: dict[str, list[str]] = {}
    _collect(families, "einmpi", {}, data)
    info = {name: str(data[name]) for name in _INFO}
    lines = ["# HELP einmpi_run which run this was", "# TYPE einmpi_run info"]
    lines.append(f"einmpi_run_info{_shown(info)} 1")
    for name, samples in families.items():
        words = name.removeprefix("einmpi_").replace("_", " ")
        lines += [f"# HELP {name} {words}", f"# TYPE {name} gauge", *samples]
    return "\n".join([*lines, "# EOF", ""])


def _collect(
    families: dict[str, list[str]], name: str, labels: Mapping[str, str], value: object
) -> None:
    """Add the numbers of a value of the JSON; a metric has all of its samples in one place."""
    if isinstance(value, (int, float)):
        families.setdefault(name, []).append(f"{name}{_shown(labels)} {+value!r}")
    elif isinstance(value, dict):
        for key, inner in value.items():
            label = _LABELS.get(key)
            if label is None:
                _collect(families, f"{name}_{key}", labels, inner)
                continue
            entries = inner.items() if isinstance(inner, dict) else _numbered(inner)
            for entry, each in entries:
                # Of what a loop has recorded, its last value.
                last = each[-1] if isinstance(each, list) and each else each
                _collect(families, f"{name}_{key}", {**labels, label: entry}, last)


def _numbered(entries: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return the entries of a list, each with its name or its number from 1."""
    return [(each.get("name", str(number)), each) for number, each in enumerate(entries, 1)]


def _shown(labels: Mapping[str, str]) -> str:
    shown = []
    for name, value in labels.items():
        quoted = printable(value).replace("\\", "\\\\").replace('"', '\\"')
        shown.append(f'{name}="{quoted}"')
    return f"{{{','.join(shown)}}}" if shown else ""
