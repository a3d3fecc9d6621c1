"""A folder that appears whole or not at all.

It is built under a hidden name beside its own, flushed to the disk, and then given its name by one rename, or exchanged
with an older folder by one system call. A run that is killed leaves the hidden folder behind; the next one clears it.
"""

import ctypes
import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from laneformer_jax.errors import LaneformerError
from laneformer_jax.safetensors_io import flush

AT_FDCWD = -100
EXCHANGE = 2  # both systems' flag for it


def staging_path(target: Path) -> Path:
    """Where `target` is built."""
    return target.with_name(f".{target.name}.laneformer-partial")


def check_target(target: Path, overwrite: bool) -> None:
    """Whether a folder may appear under `target`.

    Raises:
        LaneformerError: something is there and must not or cannot be replaced.
    """
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise LaneformerError(f"{target} exists: choose another target, or replace it with --overwrite")
    if not target.is_dir():
        raise LaneformerError(f"{target} is no folder: remove it first")
    if any(target.iterdir()) and not (target / "config.json").is_file():
        raise LaneformerError(f"{target} is not a model folder (it has no config.json): refused to replace it")


@contextmanager
def building(target: Path, overwrite: bool = False) -> Iterator[Path]:
    """An empty folder to fill, which becomes `target` when the block ends, and vanishes if it fails.

    Args:
        target: absolute, without links.
        overwrite: replace an older model folder there, which stays as it is until then.

    Raises:
        LaneformerError: as `check_target`; another run is building it; or the file system cannot exchange folders.
    """
    staging = staging_path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging.mkdir(exist_ok=True)
    with ExitStack() as locks:
        locks.enter_context(_lock(staging))
        _clear(staging)
        try:
            check_target(target, overwrite)
            replaced = os.path.lexists(target)
            if replaced:
                # It is this run's still when it lies under the hidden name.
                locks.enter_context(_lock(target))
                _probe_exchange(staging)
            yield staging
            _flush(staging)
            if replaced:
                _exchange(staging, target)
            else:
                os.rename(staging, target)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        flush(target.parent)
        if replaced:
            shutil.rmtree(staging)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Holds `folder` against other runs; the system lets go of it however the process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not folder.exists() or not os.path.samestat(os.fstat(descriptor), folder.stat()):
            raise BlockingIOError
        yield
    except BlockingIOError as error:
        raise LaneformerError(f"another conversion is writing {folder}: wait for its end") from error
    finally:
        os.close(descriptor)


def _clear(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _flush(folder: Path) -> None:
    for parent, _, files in os.walk(folder):
        for name in files:
            flush(Path(parent, name))
        flush(Path(parent))


def _probe_exchange(folder: Path) -> None:
    one, other = folder / "one", folder / "other"
    one.mkdir()
    other.mkdir()
    try:
        _exchange(one, other)
    except OSError as error:
        raise LaneformerError(
            f"the file system of {folder.parent} cannot exchange two folders at once ({error.strerror}): "
            "convert to a new folder and replace the old one yourself"
        ) from error
    finally:
        one.rmdir()
        other.rmdir()


def _exchange(one: Path, other: Path) -> None:
    """Swaps the two names in one step, so that each is there at any moment."""
    libc = ctypes.CDLL(None, use_errno=True)
    paths = os.fsencode(one), os.fsencode(other)
    if sys.platform == "darwin":
        failed = libc.renamex_np(*paths, EXCHANGE)
    elif hasattr(libc, "renameat2"):
        failed = libc.renameat2(AT_FDCWD, paths[0], AT_FDCWD, paths[1], EXCHANGE)
    else:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(one), None, str(other))
