"""The device programs of generation: prefill in chunks, then a loop that never returns to the host between tokens.

Both are pure functions of the model and arrays. `Engine` compiles them once per shape, and `parallel` runs the very
same functions on a mesh.
"""

import dataclasses

import jax
import jax.numpy as jnp

from laneformer_jax.array_types import Array, Bool, Float, Int
from laneformer_jax.cache import Cache
from laneformer_jax.lanes import Lanes
from laneformer_jax.model import Laneformer
from laneformer_jax.sampling import Filters, Values, choose


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a program is compiled for, besides its arrays' shapes.

    Attributes:
        capacity: tokens of a row that full layers can hold, and that can be generated.
        chunk: tokens that prefill handles at a time; divides the prompt's padded length.
        samples: completions per prompt, which share its prefill.
        filters: of the sampling.
    """

    capacity: int
    chunk: int
    samples: int = 1
    filters: Filters = Filters(greedy=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Choice:
    """How tokens are chosen and when a row ends; the same for every step.

    Attributes:
        keys: one random key per row.
        values: numbers of the sampling.
        sampleable: ids below it can be chosen.
        eos: ids that end a row; unused places hold -1.
    """

    keys: Array
    values: Values
    sampleable: Int[Array, ""]
    eos: Int[Array, "N"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Progress:
    """A generation under way.

    Attributes:
        cache: holds everything but each row's newest token.
        token: each row's newest token.
        active: rows that have not met an end-of-sequence token.
        tokens: chosen so far, up to `step` columns of them; the end-of-sequence token included.
        count: tokens of each row before its end.
        step: columns filled.
        finite: rows whose logits have all been finite.
    """

    cache: Cache
    token: Int[Array, "B"]
    active: Bool[Array, "B"]
    tokens: Int[Array, "B N"]
    count: Int[Array, "B"]
    step: Int[Array, ""]
    finite: Bool[Array, "B"]


def prefill(
    model: Laneformer, lanes: Lanes, chunk: int, prompts: Int[Array, "B P"], lengths: Int[Array, "B"], cache: Cache
) -> tuple[Cache, Float[Array, "B 1 L D"]]:
    """The cache with the prompts added, and the streams of each row's last prompt token.

    Scores never exceed `chunk` x (slots + chunk); chunks behind the longest prompt are not computed.

    Args:
        model: with the lanes held here.
        lanes: the way to the others.
        chunk: tokens at a time; divides P.
        prompts: ids, padded at the end.
        lengths: tokens of each row, at least 1.
        cache: of what came before, with room for the prompts.
    """
    rows, start = prompts.shape[0], cache.length
    column = jnp.arange(chunk, dtype=jnp.int32)

    def add_chunk(i: Array, carry: tuple[Cache, Array]) -> tuple[Cache, Array]:
        cache, last = carry
        columns = i * chunk + column
        ids = jax.lax.dynamic_slice_in_dim(prompts, i * chunk, chunk, axis=1)
        positions = jnp.where(columns < lengths[:, None], start[:, None] + columns, -1)
        x, extended = model.streams(ids, positions, cache, lanes)
        assert extended is not None
        at = jnp.clip(lengths - 1 - i * chunk, 0, chunk - 1)
        ends_here = (lengths - 1) // chunk == i
        return extended, jnp.where(ends_here[:, None, None, None], x[jnp.arange(rows), at][:, None], last)

    shape = (rows, 1, lanes.share(model.config.num_lanes), model.config.hidden_size)
    carry = cache, jnp.zeros(shape, model.embedding.dtype)
    if prompts.shape[1] == chunk:
        return add_chunk(jnp.int32(0), carry)
    chunks = (jnp.max(lengths) + chunk - 1) // chunk
    return jax.lax.fori_loop(0, chunks, add_chunk, carry)


def start(
    model: Laneformer,
    lanes: Lanes,
    shape: Shape,
    prompts: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    cache: Cache,
    choice: Choice,
    limit: Int[Array, ""],
) -> Progress:
    """Prefills the prompts and generates up to `limit` tokens of each row; `limit` is at least 1.

    Row b of the result is sample b mod `samples` of prompt b // `samples`.
    """
    cache, last = prefill(model, lanes, shape.chunk, prompts, lengths, cache)
    if shape.samples > 1:
        cache, last = jax.tree.map(lambda a: jnp.repeat(a, shape.samples, axis=0), (cache, last))
    rows = last.shape[0]
    fresh = Progress(
        cache=cache,
        token=jnp.zeros((rows,), jnp.int32),
        active=jnp.ones((rows,), bool),
        tokens=jnp.zeros((rows, shape.capacity), jnp.int32),
        count=jnp.zeros((rows,), jnp.int32),
        step=jnp.int32(0),
        finite=jnp.ones((rows,), bool),
    )
    first = _emit(model, lanes, shape.filters, last, fresh, choice)
    return resume(model, lanes, shape, first, choice, limit)


def resume(
    model: Laneformer, lanes: Lanes, shape: Shape, progress: Progress, choice: Choice, limit: Int[Array, ""]
) -> Progress:
    """Continues until `limit` tokens stand in `tokens`, every row has ended, or logits are not finite."""

    def unfinished(progress: Progress) -> Array:
        return (progress.step < limit) & jnp.any(progress.active) & jnp.all(progress.finite)

    def advance(progress: Progress) -> Progress:
        positions = jnp.where(progress.active, progress.cache.length, -1)[:, None]
        x, cache = model.streams(progress.token[:, None], positions, progress.cache, lanes)
        assert cache is not None
        return _emit(model, lanes, shape.filters, x, dataclasses.replace(progress, cache=cache), choice)

    return jax.lax.while_loop(unfinished, advance, progress)


def _emit(
    model: Laneformer, lanes: Lanes, filters: Filters, x: Float[Array, "B 1 L D"], progress: Progress, choice: Choice
) -> Progress:
    logits = model.logits(x, lanes)[:, 0]
    with jax.named_scope("choose"):
        keys = jax.vmap(jax.random.fold_in)(choice.keys, progress.count) if not filters.greedy else choice.keys
        vocab = model.config.vocab_size
        token, finite = choose(logits, keys, filters, choice.values, vocab, choice.sampleable, lanes)
    ended = jnp.any(token[:, None] == choice.eos, axis=1)
    active = progress.active & ~ended
    return dataclasses.replace(
        progress,
        token=token,
        active=active,
        tokens=jax.lax.dynamic_update_slice(progress.tokens, token[:, None], (0, progress.step)),
        count=progress.count + active.astype(jnp.int32),
        step=progress.step + 1,
        finite=progress.finite & (finite | ~progress.active),
    )
