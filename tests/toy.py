"""Toy models that compile in seconds, with seeded weights: the same parameter has the same values in every config."""

import zlib
from functools import cache

import jax.numpy as jnp
import numpy as np
from flax import nnx

from laneformer_jax.chat_template import ControlToken
from laneformer_jax.config import LaneformerConfig
from laneformer_jax.engine import Engine
from laneformer_jax.language_model import LanguageModel
from laneformer_jax.model import Laneformer
from laneformer_jax.tokenizer import Tokenizer
from laneformer_jax.weights import abstract_model, parameter_names

BASE = LaneformerConfig(
    vocab_size=64,
    hidden_size=64,
    num_layers=2,
    num_heads=16,
    num_kv_heads=8,
    intermediate_size=32,
    num_lanes=8,
    max_position_embeddings=64,
    delay=2,
    sliding_window=8,
    sliding_layers=(0,),
    dtype="float32",
    bos_token_id=1,
    eos_token_ids=(),
)
UNK, BOS, EOS = 0, 1, 2
PIECES = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz \n", *[a + b for a in "bcdfg" for b in "aeiou"]]


@cache
def model(config: LaneformerConfig = BASE, seed: int = 0) -> Laneformer:
    """Norm scales about 1; matrices, and embeddings, of the size that training starts from."""

    def values(path: tuple[str | int, ...], leaf: nnx.Variable) -> nnx.Variable:
        rng = np.random.default_rng([seed, zlib.crc32(str(path).encode())])
        normal = rng.standard_normal(leaf.shape)
        if path[-1] == "scale":
            normal = 1 + 0.2 * normal
        elif path[-1] == "weight":
            normal *= leaf.shape[-1] ** -0.5
        return leaf.replace(jnp.asarray(normal, leaf.dtype))

    graph, state = nnx.split(abstract_model(config))
    return nnx.merge(graph, nnx.from_flat_state([(p, values(p, leaf)) for p, leaf in nnx.to_flat_state(state)]))


@cache
def language_model(config: LaneformerConfig = BASE, lanes: int | None = None) -> LanguageModel:
    """On one device without a mesh, or on `lanes` of them; without a tokenizer."""
    if lanes is None:
        return LanguageModel(Engine(model(config)), None, config.eos_token_ids)
    from parallel import MeshEngine, make_mesh

    return LanguageModel(MeshEngine(model(config), make_mesh(lanes)), None, config.eos_token_ids)


def speaking(lm: LanguageModel, *eos: int) -> LanguageModel:
    """The same programs with the toy tokenizer."""
    return LanguageModel(lm.engine, tokenizer(), eos)


@cache
def logits(config: LaneformerConfig = BASE) -> np.ndarray:
    """Uncached logits [2, 20, V] of `ids(config)`, operation by operation: configs share the compiled operations."""
    return np.asarray(model(config)(jnp.asarray(ids(config))))


def ids(config: LaneformerConfig = BASE, rows: int = 2, tokens: int = 20) -> np.ndarray:
    """Seeded token ids [rows, tokens] without the three special ones."""
    return np.random.default_rng(rows + tokens).integers(3, config.vocab_size, (rows, tokens), dtype=np.int32)


def named_weights(config: LaneformerConfig) -> dict[str, np.ndarray]:
    """The toy model's parameters in float64 under their checkpoint names."""
    flat = dict(nnx.to_flat_state(nnx.state(model(config))))
    return {name: np.asarray(flat[path][...], np.float64) for name, path in parameter_names(config).items()}


class Letters:
    """A vocabulary of letters and some pairs of them; its text is shorter than the toy embedding."""

    pieces = [piece.encode() for piece in PIECES]
    control = {UNK: "<unk>", BOS: "<s>", EOS: "</s>"}
    names = {"bos_token": "<s>", "eos_token": "</s>"}

    def encode(self, text: str) -> list[int]:
        return [PIECES.index(letter) if letter in PIECES else UNK for letter in text]

    def id_of(self, piece: str) -> int | None:
        return PIECES.index(piece) if piece in PIECES else None


@cache
def tokenizer() -> Tokenizer:
    """A real `Tokenizer` over `Letters`; without an end-of-sequence token, which the tests choose."""
    control = [ControlToken(token, spelling) for token, spelling in Letters.control.items()]
    return Tokenizer(Letters(), control, {"bos_token": "<s>"})
