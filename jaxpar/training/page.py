"""One HTML page that tells a run: from the files in its folder, with everything inside it."""

import base64
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from jaxpar.errors import ConfigError
from jaxpar.training.metrics_log import read_records
from jaxpar.training.page_style import STYLE
from jaxpar.training.plot import Size, draw_curve, draw_losses, draw_memory
from jaxpar.training.program_file import binary, read_program
from jaxpar.training.progress import short
from jaxpar.training.table import read_sharding_table

_WIDE, _NARROW = (8.6, 3.4), (4.2, 3.0)  # inches

Draw = Callable[[Size], Figure]


def page(directory: Path) -> str:
    """HTML without a reference to anything outside. Raises `ConfigError` where no run is."""
    config_path = directory / "config.json"
    if not config_path.exists():
        raise ConfigError(f"there is no run in {directory}: needed a folder with config.json, such as runs/pretrain_lm")
    config, program = json.loads(config_path.read_text()), read_program(directory)
    steps = [r for r in records if "loss" in r] if (records := read_records(directory)) else []
    evaluations = [r for r in records if "validation_loss" in r]
    name = escape(str(config.get("name", directory.name)))
    body = "".join(
        (
            f"<header><h1>{name}</h1><p>{escape(program.get('plan', 'not compiled yet'))}</p></header>",
            _tiles(_summary(config, program, steps, evaluations)),
            _section("Loss", _losses(records, steps, program)),
            _section("Evaluations", _table(*_evaluation_rows(evaluations))),
            _section("Throughput", _throughput(steps)),
            _section("Memory on one device", _memory(program)),
            _section("Communication of one step, on one device", _collectives(program)),
            _section("Where every parameter lies", _sharding(directory / "sharding.txt")),
            _section("Samples", _text(directory / "sample.txt", wrap=True)),
            _section("Config", _config(config)),
        )
    )
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{name}</title>'
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head><body>{body}</body></html>\n'


# -- parts of the page --


def _summary(config: Mapping, program: Mapping, steps: Sequence, evaluations: Sequence) -> Iterator[tuple[str, str]]:
    if steps:
        yield "step", f"{steps[-1]['step']:,} of {config.get('trainer', {}).get('steps', 0):,}"
    if evaluations:
        yield "validation loss", _number(evaluations[-1]["validation_loss"])
        best = min((r for r in evaluations if r["validation_loss"] is not None), default=None, key=_validation)
        if best is not None and best is not evaluations[-1]:
            yield "best", f"{_number(_validation(best))} at step {best['step']:,}"
    if steps:
        yield "tokens/s", short(_middle(steps, "tokens_per_second"))
        if any("mfu" in r for r in steps):
            yield "MFU", f"{_middle(steps, 'mfu'):.1%}"
        yield "skipped steps", f"{sum(r['skipped'] or 0 for r in steps):.0f}"
    if program:
        yield "devices", f"{program['devices']} x {program['device_kind']}"
        yield "memory per device", binary(sum(program["memory"].values()))
        yield "compiled in", f"{program['compile_seconds']:.1f} s"


def _validation(record: Mapping[str, Any]) -> float:
    return record["validation_loss"]


def _losses(records: Sequence, steps: Sequence, program: Mapping) -> str:
    if not records:
        return ""
    parts = [_chart("losses against the step", lambda size: draw_losses(records, program.get("bigram_entropy"), size))]
    for name, label in _CURVES.items():
        if len({r[name] for r in steps if name in r}) > 1:
            parts.append(_details(label, _chart(f"{label} against the step", _curve(steps, name, label))))
    return "".join(parts)


# What does not change over a run, such as the rows of a step without a warm-up, has no curve.
_CURVES = {"grad_norm": "gradient norm", "learning_rate": "learning rate", "rows": "rows of a step"}


def _throughput(steps: Sequence) -> str:
    if not steps:
        return ""
    chart = _chart(
        "tokens per second against the step",
        lambda size: draw_curve(steps, "tokens_per_second", "tokens/s, all devices", size, zero=True),
    )
    rows = [(label, show(_middle(steps, name))) for name, label, show in _SPEEDS if any(name in r for r in steps)]
    return chart + _table(("in the middle step", ""), rows)


_SPEEDS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("seconds", "time", lambda x: f"{x:.4g}\N{NO-BREAK SPACE}s"),
    ("tokens_per_second_per_device", "tokens/s/device", short),
    ("tflops_per_device", "TFLOP/s/device (dot products that the program executes)", lambda x: f"{x:.3g}"),
    ("mfu", "MFU (6N and attention by formula, causal half left out)", lambda x: f"{x:.1%}"),
    ("data_wait", "part of the time that waited for data", lambda x: f"{x:.1%}"),
)


def _memory(program: Mapping) -> str:
    if not program:
        return ""
    memory = program["memory"]
    rows = [(kind, binary(count)) for kind, count in memory.items()]
    chart = _chart("memory by kind", lambda size: draw_memory(memory, (size[0], 2.2)))
    return chart + _table(("kind", "bytes"), [*rows, ("together", binary(sum(memory.values())))])


def _collectives(program: Mapping) -> str:
    found = program.get("collectives", ())
    rows = [(c["axes"], c["kind"], f"{c['executions']:,}", binary(c["bytes"])) for c in found]
    return _table(("mesh axes", "collective", "executions", "bytes"), rows)


def _sharding(path: Path) -> str:
    if not path.exists():
        return ""
    head, rows, foot = read_sharding_table(path.read_text(encoding="utf-8"))
    below = "".join(f"<p>{escape(line)}</p>" for line in foot.splitlines())
    return f"<p>{escape(head)}</p>{_table(rows[0], rows[1:], 'cards') if rows else ''}{below}"


def _evaluation_rows(evaluations: Sequence) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The last ones, with every number that any of them has."""
    names = list(dict.fromkeys(name for r in evaluations for name in r if name != "step"))
    rows = [(f"{r['step']:,}", *(_number(r[n]) if n in r else "" for n in names)) for r in evaluations[-10:]]
    return ("step", *(n.replace("_", " ") for n in names)), rows


def _config(config: Mapping) -> str:
    parts = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            rows = [(name, json.dumps(inner)) for name, inner in value.items()]
            parts.append(_details(key, _table(("key", "value"), rows)))
    return "".join(parts)


# -- pieces of HTML --


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def _tiles(items: Iterable[tuple[str, str]]) -> str:
    tiles = "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in items)
    return f"<dl>{tiles}</dl>" if tiles else ""


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "plain") -> str:
    """`cards`: on a narrow screen each row is a card of its own, whose cells carry the name of their column."""
    if not rows:
        return ""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(map(_cell, header, row)) + "</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _cell(column: str, text: str) -> str:
    return f'<td data-column="{escape(column)}">{escape(text)}</td>'


def _details(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def _text(path: Path, wrap: bool = False) -> str:
    if not path.exists():
        return ""
    return f'<pre class="{"wrap" if wrap else "scroll"}">{escape(path.read_text(encoding="utf-8"))}</pre>'


def _curve(steps: Sequence, name: str, label: str) -> Draw:
    return lambda size: draw_curve(steps, name, label, size)


def _chart(description: str, draw: Draw) -> str:
    """Two drawings, of which the page's width shows one: letters keep their size."""
    return "".join(
        f'<img class="{kind}" alt="{escape(description)}" src="{_svg(draw(size))}">'
        for kind, size in (("wide", _WIDE), ("narrow", _NARROW))
    )


def _svg(figure: Figure) -> str:
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "jaxpar"}):  # the same page for the same run
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def _middle(records: Sequence, name: str) -> float:
    return median(r[name] for r in records if r.get(name) is not None)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
