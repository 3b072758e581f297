"""Ulysses: the members of a group trade positions for heads, and back (Jacobs et al., DeepSpeed-Ulysses, 2023).

A device then has some heads on all positions of its group, and attends to them like one device, or in a ring of groups.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax

from jaxpar.errors import PlanError
from jaxpar.parallel.sequence import SequenceLayout


@dataclass(frozen=True)
class Ulysses:
    layout: SequenceLayout

    def to_heads(self, x_BTHD):
        """[b, positions of a device, heads, d] -> [b, positions of the group, heads of a device, d]."""
        return self._trade(x_BTHD, split=2, join=1)

    def to_positions(self, x_BTHD):
        """The inverse."""
        return self._trade(x_BTHD, split=1, join=2)

    def segments(self, x_BT):
        """Those of the group's positions."""
        if self.layout.members == 1 or x_BT is None:
            return x_BT
        return lax.all_gather(x_BT, "seq", axis=1, tiled=True, axis_index_groups=self._groups)

    def _trade(self, x, split: int, join: int):
        if self.layout.members == 1:
            return x
        return lax.all_to_all(x, "seq", split, join, tiled=True, axis_index_groups=self._groups)

    @property
    def _groups(self) -> list[list[int]] | None:
        """None: all devices of `seq` are one group."""
        members, groups = self.layout.members, self.layout.groups
        return None if groups == 1 else [[g * members + i for i in range(members)] for g in range(groups)]


def share_heads(q, k, v, members: int, tensor: int):
    """Heads that divide over `members` x `tensor` devices: q, k, v, and how many of the query heads are real.

    Few key heads are repeated, each for the query heads that read it; where that does not divide either, key and query
    heads are filled up with zeros in the same ratio, which `tensor` cannot have: it would move heads between devices.
    Raises `PlanError` with what would divide.
    """
    heads, kv_heads, shards = q.shape[2], k.shape[2], members * tensor
    if heads % shards == 0 and kv_heads % shards == 0:
        return q, k, v, heads
    if heads % shards == 0 and shards % kv_heads == 0:
        return q, *(_repeated(x, shards // kv_heads) for x in (k, v)), heads
    if problems := head_problems(heads, kv_heads, members, tensor):
        raise PlanError(problems)
    more = -kv_heads % shards
    filled = [
        jnp.pad(x, ((0, 0), (0, 0), (0, n), (0, 0))) for x, n in ((q, more * (heads // kv_heads)), (k, more), (v, more))
    ]
    return *filled, heads


def head_problems(heads: int, kv_heads: int, members: int, tensor: int) -> list[str]:
    """Why so many heads cannot be shared by `members` x `tensor` devices."""
    if tensor == 1 or (heads % (members * tensor) == 0 and _divides(kv_heads, members * tensor)):
        return []
    legal = [n for n in range(1, heads // tensor + 1) if heads % (n * tensor) == 0 and _divides(kv_heads, n * tensor)]
    return [
        f"ulysses over {members} devices: {heads} query and {kv_heads} key heads do not divide over ulysses x "
        f"tensor = {members} x {tensor}; choose ulysses among {legal} with tensor={tensor}, or attention='ring'"
    ]


def _divides(kv_heads: int, shards: int) -> bool:
    return kv_heads % shards == 0 or shards % kv_heads == 0


def _repeated(x, times: int):
    """In float32 and back: the values are the same, and gradients of a shared head are summed in float32."""
    return jnp.repeat(x.astype(jnp.float32), times, axis=2).astype(x.dtype)
