"""Text to tokens and back, with a tiny tokenizer; text that comes token by token."""

import json
import sys

import pytest
from tiny_tokenizer import TEXT, write_tokenizer

from einmpi.errors import InputError
from einmpi.models.sampling import TextStream, open_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("model")
    write_tokenizer(made)
    return made


def test_round_trip(folder):
    tokenizer = open_tokenizer(str(folder))
    tokens = tokenizer.encode(TEXT)
    assert tokens[0] == 1
    assert tokenizer.decode(tokens) == TEXT


def test_streamed_text_equals_the_whole(folder):
    tokenizer = open_tokenizer(str(folder))
    tokens = tokenizer.encode(TEXT)
    for start in (1, 4, len(tokens) - 1):
        stream = TextStream(tokenizer, tokens[:start])
        pieces = [stream.add(token) for token in tokens[start:]]
        pieces.append(stream.finish())
        assert tokenizer.decode(tokens[:start]) + "".join(pieces) == TEXT


def test_parts_of_a_character_wait_for_the_rest(folder):
    tokenizer = open_tokenizer(str(folder))
    first = tokenizer.tokenizer.token_to_id("Ã")  # the two bytes of é, as the library shows them
    second = tokenizer.tokenizer.token_to_id("©")
    stream = TextStream(tokenizer, tokenizer.encode("a"))
    assert stream.add(first) == ""
    assert stream.add(second) == "é"
    assert stream.add(first) == ""
    assert stream.finish() == "\ufffd"


def test_the_first_token_that_settings_ask_for(tmp_path):
    write_tokenizer(tmp_path)
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    whole["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    assert open_tokenizer(str(tmp_path)).encode("the")[0] != 1
    for word in ("<s>", {"content": "<s>"}):
        settings = {"add_bos_token": True, "bos_token": word}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        assert open_tokenizer(str(tmp_path)).encode("the")[0] == 1


def test_folders_without_a_tokenizer(tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"there is no tokenizer\.json; expected a folder with it"):
        open_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="cannot be read as a tokenizer"):
        open_tokenizer(str(tmp_path))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match=r"tokenizers is not installed; install einmpi\[llama\]"):
        open_tokenizer(str(tmp_path))
