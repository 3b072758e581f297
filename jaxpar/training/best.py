"""The checkpoint with the lowest validation loss, which no later one pushes out."""

import json
import math
from pathlib import Path

import jax

from jaxpar.checkpoint.checkpoints import Checkpoints
from jaxpar.training.callbacks import Callback, Loop, Record

FILE = "validation_loss.json"


class KeepBest(Callback):
    """Saves each state that evaluates better than all before it to a folder of its own, where the last one stays.

    It comes after the guard, so that only what was compared is saved. Every process of a run calls it.
    """

    def __init__(self, directory: Path):
        self._checkpoints = Checkpoints(directory, keep=1)
        self._file, self._best, self._due = directory / FILE, math.inf, False

    def on_start(self, loop: Loop) -> None:
        if (step := self._checkpoints.latest()) is not None:
            losses = json.loads(self._file.read_text()) if self._file.exists() else {}
            self._best = losses.get(str(step), math.inf)

    def on_record(self, loop: Loop, step: int, record: Record) -> None:
        if record.get("validation_loss", math.inf) < self._best:
            self._best, self._due = record["validation_loss"], True

    def on_step(self, loop: Loop) -> None:
        self._save(loop)

    def on_end(self, loop: Loop) -> None:
        self._save(loop)
        self._checkpoints.wait()

    def close(self) -> None:
        self._checkpoints.close()

    def _save(self, loop: Loop) -> None:
        # A run that was killed comes past steps that it has been to.
        if self._due and not self._checkpoints.has(loop.step):
            self._note(loop.step)
            self._checkpoints.save(loop.run, loop.state, loop.data.get_state())
        self._due = False

    def _note(self, step: int) -> None:
        """Before the checkpoint is there: one without a loss would be replaced by any other."""
        if jax.process_index() == 0:
            kept = {str(s): self._best for s in (step,)}
            if self._file.exists():
                kept = json.loads(self._file.read_text()) | kept
            self._file.parent.mkdir(parents=True, exist_ok=True)
            partial = self._file.with_name(f"{FILE}.partial")
            partial.write_text(json.dumps(kept) + "\n")
            partial.replace(self._file)
