"""`laneformer train`: a small Laneformer from text, in one command that can be stopped and repeated."""

import argparse
import dataclasses
import math
from pathlib import Path

from experiments.train import Settings, train
from laneformer_jax import cli

HELP = """Train a Laneformer from scratch, evaluate it on held-out files and write a model folder.

  laneformer train --out my-model                      the command that made the embedded model
  laneformer train --out my-model --corpus src --steps 500
  laneformer generate --model my-model "def main():"

Run it again after a stop (Ctrl-C, SIGTERM, --max-minutes) and it goes on from the last checkpoint, on the very data
that an unbroken run would have seen. DIR/training has the checkpoints and the loss of every step (metrics.jsonl),
DIR/metrics.json the result in bits per byte beside gzip and byte frequencies."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option for every setting, and those that leave the result alone."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the model folder to make")
    for field in dataclasses.fields(Settings):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=type(field.default),
            default=field.default,
            metavar={int: "N", float: "X", str: "NAME"}[type(field.default)],
            help=f"{field.metadata['help']} (default: {field.default})",
        )
    parser.add_argument(
        "--resume",
        choices=("auto", "never"),
        default="auto",
        help="auto goes on with a run of the same settings in DIR, never refuses it (default: auto)",
    )
    parser.add_argument(
        "--save-every", type=int, default=200, metavar="N", help="steps between checkpoints (default: 200)"
    )
    parser.add_argument(
        "--max-minutes", type=float, default=math.inf, metavar="X", help="stop at a checkpoint then (default: inf)"
    )


def run(args: argparse.Namespace) -> None:
    """Trains, or goes on training."""
    cli.use_devices(args.devices)
    settings = Settings(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Settings)})
    train(settings, args.out, resume=args.resume == "auto", save_every=args.save_every, max_minutes=args.max_minutes)
