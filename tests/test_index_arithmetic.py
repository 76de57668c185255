"""Index arithmetic such as u[i+1], x[i+k] and w[h*4+d]: values, and bytes that move as halos."""

import re
import time

import numpy as np
import pytest
from distributed import run_from_files
from hypothesis import given, settings
from hypothesis import strategies as st

import einmpi
from einmpi.errors import InputError

RNG = np.random.default_rng(7)
N = 41
U = RNG.normal(size=(N, N))
X = RNG.normal(size=200)
W = RNG.normal(size=6)


# Ranks → into how many rows and columns of blocks they cut a matrix.
SQUAREST = {1: (1, 1), 2: (2, 1), 3: (3, 1), 4: (2, 2), 5: (5, 1), 6: (3, 2), 7: (7, 1)}
SQUAREST |= {8: (4, 2), 9: (3, 3), 64: (8, 8)}


@pytest.mark.parametrize("ranks", range(1, 10))
def test_a_five_point_stencil_moves_the_borders_of_its_blocks(ranks):
    text = (
        f"Z[i:{N - 2},j:{N - 2}] = u[i+1,j+0] + u[i+1,j+2] + u[i+0,j+1] + u[i+2,j+1]"
        " - 4 * u[i+1,j+1]"
    )
    outputs, moved = run_from_files(ranks, text, {"u": U})
    inner = U[1:-1, :-2] + U[1:-1, 2:] + U[:-2, 1:-1] + U[2:, 1:-1] - 4 * U[1:-1, 1:-1]
    assert np.array_equal(outputs["Z"], inner)
    # Blocks of 39 rows and of 41 rows do not always begin at the same row.
    rows, columns = SQUAREST[ranks]
    least = 2 * ((rows - 1) + (columns - 1)) * (N - 2) * 8
    assert least <= moved <= least + 3 * ((rows - 1) + (columns - 1)) * N * 8


@pytest.mark.parametrize("ranks", range(1, 10))
def test_a_convolution_moves_its_window(ranks):
    outputs, moved = run_from_files(ranks, "y[i:195] = sum[k](x[i+k] * w[k])", {"x": X, "w": W})
    # Sums of six products in another order: a few units in the last place.
    assert np.allclose(outputs["y"], np.correlate(X, W), rtol=0, atol=1e-13)
    window = (ranks - 1) * 5 * 8
    weights = (ranks - 1) * 6 * 8  # every rank needs all of w
    assert window + weights <= moved <= window + weights + (ranks - 1) * 5 * 8


def windows(x, length):
    return np.lib.stride_tricks.sliding_window_view(x, length).sum(1)


CASES = {
    "shift": ("y[i:30] = x[i+3] * 2", lambda x: x[3:33] * 2),
    "stride": ("y[i:50] = x[2*i+1]", lambda x: x[1:101:2]),
    "reversal": ("y[i:200] = x[199-i]", lambda x: x[::-1]),
    "one element": ("y = x[17] + x[3]", lambda x: x[17] + x[3]),
    "fixed and free": ("y[i] = x[i] - x[0]", lambda x: x - x[0]),
    "split": ("y[a:20,b:10] = x[a*10+b]", lambda x: x.reshape(20, 10)),
    "split, summed": ("y[b:10] = sum[a:20](x[a*10+b])", lambda x: x.reshape(20, 10).sum(0)),
    "downsampled": ("y[i:50] = max[k:4](x[4*i+k])", lambda x: x.reshape(50, 4).max(1)),
    "window of differences": ("y[i:199] = x[i+1] - x[i+0]", np.diff),
    "inferred extent": ("y[i] = sum[k:3](x[2*i+k])", lambda x: x[:-2:2] + x[1:-1:2] + x[2::2]),
    "written extent": ("y[i:199] = x[i+1] - x[i]", np.diff),
    "last element": ("y[i] = x[i] - x[-1]", lambda x: x - x[-1]),
    "slice": ("y = x[2:10]", lambda x: x[2:10]),
    "slices with steps": ("y = x[-3:5:-7]", lambda x: x[-3:5:-7]),
    "slices with labels": ("y[i] = x[1:][i] * x[:-1][i]", lambda x: x[1:] * x[:-1]),
    "slice of a slice": ("y[i] = x[3:][::2][i]", lambda x: x[3::2]),
    "guarded neighbours": (
        "y[i:200] = where((i > 0) & (i < 199), x[i-1] + x[i+1], 0)",
        lambda x: np.r_[0, x[:-2] + x[2:], 0],
    ),
    "guarded otherwise": (
        "y[i] = where(i == 0, x[i], where(i >= 198, 7, x[i+2]))",
        lambda x: np.r_[x[0], x[3:], 7, 7],
    ),
    "guarded by both ends": (
        "y[i:200] = where((i == 0) | (i == 1) | (199 == i), 0, x[i-2] + x[i+1])",
        lambda x: np.r_[0, 0, x[:-3] + x[3:], 0],
    ),
    "guarded in the middle": (
        "y[i] = where(i != 50, x[i], x[i-1])",
        lambda x: np.r_[x[:50], x[49], x[51:]],
    ),
    "guarded by values": (
        "y[i] = where((x[i] > 0) & (i > 9), x[i-10], 0)",
        lambda x: np.where((x > 0) & (np.arange(200) > 9), np.roll(x, 10), 0),
    ),
    "concatenation": (
        "y[i:300] = where(i < 200, x[i], 2 * x[i-200])",
        lambda x: np.r_[x, 2 * x[:100]],
    ),
    "as many as fit, in any order": (
        "y[i] = sum[k:3](x[i+k]) + sum[k:5](x[i+k+1])",
        lambda x: windows(x, 3)[:195] + windows(x, 5)[1:],
    ),
    "labels of the same name": (
        "y = sum[k:2](x[9*k]) + sum[k](x[2*k])",
        lambda x: x[0] + x[9] + x[::2].sum(),
    ),
    "a condition on another label of the same name": (
        "k[i:200] = i % 7\ny[i] = x[i] * 0 + where(x[i] > 0, sum[i](x[k[i]]), 0)",
        lambda x: np.where(x > 0, x[np.arange(200) % 7].sum(), 0),
    ),
    "a divisor with a label": (
        "y[i:9] = x[i//(i//2+1)]",
        lambda x: x[np.arange(9) // (np.arange(9) // 2 + 1)],
    ),
    "one huge step": ("y[i:1] = x[i*4611686018427387904]", lambda x: x[:1]),
    "powers and shifts": ("y[i:14] = x[i**2] + x[i+1]", lambda x: x[np.arange(14) ** 2] + x[1:15]),
    "no elements": ("y[i:0] = x[i+3]", lambda x: x[:0]),
    "used twice": ("y[i:100] = x[2*i] * x[199-i]", lambda x: x[::2] * x[:99:-1]),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("case", CASES)
def test_values(case, ranks):
    text, expected = CASES[case]
    outputs, _ = run_from_files(ranks, text, {"x": X})
    assert np.allclose(outputs["y"], expected(X), rtol=1e-13, atol=0)


def guarded_stencil(u):
    result = u.copy()
    result[1:-1, 1:-1] = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
    return result


MATRICES = {
    "row": ("y[j] = u[5,j]", lambda u: u[5]),
    "shifted diagonal": ("y[i:40] = u[i+0,i+1]", lambda u: np.diagonal(u, 1)),
    "diagonal and label": (
        "y[i:40,j] = u[i+1,j] * u[i+0,i+1]",
        lambda u: u[1:] * np.diag(u, 1)[:, None],
    ),
    "anti-diagonals": (
        "y[i:20,j:20] = u[i+j,i+j+1]",
        lambda u: np.diag(u, 1)[np.add.outer(range(20), range(20))],
    ),
    "pooling": (
        "y[i:10,j:10] = max[a:4,b:4](u[4*i+a,4*j+b])",
        lambda u: u[:40, :40].reshape(10, 4, 10, 4).max((1, 3)),
    ),
    "computed before": (
        "v[i,j] = sin(u[i,j])\ny[i:40,j] = v[i+1,j] - v[i+0,j]",
        lambda u: np.diff(np.sin(u), axis=0),
    ),
    "partial sums": (
        "v[i] = sum[j](u[i,j])\ny[i:40] = v[i+1] + v[i+0]",
        lambda u: u.sum(1)[1:] + u.sum(1)[:-1],
    ),
    "merge": ("y[p:1681] = u[p//41,p%41]", lambda u: u.ravel()),
    "slices of both": ("y = u[1:-1,::5]", lambda u: u[1:-1, ::5]),
    "slice and index": ("y[j] = u[3,2:7][j]", lambda u: u[3, 2:7]),
    "periodic": ("y[i,j] = u[(i+40)%41,j] + u[i,j]", lambda u: np.roll(u, 1, 0) + u),
    "guarded stencil": (
        "y[i,j] = where((i > 0) & (i < 40) & (0 < j) & (j < 40),"
        " u[i-1,j] + u[i+1,j] + u[i,j-1] + u[i,j+1], u[i,j])",
        lambda u: guarded_stencil(u),
    ),
    "stencil with its border first": (
        "y[i,j] = where((i == 0) | (i == 40) | (j == 0) | (j == 40),"
        " u[i,j], u[i-1,j] + u[i+1,j] + u[i,j-1] + u[i,j+1])",
        lambda u: guarded_stencil(u),
    ),
    "gather and shift": ("k[i:9] = 3 * i\ny[i:9,j:40] = u[k[i],j+1]", lambda u: u[0:27:3, 1:]),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("case", MATRICES)
def test_values_of_matrices(case, ranks):
    text, expected = MATRICES[case]
    outputs, _ = run_from_files(ranks, text, {"u": U})
    # Another order of summation: 41 numbers around 1.
    assert np.allclose(outputs["y"], expected(U), rtol=1e-12, atol=1e-12)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", range(2, 10))
@pytest.mark.parametrize("name", ["guarded stencil", "stencil with its border first"])
def test_a_guarded_stencil_moves_the_borders_of_its_blocks(name, ranks):
    text, expected = MATRICES[name]
    outputs, moved = run_from_files(ranks, text, {"u": U})
    assert np.allclose(outputs["y"], expected(U), rtol=1e-13, atol=1e-13)
    assert moved == _borders(N, ranks) * 8


def _borders(n, ranks):
    """Return the elements that blocks of an n × n matrix need from beside them, without corners."""
    rows, columns = SQUAREST[ranks]
    return 2 * n * (rows - 1 + columns - 1)


@pytest.mark.parametrize("ranks", [2, 5, 8, 64])
def test_plans_of_large_stencils_and_convolutions(ranks):
    condition = "(i > 0) & (i < 3999) & (j > 0) & (j < 3999)"
    neighbours = "u[i-1,j] + u[i+1,j] + u[i,j-1] + u[i,j+1]"
    text = f"y[i,j] = where({condition}, {neighbours}, u[i,j])"
    stencil = einmpi.plan(einmpi.program(text, u=(4000, 4000)), ranks)
    assert stencil.bytes_predicted == _borders(4000, ranks) * 8
    job = einmpi.program("y[i] = sum(x[i+k] * w[k])", x=(10**6,), w=(64,))
    window_and_weights = 63 + 64
    assert einmpi.plan(job, ranks).bytes_predicted <= (ranks - 1) * (window_and_weights + 64) * 8


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "y[i] = x[i+1] - x[i]",
            "p:1:10: the index i + 1 goes from 1 to 200; expected 0 to 199; give its labels "
            "extents, such as i:n-1, or use where(i > 0, ..., ...)",
        ),
        (
            "y[i:3] = x[i] * 2",
            "p:1:5: label i has two extents: 200 in x[i] and 3 in i:3; expected the same extent "
            "everywhere; a slice such as x[:3][i] reads less of a tensor",
        ),
        (
            "y = x[2:k]",
            "p:1:9: k is not allowed beside a slice; expected integers and slices, such as 1:-1, "
            "::2 or 3",
        ),
        (
            "y[i] = x[i]*0 + where(i > 0, sum[i:10](x[i-1]), 0)",
            "p:1:42: the index i - 1 goes from -1 to 8; expected 0 to 199; give its labels "
            "extents, such as i:n-1, or use where(i > 0, ..., ...)",
        ),
        (
            "y[i] = x[i]*0 + where(i > 0, cumsum[i](x[i-1]), 0)",
            "p:1:42: the index i - 1 goes from -1 to 198; expected 0 to 199; give its labels "
            "extents, such as i:n-1, or use where(i > 0, ..., ...)",
        ),
        (
            "y[i] = x[i]*0 + where(i > 0, softmax[i](x[i-1]), 0)",
            "p:1:43: the index i - 1 goes from -1 to 198; expected 0 to 199; give its labels "
            "extents, such as i:n-1, or use where(i > 0, ..., ...)",
        ),
        (
            "y[i:3] = x[i]*2 + sum[i:4](x[i+1])",
            "p:1:5: label i has two extents: 200 in x[i] and 3 in i:3; expected the same extent "
            "everywhere; a slice such as x[:3][i] reads less of a tensor",
        ),
        ("y = x[::0]", "p:1:5: a slice has step 0; expected another step"),
        (
            "y = x[1:2,0]",
            "p:1:5: x[1:2, 0] has the wrong number of indices; expected 1, one for "
            "each dimension of x",
        ),
    ],
)
def test_refusals(text, message):
    with pytest.raises(einmpi.InputError) as caught:
        einmpi.program(text, x=X)
    assert str(caught.value) == message.replace("p:", "program:", 1)


def test_a_guard_that_fails_is_an_error():
    """Where a condition holds, what it guards is read, and must be there."""
    with pytest.raises(einmpi.EinmpiError, match="an index from 5 to 204 is out of range"):
        einmpi.run("y[i] = where(x[i] == x[i], x[i+5], 0)", x=X)


def test_a_row_moves_alone():
    """Of a matrix that is cut by rows, one row moves and nothing else."""
    _, moved = run_from_files(4, "s[i] = sum[j](u[i,j] * u[i,j])\ny[j] = u[5,j]", {"u": U})
    assert moved <= 2 * 4 * N * 8


@st.composite
def programs(draw):
    """A tensor, an affine index of each of its dimensions, and where labels are aggregated."""
    labels = ["i", "j", "k"][: draw(st.integers(1, 3))]
    extents = {label: draw(st.integers(1, 9)) for label in labels}
    shape = []
    entries = []
    for _ in range(draw(st.integers(1, 3))):
        used = draw(st.lists(st.sampled_from(labels), min_size=0, max_size=2, unique=True))
        coefficients = {label: draw(st.sampled_from([-3, -1, 1, 1, 2])) for label in used}
        reach = {label: c * (extents[label] - 1) for label, c in coefficients.items()}
        offset = -sum(min(r, 0) for r in reach.values()) + draw(st.integers(0, 2))
        shape.append(offset + sum(max(r, 0) for r in reach.values()) + 1 + draw(st.integers(0, 2)))
        entries.append((coefficients, offset))
    summed = draw(st.sampled_from([None, *labels]))
    return labels, extents, tuple(shape), entries, summed


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(programs(), st.integers(1, 9), st.booleans())
def test_random_affine_indices(program, ranks, computed):
    labels, extents, shape, entries, summed = program
    x = np.arange(1.0, np.prod(shape) + 1).reshape(shape)
    index = []
    for coefficients, offset in entries:
        terms = [f"{coefficient}*{label}" for label, coefficient in coefficients.items()]
        index.append(" + ".join([*terms, str(offset)]))
    output = [label for label in labels if label != summed]
    body = f"x[{', '.join(index)}] + {' + '.join(labels)}"
    if summed:
        body = f"sum[{summed}:{extents[summed]}]({body})"
    head = "y"
    if output:
        head += "[" + ",".join(f"{label}:{extents[label]}" for label in output) + "]"
    text = f"{head} = {body}"
    if computed:
        dimensions = "abc"[: len(shape)]
        listed = ",".join(dimensions)
        text = f"v[{listed}] = x[{listed}] * 2\n" + text.replace("x[", "v[", 1)
    outputs, _ = run_from_files(ranks, text, {"x": x})
    grid = dict(
        zip(labels, np.ogrid[tuple(slice(extents[label]) for label in labels)], strict=True)
    )
    place = []
    for coefficients, offset in entries:
        place.append(offset + sum(c * grid[label] for label, c in coefficients.items()))
    whole = tuple(extents[label] for label in labels)
    place = tuple(np.broadcast_to(p, whole) for p in place)
    expected = (x * 2 if computed else x)[place] + sum(grid.values())
    if summed:
        expected = expected.sum(labels.index(summed))
    assert np.array_equal(outputs["y"], expected)  # small integers: exact


# ---- guards, extents and messages ---------------------------------------------------------------

NONE = np.zeros(0)
THREE = np.array([10.0, 20.0, 30.0])
FIVE = np.arange(1.0, 6.0)
PLACES = np.array([4, 3, 2, 1, 0])


@pytest.mark.sampled(15)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    "text",
    [
        "y[i] = where(x[i] > 100, e[k[i]], x[i])",
        "y[i] = where(i > 100, e[i-101], x[i]) + 0 * k[i]",
        "y[i:5] = where(i < 0, e[i], x[i]) + 0 * k[i]",
        "y[i:5] = where(i < 0, e[i], x[i-0]) + 0 * k[i]",
        "y[i] = where(x[i] > 100, sum[j](e[k[j]]), x[i])",
    ],
)
@pytest.mark.parametrize("dtype", ["float64", "int32", "bool"])
def test_a_guarded_index_into_an_empty_tensor_is_never_used(text, ranks, dtype):
    arrays = {"x": FIVE, "e": NONE.astype(dtype), "k": PLACES}
    outputs, _ = run_from_files(ranks, text, arrays)
    assert np.array_equal(outputs["y"], FIVE)


def test_an_index_into_an_empty_tensor_that_is_used_is_an_error():
    text = "y[i] = where(x[i] > 4, e[k[i]], x[i])"
    with pytest.raises(einmpi.EinmpiError, match="out of range"):
        einmpi.run(text, x=FIVE, e=NONE, k=PLACES)


def test_rows_of_an_empty_matrix():
    text = "y[i,j] = where(x[i] > 100, e[k[i],j], x[i] * b[j])"
    arrays = {"x": FIVE, "e": np.zeros((0, 3)), "k": PLACES, "b": THREE}
    assert np.array_equal(einmpi.run(text, arrays)["y"].gather(), FIVE[:, None] * THREE)


GUARDED_SUMS = {
    "values": ("where(x[i] > 2, sum[j](x[k[j]]), 0)", lambda x: np.where(x > 2, x.sum(), 0)),
    "labels": ("where(i > 2, sum[j](x[k[j]]), 0) + 0 * x[i]", lambda x: [0, 0, 0, 15, 15]),
    "else": ("where(x[i] > 2, 0, max[j](x[k[j]]))", lambda x: np.where(x > 2, 0, 5)),
    "both": (
        "where(x[i] > 1, where(i < 4, sum[j](x[k[j]]), 1), 2)",
        lambda x: [2, 15, 15, 15, 1],
    ),
    "its own label too": (
        "where(x[i] > 2, sum[j](x[k[j]] * x[i]), 0)",
        lambda x: np.where(x > 2, 15 * x, 0),
    ),
}


@pytest.mark.parametrize("name", GUARDED_SUMS)
def test_a_guard_does_not_repeat_a_sum(name):
    body, expected = GUARDED_SUMS[name]
    job = einmpi.program(f"y[i] = {body}", x=FIVE, k=PLACES)
    found = einmpi.run(job, {"x": FIVE, "k": PLACES})["y"].gather()
    assert np.array_equal(found, expected(FIVE))
    for vertex in job.graph.computed:
        is_needed = name == "its own label too"
        assert is_needed or vertex.einsum.calls() <= 5, str(vertex)


def test_a_guarded_sum_reads_nothing_if_no_condition_holds():
    text = "y[i] = where(x[i] > 100, sum[j](x[k[j]]), 7)"
    found = einmpi.run(text, x=FIVE, k=PLACES + 1000)["y"]
    assert np.array_equal(found.gather(), [7] * 5)
    with pytest.raises(einmpi.EinmpiError, match="out of range"):
        einmpi.run(text.replace("100", "4"), x=FIVE, k=PLACES + 1000)


@pytest.mark.parametrize("body", ["x[i] * b[i] + x[i+1]", "b[i] * x[i] + x[i+1]"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_written_extent_comes_before_those_of_tensors(body, ranks):
    outputs, _ = run_from_files(ranks, f"y[i:3] = {body}", {"x": FIVE, "b": THREE})
    assert np.array_equal(outputs["y"], FIVE[:3] * THREE + FIVE[1:4])


def test_a_guarded_label_inside_of_a_sum_may_go_further_than_its_tensor():
    text = "y[i:5] = where(i < 3, sum[j](b[i] * x[j]), 0)"
    found = einmpi.run(text, x=FIVE, b=THREE)["y"].gather()
    assert np.array_equal(found, [150, 300, 450, 0, 0])


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "y[i] = x[i] * 0 + where(i > 1, x[i-3], 0)",
            "p:1:34: the index i - 3 goes from -1 to 1; expected 0 to 4; "
            "the condition of where has to exclude the rest",
        ),
        (
            "y[i] = x[i] + where((i < 3) | (i > 3), 0, where(i == 3, x[2*i], 0))",
            "p:1:59: the index 2 * i goes from 6 to 6; expected 0 to 4; "
            "the condition of where has to exclude the rest",
        ),
        (
            "y[i] = x[:][i] + b[1:][i]",
            "p:1:24: label i has two extents: 5 in x[:][i] and 2 in b[1:][i]; "
            "expected the same extent everywhere",
        ),
        (
            "y[i,j] = x[1:][i] + b[1:][i,j]",
            "p:1:21: b[1:][i, j] has the wrong number of indices; "
            "expected 1, one for each dimension of b[1:]",
        ),
        (
            "y[i] = sum[k:9](x[1:][i+k])",
            "p:1:17: no value of label i keeps x[1:][i + k] inside of its tensor; "
            "expected a longer tensor or smaller extents; i starts at 0, and where(...) guards an "
            "index that leaves its tensor",
        ),
        (
            "y[i] = x[x[1:][i]]",
            "p:1:10: the index x[1:][i] is float64; expected an integer",
        ),
    ],
)
def test_messages_name_what_was_written(text, message):
    with pytest.raises(einmpi.InputError) as caught:
        einmpi.program(text, x=FIVE, b=THREE)
    assert str(caught.value) == message.replace("p:", "program:", 1)


def test_a_condition_on_values_is_left_to_the_run():
    text = "y[i] = where((x[i] > 3) & (i > 1), x[i-3], 0)"
    assert np.array_equal(einmpi.run(text, x=FIVE)["y"].gather(), [0, 0, 0, 1, 2])


PERIODIC = {
    "one neighbour": ("y[i] = x[i] + x[(i+1)%200]", lambda x: x + np.roll(x, -1)),
    "both neighbours": (
        "y[i] = x[(i+1)%200] - 2 * x[i] + x[(i+199)%200]",
        lambda x: np.roll(x, -1) - 2 * x + np.roll(x, 1),
    ),
    "shifted far": ("y[i:200] = x[(i+70)%200]", lambda x: np.roll(x, -70)),
    "a window": (
        "y[i:200] = sum[k:6](x[(i+k)%200] * w[k])",
        lambda x: sum(W[k] * np.roll(x, -k) for k in range(6)),
    ),
    "backwards": ("y[i:200] = x[(199-i+3)%200] + x[i]", lambda x: np.roll(x[::-1], 3) + x),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("case", PERIODIC)
def test_periodic_indices(case, ranks):
    text, wanted = PERIODIC[case]
    inputs = {"x": X, "w": W} if "w[" in text else {"x": X}
    outputs, moved = run_from_files(ranks, text, inputs)
    assert np.allclose(outputs["y"], wanted(X), rtol=0, atol=1e-13)
    if "neighbour" in case and ranks > 2:
        count = 2 if case == "both neighbours" else 1
        assert moved == ranks * count * X.itemsize


def test_a_periodic_grid_moves_its_wrapped_halo():
    """Neighbours in both dimensions: no cut goes without a wrap."""
    u = RNG.normal(size=(32, 32))
    text = "Z[i,j] = u[(i+1)%32,j] + u[(i+31)%32,j] + u[i,(j+1)%32] + u[i,(j+31)%32] - 4 * u[i,j]"
    outputs, moved = run_from_files(4, text, {"u": u})
    wanted = sum(np.roll(u, step, axis) for step in (1, -1) for axis in (0, 1)) - 4 * u
    assert np.allclose(outputs["Z"], wanted, rtol=0, atol=1e-13)
    assert moved == 4 * 2 * 32 * 8


def test_planning_a_chain_of_stencils_counts_each_cut_once():
    """On 64 ranks there are 4096 pairs of a layout and a state for each of the stencils."""
    lines = ["y1[i:1999] = x[i] + x[i+1]"]
    lines += [f"y{k}[i:{2000 - k}] = y{k - 1}[i] + y{k - 1}[i+1]" for k in range(2, 21)]
    job = einmpi.program("\n".join(lines), x=(2000,))
    start = time.process_time()
    plan = einmpi.plan(job, ranks=64)
    # It took 40 times as long when every pair was counted on its own.
    assert time.process_time() - start < 10
    assert plan.words_predicted == 20 * 63


def test_the_peak_has_no_copy_of_what_is_read_in_place():
    job = einmpi.program("Z[i:98] = u[i] + u[i+2]", u=(100,))
    assert einmpi.plan(job, ranks=1).peak == (100 + 98) * 8
    # Splits begin where the blocks of ranks do: nothing is fetched, and nothing is copied.
    job = einmpi.program("Z[a:20,b:10] = x[a*10+b] * 2", x=(200,))
    assert einmpi.plan(job, ranks=4).peak == 2 * 50 * 8


def test_the_least_memory_is_that_of_a_rank():
    """A rank keeps what it needs of an operand with index arithmetic, not all of the tensor."""
    text = "Z[i:3998] = u[i] * u[i+2]"
    u = RNG.normal(size=4000)
    job = einmpi.program(text, u=(4000,))
    with pytest.raises(InputError, match="at least") as refusal:
        einmpi.plan(job, ranks=4, memory=100)
    least = int(re.search("at least ([0-9]*) bytes", str(refusal.value)).group(1))
    assert least < 17_000  # two operands of a quarter each, and a piece of the result
    outputs, _ = run_from_files(4, text, {"u": u}, memory=least)
    assert np.array_equal(outputs["Z"], u[:-2] * u[2:])
