"""Generate: text that is printed as it comes, or tokens for those who bring tokens."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from einmpi.cli.llama.arrays import read_prompts
from einmpi.cli.llama.models import load_model
from einmpi.cli.output_files import check_files, print_or_write

if TYPE_CHECKING:
    from einmpi.comm.base import Comm
    from einmpi.models.sampling import Tokens
    from einmpi.models.tokens import TextTokenizer


def write_text(options: argparse.Namespace, comm: Comm) -> None:
    """Generate what follows the prompts, and print it. All ranks call it."""
    from einmpi.comm.agreement import on_first_rank, together
    from einmpi.models.tokens import open_tokenizer

    on_first_rank(comm, lambda: check_files(options))
    model = load_model(options, comm)
    tokenizer = None
    lengths = None
    prompts: Any
    if options.prompt:
        tokenizer = together(comm, lambda: open_tokenizer(options.model))
        prompts = [tokenizer.encode(text) for text in options.prompt]
    else:
        prompts, lengths = together(comm, lambda: read_prompts(options))
    printer = None
    is_streamed = len(prompts) == 1 and not options.quiet and options.json != "-"
    if is_streamed and comm.rank == 0 and tokenizer is not None:
        printer = StreamPrinter(tokenizer, prompts[0], options.prompt[0])
    started = time.perf_counter()
    generated = model.generate(
        prompts,
        options.new,
        options.temperature,
        options.top_k,
        options.top_p,
        options.seed,
        lengths=lengths,
        on_tokens=None if printer is None else printer.add,
    )
    seconds = time.perf_counter() - started
    if printer is not None:
        printer.finish()
    data = _as_json(options, generated, tokenizer, seconds, comm.size)

    def present() -> None:
        if printer is not None:
            options.quiet = True  # the text has been printed
        print_or_write(options, _text(options, generated, tokenizer), data)

    on_first_rank(comm, present)


class StreamPrinter:
    """Prints a prompt with its first token, and then each token's text as soon as it is known.

    A model that cannot take the prompt has printed nothing before its error.
    """

    def __init__(self, tokenizer: TextTokenizer, tokens: Sequence[int], prompt: str) -> None:
        from einmpi.models.tokens import TextStream

        self.stream = TextStream(tokenizer, tokens)
        self.prompt = prompt  # as long as it is not printed

    def add(self, step: Tokens) -> None:
        """Print the text of the next token."""
        self._write(self.prompt + self.stream.add(int(step[0])))
        self.prompt = ""

    def finish(self) -> None:
        """Print the rest of the text, and end the line."""
        self._write(self.stream.finish() + "\n")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _text(
    options: argparse.Namespace, generated: Sequence[Tokens], tokenizer: TextTokenizer | None
) -> str:
    """Return the prompts with what follows them; tokens on a line for prompts in tokens."""
    lines = []
    for number, tokens in enumerate(generated):
        if tokenizer is None:
            lines.append(" ".join(map(str, tokens)))
        else:
            lines.append(options.prompt[number] + tokenizer.decode(tokens))
    return "\n".join(lines)


def _as_json(
    options: argparse.Namespace,
    generated: Sequence[Tokens],
    tokenizer: TextTokenizer | None,
    seconds: float,
    ranks: int,
) -> dict[str, Any]:
    data: dict[str, Any] = {
        "model": options.model,
        "ranks": ranks,
        "tokens": [tokens.tolist() for tokens in generated],
        "seconds": seconds,
    }
    if tokenizer is not None:
        data["prompts"] = options.prompt
        data["texts"] = [tokenizer.decode(tokens) for tokens in generated]
    return data
