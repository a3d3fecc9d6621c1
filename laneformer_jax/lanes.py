"""The lanes that a program holds and its way to all the others."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from laneformer_jax.array_types import Array, Float
from laneformer_jax.schedule import Pack


@dataclass(frozen=True)
class Lanes:
    """Sums and gathers over all lanes; the layers know nothing else about how many devices there are.

    Attributes:
        axis: name of the mesh axis over which the lanes are split, or None where this program holds all of them.
        pack: what one sum between devices carries; see `make_schedule`.
        sum_dtype: in which sums travel between devices and arrive; that of the summands if None.
    """

    axis: str | None = None
    pack: Pack = "module"
    sum_dtype: str | None = None

    def sum(self, x: Float[Array, "B T L D"]) -> Float[Array, "B T 1 D"]:
        """sum_l x_l over every lane there is, accumulated in float32 within a device."""
        return self.add(self._held(x))

    def sums(self, xs: Sequence[Float[Array, "B T L D"]]) -> list[Float[Array, "B T 1 D"]]:
        """`sum` of each of several arrays, which travel together."""
        if len(xs) == 1:
            return [self.sum(xs[0])]
        return list(self.add(jnp.stack([self._held(x) for x in xs])))

    def _held(self, x: Float[Array, "B T L D"]) -> Float[Array, "B T 1 D"]:
        dtype = x.dtype if self.sum_dtype is None else jnp.dtype(self.sum_dtype)
        return jnp.sum(x, axis=2, keepdims=True, dtype=jnp.float32).astype(dtype)

    def add(self, x: Array) -> Array:
        """The sum of x over the devices."""
        return x if self.axis is None else jax.lax.psum(x, self.axis)

    def max(self, x: Array) -> Array:
        """The largest x of any device."""
        return x if self.axis is None else jax.lax.pmax(x, self.axis)

    def gather(self, x: Array, axis: int) -> Array:
        """Every device's x concatenated along `axis`, in the order of the lanes."""
        return x if self.axis is None else jax.lax.all_gather(x, self.axis, axis=axis, tiled=True)

    def share(self, size: int) -> int:
        """How much of an axis of `size` one device holds when it is split evenly, or all of it if that can't be."""
        devices = 1 if self.axis is None else jax.lax.axis_size(self.axis)
        return size if size % devices else size // devices

    def offset(self, share: int, size: int) -> jax.Array:
        """Where this device's `share` of an axis of `size` begins."""
        if self.axis is None or share == size:
            return jnp.int32(0)
        return jax.lax.axis_index(self.axis) * share


ALL_HELD = Lanes()
