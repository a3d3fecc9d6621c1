"""Generation as users call it. All toy prompts share a bucket, so that few programs are compiled."""

import json
import logging
from functools import cache

import goldens
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import nnx

import laneformer_jax as lf
from laneformer_jax import decode, weights
from laneformer_jax.engine import Engine, bucket
from laneformer_jax.language_model import LanguageModel
from laneformer_jax.sampling import Sampling, row_keys

CONTEXT, NEW = 64, 40
LENGTHS = [1, 3, 7, 8, 9, 12, 15, 16]  # around the window of eight, within the smallest bucket
PROMPTS = [row[:length].tolist() for row, length in zip(toy.ids(rows=8, tokens=16), LENGTHS, strict=True)]
SAMPLED = {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01}


def generate(prompts=PROMPTS[4:5], lm=None, max_new_tokens=NEW, **options):
    lm = lm or toy.language_model()
    return [c.token_ids for c in lm.generate(prompts, max_new_tokens=max_new_tokens, **options)]


@cache
def answers():
    """Greedy answers to all prompts as one batch."""
    return generate(PROMPTS)


def assert_greedy_by_the_uncached_forward(prompts, completions):
    whole = np.zeros((8, CONTEXT), np.int32)
    for row, (prompt, ids) in enumerate(zip(prompts, completions, strict=True)):
        whole[row, : len(prompt) + len(ids)] = prompt + ids
    best = np.asarray(toy.language_model().logits(whole)).argmax(-1)
    for row, (prompt, ids) in enumerate(zip(prompts, completions, strict=True)):
        assert ids == best[row, len(prompt) - 1 : len(prompt) + len(ids) - 1].tolist()


def ending_with(*eos):
    return LanguageModel(toy.language_model().engine, None, eos)


def test_batch_of_different_lengths_equals_the_uncached_forward_and_each_row_alone():
    assert [len(ids) for ids in answers()] == [NEW] * 8
    assert len({tuple(ids) for ids in answers()}) == 8
    assert_greedy_by_the_uncached_forward(PROMPTS, answers())
    for prompt, ids in zip(PROMPTS, answers(), strict=True):
        assert generate([prompt]) == [ids]


def test_three_prompts_of_one_bucket_compile_once(caplog):
    config = toy.BASE.replace(num_layers=1, max_position_embeddings=256)
    lm = LanguageModel(Engine(toy.model(config)), None, ())

    def compiled(max_new_tokens=52, **options):
        """Of 3, 9 and 16 tokens: with what is asked for, more and less than 64."""
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            for prompt in (PROMPTS[1], PROMPTS[4], PROMPTS[7]):
                generate([prompt], lm, max_new_tokens, **options)
        return [record.getMessage() for record in caplog.records if "Finished XLA compilation" in record.getMessage()]

    assert sum("jit(start)" in message for message in compiled()) == 1
    assert sorted(name for name, *_ in lm.engine.programs) == ["cache", "start"]
    lm.eos = (0, 1, 2)
    assert compiled(seed=9) == compiled(max_new_tokens=100) == []
    assert len(lm.engine.programs) == 2


def test_bucket_is_the_next_power_of_two():
    assert [bucket(n) for n in (1, 16, 17, 64, 65)] == [16, 16, 32, 64, 128]


@pytest.mark.parametrize("at", [0, 1, 7])
def test_any_end_of_sequence_token_ends_a_completion_and_is_not_part_of_it(at):
    ids = answers()[4]
    end = ids.index(ids[at])
    (completion,) = ending_with(ids[at]).generate(PROMPTS[4:5], max_new_tokens=NEW)
    assert (completion.token_ids, completion.finish_reason, completion.prompt_tokens) == (ids[:end], "stop", 9)
    unseen = sorted(set(range(toy.BASE.vocab_size)) - set(ids))
    for eos in [(unseen[0], ids[at]), (ids[at], *unseen[:6])]:
        assert generate(lm=ending_with(*eos)) == [ids[:end]]
    (completion,) = ending_with(unseen[0]).generate(PROMPTS[4:5], max_new_tokens=NEW)
    assert (completion.token_ids, completion.finish_reason) == (ids, "length")


def test_rows_end_by_themselves():
    eos = answers()[0][3]
    cut = [ids[: ids.index(eos)] if eos in ids else ids for ids in answers()]
    assert len({len(ids) for ids in cut}) > 1
    assert generate(PROMPTS, ending_with(eos)) == cut


def test_end_of_sequence_inside_the_prompt_is_ignored():
    ids, eos = answers()[7], next(token for token in PROMPTS[7] if token not in answers()[7][:5])
    assert generate(PROMPTS[7:8], ending_with(eos)) == [ids[: ids.index(eos)] if eos in ids else ids]


def test_ends_come_from_config_generation_config_and_tokenizer(tmp_path):
    weights.save_folder(toy.model(toy.BASE.replace(num_layers=1, eos_token_ids=(5, 6))), tmp_path)
    assert lf.load(tmp_path).eos == (5, 6)
    for value, eos in [(7, (5, 6, 7)), ([6, 9, 8], (5, 6, 9, 8)), (None, (5, 6))]:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        assert lf.load(tmp_path).eos == eos
    for content in ("[]", "{", '{"eos_token_id": "</s>"}'):
        (tmp_path / "generation_config.json").write_text(content)
        with pytest.raises(lf.LaneformerError, match=r"generation_config.json: unusable"):
            lf.load(tmp_path)
    speaking = toy.speaking(toy.language_model())
    speaking.tokenizer.eos_id = 4
    try:
        assert LanguageModel(speaking.engine, speaking.tokenizer, ()).eos == (4,)
        assert LanguageModel(speaking.engine, speaking.tokenizer, (5,)).eos == (5,)
    finally:
        speaking.tokenizer.eos_id = None


def test_later_turn_runs_only_what_is_new_and_equals_the_uncached_forward(monkeypatch):
    engine, prefilled = toy.language_model().engine, []

    def start(shape, prompts, lengths, *rest):
        prefilled.append(int(lengths[0]))
        return Engine.start(engine, shape, prompts, lengths, *rest)

    monkeypatch.setattr(engine, "start", start)
    session, prompt = lf.Session(engine), PROMPTS[6]
    for new, user in [(10, [3, 4, 5]), (9, [6, 7, 8, 9, 10, 11, 12, 13]), (8, [14])]:
        (ids,) = generate([prompt], session=session, max_new_tokens=new)
        assert_greedy_by_the_uncached_forward([prompt], [ids])
        prompt = prompt + ids + user
    # The newest token of an answer has not been through the model: it is prefilled with the next message.
    assert prefilled == [15, 1 + 3, 1 + 8]
    other = PROMPTS[3]
    assert generate([other], session=session) == [answers()[3]]
    assert generate([other], session=session) == [answers()[3]]
    assert prefilled[3:] == [8, 8]


def test_later_turn_after_an_end_of_sequence_token():
    ids = answers()[4]
    lm, end = ending_with(ids[6]), ids.index(ids[6])
    session = lf.Session(lm.engine)
    assert generate(lm=lm, session=session) == [ids[:end]]
    assert session.cached == [PROMPTS[4] + ids[:end]]
    prompt = PROMPTS[4] + ids[:end] + [ids[6], 3, 4]
    (more,) = generate([prompt], session=session, max_new_tokens=10)
    assert_greedy_by_the_uncached_forward([prompt], [more])


def test_later_turn_of_rows_that_ended_at_different_times():
    lm = ending_with(answers()[0][3])
    session = lf.Session(lm.engine, rows=8)
    first = generate(PROMPTS, lm, session=session, max_new_tokens=20)
    assert len({len(ids) for ids in first}) > 2
    prompts = [
        prompt + ids + [lm.eos[0], 3 + row] for row, (prompt, ids) in enumerate(zip(PROMPTS, first, strict=True))
    ]
    more = generate(prompts, toy.language_model(), session=session, max_new_tokens=20)
    assert_greedy_by_the_uncached_forward(prompts, more)


def test_context_is_filled_to_its_last_token_and_not_beyond():
    (ids,) = generate(PROMPTS[7:8], max_new_tokens=CONTEXT - 16)
    assert_greedy_by_the_uncached_forward(PROMPTS[7:8], [ids])
    with pytest.raises(lf.LaneformerError) as error:
        generate(PROMPTS[7:8], max_new_tokens=CONTEXT - 15)
    assert str(error.value) == (
        "prompt of 16 tokens and 49 new ones exceed the context of 64:"
        " shorten the prompt or ask for at most 48 new tokens"
    )
    with pytest.raises(lf.LaneformerError, match="prompt of 70 tokens and 1 new ones .* at most 0 new tokens"):
        toy.language_model().generate([[3] * 70])
    with pytest.raises(lf.LaneformerError, match="prompt of 16 tokens and 49 new ones"):
        generate(PROMPTS, max_new_tokens=CONTEXT - 15)


def test_default_limit_is_what_the_context_leaves():
    assert [len(ids) for ids in generate(PROMPTS[7:8], max_new_tokens=None)] == [CONTEXT - 16]


def test_session_refuses_more_than_its_own_capacity():
    session = lf.Session(toy.language_model().engine, capacity=20)
    with pytest.raises(lf.LaneformerError, match="9 tokens and 12 new ones exceed the context of 20.*at most 11 new"):
        generate(session=session, max_new_tokens=12)
    assert lf.Session(toy.language_model().engine, capacity=1000).capacity == CONTEXT
    with pytest.raises(lf.UsageError, match=r"a session of 1 row\(s\) got 8 prompts"):
        generate(PROMPTS, session=session)


def test_smaller_longest_context_is_refused_earlier():
    short = LanguageModel(Engine(toy.model(toy.BASE.replace(max_position_embeddings=20))), None, ())
    with pytest.raises(lf.LaneformerError, match="9 tokens and 12 new ones exceed the context of 20"):
        generate(lm=short, max_new_tokens=12)
    with pytest.raises(lf.LaneformerError, match="21 tokens exceed the context of 20"):
        short.logits([[3] * 21])


@cache
def sampled():
    """Eight rows of one prompt, with the seeds 4 to 11."""
    return generate([PROMPTS[4]] * 8, seed=list(range(4, 12)), **SAMPLED)


def test_seed_gives_the_same_tokens_alone_and_as_row_3_of_8():
    assert len({tuple(ids) for ids in sampled()}) == 8
    for row in (3, 6):
        assert generate(seed=4 + row, **SAMPLED) == [sampled()[row]]
    assert generate(seed=7, **{**SAMPLED, "temperature": 1e-6}) == [answers()[4]]


def test_seed_gives_the_same_tokens_on_eight_devices():
    """Greedy ones are compared with the goldens, in tests/parallel."""
    assert generate(lm=toy.language_model(lanes=8), seed=7, **SAMPLED) == [sampled()[3]]


def test_samples_share_one_prefill_and_equal_separate_runs(monkeypatch):
    lm, rows = toy.speaking(toy.language_model()), []

    def prefill(model, lanes, chunk, prompts, *rest, prefill=decode.prefill):
        rows.append(prompts.shape)
        return prefill(model, lanes, chunk, prompts, *rest)

    monkeypatch.setattr(decode, "prefill", prefill)
    groups = lm.generate(PROMPTS[3:5], max_new_tokens=NEW, seed=[8, 7], num_samples=3, **SAMPLED)
    assert rows == [(2, 16)]
    for prompt, seed, samples in zip(PROMPTS[3:5], [8, 7], groups, strict=True):
        assert len({tuple(sample.token_ids) for sample in samples}) == 3
        assert [samples[0].token_ids] == generate([prompt], lm, seed=seed, **SAMPLED)
        for key, sample in zip(row_keys([seed], 3), samples, strict=True):
            assert sample.token_ids == run_with(lm.engine, prompt, key, sampleable=lm.tokenizer.size)
    # One text gives one list; a second row fills up the program's batch.
    monkeypatch.setattr(lm.engine, "row_multiple", 2)
    text = lm.tokenizer.decode(PROMPTS[4])
    monkeypatch.setattr(lm, "_tokens", {text: PROMPTS[4]}.get)
    assert lm.generate(text, max_new_tokens=NEW, seed=7, num_samples=3, **SAMPLED) == groups[1]


def run_with(engine, prompt, key, sampleable):
    shape = decode.Shape(CONTEXT, 16, 1, Sampling(**SAMPLED).filters())
    padded = jnp.array([prompt + [0] * (16 - len(prompt))], jnp.int32)
    choice = decode.Choice(key[None], Sampling(**SAMPLED).values(), jnp.int32(sampleable), jnp.full(4, -1, jnp.int32))
    lengths, limit = jnp.array([len(prompt)], jnp.int32), jnp.int32(NEW)
    progress = engine.start(shape, padded, lengths, engine.init_cache(1, CONTEXT), choice, limit)
    return progress.tokens[0, :NEW].tolist()


def test_padded_rows_of_the_embedding_are_never_sampled():
    """The toy tokenizer knows 56 of 64 ids."""
    lm, flat = toy.language_model(), {"temperature": 9.0, "top_k": 1000, "top_p": 0.9999, "min_p": 1e-6}
    with_all = np.array(generate([PROMPTS[4]] * 8, seed=list(range(8)), **flat))
    speaking = np.array(generate([PROMPTS[4]] * 8, toy.speaking(lm), seed=list(range(8)), **flat))
    assert with_all.max() >= 56 and speaking.max() == 55


def test_rows_that_fill_up_a_mesh_end_with_the_last_one(monkeypatch):
    engine, steps = toy.language_model().engine, []

    def start(*arguments):
        progress = Engine.start(engine, *arguments)
        steps.append((len(progress.token), int(progress.step)))
        return progress

    monkeypatch.setattr(engine, "row_multiple", 8)
    monkeypatch.setattr(engine, "start", start)
    ids = answers()[4]
    end = ids.index(ids[7])
    assert generate(lm=ending_with(ids[7])) == [ids[:end]]
    assert generate([PROMPTS[4]] * 3, seed=[5, 6, 7], **SAMPLED) == sampled()[1:4]
    assert steps == [(8, end + 1), (8, NEW)]
    assert toy.language_model().logits([PROMPTS[7]] * 3).shape == (3, 16, 64)


@cache
def spoken():
    (completion,) = toy.speaking(toy.language_model()).generate(PROMPTS[4:5], max_new_tokens=NEW)
    assert len(completion.text) > 20
    return completion


def stream(**options):
    """Pieces as they come, and the completion."""
    pieces = toy.speaking(toy.language_model()).generate(PROMPTS[4:5], max_new_tokens=NEW, stream=True, **options)
    shown = []
    while True:
        try:
            shown.append(next(pieces))
        except StopIteration as end:
            return shown, end.value


def stopped(stop):
    """The completion, which must be the same streamed and not."""
    (completion,) = toy.speaking(toy.language_model()).generate(PROMPTS[4:5], max_new_tokens=NEW, stop=stop)
    shown, streamed = stream(stop=stop)
    assert "".join(shown) == completion.text
    assert streamed == completion
    return completion


def test_streamed_text_is_the_text():
    shown, completion = stream()
    assert len(shown) > 2 and "".join(shown) == spoken().text
    assert completion == spoken()


@pytest.mark.parametrize("at", [0, 1, 9, 13])
def test_stop_string_over_several_tokens_is_found_and_not_shown(at):
    text = spoken().text
    stop = text[at : at + 5]
    pieces = [toy.PIECES[token] for token in spoken().token_ids]
    assert not any(stop in piece for piece in pieces)
    completion = stopped(stop)
    assert (completion.text, completion.finish_reason) == (text[: text.index(stop)], "stop")
    assert len(completion.token_ids) < NEW
    assert completion.token_ids == spoken().token_ids[: len(completion.token_ids)]


def test_earliest_of_several_stop_strings_counts():
    text = spoken().text
    completion = stopped([text[12:16], text[6:9], "never"])
    assert completion.text == text[: min(text.index(text[12:16]), text.index(text[6:9]))]


def test_beginning_of_a_stop_string_is_shown_in_the_end():
    text = spoken().text
    completion = stopped([text[-3:] + "never", text[5:8] + "never"])
    assert (completion.text, completion.finish_reason) == (text, "length")


def test_logits_that_are_not_finite_are_reported_with_their_row(monkeypatch):
    engine = toy.language_model().engine

    def poisoned(path, leaf):
        return leaf.replace(leaf[...].at[5].set(jnp.nan)) if path == ("embedding",) else leaf

    flat = nnx.to_flat_state(engine.state)
    monkeypatch.setattr(engine, "state", nnx.from_flat_state([(path, poisoned(path, leaf)) for path, leaf in flat]))
    prompts = [[token if token != 5 else 6 for token in prompt] for prompt in PROMPTS]
    prompts[3] = [3, 5, 4]
    with pytest.raises(lf.LaneformerError, match=r"^the logits of row\(s\) \[3\] are not finite: the weights"):
        generate(prompts)
    with pytest.raises(lf.LaneformerError, match=r"row\(s\) \[0\]"):
        generate(prompts[3:4], **SAMPLED)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": []}, "no prompts given"),
        ({"prompts": [[]]}, "the prompt is empty: give at least one token"),
        ({"prompts": [[3], []]}, "the prompt is empty"),
        ({"prompts": [[3, 64]]}, "token ids outside the vocabulary of 64"),
        ({"prompts": [[-1]]}, "token ids outside the vocabulary of 64"),
        ({"prompts": [[2.5]]}, "a prompt must be a text or a list of token ids, got "),
        ({"prompts": [3, 4]}, "a prompt must be a text or a list of token ids, got 3"),
        ({"prompts": "abc"}, "no tokenizer: give the prompt as token ids"),
        ({"max_new_tokens": 0}, "max_new_tokens and num_samples must be at least 1, got 0, 1"),
        ({"num_samples": 0}, "max_new_tokens and num_samples must be at least 1, got 40, 0"),
        ({"seed": [1, 2]}, "2 seeds for 1 prompts: give one, or one for each"),
        ({"seed": -1}, "a seed must be a whole number from 0 to 4294967295, got -1"),
        ({"seed": 2**32}, "a seed must be a whole number from 0 to 4294967295, got 4294967296"),
        ({"seed": 1.5}, "a seed must be a whole number from 0 to 4294967295, got 1.5"),
        ({"temperature": -1.0}, "temperature must be 0 or a positive number, got -1.0"),
        ({"top_p": 1.5}, "top_p must lie between 0 and 1, got 1.5"),
        ({"stop": "a"}, "stop strings and streaming need a tokenizer"),
        ({"stream": True}, "stop strings and streaming need a tokenizer"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(options, message):
    lm = toy.language_model()
    with pytest.raises(lf.LaneformerError, match=message):
        lm.generate(**{"prompts": PROMPTS[:1], "max_new_tokens": NEW, **options})


def test_bad_requests_of_text_are_refused():
    lm = toy.speaking(toy.language_model())
    for options, message in [
        ({"prompts": ""}, "the prompt is empty: give at least one character"),
        ({"prompts": "a", "stop": ""}, "a stop string must not be empty"),
        ({"prompts": ["a", "b"], "stream": True}, "stream takes one prompt and one sample"),
        ({"prompts": "a", "num_samples": 2, "stream": True}, "stream takes one prompt and one sample"),
    ]:
        with pytest.raises(lf.LaneformerError, match=message):
            lm.generate(**options)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[3], [3, 4]], "token_ids must be rows of equal length"),
        ([3, 4], r"whole numbers of shape \[B, T\], got int64 \[2\]"),
        ([[]], r"whole numbers of shape \[B, T\]"),
        ([[0.5]], r"whole numbers of shape \[B, T\], got float64"),
        ([[64]], "outside the vocabulary of 64"),
        ([[-1]], "outside the vocabulary of 64"),
        ([[3] * 65], "65 tokens exceed the context of 64"),
    ],
)
def test_logits_of_bad_ids_are_refused(ids, message):
    with pytest.raises(lf.LaneformerError, match=message):
        toy.language_model().logits(ids)


def test_what_is_no_model_folder_is_named(tmp_path):
    for path in (tmp_path, tmp_path / "missing", goldens.FOLDER / "delay2_swa" / "config.json"):
        with pytest.raises(lf.LaneformerError, match=f"{path} is not a model folder: it has no config.json"):
            lf.load(path)
    fields = json.loads((goldens.FOLDER / "delay2_swa" / "config.json").read_text())
    for changes, message in [
        ({"model_type": "llama"}, "config.json: model_type 'llama' is not a Laneformer"),
        ({"num_lanes": 16}, "config.json: config: 16 lanes do not divide num_heads 8"),
        ({}, "has no weights"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(fields | changes))
        with pytest.raises(lf.LaneformerError, match=message):
            lf.load(tmp_path)
    with pytest.raises(lf.LaneformerError, match="dtype must be one of float32, bfloat16, float16, got 'int4'"):
        lf.load(goldens.FOLDER / "delay2_swa", dtype="int4")


def test_texts_in_texts_out():
    lm = toy.speaking(toy.language_model())
    prompt = "abc def"
    completion = lm.generate(prompt, max_new_tokens=NEW)
    assert completion.prompt_tokens == 8  # with the BOS
    assert generate([[toy.BOS, *toy.Letters().encode(prompt)]], lm) == [completion.token_ids]
    assert completion.text == lm.tokenizer.decode(completion.token_ids)
    (alone,) = lm.generate([prompt], max_new_tokens=NEW)
    assert alone == completion
    (silent,) = toy.language_model().generate(PROMPTS[:1], max_new_tokens=NEW)
    assert silent.text is None
