"""Converts seeded bfloat16 weights of the 2B model's shapes, in two shards, to Orbax and back, and measures each
process: peak resident memory above what it had after its imports, and wall time beside `cp` of the same bytes.
"""

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from importlib.metadata import version
from pathlib import Path

import ml_dtypes
import numpy as np
from flax import nnx

from laneformer_jax import weights
from laneformer_jax.config import LaneformerConfig, laneformer_2b
from laneformer_jax.errors import LaneformerError
from laneformer_jax.safetensors_io import INDEX_FILE, SafetensorsWriter

SHARDS = 2
PACKAGES = ("jax", "orbax-checkpoint", "tensorstore", "numpy")
# Sign and mantissa of a bfloat16 are drawn, and the exponent's last bit: values of about 0.01 to 0.06.
DRAWN, FIXED = np.uint16(0x80FF), np.uint16(0x3C00)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--layers and --folder."""
    layers = laneformer_2b().num_layers
    parser.add_argument("--layers", type=int, default=layers, help=f"fewer than the 2B model's (default: {layers})")
    parser.add_argument("--folder", type=Path, help="for the files, three times the weights (default: a temporary one)")


def run(args: argparse.Namespace) -> None:
    """Prints the figures; the files are removed.

    Raises:
        LaneformerError: the system does not tell a process's peak memory, or a conversion failed.
    """
    config = laneformer_2b()
    sliding = tuple(layer for layer in config.sliding_layers if layer < args.layers)
    config = config.replace(num_layers=args.layers, sliding_layers=sliding, dtype="bfloat16")
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="laneformer-bench-") as name:
        folder = Path(name)
        largest, total = make_checkpoint(config, folder / "source")
        print(f"{weights.parameter_count(config):,} parameters, {total:,} bytes, largest tensor {largest:,}")
        print(f"{platform.machine()}, Python {platform.python_version()}, " + ", ".join(map(_versioned, PACKAGES)))
        copy, flushed = time_copy(folder / "source", folder / "copy")
        print(f"cp: {copy:.1f} s, with its bytes flushed to the disk {flushed:.1f} s")
        limit = 2 * largest + 300_000_000
        for source, target in (("source", "orbax"), ("orbax", "safetensors")):
            peak, wall = measure(folder / source, folder / target)
            print(
                f"{source} -> {target}: peak {peak / 1e6:.0f} MB above imports (limit {limit / 1e6:.0f}), "
                f"{wall:.1f} s, {wall / flushed:.2f} times the flushed cp, {wall / copy:.2f} times cp alone"
            )


def make_checkpoint(config: LaneformerConfig, folder: Path) -> tuple[int, int]:
    """Writes seeded bfloat16 weights in the published layout; gives the bytes of the largest tensor and of all."""
    dtype = np.dtype(ml_dtypes.bfloat16)
    abstract = dict(nnx.to_flat_state(nnx.state(weights.abstract_model(config))))
    shapes = {name: tuple(abstract[path].shape) for name, path in weights.parameter_names(config).items()}
    sizes = {name: int(np.prod(shape)) * dtype.itemsize for name, shape in shapes.items()}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    plans: list[dict[str, tuple[np.dtype, tuple[int, ...]]]] = [{} for _ in range(SHARDS)]
    start = 0
    for name, shape in shapes.items():
        plans[SHARDS * start // sum(sizes.values())][name] = (dtype, shape)
        start += sizes[name]
    shard_of = {}
    for number, plan in enumerate(plans, 1):
        shard = f"model-{number:05}-of-{SHARDS:05}.safetensors"
        shard_of |= dict.fromkeys(plan, shard)
        with SafetensorsWriter(folder / shard, plan) as writer:
            for name, (_, shape) in plan.items():
                drawn = np.random.default_rng(zlib.crc32(name.encode())).integers(1 << 16, size=shape, dtype=np.uint16)
                writer.write(name, ((drawn & DRAWN) | FIXED).view(dtype))
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": shard_of}))
    return max(sizes.values()), sum(sizes.values())


def time_copy(source: Path, target: Path) -> tuple[float, float]:
    """Seconds that `cp` takes, without and with a flush of what it wrote."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    copied = time.perf_counter() - start
    subprocess.run(["sync", *target.iterdir()], check=True)
    flushed = time.perf_counter() - start
    shutil.rmtree(target)
    return copied, flushed


def measure(source: Path, target: Path) -> tuple[int, float]:
    """Peak bytes above the imports', and seconds from start to end, of one conversion in its own process.

    Raises:
        LaneformerError: it failed.
    """
    start = time.perf_counter()
    command = [sys.executable, "-m", "experiments.bench_convert", source, target]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    wall = time.perf_counter() - start
    if done.returncode:
        raise LaneformerError(f"the conversion of {source} failed")
    return int(done.stdout.split()[-1]), wall


def _measured(source: str, target: str) -> int:
    import jax

    from convert import convert, orbax_store
    from convert.source import find_source

    assert orbax_store
    jax.devices()  # the runtime is the interpreter's too
    before = peak_memory()
    convert.convert(find_source(source, None), Path(target))
    return peak_memory() - before


def peak_memory() -> int:
    """The most bytes that this process has held in memory so far.

    Raises:
        LaneformerError: the system is not Linux.
    """
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    if found is None:
        raise LaneformerError("peak memory is known on Linux only")
    return 1024 * int(found[1])


def _versioned(package: str) -> str:
    return f"{package} {version(package)}"


if __name__ == "__main__":
    print(_measured(*sys.argv[1:]))
