import goldens
import numpy as np
import pytest
from tolerances import LOGITS_FLOAT32

import laneformer_jax as lf


@pytest.fixture(params=goldens.NAMES)
def golden(request):
    return lf.load(goldens.FOLDER / request.param), goldens.expected(request.param)


def test_uncached_logits(golden):
    lm, expected = golden
    assert np.abs(np.asarray(lm.logits(expected.input_ids)) - expected.logits).max() < LOGITS_FLOAT32


def test_greedy_through_prefill_and_cached_steps(golden):
    lm, expected = golden
    lm.eos = ()
    completions = lm.generate(expected.input_ids.tolist(), max_new_tokens=goldens.NEW_TOKENS)
    assert [c.token_ids for c in completions] == expected.greedy[:, goldens.PROMPT_TOKENS :].tolist()


def test_greedy_through_the_uncached_forward(golden):
    lm, expected = golden
    logits = np.asarray(lm.logits(expected.greedy))
    chosen = logits[:, goldens.PROMPT_TOKENS - 1 : -1].argmax(-1)
    assert chosen.tolist() == expected.greedy[:, goldens.PROMPT_TOKENS :].tolist()
