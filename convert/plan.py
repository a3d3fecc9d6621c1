"""What a conversion will do, known from headers alone."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
from flax import nnx

from laneformer_jax import weights
from laneformer_jax.config import LaneformerConfig
from laneformer_jax.errors import LaneformerError
from laneformer_jax.weights import ParameterPath, TensorSource

FORMATS = ("orbax", "safetensors")


@dataclass(frozen=True)
class Item:
    """One parameter: its tensor in the source, and what becomes of it.

    Attributes:
        axes: for each of the tensor's axes, what it counts where devices may split it (lanes, vocab), else None.
        chunk: the shape of the parts that are read and written at once.
    """

    source: str
    target: str
    path: ParameterPath
    shape: tuple[int, ...]
    source_dtype: np.dtype
    dtype: np.dtype
    axes: tuple[str | None, ...]
    chunk: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def parts(self) -> Iterator[tuple[slice, ...]]:
        """Indices of the chunks that make up the tensor, along its first axis."""
        for start in range(0, self.shape[0], self.chunk[0]):
            yield slice(start, start + self.chunk[0]), *(slice(0, size) for size in self.shape[1:])

    def device_bytes(self, devices: int) -> int:
        """What each of `devices` holds and reads; an axis that does not come out even is whole on each."""
        split = any(axis and size % devices == 0 for axis, size in zip(self.axes, self.shape, strict=True))
        return self.nbytes // devices if split else self.nbytes


@dataclass(frozen=True)
class Plan:
    """Every tensor of a conversion.

    Attributes:
        config: of the result.
        skipped: tensors of the source that follow from the config and are left out.
    """

    config: LaneformerConfig
    source: TensorSource
    to: str
    items: tuple[Item, ...]
    skipped: tuple[str, ...] = field(default=())

    @property
    def size(self) -> int:
        return sum(item.size for item in self.items)

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)

    @property
    def dtypes(self) -> list[str]:
        return sorted({item.dtype.name for item in self.items})

    def lines(self, devices: int | None) -> Iterator[str]:
        """A table for people: each tensor, then the totals.

        Raises:
            LaneformerError: `devices` do not divide the lanes.
        """
        if devices is not None and (devices < 1 or self.config.num_lanes % devices):
            raise LaneformerError(f"{devices} devices do not divide the model's {self.config.num_lanes} lanes")
        width = max(len(item.source) for item in self.items)
        for item in self.items:
            cast = item.dtype.name
            if item.source_dtype != item.dtype:
                cast = f"{item.source_dtype.name} -> {cast}"
            yield f"{item.source:{width}}  {item.target}  {list(item.shape)}  {cast}  {item.nbytes:,} bytes"
        yield from (f"{name}  left out: it follows from the config" for name in self.skipped)
        yield f"{len(self.items)} tensors, {self.size:,} parameters, {self.nbytes:,} bytes as {self.to}"
        if devices is not None:
            share = sum(item.device_bytes(devices) for item in self.items)
            yield f"on each of {devices} devices: {share:,} bytes"


def chunk_shape(shape: tuple[int, ...], lanes: int) -> tuple[int, ...]:
    """Chunks that are whole along every axis but the first of a matrix.

    That one, lanes or vocabulary, is cut into the most parts that also come out even for any number of devices that
    divides the lanes.
    """
    if len(shape) < 2:
        return shape
    return (shape[0] // math.gcd(shape[0], lanes), *shape[1:])


def make_plan(folder: Path, to: str | None = None, dtype: str = "keep") -> Plan:
    """The conversion of a model folder.

    Args:
        folder: Hugging Face or converted.
        to: "orbax" or "safetensors"; the one that the folder is not, by default.
        dtype: of all tensors of the result; "keep" leaves each its own.

    Raises:
        LaneformerError: `folder` is unusable, or its tensors are not those of its config; all faults are listed.
    """
    if not (folder / "config.json").is_file():
        raise LaneformerError(f"{folder} is not a model folder: it has no config.json")
    config = LaneformerConfig.from_file(folder / "config.json")
    source, names = weights.open_source(folder, config)
    published = weights.parameter_names(config)
    if to is None:
        to = "orbax" if names.keys() == published.keys() else "safetensors"
    skipped = weights.check_names(config, source, names)
    targets = {path: name for name, path in (published if to == "safetensors" else weights.leaf_names(config)).items()}
    abstract = dict(nnx.to_flat_state(nnx.state(weights.abstract_model(config))))
    wanted = None if dtype == "keep" else np.dtype(getattr(ml_dtypes, dtype, dtype))
    items = tuple(
        Item(
            source=name,
            target=targets[path],
            path=path,
            shape=tuple(source.entries[name].shape),
            source_dtype=source.entries[name].dtype,
            dtype=wanted or source.entries[name].dtype,
            axes=tuple(abstract[path].get_metadata("axes")),
            chunk=chunk_shape(tuple(source.entries[name].shape), config.num_lanes),
        )
        for name, path in names.items()
    )
    if wanted is not None:
        config = config.replace(dtype=dtype)
    return Plan(config, source, to, items, tuple(skipped))
