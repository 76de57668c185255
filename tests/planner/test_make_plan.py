"""Whole plans: targets, digests, memory limits, pins, idle ranks, JSON, EXPLAIN, errors."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from paper_llama import llama_program
from target_graphs import llama

import einmpi
from einmpi.models.config import NAMED
from einmpi.planner.cut_search import CutSearch
from einmpi.planner.make_plan import make_plan
from einmpi.planner.peak_memory import peak_bound
from einmpi.planner.plan import Options
from einmpi.planner.strategies import STRATEGIES
from einmpi.planner.text.explain import as_json, explain

ROLES = {"batch": ("b",), "sequence": ("s", "t"), "head": ("h",), "hidden": ("f",)}


def chain(s=960, skew=1):
    return einmpi.load("jobs/chain.toml", s=s, skew=skew)


def attention():
    return einmpi.load("jobs/attention.toml", s=1024, a=4096, h=32)


# docs/planner.md, How good it is: the paper's cuts, ours, and the lower bound, in units of s².
CHAIN = [
    (1, 4, 6.00, 6.00, 6.00),
    (1, 8, 12.00, 9.00, 9.00),
    (1, 16, 16.00, 15.00, 15.00),
    (1, 64, 29.00, 27.00, 27.00),
    (10, 4, 0.70, 0.70, 0.70),
    (10, 8, 1.50, 1.50, 1.50),
    (10, 16, 2.90, 2.70, 2.70),
    (10, 64, 6.90, 6.90, 6.90),
]


@pytest.mark.parametrize("skew, ranks, paper, ours, bound", CHAIN)
def test_the_chain_moves_what_the_target_table_says(skew, ranks, paper, ours, bound):
    job = chain(skew=skew)
    unit = 960 * 960
    assert (
        round(einmpi.plan(job, ranks, strategy="eindecomp-paper").words_predicted / unit, 2)
        == paper
    )
    assert round(einmpi.plan(job, ranks).words_predicted / unit, 2) == ours
    # A plan under another strategy reports the bound.
    assert round(einmpi.plan(job, ranks, strategy="sqrt").lower_bound / unit, 2) == bound


@pytest.mark.parametrize(
    "strategy, millions",
    [
        ("eindecomp", 67.1),
        ("eindecomp-paper", 81.9),
        ("sequence", 528.5),
        ("attention", 117.4),
        ("megatron", 117.4),
    ],
)
def test_attention_on_8_ranks(strategy, millions):
    assert (
        round(einmpi.plan(attention(), 8, strategy=strategy).words_predicted / 1e6, 1) == millions
    )


def test_llama_layer_on_8_ranks():
    graph, weights = llama()
    exact = make_plan(graph, 8)
    assert exact.kind == "exact"
    assert exact.words_predicted == 571_531_264
    assert make_plan(graph, 8, Options(resident=weights)).words_predicted == 0
    assert make_plan(graph, 8, Options("sequence", roles=ROLES)).words_predicted == pytest.approx(
        1886.4e6, abs=5e4
    )
    assert make_plan(
        graph, 8, Options("sequence", roles=ROLES, resident=weights)
    ).words_predicted == pytest.approx(469.8e6, abs=5e4)
    long, weights = llama(1, 4096)
    assert make_plan(long, 8, Options(resident=weights)).words_predicted == 58_720_256


def test_llama_layer_with_mask_and_rotary_tables_as_inputs():
    """580.7 million words: the mask and the cosine and sine tables are inputs here."""
    text, shapes, _ = llama_program(NAMED["7B"], 8, 1024, 1)
    text = text.replace(
        "where(t <= s, t_1[b,h,s,t] / sqrt(128), -inf)", "t_1[b,h,s,t] / sqrt(128) + mask[s,t]"
    )
    for name in "qk":
        text = text.replace(f"{name}_1[b,s,h,d]  = sum", f"{name}0[b,s,h,d]  = sum")
        text += (
            f"\n{name}_1[b,s,h,d] = {name}0[b,s,h,d] * cos_[s,d] + {name}0[b,s,h,d] * sin_[s,d]\n"
        )
    shapes |= {"mask": (1024, 1024), "cos_": (1024, 128), "sin_": (1024, 128)}
    graph = einmpi.program(text, dtype="float32", **shapes).graph
    assert round(make_plan(graph, 8).words_predicted / 1e6, 1) == 580.7


def test_32_layers_cost_32_times_one():
    graph, _ = llama(layers=32)
    assert make_plan(graph, 8).words_predicted == 32 * 571_531_264


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    "ranks", [1, 2, 3, 5, 6, 7, 8, 12, 13, 16, 30, 60, 64, 97, 210, 1024, 4095, 4096]
)
@pytest.mark.parametrize("job", ["chain", "distances", "softmax", "attention", "shortest_path"])
def test_every_rank_count_has_a_plan(job, ranks):
    graph = einmpi.load(f"jobs/{job}.toml").graph
    plan = make_plan(graph, ranks)
    assert plan.mesh.ranks <= ranks
    for vertex in graph.computed:
        parts = plan.parts(vertex.name)
        extents = vertex.einsum.extent
        assert all(parts[label] <= max(1, extents[label]) for label in parts)
    if ranks == 1:
        assert (plan.words_predicted, plan.bytes_predicted, plan.kind) == (0, 0, "exact")
    assert plan.lower_bound <= plan.words_predicted


def test_a_prime_number_of_ranks_may_leave_some_idle():
    plan = einmpi.plan(chain(), 13)
    assert plan.mesh.ranks == 12
    assert "1 idle" in explain(plan)
    # A single long product is cut along its long label by any prime: nobody idles there.
    inner = einmpi.program("Z[i,k] = sum(A[i,j] * B[j,k])", A=(8, 130_000), B=(130_000, 8))
    assert einmpi.plan(inner, 13).mesh.ranks == 13


# ---- determinism ------------------------------------------------------------------------------

# Golden digests: equal on every machine, in every run, under every hash seed. A change of plans
# changes them: then check the words by hand, and write the new ones here.
SCRIPT = """
import einmpi
sizes_of = (
    ("chain", {"s": 960}),
    ("chain", {"s": 960, "skew": 10}),
    ("attention", {"s": 256, "a": 512}),
)
for name, sizes in sizes_of:
    for ranks in (4, 6, 8, 60, 64):
        job = einmpi.load(f"jobs/{name}.toml", **sizes)
        paper = einmpi.plan(job, ranks, strategy="eindecomp-paper")
        print(einmpi.plan(job, ranks).digest, paper.digest)
"""


def digests(seed):
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=True
    )
    return done.stdout


@pytest.mark.slow
def test_digests_do_not_depend_on_the_hash_seed():
    assert digests(0) == digests(1) == digests(4242)


def test_digest_tells_plans_apart():
    job = chain()
    plans = [
        einmpi.plan(job, 4),
        einmpi.plan(job, 8),
        einmpi.plan(job, 8, strategy="sqrt"),
        einmpi.plan(chain(480), 8),
    ]
    assert len({plan.digest for plan in plans}) == len(plans)
    assert einmpi.plan(job, 8).digest == einmpi.plan(job, 8).digest


# ---- memory and pins --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_memory_limit_is_kept():
    graph, weights = llama()
    free = make_plan(graph, 8, Options(resident=weights))
    limit = free.peak * 2 // 3
    tight = make_plan(graph, 8, Options(resident=weights, memory=limit))
    assert tight.peak <= limit < free.peak
    assert tight.words_predicted > free.words_predicted


def test_a_memory_limit_that_nothing_fits_names_the_smallest():
    with pytest.raises(einmpi.InputError) as caught:
        einmpi.plan(chain(480), 4, memory=256)
    found = re.fullmatch(
        r"memory: no plan on 4 ranks was found below 256 bytes a rank; "
        r"expected at least (\d+) bytes, or more "
        "ranks",
        str(caught.value),
    )
    assert found
    least = int(found[1])
    assert einmpi.plan(chain(480), 4, memory=least).peak == least


def test_a_memory_limit_that_batches_exceed_is_named_as_given(tmp_path):
    (tmp_path / "job.toml").write_text(
        """
program  = "y = x + sum(X[i,j])"
inputs.X = { shape = [1000, 20], random = "ones", batch = 100 }
inputs.x = { shape = [], random = "ones" }
loop     = { epochs = 1, carry = { x = "y" } }
"""
    )
    job = einmpi.load(tmp_path / "job.toml")
    with pytest.raises(einmpi.InputError) as caught:
        einmpi.plan(job, 2, memory=1000)
    text = str(caught.value)
    assert text.startswith("memory: no plan on 2 ranks was found below 1000 bytes a rank; expected")
    found = re.search(r"at least (\d+) bytes", text)
    assert found
    least = int(found[1])
    assert einmpi.plan(job, 2, memory=least).peak <= least
    with pytest.raises(einmpi.InputError):
        einmpi.plan(job, 2, memory=least - 1)


def test_the_smallest_limit_does_not_depend_on_the_one_that_was_asked_for():
    """Which plan takes the least memory does, for message buffers are a share of the limit."""
    text = (
        "A[i,j] = sum[k](X[i,k] * X[i,k]) * X[i,j]; B[i,j] = sum[k](Y[i,k] * Y[i,k]) * Y[i,j];"
        "C[j,i] = X[i,j] * 2;"
        "D[i,j] = layernorm[i](X[i,j]); E[j] = sum[k](X[n[k],j])"
    )
    graph = einmpi.program(text, X=(200, 16), Y=(200, 16), n=np.zeros(16, int)).graph
    with pytest.raises(einmpi.InputError) as caught:
        make_plan(graph, 3, Options(resident=("X", "Y"), memory=1))
    least = int(re.search(r"at least (\d+) bytes", str(caught.value))[1])
    assert make_plan(graph, 3, Options(resident=("X", "Y"), memory=least)).peak == least


@pytest.mark.slow
def test_no_peak_is_below_the_bound():
    """Whatever is cut how: of all strategies, with and without inputs that stay."""
    for graph, weights in (llama(), (attention().graph, ()), (chain(480).graph, ("A", "D"))):
        for ranks in (1, 3, 8):
            for strategy in ("eindecomp", "eindecomp-paper", "sqrt", "replicate"):
                for resident in ((), weights):
                    plan = make_plan(graph, ranks, Options(strategy, resident=resident))
                    inner = {name for chain in plan.chains for name in chain.inner}
                    bound = peak_bound(graph, plan.mesh.ranks, resident, inner)
                    assert bound <= plan.peak
                    assert ranks > 1 or plan.chains or bound == plan.peak


@pytest.mark.parametrize(("ranks", "most"), [(1, 1), (6, 2)])
def test_dearer_memory_is_not_tried_where_no_plan_fits(ranks, most, monkeypatch):
    """So that planning does not take many times as long as without a limit."""
    solved = []
    solve = CutSearch.solve
    monkeypatch.setattr(
        CutSearch, "solve", lambda self, price: solved.append(price) or solve(self, price)
    )
    graph, _ = llama()
    bound = peak_bound(graph, ranks, ())
    assert make_plan(graph, ranks, Options(memory=bound // 50)).spilled
    assert len(solved) <= most
    with pytest.raises(einmpi.InputError):
        make_plan(graph, ranks, Options(memory=1))
    assert len(solved) <= most + 2


def test_pins():
    job = chain(480)
    for pin in ({"A": (2, 2)}, {"A": (4, 1), "Z": (1, 4)}, {"D": (1, 1)}):
        plan = einmpi.plan(job, 4, pin=pin)
        for name, parts in pin.items():
            layout = plan.layouts[name]
            assert tuple(2 ** layout.count(dimension) for dimension in range(2)) == parts
        assert plan.words_predicted >= einmpi.plan(job, 4).words_predicted
    assert einmpi.plan(job, 64, pin={"A": (64, 1)}).layouts["A"] == (0,) * 6


@pytest.mark.parametrize(
    "pin, message",
    [
        (
            {"A": (3, 1)},
            "pin: A cannot be cut 3×1 over 4 ranks; expected parts out of (1, 2, 4) × (1, 2, 4), "
            "each of the factors 2·2 used at most once",
        ),
        ({"A": (2,)}, "pin: A cannot be cut 2; expected a positive integer for each dimension"),
        ({"A": 4}, "pin: A cannot be cut 4; expected a positive integer for each dimension"),
        (
            {"A": ("2", 1)},
            "pin: A cannot be cut 2×1; expected a positive integer for each dimension",
        ),
        ({"Q": (2, 2)}, "pin: Q is not in the graph; expected one of A, B, C, D, E, …"),
        ({"Z_1": (2, 2)}, "pin: Z_1 is an intermediate result; expected one of Z, A, B, C, D, …"),
    ],
)
def test_a_pin_that_cannot_be_met(pin, message):
    with pytest.raises(einmpi.InputError) as caught:
        einmpi.plan(chain(480), 4, pin=pin)
    assert str(caught.value) == message


def test_a_refused_pin_says_which_parts_there_are():
    """The message names only parts that can be made, alone in their dimension."""
    job = einmpi.program("Z[i] = X[i] + 1", X=(8,))
    for parts in range(1, 9):
        try:
            einmpi.plan(job, 12, pin={"X": (parts,)})
            is_possible = True
        except einmpi.InputError as error:
            is_possible = False
            assert str(error) == (
                f"pin: X cannot be cut {parts} over 12 ranks; expected parts out of (1, 2, 3, 6), "
                "each of the factors 3·2·2 used at most once"
            )
        assert is_possible == (parts in (1, 2, 3, 6))


def test_refused_parts_of_a_job_file_name_their_place(tmp_path):
    path = tmp_path / "job.toml"
    given = "shape = [4, 4], random = 'ones'"
    texts = {
        "X": f"inputs.X = {{ {given}, parts = [3, 1] }}\n",
        "Z": f"inputs.X = {{ {given} }}\noutputs.Z = {{ file = 'z.npy', parts = [3, 1] }}\n",
    }
    for name, text in texts.items():
        path.write_text(f"program = 'Z[i,j] = 2 * X[i,j]'\n{text}")
        job = einmpi.load(path)
        place = {"X": f"{path}:2:8", "Z": f"{path}:3:9"}[name]
        with pytest.raises(einmpi.InputError) as caught:
            einmpi.plan(job, 2)
        assert str(caught.value).startswith(f"{place}: {name} cannot be cut 3×1 over 2 ranks; ")
        with pytest.raises(einmpi.InputError, match=f"^pin: {name} cannot be cut 4×1"):
            einmpi.plan(job, 2, pin={name: (4, 1)})
        assert einmpi.plan(job, 2, pin={name: (2, 1)}).layouts[name] == (0,)


def test_an_exact_certificate_names_what_was_not_free():
    """The table of a gather is not cut along the gathered dimension, whatever that costs."""
    text = "Z[i,a] = W[tok[i],a] + 1"
    job = einmpi.program(text, W=(64, 8), tok=np.zeros(256, int))
    plan = einmpi.plan(job, 2)
    assert plan.kind == "exact" and plan.gathered == ("W",)
    assert ", given that gathered dimensions are not cut (of W)" in str(plan)
    assert as_json(plan)["certificate"]["not_cut"] == ["W"]
    free = einmpi.plan(einmpi.program("Z[i] = X[i] + 1", X=(8,)), 2)
    assert "given that" not in str(free) and "not_cut" not in as_json(free)["certificate"]


def test_pins_of_repeated_layers_stay_apart():
    layers = "".join(f"X{k}[i,k] = sum(X{k - 1}[i,j] * W{k}[j,k])\n" for k in range(1, 9))
    shapes = {"X0": (256, 256), **{f"W{k}": (256, 256) for k in range(1, 9)}}
    job = einmpi.program(layers, **shapes)
    plan = einmpi.plan(job, 16, pin={"W2": (16, 1), "W3": (1, 16)})
    assert (plan.layouts["W2"], plan.layouts["W3"]) == ((0,) * 4, (1,) * 4)


def test_a_pin_may_need_all_axes_or_some():
    square = einmpi.program("Z[i,k] = sum(A[i,j] * B[j,k])", A=(26, 26), B=(26, 26))
    assert einmpi.plan(square, 13, pin={"A": (13, 1)}).mesh.ranks == 13
    assert einmpi.plan(square, 13, pin={"A": (12, 1)}).mesh.ranks == 12
    cube = einmpi.program("Z[i,j,k] = exp(A[i,j,k])", A=(32, 4, 4))
    assert sorted(einmpi.plan(cube, 32, pin={"A": (2, 4, 4)}).layouts["A"]) == [0, 1, 1, 2, 2]


@pytest.mark.slow
def test_huge_tensors_and_many_dimensions():
    """Costs get larger units where 64 bits are not enough; only the longest dimensions are cut."""
    huge = einmpi.program("Z[i,k] = sum(A[i,j] * B[j,k])", A=(2**24, 2**24), B=(2**24, 2**24))
    plan = einmpi.plan(huge, 4096)
    assert plan.words_predicted == 3 * 15 * 2**48  # 16 × 16 × 16
    assert einmpi.plan(huge, 4096, memory=plan.peak - 1).spilled == 1  # equal cuts need the least
    labels = ",".join(f"i{k}" for k in range(20))
    many = einmpi.program(f"Z[{labels}] = exp(A[{labels}])", A=(2,) * 20)
    assert einmpi.plan(many, 8).words_predicted == 0


def test_more_values_on_a_rank_than_64_bits_count():
    job = einmpi.program("Z = sum[i:549755813888, j:549755813888](2.0)")
    for ranks in (1, 4, 4096):
        with pytest.raises(einmpi.InputError) as caught:
            einmpi.plan(job, ranks)
        assert str(caught.value) == (
            f"plan: Z is computed from {2**78 // ranks} combinations of label values on a rank; "
            "expected less than 2**63; use smaller extents or more ranks"
        )
    # Nothing is refused that a large machine can do.
    square = einmpi.program("Z[i,k] = sum(A[i,j] * B[j,k])", A=(2**24, 2**24), B=(2**24, 2**24))
    assert einmpi.plan(square, 4096).parts("Z") == {"i": 16, "k": 16, "j": 16}


def test_a_plan_equals_itself():
    assert einmpi.plan(chain(), 4) == einmpi.plan(chain(), 4)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"ranks": True}, "ranks: True ranks requested; expected an integer from 1 to 1048576"),
        (
            {"ranks": 4, "memory": 2.5},
            "memory: '2.5' has no unit; "
            'expected an integer number of bytes, or a unit as in "4 GiB"',
        ),
        (
            {"ranks": 4, "memory": -1},
            "memory: '-1' is not an amount of memory; "
            'expected a number and a unit, such as "4 GiB"',
        ),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(einmpi.InputError) as caught:
        einmpi.plan(chain(), **arguments)
    assert str(caught.value) == message


def test_bytes_not_words_decide():
    """A is half the words and twice the bytes of B: it is B that is copied."""
    text = "Z[i,k] = sum(A[i,j] * B[j,k])"
    job = einmpi.program(f"A: float64[64,64]; B: float32[64,128]; {text}")
    plan = einmpi.plan(job, 2)
    assert plan.parts("Z")["k"] == 1 and plan.bytes_predicted == min(64 * 64 * 8, 64 * 128 * 4)
    double = einmpi.program(f"A: complex128[64,64]; B: float32[64,128]; {text}")
    assert einmpi.plan(double, 2).parts("Z") == {"i": 2, "k": 1, "j": 1}
    assert einmpi.plan(double, 2).bytes_predicted == 64 * 128 * 4


# ---- text and JSON ----------------------------------------------------------------------------


def test_json_has_the_keys_of_the_contract():
    data = as_json(einmpi.plan(chain(), 8))
    assert set(data) >= {
        "ranks",
        "strategy",
        "certificate",
        "digest",
        "words_predicted",
        "bytes_predicted",
        "bytes_peak_predicted",
        "paper_cost",
        "operations_max_rank",
        "seconds_planning",
        "vertices",
    }
    among = "cuts on this mesh"
    certificate = {"kind": "exact", "lower_bound_words": 8294400, "among": among}
    assert data["certificate"] == certificate
    assert (data["ranks"], data["words_predicted"], data["bytes_predicted"]) == (
        8,
        8294400,
        8294400 * 8,
    )
    assert data["vertices"][0] == {
        "name": "Z_1",
        "einsum": "Z_1[i,k] ← Σ[j](A[i,j] × B[j,k])",
        "partitioning": {"i": 2, "k": 2, "j": 2},
        "words": {"join": 1843200, "aggregate": 921600, "repartition": 0},
        "bytes_between_predicted": 0,
        "seconds_predicted": None,
    }
    assert (data["nodes"], data["bytes_between_predicted"], data["seconds_predicted"]) == (
        1,
        0,
        None,
    )


def test_explain():
    text = str(einmpi.plan(chain(), 8))
    assert text.splitlines()[:2] == [
        "8 ranks (mesh 2·2·2), strategy eindecomp",
        "vertex                              cuts              join  aggregate  "
        "repartition     bytes",
    ]
    assert "moved        8,294,400 words, 63.3 MiB; 7.9 MiB to the busiest rank" in text
    assert "certificate  exact: no cut of this graph on this mesh moves less" in text


def test_every_strategy_is_explained():
    job = attention()
    for strategy in STRATEGIES:
        if strategy == "data":
            continue
        assert f"strategy {strategy}" in str(einmpi.plan(job, 6, strategy=strategy))


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "einmpi", "plan", *arguments], capture_output=True, text=True
    )


@pytest.mark.slow
def test_the_plan_command(tmp_path):
    target = tmp_path / "plan.json"
    done = command("jobs/chain.toml", "-n", "8", "--set", "s=960", "--json", str(target))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("8 ranks (mesh 2·2·2), strategy eindecomp\n")
    assert json.loads(target.read_text())["words_predicted"] == 8294400
    compared = command("jobs/attention.toml", "-n", "8", "--compare", "--json", "-")
    listed = json.loads(compared.stdout)
    assert [entry["strategy"] for entry in listed] == [
        name for name in STRATEGIES if name != "data"
    ]
    assert min(listed, key=lambda entry: entry["bytes_predicted"])["strategy"] == "eindecomp"
    relations = command("jobs/chain.toml", "-n", "4", "--show-relations", "Z_3")
    assert "join C[i,j] ⋈ Z_2[j,k] on j" in relations.stdout


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "arguments, message",
    [
        (("-n", "0"), "ranks: 0 ranks requested; expected an integer from 1 to 1048576"),
        (
            ("-n", "1048577"),
            "ranks: 1048577 ranks requested; expected an integer from 1 to 1048576",
        ),
        (
            ("-n", "two"),
            "einmpi: argument -n/-np/--ranks: invalid int value: 'two'; see einmpi plan --help",
        ),
        (
            ("-n", "4", "--strategy", "best"),
            "--strategy: unknown strategy 'best'; expected one of eindecomp, eindecomp-paper, "
            "sqrt, data, model, sequence, attention, megatron, replicate",
        ),
        (
            ("-n", "4", "--strategy", "data"),
            "[roles]: strategy data needs the role batch; "
            'expected a list of labels, such as batch = ["b"]',
        ),
        (
            ("-n", "4", "--memory", "lots"),
            "--memory: 'lots' is not an amount of memory; "
            'expected a number and a unit, such as "4 GiB"',
        ),
        (
            ("-n", "4", "--show-relations", "Q"),
            "--show-relations: unknown vertex 'Q'; expected one of Z_1, Z_2, Z_3, Z",
        ),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message):
    done = command("jobs/chain.toml", *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message + "\n")
