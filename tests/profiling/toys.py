"""Small modules to profile, and a clock that does not mind a busy machine.

What is known of well-known models, whoever modelled them.
"""

import functools
import random
import time

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn

from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.modules.on_paper import read_configs

WIDTH = 24


class CpuClock:
    """Time this thread has computed: what other processes do meanwhile does not count."""

    def stamp(self):
        return time.thread_time()

    def settle(self):
        pass

    def seconds(self, start, stop):
        return stop - start


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.outer(self.inner(x).relu())


class Normalizes(nn.BatchNorm1d):
    """Needs two samples and keeps no statistics, without which it could not be frozen."""

    def __init__(self, width):
        super().__init__(width, track_running_stats=False)


class Encoder(nn.Module):
    """Frozen, with batch norm and dropout."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = Normalizes(width)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(self.inner(x)))


class Toy(L.LightningModule):
    """A frozen encoder, noise, blocks with a skip, a head; draws from every source of random numbers."""

    def __init__(self, num_blocks=4, width=WIDTH):
        super().__init__()
        self.encoder = Encoder(width).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))
        self.num_steps = 0

    def training_step(self, batch, batch_idx):
        self.num_steps += 1
        self.calls = self.calls + 1
        self.seen += len(batch["x"])
        x = self.encoder(batch["x"])
        x = x + torch.randn_like(x) * (1 + random.random() + float(np.random.rand()))
        first = x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        loss = (self.head(x + first) - batch["x"]).square().mean()
        self.log("loss", loss)
        return loss


def step(module, batch):
    return module.training_step(batch, 0)


def toy(num_samples=8, **kwargs):
    """A module, its step, a batch and its graph."""
    module = Toy(**kwargs).train()
    return module, step, batch_of(num_samples, module.head.in_features), _graph_of(**kwargs)


def batch_of(num_samples, width=WIDTH):
    captions = [str(i) for i in range(num_samples)]
    return {"x": torch.randn(num_samples, width), "caption": captions}


@functools.cache
def _graph_of(**kwargs):
    module = Toy(**kwargs).train()
    return probe(module, step, batch_of(2, module.head.in_features), max_share=0.1)


CONTROLNET = 364_228_240
"""Parameters of the one for Stable Diffusion 2.1, as published."""

DENOISERS = {
    "sd21": 865_910_724,
    "controlnet": 865_910_724,
    "sdxl": 2_567_463_684,
    "sd3": 2_028_328_000,
    "flux": 11_901_408_320,
    "pixart": 610_856_096,
    "wan": 1_418_996_800,
    "sd35": 8_056_627_520,
    "wan14b": 14_288_491_584,
    "qwen_image": 20_430_401_088,
    "flux2": 32_223_281_152,
    "flux2_klein": 3_875_544_576,
    "wan22": 14_288_491_584,
    "wan22_i2v": 14_288_901_184,
    "flux_kontext": 11_901_408_320,
    "wan22_5b": 4_999_787_712,
}
"""Parameters of denoisers, as published."""


def tiny_configs():
    """Stable Diffusion, small."""
    configs = dict(read_configs("sd21"))
    configs["unet"] = {
        "sample_size": 8,
        "block_out_channels": (32, 64),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "layers_per_block": 1,
        "cross_attention_dim": 32,
        "attention_head_dim": 8,
    }
    blocks = {"block_out_channels": (32, 32), "layers_per_block": 1}
    blocks["down_block_types"] = ("DownEncoderBlock2D",) * 2
    blocks["up_block_types"] = ("UpDecoderBlock2D",) * 2
    configs["vae"] = {**configs["vae"], **blocks}
    small = {"hidden_size": 32, "num_hidden_layers": 1}
    small |= {"intermediate_size": 64, "num_attention_heads": 2}
    configs["text_encoder"] = {**configs["text_encoder"], **small}
    return configs | {"size": {"height": 64, "width": 64, "num_frames": 1}}


def check_known(name, profile):
    """Shares of frozen work are near those DiffusionPipe measured: 38-44 % (SD), 76-89 % (ControlNet)."""
    layers = profile.backbones[0].layers
    trained = CONTROLNET if name == "controlnet" else DENOISERS[name]
    assert sum(x.gradient_bytes for x in layers) == 2 * trained
    path_s = sum(x.forward_s.at(8) + x.backward_s.at(8) for x in layers)
    frozen_s = sum(x.forward_s.at(8) for encoder in profile.encoders for x in encoder.layers)
    shares = {
        "sd21": 0.5,
        "controlnet": 0.75,
        "sdxl": 0.3,
        "sd3": 0.33,
        "flux": 0.05,
        "pixart": 0.45,
        "wan": 0.56,
        "sd35": 0.1,
    }
    assert frozen_s / path_s == pytest.approx(shares[name], rel=0.25)
