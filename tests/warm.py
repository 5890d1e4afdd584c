"""Imported once by the server that test processes are forked from.

Without it every process would import the project and its test, and pay for the first use of fake tensors (dynamo,
symbolic shapes, decompositions: seconds), of Lightning's trainer and of autograd. No thread may be left here: forks
would lack it.
"""

import contextlib
import gc
import importlib
import os
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

HERE = Path(__file__).parent


def train_once() -> None:
    """Runs the code that a set-up and a step run; its caches are inherited by every fork."""
    import lightning_diffpipe.callbacks  # noqa: F401  # a fit looks for files of these
    from lightning_diffpipe.graph.probe import fold, probe, reprobe
    from tests.distributed import scenarios, tiny

    torch.set_num_threads(1)
    module = scenarios.build(scenarios.Settings())
    batch_of = lambda size: torch.utils.data.default_collate([tiny.Samples(2)[0]] * size)
    step = lambda module, batch: module.training_step(batch, 0)
    graph = probe(module, step, batch_of(2))
    fold(module, step, batch_of(2), graph, [len(graph.path) // 2])
    for size in (1, 3, 4):  # of most microbatches in the tests
        reprobe(module, step, batch_of(size), graph)
    settings = scenarios.Settings(trainer={"max_steps": 1}, strategy={"num_microbatches": 2})
    with mock.patch.dict(os.environ):  # where Lightning leaves ranks
        scenarios.fit(0, settings, 1)
        dist.destroy_process_group()


def import_what_samples() -> None:
    """Imports what is found in diffusers and transformers at first use: more than a second of a processor."""
    import diffusers
    import transformers

    for cls in (
        "StableDiffusion",
        "StableDiffusionXL",
        "StableDiffusion3",
        "Flux",
        "PixArtAlpha",
        "DiT",
        "Wan",
    ):
        getattr(diffusers, f"{cls}Pipeline")
    for cls in (
        "CLIPTextModelWithProjection",
        "CLIPTokenizer",
        "T5EncoderModel",
        "UMT5EncoderModel",
    ):
        getattr(transformers, cls)


def import_what_ranks_run() -> None:
    """Imports the tests that start ranks, and so what these import."""
    for path in sorted(HERE.rglob("test_*.py")):
        if b"mark.distributed" in path.read_bytes():
            name = ".".join(path.relative_to(HERE.parent).with_suffix("").parts)
            importlib.import_module(name)


# Training comes last: Python forgets what is no abstract class whenever an import registers one.
for _prepare in (import_what_samples, import_what_ranks_run, train_once):
    # An error here would end the server without a word; the tests themselves will report it.
    with contextlib.suppress(Exception):
        _prepare()
gc.collect()
gc.freeze()  # what is shared by all forks need not be searched by any
