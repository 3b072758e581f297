"""Keeps from the terminal one message of XLA's that says nothing, and is as long as the cluster is large."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Meshes whose order of devices is not the physical one: the program is the same.
_NOISE = b"XLA:GPU only supports IOTA device assignment"


@contextmanager
def filtered() -> Iterator[None]:
    """Passes on, line by line, what this process writes to file descriptor 2 meanwhile, but for the noise."""
    sys.stderr.flush()
    kept = os.dup(2)
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    os.close(writer)
    thread = threading.Thread(target=_pass_on, args=(reader, kept), daemon=True)
    thread.start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)  # closes the last end of the pipe, and so ends the thread
        thread.join()
        os.close(kept)


def _pass_on(reader: int, to: int) -> None:
    with os.fdopen(reader, "rb") as lines:
        for line in lines:
            if _NOISE not in line:
                os.write(to, line)
