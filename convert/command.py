"""`laneformer convert`: model folders between safetensors and Orbax."""

import argparse
import sys
from pathlib import Path

from convert.convert import Result, convert
from convert.plan import FORMATS, make_plan
from convert.source import find_source
from laneformer_jax.config import DTYPES
from laneformer_jax.errors import UsageError

HELP = """Convert a model folder between safetensors (PyTorch) and Orbax (JAX), one tensor at a time.

  laneformer convert laneformer-2b-it laneformer-2b-jax             safetensors -> Orbax
  laneformer convert laneformer-2b-jax published                    and back, bit for bit
  laneformer convert kogai/laneformer-2b-it laneformer-2b-jax --revision main
  laneformer convert laneformer-2b-it out --dry-run --devices 8     what would be done, from headers alone

DST has the weights, config, tokenizer and generation files, and manifest.json: where they came from, with the SHA-256
of every file. It appears whole or not at all, and both kinds of folder load everywhere."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """SRC, DST and what to do with them."""
    parser.add_argument("source", metavar="SRC", help="a Hugging Face folder, a converted folder, or an id of the hub")
    parser.add_argument("target", metavar="DST", type=Path, help="the folder to make")
    parser.add_argument("--to", choices=FORMATS, help="format of DST (default: the one that SRC is not)")
    parser.add_argument(
        "--dtype", choices=("keep", *DTYPES), default="keep", help="dtype of all tensors (default: keep each its own)"
    )
    parser.add_argument("--allow-overflow", action="store_true", help="write infinities for values that exceed --dtype")
    parser.add_argument("--overwrite", action="store_true", help="replace DST once the new one is complete")
    parser.add_argument("--revision", help="branch, tag or commit of the hub's repository (default: main)")
    parser.add_argument("--dry-run", action="store_true", help="print the whole plan and write nothing")
    parser.add_argument("--devices", type=int, metavar="N", help="with --dry-run: bytes on each of N devices")
    parser.add_argument("--verify", action="store_true", help="compare with PyTorch on SRC before DST appears")
    parser.add_argument(
        "--reference", choices=("own", "hub"), help="with --verify: this project's PyTorch model or SRC's own (own)"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="let --reference hub run SRC's Python files")


def run(args: argparse.Namespace) -> None:
    """Converts, or prints the plan.

    Raises:
        UsageError: options that do not go together.
        LaneformerError: as `convert`.
    """
    if args.devices is not None and not args.dry_run:
        raise UsageError("--devices goes with --dry-run")
    if args.reference is not None and not args.verify:
        raise UsageError("--reference goes with --verify")
    if args.reference == "hub" and not args.trust_remote_code:
        raise UsageError("--reference hub runs Python files of SRC: read them, then add --trust-remote-code")
    source = find_source(args.source, args.revision)
    if args.dry_run:
        for line in make_plan(source.folder, args.to, args.dtype).lines(args.devices):
            print(line)
        return
    check = None
    if args.verify:
        from convert.verify import Verification

        check = Verification(source.folder, args.reference or "own")
    result = convert(source, args.target, args.to, args.dtype, args.overwrite, args.allow_overflow, check)
    _report(result, args.target)
    if check is not None:
        print(check.report())


def _report(result: Result, target: Path) -> None:
    for name, count in result.not_finite.items():
        print(f"laneformer convert: {name} has {count} values that are not finite", file=sys.stderr)
    for name, count in result.overflowed.items():
        print(f"laneformer convert: {name} has {count} values that became infinite", file=sys.stderr)
    plan = result.plan
    print(f"{target}: {len(plan.items)} tensors, {plan.nbytes:,} bytes of {', '.join(plan.dtypes)} as {plan.to}")
