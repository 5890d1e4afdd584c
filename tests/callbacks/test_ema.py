import copy

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from lightning_diffpipe import DiffPipeStrategy
from lightning_diffpipe.callbacks import EMA
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph.placement import place_parameters
from tests.distributed.scenarios import Settings, build, quick_strategy, quiet_trainer, weights_of
from tests.distributed.tiny import Data, TinyDiffusion
from tests.ranks import run_ranks


class Recorder(L.Callback):
    """Keeps the weights after every optimizer step, and those validated."""

    def __init__(self):
        self.trained, self.validated = [], []

    def on_train_batch_end(self, trainer, module, *args):
        if not self.trained or trainer.global_step > len(self.trained) - 1:
            self.trained.append(module.layer.weight.detach().clone())

    def on_train_start(self, trainer, module):
        self.trained.append(module.layer.weight.detach().clone())

    def on_validation_batch_start(self, trainer, module, *args):
        self.validated.append(module.layer.weight.detach().clone())


def fit(tmp_path, ema, module=None, ckpt_path=None, **kwargs):
    torch.manual_seed(0)
    recorder = Recorder()
    settings = {"max_epochs": 1, "limit_train_batches": 6, "limit_val_batches": 1} | kwargs
    callbacks = [ema, recorder]
    trainer = quiet_trainer(**settings, default_root_dir=tmp_path, callbacks=callbacks)
    module = module or BoringModel()
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer, module, recorder


def averaged_by_hand(weights, decay):
    average = weights[0].clone()
    for n, weight in enumerate(weights[1:]):
        d = min(decay, (1 + n) / (10 + n))
        average = d * average + (1 - d) * weight
    return average


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_average_is_the_formula_over_optimizer_steps(tmp_path, accumulate):
    ema = EMA(decay=0.3)
    _, _, recorder = fit(tmp_path, ema, accumulate_grad_batches=accumulate)
    assert len(recorder.trained) == 1 + -(-6 // accumulate)
    expected = averaged_by_hand(recorder.trained, 0.3)
    torch.testing.assert_close(ema.averages["layer.weight"], expected)


def test_averages_are_validated_and_weights_trained_on(tmp_path):
    ema = EMA(decay=0.3)
    _, module, recorder = fit(tmp_path, ema)
    torch.testing.assert_close(recorder.validated[0], ema.averages["layer.weight"])
    assert module.layer.weight.equal(recorder.trained[-1])


def test_averages_leave_training_unchanged(tmp_path):
    class Nothing(L.Callback):
        averages = None

    _, plain, _ = fit(tmp_path, Nothing())
    _, averaged, _ = fit(tmp_path, EMA(decay=0.3))
    assert plain.layer.weight.equal(averaged.layer.weight)


def test_a_resumed_run_goes_on_averaging(tmp_path):
    whole = EMA(decay=0.3)
    fit(tmp_path, whole, max_epochs=2)
    first = EMA(decay=0.3)
    trainer, _, _ = fit(tmp_path, first)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    second = EMA(decay=0.3)
    fit(tmp_path, second, ckpt_path=tmp_path / "half.ckpt", max_epochs=2)
    assert second._num_updates == whole._num_updates == 12
    torch.testing.assert_close(second.averages["layer.weight"], whole.averages["layer.weight"])


def test_a_second_fit_of_a_trainer_averages_anew(tmp_path):
    """History: averages began with the weights again, but with the decay of a long run."""
    ema = EMA(decay=0.3)
    trainer, module, _ = fit(tmp_path, ema)
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    recorder = next(c for c in trainer.callbacks if isinstance(c, Recorder))
    recorder.trained = []
    # What is read to validate must not begin the next training either.
    trainer.validate(module, ckpt_path=tmp_path / "first.ckpt", verbose=False)
    assert ema._num_updates == 6
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    assert ema._num_updates == 6
    expected = averaged_by_hand(recorder.trained, 0.3)
    torch.testing.assert_close(ema.averages["layer.weight"], expected)


def test_another_module_is_validated_with_its_own_weights_before_its_training(tmp_path):
    """History: nothing forgot the averages of the run before, and its first validation asked for their weights."""
    ema = EMA(decay=0.3)
    fit(tmp_path, ema)
    other = BoringModel()
    other.head, other.layer = other.layer, nn.Identity()
    other.forward = lambda x: other.head(x)
    seen = []
    other.on_validation_batch_start = lambda *args: seen.append(other.head.weight.detach().clone())
    before = other.head.weight.detach().clone()
    options = {"max_steps": 1, "limit_val_batches": 1, "num_sanity_val_steps": 1}
    trainer = quiet_trainer(callbacks=[ema], **options)
    trainer.fit(other)
    assert torch.equal(seen[0], before)
    assert set(ema.averages) == {"head.weight", "head.bias"}


def test_nothing_is_made_up_where_training_has_not_begun(tmp_path):
    """History: a checkpoint saved before training held averages of arbitrary memory."""
    ema = EMA(decay=0.3)
    strategy = DiffPipeStrategy()
    trainer = quiet_trainer(strategy=strategy, devices=1, callbacks=[ema], limit_val_batches=1)
    trainer.validate(BoringModel(), verbose=False)
    trainer.save_checkpoint(tmp_path / "early.ckpt")
    saved = torch.load(tmp_path / "early.ckpt", weights_only=True)
    assert saved["callbacks"]["EMA"] == {"averages": {}, "num_updates": 0}


def test_the_context_swaps_in_and_back(tmp_path):
    ema = EMA(decay=0.3)
    _, module, _ = fit(tmp_path, ema)
    trained = copy.deepcopy(module.layer.weight)
    average = ema.averages["layer.weight"].clone()
    with ema.averaged(module):
        assert module.layer.weight.equal(average)
    assert module.layer.weight.equal(trained)
    assert ema.averages["layer.weight"].equal(average)


def test_averages_are_fp32_and_are_swapped_in_as_the_weights_are(tmp_path):
    ema = EMA(decay=0.3)
    _, module, recorder = fit(tmp_path, ema, BoringModel().bfloat16(), precision="bf16-true")
    average = ema.averages["layer.weight"]
    assert average.dtype == torch.float32
    torch.testing.assert_close(
        average, averaged_by_hand([w.float() for w in recorder.trained], 0.3)
    )
    with ema.averaged(module):
        assert module.layer.weight.equal(average.bfloat16())
    assert module.layer.weight.equal(recorder.trained[-1])


def test_averages_follow_a_module_that_has_moved(tmp_path):
    """History: after a training on a GPU, averages stayed there, in a module on the host."""
    ema = EMA(decay=0.3)
    _, module, _ = fit(tmp_path, ema)
    module.to("meta")  # another device, which every machine has
    with ema.averaged(module):
        assert module.layer.weight.is_meta


def use_averages_after_training(rank):
    ema, module = EMA(decay=0.3), build(Settings())
    strategy = quick_strategy(num_stages=2, num_microbatches=2)
    trainer = quiet_trainer(devices=2, strategy=strategy, callbacks=[ema])
    trainer.fit(module, datamodule=Data())  # validates averages on the way
    before = weights_of(module)
    refused = pytest.raises(ConfigurationError, match=r"averages of \d+ of \d+ weights, e\.g\. ")
    with refused, ema.averaged(module):
        pass
    assert all(value.equal(before[name]) for name, value in module.state_dict().items())
    return set(ema.averages)


@pytest.mark.distributed
def test_averages_of_one_stage_are_not_mixed_with_weights_of_others():
    """History: the module was whole again after the training, and a mixture was saved without a word."""
    first, second = run_ranks(use_averages_after_training, 2)
    assert first - second
    assert second - first


class FrozenEnd(TinyDiffusion):
    """Trains its first block only, as adapters may lie in front only."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.blocks[0].requires_grad_(True)


class NotesDtypes(L.Callback):
    """Notes the types of the losses that callbacks get."""

    def on_train_start(self, trainer, module):
        self.dtypes = set()

    def on_train_batch_end(self, trainer, module, outputs, *_):
        self.dtypes.add(outputs["loss"].dtype)


def average_where_little_is_trained(rank, world_size, folder):
    ema, dtypes, module = EMA(decay=0.3), NotesDtypes(), build(Settings(module_class=FrozenEnd))
    strategy = quick_strategy(num_stages=world_size, num_microbatches=2)
    trainer = quiet_trainer(
        devices=world_size, strategy=strategy, callbacks=[ema, dtypes], max_steps=2
    )
    trainer.fit(module, datamodule=Data())
    names, path = set(ema.averages), folder / f"{world_size}.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path)["callbacks"]["EMA"] if rank == 0 else None
    return names, dtypes.dtypes, saved


@pytest.mark.distributed
def test_a_stage_may_train_nothing(tmp_path):
    """History: the first optimizer step ended in an error of torch, and losses in double were rounded there."""
    first, second = run_ranks(average_where_little_is_trained, 2, 2, tmp_path)
    (alone,) = run_ranks(average_where_little_is_trained, 1, 1, tmp_path)
    assert first[0] == alone[0]
    assert second[0] == set()
    assert first[1] == second[1] == alone[1] == {torch.float64}
    assert first[2]["num_updates"] == 2
    torch.testing.assert_close(first[2]["averages"], alone[2]["averages"])


def test_a_checkpoint_written_in_validation_holds_averages_as_averages(tmp_path):
    ema = EMA(decay=0.3)
    _, module, _ = fit(tmp_path, ema)
    average = ema.averages["layer.weight"].clone()
    with ema.averaged(module):
        assert ema.state_dict()["averages"]["layer.weight"].equal(average)


def test_frozen_and_foreign_parameters_are_left_out(tmp_path):
    module = BoringModel()
    module.frozen = nn.Linear(2, 2).requires_grad_(False)
    module.foreign = nn.Parameter(torch.zeros(3, 4))
    here = [name for name, _ in module.named_parameters() if name != "foreign"]
    place_parameters(module, here, "cpu")
    ema = EMA()
    fit(tmp_path, ema, module, max_steps=2)
    assert set(ema.averages) == {"layer.weight", "layer.bias"}
