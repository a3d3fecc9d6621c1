"""Values on their way from one folder to the other: kept bit for bit or cast, and watched for what is not finite."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from convert.plan import Item
from laneformer_jax.weights import TensorSource, narrowed

BLOCK = 1 << 22  # values looked at together, so that what is made of them stays small
# Bits of the exponent: all are set in infinities and NaNs alone.
EXPONENTS = {
    "float64": np.uint64(0x7FF0_0000_0000_0000),
    "float32": np.uint32(0x7F80_0000),
    "float16": np.uint16(0x7C00),
    "bfloat16": np.uint16(0x7F80),
}


def count_not_finite(array: np.ndarray) -> int:
    """How many values are infinite or NaN."""
    exponent = EXPONENTS[array.dtype.name]
    bits = np.ascontiguousarray(array).reshape(-1).view(exponent.dtype)
    blocks = (bits[start : start + BLOCK] for start in range(0, bits.size, BLOCK))
    return sum(int(np.count_nonzero((block & exponent) == exponent)) for block in blocks)


@dataclass
class Reader:
    """Reads parts of tensors in the dtype of the result, and counts what people should know of.

    Attributes:
        progress: is told the bytes of the result that each part has.
        not_finite: values per tensor that are infinite or NaN in the source.
        overflowed: values per tensor that are finite there and not in the result.
    """

    source: TensorSource
    progress: Callable[[int], object]
    not_finite: dict[str, int] = field(default_factory=dict)
    overflowed: dict[str, int] = field(default_factory=dict)

    def read(self, item: Item, index: tuple[slice, ...]) -> np.ndarray:
        """The values of `item` at `index`."""
        values = self.source.read_slice(item.source, index)
        cast = narrowed(values, item.dtype)
        before = count_not_finite(values)
        self._count(self.not_finite, item, before)
        if cast is not values:
            self._count(self.overflowed, item, count_not_finite(cast) - before)
        self.progress(cast.nbytes)
        return cast

    def read_whole(self, item: Item) -> np.ndarray:
        """All values of `item`, read part by part, as storage may need as much memory again for what it reads."""
        values = np.empty(item.shape, item.dtype)
        for index in item.parts():
            values[index] = self.read(item, index)
        return values

    @staticmethod
    def _count(counts: dict[str, int], item: Item, found: int) -> None:
        if found:
            counts[item.source] = counts.get(item.source, 0) + found
