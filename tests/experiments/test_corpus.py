"""From a folder to batches of tokens: nothing lost, nothing leaked, the same every time."""

import ast
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from experiments import corpus
from laneformer_jax.errors import LaneformerError

SOURCE = Path(corpus.__file__).parent.parent / "laneformer_jax"


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [path.read_text() for path in sorted(SOURCE.glob("*.py"))]


@pytest.fixture(scope="module")
def tokenizer(texts: list[str]) -> bytes:
    return corpus.train_tokenizer(texts, 512)


def held_out_name() -> str:
    return next(name for name in (f"m{i}.py" for i in range(1000)) if corpus.is_held_out(name))


def fill(folder: Path, files: dict[str, str]) -> str:
    for name, text in {**files, held_out_name(): "hidden = 1\n"}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


def test_cut_loses_nothing_and_starts_documents_at_statements(texts: list[str]):
    for text in texts:
        documents = list(corpus.cut(text, python=True))
        assert "".join(documents) == text
        assert all(len(document) >= corpus.DOCUMENT_CHARACTERS for document in documents[:-1])
        for document in documents:
            ast.parse(document)
    assert any(len(list(corpus.cut(text, python=True))) > 2 for text in texts)


def test_cut_keeps_comments_and_decorators_with_what_they_belong_to():
    before = "x = 1\n" * 166 + "y = 10\n"
    belongs = "# about f\n@decorated\n@twice\ndef f():\n    pass\n"
    assert list(corpus.cut(before + belongs, python=True)) == [before, belongs]


@pytest.mark.parametrize("text", ["no python: (\n" * 300, "a\fb = 1\n\x0c\nc = 2\n", "", "x = 1"])
def test_cut_of_awkward_text_loses_nothing(text: str):
    assert "".join(corpus.cut(text, python=True)) == text


def test_split_is_by_name_and_close_to_its_share():
    names = [f"package/module_{i}.py" for i in range(5000)]
    share = sum(map(corpus.is_held_out, names)) / len(names)
    assert 0.02 < share < 0.04
    assert corpus.is_held_out(held_out_name())


def test_folder_is_read_in_order_without_tests_and_undecodable_files(tmp_path: Path):
    source = fill(tmp_path, {"b.py": "b = 1\n", "a/d.py": "c = 1\n", "test/t.py": "t = 1\n", "data.bin": "no text"})
    (tmp_path / "latin.py").write_bytes(b"x = '\xe9'\n")
    read = corpus.read_corpus(source)
    assert (read.training, read.held_out, read.files) == (("c = 1\n", "b = 1\n"), ("hidden = 1\n",), 3)
    assert corpus.read_corpus(source) == read
    (tmp_path / "b.py").write_text("b = 2\n")
    assert corpus.read_corpus(source).sha256 != read.sha256


def test_unusable_corpora_are_refused(tmp_path: Path):
    with pytest.raises(LaneformerError, match="neither 'stdlib' nor a folder"):
        corpus.read_corpus(str(tmp_path / "absent"))
    with pytest.raises(LaneformerError, match="0 documents to train on and 1 held out"):
        corpus.read_corpus(fill(tmp_path, {}))
    with pytest.raises(LaneformerError, match="no vocabulary of 4000"):
        corpus.train_tokenizer(["tiny = 1\n"], 4000)
    with pytest.raises(LaneformerError, match="20 tokens, too few for sequences of 16"):
        corpus.batch(np.zeros(20, np.uint16), 0, 1, 16, 0)


@pytest.mark.parametrize(
    "text",
    ["def f(x):\n    if x:\n\t\treturn 1  \n\n\n", "    indented first", "\u00e9 \U0001f600 \r\n x", "</s><s>", "   "],
)
def test_tokenizer_gives_back_the_very_text(tokenizer: bytes, text: str):
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer)
    ids = processor.encode(text)
    assert processor.decode(ids) == text
    assert not {corpus.BOS, corpus.EOS} & set(ids)


def test_tokenizer_spends_one_piece_on_a_line_end_and_on_four_spaces(tokenizer: bytes):
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer)
    assert processor.encode("\n        return", out_type=str) == ["\n", "\u2581" * 4, "\u2581" * 4, "return"]
    assert (processor.unk_id(), processor.bos_id(), processor.eos_id()) == (0, corpus.BOS, corpus.EOS)
    assert processor.vocab_size() == 512


def test_tokenizer_training_is_deterministic(texts: list[str], tokenizer: bytes):
    assert corpus.train_tokenizer(texts, 512) == tokenizer


def test_documents_are_framed(tokenizer: bytes):
    first, second = (corpus.encode([text], tokenizer) for text in ("a = 1\n", "b"))
    assert first[0] == second[0] == corpus.BOS and first[-1] == second[-1] == corpus.EOS
    assert np.array_equal(corpus.encode(["a = 1\n", "b"], tokenizer), [*first, *second])


def test_an_epoch_has_every_window_once_and_epochs_differ():
    tokens = np.arange(100, dtype=np.uint16)
    epochs = [corpus.batch(tokens, epoch, 9, 10, seed=3) for epoch in range(2)]
    for rows in epochs:
        starts = np.sort(rows[:, 0])
        assert 0 <= starts[0] < 10 and np.array_equal(starts, starts[0] + 10 * np.arange(9))
        assert np.array_equal(rows, rows[:, :1] + np.arange(11))
    assert not np.array_equal(*epochs)
    assert not np.array_equal(epochs[0], corpus.batch(tokens, 0, 9, 10, seed=4))


def test_batches_do_not_depend_on_what_was_asked_before():
    tokens = np.arange(100, dtype=np.uint16)
    asked_in_order = [corpus.batch(tokens, step, 4, 10, seed=0) for step in range(8)]
    corpus._epoch.cache_clear()
    assert np.array_equal(corpus.batch(tokens, 7, 4, 10, seed=0), asked_in_order[7])
    flat = corpus.batch(tokens, 0, 32, 10, seed=0)
    assert np.array_equal(flat, np.concatenate(asked_in_order))
