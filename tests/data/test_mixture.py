import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.config import RunConfig, changes, parse
from jaxpar.data.iterator import RowIterator
from jaxpar.data.mixture import MixedRows, MixtureData, turn, whole_numbers
from jaxpar.data.packing import pack
from jaxpar.data.synthetic import SyntheticData
from jaxpar.data.text import TextData
from jaxpar.errors import ConfigError, DataError
from models.llama import LlamaConfig

LENGTH, BATCH = 12, 4
WEIGHTS = st.lists(st.integers(1, 30), min_size=1, max_size=6)


def numbered(first: int, documents: int, seed: int):
    """Packed documents of random lengths, in which every token is another number."""
    lengths = np.random.default_rng(seed).integers(2, 3 * LENGTH, documents)
    ends = first + np.cumsum(lengths)
    return pack([np.arange(end - size, end) for end, size in zip(ends, lengths, strict=True)], LENGTH)


def mixture() -> MixedRows:
    """15, 24 and 6 rows or so, in shares 5 : 3 : 2."""
    return MixedRows((numbered(0, 10, 1), numbered(1000, 20, 2), numbered(2000, 5, 3)), (5, 3, 2))


def iterator(rows=None, index=0, count=1, seed=7) -> RowIterator:
    share = BATCH // count
    rows = mixture() if rows is None else rows
    return RowIterator(rows, batch_rows=BATCH, local=slice(index * share, (index + 1) * share), seed=seed)


def step(parts) -> list[int]:
    """The first token of each row of the next batch, of all processes: it names the row."""
    return [int(token) for part in parts for token in next(part)["tokens"][:, 0]]


def take(parts, steps: int) -> list[int]:
    return [token for _ in range(steps) for token in step(parts)]


@given(WEIGHTS, st.integers(0, 10**15))
def test_shares_equal_the_weights_in_every_period_however_late(weights, periods):
    """Otherwise a long run would be trained on another mixture than was declared."""
    total = sum(weights)
    turns = [turn(periods * total + i, weights) for i in range(total)]
    assert Counter(part for part, _ in turns) == Counter(dict(enumerate(weights)))
    assert turns[0] == (0, periods * weights[0])


@given(WEIGHTS)
def test_shares_are_near_the_weights_at_any_time_and_each_part_goes_on_by_one(weights):
    """Otherwise a part would come in lumps, or rows of it would be skipped."""
    counts = np.zeros(len(weights), int)
    for index in range(2 * sum(weights)):
        part, before = turn(index, weights)
        assert before == counts[part]
        counts[part] += 1
        expected = np.array(weights) * (index + 1) / sum(weights)
        assert (abs(counts - expected) < len(weights)).all()


def test_weights_are_taken_as_they_are_written():
    """Otherwise 0.7 and 0.3 would be 233 to 100, or a period would be 2**53 rows long."""
    assert whole_numbers([0.7, 0.2, 0.1]) == (7, 2, 1)
    assert whole_numbers([2, 4.0]) == (1, 2)
    assert whole_numbers([1e-3, 1]) == (1, 1000)


def test_every_part_gives_each_of_its_rows_once_in_each_of_its_epochs_in_a_new_order():
    """Otherwise a small part would be repeated in one order, or a part would end and the mixture with it."""
    rows = mixture()
    seen = take([iterator(rows)], 100)
    for index, part in enumerate(rows.parts):
        own = [token for token in seen if token // 1000 == index]
        size = len(part)
        epochs = [own[i : i + size] for i in range(0, len(own) - size, size)]
        assert len(epochs) >= 3
        assert all(sorted(epoch) == sorted(part.batch(range(size))["tokens"][:, 0]) for epoch in epochs)
        assert all(a != b for a, b in pairwise(epochs))
        assert len(own) == 400 * rows.weights[index] // 10


def test_resumed_rows_equal_uninterrupted_rows_from_two_processes_to_one_and_back():
    """Otherwise a run that changes its cluster would skip or repeat rows of some part."""
    uninterrupted = take([iterator()], 40)
    seen, state = [], None
    for count, steps in ((2, 7), (1, 13), (2, 20)):
        parts = [iterator(index=index, count=count) for index in range(count)]
        if state is not None:
            for part in parts:
                part.set_state(json.loads(state))
        seen += take(parts, steps)
        states = {json.dumps(part.get_state()) for part in parts}
        assert len(states) == 1  # the same on every process
        state = states.pop()
    assert seen == uninterrupted


def test_a_state_of_other_weights_or_parts_is_refused():
    """Otherwise the run would go on at a row of another sequence."""
    state, rows = iterator().get_state(), mixture()
    for other in (MixedRows(rows.parts, (5, 3, 3)), MixedRows(rows.parts[::-1], rows.weights)):
        with pytest.raises(DataError, match="belongs to other rows"):
            iterator(other).set_state(state)


def test_another_seed_gives_another_order_in_the_same_shares():
    """Otherwise runs that are to differ by their seed would see the same rows."""
    one, other = (take([iterator(seed=seed)], 20) for seed in (7, 8))
    assert one != other
    assert [token // 1000 for token in one] == [token // 1000 for token in other]


def test_a_command_line_reaches_the_parts_and_their_size_may_change():
    """Otherwise a script would have to be edited for another mixture, or a smaller evaluation end a run."""
    data = MixtureData({"a": synthetic(), "b": synthetic()}, {"a": 1.0, "b": 2.0}, rows=BATCH)
    script = RunConfig(name="mix", model=LlamaConfig(257, 1, 16, 2, 1, 8, 16), data=data)
    line = ["--data.parts.a.eval-rows", "9", "--data.weights.b", "3", "--data.rows", "8"]
    found = parse(script, line, "script.py")[0]
    assert found.data.parts == {"a": synthetic(eval_rows=9), "b": synthetic()}
    assert (found.data.weights, found.data.rows) == ({"a": 1.0, "b": 3.0}, 8)
    changed = {c.key: c.breaks for c in changes(script.to_dict(), found.to_dict())}
    assert changed == {"data.parts.a.eval_rows": False, "data.weights.b": True, "data.rows": False}


def test_a_mixture_of_mixtures_keeps_the_shares():
    """Otherwise shares could not be declared within a share."""
    inner = MixedRows((numbered(0, 10, 1), numbered(1000, 10, 2)), (1, 3))
    seen = take([iterator(MixedRows((inner, numbered(2000, 10, 3)), (2, 1)))], 30)
    assert Counter(token // 1000 for token in seen) == {0: 20, 1: 60, 2: 40}


def synthetic(**changes) -> SyntheticData:
    return SyntheticData(**{"vocab_size": 257, "row_length": LENGTH, "rows": 1, "eval_rows": 6} | changes)


def test_each_part_is_an_evaluation_set_of_its_name(tmp_path):
    """Otherwise one could not see which part is learned."""
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text("words " * i)
    text = TextData(paths=(str(tmp_path),), row_length=LENGTH, rows=99)
    data = MixtureData({"code": text, "noise": synthetic()}, {"noise": 0.25, "code": 0.75}, rows=BATCH)
    dataset = data.build(1, 2)
    sets = dataset.evaluations()
    assert list(sets) == ["code", "noise"]
    assert [len(batch["tokens"]) for batch in sets["noise"]] == [2, 0]
    assert [len(batch["tokens"]) for batch in sets["noise"].whole()] == [4, 2]
    assert next(dataset.train())["tokens"].shape == (2, LENGTH)
    assert dataset.bigram_entropy == pytest.approx(text.build().bigram_entropy)
    assert "code: 75.0000% of the rows" in dataset.describe()
    nested = MixtureData({"a": data, "b": synthetic()}, {"a": 1, "b": 1}, rows=BATCH).build()
    assert list(nested.evaluations()) == ["a/code", "a/noise", "b"]


def test_parts_that_do_not_fit_together_are_named():
    """Otherwise ids of one part would mean something else in the other."""
    for change in ({"vocab_size": 300}, {"row_length": 8}):
        name, value = next(iter(change.items()))
        parts = {"a": synthetic(), "b": synthetic(**change)}
        with pytest.raises(DataError, match=f"same {name}, found: a has .*, b has {value}"):
            MixtureData(parts, {"a": 1, "b": 1}, rows=BATCH).build()


@pytest.mark.parametrize("weights", [{"a": 1}, {"a": 1, "b": 0}, {"a": 1, "b": -1}, {"a": 1, "b": float("nan")}])
def test_weights_that_are_missing_or_not_above_0_are_refused(weights):
    """Otherwise a part would be left out in silence."""
    with pytest.raises(ConfigError, match="weights must be a number above 0 for each of the parts a, b"):
        MixtureData({"a": synthetic(), "b": synthetic()}, weights, rows=BATCH)
