"""[inputs] and [outputs] of job files: what is read, and the exact text of every error."""

import pytest
from job_text import ALL_DTYPES, DTYPES, EXTENT, NAME, PROGRAM, A, error, read

import einmpi

pytestmark = pytest.mark.usefixtures("in_folder")


# ---- inputs -------------------------------------------------------------------------------------

ALL_INPUT_KEYS = (
    "random, shape, dtype, seed, low, high, density, nnz, resident, parts, batch, implicit, file, "
    "dataset, tensor, rows, columns, slice, convert, follow, keys, values"
)
GENERATED = "random, shape, dtype, seed, low, high, density, nnz, resident, parts, batch, implicit"


@pytest.mark.parametrize(
    "text, message",
    [
        ("A = 3", '4:1: input A is 3; expected a table or a string such as "FILE.h5:/A"'),
        ("A = {}", "4:1: input A has neither random nor file; expected one of the two"),
        (
            'A = { random = "ones", file = "x.h5" }',
            "4:1: input A has both random and file; expected one of the two",
        ),
        (
            'A = { radom = "ones" }',
            f"4:7: unknown key 'radom' in inputs.A; expected one of {ALL_INPUT_KEYS} (did "
            "you mean random?)",
        ),
        (
            'A = { random = "ones" }',
            '4:1: input A has no shape; expected a list such as shape = ["s", 10]',
        ),
        (
            'A = { random = "norm", shape = [3] }',
            "4:7: unknown random 'norm'; expected one of normal, uniform, zeros, ones, "
            "arange, sparse (did you mean normal?)",
        ),
        ('A = { random = "ones", shape = 3 }', "4:24: shape is 3; expected a list"),
        (
            'A = { random = "ones", shape = [3, -1] }',
            "4:36: extent -1 in shape; expected an integer from 0 to 2**39 = 549755813888",
        ),
        (
            'A = { random = "ones", shape = [2.0] }',
            "4:33: extent 2.0 in shape; expected an integer from 0 to 2**39 = 549755813888",
        ),
        (
            'A = { random = "ones", shape = ["n - 9"] }',
            "4:33: extent -4 in shape; expected an integer from 0 to 2**39 = 549755813888",
        ),
        (
            'A = { random = "ones", shape = ["n", "m"] }',
            "4:39: unknown size 'm'; expected n",
        ),
        (
            f'A = {{ random = "ones", shape = {[1] * 33} }}',
            "4:24: shape has 33 dimensions; expected at most 32",
        ),
        (
            'A = { random = "ones", shape = [3], dataset = "/A" }',
            f"4:37: dataset cannot be combined with random; expected one of {GENERATED}",
        ),
        (
            'A = { random = "ones", shape = [3], dtype = "int9" }',
            f"4:37: unknown dtype 'int9'; expected one of {ALL_DTYPES} (did you mean int8?)",
        ),
        (
            'A = { random = "normal", shape = [3], dtype = "int32" }',
            "4:1: input A cannot be both normal and int32; expected a float or complex "
            "dtype, or one of uniform, zeros, ones, arange",
        ),
        (
            'A = { random = "normal", shape = [3], seed = -1 }',
            "4:39: seed is -1; expected an integer from 0 to 2**64 - 1",
        ),
        (
            'A = { random = "normal", shape = [3], seed = 1.0 }',
            "4:39: seed is 1.0; expected an integer",
        ),
        (
            'A = { random = "normal", shape = [3], low = 1 }',
            "4:39: low cannot be combined with random = 'normal'; expected random = \"uniform\"",
        ),
        (
            'A = { random = "uniform", shape = [3], high = 2, dtype = "bool" }',
            "4:40: high cannot be combined with dtype bool; expected an integer, float or "
            "complex dtype",
        ),
        (
            'A = { random = "uniform", shape = [3], low = [0] }',
            "4:40: low is a list; expected a number",
        ),
        (
            'A = { random = "uniform", shape = [3], low = true }',
            "4:40: low is true; expected a number",
        ),
        (
            'A = { random = "uniform", shape = [3], low = 1 }',
            "4:1: low = 1 is not below high = 1; expected low < high",
        ),
        (
            'A = { random = "uniform", shape = [3], high = inf }',
            "4:40: high = inf does not fit into float64; expected -1.7976931348623157e+308 "
            "to 1.7976931348623157e+308",
        ),
        (
            'A = { random = "uniform", shape = [3], low = nan }',
            "4:40: low = nan does not fit into float64; expected -1.7976931348623157e+308 "
            "to 1.7976931348623157e+308",
        ),
        (
            'A = { random = "uniform", shape = [3], high = 1e5, dtype = "float16" }',
            "4:40: high = 100000.0 does not fit into float16; expected -65504.0 to 65504.0",
        ),
        (
            'A = { random = "uniform", shape = [3], dtype = "int32" }',
            "4:1: input A is uniform and int32 but has no high; expected high = NUMBER, "
            "an exclusive upper bound",
        ),
        (
            'A = { random = "uniform", shape = [3], high = 2.0, dtype = "int32" }',
            "4:40: high is 2.0; expected an integer",
        ),
        (
            'A = { random = "uniform", shape = [3], high = 3000000000, dtype = "int32" }',
            "4:40: high = 3000000000 does not fit into int32; expected -2147483648 to 2147483647",
        ),
        (
            'A = { random = "ones", shape = [3], resident = 1 }',
            '4:37: resident is 1; expected true, false or "fit"',
        ),
        (
            'A = { random = "ones", shape = [3], parts = [1, 2] }',
            "4:1: parts of A has length 2; expected 1, the number of its dimensions",
        ),
        (
            'A = { random = "ones", shape = [3], parts = [] }',
            "4:1: parts of A has length 0; expected 1, the number of its dimensions",
        ),
        (
            'A = { file = "x.h5", dataset = "/A", seed = 3 }',
            "4:38: seed cannot be combined with file; expected one of file, dataset, "
            "tensor, rows, columns, slice, shape, dtype, convert, follow, resident, parts, batch, "
            "implicit",
        ),
        (
            'A = { file = "x.csv", dataset = "/A" }',
            "4:1: 'x.csv' is not a file of a known format; expected a file name that ends "
            "in one of .h5, .hdf5, .he5, .nc, .nc4, .h5ad, .safetensors, .safetensors.index.json, "
            ".npy, .zarr, .npz, .mtx, .tns",
        ),
        (
            'A = { file = "x.h5" }',
            "4:1: input A does not say which dataset of the file to use; expected dataset "
            '= "/DATASET"',
        ),
        (
            'A = { file = "x.h5", tensor = "A" }',
            "4:22: tensor cannot be combined with a .h5 file; expected dataset",
        ),
        (
            'A = { file = "x.safetensors", dataset = "A" }',
            "4:31: dataset cannot be combined with a .safetensors file; expected tensor",
        ),
        (
            'A = { file = "x.h5", dataset = "//" }',
            "4:1: '//' is not the path of a dataset; expected a path such as /Z or /group/Z",
        ),
        ("A = { file = 3 }", "4:7: file is 3; expected a string"),
        (
            'A = "x.h5"',
            "4:1: 'x.h5' names a file but no dataset in it; expected \"FILE.h5:/DATASET\"",
        ),
        (
            'A = "x.csv:/A"',
            "4:1: 'x.csv' is not a file of a known format; expected a file name that ends "
            "in one of .h5, .hdf5, .he5, .nc, .nc4, .h5ad, .safetensors, .safetensors.index.json, "
            ".npy, .zarr, .npz, .mtx, .tns",
        ),
        ('n = "x.h5:/A"', "4:1: n is a size and cannot name a tensor; expected another name"),
        (
            'exp = "x.h5:/A"',
            "4:1: exp is a word of the language and cannot name a tensor; expected another name",
        ),
        ('"a-b" = "x.h5:/A"', f"4:1: 'a-b' cannot name a tensor; {NAME}"),
    ],
)
def test_wrong_inputs(text, message):
    assert error(f"{PROGRAM}sizes.n = 5\n[inputs]\n{text}\n") == f"job.toml:{message}"


def test_uniform_limits():
    job = read(
        PROGRAM
        + '[inputs]\nA = { random = "uniform", shape = [3], low = -2, high = 9, dtype = "int64" }\n'
    )
    assert (job.inputs[0].low, job.inputs[0].high) == (-2, 9)


def test_an_input_the_program_does_not_have():
    assert (
        error('program = "Z[i] = A[i] * B[i]"\n' + A)
        == "job.toml:1:26: unknown tensor 'B'; expected A"
    )


# ---- outputs ------------------------------------------------------------------------------------

OUTPUT_KEYS = "file, dataset, chunks, compression, dtype, parts"


@pytest.mark.parametrize(
    "text, message",
    [
        ('Q = "o.h5:/Z"', "5:1: unknown output 'Q'; expected one of Z, Y"),
        ('A = "o.h5:/Z"', "5:1: unknown output 'A'; expected one of Z, Y"),
        ("Z = 3", '5:1: output Z is 3; expected a table or a string such as "FILE.h5:/Z"'),
        (
            'Z = "o.h5"',
            "5:1: 'o.h5' names a file but no dataset in it; expected \"FILE.h5:/DATASET\"",
        ),
        (
            'Z = "o.safetensors:Z"',
            "5:1: safetensors files can be read but not written; expected a file name that "
            "ends in one of .h5, .hdf5, .he5, .nc, .nc4, .h5ad, .npy, .zarr, .npz, .mtx, .tns",
        ),
        (
            'Z = { file = "o.npy", dataset = "Z" }',
            "5:23: dataset cannot be combined with a .npy file; expected one of file, dtype, parts",
        ),
        (
            'Z = { file = "o.h5" }',
            '5:1: output Z has no dataset; expected dataset = "/DATASET"',
        ),
        (
            'Z = { dataset = "/Z" }',
            '5:1: output Z has no file; expected file = "FILE.h5", dataset = "/NAME"',
        ),
        (
            'Z = { file = "o.h5", dataset = "Z", chunk = [2] }',
            f"5:37: unknown key 'chunk' in outputs.Z; expected one of {OUTPUT_KEYS} (did "
            "you mean chunks?)",
        ),
        ('Z = { file = "o.h5", dataset = "Z", chunks = [0] }', f"5:47: 0 in chunks; {EXTENT}"),
        ('Z = { file = "o.h5", dataset = "Z", chunks = 4 }', "5:37: chunks is 4; expected a list"),
        (
            'Z = { file = "o.h5", dataset = "Z", chunks = [4, 4] }',
            "5:1: chunks of Z has length 2; expected 1, the number of its dimensions",
        ),
        (
            'Z = { file = "o.npy", parts = [4, 1] }',
            "5:1: parts of Z has length 2; expected 1, the number of its dimensions",
        ),
        (
            'Z = { file = "o.h5", dataset = "Z", chunks = [1_000_000_000] }',
            "5:1: a chunk of Z would have 8000000000 bytes; expected less than 4 GiB",
        ),
        (
            'Z = { file = "o.h5", dataset = "Z", compression = "zip" }',
            "5:37: unknown compression 'zip'; expected one of gzip, lzf (did you mean gzip?)",
        ),
        (
            'Z = { file = "o.h5", dataset = "Z", dtype = "bfloat16" }',
            f"5:37: files have no bfloat16; expected one of {DTYPES}",
        ),
        (
            'Z = { file = "o.h5", dataset = "Z", dtype = "int32" }',
            "5:1: Z is float64 and cannot be stored as int32; expected one of float16, "
            "float32, float64, complex64, complex128",
        ),
        (
            'Z = "o.h5:/a"\nY = "./o.h5:a"',
            "6:1: outputs Z and Y would both be o.h5:/a; expected a separate dataset for "
            "each output",
        ),
        (
            'Z = "o.h5:/a"\nY = "o.h5:/a/b"',
            "6:1: outputs Z and Y would be one inside the other in o.h5; expected a "
            "separate dataset for each output",
        ),
    ],
)
def test_wrong_outputs(text, message):
    program = "program = 'Z[i] = A[i] + 1; Y[i] = A[i] / 2'\n"
    assert error(f"{program}{A}[outputs]\n{text}\n") == f"job.toml:{message}"


def test_limits_are_arithmetic_on_sizes(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(
        'program = "Z[i] = X[i]"\n[sizes]\nn = 9\n[inputs]\n'
        'X = { shape = ["n"], dtype = "int64", random = "uniform", low = "-n", high = "2 * n" }\n'
    )
    (spec,) = einmpi.load(path, n=7).inputs
    assert (spec.low, spec.high) == (-7, 14)
    path.write_text(path.read_text().replace("2 * n", "2 * m"))
    with pytest.raises(einmpi.InputError, match="unknown size 'm'; expected n"):
        einmpi.load(path)
