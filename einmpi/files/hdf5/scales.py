"""Dimension labels and scales of HDF5 outputs, by which netCDF readers such as xarray name
dimensions. A scale is a dataset without values beside the outputs, as netCDF has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from einmpi.files.specs import StorageSpec

if TYPE_CHECKING:
    import h5py

# By this text netCDF recognizes a scale that is no variable.
_NO_VARIABLE = "This is a netCDF dimension but not a netCDF variable."
_OWN = "einmpi_scale"  # the attribute of scales that were made here; it has their label


def is_dimension_only(dataset: h5py.Dataset) -> bool:
    """Return whether a dataset only names a dimension and has no values."""
    if not dataset.is_scale:
        return False
    name = bytes(dataset.attrs.get("NAME", b""))
    return name.startswith(_NO_VARIABLE.encode())


def release_parts(handle: h5py.File, names: Iterable[str]) -> None:
    """Prepare datasets for their removal: detach scales, and free the space of long attributes.

    Own scales that nothing uses any more are removed.
    """
    for name in names:
        dataset = _own_dataset(handle, name)
        if dataset is None or dataset.is_virtual:
            continue
        for dimension in dataset.dims:
            for scale in list(dimension.values()):
                dimension.detach_scale(scale)
                if _OWN in scale.attrs and "REFERENCE_LIST" not in scale.attrs:
                    del handle[scale.name]
        for key, value in dataset.attrs.items():
            if isinstance(value, str):  # HDF5 would not free its text with the dataset
                dataset.attrs.modify(key, "")


def make_way(handle: h5py.File, names: Iterable[str]) -> None:
    """Rename own scales that have the names of outputs. References to them stay valid."""
    for name in names:
        found = _own_dataset(handle, name)
        if found is not None and _OWN in found.attrs:
            group = found.parent
            label = str(found.attrs[_OWN])
            group.move(found.name, _free_name(group, label, found.shape[0]))


def name_dimensions(handle: h5py.File, datasets: Mapping[str, StorageSpec]) -> None:
    """Give the dimensions of datasets their labels, and scales to those that have none.

    A dimension with a scale that was not made here keeps it, and its label.
    """
    for name, spec in datasets.items():
        if spec.labels is None:
            continue
        dataset = handle[name]
        for dimension, label, extent in zip(dataset.dims, spec.labels, spec.shape, strict=True):
            attached = list(dimension.values())
            if any(_OWN not in scale.attrs for scale in attached):
                continue
            if dimension.label != label:
                dimension.label = label
            if attached and str(attached[0].attrs[_OWN]) == label:
                continue
            for scale in attached:
                dimension.detach_scale(scale)
                if "REFERENCE_LIST" not in scale.attrs:
                    del handle[scale.name]
            dimension.attach_scale(_scale(dataset.parent, label, extent))


def _own_dataset(group: h5py.Group, name: str) -> h5py.Dataset | None:
    """Return a dataset of this file, None for anything else. No link is followed."""
    import h5py

    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        return None
    found = group[name]
    return found if isinstance(found, h5py.Dataset) else None


def _scale(group: h5py.Group, label: str, extent: int) -> h5py.Dataset:
    """Return the scale of a label with this extent in a group, made if there is none."""
    for candidate in _names(label, extent):
        if group.get(candidate, getlink=True) is None:
            return _make_scale(group, candidate, label, extent)
        found = _own_dataset(group, candidate)
        if found is None or found.attrs.get(_OWN) != label:
            continue
        if found.shape == (extent,):
            return found
    raise AssertionError("there is always another name")


def _free_name(group: h5py.Group, label: str, extent: int) -> str:
    """Return a name for a scale under which there is nothing."""
    return next(name for name in _names(label, extent) if group.get(name, getlink=True) is None)


def _names(label: str, extent: int) -> Iterable[str]:
    """Yield the names that the scale of a label may have: i, i_200, i_200_2, i_200_3, …"""
    yield label
    yield f"{label}_{extent}"
    number = 2
    while True:
        yield f"{label}_{extent}_{number}"
        number += 1


def _make_scale(group: h5py.Group, name: str, label: str, extent: int) -> h5py.Dataset:
    """Make a scale as netCDF does: without values, so that it takes no space in the file."""
    import h5py

    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_LATE)
    properties.set_obj_track_times(False)
    space = h5py.h5s.create_simple((extent,))
    made = h5py.h5d.create(group.id, name.encode(), h5py.h5t.IEEE_F32BE, space, properties)
    scale = h5py.Dataset(made)
    scale.make_scale(f"{_NO_VARIABLE}{extent:10d}")
    scale.attrs[_OWN] = label
    return scale
