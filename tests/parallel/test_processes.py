"""Several processes on the loopback device are one mesh, and none outlives another for long."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import goldens
import pytest

import laneformer_jax as lf

ROOT = Path(__file__).parents[2]
END_S = 30  # within which the others must end when one is killed


def start(folder: Path, processes: int, rounds: str) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "JAX_PLATFORMS": "cpu"}
    worker = str(ROOT / "tests" / "parallel" / "process_worker.py")
    workers = []
    for i in range(processes):
        place = [f"localhost:{port}", str(processes), str(i), str(8 // processes)]
        with (folder / f"{i}.err").open("w") as errors:
            command = [sys.executable, worker, *place, str(folder / f"{i}.json"), rounds]
            workers.append(subprocess.Popen(command, env=environment, stderr=errors))
    return workers


@pytest.fixture
def alone():
    expected = goldens.expected("eight_lanes")
    lm = lf.load(goldens.FOLDER / "eight_lanes")
    lm.eos = tuple(int(row[goldens.PROMPT_TOKENS + 9]) for row in expected.greedy)
    completions = lm.generate(expected.input_ids.tolist(), max_new_tokens=goldens.NEW_TOKENS)
    assert all(completion.finish_reason == "stop" for completion in completions)
    return [[c.token_ids, c.finish_reason] for c in completions]


@pytest.mark.parametrize("processes", [2, 4])
def test_every_process_sees_the_tokens_and_the_end_of_one(tmp_path, processes, alone):
    workers = start(tmp_path, processes, "once")
    try:
        codes = [worker.wait(timeout=240) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert codes == [0] * processes, [(tmp_path / f"{i}.err").read_text()[-500:] for i in range(processes)]
    assert [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(processes)] == [alone] * processes


def test_the_others_end_with_the_reason_when_one_is_killed(tmp_path):
    workers = start(tmp_path, 2, "forever")
    try:
        deadline = time.monotonic() + 240
        while not (tmp_path / "1.json").exists():
            assert time.monotonic() < deadline and workers[1].poll() is None
            time.sleep(0.2)
        workers[1].send_signal(signal.SIGKILL)
        code = workers[0].wait(timeout=END_S)
    finally:
        for worker in workers:
            worker.kill()
    assert code != 0
    reason = (tmp_path / "0.err").read_text()
    assert "died" in reason or "Connection closed" in reason or "heartbeat" in reason
