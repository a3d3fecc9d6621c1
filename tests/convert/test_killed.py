"""Conversions that are killed or run out of disk, in a worker's forked children (see kill_worker.py)."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import folders
import pytest

ROOT = Path(__file__).parents[2]
SECONDS = [0.3, 0.7]  # of a whole run


@pytest.fixture(scope="module")
def run():
    """Sends one job to a worker and gives its answer."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, Path(__file__).with_name("kill_worker.py")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env=environment) as worker:

        def send(source, target, **job):
            worker.stdin.write(json.dumps({"source": str(source), "target": str(target), **job}) + "\n")
            worker.stdin.flush()
            return json.loads(worker.stdout.readline())

        yield send
        worker.stdin.close()


def state(folder):
    """Name -> hash of everything in it, or None if it is not there; Orbax's own metadata has the time in it."""
    if not folder.exists():
        return None
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in folder.rglob("*")
        if path.name != "_CHECKPOINT_METADATA"
    }


@pytest.fixture(scope="module", params=[False, True], ids=["new", "overwritten"])
def situation(request, run, tmp_path_factory):
    """The source, what stood at the target before (or nothing), and the states of source, before and after."""
    folder = tmp_path_factory.mktemp("situation")
    source, before = folders.write(folder / "source"), folder / "before"
    if request.param:
        other = folders.write(folder / "other", folders.values(dtype="bfloat16"), torch_dtype="bfloat16")
        run(other, before)
    run(source, folder / "after")
    assert before.exists() == request.param and (folder / "after").exists()
    return source, before, (state(source), state(before), state(folder / "after"))


def kill_and_run_again(run, situation, target, **kill):
    source, before, (original, old, new) = situation
    shutil.rmtree(target, ignore_errors=True)
    if old is not None:
        shutil.copytree(before, target)
    answer = run(source, target, **kill)
    assert answer["killed"] or "kill_at" not in kill  # a slow timer may find the run at its end
    assert state(source) == original
    assert state(target) == old or state(target) == new, kill
    assert "error" not in run(source, target)
    assert state(target) == new
    assert [path.name for path in target.parent.iterdir()] == ["target"]


def test_kill_at_any_operation_leaves_the_old_folder_or_the_new_and_the_next_run_works(run, situation, tmp_path):
    source, older, (_, old, _) = situation
    target = tmp_path / "target"
    if old is not None:
        shutil.copytree(older, target)
    clean = run(source, target)
    named, last = clean["named"], clean["operations"]
    before = [1 + i * named // 6 for i in range(6)]
    for kill_at in sorted({*before, named, named + 1, (named + last) // 2, last}):
        kill_and_run_again(run, situation, target, kill_at=kill_at)


@pytest.mark.parametrize("share", SECONDS)
def test_kill_from_outside_while_values_are_written(run, situation, tmp_path, share):
    seconds = run(situation[0], tmp_path / "other" / "target")["seconds"]
    kill_and_run_again(run, situation, tmp_path / "work" / "target", kill_after=share * seconds)


@pytest.mark.parametrize("to, limit", [("orbax", 1000), ("safetensors", 8000)])
def test_disk_that_fills_up_is_reported_and_changes_nothing(run, situation, tmp_path, to, limit):
    """A limit on the size of files makes writes fail as a full disk does."""
    source, before, (_, old, _) = situation
    target = tmp_path / "target"
    if old is not None:
        shutil.copytree(before, target)
    answer = run(source, target, to=to, file_limit=limit)
    assert "File too large" in answer["error"] and "\n" not in answer["error"]
    assert state(target) == old
    assert [path.name for path in tmp_path.iterdir()] == (["target"] if old is not None else [])
