"""An endless, shuffled, resumable stream of rows, cut into the batches of one process."""

from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np

from jaxpar.data.rows import Batch, Rows
from jaxpar.errors import DataError

# Rows take little to assemble: one thread is enough for a few batches ahead while the devices compute.
READ_AHEAD = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)


class RowIterator(Iterator[Batch]):
    """Yields this process's part of each batch, for ever, in the order that the rows give.

    The stream of rows is the same on any number of processes: batch k is its rows k * batch_rows and
    following, across the ends of epochs, and `local` says which of them this process takes. So the state
    counts rows of the whole stream, and restores on another number of processes and with another batch size.
    """

    def __init__(self, rows: Rows, *, batch_rows: int, local: slice, seed: int):
        """`batch_rows`: rows of a whole batch; `local`: this process's slice of them; `seed`: below 2**32."""
        self._rows, self._batch_rows, self._local, self._seed = rows, batch_rows, local, seed
        self._start_at(0)

    def _start_at(self, consumed: int) -> None:
        # Row numbers, not rows, go through the batching: a process assembles its own rows alone.
        stream = self._rows.order(self._seed)[consumed:]
        # drop_remainder: without it Grain rounds the endless length up in floating point, and overflows.
        batches = stream.batch(self._batch_rows, drop_remainder=True).map(local_rows(self._rows, self._local))
        self._start, self._batches = consumed, iter(batches.to_iter_dataset(READ_AHEAD))

    def __next__(self) -> Batch:
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        """For JSON: the rows given out so far by all processes (not those read ahead), and of which data."""
        # Grain counts the batches it returned; its read-ahead has a counter of its own.
        consumed = self._start + self._batches.get_state()["next_index"] * self._batch_rows
        return {"rows_consumed": consumed, **self._identity()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues right after `state`. Raises DataError if it is no state, or of other data or seed."""
        needed = {"rows_consumed", *self._identity()}
        if set(state) != needed or not isinstance(state["rows_consumed"], int) or state["rows_consumed"] < 0:
            raise DataError(f"needed a data state with {sorted(needed)}, found {state}: pass what get_state returned")
        different = {key: (state[key], here) for key, here in self._identity().items() if state[key] != here}
        if different:
            shown = ", ".join(f"{key} {there} then, {here} now" for key, (there, here) in different.items())
            raise DataError(
                f"the data state belongs to other rows ({shown}), so its row {state['rows_consumed']} is "
                "another: restore with the same files, split, weights, row_length and seed, or start the data anew"
            )
        self.close()
        self._start_at(state["rows_consumed"])

    def resize(self, batch_rows: int) -> None:
        """From the next batch on, batches of so many rows over all processes; the stream of rows is the same.

        Raises DataError where this process's share of them is no whole number of rows.
        """
        if batch_rows == self._batch_rows:
            return
        ends = (self._local.start, self._local.stop)
        if any(end is not None and end * batch_rows % self._batch_rows for end in ends):
            raise DataError(f"a batch of {batch_rows} rows cannot be shared as one of {self._batch_rows} rows was")
        consumed = self.get_state()["rows_consumed"]
        self._local = slice(*(None if end is None else end * batch_rows // self._batch_rows for end in ends))
        self._batch_rows = batch_rows
        self.close()
        self._start_at(consumed)

    def _identity(self) -> dict[str, Any]:
        return {"rows": len(self._rows), "fingerprint": self._rows.fingerprint, "seed": self._seed}

    def close(self) -> None:
        """Ends the read-ahead thread; also done when the iterator is collected."""
        self._batches.close()


def local_rows(rows: Rows, local: slice) -> Callable[[np.ndarray], Batch]:
    """A function from the row numbers of a whole batch, int [rows], to this process's rows of it."""
    return lambda numbers: rows.batch(numbers[local])
