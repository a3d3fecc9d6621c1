"""The one legend of letters for shapes, einsum strings and axis names.

B batch, T query tokens, S cache slots or key tokens, L lanes held by this program, D model width, H query heads,
K key/value heads of one lane, G query heads per key/value head, E head dim, F FFN width, V vocabulary (or the part of
it that this program holds), O and I a linear map's output and input.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

__all__ = ["Array", "Bool", "Float", "Int", "einsum"]


def einsum(spec: str, *operands: jax.Array, out: jnp.dtype | type | None = None) -> jax.Array:
    """Einstein sum at full precision (no TF32 on GPUs), with the result in dtype `out` or that of the operands."""
    return jnp.einsum(spec, *operands, precision=jax.lax.Precision.HIGHEST, preferred_element_type=out)
