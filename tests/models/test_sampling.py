"""Choices of tokens: the likeliest one, and frequencies of random ones against probabilities."""

import numpy as np
import pytest

from einmpi.errors import EinmpiError
from einmpi.models.sampling import Sampling, candidates, choose_tokens

LOGITS = np.array([1.0, 3.0, 0.5, 2.5, -1.0])


def softmax(scores):
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


def test_temperature_zero_takes_the_first_of_the_likeliest():
    logits = np.array([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0]], np.float32)
    assert choose_tokens(logits, Sampling(), [3, 3]).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_probabilities(temperature):
    count = 1500
    logits = np.broadcast_to(LOGITS, (1, 5))
    sampling = Sampling(temperature, seed=7)
    drawn = [int(choose_tokens(logits, sampling, [at])[0]) for at in range(count)]
    frequencies = np.bincount(drawn, minlength=5) / count
    np.testing.assert_allclose(frequencies, softmax(LOGITS / temperature), atol=0.04)


def test_a_choice_depends_on_seed_sequence_and_position_only():
    logits = np.zeros((3, 1000))
    sampling = Sampling(1.0, seed=11)
    first = choose_tokens(logits, sampling, [4, 5, 6])
    assert choose_tokens(logits, sampling, [4, 5, 6]).tolist() == first.tolist()
    assert choose_tokens(logits[:2], sampling, [4, 5]).tolist() == first[:2].tolist()
    others = [
        choose_tokens(logits, Sampling(1.0, seed=12), [4, 5, 6]),
        choose_tokens(logits, sampling, [5, 6, 7]),
    ]
    for other in others:
        assert (other != first).all()
    assert len(set(choose_tokens(logits, sampling, [4, 4, 4]).tolist())) == 3


def test_top_k_and_top_p_keep_the_likeliest():
    order = [1, 3, 0, 2, 4]
    probabilities = softmax(LOGITS)
    tokens, _ = candidates(LOGITS, Sampling(1.0, top_k=2))
    assert tokens.tolist() == order[:2]
    tokens, kept = candidates(LOGITS, Sampling(1.0, top_p=probabilities[1] + 1e-9))
    assert tokens.tolist() == order[:2]
    np.testing.assert_allclose(kept, probabilities[order[:2]])
    tokens, _ = candidates(LOGITS, Sampling(1.0, top_p=1e-9))
    assert tokens.tolist() == order[:1]
    tokens, _ = candidates(LOGITS, Sampling(1.0, top_k=100))
    assert tokens.tolist() == order


def test_logits_that_are_no_numbers_end_a_run():
    with pytest.raises(EinmpiError, match="not a number"):
        choose_tokens(np.array([[1.0, np.nan]]), Sampling(), [0])


@pytest.mark.filterwarnings("error")
def test_a_tiny_temperature_chooses_the_likeliest_token():
    logits = np.array([[0.5, 3.0, 2.9]])
    assert choose_tokens(logits, Sampling(temperature=1e-310), [4]).tolist() == [1]
