"""Where results go: all ranks write into a draft of a file, which then takes the file's place. One table by suffix."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from einmpi.comm.base import on_first_rank, together
from einmpi.errors import EinmpiError, InputError, one_of
from einmpi.files import hdf5_writing
from einmpi.files.atomic import FAILURES, begin, claimed, new_draft, publish, reason_of
from einmpi.files.fill import Distributed, Tensor, fill
from einmpi.files.hdf5_writing import Kind, Place
from einmpi.files.specs import COMPRESSIONS, HDF5_SUFFIXES, suffix_of
from einmpi.graph.dtypes import DTYPES


@dataclass(frozen=True)
class Format:
    """How to look at a file that exists, and how to make the draft of a file, without the elements of its tensors."""

    check: Callable[[str, Mapping[str, str]], None]
    lay_out: Callable[[str, str, Mapping[str, Kind], Mapping[str, str]], list[Place]]


def tensor_of(
    array: Distributed,
    name: str,
    dtype: str | None = None,
    chunks: Sequence[int] | None = None,
    compression: str | None = None,
) -> Tensor:
    """Without a dtype the tensor keeps its own; files have no bfloat16, so it becomes float32. What has no elements or
    no dimensions has no chunks either."""
    own = DTYPES[array.dtype.name].file_dtype
    if not array.ndim or not array.size:
        chunks = compression = None
    fitting = (
        None
        if chunks is None
        else tuple(min(pair) for pair in zip(chunks, array.shape, strict=True))
    )
    return Tensor(name, array, Kind(array.shape, dtype or own, fitting, compression))


def save(
    array: Distributed,
    file: str,
    dataset: str,
    chunks: Sequence[int] | None,
    compression: str | None,
) -> None:
    """A DistArray to a dataset of an HDF5 file. All ranks call it."""

    def checked() -> Tensor:
        if not isinstance(dataset, str) or not dataset.strip("/"):
            raise InputError(
                "to_hdf5", f"{dataset!r} is not the path of a dataset", "such as /Z or /group/Z"
            )
        if compression not in (None, *COMPRESSIONS):
            raise InputError(
                "to_hdf5",
                f"unknown compression {compression!r}",
                one_of(COMPRESSIONS, str(compression)),
            )
        numbers = chunks if isinstance(chunks, Sequence) else [chunks]
        if chunks is not None and (
            len(numbers) != array.ndim or any(type(n) is not int or n < 1 for n in numbers)
        ):
            raise InputError(
                "to_hdf5", f"chunks are {chunks!r}", f"{array.ndim} positive whole numbers"
            )
        return tensor_of(array, dataset, None, chunks, compression)

    tensor = together(array.comm, checked, lambda tensor: repr((tensor.name, tensor.kind)))
    with claimed({file: ""}, array.comm, lambda: check_target(file, {dataset: ""}, HDF5)):
        write(file, [tensor], {}, HDF5)


# ---- a file ---------------------------------------------------------------------------------------------------------


def check_target(file: str, names: Mapping[str, str], format: Format) -> None:
    """Refuse a file that could not be written. `names` are those of the tensors, with the place of each."""
    target = os.path.realpath(file)
    folder, where = os.path.dirname(target), next(iter(names.values()), "") or file
    if not os.path.isdir(folder):
        raise InputError(where, f"there is no folder for {file}", "a folder that exists")
    # A file is replaced, for which its folder's permission would do. But who made it read-only wants to keep it.
    kept = os.path.exists(target) and not os.stat(target).st_mode & 0o222
    if kept or not os.access(folder, os.W_OK):
        raise InputError(
            where, f"{file} may not be written", "a file and a folder with write permission"
        )
    if os.path.exists(target):
        format.check(file, names)


def write(
    file: str, tensors: Sequence[Tensor], attributes: Mapping[str, str], format: Format
) -> None:
    """Write tensors to a file. What else is in the file stays. All ranks call it, within `claimed`."""
    with drafted(file, tensors, attributes, format) as publish_file:
        publish_file()


@contextlib.contextmanager
def drafted(
    file: str,
    tensors: Sequence[Tensor],
    attributes: Mapping[str, str],
    format: Format,
    place: str = "",
) -> Iterator[Callable[[], object]]:
    """Write tensors to a draft of a file. What this gives puts the draft in the file's place; else it is dropped."""
    comm, target = tensors[0].array.comm, os.path.realpath(file)  # a link stays a link
    existed = os.path.exists(target)
    kinds = {tensor.name: tensor.kind for tensor in tensors}

    def failed(error: BaseException) -> EinmpiError:
        now = f"{file} is as it was" if existed else "nothing was written"
        return EinmpiError(f"{place or file}: {file} cannot be written: {reason_of(error)}; {now}")

    def first_rank(action: Callable[[], str | None]) -> str:
        def careful() -> str | None:
            try:
                return action()
            except FAILURES as error:
                raise failed(error) from error

        return on_first_rank(comm, careful)

    def prepare() -> str:
        return json.dumps(
            [os.path.basename(draft), format.lay_out(draft, target, kinds, attributes)]
        )

    def fill_draft() -> None:
        error = fill(draft, tensors, places, comm)
        if error is not None:
            raise failed(error) from error

    draft = new_draft(target)
    try:
        name, laid_out = json.loads(first_rank(prepare))
        draft = os.path.join(
            os.path.dirname(target), name
        )  # of rank 0, in the folder as this rank sees it
        places = [(offset, chunks and tuple(chunks)) for offset, chunks in laid_out]
        together(comm, fill_draft)  # and nobody reads the old file any more
        yield lambda: first_rank(lambda: publish(draft, target))
    finally:
        if comm.rank == 0:
            with contextlib.suppress(FileNotFoundError):
                os.remove(draft)


# ---- kinds of files -------------------------------------------------------------------------------------------------


def _lay_out_hdf5(
    draft: str, target: str, kinds: Mapping[str, Kind], attributes: Mapping[str, str]
) -> list[Place]:
    begin(draft, target, hdf5_writing.written_over(target, kinds) if os.path.exists(target) else [])
    return hdf5_writing.lay_out(draft, kinds, attributes)


def _check_npy(file: str, names: Mapping[str, str]) -> None:
    if not os.path.isfile(file):
        raise InputError(
            next(iter(names.values())) or file, f"{file} is not a file", "an .npy file"
        )


def _lay_out_npy(
    draft: str, target: str, kinds: Mapping[str, Kind], attributes: Mapping[str, str]
) -> list[Place]:
    """The one tensor of such a file comes after its header. There is no room for attributes."""
    begin(draft, target, None)
    (kind,) = kinds.values()
    with open(draft, "r+b") as file:
        descr = np.lib.format.dtype_to_descr(np.dtype(kind.dtype))
        np.lib.format.write_array_header_1_0(
            file, {"descr": descr, "fortran_order": False, "shape": kind.shape}
        )
        offset = file.tell()
        os.ftruncate(file.fileno(), offset + prod(kind.shape) * np.dtype(kind.dtype).itemsize)
    return [(offset, None)]


HDF5 = Format(hdf5_writing.check_target, _lay_out_hdf5)
FORMATS: dict[str, Format] = {
    **dict.fromkeys(HDF5_SUFFIXES, HDF5),
    ".npy": Format(_check_npy, _lay_out_npy),
}


def format_of(file: str) -> Format:
    return FORMATS[suffix_of(file)]
