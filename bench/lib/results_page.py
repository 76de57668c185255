"""The results of many benchmarks as one HTML page with plots and tables; it needs no network."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from bench.lib.catalogue import Bars, Bench, Lines, first_sentence, scripts
from bench.lib.plots import bar_plot, line_plot
from einmpi.units import counted

STYLE = """
body { font: 15px/1.5 Helvetica, Arial, sans-serif; margin: 2em auto; max-width: 77em;
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
    left_out: tuple[str, ...] = ()  # a line for each peer that could not run

    def summary(self) -> str:
        """Return one line for a terminal."""
        if self.skipped:
            return f"skipped: {self.skipped}"
        if self.failed:
            return f"failed: {self.failed}"
        assert self.record is not None
        return f"{counted(len(self.record['rows']), 'row')} in {self.seconds:.0f} s"


def write_page(file: Path, outcomes: list[Outcome]) -> None:
    """Write the page: what there is, then a section for each benchmark with results."""
    with_results = [outcome for outcome in outcomes if outcome.record is not None]
    sections = "".join(section(outcome) for outcome in with_results)
    page = (
        "<!doctype html><html lang='en'><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'>"
        "<title>Results of einmpi's benchmarks</title>"
        f"<style>{STYLE}</style><body><h1>Results of einmpi's benchmarks</h1>"
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
    return (
        f"<p>Measured on {escape(record['date'])} on this machine: {escape(machine)}. Darker bars "
        "and thicker lines are those of einmpi and of its planners. Times depend on the machine "
        "and on what else it did; words do not.</p>"
    )


def contents(outcomes: list[Outcome]) -> str:
    """Return tables of all benchmarks, with what came of each; the paper's experiments first."""
    of_paper = [outcome for outcome in outcomes if outcome.bench.is_of_paper]
    others = [outcome for outcome in outcomes if not outcome.bench.is_of_paper]
    found = ""
    for heading, part in (("The paper's experiments", of_paper), ("Other benchmarks", others)):
        if part:
            found += f"<h3>{heading}</h3>{contents_table(part)}"
    return found


def contents_table(outcomes: list[Outcome]) -> str:
    """Return a table with a line for each benchmark."""
    lines = []
    for outcome in outcomes:
        bench = outcome.bench
        kind = "skipped" if outcome.skipped else "failed" if outcome.failed else "done"
        title = escape(title_of(bench))
        if kind == "done":
            title = f"<a href='#{escape(bench.name)}'>{title}</a>"
        cells = f"<td>{title}</td><td><code>{escape(bench.name)}</code></td>"
        lines.append(f"<tr>{cells}<td class='{kind}'>{escape(outcome.summary())}</td></tr>")
    head = "<tr><th>what it shows</th><th>name</th><th>result</th></tr>"
    return f"<table>{head}{''.join(lines)}</table>"


def title_of(bench: Bench) -> str:
    """Return the title of a benchmark; else what its script says about itself."""
    file = scripts().get(bench.script)
    if bench.title or file is None:
        return bench.title or bench.name
    return first_sentence(file).rstrip(".")


def section(outcome: Outcome) -> str:
    """Return the part of the page for one benchmark."""
    record = outcome.record
    assert record is not None
    pictures = "".join(f"<figure>{svg}</figure>" for svg in plots_of(outcome.bench, record["rows"]))
    count = counted(len(record["rows"]), "row")
    left_out = ""
    if outcome.left_out:
        lines = "".join(f"<li>{escape(line)}</li>" for line in outcome.left_out)
        left_out = f"<ul class='skipped'>{lines}</ul>"
    return (
        f"<h2 id='{escape(outcome.bench.name)}'>{escape(title_of(outcome.bench))}</h2>"
        f"<p>{escape(outcome.bench.reading)}</p>{left_out}<div class='plots'>{pictures}</div>"
        f"<p class='skipped'>By <code>{escape(record['command'])}</code></p>"
        f"<details><summary>{count}</summary>{table(record['rows'])}</details>"
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
        if not all(name in row for name in plot.per):
            continue
        places = [place(name, row[name]) for name in plot.per]
        title = ", ".join([plot.subject, *places] if plot.subject else places)
        for names, value in named_values(plot, row):
            found.setdefault(title, []).append((", ".join(names), value))
    plots = []
    for title, bars in found.items():
        if not plot.in_order:
            bars = sorted(bars, key=lambda bar: bar[1])
        unit, factor = unit_and_factor(plot.unit or plot.value, [value for _, value in bars])
        if len(bars) > MOST_BARS:
            unit += f" (the first {MOST_BARS} of {len(bars)})"
        scaled = [(name, factor * value) for name, value in bars[:MOST_BARS]]
        plots.append(bar_plot(title, unit, scaled, is_ratio=plot.is_ratio))
    return plots


def named_values(plot: Bars, row: dict[str, Any]) -> list[tuple[list[str], float]]:
    """Return the names and the numbers of the bars of a row."""
    names = [bar_name(name, row[name]) for name in plot.names if name in row]
    if not names:
        return []
    values = {"": row}
    if plot.inside:
        values = row.get(plot.inside, {})
    found = []
    for inner, columns in values.items():
        if is_number(columns.get(plot.value)):
            found.append(([*names, *([inner] if inner else [])], float(columns[plot.value])))
    return found


def bar_name(column: str, value: Any) -> str:
    """Return a part of the name of a bar: a text as it is, a number with what it counts."""
    return value if isinstance(value, str) else counted(value, column.removesuffix("s"))


def place(name: str, value: Any) -> str:
    """Return a column and its value for a title; a text says by itself what it is."""
    return value if isinstance(value, str) else f"{name} {value}"


def unit_and_factor(unit: str, values: list[float]) -> tuple[str, float]:
    """Return the unit for some numbers, and by what they are multiplied: few decimals are read."""
    largest = max(values, default=1.0)
    if unit.startswith("seconds") and 0 < largest < 1:
        if largest < 1e-3:
            return f"micro{unit}", 1e6
        return f"milli{unit}", 1e3
    return unit, 1.0


def line_plots(plot: Lines, rows: list[dict[str, Any]]) -> list[str]:
    """Return a plot for each combination of the columns that plots differ in."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        has_place = all(name in row for name in (*plot.per, plot.name, plot.x))
        if has_place and is_number(row.get(plot.y)):
            title = ", ".join(str(row[name]) for name in plot.per)
            lines = found.setdefault(title, {})
            lines.setdefault(row[plot.name], []).append((row[plot.x], row[plot.y]))
    plots = []
    for title, lines in found.items():
        values = [y for line in lines.values() for _, y in line]
        unit, factor = unit_and_factor(plot.unit or plot.y, values)
        scaled = {name: [(x, factor * y) for x, y in line] for name, line in lines.items()}
        plots.append(line_plot(title, plot.x, unit, scaled))
    return plots


def table(rows: list[dict[str, Any]]) -> str:
    """Return all rows as a table, with a column for each name that a row has."""
    flat = [flattened(row) for row in rows]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in columns)
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
