"""The rows of a schedule's table as one stage reads them."""

from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxpar import collectives
from jaxpar.pipeline.table import Segment, Table


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Row:
    """One tick: by slot the fields of `Played` of this stage, those of the ends, and by slot whether any stage plays
    it."""

    slots: tuple[dict[str, Array], ...]
    ends: dict[str, Array]
    played: tuple[Array, ...]


def stage_rows(table: Table, segment: Segment) -> Row:
    """This stage's rows of a segment, with the ticks in front."""

    def own(column: np.ndarray) -> Array:
        column = column[segment.start : segment.stop]
        if (column == column[:, :1]).all():
            return jnp.asarray(column[:, 0])
        return lax.dynamic_index_in_dim(jnp.asarray(column), collectives.axis_index("pipe"), 1, keepdims=False)

    def same(column: np.ndarray) -> Array:
        return jnp.asarray(column[segment.start : segment.stop])

    slots = tuple({f.name: own(getattr(s, f.name)) for f in fields(s)} for s in table.slots)
    ends = {f.name: same(getattr(table.ends, f.name)) for f in fields(table.ends)}
    return Row(slots, ends, tuple(same(table.played(i)) for i in range(len(slots))))
