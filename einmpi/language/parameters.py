"""The dtypes of parameters: like constants, they take the dtype of what they are combined with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from einmpi.graph.arithmetic import call, compute_types, result_type
from einmpi.graph.dtypes import Type
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import Const
from einmpi.language.symbols import TypedScalar

# The types of Python that adapt like those of constants, by the kind of a dtype.
_PYTHON_TYPES: dict[str, type] = {"b": bool, "i": int, "u": int, "f": float, "c": complex}


def with_cast_parameters(op: str, arguments: Sequence[TypedScalar]) -> Sequence[TypedScalar]:
    """Cast parameters, and expressions of nothing else, to the dtype in which `op` computes.

    Like constants they have a type of Python, which takes the dtype of the other operands.
    """
    kinds = tuple(argument.type for argument in arguments)
    are_parameters = [_is_parameter(argument) for argument in arguments]
    if not any(are_parameters) or all(isinstance(kind, type) for kind in kinds):
        return arguments
    if OPERATIONS[op].is_cast:
        return arguments
    result_type(op, kinds)  # raises OperationError for arguments that the operation rejects
    found = []
    for number, dtype in enumerate(compute_types(op, kinds)):
        argument = arguments[number]
        if are_parameters[number]:
            scalar = argument.scalar
            if np.dtype(argument.type).name != dtype:
                scalar = call(dtype, scalar)
            argument = TypedScalar(scalar, np.dtype(dtype))
        found.append(argument)
    return found


def _is_parameter(argument: TypedScalar) -> bool:
    return isinstance(argument.type, type) and not isinstance(argument.scalar, Const)


def adapting_type(op: str, kinds: Sequence[Type], result: Type) -> Type:
    """Return the type of a result: a type of Python if all arguments have one."""
    if all(isinstance(kind, type) for kind in kinds) and not OPERATIONS[op].is_cast:
        return _PYTHON_TYPES[np.dtype(result).kind]
    return result
