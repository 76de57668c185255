"""The optimisers in numpy, written from their papers and torch's documentation, and a small model.

The model is a least-squares fit with tanh, whose gradients are written by hand.
"""

import numpy as np


def loss_and_gradients(X, y, W1, b1, w2):
    """Return mean((tanh(X W1 + b1) w2 - y)²) and its gradients by W1, b1 and w2."""
    H = np.tanh(X @ W1 + b1)
    residual = H @ w2 - y
    loss = np.mean(residual**2)
    d_prediction = 2 * residual / len(y)
    d_w2 = H.T @ d_prediction
    d_sum = np.outer(d_prediction, w2) * (1 - H**2)
    return loss, [X.T @ d_sum, d_sum.sum(0), d_w2]


def clipped(gradients, limit):
    norm = np.sqrt(sum(np.sum(np.abs(g) ** 2) for g in gradients))
    factor = min(1.0, limit / (norm + 1e-6))
    return [factor * g for g in gradients]


class Sgd:
    def __init__(self, rate, momentum=0.0, nesterov=False, decay=0.0):
        self.momentum = momentum
        self.nesterov = nesterov
        self.decay = decay
        self.buffers = {}

    def step(self, number, parameters, gradients, rate):
        for k, (w, g) in enumerate(zip(parameters, gradients, strict=True)):
            g = g + self.decay * w
            if self.momentum:
                if k not in self.buffers:
                    self.buffers[k] = g.copy()
                else:
                    self.buffers[k] = self.momentum * self.buffers[k] + g
                g = g + self.momentum * self.buffers[k] if self.nesterov else self.buffers[k]
            w -= rate * g


class Adam:
    def __init__(self, rate, beta1=0.9, beta2=0.999, eps=1e-8, decay=0.0, decoupled=False):
        self.betas = beta1, beta2
        self.eps = eps
        self.decay = decay
        self.decoupled = decoupled
        self.moments = {}

    def step(self, number, parameters, gradients, rate):
        beta1, beta2 = self.betas
        t = number + 1
        for k, (w, g) in enumerate(zip(parameters, gradients, strict=True)):
            m, v = self.moments.get(k, (np.zeros_like(w), np.zeros_like(w)))
            if self.decoupled:
                w *= 1 - rate * self.decay
            else:
                g = g + self.decay * w
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g * g
            self.moments[k] = m, v
            m_hat = m / (1 - beta1**t)
            v_hat = v / (1 - beta2**t)
            w -= rate * m_hat / (np.sqrt(v_hat) + self.eps)


class Adagrad:
    def __init__(self, rate, rate_decay=0.0, initial=0.0, eps=1e-10, decay=0.0):
        self.rate_decay = rate_decay
        self.initial = initial
        self.eps = eps
        self.decay = decay
        self.sums = {}

    def step(self, number, parameters, gradients, rate):
        for k, (w, g) in enumerate(zip(parameters, gradients, strict=True)):
            g = g + self.decay * w
            total = self.sums.get(k, np.full_like(w, self.initial)) + g * g
            self.sums[k] = total
            w -= rate / (1 + number * self.rate_decay) * g / (np.sqrt(total) + self.eps)


class Lion:
    def __init__(self, rate, beta1=0.9, beta2=0.99, decay=0.0):
        self.betas = beta1, beta2
        self.decay = decay
        self.means = {}

    def step(self, number, parameters, gradients, rate):
        beta1, beta2 = self.betas
        for k, (w, g) in enumerate(zip(parameters, gradients, strict=True)):
            m = self.means.get(k, np.zeros_like(w))
            w *= 1 - rate * self.decay
            w -= rate * np.sign(beta1 * m + (1 - beta1) * g)
            self.means[k] = beta2 * m + (1 - beta2) * g


class Rmsprop:
    def __init__(self, rate, alpha=0.99, eps=1e-8, decay=0.0):
        self.alpha = alpha
        self.eps = eps
        self.decay = decay
        self.means = {}

    def step(self, number, parameters, gradients, rate):
        for k, (w, g) in enumerate(zip(parameters, gradients, strict=True)):
            g = g + self.decay * w
            v = self.alpha * self.means.get(k, np.zeros_like(w)) + (1 - self.alpha) * g * g
            self.means[k] = v
            w -= rate * g / (np.sqrt(v) + self.eps)


class Adafactor:
    """As torch's, with the machine precision of float64 where torch's eps has None."""

    def __init__(self, rate, beta2_decay=-0.8, eps=1e-3, threshold=1.0, decay=0.0):
        self.beta2_decay = beta2_decay
        self.eps = eps
        self.threshold = threshold
        self.decay = decay
        self.means = {}

    def step(self, number, parameters, gradients, rate):
        weight = (number + 1) ** self.beta2_decay
        machine = np.finfo(np.float64).eps
        for k, (w, g) in enumerate(zip(parameters, gradients, strict=True)):
            rho = min(rate, 1 / np.sqrt(number + 1))
            alpha = rho * max(self.eps, np.sqrt(np.mean(w**2)))
            w *= 1 - rate * self.decay
            if w.ndim > 1:
                rows, columns = self.means.get(
                    k, (np.zeros((*w.shape[:-1], 1)), np.zeros((*w.shape[:-2], 1, w.shape[-1])))
                )
                rows = rows + weight * ((g * g).mean(-1, keepdims=True) - rows)
                columns = columns + weight * ((g * g).mean(-2, keepdims=True) - columns)
                self.means[k] = rows, columns
                v = rows @ columns / np.maximum(rows.mean(-2, keepdims=True), machine)
            else:
                v = self.means.get(k, np.zeros_like(w))
                v = v + weight * (g * g - v)
                self.means[k] = v
            u = g / np.sqrt(np.maximum(v, machine**2))
            w -= alpha / max(1, np.sqrt(np.mean(u**2)) / self.threshold) * u


class Muon:
    """Matrices as torch's Muon, but orthogonalised in float64; vectors by AdamW."""

    def __init__(self, rate, momentum=0.95, decay=0.1, **adam):
        self.momentum = momentum
        self.decay = decay
        self.means = {}
        self.adam = Adam(rate, decay=decay, decoupled=True, **adam)

    def step(self, number, parameters, gradients, rate):
        vectors = [k for k, w in enumerate(parameters) if w.ndim < 2]
        own = [parameters[k] for k in vectors]
        self.adam.step(number, own, [gradients[k] for k in vectors], rate)
        for k, (w, g) in enumerate(zip(parameters, gradients, strict=True)):
            if w.ndim < 2:
                continue
            m = self.momentum * self.means.get(k, 0.0) + (1 - self.momentum) * g
            self.means[k] = m
            x = (1 - self.momentum) * g + self.momentum * m
            is_tall = x.shape[-2] > x.shape[-1]
            if is_tall:
                x = x.swapaxes(-1, -2)
            norm = np.sqrt(np.sum(x**2, axis=(-1, -2), keepdims=True))
            x = x / np.maximum(norm, 1e-7)
            for _ in range(5):
                gram = x @ x.swapaxes(-1, -2)
                x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
            if is_tall:
                x = x.swapaxes(-1, -2)
            w *= 1 - rate * self.decay
            w -= rate * np.sqrt(max(1.0, w.shape[-2] / w.shape[-1])) * x


def make(name, rate, **options):
    """Return an optimiser by einmpi's name for it."""
    if name in ("momentum", "nesterov"):
        options.setdefault("momentum", 0.9)
        return Sgd(rate, nesterov=name == "nesterov", **options)
    if name in ("adam", "adamw"):
        if name == "adamw":
            options.setdefault("decay", 0.01)
        return Adam(rate, decoupled=name == "adamw", **options)
    others = {
        "sgd": Sgd,
        "adagrad": Adagrad,
        "lion": Lion,
        "rmsprop": Rmsprop,
        "adafactor": Adafactor,
        "muon": Muon,
    }
    return others[name](rate, **options)
