"""Fits the estimator's constants on the published runs of `split=calibrate`, and says how well they carry over.

    python -m experiments.bench.calibrate_time            (--cross: leave out one source at a time, and predict it)

Each constant has a value that physics or other people's measurements suggest, and how far from it one would believe;
the fit moves it only as far as the runs insist (least squares of the logarithm of predicted over measured step time, a
run far off counting less, sources with many runs counting less for each). What the runs hardly tell apart is not
fitted at all. Constants are printed, to be copied into `jaxpar/estimate/constants.py` and, for Blackwell's
`sustained`, into `devices.py`.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console
from scipy.optimize import least_squares

from experiments.bench.published import Run, read, splits
from jaxpar.estimate.constants import Constants

# name -> (what one would start from, how far from it one would believe).
PRIORS: dict[str, tuple[float, float]] = {
    "matmul": (0.9, 0.1),
    "passes": (1.5, 0.4),
    "attention_forward": (0.7, 0.07),  # FlashAttention-2 on an A100 and cuDNN on an H100: 0.6 to 0.75 of the peak
    "attention_backward": (0.55, 0.07),
    "attention_older": (0.7, 0.2),
    "fp8_bytes": (4.0, 2.0),  # read in 16 bits, written in 8, as it stands and transposed
    "hidden_tensor": (0.8, 0.15),
    "contention": (0.25, 0.1),
    "spread": (0.012, 0.004),
    "step_seconds": (0.02, 0.01),
    "kernel_seconds": (1e-5, 5e-6),
}
# Of the B200 and GB200: a figure of the device, not of the estimator.
SUSTAINED = ("gb200", "b200")
SUSTAINED_PRIOR = (0.9, 0.2)
# A run's own error in the logarithm, and from where on it counts less.
ERROR, FAR = 0.05, 0.1


@dataclass(frozen=True)
class Fitted:
    constants: Constants
    sustained: float

    def seconds(self, run: Run) -> float:
        """Of the run's step, estimated."""
        if run.row["device"] in SUSTAINED:
            run = replace(run, device=replace(run.device, sustained=self.sustained))
        return run.estimate(self.constants).total

    def error(self, runs: Sequence[Run]) -> float:
        """Mean absolute error of the step time, relative."""
        return float(np.mean([abs(self.seconds(run) / run.seconds - 1) for run in runs]))


def fit(runs: Sequence[Run]) -> Fitted:
    priors = np.array([*PRIORS.values(), SUSTAINED_PRIOR])
    start, reach = priors.T
    count = Counter(run.source for run in runs)
    weights = np.array([(len(runs) / len(count) / count[run.source]) ** 0.25 for run in runs])

    def fitted(x: np.ndarray) -> Fitted:
        *values, sustained = map(float, start + x * reach)
        return Fitted(Constants(**dict(zip(PRIORS, values, strict=True))), sustained)

    def residuals(x: np.ndarray) -> np.ndarray:
        now = fitted(x)
        off = np.array([np.log(now.seconds(run) / run.seconds) for run in runs])
        return np.concatenate([weights * off, ERROR * x])

    lowest = -0.95 * start / reach
    found = least_squares(
        residuals, np.zeros(len(start)), bounds=(lowest, np.inf), loss="soft_l1", f_scale=FAR, diff_step=1e-3
    )
    return fitted(found.x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cross", action="store_true", help="leave out one source at a time, and predict it")
    arguments, console = parser.parse_args(), Console()
    runs = read()
    calibrate = splits(runs, "calibrate")
    found = fit(calibrate)
    for name, (start, reach) in PRIORS.items():
        console.print(
            f"{name} = {getattr(found.constants, name):.3g}    (from {start:g} +- {reach:g})", highlight=False
        )
    console.print(f"sustained of {', '.join(SUSTAINED)} = {found.sustained:.3g}", highlight=False)
    for split in ("calibrate", "validate"):
        console.print(f"{split}: {found.error(splits(runs, split)):.1%} of {len(splits(runs, split))} runs")
    if arguments.cross:
        for source in sorted({run.source for run in calibrate}):
            without = fit([run for run in calibrate if run.source != source])
            theirs = [run for run in runs if run.source == source]
            console.print(f"fitted without {source}: {without.error(theirs):.1%} of its {len(theirs)} runs")


if __name__ == "__main__":
    main()
