"""Open HDF5 files, look datasets up in them, and report what HDF5 says of damaged ones."""

from __future__ import annotations

import contextlib
import io
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from einmpi.errors import InputError, nearest_of
from einmpi.files.datasets import MOST_NAMES_COMPARED, Array, Dataset, check_file
from einmpi.files.specs import StorageSpec

if TYPE_CHECKING:
    import h5py


# ---- scales --------------------------------------------------------------------------------------
#
# Dimension labels and scales of HDF5 outputs, by which netCDF readers such as xarray name
# dimensions. A scale is a dataset without values beside the outputs, as netCDF has it.


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
            _detach_scales(handle, dimension)
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

    A scale has the coordinates of an input's dimension with the same name and extent, if there is
    one. A dimension with a scale that was not made here keeps it, and its label.
    """
    inputs = {each: None for spec in datasets.values() for each in spec.inputs}
    coordinates = _coordinates_of(inputs)
    without_scale = []
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
            coordinate = coordinates.get((label, extent))
            if attached and _fits(attached[0], label, coordinate):
                continue
            _detach_scales(handle, dimension)
            without_scale.append((dimension, dataset.parent, label, extent, coordinate))
    # All old scales are gone before any is made, so that the new ones can have their names.
    for dimension, *asked in without_scale:
        dimension.attach_scale(_scale(*asked))


def _detach_scales(handle: h5py.File, dimension: Any) -> None:
    """Detach the scales of a dimension; own ones that nothing uses any more are removed."""
    for scale in list(dimension.values()):
        dimension.detach_scale(scale)
        if _OWN in scale.attrs and "REFERENCE_LIST" not in scale.attrs:
            del handle[scale.name]


def _own_dataset(group: h5py.Group, name: str) -> h5py.Dataset | None:
    """Return a dataset of this file, None for anything else. No link is followed."""
    import h5py

    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        return None
    found = group[name]
    return found if isinstance(found, h5py.Dataset) else None


def _scale(
    group: h5py.Group, label: str, extent: int, coordinate: Coordinate | None
) -> h5py.Dataset:
    """Return the scale of a label with this extent in a group, made if there is none."""
    for candidate in _names(label, extent):
        if group.get(candidate, getlink=True) is None:
            scale = _make_scale(group, candidate, extent, coordinate)
            scale.attrs[_OWN] = label
            return scale
        found = _own_dataset(group, candidate)
        if found is None or found.attrs.get(_OWN) != label:
            continue
        if found.shape == (extent,) and _fits(found, label, coordinate):
            return found
    raise AssertionError("there is always another name")


def _free_name(group: h5py.Group, label: str, extent: int) -> str:
    """Return a name for a scale under which there is nothing."""
    return next(name for name in _names(label, extent) if group.get(name, getlink=True) is None)


def _names(label: str, extent: int) -> Iterable[str]:
    """Yield the names that the scale of a label may have: i, i_200, i_200_2, i_200_3, …"""
    yield label
    yield f"{label}_{extent}"
    for number in count(2):
        yield f"{label}_{extent}_{number}"


def _make_scale(
    group: h5py.Group, name: str, extent: int, coordinate: Coordinate | None
) -> h5py.Dataset:
    """Make a scale as netCDF does: without coordinates, it takes no space in the file."""
    import h5py

    if coordinate is not None:
        scale = group.create_dataset(name, data=coordinate.values, dtype=coordinate.values.dtype)
        for key, value in coordinate.attributes.items():
            scale.attrs[key] = value
        scale.make_scale(name)
        return scale
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_LATE)
    properties.set_obj_track_times(False)
    space = h5py.h5s.create_simple((extent,))
    made = h5py.h5d.create(group.id, name.encode(), h5py.h5t.IEEE_F32BE, space, properties)
    scale = h5py.Dataset(made)
    scale.make_scale(f"{_NO_VARIABLE}{extent:10d}")
    return scale


# ---- coordinates ---------------------------------------------------------------------------------


class Coordinate(NamedTuple):
    """The values along a dimension, such as times, and what the file says about them: units."""

    values: Array
    attributes: dict[str, Any]


# Attributes that refer to other datasets of the file; all others of a coordinate are copied.
_REFERRING = ("CLASS", "NAME", "REFERENCE_LIST", "_Netcdf4Dimid", "_Netcdf4Coordinates", "bounds")


def _coordinates_of(inputs: Iterable[Dataset]) -> dict[tuple[str, int], Coordinate]:
    """Return the coordinates of the inputs, by name and extent; the first of a name counts.

    They are extras: what cannot be read any more is left out.
    """
    found: dict[tuple[str, int], Coordinate] = {}
    for each in inputs:
        if not each.dimensions:
            continue
        with contextlib.suppress(InputError, *_DAMAGE), opened(each.file, "") as handle:
            dimensions = handle[each.name].dims
            for name, dimension, chosen in zip(
                each.dimensions, dimensions, each.ranges(), strict=True
            ):
                for scale in dimension.values():
                    if scale.ndim == 1 and not is_dimension_only(scale) and not chosen.dropped:
                        values = scale[chosen.in_file(0, chosen.count)]
                        coordinate = Coordinate(values, _own_attributes(scale))
                        found.setdefault((name, chosen.count), coordinate)
    return found


def _own_attributes(scale: h5py.Dataset) -> dict[str, Any]:
    skipped = (*_REFERRING, _OWN)
    return {name: value for name, value in scale.attrs.items() if name not in skipped}


def _fits(scale: h5py.Dataset, label: str, coordinate: Coordinate | None) -> bool:
    """Return whether a scale that was made here has this label and these coordinates."""
    if str(scale.attrs[_OWN]) != label:
        return False
    if coordinate is None or is_dimension_only(scale):
        return coordinate is None and is_dimension_only(scale)
    values, attributes = coordinate
    same_type = scale.dtype == values.dtype
    same_attributes = str(_own_attributes(scale)) == str(attributes)
    return same_type and same_attributes and np.array_equal(scale[()], values)


# Attributes by which readers of netCDF and openPMD change values, and those without an effect.
_PACKING = {"scale_factor": 1, "add_offset": 0, "unitSI": 1, "_FillValue": None}


def names_and_packing(dataset: h5py.Dataset) -> tuple[tuple[str, ...], str]:
    """Return the names of the dimensions, and how values are packed; empty if there is none.

    The names are those of scales, labels of HDF5, or the axes of a mesh of openPMD.
    """
    names: list[str] = []
    packing: list[str] = []
    with contextlib.suppress(*_DAMAGE, LookupError, AttributeError):  # they are extras, too
        present = set(dataset.attrs)  # looked up once: opening attributes takes time
        for name, neutral in _PACKING.items():
            value = np.ravel(dataset.attrs[name])[0] if name in present else neutral
            if value != neutral and value == value:  # NaN means nothing else either way
                packing.append(f"{name} {value:g}")
        if "unitSI" in present:  # openPMD: a vector has its axes in its group
            holder = dataset if "axisLabels" in present else dataset.parent
            names = [os.fsdecode(axis) for axis in holder.attrs["axisLabels"]]
        elif "CLASS" in present and dataset.is_scale:  # a coordinate
            names = [dataset.name.rpartition("/")[2]]
        elif present.intersection(("DIMENSION_LIST", "DIMENSION_LABELS")):
            for dimension in dataset.dims:
                scales = dimension.values()
                names.append(scales[0].name.rpartition("/")[2] if scales else dimension.label)
    is_complete = len(names) == dataset.ndim and all(names)
    return tuple(names) if is_complete else (), ", ".join(packing)


# What HDF5 and h5py raise for files that are damaged or use features this build cannot read.
_DAMAGE = (OSError, RuntimeError, ValueError, TypeError, KeyError, OverflowError)


@contextlib.contextmanager
def opened(file: str, place: str) -> Iterator[h5py.File]:
    """Open a file for reading; raise InputError if there is none or it is not HDF5."""
    check_file(file, place, "an HDF5 file")  # HDF5 would wait for a pipe
    try:
        handle = _open(file)
    except (OSError, RuntimeError, ValueError) as error:
        expected = "an HDF5 file"
        hint = ""
        if isinstance(error, BlockingIOError):
            expected = "a file that no other program is writing"
        elif "unable to lock" in str(error):
            # On a file system without locks, only this setting keeps HDF5 from trying.
            hint = "set HDF5_USE_FILE_LOCKING=FALSE in the environment"
        what = f"{file} cannot be opened as HDF5: {hdf5_reason(error)}"
        raise InputError(place or file, what, expected, hint) from None
    with handle:
        yield handle


def _open(file: str) -> h5py.File:
    import h5py

    try:
        return h5py.File(file, "r")
    except BlockingIOError:  # another program is writing it
        raise
    except OSError as error:
        if "lock" not in str(error):
            raise
        return h5py.File(file, "r", locking=False)  # a file system without locks


@contextlib.contextmanager
def damage_reported(file: str, dataset: str, place: str) -> Iterator[None]:
    """Turn what HDF5 raises for a damaged file into an InputError."""
    try:
        yield
    except InputError:
        raise
    except _DAMAGE as error:
        raise InputError(
            place or file, f"{dataset} in {file} cannot be read: {hdf5_reason(error)}"
        ) from None


def hdf5_reason(error: BaseException) -> str:
    """Return what HDF5 itself says, without the words of h5py around it and without addresses."""
    text = str(error)
    inner = text.partition("(")[2].rpartition(")")[0] or text
    return " ".join(inner.partition(": eof")[0].split())


# ---- looking up a dataset -----------------------------------------------------------------------


def look_up(handle: h5py.File, file: str, dataset: str, where: str) -> h5py.Dataset:
    """Return a dataset; raise InputError if there is none or it has no values."""
    import h5py

    found = handle.get(dataset)
    if isinstance(found, h5py.Dataset):
        if found.shape is None:
            raise InputError(where, f"{dataset} in {file} has no values", "a dataset with a shape")
        return found
    if isinstance(found, h5py.Group):
        names = datasets_in(found, MOST_NAMES_COMPARED)
        expected = nearest_of(names, "") if names else "a dataset"
        raise InputError(where, f"{dataset} in {file} is a group", expected)
    link = handle.get(dataset, getlink=True)
    if isinstance(link, h5py.SoftLink | h5py.ExternalLink):
        target = link.path
        if isinstance(link, h5py.ExternalLink):
            target = f"{link.filename}:{link.path}"
        raise InputError(
            where, f"{dataset} in {file} is a link to {target}, which does not exist", "a dataset"
        )
    names = datasets_in(handle, MOST_NAMES_COMPARED)
    expected = "a file that has datasets"
    if names:
        expected = nearest_of(names, dataset)
    raise InputError(where, f"there is no dataset {dataset} in {file}", expected)


def datasets_in(group: h5py.Group, most: int) -> list[str]:
    """Return the names of the first datasets of a group that have values.

    Links in it are not followed.
    """
    import h5py

    names: list[str] = []

    def visit(_: str, item: object) -> bool | None:
        if isinstance(item, h5py.Dataset) and not is_dimension_only(item):
            names.append(str(item.name))
        return True if len(names) >= most else None

    group.visititems(visit)
    return names


# ---- unclosed ------------------------------------------------------------------------------------
#
# HDF5 files that a killed writer has not closed, read as if it had closed them.


_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_VERSION = 3  # of the superblock: the only one that notes who has the file open
_BYTES_OF_ADDRESS = 8
# The superblock: signature, version, bytes of an address, bytes of a length, flags, then the
# addresses of the base, the extension, the end of the file and the root group; then a checksum.
_SUPERBLOCK = struct.Struct("<8sBBBBQQQQ")
_FLAGS = 4  # which of these fields
_END = 7
_CHECKSUM = struct.Struct("<I")
_WORD = 2**32 - 1


class ClosedView(io.FileIO):
    """A file whose last writer was killed, with a superblock that says that nobody writes it.

    HDF5 reads the file itself only as one that is still written: it reads what looks damaged again
    and again, and waits longer each time.
    """

    def __init__(self, file: str) -> None:
        super().__init__(file, "r")
        size = os.fstat(self.fileno()).st_size
        self.superblock = _closed_superblock(self.read(_SUPERBLOCK.size + _CHECKSUM.size), size)
        self.seek(0)

    def readinto(self, buffer: Any) -> int:
        """Read as from the file, but the superblock."""
        start = self.tell()
        count = super().readinto(buffer) or 0
        changed = self.superblock[start : start + count]
        memoryview(buffer).cast("B")[: len(changed)] = changed
        return count


def _closed_superblock(written: bytes, size: int) -> bytes:
    """Return a superblock without the note that the file is open; `size` is that of the file.

    The end of the file may have moved after the superblock was written.
    """
    if len(written) < _SUPERBLOCK.size + _CHECKSUM.size:
        raise OSError("truncated file")
    fields = list(_SUPERBLOCK.unpack_from(written))
    if fields[:3] != [_SIGNATURE, _VERSION, _BYTES_OF_ADDRESS]:
        raise OSError("unknown superblock")
    if _CHECKSUM.pack(lookup3(written[: _SUPERBLOCK.size])) != written[_SUPERBLOCK.size :]:
        raise OSError("damaged superblock")
    fields[_FLAGS] = 0
    fields[_END] = max(fields[_END], size)
    closed = _SUPERBLOCK.pack(*fields)
    return closed + _CHECKSUM.pack(lookup3(closed))


def lookup3(data: bytes) -> int:
    """Return the checksum that HDF5 gives to its metadata: Bob Jenkins' lookup3, from 0."""
    start = (0xDEADBEEF + len(data)) & _WORD
    a = start
    b = start
    c = start
    blocks = [data[place : place + 12] for place in range(0, len(data), 12)]
    for number, block in enumerate(blocks):
        words = struct.unpack("<3I", block.ljust(12, b"\0"))
        a = (a + words[0]) & _WORD
        b = (b + words[1]) & _WORD
        c = (c + words[2]) & _WORD
        if number + 1 < len(blocks):
            a, b, c = _mixed(a, b, c)
    return _finished(a, b, c) if data else c


def _rotated(word: int, bits: int) -> int:
    return ((word << bits) | (word >> (32 - bits))) & _WORD


def _mixed(a: int, b: int, c: int) -> tuple[int, int, int]:
    """Mix three words with one another, so that all of them depend on all bits."""
    for bits in (4, 6, 8, 16, 19, 4):
        a = ((a - c) & _WORD) ^ _rotated(c, bits)
        c = (c + b) & _WORD
        a, b, c = b, c, a
    return a, b, c


def _finished(a: int, b: int, c: int) -> int:
    """Return the checksum that three words give in the end."""
    for bits in (14, 11, 25, 16, 4, 14, 24):
        c = ((c ^ b) - _rotated(b, bits)) & _WORD
        a, b, c = b, c, a
    # The words have changed places seven times: the last one that was computed is in the middle.
    return b


# ---- tables --------------------------------------------------------------------------------------
#
# Tables in HDF5 files that grow row by row and can be read at any time, even after a kill.


# HDF5's mode for one writer and many readers needs this format, which HDF5 1.10 introduced.
_FORMAT = ("v110", "v110")
_LEAST_SUPERBLOCK = 3
_ROWS_OF_A_CHUNK = 1024
_NOT_CLOSED = "file consistency flags"  # in HDF5's message, if the last writer was killed


def check_table(file: str, path: str, place: str) -> None:
    """Refuse a table that an existing file cannot take."""
    import h5py

    expected = "a new file, or one that only histories were written to"
    try:
        handle = _open_for_reading(file)
    except (OSError, RuntimeError, ValueError) as error:
        what = f"{file} cannot be opened as HDF5: {hdf5_reason(error)}"
        raise InputError(place, what, expected) from None
    with handle, damage_reported(file, path, place):
        version = handle.id.get_create_plist().get_version()[0]
        if version < _LEAST_SUPERBLOCK:
            what = f"{file} is in an older format of HDF5, in which a killed run would damage it"
            raise InputError(place, what, expected)
        parts = path.strip("/").split("/")
        for depth in range(1, len(parts)):
            above = "/" + "/".join(parts[:depth])
            if above in handle and not isinstance(handle[above], h5py.Group):
                what = f"{above} in {file} is not a group"
                raise InputError(place, what, f"a group to hold {path}")
        if isinstance(handle.get(path), h5py.Group):
            raise InputError(place, f"{path} in {file} is a group", "another name for the table")


def _open_for_reading(file: str) -> h5py.File:
    """Open a file, also one that a killed run has not closed."""
    import h5py

    try:
        return h5py.File(file, "r", libver=_FORMAT, locking=False)
    except OSError as error:
        if _NOT_CLOSED not in str(error):
            raise
    return h5py.File(ClosedView(file), "r")


def draft_table(draft: str, target: str, path: str, rows: Array) -> None:
    """Fill an empty draft with all of the target and with a table that has these rows.

    A table of the same name is replaced.
    """
    import h5py

    with h5py.File(draft, "w", libver=_FORMAT, locking=False) as handle:
        if os.path.exists(target):
            with _open_for_reading(target) as old:
                for name in old:
                    old.copy(name, handle)
        if path in handle:
            del handle[path]
        first_rows = np.zeros(1, rows.dtype)
        first_rows["step"] = -1  # of a row that was never written
        handle.create_dataset(
            path,
            data=rows,
            maxshape=(None,),
            chunks=(_ROWS_OF_A_CHUNK,),
            fillvalue=first_rows[0],
        )


class GrowingTable:
    """A table in a file that one process writes. Others can read it, with `swmr=True`."""

    def __init__(self, file: str, path: str) -> None:
        import h5py

        self.handle = h5py.File(file, "r+", libver=_FORMAT, locking=False)
        self.dataset = self.handle[path]
        # From now on HDF5 writes in an order that leaves a whole file at any time.
        self.handle.swmr_mode = True

    def append(self, rows: Array) -> None:
        """Add rows at the end."""
        count = len(self.dataset)
        self.dataset.resize((count + len(rows),))
        self.dataset[count:] = rows
        self.dataset.flush()

    def close(self) -> None:
        self.handle.close()
