"""The forward pass of design section 1 in float64, lane by lane and module by module, with nothing of the package."""

import numpy as np

from laneformer_jax.config import LaneformerConfig

Weights = dict[str, np.ndarray]


def forward(weights: Weights, c: LaneformerConfig, ids: np.ndarray) -> np.ndarray:
    """Logits [T, V] of one row of token ids."""
    x = [weights["model.tok_embeddings.weight"][ids]] * c.num_lanes
    talks = [c.attention_comm, c.mlp_comm]
    outputs: list[list[np.ndarray]] = []
    for n in range(2 * c.num_layers):
        out = [_module(weights, c, n, lane, x[lane]) for lane in range(c.num_lanes)]
        outputs.append(out)
        present = talks[n % 2] if c.delay == 0 else n < c.delay and c.early_comm
        past = c.delay > 0 and n >= c.delay and talks[(n - c.delay) % 2]
        for lane in range(c.num_lanes):
            if present:
                added = sum(out)
            elif past:
                earlier = outputs[n - c.delay]
                added = out[lane] + sum(earlier[other] for other in range(c.num_lanes) if other != lane)
            else:
                added = np.sqrt(c.num_lanes) * out[lane]
            x[lane] = x[lane] + added
    return _head(weights, c, x)


def _norm(weights: Weights, c: LaneformerConfig, name: str, lane: int, x: np.ndarray) -> np.ndarray:
    scale = weights[f"{name}.scale"][lane] if c.lane_norm_scale else weights[f"{name}.weight"]
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_eps) * scale


def _module(weights: Weights, c: LaneformerConfig, n: int, lane: int, x: np.ndarray) -> np.ndarray:
    layer = f"model.layers.{n // 2}"
    if n % 2 == 0:
        return _attention(weights, c, n // 2, lane, _norm(weights, c, f"{layer}.attention_norm", lane, x))
    x = _norm(weights, c, f"{layer}.ffn_norm", lane, x)
    w1, w2, w3 = (weights[f"{layer}.feed_forward.w{i}.weight"][lane] for i in (1, 2, 3))
    gate = x @ w1.T
    return (gate / (1 + np.exp(-gate)) * (x @ w3.T)) @ w2.T


def _attention(weights: Weights, c: LaneformerConfig, layer: int, lane: int, x: np.ndarray) -> np.ndarray:
    wq, wk, wv, wo = (weights[f"model.layers.{layer}.attention.w{i}.weight"][lane] for i in "qkvo")
    q, k, v = ((x @ w.T).reshape(len(x), -1, c.head_dim) for w in (wq, wk, wv))
    q, k = rotate(q, frequencies(c)), rotate(k, frequencies(c))
    heads = []
    for head in range(q.shape[1]):
        shared = head // (c.num_heads // c.num_kv_heads)
        scores = q[:, head] @ k[:, shared].T / np.sqrt(c.head_dim)
        for query in range(len(x)):
            for key in range(len(x)):
                slid_past = layer in c.sliding_layers and key <= query - c.sliding_window
                if key > query or slid_past:
                    scores[query, key] = -np.inf
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(weight / weight.sum(-1, keepdims=True) @ v[:, shared])
    return np.concatenate(heads, -1) @ wo.T


def frequencies(c: LaneformerConfig) -> list[float]:
    """Radians per token of each pair, stretched as Llama 3.1's description says where the config asks for it."""
    result = []
    for i in range(0, c.head_dim, 2):
        frequency = 1.0 / c.rope_theta ** (i / c.head_dim)
        scaling = c.rope_scaling
        if scaling is not None:
            wavelength = 2 * np.pi / frequency
            longest = scaling.original_max_position_embeddings / scaling.low_freq_factor
            shortest = scaling.original_max_position_embeddings / scaling.high_freq_factor
            if wavelength > longest:
                frequency /= scaling.factor
            elif wavelength >= shortest:
                smooth = scaling.original_max_position_embeddings / wavelength - scaling.low_freq_factor
                smooth /= scaling.high_freq_factor - scaling.low_freq_factor
                frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        result.append(frequency)
    return result


def rotate(x: np.ndarray, radians: list[float], start: int = 0) -> np.ndarray:
    """[T, H, E] turned as complex numbers x[2i] + j x[2i+1], the first token being at position `start`."""
    turns = np.exp(1j * np.outer(np.arange(start, start + len(x)), radians))[:, None]
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * turns
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def _head(weights: Weights, c: LaneformerConfig, x: list[np.ndarray]) -> np.ndarray:
    normed = [_norm(weights, c, "model.norm", lane, x[lane]) for lane in range(c.num_lanes)]
    if c.head == "vocab_parallel":
        return np.concatenate([y @ w.T for y, w in zip(normed, weights["lm_head.weight"], strict=True)], axis=-1)
    if c.head == "lane":
        return np.concatenate(normed, axis=-1) @ weights["lm_head.linear.weight"].T
    matrix = weights["model.tok_embeddings.weight" if c.tie_embeddings else "lm_head.weight"]
    features = _norm(weights, c, "model.norm", 0, sum(x)) if c.pre_norm_lane_agg else sum(normed) / c.num_lanes
    return features @ matrix.T
