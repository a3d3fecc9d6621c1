"""Orbax checkpoints read leaf by leaf and slice by slice, through TensorStore; Orbax itself is not imported.

An Orbax folder lists its leaves in `_METADATA` (path of keys -> how it was written) and holds each as a Zarr array,
a folder of chunk files or keys of one OCDBT database. A checkpoint is untrusted: no leaf can name a file elsewhere, and
what is missing is an error, never zeros.

Source: https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpoint_format.html.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from laneformer_jax.errors import LaneformerError
from laneformer_jax.safetensors_header import MAX_HEADER_BYTES, faults_of, parse_json, printable, quoted

METADATA_FILE = "_METADATA"


@dataclass(frozen=True)
class Leaf:
    """One array of the tree, open for reading."""

    store: ts.TensorStore

    @property
    def dtype(self) -> np.dtype:
        return self.store.dtype.numpy_dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.store.shape)


class OrbaxFolder:
    """The leaves of an Orbax checkpoint under their paths joined by dots; `entries` are in the tree's order."""

    def __init__(self, path: Path, entries: dict[str, Leaf]):
        self.path = path
        self.entries = entries

    @classmethod
    def open(cls, path: str | Path) -> "OrbaxFolder":
        """Read `_METADATA` and every leaf's header; no values are read.

        Raises:
            LaneformerError: the folder is no complete Orbax checkpoint of arrays; the message names the leaf.
        """
        path = Path(path).absolute()  # TensorStore knows absolute paths only
        with faults_of(path):
            if not (path / METADATA_FILE).is_file():
                raise LaneformerError(f"is no complete Orbax checkpoint: it has no {METADATA_FILE}")
            if (path / METADATA_FILE).stat().st_size > MAX_HEADER_BYTES:
                raise LaneformerError(f"{METADATA_FILE} is too big")
            tree = parse_json((path / METADATA_FILE).read_bytes())
            names = _leaf_names(tree)
            context = ts.Context()
            opening = {name: ts.open(_spec(path, tree, name), read=True, context=context) for name in names}
            # A tree of Flax variables instead of their values has one more key, the same for all.
            wrapped = all(name.endswith(".value") for name in names)
            entries = {}
            for name, store in opening.items():
                with _faults_of_leaf(name):
                    leaf = Leaf(store.result())
                    _check_chunks(leaf.store)
                entries[name.removesuffix(".value") if wrapped else name] = leaf
        return cls(path, entries)

    def read_slice(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Part of leaf `name`: only the chunks that it touches are read.

        Raises:
            LaneformerError: there is no such leaf, or a chunk is missing or damaged.
        """
        with faults_of(self.path):
            if name not in self.entries:
                raise LaneformerError(f"has no leaf {quoted(name)}")
            with _faults_of_leaf(name):
                return self.entries[name].store[index].read().result()


def _leaf_names(tree: Mapping[str, Any]) -> list[str]:
    leaves = tree.get("tree_metadata")
    if not isinstance(leaves, dict) or not leaves:
        raise LaneformerError(f"{METADATA_FILE} lists no leaves")
    names: dict[str, None] = {}
    for leaf, fields in leaves.items():
        try:
            keys = [entry["key"] for entry in fields["key_metadata"]]
            name = ".".join(keys)
        except (KeyError, TypeError) as error:
            raise LaneformerError(f"{METADATA_FILE} has the unusable leaf {quoted(leaf)}") from error
        if not name or any(not key or key in (".", "..") or set(key) & set("/\\\0") for key in keys):
            raise LaneformerError(f"leaf {quoted(name)} may lie outside the folder: refused")
        if name in names:
            raise LaneformerError(f"two leaves have the name {quoted(name)}")
        names[name] = None
    return list(names)


def _spec(path: Path, tree: Mapping[str, Any], name: str) -> ts.Spec:
    if tree.get("use_ocdbt"):
        store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/"}, "path": f"{name}/"}
    else:
        store = {"driver": "file", "path": f"{path / name}/"}
    driver = "zarr3" if tree.get("use_zarr3") else "zarr"
    return ts.Spec({"driver": driver, "kvstore": store, "fill_missing_data_reads": False})


def _check_chunks(store: ts.TensorStore) -> None:
    """A chunk beyond its array would let a small file ask for any amount of memory."""
    chunk = [size or 0 for size in store.chunk_layout.read_chunk.shape or store.shape]
    if any(part > max(size, 1) for part, size in zip(chunk, store.shape, strict=True)):
        raise LaneformerError(f"has chunks {chunk} beyond its shape {list(store.shape)}")


@contextmanager
def _faults_of_leaf(name: str) -> Iterator[None]:
    try:
        yield
    except LaneformerError as error:
        raise LaneformerError(f"leaf {printable(name)} {error}") from error
    except (ValueError, NotImplementedError, OverflowError) as error:  # all that TensorStore raises
        reason = str(error).split(" [", 1)[0]
        raise LaneformerError(f"leaf {printable(name)} cannot be read: {reason}") from error
