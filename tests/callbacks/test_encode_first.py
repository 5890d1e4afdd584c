"""Encodings stored before training: the same training as one process, without encoders in memory."""

from dataclasses import replace

import lightning as L
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_diffpipe.callbacks import EncodingCache
from lightning_diffpipe.checkpoint_shards import is_sharded, read_shards
from lightning_diffpipe.errors import ConfigurationError, PlanError
from lightning_diffpipe.graph.placement import (
    is_offloaded,
    is_placeholder,
    keep_stored,
    load_back,
    loaded,
    offload,
)
from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.profile import encoded_first
from lightning_diffpipe.planning.search import find_plan
from tests.distributed.scenarios import (
    Settings,
    assert_equal_runs,
    build,
    fit,
    quick_strategy,
    quiet_trainer,
    reference,
)
from tests.distributed.tiny import Samples, TinyDiffusion
from tests.planning.profiles import equal_profile
from tests.ranks import run_in_turn, run_ranks
from tests.rows import row

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

BATCHES = {"size": 20, "batch_size": 8}  # the last one is smaller
PLAIN = Settings(
    data=BATCHES,
    trainer={"max_epochs": 2, "num_sanity_val_steps": 1},
    strategy={"num_stages": 2, "num_microbatches": 2, "filling": "none"},
)


def cached(settings, folder, encode_first=True, **options):
    cache = EncodingCache(folder, encode_first=encode_first, min_flops_per_byte=0.0, **options)
    return replace(settings, trainer={**settings.trainer, "callbacks": [cache]})


def fit_cached(rank, settings, world_size):
    """What a run leaves, and how many samples were computed in training, by layer."""
    cache = next(iter(settings.trainer.get("callbacks", [])), None)
    outcome = fit(rank, settings, world_size)
    return outcome, {} if cache is None else dict(cache.memo.made)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "options",
    [{"filling": "shares", "encoding_ranks": 1}, row({"filling": "shares"}), row({})],
    ids=str,
)
def test_two_ranks_train_as_one_process_without_encoders(tmp_path, options):
    plain = replace(PLAIN, strategy={**PLAIN.strategy, **options})
    before, after = run_in_turn(fit_cached, 2, (plain, 2), (cached(plain, tmp_path), 2))
    outcomes = [outcome for outcome, _ in after]
    assert_equal_runs(outcomes, reference(PLAIN, num_microbatches=2))
    assert not any(outcome.holds_frozen for outcome in outcomes)
    assert all(outcome.plan.options.encode_first for outcome in outcomes)
    assert any(outcome.holds_frozen for outcome, _ in before)
    for (outcome, made), (other, _) in zip(after, before, strict=True):
        assert not made, "all was stored before"
        loss, wanted = (each.metrics["val/loss"] for each in (outcome, other))
        assert loss == pytest.approx(wanted, rel=1e-12), "encoders were loaded"


class Looking(EncodingCache):
    """Notes which parameters have memory while samples are encoded, and in training."""

    def _run(self, trainer, pipeline, batch, number):
        self.encoding = in_memory(pipeline.module)
        super()._run(trainer, pipeline, batch, number)

    def on_before_zero_grad(self, trainer, module, optimizer):
        self.training = in_memory(module)


def in_memory(module):
    return {name for name, p in module.named_parameters() if not is_placeholder(p)}


@pytest.mark.slow
def test_one_rank_trains_as_one_process(tmp_path):
    """Parameters of all layers are trained, but for the encoders'."""
    cache = Looking(tmp_path, encode_first=True)
    trainer = {**PLAIN.trainer, "callbacks": [cache]}
    alone = replace(PLAIN, strategy={"num_stages": 1, "num_microbatches": 2}, trainer=trainer)
    outcome, made = fit_cached(0, alone, 1)
    assert_equal_runs([outcome], reference(PLAIN, num_microbatches=2))
    assert not made
    assert cache.encoding == {n for n in outcome.weights if n.startswith(("encoder.", "text."))}
    assert cache.training == outcome.weights.keys() - cache.encoding


class NoisyToo(TinyDiffusion):
    """One encoder reads each sample as it is and with noise, as of images that are animated; another only noise."""

    def __init__(self):
        super().__init__()
        self.late = nn.Linear(12, 12).requires_grad_(False)

    def loss(self, batch):
        noisy = batch["image"] + torch.rand_like(batch["image"])
        with torch.no_grad():
            moments = self.encoder(noisy)
            further = self.late(moments.chunk(2, -1)[0])
        return super().loss(batch) + (self.head(further) - 1).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["flops", row(None)])
def test_plans_count_encoders_that_follow_noise_as_staying(tmp_path, profile):
    """What plans count as gone in training is what is gone, and takes no time."""
    cache = Looking(tmp_path, encode_first=True)
    trainer = {**PLAIN.trainer, "callbacks": [cache]}
    strategy = {"num_stages": 1, "num_microbatches": 2, "profile": profile}
    noisy = replace(PLAIN, module_class=NoisyToo, strategy=strategy, trainer=trainer)
    outcome, made = fit_cached(0, noisy, 1)
    assert_equal_runs([outcome], reference(noisy, num_microbatches=2))
    layers = encoded_first(outcome.basis.profile).frozen_layers
    gone = {name for name in outcome.weights if name not in cache.training}
    assert gone == {"text.weight"}
    assert {layer.name for layer in layers if layer.offloaded} == {"text"}
    sizes = {name: value.nbytes for name, value in outcome.weights.items()}
    bytes_of = lambda is_gone: sum(x.parameter_bytes for x in layers if x.offloaded == is_gone)
    assert bytes_of(True) == sizes["text.weight"]
    assert bytes_of(False) == sum(
        size for name, size in sizes.items() if name.startswith(("encoder.", "late."))
    )
    computed = [layer.name for layer in layers if layer.follows_sample is False]
    assert set(computed) == {"encoder.first", "encoder.second", "late"}
    assert len(computed) == 3, "the encoder is stored in one of its two calls"
    assert not made.keys() - {"encoder"}


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, row(20)])
def test_encoders_leave_after_a_pass_in_which_all_was_found(tmp_path, size):
    """A smaller last batch has other groups, and with them the samples that were in larger ones have other keys."""
    alone = replace(
        PLAIN,
        strategy={"num_stages": 1, "num_microbatches": 2},
        data={"size": size, "batch_size": 8},
        trainer={"max_epochs": 3},
    )
    outcome, made = fit_cached(0, cached(alone, tmp_path, encode_first=False), 1)
    assert_equal_runs([outcome], reference(alone, num_microbatches=2))
    assert made == {"encoder": size, "text": size}
    assert not outcome.holds_frozen


class Shifted(TinyDiffusion):
    """Other samples in the second pass."""

    def training_step(self, batch, batch_idx):
        shift = 1e-3 * self.current_epoch
        return super().training_step({**batch, "image": batch["image"] + shift}, batch_idx)


@pytest.mark.slow
@pytest.mark.distributed
def test_new_samples_load_encoders_for_their_time(tmp_path):
    settings = replace(
        PLAIN, module_class=Shifted, strategy={**PLAIN.strategy, "filling": "shares"}
    )
    results = run_ranks(fit_cached, 2, cached(settings, tmp_path), 2)
    assert_equal_runs([outcome for outcome, _ in results], reference(settings, num_microbatches=2))
    assert sum(made.get("encoder", 0) for _, made in results) == 20
    assert not any(outcome.holds_frozen for outcome, _ in results), "between two steps"


SHARED = {"num_replicas": (2, 1), "shard_optimizer": True, "state_dict_type": "sharded"}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("world_size", "options"), [(2, {}), row(3, SHARED)], ids=str)
def test_going_on_reads_what_is_stored(tmp_path, world_size, options):
    """The checkpoint has the encoders' weights, which are in no memory when it is written."""
    save = L.pytorch.callbacks.ModelCheckpoint(tmp_path / "saved", filename="one")
    strategy = {**PLAIN.strategy, **options}
    first = replace(PLAIN, trainer={"max_epochs": 1, "enable_checkpointing": True})
    first = cached(replace(first, strategy=strategy), tmp_path / "cache")
    first.trainer["callbacks"].append(save)
    run_ranks(fit_cached, world_size, first, world_size)
    written, again = tmp_path / "saved" / "one.ckpt", replace(PLAIN, strategy=strategy)
    assert is_sharded(written) == bool(options)
    whole = read_shards(written) if options else torch.load(written, weights_only=True)
    assert all(value.isfinite().all() for value in whole["state_dict"].values())
    results = run_ranks(go_on, world_size, cached(again, tmp_path / "cache"), written)
    whole = reference(PLAIN, num_microbatches=2)
    for found, written in results:
        assert not written
        for name, value in whole.weights.items():
            assert (found[name] - value).abs().max() <= 1e-10 * value.abs().max(), name


def go_on(rank, settings, path):
    outcome = fit(rank, settings, torch.distributed.get_world_size(), ckpt_path=path)
    return outcome.weights, settings.trainer["callbacks"][0]._store.bytes_written


class Drawn(Samples):
    """Flips a sample or does not, each time it is read."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {**sample, "image": sample["image"] * (1 - 2 * torch.randint(2, ()))}


class Stream(IterableDataset):
    def __iter__(self):
        return iter([Samples(8)[index] for index in range(8)])


class Noisy(TinyDiffusion):
    """Text is trained, and the encoder sees noise."""

    def __init__(self):
        super().__init__()
        self.text.requires_grad_(True)

    def loss(self, batch):
        return super().loss(
            {**batch, "image": batch["image"] + torch.rand(len(batch["image"]), 1, 1)}
        )


def fit_refused(rank, folder, data, module_class=TinyDiffusion, **options):
    world_size = 2 if isinstance(folder, tuple) else 1
    folder = folder[rank] if isinstance(folder, tuple) else folder
    cache = EncodingCache(folder, encode_first=True, **options)
    strategy = quick_strategy(num_stages=world_size, num_microbatches=2)
    trainer = quiet_trainer(devices=world_size, strategy=strategy, callbacks=[cache])
    with pytest.raises(ConfigurationError) as refused:
        trainer.fit(build(Settings(module_class=module_class)), DataLoader(data, 8))
    return str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "module_class", "options", "says"),
    [
        (Drawn(16), TinyDiffusion, {}, "encoder other samples: they differ from pass to pass"),
        (Stream(), TinyDiffusion, {}, "this is a stream"),
        (
            Samples(16),
            Noisy,
            {},
            "results of none of its encoders (frozen encoder) follow from the",
        ),
        (Samples(16), TinyDiffusion, {"max_bytes": 2000}, "2000 bytes is used up"),
    ],
    ids=["augmented", "stream", "noisy", "full"],
)
def test_refused(tmp_path, data, module_class, options, says):
    assert says in fit_refused(0, tmp_path, data, module_class, **options)


def test_a_plan_without_encoders_is_not_followed_with_them():
    options = PlanOptions(8, 1, 2, encode_first=True)
    plan = find_plan(equal_profile(20, frozen_share=0.1), Cluster(1), options)
    trainer = quiet_trainer(devices=1, strategy=quick_strategy(plan=plan, profile=None))
    with pytest.raises(PlanError, match=r"with encode_first=true, .*callbacks\.encoding_cache"):
        trainer.fit(build(Settings()), DataLoader(Samples(8), 8))


@pytest.mark.slow
@pytest.mark.distributed
def test_a_folder_of_each_rank_is_refused(tmp_path):
    folders = tmp_path / "a", tmp_path / "b"
    for says in run_ranks(fit_refused, 2, folders, Samples(16)):
        assert "a folder that all ranks share" in says


def test_parameters_are_mapped_from_their_own_file_or_a_new_one(tmp_path):
    """The second is in no file, and its strides are not those of one in order."""
    save_file({"mapped": torch.randn(300, 5)}, tmp_path / "weights.safetensors")
    root = nn.ParameterDict(load_file(tmp_path / "weights.safetensors")).requires_grad_(False)
    root["other"] = nn.Parameter(torch.randn(7, 4).t(), requires_grad=False)
    keep_stored(root)
    named, values = dict(root.named_parameters()), {n: p.clone() for n, p in root.items()}
    address, files = named["mapped"].data_ptr(), list(tmp_path.iterdir())
    offload(root, named, tmp_path)
    assert list(tmp_path.iterdir()) == files
    for name, parameter in named.items():
        assert is_offloaded(parameter)
        assert is_placeholder(parameter)
        with loaded([parameter]):
            assert torch.equal(parameter, values[name])
            assert parameter.stride() == values[name].stride()
        assert is_placeholder(parameter)
    load_back(named.values(), torch.device("cpu"), root)
    assert named["mapped"].data_ptr() == address
    for name, parameter in named.items():
        assert torch.equal(parameter, values[name])
        assert not is_offloaded(parameter)
        assert type(parameter) is nn.Parameter
