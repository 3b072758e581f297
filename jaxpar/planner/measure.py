"""Times the best candidates on the devices at hand, and keeps what that teaches."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import exp
from statistics import median

import jax

from jaxpar.errors import ConfigError
from jaxpar.plan import Plan
from jaxpar.planner.calibration import Calibration, Sample
from jaxpar.planner.candidate import Candidate
from jaxpar.planner.ranked import Ranked
from jaxpar.planner.search import Progress, Search
from jaxpar.planner.stopwatch import Stopwatch

# Plans measured within so many times the fastest are timed again, in turns: at most so many of them.
CLOSE, FINALISTS = 1.15, 4


def measure(
    ranked: Ranked,
    count: int,
    calibration: Calibration | None = None,
    progress: Progress = lambda what, done, of: None,
    stopwatch: Stopwatch | None = None,
) -> tuple[Ranked, Calibration]:
    """Runs the steps of the `count` best plans that are unlike, then of at most as many that look faster still by what
    was learned, and searches again with that.

    It stops when no plan that was not timed may be faster than the fastest that was, by what predictions still err.
    Those that come near the fastest are timed again in turns. The measured candidates keep their measured seconds, and
    lead. Raises `ConfigError` where the cluster of the search is not the devices at hand, and what a run raises.
    """
    q, devices = ranked.question, jax.devices()
    if len(devices) != q.cluster.size:
        raise ConfigError(f"to measure on {q.cluster} it must be here: found {len(devices)} {devices[0].device_kind}")
    timed = _Timed(ranked, calibration or Calibration(q.cluster.kind), stopwatch or Stopwatch(q))
    for i, candidate in enumerate(_unlike(ranked, count)):
        progress("measuring", i, 2 * count)
        timed.add(candidate.plan)
    for i in range(count):
        progress("measuring", count + i, 2 * count)
        if (rival := timed.rival()) is None:
            break
        timed.add(rival.plan)
    timed.settle()
    progress("measuring", 2 * count, 2 * count)
    return timed.ranked(), timed.learned


@dataclass
class _Timed:
    """`seconds`: by plan, as measured; `learned`: from these and from what was measured before."""

    before: Ranked
    learned: Calibration
    stopwatch: Stopwatch
    seconds: dict[Plan, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._plain = Search(replace(self.before.question, calibration=None))
        self._contradicted = {candidate.plan for candidate, _ in self.before.dropped}

    def add(self, plan: Plan) -> None:
        self._keep({plan: self.stopwatch.seconds(plan)})

    def rival(self) -> Candidate | None:
        """The plan that may be the fastest though it was not timed; None: by what was learned, there is none."""
        again = self._again()
        rival = next((c for c in again if c.plan not in self.seconds and c.plan not in self._contradicted), None)
        likely = rival is not None and rival.time.total * exp(-self.learned.doubt) < min(self.seconds.values())
        return rival if likely else None

    def settle(self) -> None:
        """Times those near the fastest in turns: what slowed the machine meanwhile was no plan's fault."""
        close = sorted(self.seconds, key=self.seconds.__getitem__)[:FINALISTS]
        close = [plan for plan in close if self.seconds[plan] <= CLOSE * self.seconds[close[0]]]
        if len(close) > 1:
            self._keep({plan: median(found) for plan, found in self.stopwatch.in_turns(close).items()})

    def ranked(self) -> Ranked:
        again, search = self._again(), Search(replace(self.before.question, calibration=self.learned))
        ours = [replace(search.evaluate(plan), measured=seconds) for plan, seconds in self.seconds.items()]
        others = [c for c in again.found if c.plan not in self.seconds and c.plan not in self._contradicted]
        found = (*sorted(ours, key=lambda c: c.seconds), *others)
        return replace(again, found=found, dropped=self.before.dropped)

    def _keep(self, seconds: Mapping[Plan, float]) -> None:
        self.seconds |= seconds
        samples = [Sample.of(str(p), self._plain.evaluate(p).time, s) for p, s in seconds.items()]
        self.learned = self.learned.with_samples(samples)

    def _again(self) -> Ranked:
        return Search(replace(self.before.question, calibration=self.learned)).run()


def _unlike(ranked: Ranked, count: int) -> list[Candidate]:
    """The best ones, of each mesh and ZeRO stage one: twins teach nothing."""
    kinds = {(c.plan.mesh, c.plan.zero, c.plan.pipeline): c for c in reversed(ranked.found)}
    return sorted(kinds.values(), key=lambda c: c.time.total)[:count]
