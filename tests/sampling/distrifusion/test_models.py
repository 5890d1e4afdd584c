"""Whole models on bands: equal to one process where they should be, and to the laws of displacement."""

import math
import time
from dataclasses import replace

import diffusers
import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import AttnProcessor

from lightning_diffpipe.comm.links import Alone
from lightning_diffpipe.comm.loopback import LoopbackNetwork
from lightning_diffpipe.errors import ConfigurationError, GraphError
from lightning_diffpipe.sampling.distrifusion import DistriFusion, emulate
from lightning_diffpipe.sampling.distrifusion import sampler as bands_sampler
from lightning_diffpipe.sampling.rehearsal import relative_error
from lightning_diffpipe.sampling.request import OneProcess
from tests.sampling.distrifusion.models import (
    TRANSFORMERS,
    UNETS,
    build,
    last_prediction,
    normal,
    request_for,
)

FAST = ("sd", "sd3")
EVERY = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
    for name in (*UNETS, *TRANSFORMERS)
]
FEW = [pytest.param("sd", marks=pytest.mark.slow), "sd3"]


@pytest.fixture(scope="module")
def tiny_models():
    known = {}
    return lambda name: known.setdefault(name, build(name))


def relative(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_synchronous_bands_compute_what_one_process_computes(name, tiny_models):
    request = request_for(name, tiny_models(name), num_steps=2)
    wanted = OneProcess().sample(request)
    for num_bands in (2, 3) if name in UNETS else (3,):  # three bands of 32 rows are uneven
        found, _ = emulate(request, num_bands, mode="synchronous", verify=False)
        assert relative(found, wanted) < 1e-12
    naive, _ = emulate(request, 2, mode="naive", warmup_steps=0, verify=False)
    assert relative(naive, wanted) > 1e-6, "the bands would not have needed each other"


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_only_synchronous_steps_are_the_synchronous_mode(name, tiny_models):
    request = request_for(name, tiny_models(name))
    wanted, _ = emulate(request, 2, mode="synchronous")
    for mode in ("displaced", "naive"):
        found, _ = emulate(request, 2, mode=mode, warmup_steps=3)
        assert torch.equal(found, wanted)
        assert not torch.equal(emulate(request, 2, mode=mode, warmup_steps=1)[0], wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_requests_leave_nothing_behind(name, tiny_models):
    tiny = tiny_models(name)
    latents = tiny.latents.clone().requires_grad_()
    first = request_for(name, tiny._replace(latents=latents))
    other = request_for(name, tiny._replace(latents=-tiny.latents))

    def sample(links):
        sampler = DistriFusion(tiny.model, links, warmup_steps=1)
        return [sampler.sample(request) for request in (first, other, first)]

    network = LoopbackNetwork(2, timeout_s=20)
    one, two, three = network.run(sample)[0]
    assert torch.equal(one, three)
    assert not one.requires_grad
    assert torch.equal(one, emulate(first, 2, warmup_steps=1)[0])
    assert torch.equal(two, emulate(other, 2, warmup_steps=1)[0])
    assert not network._mail, "the last step sent something that nobody reads"
    assert "forward" not in tiny.model.__dict__, "the model is still intercepted"


@pytest.mark.slow
def test_a_model_that_was_changed_between_requests_is_looked_at_anew():
    """History: with other attention processors, or FreeU, bands of the second request had seams."""
    tiny = build("sd")
    request = request_for("sd", tiny)

    def sample(links):
        sampler = DistriFusion(tiny.model, links, mode="synchronous")
        first = sampler.sample(request)
        links.broadcast_object(lambda: tiny.model.set_attn_processor(AttnProcessor()))
        with pytest.raises(GraphError, match=r"(baddbmm|softmax)\(\) mixes rows"):
            sampler.sample(request)
        return first

    LoopbackNetwork(2, timeout_s=20).run(sample)


@pytest.mark.slow
def test_guidance_by_two_calls_has_buffers_for_each(tiny_models):
    """One set of buffers for both calls would let the prompt read what the empty prompt left."""
    in_batch, _ = emulate(request_for("sd", tiny_models("sd")), 2, warmup_steps=1)
    by_calls, _ = emulate(
        request_for("sd, two calls", tiny_models("sd, two calls")), 2, warmup_steps=1
    )
    assert relative(by_calls, in_batch) < 1e-12
    assert relative(in_batch, OneProcess().sample(request_for("sd", tiny_models("sd")))) > 1e-4


def test_one_rank_is_the_plain_loop(tiny_models):
    request = request_for("sd", tiny_models("sd"))
    assert torch.equal(
        DistriFusion(request.model, Alone()).sample(request), OneProcess().sample(request)
    )


@pytest.mark.slow
def test_texts_may_change_in_the_middle(tiny_models):
    """Keys and values of texts are remembered only for as long as the text stays the same."""
    tiny = tiny_models("sd")

    def denoise(x, t):
        text = torch.full((2, 7, 12), 1.0 if t > 400 else -1.0, dtype=torch.float64)
        return tiny.model(x, t.expand(2), encoder_hidden_states=text)[0]

    request = request_for("sd", tiny)
    request.denoise = denoise
    found, _ = emulate(request, 2, mode="synchronous")
    assert relative(found, OneProcess().sample(request)) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd", "sd, two calls"])
def test_steps_are_timed_without_what_is_learned_about_the_model(name, tiny_models, monkeypatch):
    """History: the report of one or two steps said that a step takes as long as looking and comparing, too."""
    look, took_s = bands_sampler.analyse, 0.3

    def slowly(*args):
        time.sleep(took_s)
        return look(*args)

    monkeypatch.setattr(bands_sampler, "analyse", slowly)
    _, samplers = emulate(request_for(name, tiny_models(name), num_steps=1), 2)
    for sampler in samplers:
        statistics = sampler.statistics
        assert 0 < statistics.step_s[0] <= statistics.total_s - took_s


class Refining(torch.nn.Module):
    """Lets the tokens of a text attend to each other, and then those of the image to these and to each other."""

    def __init__(self):
        super().__init__()
        self.refine, self.enter, self.leave = Refiner(), *(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, x, text):
        text = self.refine(text)
        image = self.enter(x.movedim(1, -1).flatten(1, 2))[:, None]
        for keys in (image, text[:, None]):
            image = image + F.scaled_dot_product_attention(image, keys, keys)
        return self.leave(image[:, 0]).unflatten(1, x.shape[2:]).movedim(-1, 1)


class Refiner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, text):
        keys = self.linear(text)[:, None]
        return F.scaled_dot_product_attention(keys, keys, keys)[:, 0]


def test_texts_that_attend_to_themselves_leave_other_attention_as_it_is():
    """History: their attention was left out in later steps, and the image's was taken for theirs."""
    torch.manual_seed(0)
    model, text, request = Refining().double(), normal(2, 7, 4, seed=3), request_for("sd")
    request = replace(request, model=model, denoise=lambda x, t: model(x, text))
    found, _ = emulate(request, 2, mode="synchronous")
    assert relative(found, OneProcess().sample(request)) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("generators", [None, "one", "one for each sample"])
def test_noise_on_the_way_is_that_of_one_process_on_all_bands(generators, tiny_models):
    """History: threads drew from one default generator, or from the generators of one list, each other noise."""
    scheduler = diffusers.EulerAncestralDiscreteScheduler()
    scheduler.set_timesteps(3)

    def request():
        torch.manual_seed(3)
        made = [torch.Generator().manual_seed(seed) for seed in (4, 5)]
        given = {None: {}, "one": {"generator": made[0]}}.get(generators, {"generator": made})
        plain = request_for("sd", tiny_models("sd"))
        return replace(plain, scheduler=scheduler, timesteps=scheduler.timesteps, step_kwargs=given)

    wanted = OneProcess().sample(request())
    drawn = torch.get_rng_state()
    found, _ = emulate(request(), 4, mode="synchronous", verify=False)
    assert relative(found, wanted) < 1e-12
    assert torch.equal(torch.get_rng_state(), drawn), "the next request draws as it would"


class Drawing(diffusers.DDIMScheduler):
    """Takes no generator, and draws all the same."""

    def step(self, prediction, timestep, latents):
        stepped = super().step(prediction, timestep, latents)
        stepped.prev_sample += torch.randn_like(latents)
        return stepped


@pytest.mark.slow
def test_bands_that_drew_other_noise_are_named(tiny_models):
    """History: a bare AssertionError, when all was done."""
    scheduler = Drawing()
    scheduler.set_timesteps(3)
    request = replace(request_for("sd", tiny_models("sd")), scheduler=scheduler)
    with pytest.raises(ConfigurationError, match="Drawing or the request's closure uses torch"):
        emulate(request, 2, verify=False)


@pytest.mark.slow
@pytest.mark.parametrize(("warmup_threshold", "num_synchronous"), [(1e9, 1), (0.0, 3)])
def test_automatic_warmup_ends_when_latents_hardly_change(
    warmup_threshold, num_synchronous, tiny_models
):
    request = request_for("sd", tiny_models("sd"), num_steps=3)
    found, samplers = emulate(request, 2, warmup_steps="auto", warmup_threshold=warmup_threshold)
    assert {sampler.statistics.num_synchronous for sampler in samplers} == {num_synchronous}
    assert torch.equal(found, emulate(request, 2, warmup_steps=num_synchronous)[0])


def test_automatic_warmup_does_not_end_by_latents_that_are_not_finite():
    """History: a difference that is no number was taken for none."""
    assert bands_sampler._change(torch.ones(2), torch.tensor([1.0, math.nan])) == math.inf
    assert bands_sampler._change(torch.ones(2), torch.ones(2)) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bands_add_little_to_the_rounding_of_low_precision(dtype, tiny_models):
    exact = tiny_models("sd")
    with torch.inference_mode():
        wanted = exact.denoise(exact.model)(exact.latents, torch.tensor(500))
        tiny = build("sd")
        call, x = tiny.denoise(_Casting(tiny.model.to(dtype), dtype)), tiny.latents.to(dtype)
        plain = call(x, torch.tensor(500))
    found = last_prediction(tiny.model, [x], 2, call, verify=False)
    assert relative(found.double(), wanted) < 2 * relative(plain.double(), wanted)


@pytest.mark.slow
def test_the_weights_say_what_rounding_is_too():
    """History: a model in bfloat16 was refused for its rounding, since latents were in float32."""
    tiny = build("sd")
    call = tiny.denoise(_Casting(tiny.model.bfloat16(), torch.bfloat16))
    assert last_prediction(tiny.model, [tiny.latents.float()], 2, call).isfinite().all()


def test_an_overflow_is_not_taken_for_another_result():
    """History: a model that overflows was refused for an operator that does nothing wrong."""
    whole = torch.ones(4)
    assert relative_error(whole * torch.nan, whole) == float("inf")
    assert relative_error(whole * torch.nan, whole * torch.inf) == 0.0


class _Casting:
    """Casts conditions to the model's precision."""

    def __init__(self, model, dtype):
        self.model, self.dtype = model, dtype

    def __call__(self, *args, **kwargs):
        def cast(x):
            return x.to(self.dtype) if torch.is_tensor(x) and x.is_floating_point() else x

        return self.model(*map(cast, args), **{k: cast(v) for k, v in kwargs.items()})
