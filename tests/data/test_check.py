import numpy as np
import pytest

from jaxpar.data.check import check_tokens
from jaxpar.errors import BatchError


def batch(**ids):
    return {"tokens": np.zeros((2, 3), np.int32), "targets": np.zeros((2, 3), np.int32)} | ids


def test_every_id_of_the_vocabulary_is_accepted():
    """Otherwise the last id of a vocabulary could not be trained."""
    check_tokens(batch(tokens=np.array([[0, 256, 3]])), 257)
    check_tokens(batch(tokens=np.zeros((0, 3), np.int32), targets=np.zeros((0, 3), np.int32)), 257)


@pytest.mark.parametrize("name", ["tokens", "targets"])
def test_an_id_past_the_vocabulary_is_named_with_its_place(name):
    """Otherwise the gather would clamp it and train on another word."""
    with pytest.raises(
        BatchError, match=rf"{name} hold id 300 at row 1, position 2, .* 257 ids \(0\.\.256\).* 301"
    ):
        check_tokens(batch(**{name: np.array([[0, 257, 1], [2, 3, 300]])}), 257)


@pytest.mark.parametrize("name", ["tokens", "targets"])
def test_a_negative_id_is_named_with_its_place(name):
    """Otherwise -100 would count from the end of the vocabulary."""
    with pytest.raises(
        BatchError, match=rf"{name} hold the negative id -100 at row 0, position 1 .*weight 0"
    ):
        check_tokens(batch(**{name: np.array([[0, -100, 1]])}), 257)


@pytest.mark.parametrize("wrong", [np.zeros((2, 3), np.float32), np.zeros(3, np.int32)])
def test_what_is_no_array_of_ids_is_refused(wrong):
    """Otherwise a float batch or a lost row dimension would show up deep inside the model."""
    with pytest.raises(BatchError, match=r"targets must be integers \[rows, positions\]"):
        check_tokens(batch(targets=wrong), 257)


def test_a_missing_array_is_named():
    """Otherwise a batch without targets would pass as checked."""
    with pytest.raises(BatchError, match=r"needs 'targets', found \['tokens'\]"):
        check_tokens({"tokens": np.zeros((2, 3), np.int32)}, 257)
