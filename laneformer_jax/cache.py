"""Key/value caches: every layer is a ring, of `sliding_window` slots or of as many as the context asks for.

A token at position p lives in slot p mod S. Which position a slot holds follows from the number of tokens seen, so
nothing but keys and values is stored.
"""

import dataclasses

import jax
import jax.numpy as jnp

from laneformer_jax.array_types import Array, Bool, Float, Int
from laneformer_jax.config import LaneformerConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """One layer's rotated keys, stored [E, S] so that no kernel has to transpose them, and its values."""

    keys: Float[Array, "B L K E S"]
    values: Float[Array, "B L K S E"]

    @property
    def slots(self) -> int:
        return self.values.shape[3]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """All layers' caches and the number of tokens that each row has seen."""

    layers: tuple[LayerCache, ...]
    length: Int[Array, "B"]


def slots(config: LaneformerConfig, layer: int, capacity: int) -> int:
    """Slots of one layer's ring when `capacity` tokens must be reachable."""
    return min(config.window(layer) or capacity, capacity)


def init_cache(config: LaneformerConfig, batch: int, capacity: int, dtype: jnp.dtype) -> Cache:
    """An empty cache of all lanes for `batch` rows and `capacity` tokens a row."""
    heads = config.num_kv_heads // config.num_lanes

    def layer_cache(layer: int) -> LayerCache:
        size = slots(config, layer, capacity)
        shape = (batch, config.num_lanes, heads)
        keys = jnp.zeros((*shape, config.head_dim, size), dtype)
        return LayerCache(keys, jnp.zeros((*shape, size, config.head_dim), dtype))

    return Cache(tuple(layer_cache(i) for i in range(config.num_layers)), jnp.zeros((batch,), jnp.int32))


def cache_bytes(config: LaneformerConfig, batch: int, capacity: int, dtype: jnp.dtype) -> int:
    """Bytes of keys and values that `init_cache` takes."""
    total = sum(slots(config, layer, capacity) for layer in range(config.num_layers))
    return 2 * batch * config.num_kv_heads * config.head_dim * total * jnp.dtype(dtype).itemsize


def slot_positions(length: Int[Array, "B"], size: int) -> Int[Array, "B S"]:
    """Position held by each slot once `length` tokens were written; negative where none was yet."""
    newest = length[:, None] - 1
    return newest - jnp.mod(newest - jnp.arange(size, dtype=jnp.int32), size)


def write(
    cache: LayerCache, keys: Float[Array, "B T L K E"], values: Array, positions: Int[Array, "B T"]
) -> LayerCache:
    """The cache with each row's tokens in their slots; position -1 marks padding, which is written nowhere.

    Of more tokens than there are slots, the last ones are kept.
    """
    size = cache.slots
    last = jnp.max(positions, axis=1, keepdims=True)
    kept = (positions >= 0) & (positions > last - size)
    target = jnp.where(kept, positions % size, size)
    rows = jnp.arange(positions.shape[0])[:, None]
    return LayerCache(
        cache.keys.at[rows, :, :, :, target].set(keys, mode="drop"),
        cache.values.at[rows, :, :, target].set(values, mode="drop"),
    )


def visible(queries: Int[Array, "B T"], keys: Int[Array, "B S"], window: int | None) -> Bool[Array, "B T S"]:
    """Which keys a query attends to: existing, not later than itself, and among the last `window` tokens."""
    queries, keys = queries[:, :, None], keys[:, None, :]
    causal = (keys >= 0) & (keys <= queries)
    return causal if window is None else causal & (keys > queries - window)
