"""An experiment's script from its config to its end: start or resume, train, say how it went."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.checkpoint.checkpoints import Checkpoints
from jaxpar.cli.compile_cache import use_compile_cache
from jaxpar.cli.friendly import friendly_errors
from jaxpar.cli.plan_argument import planned, program_of, take_plan
from jaxpar.cli.processes import Processes, check_alike, end_at_once, join
from jaxpar.cli.run_directory import move_aside
from jaxpar.config import RunConfig, Start, check_continues, default_directory, parse, save_config
from jaxpar.mesh import simulate
from jaxpar.run import Run
from jaxpar.self_check import self_check
from jaxpar.state import TrainState
from jaxpar.training.batch_warmup import Stage, batch_stages
from jaxpar.training.best import KeepBest
from jaxpar.training.callbacks import Callback
from jaxpar.training.evaluate import Evaluate
from jaxpar.training.guard import Guard
from jaxpar.training.meter import Known
from jaxpar.training.metrics_log import MetricsLog, read_records
from jaxpar.training.plot import Plots
from jaxpar.training.profile import Profile, ProfiledSteps
from jaxpar.training.program_file import ProgramFile
from jaxpar.training.progress import ProgressLog
from jaxpar.training.save import Checkpoint
from jaxpar.training.stragglers import Stragglers
from jaxpar.training.table import sharding_table
from jaxpar.training.tracking import Tracking
from jaxpar.training.trainer import compile_step, train

MoreCallbacks = Callable[[Path], Sequence[Callback]]


def run_experiment(
    script: RunConfig, more_callbacks: MoreCallbacks = lambda directory: (), arguments: Sequence[str] | None = None
) -> int:
    """Trains what `script` and the command line say; returns the exit status: 128 + n after signal n.

    `more_callbacks(run_directory)`: hooks beside the usual ones; `arguments`: in place of `sys.argv[1:]`. A user's
    mistake ends the process with one message and status 2.
    """
    with end_at_once(), friendly_errors():
        script, rest, search = take_plan(script, sys.argv[1:] if arguments is None else arguments)
        config, start = parse(script, rest, sys.argv[0])
        join(Processes(start.coordinator, start.processes, start.process_id), start.heartbeat_timeout)
        if start.simulate is not None:
            simulate(start.simulate)
        directory = start.directory or default_directory(config, script)
        config = planned(config) if search else config
        return _Experiment(config, start, directory, more_callbacks).run()


@dataclass(frozen=True)
class _Experiment:
    config: RunConfig
    start: Start
    directory: Path
    more_callbacks: MoreCallbacks

    def run(self) -> int:
        if self.start.compile_cache and not self.start.dry_run:
            use_compile_cache(self.directory.parent / ".cache", self.config.plan)
        self_check()
        check_alike(self._declared())
        run = program_of(self.config).on()
        dataset = self.config.data.build(*run.row_share)
        stages = batch_stages(self.config.trainer.batch_warmup, dataset.share.rows, run.plan, len(run.structure.stacks))
        _say(f"{jax.default_backend()}: {run.plan}, {_devices(run)}\n{dataset.describe()}")
        if self.start.dry_run:
            return _dry_run(run, dataset)
        if not self.start.resume:
            move_aside(self.directory, _say)
        checkpoints = Checkpoints(self.directory / "checkpoints", self.config.trainer.keep_checkpoints)
        step, steps = checkpoints.latest(), self.config.trainer.steps
        if step is not None:
            for change in check_continues(self.config, self.directory):
                _say(f"changed since this run was started: {change}")
            if step >= steps:
                _say(f"the run in {self.directory} is at step {step} of {steps} already; --trainer.steps N goes on")
                return 0
        data = dataset.train()
        state = self._state(run, data, checkpoints)
        self._prepare(run)
        return self._train(run, state, data, dataset, checkpoints, stages)

    def _declared(self) -> dict[str, Any]:
        """What must be the same on every process."""
        start = self.start
        options = {"directory": str(self.directory), "resume": start.resume, "dry_run": start.dry_run}
        return self.config.to_dict() | {"start": options}

    def _known(self) -> Known:
        optimizer, steps = self.config.optimizer, self.config.trainer.steps
        # At once: asked step by step, each would wait in the queue of the devices.
        rates = jax.jit(jax.vmap(lambda update: optimizer.rate(update, steps)))(jnp.arange(steps))
        return Known(np.asarray(rates), getattr(self.config.model, "experts_per_token", None))

    def _state(self, run: Run, data: Any, checkpoints: Checkpoints) -> TrainState:
        if checkpoints.latest() is None:
            _say(f"new run in {self.directory}")
            return run.init(self.config.trainer.seed)
        restored = checkpoints.restore(run)
        data.set_state(restored.data)
        _say(f"resumes the run in {self.directory} at step {int(restored.state.step)} of {self.config.trainer.steps}")
        return restored.state

    def _prepare(self, run: Run) -> None:
        if jax.process_index() == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            save_config(self.config, self.directory)
            (self.directory / "sharding.txt").write_text(sharding_table(run) + "\n")

    def _train(
        self, run: Run, state: TrainState, data: Any, dataset: Any, checkpoints: Checkpoints, stages: list[Stage]
    ) -> int:
        trainer = self.config.trainer
        callbacks: list[Callback] = [
            Evaluate(dataset.evaluations, trainer.evaluate_every),
            *([Guard(trainer.guard_every)] if trainer.guard_every else []),  # before what it guards is saved
            Checkpoint(checkpoints, trainer.checkpoint_every),
            *([KeepBest(self.directory / "best")] if trainer.keep_best else []),
            *([Stragglers(say=_say)] if jax.process_count() > 1 else []),
        ]
        bigram = None
        if jax.process_index() == 0:
            bigram = dataset.bigram_entropy
            files = [MetricsLog(self.directory), ProgramFile(self.directory, bigram), Plots(self.directory, bigram)]
            callbacks += [*files, ProgressLog(bigram), *self._asked_for(), *self.more_callbacks(self.directory)]
        outcome = train(run, state, data, trainer.steps, callbacks, trainer.max_skips, self._known(), stages)
        if outcome.signal is not None:
            _say(f"stopped at step {outcome.step} of {trainer.steps}, saved; the same command goes on from there")
            return 128 + outcome.signal
        if jax.process_index() != 0:  # what was recorded is with the first
            return 0
        last = [r["validation_loss"] for r in read_records(self.directory) if "validation_loss" in r][-1]
        beside = "" if bigram is None else f", bigram entropy {bigram:.4f}"
        _say(f"done: validation loss {last:.4f}{beside} nats per token; see {self.directory}/")
        return 0

    def _asked_for(self) -> list[Callback]:
        """What a start may have beside the usual hooks."""
        found: list[Callback] = []
        if self.start.profile is not None:
            found.append(Profile(self.directory, ProfiledSteps.parse(self.start.profile), _say))
        if self.start.track is not None:
            found.append(Tracking(self.start.track, self.directory, self.config.name, self.config.to_dict()))
        return found


def _dry_run(run: Run, dataset: Any) -> int:
    _say(sharding_table(run))
    _, report = compile_step(run, run.put(next(dataset.train())))
    _say(f"\n{report.table()}")
    return 0


def _devices(run: Run) -> str:
    processes = jax.process_count()
    return f"{run.mesh.size} devices" + (f" of {processes} processes" if processes > 1 else "")


def _say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, flush=True)
