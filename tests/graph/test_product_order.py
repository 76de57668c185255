"""The order in which products of many tensors are multiplied."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys

import pytest

from einmpi.graph.split_products import contraction_order


def operations(factors, output, extent, order):
    """Pairs of a product and a sum, or products alone, in an order; an independent count."""
    factors = [set(labels) for labels in factors]
    count = 0
    for pair in order:
        taken = [factors.pop(position) for position in sorted(pair, reverse=True)]
        joined = set.union(*taken)
        needed = set(output).union(*factors)
        values = 1
        for label in joined:
            values *= extent[label]
        count += values * (1 if joined <= needed else 2)
        factors.append(joined & needed)
    assert len(factors) == 1
    return count


def fewest_operations(factors, output, extent):
    """The best of all orders."""
    if len(factors) == 1:
        return 0
    best = None
    for i, j in itertools.combinations(range(len(factors)), 2):
        rest = [labels for k, labels in enumerate(factors) if k not in (i, j)]
        joined = set(factors[i]) | set(factors[j])
        values = 1
        for label in joined:
            values *= extent[label]
        needed = set(output).union(*rest)
        here = values * (1 if joined <= needed else 2)
        total = here + fewest_operations([*rest, sorted(joined & needed)], output, extent)
        best = total if best is None else min(best, total)
    return best


def random_network(rng, factors):
    """Tensors of which some share labels, also among three of them."""
    labels = [f"l{k}" for k in range(rng.randint(2, 2 * factors))]
    extent = {label: rng.choice((1, 2, 3, 5, 8, 16)) for label in labels}
    found = [set(rng.sample(labels, rng.randint(1, min(3, len(labels))))) for _ in range(factors)]
    used = sorted(set().union(*found))
    output = sorted(rng.sample(used, rng.randint(0, min(2, len(used)))))
    for label in used:
        if label not in output and sum(label in labels for labels in found) == 1:
            for labels in found:  # a label of one factor is summed before
                labels.discard(label)
    return [sorted(labels) for labels in found], output, extent


@pytest.mark.parametrize("seed", range(30))
def test_up_to_four_factors_have_the_best_of_all_orders(seed):
    rng = random.Random(seed)
    factors, output, extent = random_network(rng, rng.randint(2, 4))
    order = contraction_order(factors, output, extent)
    best = fewest_operations(factors, output, extent)
    assert operations(factors, output, extent, order) == best


@pytest.mark.parametrize("seed", range(30))
def test_more_factors_have_an_order_near_the_best_one(seed):
    """Outer products of the factors are not tried where there are more than four."""
    rng = random.Random(seed)
    factors, output, extent = random_network(rng, rng.randint(5, 6))
    order = contraction_order(factors, output, extent)
    best = fewest_operations(factors, output, extent)
    assert best <= operations(factors, output, extent, order) <= 1.5 * best


def ring_of_matrices(factors):
    """A ring with chords, each factor with four neighbours at most."""
    found = [{f"r{k}", f"r{(k + 1) % factors}"} for k in range(factors)]
    for k in range(factors // 2):
        other = (3 * k + factors // 2) % factors
        if other != k:
            found[k].add(f"c{k}")
            found[other].add(f"c{k}")
    return [sorted(labels) for labels in found]


@pytest.mark.parametrize("factors", [5, 9, 12, 16, 17, 40])
def test_no_order_has_more_operations_than_that_of_opt_einsum(factors):
    from opt_einsum import paths

    network = ring_of_matrices(factors)
    extent = {label: 2 + len(label) * 7 % 5 for labels in network for label in labels}
    order = contraction_order(network, [], extent)
    inputs = [frozenset(labels) for labels in network]
    default = paths.auto(inputs, frozenset(), extent)
    here, there = (operations(network, [], extent, each) for each in (order, default))
    assert here <= there
    if factors >= 12:
        assert here < there


def test_a_product_of_many_factors_with_large_extents():
    """More elements than a float can count, and more factors than are tried often."""
    factors = [[f"l{k}"] for k in range(60)]
    output = [f"l{k}" for k in range(60)]
    extent = dict.fromkeys(output, 10**6)
    assert len(contraction_order(factors, output, extent)) == 59
    chain = [[f"l{k}", f"l{k + 1}"] for k in range(500)]
    assert len(contraction_order(chain, ["l0"], dict.fromkeys((f"l{k}" for k in range(501)), 3)))


def test_the_order_is_the_same_in_every_process_and_leaves_random_alone():
    """Labels are hashed in another way in each process."""
    script = (
        "import random; random.seed(1); state = random.getstate()\n"
        "from einmpi.graph.split_products import contraction_order as order\n"
        "names = [f'{a}{b}' for a in 'pqrstu' for b in 'abcd']\n"
        "factors = [[names[k], names[(k + 1) % 24], names[k * 7 % 24]] for k in range(24)]\n"
        "print(order(factors, [], {n: 2 + k % 5 for k, n in enumerate(names)}))\n"
        "assert random.getstate() == state"
    )
    found = set()
    for seed in ("0", "1", "2"):
        command = [sys.executable, "-c", script]
        env = {**os.environ, "PYTHONHASHSEED": seed}
        found.add(
            subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
        )
    assert len(found) == 1
