"""[train] in job files: what is refused, and with what else it can be combined."""

import numpy as np
import pytest
from job_text import error, read

import einmpi

JOB = """
program = "loss = sum[i]((x[i] - a)**2); twice[i] = 2 * x[i]"
[parameters]
a = 2.0
[inputs]
x = { shape = [3], random = "ones" }
k = { shape = [3], random = "ones", dtype = "int64" }
[loop]
steps = 3
"""
TRAIN = """
[train]
loss = "loss"
parameters = ["x"]
optimizer = { name = "sgd", rate = 0.1 }
"""


def changed(old, new):
    assert old in JOB + TRAIN
    return (JOB + TRAIN).replace(old, new)


@pytest.mark.parametrize(
    "text, message",
    [
        (changed('"sgd"', '"sdg"'), "job.toml:14:15: unknown optimizer 'sdg'; expected one of sgd"),
        (changed('name = "sgd", ', ""), "job.toml:14:1: the optimizer has no name; expected one"),
        (changed('"sgd"', "3"), "job.toml:14:15: the name of the optimizer is 3; expected one of"),
        (
            changed("rate =", "rat ="),
            "job.toml:14:29: sgd has no option 'rat'; expected one of nam",
        ),
        (
            changed("0.1", "-0.1"),
            "job.toml:14:29: rate is -0.1; expected a number above 0, or an e",
        ),
        (changed("0.1", "true"), "job.toml:14:29: rate is true; expected a number above 0, or an"),
        (changed("0.1", '"y"'), "job.toml:14:37: unknown name 'y'; expected one of step, a, l"),
        (changed("0.1", '"0.1 +"'), "job.toml:14:42: syntax error: invalid syntax; expected one"),
        (changed("0.1", '"a = 3"'), "job.toml:14:29: 'a = 3' is not a rate; expected a number, or"),
        (changed("0.1", '"a < 3"'), "job.toml:14:29: the rate 'a < 3' is bool; expected a real nu"),
        (changed("0.1", "0.1, decay = -1"), "job.toml:14:41: decay is -1; expected a number of at"),
        (
            changed("0.1", "0.1, decay = inf"),
            "job.toml:14:41: decay is inf; expected a number of at",
        ),
        (changed("0.1", "0.1, clip = 0"), "job.toml:14:41: clip is 0; expected a number above 0"),
        (
            changed('"sgd"', '"adam", beta1 = 1'),
            "job.toml:14:30: beta1 is 1; expected a number from 0 to below 1",
        ),
        (
            changed('"sgd"', '"adam", eps = "x"'),
            "job.toml:14:30: eps is 'x'; expected a number of at least 0",
        ),
        (
            changed('{ name = "sgd", rate = 0.1 }', "5"),
            "job.toml:14:1: the optimizer is 5; expected",
        ),
        (
            changed('optimizer = { name = "sgd", rate = 0.1 }', ""),
            "job.toml:11:2: there is no optimizer; expected a table such as { name",
        ),
        (changed('loss = "loss"', ""), "job.toml:11:2: there is no loss; expected the name of a"),
        (changed('"loss"', '"los"'), "job.toml:12:1: the loss los is not computed; expected"),
        (
            changed('"loss"', '"twice"'),
            "job.toml:12:1: the loss twice has 1 dimension; expected a real number",
        ),
        (
            changed('parameters = ["x"]', ""),
            "job.toml:11:2: there are no parameters to train; expected a list of inputs such",
        ),
        (
            changed('["x"]', "[]"),
            "job.toml:13:1: there are no parameters to train; expected a list",
        ),
        (changed('["x"]', "[1]"), "job.toml:13:15: parameters has 1; expected a list of inputs"),
        (changed('["x"]', '["x", "x"]'), "job.toml:13:20: x is in parameters twice; expected each"),
        (
            changed('["x"]', '["y"]'),
            "job.toml:13:15: y is no input of the program; expected one of",
        ),
        (changed('["x"]', '"x"'), "job.toml:13:1: parameters is 'x'; expected a list"),
        (
            changed("steps = 3", 'steps = 3\ncarry = { x = "twice" }'),
            "job.toml:14:15: x is trained, but the loop carries it already; expected no entry for",
        ),
        (
            changed('random = "ones" }\nk', 'random = "ones", batch = 2 }\nk'),
            "job.toml:13:15: x is trained, but comes in batches; expected an input that a step can",
        ),
        (
            changed('"loss = ', '"x_next[i] = x[i]; loss = '),
            "job.toml:11:2: x_next is in the program, but training writes it out; expected another",
        ),
        (
            changed("twice[i] = 2", "step = 1.0; twice[i] = step"),
            "job.toml:11:2: step is not the number of the step in this program, and training",
        ),
        (
            changed("x[i] - a", "x[i] - a + k[i]").replace('["x"]', '["k"]'),
            "job.toml:13:15: k is int64; expected a parameter of floating-point or complex numbers",
        ),
        (
            changed('"ones" }\nk', '"ones", dtype = "complex64" }\nk')
            .replace("(x[i] - a)", "abs(x[i] - a)")
            .replace("sgd", "adam"),
            "job.toml:13:15: x is complex64, and adam takes real parameters; expected a parameter",
        ),
        (
            changed("(x[i] - a)**2", "sign(x[i])"),
            "job.toml:11:1: loss does not depend on x by anything that has a derivative; expe",
        ),
        (
            changed("[loop]\nsteps = 3\n", ""),
            "job.toml:9:2: there is a [train], but no step is rep",
        ),
        (
            changed("[loop]\n", '[[loop]]\nprogram = "y = 1.0"\n').replace("program = ", "#", 1),
            "job.toml:12:2: there is a [train] besides several loops; expected [loop.train]",
        ),
        (
            changed("loss =", "los ="),
            "job.toml:12:1: unknown key 'los' in train; expected one of los",
        ),
        (
            JOB + TRAIN + "accumulate = 0\n",
            "job.toml:15:1: accumulate is 0; expected an integer from",
        ),
        (
            JOB + TRAIN + 'accumulate = "2"\n',
            "job.toml:15:1: accumulate is '2'; expected an integer",
        ),
        (JOB, "job.toml:8:2: nothing is carried; expected carry = { INPUT"),
    ],
)
def test_refused(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    assert error(text).startswith(message)


def test_rate_of_a_tensor_or_a_parameter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = read(changed("0.1", '"a"'))
    assert job.loop.written_out[0] == "train_rate = a"
    job = read(changed("0.1", '"loss / 10"'))
    assert job.loop.written_out[0] == "train_rate = loss / 10"
    text = changed("0.1", '"r"').replace(
        "[inputs]", '[inputs]\nr = { shape = [], random = "ones" }'
    )
    assert "r" in read(text).graph.by_name


def test_a_row_of_each_step(tmp_path):
    """The number of a step is no label of what is trained, although x[step,i] is read first."""
    text = """
program = "loss = sum((x[step,i] - 1)**2) + 0 * sum(x[j,i])"
[inputs]
x = { shape = [3, 2], random = "zeros" }
[train]
loss = "loss"
parameters = ["x"]
optimizer = { name = "sgd", rate = 0.25 }
[loop]
steps = 2
"""
    (tmp_path / "job.toml").write_text(text)
    found = einmpi.run(einmpi.load(tmp_path / "job.toml"))["x"].gather()
    np.testing.assert_array_equal(found, [[0.5, 0.5], [0.5, 0.5], [0, 0]])
    job = einmpi.program("step: int64\nloss = sum((x[step,i] - 1)**2)", x=(3, 2))
    done = einmpi.train(
        job,
        {"x": np.zeros((3, 2))},
        loss="loss",
        parameters=["x"],
        optimizer={"name": "sgd", "rate": 0.25},
        steps=2,
    )
    np.testing.assert_array_equal(done.outputs["x"].gather(), found)


def test_new_labels_where_the_program_has_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = changed("(x[i] - a)**2", "(x[2 - i] - a)**2")
    text = text.replace("2 * x[i]", "x[i+0]")
    job = read(text)
    assert job.loop.written_out[0] == "x_grad[i_1] = grad(loss, x[i_1])"


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_parameters(tmp_path, monkeypatch, dtype):
    monkeypatch.chdir(tmp_path)
    text = changed('"ones" }\nk', f'"ones", dtype = "{dtype}" }}\nk')
    text = text.replace("(x[i] - a)", "abs(x[i] - a * 1j)").replace("0.1", '"0.1", clip = 2')
    job = read(text)
    found = einmpi.loop(job)
    x = np.ones(3, dtype)
    for _ in range(3):
        gradient = 2 * (x - 2j)
        norm = np.sqrt(np.sum(np.abs(gradient) ** 2))
        x = x - 0.1 * min(1, 2 / (norm + 1e-6)) * gradient
    tolerance = 1e-5 if dtype == "complex64" else 1e-12
    np.testing.assert_allclose(found.outputs["x"].gather(), x, rtol=tolerance)
