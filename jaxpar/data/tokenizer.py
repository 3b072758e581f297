"""The byte tokenizer: no vocabulary file, nothing to download, and every file has an encoding."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from jaxpar.errors import DataError


class ByteTokenizer:
    """Ids 0..255 are the bytes; id 256 ends a document, so that a model can learn where text stops."""

    end_of_document: ClassVar[int] = 256
    vocab_size: ClassVar[int] = 257

    def encode(self, text: bytes | str) -> np.ndarray:
        """int32 [bytes]: the bytes of `text` (a `str` as UTF-8), without an end of document."""
        data = text.encode("utf-8") if isinstance(text, str) else text
        return np.frombuffer(data, dtype=np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of int [n] ids. Bytes that are no UTF-8 become U+FFFD; an end of document becomes nothing.

        Raises DataError for an id outside 0..256.
        """
        array = np.asarray(ids, dtype=np.int64).reshape(-1)
        wrong = (array < 0) | (array >= self.vocab_size)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise DataError(
                f"cannot decode id {array[at]} at position {at}: the byte tokenizer has ids "
                f"0..{self.vocab_size - 1}; decode with the tokenizer that made these ids"
            )
        data = array[array != self.end_of_document].astype(np.uint8).tobytes()
        return data.decode("utf-8", errors="replace")
