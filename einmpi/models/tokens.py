"""Text becomes tokens and tokens become text, by the tokenizer.json of a model's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from einmpi.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
_SETTINGS_FILE = "tokenizer_config.json"
_INCOMPLETE = "\ufffd"  # what a tokenizer gives for the first bytes of a character


def open_tokenizer(folder: str) -> TextTokenizer:
    """Read the tokenizer of a model's folder. It needs the package tokenizers."""
    try:
        import tokenizers
    except ImportError:
        problem = "the package tokenizers is not installed"
        hint = "install einmpi[llama], or give tokens instead of text: --prompts"
        raise InputError("einmpi llama", problem, hint=hint) from None
    file = os.path.join(folder, TOKENIZER_FILE)
    if not os.path.isfile(file):
        hint = "give tokens instead of text: --prompts"
        raise InputError(folder, f"there is no {TOKENIZER_FILE}", "a folder with it", hint)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(file)
    except Exception as error:  # the library raises plain Exception
        reason = " ".join(str(error).split())
        problem = f"it cannot be read as a tokenizer: {reason:.200}"
        raise InputError(file, problem, "an undamaged file") from None
    return TextTokenizer(tokenizer, _first_word(folder))


def _first_word(folder: str) -> str | None:
    """Return the token that the settings want in front of every text, as text."""
    try:
        with open(os.path.join(folder, _SETTINGS_FILE), encoding="utf-8") as opened:
            settings = json.load(opened)
    except (OSError, ValueError):
        return None
    if not isinstance(settings, dict) or not settings.get("add_bos_token"):
        return None
    word = settings.get("bos_token")
    if isinstance(word, dict):  # older files write all properties of the token
        word = word.get("content")
    return word if isinstance(word, str) else None


class TextTokenizer:
    """A tokenizer, and the token that stands in front of every text, if the model wants one."""

    def __init__(self, tokenizer: Tokenizer, first_word: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.first_token = None
        if first_word is not None:
            self.first_token = tokenizer.token_to_id(first_word)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with those that the model wants around it."""
        tokens: list[int] = self.tokenizer.encode(text).ids
        if self.first_token is not None and tokens[:1] != [self.first_token]:
            return [self.first_token, *tokens]
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, without tokens that stand for no text."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text


class TextStream:
    """The text of tokens that come one by one, in pieces that can be printed one after another.

    A token may be a part of a character, and the text of one may depend on the token before it.
    """

    def __init__(self, tokenizer: TextTokenizer, prompt: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.tokens = list(prompt)
        self.context = 0  # the first token that may influence the text that is still to come
        self.printed = len(self.tokens)  # the first token whose text has not been returned

    def add(self, token: int) -> str:
        """Return the text that can be printed after one more token; it may be empty."""
        self.tokens.append(token)
        return self._text(is_last=False)

    def finish(self) -> str:
        """Return the text that is left after the last token."""
        return self._text(is_last=True)

    def _text(self, is_last: bool) -> str:
        before = self.tokenizer.decode(self.tokens[self.context : self.printed])
        text = self.tokenizer.decode(self.tokens[self.context :])
        if not is_last and (len(text) <= len(before) or text.endswith(_INCOMPLETE)):
            return ""
        self.context = self.printed
        self.printed = len(self.tokens)
        return text[len(before) :]
