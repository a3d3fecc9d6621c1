"""One of several processes of a mesh: generates once, or on and on, and writes what it saw to a file.

Arguments: coordinator, number of processes, this process, devices of each, result file, "once" or "forever".
"""

import json
import os
import sys
from pathlib import Path

coordinator, processes, process, devices, result, rounds = sys.argv[1:]
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"

import goldens  # noqa: E402

import laneformer_jax as lf  # noqa: E402
import parallel  # noqa: E402
from parallel import distributed  # noqa: E402

distributed.join(coordinator, int(processes), int(process))
expected = goldens.expected("eight_lanes")
lm = lf.load(goldens.FOLDER / "eight_lanes", mesh=parallel.make_mesh(4, data=2))
lm.eos = tuple(int(row[goldens.PROMPT_TOKENS + 9]) for row in expected.greedy)
while True:
    completions = lm.generate(expected.input_ids.tolist(), max_new_tokens=goldens.NEW_TOKENS)
    Path(result).write_text(json.dumps([[c.token_ids, c.finish_reason] for c in completions]))
    if rounds == "once":
        break
