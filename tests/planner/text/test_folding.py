"""Repeated layers in tables of a plan: one line for what is the same as in the layer before."""

import json
from dataclasses import replace

import numpy as np
import pytest
from in_process import einmpi_here
from paper_llama import llama_program

import einmpi
from einmpi.models.config import NAMED, llama_1
from einmpi.models.programs import decode_program, prefill_program
from einmpi.planner.text.explain import as_json, explain, vertex_rows
from einmpi.planner.text.summary import (
    LEAST_FOLDED,
    MOST_UNFOLDED,
    Fold,
    folded_vertices,
    vertices_and_folds,
)
from einmpi.report.graph_picture import graph_picture

LAYERS = 12


def llama_job(layers):
    text, shapes, _ = llama_program(llama_1(64, layers, 4, 96), 2, 32)
    return einmpi.program(text, dtype="float32", **shapes)


@pytest.fixture(scope="module")
def plan():
    return einmpi.plan(llama_job(LAYERS), 4)


def unfolded(plan):
    """All vertices of what a table shows, those of folds written out."""
    names = []
    for each in vertices_and_folds(plan):
        vertices = each.vertices if isinstance(each, Fold) else [each]
        names += [vertex.name for vertex in vertices]
    return names


def numbers(row):
    """The words of a row of EXPLAIN: join, aggregate, repartition."""
    return [int(cell.replace(",", "")) for cell in row[2:5]]


def test_layers_that_are_cut_alike_are_one_line(plan):
    lines = str(plan).split("\n")
    folds = [line for line in lines if line.startswith("…")]
    assert folds and "layers 2 to" in folds[0] and "as in the layer before" in folds[0]
    assert folds[0].startswith("… n1_2_1 to ")
    assert len(lines) < 90 < len(plan.graph.computed)
    assert explain(plan, full=True).count(" ← ") == len(plan.graph.computed)


@pytest.mark.slow
def test_the_first_layer_is_shown_whole(plan):
    folded = folded_vertices(plan)
    vertices_of_a_layer = len(plan.graph.computed) // LAYERS
    for vertex in plan.graph.computed[:vertices_of_a_layer]:
        assert vertex.name not in folded and vertex.summary in str(plan)


def test_each_vertex_is_shown_or_folded_once_and_in_order(plan):
    assert unfolded(plan) == [vertex.name for vertex in plan.graph.computed]


def test_a_folded_vertex_has_the_row_of_its_vertex_in_the_layer_before(plan):
    full = vertex_rows(plan, full=True)[1:]
    vertices_of_a_layer = len(plan.graph.computed) // LAYERS
    folded = folded_vertices(plan)
    for place, vertex in enumerate(plan.graph.computed):
        if vertex.name in folded:
            assert full[place][1:] == full[place - vertices_of_a_layer][1:]


def test_the_rows_add_up_to_the_totals(plan):
    for full in (False, True):
        rows = vertex_rows(plan, full)[1:]
        assert sum(sum(numbers(row)) for row in rows) == plan.words_predicted


def test_a_layer_that_is_cut_otherwise_is_shown(plan):
    folded = folded_vertices(plan)
    other = "u_7_1"
    assert other in folded
    states = {**plan.states, other: (None, *plan.states[other][1:])}
    assert states != plan.states
    changed = replace(plan, states=states)
    assert other not in folded_vertices(changed)
    assert "u_8_1" not in folded_vertices(changed)  # it is not as in the layer before
    assert unfolded(changed) == unfolded(plan)


def test_a_layer_that_moves_more_is_shown(plan):
    bill = replace(plan.bills["u_7_1"], nbytes=plan.bills["u_7_1"].nbytes + 1)
    changed = replace(plan, bills={**plan.bills, "u_7_1": bill})
    assert "u_7_1" not in folded_vertices(changed)


def test_notes_of_folded_vertices_are_left_out(plan):
    note = "the rule could not be followed"
    names = [f"u_{layer}_1" for layer in range(1, LAYERS + 1)]
    changed = replace(plan, notes=dict.fromkeys(names, note))
    shown = [line for line in str(changed).split("\n") if line.endswith(note)]
    assert shown[0] == f"u_1_1: {note}" and len(shown) < LAYERS
    assert explain(changed, full=True).count(note) == LAYERS


@pytest.mark.parametrize("extra", [0, 1])
def test_a_small_graph_is_shown_whole(extra):
    count = MOST_UNFOLDED + extra
    text = "\n".join(f"T{k}[i,j] = sum(T{k - 1}[i,l] * W{k}[l,j])" for k in range(1, count + 1))
    shapes = {f"W{k}": (8, 8) for k in range(1, count + 1)}
    plan = einmpi.plan(einmpi.program(text, T0=(8, 8), **shapes), 2)
    assert bool(folded_vertices(plan)) == bool(extra)
    assert ("\n…" in str(plan)) == bool(extra)


def test_layers_that_do_not_repeat_are_shown():
    count = MOST_UNFOLDED + LEAST_FOLDED
    text = "\n".join(f"T{k}[i,j] = sum(T{k - 1}[i,l] * W{k}[l,j])" for k in range(1, count + 1))
    shapes = {f"W{k}": (9 + k, 10 + k) for k in range(1, count + 1)}
    plan = einmpi.plan(einmpi.program(text, T0=(8, 10), **shapes), 2, strategy="sqrt")
    assert not folded_vertices(plan)


def test_one_rank_folds_too():
    plan = einmpi.plan(llama_job(LAYERS), 1)
    assert len(str(plan).split("\n")) < 60


def test_the_command_shows_everything_on_request_and_json_always(tmp_path):
    text, shapes, _ = llama_program(llama_1(16, 4, 2, 24), 2, 8)
    inputs = ""
    for name, shape in shapes.items():
        inputs += f'{name} = {{ shape = {list(shape)}, random = "ones" }}\n'
    (tmp_path / "job.toml").write_text(f"program = '''{text}'''\n[inputs]\n{inputs}")
    command = ["plan", "job.toml", "-n", "2"]
    folded = einmpi_here(tmp_path, command)
    full = einmpi_here(tmp_path, [*command, "--full"])
    data = json.loads(einmpi_here(tmp_path, [*command, "--json", "-"]).stdout)
    assert folded.returncode == full.returncode == 0
    assert "as in the layer before" in folded.stdout and "…" not in full.stdout.split("layouts")[0]
    assert full.stdout.count(" ← ") == len(data["vertices"]) > folded.stdout.count(" ← ")
    plan = einmpi.plan(einmpi.load(tmp_path / "job.toml"), 2)
    assert len(as_json(plan)["vertices"]) == len(data["vertices"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("program", [prefill_program, decode_program])
def test_layers_that_read_the_same_computed_tensors_fold(program):
    """Cosines and sines of positions are computed once, and every layer reads them."""
    config = replace(
        NAMED["7B"], width=32, layers=8, heads=4, groups=4, head_width=8, hidden=48, vocabulary=64
    )
    written = program(config, 2, 16, "float32")
    tensors = {name: np.zeros(shape, dtype) for name, (shape, dtype) in written.inputs.items()}
    tensors |= {name: weight.shape for name, weight in written.weights.items()}
    job = einmpi.program(written.text, dtype="float32", outputs=written.outputs, **tensors)
    for ranks in (1, 4):
        plan = einmpi.plan(job, ranks)
        computed = len(plan.graph.computed)
        assert 2 * len(folded_vertices(plan)) > computed > 120
        assert str(plan).count(" ← ") + len(folded_vertices(plan)) == computed
        assert "more layers like this" in str(graph_picture(plan))
