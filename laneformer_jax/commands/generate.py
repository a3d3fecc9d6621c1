"""`laneformer generate`: continue a prompt."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

from laneformer_jax.commands import options
from laneformer_jax.errors import LaneformerError, UsageError

HELP = """Continue a prompt, as text that appears while it is written.

  laneformer generate "def fibonacci(n):"
  laneformer generate --prompt-file main.py --temperature 0.8 --top-p 0.95 --seed 7
  echo "class Stack:" | laneformer generate --json --num-samples 4 -t 0.8
  laneformer generate --model DIR --devices 8 "def main():"

Text goes to stdout, figures to stderr. With --json every completion is one JSON object on one line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="text to continue (default: read from stdin)")
    parser.add_argument("--prompt-file", type=Path, metavar="FILE", help="read the prompt from a file")
    parser.add_argument("--token-ids", metavar="IDS", help="the prompt as token ids, as in '1 306 4658'")
    parser.add_argument("--num-samples", type=int, default=1, metavar="N", help="completions that share one prefill")
    parser.add_argument("--echo", action="store_true", help="print the prompt before the completion")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of streamed text")
    options.add_sampling_arguments(parser)
    options.add_model_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Prints the completions."""
    prompt = _prompt(args)
    lm = options.load_model(args)
    echo = prompt if args.echo and isinstance(prompt, str) and not args.json else ""
    if args.num_samples == 1 and lm.tokenizer is not None:
        pieces = lm.generate([prompt], stream=True, **options.sampling(args))
        completions = [options.follow(pieces, (lambda _: None) if args.json else _writer(echo))]
    else:
        completions = lm.generate([prompt], num_samples=args.num_samples, **options.sampling(args))
        completions = completions[0] if args.num_samples > 1 else completions
    for i, completion in enumerate(completions):
        if args.json:
            record = {"prompt": prompt, "sample": i, "seed": args.seed, **dataclasses.asdict(completion)}
            print(json.dumps(record, ensure_ascii=False))
        elif len(completions) > 1 or lm.tokenizer is None:
            print(f"--- sample {i + 1} of {len(completions)} ({completion.finish_reason})")
            print(" ".join(map(str, completion.token_ids)) if completion.text is None else echo + completion.text)
    if not args.json:
        options.report(completions[0])


def _writer(echo: str) -> Callable[[str], None]:
    """Shows pieces as they come; the prompt before the first, so that nothing is shown when generation fails."""
    waiting = [echo]

    def show(piece: str) -> None:
        print(waiting.pop() + piece if waiting else piece, end="", flush=True)

    return show


def _prompt(args: argparse.Namespace) -> str | list[int]:
    given = [name for name in ("prompt", "prompt_file", "token_ids") if getattr(args, name) is not None]
    if len(given) > 1:
        raise UsageError("give the prompt once: as PROMPT, --prompt-file or --token-ids")
    if args.token_ids is not None:
        try:
            return [int(token) for token in args.token_ids.replace(",", " ").split()]
        except ValueError as error:
            raise UsageError(f"--token-ids must be whole numbers, got {args.token_ids!r}") from error
    if args.prompt is not None:
        return args.prompt
    try:
        if args.prompt_file is not None:
            return args.prompt_file.read_text(encoding="utf-8-sig")
        source = options.standard_input()
        if source.isatty():
            print("(reading the prompt from the terminal: end it with Ctrl-D)", file=sys.stderr)
        return source.read()
    except UnicodeDecodeError as error:
        raise LaneformerError(f"the prompt is not UTF-8 text ({error})") from error
