import math
from collections import Counter

import grain
import numpy as np
import pytest

from jaxpar.data import dataset, iterator
from jaxpar.data.dataset import EvaluationSet, Share
from jaxpar.data.iterator import RowIterator
from jaxpar.data.packing import pack

LENGTH = 8


def rows(count: int):
    """Rows that hold nothing but their own number."""
    return pack([np.full(LENGTH + 1, number) for number in range(count)], LENGTH)


@pytest.fixture(params=[0, 1, 2])
def readers(request, monkeypatch):
    """So many threads that read ahead."""
    options = grain.ReadOptions(num_threads=request.param, prefetch_buffer_size=4 if request.param else 0)
    for module in (dataset, iterator):
        monkeypatch.setattr(module, "READ_AHEAD", options)


@pytest.mark.parametrize(("count", "batch", "processes"), [(34, 16, 1), (34, 16, 2), (34, 16, 8), (19, 4, 4)])
def test_a_ragged_tail_is_evaluated_once_and_every_process_takes_as_many_steps(readers, count, batch, processes):
    """Otherwise the last rows would not be scored, or a process would wait for ever for the others."""
    found = rows(count)
    batches = [list(EvaluationSet(found, Share(batch, i, processes))) for i in range(processes)]
    assert {len(part) for part in batches} == {-(-count // batch)}
    assert Counter(int(n) for part in batches for b in part for n in b["tokens"][:, 0]) == Counter(range(count))


@pytest.mark.parametrize(("count", "batch", "processes"), [(34, 16, 1), (34, 16, 2), (19, 4, 4)])
def test_a_ragged_tail_is_trained_on_once_an_epoch(readers, count, batch, processes):
    """Otherwise the rows left over at the end of an epoch would be lost, or repeated."""
    found = rows(count)
    shares = [Share(batch, index, processes) for index in range(processes)]
    parts = [RowIterator(found, batch_rows=batch, local=share.local, seed=1) for share in shares]
    steps = math.lcm(count, batch) // batch  # up to the end of an epoch that is the end of a batch
    seen = [int(n) for _ in range(steps) for part in parts for n in next(part)["tokens"][:, 0]]
    assert all(sorted(seen[i : i + count]) == list(range(count)) for i in range(0, len(seen), count))
