"""What ranks do in the distributed tests of the Predictor."""

import os
import signal

import numpy as np

from lightning_diffpipe.errors import DiffPipeError
from lightning_diffpipe.predictor import Predictor


def draw(rank, path, prompts, settings, options):
    """Pictures of rank 0 as an array, with the report; on others whether they got None."""
    with Predictor.from_pretrained(path, **options) as predictor:
        pictures = predictor(prompts, **settings)
        if rank:
            return pictures is None
        return np.stack([np.asarray(picture) for picture in pictures]), predictor.report


def draw_each(rank, jobs):
    """Several jobs one after the other, which saves starting processes for each."""
    return [draw(rank, *job) for job in jobs]


def latents_of_each(rank, jobs):
    """Final latents of several jobs, as every rank has them: pictures of 8 bits hide small differences."""
    found = []
    for path, prompts, settings, options in jobs:
        with Predictor.from_pretrained(path, **options) as predictor:
            sample = predictor._sample
            predictor._sample = lambda call, sample=sample: found.append(sample(call)) or found[-1]
            predictor(prompts, **settings)
    return found


def failure_of_each(rank, jobs):
    """What the errors of several jobs say, on every rank."""
    return [failure(rank, *job) for job in jobs]


def failure(rank, path, prompts, settings, options):
    """What the error says, on every rank."""
    try:
        draw(rank, path, prompts, settings, options)
    except DiffPipeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def killed(rank, path, prompts, settings, options, victim, told):
    """One rank is killed in mid-sample; the others write what their error says to `told`."""

    def on_step(done, steps):
        if rank == victim and done == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    told.write_text(failure(rank, path, prompts, settings | {"on_step": on_step}, options))
