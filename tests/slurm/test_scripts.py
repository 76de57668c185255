"""Every script in jobs/ on a real Slurm with two nodes: status 0 and the right results."""

import json

import h5py
import numpy as np
import pytest
from mpi_helpers import ROOT
from slurm.submitted import SETTINGS, TWO_BY_TWO, check, check_page, printed

import einmpi

pytestmark = pytest.mark.slurm


def test_every_script_is_tested():
    scripts = {path.name for path in (ROOT / "jobs").glob("*.sbatch")}
    assert scripts == {
        "one_node.sbatch",
        "many_nodes.sbatch",
        "gpus.sbatch",
        "sizes.sbatch",
        "pipeline.sbatch",
        "long.sbatch",
    }
    page = (ROOT / "docs/slurm.md").read_text()
    assert all(f"`jobs/{name}`" in page for name in (*scripts, "pipeline.sh"))


def test_scripts_for_one_job(slurm, project):
    one = slurm.submit("jobs/one_node.sbatch", cwd=project, env=SETTINGS)
    gpus = slurm.submit(*TWO_BY_TWO, "jobs/gpus.sbatch", cwd=project, env=SETTINGS)
    long = slurm.submit(*TWO_BY_TWO, "jobs/long.sbatch", cwd=project, env=SETTINGS)
    done = slurm.wait(one, gpus, long)
    for job, path in zip(done, ("chain.toml", "attention.toml", "shortest_path.toml"), strict=True):
        check(project, job, 4, f"jobs/{path}")
        check_page(printed(project, job))
    assert "there is no checkpoint; starts from the beginning" in printed(project, done[2])
    assert list(project.glob("saved-*/*")) == []


def test_a_script_from_a_plan(slurm, project):
    """`einmpi sbatch` with a malicious name and title, from a folder that looks like a pattern."""
    folder = project / "it's $(touch pwned)\n#SBATCH --nodes=7\n"
    folder.mkdir()
    text = (
        (project / "jobs/chain.toml")
        .read_text()
        .replace('"Matrix chain"', r'"two\n#SBATCH --nodes=7\n$(touch pwned)"')
    )
    (folder / "a b.toml").write_text(text)
    asked = (
        "--nodes=2",
        "--ntasks-per-node=2",
        "--time=5",
        "--checkpoint",
        folder / "saved",
        "--out",
        "run.sbatch",
    )
    done = slurm.run("python", "-m", "einmpi", "sbatch", folder / "a b.toml", *asked, cwd=project)
    assert (done.returncode, done.stdout) == (0, "sbatch run.sbatch\n"), done.stderr
    here = project / "100%jobs"
    here.mkdir()
    number = slurm.submit(
        f"--output={str(here).replace('%', '%%')}/%x-%j.out", project / "run.sbatch", cwd=here
    )
    (job,) = slurm.wait(number)
    assert (job["JobName"], job["NumNodes"], job["TimeLimit"]) == ("a-b", "2", "00:05:00")
    check(
        here, {**job, "StdOut": f"a-b-{number}.out"}, 4, folder / "a b.toml"
    )  # Slurm shows another name
    assert not list(project.rglob("pwned"))


def test_an_array_of_sizes(slurm, project):
    done = slurm.wait(slurm.submit(*TWO_BY_TWO, "jobs/sizes.sbatch", cwd=project, env=SETTINGS))
    assert sorted(job["ArrayTaskId"] for job in done) == ["1", "2", "3"]
    for job in done:
        size = 160 * int(job["ArrayTaskId"])
        check(project, job, 4, "jobs/chain.toml", s=size)
        check_page(printed(project, job))
        data = json.loads((project / f"chain-{size}.json").read_text())
        assert data["outputs"]["Z"]["shape"] == [size, size] and len(data["seconds_all"]) == 3


def test_a_pipeline(slurm, project):
    done = slurm.run("bash", "jobs/pipeline.sh", cwd=project, env=SETTINGS)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [path for _, path in lines] == [
        "jobs/pipeline/covariance.toml",
        "jobs/pipeline/direction.toml",
    ]
    for job, (_, path) in zip(
        slurm.wait(*(int(number) for number, _ in lines)), lines, strict=True
    ):
        check(project, job, 4, path)
        check_page(printed(project, job))
    # numpy's own way from the same X to the same direction.
    (project / "x.toml").write_text("""program = "Y[n,a] = X[n,a]"
        [inputs]
        X = { shape = [2000, 64], random = "normal", seed = 1 }""")
    x = einmpi.reference(einmpi.load(project / "x.toml"))["Y"]
    values, vectors = np.linalg.eigh(np.cov(x, rowvar=False))
    weights = vectors @ (values**8 * vectors[0])
    with h5py.File(project / "jobs/pipeline/direction.h5") as file:
        np.testing.assert_allclose(file["D"][:], weights / np.linalg.norm(weights), atol=1e-10)
