"""Timelines as pictures; the one file of `viewing` that needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
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
    """Draws timelines below each other, on one scale of time.

    Args:
        timelines: By name, for example `{"planned": ..., "measured": ...}`.
        path: File to write; the ending chooses the format.
        title: Written above the picture.

    Raises:
        ConfigurationError: No picture is written with that ending.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.backend_bases import FigureCanvasBase
    from matplotlib.patches import Patch

    endings = sorted(FigureCanvasBase.get_supported_filetypes())
    if Path(path).suffix.removeprefix(".").lower() not in endings:
        raise ConfigurationError(
            f"{path} is no name for a picture; choose an ending of {', '.join(endings)}"
        )

    rows = sum(timeline.num_ranks for timeline in timelines.values())
    figure, axes = pyplot.subplots(
        len(timelines), 1, figsize=(12, 1.2 + 0.5 * rows), sharex=True, squeeze=False
    )
    for axis, (name, timeline) in zip(axes[:, 0], timelines.items(), strict=True):
        for span in timeline.spans:
            color = COLORS.get(type(span.instruction), "#999999")
            axis.barh(
                span.rank, span.duration_s, left=span.start_s, height=0.8, color=color,
                edgecolor="white", linewidth=0.5,
            )  # fmt: skip
        axis.set_yticks(range(timeline.num_ranks), [f"rank {r}" for r in range(timeline.num_ranks)])
        axis.invert_yaxis()
        axis.set_title(f"{name}: bubble ratio {100 * timeline.bubble_ratio:.1f}%", loc="left")
    axes[-1, 0].set_xlabel("seconds")
    used = {type(span.instruction) for t in timelines.values() for span in t.spans}
    keys = [
        Patch(color=color, label=kind.__name__) for kind, color in COLORS.items() if kind in used
    ]
    figure.legend(handles=keys, loc="upper right", ncols=len(keys), frameon=False)
    figure.suptitle(title, x=0.01, ha="left")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
