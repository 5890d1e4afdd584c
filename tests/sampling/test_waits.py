"""No host waits for its device in a denoising loop, after the first step."""

import copy

import diffusers
import pytest
import torch

from lightning_diffpipe.comm.loopback import LoopbackNetwork
from lightning_diffpipe.sampling import loop
from lightning_diffpipe.sampling.distrifusion import DistriFusion
from lightning_diffpipe.sampling.pipefusion import PipeFusion, SequenceParallel
from lightning_diffpipe.sampling.request import OneProcess
from lightning_diffpipe.sampling.schedulers import HostTimesteps
from tests.sampling.models import build, knowing, pixart_call, request_for
from tests.sampling.traffic import Waits, request_on_device

METHODS = {
    "single": (1, lambda model, links: OneProcess()),
    "pipefusion, one rank": (1, lambda m, links: PipeFusion(m, num_patches=4, verify=False)),
    "pipefusion": (2, lambda m, links: PipeFusion(m, links, num_patches=4, split=[2], verify=False)),
    "ulysses": (2, lambda m, links: SequenceParallel(m, links, verify=False)),
    "ring": (2, lambda m, links: SequenceParallel(m, links, mode="ring", verify=False)),
    "distrifusion": (2, lambda m, links: DistriFusion(m, links, warmup_steps=1, verify=False)),
}  # fmt: skip


def waits_of(name, scheduler, method):
    """Counts what each rank waits for in the loop, by operator."""
    num_ranks, make = METHODS[method]
    tiny = build(name)
    network = LoopbackNetwork(num_ranks, timeout_s=20)
    all_waits = [Waits() for _ in range(num_ranks)]

    def rank(links):
        waits = all_waits[links.rank]
        model = copy.deepcopy(tiny.model)
        stepping = scheduler and diffusers.DDPMScheduler()
        if stepping:
            stepping.set_timesteps(4)
        request = request_for(name, stepping, tiny=tiny._replace(model=model))
        request.scale_input = hasattr(request.scheduler, "scale_model_input")
        sampler = make(model, links)
        if hasattr(sampler, "layouts"):
            knowing(sampler, name, tiny)
        with waits:
            sampler.sample(request_on_device(request), waits.end_step)

    network.run(rank)
    assert all(len(waits.ends) == 4 for waits in all_waits)
    # The second step of bands finds out, by values, which modules are given the same texts in every step.
    return [waits.after(2 if method == "distrifusion" else 1) for waits in all_waits]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("name", "scheduler"), [("pixart", None), ("flux", None), ("dit", None), ("dit", "DDPM")]
)
def test_nothing_waits_for_the_device(name, scheduler, method):
    """History: DDIM read two values for each patch and step, to index its tables on the host by a timestep."""
    assert not any(waits_of(name, scheduler, method))


def test_what_waits_is_seen():
    """The counter itself: DDIM as diffusers steps it, with a timestep of the device."""
    waits = Waits()
    request = request_on_device(request_for("dit"))
    with waits:
        request.scheduler.step(request.latents, request.timesteps[0], request.latents)
        assert set(waits.counted) == {"_local_scalar_dense"}
        host = request.latents.cpu()
        for target in ("cpu", torch.device("cpu"), host):
            request.latents.to(target)
        request.latents.to(device="cpu", dtype=torch.float16)
        request.latents.to(torch.float16).to(request.latents.device)
        host.to(request.latents).tolist()
        bool(request.latents.sum() > 0)
        request.latents.tolist()
    assert waits.counted["cpu"] == 5
    assert waits.counted["tolist"] == 2
    assert waits.counted["_local_scalar_dense"] > 1


@torch.inference_mode()
def test_the_loop_of_a_pipeline_steps_with_timesteps_of_the_host(monkeypatch):
    model, call = pixart_call()
    given = []

    class Noting(HostTimesteps):
        def of(self, t, schedule):
            found = super().of(t, schedule)
            given.append((t, found))
            return found

    monkeypatch.setattr(loop, "HostTimesteps", Noting)
    OneProcess().sample(call.request(model))
    assert len(given) == 4
    for t, found in given:
        assert found is not t
        assert torch.equal(found, t)


def test_timesteps_of_a_schedule_are_copied_once():
    waits = Waits()
    schedule = request_on_device(request_for("dit")).timesteps
    timesteps = HostTimesteps()
    with waits:
        found = [timesteps.of(t, schedule) for t in schedule]
        other = schedule.clone()[1]
    assert dict(waits.counted) == {"cpu": 1}
    assert torch.equal(torch.stack(found), schedule)
    assert not any(getattr(t, "is_of_device", False) for t in found)
    assert timesteps.of(other, schedule) is other
    assert timesteps.of(7, schedule) == 7
