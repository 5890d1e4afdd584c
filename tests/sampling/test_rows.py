"""Ranks that divide samples or branches give a denoiser their own rows, wherever these are among its arguments."""

import itertools
from types import SimpleNamespace

import diffusers
import pytest
import torch
from torch import nn

from lightning_diffpipe.comm.links import start_all_gather
from lightning_diffpipe.comm.loopback import LoopbackNetwork
from lightning_diffpipe.comm.packing import TensorShape
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.sampling.call import Call, Phase
from lightning_diffpipe.sampling.dry_run import dry_run_of, observe_samples
from lightning_diffpipe.sampling.loop import PipelineCall
from lightning_diffpipe.sampling.request import OneProcess

FRAMES = 3
ROWS = 4
"""Of two samples with guidance; as many entries have other arguments, too."""


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Denoiser(nn.Module):
    """Videos in, videos out; everything else that it is given counts, too."""

    config = SimpleNamespace(in_channels=4, out_channels=4)

    def forward(self, sample, text, texts=(), frames=None, shared=None, layers=()):
        rows = len(sample)
        out = 0.3 * sample + text.sum(1).view(rows, 1, 1, 1, 1)
        if texts:
            out = out + torch.stack([each.sum() for each in texts]).view(rows, 1, 1, 1, 1)
        if frames is not None:
            out = out + frames.sum(1).view(rows, 1, FRAMES, 1, 1)
        if shared is not None:
            out = out * (1 + shared.std())
        for each in layers:
            out = 0.9 * out + each
        return (out,)


class Control(nn.Module):
    """One residual for each of some layers."""

    def forward(self, sample, count):
        return [sample.sin() * number for number in range(count)]


class Videos:
    """A pipeline whose options say where rows are."""

    def __init__(self, parts, latents="samples", guidance="one after the other", given=()):
        vars(self).update(parts)
        self.options = latents, guidance, given

    def __call__(self, prompt, generator=None, num_inference_steps=3):
        latents, guidance, given = self.options
        num, branches = len(prompt), 1 if guidance in ("none", "a call each") else 2
        text = torch.stack([numbers(5, seed=len(each)) for each in prompt])
        x = torch.randn(num, 4, FRAMES, 2, 2, generator=generator, dtype=torch.float64)
        if guidance == "one after the other":
            text = torch.cat([-text, text])
        elif guidance == "sample by sample":
            text = torch.stack([-text, text], 1).flatten(0, 1)
        rows = num * branches
        arguments = {
            "texts": [text[i, : 2 + i % 2] for i in range(rows)],
            "frames": text.repeat_interleave(FRAMES, 0),
            "shared": numbers(ROWS, 3),
        }
        arguments = {name: value for name, value in arguments.items() if name in given}
        self.scheduler.set_timesteps(num_inference_steps)
        for t in self.scheduler.timesteps:
            if (
                latents == "half of them"
            ):  # both halves of the latents are steps, the second is not looked at
                x = torch.cat([x[:num], x[:num]])
            seen = x[:num]
            if guidance == "one after the other":
                seen = torch.cat([seen, seen])
            elif guidance == "sample by sample":
                seen = seen.repeat_interleave(2, 0)
            if "layers" in given:
                arguments["layers"] = self.control(seen, ROWS)
            texts = (-text, text) if guidance == "a call each" else (text,)
            out, *others = (self.unet(seen, each, **arguments)[0] for each in texts)
            if others:
                without, [with_text] = out, others
            if guidance == "one after the other":
                without, with_text = out.chunk(2)
            elif guidance == "sample by sample":
                without, with_text = out[::2], out[1::2]
            if guidance != "none":
                out = without + 2 * (with_text - without)
            if others:  # as long as before, as Qwen-Image has it
                out = out * with_text.norm(dim=1, keepdim=True) / out.norm(dim=1, keepdim=True)
            if latents == "half of them":
                out = torch.cat([out, out])
            if latents == "frames":
                of_frames = [v.transpose(1, 2).flatten(0, 1) for v in (out, x)]
                stepped = self.scheduler.step(of_frames[0], t, of_frames[1])[0]
                x = stepped.unflatten(0, (num, FRAMES)).transpose(1, 2)
            elif latents == "frame by frame":
                state = self.scheduler._step_index
                for frame in range(FRAMES):
                    self.scheduler._step_index = state
                    x[:, :, frame] = self.scheduler.step(out[:, :, frame], t, x[:, :, frame])[0]
            elif latents == "mean of all":
                x = self.scheduler.step(out, t, x)[0] + 0.1 * x.mean(0, keepdim=True)
            else:
                x = self.scheduler.step(out, t, x)[0]
        return (x[:num],)


LATENTS = ("samples", "frames", "half of them", "frame by frame", "mean of all")
GUIDANCE = ("none", "one after the other", "sample by sample", "a call each")
GIVEN = ((), ("texts",), ("frames",), ("shared",), ("layers",), ("texts", "frames", "shared"))


def call_of(num, *options):
    parts = {
        "unet": Denoiser(),
        "control": Control(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
    }
    arguments = {"prompt": ["a", "bcd", "ef"][:num], "generator": torch.Generator().manual_seed(1)}
    pipeline = Videos({**parts, "unet": parts["unet"]}, *options)
    device = torch.device("cpu")
    return PipelineCall(pipeline, "__call__", arguments, parts, tuple(parts), device)


def drawn_alone(num, *options):
    call = call_of(num, *options)
    [drawn] = Videos(call.parts, *options)(**call.arguments)
    return drawn


@pytest.mark.slow
@pytest.mark.parametrize("latents", LATENTS)
@pytest.mark.parametrize("guidance", GUIDANCE)
def test_samples_are_divided_wherever_their_rows_are(latents, guidance):
    """History: rows were found by their number, and of two videos one was NaN."""
    for given, num in itertools.product(GIVEN, (2, 3)):
        options = latents, guidance, given
        expected = drawn_alone(num, *options)
        call = observe_samples(dry_run_of(call_of(num, *options)))
        assert call.num_shares == (num if latents in LATENTS[:3] else 1), call.apart
        whole = torch.full_like(call.whole, torch.nan)
        for sample in range(call.num_shares):
            part = call.samples(sample, sample + 1) if call.num_shares > 1 else call
            whole[call.rows_of(sample, sample + 1)] = OneProcess().sample(part.request(Denoiser()))
        torch.testing.assert_close(call.finish(whole)[0], expected, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("latents", LATENTS[:2])
@pytest.mark.parametrize("guidance", GUIDANCE[1:])
def test_branches_are_divided_wherever_their_rows_are(latents, guidance):
    """History: tokens of a prediction were cut as if they were channels, and arguments of all rows were halved."""
    for given, num in itertools.product(GIVEN, (1, 2)):
        options = latents, guidance, given
        expected, pair = drawn_alone(num, *options), LoopbackNetwork(2)

        def rank(links, options=options, num=num):
            def exchange(prediction):
                shapes = [TensorShape.of(prediction)] * 2
                return tuple(start_all_gather(links, prediction, shapes, "prediction")())

            call = observe_samples(dry_run_of(call_of(num, *options)))
            half = call.branch(links.rank)
            latents = OneProcess().sample(half.request(Denoiser(), exchange))
            return half.finish(latents)[0]

        for found in pair.run(rank):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_what_cannot_be_divided_is_refused_by_name():
    class Odd(Videos):
        """Gives its denoiser a text for each pair of frames, in an order that nothing shows."""

        def __call__(self, prompt, generator=None):
            x = torch.randn(len(prompt), 4, FRAMES, 2, 2, generator=generator)
            self.scheduler.set_timesteps(2)
            for t in self.scheduler.timesteps:
                seen = torch.cat([x, x])
                text = numbers(len(seen), 5)
                out = self.unet(seen, text, frames=numbers(FRAMES * len(seen), 5))[0]
                x = self.scheduler.step(out.chunk(2)[0], t, x)[0]
            return (x,)

    call = call_of(2)
    call.pipeline = Odd(call.parts)
    apart = observe_samples(dry_run_of(call))
    assert apart.num_shares == 1
    with pytest.raises(
        ConfigurationError, match=r"guidance=2 .* frames has 6 rows for each sample, and sample 2"
    ):
        apart.branch(0)


class OfVideos(nn.Module):
    """Predicts four of six channels of images that have an axis of frames."""

    def forward(self, hidden_states):
        return (hidden_states[:, :4] * 2 + hidden_states[:, 4:].sum(1, keepdim=True),)


def test_a_pipeline_may_give_latents_an_axis_and_further_channels():
    """History: either was known, and both together ended in an error of torch."""
    latents, more = numbers(2, 4, 8, 8), numbers(2, 2, 8, 8, seed=1)
    seen = torch.cat([torch.zeros_like(latents), more], 1)[:, :, None]
    phases = [Phase(("transformer",), latents.shape, calls=[[{"hidden_states": seen}]])]
    call = Call(None, phases, torch.ones(1), latents, None, 2)
    found = call.denoise(OfVideos())(latents, torch.ones(()))
    assert torch.equal(found, latents * 2 + more.sum(1, keepdim=True))
    phases[0].calls = [[{"hidden_states": seen[:, None]}]]
    with pytest.raises(ConfigurationError, match=r"given \(2, 1, 6, 1, 8, 8\) for latents \(2, 4,"):
        call.denoise(OfVideos())(latents, torch.ones(()))
