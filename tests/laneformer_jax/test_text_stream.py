import random

import pytest
from tokenizer_fixtures import AWKWARD, FORMS, STYLES, write_tokenizer

from laneformer_jax import tokenizer as tokenizer_module
from laneformer_jax.errors import LaneformerError
from laneformer_jax.text_stream import TextStream
from laneformer_jax.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module", params=[(style, form) for style in STYLES for form in FORMS], ids="-".join)
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    style, form = request.param
    tokenizer = load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), form, STYLES[style]))
    assert tokenizer is not None
    return tokenizer


def completion_text(tokenizer: Tokenizer, prompt_ids: list[int], ids: list[int], stop: tuple[str, ...] = ()) -> str:
    stream = TextStream(tokenizer, prompt_ids, stop)
    return stream.push(ids) + stream.finish()


def pieces(stream: TextStream, ids: list[int], seed: int) -> list[str]:
    """What a stream gives for the ids, handed over one to four at a time, and at its end."""
    sizes = random.Random(seed)
    texts = []
    while ids:
        count = sizes.randint(1, 4)
        texts.append(stream.push(ids[:count]))
        ids = ids[count:]
    return [*texts, stream.finish()]


def test_joined_pieces_are_the_text_decoded_at_once(tokenizer):
    for seed, text in enumerate(AWKWARD):
        prompt = "def f(a):\n"
        ids = tokenizer.encode(prompt + text)
        cut = len(tokenizer.encode(prompt))
        expected = tokenizer.decode(ids)[len(tokenizer.decode(ids[:cut])) :]
        texts = pieces(TextStream(tokenizer, ids[:cut]), ids[cut:], seed)
        assert "".join(texts) == completion_text(tokenizer, ids[:cut], ids[cut:]) == expected
        assert "\ufffd" not in "".join(texts)


def test_any_ids_in_any_division(tokenizer):
    chance = random.Random(0)
    for seed in range(200):
        ids = [chance.randrange(tokenizer.size + 5) for _ in range(chance.randrange(40))]
        prompt = ids[: chance.randrange(3)]
        texts = pieces(TextStream(tokenizer, prompt), ids[len(prompt) :], seed)
        assert "".join(texts) == completion_text(tokenizer, prompt, ids[len(prompt) :])
        assert "".join(pieces(TextStream(tokenizer, []), ids, seed)) == tokenizer.decode(ids)


def test_spaces_and_the_first_indent_are_kept(tokenizer):
    prompt = tokenizer.encode("def f(a):\n")
    completion = tokenizer.encode("def f(a):\n    return a")[len(prompt) :]
    assert completion_text(tokenizer, prompt, completion) == "    return a"
    stream = TextStream(tokenizer, prompt)
    assert "".join(stream.push([token]) for token in completion) == "    return a"
    # After BOS alone the vocabulary's own space isn't part of the text.
    assert completion_text(tokenizer, [1], tokenizer.encode("  two spaces", bos=False)) == "  two spaces"


def test_characters_come_whole(tokenizer):
    prompt, ids = tokenizer.encode("a"), tokenizer.encode("a🙂é")[2:]
    prompt = tokenizer.encode("a🙂é")[:2]
    stream = TextStream(tokenizer, prompt)
    shown = [stream.push([token]) for token in ids]
    assert [text for text in shown if text] == ["🙂", "é"] and stream.finish() == ""

    cut = TextStream(tokenizer, prompt)
    assert cut.push(ids[:3]) == "" and cut.finish() == "\ufffd" and cut.finish() == ""
    # The prompt's end can be the first half.
    assert completion_text(tokenizer, [*prompt, *ids[:2]], ids[2:]) == "🙂é"


def oracle(text: str, stops: tuple[str, ...]) -> str:
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


def test_stop_strings_end_the_text_and_are_never_shown(tokenizer):
    text = "Hello world:\n    return ababac 🙂\n\ndef next(a):\n"
    prompt = tokenizer.encode("x")
    ids = tokenizer.encode("x" + text)[len(prompt) :]
    assert completion_text(tokenizer, prompt, ids) == text
    for stops in [
        ("world",),
        ("Hello",),
        ("abac",),
        ("\n\n", "\n\ndef"),
        ("def", "\n\ndef"),
        ("absent", "def next(a):\n..."),
        ("return ababac 🙂!", "bab"),
        ("urn ababac 🙂\n", "bab"),
        ("🙂",),
        (),
    ]:
        for seed in range(20):
            stream = TextStream(tokenizer, prompt, stops)
            texts = pieces(stream, ids, seed)
            assert "".join(texts) == oracle(text, stops) == completion_text(tokenizer, prompt, ids, stops), stops
            assert stream.stopped == any(stop in text for stop in stops)
            assert stream.push(ids) == "" or not stream.stopped


def test_only_what_may_become_a_stop_string_is_held_back(tokenizer):
    prompt = tokenizer.encode("x")
    stream = TextStream(tokenizer, prompt, ["\n\nEND", "a b"])
    feed = [
        ("one", "one"),
        ("\n", ""),
        ("\n", ""),
        ("E", ""),
        ("NOT", "\n\nENOT"),
        ("a", ""),
        ("c", "ac"),
        ("\nE", "\nE"),
    ]
    for text, shown in feed:
        assert stream.push(tokenizer.encode("x" + text)[len(prompt) :]) == shown, text
    assert not stream.stopped


def test_a_text_that_ends_in_half_a_stop_string_is_released(tokenizer):
    prompt = tokenizer.encode("x")
    stream = TextStream(tokenizer, prompt, ["abac"])
    assert stream.push(tokenizer.encode("xzaba")[len(prompt) :]) == "z"
    assert stream.finish() == "aba" and not stream.stopped
    # A found stop string waits for an earlier one; the end settles it.
    stream = TextStream(tokenizer, prompt, ["abac", "b"])
    assert stream.push(tokenizer.encode("xzaba")[len(prompt) :]) == "z" and not stream.stopped
    assert stream.finish() == "a" and stream.stopped


def test_a_string_as_stop_is_one_stop_string_and_an_empty_one_is_refused(tokenizer):
    prompt = tokenizer.encode("x")
    ids = tokenizer.encode("xabac")[len(prompt) :]
    assert completion_text(tokenizer, prompt, ids, "ac") == "ab"
    with pytest.raises(LaneformerError, match="empty stop string"):
        TextStream(tokenizer, prompt, ["a", ""])


def test_every_token_is_decoded_once(tokenizer, monkeypatch):
    decoded = []
    push = tokenizer_module.Detokenizer.push

    def counted(self, ids, final=False):
        decoded.extend(ids)
        return push(self, ids, final)

    monkeypatch.setattr(tokenizer_module.Detokenizer, "push", counted)
    ids = tokenizer.encode("Hello world\n" * 200)
    stream = TextStream(tokenizer, ids[:50], ["world\n\n"])
    for token in ids[50:]:
        stream.push([token])
        assert len(stream._held) < len("world\n\n")
    stream.finish()
    assert decoded == ids
