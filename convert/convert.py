"""One conversion from end to end: plan, tensors, other files, manifest, check; the target appears last and whole."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqdm import tqdm

from convert.plan import Plan, make_plan
from convert.source import Source, sha256
from convert.staging import building, check_target
from convert.tensors import Reader
from laneformer_jax.errors import LaneformerError
from laneformer_jax.safetensors_io import SINGLE_FILE, SafetensorsWriter
from laneformer_jax.weights import ORBAX_FOLDER

MANIFEST_FILE = "manifest.json"
PACKAGES = ("laneformer-jax", "jax", "flax", "orbax-checkpoint", "tensorstore", "numpy", "ml-dtypes")
SPARE_BYTES = 1 << 20  # for what lies beside the tensors


@dataclass(frozen=True)
class Result:
    """What a conversion wrote.

    Attributes:
        not_finite: values per tensor that are infinite or NaN in the source, and so in the result.
        overflowed: values per tensor that became infinite.
    """

    plan: Plan
    not_finite: dict[str, int]
    overflowed: dict[str, int]


def convert(
    source: Source,
    target: Path,
    to: str | None = None,
    dtype: str = "keep",
    overwrite: bool = False,
    allow_overflow: bool = False,
    check: Callable[[Path, Plan], object] | None = None,
) -> Result:
    """Converts a model folder, reading and writing one tensor, or one lane of it, at a time.

    Args:
        source: the folder.
        target: the folder that will hold weights, config, tokenizer and a manifest.
        to: "orbax" or "safetensors"; the one that `source` is not, by default.
        dtype: "keep" copies every tensor bit for bit; "float32", "bfloat16" or "float16" casts.
        overwrite: replace an older model folder at `target` once the new one is complete.
        allow_overflow: write infinities where values exceed `dtype`.
        check: is called with the finished folder, before it becomes `target`, and may raise.

    Raises:
        LaneformerError: source or target are unusable, or values overflow; `target` is as it was before.
    """
    target = target.resolve()
    plan = make_plan(source.folder, to, dtype)
    files = source.files(plan.source)
    _check_apart(source.folder, target, files)
    check_target(target, overwrite)
    with _faults_of_target(target), building(target, overwrite) as folder:
        _check_space(plan, folder)
        hashes = {path.relative_to(source.folder).as_posix(): sha256(path) for path in files}
        with tqdm(total=plan.nbytes, unit="B", unit_scale=True, disable=None, file=sys.stderr) as bar:
            reader = Reader(plan.source, bar.update)
            _write_tensors(plan, folder, reader)
        if reader.overflowed and not allow_overflow:
            raise LaneformerError(_explain_overflow(reader.overflowed, dtype))
        _write_others(source, plan, folder, dtype)
        _write_json(folder / MANIFEST_FILE, _manifest(source, plan, dtype, hashes))
        if check is not None:
            check(folder, plan)
    return Result(plan, reader.not_finite, reader.overflowed)


@contextmanager
def _faults_of_target(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = error.filename or target
        raise LaneformerError(f"{target} was not made: {where}: {error.strerror or error}") from error


def _check_apart(source: Path, target: Path, files: list[Path]) -> None:
    inside = [path for path in files if target in path.resolve().parents]
    if source == target:
        raise LaneformerError(f"{target} is the source itself: choose another target")
    if source in target.parents or target in source.parents or inside:
        raise LaneformerError(f"source {source} and target {target} lie within each other: choose another target")


def _check_space(plan: Plan, folder: Path) -> None:
    needed, free = plan.nbytes + SPARE_BYTES, shutil.disk_usage(folder).free
    if needed > free:
        raise LaneformerError(f"{folder.parent} has {free:,} bytes free, and {needed:,} are needed: make room")


def _write_tensors(plan: Plan, folder: Path, reader: Reader) -> None:
    if plan.to == "orbax":
        from convert import orbax_store

        orbax_store.save(plan, folder / ORBAX_FOLDER, reader.read)
        return
    header = {item.target: (item.dtype, item.shape) for item in plan.items}
    with SafetensorsWriter(folder / SINGLE_FILE, header) as writer:
        for item in plan.items:
            writer.write(item.target, reader.read_whole(item))


def _write_others(source: Source, plan: Plan, folder: Path, dtype: str) -> None:
    for path in source.carried():
        shutil.copyfile(path, folder / path.name)
    if dtype != "keep":
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        # Both spellings are in circulation, and an old value under one would contradict the other.
        names = [name for name in ("torch_dtype", "dtype") if name in config] or ["torch_dtype"]
        _write_json(folder / "config.json", config | dict.fromkeys(names, plan.config.dtype))


def _manifest(source: Source, plan: Plan, dtype: str, hashes: dict[str, str]) -> dict[str, Any]:
    return {
        "format": f"laneformer {plan.to}",
        "source": {**source.origin, "sha256": hashes},
        "dtype": dtype,
        "dtypes": plan.dtypes,
        "parameters": plan.size,
        "versions": {name: version(name) for name in PACKAGES},
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _explain_overflow(overflowed: dict[str, int], dtype: str) -> str:
    shown = "; ".join(f"{name}: {count} values" for name, count in overflowed.items())
    return f"{len(overflowed)} tensor(s) exceed {dtype}: {shown}; --allow-overflow writes infinities in their place"
