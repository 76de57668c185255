"""Tables in HDF5 files that grow row by row and can be read at any time, even after a kill."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from einmpi.errors import InputError
from einmpi.files.hdf5.opening import damage_reported, hdf5_reason
from einmpi.files.hdf5.unclosed import ClosedView

if TYPE_CHECKING:
    import h5py

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


def draft_table(draft: str, target: str, path: str, rows: npt.NDArray[Any]) -> None:
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

    def append(self, rows: npt.NDArray[Any]) -> None:
        """Add rows at the end."""
        count = len(self.dataset)
        self.dataset.resize((count + len(rows),))
        self.dataset[count:] = rows
        self.dataset.flush()

    def close(self) -> None:
        self.handle.close()
