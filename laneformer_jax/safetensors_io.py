"""Safetensors read by mapping and written by streaming, without PyTorch.

A checkpoint is untrusted: each header is checked in full (see `safetensors_header`), an index may name files of its own
folder only, and a pickle, which could run code, is never opened.
"""

import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from laneformer_jax.errors import LaneformerError
from laneformer_jax.safetensors_header import (
    MAX_HEADER_BYTES,
    TensorEntry,
    faults_of,
    parse_json,
    plan_header,
    printable,
    quoted,
    read_header,
)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TRANSFORMERS_METADATA = {"format": "pt"}  # Transformers refuses a file without this entry

MAX_WRITE_BYTES = 1 << 30  # some systems refuse a single write of 2 GiB
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

BasicIndex = int | slice | tuple[int | slice, ...]


class SafetensorsFile:
    """One safetensors file whose header has been checked in full; `entries` are in the header's order.

    Reading maps the file anew for each tensor: pages are fetched when touched, and released with the last view.
    """

    def __init__(
        self, path: Path, entries: dict[str, TensorEntry], metadata: dict[str, str], identity: tuple[int, ...]
    ):
        self.path = path
        self.entries = entries
        self.metadata = metadata
        self._identity = identity

    @classmethod
    def open(cls, path: str | Path) -> "SafetensorsFile":
        """Read and check the header of `path`; no tensor is touched.

        Raises:
            LaneformerError: the file is missing, cut, no safetensors file, or its header is not exactly consistent.
        """
        path = Path(path)
        with faults_of(path):
            if not path.is_file():
                raise LaneformerError("is a broken link or no regular file" if path.is_symlink() else "is missing")
            with path.open("rb") as file:
                stat = os.fstat(file.fileno())
                entries, metadata = read_header(file, stat.st_size, path)
        return cls(path, entries, metadata, _identity(stat))

    def read(self, name: str) -> np.ndarray:
        """Tensor `name`, bit for bit: a read-only view of the mapped file, of `entries[name]`'s shape and dtype.

        Raises:
            LaneformerError: there is no such tensor, or the file changed after it was opened.
        """
        with faults_of(self.path):
            entry = self.entries.get(name)
            if entry is None:
                raise LaneformerError(f"has no tensor {quoted(name)}")
            with self.path.open("rb") as file:
                if _identity(os.fstat(file.fileno())) != self._identity:
                    raise LaneformerError("changed while it was being read")
                return _map(file.fileno(), entry)

    def read_slice(self, name: str, index: BasicIndex) -> np.ndarray:
        """`read(name)[index]` for whole numbers and slices: still a view, so that only its own bytes are fetched.

        Raises:
            LaneformerError: as `read`.
            IndexError: `index` lies outside the tensor.
        """
        return np.asarray(self.read(name)[index])


class SafetensorsFolder:
    """The safetensors weights of a Hugging Face folder: those that its index names, else its `model.safetensors`.

    `entries` covers every tensor of those files; any other file of the folder is ignored.
    """

    def __init__(self, path: Path, files: tuple[SafetensorsFile, ...]):
        self.path = path
        self.files = files
        self.entries = {name: entry for file in files for name, entry in file.entries.items()}
        self._file_of = {name: file for file in files for name in file.entries}

    @classmethod
    def open(cls, path: str | Path) -> "SafetensorsFolder":
        """Check the index and the header of every file that it names.

        Raises:
            LaneformerError: there are no safetensors weights; a shard is missing, faulty, or lies outside the folder;
                a shard lacks a tensor that the index puts there; two shards hold the same tensor.
        """
        path = Path(path)
        with faults_of(path):
            if not path.is_dir():
                raise LaneformerError("is not a folder" if path.exists() else "is missing")
            has_index = os.path.lexists(path / INDEX_FILE)
            if not has_index and not os.path.lexists(path / SINGLE_FILE):
                raise LaneformerError(_explain_no_weights(path))
        if not has_index:
            return cls(path, (SafetensorsFile.open(path / SINGLE_FILE),))
        with faults_of(path / INDEX_FILE):
            shard_of = _read_index(path / INDEX_FILE)
            _check_shards_exist(path, shard_of)
        shards = {shard: SafetensorsFile.open(path / shard) for shard in dict.fromkeys(shard_of.values())}
        with faults_of(path):
            _check_against_index(shards, shard_of)
        return cls(path, tuple(shards.values()))

    def read(self, name: str) -> np.ndarray:
        """Tensor `name` of whichever file holds it (see `SafetensorsFile.read`)."""
        return self._holder(name).read(name)

    def read_slice(self, name: str, index: BasicIndex) -> np.ndarray:
        """Part of tensor `name`, fetching only its bytes (see `SafetensorsFile.read_slice`)."""
        return self._holder(name).read_slice(name, index)

    def _holder(self, name: str) -> SafetensorsFile:
        if name not in self._file_of:
            raise LaneformerError(f"{printable(self.path)}: has no tensor {quoted(name)}")
        return self._file_of[name]


class SafetensorsWriter:
    """A safetensors file written tensor by tensor, in any order, that appears under `path` whole or not at all.

    The header is written first, from `plan` (name -> dtype and shape). Tensors lie in the plan's order, but wider
    dtypes first, so that each is aligned to its own dtype. Until `close`, the bytes are in a hidden file beside
    `path`; as a context manager, the writer closes at the end and removes that file after an exception.

    Raises:
        LaneformerError: the plan has a dtype or shape that the format lacks, or the file cannot be written.
    """

    def __init__(
        self,
        path: str | Path,
        plan: Mapping[str, tuple[DTypeLike, tuple[int, ...]]],
        metadata: Mapping[str, str] = TRANSFORMERS_METADATA,
    ):
        self.path = Path(path)
        self._partial = self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")
        with faults_of(self.path):
            header, self._entries = plan_header(self.path, plan, metadata)
            self._missing = dict.fromkeys(plan)
            self._file = self._partial.open("wb", buffering=0)
            try:
                self._put(memoryview(header), 0)
            except BaseException:
                self.abort()
                raise

    def write(self, name: str, array: ArrayLike) -> None:
        """Write the values of `array`, whatever its memory layout, as tensor `name`.

        Raises:
            LaneformerError: `name` is not in the plan or already written, `array` has another shape or dtype than
                planned, or the disk is full.
        """
        values = np.asarray(array)
        with faults_of(self.path):
            if name not in self._missing:
                fault = "was written before" if name in self._entries else "is not in the plan"
                raise LaneformerError(f"tensor {quoted(name)} {fault}")
            entry = self._entries[name]
            if (values.dtype, values.shape) != (entry.dtype, entry.shape):
                raise LaneformerError(
                    f"tensor {quoted(name)} is {values.dtype}{list(values.shape)}, "
                    f"but the plan says {entry.dtype}{list(entry.shape)}"
                )
            self._put(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data, entry.start)
            del self._missing[name]

    def close(self) -> None:
        """Flush to the disk and give the file its name, replacing an older one; any failure removes the partial file.

        Raises:
            LaneformerError: a planned tensor was not written, or the disk refuses.
        """
        try:
            with faults_of(self.path):
                if self._missing:
                    names = ", ".join(quoted(name) for name in list(self._missing)[:3])
                    raise LaneformerError(f"{len(self._missing)} planned tensors were never written: {names}")
                os.fsync(self._file.fileno())
                self._file.close()
                os.replace(self._partial, self.path)
                flush(self.path.parent)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Remove the partial file; `path` stays as it was."""
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _put(self, data: memoryview, offset: int) -> None:
        while data:
            written = os.pwrite(self._file.fileno(), data[:MAX_WRITE_BYTES], offset)
            data, offset = data[written:], offset + written


def _identity(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _map(descriptor: int, entry: TensorEntry) -> np.ndarray:
    if not entry.nbytes:
        empty = np.empty(entry.shape, entry.dtype)
        empty.setflags(write=False)
        return empty
    skipped = entry.start % mmap.ALLOCATIONGRANULARITY
    mapped = mmap.mmap(descriptor, skipped + entry.nbytes, access=mmap.ACCESS_READ, offset=entry.start - skipped)
    return np.frombuffer(mapped, entry.dtype, math.prod(entry.shape), skipped).reshape(entry.shape)


def _explain_no_weights(folder: Path) -> str:
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if pickled:
        return (
            f"has only pickled weights ({printable(pickled[0])}), which are never opened as they can run code: "
            "get or save the model as safetensors"
        )
    return f"has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}"


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file within the folder, as the index says."""
    if not path.is_file():
        raise LaneformerError("is a broken link or no regular file")
    if path.stat().st_size > MAX_HEADER_BYTES:
        raise LaneformerError(f"is too big for an index ({path.stat().st_size} bytes)")
    weight_map = parse_json(path.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise LaneformerError("has no weight_map of tensor names to files")
    return {name: _check_shard_name(name, shard) for name, shard in weight_map.items()}


def _check_shard_name(tensor: str, shard: Any) -> str:
    where = f"puts tensor {quoted(tensor)} in {quoted(shard)}"
    if not isinstance(shard, str):
        raise LaneformerError(f"{where}, which is no file name")
    path = PurePosixPath(shard)
    # A backslash or a drive's colon would be a way out of the folder on Windows.
    if path.is_absolute() or ".." in path.parts or any(letter in shard for letter in "\\:\0"):
        raise LaneformerError(f"{where}, which may lie outside the folder: refused")
    if path.suffix != ".safetensors":
        raise LaneformerError(f"{where}, which is no .safetensors file: never opened")
    return str(path)


def _check_shards_exist(folder: Path, shard_of: Mapping[str, str]) -> None:
    missing = sorted(shard for shard in set(shard_of.values()) if not (folder / shard).exists())
    if missing:
        tensor = next(name for name, shard in shard_of.items() if shard == missing[0])
        more = f" (and {len(missing) - 1} more shards)" if len(missing) > 1 else ""
        raise LaneformerError(
            f"puts tensor {quoted(tensor)} in {quoted(missing[0])}, which is missing{more}: download it again"
        )


def _check_against_index(shards: Mapping[str, SafetensorsFile], shard_of: Mapping[str, str]) -> None:
    holder: dict[str, str] = {}
    for shard, file in shards.items():
        for name in file.entries:
            if name in holder:
                raise LaneformerError(f"tensor {quoted(name)} is in both {quoted(holder[name])} and {quoted(shard)}")
            holder[name] = shard
    for name, shard in shard_of.items():
        if name not in shards[shard].entries:
            raise LaneformerError(f"{quoted(shard)} lacks tensor {quoted(name)}, which {INDEX_FILE} puts there")


def flush(path: Path) -> None:
    """Makes a file's content, or a rename within a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
