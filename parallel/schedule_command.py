"""`laneformer schedule`: the exchange as a table, or what a compiler makes of it."""

import argparse
import dataclasses
import json
from pathlib import Path

from laneformer_jax.config import DTYPES, PRESETS, LaneformerConfig
from laneformer_jax.errors import LaneformerError, UsageError
from laneformer_jax.schedule import PACKS, format_schedule, make_schedule

HELP = """Shows which module's output crosses lanes, and when.

Without --target: the schedule itself, one line a module.
With --target: compiles one greedy decode loop for devices that need not be there, and reads from the compiler's own
schedule which exchanges wait, how much work the others hide behind, and what moves through memory per token.

  laneformer schedule --config laneformer_2b --delay 2
  laneformer schedule --config laneformer_2b --target h200x8 --pack layer --plot token.png
"""
TARGET_NAMES = ("h200x8", "h200x1", "v5e-8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this verb's arguments."""
    parser.add_argument(
        "--config", default="laneformer_2b", help=f"{', '.join(PRESETS)} or a model folder (default: %(default)s)"
    )
    delay = parser.add_mutually_exclusive_group()
    delay.add_argument("--delay", type=int, metavar="D", help="delay in layers, instead of the config's")
    delay.add_argument("--delay-modules", type=int, metavar="N", help="delay in modules, two of which make a layer")
    parser.add_argument("--pack", choices=PACKS, default="module", help="what one sum carries (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    compiled = parser.add_argument_group("with a compiler")
    compiled.add_argument("--target", choices=TARGET_NAMES, help="the devices to compile for")
    compiled.add_argument("--context", type=int, help="tokens of the cache (default: the model's context)")
    compiled.add_argument("--sum-dtype", choices=DTYPES, help="in which sums travel (default: the model's)")
    compiled.add_argument(
        "--collective-us", type=float, help="stated time of one exchange in microseconds (default: the target's)"
    )
    compiled.add_argument("--plot", type=Path, metavar="FILE", help="draw the token's work and exchanges over time")


def run(args: argparse.Namespace) -> None:
    """Runs the verb."""
    config = _config(args)
    if args.target is None:
        if args.plot or args.context or args.sum_dtype or args.collective_us:
            raise UsageError("--plot, --context, --sum-dtype and --collective-us need a --target to compile for")
        steps = make_schedule(config, args.pack)
        print(json.dumps([dataclasses.asdict(s) for s in steps]) if args.json else format_schedule(steps))
        return
    report = _report(args, config)
    if args.plot:
        _plot(report, f"{args.target}, {args.config}, delay {config.delay} modules, pack {args.pack}", args.plot)
    print(json.dumps(report.to_dict()) if args.json else report.format())


def _config(args: argparse.Namespace) -> LaneformerConfig:
    if args.config in PRESETS:
        config = PRESETS[args.config]()
    elif (Path(args.config) / "config.json").is_file():
        config = LaneformerConfig.from_file(Path(args.config) / "config.json")
    else:
        raise LaneformerError(f"{args.config} is neither a preset ({', '.join(PRESETS)}) nor a folder with config.json")
    if args.delay is not None:
        return config.replace(delay=2 * args.delay)
    return config if args.delay_modules is None else config.replace(delay=args.delay_modules)


def _report(args: argparse.Namespace, config: LaneformerConfig):
    import jax

    from parallel.report import compile_report
    from parallel.target import find_target

    jax.config.update("jax_platforms", "cpu")
    return compile_report(config, find_target(args.target), args.pack, args.context, args.sum_dtype, args.collective_us)


def _plot(report, title: str, file: Path) -> None:
    try:
        from parallel.plot import draw
    except ModuleNotFoundError as error:
        raise LaneformerError(f"--plot needs {error.name}: pip install 'laneformer-jax[train]'") from error
    draw(report, title, file)
