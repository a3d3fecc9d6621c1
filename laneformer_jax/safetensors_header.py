"""The header of a safetensors file: parsed and checked, or planned; no byte is believed before it is checked.

A file is the header's length (8 bytes, little endian), the header (JSON: name -> dtype, shape, data_offsets, and
`__metadata__`), and the tensors' bytes back to back. A checkpoint comes from strangers, so a header is refused unless
its tensors tile the file exactly, and every fault is one line.

Source: the format's description, https://github.com/huggingface/safetensors#format.
"""

import json
import math
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from laneformer_jax.errors import LaneformerError

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "C64": np.dtype(np.complex64),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

MAX_HEADER_BYTES = 100_000_000  # the official reader's limit
MAX_RANK = 32
GIT_LFS_START = b"version https://git-lfs"


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: bytes `start` up to `stop` of `file`, counted from the file's beginning."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@contextmanager
def faults_of(path: Path) -> Iterator[None]:
    """Put the name of the faulty file before the fault, and make the system's refusals such faults."""
    try:
        yield
    except OSError as error:
        raise LaneformerError(f"{printable(path)}: {error.strerror or error}") from error
    except LaneformerError as error:
        raise LaneformerError(f"{printable(path)}: {error}") from error


def printable(path: str | Path) -> str:
    """`path` on one line."""
    shown = str(path)
    return shown if shown.isprintable() else ascii(shown)


def quoted(value: Any) -> str:
    """A value out of an untrusted file, fit for one line of an error message."""
    shown = ascii(value)
    return shown if len(shown) <= 100 else f"{shown[:97]}..."


def parse_json(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`, refusing what readers of JSON disagree about.

    Raises:
        LaneformerError: `data` is not one JSON object in UTF-8, or has the same key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        parsed: dict[str, Any] = {}
        for key, value in pairs:
            if key in parsed:
                raise ValueError(f"{quoted(key)} stands there twice")
            for text in (key, value):
                if isinstance(text, str):
                    text.encode()  # an escaped half of a surrogate pair is no text
            parsed[key] = value
        return parsed

    def refuse(constant: str):
        raise ValueError(f"{constant} is not JSON")

    try:
        parsed = json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except UnicodeError as error:
        raise LaneformerError("is not UTF-8 text") from error
    except RecursionError as error:
        raise LaneformerError("is nested too deeply") from error
    except ValueError as error:
        raise LaneformerError(f"is not valid JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise LaneformerError("is not a JSON object")
    return parsed


def read_header(file: BinaryIO, size: int, path: Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors and the metadata of a file of `size` bytes, open at its beginning.

    Raises:
        LaneformerError: the file is no safetensors file, is cut, or its tensors do not tile it exactly.
    """
    header, data_start = _read_json(file, size)
    metadata = _check_metadata(header.pop("__metadata__", {}))
    entries = {name: _check_entry(name, spec, path, data_start) for name, spec in header.items()}
    _check_tiling(entries, data_start, size)
    return entries, metadata


def plan_header(
    path: Path, plan: Mapping[str, tuple[DTypeLike, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, TensorEntry]]:
    """The bytes before the first tensor, and where each tensor of `plan` (name -> dtype, shape) goes.

    Tensors keep the plan's order, but wider dtypes come first, so that each is aligned to its own dtype.

    Raises:
        LaneformerError: the plan has a name, dtype or shape that the format lacks.
    """
    header: dict[str, Any] = {"__metadata__": _check_metadata(dict(metadata))}
    planned = {name: (np.dtype(dtype), [operator.index(n) for n in shape]) for name, (dtype, shape) in plan.items()}
    end = 0
    for name, (dtype, shape) in sorted(planned.items(), key=lambda item: -item[1][0].itemsize):
        if dtype not in DTYPE_NAMES or name == "__metadata__":
            raise LaneformerError(f"tensor {quoted(name)} of {dtype} has no place in a safetensors file")
        _check_shape(f"tensor {quoted(name)}", shape, dtype)
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
    try:
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise LaneformerError("a tensor's name or a metadata entry is not valid text") from error
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise LaneformerError(f"the header of {len(plan)} tensors would be longer than {MAX_HEADER_BYTES} bytes")
    del header["__metadata__"]
    entries = {name: _check_entry(name, spec, path, 8 + len(text)) for name, spec in header.items()}
    return len(text).to_bytes(8, "little") + text, entries


def _read_json(file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """The parsed header, and the offset at which the tensors begin."""
    if not size:
        raise LaneformerError("is empty: download it again")
    prefix = file.read(8)
    if prefix == GIT_LFS_START[:8]:
        raise LaneformerError("is a Git LFS pointer instead of the weights: run `git lfs pull`")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise LaneformerError(f"is no safetensors file: its header would be {length} bytes long")
    data = file.read(length)
    if len(prefix) < 8 or len(data) < length:
        raise LaneformerError(f"is cut within its header, at byte {size}: download it again")
    if not data.startswith(b"{"):
        raise LaneformerError("is no safetensors file: its header does not begin with a brace")
    try:
        return parse_json(data), 8 + length
    except LaneformerError as error:
        raise LaneformerError(f"the header {error}") from error


def _check_metadata(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise LaneformerError("__metadata__ must map strings to strings")
    return metadata


def _check_entry(name: str, spec: Any, path: Path, data_start: int) -> TensorEntry:
    what = f"tensor {quoted(name)}"
    if not isinstance(spec, dict) or set(spec) != {"dtype", "shape", "data_offsets"}:
        raise LaneformerError(f"{what} must have exactly dtype, shape and data_offsets")
    code, shape, offsets = spec["dtype"], spec["shape"], spec["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise LaneformerError(f"{what} has the unknown dtype {quoted(code)}")
    dtype = DTYPES[code]
    _check_shape(what, shape, dtype)
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise LaneformerError(f"{what} has data_offsets {quoted(offsets)}, not two rising whole numbers")
    needed, spanned = math.prod(shape) * dtype.itemsize, offsets[1] - offsets[0]
    if needed != spanned:
        raise LaneformerError(f"{what} of {code} {quoted(shape)} needs {needed} bytes, but its offsets span {spanned}")
    return TensorEntry(name, dtype, tuple(shape), path, data_start + offsets[0], data_start + offsets[1])


def _are_sizes(values: Any) -> bool:
    """Whether `values` is a list of whole numbers >= 0 that 64 bits hold; true and 1.0 are no such numbers."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_shape(what: str, shape: Any, dtype: np.dtype) -> None:
    if not _are_sizes(shape) or len(shape) > MAX_RANK:
        raise LaneformerError(f"{what} has the impossible shape {quoted(shape)}")
    # Zeros count as ones: NumPy refuses an empty array whose other sizes overflow.
    if math.prod(size or 1 for size in shape) * dtype.itemsize >= 2**63:
        raise LaneformerError(f"{what} has the absurd shape {quoted(shape)}")


def _check_tiling(entries: Mapping[str, TensorEntry], data_start: int, file_size: int) -> None:
    """Every byte behind the header belongs to exactly one tensor."""
    end, before = data_start, "the header"
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.stop)):
        what = f"tensor {quoted(entry.name)}"
        if entry.stop > file_size:
            raise LaneformerError(f"is cut, or wrong: {what} ends at byte {entry.stop} of a file of {file_size} bytes")
        if entry.start < end:
            raise LaneformerError(f"{what} overlaps {before}")
        if entry.start > end:
            raise LaneformerError(f"has a gap of {entry.start - end} bytes between {before} and {what}")
        end, before = entry.stop, what
    if end != file_size:
        raise LaneformerError(f"has {file_size - end} bytes behind {before}, which belong to no tensor")
