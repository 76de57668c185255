"""The results of many benchmarks as one HTML page with plots and tables; it needs no network."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from catalogue import FOLDER, Bars, Bench, Lines, first_sentence
from plots import bar_plot, line_plot

STYLE = """
body { font: 15px/1.5 Helvetica, Arial, sans-serif; margin: 2em auto; max-width: 70em;
       padding: 0 1em; color: #1f2328; }
h2 { margin-top: 2em; border-bottom: 1px solid #d0d7de; }
code { font-size: 90%; }
table { border-collapse: collapse; font-size: 13px; }
td, th { border: 1px solid #d0d7de; padding: 2px 8px; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
details { overflow-x: auto; }
.plots { display: flex; flex-wrap: wrap; gap: 1em; }
figure { margin: 0; }
svg { max-width: 100%; height: auto; }
.skipped { color: #57606a; }
.failed { color: #b00020; font-weight: bold; }
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
    """Write the page: what there is, then a section for each benchmark with results."""
    with_results = [outcome for outcome in outcomes if outcome.record is not None]
    sections = "".join(section(outcome) for outcome in with_results)
    page = (
        "<!doctype html><html lang='en'><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'><title>Benchmarks</title>"
        f"<style>{STYLE}</style><body><h1>Benchmarks</h1>"
        f"{about_machine(with_results)}{contents(outcomes)}{sections}</body></html>\n"
    )
    file.write_text(page, encoding="utf-8")


def about_machine(outcomes: list[Outcome]) -> str:
    """Return the machine and the date of the first results: all are of one run."""
    if not outcomes:
        return ""
    record = outcomes[0].record
    assert record is not None
    machine = ", ".join(f"{name} {value}" for name, value in record["machine"].items())
    return f"<p>{escape(machine)}; {escape(record['date'])}</p>"


def contents(outcomes: list[Outcome]) -> str:
    """Return a table of all benchmarks, with what came of each."""
    lines = []
    for outcome in outcomes:
        name = escape(outcome.bench.name)
        kind = "skipped" if outcome.skipped else "failed" if outcome.failed else "done"
        link = f"<a href='#{name}'>{name}</a>" if kind == "done" else name
        cells = f"<td>{link}</td><td>{escape(about(outcome.bench))}</td>"
        lines.append(f"<tr>{cells}<td class='{kind}'>{escape(outcome.summary())}</td></tr>")
    head = "<tr><th>benchmark</th><th>what it shows</th><th>result</th></tr>"
    return f"<table>{head}{''.join(lines)}</table>"


def about(bench: Bench) -> str:
    """Return what the script of a benchmark says about itself, in a sentence."""
    file = FOLDER / f"{bench.script}.py"
    return first_sentence(file).rstrip(".") if file.exists() else ""


def section(outcome: Outcome) -> str:
    """Return the part of the page for one benchmark."""
    record = outcome.record
    assert record is not None
    pictures = "".join(f"<figure>{svg}</figure>" for svg in plots_of(outcome.bench, record["rows"]))
    name = escape(record["bench"])
    return (
        f"<h2 id='{name}'>{name}</h2><p>{escape(about(outcome.bench))}<br>"
        f"<code>{escape(record['command'])}</code></p><div class='plots'>{pictures}</div>"
        f"<details><summary>{len(record['rows'])} rows</summary>{table(record['rows'])}</details>"
    )


def plots_of(bench: Bench, rows: list[dict[str, Any]]) -> list[str]:
    """Return the plots of some rows; rows without the number that is shown are left out."""
    found = []
    for plot in bench.plots:
        found += bar_plots(plot, rows) if isinstance(plot, Bars) else line_plots(plot, rows)
    return found


def bar_plots(plot: Bars, rows: list[dict[str, Any]]) -> list[str]:
    """Return a plot of bars for each combination of the columns that plots differ in."""
    found: dict[str, list[tuple[str, float]]] = {}
    for row in rows:
        has_place = all(name in row for name in plot.per)
        names = [str(row[name]) for name in plot.names if name in row]
        if has_place and names and is_number(row.get(plot.value)):
            title = ", ".join(place(name, row[name]) for name in plot.per)
            found.setdefault(title, []).append((", ".join(names), float(row[plot.value])))
    plots = []
    for title, bars in found.items():
        unit = plot.value
        if len(bars) > MOST_BARS:
            unit += f" (the first {MOST_BARS} of {len(bars)})"
        plots.append(bar_plot(title, unit, bars[:MOST_BARS]))
    return plots


def place(name: str, value: Any) -> str:
    """Return a column and its value for a title; a text says by itself what it is."""
    return value if isinstance(value, str) else f"{name} {value}"


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
