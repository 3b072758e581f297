import numpy as np
import pytest

from jaxpar.data.synthetic import SyntheticData
from jaxpar.errors import ConfigError


def data(**changes) -> SyntheticData:
    return SyntheticData(**{"vocab_size": 50, "row_length": 9, "rows": 4, "train_rows": 32, "eval_rows": 6} | changes)


def test_uniform_ids_are_all_drawn_and_continue_as_targets():
    """Otherwise a benchmark would look up a part of the vocabulary, or learn something."""
    rows = data(vocab_size=7, row_length=2000).build().train_rows
    batch = rows.batch([3, 8])
    assert np.array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    assert not np.array_equal(batch["tokens"][0], batch["tokens"][1])
    assert all(abs((batch["tokens"] == token).mean() - 1 / 7) < 0.03 for token in range(7))
    assert batch["weights"].all() and batch["segments"].all()


def test_the_copy_task_scores_the_copy_alone():
    """Otherwise its loss could not go to 0."""
    batch = data(task="copy").build().train_rows.batch(range(32))
    tokens, weights = batch["tokens"], batch["weights"]
    assert (tokens[:, 4] == 49).all() and (tokens[:, :4] < 49).all()
    assert weights.tolist() == [[0] * 4 + [1] * 4 + [0]] * 32
    assert np.array_equal(batch["targets"][:, 4:8], tokens[:, :4])
    assert np.array_equal(tokens[:, 5:8], tokens[:, :3])


def test_held_out_rows_are_no_training_rows_and_another_seed_gives_others():
    """Otherwise evaluation would score what was learned by heart."""
    dataset = data().build()
    train = {tuple(row) for row in dataset.train_rows.batch(range(32))["tokens"].tolist()}
    held_out = [row for batch in dataset.evaluations()["held_out"] for row in batch["tokens"].tolist()]
    assert len(train) == 32 and len(held_out) == 6
    assert not train & set(map(tuple, held_out))
    other = data(seed=1).build()
    assert other.train_rows.fingerprint != dataset.train_rows.fingerprint
    assert not np.array_equal(other.train_rows[0]["tokens"], dataset.train_rows[0]["tokens"])


def test_impossible_values_are_refused():
    """Otherwise a benchmark would run on rows without a target."""
    with pytest.raises(ConfigError, match=r"task must be one of .*vocab_size must be .*train_rows must be"):
        data(task="reverse", vocab_size=1, train_rows=0)
    with pytest.raises(ConfigError, match="row_length must be at least 2"):
        data(task="copy", row_length=1)
