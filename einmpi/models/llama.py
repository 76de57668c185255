"""Load a LLaMA, or a model of the same form, from its folder; compute logits and generate tokens.

Prefill and decode are two programs over the same weights, which are loaded once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from einmpi.api import plan as plan_job
from einmpi.arguments import integer_from, known_name, path_name
from einmpi.comm.agreement import comm_of_program, on_first_rank, together
from einmpi.errors import InputError
from einmpi.files.datasets import CONVERTIBLE_DTYPES
from einmpi.files.specs import InputSpec, Resident
from einmpi.job.job import Job, program_job
from einmpi.job.settings import BACKENDS, truth_value
from einmpi.models.chat import Answer, Message, checked_messages, open_template
from einmpi.models.config import NAMED, Config, read_config
from einmpi.models.modules import AT
from einmpi.models.programs import (
    FREQUENCIES,
    LAST_HIDDEN,
    LENGTHS,
    LOGITS,
    OUTPUT_HEAD,
    TOKENS,
    KnownPrograms,
    ModelProgram,
    Wanted,
    Weight,
    check_folder,
    decode_program,
    files_of_tensors,
    prefill_program,
    random_inputs,
    weight_inputs,
)
from einmpi.models.quantised import (
    BITS,
    Quantised,
    quantised_inputs,
    quantised_weights,
    with_quantised,
)
from einmpi.models.sampling import (
    Prompts,
    Sampling,
    Tokens,
    check_sampling,
    checked_layers,
    checked_stop_tokens,
    choose_tokens,
    make_prompts,
    open_tokenizer,
    rounded_length,
    seen_tokens,
)
from einmpi.planner.strategies import DEFAULT_STRATEGY, STRATEGIES
from einmpi.units import parse_bytes

if TYPE_CHECKING:
    from einmpi.arrays.dist_array import DistArray
    from einmpi.comm.base import Comm
    from einmpi.planner.plan import Plan


# ---- settings ------------------------------------------------------------------------------------
#
# How a model is computed: the arguments of `load`, checked.


@dataclass(frozen=True)
class Settings:
    """How a model is computed: its dtype, and what its jobs say about backend and plan."""

    dtype: str
    backend: str
    memory: int | None
    strategy: str
    bits: int | None = None  # of weights that are quantised while they are read


def checked_settings(
    config: Config,
    dtype: str | None,
    backend: str,
    memory: int | str | None,
    strategy: str | None,
    weights: str | None = None,
) -> Settings:
    """Return the settings that a caller gave; by default the dtype is that of the files."""
    if weights is not None and config.quantisation is not None:
        problem = f"{weights!r:.40} requested, and the checkpoint has quantized weights"
        raise InputError("weights", problem)
    return Settings(
        known_name("dtype", config.dtype if dtype is None else dtype, CONVERTIBLE_DTYPES),
        known_name("backend", backend, BACKENDS),
        None if memory is None else parse_bytes(str(memory), "memory"),
        known_name("strategy", DEFAULT_STRATEGY if strategy is None else strategy, STRATEGIES),
        None if weights is None else BITS[known_name("weights", weights, tuple(BITS))],
    )


def config_of(path: str, random: bool) -> Config:
    """Return the config of a folder, or of a named size with random weights."""
    if path in NAMED and not os.path.isdir(path):
        if not random:
            problem = "a size has no weights"
            hint = "use random weights: --random, or random=True in Python"
            raise InputError(path, problem, "the folder of a checkpoint", hint)
        return NAMED[path]
    check_folder(path)
    return read_config(path)


CACHE_STEP = 64  # positions: a cache has room for a multiple of them, so that programs are reused
ENDED = -1  # what a stream yields for a sequence after its stop token


def load(
    folder: str | os.PathLike[str],
    dtype: str | None = None,
    backend: str = "numpy",
    memory: int | str | None = None,
    strategy: str | None = None,
    comm: Any = None,
    *,
    random: bool = False,
    weights: str | None = None,
) -> Model:
    """Load a model from a folder in the format of Hugging Face. All ranks call it.

    The files are looked up and checked. The weights are read when they are first used, each part
    by the rank that needs it.

    Parameters
    ----------
    folder : path
        The folder with config.json and the weights in safetensors; or one of ``"7B"``, ``"13B"``,
        ``"30B"`` and ``"65B"`` together with `random`.
    dtype : {"float32", "bfloat16", "float16", "float64"}, optional
        The dtype to compute in; by default that of the checkpoint.
    backend : {"numpy", "cupy"}, optional
        What computes: CPUs or GPUs.
    memory : int or str, optional
        The limit per rank, in bytes or as a text such as ``"16 GiB"``.
    strategy : str, optional
        How the model is cut over ranks; by default the best plan is searched.
    comm : mpi4py communicator, optional
        The ranks; by default all that mpirun started, or this process alone.
    random : bool, optional
        Whether to use random weights instead of those of the checkpoint.
    weights : {"int8", "int4"}, optional
        What the matrices of linear layers are quantised to while they are read.

    Returns
    -------
    Model
        The model, ready for `logits` and `generate`.

    Raises
    ------
    InputError
        The folder has no model that einmpi knows, a tensor is missing or has a wrong shape, or an
        argument is wrong; the same error on all ranks.
    """

    own_comm = comm_of_program(comm)

    def read() -> Model:
        path = path_name("load", folder)
        has_random_weights = truth_value("random", random)
        config = config_of(path, has_random_weights)
        settings = checked_settings(config, dtype, backend, memory, strategy, weights)
        model = Model(path, config, settings, own_comm, has_random_weights)
        model.job(1, 1)  # all tensors are there and have the right shapes
        return model

    return together(own_comm, read, lambda model: repr((model.config, model.settings)))


class Model:
    """A model that computes logits and generates tokens. `load` makes it.

    All ranks call its methods, with the same arguments.

    Attributes
    ----------
    config : Config
        The sizes of the model, and what its architecture has.
    settings : Settings
        The dtype, the backend, the memory limit and the strategy.
    """

    def __init__(
        self, folder: str, config: Config, settings: Settings, comm: Comm, random: bool
    ) -> None:
        self.folder = folder
        self.config = config
        self.settings = settings
        self.comm = comm
        self.random = random
        self.programs = KnownPrograms(comm, settings.memory, self.make_job)

    def __repr__(self) -> str:
        return f"<Model {self.folder}: {self.config.layers} layers, {self.settings.dtype}>"

    # ---- what it computes ------------------------------------------------------------------------

    def logits(self, tokens: Any, lengths: Any = None, every: bool = False) -> DistArray:
        """Compute the logits of the token that follows each sequence.

        Parameters
        ----------
        tokens : array of int, or sequence of sequences
            The tokens [batch, position]; one sequence may be without the first dimension.
        lengths : sequence of int, optional
            The number of tokens of each sequence, if they are padded at their end.
        every : bool, optional
            Whether to compute the logits at every position.

        Returns
        -------
        DistArray
            The logits [batch, vocabulary]; with `every`, [batch, position, vocabulary].

        Raises
        ------
        InputError
            The tokens are wrong; the same error on all ranks.
        """
        return self.prefill(tokens, lengths, every)[0]

    def hidden(
        self, tokens: Any, layers: Sequence[int], lengths: Any = None, before_norm: bool = False
    ) -> list[DistArray]:
        """Compute the hidden states after some layers.

        Parameters
        ----------
        tokens, lengths
            As for `logits`.
        layers : sequence of int
            The layers, counted from 1; 0 is the embedding. As in transformers, the states of the
            last layer are those after the model's last norm.
        before_norm : bool, optional
            Whether those of the last layer are as it leaves them, before that norm.

        Returns
        -------
        list of DistArray
            For each layer the states [batch, position, width].

        Raises
        ------
        InputError
            The tokens are wrong, or there is no such layer; the same error on all ranks.
        """
        return self.prefill(tokens, lengths, layers=layers, before_norm=before_norm)[1]

    def prefill(
        self,
        tokens: Any,
        lengths: Any = None,
        every: bool = False,
        layers: Sequence[int] = (),
        before_norm: bool = False,
    ) -> tuple[DistArray, list[DistArray]]:
        """Compute logits as `logits` does, and hidden states as `hidden` does, in one run."""
        prompts = self._prompts(tokens, lengths)
        chosen = together(self.comm, lambda: checked_layers(layers, self.config, before_norm))
        last = -1 if before_norm else self.config.layers  # the layer after which there is a norm
        plain = tuple(layer for layer in chosen if layer != last)
        outputs = self._run_prefill(prompts, every=every, hidden=plain, last_hidden=last in chosen)
        names = [LAST_HIDDEN if layer == last else f"x_{layer}" for layer in chosen]
        return outputs[LOGITS], [outputs[name] for name in names]

    def generate(
        self,
        tokens: Any,
        new: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[int] | None = None,
        lengths: Any = None,
        on_tokens: Callable[[Tokens], object] | None = None,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
    ) -> list[Tokens]:
        """Generate the tokens that follow each sequence.

        Parameters
        ----------
        tokens, lengths
            As for `logits`.
        new : int, optional
            The most tokens to generate for a sequence. The last of them needs no position of the
            model: a prompt may fill all positions if one token is asked for.
        temperature : float, optional
            0 chooses the likeliest token; with larger values unlikely ones become more likely.
        top_k : int, optional
            How many of the likeliest tokens may be chosen; 0 for all.
        top_p : float, optional
            The probability that the fewest likeliest tokens must have together; only these may be
            chosen.
        seed : int, optional
            Another seed makes other choices. The same one makes the same on any number of ranks.
        stop : sequence of int, optional
            The tokens after which a sequence ends; by default those of the model.
        on_tokens : function, optional
            Called after each step with what `stream` yields.
        min_p : float, optional
            How many times as likely as the likeliest token another one must be to be chosen.
        repetition_penalty : float, optional
            What positive logits of tokens that are in the text are divided by, and negative ones
            multiplied; 1 has no effect.

        Returns
        -------
        list of array
            The new tokens of each sequence, with its stop token if it has reached one.

        Raises
        ------
        InputError
            An argument is wrong; the same error on all ranks.
        """
        sampling = Sampling(temperature, top_k, top_p, seed, min_p, repetition_penalty)
        batch, steps = self._begin(tokens, new, stop, lengths, sampling)
        by_sequence = np.full((batch, new), ENDED, np.int64)
        for number, step in enumerate(steps):
            if on_tokens is not None:
                on_tokens(step)
            by_sequence[:, number] = step
        return [row[row != ENDED] for row in by_sequence]

    def stream(
        self,
        tokens: Any,
        new: int = 64,
        stop: Sequence[int] | None = None,
        lengths: Any = None,
        **sampling: Any,
    ) -> Iterator[Tokens]:
        """Generate tokens one after another. All ranks go through the iterator.

        Parameters
        ----------
        tokens, new, stop, lengths
            As for `generate`.
        **sampling
            `temperature`, `top_k`, `top_p`, `seed`, `min_p` and `repetition_penalty`, as for
            `generate`.

        Returns
        -------
        iterator of array
            For each step the next token of each sequence; -1 for one that has ended.

        Raises
        ------
        InputError
            An argument is wrong; the same error on all ranks.
        """
        return self._begin(tokens, new, stop, lengths, Sampling(**sampling))[1]

    def chat(
        self,
        messages: Sequence[Message],
        new: int = 512,
        stop_text: Sequence[str] = (),
        **sampling: Any,
    ) -> str:
        """Answer the last message of a conversation.

        The folder has a tokenizer and a chat template.

        Parameters
        ----------
        messages : list of dict
            The conversation: each message has a `role`, such as "system", "user" or "assistant",
            and a `content`.
        new : int, optional
            The most tokens to generate.
        stop_text : sequence of str, optional
            Texts before which the answer ends.
        **sampling
            As for `stream`.

        Returns
        -------
        str
            The answer.

        Raises
        ------
        InputError
            An argument is wrong, or the folder lacks a file; the same error on all ranks.
        """

        # One rank makes the text, as a template may ask for the time.
        conversation = together(self.comm, lambda: checked_messages(messages))
        text = on_first_rank(self.comm, lambda: open_template(self.folder).prompt(conversation))
        tokenizer = together(self.comm, lambda: open_tokenizer(self.folder))
        tokens = tokenizer.encode(text, is_complete=True)
        answer = Answer(tokenizer, tokens, stop_text)
        for step in self.stream(tokens, new, **sampling):
            answer.add(int(step[0]))
            if answer.has_ended:
                break
        answer.finish()
        return answer.text

    # ---- plans and jobs --------------------------------------------------------------------------

    def job(self, batch: int = 1, sequence: int | None = None, every: bool = False) -> Job:
        """Return the job that computes the logits of prompts of this shape.

        Parameters
        ----------
        batch, sequence : int, optional
            The number of prompts and of tokens in each; by default 1 and all positions.
        every : bool, optional
            Whether to compute the logits at every position.

        Returns
        -------
        Job
            The job. Its inputs are the tokens, and the weights, which come from their files.

        Raises
        ------
        InputError
            An argument is wrong.
        """
        positions = self.config.positions if sequence is None else sequence
        return self.make_job(
            self._prefill_program(
                integer_from("batch", batch, 1),
                integer_from("sequence", positions, 1),
                every=truth_value("every", every),
            )
        )

    def plan(
        self,
        ranks: int,
        batch: int = 1,
        sequence: int | None = None,
        strategy: str | None = None,
        memory: int | str | None = None,
        machine: str | None = None,
    ) -> Plan:
        """Plan how the model is cut over ranks. No weights are read.

        Parameters
        ----------
        ranks : int
            The number of ranks.
        batch, sequence : int, optional
            As for `job`.
        strategy, memory, machine : optional
            As for `einmpi.plan`; by default those of the model.

        Returns
        -------
        Plan
            The plan of a prefill. ``print(plan)`` explains it.

        Raises
        ------
        InputError
            An argument is wrong, or no plan stays within the memory limit.
        """
        job = self.job(batch, sequence)
        return plan_job(job, ranks, strategy=strategy, memory=memory, machine=machine)

    def make_job(self, program: ModelProgram, weights_stay: bool = True) -> Job:
        """Return the job of a program over the weights of this model.

        They stay loaded between calls, as many as the memory limit allows, or they do not.
        """
        settings = self.settings
        quantised, used = self._quantised(program)
        text, weights = with_quantised(program, quantised)
        inputs = {**program.inputs, **weights}
        job = program_job(text, inputs, {}, settings.dtype, program.outputs)
        resident: Resident = weights_stay
        if weights_stay and settings.memory is not None:
            resident = "fit"
        plain = {name: each for name, each in program.weights.items() if name not in quantised}
        specs = self._weights(plain, used, resident)
        return replace(
            job,
            title=os.path.basename(os.path.abspath(self.folder)),
            inputs=(*specs, *quantised_inputs(quantised, program.weights, weights, resident)),
            roles=program.roles,
            strategy=settings.strategy,
            memory=settings.memory,
            backend=settings.backend,
        )

    def _quantised(self, program: ModelProgram) -> tuple[dict[str, Quantised], set[str]]:
        """Return the weights that are in 8 or 4 bits, and the tensors that they are read from."""
        stored, bits = self.config.quantisation, self.settings.bits
        if stored is None and bits is None:
            return {}, set()
        files = None if self.random else files_of_tensors(self.folder)
        return quantised_weights(program.weights, files, stored, bits, self.settings.dtype)

    def _weights(
        self, weights: Mapping[str, Weight], others: Collection[str], resident: Resident
    ) -> tuple[InputSpec, ...]:
        """Return where the float weights come from; `others` are tensors of the other weights."""
        dtype = self.settings.dtype
        if self.random:
            return random_inputs(weights, dtype, resident)
        may_be_there = (*others, *((OUTPUT_HEAD,) if self.config.tied else ()))
        return weight_inputs(self.folder, weights, dtype, may_be_there, resident)

    # ---- steps -----------------------------------------------------------------------------------

    def _prompts(self, tokens: Any, lengths: Any, new: int = 0) -> Prompts:
        return together(self.comm, lambda: make_prompts(tokens, lengths, self.config, new))

    def _begin(
        self,
        tokens: Any,
        new: int,
        stop: Sequence[int] | None,
        lengths: Any,
        sampling: Sampling,
    ) -> tuple[int, Iterator[Tokens]]:
        """Return the number of prompts, and the steps after them; refuse wrong arguments."""
        together(self.comm, lambda: check_sampling(sampling))
        prompts = self._prompts(tokens, lengths, new)
        wanted = self.config.stop_tokens if stop is None else stop
        stop_tokens = together(self.comm, lambda: checked_stop_tokens(wanted))
        return len(prompts.tokens), self._steps(prompts, new, sampling, stop_tokens)

    def _prefill_program(self, batch: int, sequence: int, **options: Any) -> ModelProgram:
        return prefill_program(self.config, batch, sequence, self.settings.dtype, **options)

    def _wanted_prefill(self, batch: int, sequence: int, **options: Any) -> Wanted:
        key = ("prefill", batch, sequence, tuple(sorted(options.items())))
        return Wanted(key, partial(self._prefill_program, batch, sequence, **options))

    def _run_prefill(self, prompts: Prompts, **options: Any) -> dict[str, DistArray]:
        """Compute the outputs of a prefill."""
        batch, sequence = prompts.tokens.shape
        is_padded = bool((prompts.lengths < sequence).any())
        options["lengths"] = is_padded and not options.get("every")
        ((_, compiled),) = self.programs.ready(self._wanted_prefill(batch, sequence, **options))
        frequencies = self.config.frequencies(int(prompts.lengths.max()))
        given: dict[str, Any] = {TOKENS: prompts.tokens, FREQUENCIES: frequencies}
        if options["lengths"]:
            given[LENGTHS] = prompts.lengths
        return compiled(given)

    def _steps(
        self, prompts: Prompts, new: int, sampling: Sampling, stop: Tokens
    ) -> Iterator[Tokens]:
        """Prefill, then decode token by token until all sequences have ended."""
        if new == 0:
            return
        positions = self.config.positions
        longest = int(prompts.lengths.max())
        frequencies = self.config.frequencies(longest)
        prompts = prompts.padded(min(rounded_length(longest), positions))
        batch, sequence = prompts.tokens.shape
        room = -(-max(sequence, longest + new) // CACHE_STEP) * CACHE_STEP
        length = min(room, positions)
        (_, prefill), (program, decode) = self.programs.ready(
            self._wanted_prefill(batch, sequence, caches=length, lengths=True),
            Wanted(
                ("decode", batch, length),
                partial(decode_program, self.config, batch, length, self.settings.dtype),
            ),
        )
        outputs = prefill(
            {
                TOKENS: prompts.tokens,
                LENGTHS: prompts.lengths,
                FREQUENCIES: frequencies,
            }
        )
        caches = {name: outputs[name] for name in program.carry}
        places = prompts.lengths.copy()  # of the tokens that are chosen next
        has_ended = np.zeros(batch, bool)
        seen = seen_tokens(prompts, sampling, self.config.vocabulary)
        for step in range(new):
            chosen = choose_tokens(outputs[LOGITS].gather(), sampling, places, seen)
            yield np.where(has_ended, ENDED, chosen)
            has_ended |= np.isin(chosen, stop)
            if seen is not None:
                seen[np.arange(batch), chosen] = True
            if has_ended.all() or step == new - 1:
                return
            given = {TOKENS: chosen, AT: places, FREQUENCIES: frequencies}
            outputs = decode({**given, **caches})
            caches = {name: outputs[output] for name, output in program.carry.items()}
            places = places + 1
