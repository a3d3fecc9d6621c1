import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import toy
from tolerances import ANGLES_FLOAT32, ROUNDED_BFLOAT16

from laneformer_jax import rotary
from laneformer_jax.config import RopeScaling

CONFIG = toy.BASE.replace(num_heads=4, num_kv_heads=4, num_lanes=4, head_dim=16)
LLAMA3 = CONFIG.replace(rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64))


def rotated(config, x, start):
    positions = jnp.arange(start, start + x.shape[1], dtype=jnp.int32)[None]
    return np.asarray(rotary.rotate(x, *rotary.angles(config, positions)).astype(jnp.float32), np.float64)


def vectors(dtype):
    """[1, 6, 1, 3, 16], and the same in float64 as [6, 3, 16]."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 6, 1, 3, 16)), dtype)
    return x, np.asarray(x, np.float64)[0, :, 0]


@pytest.mark.parametrize("config", [CONFIG, CONFIG.replace(rope_theta=500.0), LLAMA3], ids=["plain", "theta", "llama3"])
@pytest.mark.parametrize("start", [0, 300, 4090])
def test_interleaved_pairs_turn_as_complex_numbers(config, start):
    x, wide = vectors(jnp.float32)
    expected = oracle.rotate(wide, oracle.frequencies(config), start)
    assert np.abs(rotated(config, x, start)[0, :, 0] - expected).max() < ANGLES_FLOAT32


@pytest.mark.parametrize("start", [251, 1000, 4090])
def test_bfloat16_keeps_angles_in_float32(start):
    """bfloat16 has no whole numbers between 256 and 258: an angle in it would be off by up to a radian."""
    x, wide = vectors(jnp.bfloat16)
    expected = oracle.rotate(wide, oracle.frequencies(CONFIG), start)
    assert np.abs(rotated(CONFIG, x, start)[0, :, 0] - expected).max() < ROUNDED_BFLOAT16 * np.abs(expected).max()
    coarse = oracle.rotate(wide, oracle.frequencies(CONFIG), int(jnp.bfloat16(start)) + 1)
    assert np.abs(coarse - expected).max() > 0.1


def test_angles_are_float32_for_every_model_dtype():
    for dtype in ("float32", "bfloat16", "float16"):
        cos, sin = rotary.angles(CONFIG.replace(dtype=dtype), jnp.array([[257]], jnp.int32))
        assert cos.dtype == sin.dtype == jnp.float32
        exact = 257 * np.array(oracle.frequencies(CONFIG))
        assert np.abs(np.asarray(cos, np.float64)[0, 0] - np.cos(exact)).max() < ANGLES_FLOAT32
        assert np.abs(np.asarray(sin, np.float64)[0, 0] - np.sin(exact)).max() < ANGLES_FLOAT32


def test_llama3_keeps_short_waves_stretches_long_ones_and_interpolates_between():
    plain, scaled = rotary.inverse_frequencies(CONFIG), rotary.inverse_frequencies(LLAMA3)
    np.testing.assert_allclose(scaled, oracle.frequencies(LLAMA3), rtol=1e-6)
    ratio = scaled / plain
    # Wavelengths 6.3, 19.9, 62.8, 199, ... tokens against 64 / 4 = 16 and 64 / 1 = 64.
    assert ratio[0] == 1 and (ratio[3:] == 1 / 8).all()
    assert (1 / 8 < ratio[1:3]).all() and (ratio[1:3] < 1).all()


def test_scores_depend_on_distance_alone():
    x, _ = vectors(jnp.float32)
    near, far = rotated(CONFIG, x, 3)[0, :, 0], rotated(CONFIG, x, 1003)[0, :, 0]
    scores = [np.einsum("the,she->hts", y, y) for y in (near, far)]
    assert np.abs(scores[0] - scores[1]).max() < 10 * ANGLES_FLOAT32
