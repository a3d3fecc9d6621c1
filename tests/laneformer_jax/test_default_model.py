"""The model that ships with the package is the one that its card describes, and has learned Python."""

import json
import math

import numpy as np
import pytest

import laneformer_jax as lf
from laneformer_jax.language_model import DEFAULT_MODEL, LanguageModel

UNSEEN = '''def moving_average(values, width):
    """Return the mean of every window of the given width."""
    if width < 1:
        raise ValueError("width must be positive")
    total = sum(values[:width])
    for i in range(width, len(values)):
        yield total / width
        total += values[i] - values[i - width]
'''


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return lf.load()


def test_it_is_small_and_of_the_released_arrangement(lm):
    assert (DEFAULT_MODEL / "model.safetensors").stat().st_size <= 4_000_000
    assert (lm.config.num_lanes, lm.config.delay, lm.config.early_comm) == (8, 4, False)
    assert 0 < len(lm.config.sliding_layers) < lm.config.num_layers
    assert lm.config.dtype == "bfloat16"


def test_the_card_states_the_measured_figures(lm):
    facts = json.loads((DEFAULT_MODEL / "metrics.json").read_text())
    card = (DEFAULT_MODEL / "README.md").read_text()
    for name in ("bits_per_byte", "bits_per_byte_bfloat16", "gzip_bits_per_byte", "unigram_bits_per_byte"):
        assert f"{facts[name]:.3f}" in card
    assert card.count("~~~python") == 10
    assert facts["bits_per_byte_bfloat16"] < facts["gzip_bits_per_byte"] < facts["unigram_bits_per_byte"]


def test_unseen_python_costs_it_far_less_than_bytes_of_random_text(lm):
    assert bits_per_byte(lm, UNSEEN) < 2.5 < 5 < bits_per_byte(lm, "Qz7#kW~pX)}v0@Jg^Lb")


def bits_per_byte(lm: LanguageModel, text: str) -> float:
    assert lm.tokenizer is not None
    ids = np.asarray([lm.tokenizer.encode(text)])
    logits = np.asarray(lm.logits(ids), np.float64)[0, :-1]
    logits -= logits.max(-1, keepdims=True)
    chosen = np.take_along_axis(logits, ids[0, 1:, None], -1)[:, 0] - np.log(np.exp(logits).sum(-1))
    return -chosen.sum() / math.log(2) / len(text.encode())


def test_streamed_text_is_the_unstreamed_and_continues_the_prompt(lm):
    settings = {"max_new_tokens": 60, "temperature": 0.7, "top_p": 0.95, "seed": 7}
    whole = lm.generate("def read_lines(path):\n", **settings)
    pieces = list(lm.generate("def read_lines(path):\n", stream=True, **settings))
    assert len(pieces) > 3 and "".join(pieces) == whole.text
    assert whole.text.startswith("    ")
