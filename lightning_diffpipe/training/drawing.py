"""Samples drawn in training by PipeFusion, on the stages that are there.

    all ranks     prompts -> text encoders -> start noise     in lock step, layers answered by who has them
    each rank     denoising steps through its own blocks      sampling/pipefusion/
    all ranks     latents -> autoencoder -> samples           in lock step

Blocks run where their weights lie in training. What lies between blocks, such as embeddings and the last
projection, runs on every rank under PipeFusion: ranks that lack it are sent it for the time of a drawing.

With one patch the samples follow each other through the stages in shares, and nothing is approximated; with more,
patches of all samples do.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_diffpipe.comm.links import ProcessLinks
from lightning_diffpipe.errors import ConfigurationError, GraphError, PartitionError
from lightning_diffpipe.graph.placement import is_placeholder, lent_to_placeholders
from lightning_diffpipe.graph.rng import derived_seed, isolated_random_numbers
from lightning_diffpipe.runtime.ownership import spread
from lightning_diffpipe.sampling.call import Call
from lightning_diffpipe.sampling.loop import PipelineCall
from lightning_diffpipe.sampling.pipefusion import PipeFusion, PipeFusionSetting
from lightning_diffpipe.sampling.pipefusion.stages import resident_parameters
from lightning_diffpipe.sampling.schedulers import random_states
from lightning_diffpipe.sampling.source import drawn_by
from lightning_diffpipe.sampling.tracing.layout import Layout
from lightning_diffpipe.training.pipeline import Pipeline

_log = logging.getLogger(__name__)


class _RefusedError(Exception):
    """PipeFusion cannot run on these stages; on all ranks."""


def draw_on_stages(pipeline: Pipeline, call: PipelineCall, num_patches: int) -> Any:
    """Draws with all ranks of a pipeline; collective, inside `Pipeline.relayed`.

    Args:
        pipeline: In training.
        call: What is drawn.
        num_patches: Of PipeFusion, which begins with one synchronous step. With 1 all steps are synchronous.

    Returns:
        What the call returns; None, with the reason in the log, where PipeFusion cannot do it on these stages.
    """
    drawer = StageDrawer(pipeline, call.parts[call.denoisers[0]], num_patches)
    try:
        with isolated_random_numbers(derived_seed(pipeline.seed, "drawing")):
            return drawn_by(call, drawer.sample, type(call.pipeline).__name__)
    except _RefusedError as error:
        if pipeline.mesh.rank == 0:
            _log.info("samples are drawn layer by layer, not by PipeFusion: %s", error)
        return None


class StageDrawer:
    """Runs the denoising loop of one drawing.

    Args:
        pipeline: In training.
        denoiser: A part of its module.
        num_patches: See `draw_on_stages`.
    """

    def __init__(self, pipeline: Pipeline, denoiser: nn.Module, num_patches: int) -> None:
        self._pipeline, self._mesh, self._num_patches = pipeline, pipeline.mesh, num_patches
        self._denoiser = denoiser
        self._names = {p: name for name, p in pipeline.module.named_parameters()}

    def sample(self, call: Call) -> Tensor:
        """Returns final latents, on all ranks.

        Raises:
            _RefusedError: PipeFusion cannot run this call on these stages.
        """
        layout, mesh = self._mesh.layout, self._mesh
        pipelines = [layout.pipeline_ranks(p) for p in range(layout.num_pipelines)]
        links = ProcessLinks.connect(
            pipelines, mesh.device, mesh.backend, mesh.timeout_s, patience_s=mesh.patience_s
        )
        try:
            with self._pipeline.apart():
                latents = self._sampled(call, links)
        except _RefusedError:
            links.disconnect()
            raise
        except BaseException:
            links.abandon()
            raise
        links.disconnect()
        return latents

    def _sampled(self, call: Call, links: ProcessLinks) -> Tensor:
        # Training would save for its backward what modules compute once for all calls, such as tables.
        call = replace(call, random_states=random_states(links.device))
        request = replace(call.request(self._denoiser), infers=False)
        rows = len(request.latents) * request.branches_in_batch
        by_samples = {
            "warmup_steps": request.num_steps,
            "warmup_microbatches": min(links.num_ranks, rows),
        }
        sampler = PipeFusion(
            self._denoiser,
            links,
            num_patches=self._num_patches,
            split=self._positions,
            **(by_samples if self._num_patches == 1 else {}),
        )
        try:
            if len(call.phases) > 1:
                raise ConfigurationError("its denoisers take turns")
            call.refuse_steps("pipefusion")
            call.refuse_rows(1)
            setting = sampler.prepare(request)
        except (ConfigurationError, GraphError, PartitionError) as error:
            raise _RefusedError(str(error)) from error
        with self._everything_needed(setting):
            return sampler.sample(request, None, setting)

    def _positions(self, layout: Layout) -> tuple[int, ...]:
        """Returns where the stages of the training cut the blocks.

        Raises:
            PartitionError: They are no ranges of blocks, one for each rank, in order.
        """
        homes = []  # of each block, the ranks that have most of its weights
        for block in layout.block_names:
            weights = self._denoiser.get_submodule(block).parameters()
            sizes = {self._names[p]: p.numel() for p in weights}
            held = [
                sum(size for name, size in sizes.items() if name in resident)
                for resident in self._pipeline.residents
            ]
            homes.append([rank for rank, size in enumerate(held) if size == max(held)])
        # Replicas of a stage take a share of its blocks each; frozen blocks, which all have, go to the first rank.
        shared = list[int]()
        for home, blocks in itertools.groupby(homes):
            num = len(list(blocks))
            shared += [home[i * len(home) // num] for i in range(num)]
        first = [home[0] for home in homes]
        num_ranks = self._mesh.layout.ranks_per_pipeline
        for ranks in (shared, first):
            if ranks == sorted(ranks) and set(ranks) == set(range(num_ranks)):
                return tuple(ranks.index(rank) for rank in range(1, num_ranks))
        raise PartitionError(
            f"its blocks lie on ranks {first}, and PipeFusion needs a range of them on each of the {num_ranks} "
            "ranks, in order"
        )

    @contextlib.contextmanager
    def _everything_needed(self, setting: PipeFusionSetting) -> Iterator[None]:
        """A context in which this rank has all that it runs, its own blocks and what lies between blocks."""
        needed, own = list[set[str]](), dict(self._denoiser.named_parameters())
        for rank in range(self._mesh.layout.ranks_per_pipeline):
            names = resident_parameters(self._denoiser, setting.layout, setting.stages, rank)
            needed.append({self._names[own[name]] for name in names})
        residents = self._pipeline.residents
        missing = set[str]().union(*(n - held for n, held in zip(needed, residents, strict=True)))
        tensors = {n: p.detach() for p, n in self._names.items() if n in missing}
        owners = {name: self._pipeline.owners[name] for name in tensors}
        whole = spread(tensors, owners, self._mesh)
        here = needed[self._mesh.local_rank]
        absent = {p: whole[n] for p, n in self._names.items() if n in here and is_placeholder(p)}
        with lent_to_placeholders({p: v.to(p.device) for p, v in absent.items()}), torch.no_grad():
            yield
