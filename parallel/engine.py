"""The engine's programs on a mesh: the same functions inside one `shard_map`, each device with its own lanes."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from laneformer_jax import decode
from laneformer_jax.cache import Cache, init_cache
from laneformer_jax.config import LaneformerConfig
from laneformer_jax.engine import Engine
from laneformer_jax.model import Laneformer
from laneformer_jax.schedule import Pack
from laneformer_jax.weights import Place
from parallel import mesh as specs
from parallel.compile_options import compiler_options


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

    Args:
        model: with parameters placed by `place_on`, or abstract ones for compiling alone.
        mesh: of the axes "data" and "lanes".
        pack: what one sum between devices carries, a module's output or a layer's two; see `make_schedule`.
        sum_dtype: in which sums travel; the activations' own if None.

    Raises:
        LaneformerError: the mesh does not fit the model.
        UsageError: `pack` or `sum_dtype` is none that there is.
    """

    def __init__(self, model: Laneformer, mesh: Mesh, pack: Pack = "module", sum_dtype: str | None = None):
        super().__init__(model)
        specs.check_mesh(mesh, model.config)
        self.lanes = specs.exchange(pack, sum_dtype)
        self.mesh, self.row_multiple = mesh, mesh.shape[specs.DATA]
        self.state_specs = specs.state_specs(self.state, mesh)

    def fetch(self, arrays: Any) -> Any:
        """The arrays' values on the host of every process, also where other processes hold some of their rows."""
        if jax.process_count() == 1:
            return jax.device_get(arrays)
        return multihost_utils.process_allgather(arrays, tiled=True)

    def lower_resume(self, shape: decode.Shape, progress: decode.Progress, choice: decode.Choice) -> jax.stages.Lowered:
        """The decode loop for arguments of these shapes, ready to be compiled; needs no device."""
        program = self._program("resume", shape, progress.token.shape, len(choice.eos))
        return cast(jax.stages.Wrapped, program).lower(
            self.state, progress, choice, jax.ShapeDtypeStruct((), jnp.int32)
        )

    def _make_cache(self, rows: int, capacity: int) -> Callable[[], Cache]:
        make = partial(init_cache, self.config, rows, capacity, self.dtype)
        shardings = jax.tree.map(partial(NamedSharding, self.mesh), specs.CACHE)
        return jax.jit(make, out_shardings=shardings)

    def _compile(self, kind: str, function: Callable[..., Any], donate: tuple[int, ...] = ()) -> Callable[..., Any]:
        inputs, outputs = specs.PROGRAMS[kind]
        if kind == "logits" and self.config.vocab_size % self.mesh.shape[specs.LANES]:
            outputs = specs.ROWS  # a vocabulary that cannot be split evenly is whole on every device
        on_mesh = jax.shard_map(
            partial(function, lanes=self.lanes),
            mesh=self.mesh,
            in_specs=(self.state_specs, *inputs),
            out_specs=outputs,
            check_vma=False,
        )
        options = compiler_options(self.mesh)
        return jax.jit(on_mesh, donate_argnums=donate, compiler_options=options or None)
