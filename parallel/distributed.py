"""Several processes as one mesh: over hosts, or over groups of one host's devices."""

import os
import re
import sys

import jax

from laneformer_jax.errors import LaneformerError, UsageError

HEARTBEAT_S = 10  # silence after which a process counts as dead and all others end
JOIN_S = 60


def join(coordinator: str | None = None, processes: int | None = None, process: int | None = None) -> None:
    """Makes this process one of several; afterwards `jax.devices()` shows the devices of all of them.

    If one of them dies, the others end within about twice `HEARTBEAT_S` seconds and print the reason. Only process 0
    keeps its standard output.

    Args:
        coordinator: "host:port" of process 0; all three are found out under SLURM, Open MPI and the cloud's TPUs.
        processes: how many there are.
        process: this one's number.

    Raises:
        LaneformerError: they did not find each other within `JOIN_S` seconds, or nothing says who they are.
        UsageError: `coordinator` is no host and port.
    """
    port = re.fullmatch(r".+:(\d{1,5})", "localhost:0" if coordinator is None else coordinator)
    if port is None or int(port[1]) >= 2**16:
        raise UsageError(f"--coordinator must be HOST:PORT with a port below {2**16}, got {coordinator!r}")
    try:
        jax.distributed.initialize(
            coordinator, processes, process, heartbeat_timeout_seconds=HEARTBEAT_S, initialization_timeout=JOIN_S
        )
    except (RuntimeError, ValueError) as error:
        raise LaneformerError(
            f"the processes did not find each other: {error}. Start one process per host under SLURM, or name "
            "--coordinator HOST:PORT, --processes N and --process I for each"
        ) from error
    # The CPU's collectives report their connections on the standard output, which is for text alone.
    shown = os.dup(1) if jax.process_index() == 0 else os.open(os.devnull, os.O_WRONLY)
    sys.stdout.flush()
    os.dup2(2, 1)
    sys.stdout = os.fdopen(shown, "w", encoding="utf-8")
