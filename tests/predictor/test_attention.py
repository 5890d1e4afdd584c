"""Kernels of attention: those of diffusers' registry compute in every method, on all ranks, as on one."""

import contextlib
from unittest import mock

import pytest
import torch
from diffusers.models import attention_dispatch

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.predictor import Predictor
from lightning_diffpipe.sampling.tracing.attention import KernelsAnswered
from tests.modules.tiny_parts import perturbed_latent_diffusion
from tests.predictor.scenarios import final_latents
from tests.predictor.tiny_pipelines import options_of, prompts_of
from tests.ranks import run_ranks
from tests.rows import row

STEPS = 3
SHRINKS = 0.7
"""What the kernel here multiplies values with, so that no other attention could have computed its latents."""
REGISTRY = attention_dispatch._AttentionBackendRegistry
FLASH = attention_dispatch.AttentionBackendName.FLASH


@contextlib.contextmanager
def own_kernel(gives_normaliser=True):
    """Registers a kernel as `flash`; gives a list of the numbers of queries and keys of its calls."""
    calls = []

    def kernel(query, key, value, scale=None, return_lse=False):
        calls.append((query.shape[1], key.shape[1]))
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
        out = (scores.softmax(-1) @ v * SHRINKS).transpose(1, 2)
        return (out, scores.logsumexp(-1)) if return_lse else out

    def without(query, key, value, scale=None):
        return kernel(query, key, value, scale)

    with (
        mock.patch.dict(REGISTRY._backends),
        mock.patch.dict(REGISTRY._constraints),
        mock.patch.dict(REGISTRY._supported_arg_names),
        mock.patch.object(attention_dispatch, "_CAN_USE_FLASH_ATTN", True),
    ):
        REGISTRY.register(FLASH)(kernel if gives_normaliser else without)
        yield calls


def latents_of(path, name, **options):
    settings = {"num_inference_steps": STEPS, "guidance_scale": 3.0, **options_of(name)}
    [latents] = final_latents(
        path, [(prompts_of(name)[:1], settings)], dtype=torch.float64, **options
    )
    return latents


def draw_each(rank, path, name, several):
    """Latents by each method, with the calls of the kernel on this rank."""
    drawn = []
    for options in several:
        with own_kernel() as calls:
            drawn.append((latents_of(path, name, **options), list(calls)))
    return drawn


WARM = {"method": "pipefusion", "num_patches": 2, "warmup_steps": STEPS}
PATCHES = {"method": "pipefusion", "num_patches": 2}
EXACT = {
    "flux": [
        WARM,
        {"method": "sequence"},
        {"method": "sequence", "mode": "ring"},
        {"method": "distrifusion", "warmup_steps": STEPS},
    ],
    "wan": [{"method": "single", "guidance": 2}, {"method": "sequence", "mode": "ring"}],
}


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["flux", row("wan")])
def test_ranks_draw_with_a_kernel_of_ones_own_what_one_draws_with_it(name, folder_of):
    path, jobs = folder_of(name), [options | {"attention": "flash"} for options in EXACT[name]]
    with own_kernel() as calls:
        expected = latents_of(path, name, method="single", attention="flash")
    assert calls
    plain = latents_of(path, name, method="single")
    assert (expected - plain).norm() / plain.norm() > 1e-3
    for drawn in run_ranks(draw_each, 2, path, name, jobs):
        for options, (found, calls) in zip(jobs, drawn, strict=True):
            assert calls, options
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.distributed
def test_a_patch_attends_to_all_tokens_by_the_users_kernel(folder_of):
    """Two ranks draw in patches what one rank draws in patches, and each of its calls sees keys of all."""
    path, options = folder_of("flux"), PATCHES | {"attention": "flash"}
    with own_kernel() as calls:
        expected = latents_of(path, "flux", **options)
    assert any(queries < keys for queries, keys in calls)
    for ((found, calls),) in run_ranks(draw_each, 2, path, "flux", [options]):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert any(queries < keys for queries, keys in calls)


@pytest.mark.parametrize(
    "options",
    [
        PATCHES | {"attention": "_native_flash"},
        row(PATCHES | {"attention": "_native_math"}),
        row(PATCHES | {"attention": "flex"}),
        row(PATCHES | {"attention": "native"}),
    ],
    ids=lambda options: options["attention"],
)
def test_kernels_of_torch_draw_in_patches_what_it_draws_by_itself(options, folder_of):
    path = folder_of("flux")
    found = latents_of(path, "flux", **options)
    torch.testing.assert_close(found, latents_of(path, "flux", **PATCHES), rtol=1e-9, atol=1e-9)


def test_the_kernel_of_the_environment_is_kept(folder_of):
    path, flash = folder_of("flux"), PATCHES | {"attention": "flash"}
    with own_kernel():
        expected = latents_of(path, "flux", **flash)
    with own_kernel() as calls, attention_dispatch.attention_backend("flash"):
        found = latents_of(path, "flux", **PATCHES)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert calls


def test_the_registry_is_left_with_the_users_kernels():
    """History: what was registered during a request was lost; after an error on entry nobody answered any more."""
    before, one = dict(REGISTRY._backends), sum
    with own_kernel():
        with KernelsAnswered(), KernelsAnswered():
            REGISTRY._backends[FLASH] = one
        assert REGISTRY._backends == before | {FLASH: one}
        REGISTRY._backends[FLASH] = torch._C._nn.scaled_dot_product_attention
        with pytest.raises(ValueError, match="no signature"), KernelsAnswered():
            pass
    with KernelsAnswered():
        assert REGISTRY._backends[FLASH] is KernelsAnswered.by_name["flash"].dispatched
    assert REGISTRY._backends == before


def test_compiled_blocks_keep_the_kernel(folder_of):
    path, options = folder_of("flux"), {"method": "single", "attention": "flash"}
    torch.compiler.reset()
    with own_kernel() as calls:
        expected = latents_of(path, "flux", **options)
        num_calls = len(calls)
        found = latents_of(path, "flux", compile="blocks", compile_backend="eager", **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len(calls) == 2 * num_calls


def refused(rank, path):
    """What a ring says of kernels without normalisers, and how many weights were there."""
    said = []
    with own_kernel(gives_normaliser=False):
        for name in ("flash", "_native_math"):
            options = {"method": "sequence", "mode": "ring", "attention": name}
            predictor = Predictor.from_pretrained(path, **options)
            with pytest.raises(ConfigurationError) as error:
                predictor(prompts_of("flux"), num_inference_steps=2, **options_of("flux"))
            said.append(str(error.value))
            assert all(not any(p.stride()) for p in predictor.source.denoiser.parameters())
            predictor.close()
    return said


@pytest.mark.distributed
def test_a_ring_refuses_kernels_without_normalisers_before_weights_are_read(folder_of):
    for said in run_ranks(refused, 2, folder_of("flux")):
        for name, reason in zip(("flash", "_native_math"), said, strict=True):
            assert f"attention={name}: a ring merges results by their normalisers" in reason


@pytest.mark.parametrize(
    ("name", "attention", "reason"),
    [
        ("flux", "fast", "attention=fast: FluxTransformer2DModel cannot: .* one of the following"),
        ("stable_diffusion", "_native_math", "its attention has one kind of kernel"),
    ],
)
def test_what_a_denoiser_cannot_take_is_refused(name, attention, reason, folder_of):
    with pytest.raises(ConfigurationError, match=reason):
        Predictor.from_pretrained(folder_of(name), "single", attention=attention)


def test_a_module_in_memory_is_not_changed():
    with pytest.raises(ConfigurationError, match="attention=native would change the module"):
        Predictor.from_module(perturbed_latent_diffusion(), "single", attention="native")
