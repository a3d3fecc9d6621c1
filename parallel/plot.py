"""A drawing of one token: the device's work on one line, the exchanges that run beside it on the others."""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from laneformer_jax.errors import LaneformerError
from parallel.report import Report
from parallel.timeline import length, play, waited

COLOURS = {"attention": "#3b75af", "mlp": "#8cb3d9", "head": "#6a51a3", "choose": "#9e9ac8", "": "#bbbbbb"}
WAIT, SUM = "#d62728", "#f4a142"


def draw(report: Report, title: str, file: Path) -> None:
    """Writes the drawing in the format that the file's name ends in; as many exchanges may run at once as there are.

    Raises:
        LaneformerError: the format is unknown or the file cannot be written.
    """
    streams = max(report.most_in_flight, 1)
    spans = play(report.tasks, streams)
    figure, axes = plt.subplots(figsize=(16, 1.9 + 0.4 * streams), layout="constrained")
    for span in spans:
        kind = span.name.split(".")[-1]
        colour = {"work": COLOURS.get(kind, COLOURS[""]), "wait": WAIT, "sum": SUM}[span.kind]
        axes.broken_barh([(span.begin, span.end - span.begin)], (-span.stream - 0.4, 0.8), color=colour)
    axes.set_yticks(range(-streams, 1), [f"exchange {i}" for i in range(streams, 0, -1)] + ["work"])
    axes.set_xlabel("microseconds, at the target's memory bandwidth and the stated time of an exchange (predicted)")
    axes.set_title(f"{title}: {length(spans):.0f} us a token, {waited(spans):.0f} us of it waiting")
    named = {"attention": COLOURS["attention"], "MLP": COLOURS["mlp"], "head": COLOURS["head"]}
    named |= {"exchange": SUM, "waiting": WAIT}
    figure.legend([Patch(color=c) for c in named.values()], list(named), ncol=5, loc="outside lower center")
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise LaneformerError(f"{file}: cannot be written ({error})") from error
    finally:
        plt.close(figure)
