"""A small model of a decode step's time on a machine. Every figure that comes out of it is a prediction.

    work of a module = bytes / (read_share * bytes_per_second) + kernels * launch_us
    a sum            = sum_us + bytes * (devices - 1) / link_bytes_per_second
    a token          = `timeline.play` of the schedule with those times: what really overlaps, and no more

`python -m parallel.cost_model` prints the tables of docs/delay.md.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import jax.numpy as jnp

from laneformer_jax.cache import cache_bytes
from laneformer_jax.config import LaneformerConfig, laneformer_2b
from laneformer_jax.schedule import PACKS, Kind, Pack, make_schedule
from parallel.timeline import Task, length, play, waited

BYTES = 2  # of a weight, a cached value and a summand, in 16 bits


@dataclass(frozen=True)
class Machine:
    """Eight devices and what software makes of them. docs/delay.md says where each number comes from.

    Attributes:
        name: of the machine.
        bytes_per_second: peak memory bandwidth of a device.
        read_share: of it that streaming weights reaches.
        launch_us: between two kernels, in microseconds.
        sum_us: one small sum, from the first device's start to the last one's end, in microseconds.
        link_bytes_per_second: that a device can receive from the others.
        streams: sums that can run at a time.
        published: tokens per second that have been published for it.
        devices: of one lane group.
    """

    name: str
    bytes_per_second: float
    read_share: float
    launch_us: float
    sum_us: float
    link_bytes_per_second: float
    streams: int
    published: float
    devices: int = 8


@dataclass(frozen=True)
class Kernels:
    """Kernels of a decode step: of each module, of each sum (the copy of its operand), and once a token.

    The defaults are those of the program that JAX 0.10.2 compiles for eight H200s.
    """

    attention: float = 16
    mlp: float = 5
    sum: float = 1
    token: float = 48

    def of(self, kind: Kind) -> float:
        return self.attention if kind == "attention" else self.mlp


@dataclass(frozen=True)
class Prediction:
    """Predicted microseconds of a token and its parts: `us = streaming + launching + waiting`."""

    us: float
    streaming: float
    launching: float
    waiting: float

    @property
    def tokens_per_second(self) -> float:
        return 1e6 / self.us

    @property
    def dominant(self) -> str:
        """The largest part."""
        return max(("streaming", "launching", "waiting"), key=lambda part: getattr(self, part))


H200 = Machine("8x H200", 4.8e12, 0.85, 1.0, 8.0, 450e9, 1, 2100)
MI300X = Machine("8x MI300X", 5.3e12, 0.8, 1.5, 10.0, 448e9, 1, 3000)
ONE_KERNEL = Kernels(attention=0, mlp=0, sum=0, token=0)


def predict(
    config: LaneformerConfig,
    machine: Machine,
    pack: Pack = "module",
    context: int = 1024,
    kernels: Kernels = Kernels(),  # noqa: B008
) -> Prediction:
    """The predicted time of one token of one row.

    Args:
        config: the architecture, its delay included.
        machine: to run on.
        pack: what one sum carries.
        context: tokens in the cache.
        kernels: launched.
    """
    bandwidth = 1e-6 * machine.read_share * machine.bytes_per_second
    tasks = list(_tasks(config, machine, pack, context, kernels, bandwidth))
    spans = play(tasks, machine.streams)
    streaming = sum(_bytes(config, context)) / machine.devices / bandwidth
    us, waiting = length(spans), waited(spans)
    return Prediction(us, streaming, max(us - waiting - streaming, 0.0), waiting)


def _bytes(config: LaneformerConfig, context: int) -> tuple[float, float, float]:
    """Bytes of all attention modules with the cache, all MLPs, and the head, over all devices."""
    width, kv = config.hidden_size, config.num_kv_heads * config.head_dim
    attention = config.num_layers * BYTES * width * 2 * (width + kv)
    cache = cache_bytes(config, 1, context, jnp.dtype(jnp.bfloat16))
    return (
        attention + cache,
        config.num_layers * BYTES * 3 * width * config.intermediate_size,
        (BYTES * width * config.vocab_size),
    )


def _tasks(
    config: LaneformerConfig, machine: Machine, pack: Pack, context: int, kernels: Kernels, bandwidth: float
) -> Iterator[Task]:
    attention, mlp, head = (total / machine.devices / bandwidth for total in _bytes(config, context))
    streaming = {"attention": attention / config.num_layers, "mlp": mlp / config.num_layers}

    def sum_us(outputs: int) -> float:
        payload = outputs * BYTES * config.hidden_size * (machine.devices - 1)
        return machine.sum_us + 1e6 * payload / machine.link_bytes_per_second

    def exchange(name: str, outputs: int = 1) -> Iterator[Task]:
        yield Task("start", name, sum_us(outputs))
        yield Task("wait", name)

    yield Task("work", "token", kernels.token * machine.launch_us)
    carrier: dict[int, str] = {}
    for step in make_schedule(config, pack):
        launches = kernels.of(step.kind) + kernels.sum * bool(step.sums)
        yield Task("work", step.kind, streaming[step.kind] + launches * machine.launch_us)
        if step.sums:
            name = f"sum of {step.module}"
            carrier |= dict.fromkeys(step.sums, name)
            yield Task("start", name, sum_us(len(step.sums)))
        needed = step.module if step.sum_now else step.receive_from
        if needed is not None:
            yield Task("wait", carrier[needed])
    yield from exchange("head")
    yield Task("work", "head", head)
    yield from exchange("winner", 0)


def table(machine: Machine, context: int = 1024) -> str:
    """Predictions at delays of 0 to 4 layers under both packings, as Markdown."""
    lines = [
        "| delay (layers) | pack | kernels | tokens/s (predicted) | us | streaming | launching | waiting | largest |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kernels, label in ((Kernels(), "as compiled"), (ONE_KERNEL, "one")):
        for delay in range(5):
            for pack in PACKS if delay else PACKS[:1]:
                p = predict(laneformer_2b().replace(delay=2 * delay), machine, pack, context, kernels)
                lines.append(
                    f"| {delay} | {pack} | {label} | {p.tokens_per_second:.0f} | {p.us:.0f} | {p.streaming:.0f} | "
                    f"{p.launching:.0f} | {p.waiting:.0f} | {p.dominant} |"
                )
    return "\n".join(lines)


def kernels_to_reach(machine: Machine, tokens_per_second: float, context: int = 1024) -> float:
    """The share of today's kernels at which delay 2 packed by layer is predicted to reach a speed; 0 if none does."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        scaled = Kernels(*(middle * n for n in dataclasses.astuple(Kernels())))
        fast = predict(laneformer_2b(), machine, "layer", context, scaled).tokens_per_second >= tokens_per_second
        low, high = (middle, high) if fast else (low, middle)
    return low


def main() -> None:
    """Prints the tables."""
    for machine in (H200, MI300X):
        print(f"\n{machine.name}: published {machine.published:.0f} tokens/s\n\n{table(machine)}")
        share = kernels_to_reach(machine, machine.published)
        print(f"\nreached with {100 * share:.0f} % of today's kernels, at delay 2 packed by layer (predicted)")


if __name__ == "__main__":
    main()
