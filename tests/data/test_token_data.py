import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from jaxpar.data.sources import Sources
from jaxpar.data.token_data import TokenData, held_out
from jaxpar.data.tokenizing import Tokenizing, tokenize
from jaxpar.errors import ConfigError, DataError
from tests.data.corpora import texts, write_jsonl, write_tokenizer

LENGTH = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """100 documents as bytes in a dozen shards."""
    path = tmp_path_factory.mktemp("tokens")
    write_jsonl(path / "a.jsonl", texts(100))
    tokenize(Tokenizing(Sources((str(path / "a.jsonl"),)), shard_bytes=1000), path / "out")
    return path / "out"


def data(folder, **changes) -> TokenData:
    return TokenData(**{"directory": str(folder), "row_length": LENGTH, "rows": 4, "held_out": 0.2} | changes)


def scored(rows) -> Counter:
    """How often each (token, target) pair is scored."""
    batch = rows.batch(range(len(rows)))
    used = batch["weights"] == 1
    return Counter(zip(batch["tokens"][used].tolist(), batch["targets"][used].tolist(), strict=True))


def test_every_token_of_every_document_is_a_target_once(folder):
    """Otherwise tokens would be lost at the borders of shards, rows or sides."""
    dataset = data(folder).build()
    expected = Counter()
    for text in texts(100):
        ids = [*text.encode(), 256]
        expected.update(pairwise(ids))
    sides = [dataset.train_rows, dataset.evaluations()["held_out"].rows]
    assert scored(sides[0]) + scored(sides[1]) == expected
    assert sum(side.num_targets for side in sides) == expected.total()


def test_a_row_holds_the_text_of_its_documents(folder):
    """Otherwise a row would be read from another shard."""
    rows = data(folder, row_length=400).build().train_rows
    known = {text for text in texts(100)}
    for row in (rows[number] for number in range(len(rows))):
        for segment in range(1, row["segments"].max() + 1):
            here = row["segments"] == segment
            assert row["targets"][here][-1] == 256
            assert bytes(row["tokens"][here].astype(np.uint8)).decode() in known


def test_resumed_rows_equal_uninterrupted_rows_from_two_processes_to_one_and_back(folder):
    """Otherwise a run that changes its cluster would skip or repeat rows."""

    def take(parts, steps):
        return [row.tobytes() for _ in range(steps) for part in parts for row in next(part)["tokens"]]

    uninterrupted = take([data(folder).build().train()], 45)
    seen, state = [], None
    for count, steps in ((2, 11), (1, 14), (2, 20)):
        parts = [data(folder).build(index, count).train() for index in range(count)]
        for part in parts if state else ():
            part.set_state(json.loads(state))
        seen += take(parts, steps)
        state = json.dumps(parts[0].get_state())
    assert seen == uninterrupted
    assert len(set(seen)) < len(seen)  # into the second epoch


def test_evaluation_on_processes_is_that_of_one(folder):
    """Otherwise the ragged last batch would be lost or scored twice."""
    single = [row.tobytes() for batch in data(folder).build().evaluations()["held_out"] for row in batch["tokens"]]
    parts = [list(data(folder).build(i, 4).evaluations()["held_out"]) for i in range(4)]
    assert len({len(part) for part in parts}) == 1
    joined = [row.tobytes() for batches in zip(*parts, strict=True) for batch in batches for row in batch["tokens"]]
    assert joined == single and len(single) % 4


def test_the_fingerprint_is_that_of_the_text_and_not_of_the_folder(folder, tmp_path):
    """Otherwise a run could not go on where the corpus was copied, or would go on with another one."""
    write_jsonl(tmp_path / "same.jsonl", texts(100))
    write_jsonl(tmp_path / "other.jsonl", [*texts(99), texts(100)[99].replace("axis", "mesh")])
    found = []
    for name in ("same", "other"):
        job = Tokenizing(Sources((str(tmp_path / f"{name}.jsonl"),)), shard_bytes=1000)
        tokenize(job, tmp_path / name)
        found.append(data(tmp_path / name).build().train_rows.fingerprint)
    assert found[0] == data(folder).build().train_rows.fingerprint != found[1]


def test_bits_per_byte_need_the_bytes_of_a_target(folder, tmp_path):
    """Otherwise losses of two tokenizers could not be compared."""
    assert data(folder).build().evaluations()["held_out"].bytes_per_target == 1.0
    write_tokenizer(tmp_path / "tokenizer.json")
    write_jsonl(tmp_path / "a.jsonl", texts(100))
    job = Tokenizing(Sources((str(tmp_path / "a.jsonl"),)), tokenizer=str(tmp_path / "tokenizer.json"))
    tokenize(job, tmp_path / "out")
    dataset = data(tmp_path / "out").build()
    evaluation = dataset.evaluations()["held_out"]
    batches = list(evaluation)
    length = sum(len(text.encode()) for text in texts(100)) - int(dataset.describe().split()[4].replace(",", ""))
    assert evaluation.bytes_per_target == pytest.approx(length / sum(b["weights"].sum() for b in batches))
    assert 2 < evaluation.bytes_per_target < 6


def test_equal_documents_are_on_one_side_and_no_side_is_empty():
    """Otherwise a model would be evaluated on text that it was trained on."""
    hashes = np.random.default_rng(0).integers(0, 2**63, 1000).astype(np.uint64)
    out = held_out(hashes, 0.1, seed=3)
    assert 60 < out.sum() < 140
    assert np.array_equal(held_out(np.tile(hashes, 2)[::-1], 0.1, 3), np.tile(out, 2)[::-1])
    assert not np.array_equal(held_out(hashes, 0.1, 4), out)
    assert held_out(hashes[:2], 1e-9, 0).sum() == held_out(hashes[:2], 1 - 1e-9, 0).sum() == 1
    for few in (hashes[:0], np.repeat(hashes[:1], 3)):
        with pytest.raises(DataError, match="fewer than 2 different texts cannot be split"):
            held_out(few, 0.5, 0)


def test_impossible_values_are_refused(folder):
    """Otherwise they would fail deep inside."""
    with pytest.raises(ConfigError, match=r"token data: rows must be .* row_length must be .* held_out must be"):
        data(folder, rows=0, row_length=0, held_out=1.0)
    with pytest.raises(DataError, match="rows=4 cannot be shared by 3 processes"):
        data(folder).build(0, 3)
