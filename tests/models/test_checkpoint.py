"""Files of a checkpoint: every tensor is found, and wrong files are refused in one line."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from einmpi.errors import InputError
from einmpi.models.llama import load

CHECKPOINTS = Path(__file__).parent / "checkpoints"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "model"
    shutil.copytree(CHECKPOINTS / "llama", made)
    return made


def refused(folder, **settings):
    with pytest.raises(InputError) as caught:
        load(folder, **settings)
    text = str(caught.value)
    assert "\n" not in text
    return text.replace(str(folder), "DIR")


def test_folders_without_a_model(folder, tmp_path):
    expected = "a folder with a checkpoint, or one of 7B, 13B, 30B, 65B"
    assert refused(tmp_path / "none") == f"DIR: there is no such folder; expected {expected}"
    (folder / WEIGHTS).unlink()
    assert refused(folder).startswith(f"DIR: there is neither {WEIGHTS} nor {INDEX}; expected")
    (folder / "config.json").unlink()
    assert refused(folder).startswith("DIR: there is no config.json; expected the folder of a")
    assert refused(Path("7B")).startswith("DIR: a size has no weights; expected the folder of a")


def test_missing_and_unknown_tensors(folder):
    tensors = load_file(folder / WEIGHTS)
    query = tensors.pop(QUERY)
    save_file(tensors, folder / WEIGHTS)
    assert refused(folder).startswith(f"DIR: there is no tensor {QUERY}; expected")
    tensors[QUERY] = query
    tensors["model.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(tensors, folder / WEIGHTS)
    load(folder)
    tensors["model.layers.7.extra"] = np.ones(1, np.float32)
    save_file(tensors, folder / WEIGHTS)
    assert "does not have 1 tensor of the checkpoint: model.layers.7.extra;" in refused(folder)


def test_tensors_of_wrong_shapes(folder):
    tensors = load_file(folder / WEIGHTS)
    for shape in ((32, 31), (16, 64), (64, 32), (4, 8, 32)):
        changed = {**tensors, QUERY: np.zeros(shape, np.float32)}
        save_file(changed, folder / WEIGHTS)
        if shape == (4, 8, 32):  # already split
            load(folder)
            continue
        shown = "×".join(map(str, shape))
        assert refused(folder).startswith(f"DIR/{WEIGHTS}: {QUERY} has shape {shown}; expected")


def test_damaged_indices(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(CHECKPOINTS / "llama_shards", folder)
    index = json.loads((folder / INDEX).read_text())
    file = index["weight_map"].pop(QUERY)
    (folder / INDEX).write_text(json.dumps(index))
    assert refused(folder).startswith(f"DIR: there is no tensor {QUERY}; expected")
    index["weight_map"][QUERY] = "../" + file
    (folder / INDEX).write_text(json.dumps(index))
    assert f"says that {QUERY} is in '../{file}'" in refused(folder)
    for text in ("[]", "{", '{"weight_map": 3}'):
        (folder / INDEX).write_text(text)
        message = refused(folder)
        assert message.startswith(f"DIR/{INDEX}: ")
        assert "cannot be read as an index of safetensors files: " in message
