"""Options that several verbs share, and what they mean."""

import argparse
import sys
from collections.abc import Callable, Generator
from typing import Any, TextIO

from laneformer_jax import cli
from laneformer_jax.config import DTYPES
from laneformer_jax.errors import UsageError
from laneformer_jax.generation import Completion
from laneformer_jax.language_model import load
from laneformer_jax.schedule import PACKS


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """--model, --dtype, --devices and, for several processes, who they are."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", metavar="DIR", help="checkpoint folder (default: the small model in the package)")
    group.add_argument("--dtype", choices=DTYPES, help="of weights, cache and activations (default: the config's)")
    group.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="split the lanes over N devices; on a CPU they are virtual ones (default: one device)",
    )
    group.add_argument("--pack", choices=PACKS, default="module", help="what one sum between devices carries")
    group = parser.add_argument_group(
        "several processes", "with --devices, the devices of all of them together; only process 0 prints"
    )
    group.add_argument("--distributed", action="store_true", help="join the other processes of this SLURM or MPI job")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens, if there is no such job")
    group.add_argument("--processes", type=int, metavar="N", help="how many processes there are")
    group.add_argument("--process", type=int, metavar="I", help="which of them this is, from 0")


def load_model(args: argparse.Namespace):
    """The language model that the arguments name, on as many devices as they ask for, with a compilation cache."""
    if args.devices is not None and args.devices < 1:
        raise UsageError(f"--devices must be at least 1, got {args.devices}")
    named = (args.coordinator, args.processes, args.process)
    several = args.distributed or any(value is not None for value in named)
    if several and args.devices is None:
        raise UsageError("several processes need --devices, the number of devices of all of them together")
    if any(value is not None for value in named) and None in named:
        raise UsageError("--coordinator, --processes and --process go together")
    if args.processes is not None and not (0 <= args.process < args.processes and args.devices % args.processes == 0):
        raise UsageError(
            "--process counts from 0 to --processes - 1, and --processes divides --devices: got --process "
            f"{args.process}, --processes {args.processes}, --devices {args.devices}"
        )
    cli.use_devices(args.devices // (args.processes or 1) if args.devices else None)
    cli.keep_compilations()
    mesh = None
    if args.devices is not None:
        from parallel import distributed, make_mesh

        if several:
            distributed.join(*named)
        mesh = make_mesh(args.devices)
    return load(args.model, dtype=args.dtype, mesh=mesh, pack=args.pack)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Length, temperature, filters, seed and stop strings."""
    group = parser.add_argument_group("sampling")
    group.add_argument("-n", "--max-new-tokens", type=int, metavar="N", help="default: 256, or what the context leaves")
    group.add_argument("-t", "--temperature", type=float, default=0.0, help="0 takes the likeliest token (default)")
    group.add_argument("--top-k", type=int, metavar="K", help="choose among the K likeliest tokens")
    group.add_argument("--top-p", type=float, metavar="P", help="choose among the likeliest tokens that make up P")
    group.add_argument("--min-p", type=float, metavar="P", help="drop tokens less than P times as likely as the best")
    group.add_argument("--seed", type=int, default=0, help="same seed, same text (default 0)")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; may be repeated")


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `LanguageModel.generate` that `add_sampling_arguments` reads."""
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop")
    return {name: getattr(args, name) for name in names}


def standard_input() -> TextIO:
    """The standard input.

    Raises:
        UsageError: it is closed.
    """
    if sys.stdin is None:
        raise UsageError("there is nothing to read: the standard input is closed")
    return sys.stdin


def follow(pieces: Generator[str, None, Completion], show: Callable[[str], None]) -> Completion:
    """Shows pieces of text as they are generated; returns the whole."""
    while True:
        try:
            show(next(pieces))
        except StopIteration as end:
            show("\n")
            return end.value


def report(completion: Completion) -> None:
    """How long it took, as a line on stderr."""
    print(f"[{completion.timing}]", file=sys.stderr)
