"""Data loading under the trainer: who sees which samples, in which order, in which form."""

import itertools

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from lightning_diffpipe.data import WebDatasetDataModule
from tests.data.folders import red_images, write_shard
from tests.distributed.scenarios import fit_module, make, quick_strategy, quiet_trainer, weights_of
from tests.distributed.tiny import Reds, Samples, Stream, TinyDiffusion
from tests.ranks import RankError, run_ranks

pytestmark = pytest.mark.distributed


class Numbered(Dataset):
    """Samples with their number and a random shift."""

    def __init__(self, size=12):
        self.samples = Samples(size)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        sample = self.samples[index]
        shift = torch.rand((), dtype=torch.float64)
        return {**sample, "image": sample["image"] + shift, "shift": shift, "index": index}


class Pairs(TinyDiffusion):
    """Trains on two loaders at once."""

    def training_step(self, batch, batch_idx):
        if isinstance(batch, dict) and "left" in batch:
            batch = {
                key: torch.cat([batch["left"][key], batch["right"][0][key]])
                for key in batch["left"]
            }
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.training_step(batch, batch_idx)


class Seen(L.Callback):
    """Notes the samples of every batch, by epoch."""

    def __init__(self):
        self.epochs = {}

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if "left" in batch:
            batch = batch["left"]
        rows = list(zip(batch["index"].tolist(), batch["shift"].tolist(), strict=True))
        self.epochs.setdefault(trainer.current_epoch, []).append(rows)


ONE_REPLICA = {"num_stages": 2, "num_replicas": 1}


def train(rank, world_size, make_loader, options=None):
    seen = Seen()
    options = {"use_distributed_sampler": True, "max_epochs": 2, **(options or {})}
    trainer = fit_module(Pairs, world_size, make_loader(), ONE_REPLICA, callbacks=[seen], **options)
    return seen.epochs, trainer.global_step


def shuffled(**options):
    return DataLoader(Numbered(), 3, shuffle=True, **options)


class Drawn(Sampler):
    """A sampler of a user's own: some samples twice, from a generator of its own."""

    def __init__(self, seed=5):
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self):
        return 12

    def __iter__(self):
        yield from torch.randint(12, (12,), generator=self.generator).tolist()


class Buckets(Sampler):
    """Makes batches of unequal size, in another order in every epoch."""

    def __init__(self):
        self.epoch, self.epochs = 0, []

    sampler = property(lambda self: self)  # where Lightning sets the epoch

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.epochs.append(epoch)

    def __len__(self):
        return 4

    def __iter__(self):
        batches = [[0, 1, 2], [3, 4, 5, 6], [7, 8], [9, 10, 11]]
        return iter(batches[self.epoch :] + batches[: self.epoch])


SAME_AS_ONE_PROCESS = {
    "in order": lambda: DataLoader(Numbered(), 3),
    "without the last batch": lambda: DataLoader(Numbered(), 5, drop_last=True),
    "shuffled with a seed": lambda: DataLoader(
        Numbered(), 3, shuffle=True, generator=torch.Generator().manual_seed(4)
    ),
    "a sampler of one's own": lambda: DataLoader(Numbered(), 3, sampler=Drawn()),
    "a batch sampler": lambda: DataLoader(
        Numbered(), batch_sampler=BatchSampler(Drawn(), 5, False)
    ),
    "a batch sampler of one's own": lambda: DataLoader(Numbered(), batch_sampler=Buckets()),
    "samples of a loader without batches": lambda: DataLoader(
        [next(iter(DataLoader(Numbered(), 4))) for _ in range(2)], batch_size=None
    ),
    "a stream": lambda: DataLoader(Stream(Numbered(), range(11, -1, -1)), 3),
}


class Batches(L.Callback):
    """Notes which samples were seen in training, validation and tests."""

    def __init__(self):
        self.seen = []

    def _note(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        self.seen.append(
            (trainer.state.stage.value, trainer.current_epoch, batch["index"].tolist())
        )

    on_train_batch_start = on_validation_batch_start = on_test_batch_start = _note


class Validated(Pairs):
    def test_step(self, batch, batch_idx):
        self.training_step(batch, batch_idx)


def see_batches(rank, world_size, names, num_stages=2):
    """The batches of all kinds of loaders; in one plain process if there is no world."""
    seen = {}
    for name in names:
        batches, make_loader = Batches(), SAME_AS_ONE_PROCESS[name]
        loaders = make_loader(), make_loader()
        module = make(Validated, num_blocks=2)
        strategy = {"num_stages": num_stages, "num_replicas": 1}
        fit_module(
            module, world_size, loaders[0], strategy, val_dataloaders=loaders[1], callbacks=[batches],
            use_distributed_sampler=True, max_epochs=2,
        )  # fmt: skip
        samplers = [getattr(loader, "batch_sampler", None) for loader in loaders]
        seen[name] = batches.seen, [getattr(sampler, "epochs", None) for sampler in samplers]
    return seen


def test_one_pipeline_sees_the_batches_of_one_process():
    """History: Lightning gave every rank a sampler that shuffles, whatever the user's did."""
    alone = see_batches(0, 0, SAME_AS_ONE_PROCESS)
    assert alone["a batch sampler of one's own"][1] == [[0, 1]] * 2, "in validation, too"
    for seen in run_ranks(see_batches, 2, 2, list(SAME_AS_ONE_PROCESS)):
        for name, expected in alone.items():
            assert seen[name] == expected, name


def test_pipelines_share_out_the_order_of_one_process():
    """History: what was to be in order was shuffled. Samples go round; batches that belong together stay so."""
    names = ["in order", "a sampler of one's own", "a batch sampler of one's own"]
    kinds, ranks = see_batches(0, 0, names), run_ranks(see_batches, 2, 2, names, 1)
    for name, (stage, epoch) in itertools.product(
        names, (("train", 0), ("train", 1), ("validate", 1))
    ):
        first, second, alone = (seen[name][0] for seen in (*ranks, kinds))
        own, other, order = (
            [wanted for *where, wanted in seen if tuple(where) == (stage, epoch)]
            for seen in (first, second, alone)
        )
        if "batch" in name:
            assert [x for pair in zip(own, other, strict=True) for x in pair] == order
        else:
            flat = [[x for batch in seen for x in batch] for seen in (own, other, order)]
            assert [x for pair in zip(*flat[:2], strict=True) for x in pair] == flat[2]


class NeverSteps(Pairs):
    """As with plain Lightning, nothing is trained on where no batch is asked for."""

    def training_step(self, batch, batch_idx):
        raise AssertionError("a step was run")

    def validation_step(self, batch, batch_idx):
        self.log("seen", self.loss(batch))


@pytest.mark.parametrize("option", ["limit_train_batches", "max_epochs", "max_steps"])
def test_no_step_is_run_where_none_is_asked_for(option):
    """History: one was run to look at it."""
    options = {"num_sanity_val_steps": 1, option: 0}
    trainer = fit_module(NeverSteps, 1, shuffled(), val_dataloaders=shuffled(), **options)
    assert trainer.global_step == 0


def indices(batches):
    return [index for batch in batches for index, _ in batch]


def test_pipelines_side_by_side_see_different_samples():
    outcomes = [epochs for epochs, _ in run_ranks(train, 4, 4, shuffled)]
    assert outcomes[0] == outcomes[1]
    assert outcomes[2] == outcomes[3]
    for epoch in (0, 1):
        seen = indices(outcomes[0][epoch]) + indices(outcomes[2][epoch])
        assert sorted(seen) == list(range(12))
    assert indices(outcomes[0][0]) != indices(outcomes[0][1]), "set_epoch did not arrive"


def pairs():
    return {"left": shuffled(), "right": [shuffled()]}


class ReadsTable(TinyDiffusion):
    """Adds a table to its images, which is no sample's but all samples'."""

    def training_step(self, batch, batch_idx):
        return super().training_step({**batch, "image": batch["image"] + batch["table"]}, batch_idx)


def with_table(samples):
    return {**torch.utils.data.default_collate(samples), "table": torch.zeros(3, 5)}


def train_on_tables(rank):
    fit_module(ReadsTable, 1, DataLoader(Samples(6), 3, collate_fn=with_table))


def test_a_table_as_long_as_the_batch_is_named():
    """History: the error was torch's alone, of shapes that the user's step never had."""
    with pytest.raises(RankError, match=r"RuntimeError: .* must match") as raised:
        run_ranks(train_on_tables, 1)
    assert "run on 2 of the 3 samples of a batch" in str(raised.value)
    assert "or let the module cut batches itself (split_batch)" in str(raised.value)


def use_again(rank):
    """Validates and trains with one `CombinedLoader`, with an epoch that asks for its loaders again."""
    combined = CombinedLoader(pairs(), "min_size")
    before, seen, inner = list(combined.flattened), [], []
    module = make(Pairs)
    options = {"use_distributed_sampler": True, "reload_dataloaders_every_n_epochs": 1}
    quiet_trainer(devices=2, strategy=quick_strategy(num_stages=2), **options).validate(
        module, combined, verbose=False
    )
    for num_stages in (1, 2):
        epochs, strategy = Seen(), {"num_stages": num_stages, "num_replicas": 1}
        trainer = fit_module(
            module, 2, combined, strategy, callbacks=[epochs], max_epochs=2, **options
        )
        seen.append(epochs.epochs)
        inner += [type(loader._loader) for loader in trainer.fit_loop._combined_loader.flattened]
    same = [one is other for one, other in zip(combined.flattened, before, strict=True)]
    return seen, set(inner), same


def test_combined_loaders_can_be_used_again():
    """History: a second run hung in the comparison of batches of the first, or had its shares of the samples."""
    (first, inner, same), (second, _, _) = run_ranks(use_again, 2)
    assert all(same), "the user's loaders were exchanged"
    assert inner == {DataLoader}
    for epoch in (0, 1):
        shares = indices(first[0][epoch]) + indices(second[0][epoch])
        assert sorted(shares) == list(range(12)), "two pipelines, side by side"
        assert first[1][epoch] == second[1][epoch], "two stages of one pipeline"
        assert sorted(indices(first[1][epoch])) == list(range(12))


def train_on_shards(rank, pattern, num_stages):
    data = WebDatasetDataModule(
        pattern, samples_per_epoch=8, resolution=8, batch_size=4, num_workers=0
    )
    module = make(Reds)
    fit_module(module, 2, data, {"num_stages": num_stages, "num_replicas": 1})
    return [caption for captions in module.seen for caption in captions]


def test_shards_are_dealt_out_to_pipelines_not_to_ranks(tmp_path):
    """History: two ranks of one pipeline refused a single shard, before they knew that they were one."""
    write_shard(tmp_path / "all.tar", red_images(range(8)))
    first, second = run_ranks(train_on_shards, 2, str(tmp_path / "all.tar"), 2)
    assert first == second
    assert sorted(first) == [str(number) for number in range(8)]
    with pytest.raises(
        RankError, match=r"1 shards .* cannot be dealt out to 2 data-parallel ranks"
    ):
        run_ranks(train_on_shards, 2, str(tmp_path / "all.tar"), 1)


class AsksInTime(Pairs):
    """Asks for the number of steps where every rank knows its pipeline, and notes all answers."""

    answers = ()

    def configure_optimizers(self):
        self.answers = (*self.answers, self.trainer.estimated_stepping_batches)
        return super().configure_optimizers()

    def on_fit_start(self):
        self.answers = (*self.answers, self.trainer.estimated_stepping_batches)


class AsksInSetup(Pairs):
    """Asks for the number of steps before there is a pipeline."""

    answers = ()

    def setup(self, stage):
        self.answers = (*self.answers, self.trainer.estimated_stepping_batches)


def fit_in_a_row(rank, module_class, path):
    """Trains two epochs, then a third one from a checkpoint, with the same trainer."""
    module = make(module_class)
    trainer = fit_module(
        module, 2, shuffled(), ONE_REPLICA, use_distributed_sampler=True, max_epochs=2
    )
    trainer.save_checkpoint(path)
    states = torch.load(path)["optimizer_states"][0]["state"] if rank == 0 else {}
    assert rank or len(states) == sum(p.requires_grad for p in module.parameters())
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, shuffled(), ckpt_path=path)
    return module.answers, trainer.global_step


@pytest.mark.parametrize("module_class", [AsksInSetup, AsksInTime])
def test_the_number_of_steps_may_be_asked_for_at_any_time(module_class, tmp_path):
    """History: asked for before there was a pipeline, it counted samples of one rank only, or was refused."""
    for answers, steps in run_ranks(fit_in_a_row, 2, module_class, tmp_path / "a.ckpt"):
        assert answers == ((8, 12) if module_class is AsksInSetup else (8, 8, 12, 12))
        assert steps == 12


class SavesEpochs(L.Callback):
    """Saves where Lightning counts the epoch as processed but not as completed."""

    def __init__(self, path, every):
        self.path, self.every = path, every

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == self.every:
            trainer.save_checkpoint(self.path)


def go_on_with_a_stream(rank, module_class, path):
    """Trains three epochs in one go, then the last one again from a checkpoint."""
    epochs = []
    for checkpoint in (None, path):
        seen = Seen()
        fit_module(
            module_class, 2, DataLoader(Stream(Numbered()), 3), ONE_REPLICA, checkpoint,
            callbacks=[seen, SavesEpochs(path, 1)], max_epochs=3,
        )  # fmt: skip
        epochs.append(seen.epochs)
    return epochs


@pytest.mark.parametrize("module_class", [AsksInTime, Pairs])
def test_an_epoch_of_a_stream_that_is_resumed_draws_its_own_numbers(module_class, tmp_path):
    """History: all random numbers of the resumed epoch were those of epoch 0, or of the one before."""
    for whole, resumed in run_ranks(go_on_with_a_stream, 2, module_class, tmp_path / "a.ckpt"):
        assert sorted(whole) == [0, 1, 2]
        assert resumed == {2: whole[2]}
        assert whole[2][0] != whole[1][0] != whole[0][0]


class Captioned(Numbered):
    """Images with captions, sizes and arrays, as a pair, without random numbers."""

    def __getitem__(self, index):
        image, caption = self.samples[index]["image"], None if index % 5 == 0 else "a" * index
        return image, caption, (index, 2), np.full(3, index)


def as_they_come(samples):
    """Leaves it to the module what to make of captions, sizes and arrays."""
    images, captions, sizes, arrays = zip(*samples, strict=True)
    return torch.stack(images), captions, list(sizes), np.stack(arrays)


class ReadsCaptions(L.LightningModule):
    """Zips images with their captions in the step."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Linear(3, 8), torch.nn.Linear(8, 15)

    def training_step(self, batch, batch_idx):
        images, captions, sizes, arrays = batch
        assert len(images) == len(captions) == len(sizes) == len(arrays)
        lengths = [
            (len(caption or ""), sum(size), int(array.sum()))
            for caption, size, array in zip(captions, sizes, arrays, strict=True)
        ]
        described = torch.tensor(lengths, dtype=images.dtype) / 10
        return (self.head(self.embed(described)) - images.flatten(1)).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def read_captions(rank, world_size):
    module, loader = make(ReadsCaptions), DataLoader(Captioned(), 5, collate_fn=as_they_come)
    fit_module(module, world_size, loader, {"verify": True})
    return weights_of(module)


def test_captions_stay_with_their_images():
    """History: every microbatch got the captions of all, and took those of the first."""
    alone = read_captions(0, 0)
    for weights in run_ranks(read_captions, 2, 2):
        torch.testing.assert_close(weights, alone)
