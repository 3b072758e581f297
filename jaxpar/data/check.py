"""Ids that are no ids: found on the host, because a gather on the device clamps them and trains on."""

from collections.abc import Mapping

import numpy as np

from jaxpar.errors import BatchError


def check_tokens(batch: Mapping[str, np.ndarray], vocab_size: int) -> None:
    """Checks that every id in `tokens` and `targets` (int [rows, positions]) lies in 0..vocab_size-1.

    Targets of weight 0 are checked too: the head reads them before the weight hides them. Raises BatchError.
    """
    for name in ("tokens", "targets"):
        if name not in batch:
            raise BatchError(f"a token batch needs {name!r}, found {sorted(batch)}: add it to the batch")
        _check_ids(name, np.asarray(batch[name]), vocab_size)


def _check_ids(name: str, ids: np.ndarray, vocab_size: int) -> None:
    if not np.issubdtype(ids.dtype, np.integer) or ids.ndim != 2:
        raise BatchError(
            f"{name} must be integers [rows, positions], found {ids.dtype} {list(ids.shape)}: "
            "convert them where the batch is made"
        )
    if ids.size == 0:
        return
    if ids.max() >= vocab_size:
        row, position = np.unravel_index(int(ids.argmax()), ids.shape)
        raise BatchError(
            f"{name} hold id {ids.max()} at row {row}, position {position}, but the vocabulary has "
            f"{vocab_size} ids (0..{vocab_size - 1}): use the tokenizer the model was built for, or a "
            f"vocab_size of at least {int(ids.max()) + 1}"
        )
    if ids.min() < 0:
        row, position = np.unravel_index(int(ids.argmin()), ids.shape)
        raise BatchError(
            f"{name} hold the negative id {ids.min()} at row {row}, position {position} (the vocabulary has "
            f"{vocab_size} ids, 0..{vocab_size - 1}): to leave a position out, give it weight 0"
        )
