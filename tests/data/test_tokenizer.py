import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.data.tokenizer import ByteTokenizer
from jaxpar.errors import DataError


@given(st.text(max_size=50))
def test_decoding_gives_back_any_text(text):
    """Otherwise what a model writes would be shown as something else."""
    ids = ByteTokenizer().encode(text)
    assert ids.dtype == np.int32
    assert ByteTokenizer().decode(ids) == text


def test_ids_are_bytes_and_256_ends_a_document():
    """Otherwise a checkpoint trained on bytes would not mean the same bytes elsewhere."""
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(bytes(range(256))).tolist() == list(range(256))
    assert (tokenizer.end_of_document, tokenizer.vocab_size) == (256, 257)
    assert tokenizer.decode([104, 105, 256]) == "hi"


def test_half_a_character_is_shown_as_replaced():
    """Otherwise generating token by token would fail in the middle of a character."""
    assert ByteTokenizer().decode(ByteTokenizer().encode("é")[:1]) == "\ufffd"


@pytest.mark.parametrize("wrong", [257, -1])
def test_an_id_past_the_vocabulary_is_refused(wrong):
    """Otherwise it would wrap around to some other byte."""
    with pytest.raises(DataError, match=rf"id {wrong} at position 1"):
        ByteTokenizer().decode([0, wrong])
