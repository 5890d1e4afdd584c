"""Schedulers in patches: admitted by trying them, stepped as in one process, refused by name."""

import abc
import pickle
from types import SimpleNamespace

import diffusers
import pytest
import torch

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.sampling.dry_run import dry_run_of
from lightning_diffpipe.sampling.loop import PipelineCall
from lightning_diffpipe.sampling.pipefusion import PipeFusion
from lightning_diffpipe.sampling.request import InputScaler, OneProcess, Request
from lightning_diffpipe.sampling.schedulers import PatchSchedulers, for_samples, is_elementwise
from tests.sampling.models import build, knowing, request_for, sample_plainly
from tests.sampling.ranks_in_threads import sample_together

DETERMINISTIC = [
    "DDIMScheduler", "DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler", "EulerDiscreteScheduler",
    "FlowMatchEulerDiscreteScheduler", "HeunDiscreteScheduler", "KDPM2DiscreteScheduler", "PNDMScheduler",
    "UniPCMultistepScheduler",
]  # fmt: skip
STOCHASTIC = ["DDPMScheduler", "EulerAncestralDiscreteScheduler", "LCMScheduler"]


def make(name: str, num_steps: int = 4, **config):
    scheduler = getattr(diffusers, name)(**config)
    scheduler.set_timesteps(num_steps)
    return scheduler


def generator():
    return torch.Generator().manual_seed(3)


@pytest.fixture(scope="module")
def tiny():
    return build("pixart")


@pytest.fixture(scope="module")
def synchronous(tiny):
    """All steps compute all tokens, but patches are stepped apart; the model is probed once."""
    return knowing(PipeFusion(tiny.model, num_patches=4, warmup_steps=99), "pixart", tiny)


@pytest.mark.slow
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_synchronous_steps_in_patches_are_one_process(name, tiny, synchronous):
    """Histories of multistep solvers and the scaling of Euler's input included."""
    request = request_for("pixart", make(name), tiny=tiny)
    expected = sample_plainly(request)
    result = synchronous.sample(request)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    assert getattr(request.scheduler, "_step_index", None) is None  # the request's own is untouched


@pytest.mark.parametrize("name", STOCHASTIC)
def test_noise_of_patches_is_cut_out_of_noise_for_the_whole(name, tiny, synchronous):
    def request():
        return request_for("pixart", make(name), tiny=tiny, generator=generator())

    result = synchronous.sample(request())
    torch.testing.assert_close(result, sample_plainly(request()), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler", "KDPM2DiscreteScheduler"]
)
def test_ranks_that_never_step_scale_their_input_all_the_same(name, tiny):
    options = {"make_generator": generator} if name in STOCHASTIC else {}
    kwargs = {"generator": generator()} if options else {}
    request = request_for("pixart", make(name), tiny=tiny, **kwargs)
    alone = knowing(PipeFusion(tiny.model, num_patches=4), "pixart", tiny)
    expected = alone.sample(request)
    results, _ = sample_together(
        "pixart", tiny, 2, lambda m, links: PipeFusion(m, links, num_patches=4),
        scheduler=make(name), **options,
    )  # fmt: skip
    assert all(torch.equal(result, expected) for result in results)


def test_eta_is_passed_on(tiny, synchronous):
    def request(eta):
        return request_for(
            "pixart", make("DDIMScheduler"), tiny=tiny, eta=eta, generator=generator()
        )

    result = synchronous.sample(request(0.7))
    torch.testing.assert_close(result, sample_plainly(request(0.7)), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(result, sample_plainly(request(0.0)))


def test_a_scheduler_that_looks_at_all_rows_is_refused_by_name(tiny):
    scheduler = make("DDPMScheduler", thresholding=True, sample_max_value=100.0)
    request = request_for("pixart", scheduler, tiny=tiny)
    with pytest.raises(ConfigurationError, match="DDPMScheduler reads all rows"):
        knowing(PipeFusion(tiny.model, num_patches=2), "pixart", tiny).sample(request)
    whole = knowing(PipeFusion(tiny.model, num_patches=1), "pixart", tiny)
    whole.sample(request)  # one patch is the whole


def test_a_scheduler_that_cannot_be_stepped_is_refused_by_name():
    """History: one that takes a predicted variance ended in a TypeError."""
    scheduler = make("DDPMScheduler", variance_type="learned_range")
    with pytest.raises(ConfigurationError, match=r"DDPMScheduler fails .* variance_type=fixed_sm"):
        is_elementwise(scheduler, scheduler.timesteps, ndim=4, axis=-2)


def test_trying_leaves_the_random_state_alone():
    scheduler = make("DDPMScheduler")
    torch.manual_seed(11)
    expected = torch.randn(3)
    torch.manual_seed(11)
    assert is_elementwise(scheduler, scheduler.timesteps, ndim=4, axis=-2)
    assert torch.equal(torch.randn(3), expected)


def test_scaling_inputs_draws_nothing_from_outside(tiny):
    """Though a copy of the scheduler is stepped to know what it is before each step."""
    request = request_for("pixart", make("EulerAncestralDiscreteScheduler"), tiny=tiny)
    before = torch.get_rng_state()
    InputScaler(request)
    assert torch.equal(torch.get_rng_state(), before)


def test_trying_leaves_generators_of_gpus_alone(monkeypatch):
    """History: every GPU of rank 0 went on with seed 2 after its first request in patches."""
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    scheduler = make("DDPMScheduler")
    assert is_elementwise(scheduler, scheduler.timesteps, ndim=4, axis=-2)
    assert not seeded


class OnGpu(torch.Tensor):
    """Stands for a tensor of another device: works with those and with scalars, until it is brought to the host."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        host = [x for x in args if isinstance(x, torch.Tensor) and not isinstance(x, cls)]
        if any(x.ndim for x in host) and func is not torch.Tensor.__getitem__:
            raise RuntimeError("Expected all tensors to be on the same device")
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out.as_subclass(torch.Tensor) if func is torch.Tensor.cpu else out

    def __deepcopy__(self, memo):
        return self.clone()


def test_a_scheduler_is_tried_on_the_host_wherever_it_is():
    """History: LCM weighs latents by a function of the timestep, which failed where that was on a GPU."""
    scheduler = make("LCMScheduler")
    scheduler.timesteps = scheduler.timesteps.as_subclass(OnGpu)
    assert is_elementwise(scheduler, scheduler.timesteps, ndim=4, axis=-2)
    assert isinstance(scheduler.timesteps, OnGpu)  # the given one is untouched


def test_patches_of_unequal_length_share_their_noise():
    scheduler, x = make("DDPMScheduler"), torch.zeros(1, 2, 7, 3, dtype=torch.float64)
    whole, parts = (
        PatchSchedulers(scheduler, {"generator": generator()}, slices, -2)
        for slices in ([(0, 7)], [(0, 3), (3, 2), (5, 2)])
    )
    y = x.clone()
    for t in scheduler.timesteps:
        whole.step(x, torch.zeros_like(x), t, 0, {})
        for m in range(3):
            parts.step(y, torch.zeros_like(y), t, m, {})
    assert torch.equal(x, y)
    assert x.any()


@pytest.mark.parametrize("name", STOCHASTIC)
def test_some_samples_get_their_noise_of_all_samples(name):
    scheduler, x = make(name), torch.zeros(3, 2, 7, 3, dtype=torch.float64)
    rows, y = [0, 2], torch.zeros(2, 2, 7, 3, dtype=torch.float64)
    whole = PatchSchedulers(scheduler, {"generator": generator()}, [(0, 7)], -2)
    parts = PatchSchedulers(
        for_samples(scheduler, rows, x), {"generator": generator()}, [(0, 3), (3, 4)], -2
    )
    for t in scheduler.timesteps:
        whole.step(x, torch.zeros_like(x), t, 0, {})
        for m in range(2):
            parts.step(y, torch.zeros_like(y), t, m, {})
    assert torch.equal(x[rows], y)
    assert x.any()
    assert getattr(scheduler, "_step_index", None) is None  # the given one is untouched


def test_a_scheduler_that_looks_at_all_samples_is_refused_by_name():
    class MeanSubtracting(diffusers.DDIMScheduler):
        def step(self, model_output, *args, **kwargs):
            return super().step(model_output - model_output.mean(), *args, **kwargs)

    scheduler = MeanSubtracting()
    scheduler.set_timesteps(3)
    with pytest.raises(ConfigurationError, match="MeanSubtracting reads all samples"):
        for_samples(scheduler, [0], torch.zeros(2, 4, 4, 4))


class OfTwo:
    """The least of a pipeline that is given generators."""

    def __call__(self, generator, eta):
        noise = torch.stack([torch.randn(4, 4, 4, generator=each) for each in generator])
        self.scheduler.set_timesteps(3)
        for t in self.scheduler.timesteps:
            noise = self.scheduler.step(
                self.unet(noise)[0], t, noise, generator=generator
            ).prev_sample
        return noise


def call_with(generators, pipeline=OfTwo, scheduler=None):
    parts = {"scheduler": scheduler or make("DDPMScheduler"), "unet": unet_of_one_layer()}
    arguments = {"generator": generators, "eta": 1.0}
    call = PipelineCall(pipeline(), "__call__", arguments, parts, tuple(parts), torch.device("cpu"))
    return dry_run_of(call)


@pytest.mark.parametrize("bases", [(diffusers.DDPMScheduler,), (diffusers.DDPMScheduler, abc.ABC)])
def test_pipelines_may_compare_the_class_of_their_scheduler(bases):
    """Also one that has a metaclass of its own."""
    kind = type("Own", bases, {})
    compared = []

    class Comparing(OfTwo):
        def __call__(self, generator, eta):
            own = type(self.scheduler)
            compared.append((own == kind, own in [kind], own == bases[0], own is kind))
            return super().__call__(generator, eta)

    call = call_with([generator() for _ in range(2)], Comparing, kind())
    assert set(compared) == {(True, True, False, False)}
    assert type(call.scheduler) is kind


def unet_of_one_layer():
    class Unet(torch.nn.Module):
        config = SimpleNamespace(in_channels=4, out_channels=4)

        def forward(self, sample):
            return (0.1 * sample,)

    return Unet()


def test_generators_of_samples_are_divided_with_them():
    call = call_with([generator() for _ in range(3)])
    part = call.samples(1, 3)
    assert len(part.request(torch.nn.Identity()).step_kwargs["generator"]) == 2
    assert part.scheduler is call.scheduler


def test_generators_of_samples_travel_to_other_ranks():
    """History: a list of them arrived as their states, of which no scheduler draws."""
    generators = [torch.Generator().manual_seed(i) for i in range(2)]
    expected = [torch.randn(4, 4, 4, generator=each) for each in generators]
    expected = [torch.randn(3, generator=each) for each in generators]
    call = call_with([torch.Generator().manual_seed(i) for i in range(2)])
    packed = pickle.loads(pickle.dumps(call.packed()))
    request = packed.unpacked(torch.device("cpu")).request
    for steps in [request(torch.nn.Identity()).step_kwargs for _ in range(2)]:
        # each request's own, from the same state
        found = [torch.randn(3, generator=each) for each in steps["generator"]]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", STOCHASTIC)
def test_noise_of_patches_with_a_generator_for_each_sample(name, tiny, synchronous):
    def request():
        return request_for(
            "pixart",
            make(name),
            tiny=tiny,
            generator=[generator(), torch.Generator().manual_seed(4)],
        )

    torch.testing.assert_close(
        synchronous.sample(request()), sample_plainly(request()), rtol=0, atol=1e-9
    )


def test_one_process_samples_with_a_scheduler_that_scales_nothing():
    """History: the request that the documentation shows ended in an AttributeError with Flux's scheduler."""
    scheduler = make("FlowMatchEulerDiscreteScheduler")
    assert not hasattr(scheduler, "scale_model_input")
    noise = torch.randn(1, 4, 8, 8, generator=generator())
    model = torch.nn.Identity()
    request = Request(model, lambda x, t: 0.5 * model(x), scheduler, scheduler.timesteps, noise)
    assert torch.equal(OneProcess().sample(request), sample_plainly(request))
