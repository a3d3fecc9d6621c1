"""Weights as an Orbax checkpoint, written part by part.

Orbax keeps a tree in memory while it saves it. Here the tree's leaves are promises instead, and a handler of their
type, registered with Orbax for this one save, reads and writes them one by one. What lies on the disk are NumPy arrays
to any Orbax: Zarr, uncompressed, one chunk file for each lane, so that a device reads its own lanes alone.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint import type_handlers

from convert.plan import Item, Plan
from laneformer_jax.errors import LaneformerError

Read = Callable[[Item, tuple[slice, ...]], np.ndarray]


@dataclass(frozen=True)
class Promise:
    """A leaf whose values are read when Orbax comes to write them."""

    item: Item
    read: Read


class PromiseHandler(type_handlers.NumpyHandler):
    """Writes promises as Orbax writes NumPy arrays, with one part in memory at a time."""

    async def serialize(
        self,
        values: Sequence[Any],
        infos: Sequence[type_handlers.ParamInfo],
        args: Sequence[type_handlers.SaveArgs] | None = None,
    ) -> Sequence[Any]:
        for promise, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            store = await ts.open(_spec(Path(info.path), promise.item), create=True, delete_existing=True)
            for index in promise.item.parts():
                part = promise.read(promise.item, index)
                await store[index].write(part, can_reference_source_data_indefinitely=True)
        return []


def save(plan: Plan, folder: Path, read: Read) -> None:
    """Writes the tensors of `plan` as an Orbax checkpoint.

    Args:
        plan: names the leaves by their paths in the model.
        folder: of the checkpoint; must not be there.
        read: gives a part of an item's values.

    Raises:
        LaneformerError: a tensor cannot be read, or the disk is full or refuses.
    """
    tree: dict[str, Any] = {}
    for item in plan.items:
        *parents, last = map(str, item.path)
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = Promise(item, read)
    registry = type_handlers.create_type_handler_registry((Promise, PromiseHandler()))
    try:
        with _quiet():
            handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, type_handler_registry=registry)
            with ocp.Checkpointer(handler) as checkpointer:
                checkpointer.save(folder, args=ocp.args.PyTreeSave(tree))
        # It tells object stores alone that the save is complete, and holds this machine's path.
        (folder / "commit_success.txt").unlink(missing_ok=True)
    except LaneformerError:
        raise
    except ValueError as error:  # TensorStore's only kind of error
        raise LaneformerError(f"{folder}: cannot be written: {str(error).split(' [', 1)[0]}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Orbax's warnings of what it did not find, as it is not meant to be there: devices' arrays, OCDBT."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _spec(path: Path, item: Item) -> ts.Spec:
    return ts.Spec(
        {
            "driver": "zarr",
            # What is written is flushed to the disk at the end, all at once.
            "kvstore": {"driver": "file", "path": f"{path}/", "file_io_sync": False},
            "metadata": {
                "shape": item.shape,
                "chunks": item.chunk,
                "dtype": _zarr_dtype(item.dtype),
                "compressor": None,
                "fill_value": None,  # with one, parts that are nothing else would not be written
            },
        }
    )


def _zarr_dtype(dtype: np.dtype) -> str:
    return "bfloat16" if dtype.name == "bfloat16" else dtype.newbyteorder("<").str
