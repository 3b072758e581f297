"""Ctrl-C and SIGTERM: the first asks the run to end after its step, the second ends the process at once."""

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = b"\x1b[?25h"


class Interrupts:
    """While entered, `signal` tells which signal came, if any."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python sets no handlers
            self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            self._end_at_once(number)
        self.signal = number
        # print is not safe here: the signal may have come in the middle of one.
        os.write(2, b"\nfinishing this step, then saving; once more ends at once\n")

    def _end_at_once(self, number: int) -> None:
        if sys.stdout.isatty():
            os.write(1, _SHOW_CURSOR)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
