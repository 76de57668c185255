"""What attention kernels need no GPU for: their text, tiles, and how arrays are stored."""

import types
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from attention_cases import HEADS_FIRST, PLAIN, SHARED_HEADS, Case, attention_chain, gradient_chain

from einmpi.kernels.attention.pattern import find_attention
from einmpi.kernels.cuda.attention import launches
from einmpi.kernels.cuda.attention.backward import (
    PRODUCTS_GIVEN,
    PRODUCTS_IN_A_PASS,
    PRODUCTS_OF_RESULTS,
    column_gradients_text,
    gradient_bytes,
    row_gradients_text,
    row_numbers_text,
)
from einmpi.kernels.cuda.attention.chain import (
    Storage,
    prepare_attention_chain,
    prepare_gradient_chain,
)
from einmpi.kernels.cuda.attention.forward import forward_bytes, forward_text
from einmpi.kernels.cuda.attention.launches import AttentionLaunch, Scores, Stored, supports
from einmpi.kernels.cuda.attention.tiles import TileSizes

# The most shared memory of a block with compute capability 8.6 and 8.9, and with 9.0.
SMALLEST_SHARED_BYTES = 99 * 1024
HOPPER_SHARED_BYTES = 227 * 1024
HEADS = [8, 32, 40, 64, 80, 96, 128]


class FakeArray:
    """An array that is nowhere: contiguous, with an address."""

    def __init__(self, shape, dtype, address=4096):
        self.shape = shape
        self.dtype = types.SimpleNamespace(name=dtype)
        itemsize = 4 if dtype == "float32" else 2
        sizes = [int(np.prod(shape[position + 1 :])) for position in range(len(shape))]
        self.strides = tuple([itemsize * size for size in sizes])
        self.data = types.SimpleNamespace(ptr=address)


@pytest.fixture
def compiled(monkeypatch):
    """Let kernels be compiled by nobody, for compute capability 9.0; return their texts."""
    texts = []

    def compile_attention(text, warpgroups, shared_bytes, device):
        texts.append(text)

    device = types.SimpleNamespace(compute_capability="90", id=0)
    cuda = types.SimpleNamespace(Device=lambda: device)
    monkeypatch.setattr(launches, "compiled_attention", compile_attention)
    monkeypatch.setattr(launches.driver, "cupy", lambda: types.SimpleNamespace(cuda=cuda))
    return texts


def arrays_of(step):
    arrays = {}
    for number, slot in enumerate((*step.reads, *step.writes)):
        arrays[slot.name] = FakeArray(slot.shape, slot.dtype, 4096 * (number + 1))
    return arrays


def stored(**changes):
    array = Stored("float16", (1, 1, 1, 8, 64), (1024, 1024, 1024, 128, 2), 4096)
    return replace(array, **changes)


# ---- texts and tiles ----------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("warpgroups", [False, True])
def test_tiles_fit_into_shared_memory(head, warpgroups):
    limit = HOPPER_SHARED_BYTES if warpgroups else SMALLEST_SHARED_BYTES
    forward = launches.forward_sizes("float16", head, warpgroups)
    assert forward_bytes(forward) * forward.blocks <= limit
    for sizes in (
        launches.row_gradient_sizes("float16", head, warpgroups),
        launches.column_gradient_sizes("float16", head, warpgroups),
    ):
        assert gradient_bytes(sizes) * sizes.blocks <= limit
        assert sizes.threads % 128 == 0


@pytest.mark.parametrize("warpgroups", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_text_has_the_instructions_of_its_gpu_and_dtype(dtype, warpgroups):
    sizes = TileSizes(dtype, 64, 128, 64, warpgroups)
    fraction = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    for text in (
        forward_text(sizes),
        row_gradients_text(sizes, PRODUCTS_IN_A_PASS),
        column_gradients_text(sizes),
    ):
        assert ("wgmma.mma_async" in text) == warpgroups
        assert ("mma.sync.aligned.m16n8k16" in text) != warpgroups
        assert f"f32.{fraction}.{fraction}" in text
        for word in ("PARAMETERS", "BATCH_OFFSETS", "FRACTION"):
            assert word not in text
        assert text.count("{") == text.count("}")
    assert "atomic" not in text


def test_a_text_says_where_the_sums_of_weighted_slopes_come_from():
    sizes = TileSizes("float16", 64, 128, 64, True)
    for choice in (PRODUCTS_GIVEN, PRODUCTS_OF_RESULTS, PRODUCTS_IN_A_PASS):
        assert f"constexpr int PRODUCTS = {choice};" in row_gradients_text(sizes, choice)
    assert row_numbers_text(sizes).count('extern "C"') == 1


# ---- what is supported --------------------------------------------------------------------------


def test_supported(compiled):
    assert supports([stored()], Scores(0.5))
    assert not supports([stored(dtype="float32")], Scores(0.5))
    assert not supports([stored(address=4098)], Scores(0.5))
    assert not supports([stored(strides=(1024, 1024, 1024, 130, 2))], Scores(0.5))
    assert not supports([stored(strides=(1024, 1024, 1024, 128, 4))], Scores(0.5))
    assert not supports([stored(shape=(1, 1, 1, 0, 64))], Scores(0.5))
    assert not supports([stored(shape=(1, 1, 1, 8, 60))], Scores(0.5))
    assert not supports([stored(shape=(1, 1, 1, 8, 136))], Scores(0.5))
    assert not supports([stored(), stored(shape=(1, 1, 1, 8, 32))], Scores(0.5))
    assert not supports([stored(), stored(dtype="bfloat16")], Scores(0.5))
    assert not supports([stored()], Scores(-0.5))
    assert not supports([stored()], Scores(0.5, fill=inf))


@pytest.mark.parametrize("known", ["75", None])
def test_older_gpus_and_stand_ins_are_not_supported(monkeypatch, known):
    cuda = types.SimpleNamespace()
    if known is not None:
        cuda.Device = lambda: types.SimpleNamespace(compute_capability=known)
    monkeypatch.setattr(launches.driver, "cupy", lambda: types.SimpleNamespace(cuda=cuda))
    assert not supports([stored()], Scores(0.5))


def test_rows_that_see_nothing():
    assert Scores(1.0).every_row_sees(10, 3)
    assert Scores(1.0, upper=0).every_row_sees(10, 3)
    assert not Scores(1.0, upper=-1).every_row_sees(10, 10)
    assert not Scores(1.0, lower=0).every_row_sees(10, 9)
    assert Scores(1.0, lower=0).every_row_sees(10, 10)
    assert not Scores(1.0, lower=2, upper=1).every_row_sees(10, 20)
    assert not Scores(1.0, fill=-5.0).skips


# ---- how arrays are stored ----------------------------------------------------------------------


def storage_of(case):
    chain, written = attention_chain(case)
    found = find_attention(chain.kernels, written)
    return Storage(found.elements, arrays_of(chain), found.labels)


def test_batches_that_lie_in_a_row_are_one():
    storage = storage_of(Case(HEADS_FIRST, batch=3, heads=5))
    sizes = [size for size, _ in storage.batches(3)]
    assert sizes == [1, 15, 1]


def test_batches_that_do_not_are_two():
    storage = storage_of(Case(PLAIN, batch=3, heads=5, head=64))
    batches = storage.batches(3)
    assert [size for size, _ in batches] == [3, 5, 1]
    assert batches[1][1]["q"] == 2 * 64


def test_members_that_share_k_and_v_have_no_stride_there():
    storage = storage_of(Case(SHARED_HEADS, batch=3, heads=5, members=4, head=64))
    batches = storage.batches(3)
    assert [size for size, _ in batches] == [3, 5, 4]
    assert batches[2][1]["k"] == batches[2][1]["v"] == 0
    assert batches[2][1]["q"] == 2 * 64


def test_too_many_dimensions_of_batches_are_not_supported():
    storage = storage_of(Case(SHARED_HEADS, batch=3, heads=5, members=4))
    assert storage.batches(1) is None


# ---- chains -------------------------------------------------------------------------------------


def arguments_of(launch, names):
    """Return the values of a launch that follow some addresses: strides of arrays."""
    found = {}
    for name in names:
        position = launch.arguments.index(name)
        found[name] = tuple(launch.arguments[position + 1 : position + 5])
    return found


def test_a_chain_becomes_a_launch(compiled, monkeypatch):
    launched = []
    monkeypatch.setattr(
        AttentionLaunch, "__call__", lambda self, given: launched.append((self, given))
    )
    chain, _ = attention_chain(Case(batch=3, heads=5, rows=300, columns=40), with_numbers=True)
    arrays = arrays_of(chain)
    prepared = prepare_attention_chain(chain, arrays)
    assert prepared is not None
    assert len(compiled) == 1
    prepared.compute(arrays)
    ((launch, given),) = launched
    assert launch.blocks == 3 * 5 * 3
    assert given["q"] == arrays["Q"].data.ptr
    assert set(given) == {"q", "k", "v", "o", "maxima", "totals"}
    strides = arguments_of(launch, ["q", "maxima"])
    assert strides["q"] == (300 * 5 * 64, 64, 0, 5 * 64)
    assert strides["maxima"] == (5 * 300, 300, 0, 1)


@pytest.mark.parametrize(
    ("given", "launches_expected"),
    [((), 3), (("statistics",), 3), (("statistics", "products"), 3)],
    ids=["nothing given", "statistics", "products too"],
)
def test_a_chain_of_gradients_becomes_launches(compiled, given, launches_expected):
    chain, _ = gradient_chain(Case(SHARED_HEADS, batch=2, heads=3, members=4), given)
    prepared = prepare_gradient_chain(chain, arrays_of(chain))
    assert prepared is not None
    assert len(compiled) == launches_expected
    rows = 2 * 3 * 4 * 40
    assert prepared.workspace == 2 * 4 * rows + (0 if given else 2 * rows * 64)


def test_chains_in_float32_are_left_to_other_kernels(compiled):
    chain, _ = attention_chain(Case(dtype="float32"))
    assert prepare_attention_chain(chain, arrays_of(chain)) is None
    chain, _ = gradient_chain(Case(dtype="float32"))
    assert prepare_gradient_chain(chain, arrays_of(chain)) is None


def test_an_unsuitable_head_is_left_to_other_kernels(compiled):
    chain, _ = attention_chain(Case(head=20))
    assert prepare_attention_chain(chain, arrays_of(chain)) is None
