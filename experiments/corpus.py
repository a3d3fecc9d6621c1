"""A folder of source code as a deterministic stream of tokens, with files held out by name."""

import ast
import dataclasses
import functools
import hashlib
import io
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from laneformer_jax.errors import LaneformerError

STDLIB = "stdlib"
SUFFIXES = (".py", ".md", ".txt")
# Tests, generated tables and other people's packages: not what a reader calls the standard library.
LEFT_OUT = frozenset(
    "site-packages dist-packages test tests idle_test lib2to3 encodings pydoc_data turtledemo __pycache__ "
    "__phello__ lib-dynload".split()
)
HELD_OUT_PERCENT = 3
DOCUMENT_CHARACTERS = 1000
BOS, EOS = 1, 2


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Texts cut to documents: those to train on and those of files never trained on.

    Attributes:
        training: documents in the order of the files' names.
        held_out: likewise, of the files that `is_held_out` names.
        files: number of files read.
        sha256: hash of all names and contents, so that two machines can tell whether they trained on the same.
    """

    training: tuple[str, ...]
    held_out: tuple[str, ...]
    files: int
    sha256: str


def is_held_out(name: str) -> bool:
    """Whether a file is kept from training: its path's SHA-256 modulo 100 is under 3, so about 3 % of the files."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100 < HELD_OUT_PERCENT


def read_corpus(source: str) -> Corpus:
    """The corpus of "stdlib" (this Python's standard library) or of a folder's .py, .md and .txt files.

    Raises:
        LaneformerError: not a folder, or nothing to train on or to hold out in it.
    """
    root = Path(sysconfig.get_path("stdlib") if source == STDLIB else source)
    if not root.is_dir():
        raise LaneformerError(f"corpus {source!r} is neither {STDLIB!r} nor a folder")
    suffixes = (".py",) if source == STDLIB else SUFFIXES
    parts: tuple[list[str], list[str]] = [], []
    digest, files = hashlib.sha256(), 0
    for name, path in sorted((p.relative_to(root).as_posix(), p) for p in root.rglob("*") if p.suffix in suffixes):
        if LEFT_OUT.intersection(name.split("/")) or "_sysconfigdata" in name:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, IsADirectoryError):
            continue
        digest.update(f"{name}\0{text}\0".encode())
        files += 1
        parts[is_held_out(name)].extend(cut(text, python=path.suffix == ".py"))
    training, held_out = (tuple(part) for part in parts)
    if not training or not held_out:
        raise LaneformerError(
            f"corpus {source!r}: {files} files give {len(training)} documents to train on and {len(held_out)} held out;"
            " both need at least one"
        )
    return Corpus(training, held_out, files, digest.hexdigest())


def cut(text: str, python: bool) -> Iterator[str]:
    """Documents that joined are `text`: Python is cut before top-level statements, 1,000 or more characters a piece.

    So most documents begin where a reader would begin: with an import, a function or a class.
    """
    lines = list(io.StringIO(text))  # unlike splitlines, ends lines where Python does
    starts = _statement_lines(text) if python else []
    begin, held = 0, ""
    for start in starts:
        while start > begin and lines[start - 1].startswith("#"):
            start -= 1
        piece = "".join(lines[begin:start])
        begin, held = max(begin, start), held + piece
        if len(held) >= DOCUMENT_CHARACTERS:
            yield held
            held = ""
    held += "".join(lines[begin:])
    if held:
        yield held


def _statement_lines(text: str) -> list[int]:
    """Line indices of the top-level statements, with their decorators; none where the file does not parse."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            body = ast.parse(text).body
        except (SyntaxError, ValueError):
            return []
    return [min([s.lineno, *(d.lineno for d in getattr(s, "decorator_list", []))]) - 1 for s in body]


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> bytes:
    """A SentencePiece BPE model with byte fallback, in which a line's end, a tab and four spaces are pieces.

    Nothing is normalised, so decoding gives back the very text. Training is deterministic.

    Raises:
        LaneformerError: the documents are too few for that vocabulary, or it is too small for bytes and characters.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for text in documents for line in text.split("\n") if line.strip()),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.99995,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n", "\t", "\u2581" * 4],
            unk_id=0,
            bos_id=BOS,
            eos_id=EOS,
            pad_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise LaneformerError(f"no vocabulary of {vocab_size} from this corpus: {error}") from error
    return model.getvalue()


def encode(documents: Sequence[str], tokenizer: bytes) -> np.ndarray:
    """BOS, text, EOS of every document, one after the other; uint16."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer)
    pieces = [np.array([BOS, *processor.encode(text), EOS], np.uint16) for text in documents]
    return np.concatenate(pieces)


def batch(tokens: np.ndarray, step: int, size: int, length: int, seed: int) -> np.ndarray:
    """Inputs and targets of one step, [size, length + 1] int32: a pure function of its arguments.

    An epoch cuts the stream into windows of `length` tokens from an offset of its own, shuffled by (seed, epoch).

    Raises:
        LaneformerError: the stream is shorter than two windows.
    """
    windows = len(tokens) // length - 1
    if windows < 1:
        raise LaneformerError(f"the corpus has {len(tokens)} tokens, too few for sequences of {length}")
    rows = np.empty((size, length + 1), np.int32)
    for row, index in enumerate(range(step * size, (step + 1) * size)):
        offset, order = _epoch(index // windows, windows, length, seed)
        start = offset + length * order[index % windows]
        rows[row] = tokens[start : start + length + 1]
    return rows


@functools.lru_cache(maxsize=2)
def _epoch(epoch: int, windows: int, length: int, seed: int) -> tuple[int, np.ndarray]:
    random = np.random.default_rng((seed, epoch))
    return int(random.integers(length)), random.permutation(windows)
