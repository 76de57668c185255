"""The results of many benchmarks as one HTML page with plots and tables; it needs no network."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from catalogue import Bars, Bench, Lines
from plots import bar_plot, line_plot

STYLE = """
body { font: 15px/1.5 Helvetica, Arial, sans-serif; margin: 2em auto; max-width: 70em;
       padding: 0 1em; color: #1f2328; }
code { font-size: 90%; }
table { border-collapse: collapse; font-size: 13px; }
td, th { border: 1px solid #d0d7de; padding: 2px 8px; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
details { overflow-x: auto; }
"""
MOST_BARS = 60  # of a plot; more cannot be read


@dataclass(frozen=True)
class Outcome:
    """What came of a benchmark: results, or the reason why there are none."""

    bench: Bench
    record: dict[str, Any] | None = None
    seconds: float = 0.0
    skipped: str = ""
    failed: str = ""

    def summary(self) -> str:
        """Return one line for a terminal."""
        if self.skipped:
            return f"skipped: {self.skipped}"
        if self.failed:
            return f"failed: {self.failed}"
        assert self.record is not None
        return f"{len(self.record['rows'])} rows in {self.seconds:.0f} s"


def write_page(file: Path, outcomes: list[Outcome]) -> None:
    """Write the page."""
    sections = "".join(section(outcome) for outcome in outcomes if outcome.record is not None)
    left_out = [outcome for outcome in outcomes if outcome.record is None]
    if left_out:
        items = "".join(
            f"<li>{escape(outcome.bench.name)} {escape(outcome.summary())}</li>"
            for outcome in left_out
        )
        sections += f"<h2>Left out</h2><ul>{items}</ul>"
    page = (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Benchmarks</title>"
        f"<style>{STYLE}</style><body><h1>Benchmarks</h1>{sections}</body></html>\n"
    )
    file.write_text(page, encoding="utf-8")


def section(outcome: Outcome) -> str:
    """Return the part of the page for one benchmark."""
    record = outcome.record
    assert record is not None
    machine = ", ".join(f"{name} {value}" for name, value in record["machine"].items())
    pictures = "".join(f"<figure>{svg}</figure>" for svg in plots_of(outcome.bench, record["rows"]))
    return (
        f"<h2>{escape(record['bench'])}</h2><p><code>{escape(record['command'])}</code><br>"
        f"{escape(machine)}; {escape(record['date'])}</p>{pictures}"
        f"<details><summary>{len(record['rows'])} rows</summary>{table(record['rows'])}</details>"
    )


def plots_of(bench: Bench, rows: list[dict[str, Any]]) -> list[str]:
    """Return the plots of some rows; rows without the number that is shown are left out."""
    if isinstance(bench.plot, Bars):
        names, value = bench.plot.names, bench.plot.value
        bars = []
        for row in rows:
            if is_number(row.get(value)):
                text = ", ".join(str(row[name]) for name in names if name in row)
                bars.append((text, float(row[value])))
        return [bar_plot(bench.name, value, bars[:MOST_BARS])]
    if isinstance(bench.plot, Lines):
        return line_plots(bench.plot, rows)
    return []


def line_plots(plot: Lines, rows: list[dict[str, Any]]) -> list[str]:
    """Return a plot for each combination of the columns that plots differ in."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        if is_number(row.get(plot.y)):
            title = ", ".join(str(row[name]) for name in plot.per)
            lines = found.setdefault(title, {})
            lines.setdefault(row[plot.name], []).append((row[plot.x], row[plot.y]))
    return [line_plot(title, plot.x, plot.y, lines) for title, lines in found.items()]


def table(rows: list[dict[str, Any]]) -> str:
    """Return all rows as a table, with a column for each name that a row has."""
    flat = [flattened(row) for row in rows]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    lines = []
    for row in flat:
        cells = ""
        for name in columns:
            value = row.get(name)
            kind = " class='number'" if is_number(value) else ""
            cells += f"<td{kind}>{escape(shown(value))}</td>"
        lines.append(f"<tr>{cells}</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def flattened(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without names inside of names; lists of times are left to the files."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            inner = flattened(value)
            found |= {f"{name} {each}": number for each, number in inner.items()}
        elif not isinstance(value, list):
            found[name] = value
    return found


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """Return a value as a cell shows it."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
