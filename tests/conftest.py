"""Eight CPU devices, strict dtype promotion, and shapes checked against their annotations while testing."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxtyping import install_import_hook  # noqa: E402

ARRAY_MODULES = ("cache", "decode", "lanes", "model", "rotary", "sampling")
install_import_hook([f"laneformer_jax.{name}" for name in ARRAY_MODULES], "beartype.beartype")

import jax  # noqa: E402
import pytest  # noqa: E402

from laneformer_jax import cache, decode, sampling  # noqa: E402

# Trees of shapes and of partition specs have these types too, and `Sampling` checks its own values.
for tree in (cache.Cache, cache.LayerCache, decode.Choice, decode.Progress, sampling.Sampling, sampling.Values):
    tree.__init__ = tree.__init__.__wrapped__

jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_sessionstart(session: pytest.Session) -> None:
    if jax.device_count() < 8:
        raise pytest.UsageError(f"the tests need 8 CPU devices, JAX shows {jax.devices()}")
