"""Small tokenizers in both file forms, trained on the spot: one as Llama 2's, one as the embedded model's."""

import io
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

CORPUS = """
def fibonacci(n):
    a, b = 0, 1
    for step in range(n):
        a, b = b, a + b
    return a
class Lane:
    def __init__(self, width, depth):
        self.width = width
        self.depth = depth
        if width <= 0:
            raise ValueError("the width of a lane must be positive")
The lanes of a model exchange what they have computed two layers later, so that nobody waits for anybody.
Every lane holds a stream of its own, and the sum over the lanes arrives while the next layer is at work.
Hello world, this is a sentence. Here is another one: is it longer than the other sentence?
<div class="lane"> </div> <s> </s> [INST] the user asks [/INST] <|im_start|>user <|im_end|>
""".splitlines()

# What goes wrong in tokenizers: spaces, controls, characters of several bytes, spellings of tokens.
AWKWARD = [
    "",
    " ",
    "a",
    "Hello world",
    " leading",
    "  two leading",
    "    return a",
    "trailing  ",
    "a   b     c        d",
    "\n",
    "\n\n\n\n",
    "\n    if a:\n\n\n        return b\r\n",
    "\tindent\t\tand\ttabs\t",
    "naïve café, Ünïcödé, русский, 漢字かな, العربية",
    "e\u0301 and \u00e9 stay apart",
    "👩‍👩‍👧 🇨🇭 emoji 🙂🙂",
    "</s>",
    "<s>[INST] the </s> user </s></s> [/INST]",
    "a<unk>b<pad>c",
    "<0x0A> is spelled, not a byte",
    "▁▁lower one eighth block",
    "\u00a0no-break\u2003spaces\u200b",
    "\x00\x01\x7f control characters",
    "\U0010fffd private use \ue000",
    "<|im_start|>user\nhi<|im_end|>",
]

LLAMA = {"add_dummy_prefix": True}
EMBEDDED = {"add_dummy_prefix": False, "user_defined_symbols": ["\n", "\n\n", "\t", "\t\t"]}
STYLES = {"llama": LLAMA, "embedded": EMBEDDED}
FORMS = ("tokenizer.model", "tokenizer.json")


def train(options: Mapping[str, Any] = LLAMA) -> bytes:
    """A SentencePiece BPE model with byte fallback that keeps every space."""
    return _train(json.dumps(options))


@cache
def _train(options: str) -> bytes:
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 2),
        model_writer=model,
        model_type="bpe",
        vocab_size=440,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
        **json.loads(options),
    )
    return model.getvalue()


def as_tokenizer_json(model: bytes, options: Mapping[str, Any] = LLAMA) -> dict[str, Any]:
    """The same vocabulary as a tokenizer.json, built the way Llama 2's is."""
    pieces = SentencePieceProcessor(model_proto=model)
    vocabulary = {pieces.id_to_piece(token): token for token in range(pieces.get_piece_size())}
    # A merge's rank is its result's, and SentencePiece numbers results by rank.
    merges = [
        (piece[:cut], piece[cut:])
        for piece, token in vocabulary.items()
        if not (pieces.is_byte(token) or pieces.is_control(token) or pieces.is_unknown(token))
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    tokenizer = Tokenizer(BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    prefix = options["add_dummy_prefix"]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁")] * prefix + [normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()] + [decoders.Strip(" ", 1, 0)] * prefix
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken(spelling, normalized=False) for spelling in ("<unk>", "<s>", "</s>")])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in options.get("user_defined_symbols", ())])
    return json.loads(tokenizer.to_str())


def write_tokenizer(
    folder: Path, form: str = "tokenizer.model", options: Mapping[str, Any] = LLAMA, **files: object
) -> Path:
    """A folder with the tokenizer in one form, and other files by their stems, such as added_tokens={...}."""
    folder.mkdir(exist_ok=True)
    model = train(options)
    if form == "tokenizer.model":
        (folder / form).write_bytes(model)
    else:
        (folder / form).write_text(json.dumps(as_tokenizer_json(model, options)), encoding="utf-8")
    for stem, content in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
