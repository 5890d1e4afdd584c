"""Which models fit on which cards, and how long a step takes, by `diffpipe plan`: the table of docs/memory.md.

    python benchmarks/memory/plans.py [--models flux qwen_image] > rows.md

Cards are planned with what a plan may use of them: 92 % of their memory, and links as PCIe 4 gives them between
consumer cards, and from host memory (12 GB/s), or NVLink and PCIe 5 (50 GB/s).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

from lightning_diffpipe.errors import PlanError
from lightning_diffpipe.modules.on_paper import ModelOnPaper
from lightning_diffpipe.planning import shortage
from lightning_diffpipe.planning.cluster import Cluster, Link
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.planning.profile import ModelProfile
from lightning_diffpipe.planning.search import find_plan

MODELS = {
    "sdxl": "SDXL, 1024 pixels",
    "sd35": "SD3.5 large, 1024 pixels",
    "flux": "Flux.1-dev, 1024 pixels",
    "flux2_klein": "Flux.2 klein 4B, 1024 pixels",
    "flux2": "Flux.2-dev, 1024 pixels",
    "qwen_image": "Qwen-Image, 1024 pixels",
    "wan": "Wan 2.1 1.3B, 33 frames of 512 x 512",
    "wan14b": "Wan 2.1 14B, 81 frames of 480 x 832",
    "wan22_5b": "Wan 2.2 5B, 121 frames of 704 x 1280",
    "wan22": "Wan 2.2 A14B, both experts, 81 frames of 480 x 832",
}
IN_4_BITS = ("flux", "qwen_image", "wan14b", "wan22")
"""Models whose adapters are planned over weights in 4 bits, too, on the smaller cards."""
PCIE, NVLINK = Link(12e9, 30e-6), Link(300e9, 10e-6)
TRAINED = {
    "adapters": (16, None),
    "adapters, 4 bits": (16, "nf4"),
    "all weights": (None, None),
}
"""What is trained: rank of adapters, quantization of the base."""
HOST_BYTES = 60_000_000_000
"""Memory of a host for weights that are streamed from there, and for optimizer states: of 64 GB."""


@dataclass(frozen=True)
class Cards:
    """Cards of one host, and the samples of a step on them."""

    number: int
    gigabytes: int
    device: str
    samples: int
    link: Link = PCIE

    @property
    def cluster(self) -> Cluster:
        """The cards as ranks."""
        memory_bytes = round(0.92 * self.gigabytes * 2**30)
        link, rate = self.link, 50e9 if self.link is NVLINK else 12e9
        return Cluster(
            self.number,
            p2p=link,
            all_reduce=link,
            memory_bytes=memory_bytes,
            host_bytes_per_s=rate,
            host_memory_bytes=HOST_BYTES,
        )

    def __str__(self) -> str:
        return f"{self.number} x {self.gigabytes} GB"


CARDS = (
    Cards(2, 12, "rtx4090", 4),
    Cards(2, 24, "rtx4090", 4),
    Cards(4, 24, "rtx4090", 4),
    Cards(2, 32, "rtx4090", 4),
    Cards(8, 80, "h100", 16, NVLINK),
)


def cell(profile: ModelProfile, cards: Cards) -> str:
    """Returns what is planned: the step, stages and what is done for memory; else what would fit."""
    patient = mock.patch.multiple(shortage, REMEDY_S=math.inf, REMEDIES_S=math.inf)
    try:
        with patient:  # the same on a busy machine
            plan = find_plan(profile, cards.cluster, PlanOptions(cards.samples, filling="auto"))
    except PlanError as error:
        _, _, remedy = str(error).partition("too many; ")
        return f"no: {remedy.removesuffix(' would fit')}"
    return described(plan)


def described(plan: PipelinePlan) -> str:
    """Returns a plan in a few words."""
    words = [f"{plan.planned.iteration_s:.3g} s"]
    shape = f"{plan.num_pipelines} x {plan.num_stages} stages" if plan.num_stages > 1 else "copies"
    words.append(shape.removeprefix("1 x "))
    if plan.recomputed:
        words.append(f"{len(plan.recomputed) / plan.num_layers:.0%} recomputed")
    if plan.streamed:
        words.append(f"{sum(plan.planned.streamed_bytes) / 1e9:.0f} GB streamed")
    if states := sum(plan.planned.offloaded_bytes) * plan.num_pipelines:
        words.append(f"{states / 1e9:.0f} GB of states on the host")
    if plan.options.encoding_ranks not in ("auto", plan.ranks_per_pipeline):
        words.append(f"encoders on {plan.options.encoding_ranks} of {plan.ranks_per_pipeline}")
    return ", ".join(words)


def rows(models: list[str]) -> Iterator[str]:
    """Yields the lines of the table."""
    yield f"| model | trained | {' | '.join(map(str, CARDS))} |"
    yield "|---|---|" + "---|" * len(CARDS)
    for name in models:
        for trained, (rank, quantization) in TRAINED.items():
            if quantization and name not in IN_4_BITS:
                continue
            wanted = [cards for cards in CARDS if cards.link is PCIE or not quantization]
            profiles = {
                device: ModelOnPaper(
                    name, device, lora_rank=rank, quantization=quantization
                ).profile()
                for device in dict.fromkeys(cards.device for cards in wanted)
            }
            cells = (cell(profiles[x.device], x) if x in wanted else "-" for x in CARDS)
            yield f"| {MODELS[name]} | {trained} | {' | '.join(cells)} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=[*MODELS])
    for line in rows(parser.parse_args().models):
        print(line, flush=True)
