"""Write tensors to files: all ranks write to a draft of a file, which then takes its place."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

from einmpi.comm.agreement import on_first_rank, together
from einmpi.errors import EinmpiError, InputError, one_of
from einmpi.files.atomic import FAILURES, claimed, new_draft, publish, reason_of
from einmpi.files.fill import Distributed, Tensor, fill
from einmpi.files.formats import HDF5, FileFormat
from einmpi.files.specs import COMPRESSIONS, StorageSpec
from einmpi.graph.dtypes import DTYPES


def tensor_of(
    array: Distributed,
    name: str,
    dtype: str | None = None,
    chunks: Sequence[int] | None = None,
    compression: str | None = None,
) -> Tensor:
    """Return a tensor to write, with its own dtype unless another is given.

    Files have no bfloat16: it becomes float32. A tensor without elements or dimensions is stored
    without chunks; larger chunks are cut to the tensor's shape.
    """
    if dtype is None:
        dtype = DTYPES[array.dtype.name].file_dtype
    if not array.ndim or not array.size:
        chunks = None
        compression = None
    fitting = None
    if chunks is not None:
        fitting = tuple(map(min, chunks, array.shape))
    return Tensor(name, array, StorageSpec(array.shape, dtype, fitting, compression))


def save_hdf5(
    array: Distributed,
    file: str,
    dataset: str,
    chunks: Sequence[int] | None,
    compression: str | None,
) -> None:
    """Write a DistArray to a dataset of an HDF5 file. All ranks call it."""

    def check_arguments() -> Tensor:
        if not isinstance(dataset, str) or not dataset.strip("/"):
            raise InputError(
                "to_hdf5",
                f"{dataset!r} is not the path of a dataset",
                "a path such as /Z or /group/Z",
            )
        if compression not in (None, *COMPRESSIONS):
            raise InputError(
                "to_hdf5",
                f"unknown compression {compression!r}",
                one_of(COMPRESSIONS, str(compression)),
            )
        if chunks is not None and not _are_chunks(chunks, array.ndim):
            raise InputError("to_hdf5", f"chunks are {chunks!r}", f"{array.ndim} positive integers")
        return tensor_of(array, dataset, None, chunks, compression)

    tensor = together(array.comm, check_arguments, lambda found: repr((found.name, found.storage)))
    with claimed({file: ""}, array.comm, lambda: check_target(file, {dataset: ""}, HDF5)):
        write(file, [tensor], {}, HDF5)


def _are_chunks(given: object, ndim: int) -> bool:
    if not isinstance(given, Sequence) or len(given) != ndim:
        return False
    return all(type(extent) is int and extent >= 1 for extent in given)


# ---- a file -------------------------------------------------------------------------------------


def check_target(file: str, names: Mapping[str, str], file_format: FileFormat) -> None:
    """Refuse a file that could not be written.

    `names` are those of the tensors, with the place of each in the job file.
    """
    target = os.path.realpath(file)
    folder = os.path.dirname(target)
    where = next(iter(names.values()), "") or file
    if not os.path.isdir(folder):
        raise InputError(where, f"there is no folder for {file}", "a folder that exists")
    exists = os.path.exists(target)
    # To replace a file takes only the permission of its folder, but a user who has made a file
    # read-only wants to keep it.
    read_only = exists and not os.stat(target).st_mode & 0o222
    if read_only or not os.access(folder, os.W_OK):
        raise InputError(
            where, f"there is no permission to write {file}", "a writable file and folder"
        )
    if exists:
        assert file_format.write is not None
        file_format.write.check_target(file, names)


def write(
    file: str, tensors: Sequence[Tensor], attributes: Mapping[str, str], file_format: FileFormat
) -> None:
    """Write tensors to a file; its other contents stay. All ranks call it, within `claimed`."""
    with drafted(file, tensors, attributes, file_format) as publish_file:
        publish_file()


@contextlib.contextmanager
def drafted(
    file: str,
    tensors: Sequence[Tensor],
    attributes: Mapping[str, str],
    file_format: FileFormat,
    place: str = "",
) -> Iterator[Callable[[], object]]:
    """Write tensors to a draft of a file, and give a function that puts it in the file's place.

    A draft that is not published is removed at the end.
    """
    assert file_format.write is not None
    lay_out = file_format.write.lay_out
    comm = tensors[0].array.comm
    target = os.path.realpath(file)  # a link stays a link
    existed = os.path.exists(target)
    draft = new_draft(target)

    def failure_of(error: BaseException) -> EinmpiError:
        state = f"{file} is unchanged" if existed else "nothing was written"
        return EinmpiError(
            f"{place or file}: {file} cannot be written: {reason_of(error)}; {state}"
        )

    def do_on_first_rank(action: Callable[[], str | None]) -> str:
        def reporting_failures() -> str | None:
            try:
                return action()
            except InputError:  # it says all there is to say
                raise
            except FAILURES as error:
                raise failure_of(error) from error

        return on_first_rank(comm, reporting_failures)

    def make_draft_file() -> str:
        specs = {tensor.name: tensor.storage for tensor in tensors}
        return json.dumps([os.path.basename(draft), lay_out(draft, target, specs, attributes)])

    def fill_draft() -> None:
        error = fill(draft, tensors, places, comm)
        if error is not None:
            raise failure_of(error) from error

    try:
        name, laid_out = json.loads(do_on_first_rank(make_draft_file))
        # The draft of rank 0, in the folder as this rank sees it.
        draft = os.path.join(os.path.dirname(target), name)
        places = []
        for offset, chunks in laid_out:
            places.append((offset, None if chunks is None else tuple(chunks)))
        together(comm, fill_draft)  # after this no rank reads the old file
        yield lambda: do_on_first_rank(lambda: publish(draft, target))
    finally:
        if comm.rank == 0:
            with contextlib.suppress(FileNotFoundError):
                os.remove(draft)
