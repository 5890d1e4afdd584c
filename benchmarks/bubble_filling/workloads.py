"""What is trained: frozen encoders before a transformer denoiser, in the proportions of known models.

* `stable_diffusion`: a diffusers VAE and a transformers CLIP text encoder; frozen work of about 0.43 of the
  trained forward and backward, as in Stable Diffusion v2.1 at batch 32.
* `controlnet`: the same, and a locked trunk that sees noise; about 0.89, as in ControlNet v1.0 at batch 64.
* `light_encoders`: large samples and small encoders, about 0.07, as where the denoiser is a large transformer.
* `long_layer`: one frozen layer as long as all the others together.
* `..._large`: the first two with samples of four times as many pixels and tokens, so that one sample is as much
  work to a core as in models of real size.

All random numbers come with the batch, so that gradients can be compared between systems.
"""

from __future__ import annotations

import dataclasses

import lightning as L
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

from benchmarks.two_ranks.main import WIDTH, Block

LAYERS, TEXT = 8, 16
LATENTS = 32  # rows and columns, of 4 channels
Batch = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Size:
    """How large one sample is, and how many there are."""

    batch: int
    pixels: int
    channels: tuple[int, ...]  # of the VAE's levels
    patch: int  # rows and columns of latents in a token

    @property
    def tokens(self) -> int:
        """Tokens of an image."""
        return (LATENTS // self.patch) ** 2


SMALL = Size(batch=32, pixels=64, channels=(32, 56), patch=4)
LIGHT = Size(batch=32, pixels=128, channels=(16, 16, 24), patch=2)
LARGE = Size(batch=32, pixels=128, channels=(48, 48, 56), patch=2)


class Encoders(nn.Module):
    """Everything frozen; gives the denoiser's input."""

    def __init__(self, size: Size, num_locked: int, locked: type[nn.Module] = Block) -> None:
        super().__init__()
        levels = len(size.channels)
        self.vae = AutoencoderKL(
            block_out_channels=size.channels,
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            norm_num_groups=8,
            layers_per_block=2,
        )
        self.vae.decoder = nn.Identity()  # training encodes only
        self.clip = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=1000, hidden_size=WIDTH, intermediate_size=4 * WIDTH,
                num_hidden_layers=6, num_attention_heads=8, max_position_embeddings=TEXT,
                bos_token_id=0, eos_token_id=1,
            )
        )  # fmt: skip
        self.patch = size.patch
        self.project = nn.Linear(4 * size.patch**2, WIDTH)
        self.locked = nn.Sequential(*[locked() for _ in range(num_locked)])

    def forward(self, batch: Batch) -> Tensor:
        """Latent and text tokens, `(batch, tokens + TEXT, WIDTH)`."""
        latent = self.vae.encode(batch["image"]).latent_dist.mode()
        patches = F.pixel_unshuffle(latent, self.patch).flatten(2).transpose(1, 2)
        text = self.clip(input_ids=batch["ids"]).last_hidden_state
        tokens = torch.cat([self.project(patches) + batch["noise"], text], 1)
        return tokens + self.locked(tokens) if len(self.locked) else tokens


class Workload(L.LightningModule):
    """Frozen encoders and trained denoiser; the step of an ordinary LightningModule."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder.requires_grad_(False).eval()
        self.denoiser = nn.Sequential(*[Block() for _ in range(LAYERS)])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        with torch.no_grad():
            tokens = self.encoder(batch)
        return F.mse_loss(self.denoiser(tokens), batch["target"])


class LongBlock(nn.Module):
    """One layer to anybody who looks from outside: a frozen function without modules inside."""

    def __init__(self, repeats: int = 24) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) / WIDTH**0.5)
        self.repeats = repeats

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.repeats):
            x = F.layer_norm(x + torch.tanh(x @ self.weight) @ self.weight.T, (WIDTH,))
        return x


NUM_LOCKED = {"stable_diffusion": 0, "light_encoders": 0, "controlnet": 12, "long_layer": 1}


def make(name: str) -> tuple[Workload, Batch]:
    """A workload and a batch of it; equal in every process."""
    torch.manual_seed(0)
    kind, large, _ = name.partition("_large")
    size = LIGHT if kind == "light_encoders" else LARGE if large else SMALL
    locked = LongBlock if kind == "long_layer" else Block
    model = Workload(Encoders(size, NUM_LOCKED[kind], locked))
    batch = {
        "image": torch.randn(size.batch, 3, size.pixels, size.pixels),
        "ids": torch.randint(0, 1000, (size.batch, TEXT)),
        "noise": torch.randn(size.batch, size.tokens, WIDTH),
        "target": torch.randn(size.batch, size.tokens + TEXT, WIDTH),
    }
    return model, batch
