"""The best plan by number of devices, and the cheapest cluster that meets a deadline."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from jaxpar.errors import ConfigError
from jaxpar.estimate.hardware import Cluster
from jaxpar.planner.candidate import Candidate
from jaxpar.planner.question import Question
from jaxpar.planner.search import Progress, Search
from jaxpar.planner.ways_out import quick

HOUR = 3600.0


@dataclass(frozen=True)
class Point:
    """`best`: None where there is no plan, and then `reason` says why. `price`: of a device and hour, if known."""

    cluster: Cluster
    best: Candidate | None
    reason: str
    price: float | None

    @property
    def devices(self) -> int:
        return self.cluster.size

    def hours(self, tokens: float) -> float:
        return float("inf") if self.best is None else tokens / self.best.tokens_per_second / HOUR

    def cost(self, tokens: float) -> float | None:
        """Of training on so many tokens, in the currency of `price`."""
        if self.price is None or self.best is None:
            return None
        return self.hours(tokens) * self.devices * self.price

    def efficiency(self, base: "Point") -> float:
        """Tokens a second of each device, over that of `base`."""
        assert self.best is not None and base.best is not None
        each, whole = self.best.tokens_per_second / self.devices, base.best.tokens_per_second / base.devices
        return each / whole


@dataclass(frozen=True)
class Scaling:
    """Points by devices, fewest first; the same rows a step on each."""

    points: tuple[Point, ...]
    tokens: float | None = None
    deadline_hours: float | None = None

    @property
    def cheapest(self) -> Point | None:
        """The cheapest that meets the deadline; without prices, the one of the fewest device-hours."""
        if self.tokens is None:
            return None
        tokens, limit = self.tokens, self.deadline_hours or float("inf")
        there = [p for p in self.points if p.hours(tokens) <= limit and p.best is not None]
        return min(there, key=lambda p: p.cost(tokens) or p.hours(tokens) * p.devices, default=None)

    @property
    def verdict(self) -> str:
        """What to rent, in a sentence; empty if the tokens to train on were not said."""
        if self.tokens is None:
            return ""
        best, about = self.cheapest, f"{self.tokens:.3g} tokens"
        if best is None:
            fastest = min(self.points, key=lambda p: p.hours(self.tokens or 0.0))
            if fastest.best is None:
                return f"no cluster has a plan: {fastest.reason}"
            return (
                f"none trains on {about} in {self.deadline_hours:,.0f} hours: the fastest, {fastest.cluster}, needs "
                f"{fastest.hours(self.tokens):,.1f}"
            )
        within = "" if self.deadline_hours is None else f" of {self.deadline_hours:,.0f}"
        cost = best.cost(self.tokens)
        paid = f"{best.hours(self.tokens) * best.devices:,.0f} device-hours" if cost is None else f"{cost:,.0f}"
        return f"cheapest for {about}: {best.cluster}, {best.hours(self.tokens):,.1f} hours{within}, {paid}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"points": [self._told(point) for point in self.points], "verdict": self.verdict}

    def _told(self, point: Point) -> dict[str, Any]:
        about: dict[str, Any] = {"cluster": str(point.cluster), "devices": point.devices, "reason": point.reason}
        if point.best is not None and self.tokens is not None:
            about |= {"hours": point.hours(self.tokens), "cost": point.cost(self.tokens)}
        return about if point.best is None else about | point.best.to_dict()


def parse_devices(text: str) -> tuple[int, ...]:
    """`8..1024` is 8, 16, 32 and so on up to 1024; `8,24,64` are these. Raises ConfigError."""
    try:
        if ".." in text:
            least, most = (int(part) for part in text.split(".."))
            counts = [least]
            while 0 < counts[-1] * 2 <= most:
                counts.append(counts[-1] * 2)
        else:
            counts = sorted({int(part) for part in text.split(",")})
            most = counts[-1]
        if counts[0] < 1 or most < counts[0]:
            raise ValueError
    except (ValueError, IndexError):
        raise ConfigError(f"devices {text!r}: needs a range as in 8..1024, or counts as in 8,24,64") from None
    return tuple(counts)


def scale(
    question: Question,
    counts: Iterable[int],
    tokens: float | None = None,
    deadline_hours: float | None = None,
    price: float | None = None,
    progress: Progress = lambda what, done, of: None,
) -> Scaling:
    """The best plan on each number of devices of the question's kind, in a quick part of its space.

    `price`: of a device and hour; by default what the device's kind says. Raises `ConfigError` for a mixed cluster, and
    for counts that are no whole nodes.
    """
    question.cluster.check_one_kind()
    counts, points = tuple(counts), []
    for i, count in enumerate(counts):
        progress("clusters", i, len(counts))
        q = replace(question, cluster=sized(question.cluster, count), space=quick(question.space))
        ranked = Search(q).run()
        best = ranked[0] if ranked else None
        points.append(Point(q.cluster, best, ranked.reason, q.device.price if price is None else price))
    progress("clusters", len(counts), len(counts))
    return Scaling(tuple(points), tokens, deadline_hours)


def sized(cluster: Cluster, devices: int) -> Cluster:
    """A cluster of the same kind: whole nodes, or a part of one. Raises ConfigError."""
    each = min(devices, cluster.devices_per_node)
    if devices % each:
        raise ConfigError(f"{devices} devices are no whole nodes of {each}: take a multiple of {each}")
    return replace(cluster, nodes=devices // each, devices_per_node=each)
