"""Short reprs, and what a notebook shows of plans, jobs, compiled jobs and DistArrays."""

import os
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from mpi_helpers import MPIRUN, needs_mpirun

import einmpi
from einmpi.comm.threads import run_threads

JOB = einmpi.program("Z[i,k] = sum(A[i,j] * B[j,k] < 2)", A=(40, 30), B=(30, 20))


def parsed(thing):
    """The HTML of an object, which must be well-formed."""
    return ET.fromstring(thing._repr_html_())


def texts(tree):
    return " ".join(text.strip() for text in tree.itertext() if text.strip())


def test_short_reprs():
    compiled = einmpi.compile(JOB)
    assert repr(JOB) == "<Job program: A, B → Z>"
    assert repr(einmpi.load("jobs/chain.toml")) == "<Job Matrix chain: A, B, C, D, E → Z>"
    plan = einmpi.plan(JOB, ranks=4)
    assert repr(plan).startswith("<Plan of Z on 4 ranks: ") and repr(plan).endswith(" to move>")
    assert repr(compiled) == "<Compiled <Job program: A, B → Z> on 1 rank, 0 plans so far>"
    compiled({"A": np.ones((40, 30)), "B": np.ones((30, 20))})
    assert repr(compiled).endswith("1 plan so far>")


def test_a_plan_is_the_picture_of_its_graph():
    tree = parsed(einmpi.plan(JOB, ranks=4))
    shown = texts(tree)
    assert "4 ranks (mesh 2·2), strategy eindecomp" in shown
    assert tree.find(".//{http://www.w3.org/2000/svg}svg") is not None
    for name in ("A", "B", "Z"):
        assert name in shown


def test_a_job_and_a_compiled_job():
    shown = texts(parsed(JOB))
    assert "Z[i,k] = sum(A[i,j] * B[j,k] < 2)" in shown  # < is escaped
    assert "output Z int64 40×20" in shown
    compiled = einmpi.compile(JOB)
    tree = ET.fromstring(f"<div>{compiled._repr_html_()}</div>")
    assert "It is planned when it is first called." in texts(tree)
    compiled({"A": np.ones((40, 30)), "B": np.ones((30, 20))})
    tree = ET.fromstring(f"<div>{compiled._repr_html_()}</div>")
    assert tree.find(".//{http://www.w3.org/2000/svg}svg") is not None


def test_a_distarray_shows_its_block():
    def on_rank(comm):
        array = einmpi.DistArray.zeros((8, 4), comm=comm, parts=(2, 1))
        for other in (array, array[:, 0], array.sum(), array[:0]):
            parsed(other)
        return parsed(array)

    trees = run_threads(2, on_rank)
    svg = "{http://www.w3.org/2000/svg}"
    blocks = [tree.find(f".//{svg}rect").attrib for tree in trees]
    assert [block["y"] for block in blocks] == ["0.0", "80.0"]
    assert {block["height"] for block in blocks} == {"80.0"}
    assert "shape 8×4 dtype float64, 256 B in all" in texts(trees[0])
    assert "[2,1] on 2 ranks" in texts(trees[0]) and "rank 1 of 2 [4:8, 0:4]" in texts(trees[1])


def run_notebook(cells):
    """Run the cells of a notebook as Jupyter does, and return their outputs."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=120).execute()
    return [cell.outputs for cell in notebook.cells]


@pytest.mark.slow
def test_a_notebook():
    outputs = run_notebook(
        [
            "import einmpi\njob = einmpi.program('n = sum(X[i])', X=(6,))\njob",
            "einmpi.plan(job, ranks=2)",
            "einmpi.DistArray.ones(6)",
        ]
    )
    for output in outputs:
        assert output[0].data["text/html"].startswith("<div>")
    assert outputs[0][0].data["text/plain"] == "<Job program: X → n>"


@needs_mpirun
@pytest.mark.slow
def test_several_ranks_from_a_notebook(monkeypatch):
    pytest.importorskip("ipyparallel")
    monkeypatch.setenv("PATH", f"{MPIRUN.parent}{os.pathsep}{os.environ['PATH']}")
    outputs = run_notebook(
        [
            "import ipyparallel as ipp\ncluster = ipp.Cluster(engines='mpi', n=2)\n"
            "ranks = cluster.start_and_connect_sync()",
            "%%px\nimport einmpi\nX = einmpi.DistArray.from_function(lambda i: i, 10)\n"
            "found = X.comm.rank, X.local.shape, float(X.sum())",
            "print(sorted(ranks[:]['found']))\ncluster.stop_cluster_sync()",
        ]
    )
    printed = [output.text for output in outputs[2] if output.get("name") == "stdout"]
    assert "[(0, (5,), 45.0), (1, (5,), 45.0)]" in "".join(printed), outputs
