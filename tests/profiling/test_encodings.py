"""What frozen layers hand over, as profiled, against what ranks of a real pipeline hold."""

from dataclasses import replace

import pytest
import torch

from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.cost import CostModel, LayerRun
from lightning_diffpipe.planning.filling import encode_parts, group_size_of
from lightning_diffpipe.planning.memory import frozen_loads
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.profile import ModelProfile
from lightning_diffpipe.planning.search import find_plan
from lightning_diffpipe.profiling.layer_costs import encodings, estimate_profile, found_by_running
from lightning_diffpipe.profiling.measure import profile

from ..distributed.tiny import Samples, TinyDiffusion
from ..runtime.loopback import Loopback, run_together
from .toys import step, toy

SIZES = (3, 3, 2, 2)


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    module = TinyDiffusion(tied=True).double()
    samples = Samples(sum(SIZES))
    batch = {"image": samples.images, "text": samples.text}
    small = {key: value[:2] for key, value in batch.items()}
    return module, batch, small, probe(module, step, small)


@pytest.mark.slow
def test_ranks_hold_what_the_plan_counts(tiny):
    """Three ranks in one process: bytes of joined encodings, and of those a rank has made.

    Exact, as this denoiser begins with a layer. Where noisy latents are themselves the residual stream,
    every stage is counted as if it read the encodings they are made of.
    """
    module, batch, small, graph = tiny
    known = encodings(module, step, small, graph)
    profile = estimate_profile(module, graph)
    assert {encoder.name for encoder in profile.encoders} == known.keys()
    pipeline = Loopback(module, step, batch, num_stages=3, num_microbatches=4, fine=graph)
    try:
        laid_out = [rank.engine.layout.lay_out(batch, 0) for rank in pipeline.ranks]
        made = [bytes_made(s.frozen) for s in laid_out]
        run_together(
            [rank.engine.executor for rank in pipeline.ranks],
            *([getattr(s, name) for s in laid_out] for name in ("program", "works", "frozen")),
        )
        reads = [[read for work in s.works for read in work.frozen.values()] for s in laid_out]
        held = [num_bytes(tensor for read in rank for tensor in read.values()) for rank in reads]
    finally:
        pipeline.close()
    model = CostModel(with_results(profile, known), Cluster(3))
    size = len(graph.path)
    runs = [LayerRun(size * stage // 3, size * (stage + 1) // 3) for stage in range(3)]
    group = group_size_of(SIZES, 3)
    parts = encode_parts(SIZES, 3, group_size=group)
    loads = frozen_loads(pipeline.placement, SIZES, parts, group, fills=False)
    assert held == [sum(SIZES) * model.read_bytes_per_sample(run) for run in runs]
    assert made == [load.made * model.encoding_bytes_per_sample for load in loads]


def with_results(profile, known):
    encoders = (replace(e, results=known[e.name].results) for e in profile.encoders)
    return replace(profile, encoders=tuple(encoders))


def num_bytes(tensors):
    """Of their storages: a part's results may be views of a whole microbatch's."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def bytes_made(frozen):
    for part in frozen.own_parts:
        frozen.encode(part.index)
    return num_bytes(t for results in frozen._results.values() for t in results.values())


def test_what_follows_from_the_sample_alone_can_be_stored(tiny):
    """The encoder's moments do; a frozen layer with dropout does not, nor one that reads noise."""
    module, _, small, graph = tiny
    found = encodings(module, step, small, graph, found_by_running(module, step, small))
    assert found["frozen encoder"].cacheable
    # Moments of 5 positions and 2 * 12 channels, in double precision.
    assert found["frozen encoder"].stored_bytes_per_sample == 5 * 24 * 8
    assert not found["frozen text"].cacheable  # quicker looked up than read
    random, _, batch, drawn = toy()
    batch = {key: value[:2] for key, value in batch.items()}
    dropped = encodings(random, step, batch, drawn, found_by_running(random, step, batch))
    assert not dropped["frozen encoder"].cacheable


class Locked(torch.nn.Module):
    """A frozen layer after the noise, as in the locked half of a ControlNet."""

    def __init__(self):
        super().__init__()
        self.vae, self.locked = (torch.nn.Linear(8, 8).requires_grad_(False) for _ in range(2))
        self.trained = torch.nn.Linear(8, 8)

    def forward(self, x):
        latent = self.vae(x)
        noisy = latent + torch.randn_like(latent)
        return (self.trained(noisy) + self.locked(noisy) - latent).square().mean()


def test_what_follows_noise_cannot(monkeypatch):
    monkeypatch.setattr("lightning_diffpipe.profiling.layer_costs.MIN_FLOPS_PER_BYTE", 0)
    module, batch, call = Locked(), torch.randn(2, 8), lambda module, batch: module(batch)
    graph = probe(module, call, batch, max_share=0.1)
    found = encodings(module, call, batch, graph, found_by_running(module, call, batch))
    assert found["frozen vae"].cacheable
    assert not found["frozen locked"].cacheable
    assert found["frozen locked"].splittable
    assert found["frozen locked"].stored_bytes_per_sample == 0


class Mixing(Locked):
    """The locked layer is told the mean over samples."""

    def __init__(self):
        super().__init__()
        self.vae = torch.nn.Sequential(self.vae, OverSamples())


class OverSamples(torch.nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def test_a_measured_profile_tells_which_encoders_are_not_split():
    """Plans made from it keep microbatches whole."""
    module, batch = Mixing().double(), torch.randn(4, 8, dtype=torch.float64)
    measured = profile(module, batch, step=lambda module, batch: module(batch), budget_s=0.1)
    known = ModelProfile.from_json(measured.to_json())
    assert known == measured
    assert {e.name: e.splittable for e in known.encoders}["frozen vae"] is False
    plan = find_plan(
        known, Cluster(2), PlanOptions(4, num_stages=1, num_replicas=2, num_microbatches=2)
    )
    assert not plan.options.frozen_splittable
    assert plan.options.frozen_group_size == 2
