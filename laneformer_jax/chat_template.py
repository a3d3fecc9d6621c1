"""Chat messages to prompt: a Jinja template, in which only the template itself can write control tokens."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from laneformer_jax.errors import LaneformerError

PRIVATE_USE = range(0x10FFFD, 0xFFFFF, -1)


class ControlToken(NamedTuple):
    """A token that stands for itself: no plain text is ever encoded to it.

    Attributes:
        id: token id.
        spelling: what a template writes to get it.
        special: left out of decoded text; the others are shown as they are spelled.
        lstrip, rstrip: whether it swallows the white space before and after it.
    """

    id: int
    spelling: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False


def read_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The folder's `chat_template.jinja`, else `chat_template` of its tokenizer_config.json (of several, "default")."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise LaneformerError(f"{file} isn't UTF-8 text ({error}); download it again.") from error
    template = config.get("chat_template")
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise LaneformerError(f"{folder / 'tokenizer_config.json'}: chat_template is neither text nor a list of them.")
    return template


class ChatTemplate:
    """A template with the helpers that Transformers gives it, and the control tokens that it may write.

    Args:
        source: Jinja text. It runs sandboxed: it reads the messages and its variables, and reaches nothing else.
        variables: what it may refer to, such as `bos_token`.
        control: the tokens whose spellings it may write.
    """

    def __init__(self, source: str, variables: Mapping[str, str], control: Sequence[ControlToken]):
        self._source = source
        self._variables = variables
        self._control = sorted(control, key=lambda token: -len(token.spelling))
        patterns = (
            r"\s*" * token.lstrip + re.escape(token.spelling) + r"\s*" * token.rstrip for token in self._control
        )
        # A pattern that matches nothing stands for no control tokens.
        self._pattern = re.compile("|".join(f"({pattern})" for pattern in patterns) or "(?!)")

    def parts(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> list[int | str]:
        """The rendered conversation, cut into the ids of control tokens and the plain text between them.

        While the template runs, every character of a message (its role excepted) that begins or ends a control
        token's spelling is replaced by a character that occurs nowhere. What was typed can thus neither be nor
        complete such a spelling, whatever the template strips, cuts or joins.

        Raises:
            LaneformerError: a message isn't a mapping of strings with a role, or the template fails or refuses.
        """
        for message in messages:
            texts = message.values() if isinstance(message, Mapping) and "role" in message else [None]
            if not all(isinstance(text, str) for text in texts):
                raise LaneformerError(f"A chat message needs a role and content, all of them text; got {message!r}.")
        edges = {edge for token in self._control for edge in (token.spelling[0], token.spelling[-1])}
        edges = sorted(edge for edge in edges if not edge.isspace())
        typed = set(self._source).union(*(value for message in messages for value in message.values()))
        stand_ins = (code for code in PRIVATE_USE if chr(code) not in typed)
        hide = dict(zip(map(ord, edges), stand_ins, strict=False))
        show = {stand_in: edge for edge, stand_in in hide.items()}
        hidden = [
            {key: value if key == "role" else value.translate(hide) for key, value in message.items()}
            for message in messages
        ]
        try:
            template = _environment().from_string(self._source, dict(self._variables))
            text = template.render(
                messages=hidden, tools=None, documents=None, add_generation_prompt=add_generation_prompt
            )
        # A template is a program of somebody else's: it can fail with anything.
        except Exception as error:
            reason = " ".join(str(error).translate(show).split()) or type(error).__name__
            raise LaneformerError(f"The chat template failed: {reason}") from error
        return [part if isinstance(part, int) else part.translate(show) for part in self._cut(text)]

    def _cut(self, text: str) -> list[int | str]:
        parts: list[int | str] = []
        end = 0
        for match in self._pattern.finditer(text):
            assert match.lastindex is not None
            parts += [text[end : match.start()], self._control[match.lastindex - 1].id]
            end = match.end()
        return [part for part in [*parts, text[end:]] if part != ""]


class _Generation(Extension):
    """`{% generation %}`, with which templates mark what the model writes, changes nothing in a prompt."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes for HTML; templates written for Transformers count on plain JSON.
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
