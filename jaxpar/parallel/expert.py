"""A mixture of experts spread over `expert`: tokens go to the devices of their experts, and come back.

Every device sends the pairs (token, expert) that it has for another one in a buffer of fixed size. What does not fit
goes in further rounds, so that nothing is dropped; how many there are is known at run time alone, and the same on all
devices of the group. With a capacity, pairs beyond it are dropped by rule, in the order of the tokens, and there is
one round. Source: Lepikhin et al., GShard (2021), for the exchange; Gale et al., MegaBlocks (2022), for no dropping.

Letters: N tokens, K experts of a token, D features, G devices of `expert`, C pairs from one device to another.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from jaxpar import collectives
from jaxpar.parallel.grouped import grouped_matmul, permuted, take, tile_count, tile_size, tiles

Matmul = Callable[[Array, Array], Array]
Experts = Callable[[Array, Matmul], Array]

# Of the pairs that each device would get if experts were equally liked.
BOUND = 1.25


@dataclass(frozen=True)
class Route:
    """`ctx.route` on a mesh: `devices` on `expert`; `capacity`: see `Capacity`, None: nothing is dropped."""

    devices: int = 1
    capacity: float | None = None

    def __call__(
        self,
        x: Float[Array, "N D"],
        expert: Int[Array, "N K"],
        weight: Float[Array, "N K"],
        experts: int,
        run: Experts,
    ) -> Float[Array, "N F"]:
        """The weighted sum, for every token, of what its experts make of it; see `Context.route`."""
        if self.capacity is not None:
            expert = _within_capacity(expert, experts, self.capacity)
        pairs = self._pairs(expert.size)
        run_tiles, weights = _open(run, x, self.devices * pairs, experts // self.devices)
        if self.devices == 1:
            return _on_one_device(run_tiles, x, expert, weight, experts, weights)
        exchange = _Exchange(self.devices, experts, pairs, run_tiles)
        out = exchange.one_round(0, x, weight, weights, expert)
        if self.capacity is None:
            out = out + _overflow(exchange, x, weight, weights, expert)
        return out.astype(x.dtype)

    def _pairs(self, pairs: int) -> int:
        """From one device to another in one round."""
        if self.devices == 1:
            return pairs
        share = BOUND if self.capacity is None else self.capacity
        return min(pairs, -(-int(pairs * share) // self.devices) + 1)


def _open(run: Experts, x: Array, rows: int, groups: int) -> tuple[Any, Any]:
    """-> `run` as a function of rows in tiles, each tile's group and what it closes over; and what that is: weights."""

    def run_tiles(rows: Array, group: Array) -> Array:
        return run(rows, lambda a, kernel: grouped_matmul(a, kernel, group))

    count = tile_count(rows, groups)
    shapes = ((count * tile_size(rows, groups), x.shape[1]), x.dtype), ((count,), jnp.int32)
    return jax.closure_convert(run_tiles, *collectives.vary([jnp.zeros(*shape) for shape in shapes]))


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


def _on_one_device(run: Any, x: Array, expert: Array, weight: Array, experts: int, weights: Any) -> Array:
    t = tiles(expert.reshape(-1), experts)
    token = jnp.where(t.source < expert.size, t.source // expert.shape[1], x.shape[0])
    y = run(permuted(x, token, t.place.reshape(expert.shape)), t.group, *weights)
    pairs = permuted(y, t.place, t.source[:, None])
    return _weighted(pairs.reshape(*expert.shape, -1), weight).astype(x.dtype)


@dataclass(frozen=True)
class _Exchange:
    """`pairs`: how many go from one device to another in a round. `run(rows, group of each tile, *weights)`."""

    devices: int
    experts: int
    pairs: int
    run: Any

    def rounds(self, expert: Array) -> Array:
        """How many rounds it takes, the same on all devices of `expert`."""
        dest = self._destination(expert.reshape(-1))
        sizes = jnp.sum(dest[:, None] == jnp.arange(self.devices)[None, :], axis=0)
        needed = -(-jnp.max(sizes) // self.pairs)
        return collectives.vary(lax.pmax(needed, "expert"))

    def one_round(self, n: Array | int, x: Array, weight: Array, weights: Any, expert: Array) -> Array:
        """float32[N, F]: the contributions of the pairs that go in round `n`."""
        pairs = expert.reshape(-1)
        dest = self._destination(pairs)
        slot = _rank(dest, self.devices + 1) - n * self.pairs
        mine = (dest < self.devices) & (slot >= 0) & (slot < self.pairs)
        sent, none = self.devices * self.pairs, pairs.shape[0]
        place = jnp.where(mine, dest * self.pairs + slot, sent)
        # The pair in each place of what is sent; no pair where it is not full.
        pair = jnp.full(sent + 1, none, jnp.int32).at[place].set(jnp.arange(none, dtype=jnp.int32))[:sent]
        own = self.experts // self.devices
        there = pair < none
        group = _trade(jnp.where(there, take(pairs, pair) % own, own).reshape(self.devices, -1)).reshape(-1)
        token = jnp.where(there, pair // expert.shape[1], x.shape[0])
        rows = _trade(permuted(x, token, place.reshape(expert.shape)).reshape(self.devices, self.pairs, -1))
        t = tiles(group, own)
        y = self.run(permuted(rows.reshape(sent, -1), t.source, t.place[:, None]), t.group, *weights)
        home = _trade(permuted(y, t.place, t.source[:, None]).reshape(self.devices, self.pairs, -1))
        y_NKF = permuted(home.reshape(sent, -1), place, pair[:, None]).reshape(*expert.shape, -1)
        return _weighted(y_NKF, weight)

    def _destination(self, pairs: Array) -> Array:
        """The device of each pair's expert; `devices`, which is none, for a pair of no expert."""
        return jnp.minimum(pairs // (self.experts // self.devices), self.devices)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _overflow(exchange: _Exchange, x: Array, weight: Array, weights: Any, expert: Array) -> Array:
    """What does not fit into the first round, in as many more as it takes: usually none."""
    shape = jax.eval_shape(lambda: exchange.one_round(1, x, weight, weights, expert))
    start = collectives.vary((jnp.ones((), jnp.int32), jnp.zeros(shape.shape, shape.dtype)))
    rounds = exchange.rounds(expert)

    def more(carry: Any) -> Any:
        n, out = carry
        return collectives.vary((n + 1, out + exchange.one_round(n, x, weight, weights, expert)))

    return lax.while_loop(lambda carry: carry[0] < rounds, more, start)[1]


def _overflow_fwd(exchange: _Exchange, x: Array, weight: Array, weights: Any, expert: Array) -> Any:
    return _overflow(exchange, x, weight, weights, expert), (x, weight, weights, expert)


def _overflow_bwd(exchange: _Exchange, saved: Any, d_out: Array) -> Any:
    x, weight, weights, expert = saved
    start = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), (x, weight, weights))
    rounds = exchange.rounds(expert)

    def more(carry: Any) -> Any:
        n, total = carry
        _, vjp = jax.vjp(lambda x, w, ws: exchange.one_round(n, x, w, ws, expert), x, weight, weights)
        return collectives.vary((n + 1, jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, vjp(d_out))))

    carry = collectives.vary((jnp.ones((), jnp.int32), start))
    _, total = lax.while_loop(lambda carry: carry[0] < rounds, more, carry)
    return *jax.tree.map(lambda t, a: t.astype(a.dtype), total, (x, weight, weights)), None


_overflow.defvjp(_overflow_fwd, _overflow_bwd)


def _trade(x: Array) -> Array:
    """[G, ...]: part g to device g, and what they send in its place; its own transpose."""
    return _trade_floats(x) if jnp.issubdtype(x.dtype, jnp.floating) else _all_to_all(x)


@jax.custom_vjp
def _trade_floats(x: Array) -> Array:
    return _all_to_all(x)


_trade_floats.defvjp(lambda x: (_all_to_all(x), None), lambda _, g: (_all_to_all(g),))


def _all_to_all(x: Array) -> Array:
    def trade(x: Array) -> Array:
        return lax.all_to_all(x, "expert", 0, 0, tiled=True)

    return collectives.on_tensor_shards(trade, P(), P())(x)
