"""No option is accepted and then ignored: each is refused, or the command reads its value."""

import argparse
import contextlib
import os
import shlex
import shutil
import sys

import h5py
import numpy as np
import pytest
from in_process import einmpi_here
from paths import ROOT
from tiny_tokenizer import write_tokenizer

import einmpi
from einmpi.cli import main as main_module
from einmpi.cli.options import COMMANDS, options_of

LLAMA = ROOT / "tests/models/checkpoints/llama"
LOOP = """
program = "y[i] = x[i] / 2"
inputs.x = { shape = [8], random = "ones" }
loop = { steps = 3, carry = { x = "y" } }
"""
SEVERAL = """
inputs.x = { shape = [8], random = "ones" }
[[loop]]
program = "y[i] = x[i] / 2"
steps = 3
carry = { x = "y" }
"""
FROM_FILE = 'program = "y[i] = x[i] / 2"\ninputs.x = "x.npy"\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("together")
    shutil.copytree(LLAMA, made / "tiny")
    write_tokenizer(made / "tiny")
    with h5py.File(made / "in.h5", "w") as file:
        file["tokens"] = np.ones((2, 4), int)
        file["lengths"] = np.array([4, 3])
    (made / "plain.toml").write_text((ROOT / "jobs/chain.toml").read_text())
    (made / "loop.toml").write_text(LOOP)
    (made / "several.toml").write_text(SEVERAL)
    (made / "file.toml").write_text(FROM_FILE)
    np.save(made / "x.npy", np.ones(8))
    return made


SBATCH = "sbatch plain.toml --nodes 1 --ntasks-per-node 2"


@pytest.mark.parametrize(
    "words, said",
    [
        ("plan plain.toml -n 2 --plot p.svg --memory-curve", "--memory-curve: it cannot be"),
        ("plan plain.toml -n 2 --compare --full", "--full: it cannot be combined with --compare"),
        ("plan plain.toml -n 2 --show-relations Z_1 --full", "--full: it cannot be combined"),
        ("plan plain.toml -n 2 --compare --show-relations Z_1", "--show-relations: it cannot be"),
        ("plan plain.toml -n 2 --report r.pdf", "--report r.pdf: a report is written as HTML"),
        ("plan several.toml -n 2 --plot p.svg", "--plot: several loops follow one another"),
        ("run plain.toml --report r", "--report r: a report is written as HTML"),
        ("run plain.toml --trace-steps 1", "--trace-steps: alone it does nothing"),
        ("run plain.toml --repeat 2 --checkpoint c", "--repeat: it cannot be combined"),
        ("run file.toml --dtype float32", "file.toml: dtype float32 would change nothing"),
        ("run loop.toml --trace t.json --trace-steps 3", "--trace-steps: '3' requested; expected"),
        ("simulate loop.toml -n 2 --steps 2", "einmpi: unrecognized arguments: --steps 2"),
        ("simulate plain.toml -n 2 --compare --trace t.json", "--compare: it cannot be combined"),
        (f"{SBATCH} --quiet", "--quiet: alone it does nothing; expected --out FILE with it"),
        (f"{SBATCH} --shared of", "--shared: unknown mode 'of'"),
        (f"{SBATCH} --checkpoint c --every '5 steps'", "--every: unknown unit 'steps' of time"),
        ("llama tiny --prompt a --top-p 0.5", "--top-p: the likeliest token is chosen"),
        ("llama tiny --prompt a --top-k 5", "--top-k: the likeliest token is chosen"),
        ("llama tiny --prompt a --temperature 0 --seed 5", "--seed: the likeliest token is"),
    ],
)
def test_options_that_would_do_nothing_are_refused(folder, words, said):
    before = sorted(os.listdir(folder))
    done = einmpi_here(folder, shlex.split(words))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(said) and done.stderr.count("\n") == 1
    assert sorted(os.listdir(folder)) == before


# What each thing that `einmpi llama` does can use, besides --dtype, --strategy and others that
# every one of them uses.
GENERATING = {"--new", "--temperature", "--repetition-penalty", "--random", "-n", "--json"}
ARRAYS = {"--lengths", "--random", "-n", "--json"}
PLANNING = {"-n", "--machine", "--batch", "--sequence", "--compare", "--json", "--report"}
GOALS = {
    "--prompt a": GENERATING | {"--stop-text"},
    "--prompts in.h5:/tokens": GENERATING | {"--lengths", "--logits", "--hidden"},
    "--prompts in.h5:/tokens --logits o.h5:/l": ARRAYS | {"--hidden", "--every-position"},
    "--prompts in.h5:/tokens --hidden o.h5:/h": ARRAYS | {"--logits", "--layers", "--before-norm"},
    "--plan-only -n 2": PLANNING,
    "--bench": PLANNING - {"--machine", "--report"} | {"--random", "--repeat"},
    "--job j.toml": {"--batch", "--sequence", "--random"},
    "--job j.toml --prompts in.h5:/tokens": {"--random"},
}
VALUES = {
    "--lengths": "in.h5:/lengths",
    "--logits": "o.h5:/l",
    "--hidden": "o.h5:/h",
    "--json": "j.json",
    "--report": "r.html",
}
SWITCHES = ("--random", "--every-position", "--before-norm")
EVERY_GOAL = {"--dtype", "--weights", "--backend", "--strategy", "--memory", "--quiet"}
OF_GOALS = {"--prompt", "--prompt-file", "--chat", "--prompts", "--plan-only", "--bench", "--job"}
OF_TEMPERATURE = {"--top-k", "--top-p", "--min-p", "--seed"}


@pytest.mark.parametrize("goal", GOALS)
def test_each_goal_of_llama_takes_the_options_that_it_uses(goal):
    known = {option.names[0] for option in options_of("llama") if not option.is_positional}
    for flag in sorted(known - EVERY_GOAL - OF_GOALS - OF_TEMPERATURE - set(goal.split())):
        words = ["llama", "tiny", *goal.split(), flag]
        if flag not in SWITCHES:
            words.append(VALUES.get(flag, "5"))
        if flag in GOALS[goal]:
            assert main_module._parse(words) is not None, words
        else:
            with pytest.raises(einmpi.InputError, match=r"does nothing|combined"):
                main_module._parse(words)


def test_a_script_has_all_flags_of_the_run(folder):
    flags = "--steps 7 --half steps --overlap off --shared off --dtype float32 --strict"
    words = ["sbatch", "loop.toml", "--nodes", "1", "--ntasks-per-node", "2", *flags.split()]
    done = einmpi_here(folder, words)
    assert done.returncode == 0
    run = next(line for line in done.stdout.splitlines() if "-m einmpi" in line)
    for flag in flags.replace(" --", "\n--").split("\n"):
        assert flag in run


# ---- every option of every command ---------------------------------------------------------------

CHAIN = "plain.toml --set s=40"
MODES = {
    "run": [CHAIN, "loop.toml", f"{CHAIN} --checkpoint c", "loop.toml --trace t.json"],
    "check": [CHAIN, "loop.toml"],
    "plan": [
        f"{CHAIN} -n 4",
        f"{CHAIN} -n 4 --compare",
        f"{CHAIN} -n 4 --memory-curve",
        "loop.toml -n 2",
    ],
    "verify": [CHAIN, "loop.toml"],
    "sbatch": [
        f"{CHAIN} --nodes 1 --ntasks-per-node 2",
        "loop.toml --nodes 1 --ntasks-per-node 2 --out s.sh",
    ],
    "llama": [f"tiny {goal}" for goal in GOALS],
}
SAMPLES = {
    **VALUES,
    "--set": "s=40",
    "--steps": "2",
    "--dtype": "float32",
    "--strategy": "sqrt",
    "--memory": "1GiB",
    "--machine": "m.toml",
    "--show-relations": "Z_1",
    "--repeat": "2",
    "--half": "steps",
    "--overlap": "off",
    "--shared": "off",
    "--checkpoint": "c",
    "--every": "1h",
    "--plot": "p.svg",
    "--trace": "t.json",
    "--trace-steps": "1",
    "--backend": "numpy",
    "--gpus": "2",
    "--time": "2h",
    "--out": "s.sh",
    "--format": "pbs",
    "--metrics": "m.prom",
    "--prompt": "a",
    "--prompts": "in.h5:/tokens",
    "--temperature": "0.5",
    "--job": "j.toml",
}


class Watched(argparse.Namespace):
    """Parsed options that know which of them a command has read, besides checking them."""

    def __getattribute__(self, name):
        frame = sys._getframe(1)
        is_check = frame.f_code.co_name in ("check_together", "check_flags", "_check_goal")
        is_parser = frame.f_code.co_filename.endswith(("argparse.py", "cli/main.py"))
        if not name.startswith("_") and not is_check and not is_parser:
            READ.add(name)
        return super().__getattribute__(name)


READ = set()


@pytest.mark.slow
@pytest.mark.parametrize("command", MODES)
def test_every_option_is_read_or_refused(folder, monkeypatch, command):
    parse = main_module._parse
    monkeypatch.setattr(main_module, "_parse", lambda words: Watched(**vars(parse(words))))
    machine = einmpi_here(folder, ["calibrate", "--seconds", "0.3", "--save", "m.toml"])
    assert machine.returncode == 0
    for mode in MODES[command]:
        for option in options_of(command):
            flag = option.names[0]
            if option.is_positional or flag in mode.split():
                continue
            words = [command, *mode.split(), flag]
            if not option.is_switch:
                words.append(SAMPLES.get(flag, "2"))
            for name in ("c", "j.toml", "o.h5"):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    shutil.rmtree(folder / name)
                (folder / name).unlink(missing_ok=True)
            READ.clear()
            done = einmpi_here(folder, words)
            assert done.returncode in (0, 2), (words, done.stderr)
            assert done.returncode == 2 or option.name in READ or flag == "-n", words


def test_every_command_is_tried():
    assert set(COMMANDS) - set(MODES) == {
        "simulate",
        "new",
        "examples",
        "doctor",
        "calibrate",
        "completion",
        "help",
    }  # simulate needs SimGrid; the others have few options
