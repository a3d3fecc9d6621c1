"""Meshes of ("data", "lanes") devices, and what lies where on them."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from laneformer_jax.cache import Cache
from laneformer_jax.config import DTYPES, LaneformerConfig
from laneformer_jax.decode import Choice, Progress
from laneformer_jax.errors import LaneformerError, UsageError
from laneformer_jax.lanes import Lanes
from laneformer_jax.schedule import PACKS, Pack

DATA, LANES = "data", "lanes"


def _specs(arrays: type, **specs: Any) -> Any:
    """Specs in the shape of a dataclass of arrays; one spec may stand for a whole subtree."""
    return arrays(**specs)


ROWS, EVERYWHERE = PartitionSpec(DATA), PartitionSpec()
CACHE = _specs(Cache, layers=PartitionSpec(DATA, LANES), length=ROWS)
CHOICE = _specs(Choice, keys=ROWS, values=EVERYWHERE, sampleable=EVERYWHERE, eos=EVERYWHERE)
PROGRESS = _specs(Progress, cache=CACHE, token=ROWS, active=ROWS, tokens=ROWS, count=ROWS, step=EVERYWHERE, finite=ROWS)
# Arguments behind the state, and results, of each of the engine's programs.
PROGRAMS = {
    "start": ((ROWS, ROWS, CACHE, CHOICE, EVERYWHERE), PROGRESS),
    "resume": ((PROGRESS, CHOICE, EVERYWHERE), PROGRESS),
    "logits": ((ROWS,), PartitionSpec(DATA, None, LANES)),
}


def make_mesh(lanes: int, data: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of `data` x `lanes` devices, over whose second axis the model's lanes are split.

    Raises:
        LaneformerError: there are not that many devices; says how many there are and how to get more.
        UsageError: `data` or `lanes` is no positive whole number.
    """
    devices = jax.devices() if devices is None else devices
    if not all(isinstance(size, int) and size > 0 for size in (data, lanes)):
        raise UsageError(f"a mesh takes whole numbers of at least 1, got {data!r} x {lanes!r} devices")
    if data * lanes > len(devices):
        raise LaneformerError(
            f"{data} x {lanes} devices asked for, {len(devices)} {devices[0].platform} device(s) here: on a CPU start "
            f"with XLA_FLAGS=--xla_force_host_platform_device_count={data * lanes} set before JAX is first used "
            f"(`laneformer --devices {data * lanes}` does), elsewhere use fewer devices or more hosts"
        )
    return Mesh(np.asarray(devices[: data * lanes]).reshape(data, lanes), (DATA, LANES))


def check_mesh(mesh: Mesh, config: LaneformerConfig) -> None:
    """Raises:
    LaneformerError: the mesh has other axes, or its lanes axis does not divide the model's lanes.
    """
    if not isinstance(mesh, Mesh) or mesh.axis_names != (DATA, LANES):
        got = mesh.axis_names if isinstance(mesh, Mesh) else repr(mesh)
        raise LaneformerError(f"the mesh must have the axes {(DATA, LANES)}, as parallel.make_mesh gives, got {got}")
    if config.num_lanes % mesh.shape[LANES]:
        raise LaneformerError(f"{mesh.shape[LANES]} devices do not divide the model's {config.num_lanes} lanes")


def exchange(pack: Pack = "module", sum_dtype: str | None = None) -> Lanes:
    """The lanes that one device of a mesh holds, and how their sums travel to the others.

    Raises:
        UsageError: `pack` or `sum_dtype` is none that there is.
    """
    if pack not in PACKS:
        raise UsageError(f"pack must be one of {', '.join(PACKS)}, got {pack!r}")
    if sum_dtype is not None and sum_dtype not in DTYPES:
        raise UsageError(f"sum_dtype must be one of {', '.join(DTYPES)}, got {sum_dtype!r}")
    return Lanes(LANES, pack, sum_dtype)


def parameter_spec(variable: nnx.Variable, mesh: Mesh) -> PartitionSpec:
    """Where a parameter lies: split by lane or by vocabulary, whole on every device if that does not come out even."""
    axes = variable.get_metadata("axes")
    devices = mesh.shape[LANES]
    split = (axis is not None and size % devices == 0 for axis, size in zip(axes, variable.shape, strict=True))
    return PartitionSpec(*(LANES if yes else None for yes in split))


def state_specs(state: nnx.State, mesh: Mesh) -> nnx.State:
    """`parameter_spec` of every parameter, as a tree like the state."""
    flat = [(path, leaf.replace(parameter_spec(leaf, mesh))) for path, leaf in nnx.to_flat_state(state)]
    return nnx.from_flat_state(flat)
