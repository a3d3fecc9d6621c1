"""Gradients on meshes are the single device's, for every class of parameter."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import nnx
from tolerances import GRADIENT_FLOAT32

from parallel import MeshEngine, make_mesh
from parallel.gradients import make_gradients, sum_of_losses

SHARED = toy.BASE
PER_LANE = SHARED.replace(head="lane", lane_norm_scale=True)
TIED = SHARED.replace(tie_embeddings=True, delay=3, early_comm=True)
# (config, data, lanes, pack)
MESHES = [
    (SHARED, 1, 1, "module"),
    (SHARED, 1, 2, "module"),
    (SHARED, 1, 8, "layer"),
    (PER_LANE, 1, 8, "layer"),
    (TIED, 2, 4, "module"),
    (SHARED.replace(head="vocab_parallel", delay=0), 1, 2, "module"),
]


def batch(config):
    ids = jnp.asarray(toy.ids(config, rows=2, tokens=12))
    return ids, ids % 5 != 0


@cache
def reference(config):
    """Loss and gradients of the plain model, by path."""
    graph, state = nnx.split(toy.model(config))
    loss, grads = jax.jit(jax.value_and_grad(lambda s: sum_of_losses(nnx.merge(graph, s), *batch(config))))(state)
    return float(loss), dict(nnx.to_flat_state(grads))


@pytest.mark.parametrize(("config", "data", "lanes", "pack"), MESHES)
def test_gradients_are_the_single_devices(config, data, lanes, pack):
    expected_loss, expected = reference(config)
    engine = MeshEngine(toy.model(config), make_mesh(lanes, data), pack=pack)
    loss, grads = make_gradients(engine)(engine.state, *batch(config))
    assert float(loss) == pytest.approx(expected_loss, rel=GRADIENT_FLOAT32)
    found = dict(nnx.to_flat_state(grads))
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        size = np.linalg.norm(leaf[...])
        assert size > 0, path
        assert np.linalg.norm(np.asarray(found[path][...]) - leaf[...]) < GRADIENT_FLOAT32 * size, path


def test_the_loss_is_that_of_the_logits():
    ids, counted = batch(SHARED)
    logits = np.asarray(toy.model(SHARED)(ids), np.float64)[:, :-1]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    losses = -np.take_along_axis(log_p, np.asarray(ids)[:, 1:, None], axis=-1)[..., 0]
    expected = losses[np.asarray(counted)[:, 1:]].sum()
    assert float(sum_of_losses(toy.model(SHARED), ids, counted)) == pytest.approx(expected, rel=GRADIENT_FLOAT32)
