"""Train a program: change inputs so that a loss becomes less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from einmpi.api.loop_arguments import LoopArguments
from einmpi.api.loops import run_loops
from einmpi.api.planning import Settings, check_job
from einmpi.arguments import as_int
from einmpi.errors import InputError
from einmpi.job.job import Job
from einmpi.training.settings import make_training

if TYPE_CHECKING:
    from einmpi.loops.result import LoopResult


def train(
    job: Job,
    inputs: Mapping[str, Any] | None = None,
    comm: Any = None,
    *,
    loss: str,
    parameters: Sequence[str],
    optimizer: str | Mapping[str, Any],
    accumulate: int | None = None,
    precision: str | None = None,
    scale: float | None = None,
    growth: int | None = None,
    validation: Mapping[str, Any] | None = None,
    **options: Any,
) -> LoopResult:
    """Train a program: change some of its inputs so that a loss becomes less.

    Statements are added to the program: gradients, and the next values of parameters and of the
    optimiser's state, which starts with zeros. Then it is run as by `loop`. All ranks call this
    function.

    Parameters
    ----------
    job : Job
        The program of a step, which computes the loss.
    inputs : mapping of str to array, DistArray or h5py dataset, optional
        The inputs of the first step by name, as for `loop`.
    comm : mpi4py communicator, optional
        The ranks; by default all that mpirun started, or this process alone.
    loss : str
        The tensor that becomes less: a real number, without dimensions.
    parameters : sequence of str
        The inputs that change.
    optimizer : str or mapping
        The name of an optimiser, or ``{"name": "adamw", "rate": 0.001, "decay": 0.01}``. The rate
        is a number, or an expression of `step`, `steps` and tensors without dimensions.
    accumulate : int, optional
        The number of batches whose mean gradient makes one update; 1 by default.
    precision : {"bfloat16", "float16"}, optional
        The dtype in which the loss and its gradients are computed.
    scale, growth : optional
        With float16, what the loss is multiplied by at first, and after how many updates that
        doubles; 65536 and 2000 by default.
    validation : mapping, optional
        What is computed for other inputs, such as
        ``{"inputs": {"X": X, "y": y}, "every": 100, "record": ["accuracy"]}``: tensors without
        dimensions, by default the loss, after every so many steps and after the last. Inputs that
        come in batches are given with all their rows, and have the mean over all batches.
    **options
        Further arguments of `loop`: `steps` or `epochs`, `batch`, `record`, `until` and others.
        `carry` is for inputs besides the parameters.

    Returns
    -------
    LoopResult
        With `outputs`, the last values of the parameters and the outputs of the last step, and
        `history`, the recorded values; those of the validation as "validation_accuracy" and so on,
        nan for steps without one.

    Raises
    ------
    InputError
        An argument is wrong; the same error on all ranks.

    Examples
    --------
    >>> job = einmpi.program("loss = sum((w[i] - 3)**2)", w=(2,))
    >>> found = einmpi.train(
    ...     job,
    ...     {"w": np.zeros(2)},
    ...     loss="loss",
    ...     parameters=["w"],
    ...     optimizer={"name": "momentum", "rate": 0.05},
    ...     steps=200,
    ...     record=["loss"],
    ... )
    >>> found.outputs["w"].gather().round(3)
    array([3., 3.])
    """
    arguments, settings = _arguments_of_loop(options)
    if check_job("train", job).loops:
        raise InputError("train", "the job has several loops", "a program, or a job with one loop")
    training = make_training(
        lambda *_: "train",
        loss,
        parameters,
        optimizer,
        as_int(accumulate),
        precision,
        scale,
        as_int(growth),
    )
    return run_loops(job, inputs, comm, arguments, settings, training, validation)


def _arguments_of_loop(options: Mapping[str, Any]) -> tuple[LoopArguments, Settings]:
    """Return further arguments of `train`, as `loop` groups them; refuse unknown ones."""
    arguments = {}
    settings = {}
    for name, value in options.items():
        if name in LoopArguments._fields:
            arguments[name] = value
        elif name in Settings._fields:
            settings[name] = value
        else:
            raise TypeError(f"train() got an unexpected keyword argument {name!r}")
    return LoopArguments(**arguments), Settings(**settings)
