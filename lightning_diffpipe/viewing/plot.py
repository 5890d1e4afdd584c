"""Timelines as images (`plot`) and for Perfetto, https://ui.perfetto.dev (`chrome_trace`).

In a trace each timeline is a process, each rank a thread, each message an arrow from the instruction that made it
to the one that reads it. This is the one file of `viewing` that needs matplotlib.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.planning.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Encode,
    ExchangeFrozen,
    Forward,
    ForwardNoGrad,
    Instruction,
    ReduceGradients,
    Staged,
    UpdateWeights,
)
from lightning_diffpipe.planning.timeline import Timeline

COLORS: dict[type[Instruction], str] = {
    Forward: "#4c78a8",
    ForwardNoGrad: "#9ecae9",
    Backward: "#f58518",
    BackwardInput: "#f58518",
    BackwardWeight: "#ffbf79",
    UpdateWeights: "#333333",
    Encode: "#54a24b",
    ExchangeFrozen: "#bab0ac",
    ReduceGradients: "#bab0ac",
}


def plot(timelines: Mapping[str, Timeline], path: str | Path, title: str = "") -> None:
    """Draws timelines, by name, below each other on one scale of time, to a file whose ending chooses the format.

    Raises:
        ConfigurationError: No image is written with that ending.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.backend_bases import FigureCanvasBase
    from matplotlib.patches import Patch

    endings = sorted(FigureCanvasBase.get_supported_filetypes())
    if Path(path).suffix.removeprefix(".").lower() not in endings:
        raise ConfigurationError(
            f"{path} is no name for an image; choose an ending of {', '.join(endings)}"
        )

    rows = sum(timeline.num_ranks for timeline in timelines.values())
    figure, axes = pyplot.subplots(
        len(timelines), 1, figsize=(12, 1.2 + 0.5 * rows), sharex=True, squeeze=False
    )
    for axis, (name, timeline) in zip(axes[:, 0], timelines.items(), strict=True):
        for span in timeline.spans:
            color = COLORS.get(type(span.instruction), "#999999")
            style = {"height": 0.8, "edgecolor": "white", "linewidth": 0.5, "color": color}
            axis.barh(span.rank, span.duration_s, left=span.start_s, **style)
        axis.set_yticks(range(timeline.num_ranks), [f"rank {r}" for r in range(timeline.num_ranks)])
        axis.invert_yaxis()
        axis.set_title(f"{name}: bubble ratio {100 * timeline.bubble_ratio:.1f}%", loc="left")
    axes[-1, 0].set_xlabel("seconds")
    used = {type(span.instruction) for t in timelines.values() for span in t.spans}
    shown = {kind.__name__: color for kind, color in COLORS.items() if kind in used}
    keys = [Patch(color=color, label=name) for name, color in shown.items()]
    figure.legend(handles=keys, loc="upper right", ncols=len(keys), frameon=False)
    figure.suptitle(title, x=0.01, ha="left")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


Event = dict[str, object]


def chrome_trace(timelines: Mapping[str, Timeline]) -> str:
    """Returns timelines, by name, as JSON in the trace event format; times in microseconds."""
    events: list[Event] = []
    numbers = itertools.count()  # viewers tell arrows apart by number, also between processes
    for process, (name, timeline) in enumerate(timelines.items()):
        events.append(_named("process_name", name, process))
        for rank in range(timeline.num_ranks):
            events.append(_named("thread_name", f"rank {rank}", process, rank))
        events += [*_slices(timeline, process), *_arrows(timeline, process, numbers)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _named(what: str, name: str, process: int, thread: int = 0) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _slices(timeline: Timeline, process: int) -> Iterator[Event]:
    for span in timeline.spans:
        instruction = span.instruction
        event: Event = {
            "ph": "X", "name": str(instruction), "cat": type(instruction).__name__, "pid": process,
            "tid": span.rank, "ts": 1e6 * span.start_s, "dur": 1e6 * span.duration_s,
        }  # fmt: skip
        if isinstance(instruction, Staged):
            event["args"] = {"stage": instruction.stage, "microbatch": instruction.microbatch}
        yield event


def _arrows(timeline: Timeline, process: int, numbers: Iterator[int]) -> Iterator[Event]:
    spans = {(span.rank, span.instruction): span for span in timeline.spans}
    for transfer in timeline.transfers:
        message, back = transfer.message, transfer.message.kind == "gradient"
        kinds = (Backward, BackwardInput) if back else (Forward, ForwardNoGrad)
        before = message.stage + (1 if back else -1)
        ends = [(message.from_rank, before), (message.to_rank, message.stage)]
        of_ends = [
            span
            for rank, stage in ends
            for kind in kinds
            if (span := spans.get((rank, kind(stage, message.microbatch))))
        ]
        if len(of_ends) < len(ends):
            continue
        maker, reader = of_ends
        arrow: Event = {"name": message.kind, "cat": "message", "id": next(numbers), "pid": process}
        # An arrow must begin and end within a slice to be drawn.
        middle_s = (maker.start_s + maker.stop_s) / 2
        yield arrow | {"ph": "s", "tid": maker.rank, "ts": 1e6 * middle_s}
        yield arrow | {"ph": "f", "bp": "e", "tid": reader.rank, "ts": 1e6 * reader.start_s}
