"""The choice of the next token, on logits that may be split over devices by vocabulary.

Devices exchange winners and sums, never logits. Ties go to the lowest id, and the noise of a row depends on its key
alone, so that a row gives the same tokens by itself, in a batch and on a mesh.
"""

import dataclasses
import math
from collections.abc import Callable
from numbers import Integral, Real

import jax
import jax.numpy as jnp

from laneformer_jax.array_types import Array, Bool, Float, Int
from laneformer_jax.errors import UsageError
from laneformer_jax.lanes import ALL_HELD, Lanes


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is chosen: temperature first, then top-k, top-p and min-p, each on what the one before has left.

    Attributes:
        temperature: 0 takes the most likely token.
        top_k: keep the k most likely tokens.
        top_p: keep the fewest most likely tokens whose probability reaches p; at least one.
        min_p: keep tokens at least min_p times as likely as the most likely one.

    Raises:
        UsageError: a value is out of its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self):
        if not (isinstance(self.temperature, Real) and 0 <= self.temperature < math.inf):
            raise UsageError(f"temperature must be 0 or a positive number, got {self.temperature!r}")
        if self.top_k is not None and not (isinstance(self.top_k, Integral) and self.top_k >= 1):
            raise UsageError(f"top_k must be a whole number of at least 1, got {self.top_k!r}")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, Real) and 0 <= float(value) <= 1):
                raise UsageError(f"{name} must lie between 0 and 1, got {value!r}")

    def filters(self) -> "Filters":
        """Which filters are compiled in."""
        if self.temperature == 0:
            return Filters(greedy=True)
        return Filters(
            top_k=self.top_k is not None,
            top_p=self.top_p is not None and self.top_p < 1,
            min_p=self.min_p is not None and self.min_p > 0,
        )

    def values(self) -> "Values":
        """The numbers, which can change without compiling again."""
        # Compilers divide by multiplying with the reciprocal, which has to be a normal number as well.
        tiny = float(jnp.finfo(jnp.float32).tiny)
        return Values(
            jnp.float32(min(max(self.temperature, tiny), 1 / tiny)),
            jnp.int32(min(self.top_k or 1, 2**31 - 1)),
            jnp.float32(1.0 if self.top_p is None else self.top_p),
            jnp.float32(self.min_p or 0.0),
        )


@dataclasses.dataclass(frozen=True)
class Filters:
    """The static half of `Sampling`."""

    greedy: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Values:
    """The dynamic half of `Sampling`, scalars."""

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array


def row_keys(seeds: list[int], num_samples: int) -> Array:
    """One key per sample of every row, [len(seeds) * num_samples], from its seed and its number as a sample alone."""
    keys = [jax.random.fold_in(jax.random.key(seed), sample) for seed in seeds for sample in range(num_samples)]
    return jnp.stack(keys)


def choose(
    logits: Float[Array, "B V"],
    keys: Array,
    filters: Filters,
    values: Values,
    vocab: int,
    sampleable: Int[Array, ""],
    lanes: Lanes,
) -> tuple[Int[Array, "B"], Bool[Array, "B"]]:
    """One token id per row, and whether the row's logits were free of NaN and infinities.

    Args:
        logits: of the part of the vocabulary that this device holds, float32.
        keys: one random key per row; unused when greedy.
        filters: what is compiled in.
        values: its numbers.
        vocab: size of the whole vocabulary.
        sampleable: ids from here on are padding of the embedding and are never chosen.
        lanes: the way to the other devices.
    """
    held = logits.shape[1]
    if held == vocab:
        lanes = ALL_HELD  # a vocabulary that can't be split evenly is whole on every device: nothing to add up
    offset = lanes.offset(held, vocab)
    ids = offset + jnp.arange(held, dtype=jnp.int32)
    finite = jnp.all(jnp.isfinite(logits) | (ids >= sampleable), axis=1)
    logits = jnp.where(ids < sampleable, logits, -jnp.inf)
    if filters.greedy:
        return _winner(logits, ids, finite, lanes)
    top = lanes.max(jnp.max(logits, axis=1, keepdims=True))
    scaled = (logits - top) / values.temperature
    kept = ids < sampleable
    order = _ordered_bits(scaled)
    if filters.top_k:
        ones = jnp.broadcast_to(kept, scaled.shape).astype(jnp.float32)
        kept = _leading(order, ids, ones, values.top_k.astype(jnp.float32), lanes)
    if filters.top_p:
        weights = jnp.where(kept, jnp.exp(scaled), 0.0)
        mass = values.top_p * lanes.add(jnp.sum(weights, axis=1, keepdims=True))
        kept = kept & _leading(order, ids, weights, jnp.maximum(mass, jnp.finfo(jnp.float32).tiny), lanes)
    if filters.min_p:
        kept = kept & (scaled >= jnp.log(values.min_p))
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32))(keys)
    noise = jax.lax.dynamic_slice_in_dim(noise, offset, held, axis=1)
    return _winner(jnp.where(kept, scaled + noise, -jnp.inf), ids, finite, lanes)


def _winner(
    scores: Float[Array, "B V"], ids: Int[Array, "V"], finite: Bool[Array, "B"], lanes: Lanes
) -> tuple[Int[Array, "B"], Bool[Array, "B"]]:
    """Id of the largest score, the lowest of equals, and whether no device's logits were at fault.

    Each device offers its best, in the order of the vocabulary: a score, NaN if its logits are not finite, and an id,
    as the bits of two integers in one exchange.
    """
    score = jnp.where(finite, jnp.max(scores, axis=1), jnp.nan)
    offer = jnp.stack([jax.lax.bitcast_convert_type(score, jnp.int32), ids[jnp.argmax(scores, axis=1)]])
    offers = lanes.gather(offer[None], axis=0)
    offered = jax.lax.bitcast_convert_type(offers[:, 0], jnp.float32)
    best = jnp.argmax(offered, axis=0)
    return jnp.take_along_axis(offers[:, 1], best[None], axis=0)[0], ~jnp.any(jnp.isnan(offered), axis=0)


def _ordered_bits(x: Float[Array, "B V"]) -> Array:
    """uint32 that sort as the floats do; -0.0 counts as 0.0."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _leading(order: Array, ids: Int[Array, "V"], weights: Float[Array, "B V"], target: Array, lanes: Lanes) -> Array:
    """The fewest entries, largest `order` first and lowest id among equals, whose weights sum to `target`; or all.

    Found by bisection on the bits of `order`, so that devices exchange one sum per row and round.
    """

    def mass(chosen: Bool[Array, "B V"]) -> Float[Array, "B 1"]:
        return lanes.add(jnp.sum(jnp.where(chosen, weights, 0.0), axis=1, keepdims=True))

    target = jnp.broadcast_to(target, (order.shape[0], 1))
    threshold = _bisect(lambda t: mass(order >= t) >= target, 32, order.shape[0])
    above, tied = order > threshold, order == threshold
    rest = target - mass(above)
    reverse = ~ids.astype(jnp.uint32) & jnp.uint32(0x7FFFFFFF)
    cut = _bisect(lambda t: mass(tied & (reverse >= t)) >= rest, 31, order.shape[0])
    return above | (tied & (reverse >= cut))


def _bisect(holds: Callable[[Array], Array], bits: int, rows: int) -> Array:
    """The largest `bits`-bit number per row, [rows, 1], for which `holds`, true for small ones, is true; else 0."""

    def refine(i: Array, t: Array) -> Array:
        higher = t | (jnp.uint32(1) << (bits - 1 - i).astype(jnp.uint32))
        return jnp.where(holds(higher), higher, t)

    return jax.lax.fori_loop(0, bits, refine, jnp.zeros((rows, 1), jnp.uint32))
