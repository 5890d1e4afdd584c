"""The parts of `main.py`, each run by `one_part.py`. On a CPU models are tiny."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.gpu import sampling_parts
from benchmarks.gpu.models import sized
from benchmarks.gpu.one_part import Place, Report, environment, tests
from benchmarks.gpu.ranks import Run, train_together
from benchmarks.gpu.requests import denoiser, request_of
from benchmarks.gpu.sampling_parts import step_of
from benchmarks.one_rank_overhead.main import Samples, StableDiffusion, quiet_trainer
from lightning_diffpipe import DiffPipeStrategy
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.modules.on_paper import ModelOnPaper, OnPaper
from lightning_diffpipe.planning.profile import ModelProfile
from lightning_diffpipe.profiling.measure import LayerTimer, give_back, measure_profile
from lightning_diffpipe.sampling.pipefusion import PipeFusion

SLIDES = {
    "sd21": {8: 0.38, 16: 0.41, 32: 0.43, 64: 0.44},
    "controlnet": {8: 0.76, 16: 0.81, 32: 0.86, 64: 0.89},
}
"""Frozen over trained time by number of samples, as the slides of DiffusionPipe have it."""


def gloo(place: Place, report: Report) -> None:
    """Two ranks on one GPU, over gloo: what filling changes, and what events say."""
    _two_ways(place, report, 2, "gloo")


def nccl(place: Place, report: Report) -> None:
    """The same over NCCL, where it allows two ranks on one GPU; else one rank."""
    if not place.on_gpu:
        _two_ways(place, report, 1, "gloo")
        return
    try:
        _two_ways(place, report, 2, "nccl", limit_s=65.0)
    except RuntimeError as error:
        report(two_ranks=str(error)[-500:])
        _two_ways(place, report, 1, "nccl")


def _two_ways(
    place: Place, report: Report, num_ranks: int, backend: str, limit_s: float = 85.0
) -> None:
    """Trains without filling and with it; losses and weights must be the same, bit for bit.

    Once more with layers and links that are measured, which may be cut elsewhere.
    """
    common = {"num_stages": num_ranks, "num_microbatches": 4, "profile": "flops"}
    runs = [Run(common | {"filling": filling}) for filling in ("none", "shares")]
    if place.on_gpu:
        runs.append(Run(common | {"profile": "measure"}))
    found = train_together(num_ranks, backend, place.on_gpu, runs, limit_s)
    for run, ranks in zip(runs, found, strict=True):
        for rank, outcome in enumerate(ranks):
            row = {k: v for k, v in outcome.items() if k not in ("losses", "digest", "verified")}
            report(backend=backend, num_ranks=num_ranks, rank=rank, **(run.options | row))
    equal = all(
        a["losses"] == b["losses"] and a["digest"] == b["digest"]
        for a, b in zip(*found[:2], strict=True)
    )
    report(backend=backend, num_ranks=num_ranks, filling_changes_nothing=equal)
    assert equal, "filled bubbles changed a loss or a weight"


def parity(place: Place, report: Report) -> None:
    """A pipeline of two stages beside one process, in three precisions."""
    options = {"verify": True, "num_stages": 2, "num_microbatches": 4, "profile": "flops"}
    precisions = ("32-true", "bf16-mixed", "bf16-true")
    runs = [Run(options, precision, steps=1) for precision in precisions]
    for run, ranks in zip(runs, train_together(2, "gloo", place.on_gpu, runs), strict=True):
        for rank, outcome in enumerate(ranks):
            report(precision=run.precision, rank=rank, **outcome["verified"])


def overhead(place: Place, report: Report) -> None:
    """One rank with the strategy beside plain Lightning; the host is waited for at the ends only."""
    sizes = ((32, 3, 64, 4), (128, 3, 256, 8)) if place.on_gpu else ((16, 2, 16, 2),)
    steps, rounds = (30, 3) if place.on_gpu else (3, 1)
    for width, levels, pixels, batch_size in sizes:
        torch.manual_seed(0)
        module = StableDiffusion(width, levels)
        data = DataLoader(Samples(batch_size * steps, pixels), batch_size)
        times: dict[str, list[float]] = {"plain": [], "diffpipe": []}
        for _ in range(rounds):
            for name, found in times.items():
                strategy: Any = "auto"
                if name == "diffpipe":
                    strategy = DiffPipeStrategy(
                        num_stages=1, num_microbatches=1, profile="flops", filling="none"
                    )
                found.append(_step_s(module, data, strategy, steps, place))
        plain_s, ours_s = (statistics.median(times[name]) for name in ("plain", "diffpipe"))
        report(
            parameters=sum(p.numel() for p in module.parameters()),
            plain_s=plain_s,
            diffpipe_s=ours_s,
            ratio=ours_s / plain_s,
        )


def _step_s(
    module: Any, data: DataLoader, strategy: Any, steps: int, place: Place, **trainer: Any
) -> float:
    """Seconds of a step, over all but the first tenth of them."""
    first = max(steps // 10, 1)

    class Ends(L.Callback):
        """Looks at the clock twice."""

        at_s: list[float] = []  # noqa: RUF012

        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
            if trainer.global_step in (first, steps):
                place.clock.settle()
                self.at_s.append(time.perf_counter())

    ends = Ends()
    ends.at_s = []
    accelerator = "gpu" if place.on_gpu else "cpu"
    options = {"accelerator": accelerator, "max_steps": steps, "callbacks": [ends], **trainer}
    quiet_trainer(strategy, **options).fit(module, data)
    return (ends.at_s[1] - ends.at_s[0]) / (steps - first)


def frozen_share(place: Place, report: Report) -> None:
    """How long frozen layers take beside trained ones, at the slides' batches."""
    counts = (8, 16, 32, 64) if place.on_gpu else (1, 2)
    for name in ("sd21", "controlnet"):
        training = OnPaper(name, place.dtype, sized(name, not place.on_gpu), device=place.device)
        profile = _measured(training, place, counts, budget_s=15.0)
        for count, row in _shares(profile, counts).items():
            report(model=name, samples=count, slides=SLIDES[name].get(count), **row)
        if name == "sd21":  # the same by hand, without a stamp at any layer
            report(model=name, samples=counts[0], **_by_hand(training, place, counts[0]))
        del training
        give_back(place.device)
    for name in ("sd21", "controlnet"):  # last, as this takes the host a while
        _report_modelled(name, place, counts, report)


def _by_hand(training: OnPaper, place: Place, count: int) -> dict[str, float]:
    """Seconds of the encoders alone, and of the whole step."""
    module, batch = training.module, training.batch(count)
    tokens = torch.ones(count, 77, dtype=torch.long, device=place.device)

    def encode() -> None:
        with torch.no_grad():
            module.vae.encode(batch["image"])
            module.text_encoder(tokens)

    def step() -> None:
        training.step(module, batch).backward()

    frozen_s, step_s = place.seconds(encode), place.seconds(step)
    share = frozen_s / (step_s - frozen_s)
    return {"by_hand_frozen_s": frozen_s, "by_hand_step_s": step_s, "by_hand_frozen_share": share}


def _measured(
    training: OnPaper, place: Place, counts: tuple[int, ...], budget_s: float
) -> ModelProfile:
    """Times the layers of a model at some numbers of samples."""
    graph = probe(training.module, training.step, training.batch(2))
    return measure_profile(
        LayerTimer(
            training.module,
            training.step,
            training.batch(max(max(counts), 2)),
            graph,
            device=place.device,
            sample_counts=counts,
            repeats=5 if place.on_gpu else 1,
            budget_s=budget_s,
            finds_results=False,
        )
    )


def _report_modelled(name: str, place: Place, counts: tuple[int, ...], report: Report) -> None:
    """The same figures as they are modelled for this GPU, if it is known."""
    if place.modelled_as is None:
        return
    dtype = str(place.dtype).removeprefix("torch.")
    profile = ModelOnPaper(name, place.modelled_as, dtype).profile(counts)
    for count, row in _shares(profile, counts).items():
        report(model=name, samples=count, modelled_as=place.modelled_as, **row)


def _shares(profile: ModelProfile, counts: tuple[int, ...]) -> dict[int, dict[str, Any]]:
    """By the numbers of samples that were timed: seconds of encoders and of the trained path, and their ratio."""
    timed = {count for count, _ in profile.layers[0].forward_s.points}
    rows = {}
    for count in timed.intersection(counts):
        encoders = {
            encoder.name: sum(layer.forward_s.at(count) for layer in encoder.layers)
            for encoder in profile.encoders
        }
        forward_s = sum(layer.forward_s.at(count) for layer in profile.layers)
        backward_s = sum(layer.backward_s.at(count) for layer in profile.layers)
        share = sum(encoders.values()) / (forward_s + backward_s)
        times = {"forward_s": forward_s, "backward_s": backward_s, "encoders_s": encoders}
        rows[count] = {"frozen_share": share, **times}
    return dict(sorted(rows.items()))


def layer_profile(name: str, place: Place, report: Report) -> None:
    """The layers of a model at its real size, beside what is modelled for this GPU.

    One that does not fit with its gradients is timed layer by layer.
    """
    counts = (1, 2)
    training = OnPaper(name, place.dtype, sized(name, not place.on_gpu), device=place.device)
    weights = sum(p.numel() * p.element_size() for p in training.module.parameters())
    report(model=name, weight_bytes=weights, built_peak_bytes=place.peak_bytes())
    profile = _measured(training, place, counts, budget_s=15.0)
    for count, row in _shares(profile, counts).items():
        report(model=name, samples=count, **row)
    report(model=name, peak_bytes=place.peak_bytes())
    for backbone in profile.backbones:
        layers = [
            [x.name, *(round(1e6 * s.at(1)) for s in (x.forward_s, x.backward_s))]
            for x in backbone.layers
        ]
        report(model=name, forward_and_backward_us=layers)
    _report_modelled(name, place, counts, report)


def streaming(place: Place, report: Report) -> None:
    """Frozen layers that are copied from the host for each run, beside layers that stay."""
    width, tokens, num_layers = (4096, 4096, 24) if place.on_gpu else (64, 16, 4)
    for mode in ("none", "all"):
        torch.manual_seed(0)
        module = AdaptedLayers(width, num_layers)
        data = DataLoader(torch.randn(20, tokens, width), 1)
        strategy = DiffPipeStrategy(
            num_stages=1, num_microbatches=1, checkpointing="all", streaming=mode
        )
        place.peak_bytes()
        step_s = _step_s(module, data, strategy, 20, place, precision="bf16-mixed")
        weight_bytes = sum(p.nbytes for p in module.parameters() if not p.requires_grad)
        report(
            streaming=mode,
            step_s=step_s,
            planned_s=module.planned_s,
            weight_bytes=weight_bytes,
            peak_bytes=place.peak_bytes(),
        )


class AdaptedLayers(L.LightningModule):
    """Frozen linear layers in bfloat16, each with a trained scale."""

    planned_s = 0.0

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(AdaptedLayer(width) for _ in range(num_layers))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The mean square of what comes out."""
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def on_train_end(self) -> None:
        """Keeps what was planned."""
        pipeline = self.trainer.strategy.pipeline  # type: ignore[attr-defined]
        self.planned_s = pipeline.plan.planned.iteration_s

    def configure_optimizers(self) -> Any:
        """Plain descent."""
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), 1e-3)


class AdaptedLayer(nn.Module):
    """`x + scale * tanh(W x)`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False, dtype=torch.bfloat16)
        self.linear.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.linear(x.to(self.linear.weight.dtype)).tanh()


@torch.inference_mode()
def patches(place: Place, report: Report) -> None:
    """What a step in patches costs one process, beside a plain one, at two resolutions."""
    resolutions = (1024, 2048) if place.on_gpu else (64, 128)
    for name in ("pixart", "sd3"):
        config, model = denoiser(name, place)
        for resolution in resolutions:
            request = request_of(config, model, place, resolution)
            plain_s, _ = step_of(PipeFusion(model, num_patches=1), request)
            place.peak_bytes()
            for num_patches in (2, 4, 8) if place.on_gpu else (2, 4):
                sampler = PipeFusion(model, num_patches=num_patches)
                patched_s, _ = step_of(sampler, request)
                report(
                    model=name,
                    resolution=resolution,
                    num_patches=num_patches,
                    plain_s=plain_s,
                    patched_s=patched_s,
                    ratio=patched_s / plain_s,
                    peak_bytes=place.peak_bytes(),
                )
                give_back(place.device)


ALL: dict[str, Callable[[Place, Report], None]] = {
    part.__name__: part
    for part in (environment, tests, gloo, nccl, parity, overhead, frozen_share, streaming, patches)
} | {name: partial(layer_profile, name) for name in ("sdxl", "sd3", "flux")}
ALL |= sampling_parts.ALL
"""By name."""
