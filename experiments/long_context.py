"""Trains a small Llama on rows 8 times as long as fit on one device, whole files of Python's standard library.

    python experiments/long_context.py --simulate 8 --plan.mesh seq=8

The budget is stated: 12 MiB on each device for the step. Before training the step is compiled for rows of several
lengths, on one device and on as many as the length asks for, and `context.png` in the run directory shows what a device
needs: on one it grows with the row, split over `seq` it does not.
"""

import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxpar.batch import token_shapes
from jaxpar.cli.experiment import run_experiment
from jaxpar.config import RunConfig
from jaxpar.data.text import TextData
from jaxpar.data.tokenizer import ByteTokenizer
from jaxpar.estimate.compile import report
from jaxpar.plan import Plan
from jaxpar.program import Program
from jaxpar.training.callbacks import Callback, Loop
from jaxpar.training.optimizer import OptimizerConfig
from jaxpar.training.trainer import TrainerConfig
from models.llama import LlamaConfig

SIZES = (1, 2, 4, 8)
LENGTH = 1024  # what one device has room for
BUDGET = 12 * 2**20  # bytes per device

CONFIG = RunConfig(
    name="long_context",
    model=LlamaConfig(
        vocab_size=ByteTokenizer.vocab_size,
        num_layers=2,
        embed_dim=64,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        mlp_dim=192,
    ),
    data=TextData(
        paths=(sysconfig.get_path("stdlib"),),
        suffixes=(".py",),
        exclude=(".*", "test", "tests", "idlelib", "site-packages", "__pycache__"),
        row_length=LENGTH * max(SIZES),
        rows=1,
        eval_rows=4,
    ),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=5),
    plan=Plan(mesh="seq=-1", remat="full"),
    trainer=TrainerConfig(steps=40, evaluate_every=20, checkpoint_every=20),
)


@dataclass(frozen=True)
class Needed:
    """The peak of each device, in bytes, for one row of `length` split over `seq` devices."""

    seq: int
    length: int
    peak: int

    @property
    def fits(self) -> bool:
        return self.peak <= BUDGET

    def __str__(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        return f"rows of {self.length:>5} on seq={self.seq}: {self.peak / 2**20:6.2f} MiB per device, {verdict}"


def measure(program: Program, seq: int, length: int) -> Needed:
    """Compiles the step of one such row for the first `seq` devices."""
    run = replace(program, plan=replace(program.plan, mesh=f"seq={seq}")).on(jax.devices()[:seq])
    return Needed(seq, length, report(run.lower(token_shapes(1, length)), run.mesh).peak_bytes)


class ContextMemory(Callback):
    """Prints and draws what rows of each length need, before the first step."""

    def __init__(self, directory: Path):
        self._directory = directory

    def on_start(self, loop: Loop) -> None:
        run = loop.run
        program = Program(run.build, run.optimizer, run.plan)
        sizes = [size for size in SIZES if size <= run.mesh.size]
        whole = [measure(program, 1, LENGTH * size) for size in SIZES]
        split = [whole[0], *(measure(program, size, LENGTH * size) for size in sizes[1:])]
        print(f"budget: {BUDGET / 2**20:.0f} MiB per device")
        print(*whole, *split[1:], sep="\n", flush=True)
        draw(whole, split).savefig(self._directory / "context.png", dpi=120)


def draw(whole: Sequence[Needed], split: Sequence[Needed]) -> Figure:
    """Peak against length: of one device, and of devices as many as the length is times the shortest."""
    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="positions of a row", ylabel="MiB on one device")
    axes.grid(alpha=0.3)
    for needed, label, color in ((whole, "seq=1", "tab:orange"), (split, f"seq=length/{LENGTH}", "tab:blue")):
        axes.plot([n.length for n in needed], [n.peak / 2**20 for n in needed], "o-", label=label, color=color)
    axes.axhline(BUDGET / 2**20, color="gray", linestyle="--", label="budget")
    axes.set_xscale("log", base=2)
    axes.set_xticks([n.length for n in whole], [str(n.length) for n in whole])
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


if __name__ == "__main__":
    sys.exit(run_experiment(CONFIG, lambda directory: [ContextMemory(directory)]))
