"""Recurrent networks against those of torch: values, and gradients through time."""

import numpy as np
import pytest
from distributed import run_on_threads

import einmpi

torch = pytest.importorskip("torch")

RANKS = (1, 2, 3, 4)
# Both compute in float64, with sums in different orders, over a dozen steps.
CLOSE = {"rtol": 1e-9, "atol": 1e-11}

RNN = """
before[b,t,k] = where(t > 0, h[b,t-1,k], h0[b,k])
h[b,t,k] = tanh(sum(Wx[k,j] * x[b,t,j]) + bx[k] + sum(Wh[k,l] * before[b,t,l]) + bh[k])
"""

# As in torch, the rows of the weights are those of the gates i, f, g and o, one after another.
LSTM = """
before[b,t,k] = where(t > 0, h[b,t-1,k], h0[b,k])
gate[b,t,q] = sum(Wx[q,j] * x[b,t,j]) + bx[q] + sum(Wh[q,l] * before[b,t,l]) + bh[q]
new[b,t,k:K] = sigmoid(gate[b,t,k+0]) * tanh(gate[b,t,k+2*K])
c[b,t,k:K] = sigmoid(gate[b,t,k+K]) * where(t > 0, c[b,t-1,k], c0[b,k]) + new[b,t,k]
h[b,t,k:K] = sigmoid(gate[b,t,k+3*K]) * tanh(c[b,t,k])
"""

LABELS = {"x": "a,b,c", "h0": "a,b", "c0": "a,b", "Wx": "a,b", "Wh": "a,b", "bx": "a", "bh": "a"}


def network(kind, batch=3, steps=12, width=4, features=5):
    """Return a network of torch with its inputs, which have gradients."""
    torch.manual_seed(3)
    net = kind(features, width, batch_first=True, dtype=torch.float64)
    shapes = {"x": (batch, steps, features), "h0": (batch, width)}
    if kind is torch.nn.LSTM:
        shapes["c0"] = (batch, width)
    tensors = {}
    for name, shape in shapes.items():
        tensors[name] = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    tensors |= {"Wx": net.weight_ih_l0, "Wh": net.weight_hh_l0}
    tensors |= {"bx": net.bias_ih_l0, "bh": net.bias_hh_l0}
    return net, tensors


def by_torch(kind, net, tensors, weights):
    """Return all h, and the gradients of their weighted sum of squares by all tensors."""
    start = tensors["h0"][None]
    if kind is torch.nn.LSTM:
        start = (start, tensors["c0"][None])
    h, _ = net(tensors["x"], start)
    (torch.tensor(weights) * h**2).sum().backward()
    found = {f"d{name}": tensor.grad.numpy() for name, tensor in tensors.items()}
    return {"h": h.detach().numpy(), **found}


def job_of(kind, inputs):
    text = LSTM if kind is torch.nn.LSTM else RNN
    lines = [text, "loss = sum(v[b,t,k] * h[b,t,k]**2)"]
    outputs = ["h"]
    for name in inputs:
        if name != "v":
            element = f"{name}[{LABELS[name]}]"
            lines.append(f"d{name}[{LABELS[name]}] = grad(loss, {element})")
            outputs.append(f"d{name}")
    sizes = {"K": inputs["h0"].shape[1]} if kind is torch.nn.LSTM else {}
    return einmpi.program("\n".join(lines), outputs=outputs, **inputs, **sizes)


def case_of(kind, **sizes):
    """Return the job of a network, its inputs, and what torch computes."""
    net, tensors = network(kind, **sizes)
    inputs = {name: tensor.detach().numpy().copy() for name, tensor in tensors.items()}
    shape = (*inputs["x"].shape[:2], inputs["h0"].shape[1])
    inputs["v"] = np.random.default_rng(4).normal(size=shape)
    expected = by_torch(kind, net, tensors, inputs["v"])
    return job_of(kind, inputs), inputs, expected


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", (torch.nn.RNN, torch.nn.LSTM))
def test_values_and_gradients(kind, ranks):
    job, inputs, expected = case_of(kind)
    found = run_on_threads(job, ranks, inputs).outputs
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, **CLOSE, err_msg=name)


@pytest.mark.parametrize("ranks", (1, 4))
@pytest.mark.parametrize("kind, names", ((torch.nn.RNN, ["before"]), (torch.nn.LSTM, ["gate"])))
def test_gradients_with_tensors_that_are_computed_again(kind, names, ranks):
    job, inputs, expected = case_of(kind, steps=20)
    found = run_on_threads(job, ranks, inputs, recompute=names).outputs
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, **CLOSE, err_msg=name)


@pytest.mark.parametrize("kind", (torch.nn.RNN, torch.nn.LSTM))
def test_a_single_step(kind):
    job, inputs, expected = case_of(kind, steps=1)
    found = run_on_threads(job, 2, inputs).outputs
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, **CLOSE, err_msg=name)
