"""The golden checkpoints on meshes of 1, 2, 4 and 8 devices: forward pass, prefill and cached decode."""

from functools import cache

import goldens
import numpy as np
import pytest
import toy
from tolerances import LOGITS_FLOAT32

from laneformer_jax.config import LaneformerConfig
from laneformer_jax.language_model import LanguageModel
from laneformer_jax.safetensors_io import SafetensorsFolder
from laneformer_jax.weights import load
from parallel import MeshEngine, make_mesh
from parallel.engine import place_on

# (golden, data, lanes, pack): every golden and every number of devices, both packings; not every combination.
FORWARD = [
    ("delay2_swa", 1, 4, "layer"),
    ("early_comm", 1, 4, "layer"),
    ("early_comm", 2, 2, "module"),
    ("eight_lanes", 1, 8, "layer"),
    ("eight_lanes", 2, 4, "layer"),
    ("head_dim_96", 1, 2, "module"),
    ("hub_keys", 1, 2, "layer"),
    ("lane_head_lane_norm", 2, 4, "module"),
    ("no_comm", 1, 4, "layer"),
    ("pre_norm_agg", 1, 1, "layer"),
    ("vocab_parallel_head", 1, 4, "module"),
]
DECODE = [
    ("eight_lanes", 1, 1, "layer"),
    ("eight_lanes", 1, 8, "layer"),
    ("eight_lanes", 2, 4, "module"),
    ("delay2_swa", 2, 2, "layer"),
    ("lane_head_lane_norm", 1, 4, "layer"),
    ("vocab_parallel_head", 1, 2, "module"),
]


@cache
def on_mesh(name: str, data: int, lanes: int, pack: str) -> LanguageModel:
    folder = goldens.FOLDER / name
    config, mesh = LaneformerConfig.from_file(folder / "config.json"), make_mesh(lanes, data)
    model = load(config, SafetensorsFolder.open(folder), place=place_on(mesh, config))
    return LanguageModel(MeshEngine(model, mesh, pack=pack), None, ())


def test_every_golden_and_every_number_of_devices_is_covered():
    assert {name for name, *_ in FORWARD} == set(goldens.NAMES)
    assert {data * lanes for cases in (FORWARD, DECODE) for _, data, lanes, _ in cases} == {1, 2, 4, 8}


@pytest.mark.parametrize(("name", "data", "lanes", "pack"), FORWARD)
def test_logits(name, data, lanes, pack):
    expected = goldens.expected(name)
    found = np.asarray(on_mesh(name, data, lanes, pack).logits(expected.input_ids))
    assert np.abs(found - expected.logits).max() < LOGITS_FLOAT32


@pytest.mark.parametrize(("name", "data", "lanes", "pack"), DECODE)
def test_greedy_decode_through_the_cache(name, data, lanes, pack):
    expected = goldens.expected(name)
    completions = on_mesh(name, data, lanes, pack).generate(
        expected.input_ids.tolist(), max_new_tokens=goldens.NEW_TOKENS
    )
    assert [c.token_ids for c in completions] == expected.greedy[:, goldens.PROMPT_TOKENS :].tolist()


@pytest.mark.parametrize("changes", [{"vocab_size": 67}, {"tie_embeddings": True}])
def test_a_vocabulary_that_cannot_be_split_and_a_shared_one(changes):
    config = toy.BASE.replace(**changes)
    ids = toy.ids(config)
    found = np.asarray(toy.language_model(config, lanes=8).logits(ids))
    assert found.shape == (*ids.shape, config.vocab_size)
    assert np.abs(found - toy.logits(config)).max() < LOGITS_FLOAT32
