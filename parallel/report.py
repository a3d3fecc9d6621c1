"""What a compiled decode step does about communication: which sums wait, behind how much work the others hide."""

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from laneformer_jax import decode
from laneformer_jax.cache import init_cache
from laneformer_jax.config import LaneformerConfig
from laneformer_jax.sampling import Sampling, row_keys
from laneformer_jax.schedule import Pack
from laneformer_jax.weights import abstract_model
from parallel import hlo
from parallel.engine import MeshEngine
from parallel.target import Target
from parallel.timeline import Task, length, play, waited
from parallel.traffic import is_kernel, least_bytes, moved_bytes

EOS_PLACES = 4


@dataclass(frozen=True)
class Collective:
    """One exchange between devices.

    Attributes:
        kind: such as "all-reduce".
        source: the scope that issues it, such as "layer3.mlp", "head" or "choose".
        bytes: that one device contributes.
        kernels: scheduled between its start and its end, other exchanges not counted.
        work_bytes: that those move through memory.
        work_us: what that takes at the target's bandwidth.
        exposed: `work_us` is less than the stated time of an exchange.
    """

    kind: str
    source: str
    bytes: int
    kernels: int
    work_bytes: int
    work_us: float
    exposed: bool


@dataclass(frozen=True)
class Report:
    """One token of a compiled decode loop on one device.

    Attributes:
        collectives: in the order in which they start.
        most_in_flight: collectives under way at once.
        kernels: launched, collectives included.
        moved_bytes: through memory.
        collective_us: the stated time of an exchange.
        least_bytes: that must move: weights once and the whole cache.
        layer_bytes: of those, what belongs to one layer on average.
        tasks: the step for `timeline.play`.
    """

    collectives: tuple[Collective, ...]
    most_in_flight: int
    kernels: int
    moved_bytes: int
    collective_us: float
    least_bytes: int
    layer_bytes: int
    tasks: tuple[Task, ...] = dataclasses.field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; with each exchange's work also in layers."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "tasks"}
        fields["collectives"] = [
            {**dataclasses.asdict(c), "work_layers": c.work_bytes / self.layer_bytes} for c in self.collectives
        ]
        return fields

    def format(self) -> str:
        """For people: one exchange a line, then the totals."""
        lines = ["exchange    from                 bytes  kernels  work behind it             waits"]
        for c in self.collectives:
            work = f"{c.work_us:.1f} us, {c.work_bytes / self.layer_bytes:.2f} layers"
            waits = "exposed" if c.exposed else "hidden"
            lines.append(f"{c.kind:<10}  {c.source:<18}  {c.bytes:>6}  {c.kernels:>7}  {work:<25}  {waits}")
        exposed = sum(c.exposed for c in self.collectives)
        surplus = 100 * (self.moved_bytes / self.least_bytes - 1)
        spans = play(self.tasks, max(self.most_in_flight, 1))
        return "\n".join(
            [
                *lines,
                f"{len(self.collectives)} exchanges, {exposed} exposed if one takes {self.collective_us:g} us; "
                f"{self.most_in_flight} at most in flight",
                f"{self.kernels} kernels a token; {self.moved_bytes / 1e6:.1f} MB through each device's memory, "
                f"{surplus:+.1f} % of the least possible {self.least_bytes / 1e6:.1f} MB",
                f"predicted from bytes alone, without launch gaps: {length(spans):.0f} us a token, "
                f"{waited(spans):.0f} us of it waiting",
            ]
        )

    @property
    def layer_sums(self) -> tuple[Collective, ...]:
        """The sums that modules issue, without the head's and the choice's exchanges."""
        return tuple(c for c in self.collectives if c.source.startswith("layer"))


def lower_decode(engine: MeshEngine, rows: int, capacity: int) -> jax.stages.Lowered:
    """The greedy decode loop for `rows` rows and a cache of `capacity` tokens, lowered for the engine's mesh."""

    def arguments() -> tuple[decode.Progress, decode.Choice]:
        count, truth = jnp.zeros((rows,), jnp.int32), jnp.ones((rows,), bool)
        tokens = jnp.zeros((rows, capacity), jnp.int32)
        cache = init_cache(engine.config, rows, capacity, engine.dtype)
        progress = decode.Progress(cache, count, truth, tokens, count, jnp.int32(0), truth)
        keys, eos = row_keys([0] * rows, 1), jnp.zeros((EOS_PLACES,), jnp.int32)
        return progress, decode.Choice(keys, Sampling().values(), jnp.int32(0), eos)

    return engine.lower_resume(decode.Shape(capacity, 1), *jax.eval_shape(arguments))


def compile_report(
    config: LaneformerConfig,
    target: Target,
    pack: Pack = "module",
    capacity: int | None = None,
    sum_dtype: str | None = None,
    collective_us: float | None = None,
) -> Report:
    """Compiles the decode loop of one row for a target that need not be there, and reads its schedule.

    Args:
        config: the architecture; its dtype is that of weights, cache and activations.
        target: the machine.
        pack: what one sum carries.
        capacity: tokens of the cache; the model's context by default.
        sum_dtype: in which sums travel.
        collective_us: stated time of an exchange in microseconds; the target's by default.

    Raises:
        LaneformerError: the target's compiler is missing, or the target does not fit the config.
    """
    engine = MeshEngine(abstract_model(config), target.mesh(), pack, sum_dtype)
    capacity = capacity or config.max_position_embeddings
    program = hlo.parse(lower_decode(engine, 1, capacity).compile().as_text() or "")
    least = least_bytes(engine, 1, capacity)
    return read_report(program, least, target.bytes_per_second, collective_us or target.collective_us)


def read_report(program: hlo.Program, least: tuple[int, int], bytes_per_second: float, collective_us: float) -> Report:
    """The report of a compiled program whose loop makes one token a round.

    Args:
        program: compiled for one mesh.
        least: bytes that a device must read for a token, and of those a layer's.
        bytes_per_second: memory bandwidth of a device.
        collective_us: stated time of an exchange in microseconds.
    """
    body = program.loop_body()
    local = {op.name: op for op in body}
    exchanges = {op.name: kind for op in body if (kind := program.collective(op))}
    ends = {op.operands[0]: i for i, op in enumerate(body) if op.opcode.endswith("-done")}
    moved = {
        op.name: 0
        if op.name in exchanges or exchanges.keys() & op.operands[:1] and op.opcode.endswith("-done")
        else moved_bytes(program, op, local)
        for op in body
    }

    def us(count: int) -> float:
        return 1e6 * count / bytes_per_second

    collectives, spans = [], []
    for i, op in enumerate(body):
        kind = program.collective(op)
        if kind is None:
            continue
        between = [inner for inner in body[i + 1 : ends.get(op.name, i)] if not program.collective(inner)]
        work = sum(moved[inner.name] for inner in between)
        payload = sum(local[name].bytes for name in op.operands)
        kernels = sum(map(is_kernel, between))
        collectives.append(Collective(kind, source(op), payload, kernels, work, us(work), us(work) < collective_us))
        spans.append((i, ends.get(op.name, i)))
    return Report(
        collectives=tuple(collectives),
        most_in_flight=max((sum(a <= i <= b for a, b in spans) for i, _ in spans), default=0),
        kernels=sum(map(is_kernel, body)),
        moved_bytes=sum(moved.values()),
        collective_us=collective_us,
        least_bytes=least[0],
        layer_bytes=least[1],
        tasks=tuple(_tasks(program, body, {name: us(count) for name, count in moved.items()}, collective_us)),
    )


def source(op: hlo.Operation) -> str:
    """The named scope that an operation comes from: "layer3.mlp", "head", "choose", or nothing."""
    found = re.search(r"(layer\d+\.\w+|head|choose)(?=/|$)", op.scope)
    return found[1] if found else ""


def _tasks(program: hlo.Program, body: tuple[hlo.Operation, ...], us: dict[str, float], collective_us: float):
    started = set()
    for op in body:
        if program.collective(op):
            yield Task("start", op.name, collective_us)
            started.add(op.name)
            if not op.opcode.endswith("-start"):
                yield Task("wait", op.name)
        elif op.opcode.endswith("-done") and op.operands[0] in started:
            yield Task("wait", op.operands[0])
        elif is_kernel(op) or us[op.name]:
            yield Task("work", source(op), us[op.name])
