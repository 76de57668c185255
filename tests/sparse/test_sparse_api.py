"""Sparse tensors in Python: what is taken for one, what comes back, and what is refused."""

from dataclasses import replace
from gc import collect
from weakref import ref

import numpy as np
import pytest
import scipy.sparse

import einmpi
from einmpi.comm.base import ALONE
from einmpi.compiled.sparse import stored_job
from einmpi.graph.sparse.coordinates import Coordinates
from einmpi.kernels.cpu import compiled
from einmpi.planner.make_plan import make_plan
from einmpi.planner.text.explain import as_json, explain

RNG = np.random.default_rng(0)
DENSE = np.where(RNG.random((6, 5)) < 0.4, RNG.standard_normal((6, 5)), 0)
CSR = scipy.sparse.csr_array(DENSE)
X = RNG.standard_normal(5)


def stored():
    return einmpi.SparseArray.from_keys(np.nonzero(DENSE), DENSE[np.nonzero(DENSE)], DENSE.shape)


@pytest.mark.parametrize(
    "make",
    [
        lambda: CSR,
        lambda: scipy.sparse.csc_matrix(DENSE),
        lambda: scipy.sparse.lil_array(DENSE),
        lambda: scipy.sparse.dia_array(DENSE),
        stored,
        lambda: stored().coordinates(),
    ],
)
def test_all_kinds_of_sparse_inputs(make):
    text = "y[i] = sum(A[i,j] * x[j])"
    wanted = DENSE @ X
    given = make()
    job = einmpi.program(text, A=given, x=X)
    assert job.graph["A"].bound == (6, 5)
    for found in (
        einmpi.run(job, {"A": given, "x": X})["y"],
        einmpi.run(text, A=given, x=X)["y"],
        einmpi.compile(job)({"A": given, "x": X})["y"],
        einmpi.run(einmpi.program(text, A=(6, 5), x=(5,)), A=given, x=X)["y"],
    ):
        np.testing.assert_allclose(found.gather(), wanted)
    np.testing.assert_allclose(einmpi.reference(job, {"A": given, "x": X})["y"], wanted)
    np.testing.assert_allclose(einmpi.einsum("ij,j->i", given, X), wanted)


def test_a_job_that_was_made_for_a_sparse_tensor_takes_a_dense_one():
    job = einmpi.program("y[i] = sum(A[i,j] * x[j])", A=CSR, x=X)
    np.testing.assert_allclose(einmpi.run(job, A=DENSE, x=X)["y"].gather(), DENSE @ X)


def test_pydata_sparse():
    # Without a version it would find the folder tests/sparse.
    sparse = pytest.importorskip("sparse", minversion="0.15")
    given = sparse.COO.from_numpy(np.where(DENSE == 0, np.inf, DENSE), fill_value=np.inf)
    found = einmpi.run("d[i] = min(W[i,j] + x[j])", W=given, x=X)["d"].gather()
    np.testing.assert_allclose(found, (given.todense() + X).min(1))
    whole = einmpi.run("V[i,j] = W[i,j] + x[j]", W=given, x=X)["V"].gather()
    assert isinstance(whole, sparse.COO) and whole.fill_value == np.inf
    np.testing.assert_allclose(whole.todense(), given.todense() + X)
    tensor = sparse.GCXS.from_numpy(np.stack([DENSE, 2 * DENSE]))
    found = einmpi.einsum("kij,j->ki", tensor, X)
    np.testing.assert_allclose(found.todense(), np.stack([DENSE, 2 * DENSE]) @ X)


def test_results_are_inputs():
    product = einmpi.run("B[i,j] = A[i,j] * x[j]", A=CSR, x=X)["B"]
    assert isinstance(product, einmpi.SparseArray)
    assert repr(product) == f"<SparseArray float64[6, 5], {CSR.nnz} stored, others 0.0>"
    found = einmpi.run("C[i,k] = sum(A[i,j] * B[k,j])", A=stored(), B=product)["C"]
    whole = found.gather()
    assert isinstance(whole, scipy.sparse.coo_array)
    np.testing.assert_allclose(whole.toarray(), DENSE @ (DENSE * X).T)
    assert isinstance(einmpi.einsum("ij,kj->ik", stored(), product), einmpi.SparseArray)
    assert scipy.sparse.issparse(einmpi.einsum("ij,kj->ik", CSR, CSR))


def test_calls_with_one_pattern_are_planned_once():
    compiled = einmpi.compile(einmpi.program("y[i] = sum(A[i,j] * x[j])", A=CSR, x=X))
    for factor in (1, 2, 3):
        found = compiled(A=factor * CSR, x=X)["y"].gather()
        np.testing.assert_allclose(found, factor * DENSE @ X)
    assert len(compiled.of_patterns) == 1
    for rows in range(1, 6):
        other = scipy.sparse.csr_array(DENSE * (np.arange(6) < rows)[:, None])
        np.testing.assert_allclose(compiled(A=other, x=X)["y"].gather(), other @ X)
    assert len(compiled.of_patterns) <= 4


def test_dtypes_adapt_as_those_of_arrays():
    given = scipy.sparse.csr_array(CSR.astype("float32"))
    job = einmpi.program("y[i] = sum(A[i,j] * x[j])", A=(6, 5), x=(5,))
    found = einmpi.run(job, A=given, x=X)["y"].gather()
    np.testing.assert_allclose(found, DENSE @ X, rtol=1e-6)
    job = einmpi.program("y[i] = sum(A[i,j])", A=(6, 5), dtype="float32")
    with pytest.raises(einmpi.InputError, match=r"inputs: A is float64\[6, 5\]"):
        einmpi.run(job, A=CSR)


def test_gradients_have_the_pattern_of_their_tensor():
    job = einmpi.program("loss = sum[i]((sum[j](A[i,j] * x[j]) - 1)**2)", A=CSR, x=X)
    found = einmpi.run(einmpi.grad(job, "loss", ["A", "x"]), A=CSR, x=X)
    slope = 2 * (DENSE @ X - 1)
    assert isinstance(found["dA"], einmpi.SparseArray)
    wanted = np.where(DENSE != 0, np.outer(slope, X), 0)
    np.testing.assert_allclose(found["dA"].gather().toarray(), wanted)
    np.testing.assert_allclose(found["dx"].gather(), DENSE.T @ slope)


def test_gradients_of_a_product_of_sparse_tensors():
    text = "C[i,k] = sum(A[i,j] * B[k,j]); loss = sum(C[i,k]**2)"
    job = einmpi.grad(einmpi.program(text, A=CSR, B=CSR), "loss", ["A"])
    found = einmpi.run(job, A=CSR, B=CSR)["dA"]
    wanted = np.where(DENSE != 0, 2 * (DENSE @ DENSE.T) @ DENSE, 0)
    np.testing.assert_allclose(found.gather().toarray(), wanted)


def test_a_sparse_tensor_that_a_loop_carries():
    text = """
    loss = sum[i]((sum[j](A[i,j] * x[j]) - 1)**2)
    dA[i,j] = grad(loss, A[i,j])
    A2[i,j] = A[i,j] - 0.01 * dA[i,j]
    """
    job = einmpi.program(text, A=CSR, x=X, outputs=["A2", "loss"])
    found = einmpi.loop(job, {"A": CSR, "x": X}, carry={"A": "A2"}, steps=4, record=["loss"])
    values = DENSE.copy()
    for step in range(4):
        error = values @ X - 1
        np.testing.assert_allclose(found.history["loss"][step], (error**2).sum())
        values = values - 0.01 * np.where(DENSE != 0, np.outer(2 * error, X), 0)
    np.testing.assert_allclose(found.outputs["A"].gather().toarray(), values)


def test_attention_needs_no_rule_of_its_own():
    """Scores are computed where the mask is stored, and nowhere else."""
    mask = scipy.sparse.csr_array((RNG.random((7, 7)) < 0.3) | np.eye(7, dtype=bool))
    Q, K, V = RNG.standard_normal((3, 7, 4))
    text = """
    S[i,j] = where(M[i,j], sum(Q[i,d] * K[j,d]), -inf)
    P[i,j] = softmax[j](S[i,j])
    Z[i,f] = sum(P[i,j] * V[j,f])
    """
    job = einmpi.program(text, M=mask, Q=Q, K=K, V=V)
    compiled = einmpi.compile(job)
    found = compiled(M=mask, Q=Q, K=K, V=V)["Z"].gather()
    scores = np.where(mask.toarray(), Q @ K.T, -np.inf)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    np.testing.assert_allclose(found, weights @ V)
    ((stored_job, _),) = compiled.of_patterns.values()
    assert all(vertex.elements <= 7 * 7 - 1 for vertex in stored_job.job.written.vertices)


@pytest.mark.parametrize(
    ("text", "formats", "message"),
    [
        ("Z[i,j] = A[i,j] + x[j]", {"Z": "sparse"}, "Z has no pattern: what is not stored has no"),
        ("Z[i,j] = A[i,j] + x[j]", {"Z": "like x"}, "Z is like x, which is dense"),
        ("Z[i,j] = A[i,j] * x[j]", {"Z": "csr"}, "the format of Z is 'csr'; expected \"dense\""),
        ("Z[i,j] = A[i,j] * x[j]", {"Y": "dense"}, "unknown tensor 'Y'; expected one of A, x, Z"),
        ("Z = sum(L[i,j] + L[j,k])", {}, r"sparse tensors with keys \[i,j\] and \[j,k\]"),
        ("Z[i,k] = sum(L[i,j] * (1 + L[k,j]))", {}, r"Z needs L\[k,j\] at all k"),
        ("Z[i,j] = cumsum[j](A[i,j])", {}, "is a scan along a key of A, which is sparse"),
        ("Z[i:4] = A[i,i+1]", {}, "Z reads A by a gather or index arithmetic, and it is sparse"),
        ("Z[i,j] = sum[k](exp(T[i,j,k]))", {}, "Z would be sparse, with 1.0 for each element"),
    ],
)
def test_refused(text, formats, message):
    square = scipy.sparse.csr_array(DENSE[:5])
    tensor = Coordinates.of(([0, 1], [1, 2], [0, 0]), [1.0, 2.0], (5, 5, 5))
    large = Coordinates.of(([5], [7]), [1.0], (10**5, 10**5))
    inputs = {"A": square, "x": X, "T": tensor, "L": large}
    used = {name: value for name, value in inputs.items() if f"{name}[" in text}
    with pytest.raises(einmpi.InputError, match=message) as error:
        job = einmpi.program(text, formats=formats, **used)
        einmpi.run(job, used)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "Z[i,k] = sum(A[i,j] * A[k,j]) + A[i,i] * x[k]",
        "Z[i,k] = sum(A[i,j] * (1 + A[k,j]))",
        "Z[j] = max[i](A[i,j] * A[i,i])",
        "Z[i] = sum(A[i,j] + A[j,j] + A[j,k] * x[k])",
    ],
)
def test_unlike_keys(text):
    """The smaller tensors are taken for dense ones."""
    inputs = {"A": scipy.sparse.csr_array(DENSE[:5])}
    if "* x[" in text:
        inputs["x"] = X
    job = einmpi.program(text, **inputs)
    found = einmpi.run(job, inputs)["Z"]
    wanted = einmpi.reference(job, inputs)["Z"]
    whole = found.gather()
    whole = whole.toarray() if scipy.sparse.issparse(whole) else whole
    np.testing.assert_allclose(whole, wanted, rtol=1e-12)  # sums of few numbers


def test_strict_programs_are_dense():
    """A product with what is not stored is 0, whatever the other factor is."""
    text = "y[i] = sum(A[i,j] * x[j])"
    x = np.where(np.arange(5) == 2, np.inf, X)
    with pytest.raises(einmpi.InputError, match=r"strict is true, and A is sparse.* \"dense\" if"):
        einmpi.run(einmpi.program(text, A=CSR, x=x, strict=True), A=CSR, x=x)
    job = einmpi.program(text, A=CSR, x=x, strict=True, formats={"A": "dense"})
    with np.errstate(invalid="ignore"):
        wanted = (DENSE * x).sum(axis=1)
    np.testing.assert_allclose(einmpi.run(job, A=CSR, x=x)["y"].gather(), wanted)


def test_formats():
    text = "Z[i,j] = A[i,j] * x[j]"
    wanted = DENSE * X
    dense = einmpi.run(einmpi.program(text, formats={"Z": "dense"}, A=CSR, x=X), A=CSR, x=X)["Z"]
    assert isinstance(dense, einmpi.DistArray)
    np.testing.assert_allclose(dense.gather(), wanted)
    text = "Z[i,j] = A[i,j] + x[j]"
    whole = einmpi.run(einmpi.program(text, formats={"A": "dense"}, A=CSR, x=X), A=CSR, x=X)["Z"]
    np.testing.assert_allclose(whole.gather(), DENSE + X)
    half = scipy.sparse.csr_array(DENSE * (np.arange(6) < 3)[:, None])
    text = "Z[i,j] = B[i,j] * 2"
    job = einmpi.program(text + "; t = sum(A[i,j])", formats={"Z": "like A"}, A=CSR, B=half)
    like = einmpi.run(job, A=CSR, B=half)["Z"]
    assert like.values.shape == (CSR.nnz,)
    np.testing.assert_allclose(like.gather().toarray(), 2 * half.toarray())
    job = einmpi.program(text + "; t = sum(A[i,j])", formats={"Z": "like A"}, A=half, B=CSR)
    with pytest.raises(einmpi.InputError, match="Z has stored elements where A has none"):
        einmpi.run(job, A=half, B=CSR)
    row = einmpi.SparseArray.from_keys(([1, 4],), RNG.standard_normal((2, 3)), (6, 3))
    job = einmpi.program("Z[i,f] = 2 * R[i,f]", formats={"Z": "sparse"}, R=row)
    assert einmpi.run(job, R=row)["Z"].values.shape == (2, 3)


def test_the_reference_makes_small_tensors_dense():
    large = Coordinates.of(([0], [1]), [1.0], (10**5, 10**5))
    job = einmpi.program("t = sum(A[i,j])", A=large)
    with pytest.raises(einmpi.InputError, match="A has 10,000,000,000 elements"):
        einmpi.reference(job, {"A": large})
    assert einmpi.run(job, A=large)["t"].gather() == 1


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            np.repeat(np.arange(8), 3),
            "24 of 64 elements, by rows; at most 1.00 × the mean on a rank",
        ),
        (np.sort(np.arange(24) % 8 // 5), "as many on each rank, because rows differ too much"),
    ],
)
def test_a_plan_says_what_is_stored(rows, said):
    keys = np.unique(np.stack([rows, np.arange(24) % 8]), axis=1)
    job = einmpi.program(
        "y[i] = sum(A[i,j])", A=einmpi.SparseArray.from_keys(keys, np.ones(len(keys[0])), (8, 8))
    )
    given = {"A": einmpi.SparseArray.from_keys(keys, np.ones(len(keys[0])), (8, 8))}
    plan = make_plan(stored_job(ALONE, job, given, 2).job.graph, 2)
    assert said in explain(plan)
    assert as_json(plan)["stored"]["A"]["elements"] == len(keys[0])


def test_a_plan_is_that_of_the_sparse_program():
    """A job knows how much is stored; given the tensors, the plan is that of the run."""
    text = "y[i] = sum(A[i,j] * x[j])"
    line = scipy.sparse.diags_array([-1.0, 2, -1], offsets=[-1, 0, 1], shape=(90, 90))
    x = np.ones(90)
    for given in (
        line,
        einmpi.SparseArray.from_keys(line.tocoo().coords, line.tocoo().data, (90, 90)),
    ):
        job = einmpi.program(text, A=given, x=x)
        assumed = einmpi.plan(job, 3)
        assert "A: 268 of 8,100 elements, assumed at random places, by rows" in str(assumed)
        assert as_json(assumed)["stored"]["A"]["is_assumed"]
        found = einmpi.plan(job, 3, {"A": given, "x": x})
        whole = einmpi.SparseArray.from_keys(line.tocoo().coords, line.tocoo().data, (90, 90))
        wanted = stored_job(ALONE, job, {"A": whole}, 3).job.graph
        assert found.digest == make_plan(wanted, 3).digest
        assert "A: 268 of 8,100 elements, by rows" in str(found)
    assert "stores" not in str(einmpi.plan(job, 3, {"A": line.toarray()}))
    gradient = einmpi.grad(
        einmpi.program(f"{text}; loss = sum(y[i]**2)", A=line, x=x), "loss", ["A"]
    )
    assert "A: 268 of 8,100" in str(einmpi.plan(gradient, 2))
    for wrong, message in (({"A": CSR}, "A is float64"), ({"Q": CSR}, "unknown input 'Q'")):
        with pytest.raises(einmpi.InputError, match=message):
            einmpi.plan(job, 3, wrong)
    huge = Coordinates.of((np.zeros(0, int),) * 2, np.zeros(0), (10**9, 10**9))
    job = einmpi.program(text, A=huge, x=(10**9,))
    large = replace(job, expected=(replace(job.expected[0], stored=10**12),))
    with pytest.raises(einmpi.InputError, match="for which a plan would make up keys"):
        einmpi.plan(large, 2)


def test_calls_with_the_same_sparse_tensor():
    """What such a call takes from an earlier one holds for no other tensor."""
    keys = ([0, 0, 2], [1, 2, 0])
    A = einmpi.SparseArray.from_keys(keys, [1.0, 2.0, 3.0], (3, 3))
    B = einmpi.SparseArray.from_keys(keys, [5.0, 6.0, 7.0], (3, 3))
    C = einmpi.SparseArray.from_keys(([1], [1]), [9.0], (3, 3))
    step = einmpi.compile(einmpi.program("y[i] = sum(A[i,j] * x[j])", A=A, x=(3,)))
    x = np.array([1.0, 10, 100])
    for matrix in (A, A, B, A, C, C, A):
        for vector in (x, 2 * x, einmpi.DistArray.from_global(3 * x), list(x)):
            wanted = matrix.gather() @ np.asarray(getattr(vector, "local", vector))
            np.testing.assert_array_equal(step(A=matrix, x=vector)["y"].gather(), wanted)
    np.testing.assert_array_equal(step(A=A.gather(), x=x)["y"].gather(), A.gather() @ x)
    np.testing.assert_array_equal(step(A=A.gather().toarray(), x=x)["y"].gather(), A.gather() @ x)
    for wrong in ({"A": A}, {"A": A, "x": x, "z": x}, {"A": A, "x": x[:2]}, [A, x]):
        step(A=A, x=x)
        with pytest.raises(einmpi.InputError):
            step(wrong)


def test_small_products_of_compiled_steps(monkeypatch):
    """Of a size at which a run is done before a compiler has started."""
    nests = []
    build = compiled.kernel_of
    monkeypatch.setattr(compiled, "kernel_of", lambda nest: nests.append(nest) or build(nest))
    n = 2**13
    row = np.repeat(np.arange(n // 4), 4)
    A = einmpi.SparseArray.from_keys((row, (3 * np.arange(n)) % n), np.ones(n), (n // 4, n))
    x = np.arange(n, dtype=float)
    job = einmpi.program("y[i] = sum(A[i,j] * x[j])", A=A, x=x)
    wanted = A.gather() @ x
    np.testing.assert_array_equal(einmpi.run(job, A=A, x=x)["y"].gather(), wanted)
    assert not nests
    step = einmpi.compile(job)
    for _ in range(4):
        np.testing.assert_array_equal(step(A=A, x=x)["y"].gather(), wanted)
    assert len(nests) == 1


def test_a_matrix_of_scipy_that_changes_between_calls():
    """Its values are used as they are; another pattern, in the same arrays or not, is seen."""
    arrays = np.arange(1.0, 5), np.array([0, 3, 1, 2]), np.array([0, 2, 3, 4])
    given = scipy.sparse.csr_array(arrays, (3, 5))
    step = einmpi.compile(einmpi.program("y[i] = sum(A[i,j] * x[j])", A=given, x=X))

    def check(matrix):
        np.testing.assert_allclose(step(A=matrix, x=X)["y"].gather(), matrix.toarray() @ X)

    for _ in range(3):
        check(given)
        given.data *= 2
    calls = step.last_sparse
    check(3 * given)
    assert step.last_sparse is calls
    given.indices[1] = 4
    check(given)
    given.indptr[1] = 1  # the second element moves to the second row, and is not in order there
    check(given)
    check(given.sorted_indices())
    given.indices[1] = 1  # stored twice
    for _ in range(2):
        check(given)
    check(scipy.sparse.csr_array((3, 5)))


def test_values_that_change_in_place_are_used():
    A = stored()
    step = einmpi.compile(einmpi.program("y[i] = sum(A[i,j] * x[j])", A=A, x=X))
    for _ in range(3):
        np.testing.assert_allclose(step(A=A, x=X)["y"].gather(), A.gather() @ X)
        A.values[:] = 2 * A.values + 1


def test_a_tensor_that_the_caller_gives_up_is_not_kept():
    A = stored()
    values = ref(A.values)
    step = einmpi.compile(einmpi.program("y[i] = sum(A[i,j] * x[j])", A=A, x=X))
    for _ in range(3):
        step(A=A, x=X)
    del A
    collect()
    assert values() is None
    np.testing.assert_allclose(step(A=stored(), x=X)["y"].gather(), DENSE @ X)
