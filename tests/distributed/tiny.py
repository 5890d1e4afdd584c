"""A latent diffusion model small enough for hundreds of tests, with everything that can go wrong in it.

Frozen encoder with a stochastic posterior, frozen text table, noise and timesteps drawn in the step,
skips between blocks, a shared conditioning layer, logging. No gate starts at zero.
"""

import random
import tempfile
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from lightning_diffpipe.data.captioned import collate
from lightning_diffpipe.modules import Optimization, PipelineDiffusion
from tests.predictor import tiny_pipelines

WIDTH = 12


class Block(nn.Module):
    """A residual block conditioned on time and text."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, condition):
        h = self.norm(x) * (1 + self.scale(condition)[:, None])
        return x + self.dropout(self.out(F.gelu(self.mix(h))))


class Encoder(nn.Module):
    """Stands for a VAE: mean and log-variance of a latent."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, WIDTH, 3, padding=1)
        self.second = nn.Conv1d(WIDTH, 2 * WIDTH, 3, padding=1)

    def forward(self, image):
        return self.second(torch.tanh(self.first(image))).transpose(1, 2)


class TinyDiffusion(L.LightningModule):
    """An ordinary LightningModule; nothing in it knows of pipelines."""

    def __init__(
        self, num_blocks=4, dropout=0.0, tied=False, lr=1e-2, scheduler=True, log_extra=False
    ):
        super().__init__()
        self.encoder = Encoder().requires_grad_(False).eval()
        self.text = nn.Embedding(20, WIDTH).requires_grad_(False)
        self.time = nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(num_blocks))
        self.merge = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        if tied:
            self.head.weight = self.merge_weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
            self.entry = nn.Linear(WIDTH, WIDTH)
            self.entry.weight = self.head.weight
        self.tied, self.lr, self.scheduler, self.log_extra = tied, lr, scheduler, log_extra

    def denoise(self, noisy, t, text):
        condition = self.time(t[:, None]) + self.text(text).mean(1)
        h = self.entry(noisy) if self.tied else noisy
        skips = []
        for block in self.blocks[: len(self.blocks) // 2]:
            h = block(h, condition)
            skips.append(h)
        for block in self.blocks[len(self.blocks) // 2 :]:
            h = block(h, condition)
            if skips:
                h = self.merge(torch.cat([h, skips.pop()], -1))
        return self.head(h)

    def loss(self, batch):
        with torch.no_grad():
            mean, log_variance = self.encoder(batch["image"]).chunk(2, -1)
            latent = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        noise = torch.randn_like(latent)
        t = torch.rand(len(latent), dtype=latent.dtype, device=latent.device)
        noisy = (1 - t)[:, None, None] * latent + t[:, None, None] * noise
        return F.mse_loss(self.denoise(noisy, t, batch["text"]), noise - latent)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        if self.log_extra:
            self.log_dict(
                {"train/double": 2 * loss, "train/one": 1.0}, on_step=False, on_epoch=True
            )
            if batch_idx % 2:
                self.log("train/odd", 3 * loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.loss(batch))

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.requires_grad and p.dim() > 1]
        rest = [p for p in self.parameters() if p.requires_grad and p.dim() <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
            lr=self.lr,
        )
        if not self.scheduler:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7),
        }


class Adapted(TinyDiffusion):
    """Trains a small part of each block; the frozen part may be streamed."""

    def __init__(self, num_blocks=8, **options):
        super().__init__(num_blocks=num_blocks, **options)
        for block in self.blocks:
            block.mix.requires_grad_(False)
            block.out.requires_grad_(False)


class Twice(TinyDiffusion):
    """Estimates first, and trains on the estimate (self-conditioning); or one of its relatives.

    Args:
        form: `estimate`; `detached`, made with gradients that nobody wants; `both`, which get gradients;
            `embedded`, with a trained layer before both; `teacher`, whose target the same network gives,
            without gradients, after the pass that is trained.
    """

    def __init__(self, form="estimate", **options):
        super().__init__(**options)
        self.form, self.join = form, nn.Linear(2 * WIDTH, WIDTH)
        self.embed = nn.Linear(WIDTH, WIDTH) if form == "embedded" else nn.Identity()

    def denoise(self, noisy, t, text):
        noisy = self.embed(noisy)

        def once(estimate):
            joined = self.join(torch.cat([noisy, estimate], -1))
            return super(Twice, self).denoise(joined, t, text)

        if self.form == "teacher":
            student = once(torch.ones_like(noisy))
            with torch.no_grad():
                target = once(torch.zeros_like(noisy))
            return student + 0.5 * target
        with torch.set_grad_enabled(self.form in ("detached", "both")):
            estimate = once(torch.zeros_like(noisy))
        return once(estimate if self.form == "both" else estimate.detach())


class Coin(Twice):
    """Estimates first in some steps only: the step has two call sequences.

    Args:
        coin: What decides: `random`, `torch`, `bernoulli` or `first` (all thrown for every microbatch),
            `batch_idx`, `global_step`, or `calls` and `calls_later`, which it counts before its layers and
            after them.
        p: How often a coin says so.
    """

    def __init__(self, coin="random", p=0.5, **options):
        super().__init__(**options)
        self.coin, self.p, self.calls = coin, p, 0

    def training_step(self, batch, batch_idx):
        self.estimates = {
            "random": lambda: random.random() < self.p,
            "torch": lambda: bool(torch.rand(()) < self.p),
            "bernoulli": lambda: bool(torch.bernoulli(torch.tensor(self.p))),
            "first": lambda: bool(torch.rand(2)[0] < self.p),
            "batch_idx": lambda: batch_idx % 2 == 1,
            "global_step": lambda: self.trainer.global_step < 2,
            "calls": lambda: self.calls % 2 == 1,
            "calls_later": lambda: self.calls % 2 == 1,
        }[self.coin]()
        self.calls += self.coin == "calls"
        loss = super().training_step(batch, batch_idx)
        self.calls += self.coin == "calls_later"
        return loss

    def denoise(self, noisy, t, text):
        if self.estimates:
            return super().denoise(noisy, t, text)
        joined = self.join(torch.cat([noisy, torch.zeros_like(noisy)], -1))
        return TinyDiffusion.denoise(self, joined, t, text)


class Denoiser(nn.Module):
    """A small backbone with a skip from its first block to its last."""

    def __init__(self, num_blocks):
        super().__init__()
        self.time, self.entry = nn.Linear(1, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, noisy, t, text):
        condition = self.time(t[:, None]) + text
        h = skip = self.entry(noisy)
        for block in self.blocks:
            h = block(h, condition)
        return self.head(torch.cat([h, skip], -1))


class Cascade(TinyDiffusion):
    """A base and an upscaler, each trained on latents of its own frozen encoder's; see `form` for what joins them.

    Args:
        form: `independent`; `tied`, which share an entry; `stacked`, where the upscaler reads the base's result;
            `product`, whose losses are multiplied; `frozen`, with a base that is not trained; `smaller`, of whose
            losses the smaller one counts; `triple`, with another upscaler.
    """

    def __init__(self, form="independent", sizes=(4, 5), noisy=True, **options):
        super().__init__(num_blocks=2, **options)
        del self.blocks, self.time, self.merge, self.head
        self.form = form
        self.base, self.upscaler = map(Denoiser, sizes)
        if form == "tied":
            self.upscaler.entry.weight = self.base.entry.weight
        if form == "frozen":
            self.base.requires_grad_(False).eval()
        if form == "triple":
            self.second = Denoiser(3)

    def one(self, denoiser, latent, t, text):
        noise = torch.randn_like(latent)
        noisy = (1 - t)[:, None, None] * latent + t[:, None, None] * noise
        estimate = denoiser(noisy, t, text)
        return F.mse_loss(estimate, noise - latent), estimate

    def loss(self, batch):
        with torch.no_grad():
            mean, log_variance = self.encoder(batch["image"]).chunk(2, -1)
            latent = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        text = self.text(batch["text"]).mean(1)
        t = torch.rand(2, len(latent), dtype=latent.dtype, device=latent.device)
        base, estimate = self.one(self.base, latent, t[0], text)
        low = estimate.detach() if self.form == "stacked" else latent.roll(1, 1)
        upscaled, _ = self.one(self.upscaler, latent + low, t[1], text)
        self.log("train/base", base)
        self.log_dict({"train/upscaler": upscaled, "train/t": t.mean()})
        if self.form == "triple":
            upscaled = upscaled + 2 * self.one(self.second, latent, t[1], text)[0]
        if self.form == "product":
            return base * upscaled
        if self.form == "smaller":
            return torch.minimum(base, upscaled)
        return torch.stack([base, 0.5 * upscaled]).sum() / 1.5


class Samples(Dataset):
    """Made-up images and token ids, the same for an index everywhere."""

    def __init__(self, size: int, dtype=torch.float64) -> None:
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(size, 3, 5, generator=generator, dtype=torch.float64).to(dtype)
        self.text = torch.randint(0, 20, (size, 4), generator=generator)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"image": self.images[index], "text": self.text[index]}


class Stream(IterableDataset):
    """The samples of a data set, without telling how many there are."""

    def __init__(self, samples, order=None):
        self.samples, self.order = samples, order or range(len(samples))

    def __iter__(self):
        return (self.samples[index] for index in self.order)


class Data(L.LightningDataModule):
    """Samples in order, shared out over data-parallel pipelines as the strategy asks."""

    def __init__(self, size=24, batch_size=6, drop_last=False, dtype=torch.float64):
        super().__init__()
        self.size, self.batch_size, self.drop_last, self.dtype = size, batch_size, drop_last, dtype

    def loader(self, size):
        samples = Samples(size, self.dtype)
        sampler = None
        kwargs = getattr(self.trainer, "distributed_sampler_kwargs", None)
        if kwargs and kwargs["num_replicas"] > 1:
            sampler = DistributedSampler(samples, shuffle=False, **kwargs)
        return DataLoader(samples, self.batch_size, sampler=sampler, drop_last=self.drop_last)

    def train_dataloader(self):
        return self.loader(self.size)

    def val_dataloader(self):
        return self.loader(8)

    test_dataloader = val_dataloader


class Reds(L.LightningModule):
    """Learns the mean colours of images, with noise; notes their captions by batch."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        colours = batch["image"].mean((2, 3)).to(self.first.weight.dtype)
        guess = self.second(self.first(colours).tanh())
        return (guess - torch.rand_like(colours)).square().mean()

    def on_train_batch_start(self, batch, batch_idx):
        self.seen.append(batch["caption"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.1)


class Pairs(Dataset):
    """An image of the subject and one of its class."""

    def __init__(self, size):
        self.samples = Samples(2 * size)

    def __len__(self):
        return len(self.samples) // 2

    def __getitem__(self, index):
        return self.samples[index], self.samples[len(self) + index]


def subject_first(pairs):
    return torch.utils.data.default_collate(
        [one for half in zip(*pairs, strict=True) for one in half]
    )


class Images(L.LightningDataModule):
    """Made-up images and captions, in order."""

    resolution = 32

    def __init__(self, batch_size=6):
        super().__init__()
        self.batch_size = batch_size

    def samples(self):
        generator = torch.Generator().manual_seed(1)
        for index in range(18):
            size = (3, self.resolution, self.resolution)
            image = torch.randn(size, generator=generator, dtype=torch.float64)
            yield {"image": image, "caption": f"a cat {index}"}

    def train_dataloader(self):
        return DataLoader(list(self.samples()), batch_size=self.batch_size, collate_fn=collate)


class TinyPipeline(PipelineDiffusion):
    """One of the tiny pipelines in training, equal in every process."""

    def __init__(self, name, optimization=None, **options):
        with tempfile.TemporaryDirectory() as folder:
            pipeline = tiny_pipelines.build(name, Path(folder))
        call = {"max_sequence_length": 8} if name in ("flux", "wan", "wan_experts") else {}
        optimization = optimization or Optimization(lr=1e-2, warmup_steps=1)
        super().__init__(pipeline, call=call, optimization=optimization, **options)


class Inheriting(torch.optim.AdamW):
    """Calls a step that has the same hooks."""

    def step(self, closure=None):
        return super().step(closure)


class Switching(torch.optim.SGD):
    """Swaps weights between steps, as schedule-free optimizers do."""

    def train(self):
        """Of no effect here."""

    eval = train
