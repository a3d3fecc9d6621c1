"""Compiled programs of one model: one per shape, made when first needed and kept."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from laneformer_jax import decode
from laneformer_jax.cache import Cache, init_cache
from laneformer_jax.lanes import ALL_HELD, Lanes
from laneformer_jax.model import Laneformer

MIN_BUCKET = 16
CHUNK = 256


def bucket(size: int, smallest: int = MIN_BUCKET) -> int:
    """The least power of two that is at least `size` and `smallest`."""
    return max(smallest, 1 << (size - 1).bit_length())


def round_up(size: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


class Engine:
    """Runs a model's programs on one device.

    Attributes:
        row_multiple: the number of rows of every batch must be a multiple of it.
    """

    row_multiple = 1

    def __init__(self, model: Laneformer):
        self.config = model.config
        self.graph, self.state = nnx.split(model)
        self.dtype = jnp.dtype(model.embedding.dtype)
        self.programs: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def init_cache(self, rows: int, capacity: int) -> Cache:
        """An empty cache for `rows` rows of up to `capacity` tokens."""
        return self._program("cache", rows, capacity)()

    def start(self, shape: decode.Shape, prompts: jax.Array, lengths: jax.Array, cache: Cache, *rest: Any):
        """`decode.start`; the cache is consumed."""
        program = self._program("start", shape, prompts.shape, len(rest[0].eos))
        return program(self.state, prompts, lengths, cache, *rest)

    def resume(self, shape: decode.Shape, progress: decode.Progress, *rest: Any) -> decode.Progress:
        """`decode.resume`; the progress is consumed."""
        return self._program("resume", shape, progress.token.shape, len(rest[0].eos))(self.state, progress, *rest)

    def logits(self, ids: jax.Array) -> jax.Array:
        """Logits [B, T, V] of whole sequences, which must be rows of equal length."""
        return self._program("logits", ids.shape)(self.state, ids)

    def fetch(self, arrays: Any) -> Any:
        """The arrays' values on the host."""
        return jax.device_get(arrays)

    def _program(self, kind: str, *key: Any) -> Callable[..., Any]:
        if (kind, *key) not in self.programs:
            self.programs[kind, *key] = getattr(self, f"_make_{kind}")(*key)
        return self.programs[kind, *key]

    def _make_cache(self, rows: int, capacity: int) -> Callable[[], Cache]:
        return jax.jit(partial(init_cache, self.config, rows, capacity, self.dtype))

    def _make_start(self, shape: decode.Shape, *_: Any) -> Callable[..., decode.Progress]:
        def start(state: nnx.State, *arrays: Any, lanes: Lanes) -> decode.Progress:
            return decode.start(self._model(state), lanes, shape, *arrays)

        # Samples of one prompt outgrow its cache, so that it cannot be reused for them.
        return self._compile("start", start, donate=(3,) if shape.samples == 1 else ())

    def _make_resume(self, shape: decode.Shape, *_: Any) -> Callable[..., decode.Progress]:
        def resume(state: nnx.State, *arrays: Any, lanes: Lanes) -> decode.Progress:
            return decode.resume(self._model(state), lanes, shape, *arrays)

        return self._compile("resume", resume, donate=(1,))

    def _make_logits(self, *_: Any) -> Callable[..., jax.Array]:
        def logits(state: nnx.State, ids: jax.Array, lanes: Lanes) -> jax.Array:
            return self._model(state)(ids, lanes)

        return self._compile("logits", logits)

    def _model(self, state: nnx.State) -> Laneformer:
        return nnx.merge(self.graph, state)

    def _compile(self, kind: str, function: Callable[..., Any], donate: tuple[int, ...] = ()) -> Callable[..., Any]:
        """The program of `function` of this engine's state, arrays and `lanes`; buffers of `donate` may be reused."""
        return jax.jit(partial(function, lanes=ALL_HELD), donate_argnums=donate)
