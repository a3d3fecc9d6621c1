"""Laneformer in plain, uncompiled PyTorch: the peer that verification and decode benchmarks compare with.

It follows design.md, section 1, and shares with the JAX model only the reading of `config.json` and of safetensors, so
that an error in one of the two models shows as a difference. It aims at the best speed that eager PyTorch reaches at
batch 1: all lanes in one batched product, q, k and v (and w1 and w3) fused, a preallocated cache.

Letters: B batch, T tokens, N = B * T, S cache slots, L lanes, D model, H query heads, K KV heads, G = H/K, E head dim,
F FFN, V vocabulary. Streams are [L, N, D].
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laneformer_jax.config import LaneformerConfig
from laneformer_jax.errors import LaneformerError
from laneformer_jax.safetensors_io import SafetensorsFolder


def lane_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`y_l = x_l W_l^T`: x [L, N, in], weight [L, out, in] -> [L, N, out].

    A single vector stands on the right, which is up to three times as fast in float32. The kernel is chosen by the
    strides, even that of an axis of length 1: other strides than those of `[:, 0, None]` cost a factor of eight.
    """
    if x.shape[1] == 1:
        return torch.bmm(weight, x[:, 0, None].mT).mT
    return torch.bmm(x, weight.mT)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`y = x W^T`: x [N, in], weight [out, in] -> [N, out].

    For a single vector the rows are dealt to equal blocks, since only batched products use every core then.
    """
    if len(x) > 1:
        return F.linear(x, weight)
    blocks = math.gcd(len(weight), 8)
    return lane_linear(x.expand(blocks, -1, -1), weight.view(blocks, -1, x.shape[1])).reshape(1, -1)


@contextmanager
def native_kernels(use: bool) -> Iterator[None]:
    """Where `use`, products run in PyTorch's own kernels instead of oneDNN's.

    A bfloat16 matrix times one vector reads 17 GB/s in oneDNN and 33 GB/s in PyTorch's (2.13, AVX-512, 2 threads).
    """
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = before and not use
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


def exchange_modes(config: LaneformerConfig) -> list[str]:
    """What each module n = 0 .. 2 * layers - 1 adds to lane l, with the delay d counted in modules.

    present: the sum of o_n over all lanes; past: o_n of lane l, plus o_(n-d) of the others; none: sqrt(L) times o_n of
    lane l.
    """
    talks = (config.attention_comm, config.mlp_comm)
    modes = []
    for n in range(2 * config.num_layers):
        if n < config.delay:
            modes.append("present" if config.early_comm else "none")
        elif not talks[(n - config.delay) % 2]:
            modes.append("none")
        else:
            modes.append("past" if config.delay else "present")
    return modes


def rotary_table(config: LaneformerConfig, dtype: torch.dtype) -> Tensor:
    """`exp(i p theta^(-2j/E))` for position p and pair j, the angle in float32: complex [positions, E/2].

    Llama 3's scaling divides frequencies whose wavelength exceeds the original context over `low_freq_factor` by
    `factor`, keeps those under that over `high_freq_factor`, and blends in between.
    """
    frequencies = config.rope_theta ** -(torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    if scaling := config.rope_scaling:
        turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = keep.clamp(0, 1)
        frequencies = keep * frequencies + (1 - keep) * frequencies / scaling.factor
    angles = torch.outer(torch.arange(config.max_position_embeddings).float(), frequencies)
    angles = angles.to(torch.promote_types(dtype, torch.float32))
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn the pairs (2j, 2j+1) of x [..., T, E] by the angles of table [T, E/2]."""
    pairs = torch.view_as_complex(x.to(table.real.dtype).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * table).flatten(-2).to(x.dtype)


class Cache:
    """Keys and values of the tokens so far, [layers, L*B, K/L, S, E], of which `length` slots are filled."""

    def __init__(self, config: LaneformerConfig, batch: int, slots: int, dtype: torch.dtype):
        shape = (
            config.num_layers,
            config.num_lanes * batch,
            config.num_kv_heads // config.num_lanes,
            slots,
            config.head_dim,
        )
        self.keys = torch.empty(shape, dtype=dtype)
        self.values = torch.empty(shape, dtype=dtype)
        self.slots = slots
        self.length = 0

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens, [L*B, K/L, T, E]; gives those of all tokens so far."""
        end = self.length + keys.shape[2]
        self.keys[layer, :, :, self.length : end] = keys
        self.values[layer, :, :, self.length : end] = values
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


def attention_mask(start: int, tokens: int, window: int | None) -> tuple[int, Tensor | None]:
    """The first key that queries start .. start + tokens - 1 can see, and which keys from there on each sees.

    A query at position p sees key positions p - window < k <= p. The mask is [T, keys], or None where all are seen.
    """
    first = 0 if window is None else max(0, start - window + 1)
    if tokens == 1:
        return first, None
    queries = torch.arange(start, start + tokens)[:, None]
    keys = torch.arange(first, start + tokens)
    mask = keys <= queries
    return first, mask if window is None else mask & (keys > queries - window)


class Norm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * scale`, the mean in float32; one scale [D], or one per lane [L, D]."""

    def __init__(self, config: LaneformerConfig, dtype: torch.dtype):
        super().__init__()
        lanes = (config.num_lanes,) if config.lane_norm_scale else ()
        self.scale = weight(*lanes, config.hidden_size, dtype=dtype)
        self.eps = config.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale if self.scale.ndim == 1 else self.scale[:, None]
        return F.rms_norm(x, x.shape[-1:], eps=self.eps) * scale


class Attention(nn.Module):
    """Each lane's own heads on its own stream: [L, N, D] -> partial outputs [L, N, D]."""

    def __init__(self, config: LaneformerConfig, layer: int, dtype: torch.dtype):
        super().__init__()
        lanes, self.head_dim = config.num_lanes, config.head_dim
        self.heads, self.kv_heads = config.num_heads // lanes, config.num_kv_heads // lanes
        self.layer, self.window = layer, config.window(layer)
        self.wqkv = weight(lanes, (self.heads + 2 * self.kv_heads) * self.head_dim, config.hidden_size, dtype=dtype)
        self.wo = weight(lanes, config.hidden_size, self.heads * self.head_dim, dtype=dtype)

    def forward(
        self, x: Tensor, table: Tensor, masks: dict[int | None, tuple[int, Tensor | None]], cache: Cache | None
    ) -> Tensor:
        lanes, tokens = x.shape[0], len(table)
        q_heads, kv_heads = self.heads, self.kv_heads
        heads = lane_linear(x, self.wqkv).reshape(-1, tokens, q_heads + 2 * kv_heads, self.head_dim).transpose(1, 2)
        turned = rotate(heads[:, : q_heads + kv_heads], table)
        queries, keys, values = turned[:, :q_heads], turned[:, q_heads:], heads[:, q_heads + kv_heads :]
        if cache is not None:
            keys, values = cache.extend(self.layer, keys, values)
        first, mask = masks[self.window]
        # The G query heads of a KV head become more queries of it, which spares copies of keys and values.
        groups = q_heads // kv_heads
        mixed = F.scaled_dot_product_attention(
            queries.reshape(-1, kv_heads, groups * tokens, self.head_dim),
            keys[:, :, first:],
            values[:, :, first:],
            attn_mask=None if mask is None else mask.repeat(groups, 1),
            scale=self.head_dim**-0.5,
        )
        mixed = mixed.reshape(-1, q_heads, tokens, self.head_dim).transpose(1, 2)
        return lane_linear(mixed.reshape(lanes, -1, q_heads * self.head_dim), self.wo)


class FeedForward(nn.Module):
    """`w2_l (silu(w1_l x_l) * w3_l x_l)`: [L, N, D] -> partial outputs [L, N, D]."""

    def __init__(self, config: LaneformerConfig, dtype: torch.dtype):
        super().__init__()
        neurons = config.intermediate_size // config.num_lanes
        self.w13 = weight(config.num_lanes, 2 * neurons, config.hidden_size, dtype=dtype)
        self.w2 = weight(config.num_lanes, config.hidden_size, neurons, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = lane_linear(x, self.w13).chunk(2, dim=-1)
        return lane_linear(F.silu(gate) * up, self.w2)


class Layer(nn.Module):
    def __init__(self, config: LaneformerConfig, layer: int, dtype: torch.dtype):
        super().__init__()
        self.attention_norm, self.ffn_norm = Norm(config, dtype), Norm(config, dtype)
        self.attention = Attention(config, layer, dtype)
        self.feed_forward = FeedForward(config, dtype)


class Laneformer(nn.Module):
    """A Laneformer for inference; its weights are uninitialised until filled (see `load`)."""

    table: Tensor

    def __init__(self, config: LaneformerConfig, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config, self.dtype = config, dtype
        lanes, width, vocab = config.num_lanes, config.hidden_size, config.vocab_size
        self.embeddings = weight(vocab, width, dtype=dtype)
        layers = nn.ModuleList(Layer(config, layer, dtype) for layer in range(config.num_layers))
        self.layers = cast(list[Layer], layers)  # a ModuleList does not know what it holds
        self.norm = Norm(config, dtype)
        head = {"replicate": (vocab, width), "lane": (vocab, lanes * width)}.get(
            config.head, (lanes, vocab // lanes, width)
        )
        self.head = self.embeddings if config.tie_embeddings else weight(*head, dtype=dtype)
        self.modes = exchange_modes(config)
        self.register_buffer("table", rotary_table(config, dtype), persistent=False)

    @torch.inference_mode()
    def forward(self, ids: Tensor, cache: Cache | None = None, last_only: bool = False) -> Tensor:
        """Logits [B, T, V] in float32 (float64 for a float64 model) of token ids [B, T], or [B, 1, V] if `last_only`.

        The ids follow those in `cache`, which is extended by them.

        Raises:
            LaneformerError: they do not fit into the context or the cache.
        """
        batch, tokens = ids.shape
        start = 0 if cache is None else cache.length
        room = self.config.max_position_embeddings if cache is None else cache.slots
        if start + tokens > room:
            raise LaneformerError(f"{start + tokens} tokens do not fit into {room} positions: shorten the text")
        masks = {
            window: attention_mask(start, tokens, window)
            for window in {self.config.window(layer) for layer in range(self.config.num_layers)}
        }
        with native_kernels(batch * tokens == 1):
            x = self._stream(ids, self.table[start : start + tokens], masks, cache)
            if cache is not None:
                cache.length += tokens
            if last_only:
                x = x.unflatten(1, (batch, tokens))[:, :, -1]
            logits = self._logits(x).view(batch, -1, self.config.vocab_size)
        return logits.to(torch.promote_types(self.dtype, torch.float32))

    def _stream(self, ids: Tensor, table: Tensor, masks: dict, cache: Cache | None) -> Tensor:
        """The lanes' streams [L, N, D] after the last module."""
        x = F.embedding(ids, self.embeddings).view(1, ids.numel(), -1).expand(self.config.num_lanes, -1, -1)
        sent: dict[int, Tensor] = {}
        for n, layer in enumerate(self.layers):
            output = layer.attention(layer.attention_norm(x), table, masks, cache)
            x = self._exchange(2 * n, x, output, sent)
            output = layer.feed_forward(layer.ffn_norm(x))
            x = self._exchange(2 * n + 1, x, output, sent)
        return x

    def _exchange(self, n: int, x: Tensor, output: Tensor, sent: dict[int, Tensor]) -> Tensor:
        """Add to the streams x what module n gives; `sent` holds, per module, the sum of the other lanes' outputs."""
        later = n + self.config.delay
        if later < len(self.modes) and self.modes[later] == "past":
            sent[n] = output.sum(0, keepdim=True) - output
        if self.modes[n] == "present":
            return x + output.sum(0, keepdim=True)
        if self.modes[n] == "past":
            return x + (output + sent.pop(n - self.config.delay))
        return x.add(output, alpha=self.config.num_lanes**0.5)

    def _logits(self, x: Tensor) -> Tensor:
        """The head on streams [L, N, D]: logits [N, V]."""
        if self.config.pre_norm_lane_agg:
            return linear(self.norm(x.sum(0)), self.head)
        x = self.norm(x)
        if self.config.head == "replicate":
            return linear(x.mean(0), self.head)
        if self.config.head == "lane":
            return linear(x.transpose(0, 1).flatten(1), self.head)
        return lane_linear(x, self.head).transpose(0, 1).flatten(1)

    def new_cache(self, batch: int, slots: int) -> Cache:
        """An empty cache for `slots` tokens in each of `batch` rows.

        Raises:
            LaneformerError: the model's context is shorter than that.
        """
        if slots > self.config.max_position_embeddings:
            raise LaneformerError(
                f"a cache of {slots} slots exceeds the context of {self.config.max_position_embeddings}"
            )
        return Cache(self.config, batch, slots, self.dtype)

    def generate(self, ids: Tensor, max_new_tokens: int) -> Tensor:
        """Token ids [B, T] and the `max_new_tokens` most likely ones that follow, past any end-of-text token.

        Of equally likely tokens the lowest id wins.

        Raises:
            LaneformerError: prompt and new tokens exceed the context.
        """
        cache = self.new_cache(len(ids), ids.shape[1] + max_new_tokens)
        new = [ids]
        for _ in range(max_new_tokens):
            logits = self(new[-1], cache, last_only=True)
            new.append(logits[:, -1].argmax(-1, keepdim=True))
        return torch.cat(new, 1)


def weight(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def load(folder: str | Path, dtype: torch.dtype | None = None) -> Laneformer:
    """The model of a Hugging Face folder, cast to `dtype` (default: the config's).

    Raises:
        LaneformerError: the folder's files are faulty, or its tensors are not those that its config asks for.
    """
    folder = Path(folder)
    config = LaneformerConfig.from_file(folder / "config.json")
    model = Laneformer(config, dtype or getattr(torch, config.dtype))
    source, targets = SafetensorsFolder.open(folder), dict(checkpoint_tensors(model))
    for name, target in targets.items():
        entry = source.entries.get(name)
        if entry is None:
            raise LaneformerError(f"{folder}: tensor {name} is missing")
        if entry.shape != target.shape:
            needed = list(target.shape)
            raise LaneformerError(f"{folder}: tensor {name} is {list(entry.shape)}, but the config asks for {needed}")
        if entry.dtype.name not in ("float64", "float32", "float16", "bfloat16"):
            raise LaneformerError(f"{folder}: tensor {name} is {entry.dtype}, which is no weight's dtype")
        target.copy_(_to_torch(source.read(name)))
    for name in source.entries.keys() - targets.keys():
        tied = config.tie_embeddings and name.startswith("lm_head.")
        if not tied and "rope" not in name and "inv_freq" not in name:
            raise LaneformerError(f"{folder}: tensor {name!r} has no place in the model that the config describes")
    return model


def checkpoint_tensors(model: Laneformer) -> Iterator[tuple[str, Tensor]]:
    """The published tensor names, each with the part of a weight that it fills."""
    norm = "scale" if model.config.lane_norm_scale else "weight"
    yield "model.tok_embeddings.weight", model.embeddings
    for i, layer in enumerate(model.layers):
        prefix = f"model.layers.{i}"
        attention, ffn = layer.attention, layer.feed_forward
        sizes = [attention.head_dim * n for n in (attention.heads, attention.kv_heads, attention.kv_heads)]
        for name, part in zip(("wq", "wk", "wv"), attention.wqkv.split(sizes, dim=1), strict=True):
            yield f"{prefix}.attention.{name}.weight", part
        yield f"{prefix}.attention.wo.weight", attention.wo
        for name, part in zip(("w1", "w3"), ffn.w13.chunk(2, dim=1), strict=True):
            yield f"{prefix}.feed_forward.{name}.weight", part
        yield f"{prefix}.feed_forward.w2.weight", ffn.w2
        yield f"{prefix}.attention_norm.{norm}", layer.attention_norm.scale
        yield f"{prefix}.ffn_norm.{norm}", layer.ffn_norm.scale
    yield f"model.norm.{norm}", model.norm.scale
    if not model.config.tie_embeddings:
        yield "lm_head.linear.weight" if model.config.head == "lane" else "lm_head.weight", model.head


def _to_torch(array: np.ndarray) -> Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())
