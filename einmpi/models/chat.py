"""Conversations as prompts, by the chat template of a model's folder; text until a stop text."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

from einmpi.errors import InputError
from einmpi.models.json_values import Json
from einmpi.models.sampling import TextStream, TextTokenizer, read_tokenizer_settings

TEMPLATE_FILE = "chat_template.jinja"
_TEMPLATE_KEY = "chat_template"
_ROLES = ("system", "user", "assistant", "tool")

# A message of a conversation: who says it, its `role`, and what, its `content`.
Message: TypeAlias = Mapping[str, str]


class ChatTemplate:
    """What makes one text of a conversation, in the form that a model was trained with.

    A template is a program in the language of Jinja that comes with the weights. It runs in
    Jinja's sandbox: it sees the messages and the names of special tokens, and nothing else.
    """

    def __init__(self, file: str, text: str, words: Mapping[str, str]) -> None:
        self.file = file
        self.words = words
        try:
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            problem = "the package jinja2, which reads chat templates, is not installed"
            raise InputError("einmpi llama", problem, hint="install einmpi[llama]") from None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _as_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        self.template = self._checked(lambda: environment.from_string(text), "cannot be read")

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return the text after which the model answers the last message."""
        known = {**self.words, "messages": messages, "add_generation_prompt": True}
        known.update(tools=None, documents=None)
        rendered: str = self._checked(
            lambda: self.template.render(**known), "does not take this conversation"
        )
        return rendered

    def _checked(self, action: Callable[[], Any], problem: str) -> Any:
        """Return what a template computes; whatever it raises is one line about its file."""
        try:
            return action()
        except Exception as error:  # a template is a program, so it may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            reason = reason.rstrip(".")
            problem = f"its chat template {problem}: {reason:.200}"
            raise InputError(self.file, problem, "one that transformers takes") from None


def _as_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(reason: str) -> NoReturn:
    raise ValueError(reason)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def open_template(folder: str) -> ChatTemplate:
    """Read the chat template of a model's folder: a file of its own, or in the settings."""
    settings = read_tokenizer_settings(folder)
    words = {}
    for name, value in settings.items():
        if name.endswith("_token"):
            word = value.get("content") if isinstance(value, dict) else value
            if isinstance(word, str):
                words[name] = word
    file = os.path.join(folder, TEMPLATE_FILE)
    if os.path.isfile(file):
        try:
            with open(file, encoding="utf-8") as opened:
                return ChatTemplate(file, opened.read(), words)
        except (OSError, ValueError) as error:
            raise InputError(file, f"it cannot be read: {error}", "a text in UTF-8") from None
    template = settings.get(_TEMPLATE_KEY)
    if isinstance(template, list):  # several with names
        named = [each for each in template if isinstance(each, dict)]
        found = [each.get("template") for each in named if each.get("name") == "default"]
        template = found[0] if found else None
    if not isinstance(template, str):
        expected = f"{TEMPLATE_FILE}, or {_TEMPLATE_KEY} in tokenizer_config.json"
        hint = "the model may not be one for conversations; give its prompts without --chat"
        raise InputError(folder, "there is no chat template", expected, hint)
    return ChatTemplate(os.path.join(folder, "tokenizer_config.json"), template, words)


def checked_messages(messages: Any, place: str = "messages") -> list[Message]:
    """Return the messages of a conversation; refuse what has no role and content."""
    expected = '{"role": "user", "content": "…"}, one or more in a list'
    if not isinstance(messages, list | tuple) or not messages:
        raise InputError(place, f"{messages!r:.60} is no conversation", expected)
    for message in messages:
        is_right = isinstance(message, Mapping) and message.get("role") in _ROLES
        if not is_right or not isinstance(message.get("content"), str):
            raise InputError(place, f"{message!r:.60} is no message", expected)
    return list(messages)


def question(text: str, system: str | None = None) -> list[Message]:
    """Return the conversation that begins with a question."""
    begin = [] if system is None else [{"role": "system", "content": system}]
    return [*begin, {"role": "user", "content": text}]


# ---- prompts of a file ---------------------------------------------------------------------------


def read_prompt_file(path: str, place: str) -> list[str | list[Message]]:
    """Return the prompts of a file: texts, and conversations.

    Each line of a .jsonl file is one prompt: a string, or an object with `prompt` or `messages`.
    Any other file is one prompt; the end of its last line does not belong to it.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InputError(place, f"{path} cannot be read: {reason}", "a text in UTF-8") from None
    if not path.lower().endswith(".jsonl"):
        return [text.removesuffix("\n")]
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            prompts.append(_prompt_of(line, f"{path}:{number}"))
    if not prompts:
        raise InputError(place, f"{path} has no prompts", "a prompt on each line")
    return prompts


def _prompt_of(line: str, place: str) -> str | list[Message]:
    """Return the prompt on a line of JSON."""
    try:
        entry: Json = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(place, f"it is not JSON: {error}", "JSON on each line") from None
    if isinstance(entry, dict):
        if "messages" in entry:
            return checked_messages(entry["messages"], place)
        entry = entry.get("prompt")
    if not isinstance(entry, str):
        raise InputError(place, "it has no prompt", 'a string, {"prompt": …} or {"messages": …}')
    return entry


# ---- text that ends -----------------------------------------------------------------------------


class Answer:
    """The text of one sequence, token by token, until one of some stop texts.

    What may be the beginning of a stop text is held back until it is known.
    """

    def __init__(self, tokenizer: TextTokenizer, prompt: Sequence[int], stop: Sequence[str]):
        self.stream = TextStream(tokenizer, prompt)
        self.stop = stop
        self.held = ""
        self.text = ""  # what has been returned
        self.has_ended = False

    def add(self, token: int) -> str:
        """Return the text that is certain after one more token; it may be empty."""
        return self._take(self.stream.add(token), is_last=False)

    def finish(self) -> str:
        """Return the text that is left after the last token."""
        return self._take(self.stream.finish(), is_last=True)

    def _take(self, text: str, is_last: bool) -> str:
        if self.has_ended:
            return ""
        self.held += text
        ends = [place for place in map(self.held.find, self.stop) if place >= 0]
        count = len(self.held) if is_last else len(self.held) - self._uncertain()
        if ends:
            self.has_ended = True
            count = min(ends)
        certain = self.held[:count]
        self.held = self.held[count:]
        self.text += certain
        return certain

    def _uncertain(self) -> int:
        """Return how many of the last characters may be the beginning of a stop text."""
        most = max(map(len, self.stop), default=1) - 1
        for count in range(min(most, len(self.held)), 0, -1):
            if any(text.startswith(self.held[-count:]) for text in self.stop):
                return count
        return 0
