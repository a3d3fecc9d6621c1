"""What a compiled decode step does about communication: which sums wait, behind how much work the others hide."""

import dataclasses
import re
from dataclasses import dataclass
from functools import partial

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
from parallel.timeline import Task
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
        least_bytes: weights once and the whole cache.
        collective_us: the stated time of an exchange.
        layer_bytes: of those, what a layer moves on average.
        tasks: the step for `timeline.play`.
    """

    collectives: tuple[Collective, ...]
    most_in_flight: int
    kernels: int
    moved_bytes: int
    least_bytes: int
    collective_us: float
    layer_bytes: int
    tasks: tuple[Task, ...] = dataclasses.field(repr=False)

    @property
    def layer_sums(self) -> tuple[Collective, ...]:
        """The sums that modules issue, without the head's and the choice's exchanges."""
        return tuple(c for c in self.collectives if c.source.startswith("layer"))


def lower_decode(engine: MeshEngine, rows: int, capacity: int) -> jax.stages.Lowered:
    """The greedy decode loop for `rows` rows and a cache of `capacity` tokens, lowered for the engine's mesh."""
    config = engine.config
    integer = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    truth = jax.ShapeDtypeStruct((rows,), jnp.bool_)
    progress = decode.Progress(
        cache=jax.eval_shape(partial(init_cache, config, rows, capacity, engine.dtype)),
        token=integer((rows,)),
        active=truth,
        tokens=integer((rows, capacity)),
        count=integer((rows,)),
        step=integer(()),
        finite=truth,
    )
    choice = jax.eval_shape(
        lambda: decode.Choice(
            row_keys([0] * rows, 1), Sampling().values(), jnp.int32(0), jnp.zeros((EOS_PLACES,), jnp.int32)
        )
    )
    return engine.lower_resume(decode.Shape(capacity, 1), progress, choice)


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
    text = lower_decode(engine, 1, capacity).compile().as_text()
    return read_report(
        hlo.parse(text), least_bytes(engine, 1, capacity), target.bytes_per_second, collective_us or target.collective_us
    )


def read_report(program: hlo.Program, least: int, bytes_per_second: float, collective_us: float) -> Report:
    """The report of a compiled program whose loop makes one token a round.

    Args:
        program: compiled for one mesh.
        least: bytes that a device must read for a token.
        bytes_per_second: memory bandwidth of a device.
        collective_us: stated time of an exchange in microseconds.
    """
    body = program.loop_body()
    local = {op.name: op for op in body}
    moved = {op.name: 0 if program.collective(op) else moved_bytes(program, op, local) for op in body}
    ends = {op.operands[0]: i for i, op in enumerate(body) if op.opcode.endswith("-done")}

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
    layers = {source(op).split(".")[0] for op in body if source(op).startswith("layer")}
    in_layers = sum(moved[op.name] for op in body if source(op).startswith("layer"))
    return Report(
        collectives=tuple(collectives),
        most_in_flight=max((sum(a <= i <= b for a, b in spans) for i, _ in spans), default=0),
        kernels=sum(map(is_kernel, body)),
        moved_bytes=sum(moved.values()),
        least_bytes=least,
        collective_us=collective_us,
        layer_bytes=in_layers // max(len(layers), 1),
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
        elif op.opcode.endswith("-done"):
            if op.operands[0] in started:
                yield Task("wait", op.operands[0])
        elif is_kernel(op):
            yield Task("work", source(op), us[op.name])
