import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxpar.data.iterator import RowIterator
from jaxpar.data.packing import pack
from jaxpar.errors import DataError

ROWS, LENGTH, BATCH = 64, 8, 4

RESUME = """
import json, sys
from tests.data.test_iterator import iterator, take
resumed = iterator()
resumed.set_state(json.loads(sys.argv[1]))
print(json.dumps(take(resumed, int(sys.argv[2]))))
"""


def rows(count: int = ROWS):
    """Rows that hold nothing but their own number."""
    return pack([np.full(LENGTH + 1, number) for number in range(count)], LENGTH)


def iterator(*, count=ROWS, batch_rows=BATCH, local=slice(None), seed=7) -> RowIterator:
    return RowIterator(rows(count), batch_rows=batch_rows, local=local, seed=seed)


def take(batches: RowIterator, steps: int) -> list[int]:
    """The numbers of the rows in the next `steps` batches."""
    return [int(number) for _ in range(steps) for number in next(batches)["tokens"][:, 0]]


def test_every_epoch_gives_every_row_once_in_an_order_of_its_own():
    """Otherwise rows would be skipped, or every epoch would repeat the same order."""
    seen = take(iterator(), 3 * ROWS // BATCH)
    epochs = [seen[i : i + ROWS] for i in range(0, 3 * ROWS, ROWS)]
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0] != list(range(ROWS))
    assert take(iterator(seed=8), ROWS // BATCH) not in epochs


def test_resumed_rows_equal_uninterrupted_rows_in_a_new_process():
    """Otherwise a run that was killed at row 20 would skip or repeat rows, in this epoch or the next."""
    uninterrupted = take(iterator(), 2 * ROWS // BATCH)
    stopped = iterator()
    before = take(stopped, 5)
    state = stopped.get_state()
    assert state["rows_consumed"] == 20
    steps = str(2 * ROWS // BATCH - 5)
    child = [sys.executable, "-c", RESUME, json.dumps(state), steps]
    result = subprocess.run(child, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=120)
    assert result.returncode == 0, result.stderr
    assert before + json.loads(result.stdout) == uninterrupted


def test_rows_read_ahead_do_not_count_as_consumed():
    """Otherwise a resumed run would skip what was prepared but never trained on."""
    batches = iterator()
    assert batches.get_state()["rows_consumed"] == 0
    first = take(batches, 1)
    states = [batches.get_state() for _ in range(3)]
    assert [state["rows_consumed"] for state in states] == [BATCH] * 3
    second = take(batches, 1)
    batches.set_state(states[0])
    assert take(batches, 1) == second != first


def test_batches_go_across_the_end_of_an_epoch():
    """Otherwise the 2 rows left over in an epoch of 34 would never be trained on."""
    seen = take(iterator(count=34, batch_rows=16), 17)  # 272 rows, 8 epochs
    assert [sorted(seen[i : i + 34]) for i in range(0, 272, 34)] == [list(range(34))] * 8


def test_processes_take_their_parts_of_the_batches_of_one_process():
    """Otherwise changing the number of processes would change what the model is trained on."""
    single = np.array(take(iterator(), 20)).reshape(20, BATCH)
    for count in (2, 4):
        share = BATCH // count
        parts = [iterator(local=slice(i * share, (i + 1) * share)) for i in range(count)]
        joined = np.concatenate([np.array(take(part, 20)).reshape(20, share) for part in parts], axis=1)
        assert np.array_equal(joined, single)


def test_a_state_of_two_processes_restores_on_one_and_with_another_batch_size():
    """Otherwise a run could not go on when the cluster shrinks or the batch grows."""
    uninterrupted = take(iterator(), 32)
    first, second = iterator(local=slice(0, 2)), iterator(local=slice(2, 4))
    take(first, 3), take(second, 3)
    assert first.get_state() == second.get_state()
    single, larger = iterator(), iterator(batch_rows=6)
    single.set_state(first.get_state())
    larger.set_state(first.get_state())
    assert take(single, 10) == uninterrupted[12:52]
    assert take(larger, 10) == uninterrupted[12:72]
    assert larger.get_state()["rows_consumed"] == 72


def test_batches_that_grow_give_the_same_rows_in_the_same_order():
    """Otherwise a batch-size warm-up would repeat or leave out what was read ahead, or reorder it."""
    for count in (1, 2):
        parts = [iterator(local=slice(i * BATCH // count, (i + 1) * BATCH // count)) for i in range(count)]
        seen = []
        for size, steps in ((4, 3), (8, 2), (16, 4), (2, 1)):
            for part in parts:
                part.resize(size)
            for _ in range(steps):
                seen += [row for part in parts for row in take(part, 1)]
            assert parts[0].get_state()["rows_consumed"] == len(seen)
        assert seen == take(iterator(), len(seen) // BATCH + 1)[: len(seen)]
    with pytest.raises(DataError, match="a batch of 3 rows cannot be shared as one of 2"):
        parts[0].resize(3)


def test_a_state_of_other_rows_or_another_seed_is_refused():
    """Otherwise the run would go on somewhere in the middle of other data."""
    state = iterator().get_state()
    with pytest.raises(DataError, match="rows 64 then, 63 now, fingerprint"):
        iterator(count=63).set_state(state)
    with pytest.raises(DataError, match="seed 7 then, 8 now"):
        iterator(seed=8).set_state(state)


@pytest.mark.parametrize("change", [{"next_index": 3}, {"rows_consumed": -4}, {"rows_consumed": "4"}])
def test_what_is_no_state_is_refused(change):
    """Otherwise a damaged checkpoint would restart the data from the beginning."""
    with pytest.raises(DataError, match="needed a data state"):
        iterator().set_state(iterator().get_state() | change)
