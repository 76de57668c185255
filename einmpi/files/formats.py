"""The file formats: one record each, found by the suffix of a file's name.

`register_format` adds a format; job files, readers, writers and the documentation follow from it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from einmpi.errors import InputError, one_of
from einmpi.files.contiguous import (
    SUFFIX,
    find_indexed,
    find_npy,
    lay_out_npy,
    list_indexed,
    list_tensors,
)
from einmpi.files.datasets import (
    CONVERTIBLE_DTYPES,
    ConvertingReader,
    Dataset,
    RawReader,
    Reader,
    SourceFile,
    check_unchanged,
    converted,
    identity_at,
)
from einmpi.files.hdf5 import datasets as hdf5
from einmpi.files.hdf5 import writing as hdf5_writing
from einmpi.files.hdf5.sparse_groups import find_group
from einmpi.files.journal import finish_before_reading
from einmpi.files.quantised import find_weight, open_weight
from einmpi.files.sparse.found import SparseFile, sparse_of_keys
from einmpi.files.sparse.single_files import (
    NpzReader,
    find_matrix_market,
    find_npz,
    find_tns,
    lay_out_text,
)
from einmpi.files.specs import COMPRESSIONS, InputSpec, Place, StorageSpec
from einmpi.files.zarr import arrays as zarr
from einmpi.files.zarr.metadata import ZARR_COMPRESSIONS
from einmpi.graph.scalar import MAX_LABELS

# (draft, name of the tensor, how it is stored, shape of a chunk) → what writes each chunk to a file
# of its own: it has `write(index, chunk)` and `flush()`.
OpenChunkWriter: TypeAlias = Callable[[str, str, StorageSpec, tuple[int, ...]], Any]


def check_is_file(file: str, names: Mapping[str, str]) -> None:
    """Refuse to replace anything but a regular file."""
    if not os.path.isfile(file):
        place = next(iter(names.values()))
        raise InputError(place or file, f"{file} is not a regular file", "a file to replace")


@dataclass(frozen=True)
class WriteMethods:
    """How a format is written.

    `lay_out` takes a new file, the file that it will replace, the tensors by name, and attributes:
    it makes the file without the elements of its tensors and says where they go; the ranks then
    write them there. `check_target` refuses an existing file that cannot be written, given the
    place in the job file of each tensor name. `options` are the job-file keys of an output, besides
    file, dtype and parts, that it supports. `compressions` are the names of those it has;
    `check_compression` refuses one that needs a package that is not installed, given its place.
    `max_ndim` is the most dimensions that a tensor in a file can have, and `max_chunk_bytes` the
    most bytes of a chunk. `open_chunk_writer` is for formats in which each chunk is a file:
    `lay_out` then makes a folder, to which each rank adds files. `sparse` says which tensors a file
    can take: dense ones, sparse ones "also", or sparse "only".
    """

    lay_out: Callable[[str, str, Mapping[str, StorageSpec], Mapping[str, str]], list[Place]]
    check_target: Callable[[str, Mapping[str, str]], None] = check_is_file
    options: tuple[str, ...] = ()
    compressions: tuple[str, ...] = ()
    check_compression: Callable[[str, str], None] = lambda place, compression: None
    max_ndim: int = MAX_LABELS
    max_chunk_bytes: int = 2**32 - 1
    open_chunk_writer: OpenChunkWriter | None = None
    sparse: Literal["", "also", "only"] = ""


def refuse_dense(file: str, _: str, place: str) -> Dataset:
    """Refuse to read a dense tensor from a file that holds a sparse one."""
    what = f"{file} holds a sparse tensor"
    raise InputError(place or file, what, "a dense one, as only inputs of a program are sparse")


@dataclass(frozen=True)
class FileFormat:
    """A file format.

    Parameters
    ----------
    name : str
        What the format is called in messages and in the documentation.
    suffixes : tuple of str
        The endings of its file names, in lower case, such as ``".npy"`` or ``".tar.gz"``.
    key : str
        The job-file key that names a tensor inside a file; empty if a file holds a single tensor.
    documentation : str
        One line for the table of formats.
    find : callable
        Look up a tensor without reading its elements, given the file, the name of the tensor inside
        it, and the place in the job file.
    list_names : callable, optional
        Return the names of the tensors in a file, given what messages call it, and how many names
        are needed at most. The default is for files that hold a single tensor, which has none.
    find_sparse : callable, optional
        Look up the sparse tensor of an input; None if there is none at that place of the file.
    has_links : bool, optional
        Whether files can refer to others: then `find` also takes the folders where these may be,
        and the dataset it returns has all files in `sources`.
    open_reader : callable, optional
        Open a tensor that `find` has found. The default reads elements stored contiguously.
    write : WriteMethods, optional
        How files are written; None for a format that is only read.
    check_name : callable, optional
        Return the standard spelling of a tensor's name, given its place, or raise InputError.
    example_name : str, optional
        A tensor name for messages.
    default_name : str, optional
        The tensor that is meant if no name is given; empty if a name is needed.
    """

    name: str
    suffixes: tuple[str, ...]
    key: str
    documentation: str
    find: Callable[..., Dataset]
    list_names: Callable[[str, str, int], list[str]] = lambda file, place, most: [""]
    find_sparse: Callable[[InputSpec], SparseFile | None] = lambda spec: None
    has_links: bool = False
    open_reader: Callable[[Dataset], Reader] = RawReader
    write: WriteMethods | None = None
    check_name: Callable[[str, str], str] = lambda place, name: name
    example_name: str = "NAME"
    default_name: str = ""

    @property
    def short_form(self) -> str:
        """Return an example of the short form in a job file."""
        file = f"FILE{self.suffixes[0]}"
        if self.key:
            return f'"{file}:{self.example_name}"'
        return f'"{file}"'


# ---- the registry -------------------------------------------------------------------------------

_FORMATS: list[FileFormat] = []


def register_format(new: FileFormat) -> None:
    """Add a file format. Raise ValueError if one of its suffixes is malformed or already taken."""
    for suffix in new.suffixes:
        if not re.fullmatch(r"(\.[a-z0-9_]+)+", suffix):
            raise ValueError(f"suffix {suffix!r}: expected a dot and lower-case letters or digits")
        known = format_with_suffix(suffix)
        if known is not None:
            raise ValueError(f"suffix {suffix!r} already belongs to {known.name}")
    _FORMATS.append(new)


def unregister_format(old: FileFormat) -> None:
    """Remove a format that `register_format` has added."""
    _FORMATS.remove(old)


def all_formats() -> tuple[FileFormat, ...]:
    """Return all formats in the order in which they were registered."""
    return tuple(_FORMATS)


def format_with_suffix(suffix: str) -> FileFormat | None:
    """Return the format with this suffix, None if there is none."""
    for known in _FORMATS:
        if suffix in known.suffixes:
            return known
    return None


def suffix_of(file: str) -> str:
    """Return the suffix of a file's name in lower case. A folder may end in a slash.

    It is what follows the last dot, unless a format has a suffix of several parts.
    """
    name = file.rstrip("/")
    for known in _FORMATS:
        for suffix in known.suffixes:
            if suffix.count(".") > 1 and name.lower().endswith(suffix):
                return suffix
    return os.path.splitext(name)[1].lower()


def known_format(place: str, file: str, writable: bool = False) -> FileFormat:
    """Return the format of a file; raise InputError if it is unknown or cannot be written."""
    found = format_with_suffix(suffix_of(file))
    if found is None or (writable and found.write is None):
        suffixes: list[str] = []
        for known in _FORMATS:
            if known.write is not None or not writable:
                suffixes.extend(known.suffixes)
        listed = ", ".join(suffixes)
        if found is None:
            what = f"{file!r:.60} is not a file of a known format"
        else:
            what = f"{found.name} files can be read but not written"
        hint = ""
        if split_short_form(file)[1]:
            hint = f"the short form {file!r:.60} stands alone, without file ="
        raise InputError(place, what, f"a file name that ends in one of {listed}", hint)
    return found


def name_keys() -> tuple[str, ...]:
    """Return the job-file keys that name a tensor inside a file, over all formats."""
    keys = [known.key for known in _FORMATS if known.key]
    return tuple(dict.fromkeys(keys))


def split_short_form(text: str) -> tuple[str, str]:
    """Split "FILE:NAME" at the first colon that follows a known suffix.

    Without one the name is empty.
    """
    for position, character in enumerate(text):
        if character != ":" or position + 1 == len(text):
            continue
        file = text[:position]
        if format_with_suffix(suffix_of(file)) is not None:
            return file, text[position + 1 :]
    if format_with_suffix(suffix_of(text)) is not None:
        return text, ""
    return text.partition(":")[0], ""


# ---- reading ------------------------------------------------------------------------------------


def find(spec: InputSpec) -> Dataset:
    """Look up an input in its file without reading its elements."""
    assert spec.file is not None
    file_format = known_format(spec.place or spec.file, spec.file)
    finish_before_reading(spec.file)
    identity = identity_at(spec.file)  # before the file is opened: it may change while it is read
    folders = [spec.follow] if file_format.has_links else []
    found = file_format.find(spec.file, spec.inside, spec.place, *folders)
    if not found.sources and identity is not None:
        found = replace(found, sources=(SourceFile(spec.file, identity),))
    if not found.header:
        found = found.with_header_of_facts()
    if spec.slices:
        found = found.select(spec.slices)
    if spec.declared_shape is not None:
        found = found.with_shape(spec.declared_shape)
    if spec.declared_dtype not in (None, found.dtype.name):
        raise InputError(
            found.where,
            f"{found.title} is {found.dtype.name}",
            f"{spec.declared_dtype}, as declared",
        )
    return found if spec.convert is None else converted(found, spec.convert)


def find_sparse(spec: InputSpec) -> SparseFile | None:
    """Look up a sparse input in its file without reading its elements; None if it is dense."""
    assert spec.file is not None
    if spec.keys:
        keys = [find(each) for each in spec.keys]
        values = find(replace(spec, keys=(), declared_shape=None, declared_dtype=None))
        shape = spec.declared_shape or ()
        sparse: SparseFile | None = sparse_of_keys(spec, keys, values, shape)
    else:
        file_format = known_format(spec.place or spec.file, spec.file)
        finish_before_reading(spec.file)
        sparse = file_format.find_sparse(spec)
    if sparse is None:
        return None
    dtype = sparse.dtype.name
    what = expected = ""
    if spec.declared_shape not in (None, sparse.shape):
        what = f"has shape {list(sparse.shape)}"
        expected = f"shape {list(spec.declared_shape or ())}, as declared"
    elif spec.declared_dtype not in (None, dtype):
        what = f"is {dtype}"
        expected = f"{spec.declared_dtype}, as declared"
    elif spec.slices:
        what = "is sparse, and a part of it is wanted"
        expected = "all of a sparse tensor"
    elif spec.convert is not None and dtype not in CONVERTIBLE_DTYPES:
        what = f"is {dtype}, which is not converted"
        expected = one_of(CONVERTIBLE_DTYPES)
    if what:
        raise InputError(spec.where, f"{spec.title} {what}", expected)
    if spec.implicit is not None:
        sparse = replace(sparse, implicit=spec.implicit)
    return sparse


def open_reader(dataset: Dataset) -> Reader:
    """Open a dataset; raise InputError if it is no longer what was found earlier."""
    check_unchanged(dataset)
    # A dataset that the caller has opened with h5py may be in a file with any suffix.
    file_format = format_with_suffix(suffix_of(dataset.file)) or HDF5
    reader = file_format.open_reader(dataset)
    return ConvertingReader(dataset, reader) if dataset.converted else reader


# ---- the formats of einmpi ----------------------------------------------------------------------

HDF5 = FileFormat(
    name="HDF5",
    suffixes=(".h5", ".hdf5", ".he5", ".nc", ".nc4", ".h5ad"),
    key="dataset",
    documentation="datasets in groups; compressed, chunked and virtual datasets can be read",
    find=hdf5.find,
    list_names=hdf5.list_datasets,
    find_sparse=find_group,
    has_links=True,
    open_reader=hdf5.open_reader,
    write=WriteMethods(
        hdf5_writing.lay_out_draft,
        hdf5_writing.check_target,
        options=("chunks", "compression"),
        compressions=COMPRESSIONS,
        max_ndim=32,
        sparse="also",
    ),
    check_name=hdf5.dataset_path,
    example_name="/DATASET",
)
SAFETENSORS = FileFormat(
    name="safetensors",
    suffixes=(".safetensors",),
    key="tensor",
    documentation="named tensors, such as the weights of a model",
    find=find_weight,
    list_names=list_tensors,
    open_reader=open_weight,
)
SAFETENSORS_INDEX = FileFormat(
    name="safetensors index",
    suffixes=(SUFFIX,),
    key="tensor",
    documentation="which safetensors file in the folder has which tensor of a large model",
    find=find_indexed,
    list_names=list_indexed,
)
NPY = FileFormat(
    name="NumPy",
    suffixes=(".npy",),
    key="",
    documentation="a single array, in C or Fortran order; objects are refused",
    find=find_npy,
    write=WriteMethods(lay_out_npy),
)
ZARR = FileFormat(
    name="zarr",
    suffixes=(".zarr",),
    key="dataset",
    documentation="arrays in a folder, version 3 of the format; each chunk is a file",
    find=zarr.find,
    list_names=zarr.list_arrays,
    open_reader=zarr.ZarrReader,
    write=WriteMethods(
        zarr.lay_out,
        zarr.check_target,
        options=("chunks", "compression"),
        compressions=ZARR_COMPRESSIONS,
        check_compression=zarr.check_compression,
        max_chunk_bytes=2**31 - 17,  # the limit of blosc
        open_chunk_writer=zarr.ChunkFiles,
    ),
    check_name=zarr.array_path,
    example_name="/ARRAY",
    default_name="/",
)
NPZ = FileFormat(
    name="sparse NumPy",
    suffixes=(".npz",),
    key="",
    documentation="a single sparse tensor, as scipy.sparse.save_npz and sparse.save_npz write it",
    find=refuse_dense,
    find_sparse=find_npz,
    open_reader=NpzReader,
    write=WriteMethods(lay_out_text, sparse="only"),
)
MATRIX_MARKET = FileFormat(
    name="MatrixMarket",
    suffixes=(".mtx",),
    key="",
    documentation="a single sparse matrix, as text",
    find=refuse_dense,
    find_sparse=find_matrix_market,
    write=WriteMethods(lay_out_text, sparse="only"),
)
FROSTT = FileFormat(
    name="FROSTT",
    suffixes=(".tns",),
    key="",
    documentation="a single sparse tensor, as text without a header",
    find=refuse_dense,
    find_sparse=find_tns,
    write=WriteMethods(lay_out_text, sparse="only"),
)
register_format(HDF5)
register_format(SAFETENSORS)
register_format(SAFETENSORS_INDEX)
register_format(NPY)
register_format(ZARR)
register_format(NPZ)
register_format(MATRIX_MARKET)
register_format(FROSTT)
