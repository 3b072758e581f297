import os
import sysconfig

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.data.corpus import Document, bigram_entropy, limit, read_documents, split
from jaxpar.errors import DataError

NAMES = st.lists(st.text(min_size=1, max_size=5), min_size=2, max_size=30, unique=True)


def write(folder, files: dict[str, str]):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def names(documents) -> list[str]:
    return [document.name for document in documents]


def test_folders_are_read_recursively_and_in_sorted_order(tmp_path):
    """Otherwise two processes could see the corpus in two orders, and train on different rows."""
    write(
        tmp_path,
        {"b.txt": "b", "a/z.txt": "z", "a/c.txt": "c", "a.txt": "a", "x.png": "", ".git/x.txt": "x"},
    )
    found = read_documents([tmp_path], (".txt",), exclude=(".*",))
    assert names(found) == ["a.txt", "a/c.txt", "a/z.txt", "b.txt"]
    assert found[2].data == b"z"


def test_a_file_named_in_the_paths_is_read_whatever_its_suffix(tmp_path):
    """Otherwise naming a file would not be enough to train on it."""
    write(tmp_path, {"notes": "n", "b.txt": "b"})
    assert names(read_documents([tmp_path / "notes", tmp_path / "b.txt"], (".txt",))) == ["notes", "b.txt"]


def test_excluded_names_are_left_out_at_any_depth(tmp_path):
    """Otherwise tests and vendored code would be trained on although the user left them out."""
    write(tmp_path, {"a.py": "a", "test/b.py": "b", "x/test/c.py": "c", "x/test_d.py": "d"})
    assert names(read_documents([tmp_path], (".py",), exclude=("test",))) == ["a.py", "x/test_d.py"]


def test_a_file_that_is_reached_twice_is_read_once(tmp_path):
    """Otherwise a link would train twice on one text, put it on both sides of the split, or never end."""
    write(tmp_path, {"a/one.txt": "1"})
    os.symlink(tmp_path / "a" / "one.txt", tmp_path / "two.txt")
    os.symlink(tmp_path, tmp_path / "a" / "loop")
    assert names(read_documents([tmp_path, tmp_path / "a"], (".txt",))) == ["a/one.txt"]


def test_each_line_of_a_jsonl_file_is_a_document(tmp_path):
    """Otherwise a corpus of many texts in one file could not be split."""
    write(tmp_path, {"c.jsonl": '{"text": "one\\n", "id": 1}\n\n{"text": "\\u00e9"}\r\n{"text": "\\ud800"}'})
    assert read_documents([tmp_path]) == [
        Document("c.jsonl:1", b"one\n"),
        Document("c.jsonl:3", "é".encode()),
        Document("c.jsonl:4", b"\xed\xa0\x80"),
    ]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"text": ', "no JSON"),
        ("[1]", "a JSON list"),
        ('{"body": "x"}', r"\['body'\]"),
        ('{"text": 3}', "int"),
    ],
)
def test_a_malformed_line_is_named_by_file_and_number(tmp_path, line, found):
    """Otherwise one bad line among millions could not be found, or would be dropped in silence."""
    write(tmp_path, {"c.jsonl": '{"text": "fine"}\n' + line + "\n"})
    with pytest.raises(DataError, match=rf'c\.jsonl, line 2: needed one JSON object .*"text", found .*{found}'):
        read_documents([tmp_path])


def test_a_missing_path_is_named(tmp_path):
    """Otherwise a typing error would train on whatever else was found."""
    with pytest.raises(DataError, match=r"nowhere does not exist"):
        read_documents([tmp_path, tmp_path / "nowhere"])


def test_an_empty_corpus_says_which_suffixes_were_looked_for(tmp_path):
    """Otherwise nobody would know why nothing was found."""
    write(tmp_path, {"a.rst": "text"})
    with pytest.raises(DataError, match=r"no document found .*\.txt, \.py.* left out test"):
        read_documents([tmp_path], (".txt", ".py"), exclude=("test",))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    """Otherwise it would be dropped in silence, or a pipe would be waited for without end."""
    os.symlink(tmp_path / "gone.txt", tmp_path / "link.txt")
    with pytest.raises(DataError, match=r"link\.txt is a broken link"):
        read_documents([tmp_path])
    os.unlink(tmp_path / "link.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match=r"pipe\.txt is a broken link or no regular file"):
        read_documents([tmp_path])


@given(NAMES, st.floats(0.01, 0.99), st.integers(0, 9))
def test_both_sides_of_a_split_have_documents_and_none_is_lost(found, fraction, seed):
    """Otherwise a run would train or evaluate on nothing."""
    documents = [Document(name, b"x") for name in found]
    train, held_out = split(documents, fraction, seed)
    assert train and held_out
    assert sorted(names(train) + names(held_out)) == sorted(found)


def test_adding_documents_moves_none_to_the_other_side():
    """Otherwise a model trained before would be evaluated on text it has seen."""
    documents = [Document(f"{i}.txt", b"x") for i in range(200)]
    before = split(documents[:100], 0.2, seed=3)
    after = split(documents[::-1], 0.2, seed=3)
    assert set(names(before[0])) <= set(names(after[0]))
    assert set(names(before[1])) <= set(names(after[1]))
    assert 20 <= len(after[1]) <= 60
    assert names(split(documents, 0.2, seed=4)[1]) != names(split(documents, 0.2, seed=3)[1])


def test_one_document_cannot_be_split():
    """Otherwise one side would be empty."""
    with pytest.raises(DataError, match=r"1 document cannot be split .* at least 2"):
        split([Document("a", b"x")], 0.5, seed=0)


def test_the_limit_keeps_whole_documents_chosen_by_the_seed():
    """Otherwise a smaller corpus would be the first files alone, or larger than was allowed."""
    documents = [Document(f"{i}.txt", b"x" * (1 + i % 7)) for i in range(50)]
    kept, left_out = limit(documents, 60, seed=0)
    assert sum(len(document.data) for document in kept) == 60
    assert sorted(kept + left_out, key=documents.index) == documents
    assert names(kept) != names(limit(documents, 60, seed=1)[0])
    with pytest.raises(DataError, match=r"limit_bytes=2: the smallest, b, has 3 bytes"):
        limit([Document("a", b"xxxx"), Document("b", b"xxx")], 2, seed=0)


def test_bigram_entropy_counts_exactly_the_pairs_of_weight_1():
    """Otherwise the bar a model has to beat would be too low or too high."""
    batch = {
        "tokens": np.array([[0, 0, 1, 1], [0, 0, 2, 2]]),
        "targets": np.array([[1, 2, 0, 0], [1, 2, 1, 2]]),
        "weights": np.array([[1, 1, 1, 1], [1, 1, 0, 0]], np.float32),
    }
    # After 0 (4 of 6 pairs) a fair choice, after 1 no choice; the pairs after 2 are not scored.
    assert bigram_entropy([batch], 3) == pytest.approx(4 / 6 * np.log(2))
    halves = [{name: array[i : i + 1] for name, array in batch.items()} for i in range(2)]
    assert bigram_entropy(halves, 3) == pytest.approx(bigram_entropy([batch], 3))
    with pytest.raises(DataError, match="weight 1"):
        bigram_entropy([batch | {"weights": np.zeros((2, 4))}], 3)


def test_the_standard_library_is_read_whole():
    """Otherwise real files (links, encodings, empty files) would fail where made-up ones do not."""
    found = read_documents([sysconfig.get_path("stdlib")], (".py",), exclude=("site-packages", "test"))
    assert len(found) > 300
    assert "json/decoder.py" in names(found)
    assert not any("site-packages" in name for name in names(found))
