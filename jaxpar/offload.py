"""Host memory: what a device does not need for a while waits in the host's pinned memory, and is fetched for its use.

Sources: Rajbhandari et al., ZeRO-Infinity (2021); jax's memory spaces. XLA moves what is put elsewhere while other work
goes on, as far as nothing waits for it.
"""

from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding

# Bytes of an array. What is smaller stays: a copy's latency is not worth its bytes.
SMALL = 4096

_HOST = "pinned_host"


def worth_moving(x: Any) -> bool:
    """Whether an array, or an abstract one, is large enough. Random keys stay."""
    return not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) and x.size * x.dtype.itemsize >= SMALL


def to_host(x: Array) -> Array:
    """`x` in host memory; inside jit."""
    return jax.device_put(x, jax.memory.Space.Host)


def to_device(x: Array) -> Array:
    """The inverse of `to_host`; inside jit."""
    return jax.device_put(x, jax.memory.Space.Device)


def on_host(sharding: NamedSharding) -> NamedSharding:
    """The same sharding, in host memory."""
    return sharding.with_memory_kind(_HOST)


def is_on_host(sharding: NamedSharding) -> bool:
    return sharding.memory_kind == _HOST
