"""The inputs of a job with their shapes and dtypes, those in files as the files say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from einmpi.errors import InputError
from einmpi.files.load import rows_of_chunks
from einmpi.files.specs import InputSpec
from einmpi.job.inputs import check_parts, in_batches, read_inputs
from einmpi.language.toml_document import Document, get, show, table
from einmpi.planner.strategies import ROLES

# Looks up the shape and dtype of an input in its file.
Describe: TypeAlias = Callable[[InputSpec], tuple[tuple[int, ...], str]]


def read_tensors(
    document: Document,
    sizes: Mapping[str, int],
    dtype: str,
    describe: Describe,
    parameters: Sequence[InputSpec],
) -> list[InputSpec]:
    """Return the inputs with their shapes and dtypes, those in files as the files say."""
    inputs = []
    for spec in read_inputs(document, ("inputs",), sizes, dtype):
        spec = in_batches(document, described(spec, describe), sizes)
        if spec.rows is not None:
            spec = replace(spec, chunk_rows=rows_of_chunks(spec))
        check_parts(spec, len(spec.shape or ()))
        if any(spec.name == known.name for known in parameters):
            what = f"{spec.name} is a parameter and cannot name a tensor"
            raise InputError(spec.place, what, "another name")
        inputs.append(spec)
    return inputs


def described(spec: InputSpec, describe: Describe) -> InputSpec:
    """Return an input with its shape and dtype."""
    if spec.file is None:
        return spec
    shape, dtype = describe(spec)
    return replace(spec, shape=shape, dtype=dtype)


def check_no_batches(inputs: Iterable[InputSpec]) -> None:
    """Refuse batches where no step is repeated."""
    for spec in inputs:
        if spec.rows is not None:
            what = f"{spec.name} comes in batches, but no step is repeated"
            raise InputError(spec.place, what, "a [loop]")


def read_roles(document: Document) -> dict[str, tuple[str, ...]]:
    """Return the labels that have each role."""
    roles: dict[str, tuple[str, ...]] = {}
    for role in table(document, ("roles",), ROLES):
        labels = get(document, ("roles", role), list) or []
        for number, label in enumerate(labels):
            if type(label) is not str or not label.isidentifier():
                raise InputError(
                    document.place(("roles", role, number)),
                    f"{show(label)} is not a label",
                    f'a list of labels such as {role} = ["b"]',
                )
        roles[role] = tuple(labels)
    return roles
