"""Chat templates against the texts of transformers; prompts of files; text until a stop text."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import FOLDER, golden
from tiny_tokenizer import TEXT, write_tokenizer

from einmpi.comm.threads import run_threads
from einmpi.errors import InputError
from einmpi.models.chat import Answer, ChatTemplate, open_template, question, read_prompt_file
from einmpi.models.llama import load
from einmpi.models.sampling import open_tokenizer, read_sampling

KNOWN = json.loads((Path(__file__).parent / "chat_templates.json").read_text())
SIMPLE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(FOLDER / "llama", made)
    write_tokenizer(made)
    (made / "chat_template.jinja").write_text(SIMPLE)
    return made


def refused(function: Any, *arguments: Any) -> str:
    with pytest.raises(InputError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- templates ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", KNOWN["cases"], ids=lambda case: case["name"])
def test_texts_of_templates_equal_those_of_transformers(case: dict[str, Any]) -> None:
    template = ChatTemplate("file", KNOWN["templates"][case["name"]], KNOWN["words"])
    if case["text"] is None:
        text = refused(template.prompt, case["messages"])
        assert text.startswith(
            "file: its chat template does not take this conversation: Roles must"
        )
    else:
        assert template.prompt(case["messages"]) == case["text"]


def test_where_templates_and_special_tokens_are(tmp_path: Path) -> None:
    assert "there is no chat template; expected chat_template.jinja, or" in refused(
        open_template, str(tmp_path)
    )
    settings: dict[str, Any] = {"bos_token": {"content": "<b>"}, "eos_token": "<e>"}
    file = tmp_path / "tokenizer_config.json"
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    for given_template in (template, [{"name": "default", "template": template}]):
        file.write_text(json.dumps({**settings, "chat_template": given_template}))
        assert open_template(str(tmp_path)).prompt(question("hi")) == "<b>hi<e>"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}!")
    assert open_template(str(tmp_path)).prompt(question("hi")) == "<b>!"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    assert "it cannot be read: " in refused(open_template, str(tmp_path))


@pytest.mark.parametrize(
    "text, message",
    [
        ("{% if %}", "cannot be read: Expected an expression"),
        ("{{ messages.__class__.__mro__ }}", "access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "access to attribute 'append'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ raise_exception('no\nmore') }}", "does not take this conversation: no more"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% include 'file' %}", "no loader"),
        ("{{ messages | nothing }}", "No filter named"),
    ],
)
def test_templates_that_are_wrong_or_want_too_much(text: str, message: str) -> None:
    found = refused(lambda: ChatTemplate("file", text, {}).prompt(question("a")))
    assert found.startswith("file: its chat template ") and message in found


def test_jinja_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2.sandbox", None)
    assert "install einmpi[llama]" in refused(ChatTemplate, "file", "", {})


def test_a_conversation_from_python(folder: Path) -> None:
    messages = [
        *question("the cat", "be a cat"),
        {"role": "assistant", "content": "sat"},
        {"role": "user", "content": "on"},
    ]
    model = load(folder)
    text = "<system>be a cat<user>the cat<assistant>sat<user>on<assistant>"
    tokenizer = open_tokenizer(str(folder))
    tokens = tokenizer.encode(text, is_complete=True)
    assert tokens == tokenizer.encode(text)[1:]  # the template has all that is around
    (generated,) = model.generate(tokens, new=6)
    answer = model.chat(messages, new=6)
    whole = tokenizer.decode([*tokens, *generated])
    assert answer == whole[len(tokenizer.decode(tokens)) :]
    assert (
        model.chat(messages, new=6, stop_text=[answer[1:3]]) == answer[: answer.find(answer[1:3])]
    )

    def chat(comm: Any) -> str:
        return load(folder, comm=comm).chat(messages, new=6, temperature=0.9, seed=4, min_p=0.05)

    assert len(set(run_threads(2, chat) + run_threads(1, chat))) == 1
    for wrong in ([], "hi", [{"role": "cat", "content": "x"}], [{"role": "user"}], [3]):
        assert refused(model.chat, wrong).startswith("messages: ")


# ---- stop texts ---------------------------------------------------------------------------------


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


@given(
    text=st.text("abc", max_size=30),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_a_text_ends_before_the_first_stop_text(text: str, stop: list[str]) -> None:
    answer = Answer(Letters(), [], stop)  # type: ignore[arg-type]
    shown = ""
    ended_after = len(text)
    for number, letter in enumerate(text, 1):
        shown += answer.add(ord(letter))
        if answer.has_ended:
            ended_after = number
            break
        # Only what may be the beginning of a stop text is held back.
        held = text[len(shown) : number]
        assert not held or any(each.startswith(held) for each in stop)
    shown += answer.finish()
    ends = [end for end in range(len(text) + 1) if text[:end].endswith(tuple(stop) or ("!",))]
    first = min(ends, default=None)
    if first is None:
        assert shown == text == answer.text
        return
    found = [text[:first].find(each) for each in stop]
    assert shown == answer.text == text[: min(place for place in found if place >= 0)]
    assert ended_after == first


# ---- files --------------------------------------------------------------------------------------


def test_prompts_of_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("two\nlines\n")
    assert read_prompt_file(str(tmp_path / "a.txt"), "p") == ["two\nlines"]
    lines = ['"a\u2028b"', "", '{"prompt": "c", "id": 3}', json.dumps({"messages": question("d")})]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    assert read_prompt_file(str(tmp_path / "b.jsonl"), "p") == ["a\u2028b", "c", question("d")]


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "a.jsonl:1: it is not JSON"),
        ('"a"\n3', "a.jsonl:2: it has no prompt"),
        ('{"prompt": 3}', "a.jsonl:1: it has no prompt"),
        ('{"messages": []}', "a.jsonl:1: [] is no conversation"),
        ('{"messages": [{"role": "user"}]}', "a.jsonl:1: {'role': 'user'} is no message"),
        ("[" * 10**5, "a.jsonl:1: it is not JSON"),
        ("\n", "has no prompts"),
    ],
)
def test_files_without_prompts(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    assert message in refused(read_prompt_file, str(tmp_path / "a.jsonl"), "p")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in refused(read_prompt_file, str(tmp_path / "none.txt"), "p")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    assert "it is not UTF-8" in refused(read_prompt_file, str(tmp_path / "b.txt"), "p")


def test_how_the_model_wants_tokens_to_be_chosen(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    assert read_sampling(str(tmp_path)) == {}
    wanted = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.0}
    file.write_text(json.dumps({**wanted, "do_sample": True, "eos_token_id": 3}))
    assert read_sampling(str(tmp_path)) == wanted
    file.write_text(json.dumps({**wanted, "repetition_penalty": 1.1}))
    assert read_sampling(str(tmp_path)) == {**wanted, "temperature": 0, "repetition_penalty": 1.1}
    for values, message in (
        ({"top_p": 1.5}, "top_p is 1.5; expected a number up to 1"),
        ({"top_k": -1}, "top_k is -1; expected an integer from 0 on"),
        ({"do_sample": 1}, "do_sample is 1; expected true or false"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; expected a positive number"),
    ):
        file.write_text(json.dumps(values))
        assert message in refused(read_sampling, str(tmp_path))


# ---- choices ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_penalty_for_repetition_as_transformers_has_it(ranks: int) -> None:
    expected = golden("olmo2")[1]
    assert (expected["penalised"] != expected["greedy"][:, :16]).any()

    def generate(comm: Any) -> list[np.ndarray]:
        model = load(FOLDER / "olmo2", comm=comm)
        return model.generate(expected["tokens"], new=16, repetition_penalty=1.4)

    for generated in run_threads(ranks, generate):
        np.testing.assert_array_equal(np.stack(generated), expected["penalised"])


def test_words_of_the_text_are_the_tokenizers(folder: Path) -> None:
    tokenizer = open_tokenizer(str(folder))
    tokens = tokenizer.encode(TEXT)
    answer = Answer(tokenizer, tokens[:3], ["mat"])
    for token in tokens[3:]:
        answer.add(token)
    assert tokenizer.decode(tokens[:3]) + answer.text == TEXT[: TEXT.find("mat")]
