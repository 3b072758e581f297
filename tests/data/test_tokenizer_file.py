import sys

import numpy as np
import pytest

from jaxpar.data.tokenizer import ByteTokenizer
from jaxpar.data.tokenizer_file import FileTokenizer, load_tokenizer
from jaxpar.errors import BackendError, ConfigError, DataError
from tests.data.corpora import END, write_tokenizer


@pytest.fixture
def path(tmp_path):
    write_tokenizer(tmp_path / "tokenizer.json")
    return tmp_path / "tokenizer.json"


def test_decoding_gives_back_text_in_fewer_ids_than_bytes(path):
    """Otherwise the file's merges would not be used, or text would be lost."""
    tokenizer = FileTokenizer(path)
    text = "mesh axis shard naïve 漢字\n"
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and len(ids) < len(text.encode())
    assert tokenizer.decode([*ids, tokenizer.end_of_document]) == text
    assert np.array_equal(tokenizer.encode(text.encode()), ids)
    assert tokenizer.vocab_size == 300 and ids.max() < 300


def test_a_special_token_in_a_text_is_text(path):
    """Otherwise a web page could end a document, or pretend to be the next message."""
    tokenizer = FileTokenizer(path)
    ids = tokenizer.encode(f"mesh {END} axis")
    assert tokenizer.end_of_document not in ids
    assert tokenizer.decode(ids) == f"mesh {END} axis"


def test_the_end_is_the_usual_token_or_the_one_that_is_named(path, tmp_path):
    """Otherwise documents would run into each other."""
    assert FileTokenizer(path).end_of_document == 0
    assert FileTokenizer(path, end="A").end_of_document == FileTokenizer(path).encode("A")[0]
    with pytest.raises(ConfigError, match=r"has no token end='<stop>'"):
        FileTokenizer(path, end="<stop>")
    (tmp_path / "other.json").write_text(path.read_text().replace(END, "<|fin|>"))
    with pytest.raises(ConfigError, match=r"has no token one of <\|endoftext\|>"):
        FileTokenizer(tmp_path / "other.json")
    assert FileTokenizer(path, end="A").fingerprint != FileTokenizer(path).fingerprint


def test_a_file_that_is_missing_or_no_tokenizer_is_named(tmp_path):
    """Otherwise it would be a traceback out of another language."""
    (tmp_path / "bad.json").write_text("{}")
    for name in ("bad.json", "missing.json"):
        with pytest.raises(DataError, match=rf"{name} cannot be read as a tokenizer\.json"):
            FileTokenizer(tmp_path / name)


def test_an_id_past_the_vocabulary_is_refused(path):
    """Otherwise it would be decoded to nothing."""
    with pytest.raises(DataError, match="id 300 at position 1"):
        FileTokenizer(path).decode([1, 300])


def test_bytes_needs_no_file_and_has_an_end_of_its_own():
    """Otherwise an end that is given would be ignored."""
    assert isinstance(load_tokenizer("bytes"), ByteTokenizer)
    with pytest.raises(ConfigError, match="has an end of its own"):
        load_tokenizer("bytes", "</s>")


def test_a_missing_package_is_named_with_its_extra(path, monkeypatch):
    """Otherwise a user would not know what to install."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(BackendError, match=r"pip install 'jaxpar\[hf\]'"):
        FileTokenizer(path)
