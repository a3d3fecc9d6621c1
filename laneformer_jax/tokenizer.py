"""Text to token ids and back, by a checkpoint's `tokenizer.model` (SentencePiece) or `tokenizer.json`.

Both forms are reduced to the same two things: ids for a piece of plain text, and the bytes that every id stands for.
All else is done once, here, so that they cannot differ. Decoding joins bytes and never asks the library.

Llama's vocabulary puts a space before a text, so that its first word is a word like any other. That space comes
at the start of the text only, not after a control token, as Transformers has it for Llama with `legacy: false`;
where tokenizer_config.json says `legacy: true`, text after a control token gets one too. Decoding takes these spaces
away again.
"""

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from sentencepiece import SentencePieceProcessor

from laneformer_jax.chat_template import ChatTemplate, ControlToken, read_chat_template
from laneformer_jax.errors import LaneformerError

# No vocabulary has a piece with this character (the last of Unicode's private use), so nothing merges with it.
GUARD = "\U0010fffd"
# Files come from strangers: ids beyond this would only fill the memory.
MAX_IDS = 2**24


class Vocabulary(Protocol):
    """What a tokenizer file has to give.

    Attributes:
        pieces: the bytes of every id.
        control: spelling of every id that the file itself keeps apart from text.
        names: spellings by the names that tokenizer_config.json uses, such as `bos_token`; it overrides them.
    """

    pieces: list[bytes]
    control: dict[int, str]
    names: dict[str, str]

    def encode(self, text: str) -> list[int]: ...

    def id_of(self, piece: str) -> int | None: ...


class Detokenizer:
    """Decodes token ids a few at a time; the texts joined equal the text decoded at once."""

    def __init__(self, pieces: Sequence[bytes], space_at_start: bool, space_after: Iterable[int]):
        self._pieces = pieces
        self._space_due = space_at_start
        self._space_after = frozenset(space_after)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int], final: bool = False) -> str:
        """The whole characters that are complete now; at the end, a cut one becomes U+FFFD."""
        data = bytearray()
        for token in ids:
            piece = self._pieces[token] if 0 <= token < len(self._pieces) else b""
            data += piece.removeprefix(b" ") if self._space_due else piece
            self._space_due = token in self._space_after or (self._space_due and not piece)
        return self._utf8.decode(bytes(data), final)


class Tokenizer:
    """A vocabulary with its control tokens and chat template; `load_tokenizer` makes it from a folder.

    Attributes:
        bos_id, eos_id: ids of the tokens that begin and end a text, where there are such.
        size: ids in [0, size) have a meaning; those above are padding of the embedding, and decode to nothing.
        chat_template: Jinja source, if the folder has one.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        control: Sequence[ControlToken],
        names: Mapping[str, str],
        chat_template: str | None = None,
        add_bos: bool = True,
        space_after_control: bool = False,
    ):
        self._vocabulary = vocabulary
        self._control = control
        self._add_bos = add_bos
        ids = {token.spelling: token.id for token in control}
        self._names = {name: spelling for name, spelling in names.items() if spelling in ids}
        self.bos_id = ids.get(names.get("bos_token", ""))
        self.eos_id = ids.get(names.get("eos_token", ""))
        self.chat_template = chat_template
        self.size = max(len(vocabulary.pieces), 1 + max(ids.values(), default=-1))

        self._pieces = [*vocabulary.pieces, *[b""] * (self.size - len(vocabulary.pieces))]
        for token in control:
            self._pieces[token.id] = b"" if token.special else token.spelling.encode()
        self._control_ids = frozenset(ids.values())
        spellings = "|".join(re.escape(spelling) for spelling in ids)
        self._spelling_ahead = re.compile(f"(?={spellings})" if spellings else "(?!)")
        self._space_at_start = any(vocabulary.pieces[t].startswith(b" ") for t in vocabulary.encode("a")[:1])
        self._space_after_control = space_after_control and self._space_at_start
        self._guard = vocabulary.encode(GUARD)

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Ids of plain text, in which the spelling of a control token is text like any other.

        Args:
            bos: begin with the BOS token, if there is one and tokenizer_config.json doesn't say `add_bos_token: false`.

        Raises:
            LaneformerError: the text has half a surrogate pair, which no encoding can hold.
        """
        return self._start(bos) + self._encode_plain(text, self._space_at_start)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation, as the chat template writes it, beginning with exactly one BOS token.

        Control tokens come from the template only: what a message spells like one stays text.

        Args:
            messages: mappings with `role` ("system", "user", "assistant") and `content`.
            add_generation_prompt: end where the assistant's answer begins.

        Raises:
            LaneformerError: no template, a message that isn't text, or a template that fails or refuses.
        """
        ids: list[int] = []
        for part in self._chat.parts(messages, add_generation_prompt):
            space = self._space_after_control if ids else self._space_at_start
            ids += [part] if isinstance(part, int) else self._encode_plain(part, space)
        return ids if ids[:1] == self._start() else self._start() + ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids: special tokens left out, bytes that are no character as U+FFFD."""
        return self.detokenizer().push(ids, final=True)

    def detokenizer(self) -> Detokenizer:
        """A decoder of one text, for ids that come a few at a time."""
        return Detokenizer(
            self._pieces, self._space_at_start, self._control_ids if self._space_after_control else frozenset()
        )

    @cached_property
    def _chat(self) -> ChatTemplate:
        if self.chat_template is None:
            raise LaneformerError(
                "This model has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): "
                "give it a plain prompt instead."
            )
        return ChatTemplate(self.chat_template, self._names, self._control)

    def _start(self, bos: bool = True) -> list[int]:
        return [self.bos_id] if bos and self._add_bos and self.bos_id is not None else []

    def _encode_plain(self, text: str, space: bool) -> list[int]:
        """Ids of text alone, with the vocabulary's space before it or not."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise LaneformerError(f"The text isn't valid Unicode at character {error.start}: {error.reason}.") from None
        if not text:
            return []
        if space or not self._space_at_start:
            ids = self._vocabulary.encode(text)
        else:
            ids = self._vocabulary.encode(GUARD + text)[len(self._guard) :]
        if self._control_ids.isdisjoint(ids):
            return ids
        # The vocabulary knows a control token as an ordinary piece: cut each spelling after its first character.
        # Only a spelling of one character has to stay as it is.
        cuts = [cut for match in self._spelling_ahead.finditer(text) if (cut := match.start() + 1) < len(text)]
        if not cuts:
            return ids
        parts = [text[begin:end] for begin, end in pairwise([0, *cuts, len(text)])]
        return [token for n, part in enumerate(parts) for token in self._encode_plain(part, space and n == 0)]


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint folder: its `tokenizer.model`, else its `tokenizer.json`, else None.

    Control tokens and their flags come from tokenizer.json, tokenizer_config.json, special_tokens_map.json and
    added_tokens.json, whichever are there. An added token that is neither special nor above the vocabulary proper is
    an ordinary piece, which text is encoded to.

    Raises:
        LaneformerError: a file that can't be read, or `tokenizer.json` alone without the `tokenizers` package.
    """
    folder = Path(folder)
    config = _read_json(folder / "tokenizer_config.json")
    special_map = _read_json(folder / "special_tokens_map.json")
    added = _read_json(folder / "added_tokens.json")
    spec = _read_json(folder / "tokenizer.json")
    if (folder / "tokenizer.model").is_file():
        vocabulary: Vocabulary = _SentencePiece(folder / "tokenizer.model")
    elif spec:
        vocabulary = _TokenizersJson(folder / "tokenizer.json", spec)
    else:
        return None
    try:
        entries: dict[int, dict[str, Any]] = {
            token: {"content": spelling, "special": True} for token, spelling in vocabulary.control.items()
        }
        entries |= {token: {"content": spelling} for spelling, token in added.items()}
        entries |= {entry["id"]: entry for entry in spec.get("added_tokens") or ()}
        entries |= {int(token): entry for token, entry in config.get("added_tokens_decoder", {}).items()}
        named = {**vocabulary.names, **special_map, **config}
        names = {
            name: _spelling(value)
            for name, value in named.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        special = {*names.values(), *map(_spelling, named.get("additional_special_tokens") or ())}
        control = _control_tokens(vocabulary, entries, special)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise LaneformerError(f"{folder}: the tables of added and special tokens can't be read: {error!r}") from error
    return Tokenizer(
        vocabulary,
        control,
        names,
        chat_template=read_chat_template(folder, config),
        add_bos=config.get("add_bos_token") is not False,
        space_after_control=config.get("legacy") is True,
    )


def _control_tokens(
    vocabulary: Vocabulary, entries: Mapping[int, Mapping[str, Any]], special: set[str]
) -> list[ControlToken]:
    """The control tokens among the entries of the tables (flags by id), and those that are named special."""
    ids = {spelling: vocabulary.id_of(spelling) for spelling in special - {e["content"] for e in entries.values()}}
    entries = {**entries, **{token: {"content": spelling} for spelling, token in ids.items() if token is not None}}
    for token, entry in entries.items():
        if not (0 <= token < MAX_IDS and isinstance(entry["content"], str)):
            raise ValueError(f"id {token} is given to {entry['content']!r}")
    tokens = [
        ControlToken(
            id=token,
            spelling=entry["content"],
            special=bool(entry.get("special")) or entry["content"] in special,
            lstrip=bool(entry.get("lstrip")),
            rstrip=bool(entry.get("rstrip")),
        )
        for token, entry in sorted(entries.items())
    ]
    return [token for token in tokens if token.spelling and (token.special or token.id >= len(vocabulary.pieces))]


class _SentencePiece:
    """A SentencePiece model: pieces with U+2581 for a space, or single bytes."""

    def __init__(self, path: Path):
        try:
            self._model = model = SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise LaneformerError(
                f"{path} isn't a SentencePiece model; download it again, in case it is cut short or a Git LFS pointer."
            ) from error
        ids = range(model.get_piece_size())
        spellings = [model.id_to_piece(token) for token in ids]
        self.pieces = [_piece_bytes(spelling) for spelling in spellings]
        self.control = {token: spellings[token] for token in ids if model.is_control(token) or model.is_unknown(token)}
        named = {"bos_token": model.bos_id(), "eos_token": model.eos_id(), "unk_token": model.unk_id()}
        self.names = {name: spellings[token] for name, token in named.items() if token >= 0}

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def id_of(self, piece: str) -> int | None:
        token = self._model.piece_to_id(piece)
        return token if self._model.id_to_piece(token) == piece else None


class _TokenizersJson:
    """A byte-pair vocabulary of the `tokenizers` library: Llama's, with U+2581 and bytes, or GPT-2's, all bytes."""

    def __init__(self, path: Path, spec: Mapping[str, Any]):
        try:
            from tokenizers import Tokenizer as Library
        except ImportError as error:
            raise LaneformerError(
                f"{path} needs the tokenizers package: pip install 'laneformer-jax[tokenizers]'."
            ) from error
        model = spec.get("model")
        if not isinstance(model, dict):
            model = {"type": type(model).__name__}
        if model.get("type", "BPE") != "BPE":
            raise LaneformerError(f"{path}: a vocabulary of type {model['type']} isn't supported, only BPE is.")
        try:
            # Control tokens never come from text, so the library isn't told of them.
            ordinary = [
                entry
                for entry in spec.get("added_tokens") or ()
                if not entry["special"] and entry["content"] in model["vocab"]
            ]
            plain = {**spec, "added_tokens": ordinary, "truncation": None, "padding": None}
            self._library = Library.from_str(json.dumps(plain))
        # The library raises bare Exception.
        except Exception as error:
            raise LaneformerError(f"{path} can't be read as a tokenizer: {error}") from error
        as_bytes = _byte_level_bytes if '"ByteLevel"' in json.dumps(spec.get("decoder")) else _piece_bytes
        vocabulary = self._library.get_vocab()
        size = 1 + max(vocabulary.values(), default=-1)
        if not 0 < size <= MAX_IDS:
            raise LaneformerError(f"{path}: a vocabulary of {size} ids isn't supported, only 1 to {MAX_IDS} are.")
        self.pieces = [b""] * size
        for spelling, token in vocabulary.items():
            self.pieces[token] = as_bytes(spelling)
        self.control: dict[int, str] = {}
        self.names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

    def encode(self, text: str) -> list[int]:
        return self._library.encode(text, add_special_tokens=False).ids

    def id_of(self, piece: str) -> int | None:
        return self._library.token_to_id(piece)


def _piece_bytes(spelling: str) -> bytes:
    """The bytes of a Llama piece: `<0x0A>` is one byte, and U+2581 a space."""
    if re.fullmatch("<0x[0-9A-F]{2}>", spelling):
        return bytes([int(spelling[3:5], 16)])
    return spelling.replace("\u2581", " ").encode()


def _byte_level_bytes(spelling: str) -> bytes:
    """The bytes of a GPT-2 piece, each of them a character; an added token is written as it is."""
    return bytes(_BYTE_OF[char] for char in spelling) if _BYTE_OF.keys() >= set(spelling) else spelling.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable Latin-1 stands for itself, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _spelling(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file, or {} if there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise LaneformerError(f"{file} isn't valid JSON ({error}); download it again.") from error
    if not isinstance(value, dict):
        raise LaneformerError(f"{file}: expected a JSON object, found a {type(value).__name__}.")
    return value
