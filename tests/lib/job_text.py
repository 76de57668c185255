"""Reads job files from text, for the tests of job files."""

import pytest

from einmpi.errors import InputError
from einmpi.job.job_file import read_job

NAME = (
    "expected a name of letters, digits and _ that does not start with a digit "
    "and is not a Python keyword"
)
EXTENT = "expected an integer from 1 to 2**39 = 549755813888"
DTYPES = (
    "float16, float32, float64, complex64, complex128, "
    "int8, int16, int32, int64, uint8, uint16, uint32, uint64, bool"
)
ALL_DTYPES = f"{DTYPES}, bfloat16"
PROGRAM = 'program = "Z[i] = A[i] + 1"\n'
A = '[inputs]\nA = { shape = [4], random = "ones" }\n'


def no_files(spec):
    raise AssertionError(f"{spec.file} looked at")


def read(text, describe=no_files, path="job.toml", **overrides):
    with open(path, "w", newline="") as file:
        file.write(text)
    return read_job(path, describe, **overrides)


def error(text, **options):
    with pytest.raises(InputError) as caught:
        read(text, **options)
    assert caught.value.status == 2
    return str(caught.value)
