"""Rotary position embedding on interleaved pairs, always computed in float32."""

import math

import jax.numpy as jnp
import numpy as np

from laneformer_jax.array_types import Array, Float, Int
from laneformer_jax.config import LaneformerConfig


def inverse_frequencies(config: LaneformerConfig) -> np.ndarray:
    """theta^(-2i/E) for pair i, in radians per token; [E/2] float32.

    With Llama 3's scaling, wavelengths above `original / low_freq_factor` tokens are stretched by `factor`, those
    under `original / high_freq_factor` are kept, and those between are interpolated linearly in the frequency.

    Source: RoFormer (arXiv 2104.09864); the stretch as in Llama 3.1's public model description.
    """
    frequencies = config.rope_theta ** (-np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is not None:
        turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = np.clip(kept, 0.0, 1.0)
        frequencies = frequencies * (kept + (1 - kept) / scaling.factor)
    return frequencies.astype(np.float32)


def angles(config: LaneformerConfig, positions: Int[Array, "B T"]) -> tuple[Array, Array]:
    """cos and sin of position * frequency, each [B, T, E/2] float32."""
    turned = positions[..., None].astype(jnp.float32) * inverse_frequencies(config)
    return jnp.cos(turned), jnp.sin(turned)


def rotate(x: Float[Array, "B T L N E"], cos: Float[Array, "B T P"], sin: Float[Array, "B T P"]) -> Array:
    """Pair (x[2i], x[2i+1]) turned by angle i; N heads of any kind, result in x's dtype."""
    cos, sin = cos[:, :, None, None], sin[:, :, None, None]
    even, odd = x[..., 0::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)
