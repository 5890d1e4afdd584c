"""What is trained: frozen encoders before a transformer denoiser, in the proportions of known models.

* `stable_diffusion`: a diffusers VAE and a transformers CLIP text encoder; frozen work of about 0.43 of the
  trained forward and backward, as in Stable Diffusion v2.1 at batch 32.
* `controlnet`: the same, and a locked trunk that sees noise; about 0.89, as in ControlNet v1.0 at batch 64.
* `long_layer`: one frozen layer as long as all the others together.

All random numbers come with the batch, so that gradients can be compared between systems.
"""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

from benchmarks.two_ranks.main import WIDTH, Block

BATCH, LAYERS, TOKENS, TEXT = 32, 8, 64, 16
IMAGE = (3, 64, 64)  # 32 x 32 latents of 4 channels, in patches of 4 x 4: 64 tokens
Batch = dict[str, Tensor]


class Encoders(nn.Module):
    """Everything frozen; gives the denoiser's input."""

    def __init__(self, num_locked: int, locked: type[nn.Module] = Block) -> None:
        super().__init__()
        self.vae = AutoencoderKL(
            block_out_channels=(32, 56),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
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
        self.project = nn.Linear(64, WIDTH)
        self.locked = nn.Sequential(*[locked() for _ in range(num_locked)])

    def forward(self, batch: Batch) -> Tensor:
        """Latent and text tokens, `(batch, TOKENS + TEXT, WIDTH)`."""
        latent = self.vae.encode(batch["image"]).latent_dist.mode()
        patches = F.pixel_unshuffle(latent, 4).flatten(2).transpose(1, 2)
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


def make(name: str) -> tuple[Workload, Batch]:
    """A workload and a batch of it; equal in every process."""
    torch.manual_seed(0)
    encoders = {
        "stable_diffusion": lambda: Encoders(0),
        "controlnet": lambda: Encoders(12),
        "long_layer": lambda: Encoders(1, LongBlock),
    }
    model = Workload(encoders[name]())
    batch = {
        "image": torch.randn(BATCH, *IMAGE),
        "ids": torch.randint(0, 1000, (BATCH, TEXT)),
        "noise": torch.randn(BATCH, TOKENS, WIDTH),
        "target": torch.randn(BATCH, TOKENS + TEXT, WIDTH),
    }
    return model, batch
