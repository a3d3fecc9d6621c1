"""Rings and masks as literal matrices, and the cached model against the uncached one.

Every comparison is also run with a fault planted in it: a mask or a slot that is off by one has to be noticed.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from tolerances import LOGITS_FLOAT32

from laneformer_jax import decode
from laneformer_jax import model as model_module
from laneformer_jax.cache import LayerCache, cache_bytes, init_cache, slot_positions, slots, visible, write
from laneformer_jax.engine import CHUNK
from laneformer_jax.lanes import ALL_HELD
from laneformer_jax.sampling import Sampling

RING = toy.BASE.replace(num_layers=1)
WINDOW = RING.sliding_window
# Tokens of two rows' first and second turns; the ring has wrapped in between.
TURNS = [([WINDOW - 1, WINDOW + 1], [5, 20]), ([WINDOW, 13], [1, 9])]
TURN_TOKENS, STEPS = 20, 12  # padded


def ints(rows):
    return jnp.array(rows, jnp.int32)


def masked(queries, keys, window):
    return np.asarray(visible(ints([queries]), ints([keys]), window), int)[0].tolist()


def test_mask_of_a_whole_sequence():
    assert masked([0, 1, 2, 3], [0, 1, 2, 3], None) == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]


def test_window_counts_the_query_itself():
    assert masked([0, 1, 2, 3], [0, 1, 2, 3], 2) == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert masked([0, 1, 2, 3], [0, 1, 2, 3], 1) == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert masked([3], [0, 1, 2, 3], 4) == [[1, 1, 1, 1]]


def test_mask_of_a_ring_with_empty_slots_and_padding():
    assert masked([5], [4, 5, 2, 3], 4) == [[1, 1, 1, 1]]
    assert masked([6], [4, 5, 2, 3], 4) == [[1, 1, 0, 1]]
    assert masked([1], [0, 1, -2, -1], None) == [[1, 1, 0, 0]]
    assert masked([2, -1], [2, -1, 0, 1], 3) == [[1, 0, 1, 1], [0, 0, 0, 0]]


def test_slots_of_a_ring_of_four():
    positions = slot_positions(ints([0, 1, 3, 4, 5, 9]), 4)
    assert np.maximum(positions, -1).tolist() == [
        [-1, -1, -1, -1],
        [0, -1, -1, -1],
        [0, 1, 2, -1],
        [0, 1, 2, 3],
        [4, 1, 2, 3],
        [8, 5, 6, 7],
    ]


def test_write_keeps_the_last_tokens_and_skips_padding():
    empty = LayerCache(jnp.zeros((3, 1, 1, 2, 4)), jnp.zeros((3, 1, 1, 4, 2)))
    tokens = jnp.arange(1.0, 7.0)[None, :, None, None, None] * jnp.ones((3, 6, 1, 1, 2))
    positions = ints([[0, 1, 2, 3, 4, 5], [7, 8, -1, -1, -1, -1], [-1] * 6])
    written = write(empty, tokens, 10 * tokens, positions)
    expected = np.array([[5, 6, 3, 4], [2, 0, 0, 1], [0, 0, 0, 0]])
    np.testing.assert_array_equal(written.keys[:, 0, 0, 0], expected)
    np.testing.assert_array_equal(written.keys[:, 0, 0, 1], expected)
    np.testing.assert_array_equal(written.values[:, 0, 0, :, 1], 10 * expected)


def test_memory_is_what_the_windows_imply():
    config = toy.BASE
    for capacity, expected in [(64, [8, 64]), (5, [5, 5])]:
        assert [slots(config, layer, capacity) for layer in range(2)] == expected
        made = init_cache(config, 3, capacity, jnp.dtype("bfloat16"))
        assert [layer.slots for layer in made.layers] == expected
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(made.layers))
        assert held == cache_bytes(config, 3, capacity, jnp.dtype("bfloat16"))
        assert held == 3 * sum(expected) * 8 * 4 * 2 * 2  # rows, slots, KV heads, head dim, keys and values, bytes


def two_turns_and_steps_between(ids, first, second):
    """Logits [B, N, V] of every token through the cache, and their positions [B, N] with -1 for padding.

    A padded chunk, single steps past the wrap, and another chunk; not compiled, so that faults can be planted cheaply.
    """
    model, cache = toy.model(RING), init_cache(RING, len(ids), 64, jnp.dtype("float32"))
    rows, parts = np.arange(len(ids))[:, None], []
    for lengths, tokens in [(first, TURN_TOKENS), *[([1] * len(ids), 1)] * STEPS, (second, TURN_TOKENS)]:
        columns = np.asarray(cache.length)[:, None] + np.arange(tokens)
        positions = np.where(np.arange(tokens) < np.array(lengths)[:, None], columns, -1)
        x, cache = model.streams(jnp.asarray(ids[rows, columns]), ints(positions), cache, ALL_HELD)
        parts.append((np.asarray(model.logits(x, ALL_HELD)), positions))
    logits, positions = (np.concatenate(part, axis=1) for part in zip(*parts, strict=True))
    return logits, positions, np.asarray(cache.length)


@cache
def uncached():
    ids = toy.ids(rows=2, tokens=TURN_TOKENS + STEPS + TURN_TOKENS)
    return ids, np.asarray(toy.language_model(RING).logits(ids))


def assert_cached_is_uncached():
    ids, expected = uncached()
    for first, second in TURNS:
        logits, positions, length = two_turns_and_steps_between(ids, first, second)
        assert length.tolist() == [a + STEPS + b for a, b in zip(first, second, strict=True)]
        for row, (got, at) in enumerate(zip(logits, positions, strict=True)):
            assert sorted(at[at >= 0]) == list(range(length[row]))
            assert np.abs(got[at >= 0] - expected[row, at[at >= 0]]).max() < LOGITS_FLOAT32


def test_window_wrap_and_a_later_turn_equal_the_uncached_forward():
    assert_cached_is_uncached()


PLANTED = {
    "window_too_wide": ("visible", lambda q, k, window: visible(q, k, window and window + 1)),
    "window_too_narrow": ("visible", lambda q, k, window: visible(q, k, window and window - 1)),
    "blind_to_itself": ("visible", lambda q, k, window: visible(q, k, window) & (k[:, None] < q[:, :, None])),
    "slots_one_ahead": ("slot_positions", lambda length, size: slot_positions(length + 1, size)),
    "ring_too_old": ("slot_positions", lambda length, size: slot_positions(length, size) - 1),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_off_by_one_is_noticed(monkeypatch, fault):
    uncached()
    monkeypatch.setattr(model_module, *PLANTED[fault])
    with pytest.raises(AssertionError):
        assert_cached_is_uncached()


LONG = toy.BASE.replace(sliding_window=CHUNK + 8, max_position_embeddings=600)
LONG_LENGTHS = [CHUNK + 7, CHUNK + 8, CHUNK + 9, 300, 2 * CHUNK]


def test_prompts_of_several_chunks_around_a_long_window_equal_the_uncached_forward():
    """As the released model's window of 2,048, in small: a window that no chunk and no bucket ends at."""
    new = 20
    ids = toy.ids(LONG, rows=len(LONG_LENGTHS), tokens=2 * CHUNK)
    prompts = [row[:length].tolist() for row, length in zip(ids, LONG_LENGTHS, strict=True)]
    lm = toy.language_model(LONG)
    completions = lm.generate(prompts, max_new_tokens=new)
    assert [shape[1].chunk for shape in lm.engine.programs if shape[0] == "start"] == [CHUNK]
    whole = np.zeros((len(prompts), 2 * CHUNK + new), np.int32)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        whole[row, : len(prompt) + new] = prompt + completion.token_ids
    logits = np.asarray(lm.logits(whole))
    for row, (length, completion) in enumerate(zip(LONG_LENGTHS, completions, strict=True)):
        assert completion.token_ids == logits[row, length - 1 : length + new - 1].argmax(-1).tolist()


def test_generation_takes_the_cache_s_buffers_for_itself():
    lm = toy.language_model()
    made = lm.engine.init_cache(1, 64)
    eos = jnp.full((4,), -1, jnp.int32)
    choice = decode.Choice(jax.random.key(0)[None], Sampling().values(), jnp.int32(64), eos)
    lm.engine.start(decode.Shape(64, 16), ints([[3] * 16]), ints([16]), made, choice, jnp.int32(1))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(made.layers))
