"""Filled bubbles change when frozen layers run, and nothing else: not one bit of a loss or a weight.

Every test trains twice on the same layout, with `filling="none"` and with filled bubbles, on data and a
module that draw random numbers wherever users do: in the data set, in a batch hook, in the VAE's
posterior, in dropout. That both also equal one process is what `test_parity.py` shows, whose
pipelines fill too.
"""

import contextlib
import copy
import random
import re
import time
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder

from lightning_diffpipe import BubbleFilling, find_plan
from lightning_diffpipe.errors import ConfigurationError, PipelineTimeoutError, PlanError
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.profiling.layer_costs import estimate_profile
from lightning_diffpipe.runtime.bubbles import FrozenWork
from tests.distributed.scenarios import (
    Settings,
    build,
    check_parity,
    fit_module,
    make,
    on_ranks,
    weights_of,
)
from tests.distributed.tiny import WIDTH, Data, Encoder, Samples, TinyDiffusion
from tests.ranks import RankError, run_in_turn, run_ranks
from tests.rows import row

pytestmark = pytest.mark.distributed


class Augmented(TinyDiffusion):
    """Flips images at random on the device, after they were transferred."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if self.trainer.training:
            flip = torch.rand(len(batch["image"])) < 0.5
            batch["image"][flip] = batch["image"][flip].flip(-1)
        return batch


class MixesSamples(TinyDiffusion):
    """A frozen layer normalizes over the samples of a microbatch, so that none can be split off."""

    def loss(self, batch):
        image = batch["image"]
        return super().loss({**batch, "image": self.over_samples(image)})

    def __init__(self, **options):
        super().__init__(**options)
        self.over_samples = OverSamples()


class ComparesPairs(TinyDiffusion):
    """A frozen reference gets the latents of all samples, and then of all again, as for preferences."""

    def __init__(self, **options):
        super().__init__(**options)
        self.reference = Encoder().requires_grad_(False)
        self.back = torch.nn.Linear(WIDTH, 3).requires_grad_(False)

    def denoise(self, noisy, t, text):
        given = self.back(torch.cat([noisy, noisy.flip(1)])).transpose(1, 2)
        first, second = self.reference(given)[..., :WIDTH].chunk(2)
        return super().denoise(noisy, t, text) + first * second


class OverSamples(torch.nn.Module):
    """Subtracts the mean over samples; a frozen layer by its parameter, without which it would be glue."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, image):
        return self.scale * (image - image.mean(0, keepdim=True))


class WithCaptionDropout(Samples):
    """Drops captions with the global generator of `random`, as data sets do."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if random.random() < 0.3:
            sample["text"] = torch.zeros_like(sample["text"])
        return sample


class DropoutData(Data):
    """`Data` with caption dropout, shuffled."""

    def loader(self, size):
        return torch.utils.data.DataLoader(
            WithCaptionDropout(size, self.dtype), self.batch_size, shuffle=True
        )


class Resumable(torch.utils.data.DataLoader):
    """A loader that goes on, by its state, after the batches it had given of a pass."""

    given = goes_on_at = 0

    def __iter__(self):
        self.given, self.goes_on_at = self.goes_on_at, 0
        for indices in list(self.batch_sampler)[self.given :]:
            self.given += 1
            yield self.collate_fn([self.dataset[index] for index in indices])

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.goes_on_at = state["given"]


class ResumableData(Data):
    """`Data` that goes on in the middle of an epoch, shuffled."""

    def loader(self, size):
        return Resumable(Samples(size, self.dtype), self.batch_size, shuffle=True)


class Watch(L.Callback):
    """Notes losses, whether a step encoded its own batch, and how many batches it knew ahead."""

    def __init__(self):
        self.losses, self.up_front, self.ahead = [], [], []
        self.encodes = False

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.encodes, encode = False, FrozenWork.encode

        def recorded(
            frozen, index
        ):  # an instruction of the program: not in a bubble, nor left over from one
            self.encodes = True
            encode(frozen, index)

        self.patch = mock.patch.object(FrozenWork, "encode", recorded)
        self.patch.start()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.patch.stop()
        engine = trainer.strategy.pipeline.engine
        self.losses.append(float(outputs["loss"]))
        self.up_front.append(self.encodes)
        number = trainer.fit_loop.epoch_loop.total_batch_idx
        self.ahead.append(engine.num_prepared_after(number))


def train(rank, settings, world_size, callbacks=()):
    """One run of one rank."""
    torch.manual_seed(99)
    module, watch, data = build(settings), Watch(), DropoutData(**settings.data)
    options = {**settings.trainer, "callbacks": [watch, *callbacks]}
    fit_module(module, world_size, data, settings.strategy, **options)
    return watch.losses, weights_of(module), watch.up_front, watch.ahead


def compare(world_size, callbacks=(), module_class=Augmented, strategy=(), **settings):
    """Both runs; returns by step of the filled one: did a rank encode its own batch, how many were ahead."""
    runs = []
    for filling in ("none", "shares"):
        chosen = {"num_stages": 2, **dict(strategy), "filling": filling}
        run = Settings({"dropout": 0.1}, strategy=chosen, module_class=module_class, **settings)
        runs.append((run, world_size, callbacks if filling == "shares" else ()))
    without, filled_runs = run_in_turn(train, world_size, *runs)
    for unfilled, filled in zip(without, filled_runs, strict=True):
        assert unfilled[0] == filled[0], "a loss differs"
        assert all(torch.equal(unfilled[1][name], filled[1][name]) for name in unfilled[1])
        assert all(unfilled[2]) or not any(unfilled[2]), (
            "without filling every step encodes up front"
        )
        assert not any(unfilled[3])
    ahead = filled_runs[0][3]
    assert all(run[3] == ahead for run in filled_runs)
    up_front = [any(at_step) for at_step in zip(*(run[2] for run in filled_runs), strict=True)]
    return up_front, ahead


class Ages(Augmented):
    """Its frozen encoder changes after every batch, alike on all ranks."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            for parameter in self.encoder.parameters():
                parameter.mul_(0.5)


class FindsRate(Augmented):
    """Tries learning rates on three batches, and goes back to the weights it had."""

    def configure_callbacks(self):
        return [LearningRateFinder(num_training_steps=3, update_attr=False)]


class LossAware(Augmented):
    """Draws timesteps from a buffer that changes before every batch; a frozen layer embeds them."""

    def __init__(self, **options):
        super().__init__(**options)
        self.register_buffer("history", torch.ones(6))
        self.locked = torch.nn.Linear(1, 3).requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        self.history[batch_idx % 6] *= 20

    def loss(self, batch):
        t = torch.multinomial(self.history, len(batch["text"]), True)[:, None] / 6
        time = self.locked(t.to(self.dtype))[:, :, None]
        return super().loss({**batch, "image": batch["image"] + time}) * (1 + t).mean()


THREE_STEPS, FOUR_STEPS = ({"max_steps": n, "max_epochs": -1} for n in (3, 4))
RUNS = {
    # The first batch of an epoch encodes up front; after the last one nothing is known.
    "epochs, validation, accumulation": (
        {
            "trainer": {"max_epochs": 2, "accumulate_grad_batches": 2, "val_check_interval": 2},
            "data": {"size": 22},
        },
        [True, False, False, False] * 2,
        [2, 2, 1, 0] * 2,
    ),
    "limits on batches and steps": (
        {
            "trainer": {"max_steps": 5, "max_epochs": -1, "limit_train_batches": 3},
            "strategy": {"num_microbatches": 3, "schedule": "zero_bubble"},
        },
        [True, False, False, True, False],
        [2, 1, 0, 1, 0],
    ),
    # Two batches a step: the sixth batch is the last, and nothing after it is encoded.
    "a limit on steps of several batches": (
        {
            "trainer": {"max_steps": 3, "max_epochs": -1, "accumulate_grad_batches": 2},
            "data": {"size": 48},
        },
        [True] + [False] * 5,
        [2, 2, 2, 2, 1, 0],
    ),
    # Layers before waits, counted from measured times, instead of until the message is there; one batch ahead.
    "planned, with replicas": (
        {
            "trainer": FOUR_STEPS, "world_size": 3, "data": {"size": 32, "batch_size": 8},
            "strategy": {"num_replicas": (1, 2), "num_microbatches": 4},
            "callbacks": (BubbleFilling("planned", deterministic=True, lookahead_batches=1),),
        },
        [True, False, False, False],
        [1, 1, 1, 0],
    ),
    # History: batches two ahead were encoded with the weights of two steps before.
    "frozen weights that change": (
        {"module_class": Ages, "trainer": FOUR_STEPS}, [True] * 4, [2, 0, 0, 0],
    ),
    # History: only parameters were looked at, and frozen layers saw other timesteps than the loss.
    "buffers that feed frozen layers": (
        {"module_class": LossAware, "trainer": FOUR_STEPS}, [True] * 4, [2, 0, 0, 0],
    ),
    # History: weights that were put back counted as changed, and nothing ran ahead for the rest of the run.
    "a search for the learning rate": (
        {"module_class": FindsRate, "trainer": FOUR_STEPS}, [True, False, False, False], [2, 2, 1, 0],
    ),
}  # fmt: skip
"""Runs, whether each step encodes up front, and how many batches are ahead after it."""


@pytest.mark.parametrize("name", RUNS)
def test_what_runs_ahead(name, tmp_path):
    settings, up_front, ahead = RUNS[name]
    trainer = {**settings["trainer"], "default_root_dir": tmp_path}
    assert compare(**{"world_size": 2, **settings, "trainer": trainer}) == (up_front, ahead)


class Taught(TinyDiffusion):
    """Momentum teachers of the first block and of the last, as in consistency distillation; no caption dropout."""

    fetches = through_data = True

    def __init__(self, **options):
        super().__init__(**options)
        self.teachers = copy.deepcopy(self.blocks[:1] + self.blocks[-1:]).requires_grad_(False)

    def denoise(self, noisy, t, text):
        with torch.no_grad():
            goal = sum(teacher(noisy, self.text(text).mean(1)) for teacher in self.teachers)
        return super().denoise(noisy, t, text) - 0.3 * goal

    def on_train_batch_end(self, outputs, batch, batch_idx):
        whole_model = getattr(self.trainer.strategy, "whole_model", contextlib.nullcontext)
        means = list(self.teachers.parameters())
        weights = [*self.blocks[0].parameters(), *self.blocks[-1].parameters()]
        with whole_model() if self.fetches else contextlib.nullcontext(), torch.no_grad():
            if not self.through_data:
                torch._foreach_lerp_(means, weights, 0.3)
                return
            for mean, weight in zip(means, weights, strict=True):
                mean.data.mul_(0.7).add_(weight.data, alpha=0.3)


class TaughtInPlace(Taught):
    """Writes all teachers with one call, which counts up their versions."""

    through_data = False


class TaughtByPlaceholders(Taught):
    """Reads weights of other stages where nothing fetches them."""

    fetches = False


@pytest.mark.parametrize("module_class", [Taught, TaughtInPlace])
def test_teachers_follow_weights_of_all_stages(module_class):
    """History: written through `.data`, which counts no version, teachers of two steps before were asked."""
    check_parity(
        2, module_class=module_class, strategy={"num_stages": 2, "filling": "shares"}, trainer=FOUR_STEPS
    )  # fmt: skip


@pytest.mark.parametrize("filling", [row("none"), "shares"])
def test_teachers_that_would_follow_placeholders_end_the_run(filling):
    """History: the loss became NaN, and the message was to lower the learning rate."""
    with pytest.raises(RankError, match=r"ForeignLayerError: .* lives on stage .*whole_model"):
        on_ranks(2, module_class=TaughtByPlaceholders, strategy={"filling": filling})


def test_two_pipelines_with_interleaved_stages():
    strategy = {"num_stages": 4, "schedule": "interleaved", "data_parallel": 2}
    compare(4, strategy=strategy, trainer=THREE_STEPS, data={"batch_size": 4})


def test_layers_that_mix_samples_are_not_split():
    """They are found before anything is planned, and the run is as in one process."""
    strategy = {"num_stages": 2, "frozen_group_size": 1}
    settings = {"module_class": MixesSamples, "trainer": THREE_STEPS, "strategy": strategy}
    (outcome, _), _ = check_parity(2, **settings)
    options = outcome.plan.options
    assert (options.filling, options.frozen_splittable) == ("shares", False)
    # What a run writes as its profile; rank 0 does.
    assert outcome.basis.profile.whole_encoders
    up_front, _ = compare(2, **settings)
    assert up_front == [True, False, False]


def test_code_that_mixes_samples_between_frozen_layers():
    """History: a rank that had a part of a microbatch took zeros for the other half of a pair."""
    strategy = {"num_stages": 2, "frozen_group_size": 1}
    (outcome, _), _ = check_parity(2, module_class=ComparesPairs, strategy=strategy)
    assert not outcome.plan.options.frozen_splittable


def test_a_plan_that_would_split_layers_that_mix_samples_ends_the_run():
    """Plans may come from profiles that do not know."""
    wishes = PlanOptions(6, num_stages=2, num_microbatches=2, frozen_group_size=1, filling="shares")
    plan = find_plan(profile_of(make(MixesSamples)), Cluster(2), wishes)
    message = r"encoder mixes samples, .*frozen_group_size=3, or .* plan again with it"
    with pytest.raises(RankError, match=message):
        on_ranks(2, module_class=MixesSamples, strategy={"plan": plan})


LARGE = {"num_blocks": 6}


def profile_of(module):
    """The profile with which ranks plan under `profile="flops"`."""
    samples = Samples(2)
    batch = torch.utils.data.default_collate([samples[0], samples[1]])
    return estimate_profile(module, probe(module, lambda module, batch: module.loss(batch), batch))


def test_where_only_filled_encodings_do_not_fit_nothing_is_filled():
    """History: such a run was refused, with the hint that filling=none would fit."""
    profile, wishes = profile_of(make(**LARGE)), {"num_stages": 2, "num_microbatches": 1}
    unfilled = find_plan(profile, Cluster(2), PlanOptions(24, **wishes))
    cluster = {"memory_bytes": max(unfilled.planned.peak_memory_bytes)}
    with pytest.raises(PlanError, match="filling=none would fit"):
        find_plan(profile, Cluster(2, **cluster), PlanOptions(24, filling="shares", **wishes))
    settings = {"module": LARGE, "data": {"batch_size": 24}, "trainer": {"max_steps": 1}}
    plan = on_ranks(2, strategy={**wishes, "cluster": cluster}, **settings)[0].plan
    assert (plan.options.filling, plan.pieces) == ("none", ())


class SaveInMidEpoch(L.Callback):
    """Saves after the second of four batches, while the others are read and encoded."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (0, 1):
            trainer.save_checkpoint(self.path)


def saved_and_resumed(rank, filling, data_class, path):
    """Losses and weights of a run of eight steps, and of one that goes on from its checkpoint."""
    runs = []
    for resumed in (None, path):
        torch.manual_seed(99)
        module, watch = make(Augmented, dropout=0.1), Watch()
        fit_module(
            module, 2, data_class(), {"filling": filling}, resumed, max_epochs=2, limit_val_batches=0,
            callbacks=[watch] if resumed else [watch, SaveInMidEpoch(path)],
        )  # fmt: skip
        runs.append((watch.losses, weights_of(module)))
    return runs


def assert_same(run, other):
    (losses, weights), (other_losses, other_weights) = run, other
    assert losses == other_losses
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


@pytest.mark.slow
@pytest.mark.parametrize("data_class", [row(DropoutData), ResumableData])
def test_a_run_resumed_in_mid_epoch(tmp_path, data_class):
    """Filled and unfilled runs go on alike; with a loader that knows its place, as if never stopped."""
    runs = [(filling, data_class, tmp_path / f"{filling}.ckpt") for filling in ("none", "shares")]
    for unfilled, filled in zip(*run_in_turn(saved_and_resumed, 2, *runs), strict=True):
        through, resumed = filled
        assert (len(through[0]), len(resumed[0])) == (8, 6)
        assert_same(through, unfilled[0])
        assert_same(resumed, unfilled[1])
        if data_class is ResumableData:
            assert_same(resumed, (through[0][2:], through[1]))


def changing(rank, settings, world_size):
    """A callback that changes batches in place, after their frozen layers have run."""

    class Changing(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            batch["image"] += 1

    noticed = r"batch 1 was changed after frozen layers|between two steps: lost rank"
    with pytest.raises((ConfigurationError, PipelineTimeoutError), match=noticed) as error:
        train(rank, settings, world_size, [Changing()])
    return error.type


def test_a_changed_batch_is_noticed():
    """A rank that is late, still at the batch before, may find that the other one has ended for it."""
    settings = Settings(trainer=FOUR_STEPS, module_class=Augmented)
    assert ConfigurationError in run_ranks(changing, 2, settings, 2)


class ChangesOnOneRank(L.Callback):
    """Changes a frozen weight in the third batch, on one rank only."""

    def __init__(self, rank):
        self.rank, self.at_s = rank, 0.0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 2:
            self.at_s = time.monotonic()
            if trainer.global_rank == self.rank:
                next(p for p in module.parameters() if not p.requires_grad).data.mul_(2)


def changing_weights(rank, settings, world_size, changed):
    """What each rank raises, and after how many seconds."""
    callback = ChangesOnOneRank(changed)
    with pytest.raises((ConfigurationError, PipelineTimeoutError)) as error:
        train(rank, settings, world_size, [callback])
    return str(error.value), time.monotonic() - callback.at_s


def test_a_rank_that_alone_changes_frozen_weights_is_named():
    """History: ranks waited in vain for frozen results, and no error said why."""
    num_ranks, changed, strategy = 3, 1, {"filling": "shares", "timeout_s": 8}
    settings = Settings(trainer={"max_steps": 6, "max_epochs": -1}, strategy=strategy)
    found = run_ranks(changing_weights, num_ranks, settings, num_ranks, changed)
    for rank, (message, seconds) in enumerate(found):
        assert seconds < 40
        if rank == changed:
            assert f"changed before batch 2 on rank {changed}, but not on all ranks" in message
        else:  # it waits for that rank, or for one that waits for it
            assert re.search("with frozen layers changed|its own error says more", message)
