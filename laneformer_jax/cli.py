"""The command `laneformer`: verbs, each a module with HELP, add_arguments and run, imported only when needed."""

import argparse
import importlib
import io
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from laneformer_jax.errors import LaneformerError, UsageError

VERBS = {
    "generate": "laneformer_jax.commands.generate",
    "chat": "laneformer_jax.commands.chat",
    "schedule": "parallel.schedule_command",
    "convert": "convert.command",
    "train": "experiments.train_command",
    "bench": "experiments.bench_command",
}
SUMMARY = {
    "generate": "continue a prompt",
    "chat": "talk with a model in the terminal",
    "schedule": "show which module's output crosses lanes, and when",
    "convert": "convert weights between safetensors and Orbax",
    "train": "train a small Laneformer",
    "bench": "measure what a conversion costs",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit code: 0, 1 for a failure, 2 for wrong usage."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8")  # as prompt files are, whatever the locale
    if argv is None and set(sys.argv[1:2]) & {"generate", "chat"}:
        # They leave nothing half done, and a KeyboardInterrupt can get lost in a callback of JAX.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        _let_go_of_output()


def _main(argv: list[str]) -> int:
    verb = next((word for word in argv if word in VERBS), None)
    parser = argparse.ArgumentParser(
        prog="laneformer",
        description="Laneformer: eight lanes and Delayed Tensor Parallelism, in JAX.",
        epilog="`laneformer VERB --help` says what a verb does and takes.",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    module: ModuleType | None = None
    for name, summary in SUMMARY.items():
        if name == verb:
            module = _import(name)
            described = verbs.add_parser(
                name,
                help=summary,
                description=module.HELP,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
            module.add_arguments(described)
        else:
            verbs.add_parser(name, help=summary)
    args = parser.parse_args(argv)
    assert module is not None
    try:
        code = module.run(args) or 0
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        return 0  # the reader of a pipe has seen enough
    except UsageError as error:
        print(f"laneformer {verb}: {_one_line(error)}", file=sys.stderr)
        return 2
    except (LaneformerError, OSError) as error:
        print(f"laneformer {verb}: {_one_line(error)}", file=sys.stderr)
        return 1
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        advice = "fewer samples or new tokens, --dtype bfloat16 or more --devices need less"
        print(f"laneformer {verb}: out of memory: {advice} ({_one_line(error)[:200]})", file=sys.stderr)
        return 1


def _let_go_of_output() -> None:
    """What the reader or the disk refuses is dropped, or else Python would try once more when it ends."""
    output = sys.stdout
    if output is None:
        return
    try:
        output.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())


def _import(verb: str) -> ModuleType:
    try:
        return importlib.import_module(VERBS[verb])
    except ModuleNotFoundError as error:
        package = "'laneformer-jax[train]'" if verb == "train" else error.name
        print(f"laneformer {verb}: needs the package {error.name}: pip install {package}", file=sys.stderr)
        raise SystemExit(1) from error


def _one_line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).strip() or type(error).__name__


def keep_compilations() -> None:
    """Keeps compiled programs in the user's cache folder, if there is one, so that the next run starts at once."""
    import jax

    if jax.config.values["jax_compilation_cache_dir"]:
        return
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "laneformer-jax" / "compilations"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # not to be written, or nobody's home
        return
    if os.access(folder, os.W_OK):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def use_devices(count: int | None) -> None:
    """Asks for `count` virtual CPU devices if JAX has not been started; without effect on other platforms."""
    if count is not None and count > 1:
        flag = f"--xla_force_host_platform_device_count={count}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


if __name__ == "__main__":
    sys.exit(main())
