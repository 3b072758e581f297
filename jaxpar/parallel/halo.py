"""A halo: positions at hand with those of their neighbours attached, for layers that mix positions close to each other.

What a device of `seq` holds are one or two stretches of positions that follow each other (two in zigzag order, where no
group of Ulysses takes one each). Each is extended at its ends by its neighbours in the row, wherever these lie. All of
it is linear, so that jax's own gradient is the same sends backward, and keeps nothing.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxpar.errors import ModelError, PlanError
from jaxpar.parallel.sequence import SequenceLayout

Routes = dict[tuple[int, int], list[tuple[int, int]]]


@dataclass(frozen=True)
class Halo:
    """`ctx.halo` on this mesh. A value, so that contexts of one plan are of one type.

    `sequence`: None where rows are whole; `diverges`: stages of a pipeline differ in what they play.
    """

    sequence: SequenceLayout | None = None
    diverges: bool = False

    def __call__(self, x: Array, before: int, after: int) -> Array:
        """Any dtype[b, t, ...] -> [b * stretches, before + t / stretches + after, ...]. Raises `PlanError`."""
        if before < 0 or after < 0:
            raise ModelError(f"halo(before={before}, after={after}): needs numbers of positions, from 0 on")
        if self.sequence is None:
            return jnp.pad(x, [(0, 0), (before, after)] + [(0, 0)] * (x.ndim - 2))
        rows, positions = x.shape[:2]
        stretches = self.sequence.stretches
        length = positions // stretches
        self._check(self.sequence, before, after, length)
        x = x.reshape(rows, stretches, length, *x.shape[2:])
        front = self._from_neighbours(x[:, :, length - before :], length, 1)
        back = self._from_neighbours(x[:, :, :after], length, -1)
        return jnp.concatenate([front, x, back], axis=2).reshape(rows * stretches, -1, *x.shape[3:])

    def _check(self, sequence: SequenceLayout, before: int, after: int, length: int) -> None:
        if max(before, after) > length:
            raise PlanError(
                f"halo(before={before}, after={after}) reaches beyond the neighbours: with seq={sequence.devices} and "
                f"this attention positions lie in stretches of {length}; give longer rows, or fewer devices to seq"
            )
        if self.diverges:
            raise PlanError(
                "fill=True lets stages differ in what they play, and the sends of ctx.halo over seq must not; choose "
                "fill=False"
            )

    def _from_neighbours(self, edges: Array, length: int, step: int) -> Array:
        """[b, stretch, w, ...] -> the same of the stretches that are `step` on in the row; zeros where none is."""
        if edges.shape[2] == 0:
            return edges
        assert self.sequence is not None
        stretches = range(self.sequence.stretches)
        routes = _routes(self.sequence, length, step)
        arrived = [
            sum(self._send(edges[:, here], routes[here, there]) for here in stretches if (here, there) in routes)
            for there in stretches
        ]
        return jnp.stack(arrived, axis=1)

    def _send(self, x: Array, pairs: list[tuple[int, int]]) -> Array:
        """Zeros on devices that nobody sends to; a device that alone has both neighbours does not send."""
        assert self.sequence is not None
        if any(source != target for source, target in pairs):
            return lax.ppermute(x, "seq", pairs)
        own = np.isin(np.arange(self.sequence.devices), [target for _, target in pairs])
        return jnp.where(jnp.asarray(own)[lax.axis_index("seq")], x, jnp.zeros_like(x))


def _routes(sequence: SequenceLayout, length: int, step: int) -> Routes:
    """(stretch there, stretch here) -> (from device, to device), for stretches that follow each other in the row."""
    starts = sequence.order(sequence.devices * sequence.stretches * length)[:, ::length]
    holder = {int(start): place for place, start in np.ndenumerate(starts)}
    found: Routes = {}
    for (device, stretch), start in np.ndenumerate(starts):
        if source := holder.get(int(start) - step * length):
            found.setdefault((source[1], stretch), []).append((source[0], device))
    return found
