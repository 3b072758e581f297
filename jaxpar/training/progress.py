"""How a run goes: a live line on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from jaxpar.training.callbacks import Callback, Loop, Record

_PLAIN_EVERY = 5.0  # seconds
_SHORTEST_BAR = 10

# From the one that a narrow terminal keeps to the one that it drops first.
_PRIORITY = ("step", "skipped", "loss", "validation", "eta", "speed", "mfu", "flops", "norm", "rate", "wait")
_ORDER = ("step", "loss", "validation", "norm", "rate", "speed", "flops", "mfu", "wait", "skipped", "eta")

# What a field shows of a record.
_SHOWN: dict[str, tuple[str, Callable[[float], str]]] = {
    "loss": ("loss", lambda x: f"loss {x:.3f}"),
    "norm": ("grad_norm", lambda x: f"grad norm {x:.3g}"),
    "rate": ("learning_rate", lambda x: f"lr {x:.2e}"),
    "speed": ("tokens_per_second_per_device", lambda x: f"{short(x)} tokens/s/device"),
    "flops": ("tflops_per_device", lambda x: f"{x:.3g} TFLOP/s/device"),
    "mfu": ("mfu", lambda x: f"MFU {x:.1%}"),
    "wait": ("data_wait", lambda x: f"data wait {x:.0%}"),
}


class ProgressLog(Callback):
    """Shows the numbers of `Meter`, the losses and the time left. On one process alone."""

    def __init__(self, bigram: float | None = None, console: Console | None = None):
        """`bigram`: entropy of the held-out text given one token, in nats, shown beside the validation loss."""
        self._console = console or Console()
        self._beside = "" if bigram is None else f" (bigram entropy {bigram:.4f})"
        self._fields: dict[str, str] = {}
        self._skipped = 0
        self._done = 0.0
        self._guarded = False
        self._live: Live | None = None
        self._printed = 0.0
        self._first: tuple[int, float] | None = None

    def on_start(self, loop: Loop) -> None:
        self._skipped = int(loop.state.skipped)
        self._fields = {"step": f"{loop.step}/{loop.steps}", "eta": "compiling"}
        if self._console.is_terminal:
            self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4)
            self._live.start()
        else:
            self._print("compiling")

    def on_record(self, loop: Loop, step: int, record: Record) -> None:
        if "validation_loss" in record:
            self._fields["validation"] = f"val {record['validation_loss']:.3f}"
            self._print(f"step {step}/{loop.steps}  validation loss {record['validation_loss']:.4f}{self._beside}")
        if "guard_seconds" in record and not self._guarded:
            self._guarded = True
            cost = f"{1000 * record['guard_seconds']:.1f} ms, {record['guard_share']:.2%} of the time between"
            self._print(f"step {step}/{loop.steps}  replicas are equal bit for bit; compared in {cost}")
        if "loss" in record:
            self._update(loop, step, record)
            if self._live is None and (step == loop.steps or time.monotonic() - self._printed > _PLAIN_EVERY):
                self._print("  ".join(self._fields[name] for name in _ORDER if self._fields.get(name)))

    def _update(self, loop: Loop, step: int, record: Record) -> None:
        if self._first is None and loop.report is not None:
            self._print(f"compiled in {loop.report.compile_seconds:.1f} s")
        self._skipped += int(record["skipped"])
        self._done = step / loop.steps
        self._fields |= {"step": f"{step}/{loop.steps}", "eta": self._left(loop, step)}
        self._fields |= {name: show(record[key]) for name, (key, show) in _SHOWN.items() if key in record}
        if self._skipped:
            self._fields["skipped"] = f"{self._skipped} skipped"

    def _left(self, loop: Loop, step: int) -> str:
        # From the first step that this process finished: it had to compile before that one.
        now = time.monotonic()
        if self._first is None:
            self._first = step, now
            return ""
        first, started = self._first
        return f"{clock((now - started) / (step - first) * (loop.steps - step))} left"

    def on_end(self, loop: Loop) -> None:
        self._stop()

    def close(self) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, line: str) -> None:
        """Above the live line, where there is one."""
        self._printed = time.monotonic()
        self._console.print(Text(line), soft_wrap=True)
        self._console.file.flush()

    def _render(self) -> Text:
        return Text(status(self._fields, self._done, self._console.width - 1), no_wrap=True, overflow="crop")


def status(fields: dict[str, str], done: float, width: int) -> str:
    """As many fields as `width` columns have room for, the most important first, and a bar in what is left."""
    kept: list[str] = []
    for name in _PRIORITY:
        if fields.get(name) and len(_join(fields, [*kept, name])) <= width:
            kept.append(name)
    line = _join(fields, kept)
    room = width - len(line) - 2
    return line if room < _SHORTEST_BAR else f"{bar(done, min(room, 40))}  {line}"


def _join(fields: dict[str, str], names: list[str]) -> str:
    return "  ".join(fields[name] for name in _ORDER if name in names)


def bar(done: float, width: int) -> str:
    """`width` columns, the part `done` (0 to 1) of them full."""
    full = round(width * min(max(done, 0.0), 1.0))
    return "━" * full + "╌" * (width - full)


def short(number: float) -> str:
    """Three digits and a unit: 940, 12.3k, 4.56M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


def clock(seconds: float) -> str:
    """`m:ss`, or `h:mm:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
