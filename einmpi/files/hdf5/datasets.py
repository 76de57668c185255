"""HDF5 files as they are found: which datasets they have, how these are stored, their elements."""

from __future__ import annotations

import os
import re
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, starmap
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from einmpi.errors import InputError
from einmpi.files.datasets import FileIdentity, SourceFile, identity_from, is_inside
from einmpi.files.hdf5.opening import damage_reported, look_up, opened

if TYPE_CHECKING:
    import h5py
import contextlib

import numpy as np

from einmpi.errors import one_of
from einmpi.files.datasets import (
    Array,
    Dataset,
    DType,
    RawReader,
    Reader,
    check_file,
    check_identity,
)
from einmpi.files.hdf5.opening import datasets_in, names_and_packing
from einmpi.graph.dtypes import numpy_dtypes
from einmpi.schedule.regions import Box

# ---- links ---------------------------------------------------------------------------------------
#
# Find the files that a dataset depends on, before HDF5 opens any of them.
#
# HDF5 would wait for a pipe, recurse into a virtual dataset of itself until it crashes, and
# read any file of the machine. So each link is checked before HDF5 follows it.


MOST_LINKS = 32  # soft and external links on the way to one dataset; HDF5 itself follows 16
MOST_NESTED = 16  # virtual datasets, each a source of the one before
MOST_FILES = 2**16
_UNLIMITED_BYTES = 2**63  # and more: a piece of external storage that has no end
_ORIGIN = "${ORIGIN}"  # in a prefix: the folder of the file that has the link

# A dataset in any file: device and inode of the file, and the address of the dataset in it.
Node: TypeAlias = tuple[int, int, int]


class UnsafeLinkError(InputError):
    """A link that HDF5 must not follow: it would wait forever, or crash."""


class LinkedFiles:
    """The files that datasets depend on: external links, virtual sources, external storage.

    Those in the folder of `file`, or in one of the folders `follow`, may be read.
    """

    def __init__(self, file: str, place: str, follow: Sequence[str] = ()) -> None:
        self.where = place or file
        self.place = place
        own_folders = [
            os.path.dirname(os.path.abspath(file)),
            os.path.dirname(os.path.realpath(file)),
        ]
        self.folders = [os.path.realpath(folder) for folder in (*own_folders, *follow)]
        self.named = file
        self.identities: dict[str, FileIdentity] = {}  # of all files so far, by their paths
        self.virtual: list[Node] = []  # the virtual datasets on the way to the current one
        self.finished: set[Node] = set()
        self.decoded = 0  # bytes that it takes to decode the largest chunk

    def add(self, path: str) -> None:
        """Record a file and its identity. It must be a regular file."""
        if path in self.identities:
            return
        if len(self.identities) == MOST_FILES:
            raise InputError(
                self.where,
                f"{self.named} leads to more than {MOST_FILES} other files",
                "a dataset in fewer files",
            )
        try:
            status = os.stat(path)
        except OSError as error:
            raise InputError(
                self.where, f"{path}: {error.strerror or error}", "a readable file"
            ) from None
        self.identities[path] = identity_from(status)

    # ---- following a path -----------------------------------------------------------------------

    def visit(self, handle: h5py.File, file: str, path: str, links: int = 0) -> bool:
        """Find the files behind a path in an open file; return whether there is an object.

        `links` is the number of links that led here.
        """
        import h5py

        end = follow_inside(handle, path, links)
        if end.other_file is None:
            if isinstance(end.found, h5py.h5d.DatasetID):
                self._visit_dataset(end.found, file, path)
            return end.found is not None
        target = self._locate(file, path, _candidates(end.other_file, file, "HDF5_EXT_PREFIX"))
        if target is None:
            return False
        self.add(target)
        with opened(target, self.place) as other:
            return self.visit(other, target, end.rest, end.links)

    # ---- elements in other files ----------------------------------------------------------------

    def _visit_dataset(self, dataset: h5py.h5d.DatasetID, file: str, path: str) -> None:
        import h5py

        # Not even the extents may be asked for yet: those of a virtual dataset can depend on its
        # sources, and HDF5 would open them.
        properties = dataset.get_create_plist()
        for number in range(properties.get_nfilters()):
            self._visit_filter(dataset, properties, number, f"{path} in {file}")
        for number in range(properties.get_external_count()):
            name, start, size = properties.get_external(number)
            self._visit_storage(file, path, os.fsdecode(name), start, size)
        if properties.get_layout() != h5py.h5d.VIRTUAL:
            return
        holder = self.identities[file]
        node = (holder.device, holder.inode, h5py.h5o.get_info(dataset).addr)
        if node in self.virtual:
            raise UnsafeLinkError(
                self.where,
                f"{path} in {file} is a virtual dataset that contains itself",
                "a virtual dataset of other datasets",
            )
        if node in self.finished:
            return
        if len(self.virtual) == MOST_NESTED:
            raise UnsafeLinkError(
                self.where,
                f"{path} in {file} is inside {MOST_NESTED} other virtual datasets",
                f"at most {MOST_NESTED} of them, one inside the other",
            )
        self.virtual.append(node)
        mappings: dict[tuple[str, str], None] = {}  # in order, each once
        for number in range(properties.get_virtual_count()):
            source = properties.get_virtual_filename(number)
            mappings[source, properties.get_virtual_dsetname(number)] = None
        for source_name, inside in mappings:
            self._visit_mapping(file, path, source_name, inside)
        self.virtual.pop()
        self.finished.add(node)

    def _visit_filter(
        self, dataset: h5py.h5d.DatasetID, properties: Any, number: int, title: str
    ) -> None:
        """Refuse a filter that HDF5 does not find, and note the size of what it decodes."""
        import h5py

        # It decodes whole chunks, and needs the bytes before and after that.
        nbytes = prod(properties.get_chunk()) * dataset.get_type().get_size()
        self.decoded = max(self.decoded, 2 * nbytes)
        code, _, _, name = properties.get_filter(number)
        if h5py.h5z.filter_avail(code) or not dataset.get_num_chunks():
            return
        if dataset.get_chunk_info(0).filter_mask >> number & 1:
            return  # it is optional, and was left out
        short_name = os.fsdecode(name).partition(";")[0]  # an address may follow
        folders = [os.fsdecode(h5py.h5pl.get(place)) for place in range(h5py.h5pl.size())]
        raise InputError(
            self.where,
            f"{title} needs the filter {code} {short_name:.40}".rstrip(),
            f"a plugin for it in HDF5_PLUGIN_PATH, which is {':'.join(folders)!r}",
            "pip install hdf5plugin brings many; their folder is hdf5plugin.PLUGIN_PATH",
        )

    def _visit_mapping(self, file: str, path: str, name: str, inside: str) -> None:
        """Visit the sources of one mapping: one dataset, or numbered ones.

        Numbered sources end with the first that is missing. Any other that is missing is refused:
        HDF5 would silently substitute fill values.
        """
        is_numbered = "%b" in (name + inside).replace("%%", "")
        for number in count():
            source_name = _with_number(name, number)
            source: str | None = file
            if source_name != ".":
                candidates = _candidates(source_name, file, "HDF5_VDS_PREFIX")
                source = self._locate(file, path, candidates)
            if source is None:
                if is_numbered:
                    return
                raise self._missing(file, path, source_name)
            self.add(source)
            source_path = _with_number(inside, number)
            with (
                opened(source, self.place) as handle,
                damage_reported(source, source_path, self.place),
            ):
                exists = self.visit(handle, source, source_path)
                if not exists and not is_numbered:
                    look_up(handle, source, source_path, self.where)  # raises
            if not exists or not is_numbered:
                return

    def _visit_storage(self, file: str, path: str, name: str, start: int, size: int) -> None:
        """Check a file without a format that holds elements of a dataset."""
        prefix = _expanded_prefix(os.environ.get("HDF5_EXTFILE_PREFIX", ""), file)
        storage = self._locate(file, path, [os.path.abspath(os.path.join(prefix, name))])
        if storage is None:
            raise self._missing(file, path, name)
        self.add(storage)
        if size < _UNLIMITED_BYTES and self.identities[storage].size < start + size:
            raise self._missing(file, path, name)

    def _missing(self, file: str, path: str, name: str) -> InputError:
        return InputError(
            self.where,
            f"{path} in {file} needs {name}, which is missing or too short",
            "a complete file",
        )

    # ---- other files ----------------------------------------------------------------------------

    def _locate(self, file: str, path: str, candidates: Iterable[str]) -> str | None:
        """Return the first candidate that exists; refuse it if HDF5 must not open it."""
        for candidate in candidates:
            try:
                status = os.stat(candidate)
            except (OSError, ValueError):
                continue
            if stat.S_ISDIR(status.st_mode):
                continue
            real = os.path.realpath(candidate)
            if not any(is_inside(folder, real) for folder in self.folders):
                folder = os.path.dirname(real)
                raise InputError(
                    self.where,
                    f"{path} in {file} leads to {real}, which is in another folder",
                    f'a file in the folder of the job or of {self.named}, or follow = ["{folder}"]',
                )
            if not stat.S_ISREG(status.st_mode):
                raise UnsafeLinkError(
                    self.where,
                    f"{path} in {file} leads to {real}, which is not a regular file",
                    "a link to a file",
                )
            return candidate
        return None


@dataclass(frozen=True)
class PathEnd:
    """Where a path ends: at an object of the file, at a link to another file, or nowhere."""

    found: Any = None  # an object of h5py's lower level
    other_file: str | None = None  # the name in the link
    rest: str = ""  # the path in the other file
    links: int = 0  # how many links were followed


def follow_inside(handle: h5py.File, path: str, links: int = 0) -> PathEnd:
    """Follow a path within a file. A link to another file is not followed.

    Raise ValueError if the path goes through too many links, or links of an unknown kind.
    """
    import h5py

    root = h5py.h5g.open(handle.id, b"/")
    current: Any = root
    parts = _components(path.encode(errors="surrogateescape"))
    while parts:
        part = parts.popleft()
        if not isinstance(current, h5py.h5g.GroupID) or not current.links.exists(part):
            return PathEnd(links=links)
        kind = current.links.get_info(part).type
        if kind == h5py.h5l.TYPE_HARD:
            current = h5py.h5o.open(current, part)
            continue
        links += 1
        if links > MOST_LINKS:
            raise ValueError(f"it is behind more than {MOST_LINKS} links")
        if kind == h5py.h5l.TYPE_SOFT:
            target = current.links.get_val(part)
            if target.startswith(b"/"):
                current = root
            parts = _components(target) + parts
        elif kind == h5py.h5l.TYPE_EXTERNAL:
            name, inside = current.links.get_val(part)
            rest = b"/".join([inside, *parts]).decode(errors="surrogateescape")
            return PathEnd(other_file=os.fsdecode(name), rest=rest, links=links)
        else:
            raise ValueError("it is behind a link of an unknown kind")
    return PathEnd(current, links=links)


# ---- names --------------------------------------------------------------------------------------


def _components(path: bytes) -> deque[bytes]:
    """Return the parts of a path in a file. HDF5 has no name for the group above."""
    return deque(part for part in path.split(b"/") if part not in (b"", b"."))


def _with_number(name: str, number: int) -> str:
    """Return the name of a numbered source: %b is its number, %% is a percent sign."""
    values = {"%b": str(number), "%%": "%"}
    return re.sub("%[b%]", lambda match: values[match[0]], name)


def _candidates(name: str, holder: str, variable: str) -> Iterator[str]:
    """Yield the paths at which HDF5 looks for a file that another one names, in its order.

    An absolute path is tried first; if there is no such file, the last part of its name takes the
    place of a relative path. `variable` of the environment lists folders.
    """
    if os.path.isabs(name):
        yield name
        name = os.path.basename(name)
    prefixes = os.environ.get(variable, "")
    for prefix in prefixes.split(":"):
        if prefix:
            yield os.path.join(prefix, name)
    if prefixes.startswith(_ORIGIN):
        yield os.path.join(_expanded_prefix(prefixes, holder), name)
    yield os.path.join(os.path.dirname(os.path.abspath(holder)), name)
    yield os.path.abspath(name)
    yield os.path.join(os.path.dirname(os.path.realpath(holder)), name)


def _expanded_prefix(prefix: str, holder: str) -> str:
    if prefix.startswith(_ORIGIN):
        return os.path.dirname(os.path.abspath(holder)) + prefix.removeprefix(_ORIGIN)
    return prefix


_UNSUPPORTED = {"O": "a string or of variable length", "S": "a string", "V": "opaque"}


def build() -> dict[str, Any]:
    """Return the versions of h5py and HDF5, and whether they were built for parallel writing."""
    import h5py

    return {
        "h5py": h5py.__version__,
        "hdf5": h5py.version.hdf5_version,
        "parallel": bool(h5py.get_config().mpi),
    }


def dataset_path(place: str, text: str) -> str:
    """Return the one spelling of a path that is used: /a/b. All of a file, "/", can be sparse."""
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if (not parts and text != "/") or "\0" in text:
        raise InputError(
            place, f"{text!r:.60} is not the path of a dataset", "a path such as /Z or /group/Z"
        )
    return "/" + "/".join(parts)


def find(file: str, dataset: str, place: str = "", follow: Sequence[str] = ()) -> Dataset:
    """Look up a dataset without reading its elements.

    All files that it needs are in its folder, or in one of the folders `follow`.
    """
    check_file(file, place, "an HDF5 file")  # before its identity is looked at
    links = LinkedFiles(file, place, follow)
    links.add(file)
    with opened(file, place) as handle, damage_reported(file, dataset, place):
        links.visit(handle, file, dataset)
        found = look_up(handle, file, dataset, place or file)
        dtype = _supported_dtype(found, file, dataset, place)
        offset = None
        # HDF5 itself has to supply the fill value of a dataset without allocated elements, to
        # follow a link into another file, and to read elements that are in other files.
        in_this_file = found.file.filename == handle.filename and not found.external
        if found.size and in_this_file and as_in_memory(found, dtype):
            offset = offset_in_file(found)
        described = Dataset(
            file,
            dataset,
            place,
            found.shape,
            dtype.str,
            found.chunks,
            offset,
            sources=tuple(starmap(SourceFile, links.identities.items())),
            decoded=links.decoded,
        )
        names, packing = names_and_packing(found)
        return replace(described.with_header_of_facts(), dimensions=names, packing=packing)


def list_datasets(file: str, place: str, most: int) -> list[str]:
    """Return the paths of the first datasets in a file. Links are not followed."""
    with opened(file, place) as handle, damage_reported(file, "/", place):
        return datasets_in(handle, most)


def open_reader(dataset: Dataset) -> Reader:
    """Open a dataset: without the library if its elements are stored contiguously."""
    if dataset.offset is None:
        return Hdf5Reader(dataset)
    return RawReader(dataset)


class Hdf5Reader:
    """A dataset that is read through HDF5: with chunks, filters, or elements in other files."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.stack = contextlib.ExitStack()
        handle = self.stack.enter_context(opened(dataset.file, dataset.place))
        check_identity(dataset, os.fstat(handle.id.get_vfd_handle()))
        with damage_reported(dataset.file, dataset.name, dataset.place):
            self.found = look_up(handle, dataset.file, dataset.name, dataset.where)

    def close(self) -> None:
        self.stack.close()

    def read(self, there: Box, target: Array, here: Box) -> None:
        """Read a box of the dataset into a box of the target."""
        if not target[here].size:
            return
        # A chunk may be damaged, or a filter missing in this build of HDF5.
        with damage_reported(self.dataset.file, self.dataset.name, self.dataset.place):
            self.found.read_direct(target, there, here)


def find_given(given: Any) -> Dataset | None:
    """Return the h5py dataset that a caller gives, if other processes can open it too.

    This holds for a file on disk that is opened for reading. For all else return None.
    """
    if not type(given).__module__.startswith("h5py"):
        return None
    import h5py

    if not isinstance(given, h5py.Dataset) or not given.name:
        return None
    file = given.file
    if file.mode != "r" or file.driver != "sec2" or not os.path.isfile(file.filename):
        return None
    try:
        # The caller's program has opened it, and may follow a link to anywhere.
        found = find(file.filename, given.name, follow=["/"])
    except UnsafeLinkError:
        raise
    except InputError:
        return None
    if found.shape != given.shape or found.dtype != given.dtype.newbyteorder("="):
        return None
    return found


# ---- how a dataset is stored ---------------------------------------------------------------------


def _supported_dtype(found: h5py.Dataset, file: str, dataset: str, place: str) -> DType:
    """Return the dtype as stored; raise InputError if the language does not have it."""
    import h5py

    stored: DType = found.dtype
    native = np.dtype(stored.newbyteorder("=").str) if stored.kind in "fcibu" else stored
    enumeration = h5py.check_enum_dtype(stored) is not None
    if native.name in numpy_dtypes() and not enumeration:
        return np.dtype(stored.str)
    if enumeration:
        shown = "an enumeration"
    elif h5py.check_ref_dtype(stored) is not None:
        shown = "a reference"
    elif stored.fields:
        shown = "compound"
    elif stored.subdtype:
        shown = "of an array type"
    else:
        shown = _UNSUPPORTED.get(native.kind, native.name)
    raise InputError(
        place or file,
        f"{dataset} in {file} is {shown}, which is not supported",
        one_of(numpy_dtypes()),
    )


def as_in_memory(found: h5py.Dataset, dtype: DType) -> bool:
    """Return whether elements are stored byte by byte as numpy has them.

    HDF5 also has numbers of odd widths, for which h5py chooses a dtype that can hold them.
    """
    import h5py

    return bool(found.id.get_type().equal(h5py.h5t.py_create(dtype, logical=True)))


def offset_in_file(found: h5py.Dataset) -> int | None:
    """Return where contiguous elements begin in the file, None if they have no space yet.

    For elements without space, HDF5 gives a wrong offset in a file with a user block.
    """
    import h5py

    if found.id.get_space_status() == h5py.h5d.SPACE_STATUS_NOT_ALLOCATED:
        return None
    offset: int | None = found.id.get_offset()
    return offset
