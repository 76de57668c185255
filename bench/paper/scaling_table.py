"""The points of bench/paper/scaling.py as the tables of docs/experiments.md, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]
Key = tuple[str, int, str, str, str]  # work, ranks, curve, strategy, network
TITLES = {
    "chain": "chain",
    "mttkrp": "MTTKRP",
    "ffnn": "FFNN step",
    "llama": "LLaMA-7B layer",
}
CURVES = ("strong", "weak")
FIRST_RANKS = 8  # of a weak curve: there, its work is that of the strong curve


def tables(rows: Sequence[Row], strategies: Sequence[str]) -> str:
    """Return the table of simulated times, that of the errors of predictions, and what is missing.

    A cell has the milliseconds on each network, once if they are the same, and — where they are
    not known.
    """
    known = by_point(rows)
    networks = list(dict.fromkeys(row["network"] for row in rows))
    lines = [
        _line(["work", "ranks", *strategies]),
        _rule(2 + len(strategies)),
    ]
    missing = []
    for curve, work, ranks in _points(known):
        cells = []
        for strategy in strategies:
            found = [known.get((work, ranks, curve, strategy, network)) for network in networks]
            cells.append(_cell(found))
            reasons = {row["refused"] for row in found if row is not None and "refused" in row}
            for reason in sorted(reasons):
                missing.append(f"- {TITLES[work]}, {curve}, {ranks:,} ranks, {strategy}: {reason}")
        lines.append(_line([f"{TITLES[work]}, {curve}", f"{ranks:,}", *cells]))
    return "\n".join([*lines, "", *_errors(known, networks), "", *missing]).rstrip("\n")


def by_point(rows: Iterable[Row]) -> dict[Key, Row]:
    """Return the rows of points.

    Of several rows of a point the last one counts, but one with seconds more than one without.
    """
    found: dict[Key, Row] = {}
    for row in rows:
        key = row["work"], row["ranks"], row["curve"], row["strategy"], row["network"]
        if key not in found or "seconds" in row or "seconds" not in found[key]:
            found[key] = row
    return found


def _points(known: Iterable[Key]) -> list[tuple[str, str, int]]:
    """Return the curves, works and ranks, in the order of the table."""
    works = list(TITLES)
    found = set()
    for work, ranks, curve, _, _ in known:
        if curve == "strong" or ranks > FIRST_RANKS:
            found.add((curve, work, ranks))
    return sorted(
        found, key=lambda point: (CURVES.index(point[0]), works.index(point[1]), point[2])
    )


def _cell(rows: Sequence[Row | None]) -> str:
    shown = []
    for row in rows:
        is_there = row is not None and "seconds" in row
        shown.append(milliseconds(row["seconds"]) if is_there else "—")
    different = list(dict.fromkeys(shown))
    return "not simulated" if different == ["—"] else " / ".join(different)


def milliseconds(seconds: float) -> str:
    """Return three digits of the milliseconds, or four where these are thousands."""
    number = seconds * 1000
    if number < 999.5:
        return f"{number:.3g}"
    return f"{float(f'{number:.4g}'):,.0f}"


def _errors(known: dict[Key, Row], networks: Sequence[str]) -> list[str]:
    """Return the table of the predictions that are furthest off, by network and ranks."""
    lines = [
        _line(["network", "ranks", "points", "least error", "largest error"]),
        _rule(5),
    ]
    for network in networks:
        for ranks in sorted({ranks for _, ranks, _, _, _ in known}):
            found = []
            for key, row in known.items():
                if key[1] == ranks and key[4] == network and "error" in row:
                    found.append((row["error"], f"{TITLES[key[0]]}, {key[2]}, {key[3]}"))
            if found:
                ends = [f"{error:+.1%} ({where})" for error, where in (min(found), max(found))]
                lines.append(_line([network, f"{ranks:,}", str(len(found)), *ends]))
    return lines


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return "|---" * columns + "|"
