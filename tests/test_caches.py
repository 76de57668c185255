"""Bounded caches, which several threads use at once."""

import ast
import gc
import random
import threading

import pytest
from kept_results import kept
from paths import ROOT

from einmpi.caches import bounded_cache


def test_results_are_kept_and_errors_are_not():
    asked = []

    @bounded_cache(3)
    def half(number, least=0):
        """Half of a number."""
        asked.append(number)
        if number < least:
            raise ValueError(number)
        return [number / 2]

    assert half(4) is half(4)
    for _ in range(2):
        with pytest.raises(ValueError, match="1") as caught:
            half(1, 2)
        assert caught.value.__context__ is None
    assert asked == [4, 1, 1]
    assert (half.__name__, half.__doc__) == ("half", "Half of a number.")


def test_a_full_cache_is_emptied():
    @bounded_cache(3)
    def half(number):
        return number / 2

    for number in range(10):
        half(number)
        half(number)
        assert 1 <= len(kept(half)) <= 3
    assert kept(half) == {(9,): 4.5}


class Key:
    """A key whose comparison lets others ask meanwhile, as a thread does that has to wait."""

    def __init__(self, number, meanwhile):
        self.number = number
        self.meanwhile = meanwhile

    def __hash__(self):
        return self.number // 4

    def __eq__(self, other):
        self.meanwhile()
        return self.number == other.number


def test_others_ask_while_keys_with_one_hash_are_compared():
    """With `functools.lru_cache` this test ends the process, when Python searches for garbage."""
    draw = random.Random(7)
    depth = 0

    @bounded_cache(8)
    def number_of(key):
        return [key.number]

    def ask():
        number = draw.randrange(24)
        assert number_of(Key(number, meanwhile)) == [number]

    def meanwhile():
        nonlocal depth
        if depth < 3 and draw.random() < 0.3:
            depth += 1
            ask()
            depth -= 1

    for _ in range(2000):
        ask()
    gc.collect()


def test_threads_ask_at_once():
    wrong = []

    @bounded_cache(8)
    def number_of(key):
        return [key.number]

    def ask(seed):
        draw = random.Random(seed)
        for _ in range(2000):
            number = draw.randrange(24)
            if number_of(Key(number, lambda: None)) != [number]:
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_functions_of_the_package_keep_results_in_bounded_caches():
    """A function may have an `lru_cache` for itself; those of a module belong to all threads."""
    for path in sorted((ROOT / "einmpi").rglob("*.py")):
        text = path.read_text()
        module = ast.parse(text if "lru_cache(" in text else "")
        inside = set()
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef):
                inside.update(line for part in node.body for line in range_of(part))
        for node in ast.walk(module):
            is_used = "lru_cache" in (getattr(node, "id", ""), getattr(node, "attr", ""))
            assert not is_used or node.lineno in inside, f"{path}:{node.lineno}: lru_cache"


def range_of(node):
    """The lines of a node."""
    return range(node.lineno, node.end_lineno + 1)
