"""The numbers of a run on disk: a line of JSON for each record, and TensorBoard events."""

import json
import math
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from jaxpar.training.callbacks import Callback, Loop, Record

FILE = "metrics.jsonl"


def read_records(directory: Path) -> list[dict[str, Any]]:
    """The records of `metrics.jsonl`; a last line that was cut off by a kill is left out."""
    path = directory / FILE
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


class MetricsLog(Callback):
    """Appends to `metrics.jsonl`, and to TensorBoard events beside it. On one process alone.

    A resumed run drops the records past the step that it resumes from: each step stands there once.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._file: Any = None
        self._events: Any = None

    def on_start(self, loop: Loop) -> None:
        kept = [record for record in read_records(self._directory) if record["step"] <= loop.step]
        partial = self._directory / f"{FILE}.partial"
        partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
        partial.replace(self._directory / FILE)
        self._file = (self._directory / FILE).open("a", buffering=1)
        self._events = SummaryWriter(str(self._directory), purge_step=loop.step + 1, flush_secs=10)

    def on_record(self, loop: Loop, step: int, record: Record) -> None:
        # JSON has no infinity and no NaN.
        finite = {name: value if math.isfinite(value) else None for name, value in record.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        for name, value in record.items():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._events.close()
