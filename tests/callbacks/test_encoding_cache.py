"""EncodingCache: the same losses, bit for bit; most frozen work read from disk; damaged files are written again."""

import threading
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from lightning_diffpipe.callbacks import EncodingCache
from lightning_diffpipe.callbacks.encoding_cache import EncodingStore, _covers_data
from lightning_diffpipe.graph.memo import Entry
from tests.distributed.scenarios import Settings, build, fit, quick_strategy, quiet_trainer
from tests.distributed.tiny import Data, Samples, TinyDiffusion
from tests.ranks import run_in_turn, run_ranks
from tests.rows import row

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Noisy(TinyDiffusion):
    """A second frozen encoder that sees noise, like the locked half of a ControlNet."""

    def __init__(self, **options):
        super().__init__(**options)
        self.locked = torch.nn.Linear(3, 3).requires_grad_(False)

    def loss(self, batch):
        image = batch["image"]
        with torch.no_grad():
            hint = self.locked((image + torch.randn_like(image)).transpose(1, 2)).transpose(1, 2)
        return super().loss({**batch, "image": image}) * (1 + hint.square().mean())


class Twice(TinyDiffusion):
    """An encoder that is called twice, once with noise on images, like that of a pipeline that animates them."""

    def loss(self, batch):
        image = batch["image"]
        with torch.no_grad():
            first = self.encoder(image + torch.randn_like(image))
        return super().loss(batch) * (1 + first.square().mean())


class Mirrored(Samples):
    """Mirrors half of the samples, others in each epoch, and notes which it gave."""

    given = frozenset()

    def __getitem__(self, index):
        sample, is_mirrored = super().__getitem__(index), bool(torch.rand(()) < 0.5)
        type(self).given |= {(index, is_mirrored)}
        return {**sample, "image": sample["image"].flip(-1) if is_mirrored else sample["image"]}


class MirroredData(Data):
    def train_dataloader(self):
        return DataLoader(Mirrored(self.size), self.batch_size)


def fit_cached(
    rank,
    folder,
    world_size,
    epochs,
    strategy_options=None,
    module_class=TinyDiffusion,
    data_class=Data,
):
    """Losses of all batches, and what the cache found; without a folder no cache."""
    caches = [EncodingCache(folder, min_flops_per_byte=0.5)] if folder else []
    strategy = {"num_stages": world_size, "num_microbatches": 2, **(strategy_options or {})}
    data, trainer = {"size": 20, "batch_size": 8}, {"max_epochs": epochs}
    settings = Settings({}, data, trainer, strategy, module_class, data_class)
    outcome = fit(rank, settings, world_size, callbacks=caches)
    found = [(cache.memo.found, cache.memo.made, cache.refused) for cache in caches]
    return outcome.losses, outcome.weights, *(found[0] if found else ({}, {}, {}))


@pytest.mark.slow
def test_one_process_reads_in_the_second_pass(tmp_path):
    plain = fit_cached(0, None, 1, 3)
    cached = fit_cached(0, tmp_path, 1, 3)
    assert cached[0] == plain[0], "bit for bit"
    torch.testing.assert_close(cached[1], plain[1], rtol=0, atol=0)
    _, _, found, made, refused = cached
    assert made["encoder"] == 20
    assert found["encoder"] == 40
    assert "quicker" in refused["text"]


@pytest.mark.slow
def test_mirrored_and_whole_images_are_two_entries(tmp_path):
    """However often an image comes, it is encoded once for each side it shows; in microbatches of one, as larger
    ones are encoded whole if one of theirs is new."""
    options = {"num_microbatches": 8}
    plain = fit_cached(0, None, 1, 6, options, data_class=MirroredData)
    Mirrored.given = frozenset()
    cached = fit_cached(0, tmp_path, 1, 6, options, data_class=MirroredData)
    assert cached[0] == plain[0], "bit for bit"
    _, _, found, made, _ = cached
    assert 20 < made["encoder"] == len(Mirrored.given) <= 40
    assert found["encoder"] == 6 * 20 - made["encoder"]


@pytest.mark.slow
def test_calls_that_follow_noise_are_not_stored_beside_others_of_their_module(tmp_path):
    """History: what such calls gave was written in each pass, and never read."""
    plain = fit_cached(0, None, 1, 3, module_class=Twice)
    losses, _, found, made, _ = fit_cached(0, tmp_path, 1, 3, module_class=Twice)
    assert losses == plain[0]
    assert (made["encoder"], found["encoder"]) == (20, 40)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("filling", [row("none"), "auto"])
def test_two_ranks_share_a_folder(tmp_path, filling):
    options = {"filling": filling}
    plain, cached = run_in_turn(fit_cached, 2, (None, 2, 3, options), (tmp_path, 2, 3, options))
    again = run_ranks(fit_cached, 2, tmp_path, 2, 1, options)
    for rank in range(2):
        assert cached[rank][0] == plain[rank][0], "bit for bit"
        torch.testing.assert_close(cached[rank][1], plain[rank][1], rtol=0, atol=0)
    found = sum(result[2]["encoder"] for result in cached)
    made = sum(result[3]["encoder"] for result in cached)
    assert made <= 32, "20 samples, and a few that ran in groups of another size first"
    assert found >= 36
    assert sum(result[3]["encoder"] for result in again) <= 4, (
        "another run reads what this one made"
    )
    assert again[0][0] == plain[0][0][:3]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_rank_without_encoders_stores_nothing(tmp_path):
    options = {"encoding_ranks": 1}
    plain, cached = run_in_turn(
        fit_cached, 2, (None, 2, 2, options, Noisy), (tmp_path, 2, 2, options, Noisy)
    )
    assert cached[0][0] == plain[0][0], "bit for bit"
    assert not cached[0][2] | cached[0][3]
    assert cached[1][2]["encoder"] >= 20 - 4
    assert "noise" in cached[1][4]["locked"]


@pytest.mark.slow
def test_layers_that_see_noise_are_computed(tmp_path):
    plain = fit_cached(0, None, 1, 2, None, Noisy)
    losses, _, found, made, refused = fit_cached(0, tmp_path, 1, 2, None, Noisy)
    assert losses == plain[0]
    assert "noise" in refused["locked"]
    assert found["encoder"] == made["encoder"] == 20


class Augmented(TinyDiffusion):
    """Another crop of every sample in every pass, as random augmentation would make."""

    def training_step(self, batch, batch_idx):
        shift = 1e-3 * self.current_epoch
        return super().training_step({**batch, "image": batch["image"] + shift}, batch_idx)


def passes_over_parts(folder, whole, epochs=3):
    """How much is stored of passes without a sample in common: of a stream, or of fixed data."""
    cache = EncodingCache(folder, min_flops_per_byte=0.5)
    samples = Samples(40)

    class Loading(L.LightningDataModule):
        def train_dataloader(self):
            first = 8 * self.trainer.current_epoch
            part = Subset(samples, range(first, first + 8))
            return DataLoader(part if whole else Streamed(part), 4)

    trainer = quiet_trainer(
        devices=1, strategy=quick_strategy(num_stages=1, num_microbatches=2), callbacks=[cache],
        max_epochs=epochs, reload_dataloaders_every_n_epochs=1,
    )  # fmt: skip
    trainer.fit(build(Settings()), datamodule=Loading())
    return sum(1 for path in folder.rglob("*") if path.is_file())


class Streamed(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


@pytest.mark.slow
def test_passes_over_a_part_of_the_data_are_not_taken_for_augmentation(tmp_path):
    """History: with streams, or `limit_train_batches=0.05`, storing ended after the second pass."""
    assert passes_over_parts(tmp_path / "stream", whole=False) == 24
    with pytest.warns(UserWarning, match="differ from pass to pass"):
        assert passes_over_parts(tmp_path / "whole", whole=True) == 16


@pytest.mark.slow
def test_storing_ends_when_samples_never_come_back(tmp_path):
    with pytest.warns(UserWarning, match="differ from pass to pass"):
        _, _, found, made, _ = fit_cached(0, tmp_path, 1, 4, None, Augmented)
    assert not found
    assert made["encoder"] == 80
    assert sum(1 for path in tmp_path.rglob("*") if path.is_file()) == 40, "two passes were stored"


def test_without_a_pipeline_it_says_that_it_does_nothing(tmp_path):
    trainer = quiet_trainer(devices=1, callbacks=[EncodingCache(tmp_path)], max_steps=1)
    with pytest.warns(UserWarning, match="without strategy='diffpipe'"):
        trainer.fit(build(Settings()), datamodule=Data(size=6))


class Draws:
    """A sampler without a length."""

    def __iter__(self):
        yield from range(8)


class Plain:
    """Batches with a length, and a data set, but no sampler."""

    dataset = range(8)

    def __len__(self):
        return 4


@pytest.mark.parametrize(
    ("loader", "covers"),
    [
        (DataLoader(range(8), 2), True),
        (DataLoader(range(8), 2, sampler=range(3)), False),
        (DataLoader(range(8), 2, sampler=Draws()), False),
        (DataLoader(range(8), batch_sampler=Draws()), False),
        (Plain(), False),
    ],
)
def test_whether_a_pass_covers_the_data_may_stay_unknown(loader, covers):
    """History: loaders and samplers without a length ended the first epoch in a TypeError or AttributeError."""
    trainer = SimpleNamespace(
        fit_loop=SimpleNamespace(_combined_loader=SimpleNamespace(flattened=[loader])),
        strategy=SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 1, "rank": 0}),
        num_training_batches=float("inf"),
    )
    assert _covers_data(trainer) == covers


# ------------------------------------------------------------------------------------------- files

KEY = "ab" * 32


def entry(*tensors):
    return Entry(tensors, tuple(tensor.stride() for tensor in tensors))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(1, 3, 4, dtype=torch.float64),
        torch.randn(2, 3).bfloat16(),
        torch.arange(6).reshape(1, 6),
        torch.tensor([[True, False]]),
        torch.zeros(1, 0),
    ],
    ids=lambda t: str(t.dtype),
)
def test_round_trip(tmp_path, tensor):
    store = EncodingStore(tmp_path)
    assert store.read(KEY) is None
    store.write(KEY, entry(tensor, torch.ones(1, 2)))
    read = EncodingStore(tmp_path).read(KEY)
    assert torch.equal(read.tensors[0], tensor)
    assert read.tensors[0].dtype == tensor.dtype
    assert read.strides == (tensor.stride(), (2, 1))


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: b"\0" * len(content),
        lambda content: content.replace(b"diffpipe-encoding/1", b"diffpipe-encoding/9"),
        lambda content: content.replace(b"float32", b"float99"),
        lambda content: content.replace(b'"key"', b'"kex"'),
    ],
)
def test_damaged_files_are_named_and_made_again(tmp_path, damage):
    """A power cut after a rename leaves a file of the right length and other content."""
    store = EncodingStore(tmp_path)
    store.write(KEY, entry(torch.randn(1, 5)))
    path = store.path(KEY)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match=KEY):
        assert store.read(KEY) is None
    assert not path.exists()
    store.write(KEY, entry(torch.zeros(1, 5)))
    assert torch.equal(store.read(KEY).tensors[0], torch.zeros(1, 5))


def test_a_file_of_another_key_is_not_believed(tmp_path):
    store = EncodingStore(tmp_path)
    store.write(KEY, entry(torch.randn(1, 5)))
    other = "ab" + "cd" * 31
    store.path(KEY).rename(store.path(other))
    with pytest.warns(UserWarning, match="damaged"):
        assert store.read(other) is None


def test_a_crash_while_writing_leaves_no_entry(tmp_path, monkeypatch):
    store = EncodingStore(tmp_path)

    def crash(*paths):
        raise OSError("the power is gone")

    monkeypatch.setattr("os.replace", crash)
    with pytest.warns(UserWarning, match="the power is gone"):
        store.write(KEY, entry(torch.randn(1, 5)))
    assert store.read(KEY) is None
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    store.write(KEY, entry(torch.randn(1, 5)))  # stays quiet: it has stopped storing


def test_writers_and_readers_of_one_key_never_see_half_of_it(tmp_path):
    value = torch.randn(1, 50_000)
    seen = []

    def write():
        store = EncodingStore(tmp_path)
        for _ in range(20):
            store.write(KEY, entry(value))

    def read():
        store = EncodingStore(tmp_path)
        for _ in range(60):
            found = store.read(KEY)
            seen.append(found is None or torch.equal(found.tensors[0], value))

    threads = [threading.Thread(target=target) for target in (write, write, read, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(seen)
    assert len(seen) == 120


def test_the_limit_ends_writing_not_reading(tmp_path):
    store = EncodingStore(tmp_path, max_bytes=1000)
    store.write(KEY, entry(torch.randn(1, 100)))
    with pytest.warns(UserWarning, match="used up"):
        store.write("cd" * 32, entry(torch.randn(1, 100)))
    assert store.read(KEY) is not None
    assert store.read("cd" * 32) is None
