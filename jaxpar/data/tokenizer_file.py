"""Tokenizers out of a `tokenizer.json`, the format of Hugging Face's package `tokenizers`."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxpar.data.tokenizer import ByteTokenizer, Tokenizer, check_ids
from jaxpar.errors import BackendError, ConfigError, DataError

# What the known tokenizers call the end of a document.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "[EOS]")


class FileTokenizer:
    """Ids of a `tokenizer.json`. Special tokens that stand in a text are read as text, so that none can be forged."""

    def __init__(self, path: str | Path, end: str | None = None):
        """`end`: the token that ends a document; by default the first of the usual ones that there is.

        Raises DataError for a file that is missing or malformed, ConfigError for an end that it has not, and
        BackendError when the package `tokenizers` is not installed.
        """
        try:
            from tokenizers import Tokenizer as Engine
        except ImportError as error:
            raise BackendError("a tokenizer.json needs the package tokenizers: pip install 'jaxpar[hf]'") from error
        try:
            self.content = Path(path).read_bytes()
            self._engine = Engine.from_buffer(self.content)
        except Exception as error:  # the package raises a bare Exception
            raise DataError(f"{path} cannot be read as a tokenizer.json ({error}): name another file") from error
        self._engine.encode_special_tokens = True
        self._engine.no_truncation()
        self._engine.no_padding()
        vocabulary = self._engine.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have gaps
        self.end_of_document = vocabulary[_end(vocabulary, end, path)]
        self.fingerprint = hashlib.blake2b(
            self.content + str(self.end_of_document).encode(), digest_size=16
        ).hexdigest()

    def encode(self, text: bytes | str) -> np.ndarray:
        """int32 [tokens] of `text` (bytes that are no UTF-8 become U+FFFD), without an end of document."""
        text = text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text
        return np.array(self._engine.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of int [n] ids, without special tokens. Raises DataError for an id outside the vocabulary."""
        return self._engine.decode(check_ids(ids, self.vocab_size).tolist())


def load_tokenizer(name: str, end: str | None = None) -> Tokenizer:
    """`bytes`, or the path of a `tokenizer.json` and the token that ends a document. Raises as `FileTokenizer`."""
    if name != "bytes":
        return FileTokenizer(name, end)
    if end is not None:
        raise ConfigError(f"end={end!r}: the byte tokenizer has an end of its own; leave it out")
    return ByteTokenizer()


def _end(vocabulary: dict[str, int], end: str | None, path: str | Path) -> str:
    if end in vocabulary:
        return end
    usual = [token for token in _ENDS if token in vocabulary]
    if end is None and usual:
        return usual[0]
    needed = f"end={end!r}" if end is not None else f"one of {', '.join(_ENDS)} to end a document"
    raise ConfigError(f"{path} has no token {needed}; give the name of one that it has as the end")
