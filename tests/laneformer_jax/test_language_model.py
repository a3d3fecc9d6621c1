"""What callers hand to `load` and `generate`: numbers and texts of any type are taken, all else is refused by name."""

import json

import numpy as np
import pytest
import toy

import laneformer_jax as lf
from laneformer_jax import weights

PROMPT = [3, 4, 5]


def generate(prompts=(PROMPT,), lm=None, max_new_tokens=40, **options):
    lm = lm or toy.language_model()
    return [c.token_ids for c in lm.generate(prompts, max_new_tokens=max_new_tokens, **options)]


@pytest.fixture
def requested(monkeypatch):
    """Calls `generate` and returns what it would have run."""
    requests = []

    def run(session, request, blocks):
        requests.append(request)
        return iter(())

    monkeypatch.setattr(lf.Session, "run", run)

    def call(*prompts, **options):
        toy.language_model().generate(*(prompts or [[PROMPT]]), **{"max_new_tokens": 40, **options})
        return requests[-1]

    return call


@pytest.mark.parametrize(
    "prompts", [np.array([PROMPT]), (row for row in [PROMPT]), [iter(PROMPT)], [np.array(PROMPT, np.uint64)]]
)
def test_arrays_and_iterators_are_prompts(requested, prompts):
    assert requested(prompts) == requested()


def test_numbers_of_numpy_are_numbers(requested):
    expected = requested([PROMPT] * 2, max_new_tokens=4, num_samples=2, seed=[7, 8], temperature=2.0)
    found = requested(
        [PROMPT] * 2,
        max_new_tokens=np.int64(4),
        num_samples=np.int32(2),
        seed=np.array([7, 8]),
        temperature=np.float32(2.0),
    )
    assert found == expected
    assert (type(found.max_new_tokens), type(found.num_samples)) == (int, int)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": 5}, "a prompt must be a text or a list of token ids, got 5"),
        ({"prompts": None}, "a prompt must be a text or a list of token ids, got None"),
        ({"prompts": b"abc"}, "a prompt must be a text or a list of token ids, got b'abc'"),
        ({"prompts": [b"abc"]}, "a prompt must be a text or a list of token ids, got b'abc'"),
        ({"prompts": [[0.5] * 5000]}, "a prompt must be a text or a list of token ids, got .{10,50}$"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be a whole number, got 2.5"),
        ({"max_new_tokens": "5"}, "max_new_tokens must be a whole number, got '5'"),
        ({"num_samples": 1.5}, "num_samples must be a whole number, got 1.5"),
        ({"seed": "7"}, "a seed must be a whole number from 0 to 4294967295, got '7'"),
        ({"seed": np.array([1, 2])}, "2 seeds for 1 prompts"),
        ({"session": "x"}, "the session is none of this model"),
    ],
)
def test_anything_else_is_refused(options, message):
    with pytest.raises(lf.UsageError, match=message):
        generate(**options)


@pytest.mark.parametrize("stop", [1, b"a", [1], [None], ["a", ""]])
def test_stop_strings_are_texts(stop):
    with pytest.raises(lf.UsageError, match="a stop string must not be empty nor anything but text, got "):
        generate(lm=toy.speaking(toy.language_model()), stop=stop)


def test_the_session_of_another_model_is_refused():
    other = toy.Engine(toy.model(toy.BASE.replace(num_layers=1)))
    with pytest.raises(lf.UsageError, match=r"the session is none of this model: make it as Session\(lm.engine\)"):
        generate(session=lf.Session(other))


@pytest.mark.parametrize("sizes", [(0, None), (-1, None), (1, 0), (1, -5), (1, 30.5), ("1", None)])
def test_a_session_has_rows_and_room(sizes):
    with pytest.raises(lf.UsageError, match="a session needs at least one row and one token"):
        lf.Session(toy.language_model().engine, *sizes)


def test_the_default_limit_is_what_the_session_leaves(requested):
    session = lf.Session(toy.language_model().engine, capacity=20)
    assert requested(session=session, max_new_tokens=None).max_new_tokens == 20 - len(PROMPT)


def test_a_stream_closed_early_leaves_a_session_that_goes_on():
    lm = toy.speaking(toy.language_model())
    session = lf.Session(lm.engine)
    pieces = lm.generate([PROMPT], max_new_tokens=40, stream=True, session=session)
    next(pieces)
    pieces.close()
    assert generate(lm=lm, session=session) == generate(lm=lm)


@pytest.mark.parametrize("eos", [10**12, -1, [2, 64]])
def test_ends_outside_the_vocabulary_are_named_with_their_file(tmp_path, eos):
    weights.save_folder(toy.model(toy.BASE.replace(num_layers=1)), tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(lf.LaneformerError, match=r"generation_config.json: eos_token_id .* the vocabulary of 64"):
        lf.load(tmp_path)
