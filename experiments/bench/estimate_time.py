"""Is the estimator right: predicted step times of the published runs of `split=validate`, beside the measured ones.

    python -m experiments.bench.estimate_time             (--write: the plot and tables of docs/estimate.md)

As published: each run by the layout, kernels and overlap of the system that ran it (`experiments/bench/published.py`).
The constants come from the runs of `split=calibrate` alone (`experiments/bench/calibrate_time.py`). What the model of a
step consists of, and what was taken to be true of each system, was decided with the errors of all rows in view.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import kendalltau

from experiments.bench.published import Run, read
from jaxpar.estimate.constants import Constants
from jaxpar.estimate.time import StepTime

DOCS = Path(__file__).parents[2] / "docs"
MARK = "<!-- The table below is written by experiments/bench/estimate_time.py -->"
ERROR_LIMIT, TAU_LIMIT = 0.15, 0.85
COLUMNS = ("row", "source", "model", "device", "layout", "batch", "published", "predicted", "error", "largest parts")
# Steps this much apart are told apart for certain: releases of one vendor differ by 5 % in the median.
APART = 0.05


@dataclass(frozen=True)
class Predicted:
    run: Run
    step: StepTime

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.step.total / self.run.seconds


def predict(runs: Sequence[Run]) -> list[Predicted]:
    return [Predicted(run, run.estimate(Constants())) for run in runs]


def mean_error(predicted: Sequence[Predicted]) -> float:
    """Mean absolute error of the step time, relative."""
    return float(np.mean([abs(p.ratio - 1) for p in predicted]))


def taus(predicted: Sequence[Predicted]) -> dict[str, float]:
    """Kendall's tau between predicted and measured step times, by model family."""
    found = {}
    for family in sorted({p.run.family for p in predicted}):
        of = [p for p in predicted if p.run.family == family]
        if len(of) > 2:
            found[family] = float(kendalltau([p.run.seconds for p in of], [p.step.total for p in of]).statistic)
    return found


def tau_apart(predicted: Sequence[Predicted], family: str) -> tuple[float, int]:
    """The same of pairs whose measured times differ by more than `APART`, and how many pairs that are."""
    of = [p for p in predicted if p.run.family == family]
    agree = [
        (p.run.seconds - q.run.seconds) * (p.step.total - q.step.total) > 0
        for i, p in enumerate(of)
        for q in of[:i]
        if abs(np.log(p.run.seconds / q.run.seconds)) > APART
    ]
    return 2 * float(np.mean(agree)) - 1 if agree else 1.0, len(agree)


def tau_of_table(everything: Sequence[Predicted], family: str) -> float:
    """How much of tau a better account of shapes could gain: each prediction times a free factor for every `tensor`,
    rows of a microbatch and dtype, the median of the family's own runs of `split=calibrate`."""

    def key(p: Predicted) -> tuple:
        return p.run.layout.tensor, p.run.layout.rows, p.run.row["dtype"]

    of = [p for p in everything if p.run.family == family]
    known = [p for p in of if p.run.split == "calibrate"]
    factor = {k: np.median([1 / p.ratio for p in known if key(p) == k]) for k in map(key, known)}
    validate = [p for p in of if p.run.split == "validate"]
    corrected = [p.step.total * factor.get(key(p), 1.0) for p in validate]
    return float(kendalltau([p.run.seconds for p in validate], corrected).statistic)


def cells(p: Predicted) -> tuple[str, ...]:
    layout = p.run.layout
    sizes = {"d": layout.data, "t": layout.tensor, "p": layout.pipe, "v": layout.chunks, "c": layout.seq}
    shown = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1 or name == "d")
    parts = sorted(((v, k) for k, v in p.step.parts.items()), reverse=True)[:4]
    return (
        p.run.row["row_id"], p.run.source, p.run.model, f"{p.run.row['device']} {p.run.row['dtype']}",
        f"{shown} zero{layout.zero}", f"{layout.microbatches} x {layout.rows} x {layout.length}",
        f"{p.run.seconds:.3g} s", f"{p.step.total:.3g} s", f"{p.ratio - 1:+.1%}",
        ", ".join(f"{name} {seconds / p.step.total:.0%}" for seconds, name in parts),
    )  # fmt: skip


def summary(everything: Sequence[Predicted]) -> Iterator[tuple[str, ...]]:
    """Rows: runs, how many, mean absolute error of calibrate, of validate; tau of validate, and of its pairs apart."""
    names = {"all": everything}
    names |= {s: [p for p in everything if p.run.source == s] for s in sorted({p.run.source for p in everything})}
    for name, of in names.items():
        errors = []
        for split in ("calibrate", "validate"):
            some = [p for p in of if p.run.split == split]
            errors.append(f"{mean_error(some):.1%} of {len(some)}" if some else "none")
        yield (name, *errors)


def plot(predicted: Sequence[Predicted], path: Path) -> None:
    """Predicted over measured seconds, both axes logarithmic, a colour for each source."""
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "jaxpar"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 6.0))
    ends = np.array([0.3, 1000.0])
    axes.plot(ends, ends, color="0.4", linewidth=0.8)
    axes.fill_between(ends, ends * (1 - ERROR_LIMIT), ends * (1 + ERROR_LIMIT), color="0.9", linewidth=0)
    for source in sorted({p.run.source for p in predicted}):
        of = [p for p in predicted if p.run.source == source]
        axes.plot(
            [p.run.seconds for p in of], [p.step.total for p in of], "o", markersize=3.5, alpha=0.75, label=source
        )
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="published step time, s", ylabel="predicted, s")
    axes.set_title(f"{len(predicted)} validation runs, mean absolute error {mean_error(predicted):.1%}; grey: 15 %")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)


def markdown(predicted: Sequence[Predicted], everything: Sequence[Predicted]) -> str:
    def lines(head: Sequence[str], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
        yield from (f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))

    ranks = []
    for family, tau in taus(predicted).items():
        apart, pairs = tau_apart(predicted, family)
        count = sum(p.run.family == family for p in predicted)
        table = tau_of_table(everything, family)
        ranks.append((family, str(count), f"{tau:.3f}", f"{apart:.3f} of {pairs} pairs", f"{table:.3f}"))
    tables = (
        lines(("runs", "error, calibrate", "error, validate"), summary(everything)),
        lines(("family, validate", "runs", "tau", f"of pairs more than {APART:.0%} apart", "with free factors"), ranks),
        lines(COLUMNS, (cells(p) for p in predicted)),
    )
    return "\n\n".join("\n".join(table) for table in tables) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the plot and tables of docs/estimate.md")
    arguments, console = parser.parse_args(), Console()
    runs = read()
    start = time.perf_counter()
    everything = predict(runs)
    each = (time.perf_counter() - start) / len(runs)
    predicted = [p for p in everything if p.run.split == "validate"]
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for p in predicted:
        table.add_row(*cells(p))
    console.print(table)
    for row in summary(everything):
        console.print("{}: calibrate {}, validate {}".format(*row), highlight=False)
    for family, tau in taus(predicted).items():
        apart, pairs = tau_apart(predicted, family)
        console.print(
            f"tau of {family}: {tau:.3f}; of {pairs} pairs more than {APART:.0%} apart {apart:.3f}; with free "
            f"factors of layouts {tau_of_table(everything, family):.3f}",
            highlight=False,
        )
    error, tau = mean_error(predicted), float(np.mean(list(taus(predicted).values())))
    console.print(
        f"{len(predicted)} validation runs: mean absolute error {error:.1%} (limit {ERROR_LIMIT:.0%}), tau within a "
        f"family {tau:.3f} on average (limit {TAU_LIMIT}); {each * 1e6:.0f} us an estimate",
        highlight=False,
    )
    if arguments.write:
        plot(predicted, DOCS / "estimate_time.svg")
        page = DOCS / "estimate.md"
        page.write_text(page.read_text().partition(MARK)[0] + MARK + "\n\n" + markdown(predicted, everything))
    return 0 if error < ERROR_LIMIT and tau > TAU_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
