import sysconfig
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from jaxpar.data.corpus import Document, split
from jaxpar.data.text import TextData
from jaxpar.data.tokenizer import ByteTokenizer
from jaxpar.errors import ConfigError, DataError

LENGTH = 8


def corpus(folder, train: int, held_out: int) -> dict:
    """Writes files that fill one row each with a byte of their own; what TextData needs to split them so."""
    candidates = [Document(f"{number:03}.txt", bytes([number]) * LENGTH) for number in range(256)]
    sides = split(candidates, 0.4, seed=0)
    for document in sides[0][:train] + sides[1][:held_out]:
        (folder / document.name).write_bytes(document.data)
    return {"paths": (str(folder),), "row_length": LENGTH, "held_out": 0.4}


def numbers(batches) -> list[list[int]]:
    return [batch["tokens"][:, 0].tolist() for batch in batches]


def flat(lists) -> list[int]:
    return [item for part in lists for item in part]


def test_evaluation_gives_every_held_out_row_once_on_any_number_of_processes(tmp_path):
    """Otherwise the 2 rows left over after two batches of 16 would not be scored, or a process would hang."""
    data = TextData(rows=16, **corpus(tmp_path, train=4, held_out=34))
    single = data.build().evaluations()["held_out"]
    assert [len(batch) for batch in numbers(single)] == [16, 16, 2]
    assert len(set(flat(numbers(single)))) == 34
    for count in (1, 2, 8):
        parts = [numbers(data.build(index, count).evaluations()["held_out"]) for index in range(count)]
        assert [len(part) for part in parts] == [3] * count  # as many steps on every process
        assert [flat(batches) for batches in zip(*parts, strict=True)] == numbers(single)


def test_evaluation_can_be_iterated_again(tmp_path):
    """Otherwise the second evaluation of a run would score nothing."""
    evaluation = TextData(rows=3, **corpus(tmp_path, train=4, held_out=7)).build().evaluations()["held_out"]
    assert numbers(evaluation) == numbers(evaluation) != []


def test_eval_rows_are_spread_over_all_held_out_rows_and_the_rest_is_reported(tmp_path):
    """Otherwise a capped evaluation would be the first files alone, and nobody would know."""
    options = corpus(tmp_path, train=4, held_out=34)
    every = flat(numbers(TextData(rows=16, **options).build().evaluations()["held_out"]))
    dataset = TextData(rows=16, eval_rows=17, **options).build()
    assert flat(numbers(dataset.evaluations()["held_out"])) == every[::2]
    assert "17 held-out rows by eval_rows=17" in dataset.describe()


def test_training_batches_of_processes_join_to_those_of_one_process(tmp_path):
    """Otherwise a run on two nodes would train on other rows than a run on one."""
    data = TextData(rows=4, **corpus(tmp_path, train=10, held_out=2))
    single, parts = data.build().train(), [data.build(index, 2).train() for index in range(2)]
    for _ in range(6):
        whole, halves = next(single), [next(part) for part in parts]
        for name, array in whole.items():
            assert np.array_equal(np.concatenate([half[name] for half in halves]), array)
            assert array.shape == (4, LENGTH)
    single.set_state(parts[0].get_state())
    assert numbers([next(single)]) == [flat(numbers(next(part) for part in parts))]


def test_a_batch_holds_the_documents_and_their_ends(tmp_path):
    """Otherwise a model would never learn where a text stops."""
    dataset = TextData(rows=1, **corpus(tmp_path, train=1, held_out=1)).build()
    batch = next(dataset.train())
    byte = batch["tokens"][0, 0]
    assert sorted(batch) == ["positions", "segments", "targets", "tokens", "weights"]
    assert batch["tokens"].tolist() == [[byte] * LENGTH]
    assert batch["targets"].tolist() == [[byte] * (LENGTH - 1) + [ByteTokenizer.end_of_document]]
    assert dataset.vocab_size == 257


def test_rows_that_processes_cannot_share_are_refused_with_numbers(tmp_path):
    """Otherwise some rows of each step would belong to nobody."""
    data = TextData(rows=10, **corpus(tmp_path, train=2, held_out=2))
    with pytest.raises(DataError, match=r"rows=10 cannot be shared by 4 processes.* such as 12"):
        data.build(0, 4)
    with pytest.raises(DataError, match="process_index must be from 0 to process_count - 1 = 1, found 2"):
        data.build(2, 2)


def test_impossible_values_are_all_named_at_once():
    """Otherwise a user would mend one value a run."""
    with pytest.raises(ConfigError) as error:
        TextData(
            paths=(),
            row_length=0,
            rows=-1,
            suffixes=("py",),
            held_out=1.0,
            seed=-1,
            limit_bytes=0,
            eval_rows=0,
        )
    for name in ("paths", "row_length", "rows", "suffixes", "held_out", "seed", "limit_bytes", "eval_rows"):
        assert f"{name} must be" in str(error.value)


def test_what_is_left_out_of_the_corpus_is_reported(tmp_path):
    """Otherwise a run would be said to have trained on a corpus of which it saw a part."""
    options = corpus(tmp_path, train=20, held_out=20)
    (tmp_path / "empty.txt").touch()
    dataset = TextData(rows=4, limit_bytes=30 * LENGTH + 3, **options).build()
    assert len(dataset.train_rows) + len(dataset.evaluation_sets["held_out"].rows) == 30
    assert "left out: 1 empty documents, 10 documents of 80 bytes by limit_bytes=243" in dataset.describe()


@pytest.fixture(scope="module")
def standard_library() -> dict:
    return {
        "paths": (sysconfig.get_path("stdlib"),), "suffixes": (".py",), "exclude": ("test", "site-packages"),
        "row_length": 128, "rows": 32, "limit_bytes": 1_000_000,
    }  # fmt: skip


def test_every_byte_of_the_standard_library_is_a_target_once(standard_library):
    """Otherwise the tokens a run reports would not be the tokens of its corpus."""
    dataset = TextData(**standard_library).build()
    described = [
        int(line.split(" bytes")[0].split()[-1].replace(",", "")) for line in dataset.describe().split("\n")[:2]
    ]
    assert described == [dataset.train_rows.num_targets, dataset.evaluation_sets["held_out"].rows.num_targets]
    assert sum(int(batch["weights"].sum()) for batch in dataset.evaluations()["held_out"]) == described[1]
    assert 900_000 < sum(described) <= 1_000_000


def test_shuffled_bytes_keep_their_histogram_and_raise_the_bigram_entropy(standard_library):
    """Otherwise the control would differ from the text in more than its structure, and would show nothing."""
    datasets = [TextData(shuffle_bytes=shuffle, **standard_library).build() for shuffle in (False, True)]
    histograms = [np.bincount(dataset.train_rows.stream, minlength=257) for dataset in datasets]
    assert np.array_equal(*histograms)
    assert datasets[0].bigram_entropy + 0.5 < datasets[1].bigram_entropy < np.log(257)
    assert (
        datasets[1].train_rows.fingerprint
        == TextData(shuffle_bytes=True, **standard_library).build().train_rows.fingerprint
    )


def test_bigram_entropy_is_that_of_the_held_out_documents_on_every_process(tmp_path):
    """Otherwise a loss would be compared with the entropy of other text, or of a part of it."""
    options = corpus(tmp_path, train=4, held_out=6)
    random = np.random.default_rng(0)
    documents = []
    for file in sorted(tmp_path.iterdir()):
        file.write_bytes(random.integers(97, 100, size=random.integers(1, 40), dtype=np.uint8).tobytes())
        documents.append(Document(file.name, file.read_bytes()))
    pairs, previous = Counter(), Counter()
    for document in split(documents, 0.4, seed=0)[1]:
        for token, target in pairwise([*document.data, ByteTokenizer.end_of_document]):
            pairs[token, target] += 1
            previous[token] += 1
    total = -sum(count * np.log(count / previous[token]) for (token, _), count in pairs.items())
    for process in ((0, 1), (1, 2)):
        dataset = TextData(rows=2, **options).build(*process)
        assert dataset.bigram_entropy == pytest.approx(total / pairs.total())
