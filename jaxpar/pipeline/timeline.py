"""A schedule as a picture, and as a trace for chrome://tracing or ui.perfetto.dev."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jaxpar.pipeline.schedule import Costs, Kind, Schedule, Task

# Okabe and Ito's colours, which the colour-blind can tell apart; a light and a dark one for early and late chunks.
_COLORS = {Kind.F: ("#9fd8f7", "#56b4e9"), Kind.B: ("#f7d488", "#e69f00"), Kind.W: ("#8fd6bb", "#009e73")}
_IDLE = "#e8e8e8"
_NAMES = {Kind.F: "F: forward", Kind.B: "B: backward", Kind.W: "W: backward of the weights"}
_UNIT = 1000.0  # microseconds of the trace for one unit of cost
_FONT = 7.0  # points


def boxes(schedule: Schedule, costs: Costs | None = None) -> Iterator[tuple[int, int, Task, float, float]]:
    """Every task as `(tick, stage, task, start, duration)`, in the unit of `costs`."""
    costs = costs or Costs()
    durations = schedule.durations(costs)
    starts, now = [], 0.0
    for tick in durations:
        starts.append([now + sum(tick[:slot]) for slot in range(len(tick))])
        now += sum(tick)
    for t, stage, slot, task in schedule.entries():
        yield t, stage, task, starts[t][slot], costs.of(task.kind, schedule.split) / schedule.chunks


def trace(schedule: Schedule, costs: Costs | None = None) -> dict[str, Any]:
    """Chrome's trace events: a track for each stage; one unit of cost is a millisecond."""
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": schedule.name}}]
    for stage in range(schedule.stages):
        track = {"ph": "M", "pid": 0, "tid": stage}
        events.append(track | {"name": "thread_name", "args": {"name": f"stage {stage}"}})
        events.append(track | {"name": "thread_sort_index", "args": {"sort_index": stage}})
    for t, stage, task, start, duration in boxes(schedule, costs):
        where = {"ph": "X", "pid": 0, "tid": stage, "ts": start * _UNIT, "dur": duration * _UNIT}
        args = {"microbatch": task.microbatch, "chunk": task.chunk, "tick": t}
        events.append(where | {"name": str(task), "cat": str(task.kind), "args": args})
    return {"displayTimeUnit": "ms", "traceEvents": events}


def draw_timeline(schedule: Schedule, costs: Costs | None = None) -> Figure:
    """Stages as rows, time to the right: a box for each task, its microbatch in it where it fits, gray where a stage
    waits. A darker shade is a later chunk."""
    costs = costs or Costs()
    total, shortest = schedule.time(costs), min((d for *_, d in boxes(schedule, costs) if d > 0), default=1.0)
    inches = min(max(total / shortest * 0.2, 8.0), 24.0)
    figure = Figure(figsize=(inches, 1.3 + 0.32 * schedule.stages), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="time", xlim=(0, total), ylim=(schedule.stages - 0.5, -0.5))
    axes.set_yticks(range(schedule.stages), [f"stage {s}" for s in range(schedule.stages)])
    axes.set_facecolor(_IDLE)
    _draw_boxes(axes, schedule, costs, points=72 * (inches - 1.0) / total)
    held, bubble = max(schedule.peak_live()) / schedule.chunks, schedule.bubble(costs)
    axes.set_title(
        f"{schedule.name}, {schedule.stages} stages, {schedule.microbatches} microbatches: bubble {bubble:.1%}, "
        f"{held:g} microbatches held",
        fontsize=10,
        loc="left",
    )
    _legend(figure, schedule)
    return figure


def save_timeline(schedule: Schedule, path: Path, costs: Costs | None = None) -> None:
    """Writes `path`, by its ending: .svg, .png, or .json for a trace. The same schedule gives the same bytes."""
    if path.suffix == ".json":
        path.write_text(json.dumps(trace(schedule, costs)) + "\n")
        return
    # Without dates and random names a file in version control changes only if the schedule does.
    fixed = {"Date": None} if path.suffix == ".svg" else {}
    with matplotlib.rc_context({"svg.hashsalt": schedule.name, "svg.fonttype": "none"}):
        draw_timeline(schedule, costs).savefig(path, dpi=120, metadata=fixed)


def _draw_boxes(axes: Axes, schedule: Schedule, costs: Costs, points: float) -> None:
    """`points`: how many of them one unit of time is wide."""
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for _, stage, task, start, duration in boxes(schedule, costs):
        bars.setdefault((stage, _color(task.kind, task.chunk, schedule.chunks)), []).append((start, duration))
        text = str(task.microbatch)
        if duration * points > 0.65 * _FONT * len(text):
            axes.text(start + duration / 2, stage, text, fontsize=_FONT, ha="center", va="center_baseline")
    # White edges as wide as a fifth of the narrowest box at most: thousands of boxes would be all edge.
    edge = min(0.6, 0.2 * points * min((d for spans in bars.values() for _, d in spans), default=1.0))
    for (stage, color), spans in bars.items():
        axes.broken_barh(spans, (stage - 0.42, 0.84), facecolors=color, edgecolor="white", linewidth=edge)


def _color(kind: Kind, chunk: int, chunks: int) -> str:
    light, dark = _COLORS[kind]
    if chunks == 1:
        return dark
    share = chunk / (chunks - 1)
    mixed = (round(int(light[i : i + 2], 16) * (1 - share) + int(dark[i : i + 2], 16) * share) for i in range(1, 7, 2))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _legend(figure: Figure, schedule: Schedule) -> None:
    """A column for each kind, so that it is no wider than the picture; the first and the last chunk's shade."""
    shades = dict.fromkeys((0, schedule.chunks - 1))
    handles = []
    for chunk in shades:
        for kind in schedule.kinds:
            name = _NAMES[kind] + (" of the input" if kind == Kind.B and schedule.split else "")
            label = f"{name}, chunk {chunk}" if len(shades) > 1 else name
            handles.append(Patch(color=_color(kind, chunk, schedule.chunks), label=label))
    waits = Patch(color=_IDLE, label="waits")
    columns = [handles[i :: len(schedule.kinds)] for i in range(len(schedule.kinds))]
    figure.legend(
        handles=[*(h for column in columns for h in column), waits],
        loc="outside lower center",
        ncols=len(columns) + 1,
        frameon=False,
        fontsize=8,
    )
