"""Where time and memory of plans go, as stacked bars; and the curve of the best plans by devices."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxpar.planner.candidate import Candidate
from jaxpar.planner.scaling import Scaling
from jaxpar.planner.words import name

# Of the longest bar: what is shorter on all bars goes into the rest.
_SHOWN = 0.004


def save_bars(candidates: Sequence[Candidate], path: Path) -> None:
    """Seconds and gigabytes of each candidate by part, the best on top, in a .png or .svg."""
    figure = Figure(figsize=(11, 2.2 + 0.7 * len(candidates)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    _stacked(left, [c.time.parts for c in candidates], 1.0, "predicted seconds of a step")
    _stacked(right, [c.memory.parts for c in candidates], 1e-9, "predicted GB on each device")
    right.axvline(candidates[0].limit * 1e-9, color="0.2", linestyle="--", linewidth=1)
    for row, candidate in enumerate(candidates):
        if candidate.report is not None:
            right.plot(candidate.report.peak_bytes * 1e-9, row, "k|", markersize=22)
    left.set_yticks(range(len(candidates)), [_wrapped(name(c)) for c in candidates], fontsize=7)
    left.invert_yaxis()
    figure.savefig(path, dpi=150)


def _stacked(axes: Any, bars: Sequence[Mapping[str, float]], scale: float, label: str) -> None:
    longest = max(sum(parts.values()) for parts in bars)
    shown = [part for part in bars[0] if max(parts[part] for parts in bars) > _SHOWN * longest]
    starts = [0.0] * len(bars)
    for part in (*shown, "rest"):
        sizes = [scale * (parts[part] if part != "rest" else _rest(parts, shown)) for parts in bars]
        axes.barh(range(len(bars)), sizes, left=starts, height=0.65, label=part)
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    axes.set_xlabel(label)
    axes.legend(frameon=False, fontsize=7, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _rest(parts: Mapping[str, float], shown: Sequence[str]) -> float:
    return sum(size for part, size in parts.items() if part not in shown)


def _wrapped(text: str, width: int = 44) -> str:
    lines = [""]
    for part in text.split(", "):
        if len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part + ", "
    return "\n".join(lines).rstrip(", ")


def save_curve(scaling: Scaling, path: Path) -> None:
    """Tokens a second by devices, beside what they would be without any loss, in a .png or .svg."""
    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    points = [(p.devices, p.best.tokens_per_second) for p in scaling.points if p.best is not None]
    if points:
        devices, speeds = zip(*points, strict=True)
        axes.plot(devices, speeds, "o-", markersize=4, label="best plan, predicted")
        axes.plot(devices, [speeds[0] * n / devices[0] for n in devices], color="0.6", linewidth=0.8, label="no loss")
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(devices, [str(n) for n in devices])
        axes.set_xticks([], minor=True)
        axes.legend(frameon=False)
    axes.set(xlabel="devices", ylabel="tokens/s")
    figure.savefig(path, dpi=150)
