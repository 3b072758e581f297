"""A mixture of experts spread over `expert`: tokens go to the devices of their experts, and come back.

Every device sends the pairs (token, expert) that it has for another one in a buffer of fixed size. What does not fit
goes in further rounds, so that nothing is dropped; how many there are is known at run time alone, and the same on all
devices of the group. With a capacity, pairs beyond it are dropped by rule, in the order of the tokens, and there is
one round. The tokens go in two halves, so that one half can travel while experts work on the other. Source: Lepikhin et
al., GShard (2021), for the exchange; Gale et al., MegaBlocks (2022), for no dropping.

Letters: N tokens, K experts of a token, D and F features, G devices of `expert`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from jaxpar import collectives
from jaxpar.collectives import vary_nested
from jaxpar.parallel.expert_tensor import on_own_features
from jaxpar.parallel.expert_trade import Trade, all_to_all
from jaxpar.parallel.grouped import grouped_matmul, permuted, take, tiles

Kernel = Callable[[Array], Array]
Expert = Callable[..., Array]
Counts = dict[str, Float[Array, ""]]

# Of the pairs that each device would get if experts were equally liked.
BOUND = 1.25


@dataclass(frozen=True)
class Route:
    """`ctx.route`; `capacity`: see `Capacity`, None: nothing is dropped; `pallas`: by the kernels for Hopper;
    `ragged`: see `expert_trade`."""

    capacity: float | None = None
    pallas: bool = False
    ragged: bool = False

    def __call__(
        self,
        x: Float[Array, "N D"],
        expert: Int[Array, "N K"],
        weight: Float[Array, "N K"],
        run: Expert,
        kernels: Sequence[Array],
        dims: Sequence[int | None],
        devices: int,
    ) -> tuple[Float[Array, "N F"], Counts]:
        """The weighted sum, for every token, of what its experts make of it, and counts; see `Context.route`.

        `kernels`: this device's, `[experts, in, out]`, of which dim `dims` is split over `tensor`; over how many
        `devices` of `expert` they are spread. `expert` is the number of experts or more for a pair of none.
        """
        experts = kernels[0].shape[0] * devices
        kept = expert if self.capacity is None else _within_capacity(expert, experts, self.capacity)
        exchange = _Exchange(devices, experts, run, self.capacity, self.pallas, self.ragged)
        out = on_own_features(exchange, run, dims)(x, weight, kept, *kernels)
        return out.astype(x.dtype), self._counts(exchange, expert, kept)

    def _counts(self, exchange: "_Exchange", expert: Array, kept: Array) -> Counts:
        wanted, routed = (jnp.sum(e < exchange.experts, dtype=jnp.float32) for e in (expert, kept))
        return {"routed": routed, "dropped": wanted - routed, "overflow": exchange.late(kept)}


def _within_capacity(expert: Array, experts: int, capacity: float) -> Array:
    """`experts`, which is none, for pairs past `capacity` times an expert's equal share of this device's pairs."""
    pairs = expert.reshape(-1)
    most = -(-int(capacity * pairs.shape[0]) // experts)
    return jnp.where(_rank(pairs, experts + 1) < most, pairs, experts).reshape(expert.shape)


def _rank(group: Int[Array, " n"], groups: int) -> Int[Array, " n"]:
    """How many of the same group come before each."""
    order = jnp.argsort(group, stable=True)
    sizes = jnp.sum(group[:, None] == jnp.arange(groups)[None, :], axis=0)
    first = jnp.cumsum(sizes) - sizes
    place = jnp.zeros_like(group).at[order].set(jnp.arange(group.shape[0], dtype=group.dtype))
    return place - first[group].astype(group.dtype)


def _weighted(y: Float[Array, "N K F"], weight: Float[Array, "N K"]) -> Float[Array, "N F"]:
    return jnp.einsum("nkf,nk->nf", y, weight, preferred_element_type=jnp.float32)


@dataclass(frozen=True)
class _Exchange:
    """Calling it gives float32[N, F]; `run(rows, *kernels)` is what an expert does, see `Context.route`."""

    devices: int
    experts: int
    run: Expert
    capacity: float | None
    pallas: bool
    ragged: bool

    def __call__(self, x: Array, weight: Array, expert: Array, *kernels: Array) -> Array:
        if self.devices == 1:
            return self._on_one_device(x, weight, expert, kernels)
        halves = self._halves(x, weight, expert)
        sent = [self._send(0, x, expert, self._pairs(expert.size)) for x, _, expert in halves]
        found = []
        for i, (half, journey) in enumerate(zip(halves, sent, strict=True)):
            y = self._work(journey, kernels)
            if i + 1 < len(sent):
                # The next half is worked on when this one is done, so that this one goes home meanwhile; the same, the
                # other way round, backward.
                y, rows = lax.optimization_barrier((y, sent[i + 1].rows))
                sent[i + 1] = replace(sent[i + 1], rows=rows)
            found.append(self._home(y, journey, half[1]))
        out = jnp.concatenate(found)
        if self.capacity is not None:
            return out
        # Of both halves together: the program is the shorter for it.
        return out + _overflow(self, x, weight, kernels, self._left(expert))

    def late(self, expert: Array) -> Float[Array, ""]:
        """How many pairs go in further rounds than the first."""
        if self.devices == 1 or self.capacity is not None:
            return collectives.vary(jnp.zeros((), jnp.float32))
        late = [jnp.maximum(self._sizes(e) - self._pairs(e.size), 0) for (e,) in self._halves(expert)]
        return jnp.sum(jnp.stack(late), dtype=jnp.float32)

    def _halves(self, *arrays: Array) -> list[tuple[Array, ...]]:
        parts = 1 if arrays[0].shape[0] % 2 else 2
        return list(zip(*(jnp.split(a, parts) for a in arrays), strict=True))

    def _pairs(self, pairs: int) -> int:
        """Of so many, those that go from one device to another in one round."""
        share = BOUND if self.capacity is None else self.capacity
        return min(pairs, -(-int(pairs * share) // self.devices) + 1)

    def _on_one_device(self, x: Array, weight: Array, expert: Array, kernels: Sequence[Array]) -> Array:
        t = tiles(expert.reshape(-1), self.experts, self.pallas)
        token = jnp.where(t.source < expert.size, t.source // expert.shape[1], x.shape[0])
        y = self._run(permuted(x, token, t.place.reshape(expert.shape)), t.group, kernels)
        pairs = permuted(y, t.place, t.source[:, None])
        return _weighted(pairs.reshape(*expert.shape, -1), weight)

    def _run(self, rows: Array, group: Array, kernels: Sequence[Array]) -> Array:
        """`rows` in tiles, each of one group."""
        times = functools.partial(_times, group=group, pallas=self.pallas)
        return self.run(rows, *[functools.partial(times, kernel=kernel) for kernel in kernels])

    def _left(self, expert: Array) -> Array:
        """`experts`, which is none, for the pairs that went in the first round."""
        left = []
        for (half,) in self._halves(expert):
            dest = self._destination(half.reshape(-1))
            went = _rank(dest, self.devices + 1) < self._pairs(half.size)
            left.append(jnp.where(went.reshape(half.shape), self.experts, half))
        return jnp.concatenate(left)

    def rounds(self, expert: Array) -> Array:
        """How many further rounds it takes, the same on all devices of `expert`."""
        needed = -(-jnp.max(self._sizes(expert)) // self._later_pairs(expert))
        return vary_nested(lax.pmax(needed, "expert"))

    def _later_pairs(self, expert: Array) -> int:
        """In a further round, of all tokens, as many as in the first of a half."""
        return self._pairs(expert.size // len(self._halves(expert)))

    def one_round(
        self, n: Array | int, x: Array, weight: Array, kernels: Sequence[Array], expert: Array
    ) -> Float[Array, "N F"]:
        """The contributions of the pairs that go in round `n`, float32."""
        journey = self._send(n, x, expert, self._later_pairs(expert))
        return self._home(self._work(journey, kernels), journey, weight)

    def _send(self, n: Array | int, x: Array, expert: Array, most: int) -> "_Journey":
        """Pairs that go in round `n`, to the devices of their experts; to each at most so many."""
        pairs = expert.reshape(-1)
        dest = self._destination(pairs)
        slot = _rank(dest, self.devices + 1) - n * most
        mine = (dest < self.devices) & (slot >= 0) & (slot < most)
        sent, none = self.devices * most, pairs.shape[0]
        place = jnp.where(mine, dest * most + slot, sent)
        # The pair in each place of what is sent; no pair where it is not full.
        pair = jnp.full(sent + 1, none, jnp.int32).at[place].set(jnp.arange(none, dtype=jnp.int32))[:sent]
        own = self.experts // self.devices
        there = pair < none
        group = all_to_all(jnp.where(there, take(pairs, pair) % own, own).reshape(self.devices, -1))
        token = jnp.where(there, pair // expert.shape[1], x.shape[0])
        trade = Trade(_filled(there.reshape(group.shape)), _filled(group < own)) if self.ragged else Trade()
        rows = trade(permuted(x, token, place.reshape(expert.shape)).reshape(self.devices, most, -1))
        return _Journey(rows, group.reshape(-1), place, pair, trade.back)

    def _work(self, journey: "_Journey", kernels: Sequence[Array]) -> Float[Array, "G C F"]:
        """What this device's experts make of what has come."""
        devices, most, _ = journey.rows.shape
        t = tiles(journey.group, self.experts // self.devices, self.pallas)
        rows = permuted(journey.rows.reshape(devices * most, -1), t.source, t.place[:, None])
        y = self._run(rows, t.group, kernels)
        return permuted(y, t.place, t.source[:, None]).reshape(devices, most, -1)

    def _home(self, y: Float[Array, "G C F"], journey: "_Journey", weight: Float[Array, "N K"]) -> Float[Array, "N F"]:
        """Back to the tokens, and added up by weight."""
        home = journey.home(y).reshape(-1, y.shape[-1])
        y_NKF = permuted(home, journey.place, journey.pair[:, None]).reshape(*weight.shape, -1)
        return _weighted(y_NKF, weight)

    def _sizes(self, expert: Array) -> Int[Array, " G"]:
        """How many pairs are for each device."""
        dest = self._destination(expert.reshape(-1))
        return jnp.sum(dest[:, None] == jnp.arange(self.devices)[None, :], axis=0)

    def _destination(self, pairs: Array) -> Array:
        """The device of each pair's expert; `devices`, which is none, for a pair of no expert."""
        return jnp.minimum(pairs // (self.experts // self.devices), self.devices)


@dataclass(frozen=True)
class _Journey:
    """What one device has got in a round, and where it sent what.

    rows: [G, C, D], C from each device; group: int32[G * C], the own expert of each, the number of them for none.
    place: int32[N * K], where each of this device's pairs went; pair: int32[G * C], the inverse. home: the way back.
    """

    rows: Float[Array, "G C D"]
    group: Int[Array, " GC"]
    place: Int[Array, " NK"]
    pair: Int[Array, " GC"]
    home: Trade


def _filled(there: Bool[Array, "G C"]) -> Int[Array, " G"]:
    return jnp.sum(there, axis=1, dtype=jnp.int32)


def _times(rows: Array, *, kernel: Array, group: Array, pallas: bool) -> Array:
    return grouped_matmul(rows, kernel, group, pallas)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _overflow(exchange: _Exchange, x: Array, weight: Array, kernels: Any, expert: Array) -> Array:
    """What does not fit into the first round, in as many more as it takes: usually none."""
    shape = jax.eval_shape(lambda: exchange.one_round(0, x, weight, kernels, expert))
    start = vary_nested((jnp.zeros((), jnp.int32), jnp.zeros(shape.shape, shape.dtype)))
    rounds = exchange.rounds(expert)

    def more(carry: Any) -> Any:
        n, out = carry
        return vary_nested((n + 1, out + exchange.one_round(n, x, weight, kernels, expert)))

    return lax.while_loop(lambda carry: carry[0] < rounds, more, start)[1]


def _overflow_fwd(exchange: _Exchange, x: Array, weight: Array, kernels: Any, expert: Array) -> Any:
    return _overflow(exchange, x, weight, kernels, expert), (x, weight, kernels, expert)


def _overflow_bwd(exchange: _Exchange, saved: Any, d_out: Array) -> Any:
    x, weight, kernels, expert = saved
    start = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), (x, weight, kernels))
    rounds = exchange.rounds(expert)

    def more(carry: Any) -> Any:
        n, total = carry
        _, vjp = jax.vjp(lambda x, w, ks: exchange.one_round(n, x, w, ks, expert), x, weight, kernels)
        return vary_nested((n + 1, jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, vjp(d_out))))

    carry = vary_nested((jnp.zeros((), jnp.int32), start))
    _, total = lax.while_loop(lambda carry: carry[0] < rounds, more, carry)
    return *jax.tree.map(lambda t, a: t.astype(a.dtype), total, (x, weight, kernels)), None


_overflow.defvjp(_overflow_fwd, _overflow_bwd)
