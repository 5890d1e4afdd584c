"""What ranks do in the distributed tests of the Predictor."""

import contextlib
import os
import time
from unittest import mock

import numpy as np
import pytest
import torch

from lightning_diffpipe.comm.watcher import watcher
from lightning_diffpipe.errors import DiffPipeError
from lightning_diffpipe.graph.placement import place_parameters
from lightning_diffpipe.planning.cluster import Link
from lightning_diffpipe.predictor import Predictor
from lightning_diffpipe.sampling.distrifusion import emulate
from lightning_diffpipe.sampling.pipefusion import sampler as pipefusion
from lightning_diffpipe.sampling.report import SamplingStatistics
from lightning_diffpipe.sampling.skeleton import load_weights
from lightning_diffpipe.sampling.world import World
from tests.modules.tiny_parts import perturbed_latent_diffusion
from tests.nccl_like import pretend_nccl


def draw(rank, path, prompts, settings, options):
    """Images of rank 0 as an array, with the report; on others whether they got None."""
    with Predictor.from_pretrained(path, **options) as predictor:
        torch.manual_seed(rank)  # ranks of a user are not seeded alike
        images = predictor(prompts, **settings)
        if rank:
            return images is None
        return as_array(images), predictor.report


def as_array(images):
    return np.stack([np.asarray(image) for image in images])


def draw_in_turn(rank, path, requests, options, splits=None, costs=()):
    """Images of several requests to one predictor.

    Args:
        rank: This one.
        path: Of the pipeline.
        requests: Prompts and settings of each.
        options: Of the predictor.
        splits: Where blocks have to be cut for each, or None.
        costs: What blocks are found to cost, each time they are measured.
    """
    if costs:
        found = iter(costs)
        pipefusion.measured_costs = lambda layout, request: next(found)
    drawn = []
    with Predictor.from_pretrained(path, **options) as predictor:
        for (prompts, settings), split in zip(
            requests, splits or [None] * len(requests), strict=True
        ):
            if split is not None:
                predictor._worker._sampler.split = split
            images = predictor(prompts, **settings)
            drawn.append(images is None if rank else as_array(images))
    return drawn


def requests_in_turn(rank, in_turn, fresh):
    """Jobs of `draw_in_turn`, then jobs of `draw`."""
    return [draw_in_turn(rank, *job) for job in in_turn], draw_each(rank, fresh)


def slow_links():
    """A network on which patches flow, and Ulysses would wait."""
    return mock.patch.object(World, "measured_link", return_value=Link(1e6, 0.05))


def draw_as_chosen(rank, path, prompts, settings, options):
    """With `method="auto"`, twice; then by name."""
    with slow_links(), Predictor.from_pretrained(path, method="auto", **options) as predictor:
        images = predictor(prompts, **settings)
        chosen = predictor.report
        predictor(prompts, **settings | {"num_inference_steps": 2})
        later = predictor.report
    by_name = draw(rank, path, prompts, settings, {"method": "pipefusion", **options})
    if rank == 0:
        return as_array(images), chosen, later, by_name
    return None


def counts_tokens(module, args, out):
    """A block that numbers its tokens from 0, however many it is given."""
    return out + torch.linspace(0, 1, out.shape[1])[:, None]


def expects_all_tokens(module, args, out):
    """A block that fails on fewer tokens than there are in an image of 32 pixels."""
    if out.shape[1] < 64:
        raise RuntimeError(f"64 tokens expected, got {out.shape[1]}")


def draw_in_spite(rank, path, prompts, settings, options, hook, block):
    """With `method="auto"` and a model that is refused: twice, and what one process draws; then by name."""

    def hooked(**options):
        predictor = Predictor.from_pretrained(path, **options)
        predictor.source.denoiser.transformer_blocks[block].ff.register_forward_hook(hook)
        return predictor

    with slow_links(), hooked(method="auto", **options) as predictor:
        found = [predictor(prompts, **settings) for _ in range(2)]
        chosen = predictor.report
    started_s = time.monotonic()
    with hooked(method="pipefusion", num_patches=2) as predictor:
        try:
            predictor(prompts, **settings)
        except DiffPipeError as error:
            said = f"{type(error).__name__}: {error}"
    refused = said, time.monotonic() - started_s
    if rank:
        return refused
    alone = hooked(method="single", alone=True)(prompts, **settings)
    return [as_array(images) for images in (*found, alone)], chosen, refused


def draw_each(rank, jobs):
    """Several jobs one after the other, which saves starting processes for each."""
    return [draw(rank, *job) for job in jobs]


def final_latents(path, requests, **options):
    """Final latents of some requests, prompts and settings, to one predictor, as every rank has them."""
    latents = []
    with Predictor.from_pretrained(path, **options) as predictor:
        sample = predictor._sample
        predictor._sample = lambda *call: latents.append(sample(*call)) or latents[-1]
        for prompts, settings in requests:
            predictor(prompts, **settings)
    return latents


def latents_of_each(rank, jobs):
    """Final latents of several jobs: images of 8 bits hide small differences."""
    return [final_latents(path, [request], **options)[0] for path, *request, options in jobs]


def second_latents_of_each(rank, jobs):
    """As `latents_of_each`, of the second of two requests with one generator, and with the default one."""
    found = []
    for path, prompts, settings, options in jobs:
        torch.manual_seed(8 + rank)
        again = settings | {"generator": torch.Generator().manual_seed(5)}
        found.append(final_latents(path, [(prompts, again)] * 2, **options)[1])
    return found


def failure_of_each(rank, jobs):
    """What the errors of several jobs say, on every rank."""
    return [failure(rank, *job) for job in jobs]


def failure_of_each_rank(rank, jobs):
    """As `failure_of_each`, where each job is one for each rank."""
    return failure_of_each(rank, [job[rank] for job in jobs])


def failure(rank, path, prompts, settings, options):
    """What the error says, on every rank."""
    try:
        draw(rank, path, prompts, settings, options)
    except DiffPipeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refused_later(rank, path, prompts, settings, options):
    """What a predictor says that is closed, and one of a module of which one rank has a stage only."""
    predictor = Predictor.from_pretrained(path, **options)
    predictor(prompts, **settings)
    for _ in range(2):
        predictor.close()
    module = perturbed_latent_diffusion()
    if rank == 1:
        place_parameters(
            module, [name for name, _ in module.transformer.named_parameters("transformer")], "cpu"
        )
    said = []
    for call in (lambda: predictor(prompts, **settings), lambda: Predictor.from_module(module)):
        with pytest.raises(DiffPipeError) as refusal:
            call()
        said.append(str(refusal.value))
    return said


def lost(rank, port, path, prompts, settings, options, victim, when, how, phase, folder):
    """One rank is killed or frozen, perhaps the one that has the store, once the others know what it does.

    They write what their errors say into `folder`.

    Args:
        rank: This one.
        port: Where ranks meet, as they do in use.
        path: Of the pipeline.
        prompts: To be drawn.
        settings: Of the request.
        options: Of the predictor.
        victim: Which one.
        when: The function in which it happens; empty for the second denoising step.
        how: The signal.
        phase: What it does then.
        folder: Where the others write what they see.
    """
    note = watcher._note

    def note_seen(status):
        note(status)
        if status.rank == victim and status.phase == phase:
            (folder / f"{rank}.sees").touch()

    watcher._note = note_seen
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def strike(*arguments, **options):
        while len(list(folder.glob("*.sees"))) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), how)

    def on_step(done, steps):
        if rank == victim and done == 2 and not when:
            strike()

    with mock.patch(when, strike) if rank == victim and when else contextlib.nullcontext():
        said = failure(rank, path, prompts, settings | {"on_step": on_step}, options)
    (folder / str(rank)).write_text(said)
    while len(list(folder.glob("[0-9]"))) < 2:
        time.sleep(0.05)
    os._exit(1)  # the victim is still there


def left(rank, path, prompts, settings, options):
    """What each rank says where rank 0 fails when all have drawn, and has told nobody yet."""
    gather = "lightning_diffpipe.predictor.Worker.gather"
    fails = mock.patch(gather, side_effect=DiffPipeError("no room for the images"))
    with fails if rank == 0 else contextlib.nullcontext():
        return failure(rank, path, prompts, settings, options)


def hung_before_it_draws(rank, path, prompts, settings, options, folder):
    """Rank 1 reads its weights until rank 0 has written what its error says; nobody is busy for over 12 s."""

    def never_read(*arguments):
        while not (folder / "0").exists():
            time.sleep(0.1)
        os._exit(1)

    os.dup2(os.open(folder / f"screen {rank}", os.O_CREAT | os.O_WRONLY), 2)
    where = "lightning_diffpipe.sampling.methods.load_weights"
    with mock.patch(where, never_read) if rank == 1 else contextlib.nullcontext():
        said = failure(rank, path, prompts, settings, options)
    (folder / str(rank)).write_text(said)


def cancelled(rank, path, prompts, settings, options, who, kind):
    """Requests that some ranks end, then a whole one: types and texts of errors, and images of rank 0."""

    def enough(done, steps):
        if done == 2:
            raise kind("enough")

    errors = []
    with Predictor.from_pretrained(path, **options) as predictor:
        for ranks in who:
            try:
                predictor(prompts, **settings, on_step=enough if rank in ranks else None)
            except (kind, DiffPipeError) as error:
                errors.append((type(error).__name__, str(error)))
        images = predictor(prompts, **settings)
    return errors, None if rank else as_array(images)


def too_large(module, args, out):
    """A block for which memory does not suffice."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")


def refused_over_nccl(rank, path, prompts, settings, options, hook):
    """What two requests are told, over NCCL as far as a CPU has it; in the first, a block of rank 1 is hooked."""
    pretend_nccl()
    with mock.patch("lightning_diffpipe.sampling.world._why_not_nccl", return_value=""):
        predictor = Predictor.from_pretrained(path, **options)
    block = predictor.source.denoiser.transformer_blocks[-1]
    hooked = [block.ff.register_forward_hook(hook)] if rank == 1 else []
    said = []
    for _ in range(2):
        try:
            predictor(prompts, **settings)
            said.append("no error")
        except DiffPipeError as error:
            said.append(str(error))
        while hooked:
            hooked.pop().remove()
    return said


def draw_with_a_slow_disk(rank, jobs):
    """As `draw_each`; rank 1 takes six seconds to read its weights."""

    def read_slowly(*arguments):
        time.sleep(6.0)
        load_weights(*arguments)

    where = "lightning_diffpipe.sampling.methods.load_weights"
    with mock.patch(where, read_slowly) if rank == 1 else contextlib.nullcontext():
        return draw_each(rank, jobs)


def take_a_second(done, steps):
    """Makes a denoising step slow."""
    time.sleep(1.0)


class BothBands:
    """Stands for the sampler of one rank."""

    statistics = SamplingStatistics()

    def __init__(self, *unused):
        pass

    def sample(self, request, on_step):
        return emulate(request, 2, warmup_steps=1, on_step=on_step)[0]
