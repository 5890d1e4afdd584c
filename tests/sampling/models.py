"""Tiny denoisers with the closures their pipelines would use: name -> model, denoise, latents, axis to cut.

Weights are random and nowhere zero, so that nothing hides behind a gate that is not yet open. Everything is
float64: what differs by more than rounding is wrong.
"""

import copy
import functools
from collections.abc import Callable
from typing import NamedTuple

import diffusers
import torch
from torch import Tensor, nn

from lightning_diffpipe.sampling.dry_run import dry_run_of
from lightning_diffpipe.sampling.loop import PipelineCall
from lightning_diffpipe.sampling.request import Request
from lightning_diffpipe.sampling.tracing.layout import Layout
from lightning_diffpipe.sampling.tracing.probe import probe

B = 2  # prompts
STEPS = 4


class Tiny(NamedTuple):
    """One tiny denoiser."""

    model: nn.Module
    denoise: Callable[[nn.Module], Callable[[Tensor, Tensor], Tensor]]
    latents: Tensor
    axis: int | None = None
    branches: int = 1  # of guidance, in the batch


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def guided(call):
    """Guidance in the batch, as most pipelines do: [without prompt, with prompt]."""

    def denoise(x, t):
        out = call(torch.cat([x, x]), t.expand(2 * len(x)))[:, : x.shape[1]]
        without, with_prompt = out.chunk(2)
        return without + 3.0 * (with_prompt - without)

    return denoise


def plain(call):
    return lambda x, t: call(x, t.expand(len(x)))[:, : x.shape[1]]


def whole(call):
    return lambda x, t: call(x, t.expand(len(x)))


def closure(guidance, time=lambda t: t, **arguments):
    """Calls a model with latents, times and further arguments, under guidance or without."""
    return lambda m: guidance(
        lambda x, t: m(x, timestep=time(t), **arguments, return_dict=False)[0]
    )


def per_thousand(t):
    return t / 1000


CONDITIONS = {"resolution": None, "aspect_ratio": None}


def pixart(**options):
    config = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 4} | options
    model = diffusers.PixArtTransformer2DModel(
        in_channels=4, out_channels=8, cross_attention_dim=16, caption_channels=8,
        sample_size=16, patch_size=2, norm_num_groups=4, **config,
    )  # fmt: skip
    text = normal(2 * B, 7, 8, seed=2)
    mask = torch.tensor([[1] * 4 + [0] * 3] * B + [[1] * 6 + [0]] * B)
    denoise = closure(
        guided,
        encoder_hidden_states=text,
        encoder_attention_mask=mask,
        added_cond_kwargs=CONDITIONS,
    )
    return Tiny(model, denoise, normal(B, 4, 32, 12), branches=2)


def pixart_two_calls():
    """Guidance by two calls per step, with prompts of different lengths."""
    model = pixart().model
    texts = [normal(B, 5, 8, seed=2), normal(B, 7, 8, seed=3)]

    def denoise(m):
        def call(x, t):
            without, with_prompt = (
                closure(plain, encoder_hidden_states=text, added_cond_kwargs=CONDITIONS)(m)(x, t)
                for text in texts
            )
            return without + 3.0 * (with_prompt - without)

        return call

    return Tiny(model, denoise, normal(B, 4, 32, 12))


def dit():
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=4,
        sample_size=16, patch_size=2, norm_num_groups=4, num_embeds_ada_norm=1000,
    ).eval()  # fmt: skip
    labels = torch.tensor([1000] * B + [3, 400])
    denoise = closure(guided, torch.Tensor.long, class_labels=labels)
    return Tiny(model, denoise, normal(B, 4, 16, 16), branches=2)


def sd3(dual=()):
    model = diffusers.SD3Transformer2DModel(
        sample_size=32, patch_size=2, in_channels=4, num_layers=4, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=12, caption_projection_dim=16,
        pooled_projection_dim=10, out_channels=4, pos_embed_max_size=24,
        dual_attention_layers=dual, qk_norm="rms_norm" if dual else None,
    )  # fmt: skip
    text, pooled = normal(2 * B, 7, 12, seed=2), normal(2 * B, 10, seed=3)
    denoise = closure(guided, encoder_hidden_states=text, pooled_projections=pooled)
    return Tiny(model, denoise, normal(B, 4, 32, 12), branches=2)


def flux(**options):
    model = diffusers.FluxTransformer2DModel(
        **{"num_layers": 2, "num_single_layers": 3} | options,
        patch_size=1, in_channels=4, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=12, pooled_projection_dim=10, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    text, pooled = normal(B, 7, 12, seed=2), normal(B, 10, seed=3)
    ids = torch.stack([torch.zeros(96), torch.arange(96) // 6, torch.arange(96) % 6], 1)
    denoise = closure(
        whole, per_thousand, encoder_hidden_states=text, pooled_projections=pooled,
        img_ids=ids, txt_ids=torch.zeros(7, 3),
    )  # fmt: skip
    return Tiny(model, denoise, normal(B, 96, 4))


def wan(axis=None):
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4,
        out_channels=4, text_dim=16, freq_dim=32, ffn_dim=32, num_layers=4, cross_attn_norm=True,
        qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip
    denoise = closure(plain, encoder_hidden_states=normal(B, 7, 16, seed=2))
    frames = 8 if axis == 2 else 3
    return Tiny(model, denoise, normal(B, 4, frames, 16, 12), axis)


def lumina2():
    model = diffusers.Lumina2Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, hidden_size=24, num_layers=3,
        num_refiner_layers=1, num_attention_heads=3, num_kv_heads=1, multiple_of=16,
        axes_dim_rope=(4, 2, 2), axes_lens=(128, 128, 128), cap_feat_dim=8,
    )  # fmt: skip
    text, mask = normal(B, 7, 8, seed=2), torch.ones(B, 7).long()
    denoise = closure(plain, per_thousand, encoder_hidden_states=text, encoder_attention_mask=mask)
    return Tiny(model, denoise, normal(B, 4, 16, 12))


def qwen(lengths=(5, 7)):
    """With prompts of so many words, one for each sample."""
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=4, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=12, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    num, mask = len(lengths), torch.tensor([[1] * n + [0] * (7 - n) for n in lengths])
    text = normal(num, 7, 12, seed=2)
    denoise = closure(
        whole, per_thousand, encoder_hidden_states=text, encoder_hidden_states_mask=mask,
        img_shapes=[[(1, 16, 6)]] * num,
    )  # fmt: skip
    return Tiny(model, denoise, normal(num, 96, 16))


def cogvideox():
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4,
        time_embed_dim=8, text_embed_dim=8, num_layers=4, sample_width=12, sample_height=16,
        sample_frames=9, patch_size=2, temporal_compression_ratio=4, max_text_seq_length=7,
        use_rotary_positional_embeddings=True,
    )  # fmt: skip
    text, rope = normal(B, 7, 8, seed=2), (normal(144, 16, seed=4), normal(144, 16, seed=5))
    denoise = closure(whole, encoder_hidden_states=text, image_rotary_emb=rope)
    return Tiny(model, denoise, normal(B, 3, 4, 16, 12))


def hunyuandit():
    model = diffusers.HunyuanDiT2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, patch_size=2, num_layers=4,
        sample_size=16, cross_attention_dim=8, cross_attention_dim_t5=8, pooled_projection_dim=4,
        hidden_size=16, text_len=4, text_len_t5=4, activation_fn="gelu-approximate",
    )  # fmt: skip
    clip, t5 = normal(B, 4, 8, seed=2), normal(B, 4, 8, seed=3)
    rope, ones = (normal(64, 8, seed=4), normal(64, 8, seed=5)), torch.ones(B, 4).long()
    denoise = closure(
        plain, torch.Tensor.double, encoder_hidden_states=clip, text_embedding_mask=ones,
        encoder_hidden_states_t5=t5, text_embedding_mask_t5=ones, style=torch.zeros(B).long(),
        image_meta_size=torch.ones(B, 6).double(), image_rotary_emb=rope,
    )  # fmt: skip
    return Tiny(model, denoise, normal(B, 4, 16, 16))


MODELS = {
    "pixart": pixart,
    "pixart, two calls": pixart_two_calls,
    "dit": dit,
    "sd3": sd3,
    "sd3.5": lambda: sd3((0, 1)),
    "flux": flux,
    "wan": wan,
    "wan, frames": lambda: wan(2),
    "lumina2": lumina2,
    "qwen": qwen,
    "cogvideox": cogvideox,
    "hunyuandit": hunyuandit,
}
MAIN = ("pixart", "pixart, two calls", "dit", "sd3", "flux", "wan")
"""The families that are compared with the definition; the others run elsewhere."""

_SCHEDULERS = {
    "pixart": "DPMSolverMultistepScheduler",
    "dit": "DDIMScheduler",
    "hunyuandit": "DPMSolverMultistepScheduler",
    "cogvideox": "DDIMScheduler",
}


def scheduler_for(name: str, num_steps: int = STEPS):
    """The scheduler that the family's pipeline has."""
    scheduler = getattr(diffusers, _SCHEDULERS.get(name, "FlowMatchEulerDiscreteScheduler"))()
    scheduler.set_timesteps(num_steps)
    return scheduler


def build(name: str) -> Tiny:
    torch.manual_seed(0)
    tiny = MODELS[name]()
    for p in tiny.model.parameters():
        if p.ndim and not p.any():
            nn.init.normal_(p, std=0.1)
    return tiny._replace(model=tiny.model.double().eval().requires_grad_(False))


def request_for(
    name: str,
    scheduler=None,
    num_steps: int = STEPS,
    tiny: Tiny | None = None,
    cache=None,
    **step_kwargs,
) -> Request:
    """A fresh request; its model is the tiny one's itself."""
    tiny = tiny or build(name)
    scheduler = scheduler or scheduler_for(name, num_steps)
    return Request(
        tiny.model, tiny.denoise(tiny.model), scheduler, scheduler.timesteps, tiny.latents,
        step_kwargs=step_kwargs, branches_in_batch=tiny.branches, cache=cache,
    )  # fmt: skip


@functools.cache
def layout_of(name: str) -> Layout:
    """The layout of a tiny model, found once: a probe takes longer than what most tests sample."""
    tiny = build(name)
    return probe(request_for(name, tiny=tiny), tiny.axis)


def knowing(sampler, name: str, tiny: Tiny | None = None):
    """The sampler, which need not probe; it tries the layout on as after an earlier request."""
    sampler.layouts.add(request_for(name, tiny=tiny), layout_of(name))
    return sampler


class TwoPrompts:
    """The least of a pipeline: guidance in the batch, and no look at the variance that the model predicts, too."""

    def __init__(self, tiny):
        self.tiny = tiny

    def __call__(self):
        self.scheduler.set_timesteps(STEPS)
        latents, prompts = self.tiny.latents, normal(2 * B, 7, 8, seed=2)
        for t in self.scheduler.timesteps:
            predictions = self.transformer(
                torch.cat([self.scheduler.scale_model_input(latents, t)] * 2),
                timestep=t.expand(2 * B),
                encoder_hidden_states=prompts,
                added_cond_kwargs=CONDITIONS,
                return_dict=False,
            )[0]
            free, conditional = predictions.chunk(2)
            prediction = (free + 3.0 * (conditional - free)).chunk(2, dim=1)[0]
            latents = self.scheduler.step(prediction, t, latents, return_dict=False)[0]
        return latents


@torch.inference_mode()
def pixart_call():
    """A model, and a whole request of two prompts to it, as a pipeline makes it."""
    tiny = build("pixart")
    parts = {"transformer": tiny.model, "scheduler": scheduler_for("pixart")}
    call = PipelineCall(TwoPrompts(tiny), "__call__", {}, parts, tuple(parts), torch.device("cpu"))
    return tiny.model, dry_run_of(call)


def sample_plainly(request: Request) -> Tensor:
    """The loop of any diffusers pipeline."""
    scheduler, x = copy.deepcopy(request.scheduler), request.latents
    for t in request.timesteps:
        scaled = scheduler.scale_model_input(x, t) if _scales(scheduler) else x
        prediction = request.denoise(scaled, t)
        x = scheduler.step(prediction, t, x, **request.step_kwargs).prev_sample
    return x


def _scales(scheduler) -> bool:
    return hasattr(scheduler, "scale_model_input")


class TooLarge(nn.Module):
    """A part for which memory suffices as long as it is given all tokens of an image, or not even then."""

    def __init__(self, inner, num_tokens=None):
        super().__init__()
        self.inner, self.num_tokens = inner, num_tokens

    def forward(self, x):
        if x.shape[1] != self.num_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return self.inner(x)


def too_large(num_tokens: int | None = None) -> Tiny:
    """SD3, one of whose blocks runs out of memory unless it is given so many tokens."""
    tiny = build("sd3")
    model = copy.deepcopy(tiny.model)
    block = model.transformer_blocks[2]
    block.ff = TooLarge(block.ff, num_tokens)
    return tiny._replace(model=model)
