"""What only a GPU can show: `pytest -m gpu`. One is enough; two ranks share it, over gloo."""

import math
import os
from collections import Counter

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.nn.functional import scaled_dot_product_attention

from lightning_diffpipe import Predictor
from lightning_diffpipe.clock import clock_for
from lightning_diffpipe.comm.waiting import SideStreams
from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.placement import is_placeholder, stored_value
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.sampling.pipefusion.sequence_attention import attention_part, merged
from tests import gpu_like
from tests.distributed.scenarios import (
    Settings,
    assert_equal_runs,
    build,
    fit,
    quick_strategy,
    quiet_trainer,
    reference,
    weights_of,
)
from tests.distributed.stored import LINUX, Opened
from tests.distributed.tiny import Adapted, Images, TinyDiffusion
from tests.predictor import tiny_pipelines
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DEVICE = torch.device("cuda", 0)
TRAINER = {"accelerator": "gpu", "max_steps": 3, "max_epochs": -1}


def settings(trainer=None, **strategy):
    return Settings(
        trainer={**TRAINER, **(trainer or {})}, data={"batch_size": 4}, strategy=strategy
    )


def fit_here(rank, chosen, num_ranks):
    """Each rank takes the GPU as the only one of a host of its own."""
    os.environ.update(NODE_RANK=str(rank), LOCAL_RANK="0")
    chosen.trainer["num_nodes"] = num_ranks
    return fit(rank, chosen, 1)


def fit_together(num_ranks, chosen):
    chosen.strategy["process_group_backend"] = "gloo"
    return run_ranks(fit_here, num_ranks, chosen, num_ranks)


def test_one_rank_over_nccl_equals_one_process():
    expected = reference(settings(), 2)
    got = fit(0, settings(num_stages=1, num_microbatches=2), 1)
    assert_equal_runs([got], expected, 1e-10)


@pytest.mark.parametrize(
    "strategy",
    [
        {"num_stages": 2},
        {"num_stages": 4, "schedule": "interleaved"},
        {"num_stages": 2, "schedule": "zero_bubble"},
        {"num_stages": 1, "num_replicas": 2},  # sums of gradients, in a thread that waits
        {"num_stages": 2, "optimizer_offload": "all"},  # through pinned memory, in two streams
        {"num_stages": 1, "num_replicas": 2, "shard_optimizer": True},
    ],
)
def test_two_ranks_on_one_gpu_equal_one_process(strategy):
    expected = reference(settings(), 2)
    outcomes = fit_together(2, settings(num_microbatches=2, **strategy))
    assert_equal_runs(outcomes, expected, 1e-10)


def test_streamed_weights_change_nothing():
    """They are copied from pinned memory by a stream of their own."""
    chosen = settings(num_microbatches=2, num_stages=2, streaming="all")
    chosen.module_class = Adapted
    outcomes = fit_together(2, chosen)
    assert outcomes[0].plan.streamed
    assert_equal_runs(outcomes, reference(chosen, 2), 1e-10)


def test_filled_bubbles_change_no_bit():
    """Frozen layers run in a thread that follows the stream."""
    found = []
    for filling in ("none", "shares"):
        chosen = settings(num_stages=2, num_microbatches=2, filling=filling)
        chosen.module = {"dropout": 0.2}
        found.append(fit_together(2, chosen))
    for without, filled in zip(*found, strict=True):
        assert filled.losses == without.losses
        assert all(torch.equal(filled.weights[n], value) for n, value in without.weights.items())


def test_layers_are_timed_by_events():
    chosen = settings({"max_steps": 1}, num_stages=2, num_microbatches=2, profile="measure")
    outcome = fit_together(2, chosen)[0]
    layers = outcome.basis.profile.backbones[0].layers
    assert all(layer.forward_s.at(2) > 0 for layer in layers)
    assert sum(layer.backward_s.at(2) for layer in layers) > 0


def test_random_numbers_of_the_device_do_not_depend_on_the_stages():
    found = []
    for num_ranks in (1, 2):
        chosen = settings(num_stages=num_ranks, num_microbatches=2)
        chosen.module = {"dropout": 0.3}
        found.append(fit_together(num_ranks, chosen)[0].losses)
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_generators_of_the_device_are_put_back():
    torch.cuda.init()
    before = torch.cuda.get_rng_state(DEVICE)
    with rng.preserved(host=False):
        rng.seed_all(5, host=False)
        first = torch.rand(3, device=DEVICE)
    assert torch.equal(torch.cuda.get_rng_state(DEVICE), before)
    with rng.preserved(host=False):
        rng.seed_all(5, host=False)
        assert torch.equal(torch.rand(3, device=DEVICE), first)


def test_half_precision_is_near_single():
    losses = {}
    for precision in ("32-true", "bf16-mixed"):
        chosen = settings({"precision": precision}, num_stages=2, num_microbatches=2)
        chosen.strategy["verify"] = True
        outcomes = run_ranks(fit_single, 2, chosen)
        losses[precision] = outcomes[0]
    assert losses["bf16-mixed"] == pytest.approx(losses["32-true"], rel=0.05)


def test_a_step_of_one_sample_is_probed_without_values():
    """Which draws one number on the device."""
    chosen = settings()
    module, data = build(chosen).to(DEVICE), chosen.data_class(batch_size=1)
    batch = {name: x.to(DEVICE) for name, x in next(iter(data.train_dataloader())).items()}
    assert probe(module, lambda model, sample: model.loss(sample), batch, mode="fake").trained


class Asserting(TinyDiffusion):
    """Relies on the types of autocast: of Lightning's, and of its own in it."""

    def denoise(self, noisy, t, text):
        out = super().denoise(noisy, t, text)
        assert self.blocks[0].mix(out).dtype == torch.bfloat16
        with torch.autocast("cuda", enabled=False):
            assert self.blocks[0].mix(out.float()).dtype == torch.float32
        assert self.blocks[0].mix(out).dtype == torch.bfloat16
        return out


def test_a_step_sees_the_types_of_autocast_wherever_it_is_probed():
    chosen = settings({"precision": "bf16-mixed"}, num_stages=2, num_microbatches=2)
    chosen.module_class = Asserting
    assert run_ranks(fit_single, 2, chosen)[0]


def fit_single(rank, chosen):
    os.environ.update(NODE_RANK=str(rank), LOCAL_RANK="0")
    chosen.strategy["process_group_backend"] = "gloo"
    torch.manual_seed(3)
    module = chosen.module_class()
    losses = []
    options = {**chosen.trainer, "num_nodes": 2, "devices": 1}
    trainer = quiet_trainer(strategy=quick_strategy(**chosen.strategy), **options)
    module.on_train_batch_end = lambda outputs, *_: losses.append(float(outputs["loss"]))
    trainer.fit(module, datamodule=chosen.data_class(batch_size=4, dtype=torch.float32))
    return losses


def test_a_run_goes_on_from_a_checkpoint(tmp_path):
    chosen = settings()
    chosen.data["size"] = 8  # two batches in an epoch

    def trained(steps, ckpt_path=None, callbacks=()):
        module = build(chosen)
        strategy = quick_strategy(num_stages=1, num_microbatches=2)
        options = {**TRAINER, "max_steps": steps, "callbacks": [*callbacks]}
        options["enable_checkpointing"] = bool(callbacks)
        trainer = quiet_trainer(devices=1, strategy=strategy, **options)
        trainer.fit(module, datamodule=chosen.data_class(**chosen.data), ckpt_path=ckpt_path)
        return weights_of(module)

    saves = ModelCheckpoint(tmp_path, save_on_train_epoch_end=True, save_top_k=-1)
    whole = trained(4, callbacks=[saves])
    (path,) = tmp_path.glob("*step=2.ckpt")
    read = torch.load(path, weights_only=False)
    assert all(value.device.type == "cpu" for value in read["state_dict"].values())
    resumed = trained(4, ckpt_path=str(path))
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


@pytest.mark.skipif(gpu_like.ACCELERATOR != "gpu", reason="only GPUs of tests/gpu_like count")
@pytest.mark.parametrize("strategy", [{}, {"checkpointing": "all"}, {"optimizer_offload": "all"}])
def test_a_step_waits_for_the_device_no_more_often_than_that_of_plain_lightning(strategy):
    def waits_of_a_step(run, *arguments):
        counts = []
        for steps in (2, 6):
            gpu_like.waits()
            run(
                settings({"max_steps": steps}, num_microbatches=1, num_stages=1, **strategy),
                *arguments,
            )
            counts.append(Counter(gpu_like.waits()))
        return {name: (count - counts[0][name]) / 4 for name, count in counts[1].items()}

    def fit_one(chosen):
        return fit(0, chosen, 1)

    plain, ours = waits_of_a_step(reference, 1), waits_of_a_step(fit_one)
    assert plain["copy to the host"] > 0
    for name in ours.keys() - {"copy from memory that is not pinned"}:  # which waits for no kernel
        assert ours[name] < plain.get(name, 0) + 0.5, name  # not in every step


def fit_and_evaluate(rank, chosen, num_ranks):
    """Returns whether frozen weights are mapped from their files after training, and after validation."""
    os.environ.update(NODE_RANK=str(rank), LOCAL_RANK="0")
    torch.manual_seed(3)
    module, data = chosen.module_class(**chosen.module), chosen.data_class(4)
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    named, found = dict(module.named_parameters()), []
    mapped = [name for name in frozen if stored_value(named[name]) is not None]
    trainer = quiet_trainer(
        devices=1, num_nodes=num_ranks, strategy=quick_strategy(**chosen.strategy), **chosen.trainer
    )
    for run in (trainer.fit, trainer.validate):
        run(module, data.train_dataloader())
        named = dict(module.named_parameters())
        found.append([name for name in mapped if stored_value(named[name]) is None])
    return mapped, *found


def adapters_of_flux(trainer, num_ranks, tmp_path, dtype=torch.float32):
    """Settings of a run on gloo that trains adapters of a pipeline of a type."""
    folder = str(tmp_path / "flux")
    tiny_pipelines.build("flux", tmp_path / "parts").to(dtype).save_pretrained(folder)
    chosen = settings(
        trainer, num_stages=num_ranks, num_microbatches=2, process_group_backend="gloo"
    )
    chosen.module_class, chosen.data_class = Opened, Images
    chosen.module = {"folder": folder, "lora": True}
    return chosen


@LINUX
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_frozen_weights_come_back_to_their_files(num_ranks, tmp_path):
    """Encoders, which all ranks hold, and stages."""
    trainer = {"precision": "bf16-mixed", "max_steps": 1}
    chosen = adapters_of_flux(trainer, num_ranks, tmp_path, torch.bfloat16)
    for mapped, *copied in run_ranks(fit_and_evaluate, num_ranks, chosen, num_ranks):
        assert {name.partition(".")[0] for name in mapped} > {"transformer", "text_encoder"}
        assert copied == [[], []]


class Teacher(Callback):
    """Writes frozen weights through `.data`, which counts no version: in place, and by another tensor."""

    def __init__(self, module):
        frozen = {
            n.partition(".")[0]: n for n, p in module.named_parameters() if not p.requires_grad
        }
        self.names = frozen["text_encoder"], frozen["transformer"]

    def on_train_batch_end(self, trainer, module, *_):
        in_place, replaced = map(module.get_parameter, self.names)
        in_place.data.add_(1)
        if not is_placeholder(replaced):
            replaced.data = replaced.data + 1


def fit_and_teach(rank, chosen, num_ranks):
    """Returns by how much the weights that are written have grown when training has ended."""
    os.environ.update(NODE_RANK=str(rank), LOCAL_RANK="0")
    module, data = chosen.module_class(**chosen.module), chosen.data_class(4)
    teacher = Teacher(module)
    before = [module.get_parameter(name).clone() for name in teacher.names]
    options = {"strategy": quick_strategy(**chosen.strategy), "callbacks": [teacher]}
    trainer = quiet_trainer(devices=1, num_nodes=num_ranks, **options, **chosen.trainer)
    trainer.fit(module, data.train_dataloader())
    after = map(module.get_parameter, teacher.names)
    return [float((now - x).mean()) for now, x in zip(after, before, strict=True)]


@LINUX
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_frozen_weights_that_were_written_past_autograd_stay_written(num_ranks, tmp_path):
    chosen = adapters_of_flux({"max_steps": 5}, num_ranks, tmp_path)
    for grown in run_ranks(fit_and_teach, num_ranks, chosen, num_ranks):
        assert grown == pytest.approx([5, 5], abs=1e-3)


class ResetPeak(Callback):
    """Leaves out what timing layers and copies has taken before."""

    def on_train_start(self, *_):
        torch.cuda.reset_peak_memory_stats(DEVICE)


def test_memory_is_what_was_planned():
    """Weights, gradients, Adam's moments and activations; the rest is held back, see `memory_bytes`."""
    torch.cuda.empty_cache()
    chosen = settings(num_stages=1, num_microbatches=2, profile="measure")
    chosen.module = {"num_blocks": 12}
    before = torch.cuda.memory_allocated(DEVICE)
    chosen.trainer["callbacks"] = [ResetPeak()]
    outcome = fit(0, chosen, 1)
    peak = torch.cuda.max_memory_allocated(DEVICE) - before
    (planned,) = outcome.plan.planned.peak_memory_bytes
    assert 0.5 * planned < peak + 2**20
    assert peak < 1.5 * planned + 2**23


def test_a_predictor_draws_what_diffusers_draws(tmp_path):
    torch.manual_seed(0)
    tiny_pipelines.stable_diffusion(tmp_path).save_pretrained(tmp_path / "model")
    options = {"num_inference_steps": 3, "guidance_scale": 4.0, "height": 32, "width": 32}
    from diffusers import StableDiffusionPipeline

    pipe = StableDiffusionPipeline.from_pretrained(tmp_path / "model", safety_checker=None)
    pipe.to(DEVICE).set_progress_bar_config(disable=True)
    draw = torch.Generator().manual_seed(3)
    expected = pipe(["ab"], generator=draw, output_type="pil", **options).images[0]
    predictor = Predictor.from_pretrained(tmp_path / "model", method="single", device=DEVICE)
    (got,) = predictor(["ab"], seed=3, **options)
    pairs = zip(got.tobytes(), expected.tobytes(), strict=True)
    assert max(abs(a - b) for a, b in pairs) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [40, 64, 36])
def test_kernels_of_attention_give_their_normaliser(width, dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, width, device=DEVICE).to(dtype) for n in (96, 160, 160))
    total = None
    for rows in (slice(0, 70), slice(70, 160)):
        part = attention_part(q, k[:, :, rows], v[:, :, rows], None, width**-0.5)
        total = merged(total, part)
    wide = [x.double() for x in (q, k, v)]
    scores = wide[0] @ wide[1].transpose(-2, -1) * width**-0.5
    expected = scaled_dot_product_attention(*wide)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-3
    assert (total[0].double() - expected).abs().max() < tolerance
    norms = scores.logsumexp(-1, keepdim=True)
    assert (total[1].double() - norms).abs().max() < tolerance


takes_time = pytest.mark.skipif(
    not hasattr(torch._C, "_cuda_sleep"), reason="GPUs of tests/gpu_like do all at once"
)


@takes_time
def test_events_are_past_when_the_device_has_come_by():
    clock = clock_for(DEVICE)
    torch.zeros(1, device=DEVICE)
    clock.settle()
    start = clock.stamp()
    torch.cuda._sleep(200_000_000)  # some 0.1 s
    stop = clock.stamp()
    assert not clock.is_past(stop)
    clock.wait_for(stop)
    assert clock.is_past(stop)
    assert 0.02 < clock.seconds(start, stop) < 5


@takes_time
def test_what_begins_beside_waits_for_its_memory_only():
    streams, first = SideStreams(), torch.zeros(4, device=DEVICE)
    torch.cuda.synchronize()
    buffer = torch.empty(4, device=DEVICE)
    memory = streams.memory_of(buffer)
    torch.cuda._sleep(400_000_000)
    behind = torch.cuda.Event()
    behind.record()
    with streams.receiving(1, buffer, memory):
        buffer.copy_(first + 1)
        done = torch.cuda.Event()
        done.record()
    done.synchronize()
    assert not behind.query()
    behind.synchronize()
    assert math.isclose(float(buffer.sum()), 4.0)
