"""Training in half precision: what is rounded, the scale of the loss, steps that are skipped."""

import numpy as np
import pytest
from training_jobs import NAMES, run_on, write_job

import einmpi

ADAM = '{ name = "adam", rate = 0.02 }'


def load(folder, precision, optimizer=ADAM, more="", **options):
    train = f'precision = "{precision}"\n{more}'
    return einmpi.load(write_job(folder, optimizer, train=train, dtype="float32", **options))


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_what_is_rounded(tmp_path, precision):
    job = load(tmp_path, precision)
    dtypes = {vertex.name: vertex.dtype for vertex in job.written.vertices}
    for name in ("H", "X_" + precision, "W1_" + precision):
        assert dtypes[name] == precision
    for name in NAMES:
        for tensor in (name, f"{name}_m", f"{name}_v", f"{name}_grad", f"{name}_next"):
            assert dtypes[tensor] == "float32"
    assert dtypes["loss"] == "float32"
    # Nothing with dimensions is wider than the parameters.
    assert "float64" not in {vertex.dtype for vertex in job.graph.vertices if vertex.bound}


@pytest.mark.parametrize(("precision", "ranks"), [("bfloat16", 1), ("bfloat16", 3), ("float16", 2)])
def test_as_precise_as_the_dtype(tmp_path, precision, ranks):
    more = "scale = 1024" if precision == "float16" else ""
    found, outputs, run = run_on(ranks, load(tmp_path, precision, more=more))
    exact, exact_outputs, _ = run_on(1, einmpi.load(write_job(tmp_path, ADAM, dtype="float32")))
    tolerance = 0.05 if precision == "bfloat16" else 0.01
    np.testing.assert_allclose(found.history["loss"], exact.history["loss"], rtol=tolerance)
    assert not np.array_equal(found.history["loss"], exact.history["loss"])
    for name in NAMES:
        np.testing.assert_allclose(outputs[name], exact_outputs[name], atol=0.05)
    state = {f"{name}_{suffix}" for name in NAMES for suffix in "mv"}
    assert set(run.plan.in_place) == {*NAMES, *state}


def test_float16_against_numpy(tmp_path):
    """A linear fit, every rounding written out; the loss and all that follows is in float32."""
    rng = np.random.default_rng(3)
    X = rng.normal(size=(16, 6)).astype("float32")
    y = rng.normal(size=16).astype("float32")
    np.save(tmp_path / "X.npy", X)
    np.save(tmp_path / "y.npy", y)
    (tmp_path / "job.toml").write_text(
        """
program = "P[b] = sum(X[b,i] * w[i]); loss = mean[b]((P[b] - y[b])**2)"
inputs.X = "X.npy"
inputs.y = "y.npy"
inputs.w = { shape = [6], random = "ones", dtype = "float32" }
[loop]
steps = 20
record = ["loss", "train_scale"]
[train]
loss = "loss"
parameters = ["w"]
optimizer = { name = "sgd", rate = 0.25 }
precision = "float16"
scale = 1024
"""
    )
    found, outputs, _ = run_on(1, einmpi.load(tmp_path / "job.toml"))
    X16 = X.astype("float16")
    w = np.ones(6, "float32")
    losses = []
    for _ in range(20):
        product = X16.astype("float64") @ w.astype("float16").astype("float64")
        residual = product.astype("float16").astype("float32") - y
        losses.append(np.mean(residual**2, dtype="float32"))
        d_product = (residual * np.float32(2 * 1024 / 16)).astype("float16")
        d_w = (d_product.astype("float64") @ X16.astype("float64")).astype("float16")
        w = w - np.float32(0.25) * (d_w.astype("float32") / np.float32(1024))
    np.testing.assert_allclose(found.history["loss"], losses, rtol=2e-3)
    np.testing.assert_allclose(outputs["w"], w, rtol=2e-3, atol=1e-3)
    np.testing.assert_array_equal(found.history["train_scale"], 1024)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 1), (3, 2)])
def test_steps_that_overflow_are_skipped(tmp_path, ranks, accumulate):
    """The scale starts too high, and is doubled too often: overflows come and go."""
    loop = "steps = 40"
    more = f"scale = 2e7\ngrowth = 3\naccumulate = {accumulate}\n"
    path = write_job(
        tmp_path, ADAM, loop=loop, train=f'precision = "float16"\n{more}', dtype="float32"
    )
    names = ["loss", "train_scale", "train_finite", "train_changes", "size_1"]
    text = path.read_text().replace('record = ["loss"]', f"record = {names!r}".replace("'", '"'))
    text = text.replace("'''\n[inputs]", "size_1 = sum[i,h](abs(W1[i,h]))\n'''\n[inputs]")
    path.write_text(text)
    found, outputs, _ = run_on(ranks, einmpi.load(path))
    history = found.history
    finite = history["train_finite"]
    scale = 2e7
    good = 0
    updates = 0
    for step in range(40):
        assert history["train_scale"][step] == scale
        is_due = step % accumulate == accumulate - 1
        assert history["train_changes"][step] == (is_due and finite[step])
        if step + 1 < 40:
            has_changed = history["size_1"][step + 1] != history["size_1"][step]
            assert has_changed == history["train_changes"][step]
        if not is_due:
            continue
        if finite[step]:
            updates += 1
            good += 1
            if good == 3:
                scale *= 2
                good = 0
        else:
            scale /= 2
            good = 0
    assert 2 < updates < 40 // accumulate  # both happen
    assert np.isfinite(outputs["W1"]).all() and np.isfinite(outputs["W1_v"]).all()
    assert outputs["train_updates"] == updates
    assert history["loss"][-1] < history["loss"][0]


def test_statements_that_change(tmp_path):
    """Numbers, casts that the program writes, other tensors and indices keep their precision."""
    (tmp_path / "job.toml").write_text(
        """
dtype = "float32"
program = '''
scale    = sqrt(sum(W[i,j]**2)); N[b,i] = float32(X[b,i] / 2)
Y[b,j]   = sum(N[b,i] * W[i,j]) / scale * factor

mask[b:4] = where(b < 3, 1.0, 0.5)
picked[b] = Y[b,k[b]] * mask[b] + bias
loss     = mean[b](picked[b]**2)
best[b]  = max[j](Y[b,j])
'''
parameters.factor = 2.0
[inputs]
X = { shape = [4, 3], random = "normal" }
W = { shape = [3, 2], random = "normal" }
k = { shape = [4], random = "zeros", dtype = "int64" }
bias = { shape = [], random = "ones" }
[loop]
steps = 2
[train]
loss = "loss"
parameters = ["W", "bias"]
optimizer = { name = "sgd", rate = 0.1 }
precision = "bfloat16"
"""
    )
    job = einmpi.load(tmp_path / "job.toml")
    assert job.loop.written_out[:7] == (
        "Y[b,j] = sum(bfloat16(N[b,i]) * W_bfloat16[i,j]) / bfloat16(scale) * factor",
        "mask[b:4] = bfloat16(where(b < 3, 1.0, 0.5))",
        "picked[b] = Y[b,k[b]] * mask[b] + bfloat16(bias)",
        "loss = mean[b](float64(picked[b]) ** 2)",
        "best[b] = max[j](float32(Y[b,j]))",
        "W_bfloat16[i,j] = bfloat16(W[i,j])",
        "W_grad[i,j] = grad(loss, W[i,j])",
    )
    # Places are those of the file.
    place = str(tmp_path / "job.toml")
    assert job.written["picked"].places == (f"{place}:8:1",)
    assert job.written["Y"].dtype == "bfloat16" and job.written["best"].dtype == "float32"
    run_on(2, job)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_program_with_a_gradient_of_its_own(precision):
    """A penalty on the slope: by the parameter itself, and by a tensor that is rounded."""
    rng = np.random.default_rng(1)
    X = rng.normal(size=(6, 3))
    w = rng.normal(size=3)
    job = einmpi.program(
        """
        P[b]  = sum(X[b,i] * w[i])
        fit   = sum(P[b]**2) + sum(w[i]**2)
        by_w[i] = grad(fit, w[i])
        by_P[b] = grad(fit, P[b])
        loss  = sum(by_w[i]**2) + sum(by_P[b]**2)
        """,
        X=X,
        w=w,
    )
    found = einmpi.train(
        job,
        {"X": X, "w": w},
        loss="loss",
        parameters=["w"],
        optimizer={"name": "sgd", "rate": 1e-4},
        precision=precision,
        steps=30,
        record=["loss", "train_scale"] if precision == "float16" else ["loss"],
    )
    hessian = 2 * X.T @ X + 2 * np.eye(3)
    changed = w.copy()
    skipped = 0
    if precision == "float16":
        skipped = np.count_nonzero(np.diff(found.history["train_scale"]) < 0)
    for _ in range(30 - skipped):
        changed -= 1e-4 * (2 * hessian @ hessian @ changed + 8 * X.T @ X @ changed)
    np.testing.assert_allclose(found.outputs["w"].gather(), changed, rtol=0.05, atol=0.02)
    assert not np.allclose(changed, w, rtol=0.05, atol=0.02)
