"""Checkpoints, every so many steps and at the end, however it comes."""

from jaxpar.checkpoint.checkpoints import Checkpoints
from jaxpar.training.callbacks import Callback, Loop


class Checkpoint(Callback):
    """Saves in the background; what goes wrong there raises at the next save, or at the end."""

    def __init__(self, checkpoints: Checkpoints, every: int):
        self._checkpoints, self._every = checkpoints, every
        self._last: int | None = None

    def on_start(self, loop: Loop) -> None:
        self._last = self._checkpoints.latest()

    def on_step(self, loop: Loop) -> None:
        if loop.step % self._every == 0:
            self._save(loop)

    def on_end(self, loop: Loop) -> None:
        if self._last != loop.step:
            self._save(loop)
        self._checkpoints.wait()

    def close(self) -> None:
        self._checkpoints.close()

    def _save(self, loop: Loop) -> None:
        loop.settle()
        self._checkpoints.save(loop.run, loop.state, loop.data.get_state())
        self._last = loop.step
