"""Programs with a loss, and inputs for them: what is differentiated in several tests."""

from __future__ import annotations

import numpy as np

Z = "complex"  # a shape that begins with it is that of complex numbers
INT = {
    "tok": np.array([[0, 3, 3], [5, 1, 3]]),
    "dst": np.array([2, 0, 2, 2, 1, 7, -1]),
    "src": np.array([1, 1, 0, 3, 4, 2, 1]),
    "y": np.array([1, 0, 3, 3]),
    "column": np.array([4, 1, 1, 0, 3, 2, 4, 4, 0, 2, 1, 3]),
    "flag": np.array([True, False, True, True, False]),
}

# name: (program, {input: shape, or an array}); all float and complex inputs are differentiated by.
PROGRAMS = {
    # ---- products and sums
    "square": ("loss = sum(x[i]**2)", {"x": (5,)}),
    "quadratic": ("loss = sum(x[i] * A[i,j] * x[j])", {"x": (5,), "A": (5, 5)}),
    "matmul": ("Y[i,k] = sum(A[i,j]*B[j,k]); loss = sum(Y[i,k]**2)", {"A": (3, 4), "B": (4, 5)}),
    "chain": (
        "loss = sum(sin(sum[j,k](A[i,j]*B[j,k]*C[k,l])))",
        {"A": (2, 3), "B": (3, 4), "C": (4, 2)},
    ),
    "transpose": ("Y[j,i] = exp(A[i,j]); loss = sum(Y[j,i] * B[j,i])", {"A": (3, 4), "B": (4, 3)}),
    "trace": ("loss = sum(A[i,i] * v[i])", {"A": (4, 4), "v": (4,)}),
    "diagonal": ("d[i] = A[i,i]; loss = sum(d[i]**3) + sum(A[i,j]**2)", {"A": (4, 4)}),
    "short_diagonal": (
        "loss = sum(where(i == k, x[k] * X[i,k] * s, 0))",
        {"x": (7,), "X": (3, 7), "s": ()},
    ),
    "trilinear": ("loss = sum(A[i,i,j] * B[j,i])", {"A": (3, 3, 4), "B": (4, 3)}),
    "outer": ("loss = sum(exp(a[i] * b[j]) * c[j])", {"a": (3,), "b": (4,), "c": (4,)}),
    "broadcast": (
        "Y[i,j:3] = a[i] + s; loss = sum(Y[i,j]**2 * c[j])",
        {"a": (4,), "s": (), "c": (3,)},
    ),
    "unused_label": ("loss = sum(sum[j:6](a[i] * s))", {"a": (4,), "s": ()}),
    "shared": ("h[i] = tanh(x[i]); loss = sum(h[i]*h[i]) + sum(exp(h[i]) * x[i])", {"x": (4,)}),
    "constant": ("loss = sum(x[i]) + 3 * sum(w[i])", {"x": (4,), "w": (4,)}),
    "mean": ("loss = mean((A[i,j] - B[i,j])**2)", {"A": (3, 4), "B": (3, 4)}),
    "nested_sums": ("loss = sum(A[i,j] * max(B[j,k])) ", {"A": (3, 4), "B": (4, 5)}),
    "scalar_chain": ("s = sum(x[i]); t = exp(s / 10); loss = t * s + t**2", {"x": (4,)}),
    # ---- functions
    "powers": ("loss = sum(abs(x[i])**1.5 + x[i]**3 + (2 + x[i]**2)**-2 + x[i]**1)", {"x": (5,)}),
    "power_of_two": ("loss = sum((1 + x[i]**2) ** w[i])", {"x": (5,), "w": (5,)}),
    "quotients": ("loss = sum(x[i] / (2 + w[i]**2) + 1 / (3 + x[i]**2))", {"x": (5,), "w": (5,)}),
    "remainder": ("loss = sum((5 * x[i]) % (1 + w[i]**2))", {"x": (5,), "w": (5,)}),
    "logs": (
        "p[i] = 1 + x[i]**2; loss = sum(log(p[i]) + log2(p[i]) * log10(p[i]) + log1p(p[i]))",
        {"x": (5,)},
    ),
    "exps": ("loss = sum(exp(x[i]) + expm1(x[i]) * x[i])", {"x": (5,)}),
    "roots": ("p[i] = 1 + x[i]**2; loss = sum(sqrt(p[i]) * rsqrt(p[i] + 1))", {"x": (5,)}),
    "trigonometry": (
        "loss = sum(sin(x[i]) * cos(w[i]) + tan(x[i] / 4) + arctan2(x[i], 3 + w[i]))",
        {"x": (5,), "w": (5,)},
    ),
    "hyperbolic": ("loss = sum(sinh(x[i]) * cosh(x[i]) + tanh(x[i]) + erf(x[i]))", {"x": (5,)}),
    "sigmoid": (
        "loss = sum(sigmoid(x[i]) * w[i] + w[i] / (1 + exp(-x[i])))",
        {"x": (5,), "w": (5,)},
    ),
    "softplus": ("loss = sum(log(1 + exp(x[i])) + log1p(exp(w[i])))", {"x": (5,), "w": (5,)}),
    "absolute": ("loss = sum(abs(x[i] - w[i]))", {"x": (5,), "w": (5,)}),
    "extremes": (
        "loss = sum(maximum(x[i], w[i]) * minimum(x[i], 0.3) + clip(w[i], -0.5, 0.5)**2)",
        {"x": (6,), "w": (6,)},
    ),
    "clip": ("loss = sum(clip(x[i], a[i], b[i] + 2))", {"x": (6,), "a": (6,), "b": (6,)}),
    "where": (
        "loss = sum(where(x[i] > 0, exp(x[i]), x[i]**2) + where(w[i] > x[i], w[i], 0))",
        {"x": (6,), "w": (6,)},
    ),
    "mask": (
        "loss = sum(where(flag[i], x[i], w[i])**2)",
        {"x": (5,), "w": (5,), "flag": INT["flag"]},
    ),
    "steps": (
        "loss = sum(x[i] * sign(x[i]) * floor(3 * w[i]) + (x[i] // 1) * w[i])",
        {"x": (5,), "w": (5,)},
    ),
    "stop": ("loss = sum(stop(x[i]) * x[i] * w[i])", {"x": (5,), "w": (5,)}),
    "casts": ("loss = sum(float64(x[i]) * i + int64(3 * x[i]) * x[i])", {"x": (5,)}),
    # ---- macros
    "softmax_by_hand": (
        "E[i,j] = exp(X[i,j] / 3 - v[j]); s[i] = sum(E[i,k]); P[j,i] = E[i,j] / s[i];"
        "loss = sum(P[j,i] * W[i,j]) + sum(E[i,j]**2) / 9 + sum(log(s[i]))",
        {"X": (4, 5), "v": (5,), "W": (4, 5)},
    ),
    "softmax_of_two": (
        "P[a,i,j] = softmax[i,j](X[a,i,j]); loss = sum(P[a,i,j] * W[i,j,a])",
        {"X": (2, 3, 4), "W": (3, 4, 2)},
    ),
    "computed_factors": (
        "Y[b,l] = sum(tanh(X[b,h]) * X[b,h] * exp(-W[h,l]) / 3); loss = sum(Y[b,l]**2)",
        {"X": (4, 5), "W": (5, 3)},
    ),
    "scaled_factors": (
        "Y[b,l] = sum(-(sigmoid(X[b,h]) * v[b]) * W[h,l] * s); loss = sum(Y[b,l]**2)",
        {"X": (4, 5), "W": (5, 3), "v": (4,), "s": ()},
    ),
    "softmax": (
        "P[i,j] = softmax[j](X[i,j]); loss = sum(P[i,j] * W[i,j])",
        {"X": (3, 4), "W": (3, 4)},
    ),
    "logsumexp": ("loss = sum(logsumexp[j](X[i,j]) * w[i])", {"X": (3, 4), "w": (3,)}),
    "layernorm": ("loss = sum(layernorm[j](X[i,j]) * W[i,j])", {"X": (3, 4), "W": (3, 4)}),
    "rmsnorm": ("loss = sum(rmsnorm[j](X[i,j]) * W[i,j])", {"X": (3, 4), "W": (3, 4)}),
    "activations": ("loss = sum(relu(x[i]) + silu(x[i]) * gelu(w[i]))", {"x": (6,), "w": (6,)}),
    "moments": (
        "loss = sum(var[j](X[i,j]) + std[j](X[i,j], ddof=1)) + norm(X[i,j])",
        {"X": (3, 5)},
    ),
    "cross_entropy": (
        "Z[b,l] = sum(H[b,h] * W[h,l]); loss = mean[b](logsumexp[l](Z[b,l]) - Z[b,y[b]])",
        {"H": (4, 3), "W": (3, 5), "y": INT["y"]},
    ),
    # ---- aggregations
    "max": ("loss = sum(max[j](X[i,j] * w[j]) * v[i])", {"X": (3, 4), "w": (4,), "v": (3,)}),
    "min": ("loss = sum(min[j](exp(X[i,j]) + w[j])**2)", {"X": (3, 4), "w": (4,)}),
    "max_of_all": ("loss = max(abs(X[i,j]))", {"X": (3, 4)}),
    "prod": ("loss = sum(prod[j](X[i,j] + w[j]))", {"X": (3, 4), "w": (4,)}),
    "argmax": ("m = argmax(x[i]); loss = sum(x[m] * v[j])", {"x": (5,), "v": (3,)}),
    "count": ("loss = sum(x[i]) / (1 + count(x[i] > 0))", {"x": (5,)}),
    "any": ("loss = sum(where(any[j](X[i,j] > 1), 2.0, 1.0) * X[i,0])", {"X": (3, 4)}),
    # ---- indices
    "constant_index": ("loss = sum(X[i,-1] * X[i,0])", {"X": (3, 4)}),
    "convolution": ("y[i] = sum(x[i+k] * w[k]); loss = sum(y[i]**2)", {"x": (10,), "w": (3,)}),
    "convolution_2d": (
        "Y[i,j,o] = sum(X[i+a,j+b,c] * W[a,b,c,o]); loss = sum(Y[i,j,o]**2)",
        {"X": (5, 6, 2), "W": (3, 2, 2, 3)},
    ),
    "strided": ("y[i] = sum(x[2*i+k] * w[k]); loss = sum(y[i]**2)", {"x": (11,), "w": (3,)}),
    "pooling": ("loss = sum(max[a:2,b:2](u[2*i+a,2*j+b]) * v[i,j])", {"u": (6, 4), "v": (3, 2)}),
    "mean_pooling": ("y[i] = mean[a:2](u[2*i+a]); loss = sum(y[i]**2)", {"u": (6,)}),
    "shifted": ("d[i:8] = x[i+1] - x[i]; loss = sum(d[i]**2)", {"x": (9,)}),
    "reversed": ("loss = sum(x[8-i] * x[i] * w[i])", {"x": (9,), "w": (9,)}),
    "every_third": ("loss = sum[i:3](exp(x[3*i+1]))", {"x": (9,)}),
    "reshape": (
        "h[n:3,d:4,c] = x[n*4+d,c]; loss = sum(h[n,d,c]**2 * w[d])",
        {"x": (12, 2), "w": (4,)},
    ),
    "flatten": ("f[p:12] = u[p//4,p%4]; loss = sum(f[p]**2 * v[p])", {"u": (3, 4), "v": (12,)}),
    "periodic": ("loss = sum((u[(i+7)%8,j] + u[(i+1)%8,j] - 2*u[i,j])**2)", {"u": (8, 3)}),
    "upsampled": ("y[i:10] = x[i//2]; loss = sum(y[i]**2 * w[i])", {"x": (5,), "w": (10,)}),
    "tiled": ("y[i:10] = x[i%4]; loss = sum(y[i]**2 * w[i])", {"x": (4,), "w": (10,)}),
    "slices": ("loss = sum((u[1:-1,::2][i,j] - u[:-2,::2][i,j])**2)", {"u": (6, 5)}),
    "backwards": ("y = x[::-1]; loss = sum(y[i] * x[i] * w[i])", {"x": (5,), "w": (5,)}),
    "stencil": (
        "s[i,j] = where((i > 0) & (i < 5), u[i-1,j] + u[i+1,j] - u[i,j], u[i,j]); "
        "loss = sum(s[i,j]**2)",
        {"u": (6, 3)},
    ),
    "joined": ("z[i:8] = where(i < 5, x[i], y[i-5]); loss = sum(z[i]**3)", {"x": (5,), "y": (3,)}),
    "causal": (
        "P[s,t] = softmax[t](where(t <= s, sum[d](Q[s,d] * K[t,d]), -inf)); loss = sum(P[s,t]**2)",
        {"Q": (4, 3), "K": (4, 3)},
    ),
    "embedding": (
        "E[b,s,a] = W[tok[b,s],a]; loss = sum(E[b,s,a]**3)",
        {"W": (6, 3), "tok": INT["tok"]},
    ),
    "gathers": (
        "loss = sum(X[src[e],f] * X[abs(dst[e]) % 5,f] * w[e])",
        {"X": (5, 2), "w": (7,), "src": INT["src"], "dst": INT["dst"]},
    ),
    "gather_twice": (
        "loss = sum(A[src[e],y[e%4]]**2)",
        {"A": (5, 4), "src": INT["src"], "y": INT["y"]},
    ),
    "gather_and_arithmetic": (
        "loss = sum[b:12](X[k[b],b+1]**2 * X[k[b],b//4] + X[k[b],b%4]**3 * X[k[b],11-b])",
        {"X": (5, 13), "k": INT["column"]},
    ),
    "gather_and_window": (
        "loss = sum[b:6,c:3](X[b+c,k[b]]**2 * X[k[2*b+1],b-c+2] * w[c])",
        {"X": (8, 8), "w": (3,), "k": INT["column"]},
    ),
    "flatten_three": (
        "f[z:24] = u[z//12,(z%12)//3,z%3] * t[z%2,(z//2)%4,z//8]; loss = sum(f[z]**2 * v[z])",
        {"u": (2, 4, 3), "t": (2, 4, 3), "v": (24,)},
    ),
    "flatten_remainder": (
        "f[z:6] = u[(z%6)//3,z%3] * u[(z%4)//2,z%2]; loss = sum(f[z]**2 * v[z])",
        {"u": (2, 3), "v": (6,)},
    ),
    "empty_periodic": (
        "loss = sum(u[(i+1)%8] * u[i//3] * u[7-i] * e[i]) + sum(u[k]**2)",
        {"u": (8,), "e": (0,)},
    ),
    # ---- scans and segments
    "cumsum": (
        "c[i,j] = cumsum[j](X[i,j]); loss = sum(c[i,j]**2 * w[j])",
        {"X": (2, 5), "w": (5,)},
    ),
    "cumsum_of_sum": ("loss = sum(cumsum[j](exp(X[i,j])))", {"X": (2, 5)}),
    "cumprod": (
        "c[i,j] = cumprod[j](X[i,j]); loss = sum(c[i,j] * W[i,j])",
        {"X": (2, 5), "W": (2, 5)},
    ),
    "cummax": ("c[j] = cummax[j](x[j]); loss = sum(c[j]**2)", {"x": (6,)}),
    "cummin": ("c[j] = cummin[j](x[j] + w[j]); loss = sum(c[j]**2)", {"x": (6,), "w": (6,)}),
    "segment_sum": (
        "y[dst[e]:4,f] = sum(x[e,f]); loss = sum(y[k,f]**2)",
        {"x": (7, 2), "dst": INT["dst"]},
    ),
    "segment_product": (
        "y[dst[e]:4,g] = sum(x[e,f] * W[f,g]); loss = sum(y[k,g]**2)",
        {"x": (7, 2), "W": (2, 3), "dst": INT["dst"]},
    ),
    "segment_max": (
        "y[dst[e]:3] = max(x[e] * w[e]); loss = sum(y[k]**2)",
        {"x": (7,), "w": (7,), "dst": INT["dst"]},
    ),
    "segment_prod": (
        "y[dst[e]:3] = prod(x[e]); loss = sum(y[k]**2)",
        {"x": (7,), "dst": INT["dst"]},
    ),
    "segment_mean": (
        "y[dst[e]:3,f] = mean(exp(x[e,f])); loss = sum(y[k,f]**2)",
        {"x": (7, 2), "dst": INT["dst"]},
    ),
    "messages": (
        "y[abs(dst[e])%4:4,f] = sum(x[src[e],f] * w[e]); loss = sum(tanh(y[k,f])**2)",
        {"x": (5, 2), "w": (7,), "dst": INT["dst"], "src": INT["src"]},
    ),
    "distances": (
        "D[n,k] = sum((X[n,f] - C[k,f])**2); loss = sum(min[k](D[n,k])) + sum(sqrt(D[n,k] + 1))",
        {"X": (5, 3), "C": (4, 3)},
    ),
    # ---- complex numbers
    "complex_product": ("loss = sum(abs(A[i,j] * b[j])**2)", {"A": (Z, 3, 4), "b": (Z, 4)}),
    "complex_parts": (
        "s[i] = a[i]**2 * x[i] + conj(a[i]) / (2 + a[i]); loss = sum(real(s[i]) * imag(s[i]))",
        {"a": (Z, 4), "x": (4,)},
    ),
    "complex_functions": (
        "s = sum(exp(a[i]) * sin(a[i]) + sqrt(a[i] + 3) * log(a[i] + 4)); loss = abs(s)",
        {"a": (Z, 4)},
    ),
    "complex_prod": ("s = prod(a[i]); loss = real(s * conj(s)) + real(s)", {"a": (Z, 4)}),
    "complex_cast": ("loss = abs(sum(complex128(x[i]) * a[i]))", {"a": (Z, 4), "x": (4,)}),
}


def arrays_of(name, seed=3):
    """The program and inputs of one entry, and which of them to differentiate by."""
    text, inputs = PROGRAMS[name]
    rng = np.random.default_rng(seed)
    arrays = {}
    parameters = []
    for key, given in inputs.items():
        if isinstance(given, np.ndarray):
            arrays[key] = given
            continue
        parameters.append(key)
        if given and given[0] == Z:
            arrays[key] = rng.normal(size=given[1:]) + 1j * rng.normal(size=given[1:])
        else:
            arrays[key] = rng.normal(size=given)
    return text, arrays, parameters


def gradient_text(text, parameters, arrays, loss="loss"):
    """The program with a statement for each gradient; `loss` stays an output."""
    lines = [*text.split(";"), f"value = 1 * {loss}"]
    for name in parameters:
        labels = ",".join(f"q{k}" for k in range(np.ndim(arrays[name])))
        element = f"{name}[{labels}]" if labels else name
        target = f"d{name}[{labels}]" if labels else f"d{name}"
        lines.append(f"{target} = grad({loss}, {element})")
    return "\n".join(lines)
