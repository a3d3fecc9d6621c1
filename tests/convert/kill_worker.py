"""Runs each conversion that a line of standard input asks for in a forked child, and answers with how it ended.

The imports are paid once. A job may ask that its child is killed at the n-th of the file operations that Python reports
to audit hooks, or some seconds after its start, or that its files may not grow beyond a limit, as on a full disk.
"""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

from convert import orbax_store  # noqa: F401  (imports Orbax before the fork)
from convert.convert import convert
from convert.source import find_source
from laneformer_jax.errors import LaneformerError

EVENTS = ("open", "os.", "shutil.", "fcntl.", "mmap.", "ctypes.dlsym")
NAMING = ("os.rename", "ctypes.dlsym")


def work(job, answer):
    count = named = 0

    def hook(event, args):
        nonlocal count, named
        if event.startswith(EVENTS):
            count += 1
            named = count if event in NAMING else named
            if count == job.get("kill_at"):
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    if "file_limit" in job:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_limit"],) * 2)
    try:
        convert(find_source(job["source"], None), Path(job["target"]), job.get("to"), overwrite=True)
        # The operation that gives the folder its name is the last of its kind.
        result = {"named": named, "operations": count}
    except LaneformerError as error:
        result = {"error": str(error)}
    os.write(answer, json.dumps(result).encode())


def main():
    for line in sys.stdin:
        job = json.loads(line)
        reader, writer = os.pipe()
        start = time.perf_counter()
        child = os.fork()
        if not child:
            try:
                work(job, writer)
            finally:
                os._exit(0)
        os.close(writer)
        if "kill_after" in job:
            time.sleep(job["kill_after"])
            os.kill(child, signal.SIGKILL)
        with os.fdopen(reader) as pipe:
            result = json.loads(pipe.read() or "{}")
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        print(json.dumps(result | {"killed": killed, "seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main()
