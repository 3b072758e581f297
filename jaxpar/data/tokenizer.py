"""The byte tokenizer: no vocabulary file, nothing to download, and every file has an encoding."""

from collections.abc import Sequence
from typing import ClassVar, Protocol

import numpy as np

from jaxpar.errors import DataError


class Tokenizer(Protocol):
    """Text to ids and back; one id ends a document and stands for no text."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_document(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """Equal if and only if the same text has the same ids."""
        ...

    def encode(self, text: bytes | str) -> np.ndarray: ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str: ...


class ByteTokenizer:
    """Ids 0..255 are the bytes; id 256 ends a document, so that a model can learn where text stops."""

    end_of_document: ClassVar[int] = 256
    vocab_size: ClassVar[int] = 257
    fingerprint: ClassVar[str] = "bytes"

    def encode(self, text: bytes | str) -> np.ndarray:
        """int32 [bytes]: the bytes of `text` (a `str` as UTF-8), without an end of document."""
        data = text.encode("utf-8") if isinstance(text, str) else text
        return np.frombuffer(data, dtype=np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of int [n] ids. Bytes that are no UTF-8 become U+FFFD; an end of document becomes nothing.

        Raises DataError for an id outside 0..256.
        """
        array = check_ids(ids, self.vocab_size)
        data = array[array != self.end_of_document].astype(np.uint8).tobytes()
        return data.decode("utf-8", errors="replace")


def check_ids(ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """int64 [n]: the ids, flat. Raises DataError for one outside the vocabulary."""
    array = np.asarray(ids, dtype=np.int64).reshape(-1)
    wrong = (array < 0) | (array >= vocab_size)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise DataError(
            f"cannot decode id {array[at]} at position {at}: the tokenizer has ids "
            f"0..{vocab_size - 1}; decode with the tokenizer that made these ids"
        )
    return array
