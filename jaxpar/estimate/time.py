"""How long a training step takes: physics of the parts, put together as a system runs them."""

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import log, sqrt

from jaxpar.estimate.constants import Constants
from jaxpar.estimate.data_time import accumulate_time, data_time, optimizer_time
from jaxpar.estimate.devices import Device
from jaxpar.estimate.layer_time import LayerTime, layer_time
from jaxpar.estimate.layout import Layout
from jaxpar.estimate.links import Group, Links, place
from jaxpar.estimate.matmul import Rates
from jaxpar.estimate.pipe_time import independent, lockstep
from jaxpar.estimate.system import JAXPAR, System
from jaxpar.estimate.work import Work

# Bytes moved for each logit by softmax, loss and their gradient, fused and not.
_LOGIT_BYTES = {True: 12, False: 20}
DEFAULT = Constants()


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on one device; the parts follow one another and add up to `total`.

    Attributes:
      forward, backward, recompute: compute of the layers this device holds, all microbatches.
      head: embedding, head and loss, a stage's share.
      tensor, seq, expert, pipe, data: communication of each mesh axis that compute does not hide.
      contention: what compute loses to the communication that it hides.
      bubble: waiting for other stages, and for the slowest of them.
      optimizer, host: microbatches' gradients added up and the update, and what a step does once.
      spread: waiting for the slowest of all devices.
      in_flight: chunks of layers whose activations the fullest stage holds at once.
    """

    forward: float
    backward: float
    recompute: float
    head: float
    tensor: float
    seq: float
    expert: float
    pipe: float
    data: float
    contention: float
    bubble: float
    optimizer: float
    host: float
    spread: float
    in_flight: int = 1

    @property
    def parts(self) -> dict[str, float]:
        """By name, in seconds, in the order above."""
        return {name: getattr(self, name) for name in _PARTS}

    @cached_property
    def total(self) -> float:
        return sum(self.parts.values())


_PARTS = tuple(f.name for f in fields(StepTime) if f.name != "in_flight")


def estimate(
    work: Work,
    layout: Layout,
    device: Device,
    system: System = JAXPAR,
    constants: Constants = DEFAULT,
) -> StepTime:
    """The time of a step of `work` laid out so on devices of one kind (of a mixed cluster: `Cluster.pace`).

    Nothing is compiled, and nothing checked: a layout that cannot be run gets a time too.
    """
    return Estimator(work, device, system, constants).step(layout)


@dataclass(frozen=True)
class Estimator:
    """`estimate` of many layouts: what several of them share is computed once."""

    work: Work
    device: Device
    system: System = JAXPAR
    constants: Constants = DEFAULT
    _known: dict[tuple, tuple[LayerTime, float]] = field(default_factory=dict, repr=False, compare=False)
    _placed: dict[tuple, dict[str, Group]] = field(default_factory=dict, repr=False, compare=False)

    def step(self, layout: Layout) -> StepTime:
        """See `estimate`."""
        work, system, constants = self.work, self.system, self.constants
        rates, links = Rates(self.device, constants), Links(self.device, constants)
        groups = self._groups(layout)
        layer, head = self._layer_and_head(layout, rates, links, groups)
        stacks = [n for _, n in work.layers]
        played = (lockstep if system.lockstep else independent)(layout, stacks, layer, head)
        data = data_time(work, layout, system, links, groups["replicas"], layer)
        pipe = _pipe(work, layout, system, links, groups["pipe"])
        mine = layer.times(layout.microbatches * work.depth / layout.pipe)
        update = accumulate_time(work, layout, system, rates) + optimizer_time(work, layout, rates)
        step = StepTime(
            mine.forward, mine.backward, mine.recompute, layout.microbatches * head / layout.pipe,
            mine.tensor, mine.seq, mine.expert, pipe, data.exposed, mine.contention + data.contention,
            max(0.0, played.total - played.work), update, constants.step_seconds, 0.0, played.in_flight,
        )  # fmt: skip
        slowest = constants.spread * sqrt(2.0 * log(max(1, layout.devices)))
        return replace(step, spread=slowest * (step.total - step.host))

    def _groups(self, layout: Layout) -> dict[str, Group]:
        key = (layout.tensor, layout.seq, layout.data, layout.pipe, layout.expert, layout.expert_tensor)
        if (found := self._placed.get(key)) is None:
            found = self._placed[key] = _groups(layout, self.device)
        return found

    def _layer_and_head(
        self, layout: Layout, rates: Rates, links: Links, groups: dict[str, Group]
    ) -> tuple[LayerTime, float]:
        """Of one microbatch. The key holds all of a layout that they depend on."""
        key = (
            layout.tensor, layout.seq, layout.expert, layout.expert_tensor, layout.rows, layout.length,
            layout.precision, layout.remat, layout.split_norms, layout.attention, layout.capacity,
        )  # fmt: skip
        if (found := self._known.get(key)) is None:
            shared = (self.work, layout, self.system, rates, links, groups)
            found = self._known[key] = (_mean_layer(*shared), _head(*shared))
        return found


def _groups(layout: Layout, device: Device) -> dict[str, Group]:
    """Innermost first, as `jaxpar.mesh` and Megatron both order them."""
    sizes = {"tensor": layout.tensor, "seq": layout.seq, "data": layout.data, "pipe": layout.pipe}
    groups = place(sizes, device.node)
    wide = place({"tensor": layout.tensor, "replicas": layout.seq * layout.data}, device.node)
    near = {"cut": layout.expert_tensor, "expert": layout.expert}
    return {**groups, "replicas": wide["replicas"], "expert": place(near, device.node)["expert"]}


def _mean_layer(
    work: Work, layout: Layout, system: System, rates: Rates, links: Links, groups: dict[str, Group]
) -> LayerTime:
    total = LayerTime()
    for layer, n in work.layers:
        total = total + layer_time(layer, layout, system, rates, links, groups).times(n / work.depth)
    return total


def _head(work: Work, layout: Layout, system: System, rates: Rates, links: Links, groups: dict[str, Group]) -> float:
    """Forward and backward of the head and its loss on one microbatch, with the embedding's lookup."""
    precision = "float32" if layout.precision == "float32" else "bfloat16"
    tokens, h, v = layout.tokens, work.hidden, work.vocab / layout.tensor
    products = rates.matmul(tokens, h, v, precision) + rates.matmul(tokens, v, h, precision)
    products += rates.matmul(h, tokens, v, precision)
    moved = tokens * (v * _LOGIT_BYTES[system.fused] + 6 * h * 2)
    return products + rates.moved(moved) + 4 * links.reduce(tokens * h * 2, groups["tensor"]) / 2


def _pipe(work: Work, layout: Layout, system: System, links: Links, group: Group) -> float:
    """Messages between stages: each device of `tensor` sends its own part. Where compute hides them, only those of the
    filling and draining pipeline show."""
    if group.size == 1:
        return 0.0
    width = 4 if layout.precision == "float32" else 2
    activation = layout.tokens * work.hidden * width
    one = 2 * links.send(activation / layout.tensor, group)
    times = (layout.pipe - 1) if system.overlap_pipe else layout.microbatches * layout.chunks
    shared = 0.0
    if system.lockstep:
        # Embedding and head on all stages: four sums of an activation over `pipe`.
        shared = 4 * layout.microbatches * links.reduce(activation, group)
    return times * one + shared
