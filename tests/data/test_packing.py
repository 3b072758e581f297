import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.data.packing import PackedRows, pack
from jaxpar.errors import DataError


def numbered(lengths) -> list[np.ndarray]:
    """Documents in which every token of the corpus is another number, so that a token names its pair."""
    ends = np.cumsum(lengths)
    return [np.arange(end - length, end, dtype=np.int32) for end, length in zip(ends, lengths, strict=True)]


def whole(rows: PackedRows) -> dict[str, np.ndarray]:
    return rows.batch(range(len(rows)))


def test_three_documents_share_a_row_with_their_own_segments_and_positions():
    """Otherwise a document would attend to its neighbour, or start in the middle of its positions."""
    rows = pack(numbered([6, 7, 6]), row_length=18)  # 5 + 6 + 5 pairs, 2 slots of padding
    row = rows[0]
    assert len(rows) == 1
    assert row["segments"].tolist() == [1] * 5 + [2] * 6 + [3] * 5 + [0] * 2
    assert row["positions"].tolist() == [*range(5), *range(6), *range(5), 0, 0]
    assert row["weights"].tolist() == [1.0] * 16 + [0.0] * 2
    assert row["tokens"].tolist() == [*range(0, 5), *range(6, 12), *range(13, 18), 0, 0]
    assert row["targets"].tolist() == [*range(1, 6), *range(7, 13), *range(14, 19), 0, 0]
    assert {name for name, array in row.items() if array.dtype == np.int32} == {
        "tokens",
        "targets",
        "positions",
        "segments",
    }
    assert row["weights"].dtype == np.float32


def test_a_long_document_continues_in_the_next_row_without_losing_a_target():
    """Otherwise the first token of each continued piece would never be predicted."""
    rows = whole(pack(numbered([11]), row_length=4))
    assert rows["tokens"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0]]
    assert rows["targets"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 0, 0]]
    assert rows["positions"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 0, 0]]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 16))
def test_every_target_is_scored_exactly_once(lengths, row_length):
    """Otherwise tokens would be lost or counted twice, and the loss would be that of another corpus."""
    if max(lengths) == 1:
        lengths.append(2)
    packed = pack(numbered(lengths), row_length)
    rows = whole(packed)
    scored = rows["weights"] == 1
    ends = np.cumsum(lengths) - 1
    expected = np.setdiff1d(np.arange(sum(lengths)), ends)  # all but the last token of each document
    assert np.array_equal(np.sort(rows["tokens"][scored]), expected)
    assert np.array_equal(rows["targets"][scored], rows["tokens"][scored] + 1)
    assert packed.num_targets == scored.sum() == sum(lengths) - len(lengths)
    assert all((array[~scored] == 0).all() for array in rows.values())


@given(st.lists(st.integers(2, 40), min_size=1, max_size=60), st.integers(1, 16))
def test_segments_are_runs_of_one_document_from_position_0(lengths, row_length):
    """Otherwise attention or position embeddings would mix documents."""
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    pieces = np.zeros(len(lengths), int)
    packed = pack(numbered(lengths), row_length)
    for row in (packed[number] for number in range(len(packed))):
        used = row["segments"] > 0
        assert np.array_equal(used, np.arange(row_length) < used.sum())  # padding only at the end
        assert set(np.diff(row["segments"][used])) <= {0, 1}
        for segment in range(1, row["segments"].max() + 1):
            here = row["segments"] == segment
            document = set(document_of[row["tokens"][here]])
            assert len(document) == 1
            pieces[document.pop()] += 1
            assert row["positions"][here].tolist() == list(range(here.sum()))
    assert (pieces <= -(-(np.array(lengths) - 1) // row_length)).all()  # short documents are never cut


def test_short_documents_fill_rows():
    """Otherwise rows would be mostly padding, and devices would compute on nothing."""
    rows = whole(pack(numbered([4, 7, 3, 2, 6]), row_length=6))  # 3, 6, 2, 1, 5 pairs
    assert rows["segments"].tolist() == [[1, 1, 1, 2, 2, 3], [1] * 6, [1, 1, 1, 1, 1, 0]]
    lengths = np.random.default_rng(0).integers(2, 65, size=2000)
    packed = pack(numbered(lengths), row_length=64)
    assert packed.num_targets / (len(packed) * 64) > 0.97


def test_the_fingerprint_changes_with_any_token_and_with_the_row_length():
    """Otherwise a run would continue in the middle of other data without notice."""
    documents = numbered([6, 7, 6])
    changed = [*documents[:2], documents[2][::-1]]
    found = {pack(documents, 9).fingerprint, pack(documents, 8).fingerprint, pack(changed, 9).fingerprint}
    assert len(found) == 3
    assert pack(documents, 9).fingerprint == pack(numbered([6, 7, 6]), 9).fingerprint


def test_documents_without_a_pair_are_refused():
    """Otherwise a run would train on padding alone."""
    with pytest.raises(DataError, match="2 documents hold no pair"):
        pack(numbered([1, 1]), 4)
