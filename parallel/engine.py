"""The engine's programs on a mesh: the same functions inside one `shard_map`, each device with its own lanes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from laneformer_jax.cache import Cache, init_cache
from laneformer_jax.config import LaneformerConfig
from laneformer_jax.engine import Engine
from laneformer_jax.lanes import Lanes
from laneformer_jax.model import Laneformer
from laneformer_jax.weights import Place
from parallel import mesh as specs


def place_on(mesh: Mesh, config: LaneformerConfig) -> Place:
    """Puts a parameter on the mesh; every device reads its own lanes alone.

    Raises:
        LaneformerError: the mesh does not fit the config.
    """
    specs.check_mesh(mesh, config)

    def place(variable: nnx.Variable, read: Callable[[tuple[slice, ...]], np.ndarray]) -> jax.Array:
        sharding = NamedSharding(mesh, specs.parameter_spec(variable, mesh))
        return jax.make_array_from_callback(variable.shape, sharding, lambda index: read(index or ()))

    return place


class MeshEngine(Engine):
    """Runs a model's programs on a mesh: batch rows over "data", lanes over "lanes".

    Raises:
        LaneformerError: the mesh does not fit the model.
    """

    def __init__(self, model: Laneformer, mesh: Mesh):
        super().__init__(model)
        specs.check_mesh(mesh, model.config)
        self.mesh, self.row_multiple = mesh, mesh.shape[specs.DATA]
        self.state_specs = specs.state_specs(self.state, mesh)

    def _make_cache(self, rows: int, capacity: int) -> Callable[[], Cache]:
        make = partial(init_cache, self.config, rows, capacity, self.dtype)
        shardings = jax.tree.map(partial(NamedSharding, self.mesh), specs.CACHE)
        return jax.jit(make, out_shardings=shardings)

    def _compile(self, kind: str, function: Callable[..., Any], donate: tuple[int, ...] = ()) -> Callable[..., Any]:
        inputs, outputs = specs.PROGRAMS[kind]
        on_mesh = jax.shard_map(
            partial(function, lanes=Lanes(specs.LANES)),
            mesh=self.mesh,
            in_specs=(self.state_specs, *inputs),
            out_specs=outputs,
            check_vma=False,
        )
        return jax.jit(on_mesh, donate_argnums=donate)
