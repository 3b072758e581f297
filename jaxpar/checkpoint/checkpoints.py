"""The checkpoints of one run: a folder with a folder for each saved step.

A checkpoint holds logical arrays, the same on every mesh, so that any mesh restores what any other saved. It is
written under another name and renamed when complete, and deleted the other way round: what bears a step's number is
whole.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from jaxpar.checkpoint.leaves import by_name, differences, from_names, table
from jaxpar.errors import CheckpointError
from jaxpar.run import Run
from jaxpar.state import TrainState

FORMAT = 1

_DELETED = ".deleted"
_UNFINISHED = ".orbax-checkpoint-tmp"

# Orbax writes it last.
_COMPLETE = "_CHECKPOINT_METADATA"


@dataclass(frozen=True)
class Restored:
    """What a checkpoint held: the state on the mesh of the run that asked, the data's position, the plan of then."""

    state: TrainState
    data: dict[str, Any]
    plan: dict[str, Any]


class Checkpoints:
    """Saves in the background and keeps the last few. Every process of a run calls every method."""

    def __init__(self, directory: str | Path, keep: int = 3):
        """`directory`: absolute or relative, made at the first save; `keep`: how many checkpoints stay, at least 1."""
        if keep < 1:
            raise CheckpointError(f"keep={keep}: at least one checkpoint has to stay; give 1 or more")
        self.directory = Path(directory).absolute()
        self._keep = keep
        self._pending: tuple[int, Any] | None = None

    # -- what there is --

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, ascending."""
        if not self.directory.is_dir():
            return []
        named = [path for path in self.directory.iterdir() if path.name.isdecimal()]
        return sorted(int(path.name) for path in named if (path / _COMPLETE).is_file())

    def latest(self) -> int | None:
        """The last complete checkpoint's step, the same on every process; None: there is none."""
        last = _of_first_process(max(self.steps(), default=-1))
        return None if last < 0 else last

    def has(self, step: int) -> bool:
        """Whether there is a complete checkpoint of this step, the same on every process."""
        return bool(_of_first_process(step in self.steps()))

    # -- saving --

    def save(self, run: Run, state: TrainState, data: dict[str, Any]) -> None:
        """Starts to write `state` under its step; returns as soon as `state` may be donated.

        `data`: JSON, the data iterator's state. Waits for a save that is still under way, and raises its
        `CheckpointError` if that one failed.
        """
        self.wait()
        step = int(state.step)
        if self.has(step):
            raise CheckpointError(f"{self.directory} holds a checkpoint of step {step} already: save to another folder")
        logical = run.to_logical(state)
        about = {"format": FORMAT, "plan": run.plan.to_dict(), "leaves": table(logical), "data": data}
        with self._explained(f"checkpoint of step {step} could not be written to {self.directory}"):
            if jax.process_index() == 0:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._remove_leftovers()
            self._pending = step, ocp.save_async(self._path(step), by_name(logical), custom_metadata=about)

    def wait(self) -> None:
        """Until the save under way is complete, and older checkpoints are gone. Raises `CheckpointError`."""
        if self._pending is None:
            return
        step, response = self._pending
        self._pending = None
        with self._explained(f"checkpoint of step {step} could not be written to {self.directory}"):
            response.result()
        if jax.process_index() == 0:
            with self._explained(f"an old checkpoint could not be removed from {self.directory}"):
                self._prune()

    def close(self) -> None:
        """The same as `wait`: a save that failed in the background never ends a run that looks well."""
        self.wait()

    def _path(self, step: int) -> Path:
        return self.directory / str(step)

    def _prune(self) -> None:
        for step in self.steps()[: -self._keep]:
            doomed = self._path(step).rename(self.directory / f"{step}{_DELETED}")
            shutil.rmtree(doomed)

    def _remove_leftovers(self) -> None:
        for path in self.directory.iterdir():
            if path.name.endswith(_DELETED) or _UNFINISHED in path.name:
                shutil.rmtree(path)

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            kept = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(
                f"{what}: {_first_line(error)}. Complete checkpoints here: {kept}. Make room or make the folder "
                f"writable, and start again: the run continues from the last of them"
            ) from error

    # -- restoring --

    def restore(self, run: Run, step: int | None = None) -> Restored:
        """The checkpoint of `step` (default: the latest) on the mesh of `run`, whatever mesh it was saved on.

        Raises `CheckpointError` that names every leaf that does not fit, a format of another version, and damage.
        """
        step = self.latest() if step is None else step
        if step is None or step not in self.steps():
            has = ", ".join(map(str, self.steps())) or "nothing"
            wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise CheckpointError(f"{self.directory} has {wanted}; it holds {has}")
        about = self._about(step)
        abstract = run.abstract_logical_state
        if lines := differences(about["leaves"], table(abstract)):
            raise CheckpointError(
                f"the checkpoint {self._path(step)} does not fit this model and optimizer:\n"
                + "\n".join(f"  - {line}" for line in lines)
                + "\nrestore it with the model and the optimizer that it was saved with"
            )
        leaves = self._read(step, lambda path: ocp.load(path, by_name(abstract)))
        return Restored(run.from_logical(from_names(leaves, abstract)), about["data"], about["plan"])

    def _about(self, step: int) -> dict[str, Any]:
        about = self._read(step, lambda path: ocp.metadata(path).custom_metadata) or {}
        if about.get("format") != FORMAT:
            raise CheckpointError(
                f"{self._path(step)} has the checkpoint format {about.get('format', 'of another program')}, this "
                f"version of jaxpar reads format {FORMAT}: use the version that wrote it"
            )
        return about

    def _read(self, step: int, read: Any) -> Any:
        try:
            return read(self._path(step))
        except Exception as error:
            others = ", ".join(str(s) for s in self.steps() if s != step) or "none"
            raise CheckpointError(
                f"the checkpoint {self._path(step)} cannot be read: {_first_line(error)}. Others here: {others}; "
                f"remove the damaged folder to continue from the last of them"
            ) from error


def _of_first_process(number: int) -> int:
    """A shared disk may show something to one process before another."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
