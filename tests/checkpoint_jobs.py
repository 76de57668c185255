"""A job of twelve vertices for tests that interrupt it."""

import contextlib

import h5py
import numpy as np

# Twelve vertices: products, numbers, rows, a tensor that is used much later, an output in the middle, an input that is
# first read near the end.
PROGRAM = """
A1[i,k] = sum(X[i,j] * Y[j,k])
A2[i,k] = sum(A1[i,j] * Y[j,k])
n = sum(A2[i,k]**2)
A3[i,k] = sum(A2[j,i] * A1[j,k]) / sqrt(n)
m[i] = max(A3[i,j])
A4[i,k] = exp(A3[i,k] - m[i])
s[i] = sum(A4[i,k])
A5[i,k] = sum(A4[i,j] * A1[j,k])
A6[i,k] = sum(A5[i,j] * A3[j,k])
Z[i,k] = sum(A6[i,j] * W[j,k]) / s[i]
"""
INPUTS = """
X = { shape = [21, 21], random = "normal", seed = 1 }
Y = { shape = [21, 21], random = "normal", seed = 2 }
W = { file = "w.h5", dataset = "/W" }
"""
OUTPUTS = 'Z = "out.h5:/Z"\ns = "out.h5:/s"'


def write_job(folder, program=PROGRAM, inputs=INPUTS, outputs=OUTPUTS, **more):
    """The path of a job file."""
    if not (folder / "w20.h5").exists():
        with contextlib.suppress(FileExistsError), h5py.File(folder / "w.h5", "x") as file:
            file["W"] = np.random.default_rng(0).standard_normal((21, 21))
        with h5py.File(folder / "w20.h5", "w") as file:
            file["W"] = np.ones((20, 20))
    lines = [f"{key} = {value!r}" for key, value in more.items()]
    lines += [f'program = """{program}"""', "[inputs]", inputs, "[outputs]", outputs]
    (folder / "job.toml").write_text("\n".join(lines))
    return folder / "job.toml"
