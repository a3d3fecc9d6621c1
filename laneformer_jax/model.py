"""The Laneformer's layers. Lanes are an array axis; what crosses them goes through `Lanes`, as the schedule says.

Source of every formula: design, section 1.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from laneformer_jax import rotary
from laneformer_jax.array_types import Array, Float, Int, einsum
from laneformer_jax.cache import Cache, LayerCache, slot_positions, visible, write
from laneformer_jax.config import LaneformerConfig
from laneformer_jax.lanes import ALL_HELD, Lanes
from laneformer_jax.schedule import Step, make_schedule

MASKED = -1e30
LANES, VOCAB = "lanes", "vocab"  # logical axes of parameters, which `parallel` maps to a mesh


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], scale: float, dtype: jnp.dtype, axes: tuple) -> nnx.Param:
    return nnx.Param((scale * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype), axes=axes)


class LaneLinear(nnx.Module):
    """y_l = W_l x_l with W [L, O, I], stored output-major as in the checkpoint so that a product reads it once."""

    def __init__(self, lanes: int, inputs: int, outputs: int, scale: float, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.weight = _normal(rngs, (lanes, outputs, inputs), scale, dtype, (LANES, None, None))

    def __call__(self, x: Float[Array, "B T L I"]) -> Float[Array, "B T L O"]:
        return einsum("BTLI,LOI->BTLO", x, self.weight[...])


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale, in float32; one scale [D] for all lanes or one per lane [L, D]."""

    def __init__(self, config: LaneformerConfig, dtype: jnp.dtype):
        shape = (config.num_lanes, config.hidden_size) if config.lane_norm_scale else (config.hidden_size,)
        self.scale = nnx.Param(jnp.ones(shape, dtype), axes=(LANES, None) if config.lane_norm_scale else (None,))
        self.eps = config.norm_eps

    def __call__(self, x: Float[Array, "B T L D"]) -> Float[Array, "B T L D"]:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (normed * self.scale[...].astype(jnp.float32)).astype(x.dtype)


def attend(
    queries: Float[Array, "B T L K G E"], blocks: Sequence[tuple[LayerCache, Array]]
) -> Float[Array, "B T L K G E"]:
    """softmax(q k^T E^-0.5) v over several blocks of keys together, each with its mask [B, T, S], in float32."""
    scale = queries.shape[-1] ** -0.5
    scores = [
        jnp.where(
            mask[:, None, None, None],
            scale * einsum("BTLKGE,BLKES->BLKGTS", queries, block.keys, out=jnp.float32),
            MASKED,
        )
        for block, mask in blocks
    ]
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(queries.dtype)
    ends = [0]
    for block, _ in blocks:
        ends.append(ends[-1] + block.slots)
    parts = [
        einsum("BLKGTS,BLKSE->BTLKGE", weights[..., start:stop], block.values, out=jnp.float32)
        for (block, _), start, stop in zip(blocks, ends[:-1], ends[1:], strict=True)
    ]
    return sum(parts[1:], parts[0]).astype(queries.dtype)


class Attention(nnx.Module):
    """Grouped-query attention of one lane's heads on its own stream, over all earlier tokens or a window of them."""

    def __init__(self, config: LaneformerConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        lanes, width, e = config.num_lanes, config.hidden_size, config.head_dim
        self.config, self.window = config, config.window(layer)
        heads, kv_heads = config.num_heads // lanes, config.num_kv_heads // lanes
        scale = width**-0.5
        self.wq = LaneLinear(lanes, width, heads * e, scale, dtype, rngs)
        self.wk = LaneLinear(lanes, width, kv_heads * e, scale, dtype, rngs)
        self.wv = LaneLinear(lanes, width, kv_heads * e, scale, dtype, rngs)
        self.wo = LaneLinear(lanes, heads * e, width, scale * (2 * config.num_layers) ** -0.5, dtype, rngs)

    def __call__(
        self, x: Float[Array, "B T L D"], positions: Int[Array, "B T"], cache: LayerCache | None
    ) -> tuple[Float[Array, "B T L D"], LayerCache | None]:
        split = (*x.shape[:3], -1, self.config.head_dim)
        cos, sin = rotary.angles(self.config, positions)
        q = rotary.rotate(self.wq(x).reshape(split), cos, sin)
        k = rotary.rotate(self.wk(x).reshape(split), cos, sin)
        v = self.wv(x).reshape(split)
        q = q.reshape(*x.shape[:3], k.shape[3], -1, self.config.head_dim)
        blocks, cache = self._blocks(k, v, positions, cache)
        return self.wo(attend(q, blocks).reshape(*x.shape[:3], -1)), cache

    def _blocks(self, k: Array, v: Array, positions: Int[Array, "B T"], cache: LayerCache | None):
        def masked(block: LayerCache, held: Int[Array, "B S"]):
            return block, visible(positions, held, self.window)

        new = LayerCache(k.transpose(0, 2, 3, 4, 1), v.transpose(0, 2, 3, 1, 4))
        if cache is None:
            return [masked(new, positions)], None
        written = write(cache, k, v, positions)
        if positions.shape[1] == 1:
            # Writing first lets the compiler update the ring in place: a reader of the old ring would force a copy.
            return [masked(written, slot_positions(positions[:, 0] + 1, cache.slots))], written
        first = jnp.where(positions >= 0, positions, jnp.iinfo(jnp.int32).max).min(axis=1)
        seen = jnp.where(positions.max(axis=1) >= 0, first, 0)
        return [masked(cache, slot_positions(seen, cache.slots)), masked(new, positions)], written


class MLP(nnx.Module):
    """w2_l(silu(w1_l x) * w3_l x) with F/L neurons a lane."""

    def __init__(self, config: LaneformerConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        lanes, width, neurons = config.num_lanes, config.hidden_size, config.intermediate_size // config.num_lanes
        self.w1 = LaneLinear(lanes, width, neurons, width**-0.5, dtype, rngs)
        self.w3 = LaneLinear(lanes, width, neurons, width**-0.5, dtype, rngs)
        out_scale = (config.intermediate_size * 2 * config.num_layers) ** -0.5
        self.w2 = LaneLinear(lanes, neurons, width, out_scale, dtype, rngs)

    def __call__(self, x: Float[Array, "B T L D"]) -> Float[Array, "B T L D"]:
        return self.w2(jax.nn.silu(self.w1(x)) * self.w3(x))


class Block(nnx.Module):
    """One layer: an attention and an MLP module, each behind its norm."""

    def __init__(self, config: LaneformerConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config, dtype)
        self.attention = Attention(config, layer, dtype, rngs)
        self.mlp_norm = RMSNorm(config, dtype)
        self.mlp = MLP(config, dtype, rngs)

    def __call__(
        self, step: Step, x: Float[Array, "B T L D"], positions: Int[Array, "B T"], cache: LayerCache | None
    ) -> tuple[Float[Array, "B T L D"], LayerCache | None]:
        if step.kind == "attention":
            return self.attention(self.attention_norm(x), positions, cache)
        return self.mlp(self.mlp_norm(x)), cache


class Head(nnx.Module):
    """Lanes to logits: final norm, then a mean or sum over lanes and one matrix, or one matrix over all lanes or each.

    A program that holds a part of the vocabulary gives the logits of that part.
    """

    def __init__(self, config: LaneformerConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        self.norm = RMSNorm(config, dtype)
        lanes, width, vocab = config.num_lanes, config.hidden_size, config.vocab_size
        shape, axes = {
            "replicate": ((vocab, width), (VOCAB, None)),
            "lane": ((vocab, lanes * width), (VOCAB, None)),
            "vocab_parallel": ((lanes, vocab // lanes, width), (LANES, None, None)),
        }[config.head]
        self.weight = None if config.tie_embeddings else _normal(rngs, shape, width**-0.5, dtype, axes)

    def __call__(self, x: Float[Array, "B T L D"], lanes: Lanes, embedding: Array) -> Float[Array, "B T V"]:
        if self.config.pre_norm_lane_agg:
            features = self.norm(lanes.sum(x))[:, :, 0]
        elif self.config.head == "replicate":
            features = lanes.sum(self.norm(x))[:, :, 0] / self.config.num_lanes
        elif self.config.head == "lane":
            features = lanes.gather(self.norm(x), axis=2).reshape(*x.shape[:2], -1)
        else:
            assert self.weight is not None
            logits = einsum("BTLD,LVD->BTLV", self.norm(x), self.weight[...], out=jnp.float32)
            return logits.reshape(*x.shape[:2], -1)
        return einsum("BTD,VD->BTV", features.astype(x.dtype), self._matrix(lanes, embedding), out=jnp.float32)

    def _matrix(self, lanes: Lanes, embedding: Array) -> Array:
        if self.weight is not None:
            return self.weight[...]
        vocab = self.config.vocab_size
        share = lanes.share(vocab)
        return jax.lax.dynamic_slice_in_dim(embedding, lanes.offset(share, vocab), share)


class Laneformer(nnx.Module):
    """The whole model: embedding, `num_layers` blocks on L residual streams, head.

    Args:
        config: the architecture.
        dtype: of parameters and activations; the config's by default.
        rngs: seeds for the initial weights. `nnx.eval_shape` of the constructor gives the abstract model, which
            `weights.load` fills.
    """

    def __init__(self, config: LaneformerConfig, *, dtype: jnp.dtype | None = None, rngs: nnx.Rngs):
        dtype = jnp.dtype(dtype or config.dtype)
        self.config = config
        self.embedding = _normal(rngs, (config.vocab_size, config.hidden_size), 1.0, dtype, (None, None))
        self.blocks = nnx.List(Block(config, i, dtype, rngs) for i in range(config.num_layers))
        self.head = Head(config, dtype, rngs)

    def __call__(self, ids: Int[Array, "B T"], lanes: Lanes = ALL_HELD) -> Float[Array, "B T V"]:
        """Logits of every position of whole, unpadded sequences, without a cache."""
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
        x, _ = self.streams(ids, positions, None, lanes)
        return self.logits(x, lanes)

    def logits(self, x: Float[Array, "B T L D"], lanes: Lanes) -> Float[Array, "B T V"]:
        """The head on the lanes' streams."""
        with jax.named_scope("head"):
            return self.head(x, lanes, self.embedding[...])

    def streams(
        self, ids: Int[Array, "B T"], positions: Int[Array, "B T"], cache: Cache | None, lanes: Lanes
    ) -> tuple[Float[Array, "B T L D"], Cache | None]:
        """The lanes' residual streams after the last module, and the cache with these tokens in it.

        Args:
            ids: token ids.
            positions: of the tokens in their rows, consecutive; -1 marks padding behind a row's tokens.
            cache: what came before, or None for whole sequences.
            lanes: the lanes held here and the way to the others.
        """
        x = jnp.take(self.embedding[...], ids, axis=0)[:, :, None]
        x = jnp.broadcast_to(x, (*ids.shape, lanes.share(self.config.num_lanes), x.shape[-1]))
        layers: list[LayerCache | None] = [None] * self.config.num_layers if cache is None else [*cache.layers]
        own: dict[int, Array] = {}
        summed: dict[int, Array] = {}
        for step in make_schedule(self.config, lanes.pack):
            n = step.module
            with jax.named_scope(f"layer{step.layer}.{step.kind}"):
                own[n], layers[step.layer] = self.blocks[step.layer](step, x, positions, layers[step.layer])
                if step.sums:
                    summed.update(zip(step.sums, lanes.sums([own[m] for m in step.sums]), strict=True))
                x = x + (summed[n].astype(x.dtype) if step.sum_now else jnp.asarray(step.own_scale, x.dtype) * own[n])
                if step.receive_from is not None:
                    total = summed[step.receive_from]
                    x = x + (total - own[step.receive_from].astype(total.dtype)).astype(x.dtype)
        if cache is None:
            return x, None
        length = jnp.maximum(cache.length, positions.max(axis=1) + 1)
        return x, Cache(tuple(layer for layer in layers if layer is not None), length)
