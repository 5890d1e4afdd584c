"""Tiny U-Nets beside the tiny transformers, and requests that play given latents instead of a sampler's."""

from types import SimpleNamespace

import diffusers
import torch
from torch import Tensor, nn

from lightning_diffpipe.sampling.distrifusion import emulate
from lightning_diffpipe.sampling.request import Request
from tests.sampling import models as transformers
from tests.sampling.models import B, Tiny, guided, normal, plain

CROSS = {
    "in_channels": 4, "out_channels": 4, "layers_per_block": 1, "norm_num_groups": 4,
    "block_out_channels": (8, 16, 16), "cross_attention_dim": 12,
}  # fmt: skip


def unet2d(**options):
    model = diffusers.UNet2DModel(
        in_channels=3, out_channels=3, layers_per_block=1, norm_num_groups=4,
        block_out_channels=(8, 16, 16), attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"), **options,
    )  # fmt: skip
    return Tiny(model, lambda m: plain(lambda x, t: m(x, t)[0]), normal(B, 3, 32, 8))


def sd(**options):
    model = diffusers.UNet2DConditionModel(
        **CROSS, attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"), **options,
    )  # fmt: skip
    text = normal(2 * B, 7, 12, seed=2)
    return Tiny(
        model, lambda m: guided(lambda x, t: m(x, t, encoder_hidden_states=text)[0]),
        normal(B, 4, 32, 8),
    )  # fmt: skip


def sd_two_calls():
    """The same guidance, by two calls per step."""
    tiny, texts = sd(), normal(2 * B, 7, 12, seed=2).chunk(2)

    def denoise(m):
        def call(x, t):
            without, with_prompt = (
                m(x, t.expand(B), encoder_hidden_states=text)[0] for text in texts
            )
            return without + 3.0 * (with_prompt - without)

        return call

    return tiny._replace(denoise=denoise)


def sdxl():
    model = diffusers.UNet2DConditionModel(
        **CROSS, attention_head_dim=(2, 4, 4), use_linear_projection=True,
        addition_embed_type="text_time", addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=32, transformer_layers_per_block=(1, 1, 2),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    text, pooled = normal(2 * B, 7, 12, seed=2), normal(2 * B, 8, seed=3)
    added = {"text_embeds": pooled, "time_ids": torch.arange(6.0).expand(2 * B, 6).double()}

    def denoise(m):
        return guided(lambda x, t: m(x, t, encoder_hidden_states=text, added_cond_kwargs=added)[0])

    return Tiny(model, denoise, normal(B, 4, 32, 8))


def controlled():
    """A U-Net with residuals of a ControlNet at every resolution: arguments that grow with the rows."""
    tiny, text = sd(), normal(B, 7, 12, seed=2)
    sizes = [(8, 1), (8, 1), (8, 2), (16, 2), (16, 4), (16, 4)]
    residuals = tuple(normal(B, c, 32 // s, 8 // s, seed=i) for i, (c, s) in enumerate(sizes))

    def denoise(m):
        return plain(
            lambda x, t: m(
                x, t, encoder_hidden_states=text, down_block_additional_residuals=residuals,
                mid_block_additional_residual=normal(B, 16, 8, 2, seed=9),
            )[0]
        )  # fmt: skip

    return tiny._replace(denoise=denoise)


UNETS = {
    "unet2d": unet2d,
    "unet2d, padding 0": lambda: unet2d(downsample_padding=0),
    "unet2d, scale and shift": lambda: unet2d(resnet_time_scale_shift="scale_shift"),
    "unet2d, centred": lambda: unet2d(center_input_sample=True),
    "sd": sd,
    "sd, two calls": sd_two_calls,
    "sd, only cross-attention": lambda: sd(only_cross_attention=True),
    "sdxl": sdxl,
    "controlled": controlled,
}
TRANSFORMERS = ("pixart", "pixart, two calls", "dit", "sd3", "sd3.5", "flux", "hunyuandit")


def build(name: str) -> Tiny:
    """A tiny model in float64, no weight of which is zero."""
    if name not in UNETS:
        return transformers.build(name)
    torch.manual_seed(0)
    tiny = UNETS[name]()
    generator = torch.Generator().manual_seed(1)
    for p in tiny.model.parameters():
        scale = 0.3 if p.ndim == 1 else p[0].numel() ** -0.5
        p.data = torch.randn(p.shape, generator=generator) * scale
    return tiny._replace(model=tiny.model.double().eval().requires_grad_(False))


def request_for(name: str, tiny: Tiny | None = None, num_steps: int = 3) -> Request:
    """DDIM for U-Nets, its family's scheduler for a transformer."""
    tiny = tiny or build(name)
    if name not in UNETS:
        request = transformers.request_for(name, num_steps=num_steps, tiny=tiny)
        request.scale_input = hasattr(request.scheduler, "scale_model_input")
        return request
    scheduler = diffusers.DDIMScheduler()
    scheduler.set_timesteps(num_steps)
    return Request(
        tiny.model, tiny.denoise(tiny.model), scheduler, scheduler.timesteps, tiny.latents
    )


class Script:
    """A scheduler that shows the model given latents, and returns its last prediction."""

    def __init__(self, latents: list[Tensor]) -> None:
        self.later = latents[1:]

    def step(self, prediction: Tensor, timestep: Tensor, latents: Tensor) -> SimpleNamespace:
        return SimpleNamespace(prev_sample=self.later.pop(0) if self.later else prediction)


def last_prediction(
    model: nn.Module, latents: list[Tensor], num_bands: int, call=None, **options
) -> Tensor:
    """What bands predict for the last of some latents, having seen those before."""
    return emulate(request_of(model, *latents, call=call), num_bands, **options)[0]


def request_of(model: nn.Module, *latents: Tensor, call=None) -> Request:
    """Shows the model some latents; the result is its last prediction."""
    call = call or (lambda x, t: model(x))
    steps = torch.full((len(latents),), 500)
    return Request(model, call, Script(list(latents)), steps, latents[0], scale_input=False)


class Inside(nn.Module):
    """Makes the input of an operator differ from the latents, which every rank has whole."""

    def __init__(self, operator: nn.Module) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        return self.operator(x * 1.0)
