"""Delayed Tensor Parallelism as data: what every module adds to a lane, and which outputs cross lanes when."""

from dataclasses import dataclass
from typing import Literal

from laneformer_jax.config import LaneformerConfig
from laneformer_jax.errors import UsageError

Kind = Literal["attention", "mlp"]
Pack = Literal["layer", "module"]
PACKS: tuple[Pack, ...] = ("module", "layer")


@dataclass(frozen=True)
class Step:
    """One module's exchange: `x_l += own_scale * o_l`, or the lane sum of o; plus what other lanes sent earlier.

    Attributes:
        module: number of the module, 0 .. 2 * layers - 1.
        layer: the layer that it belongs to.
        kind: attention on even modules, MLP on odd ones.
        own_scale: factor of the lane's own partial output; sqrt(L) where nothing else arrives, so that the variance
            of the stream is that of a sum over lanes.
        sum_now: the lanes' sum of this very output replaces the lane's own (ordinary tensor parallelism).
        receive_from: module whose output the other lanes' sum of which is added here, or None.
        sums: modules whose outputs the one lane sum carries that is issued as soon as this module's output is there;
            empty if none is issued here.
    """

    module: int
    layer: int
    kind: Kind
    own_scale: float
    sum_now: bool
    receive_from: int | None
    sums: tuple[int, ...]


def make_schedule(config: LaneformerConfig, pack: Pack = "module") -> tuple[Step, ...]:
    """The exchange of every module, from the delay d in modules and the communication switches.

    Module n takes "present" if d is 0 or if n < d with early communication; "past" if n >= d and module n - d
    communicates; "none" otherwise. With an even d both ends of a delayed sum are of one kind; with an odd one the
    sender's kind decides whether it communicates. Nothing that would land after the last module is sent.

    Args:
        config: the architecture.
        pack: "module" issues a sum for every output, where it is born. "layer" lets the attention output wait for its
            layer's MLP output, so that one sum carries both: half the sums, each with a module less to hide behind.
            The numbers are the same. An output that is needed before its layer ends (d < 2, or early communication)
            travels by itself under either.

    Raises:
        UsageError: `pack` is neither.

    Source: design, section 1; delays in modules after the Ladder-style residual literature.
    """
    if pack not in PACKS:
        raise UsageError(f"pack must be one of {', '.join(PACKS)}, got {pack!r}")
    talks = {"attention": config.attention_comm, "mlp": config.mlp_comm}
    modules = range(2 * config.num_layers)
    kinds: list[Kind] = ["mlp" if n % 2 else "attention" for n in modules]
    delay = config.delay

    def sum_now(n: int) -> bool:
        return talks[kinds[n]] if delay == 0 else n < delay and config.early_comm

    def source(n: int) -> int | None:
        return n - delay if delay > 0 and n >= delay and talks[kinds[n - delay]] else None

    sources = {source(n) for n in modules}
    sent = {n for n in modules if sum_now(n) or n in sources}

    def waits(n: int) -> bool:
        return pack == "layer" and kinds[n] == "attention" and delay >= 2 and not sum_now(n) and {n, n + 1} <= sent

    def sums(n: int) -> tuple[int, ...]:
        if n not in sent or waits(n):
            return ()
        return (n - 1, n) if n > 0 and waits(n - 1) else (n,)

    return tuple(
        Step(
            module=n,
            layer=n // 2,
            kind=kinds[n],
            own_scale=1.0 if sum_now(n) or source(n) is not None else config.num_lanes**0.5,
            sum_now=sum_now(n),
            receive_from=source(n),
            sums=sums(n),
        )
        for n in modules
    )


def format_schedule(steps: tuple[Step, ...]) -> str:
    """The schedule as a table for people, one module a line."""
    lines = ["module  layer  kind       lane adds            receives from  issues a sum of"]
    for s in steps:
        own = "sum over lanes" if s.sum_now else f"{s.own_scale:.4g} x own output"
        arrives = "-" if s.receive_from is None else f"module {s.receive_from}"
        issued = f"module {' and '.join(map(str, s.sums))}" if s.sums else "-"
        lines.append(f"{s.module:>6}  {s.layer:>5}  {s.kind:<9}  {own:<19}  {arrives:<13}  {issued}")
    return "\n".join(lines)
