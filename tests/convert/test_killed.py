"""Conversions that are killed, run out of disk, or meet each other."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import folders
import pytest

ROOT = Path(__file__).parents[2]
KILLS = 10  # for each of the two situations
STEP = 17


@pytest.fixture(scope="module")
def run():
    """Sends one job to a worker and gives its answer."""
    command = [sys.executable, Path(__file__).with_name("kill_worker.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env()) as worker:

        def send(**job):
            worker.stdin.write(json.dumps(job) + "\n")
            worker.stdin.flush()
            return json.loads(worker.stdout.readline())

        yield send
        worker.stdin.close()


def env():
    return {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}


def state(folder):
    """Name -> hash of everything below; Orbax's own metadata has the time in it."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in folder.rglob("*")
        if path.name != "_CHECKPOINT_METADATA"
    }


def moments(count):
    """Operations to be killed at: the last ones, where the folder gets its name, and some spread over the others."""
    last = list(range(count - KILLS // 2 + 1, count + 1))
    return [1 + i * (count - KILLS // 2) // (KILLS // 2) for i in range(KILLS // 2)] + last


@pytest.mark.parametrize("older", [False, True], ids=["new", "overwritten"])
def test_kill_leaves_the_old_folder_or_the_new_one_and_the_next_run_works(run, tmp_path, older):
    source = folders.write(tmp_path / "source")
    target = tmp_path / "work" / "target"

    def put_back():
        if older and (not target.exists() or state(target) != old):
            assert not run(source=str(other), target=str(target))["killed"]

    other = folders.write(tmp_path / "other", folders.values(dtype="bfloat16"), dtype="bfloat16")
    run(source=str(source), target=str(target))
    new, original = state(target), state(source)
    if older:
        run(source=str(other), target=str(target))
    old = state(target) if older else None
    for kill_at in moments(clean_operations(run, source, target, put_back)):
        if not older:
            remove(target)
        put_back()
        assert run(source=str(source), target=str(target), kill_at=kill_at)["killed"]
        assert state(source) == original
        found = state(target) if target.exists() else None
        assert found == old or found == new, kill_at
        assert run(source=str(source), target=str(target)).keys() == {"operations", "killed", "seconds"}
        assert state(target) == new
        assert [path.name for path in target.parent.iterdir()] == ["target"]


def clean_operations(run, source, target, put_back):
    put_back()
    return run(source=str(source), target=str(target))["operations"]
