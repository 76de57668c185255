"""xarray on DistArrays, unmodified, and its chunked arrays; numpy's own results are right."""

import configparser
import threading
from importlib.metadata import EntryPoint

import numpy as np
import pytest
from paths import ROOT

from einmpi import DistArray
from einmpi.comm import agreement
from einmpi.comm.mpi import comm_of
from einmpi.comm.threads import run_threads

xr = pytest.importorskip("xarray", "2025.1")
from xarray.namedarray import parallelcompat  # noqa: E402

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
    "quantile": lambda d: d.rain.quantile(0.3, "time", skipna=False),
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
    "points": lambda d: d.heat.isel(
        time=xr.DataArray([1, 2], dims="p"), place=xr.DataArray([3, 0], dims="p")
    ),
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
    "polyval": lambda d: xr.polyval(d.height, xr.DataArray([1.0, 2.0], dims="degree", coords={"degree": [0, 1]})),
    "corr": lambda d: xr.corr(d.rain, d.rain.roll(time=1, roll_coords=False), dim="time"),
    "clip": lambda d: d.rain.clip(-1, 1),
    "round": lambda d: d.rain.round(1),
    "astype": lambda d: d["count"].astype("float32"),
    "broadcast": lambda d: xr.broadcast(d.height, d["count"])[0],
    "idxmax": lambda d: d.rain.idxmax("time"),
    "zeros_like": lambda d: xr.zeros_like(d.heat),
    "to_dataarray": lambda d: d[["heat", "rain"]].to_dataarray("kind"),
    "pad": lambda d: d.rain.pad(time=2, constant_values=1.0),
    "dropna": lambda d: d.heat.dropna("time"),
    "ufunc, allowed": lambda d: xr.apply_ufunc(np.hypot, d.heat, d.rain, dask="allowed"),
    "map": lambda d: d.map(np.abs),
    "map_blocks": lambda d: d.rain.map_blocks(lambda block: block * 2),
    "std of a dataset": lambda d: d.std(),
    "isin": lambda d: d.rain.isin([1.0]),
    "coords": lambda d: d.rain.assign_coords(time=d.time / 2).rename(time="t"),
}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_results_are_those_of_numpy(name, ranks, world):
    compute = EXPRESSIONS[name]
    wanted = compute(datasets())

    def on_rank():
        same(compute(distributed()), wanted)

    world(ranks, on_rank)
