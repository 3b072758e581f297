"""What an evaluation records of one set and of several."""

import math
from types import SimpleNamespace

import pytest

from jaxpar.training.evaluate import Evaluate, metrics


class Set(list):
    bytes_per_target = 4.0


def recorded(sets) -> dict[str, float]:
    """What the callback records when a set's loss is the number in it."""
    records = []
    run = SimpleNamespace(evaluate=lambda state, batches: {"loss": batches[0] + 1, "cross_entropy": batches[0]})
    loop = SimpleNamespace(run=run, state=None, step=2, settle=lambda: None, record=lambda step, r: records.append(r))
    Evaluate(lambda: sets, every=2).on_step(loop)
    return records[0]


def test_the_first_set_gives_the_plain_names_and_several_have_their_own():
    """Otherwise a curve would jump when a set is added, or one could not tell the sets apart."""
    one = recorded({"text": [2.0]})
    assert one == {"validation_loss": 3.0, "perplexity": pytest.approx(math.e**2)}
    two = recorded({"text": [2.0], "code": Set([1.0])})
    assert one.items() <= two.items()
    assert (two["validation_loss/text"], two["validation_loss/code"]) == (3.0, 2.0)
    assert two["perplexity/code"] == pytest.approx(math.e)
    assert "bits_per_byte" not in two and "bits_per_byte/text" not in two
    assert two["bits_per_byte/code"] == pytest.approx(1 / math.log(2) / 4)


def test_perplexity_is_that_of_the_cross_entropy_alone():
    """Otherwise a model with an auxiliary loss would seem to know less of the text."""
    assert metrics({"loss": 3.0, "cross_entropy": 2.0}, None)["perplexity"] == pytest.approx(math.e**2)
    assert metrics({"loss": 3.0, "squares": 3.0}, 1.0) == {"validation_loss": 3.0}
    assert metrics({"loss": 1e4, "cross_entropy": 1e4}, None)["perplexity"] == math.inf
