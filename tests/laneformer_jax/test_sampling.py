"""The choice of a token against a float64 sort, on one device and with the vocabulary split over eight."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from laneformer_jax.errors import UsageError
from laneformer_jax.lanes import ALL_HELD, Lanes
from laneformer_jax.sampling import Sampling, choose, row_keys
from parallel import make_mesh

ROWS, VOCAB = 128, 64
FILTERS = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.3},
    "top_k": {"temperature": 2.0, "top_k": 5},
    "top_p": {"temperature": 1.5, "top_p": 0.7},
    "min_p": {"temperature": 2.0, "min_p": 0.1},
    "all": {"temperature": 2.0, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
}


@cache
def program(filters, devices: int, vocab: int = VOCAB):
    """`choose`, compiled; on several devices each holds its part of the vocabulary, or all where it doesn't split."""
    if devices == 1:
        return jax.jit(partial(choose, filters=filters, vocab=vocab, lanes=ALL_HELD))
    held = P(None, "lanes") if vocab % devices == 0 else P()

    def part(logits, keys, values, sampleable):
        return choose(logits, keys, filters, values, vocab, sampleable, Lanes("lanes"))

    specs = {"in_specs": (held, P(), P(), P()), "out_specs": P(), "check_vma": False}
    on_mesh = jax.jit(jax.shard_map(part, mesh=make_mesh(devices), **specs))
    return lambda logits, keys, *, values, sampleable: on_mesh(logits, keys, values, sampleable)


@cache
def keys_of(seed):
    return row_keys([seed], ROWS)


def chosen(logits, sampling, devices=1, sampleable=10**6, seed=7):
    logits = jnp.asarray(logits, jnp.float32)
    run = program(sampling.filters(), devices, logits.shape[1])
    tokens, finite = run(logits, keys_of(seed), values=sampling.values(), sampleable=jnp.int32(sampleable))
    return np.asarray(tokens), np.asarray(finite)


def kept(row, temperature, top_k=None, top_p=None, min_p=None):
    """Ids that the filters leave, by sorting: likeliest first, the lowest id first among equals."""
    order = np.lexsort((np.arange(len(row)), -row))[:top_k]
    weights = np.exp((row - row.max()) / temperature)
    if top_p is not None:
        before = np.cumsum(weights[order]) - weights[order]
        order = order[before < max(top_p, 1e-300) * weights[order].sum()]
    return order if min_p is None else order[weights[order] >= min_p]


def expected(logits, sampling, seed=7):
    if sampling.temperature == 0:
        return logits.argmax(-1)
    noise = np.asarray(jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys_of(seed)))
    result = []
    for row, extra in zip(logits.astype(np.float64), noise, strict=True):
        ids = np.sort(kept(row, **vars(sampling)))
        result.append(ids[np.argmax((row / sampling.temperature + extra)[ids])])
    return np.array(result)


def random_logits(step=None, rows=ROWS, vocab=VOCAB):
    """Normal logits of spread 3; rounded to multiples of `step`, so that many are equal."""
    logits = 3 * np.random.default_rng(1).standard_normal((rows, vocab))
    return (logits if step is None else np.round(logits / step) * step).astype(np.float32)


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("name", FILTERS)
def test_choice_is_that_of_a_float64_sort_on_any_number_of_devices(name, devices):
    sampling = Sampling(**FILTERS[name])
    for logits in (random_logits(), random_logits(step=1.5)):
        tokens, finite = chosen(logits, sampling, devices)
        assert finite.all()
        assert tokens.tolist() == expected(logits, sampling).tolist()


def test_all_kept_tokens_and_no_others_come_up():
    for name in ("top_k", "top_p", "min_p", "all"):
        sampling = Sampling(**FILTERS[name])
        row = random_logits(step=1.5)[0]
        tokens, _ = chosen(np.tile(row / 8, (ROWS, 1)), sampling)
        allowed = kept(row.astype(np.float64) / 8, **vars(sampling))
        assert set(tokens.tolist()) <= set(allowed.tolist())
        assert len(set(tokens.tolist())) > len(allowed) / 2


@pytest.mark.parametrize("devices", [1, 8])
def test_lowest_id_wins_among_equals(devices):
    ties = np.zeros((ROWS, VOCAB), np.float32)
    ties[1, [9, 17, 60]] = 5
    ties[2, [63, 62]] = 5
    ties[3, [8, 7]] = 5  # on two devices
    assert chosen(ties, Sampling(), devices)[0][:4].tolist() == [0, 9, 62, 7]
    assert chosen(ties, Sampling(2.0, top_k=1), devices)[0][:4].tolist() == [0, 9, 62, 7]
    # top_k 5 of 64 equals are the first five, and all of them come up.
    tokens = chosen(np.zeros((ROWS, VOCAB)), Sampling(2.0, top_k=5), devices)[0]
    assert set(tokens.tolist()) == {0, 1, 2, 3, 4}
    # A mass of 0.7 takes 45 of 64 equals.
    tokens = chosen(np.zeros((ROWS, VOCAB)), Sampling(1.5, top_p=0.7), devices)[0]
    assert 40 <= max(tokens) <= 44


@pytest.mark.parametrize("devices", [1, 8])
def test_a_vocabulary_that_does_not_split_is_whole_on_every_device(devices):
    logits = random_logits(vocab=67)
    sampling = Sampling(**FILTERS["all"])
    assert chosen(logits, sampling, devices)[0].tolist() == expected(logits, sampling).tolist()


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("name", ["greedy", "plain", "all"])
def test_padding_of_the_embedding_is_never_chosen(name, devices):
    logits = random_logits()
    logits[:, 60:] += 50
    sampling = Sampling(**FILTERS[name])
    tokens, _ = chosen(logits, sampling, devices, sampleable=60)
    assert tokens.max() < 60
    assert chosen(logits, sampling, devices)[0].min() >= 60
    cut = np.concatenate([logits[:, :60], np.full((ROWS, 4), -1e9, np.float32)], axis=1)
    assert tokens.tolist() == expected(cut, sampling).tolist()


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("name", ["greedy", "all"])
def test_logits_that_are_not_finite_are_reported_for_their_row(name, devices):
    logits = random_logits()
    logits[3, 40], logits[5, 2], logits[9, 63] = np.nan, np.inf, -np.inf
    _, finite = chosen(logits, Sampling(**FILTERS[name]), devices, sampleable=63)
    assert np.flatnonzero(~finite).tolist() == [3, 5]


def test_extreme_temperatures_are_greedy_or_uniform_and_finite():
    logits = random_logits()
    for temperature in (1e-6, 1e-30, 1e-45):
        tokens, finite = chosen(logits, Sampling(temperature))
        assert finite.all() and tokens.tolist() == logits.argmax(-1).tolist()
    for options in ({"temperature": 1e300}, {"temperature": 1e300, "top_k": 1000}):
        tokens, finite = chosen(logits, Sampling(**options), sampleable=60)
        assert finite.all() and len(set(tokens.tolist())) > 50 and tokens.max() < 60


def test_limits_of_the_filters():
    logits = random_logits()
    greedy = logits.argmax(-1).tolist()
    plain = chosen(logits, Sampling(1.5))[0].tolist()
    assert chosen(logits, Sampling(1.5, top_p=0.0))[0].tolist() == greedy
    assert chosen(logits, Sampling(1.5, top_p=1.0))[0].tolist() == plain
    assert chosen(logits, Sampling(1.5, top_p=0.99999999))[0].tolist() == plain
    assert chosen(logits, Sampling(1.5, top_k=1))[0].tolist() == greedy
    for top_k in (VOCAB, VOCAB + 1, 2**31, 10**12):
        assert chosen(logits, Sampling(1.5, top_k=top_k))[0].tolist() == plain
    assert chosen(logits, Sampling(1.5, min_p=0.0))[0].tolist() == plain
    assert chosen(logits, Sampling(1.5, min_p=1.0))[0].tolist() == greedy


@pytest.mark.parametrize("devices", [1, 8])
def test_a_row_depends_on_its_own_key_alone(devices):
    logits, sampling = random_logits(), Sampling(**FILTERS["all"])
    run = partial(program(sampling.filters(), devices), values=sampling.values(), sampleable=jnp.int32(VOCAB))
    forward, _ = run(jnp.asarray(logits), keys_of(7))
    backward, _ = run(jnp.asarray(logits[::-1]), keys_of(7)[::-1])
    assert forward.tolist() == backward[::-1].tolist()
    assert forward.tolist() != run(jnp.asarray(logits), keys_of(7)[::-1])[0].tolist()


def test_sample_i_of_a_seed_does_not_depend_on_how_many_there_are():
    keys = [jax.random.key_data(row_keys(*arguments)).tolist() for arguments in ([[7], 3], [[5, 7], 3], [[7], 1])]
    assert keys[0] == keys[1][3:] and keys[2] == keys[0][:1]
    assert len({tuple(key) for key in keys[1]}) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be 0 or a positive number, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be 0 or a positive number, got nan"),
        ({"temperature": float("inf")}, "temperature must be 0 or a positive number, got inf"),
        ({"temperature": None}, "temperature must be 0 or a positive number, got None"),
        ({"temperature": "0.5"}, "temperature must be 0 or a positive number, got '0.5'"),
        ({"top_p": "0.5"}, "top_p must lie between 0 and 1, got '0.5'"),
        ({"top_k": 0}, "top_k must be a whole number of at least 1, got 0"),
        ({"top_k": 2.5}, "top_k must be a whole number of at least 1, got 2.5"),
        ({"top_p": 1.01}, "top_p must lie between 0 and 1, got 1.01"),
        ({"top_p": -0.01}, "top_p must lie between 0 and 1, got -0.01"),
        ({"top_p": float("nan")}, "top_p must lie between 0 and 1, got nan"),
        ({"min_p": 2}, "min_p must lie between 0 and 1, got 2"),
    ],
)
def test_values_out_of_range_are_refused(options, message):
    with pytest.raises(UsageError, match=f"^{message}$"):
        Sampling(**options)


def test_numbers_of_numpy_are_numbers():
    plain = Sampling(0.5, 5, 0.5, 0.25)
    assert Sampling(np.float32(0.5), np.int64(5), np.float64(0.5), np.float16(0.25)) == plain
