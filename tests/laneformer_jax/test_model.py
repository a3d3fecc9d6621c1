import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import toy
from flax import nnx
from tolerances import GRADIENT_DIFFERENCE, LOGITS_BFLOAT16, LOGITS_FLOAT32

import laneformer_jax as lf
from laneformer_jax.cache import cache_bytes, init_cache
from laneformer_jax.weights import abstract_model, parameter_count

SMALL = toy.BASE.replace(num_layers=3, sliding_layers=())
SWITCHES = {
    "attention_only": {"mlp_comm": False},
    "mlp_only": {"attention_comm": False},
    "none": {"attention_comm": False, "mlp_comm": False},
    "early": {"early_comm": True},
}
MODES = {
    "delay_0": {"delay": 0},
    "delay_1": {"delay": 1},
    "delay_3": {"delay": 3},
    "delay_4": {"delay": 4},
    **SWITCHES,
    "odd_attention_only": {"delay": 1, "mlp_comm": False},
    "odd_early": {"delay": 3, "early_comm": True},
    "sliding": {"sliding_window": 5, "sliding_layers": (1,)},
    "window_of_one": {"sliding_window": 1, "sliding_layers": (0, 2)},
    "llama3_rope": {"rope_scaling": lf.RopeScaling(4.0, 1.0, 4.0, 16), "rope_theta": 100.0},
    "tied": {"tie_embeddings": True},
    "lane_norms_lane_head": {"lane_norm_scale": True, "head": "lane"},
    "vocab_head": {"head": "vocab_parallel", "norm_eps": 0.1},
    "summed_before_the_norm": {"pre_norm_lane_agg": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_the_formula(mode):
    config = SMALL.replace(**MODES[mode])
    weights = toy.named_weights(config)
    for row, logits in zip(toy.ids(config), toy.logits(config), strict=True):
        assert np.abs(logits - oracle.forward(weights, config, row)).max() < LOGITS_FLOAT32


def test_bfloat16_follows_float32():
    config = SMALL.replace(num_layers=1, delay=1, dtype="bfloat16")
    logits = np.asarray(toy.language_model(config).logits(toy.ids(config)))
    assert logits.dtype == np.float32
    weights = toy.named_weights(config)
    expected = np.stack([oracle.forward(weights, config, row) for row in toy.ids(config)])
    assert np.abs(logits - expected).max() < LOGITS_BFLOAT16 * np.abs(expected).max()


def test_two_billion_parameters():
    config = lf.laneformer_2b()
    assert parameter_count(config) == 2_320_069_632
    shapes = {leaf.shape for leaf in jax.tree.leaves(nnx.state(abstract_model(config).blocks[0]))}
    assert (8, 1536, 3072) in shapes and (8, 3072, 1536) in shapes  # 12,288 neurons over 8 lanes, out x in and back


def test_cache_of_two_billion_parameters_at_4096_tokens():
    config = lf.laneformer_2b()
    made = jax.eval_shape(lambda: init_cache(config, 1, 4096, jnp.dtype("bfloat16")))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(made.layers))
    slots = 10 * 2048 + 5 * 4096  # ten rings and five whole contexts
    assert size == slots * 16 * 96 * 2 * 2 == 251_658_240  # KV heads, head dim, keys and values, bytes
    assert size == cache_bytes(config, 1, 4096, jnp.dtype("bfloat16"))
    every_layer_whole = config.replace(sliding_layers=())
    assert cache_bytes(every_layer_whole, 1, 4096, jnp.dtype("bfloat16")) == 15 * 4096 * 16 * 96 * 2 * 2


def test_small_model_is_as_big_as_said():
    assert 1_800_000 < parameter_count(lf.laneformer_small()) < 1_900_000


def loss_of(config):
    """Mean negative log-likelihood of the toy tokens as a function of the state, and that state."""
    graph, state = nnx.split(toy.model(config))
    ids = jnp.asarray(toy.ids(config))

    def loss(state):
        scores = jax.nn.log_softmax(nnx.merge(graph, state)(ids[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(scores, ids[:, 1:, None], axis=-1))

    return loss, state


def test_gradients_are_those_of_the_loss():
    loss, state = loss_of(SMALL.replace(num_layers=1, delay=1))
    value_and_grad = jax.jit(jax.value_and_grad(loss))
    value, gradient = value_and_grad(state)
    assert abs(float(value) - np.log(SMALL.vocab_size)) < 1
    for path, leaf in nnx.to_flat_state(gradient):
        assert np.isfinite(leaf[...]).all() and np.abs(leaf[...]).max() > 0, path
    # Along the gradient itself the slope is its squared norm.
    squared = sum(float(np.sum(np.square(leaf, dtype=np.float64))) for leaf in jax.tree.leaves(gradient))
    step = 3e-3 / squared**0.5

    def moved(size):
        return jax.tree.map(lambda p, g: np.asarray(p) + np.float32(size) * np.asarray(g), state, gradient)

    up, down = (float(value_and_grad(moved(size))[0]) for size in (step, -step))
    assert abs((up - down) / (2 * step * squared) - 1) < GRADIENT_DIFFERENCE


def test_nothing_crosses_lanes_without_communication():
    """With a head of its own for each lane, lane 1's weights touch lane 1's logits alone."""
    config = SMALL.replace(head="vocab_parallel", attention_comm=False, mlp_comm=False)

    def other_lane_1(path, leaf):
        at_lanes = path[0] == "blocks" and path[-1] == "weight"
        return leaf.replace(leaf[...].at[1].multiply(2)) if at_lanes else leaf

    for case, untouched in [(config, True), (config.replace(attention_comm=True), False)]:
        graph, state = nnx.split(toy.model(case))
        changed = nnx.from_flat_state([(path, other_lane_1(path, leaf)) for path, leaf in nnx.to_flat_state(state)])
        logits = np.asarray(nnx.merge(graph, changed)(jnp.asarray(toy.ids(case))))
        same = (logits == toy.logits(case)).reshape(*logits.shape[:2], config.num_lanes, -1).all((0, 1, 3))
        assert same.tolist() == [untouched, False, *[untouched] * 6]


def test_later_tokens_change_nothing_before_them():
    changed = toy.ids(SMALL).copy()
    changed[:, 13:] = (changed[:, 13:] + 1) % SMALL.vocab_size
    logits = np.asarray(toy.model(SMALL)(jnp.asarray(changed)))
    np.testing.assert_array_equal(logits[:, :13], toy.logits(SMALL)[:, :13])
    assert (np.abs(logits - toy.logits(SMALL)).max(-1)[:, 13:] > 0).all()
