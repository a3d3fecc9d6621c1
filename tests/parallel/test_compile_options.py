"""The options that keep sums apart reach GPUs, and only them. What they do there: tests/parallel/aot."""

from types import SimpleNamespace

import numpy as np
import pytest

from parallel import make_mesh
from parallel.compile_options import LATENCY_PROFILE, compiler_options


def mesh(platform: str, devices: int):
    return SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)] * devices), size=devices)


@pytest.mark.parametrize("platform", ["gpu", "cuda", "rocm"])
def test_gpus_that_exchange_something_get_them(platform):
    assert compiler_options(mesh(platform, 8))["xla_gpu_all_reduce_combine_threshold_bytes"] == 0
    assert compiler_options(mesh(platform, 1)) == {}


def test_other_platforms_get_none():
    assert compiler_options(make_mesh(2)) == {}
    assert compiler_options(mesh("tpu", 8)) == {}


def test_the_profile_names_more_sums_than_any_model_issues():
    names = [line.split('"')[1] for line in LATENCY_PROFILE.read_text(encoding="utf-8").splitlines()]
    assert names[:3] == ["all-reduce-start", "all-reduce-start.1", "all-reduce-start.2"]
    assert len(set(names)) == len(names) == 256
