"""What becomes of one tiny pipeline when it is trained by its own call: the facts of a row of the table.

Its step is cut into two stages, emulated in one process, and compared with the step itself; then it is saved,
opened by diffusers alone, and both draw from the same noise.
"""

import inspect
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.cut import cut
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.modules import PipelineDiffusion
from lightning_diffpipe.modules.noise import FlowMatching
from lightning_diffpipe.pipelines.one_step import condition_of, image_of, required_by
from tests.graph.emulate import emulate, relative_error, take_gradients
from tests.graph.steps import step

from .double import in_double
from .measure import FLOOR, SEED
from .pipelines import PIPELINES, build, prepared
from .qwen_processor import opened, references, small_references

LENGTHS = ("num_frames", "frames", "video_length")


@dataclass(frozen=True)
class Trained:
    """The facts about one pipeline.

    Attributes:
        refusal: Why it cannot be trained by its own call; None if it can.
        prediction: What its denoiser learns.
        frozen: Parts with frozen layers in the step.
        loss: Of the step.
        loss_error: Largest relative deviation of the loss of two stages.
        gradient_error: Largest deviation of a gradient relative to its largest entry.
        worst: Name of that parameter.
        same: Whether the saved pipeline draws the same in diffusers alone, to 1e-5 of 1.
    """

    refusal: str | None
    prediction: str = ""
    frozen: tuple[str, ...] = ()
    loss: float = 0.0
    loss_error: float = 0.0
    gradient_error: float = 0.0
    worst: str = ""
    same: bool = False


def refused_by_class() -> dict[str, str]:
    """Pipelines of diffusers that draw from more than prompts or classes, with what that is."""
    refused = {}
    for name, cls in classes().items():
        try:
            condition_of(cls)
        except ConfigurationError as error:
            refused[name] = str(error).partition(" samples from ")[2].partition(", not from")[0]
    return refused


def editing_by_class() -> list[str]:
    """Pipelines of diffusers that edit images, as far as their arguments say."""
    refused = refused_by_class()
    return [
        name
        for name, cls in classes().items()
        if name not in refused and image_of(cls) in required_by(cls)
    ]


def classes() -> dict[str, type]:
    """All pipelines of diffusers, by name."""
    members = {name: getattr(diffusers, name) for name in sorted(dir(diffusers))}
    return {
        name: member
        for name, member in members.items()
        if isinstance(member, type) and issubclass(member, DiffusionPipeline) and "Pipeline" in name
    }


def module_of(name: str, folder: Path) -> PipelineDiffusion:
    """One pipeline in training, all captions as they are; images before may be dropped."""
    call = {n: v for n, v in PIPELINES[name].call.items() if n not in LENGTHS}
    pipeline = build(name, folder)
    guides = "image_guidance_scale" in inspect.signature(type(pipeline).__call__).parameters
    takes = image_of(type(pipeline)) in required_by(type(pipeline))
    dropout = 0.5 if guides and takes else None
    return PipelineDiffusion(pipeline, call=call, caption_dropout=0.0, condition_dropout=dropout)


def batch_of(name: str) -> dict[str, Any]:
    """Pixels, captions and classes; a pipeline reads what it needs."""
    entry = PIPELINES[name]
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(3, *entry.pixels, generator=generator)
    before = {"condition": torch.rand(*pixels.shape[:2], *pixels.shape[-2:], generator=generator)}
    if entry.references:
        before = {"references": references(entry.references, len(pixels))}
    return {
        **(before if entry.edits else {}),
        "video" if pixels.ndim == 5 else "image": pixels,
        "caption": ["a cat 1", "dog b", "x"],
        "class_labels": torch.tensor([1, 5, 3]),
    }


def images_of(name: str, count: int) -> Any:
    """What a pipeline's call is given for so many samples: images in [0, 1], or the references of one, as files."""
    batch = batch_of(name)
    if "references" not in batch:
        return batch["condition"][:count]
    images = [Image.fromarray(each[0]) for each in batch["references"]]
    return images if len(images) > 1 else images[0]


@small_references()
@opened()
def measure(name: str, folder: Path) -> Trained:
    """Trains, cuts, saves and draws one pipeline."""
    try:
        module = module_of(name, folder / "parts").eval()
        module.setup("fit")
    except ConfigurationError as refusal:
        return Trained(str(refusal).removeprefix(f"{name} "))
    same = draws_the_same(module, folder / "saved")
    again = PipelineDiffusion.from_pretrained(folder / "saved", call=module.hparams.call)
    assert all(p.equal(q) for p, q in zip(again.parameters(), module.parameters(), strict=True))
    module.log = lambda *arguments, **options: None
    schedule = module.noise_schedule
    v = getattr(schedule, "predicts_v", False)
    prediction = "flow" if isinstance(schedule, FlowMatching) else "v" if v else "epsilon"
    with in_double():
        module.double()
        batch = batch_of(name)
        rng.seed_all(SEED, host=True)
        loss = step(module, batch)
        loss.backward()
        expected = take_gradients(module)
        for max_share in (
            1 / 100,
            1 / 10000,
        ):  # tiny denoisers are little beside their autoencoders
            graph = probe(module, step, batch, seed=SEED, max_share=max_share)
            if len(graph.path) > 1:
                break
        place = random.Random(name).randrange(1, len(graph.path))
        got_loss, got = emulate(module, graph, cut(graph, [place]), step, batch, SEED)
    error, worst = relative_error(expected, got, FLOOR)
    return Trained(
        refusal=None, prediction=prediction,
        frozen=tuple(sorted({graph.layers[i].name.partition(".")[0] for i in graph.frozen})), loss=loss.item(),
        loss_error=abs(got_loss - loss.item()).item() / abs(loss.item()), gradient_error=error, worst=worst,
        same=same,
    )  # fmt: skip


def draws_the_same(module: PipelineDiffusion, folder: Path) -> bool:
    """Whether a saved pipeline, opened by diffusers alone, draws what the module draws."""
    module.save_pretrained(folder)
    plain = prepared(DiffusionPipeline.from_pretrained(folder))
    assert type(plain) is type(module.pipeline)
    entry = PIPELINES[module.step.name]
    takes = inspect.signature(type(plain).__call__).parameters
    size = {"height": entry.pixels[-2], "width": entry.pixels[-1]}
    options = {n: v for n, v in size.items() if n in takes} | dict(entry.drawn)
    options |= {n: v for n, v in entry.call.items() if n in LENGTHS}
    conditions = {"prompt": ["a cat 1"], "class_labels": [3], None: [None]}[module.step.condition]
    noise = lambda: torch.Generator().manual_seed(1)
    before = None
    if entry.references:
        before = [each[:1] for each in batch_of(module.step.name)["references"]]
    elif entry.edits:
        before = batch_of(module.step.name)["condition"][:1]
    got = module.sample(conditions, 2, generator=noise(), condition=before, **options)
    if before is not None:
        images = images_of(module.step.name, 1)
        if module.step.animates:
            images = VaeImageProcessor.numpy_to_pil(VaeImageProcessor.pt_to_numpy(images))[0]
        options[module.step.image] = images
    arguments = {**module.hparams.call, **options, "num_inference_steps": 2, "output_type": "pt"}
    if module.step.condition:
        arguments[module.step.condition] = conditions
    drawn = plain(**arguments, generator=noise())[0]
    drawn = torch.stack(list(drawn)) if isinstance(drawn, list) else torch.as_tensor(drawn)
    # Weights read from files are aligned otherwise, and kernels of some sizes then sum in another order.
    return torch.allclose(torch.as_tensor(got), drawn, rtol=0, atol=1e-5)
