"""xarray on DistArrays, unmodified, and its chunked arrays; numpy's own results are right."""

import configparser
import threading
from importlib.metadata import EntryPoint, entry_points

import numpy as np
import pytest
from mpi_helpers import needs_mpirun, run_mpi
from paths import ROOT

from einmpi import DistArray, EinmpiError, InputError
from einmpi.comm import agreement
from einmpi.comm.mpi import comm_of
from einmpi.comm.threads import run_threads

xr = pytest.importorskip("xarray", "2025.1")
from xarray.namedarray import parallelcompat  # noqa: E402
from xarray.namedarray.daskmanager import DaskManager  # noqa: E402

TIME, PLACE = 11, 7


@pytest.fixture(autouse=True)
def managers(monkeypatch):
    """The chunk managers of this package and of xarray, also where an older one is installed."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    group = "xarray.chunkmanagers"
    name, _, value = parser["options.entry_points"][group].strip().partition(" = ")
    found = parallelcompat.load_chunkmanagers([EntryPoint(name, value, group)])
    monkeypatch.setattr(parallelcompat, "list_chunkmanagers", lambda: found)


@pytest.fixture(autouse=True)
def world(monkeypatch):
    """The ranks of new arrays: in a thread that is a rank, those of `run_threads`."""
    own = threading.local()
    monkeypatch.setattr(
        agreement, "comm_of", lambda comm=None: comm_of(comm or getattr(own, "comm", None))
    )

    def run(ranks, on_rank):
        def on_thread(comm):
            own.comm = comm
            return on_rank()

        return run_threads(ranks, on_thread)

    return run


def datasets():
    random = np.random.default_rng(5)
    values = random.normal(size=(TIME, PLACE))
    values[2, 3] = values[9, 0] = np.nan
    coords = {"time": np.arange(TIME) * 10, "place": list("abcdefg")}
    return xr.Dataset(
        {
            "heat": (("time", "place"), values),
            "rain": (("place", "time"), random.normal(size=(PLACE, TIME))),
            "height": ("place", random.normal(size=PLACE)),
            "count": ("time", random.integers(0, 9, TIME)),
        },
        coords,
        {"source": "a test"},
    )


def distributed(**chunks):
    return datasets().chunk(chunks, chunked_array_type="einmpi")


def same(found, wanted, what=""):
    """Sums of at most a hundred numbers in another order."""
    with DistArray.gather_up_to("1 MiB"):
        found = found.compute()
    xr.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


def whole(array, dim):
    """The array with a dimension that is not cut, if it is chunked."""
    return array if array.chunks is None else array.chunk({dim: -1})


EXPRESSIONS = {
    "arithmetic": lambda d: d.heat * 2 - d.height**2 + d.rain,
    "comparison": lambda d: (d.heat > d.height) & (d["count"] < 5),
    "functions of numpy": lambda d: np.exp(d.heat) + np.maximum(d.rain, 0),
    "mean by name": lambda d: d.heat.mean("time"),
    "sum of all": lambda d: d.heat.sum(),
    "of a dataset": lambda d: d.mean("place"),
    "var": lambda d: d.heat.var("time", ddof=1),
    "max without nans": lambda d: d.heat.max("place"),
    "min with nans": lambda d: d.heat.min("place", skipna=False),
    "count": lambda d: d.heat.count("time"),
    "argmax": lambda d: d.rain.argmax("time"),
    "any": lambda d: (d.heat > 1).any("time"),
    "median": lambda d: d.rain.median("time"),
    "quantile": lambda d: whole(d.rain, "time").quantile(0.3, "time", skipna=False),
    "quantile with nans": lambda d: whole(d.heat, "time").quantile([0.3, 0.9], "time"),
    "cumsum": lambda d: d.rain.cumsum("time"),
    "diff": lambda d: d.heat.diff("time"),
    "dot": lambda d: xr.dot(d.rain, d.height, dim="place"),
    "dot of three": lambda d: xr.dot(d.rain, d.height, d.rain, dim=["place", "time"]),
    "matmul": lambda d: d.rain @ d["count"],
    "where": lambda d: d.heat.where(d.heat > 0),
    "where, other": lambda d: xr.where(d.heat > 0, d.heat, d.height),
    "fillna": lambda d: d.heat.fillna(0.0),
    "isnull": lambda d: d.heat.isnull(),
    "isel": lambda d: d.heat.isel(time=slice(2, 9, 3), place=1),
    "isel of a dataset": lambda d: d.isel(time=slice(2, 9)),
    "sel": lambda d: d.heat.sel(time=slice(20, 70), place="c"),
    "sel, list": lambda d: d.heat.sel(place=["f", "a"]),
    "nearest": lambda d: d.rain.sel(time=[4, 57], method="nearest"),
    "concat": lambda d: xr.concat([d.rain, d.rain * 2], dim="time"),
    "concat, new": lambda d: xr.concat([d.heat, d.rain], dim="kind", join="outer"),
    "merge": lambda d: xr.merge([d[["heat"]], d[["height"]]]),
    "transpose": lambda d: d.heat.transpose("place", "time"),
    "stack": lambda d: d.heat.stack(both=("time", "place")).reset_index("both", drop=True),
    "expand_dims": lambda d: d.height.expand_dims(kind=3),
    "shift": lambda d: d.rain.shift(time=2),
    "roll": lambda d: d.rain.roll(time=2),
    "sortby": lambda d: d.rain.sortby("place", ascending=False),
    "reindex": lambda d: d.rain.reindex(time=[10, 15, 20]),
    "coarsen": lambda d: d.rain.coarsen(time=5, boundary="trim").mean(),
    "rolling": lambda d: d.rain.rolling(time=3).mean(),
    "groupby": lambda d: d.rain.groupby(d.time // 40).mean(),
    "first": lambda d: d.heat.groupby(d.time // 40).first(),
    "resample by bins": lambda d: d.rain.groupby_bins("time", [-1, 30, 60, 110]).sum(),
    "weighted": lambda d: d.rain.weighted(d["count"].fillna(0)).mean("time"),
    "integrate": lambda d: d.rain.integrate("time"),
    "differentiate": lambda d: d.rain.differentiate("time"),
    "interp": lambda d: d.rain.interp(time=[5.0, 25.0]),
    "polyval": lambda d: xr.polyval(
        d.height, xr.DataArray([1.0, 2.0], dims="degree", coords={"degree": [0, 1]})
    ),
    "corr": lambda d: xr.corr(d.rain, d.rain.roll(time=1, roll_coords=False), dim="time"),
    "clip": lambda d: d.rain.clip(-1, 1),
    "round": lambda d: d.rain.round(1),
    "astype": lambda d: d["count"].astype("float32"),
    "broadcast": lambda d: xr.broadcast(d.height, d["count"])[0],
    "idxmax": lambda d: d.rain.idxmax("time"),
    "zeros_like": lambda d: xr.zeros_like(d.heat),
    "to_dataarray": lambda d: d[["heat", "rain"]].to_dataarray("kind"),
    "pad": lambda d: d.rain.pad(time=2, constant_values=1.0),
    "ufunc, allowed": lambda d: xr.apply_ufunc(np.hypot, d.heat, d.rain, dask="allowed"),
    "map": lambda d: d.map(np.abs),
    "map_blocks": lambda d: d.rain.map_blocks(lambda block: block * 2),
    "std of a dataset": lambda d: d.std(),
    "isin": lambda d: d.rain.isin([1.0]),
    "coords": lambda d: d.rain.assign_coords(time=d.time / 2).rename(time="t"),
}


@pytest.mark.sampled(49)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_results_are_those_of_numpy(name, ranks, world):
    compute = EXPRESSIONS[name]
    wanted = compute(datasets())

    def on_rank():
        same(compute(distributed()), wanted)

    world(ranks, on_rank)


def test_data_arrays_of_dist_arrays(world):
    """Without a chunk manager's help: a DistArray is given."""
    values = np.random.default_rng(0).normal(size=(5, 4))

    def on_rank():
        x = DistArray.from_global(values)
        found = xr.DataArray(x, dims=("i", "j"))
        assert found.data is x and "DistArray" in repr(found)
        assert isinstance((found * 2).mean("i").data, DistArray)
        return float((found * 2).mean()), found.chunks

    (mean, chunks), *_ = world(2, on_rank)
    assert mean == pytest.approx(2 * values.mean(), rel=1e-12)
    assert chunks == ((3, 2), (4,))


def test_values_are_gathered_if_that_is_allowed(world):
    def on_rank():
        found = distributed().heat
        for read in ("values", "to_numpy", "compute", "load"):
            with pytest.raises(TypeError, match=r"gather_up_to\(size\)"):
                value = getattr(found, read)
                value()
        with DistArray.gather_up_to("1 KiB"):
            np.testing.assert_array_equal(found.values, datasets().heat.values)
            np.testing.assert_array_equal(found.to_numpy(), datasets().heat.values)
            assert not found.dropna("time").isnull().any()
        with DistArray.gather_up_to(8), pytest.raises(TypeError, match="616 B is not gathered"):
            found.values  # noqa: B018
        assert float(found.sum()) == pytest.approx(float(datasets().heat.sum()), rel=1e-12)
        assert found.persist().data.layout == found.data.layout

    world(3, on_rank)


@pytest.mark.parametrize(
    "chunks, layout",
    [
        ({}, "[4,1]"),
        ({"time": 3}, "[4,1]"),
        ({"place": 2}, "[1,4]"),
        ({"time": -1}, "[1,4]"),
        ({"time": -1, "place": -1}, "[1,1]"),
        ({"time": 6, "place": 4}, "[2,2]"),
        ({"time": (4, 7), "place": (3, 4)}, "[2,2]"),
        ({"time": "auto"}, "[4,1]"),
    ],
)
def test_chunks_say_which_dimensions_are_cut(chunks, layout, world):
    def on_rank():
        plain = datasets().heat
        found = plain.chunk(chunks, chunked_array_type="einmpi")
        again = plain.chunk({}, chunked_array_type="einmpi").chunk(chunks)
        assert str(found.data.layout) == str(again.data.layout) == f"{layout} on 4 ranks"
        assert [sum(lengths) for lengths in found.chunks] == [TIME, PLACE]
        parts = map(int, layout.strip("[]").split(","))
        for count, lengths in zip(parts, found.chunks, strict=True):
            assert (count > 1) == (len(lengths) > 1)
        same(found, plain)
        same(again, plain)
        same(xr.ones_like(found), xr.ones_like(plain))

    world(4, on_rank)


def test_chunks_are_the_pieces_of_all_ranks():
    assert DistArray.ones((0, 3)).chunks == ((0,), (3,))
    assert DistArray.ones(()).chunks == ()

    def on_rank(comm):
        x = DistArray.ones((13, 7), "int8", comm, (3, 2))
        return x.chunks, x.region

    found = run_threads(6, on_rank)
    for dimension in range(2):
        runs = sorted({run for _, region in found for run in region[dimension]})
        lengths = tuple(stop - start for start, stop in runs)
        assert {chunks[dimension] for chunks, _ in found} == {lengths}


def test_what_is_not_a_number_stays_as_it_is(world):
    days = np.datetime64("2026-01-01") + np.arange(4)

    def on_rank():
        given = xr.Dataset({"day": ("x", days), "n": ("x", np.arange(4, dtype=">i4"))})
        found = given.chunk(x=2, chunked_array_type="einmpi")
        assert isinstance(found.day.data, np.ndarray) and isinstance(found.n.data, DistArray)
        assert found.n.dtype == np.dtype("int32").newbyteorder("=")

    world(2, on_rank)


# Functions of arrays of numpy, and how they are called.
def spread(block, weights):
    assert type(block) is np.ndarray and block.shape[-1] == weights.shape[-1] == TIME
    return (block * weights).max(axis=-1) - block.min(axis=-1), np.sort(block, axis=-1)


def line(values):
    assert values.ndim == 1
    return np.polyfit(np.arange(values.size), values, 1)


APPLIED = {
    "elements": lambda d, o: xr.apply_ufunc(np.cbrt, d.rain + d.height, **o),
    "broadcast": lambda d, o: xr.apply_ufunc(np.arctan2, d["count"], d.height, **o),
    "with numbers": lambda d, o: xr.apply_ufunc(np.fmax, d.rain, 0.25, **o),
    "with numpy": lambda d, o: xr.apply_ufunc(np.fmax, d.rain, np.linspace(0, 1, TIME), **o),
    "two results": lambda d, o: xr.Dataset(
        dict(
            zip(
                ("range", "ordered"),
                xr.apply_ufunc(
                    spread,
                    whole(d.rain, "time"),
                    whole(d["count"], "time"),
                    input_core_dims=[["time"], ["time"]],
                    output_core_dims=[[], ["time"]],
                    output_dtypes=[float, float],
                    **o,
                ),
                strict=True,
            )
        )
    ),
    "vectorized": lambda d, o: xr.apply_ufunc(
        line,
        whole(d.rain, "time"),
        input_core_dims=[["time"]],
        output_core_dims=[["degree"]],
        vectorize=True,
        output_dtypes=[float],
        **(o | ({"dask_gufunc_kwargs": {"output_sizes": {"degree": 2}}} if o else {})),
    ),
    "moved": lambda d, o: xr.apply_ufunc(
        np.fft.rfft,
        d.rain,
        input_core_dims=[["time"]],
        output_core_dims=[["frequency"]],
        **(
            o
            | (
                {"dask_gufunc_kwargs": {"output_sizes": {"frequency": 6}, "allow_rechunk": True}}
                if o
                else {}
            )
        ),
    ),
    "all dimensions": lambda d, o: xr.apply_ufunc(
        lambda block: np.linalg.norm(block, axis=(-2, -1)),
        d.rain if d.rain.chunks is None else d.rain.chunk(place=-1, time=-1),
        input_core_dims=[["place", "time"]],
        **o,
    ),
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", APPLIED)
def test_functions_of_blocks(name, ranks, world):
    apply = APPLIED[name]
    wanted = apply(datasets(), {})

    def on_rank():
        same(apply(distributed(), {"dask": "parallelized"}), wanted)

    world(ranks, on_rank)


def test_a_function_that_fails_on_one_rank_fails_on_all(world):
    def refuse_last(block):
        if block.max() == TIME - 1:
            raise ValueError("too large")
        return block

    def on_rank():
        found = xr.DataArray(np.arange(TIME), dims="t").chunk(t=4, chunked_array_type="einmpi")
        with pytest.raises((ValueError, EinmpiError), match="too large"):
            xr.apply_ufunc(refuse_last, found, dask="parallelized")
        return int(found.sum())

    assert world(3, on_rank) == [55] * 3


def test_what_xarray_and_the_manager_refuse(tmp_path, world):
    def on_rank():
        found = distributed()
        with pytest.raises(ValueError, match="handling for chunked arrays has not been enabled"):
            xr.apply_ufunc(np.cbrt, found.rain)
        with pytest.raises(ValueError, match="consists of multiple chunks"):
            xr.apply_ufunc(np.sum, found.heat, input_core_dims=[["time"]], dask="parallelized")
        points = xr.DataArray([1, 2], dims="p")
        with pytest.raises(TypeError, match="Vectorized indexing is not supported"):
            found.heat.isel(time=points, place=points)

    world(2, on_rank)


def test_zarr(tmp_path, world):
    pytest.importorskip("zarr")
    path = tmp_path / "weather.zarr"
    datasets().to_zarr(path, encoding={"heat": {"chunks": (3, 7)}}, consolidated=True)

    def on_rank():
        found = xr.open_zarr(path, chunks={}, chunked_array_type="einmpi", consolidated=True)
        assert str(found.heat.data.layout) == "[3,1] on 3 ranks"
        same(found.heat.mean("time"), datasets().heat.mean("time"))
        same(found, datasets())
        with pytest.raises(InputError, match="all ranks would create the same file"):
            found[["heat"]].drop_encoding().isel(time=slice(9)).to_zarr(tmp_path / f"{id(found)}")

    world(3, on_rank)


def test_dask_arrays(world, monkeypatch):
    """Each rank computes its own block of a Dask array."""
    dask_array = pytest.importorskip("dask.array")
    both = {**parallelcompat.list_chunkmanagers(), "dask": DaskManager()}
    monkeypatch.setattr(parallelcompat, "list_chunkmanagers", lambda: both)
    computed = []

    def note(block):
        computed.append(block.shape)
        return block * 2

    whole_array = np.arange(60.0).reshape(12, 5)
    given = dask_array.from_array(whole_array, chunks=(2, 5)).map_blocks(note, dtype=float)
    computed.clear()

    def on_rank():
        x = DistArray.from_function(
            lambda i, j: np.asarray(given[i.min() : i.max() + 1, j.min() : j.max() + 1]), (12, 5)
        )
        assert x.layout.max_elements() == 20
        np.testing.assert_array_equal(x.gather(), 2 * whole_array)
        y = xr.DataArray(given, dims=("i", "j")).chunk({}, chunked_array_type="einmpi")
        assert isinstance(y.data, DistArray)
        same(y.sum("i"), xr.DataArray(2 * whole_array.sum(axis=0), dims="j"))

    world(3, on_rank)
    assert computed == [(2, 5)] * 12  # each of the six chunks by one rank, both times


PROGRAM = """
import sys
import numpy as np, xarray as xr
from mpi4py import MPI
from einmpi import DistArray

xr.set_options(chunk_manager="einmpi")
path = sys.argv[1]
found = xr.open_zarr(path, chunks={}, chunked_array_type="einmpi", consolidated=True)
with xr.open_zarr(path, chunks=None, consolidated=True) as plain, DistArray.gather_up_to("1 MiB"):
    assert isinstance(found.heat.data, DistArray) and found.heat.chunks == ((4, 4, 3), (7,))
    pairs = [
        (found.groupby(found.time // 40).mean(), plain.groupby(plain.time // 40).mean()),
        (found.heat.fillna(0.0).idxmax("time"), plain.heat.fillna(0.0).idxmax("time")),
    ]
    ordered = dict(input_core_dims=[["time"]], output_core_dims=[["time"]])
    sort = xr.apply_ufunc(np.sort, found.rain.chunk(time=-1), dask="parallelized", **ordered)
    pairs.append((sort, xr.apply_ufunc(np.sort, plain.rain, **ordered)))
    for result, wanted in pairs:
        xr.testing.assert_allclose(result.compute(), wanted.compute(), rtol=1e-12)
print(MPI.COMM_WORLD.rank, float(found.rain.sum()) == float(found.rain.data.sum()))
"""


@pytest.mark.slow
@needs_mpirun
@pytest.mark.mpirun
def test_the_installed_chunk_manager_on_three_ranks(tmp_path):
    pytest.importorskip("zarr")
    if not entry_points(group="xarray.chunkmanagers", name="einmpi"):
        pytest.skip("an older einmpi is installed: pip install -e . tells xarray of this one")
    path = tmp_path / "weather.zarr"
    datasets().drop_vars("place").to_zarr(
        path, encoding={"heat": {"chunks": (3, 7)}}, consolidated=True
    )
    done = run_mpi(3, ["-c", PROGRAM, str(path)])
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 True", "1 True", "2 True"]
