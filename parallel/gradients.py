"""The training loss and its gradients on a mesh: lanes over one axis, rows over the other, logits never gathered."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from laneformer_jax.array_types import Array, Bool, Float, Int
from laneformer_jax.lanes import ALL_HELD, Lanes
from laneformer_jax.model import Laneformer
from parallel import mesh as specs
from parallel.engine import MeshEngine

GradientFunction = Callable[[nnx.State, Array, Array], tuple[Array, nnx.State]]


def sum_of_losses(
    model: Laneformer, ids: Int[Array, "B T"], counted: Bool[Array, "B T"], lanes: Lanes = ALL_HELD
) -> Float[Array, ""]:
    """sum_bt counted_bt * -log p(ids_bt | ids_b0 .. ids_b,t-1) in nats, float32; a row's first token is never a target.

    Args:
        model: with the lanes held here.
        ids: rows of equal length.
        counted: which tokens are targets; column 0 has no effect.
        lanes: the way to the others. Every device exchanges the sum and the target's share of its part of the
            vocabulary.
    """
    logits = model(ids[:, :-1], lanes).astype(jnp.float32)
    targets, held = ids[:, 1:], logits.shape[-1]
    vocab = model.config.vocab_size
    shared = lanes if held < vocab else ALL_HELD
    here = targets - shared.offset(held, vocab)
    inside = (here >= 0) & (here < held)
    chosen = jnp.take_along_axis(logits, jnp.clip(here, 0, held - 1)[..., None], axis=-1)[..., 0]
    top = shared.max(jax.lax.stop_gradient(jnp.max(logits, axis=-1)))
    mass = shared.add(jnp.sum(jnp.exp(logits - top[..., None]), axis=-1))
    losses = top + jnp.log(mass) - shared.add(jnp.where(inside, chosen, 0.0))
    return jnp.sum(jnp.where(counted[:, 1:], losses, 0.0))


def make_gradients(engine: MeshEngine) -> GradientFunction:
    """`(state, ids [B, T], counted [B, T]) -> (sum_of_losses, its gradient)`, compiled for the engine's mesh.

    `state` is the engine's or one like it, and the gradient lies where its parameters lie. B is a multiple of the
    mesh's data axis. Divide both by the number of counted targets for means.
    """

    def loss(state: nnx.State, ids: Array, counted: Array) -> Array:
        held = sum_of_losses(nnx.merge(engine.graph, state), ids, counted, engine.lanes)
        # Equal on all devices of a lane group; the mean tells the transposition so.
        return jax.lax.psum(jax.lax.pmean(held, specs.LANES), specs.DATA)

    on_mesh = jax.shard_map(
        loss,
        mesh=engine.mesh,
        in_specs=(engine.state_specs, specs.ROWS, specs.ROWS),
        out_specs=PartitionSpec(),
        check_vma=True,
    )
    return jax.jit(jax.value_and_grad(on_mesh))
