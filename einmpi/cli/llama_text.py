"""Text in and text out of `einmpi llama`: prompts, answers as they come, conversations."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from einmpi.cli.job_options import print_or_write
from einmpi.comm.agreement import on_first_rank, together
from einmpi.comm.base import Comm
from einmpi.errors import InputError
from einmpi.models.chat import Answer, Message, open_template, question, read_prompt_file
from einmpi.models.llama import Model
from einmpi.models.sampling import (
    Sampling,
    TextTokenizer,
    check_sampling,
    open_tokenizer,
    read_sampling,
)

# How tokens are chosen: flags, each a field of a Sampling.
SAMPLING_FLAGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
_ONLY_AT_RANDOM = ("top_k", "top_p", "min_p")


class Prompt(NamedTuple):
    """What the model continues: its text as given, its tokens, and whether it is shown."""

    text: str
    tokens: list[int]
    is_shown: bool


def given_sampling(options: argparse.Namespace) -> dict[str, Any]:
    """Return the flags that say how tokens are chosen."""
    found = {name: getattr(options, name) for name in SAMPLING_FLAGS}
    return {name: value for name, value in found.items() if value is not None}


def sampling_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return how tokens are chosen: by flags, else as generation_config.json says."""
    given = given_sampling(options)
    known = read_sampling(options.model)
    temperature = given.get("temperature", known.get("temperature", 0.0))
    if temperature == 0:
        known = {name: value for name, value in known.items() if name not in _ONLY_AT_RANDOM}
    chosen = {**known, "temperature": temperature, **given}
    check_sampling(Sampling(**chosen), as_flags=True)
    return chosen


def generate_text(options: argparse.Namespace, model: Model, comm: Comm) -> None:
    """Generate what follows the prompts, and print it. All ranks call it."""
    tokenizer = together(comm, lambda: open_tokenizer(options.model))
    sampling = together(comm, lambda: sampling_of(options))
    if not options.prompt and options.prompt_file is None:
        _converse(options, model, tokenizer, sampling, comm)
        return
    prompts = []
    for text, whole, is_shown in json.loads(on_first_rank(comm, lambda: _prompt_texts(options))):
        tokens = tokenizer.encode(whole, is_complete=not is_shown)
        prompts.append(Prompt(text, tokens, is_shown))
    is_streamed = len(prompts) == 1 and not options.quiet and options.json != "-"
    answers = [Answer(tokenizer, prompt.tokens, options.stop_text) for prompt in prompts]
    generated: list[list[int]] = [[] for _ in prompts]
    started = time.perf_counter()
    first = prompts[0].text if prompts[0].is_shown else ""  # as long as it is not printed
    for pieces in _pieces(
        model, [each.tokens for each in prompts], answers, generated, options.new, sampling
    ):
        if is_streamed:
            _print(comm, first + pieces[0])
            first = ""
    seconds = time.perf_counter() - started
    rests = [answer.finish() for answer in answers]
    lines = [
        (prompt.text if prompt.is_shown else "") + answer.text
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    data = {
        "model": options.model,
        "ranks": comm.size,
        "tokens": generated,
        "seconds": seconds,
        "prompts": [prompt.text for prompt in prompts],
        "texts": [answer.text for answer in answers],
    }

    def present() -> None:
        if is_streamed:
            _print(comm, rests[0] + "\n")
            options.quiet = True  # the text has been printed
        print_or_write(options, "\n".join(lines), data)

    on_first_rank(comm, present)


def _pieces(
    model: Model,
    prompts: Sequence[list[int]],
    answers: Sequence[Answer],
    generated: Sequence[list[int]],
    new: int,
    sampling: dict[str, Any],
) -> Iterator[list[str]]:
    """Generate tokens, and yield the text that each step adds to each answer.

    A model that cannot take the prompts raises its error before anything is yielded.
    """
    for step in model.stream(prompts, new, **sampling):
        pieces = []
        for answer, tokens, token in zip(answers, generated, map(int, step), strict=True):
            is_more = token >= 0 and not answer.has_ended
            if is_more:
                tokens.append(token)
            pieces.append(answer.add(token) if is_more else "")
        yield pieces
        if all(answer.has_ended for answer in answers):
            return


def _prompt_texts(options: argparse.Namespace) -> str:
    """Return the prompts of the flags as JSON: each is shown, or a conversation in its template.

    One rank makes them, as a template may ask for the time.
    """
    given: list[str | list[Message]] = list(options.prompt)
    if options.prompt_file is not None:
        given += read_prompt_file(options.prompt_file, f"--prompt-file {options.prompt_file}")
    template = None
    prompts = []
    for each in given:
        if isinstance(each, str) and not options.chat:
            prompts.append((each, each, True))
            continue
        template = template or open_template(options.model)
        messages = question(each, options.system) if isinstance(each, str) else each
        prompts.append((messages[-1]["content"], template.prompt(messages), False))
    return json.dumps(prompts)


# ---- conversations -------------------------------------------------------------------------------


def _converse(
    options: argparse.Namespace,
    model: Model,
    tokenizer: TextTokenizer,
    sampling: dict[str, Any],
    comm: Comm,
) -> None:
    """Answer one line after another from the terminal, until its end (Ctrl-D)."""
    on_first_rank(comm, _check_terminal)
    template = together(comm, lambda: open_template(options.model))
    messages = question("", options.system)[:-1]
    while line := on_first_rank(comm, _next_line):
        messages.append({"role": "user", "content": line[1:]})
        text = on_first_rank(comm, lambda: template.prompt(messages))
        tokens = tokenizer.encode(text, is_complete=True)
        answer = Answer(tokenizer, tokens, options.stop_text)
        for (piece,) in _pieces(model, [tokens], [answer], [[]], options.new, sampling):
            _print(comm, piece)
        _print(comm, answer.finish() + "\n")
        messages.append({"role": "assistant", "content": answer.text})


def _check_terminal() -> None:
    """Refuse to wait for questions where nobody can type them."""
    if sys.stdin is None or not sys.stdin.isatty():
        problem = "there is no prompt, and the input is no terminal"
        raise InputError("--chat", problem, "--prompt TEXT, or a terminal and no -n")


def _next_line() -> str:
    """Return the next line that is typed, after a dot; nothing at the end of the input."""
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return ""
        if line.strip():
            return "." + line


def _print(comm: Comm, text: str) -> None:
    """Print a part of a text at once, on one rank."""
    if comm.rank == 0 and text:
        sys.stdout.write(text)
        sys.stdout.flush()
