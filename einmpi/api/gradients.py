"""Gradients of jobs: a job in, a job with derivatives as outputs out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from einmpi.api.jobs import check_job
from einmpi.api.running import run
from einmpi.arguments import named_values, optional_names
from einmpi.errors import InputError, nearest_of
from einmpi.graph.einsum import element_text
from einmpi.graph.scalar import Names
from einmpi.job.job import Job, extended_job


def grad(
    job: Job | Callable[..., Any],
    loss: str | int | Sequence[int] | None = None,
    wrt: Sequence[str] | int | Sequence[int] | None = None,
) -> Any:
    """Make a job that computes a loss and its gradients.

    Parameters
    ----------
    job : Job
        What is computed, without a loop.
    loss : str
        The tensor that is differentiated: a real number, without dimensions.
    wrt : sequence of str
        The tensors to differentiate by: inputs, or tensors that the loss is computed from.

    Returns
    -------
    Job
        Its outputs are the loss and, for each W of `wrt`, a tensor dW of the shape and dtype of W.
        If the program has a dW already, the gradient's name ends in a number, as in dW_1.

    Raises
    ------
    InputError
        An argument is wrong, or the loss does not depend on a tensor by anything that has a
        derivative.

    Examples
    --------
    >>> job = einmpi.program("loss = sum((W[i] - 1)**2)", W=(2,))
    >>> job = einmpi.grad(job, "loss", ["W"])
    >>> print(job.graph["dW"])
    dW[i_2] ← 2 × (W[i_2] - 1)
    >>> einmpi.run(job, {"W": np.array([1.0, 4.0])})["dW"].gather()
    array([0., 6.])
    """
    if callable(job):
        from einmpi.api.tracing import differentiated

        return differentiated("grad", job, _arguments(loss, wrt), with_value=False)
    changed, _ = _with_gradients(check_job("grad", job), *_names(loss, wrt), "grad")
    return changed


def _arguments(loss: Any, wrt: Any) -> int | Sequence[int]:
    """Return the arguments of a function to differentiate by; the first one, if none are given."""
    given = wrt if loss is None else loss
    numbers = [given] if given is None or isinstance(given, int) else list(given)
    if not all(each is None or isinstance(each, int) for each in numbers):
        what = f"a function is differentiated by {given!r}"
        raise InputError("grad", what, "the numbers of some of its arguments")
    return 0 if given is None else given


def _names(loss: Any, wrt: Any) -> tuple[str, Sequence[str]]:
    if loss is None or wrt is None:
        raise InputError("grad", "loss or wrt is missing", "the names of tensors of the job")
    return loss, wrt


def value_and_grad(
    job: Job | Callable[..., Any],
    loss: str | int | Sequence[int] | None = None,
    wrt: Sequence[str] | int | Sequence[int] | None = None,
    inputs: Mapping[str, Any] | None = None,
    comm: Any = None,
    **options: Any,
) -> Any:
    """Compute a loss and its gradients.

    All ranks call this function.

    Parameters
    ----------
    job, loss, wrt
        As for `grad`.
    inputs : mapping of str to array, DistArray or h5py dataset, optional
        The inputs by name. Those that are missing are generated or read as the job says.
    comm : mpi4py communicator, optional
        The ranks; by default all that mpirun started, or this process alone.
    **options
        Further arguments of `run`.

    Returns
    -------
    tuple of float and dict
        The loss, and the gradient by each tensor of `wrt`, by its name.

    Raises
    ------
    InputError
        An argument is wrong, or there is no such gradient.

    Examples
    --------
    >>> job = einmpi.program("loss = sum(W[i]**2)", W=(2,))
    >>> value, gradients = einmpi.value_and_grad(job, "loss", ["W"], {"W": np.array([3.0, 4.0])})
    >>> value, gradients["W"].gather()
    (25.0, array([6., 8.]))
    """
    if callable(job):
        from einmpi.api.tracing import differentiated

        return differentiated("value_and_grad", job, _arguments(loss, wrt), with_value=True)
    loss, names = _names(loss, wrt)
    changed, gradients = _with_gradients(check_job("value_and_grad", job), loss, names, "grad")
    results = run(changed, inputs, comm, **options)
    value = float(results[loss].gather())
    return value, {name: results[gradient] for name, gradient in gradients.items()}


def vjp(job: Job, outputs: Mapping[str, str], wrt: Sequence[str]) -> Job:
    """Make a job that takes derivatives of tensors back to others: a vector-Jacobian product.

    Parameters
    ----------
    job : Job
        What is computed, without a loop.
    outputs : mapping of str to str
        For tensors of the program, the name of a new input of the same shape and dtype: the
        derivative of some loss by this tensor.
    wrt : sequence of str
        The tensors to differentiate by.

    Returns
    -------
    Job
        Its outputs are, for each X of `wrt`, the derivative dX of that loss by X.

    Raises
    ------
    InputError
        An argument is wrong, or no tensor depends on one of `wrt` by anything that has a
        derivative.

    Examples
    --------
    >>> job = einmpi.program("Y[i] = sum(A[i,j] * X[j])", A=(3, 2), X=(2,))
    >>> job = einmpi.vjp(job, {"Y": "dY"}, ["X"])
    >>> print(job.graph["dX"])
    dX[j] ← Σ[i](dY[i] × A[i,j])
    """
    checked = check_job("vjp", job)
    given = named_values("vjp", outputs)
    if not given:
        raise InputError("vjp", "there are no outputs", 'a dict such as {"Y": "dY"}')
    names = _names_in_use(checked)
    inputs: dict[str, tuple[Sequence[int], str]] = {}
    terms = []
    for name, adjoint in given.items():
        vertex = _vertex(checked, "vjp", name)
        if not isinstance(adjoint, str) or not adjoint.isidentifier() or adjoint in names:
            what = f"{name} is given the derivative {adjoint!r}"
            raise InputError("vjp", what, "the name of a new input")
        names.add(adjoint)
        inputs[adjoint] = vertex.bound, vertex.dtype
        labels = [names.take_new("i") for _ in vertex.bound]
        product = f"{element_text(adjoint, labels)} * {element_text(name, labels)}"
        if vertex.dtype.startswith("complex"):
            product = f"real(conj({element_text(adjoint, labels)}) * {element_text(name, labels)})"
        terms.append(f"sum[{','.join(labels)}]({product})" if labels else product)
    loss = names.take_new("product")
    text = f"{loss} = {' + '.join(terms)}"
    gradients, statements = _gradient_statements(checked, loss, wrt, "vjp", names)
    text = "\n".join([text, *statements])
    return extended_job(checked, text, inputs, tuple(gradients.values()))


def _with_gradients(
    job: Job, loss: str, wrt: Sequence[str], where: str
) -> tuple[Job, dict[str, str]]:
    """Return a job with a loss and its gradients, and the names of these."""
    if not isinstance(loss, str):
        raise InputError(where, f"the loss is {type(loss).__name__}", "the name of a tensor")
    _vertex(job, where, loss)
    names = _names_in_use(job)
    gradients, statements = _gradient_statements(job, loss, wrt, where, names)
    changed = extended_job(job, "\n".join(statements), {}, (loss, *gradients.values()))
    return changed, gradients


def _names_in_use(job: Job) -> Names:
    """Return all names in a program, and those of its tensors."""
    words = re.findall(r"[^\W\d]\w*", job.source.text)
    return Names([*words, *job.written.by_name, *job.sizes])


def _vertex(job: Job, where: str, name: str) -> Any:
    if job.loop is not None:
        hint = "write grad(loss, W[i,j]) in the program"
        raise InputError(where, "the job has a loop", "a job without a loop", hint)
    computed = [vertex.name for vertex in job.written.computed]
    if name not in computed:
        raise InputError(where, f"{name!r} is not computed", nearest_of(computed, name))
    return job.written[name]


def _gradient_statements(
    job: Job, loss: str, wrt: Sequence[str], where: str, names: Names
) -> tuple[dict[str, str], list[str]]:
    """Return the name of the gradient by each tensor, and the statements that define them."""
    optional_names(where, "wrt", wrt)
    if not wrt:
        raise InputError(where, "wrt is empty", 'a list of names such as ["W"]')
    gradients: dict[str, str] = {}
    statements = []
    for name in wrt:
        if name not in job.written.by_name:
            raise InputError(
                where, f"unknown tensor {name!r}", nearest_of(job.written.by_name, name)
            )
        if name in gradients:
            raise InputError(where, f"{name} is in wrt twice", "each name once")
        gradient = names.take_new(f"d{name}")
        labels = [names.take_new("i") for _ in job.written[name].bound]
        target = element_text(gradient, labels)
        statements.append(f"{target} = grad({loss}, {element_text(name, labels)})")
        gradients[name] = gradient
    return gradients, statements
