"""`laneformer bench`: measurements of this machine, one benchmark a module."""

import argparse
import importlib

HELP = """Measure memory and speed on this machine. Every figure is printed with what it was measured on.

  laneformer bench convert          weights of the 2B model's shapes to Orbax and back, beside `cp`"""

BENCHMARKS = {"convert": "memory and time of a conversion of the 2B model's shapes"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand for each benchmark, with its own options."""
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name, summary in BENCHMARKS.items():
        module = importlib.import_module(f"experiments.bench_{name}")
        module.add_arguments(benchmarks.add_parser(name, help=summary, description=module.__doc__))


def run(args: argparse.Namespace) -> None:
    """Runs the benchmark that was asked for."""
    importlib.import_module(f"experiments.bench_{args.benchmark}").run(args)
