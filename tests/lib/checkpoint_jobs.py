"""A job of twelve vertices for tests that interrupt it, and random programs."""

import contextlib

import h5py
import numpy as np
from hypothesis import strategies as st

# Twelve vertices: products, numbers, rows, a tensor that is used much later, an output in the
# middle, an input that is first read near the end.
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
X = { shape = [21, 21], random = "uniform", seed = 1 }
Y = { shape = [21, 21], random = "uniform", seed = 2 }
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


@st.composite
def programs(draw):
    """(program, extents): statements that read any tensors before them."""
    n, m = draw(st.sampled_from([(6, 9), (7, 5), (12, 8), (1, 3), (16, 16)]))
    known, lines = {"X": "nm", "Y": "mn"}, []
    for number in range(draw(st.integers(2, 7))):
        name = f"T{number}"
        one, two = (draw(st.sampled_from(sorted(known))) for _ in range(2))
        kinds = ["scale", "rows", "number"] + ["product"] * 3 * (
            known[one][1:] == known[two][:1] != ""
        )
        kind = draw(st.sampled_from(kinds))
        labels = "ij"[: len(known[one])]
        read = f"{one}[{','.join(labels)}]" if labels else one
        if kind == "product" and len(known[one]) == len(known[two]) == 2:
            lines.append(f"{name}[i,k] = sum({one}[i,j] * {two}[j,k])")
            known[name] = known[one][0] + known[two][1]
        elif kind == "rows" and len(known[one]) == 2:
            lines.append(
                f"{name}[i] = {draw(st.sampled_from(['sum', 'max', 'min']))}({one}[i,j] / 3)"
            )
            known[name] = known[one][0]
        elif kind == "number" and known[one]:
            lines.append(f"{name} = sum({read})")
            known[name] = ""
        else:
            lines.append(
                f"{name}{f'[{chr(44).join(labels)}]' if labels else ''} = tanh({read}) + 1"
            )
            known[name] = known[one]
    return "\n".join(lines), {"n": n, "m": m}
