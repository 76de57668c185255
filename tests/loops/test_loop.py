"""Loops on ranks: values against numpy, bytes of every step, ends, errors."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from counted_comm import watch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cuts import plan_crosses_windows, random_cuts

import einmpi
from einmpi.api import options_of
from einmpi.api.loops import loop
from einmpi.comm.threads import run_threads
from einmpi.errors import EinmpiError, InputError
from einmpi.job.loop import StepProgram, make_loop
from einmpi.language.syntax import Source
from einmpi.loops.arrival import plan_loop
from einmpi.loops.running import LoopRun
from einmpi.report.describe import describe_job
from einmpi.schedule.layout import Layout

RNG = np.random.default_rng(18)
POWER = """
S[i,j] = A[i,j] + A[j,i]
y[i] = sum[j](S[i,j] * x[j])
value = sum(x[i] * y[i])
x_next[i] = y[i] / sqrt(sum[k](y[k]**2))
turned = sqrt(sum((x_next[i] - sign(value) * x[i])**2))
"""


def run_on(ranks, job, inputs, **options):
    """Run a loop on thread ranks; check that all ranks see the same, and every step's bytes."""

    def on_rank(comm):
        program = StepProgram(job.written, job.sizes, job.inputs)
        until = options.get("until")
        checked = make_loop(
            program,
            lambda *_: "loop",
            options["steps"],
            options["carry"],
            None if until is None else Source("until", until),
            options.get("record", ()),
        )
        received = []
        run = LoopRun(replace(job, loop=checked), comm, options_of(job))
        run.on_row = lambda number, row: received.append(comm.received)
        run.prepare(inputs)
        before = comm.received
        result = run.run()
        steps = np.diff([before, *received])
        outputs = {name: array.gather() for name, array in result.outputs.items()}
        return result, outputs, steps, run.plan

    results = run_threads(ranks, on_rank)
    first, outputs, _, plan = results[0]
    for result, _, _, _ in results:
        assert (result.steps, result.is_done) == (first.steps, first.is_done)
        for name, values in first.history.items():
            np.testing.assert_array_equal(result.history[name], values)
    every_step = sum(steps for _, _, steps, _ in results)
    assert set(every_step) == {plan.bytes_predicted}
    for name, output in options["carry"].items():
        assert plan.layouts[name] == plan.layouts[output]
    return first, outputs, plan


@pytest.mark.sampled(5)
@pytest.mark.parametrize("ranks", range(1, 10))
def test_power_iteration(ranks):
    n = 30
    a = RNG.random((n, n))
    job = einmpi.program(POWER, A=a, x=(n,))
    result, outputs, _ = run_on(
        ranks,
        job,
        {"A": a, "x": np.ones(n)},
        carry={"x": "x_next"},
        steps=200,
        until="turned < 1e-12",
        record=["value", "turned"],
    )
    values, vectors = np.linalg.eigh(a + a.T)
    assert result.is_done and result.steps < 200
    assert result.history["turned"].shape == (result.steps,)
    # The error of the value is the square of that of the vector, which is at most 1e-11.
    assert result.history["value"][-1] == pytest.approx(values[-1], rel=1e-14)
    assert abs(outputs["x"] @ vectors[:, -1]) == pytest.approx(1, abs=1e-11)


@pytest.mark.slow
def test_random_cuts_across_windows(monkeypatch):
    """What is carried lies as axes of several windows cut it."""
    crossing = 0
    a, b = RNG.random((2, 7, 7))
    job = einmpi.program("X_next[i,k] = sum(A[i,j] * X[j,k]) / 4", A=a, X=b.shape)
    for seed in range(6):
        random_cuts(monkeypatch, seed)
        inputs = {"A": a, "X": b}
        _, outputs, plan = run_on(8, job, inputs, carry={"X": "X_next"}, steps=3)
        crossing += plan_crosses_windows(plan)
        expected = np.linalg.matrix_power(a / 4, 3) @ b
        np.testing.assert_allclose(outputs["X"], expected, rtol=1e-12)
    assert crossing == 6


def test_what_never_changes_is_computed_once():
    """S would have to be exchanged with its transpose in every step."""
    n = 30
    a = RNG.random((n, n))
    job = einmpi.program(POWER, A=a, x=(n,))
    _, _, plan = run_on(
        4, job, {"A": a, "x": np.ones(n)}, carry={"x": "x_next"}, steps=2, record=["value"]
    )
    assert "S" in {vertex.name for vertex in plan.graph.inputs}
    assert plan.words_predicted < 3 * n


CALLS = (
    "alltoallv",
    "allgatherv",
    "reduce_scatter",
    "sendrecv",
    "lowest",
    "compare",
    "barrier",
)


def calls_of_steps(job, ranks):
    """Return how many messages each rank takes part in, of any kind, in each step of a loop."""

    def on_rank(comm):
        counts = Counter()

        watch(comm, CALLS, lambda name: counts.update([name]))
        run = LoopRun(job, comm, options_of(job))
        run.prepare({})
        after = []
        run.on_row = lambda number, row: after.append(counts.total())
        run.run()
        return np.diff(after).tolist()

    return run_threads(ranks, on_rank)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_until_and_record_send_no_message_of_their_own(tmp_path, ranks):
    """All ranks have the numbers of a step: nothing is left that could overlap the next one."""
    text = """
    program = '''
    y[i]      = sum(A[i,j] * x[j])
    size      = norm(y[i])
    x_next[i] = y[i] / size
    turned    = sum((x_next[i] - x[i])**2)
    '''
    inputs.A = { shape = [120, 120], random = "uniform", seed = 1 }
    inputs.x = { shape = [120], random = "ones" }
    [loop]
    steps = 8
    carry.x = "x_next"
    """
    watching = """
    until = "(turned < -1) | (size * 2 < 0) | (step > 100)"
    record = ["turned", "size"]
    """
    counted = []
    for more in ("", watching):
        (tmp_path / "job.toml").write_text(text + more)
        counted.append(calls_of_steps(einmpi.load(tmp_path / "job.toml"), ranks))
    plain, watched = counted
    for plain_rank, watched_rank in zip(plain, watched, strict=True):
        assert min(plain_rank) > 0
        assert plain_rank == watched_rank


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7, 11])
def test_conjugate_gradients(ranks):
    n = 24
    a = RNG.normal(size=(n, n))
    job = einmpi.program(
        """
        M[i,j] = sum(A[i,k] * A[j,k]) + where(i == j, 5.0, 0.0)
        q[i] = sum(M[i,j] * p[j])
        alpha = rho / sum(p[i] * q[i])
        x_next[i] = x[i] + alpha * p[i]
        r_next[i] = r[i] - alpha * q[i]
        rho_next = sum(r_next[i]**2)
        p_next[i] = r_next[i] + rho_next / rho * p[i]
        """,
        A=a,
        x=(n,),
        r=(n,),
        p=(n,),
        rho=(),
    )
    b = np.ones(n)
    result, outputs, _ = run_on(
        ranks,
        job,
        {"A": a, "x": np.zeros(n), "r": b, "p": b, "rho": np.array(b @ b)},
        carry={"x": "x_next", "r": "r_next", "p": "p_next", "rho": "rho_next"},
        steps=500,
        until="rho_next < 1e-24",
        record=["rho_next"],
    )
    assert result.is_done
    matrix = a @ a.T + 5 * np.eye(n)
    # The residual is 1e-12, and no eigenvalue is below 5.
    np.testing.assert_allclose(outputs["x"], np.linalg.solve(matrix, b), rtol=0, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 4, 6])
def test_jacobi_moves_halos_only(ranks):
    n = 26
    u = RNG.normal(size=(n, n))
    job = einmpi.program(
        """
        u_next[i,j] = where((i > 0) & (i < n-1) & (j > 0) & (j < n-1),
            (u[i-1,j] + u[i+1,j] + u[i,j-1] + u[i,j+1]) / 4, u[i,j])
        """,
        u=u,
        n=n,
    )
    result, outputs, plan = run_on(ranks, job, {"u": u}, carry={"u": "u_next"}, steps=9)
    expected = u.copy()
    for _ in range(9):
        inner = expected[:-2, 1:-1] + expected[2:, 1:-1]
        inner = inner + expected[1:-1, :-2] + expected[1:-1, 2:]
        expected[1:-1, 1:-1] = inner / 4
    assert result.steps == 9 and not result.is_done
    np.testing.assert_allclose(outputs["u"], expected, rtol=0, atol=1e-15)
    assert plan.words_predicted <= 2 * (ranks - 1) * n


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_number_of_a_step(ranks):
    job = einmpi.program("step: int64\ntotal_next = total + step", total=())
    result, outputs, _ = run_on(
        ranks,
        job,
        {"total": np.array(0.0)},
        carry={"total": "total_next"},
        steps=100,
        until="(total_next > 10.5) & (step > 2)",
        record=["total_next"],
    )
    assert outputs["total"] == 15 and result.steps == 6
    assert result.history["total_next"].tolist() == [0, 1, 3, 6, 10, 15]


@pytest.mark.slow
@settings(max_examples=40)
@given(st.integers(1, 7), st.integers(1, 9), st.integers(1, 6), st.integers(1, 4))
def test_any_shape(ranks, rows, columns, steps):
    x = RNG.normal(size=(rows, columns))
    a = RNG.normal(size=(rows, rows))
    job = einmpi.program(
        "B[i,k] = A[i,k] / 2; x_next[i,j] = sum[k](B[i,k] * x[k,j]) + 1; n = sum(x_next[i,j])",
        A=a,
        x=x,
    )
    result, outputs, _ = run_on(
        ranks, job, {"A": a, "x": x}, carry={"x": "x_next"}, steps=steps, record=["n"]
    )
    expected = x
    sums = []
    for _ in range(steps):
        expected = a / 2 @ expected + 1
        sums.append(expected.sum())
    # Products of at most 9 terms in another order, at most 4 times.
    np.testing.assert_allclose(outputs["x"], expected, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(result.history["n"], sums, rtol=1e-10, atol=1e-10)


def test_inputs_in_any_form():
    """Arrays, DistArrays in another layout, and files become what a step needs."""
    n = 12
    a = RNG.random((n, n))
    job = einmpi.program("y[i] = sum[j](A[i,j] * x[j]); m = max(y[i])", A=a, x=(n,), outputs=["y"])

    def on_rank(comm):
        rows = einmpi.DistArray.from_global(a, comm, parts=(1, comm.size))
        x = einmpi.DistArray.from_global(np.ones(n), comm)
        found = loop(job, {"A": rows, "x": x}, comm, carry={"x": "y"}, steps=3)
        return found.outputs["x"].gather()

    # A few units in the last place: sums of 12 products in another order.
    for found in run_threads(3, on_rank):
        np.testing.assert_allclose(found, np.linalg.matrix_power(a, 3).sum(1), rtol=1e-14)


def test_an_error_in_a_step_ends_all_ranks():
    job = einmpi.program(
        "at: int64[8]\nat_next[i] = at[i] + 1; z[i] = x[at[i]]", x=(8,), outputs=["z", "at_next"]
    )

    def on_rank(comm):
        with pytest.raises(EinmpiError, match="out of range"):
            loop(
                job,
                {"x": np.ones(8), "at": np.arange(8)},
                comm,
                carry={"at": "at_next"},
                steps=10,
            )
        return True

    assert run_threads(3, on_rank) == [True] * 3


@pytest.mark.parametrize(
    "change, message",
    [
        ({"steps": 0}, "loop: steps is 0; expected an integer from 1"),
        ({"carry": {}}, "loop: nothing is carried; expected"),
        ({"carry": ["x"]}, "loop: list is not a mapping"),
        ({"carry": {"x": 3}}, "loop: x becomes 3; expected the name of a tensor"),
        (
            {"carry": {"q": "y"}},
            "loop: q is carried, but no step reads an input q; expected one of A, x",
        ),
        ({"carry": {"x": "A"}}, "loop: A is not computed; expected one of y, s"),
        ({"carry": {"x": "s"}}, r"loop: s is float64 without dimensions; expected float64\[4\]"),
        ({"until": "s"}, "loop: 's' is float64 without dimensions; expected a condition"),
        ({"until": "s < q"}, "until:1:5: .*'q'"),
        ({"until": "s = 1"}, "loop: 's = 1' is not a condition"),
        ({"record": ["y"]}, r"loop: y is recorded, but is float64\[4\]; expected a tensor without"),
        ({"record": ["z"]}, "loop: z is not computed; expected one of y, s"),
    ],
)
def test_refused(change, message):
    job = einmpi.program("y[i] = sum[j](A[i,j] * x[j]); s = sum(y[i])", A=(4, 4), x=(4,))
    options = {"carry": {"x": "y"}, "steps": 3, **change}
    with pytest.raises(InputError, match=message):
        loop(job, {"A": np.ones((4, 4)), "x": np.ones(4)}, **options)


JOB = """
program = '''
S[i,j] = A[i,j] + A[j,i]
y[i] = sum(S[i,j] * x[j])
x_next[i] = y[i] / sqrt(sum[k](y[k]**2)) + 0 * step
turned = sqrt(sum((x_next[i] - x[i])**2))
'''
sizes = { n = 12 }
parameters = { least = 1e-9 }
[inputs]
A = { shape = ["n", "n"], random = "uniform", seed = 1 }
x = { shape = ["n"], random = "ones" }
[loop]
steps = "n * 10"
carry = { x = "x_next" }
until = "turned < least"
record = ["turned"]
[outputs]
x = "out.h5:/vector"
turned = "out.h5:/turned"
"""


def gathered(arrays):
    return {name: array.gather() for name, array in arrays.items()}


def test_a_job_file(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    job = einmpi.load(tmp_path / "job.toml")
    assert job.loop.steps == 120
    expected = einmpi.reference(job)
    for ranks in (1, 2, 3):
        for found in run_threads(ranks, lambda comm: gathered(einmpi.run(job, comm=comm))):
            assert set(found) == {"x", "turned"}
            # Sums of 12 products in another order, and steps that make errors smaller.
            np.testing.assert_allclose(found["x"], expected["x"], rtol=0, atol=1e-14)
    result = einmpi.loop(job, steps=3, until="step > 5")
    assert result.steps == 3 and result.history["turned"].shape == (3,)
    shorter = einmpi.loop(einmpi.load(tmp_path / "job.toml", least=0.1))
    assert shorter.steps < einmpi.loop(job).steps


def test_nan_from_python(tmp_path):
    """The job says whether nan ends a loop, and no file is written."""
    text = (
        'program = "y = log(x) - 1"\ninputs.x = { shape = [], random = "ones" }\n'
        'loop = { steps = 4, carry = { x = "y" }, record = ["y"], history = "h.csv"'
    )
    (tmp_path / "stop.toml").write_text(text + "}")
    (tmp_path / "keep.toml").write_text(text + ', on_nan = "keep" }')
    with pytest.raises(EinmpiError, match="nan in step 1, in y; the first tensor with nan"):
        einmpi.loop(einmpi.load(tmp_path / "stop.toml"))
    kept = einmpi.loop(einmpi.load(tmp_path / "keep.toml"))
    assert kept.steps == 4 and np.isnan(kept.history["y"]).tolist() == [False, True, True, True]
    assert not (tmp_path / "h.csv").exists()


def test_a_step_that_is_called():
    """Calls with what they have returned before; nothing moves between them."""
    a = RNG.normal(size=(9, 9))
    job = einmpi.program("y[i] = sum[j](A[i,j] * x[j]) / 3; s = sum(y[i])", A=a, x=(9,))

    def on_rank(comm):
        step = einmpi.compile(job, comm, carry={"x": "y"})
        x = np.ones(9)
        for _ in range(4):
            found = step({"A": a, "x": x})
            x = found["y"]
        ((plan, _),) = step.ready.values()
        assert plan.layouts["x"] == plan.layouts["y"]
        moved = step({"A": a, "x": einmpi.DistArray.from_global(x.gather(), comm)})["y"].gather()
        np.testing.assert_array_equal(moved, step({"A": a, "x": x})["y"].gather())
        return x.gather()

    expected = np.linalg.matrix_power(a / 3, 4) @ np.ones(9)
    for ranks in (1, 2, 3, 4):
        for found in run_threads(ranks, on_rank):
            # Sums of 9 products in another order, four times; some of them nearly cancel.
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_scans_and_scattered_results_in_a_loop(ranks):
    """PageRank by edges, and a running sum over the ranks of a vector."""
    n, edges = 20, 60
    source, target = RNG.integers(0, n, (2, edges))
    source[:n] = np.arange(n)  # every page has a link
    job = einmpi.program(
        """
        source: int64[60]
        target: int64[60]
        out[source[e]:n] = sum[e](1.0)
        into[target[e]:n] = sum[e](p[source[e]] / out[source[e]])
        p_next[i] = 0.15 / n + 0.85 * into[i]
        below[i] = cumsum[i](p_next[i])
        change = sum(abs(p_next[i] - p[i]))
        """,
        p=(n,),
        n=n,
    )
    result, outputs, plan = run_on(
        ranks,
        job,
        {"source": source, "target": target, "p": np.full(n, 1 / n)},
        carry={"p": "p_next"},
        steps=300,
        until="change < 1e-14",
        record=["change"],
    )
    matrix = np.zeros((n, n))
    np.add.at(matrix, (target, source), 1 / np.bincount(source, minlength=n)[source])
    expected = np.linalg.solve(np.eye(n) - 0.85 * matrix, np.full(n, 0.15 / n))
    assert result.is_done and "out" in {vertex.name for vertex in plan.graph.inputs}
    # The last change is 1e-14, and steps shrink it by 0.85.
    np.testing.assert_allclose(outputs["p"], expected, rtol=0, atol=1e-13)
    np.testing.assert_allclose(outputs["below"], np.cumsum(expected), rtol=0, atol=2e-12)


def test_a_job_with_a_loop_is_not_compiled(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    job = einmpi.load(tmp_path / "job.toml")
    with pytest.raises(InputError, match="compile: the job has a loop; expected a job without one"):
        einmpi.compile(job)


DESCENT = """
program = "x_next[i] = x[i] - step * x[i]; size = sum(x_next[i])"
WHAT
[inputs.x]
shape = [3]
random = "ones"
[loop]
steps = 4
carry = { x = "x_next" }
until = "size < step"
"""


@pytest.mark.parametrize(
    "what", ["parameters.step = 0.5", 'inputs.step = { shape = [], random = "ones" }']
)
def test_the_number_of_a_step_does_not_replace_an_input(tmp_path, what):
    """A parameter `step`, as of gradient descent, was replaced by 0, 1, 2, … without a word."""
    (tmp_path / "job.toml").write_text(DESCENT.replace("WHAT", what))
    with pytest.raises(InputError, match=r"toml:3:\d+: in a loop, step is the number of the step"):
        einmpi.load(tmp_path / "job.toml")


def test_a_size_or_a_tensor_may_be_called_step(tmp_path):
    (tmp_path / "job.toml").write_text(DESCENT.replace("WHAT", "sizes.step = 2"))
    job = einmpi.load(tmp_path / "job.toml")
    for found in (einmpi.run(job)["x"].gather(), einmpi.reference(job)["x"]):
        np.testing.assert_array_equal(found, np.full(3, -1.0))  # until -3 < 2
    text = DESCENT.replace('= "x_next[', '= "step = 0.5 * min(x[i]); steps = 2 * step; x_next[')
    (tmp_path / "job.toml").write_text(text.replace("WHAT", "").replace("<", "< -"))
    job = einmpi.load(tmp_path / "job.toml")
    expected = np.ones(3)
    for _ in range(4):
        expected = expected - 0.5 * expected.min() * expected
    for found in (einmpi.run(job), einmpi.reference(job)):
        np.testing.assert_allclose(np.asarray(found["x"]), expected, rtol=1e-15)


@pytest.mark.parametrize("name", ["step", "rows", "epoch"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_inputs_of_python_that_would_be_replaced(name, ranks):
    """They were, or ended with an AttributeError."""
    text = f"y[i] = x[i] + {name} + sum(X[k])\nnext = {name} + 1.0"
    numbers = einmpi.program(text, x=(3,), X=(2,), **{name: ()})
    text = f"y[i] = x[i] + {name}[i] + sum(X[k])"
    vectors = einmpi.program(text, x=(3,), X=(2,), **{name: (3,)})
    inputs = {"x": np.zeros(3), "X": np.ones(4)}

    def on_rank(comm):
        keys = {"comm": comm, "batch": ["X"], "epochs": 1}
        with pytest.raises(InputError, match=f"inputs: {name} is given, but in a loop it is a num"):
            einmpi.loop(numbers, {**inputs, name: 0.5}, carry={"x": "y"}, **keys)
        message = f"loop: in a loop, {name} is a number of each step; expected another name"
        with pytest.raises(InputError, match=message):
            einmpi.loop(numbers, inputs, carry={"x": "y", name: "next"}, **keys)
        with pytest.raises(InputError, match=message):
            einmpi.loop(vectors, {**inputs, name: np.ones(3)}, carry={"x": "y"}, **keys)
        return einmpi.loop(numbers, inputs, carry={"x": "y"}, **keys).outputs["x"].gather()

    expected = {"step": 5.0, "rows": 8.0, "epoch": 4.0}[name]
    for found in run_threads(ranks, on_rank):
        np.testing.assert_array_equal(found, np.full(3, expected))


NUMBERS_IN_BRACKETS = '''
program = """
total_next = total + sum(x[step,i]) + 100 * max(x[place,j]) + sum(y[rows-1,i]) + x[epoch,0]
"""
parameters.place = 4
[inputs]
x = { shape = [6, 5], random = "uniform", seed = 1 }
y = { shape = [8, 3], random = "uniform", seed = 2, batch = 2 }
total = { shape = [], random = "zeros" }
[loop]
epochs = 1
carry = { total = "total_next" }
'''


@pytest.mark.parametrize("ranks", [1, 3])
def test_numbers_in_brackets_are_values(tmp_path, ranks):
    """`step`, `rows`, `epoch` and parameters were new labels there, and all of x was summed."""
    (tmp_path / "job.toml").write_text(NUMBERS_IN_BRACKETS)
    job = einmpi.load(tmp_path / "job.toml")
    assert "unused" not in describe_job(job)
    inputs = {
        "x": np.random.default_rng(1).random((6, 5)),
        "y": np.random.default_rng(2).random((8, 3)),
        "total": 0.0,
    }
    x, y = inputs["x"], inputs["y"]
    wanted = sum(x[step].sum() + 100 * x[4].max() + y[2 * step + 1].sum() for step in range(4))
    wanted += 4 * x[0, 0]
    # A few sums of numbers below 1 in another order.
    assert float(einmpi.reference(job, inputs)["total"]) == pytest.approx(wanted, rel=1e-13)
    for found in run_threads(
        ranks, lambda comm: einmpi.loop(job, inputs, comm).outputs["total"].gather()
    ):
        assert float(found) == pytest.approx(wanted, rel=1e-13)


@pytest.mark.parametrize("start", ["", "step: int64\n"])
@pytest.mark.parametrize(
    "text",
    [
        "total + sum(x[step,i])",
        "total + step * max(x[i,0])",
        "total + sum[step](x[step,0])",
        "total + x[step,1]",
    ],
)
def test_programs_of_python_know_the_number_of_a_step(text, start):
    """As those of job files do: in brackets too, unless it is listed as a label."""
    x = np.arange(12.0).reshape(4, 3)
    job = einmpi.program(f"{start}total_next = {text}", x=x, total=())
    done = einmpi.loop(job, {"x": x, "total": 0.0}, carry={"total": "total_next"}, steps=3)
    wanted = {
        "total + sum(x[step,i])": x[:3].sum(),
        "total + step * max(x[i,0])": 3 * x[:, 0].max(),
        "total + sum[step](x[step,0])": 3 * x[:, 0].sum(),
        "total + x[step,1]": x[:3, 1].sum(),
    }
    assert float(done.outputs["total"]) == wanted[text]


def test_the_number_of_a_step_can_be_given_to_a_single_run():
    job = einmpi.program("y[i] = x[i] + step", x=(3,))
    found = einmpi.run(job, x=np.zeros(3), step=7)["y"].gather()
    assert found.tolist() == [7, 7, 7]
    # Outside of loops a name in brackets alone is a label.
    assert einmpi.run("n = sum(x[rows,i])", x=np.ones((2, 3)))["n"].gather() == 6


@pytest.mark.parametrize("ranks", [1, 3])
def test_programs_of_python_know_the_numbers_of_a_batch(ranks):
    x = np.arange(10.0)
    job = einmpi.program(
        "total_next = total + sum(where(i < rows, x[i], 0.0)) * (epoch + 1)", x=(4,), total=()
    )
    given = {"carry": {"total": "total_next"}, "batch": ["x"], "epochs": 2, "last": "pad"}
    for found in run_threads(
        ranks, lambda comm: einmpi.loop(job, {"x": x, "total": 0.0}, comm, **given)
    ):
        assert found.steps == 6 and float(found.outputs["total"]) == 3 * x.sum()


def test_trained_programs_of_python_know_the_number_of_a_step():
    """The gradient is 1 + step; three steps with rate 1 subtract 1 + 2 + 3."""
    job = einmpi.program("loss = w * (1 + step)", w=())
    given = {"loss": "loss", "parameters": ["w"], "steps": 3}
    done = einmpi.train(job, {"w": 0.0}, optimizer={"name": "sgd", "rate": 1.0}, **given)
    assert float(done.outputs["w"]) == -6


def test_integers_of_numpy():
    job = einmpi.program("y[i] = 2 * x[i]", x=(3,))
    done = einmpi.loop(job, {"x": np.ones(3)}, carry={"x": "y"}, steps=np.int64(3))
    assert done.steps == 3 and done.outputs["x"].gather().tolist() == [8, 8, 8]
    assert einmpi.plan(job, ranks=np.int32(2)).ranks == 2
    with pytest.raises(InputError, match="expected"):
        einmpi.loop(job, {"x": np.ones(3)}, carry={"x": "y"}, steps=True)


def test_roles_of_labels_that_only_steps_have():
    """What is computed once need not have the labels of a strategy: this was refused."""
    text = "factor = a * 2; y[i] = x[i] * factor; s[j] = y[j] + c[j]"
    job = einmpi.program(text, x=(8,), c=(8,), a=())
    job = replace(job, roles={"batch": ("i",)})
    program = StepProgram(job.written, job.sizes, job.inputs)
    loop = make_loop(program, lambda *_: "loop", 3, {"x": "y"})
    plan = plan_loop(replace(job, loop=loop), 2, options_of(job, strategy="data"), {})
    assert plan.loop.once.graph["factor"].bound == ()
    assert plan.parts("y") == {"i": 2}
    job = replace(job, roles={"batch": ("k",)})
    with pytest.raises(einmpi.InputError, match="role batch names the label k, which no vertex"):
        plan_loop(replace(job, loop=loop), 2, options_of(job, strategy="data"), {})


SUMS = "0.3 * (f[i,j] + u[i,j] + where(i>=1, u[i-1,j], 0) + where(j>=1, u[i,j-1], 0))"
AROUND_STENCILS = {
    "given": ("", SUMS),
    "once": ("h[i,j] = exp(f[i,j])\n", SUMS.replace("f[i,j]", "h[i,j]")),
    "transposed": (
        "h[i,j] = f[i,j] + 1\ng[i,j] = h[j,i]\n",
        SUMS.replace("f[i,j]", "h[i,j] + g[i,j]"),
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("ranks", [4, 6])
@pytest.mark.parametrize("parts", [None, "last"])
@pytest.mark.parametrize("name", AROUND_STENCILS)
def test_stencils_of_tensors_that_lie_in_other_orders(name, parts, ranks):
    """Columns that are cut by the first axis cannot stay: where steps begin with the last one."""
    n = 24
    u, f = RNG.normal(size=(2, n, n))
    once, sums = AROUND_STENCILS[name]
    job = einmpi.program(f"{once}v[i:{n},j:{n}] = {sums}", u=(n, n), f=(n, n))
    alone = einmpi.program(f"v[i:{n},j:{n}] = {SUMS.replace('f[i,j] + ', '')}", u=(n, n))
    stencil = einmpi.plan(alone, ranks)
    in_blocks = Layout(stencil.mesh, (n, n), stencil.layouts["u"], (), stencil.orders_of("u"))
    assert in_blocks.orders == (0, -1)

    def on_rank(comm):
        program = StepProgram(job.written, job.sizes, job.inputs)
        checked = make_loop(program, lambda *_: "loop", 3, {"u": "v"})
        looped = replace(job, loop=checked)
        arrays = {
            "u": einmpi.DistArray.from_global(u, comm).redistribute(in_blocks),
            "f": einmpi.DistArray.from_global(f, comm, parts=parts and (2, ranks // 2)),
        }
        layouts = {name: array.layout for name, array in arrays.items()}
        run = LoopRun(looped, comm, options_of(job))
        before = comm.received
        run.prepare(arrays)
        at_first = comm.received - before
        result = run.run()
        planned = plan_loop(looped, ranks, options_of(job), layouts)
        assert planned.digest == run.plan.digest
        assert planned.loop.arriving == run.plan.loop.arriving
        if planned.loop.once is not None:
            assert planned.loop.once.digest == run.plan.loop.once.digest
        return result.outputs["u"].gather(), at_first, run.plan

    results = run_threads(ranks, on_rank)
    plan = results[0][2]
    assert sum(at_first for _, at_first, _ in results) == plan.cost_once.nbytes
    expected = u
    for _ in range(3):
        expected = einmpi.reference(job, {"u": expected, "f": f})["v"]
    # Sums of a few numbers around 1.
    np.testing.assert_allclose(results[0][0], expected, rtol=1e-11, atol=1e-11)
