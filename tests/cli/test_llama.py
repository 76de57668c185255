"""`einmpi llama`: text, files, plans and job files; a real mpirun; runs that are interrupted."""

import json
import shutil
import signal
import subprocess
import sys

import h5py
import numpy as np
import pytest
from in_process import einmpi_here
from mpi_helpers import environment, needs_mpirun
from paths import ROOT
from tiny_tokenizer import write_tokenizer

import einmpi
from einmpi.models.llama import load

LLAMA = ROOT / "tests/models/checkpoints/llama"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("llama")
    shutil.copytree(LLAMA, made / "tiny")
    write_tokenizer(made / "tiny")
    with np.load(LLAMA / "golden.npz") as golden, h5py.File(made / "in.h5", "w") as file:
        for name in golden:
            file[name] = golden[name]
        file["lengths"] = np.array([20, 5, 20])
    return made


def printed(folder, *words):
    done = einmpi_here(folder, ["llama", "tiny", *words])
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def in_file(folder, name, file="in.h5"):
    with h5py.File(folder / file) as opened:
        return opened[name][()]


@pytest.mark.slow
def test_text_follows_the_prompt(folder):
    text = printed(folder, "--prompt", "the cat", "--new", "12")
    assert text.startswith("the cat") and text.endswith("\n")
    data = json.loads(printed(folder, "--prompt", "the cat", "--new", "12", "--json", "-"))
    assert text == "the cat" + data["texts"][0] + "\n"
    assert len(data["tokens"][0]) == 12 and data["ranks"] == 1
    two = printed(folder, "--prompt", "the cat", "--prompt", "a", "--new", "12")
    assert two.startswith(text)
    assert printed(folder, "--prompt", "the cat", "--new", "2", "--quiet") == ""


def test_questions_and_stop_texts(folder):
    (folder / "tiny/chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}. {% endfor %}"
    )
    one = json.loads(printed(folder, "--chat", "--prompt", "a cat", "--new", "9", "--json", "-"))
    (answer,) = one["texts"]
    assert printed(folder, "--chat", "--prompt", "a cat", "--new", "9") == answer + "\n"
    other = ["--chat", "--system", "the dog", "--prompt", "a cat", "--new", "9", "--json", "-"]
    assert json.loads(printed(folder, *other))["tokens"] != one["tokens"]
    stop = answer[4:6]
    words = ["--chat", "--prompt", "a cat", "--new", "9", "--stop-text", stop]
    assert printed(folder, *words) == answer[: answer.find(stop)] + "\n"
    lines = ['"the cat"', '{"prompt": "a"}', '{"messages": [{"role": "user", "content": "a cat"}]}']
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    made = printed(folder, "--prompt-file", "prompts.jsonl", "--new", "9", "--json", "-")
    assert json.loads(made)["texts"][2] == answer
    assert json.loads(made)["prompts"] == ["the cat", "a", "a cat"]
    (folder / "prompt.txt").write_text("the cat\n")
    text = printed(folder, "--prompt-file", "prompt.txt", "--new", "9")
    assert text == printed(folder, "--prompt", "the cat", "--new", "9")


def test_a_conversation_in_a_terminal(folder, monkeypatch):
    """Two questions, an empty line, the end of the input: each answer follows all that was said."""
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    (folder / "tiny/chat_template.jinja").write_text(template)
    typed = iter(["the cat", " ", "a dog"])

    def read(question):
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    first, second, end = printed(folder, "--chat", "--new", "5").split("\n")[:3]
    assert end == ""
    whole = ["--prompt", f"the cat {first} a dog ", "--new", "5"]
    (folder / "tiny/chat_template.jinja").write_text("{{ messages[0].content }}")
    assert printed(folder, "--chat", *whole) == second + "\n"


def test_how_the_model_wants_tokens_to_be_chosen(folder):
    shutil.copytree(folder / "tiny", folder / "wants", dirs_exist_ok=True)
    wanted = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.2}
    (folder / "wants/generation_config.json").write_text(json.dumps(wanted))
    words = ["--prompt", "the cat", "--new", "12"]

    def said(*flags):
        done = einmpi_here(folder, ["llama", "wants", *words, *flags])
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    flags = ["--temperature", "0.7", "--top-p", "0.8", "--repetition-penalty", "1.2"]
    assert said() == printed(folder, *words, *flags)
    assert said("--seed", "3") == printed(folder, *words, *flags, "--seed", "3") != said()
    greedy = said("--temperature", "0", "--repetition-penalty", "1")
    assert greedy == printed(folder, *words)


def test_nothing_is_printed_before_an_error(folder):
    done = einmpi_here(folder, ["llama", "tiny", "--prompt", "the cat", "--new", "999"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "and 999 new ones" in done.stderr


def test_tokens_from_a_file(folder):
    lines = printed(folder, "--prompts", "in.h5:/tokens", "--new", "10").splitlines()
    expected = in_file(folder, "greedy")[:, :10]
    assert [list(map(int, line.split())) for line in lines] == expected.tolist()


def test_logits_and_hidden_states_in_files(folder):
    words = ["--logits", "out.h5:/logits", "--hidden", "out.h5:/h", "--layers", "2", "0"]
    printed(folder, "--prompts", "in.h5:/tokens", "--every-position", *words)
    logits = in_file(folder, "logits", "out.h5")
    np.testing.assert_allclose(logits, in_file(folder, "logits"), rtol=0, atol=1e-4)
    last = in_file(folder, "h/2", "out.h5")
    model = load(LLAMA)
    np.testing.assert_array_equal(last, model.hidden(in_file(folder, "tokens"), [2])[0].gather())
    printed(folder, "--prompts", "in.h5:/tokens", "--hidden", "out.h5:/before", "--before-norm")
    assert not np.allclose(in_file(folder, "before/2", "out.h5"), last)
    words = ["--lengths", "in.h5:/lengths", "--logits", "out.h5:/last"]
    printed(folder, "--prompts", "in.h5:/tokens", *words)
    last = in_file(folder, "last", "out.h5")
    np.testing.assert_allclose(last[1], logits[1, 4], rtol=0, atol=1e-4)
    np.testing.assert_allclose(last[0], logits[0, 19], rtol=0, atol=1e-4)


@pytest.mark.parametrize("logits", ["/h", "/h/2", "/h/2/x"])
def test_logits_and_hidden_states_in_one_place(folder, logits):
    words = ["--logits", f"both.h5:{logits}", "--hidden", "both.h5:/h/", "--layers", "2"]
    done = einmpi_here(folder, ["llama", "tiny", "--prompts", "in.h5:/tokens", *words])
    assert done.returncode == 2 and done.stderr.startswith("--hidden both.h5:/h/: layer 2 and")
    assert not (folder / "both.h5").exists()


@pytest.mark.parametrize(
    ("flag", "target"),
    [("--logits", "/tokens"), ("--logits", "/lengths"), ("--hidden", "/tokens")],
)
def test_results_do_not_replace_the_tokens(folder, flag, target):
    before = (folder / "in.h5").read_bytes()
    words = ["--prompts", "in.h5:/tokens", "--lengths", "in.h5:/lengths"]
    done = einmpi_here(folder, ["llama", "tiny", *words, flag, f"in.h5:{target}"])
    assert done.returncode == 2 and done.stderr.startswith(f"{flag} in.h5:{target}: ")
    assert done.stderr.count("\n") == 1 and "would be the same dataset" in done.stderr
    assert (folder / "in.h5").read_bytes() == before


def test_the_job_file_runs_and_gives_the_same_logits(folder):
    (folder / "made").mkdir()
    printed(folder, "--job", "made/tiny.toml", "--prompts", "in.h5:/tokens")
    done = einmpi_here(folder, ["run", "made/tiny.toml", "--quiet"])
    assert (done.returncode, done.stderr) == (0, "")
    logits = in_file(folder, "logits", "made/tiny.h5")
    np.testing.assert_allclose(logits, in_file(folder, "logits")[:, -1], rtol=0, atol=1e-4)
    random = ["--random", "--memory", "1MiB", "--strategy", "megatron"]
    printed(folder, "--job", "random.toml", "--batch", "2", "--sequence", "8", *random)
    job = einmpi.load(folder / "random.toml")
    assert (job.memory, job.strategy) == (2**20, "megatron")
    assert einmpi.run(job)["logits"].shape == (2, 80)


@pytest.mark.slow
def test_plans(folder):
    shape = ["--batch", "2", "--sequence", "16"]
    text = printed(folder, "--plan-only", "-n", "4", *shape)
    assert "eindecomp" in text and "4 ranks" in text
    words = ["--compare", "megatron", "--report", "page.html", "--json", "plans.json"]
    text = printed(folder, "--plan-only", "-n", "4", *shape, *words)
    assert "megatron" in text and "sequence" not in text
    plans = json.loads((folder / "plans.json").read_text())
    assert [plan["strategy"] for plan in plans] == ["eindecomp", "megatron"]
    assert plans[0]["words_predicted"] <= plans[1]["words_predicted"]
    assert "<html" in (folder / "page.html").read_text()[:200].lower()


@pytest.mark.slow
def test_a_named_size_is_planned_without_weights(folder):
    words = ["--plan-only", "-n", "8", "--batch", "8", "--sequence", "1024", "--json", "-"]
    done = einmpi_here(folder, ["llama", "7B", *words])
    assert (done.returncode, done.stderr) == (0, "")
    (plan,) = json.loads(done.stdout)
    assert (plan["ranks"], plan["batch"], plan["sequence"]) == (8, 8, 1024)


@pytest.mark.slow
def test_measurements(folder):
    words = ["--random", "--bench", "--batch", "1", "2", "--sequence", "8", "--repeat", "1"]
    rows = json.loads(printed(folder, *words, "--compare", "megatron", "--json", "-"))
    assert [(row["strategy"], row["batch"]) for row in rows] == [
        ("eindecomp", 1),
        ("eindecomp", 2),
        ("megatron", 1),
        ("megatron", 2),
    ]
    for row in rows:
        assert row["bytes_moved"] == row["bytes_predicted"] == 0
        assert len(row["seconds_all"]) == 1
        assert row["flops"] == row["operations_max_rank"] > 0  # of a single rank


@pytest.mark.slow
@pytest.mark.mpirun
@needs_mpirun
def test_ranks_print_the_same_text_once(folder):
    words = ["--prompt", "the cat", "--new", "6", "--temperature", "1", "--seed", "3"]
    alone = printed(folder, *words)
    command = [sys.executable, "-m", "einmpi", "llama", "tiny", *words, "-n", "2"]
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == alone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop_signal", "status", "line"),
    [(signal.SIGINT, 130, "einmpi: interrupted\n"), (signal.SIGTERM, 143, None)],
)
def test_a_signal_ends_generation_with_one_line(folder, stop_signal, status, line):
    words = ["--prompt", "the cat", "--new", "240"]
    command = [sys.executable, "-m", "einmpi", "llama", "tiny", *words]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Tests that run in the background of a shell ignore Ctrl-C, and so would this process.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(len("the cat") + 2).startswith(b"the cat")
        process.send_signal(stop_signal)
        said = process.stderr.read().decode()
        process.stdout.read()
        assert process.wait(60) in (status, -stop_signal)
    assert len(said.splitlines()) <= 1
    if line is not None:
        assert said == line
