"""The cost model against sums done by hand."""

import dataclasses

import pytest

from laneformer_jax.config import laneformer_2b
from laneformer_jax.schedule import PACKS
from parallel.cost_model import H200, ONE_KERNEL, Kernels, Machine, kernels_to_reach, predict

# A terabyte per second, nothing else costs time unless a test says so.
PLAIN = Machine(
    "plain", 1e12, 1.0, launch_us=0.0, sum_us=0.0, link_bytes_per_second=float("inf"), streams=64, published=1.0
)
EXCHANGES_AT_THE_END = 2


def test_streaming_is_weights_and_cache_over_bandwidth():
    weights = 2_320_069_632 - 32_000 * 3072 - 31 * 3072  # neither embedding nor norms
    cache = 2 * 15 * 16 * 96 * 1024
    predicted = predict(laneformer_2b(), PLAIN, context=1024, kernels=ONE_KERNEL)
    assert predicted.us == pytest.approx(1e6 * 2 * (weights + cache) / 8 / 1e12)
    assert predicted.streaming == pytest.approx(predicted.us)


def test_every_sum_waits_without_delay_and_only_the_last_with_it():
    slow = dataclasses.replace(PLAIN, sum_us=10.0)
    waiting = [predict(laneformer_2b().replace(delay=d), slow, kernels=ONE_KERNEL).waiting for d in (0, 4)]
    assert waiting == pytest.approx([(30 + EXCHANGES_AT_THE_END) * 10, EXCHANGES_AT_THE_END * 10])


def test_sums_on_one_stream_are_too_many_unless_packed():
    """A layer streams in about 36 us here, in which one sum of 30 us ends and two do not."""
    one_stream = dataclasses.replace(PLAIN, sum_us=30.0, streams=1)
    module, layer = (predict(laneformer_2b(), one_stream, pack, kernels=ONE_KERNEL).waiting for pack in PACKS)
    assert layer == pytest.approx(EXCHANGES_AT_THE_END * 30)
    assert module > 10 * 15


def test_launch_gaps_count_kernels():
    gaps = dataclasses.replace(PLAIN, launch_us=2.0)
    kernels = Kernels(attention=3, mlp=2, sum=1, token=4)
    assert predict(laneformer_2b(), gaps, "layer", kernels=kernels).launching == pytest.approx(2 * (4 + 15 * 5 + 13))


def test_the_share_of_kernels_that_reaches_a_speed():
    share = kernels_to_reach(H200, 3000)
    assert 0 < share < 1
    kernels = Kernels(*(share * n for n in dataclasses.astuple(Kernels())))
    assert predict(laneformer_2b(), H200, "layer", kernels=kernels).tokens_per_second == pytest.approx(3000, rel=1e-3)
    assert kernels_to_reach(H200, 1e6) == pytest.approx(0, abs=1e-6)
