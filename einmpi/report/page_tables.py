"""The figures and tables of a report page: what was planned, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from einmpi.graph.eingraph import Vertex
from einmpi.planner.make_plan import Plan
from einmpi.planner.prices import FLOPS_PER_BYTE
from einmpi.planner.text.explain import Comparison, one_level
from einmpi.report.graph_picture import NAMES, layout_text
from einmpi.report.movement import WAYS, Movement, movements
from einmpi.report.timeline import KINDS, Timeline
from einmpi.units import show_bytes, show_count, show_seconds

ROWS = 100  # shown at first: a browser takes long to arrange thousands


def figures(plan: Plan, measured: Mapping[str, Any] | None) -> str:
    """The headline: a few numbers that tell most."""
    moved, peak = plan.bytes_predicted, plan.peak
    cards = []
    if measured:
        seconds = measured["seconds"]
        rate = measured["flops"] / seconds["run"] / 1e9 if seconds["run"] else 0.0
        cards.append(
            (f"{seconds['run']:.3g} s", f"run, {seconds['total']:.3g} s in all; {rate:.3g} Gop/s")
        )
        found = measured["bytes_moved"]
        verdict = (
            '<span class="good">as planned</span>'
            if found == moved
            else (f'<span class="bad">{show_bytes(moved)} planned</span>')
        )
        busiest = show_bytes(measured["bytes_moved_max_rank"])
        cards.append((show_bytes(found), f"moved, {verdict}; {busiest} to the busiest rank"))
        cards.append(
            (
                show_bytes(measured["bytes_peak"]),
                f"peak memory of a rank; {show_bytes(peak)} planned",
            )
        )
    else:
        cards.append(
            (
                show_bytes(moved),
                f"moved in all; {show_bytes(plan.bytes_busiest)} to the busiest rank",
            )
        )
        cards.append((show_bytes(peak), "peak memory of a rank"))
        cards.append((f"{plan.graph.operations():.3g}", "operations"))
    if plan.machine is not None and plan.seconds_predicted is not None:
        cards.append(
            (
                show_seconds(plan.seconds_predicted),
                f"predicted, by a machine {escape(plan.machine.source)}",
            )
        )
    if plan.nodes > 1:
        cards.append(_between_nodes(plan, measured))
    cards.append(_certificate(plan))
    shown = "".join(
        f'<div class="figure"><b>{escape(number)}</b><span class="faint">{text}</span></div>'
        for number, text in cards
    )
    return f'<div class="figures">{shown}</div>'


def _between_nodes(plan: Plan, measured: Mapping[str, Any] | None) -> tuple[str, str]:
    planned = "–" if plan.bytes_between is None else show_bytes(plan.bytes_between)
    level = "" if plan.knows_nodes else f"; {one_level(plan)}"
    if measured:
        return show_bytes(
            measured["bytes_between"]
        ), f"between the {plan.nodes} nodes; {planned} planned{level}"
    return planned, f"between the {plan.nodes} nodes{level}"


def _certificate(plan: Plan) -> tuple[str, str]:
    if plan.kind == "exact":
        return "exact", "no cut of this graph on this mesh moves less"
    if not plan.lower_bound:
        return "no bound", "how little can be moved is not known"
    return (
        f"{plan.words_predicted / plan.lower_bound:.2f}×",
        "the lower bound on what must be moved",
    )


# ---- tensors --------------------------------------------------------------------------------------------------------


@dataclass
class _Seen:
    """What the timeline shows of a tensor, summed over ranks."""

    computing: float = 0.0
    moving: float = 0.0
    nbytes: int = 0


def _seen(timeline: Timeline) -> dict[str, _Seen]:
    found: dict[str, _Seen] = {}
    for span in timeline.spans:
        tensor = found.setdefault(span.vertex, _Seen())
        if span.kind == "kernel":
            tensor.computing += span.end - span.start
        elif span.kind in ("exchange", "reduce"):
            tensor.moving += span.end - span.start
            tensor.nbytes += span.nbytes
    return found


def time_by_kind(timeline: Timeline) -> dict[str, float]:
    """The part of all ranks' time that each kind of step took; "idle" is the rest."""
    whole = timeline.seconds * timeline.ranks or 1.0
    found = dict.fromkeys(KINDS, 0.0)
    for span in timeline.spans:
        found[span.kind] += (span.end - span.start) / whole
    return {
        **{kind: share for kind, share in found.items() if share},
        "idle": max(0.0, 1 - sum(found.values())),
    }


def tensor_table(plan: Plan, timeline: Timeline | None) -> str:
    """A row for each tensor: what of it was to move, and what did; where the time was to go, and where it went."""
    moves: dict[str, list[Movement]] = {vertex.name: [] for vertex in plan.graph.vertices}
    for each in movements(plan):
        moves[each.tensor].append(each)
    seen = _seen(timeline) if timeline else {}
    nbytes = {name: sum(each.nbytes for each in own) for name, own in moves.items()}
    predicted = _shares(
        {vertex.name: _cost(plan, vertex, nbytes[vertex.name]) for vertex in plan.graph.vertices}
    )
    measured = _shares(
        {name: seen[name].computing + seen[name].moving if name in seen else 0.0 for name in moves}
    )
    longest = max([*predicted.values(), *measured.values()], default=0.0)
    most = max(nbytes.values(), default=0)
    rows: list[str] = []
    for vertex in plan.graph.vertices:
        name = vertex.name
        cells = [*_planned_cells(plan, vertex, moves[name])]
        if timeline:
            cells += _measured_cells(seen.get(name, _Seen()), nbytes[name], timeline.ranks)
            cells.append(_bars(longest, predicted[name], measured[name]))
        else:
            cells += [_bars(most, nbytes[name]), _bars(longest, predicted[name])]
        hidden = " hidden" if len(rows) >= ROWS else ""
        rows.append(f"<tr{hidden}>{''.join(cells)}</tr>")
    heads = ["tensor", "what it is", "cuts", "moved", "mostly"]
    heads += (
        ["measured", "computing", "moving", "share of the time"]
        if timeline
        else ["", "share of the work"]
    )
    return f"""{_notes(plan, timeline)}
<div class="tools"><label>Find a row <input id="table-filter" type="search" autocomplete="off"></label>
<button id="table-all" hidden>Show all {len(rows):,} rows</button></div>
<div class="scroll" tabindex="0" role="region" aria-label="Table of tensors"><table id="tensor-table">
<thead><tr>{_heads(heads, left=(0, 1, 2, 4, 8))}</tr></thead>
<tbody>
{chr(10).join(rows)}
</tbody></table></div>"""


def _planned_cells(plan: Plan, vertex: Vertex, moves: Sequence[Movement]) -> Iterator[str]:
    words = [sum(each.words[k] for each in moves) for k in range(len(WAYS))]
    yield _left(vertex.name)
    yield _left(
        vertex.einsum.show(vertex.inputs) if vertex.einsum is not None else "input", "mono wide"
    )
    yield _left(_cuts(plan, vertex))
    yield _cell(show_bytes(sum(each.nbytes for each in moves)))
    yield _left(NAMES[WAYS[words.index(max(words))]] if any(words) else "")


def _measured_cells(seen: _Seen, planned: int, ranks: int) -> Iterator[str]:
    yield _cell(show_bytes(seen.nbytes), "" if seen.nbytes == planned else "bad")
    yield _cell(_time(seen.computing / ranks))
    yield _cell(_time(seen.moving / ranks))


def _notes(plan: Plan, timeline: Timeline | None) -> str:
    weighed = f"The planner weighs a byte that moves like {FLOPS_PER_BYTE} operations"
    if plan.machine is not None:
        weighed = f"Seconds are those of a machine {escape(plan.machine.source)}, with what moves for a vertex"
    if timeline is None:
        return f"<p>{weighed}; the last column is each tensor's share of the whole by that measure.</p>"
    return f"""<p>Bytes are those of the tensor itself on its way to whoever needs it; red ones differ from the plan.
Times are means over the ranks. {weighed}: the blue bar is the share of the time by that measure, the green one the
measured share. Kernels that are done together count for the last of them.</p>"""


def _shares(amounts: Mapping[str, float]) -> dict[str, float]:
    whole = sum(amounts.values()) or 1
    return {name: amount / whole for name, amount in amounts.items()}


def _cost(plan: Plan, vertex: Vertex, nbytes: int) -> int:
    """The planner's measure of time, for all ranks together; what several ranks compute again counts again."""
    if plan.machine is not None:
        return plan.bills[vertex.name].time if vertex.name in plan.bills else 0
    if vertex.einsum is None:
        return FLOPS_PER_BYTE * nbytes
    again = plan.mesh.parts(plan.states[vertex.name], [None])[0]
    return vertex.einsum.operations() * again + FLOPS_PER_BYTE * nbytes


def _cuts(plan: Plan, vertex: Vertex) -> str:
    cut = (
        []
        if vertex.is_input
        else [f"{x}:{parts}" for x, parts in plan.parts(vertex.name).items() if parts > 1]
    )
    if vertex.name in plan.layouts and vertex.bound:
        cut.append(f"kept {layout_text(plan, vertex.name)}")
    return " ".join(cut) or "–"


def _time(seconds: float) -> str:
    return "" if not seconds else f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


# ---- strategies -----------------------------------------------------------------------------------------------------


def comparison_table(plan: Plan, comparison: Comparison) -> str:
    """The strategies side by side; the plan of this page is marked."""
    heads = (
        "strategy",
        "moved",
        "",
        "busiest rank",
        "peak memory",
        "lower bound, words",
        "paper's cost",
    )
    most = max((each.bytes_predicted for each in comparison.plans), default=0)
    rows = []
    for each in comparison.plans:
        moved, busiest = each.bytes_predicted, each.bytes_busiest
        cells = [
            _left(each.strategy),
            _cell(show_bytes(moved)),
            _bars(most, moved),
            _cell(show_bytes(busiest)),
            _cell(show_bytes(each.peak)),
            _cell(show_count(each.lower_bound)),
            _cell(show_count(each.paper_cost)),
        ]
        chosen = ' class="chosen"' if each.strategy == plan.strategy else ""
        rows.append(f"<tr{chosen}>{''.join(cells)}</tr>")
    refused = comparison.text.split("\n")[1 + len(comparison.plans) :]
    notes = "".join(f'<p class="faint">{escape(line)}</p>' for line in refused)
    return f"""<div class="scroll" tabindex="0" role="region" aria-label="Strategies side by side"><table>
<thead><tr>{_heads(heads, left=(0, 2))}</tr></thead>
<tbody>{"".join(rows)}</tbody></table></div>{notes}"""


# ---- cells ----------------------------------------------------------------------------------------------------------


def _heads(names: Sequence[str], left: Sequence[int]) -> str:
    return "".join(
        f'<th scope="col"{" class=left" * (k in left)}>{name}</th>' for k, name in enumerate(names)
    )


def _cell(text: str, kind: str = "") -> str:
    shown = escape(text)
    look = f' class="{kind}"' if kind else ""
    hint = f' title="{shown}"' if len(text) > 50 else ""
    return f"<td{look}{hint}>{shown}</td>"


def _left(text: str, more: str = "") -> str:
    return _cell(text, f"left {more}".strip())


def _bars(longest: float, one: float, two: float | None = None) -> str:
    """Bars beside one another; the longest of the column fills it."""
    shown = [(one, "bar")] if two is None else [(one, "bar"), (two, "bar two")]
    bars = "".join(
        f'<span class="{kind}" style="width:{100 * x / (longest or 1):.1f}%"></span>'
        for x, kind in shown
    )
    said = (
        f"{100 * one:.1f}% predicted, {100 * two:.1f}% measured"
        if two is not None
        else (f"{100 * one / (longest or 1):.1f}% of the longest")
    )
    return f'<td class="bars" title="{said}" aria-label="{said}">{bars}</td>'
