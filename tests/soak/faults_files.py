"""The files of a fault sweep: jobs, inputs, outputs as they were, and what a run makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from .fuzz_oracle import emptied

JOB = """
program = '''
Y[i,k] = sum(X[i,j] * A[j,k])
Z[i,k] = exp(Y[i,k] / 8)
m[i] = max(Y[i,k])
'''
inputs.X = "x.h5:/X"
inputs.A = { shape = [8, 8], random = "arange" }
outputs.Z = { file = "a.h5", dataset = "/Z", chunks = [4, 4] }
outputs.m = "b.npy"
"""
OTHER_JOB = """
program = "B[i] = V[i] + 1"
inputs.V = { shape = [5], random = "arange" }
outputs.B = "a.h5:/B"
"""
READING_JOB = """
program = "C = sum(Z[i,k]) + sum(m[i])"
inputs.Z = "a.h5:/Z"
inputs.m = "b.npy"
"""


def make_template(folder: Path) -> None:
    """Fill a folder with jobs, inputs and the old outputs."""
    emptied(folder)
    (folder / "job.toml").write_text(JOB)
    (folder / "other.toml").write_text(OTHER_JOB)
    (folder / "reading.toml").write_text(READING_JOB)
    for name, factor in (("x.h5", 1.0), ("other-x.h5", -1.0)):
        with h5py.File(folder / name, "w") as file:
            values = np.arange(64.0).reshape(8, 8) / 64 * factor
            file.create_dataset("X", data=values, chunks=(4, 4))
    with h5py.File(folder / "a.h5", "w") as file:
        file["Z"] = np.zeros((8, 8))
        file["keep"] = np.arange(3)
    with h5py.File(folder / "other-a.h5", "w") as file:
        file["Z"] = np.ones((8, 8))
        file["keep"] = np.arange(3)
    np.save(folder / "b.npy", np.zeros(8))


@dataclass(frozen=True)
class Outputs:
    """What the output files hold: bytes of values, or what is wrong with a file."""

    z: bytes | str
    m: bytes | str
    keeps: bool  # the other dataset of the file
    second: bytes | None  # what a second run has written


def read_outputs(folder: Path) -> Outputs:
    """Read the outputs, whatever state they are in."""
    z: bytes | str
    m: bytes | str
    keeps = False
    second = None
    try:
        with h5py.File(folder / "a.h5", "r", locking=False) as file:
            z = file["Z"][()].tobytes()
            keeps = "keep" in file and file["keep"][()].tolist() == [0, 1, 2]
            second = file["B"][()].tobytes() if "B" in file else None
    except FileNotFoundError:
        z = "removed"
    except (OSError, KeyError, ValueError) as error:
        z = f"damaged: {error}"
    try:
        m = np.load(folder / "b.npy").tobytes()
    except FileNotFoundError:
        m = "removed"
    except (OSError, ValueError) as error:
        m = f"damaged: {error}"
    return Outputs(z, m, keeps, second)
