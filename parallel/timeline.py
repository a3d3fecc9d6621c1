"""What a schedule costs in time: one stream of work that starts sums and waits for them, sums on streams beside it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Task:
    """One entry of the stream of work.

    Attributes:
        kind: "work" takes `us`; "start" sends a sum of `us` on its way; "wait" ends no sooner than that sum does.
        name: of the work, or of the sum, which "start" and "wait" share.
        us: duration in microseconds.
    """

    kind: Literal["work", "start", "wait"]
    name: str
    us: float = 0.0


@dataclass(frozen=True)
class Span:
    """A stretch of time in microseconds: on stream 0 work or a wait, on the streams from 1 on a sum."""

    stream: int
    kind: Literal["work", "wait", "sum"]
    name: str
    begin: float
    end: float


def play(tasks: Iterable[Task], streams: int) -> list[Span]:
    """The spans of the tasks in order, where `streams` sums can run at a time; each takes the first free stream."""
    now, spans = 0.0, []
    free = [0.0] * streams
    ends: dict[str, float] = {}
    for task in tasks:
        if task.kind == "work":
            spans.append(Span(0, "work", task.name, now, now + task.us))
            now += task.us
        elif task.kind == "start":
            stream = min(range(streams), key=lambda i: (max(free[i], now), i))
            begin = max(free[stream], now)
            free[stream] = ends[task.name] = begin + task.us
            spans.append(Span(stream + 1, "sum", task.name, begin, begin + task.us))
        elif ends[task.name] > now:
            spans.append(Span(0, "wait", task.name, now, ends[task.name]))
            now = ends[task.name]
    return spans


def length(spans: Iterable[Span]) -> float:
    """When the stream of work ends, in microseconds."""
    return max((span.end for span in spans if span.stream == 0), default=0.0)


def waited(spans: Iterable[Span]) -> float:
    """How long it stands still for sums, in microseconds."""
    return sum(span.end - span.begin for span in spans if span.kind == "wait")
