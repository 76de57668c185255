"""The figures and tables of a report page: what was planned, next to what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from einmpi.graph.eingraph import Vertex
from einmpi.planner.lower_bound.pieces import ALL_CUTS
from einmpi.planner.machine import FLOPS_PER_BYTE
from einmpi.planner.plan import Plan
from einmpi.planner.text.compare import Comparison
from einmpi.planner.text.explain import EXACTNESS, gather_condition, one_level
from einmpi.planner.text.summary import folded_vertices, note_line, show_cuts, show_layout
from einmpi.report.graph_picture import (
    REASON_NAMES,
    EdgeMovement,
    edge_movements,
    main_reason,
    total_words,
)
from einmpi.report.record import KINDS, Timeline
from einmpi.report.results import a_step_text
from einmpi.report.times import VertexTimes, total, vertex_times
from einmpi.units import counted, show_bytes, show_seconds

# Columns of the comparison of strategies → their titles; the column without a name is a bar.
COMPARED = {
    "strategy": "strategy",
    "bytes": "moved",
    "": "",
    "operations a rank": "operations a rank",
    "busiest rank": "busiest rank",
    "peak memory": "peak memory",
    "lower bound": "lower bound, words",
    "paper's cost": "paper's cost",
}
ROWS_SHOWN = 100  # at first: a browser takes long to lay out thousands of rows
LONG_TEXT = 50  # characters; a cell with more has a tooltip


# ---- the headline --------------------------------------------------------------------------------


def figures(plan: Plan, measured: Mapping[str, Any] | None) -> str:
    """Return the headline: the few numbers that say most. `measured` is the JSON of a run."""
    cards = _planned_cards(plan) if measured is None else _measured_cards(plan, measured)
    seconds = plan.cost_in_all.seconds if measured is None else measured["seconds_predicted"]
    if plan.machine is not None and seconds is not None:
        caption = f"predicted; machine: {escape(plan.machine.source)}"
        cards.append((show_seconds(seconds), caption))
    if plan.nodes > 1:
        cards.append(_between_nodes(plan, measured))
    cards.append(_certificate(plan))
    shown = ""
    for number, text in cards:
        caption = f'<span class="faint">{text}</span>'
        shown += f'<div class="figure"><b>{escape(number)}</b>{caption}</div>'
    return f'<div class="figures">{shown}</div>'


def _planned_cards(plan: Plan) -> list[tuple[str, str]]:
    cost = plan.cost_in_all
    busiest = show_bytes(-(-cost.nbytes // plan.mesh.ranks))
    steps = ", in all steps" if plan.loops else ""
    return [
        (
            show_bytes(cost.nbytes),
            f"moved in total{_a_step(plan)}; {busiest} to the busiest rank",
        ),
        (show_bytes(plan.peak_in_all), "peak memory per rank"),
        (f"{cost.operations:.3g}", f"operations{steps}"),
    ]


def _a_step(plan: Plan) -> str:
    """Return what a step of each loop moves; empty without loops."""
    shown = [a_step_text(each.cost_once, each.cost) for each in plan.loops]
    return f"; {', then '.join(shown)}" if shown else ""


def _measured_cards(plan: Plan, measured: Mapping[str, Any]) -> list[tuple[str, str]]:
    run = measured["seconds"]["run"]
    total = measured["seconds"]["total"]
    rate = measured["flops"] / run / 1e9 if run else 0.0
    moved = measured["bytes_moved"]
    if moved == measured["bytes_predicted"]:
        verdict = '<span class="good">as planned</span>'
    else:
        verdict = f'<span class="bad">{show_bytes(measured["bytes_predicted"])} planned</span>'
    busiest = show_bytes(measured["bytes_moved_max_rank"])
    return [
        (f"{run:.3g} s", f"run; {total:.3g} s in total; {rate:.3g} Gop/s"),
        (show_bytes(moved), f"moved, {verdict}{_a_step(plan)}; {busiest} to the busiest rank"),
        (
            show_bytes(measured["bytes_peak"]),
            f"peak memory per rank; {show_bytes(measured['bytes_peak_predicted'])} planned",
        ),
    ]


def _between_nodes(plan: Plan, measured: Mapping[str, Any] | None) -> tuple[str, str]:
    planned = "–" if plan.bytes_between is None else show_bytes(plan.cost_in_all.between)
    level = "" if plan.knows_nodes else f"; {one_level(plan)}"
    if measured is None:
        return planned, f"between the {plan.nodes} nodes{level}"
    planned = show_bytes(measured["bytes_between_predicted"])
    moved = show_bytes(measured["bytes_between"])
    return moved, f"between the {plan.nodes} nodes; {planned} planned{level}"


def _certificate(plan: Plan) -> tuple[str, str]:
    if plan.kind == "exact":
        return "exact", f"{EXACTNESS[plan.among]}{gather_condition(plan)}"
    if not plan.lower_bound:
        return "no bound", "no lower bound on what must be moved is known"
    ratio = plan.words_predicted / plan.lower_bound
    among = "" if plan.among == ALL_CUTS else f" among {plan.among}"
    return f"{ratio:.2f}×", f"the lower bound on what must be moved{among}"


# ---- tensors -------------------------------------------------------------------------------------


def time_by_kind(timeline: Timeline) -> dict[str, float]:
    """Return the share of all ranks' time that each kind of step took; the rest is "idle"."""
    total = timeline.seconds * timeline.ranks or 1.0
    shares = dict.fromkeys(KINDS, 0.0)
    for span in timeline.spans:
        if span.background:
            continue  # the rank does something else
        shares[span.kind] += (span.end - span.start) / total
    found = {kind: share for kind, share in shares.items() if share}
    found["idle"] = max(0.0, 1 - sum(shares.values()))
    return found


def tensor_table(plan: Plan, timeline: Timeline | None) -> str:
    """Return a table with a row for each tensor: bytes and shares of the time.

    Each is shown as planned and, if there is a timeline, as measured.
    """
    heads = ["tensor", "definition", "cuts", "to move", "main reason"]
    if timeline is not None:
        heads += ["moved", "computing", "moving", "share of the time"]
    else:
        heads += ["", "share of the work"]
    all_rows = "\n".join(_TensorRows(plan, timeline).rows())
    filter_input = '<input id="table-filter" type="search" autocomplete="off">'
    return f"""{_notes(plan, timeline)}
<div class="tools"><label>Filter rows {filter_input}</label>
<button id="table-all" hidden>Show all {len(plan.graph.vertices):,} rows</button></div>
<div class="scroll" tabindex="0" role="region" aria-label="Table of tensors">
<table id="tensor-table">
<thead><tr>{_heads(heads, left=(0, 1, 2, 4, 8))}</tr></thead>
<tbody>
{all_rows}
</tbody></table></div>"""


class _TensorRows:
    """The rows of the table of tensors, and the figures of all tensors that they are drawn from."""

    def __init__(self, plan: Plan, timeline: Timeline | None) -> None:
        self.plan = plan
        self.timeline = timeline
        vertices = plan.graph.vertices
        self.moves: dict[str, list[EdgeMovement]] = {vertex.name: [] for vertex in vertices}
        for movement in edge_movements(plan):
            self.moves[movement.tensor].append(movement)
        self.planned_bytes = {}
        for name, own in self.moves.items():
            self.planned_bytes[name] = sum(each.nbytes for each in own)
        costs = {}
        for vertex in vertices:
            costs[vertex.name] = _cost(plan, vertex, self.planned_bytes[vertex.name])
        self.predicted = _shares(costs)
        self.measured = {name: VertexTimes(name) for name in self.moves}
        if timeline is not None:
            for each in vertex_times(timeline, ()):
                if each.name in self.moves:
                    self.measured[each.name] = each
        self.took = _shares({name: each.seconds for name, each in self.measured.items()})
        self.longest = max([*self.predicted.values(), *self.took.values()], default=0.0)
        self.most_bytes = max(self.planned_bytes.values(), default=0)

    def rows(self) -> list[str]:
        """Return the rows; those of folded tensors are hidden below a row for all of them."""
        folded = _folded_tensors(self.plan)
        rows: list[str] = []
        folded_here: list[str] = []  # names of consecutive tensors that are hidden
        tensors = 0  # that the table shows at first
        for vertex in self.plan.graph.vertices:
            cells = "".join(self._cells(vertex))
            if vertex.name in folded:
                folded_here.append(vertex.name)
                rows.append(f"<tr hidden>{cells}</tr>")
                continue
            rows += self._fold_rows(folded_here)
            folded_here = []
            tensors += 1
            hidden = " hidden" if tensors > ROWS_SHOWN else ""
            rows.append(f"<tr{hidden}>{cells}</tr>")
        return rows + self._fold_rows(folded_here)

    def _cells(self, vertex: Vertex) -> list[str]:
        name = vertex.name
        cells = _planned_cells(self.plan, vertex, self.moves[name])
        if self.timeline is None:
            cells.append(_bar(self.most_bytes, self.planned_bytes[name]))
            cells.append(_bar(self.longest, self.predicted[name]))
            return cells
        cells += _measured_cells(self.measured[name], self.planned_bytes[name])
        bars = _predicted_and_measured_bars(self.longest, self.predicted[name], self.took[name])
        return [*cells, bars]

    def _fold_rows(self, names: Sequence[str]) -> list[str]:
        """Return a row with the sums of tensors that are hidden, if there are any."""
        if not names:
            return []
        planned = sum(self.planned_bytes[name] for name in names)
        tensors = counted(len(names), "tensor")
        cells = [
            _left(f"… {names[0]} to {names[-1]}"),
            _left(f"{tensors} of repeated layers, each as in the layer before"),
            _left(""),
            _cell(show_bytes(planned)),
            _left(""),
        ]
        if self.timeline is None:
            cells += [_left(""), _left("")]
        else:
            measured = total("", (self.measured[name] for name in names))
            cells += [*_measured_cells(measured, planned), _left("")]
        return [f'<tr class="fold faint">{"".join(cells)}</tr>']


def _planned_cells(plan: Plan, vertex: Vertex, moves: Sequence[EdgeMovement]) -> list[str]:
    definition = "input"
    if vertex.einsum is not None:
        definition = vertex.einsum.summary(vertex.inputs)
    reason = main_reason(total_words(moves))
    return [
        _left(vertex.name),
        _left(definition, "mono wide"),
        _left(_cuts(plan, vertex)),
        _cell(show_bytes(sum(each.nbytes for each in moves))),
        _left(REASON_NAMES[reason] if reason else ""),
    ]


def _folded_tensors(plan: Plan) -> frozenset[str]:
    """Return what is hidden at first: folded vertices, and inputs that only these read."""
    folded = folded_vertices(plan)
    names = set(folded)
    for vertex in plan.graph.inputs:
        readers = plan.graph.consumers[vertex.name]
        if readers and folded.issuperset(readers):
            names.add(vertex.name)
    return frozenset(names)


def _measured_cells(measured: VertexTimes, planned: int) -> list[str]:
    as_planned = measured.nbytes == planned
    return [
        _cell(show_bytes(measured.nbytes), "" if as_planned else "bad"),
        _cell(_time(measured.kernel)),
        _cell(_time(measured.communication + measured.waiting)),
    ]


def _notes(plan: Plan, timeline: Timeline | None) -> str:
    if plan.machine is None:
        model = f"The planner counts each byte moved as {FLOPS_PER_BYTE} operations."
    else:
        source = escape(plan.machine.source)
        model = f"The predicted time of a vertex includes what moves for it (machine: {source})."
    if plan.loops:
        which = "first loop" if len(plan.loops) > 1 else "loop"
        model = f"All numbers are of one step of the {which}. {model}"
    if timeline is None:
        return f"<p>{model} The last column is each tensor's share of the total in this model.</p>"
    return f"""<p>The bytes are those of the tensor itself, moved to the vertices that read
it; bytes that differ from the plan are red. Times are means over the ranks; fused kernels count
for the last of them. {model} In the last column the blue bar is the share of the time in this
model, the green bar the measured share.</p>"""


def _shares(amounts: Mapping[str, float]) -> dict[str, float]:
    total = sum(amounts.values()) or 1
    return {name: amount / total for name, amount in amounts.items()}


def _cost(plan: Plan, vertex: Vertex, nbytes: int) -> int:
    """Return the planner's measure of time, summed over ranks, with repeated work counted again."""
    if plan.machine is not None:
        return plan.bills[vertex.name].time if vertex.name in plan.bills else 0
    if vertex.einsum is None:
        return FLOPS_PER_BYTE * nbytes
    repetitions = plan.mesh.parts(plan.states[vertex.name], [None])[0]
    return vertex.operations() * repetitions + FLOPS_PER_BYTE * nbytes


def _cuts(plan: Plan, vertex: Vertex) -> str:
    cuts = "" if vertex.is_input else show_cuts(plan, vertex.name)
    if vertex.name in plan.layouts and vertex.bound:
        cuts += f" kept {show_layout(plan, vertex.name)}"
    return cuts.lstrip() or "–"


def _time(seconds: float) -> str:
    if not seconds:
        return ""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s"


# ---- strategies ----------------------------------------------------------------------------------


def comparison_table(plan: Plan, comparison: Comparison) -> str:
    """Return a table of the strategies, with the plan of this page marked."""
    titles = COMPARED
    if plan.loops:  # a step, and all steps
        titles = {head: head for head in comparison.rows[0]}
    most = max((each.bytes_predicted for each in comparison.plans), default=0)
    rows = []
    for each, texts in zip(comparison.plans, comparison.rows[1:], strict=True):
        text_of = dict(zip(comparison.rows[0], texts, strict=True))
        cells = [_left(each.strategy)]
        for head in list(titles)[1:]:
            is_bar = head not in text_of
            cells.append(_bar(most, each.bytes_predicted) if is_bar else _cell(text_of[head]))
        chosen = ' class="chosen"' if each.strategy == plan.strategy else ""
        rows.append(f"<tr{chosen}>{''.join(cells)}</tr>")
    notes = ""
    for note in comparison.notes:
        notes += f'<p class="faint">{escape(note_line(note))}</p>'
    return f"""<div class="scroll" tabindex="0" role="region" aria-label="Comparison of strategies">
<table>
<thead><tr>{_heads(tuple(titles.values()), (0,) if plan.loops else (0, 2))}</tr></thead>
<tbody>{"".join(rows)}</tbody></table></div>{notes}"""


# ---- cells ---------------------------------------------------------------------------------------


def _heads(names: Sequence[str], left: Sequence[int]) -> str:
    cells = []
    for column, name in enumerate(names):
        side = " class=left" if column in left else ""
        cells.append(f'<th scope="col"{side}>{name}</th>')
    return "".join(cells)


def _cell(text: str, style: str = "") -> str:
    shown = escape(text)
    attributes = ""
    if style:
        attributes += f' class="{style}"'
    if len(text) > LONG_TEXT:
        attributes += f' title="{shown}"'
    return f"<td{attributes}>{shown}</td>"


def _left(text: str, style: str = "") -> str:
    return _cell(text, f"left {style}".strip())


def _bar(longest: float, value: float) -> str:
    """Return a cell with a bar; the longest bar of the column fills it."""
    percent = 100 * value / (longest or 1)
    return _bars_cell([("bar", percent)], f"{percent:.1f}% of the longest")


def _predicted_and_measured_bars(longest: float, predicted: float, measured: float) -> str:
    bars = [
        ("bar", 100 * predicted / (longest or 1)),
        ("bar two", 100 * measured / (longest or 1)),
    ]
    text = f"{100 * predicted:.1f}% predicted, {100 * measured:.1f}% measured"
    return _bars_cell(bars, text)


def _bars_cell(bars: Iterable[tuple[str, float]], text: str) -> str:
    shown = ""
    for style, percent in bars:
        shown += f'<span class="{style}" style="width:{percent:.1f}%"></span>'
    return f'<td class="bars" title="{text}" aria-label="{text}">{shown}</td>'
