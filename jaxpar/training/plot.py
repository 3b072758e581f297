"""Pictures of a run: losses, speed, memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxpar.training.callbacks import Callback, Loop, Record
from jaxpar.training.metrics_log import read_records
from jaxpar.training.program_file import binary, read_program

Records = Sequence[Mapping[str, Any]]
Size = tuple[float, float]

# More points than a screen has columns only make a picture slow.
_MOST_POINTS = 1500
_SIZE = (8.0, 4.5)  # inches


class Plots(Callback):
    """Draws `loss.png` at each evaluation and at the end, there also `speed.png` and `memory.png`; and `experts.png`
    of a model that says how often it chooses each expert (`load/0`, `load/1`, ...).

    From what `MetricsLog` and `ProgramFile` write, which come before it. `bigram`: the entropy of the held-out text
    given one token, in nats: what a table of pairs could reach at best.
    """

    def __init__(self, directory: Path, bigram: float | None = None):
        self._directory, self._bigram = directory, bigram

    def on_record(self, loop: Loop, step: int, record: Record) -> None:
        if "validation_loss" in record:
            records = read_records(self._directory)
            self._save("loss.png", draw_losses(records, self._bigram))
            if loads(records):
                self._save("experts.png", draw_loads(records))

    def on_end(self, loop: Loop) -> None:
        records, program = read_records(self._directory), read_program(self._directory)
        self._save("loss.png", draw_losses(records, self._bigram))
        self._save("speed.png", draw_curve(records, "tokens_per_second", "tokens/s, all devices", zero=True))
        if loads(records):
            self._save("experts.png", draw_loads(records))
        if program:
            self._save("memory.png", draw_memory(program["memory"], (8.0, 2.4)))

    def _save(self, name: str, figure: Figure) -> None:
        # Renamed when complete: a viewer never shows half a picture.
        partial = self._directory / f"partial-{name}"
        figure.savefig(partial, dpi=120)
        partial.replace(self._directory / name)


def loads(records: Records) -> list[str]:
    """The names of the experts' shares of all choices, in order."""
    names = {name for record in records for name in record if name.startswith("load/")}
    return sorted(names, key=lambda name: int(name.removeprefix("load/")))


def draw_loads(records: Records, size: Size = _SIZE) -> Figure:
    """Each expert's share of all choices against the step, and the share that all would have if equally liked."""
    figure, axes = _axes(size, "step", "share of choices")
    names = loads(records)
    for name in names:
        _line(axes, records, name, label=f"expert {name.removeprefix('load/')}", linewidth=0.8)
    axes.axhline(1 / len(names), color="gray", linestyle="--")
    axes.set_ylim(bottom=0)
    if len(names) <= 16:
        axes.legend(ncols=2, fontsize="small")
    return figure


def draw_losses(records: Records, bigram: float | None, size: Size = _SIZE) -> Figure:
    """Train and validation loss against the step; a step without a finite loss is a gap."""
    figure, axes = _axes(size, "step", "loss (nats per token)")
    _line(axes, records, "loss", label="train", color="tab:blue", linewidth=0.8, alpha=0.7)
    _line(axes, records, "validation_loss", label="validation", color="tab:orange", marker="o", markersize=3)
    if bigram is not None:
        axes.axhline(bigram, color="gray", linestyle="--", label=f"bigram entropy {bigram:.3f}")
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    return figure


def draw_curve(records: Records, name: str, label: str, size: Size = _SIZE, *, zero: bool = False) -> Figure:
    """One number of the records against the step; `zero`: the axis starts there."""
    figure, axes = _axes(size, "step", label)
    _line(axes, records, name, color="tab:blue", linewidth=0.9)
    if zero:
        axes.set_ylim(bottom=0)
    return figure


def draw_memory(memory: Mapping[str, int], size: Size = _SIZE) -> Figure:
    """Bytes on one device, by kind: one bar whose parts stand beside each other."""
    figure, axes = _axes(size, "MiB on one device", "")
    left, colors = 0.0, ("tab:blue", "tab:green", "tab:gray", "tab:orange")
    for (kind, count), color in zip(memory.items(), colors, strict=True):
        axes.barh([0], [count / 2**20], left=left, color=color, label=f"{kind}: {binary(count)}")
        left += count / 2**20
    axes.set_yticks([])
    columns = 2 if size[0] > 6 else 1
    figure.legend(loc="outside upper left", ncols=columns, frameon=False, fontsize="small")
    return figure


def _axes(size: Size, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    return figure, axes


def _line(axes: Axes, records: Records, name: str, **style: Any) -> None:
    points = [(r["step"], float("nan") if r[name] is None else r[name]) for r in records if name in r]
    shown = points[:: -(-len(points) // _MOST_POINTS) or 1]
    if shown:
        axes.plot(*zip(*shown, strict=True), **style)
