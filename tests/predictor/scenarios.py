"""What ranks do in the distributed tests of the Predictor."""

import os
import signal
from dataclasses import replace
from unittest import mock

import numpy as np

from lightning_diffpipe.errors import DiffPipeError
from lightning_diffpipe.planning.cluster import Link
from lightning_diffpipe.predictor import Predictor
from lightning_diffpipe.sampling.auto import profile_request
from lightning_diffpipe.sampling.mesh import World


def draw(rank, path, prompts, settings, options):
    """Pictures of rank 0 as an array, with the report; on others whether they got None."""
    with Predictor.from_pretrained(path, **options) as predictor:
        pictures = predictor(prompts, **settings)
        if rank:
            return pictures is None
        return np.stack([np.asarray(picture) for picture in pictures]), predictor.report


def draw_as_chosen(rank, path, prompts, settings, options):
    """With `method="auto"` on a slow network and a model that is worth dividing, twice; then by name."""

    def profile(*arguments):
        return replace(profile_request(*arguments), step_s=1.0, glue_s=0.0, call_s=0.0)

    with (
        mock.patch.object(World, "measured_link", return_value=Link(1e8, 0.05)),
        mock.patch("lightning_diffpipe.sampling.auto.profile_request", profile),
        Predictor.from_pretrained(path, method="auto", **options) as predictor,
    ):
        pictures = predictor(prompts, **settings)
        chosen = predictor.report
        predictor(prompts, **settings | {"num_inference_steps": 2})
        later = predictor.report
    by_name = draw(rank, path, prompts, settings, {"method": "pipefusion", **options})
    if rank == 0:
        return np.stack([np.asarray(picture) for picture in pictures]), chosen, later, by_name
    return None


def draw_each(rank, jobs):
    """Several jobs one after the other, which saves starting processes for each."""
    return [draw(rank, *job) for job in jobs]


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
