import json
import sys
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor
from tokenizer_fixtures import AWKWARD, FORMS, LLAMA, STYLES, as_tokenizer_json, train, write_tokenizer
from tokenizers import Tokenizer as Library
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

from laneformer_jax.errors import LaneformerError
from laneformer_jax.tokenizer import Tokenizer, load_tokenizer


def load(folder, form="tokenizer.model", options=LLAMA, **files) -> Tokenizer:
    tokenizer = load_tokenizer(write_tokenizer(folder, form, options, **files))
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("style", STYLES)
def test_both_forms_give_the_ids_of_sentencepiece_and_the_text_back(tmp_path, style):
    options = STYLES[style]
    reference = SentencePieceProcessor(model_proto=train(options))
    forms = [load(tmp_path / form, form, options) for form in FORMS]
    for tokenizer in forms:
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.size) == (1, 2, 440)
        for text in AWKWARD:
            ids = tokenizer.encode(text, bos=False)
            assert ids == reference.encode(text), (style, text)
            assert tokenizer.encode(text) == [1, *ids]
            # U+2581 is SentencePiece's own sign for a space.
            assert tokenizer.decode(ids) == tokenizer.decode([1, *ids, 2]) == text.replace("▁", " ")


@pytest.mark.parametrize("style", STYLES)
def test_any_ids_decode_alike(tmp_path, style):
    model, json_form = (load(tmp_path / form, form, STYLES[style]) for form in FORMS)
    reference = Library.from_str(json.dumps(as_tokenizer_json(train(STYLES[style]), STYLES[style])))
    for start in range(3, 440):
        ids = [(start * step) % 437 + 3 for step in range(1, 9)]
        assert model.decode(ids) == json_form.decode(ids)
        if "\ufffd" not in model.decode(ids):
            assert model.decode(ids) == reference.decode(ids)


@pytest.mark.parametrize("form", FORMS)
def test_a_cut_character_is_one_replacement_character(tmp_path, form):
    tokenizer = load(tmp_path, form)
    ids = tokenizer.encode("a 🙂")
    assert tokenizer.decode(ids[:-1]) == "a \ufffd"
    assert tokenizer.decode([*ids[:-1], *tokenizer.encode(" b", bos=False)]) == "a \ufffd  b"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("where", ["added_tokens", "tokenizer_config", "tokenizer.json"])
def test_added_tokens_above_the_vocabulary(tmp_path, form, where):
    entries = {
        440: {"content": "<|im_start|>", "special": True},
        441: {"content": "<tool>", "special": False},
        443: {"content": "<pad>", "special": True},
    }
    named = {"additional_special_tokens": ["<|im_start|>"], "pad_token": {"content": "<pad>"}}
    files: dict[str, Any] = {"special_tokens_map": named}
    if where == "added_tokens":
        files["added_tokens"] = {entry["content"]: token for token, entry in entries.items()}
    elif where == "tokenizer_config":
        files["tokenizer_config"] = {"added_tokens_decoder": {str(token): entries[token] for token in entries}}
    folder = write_tokenizer(tmp_path, form, **files)
    if where == "tokenizer.json":
        spec = as_tokenizer_json(train())
        spec["added_tokens"] += [{"id": token, **entry} for token, entry in entries.items()]
        (folder / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None and tokenizer.size == 444
    hello = tokenizer.encode("Hello", bos=False)
    assert tokenizer.decode([440, *hello, 441, 443, *hello]) == "Hello<tool> Hello"
    # 442 has no token, 444 and above are rows that only pad the embedding.
    assert tokenizer.decode([442, 444, 100_000, -3]) == ""
    for text in ("<|im_start|>", "a<tool>b", "<pad><pad>"):
        ids = tokenizer.encode(text)
        assert max(ids) < 440 and ids.count(1) == 1 and tokenizer.decode(ids) == text


def test_a_control_token_that_sentencepiece_itself_knows_as_a_piece_is_not_typed(tmp_path):
    options = {"add_dummy_prefix": True, "user_defined_symbols": ["<|im_start|>", "[[", "\n\n"]}
    marks = {"3": {"content": "<|im_start|>", "special": True}, "4": {"content": "[[", "special": True}}
    assert SentencePieceProcessor(model_proto=train(options)).encode("<|im_start|>")[-1] == 3
    for form in FORMS:
        tokenizer = load(tmp_path / form, form, options, tokenizer_config={"added_tokens_decoder": marks})
        for text in ("<|im_start|>", " a[[[[<|im_start|><|im_start|>b", "x <|im_<|im_start|>start|>"):
            ids = tokenizer.encode(text)
            assert not {3, 4} & set(ids) and tokenizer.decode(ids) == text
        # A piece that isn't special is ordinary text.
        assert 5 in tokenizer.encode("a\n\nb")


def test_a_control_token_of_one_character_can_only_be_itself(tmp_path):
    options = {"add_dummy_prefix": True, "user_defined_symbols": ["|"]}
    tokenizer = load(tmp_path, options=options, tokenizer_config={"eos_token": "|"})
    assert tokenizer.eos_id == 3 and tokenizer.encode("a|b||").count(3) == 3


def test_the_model_file_is_preferred(tmp_path):
    write_tokenizer(tmp_path, "tokenizer.model")
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None and tokenizer.size == 440


def test_a_folder_without_a_tokenizer(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize("form", FORMS)
def test_bos_and_eos_are_the_configs(tmp_path, form):
    tokenizer = load(
        tmp_path / "named",
        form,
        tokenizer_config={"bos_token": {"content": "<start>"}, "eos_token": "<unk>"},
        added_tokens={"<start>": 440},
    )
    assert (tokenizer.bos_id, tokenizer.eos_id) == (440, 0)
    assert tokenizer.encode("a")[0] == 440 and tokenizer.decode([440]) == ""

    without = load(tmp_path / "without", form, tokenizer_config={"bos_token": None})
    assert without.bos_id is None and without.encode("a") == without.encode("a", bos=False)

    nowhere = load(tmp_path / "nowhere", form, tokenizer_config={"eos_token": "<nowhere>", "pad_token": ""})
    assert (nowhere.bos_id, nowhere.eos_id) == (1, None)

    silent = load(tmp_path / "silent", form, tokenizer_config={"add_bos_token": False})
    assert silent.bos_id == 1 and silent.encode("a") == silent.encode("a", bos=False)


def test_a_vocabulary_of_bytes(tmp_path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: token for token, piece in enumerate([*alphabet, "Ġa", "<|end|>"])}
    library = Library(BPE(vocabulary, [("Ġ", "a")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|end|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None and tokenizer.size == 258
    for text in AWKWARD:
        ids = tokenizer.encode(text)
        assert ids == library.encode(text).ids and tokenizer.decode(ids) == text
    assert 257 not in tokenizer.encode("<|end|>") and tokenizer.decode([*tokenizer.encode(" a"), 257]) == " a"


def test_without_the_tokenizers_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert load(tmp_path / "model", "tokenizer.model").size == 440
    with pytest.raises(LaneformerError, match=r"laneformer-jax\[tokenizers\]"):
        load(tmp_path / "json", "tokenizer.json")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.model", "version https://git-lfs.github.com/spec/v1", "tokenizer.model isn't a SentencePiece"),
        ("tokenizer.model", "", "tokenizer.model isn't a SentencePiece"),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1", "tokenizer.json isn't valid JSON"),
        ("tokenizer.json", "[1]", "expected a JSON object, found a list"),
        ("tokenizer.json", '{"model": {"type": "Unigram"}}', "Unigram isn't supported"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {}}}', "can't be read as a tokenizer"),
        ("added_tokens.json", '{"<pad>": "a"}', "added and special tokens"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"440": {}}}', "added and special tokens"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"440": {"content": 5}}}', "id 440 is given to 5"),
        ("added_tokens.json", '{"<pad>": 10000000000}', "id 10000000000 is given to '<pad>'"),
        ("added_tokens.json", '{"<pad>": -1}', "id -1 is given to '<pad>'"),
        ("tokenizer.json", '{"model": [1]}', "of type list isn't supported"),
        ("tokenizer.json", '{"version": "1.0", "model": {"vocab": {}, "merges": []}}', "vocabulary of 0 ids isn't"),
        ("tokenizer.json", "[" * 100_000, "tokenizer.json isn't valid JSON"),
    ],
)
def test_broken_files_are_named(tmp_path, file, content, message):
    form = file if file in FORMS else "tokenizer.model"
    write_tokenizer(tmp_path, form)
    (tmp_path / file).write_text(content)
    with pytest.raises(LaneformerError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("form", FORMS)
def test_half_a_surrogate_pair_is_refused(tmp_path, form):
    with pytest.raises(LaneformerError, match="isn't valid Unicode at character 1"):
        load(tmp_path, form).encode("a\ud800")
