"""Losses against steps, as a picture that anyone can open."""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxpar.training.callbacks import Callback, Loop, Record
from jaxpar.training.metrics_log import read_records

FILE = "loss.png"


class LossPlot(Callback):
    """Draws `loss.png` from the records at each evaluation and at the end; `MetricsLog` comes before it.

    `bigram`: the entropy of the held-out text given one token, in nats: what a table of pairs could reach at best.
    """

    def __init__(self, directory: Path, bigram: float | None = None):
        self._directory, self._bigram = directory, bigram

    def on_record(self, loop: Loop, step: int, record: Record) -> None:
        if "validation_loss" in record:
            self._draw()

    def on_end(self, loop: Loop) -> None:
        self._draw()

    def _draw(self) -> None:
        figure = draw_losses(read_records(self._directory), self._bigram)
        # Renamed when complete: a viewer never shows half a picture.
        partial = self._directory / f"partial-{FILE}"
        figure.savefig(partial, dpi=120)
        partial.replace(self._directory / FILE)


def draw_losses(records: list[dict], bigram: float | None) -> Figure:
    """Train and validation loss against the step; a step without a finite loss is a gap."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)")
    lines: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("loss", "train", {"color": "tab:blue", "linewidth": 0.8, "alpha": 0.7}),
        ("validation_loss", "validation", {"color": "tab:orange", "marker": "o", "markersize": 3}),
    )
    for name, label, style in lines:
        points = [(r["step"], float("nan") if r[name] is None else r[name]) for r in records if name in r]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    if bigram is not None:
        axes.axhline(bigram, color="gray", linestyle="--", label=f"bigram entropy {bigram:.3f}")
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    axes.grid(alpha=0.3)
    return figure
