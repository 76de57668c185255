"""Write tensors to files: all ranks write to a draft of a file, which then takes its place."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeAlias

from einmpi.comm.agreement import on_first_rank, together
from einmpi.errors import EinmpiError, InputError, one_of
from einmpi.files.atomic import (
    FAILURES,
    NotPublished,
    cannot_write,
    draft_path,
    is_of_another_user,
    reason_of,
    remove_path,
)
from einmpi.files.claims import Claim, claimed
from einmpi.files.datasets import FileIdentity, identity_at
from einmpi.files.fill import Distributed, Tensor, fill, fill_chunk_files
from einmpi.files.formats import FileFormat
from einmpi.files.journal import Draft, publish_all
from einmpi.files.specs import StorageSpec
from einmpi.graph.dtypes import DTYPES

# Returns the attributes of tensors that are written.
Describe: TypeAlias = Callable[[], Mapping[str, str]]


def tensor_of(
    array: Distributed,
    name: str,
    dtype: str | None = None,
    chunks: Sequence[int] | None = None,
    compression: str | None = None,
    labels: tuple[str, ...] | None = None,
    tensor: str = "",
) -> Tensor:
    """Return a tensor to write, with its own dtype unless another is given.

    Files have no bfloat16: it becomes float32. A tensor without elements or dimensions is stored
    without chunks; larger chunks are cut to the tensor's shape. `labels` name the dimensions, and
    `tensor` is the name in the program.
    """
    if dtype is None:
        dtype = DTYPES[array.dtype.name].file_dtype
    if not array.ndim or not array.size:
        chunks = None
        compression = None
    fitting = None
    if chunks is not None:
        fitting = tuple(map(min, chunks, array.shape))
    storage = StorageSpec(array.shape, dtype, fitting, compression, labels, tensor)
    return Tensor(name, array, storage)


def save(
    array: Distributed,
    where: str,
    file_format: FileFormat,
    file: str,
    dataset: str,
    chunks: Sequence[int] | None,
    compression: str | None,
    describe: Describe,
    labels: tuple[str, ...] | None = None,
    tensor: str = "",
) -> None:
    """Write a DistArray to a file of a format that has chunks. All ranks call it.

    `where` is the function that messages name.
    """
    methods = file_format.write
    assert methods is not None

    def check_arguments() -> Tensor:
        if not isinstance(dataset, str) or not (dataset.strip("/") or file_format.default_name):
            raise InputError(
                where, f"{dataset!r} is not the path of a dataset", "a path such as /Z or /group/Z"
            )
        name = file_format.check_name(where, dataset)
        if compression is not None:
            if not isinstance(compression, str) or compression not in methods.compressions:
                raise InputError(
                    where,
                    f"unknown compression {compression!r}",
                    one_of(methods.compressions, str(compression)),
                )
            methods.check_compression(where, compression)
        if chunks is not None and not _are_chunks(chunks, array.ndim):
            raise InputError(where, f"chunks are {chunks!r}", f"{array.ndim} positive integers")
        return tensor_of(array, name, None, chunks, compression, labels, tensor)

    def fingerprint(found: Tensor) -> str:
        return repr((file, found.name, found.storage))

    checked = together(array.own_comm, check_arguments, fingerprint)
    check = partial(check_target, file, {checked.name: ""}, file_format)
    with claimed({file: ""}, array.own_comm, check) as claim:
        write([OutputFile(file, "", file_format, [checked])], describe, claim)


def _are_chunks(given: object, ndim: int) -> bool:
    if not isinstance(given, Sequence) or len(given) != ndim:
        return False
    return all(type(extent) is int and extent >= 1 for extent in given)


# ---- a file -------------------------------------------------------------------------------------


def check_target(file: str, names: Mapping[str, str], file_format: FileFormat) -> None:
    """Refuse a file that could not be written.

    `names` are those of the tensors, with the place of each in the job file.
    """
    check_folder_of(file, next(iter(names.values()), "") or file)
    if os.path.exists(file):
        assert file_format.write is not None
        file_format.write.check_target(file, names)


def check_folder_of(file: str, where: str) -> None:
    """Refuse a file that could not be replaced."""
    target = os.path.realpath(file)
    folder = os.path.dirname(target)
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
    if is_of_another_user(target):
        raise InputError(
            where,
            f"{file} belongs to another user, and its folder has the sticky bit",
            "a file of your own, or another folder",
        )


@dataclass(frozen=True)
class OutputFile:
    """A file to write: its path and place in the job file, its format and tensors."""

    file: str
    place: str
    file_format: FileFormat
    tensors: Sequence[Tensor]


def write(files: Sequence[OutputFile], describe: Describe, claim: Claim) -> None:
    """Write tensors to files, to all of them or to none; their other contents stay.

    All ranks call it, within `claimed`. Rank 0 calls `describe` for the attributes of the tensors.
    """
    if not files:
        return
    attributes = cache(describe)  # the same in all files
    with contextlib.ExitStack() as stack:
        drafts = [stack.enter_context(_drafted(file, attributes, claim)) for file in files]

        def publish_drafts() -> None:
            try:
                with claim.publishing():
                    publish_all(drafts, claim.token)
            except NotPublished as error:
                concerned = files[0]
                for output, draft in zip(files, drafts, strict=True):
                    if draft.target == error.target:
                        concerned = output
                raise _cannot_write(concerned, str(error), error.state) from error

        on_first_rank(claim.comm, publish_drafts)  # only when all drafts are complete


@contextlib.contextmanager
def _drafted(output: OutputFile, attributes: Describe, claim: Claim) -> Iterator[Draft]:
    """Write tensors to a draft of a file. A draft that is not published is removed at the end."""
    assert output.file_format.write is not None
    lay_out = output.file_format.write.lay_out
    open_chunk_writer = output.file_format.write.open_chunk_writer
    comm = claim.comm
    target = os.path.realpath(output.file)  # a link stays a link
    draft = draft_path(target, claim.token)
    replaced: FileIdentity | None = None  # known to rank 0

    def failure_of(error: BaseException) -> EinmpiError:
        existed = os.path.exists(target)
        state = f"{output.file} is unchanged" if existed else "nothing was written"
        try:
            claim.require_locks()
        except NotPublished as lost:
            return _cannot_write(output, str(lost), lost.state)
        return _cannot_write(output, reason_of(error), state)

    def make_draft_file() -> str:
        nonlocal replaced
        specs = {tensor.name: tensor.storage for tensor in output.tensors}
        try:
            replaced = identity_at(target)
            return json.dumps(lay_out(draft, target, specs, attributes()))
        except InputError:  # it says all there is to say
            raise
        except FAILURES as error:
            raise failure_of(error) from error

    def fill_draft() -> None:
        if open_chunk_writer is None:
            error = fill(draft, output.tensors, places, comm)
        else:
            error = fill_chunk_files(draft, output.tensors, places, comm, open_chunk_writer)
        if error is not None:
            raise failure_of(error) from error

    try:
        places = []
        for offset, chunks in json.loads(on_first_rank(comm, make_draft_file)):
            places.append((offset, None if chunks is None else tuple(chunks)))
        together(comm, fill_draft)  # after this no rank reads the old file
        yield Draft(output.file, target, draft, replaced)
    finally:
        if comm.rank == 0:
            # It is gone once it is published, or the old folder has its name. On a disk that has
            # become read-only it stays, and what is being raised says so.
            with contextlib.suppress(OSError):
                remove_path(draft)


def _cannot_write(output: OutputFile, reason: str, state: str) -> EinmpiError:
    return cannot_write(output.place, output.file, f"{reason}; {state}")
