"""`laneformer chat`: a conversation whose cache is kept from turn to turn."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import Any

from laneformer_jax.commands import options
from laneformer_jax.errors import LaneformerError, UsageError
from laneformer_jax.generation import Session

HELP = """Talk with an instruction-tuned model. Every line is a message; the history is kept and only what is new runs
through the model.

  laneformer chat --model DIR --system "You write short, correct Python."
  /reset  forgets the history      /exit or end of input  leaves

With --json every answer is one JSON object on one line, for scripts that write messages to stdin."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("--system", metavar="TEXT", help="system message at the start of the conversation")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of streamed text")
    options.add_sampling_arguments(parser)
    options.add_model_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Answers messages until the input ends."""
    lm = options.load_model(args)
    if lm.tokenizer is None or lm.tokenizer.chat_template is None:
        raise LaneformerError("this model has no chat template: use `laneformer generate`, or a folder of a chat model")
    opening = [{"role": "system", "content": args.system}] if args.system else []
    history, session = list(opening), Session(lm.engine)
    for message in _messages(interactive=options.standard_input().isatty() and not args.json):
        if message == "/reset":
            history, session = list(opening), Session(lm.engine)
            continue
        turn = [*history, {"role": "user", "content": message}]
        try:
            answer = _answer(lm, turn, session, args)
        except UsageError:
            raise  # no message would fare better
        except LaneformerError as error:
            print(f"{error} (/reset forgets the history)", file=sys.stderr)
            continue
        history = [*turn, {"role": "assistant", "content": answer}]


def _messages(interactive: bool) -> Iterator[str]:
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise LaneformerError(f"a message is not UTF-8 text ({error})") from error
        if line == "/exit":
            return
        if line:
            yield line


def _answer(lm: Any, messages: list[dict[str, str]], session: Any, args: argparse.Namespace) -> str:
    shown: list[str] = []

    def show(piece: str) -> None:
        # Templates in Llama's style leave the space between marker and answer to the model.
        piece = piece if "".join(shown).strip() else piece.lstrip()
        shown.append(piece)
        if not args.json:
            print(piece, end="", flush=True)

    prompt = lm.tokenizer.encode_chat(messages)
    pieces = lm.generate([prompt], stream=True, session=session, **options.sampling(args))
    completion = options.follow(pieces, show)
    text = "".join(shown).rstrip("\n")
    if args.json:
        record = {**dataclasses.asdict(completion), "text": text}
        print(json.dumps(record, ensure_ascii=False), flush=True)
    else:
        options.report(completion)
    return text
