"""Imported once by the server that test processes are forked from.

Without it every process would import the project, and pay for the first use of fake tensors (dynamo,
symbolic shapes, decompositions: seconds) again. No thread may be started here: forks would lack it.
"""

import contextlib
import gc

import torch


def probe_once() -> None:
    """Runs the code that a set-up runs; its caches are inherited by every fork."""
    import lightning_diffpipe.callbacks  # noqa: F401  # a fit looks for files of these
    from lightning_diffpipe.graph.probe import fold, probe
    from tests.distributed import scenarios, tiny

    torch.set_num_threads(1)
    module = scenarios.build(scenarios.Settings())
    batch = torch.utils.data.default_collate([tiny.Samples(2)[0]] * 2)
    step = lambda module, batch: module.training_step(batch, 0)
    graph = probe(module, step, batch)
    fold(module, step, batch, graph, [len(graph.path) // 2])


def import_what_samples() -> None:
    """Imports what is found in diffusers and transformers at first use: more than a second of a processor."""
    import diffusers
    import transformers

    from tests.predictor import scenarios, tiny_pipelines  # noqa: F401

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


# An error here would end the server without a word; the tests themselves will report it.
with contextlib.suppress(Exception):
    probe_once()
    import_what_samples()
gc.collect()
gc.freeze()  # what is shared by all forks need not be searched by any
