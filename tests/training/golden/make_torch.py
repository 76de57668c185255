"""Write torch.json: 20 steps of torch's optimisers in float64, on the model of training_jobs.py.

python tests/training/golden/make_torch.py > tests/training/golden/torch.json, with torch installed
"""

import json

import numpy as np
import torch

STEPS = 20
BATCH = 8
# name → the optimiser in einmpi, its options there, and how to make it in torch.
CASES = {
    "sgd": ("sgd", {}, torch.optim.SGD, {}),
    "sgd, decay": ("sgd", {"decay": 0.1}, torch.optim.SGD, {"weight_decay": 0.1}),
    "momentum": (
        "momentum",
        {"decay": 0.05},
        torch.optim.SGD,
        {"momentum": 0.9, "weight_decay": 0.05},
    ),
    "nesterov": (
        "nesterov",
        {"momentum": 0.7},
        torch.optim.SGD,
        {"momentum": 0.7, "nesterov": True},
    ),
    "adam": ("adam", {}, torch.optim.Adam, {}),
    "adam, decay": ("adam", {"decay": 0.1}, torch.optim.Adam, {"weight_decay": 0.1}),
    "adamw": ("adamw", {}, torch.optim.AdamW, {}),
    "adamw, options": (
        "adamw",
        {"beta1": 0.8, "beta2": 0.95, "eps": 1e-4, "decay": 0.3, "clip": 0.5},
        torch.optim.AdamW,
        {"betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.3},
    ),
    "adagrad": ("adagrad", {}, torch.optim.Adagrad, {}),
    "adagrad, options": (
        "adagrad",
        {"rate_decay": 0.1, "initial": 0.5, "eps": 1e-3, "decay": 0.1},
        torch.optim.Adagrad,
        {"lr_decay": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-3, "weight_decay": 0.1},
    ),
}
RATE = 0.02


def trained(X, y, first, make, arguments, clip):
    """Return the losses and the last parameters."""
    W1, b1, w2 = (torch.tensor(values, requires_grad=True) for values in first)
    optimizer = make([W1, b1, w2], lr=RATE, **arguments)
    losses = []
    for step in range(STEPS):
        start = step * BATCH % len(y)
        rows = slice(start, start + BATCH)
        optimizer.zero_grad()
        residual = torch.tanh(X[rows] @ W1 + b1) @ w2 - y[rows]
        loss = (residual**2).mean()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_([W1, b1, w2], clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, [tensor.detach().tolist() for tensor in (W1, b1, w2)]


def main():
    rng = np.random.default_rng(20)
    X = rng.normal(size=(24, 5))
    y = np.sin(X @ np.arange(1.0, 6))
    first = [rng.normal(size=(5, 4)), np.full(4, 0.1), rng.normal(size=4)]
    found = {
        "torch": torch.__version__,
        "rate": RATE,
        "X": X.tolist(),
        "y": y.tolist(),
        "first": [values.tolist() for values in first],
        "cases": {},
    }
    for case, (name, options, make, arguments) in CASES.items():
        losses, last = trained(
            torch.tensor(X), torch.tensor(y), first, make, arguments, options.get("clip")
        )
        found["cases"][case] = {"name": name, "options": options, "losses": losses, "last": last}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
