"""What becomes of one tiny pipeline when the Predictor draws with it: the facts of a row of the table.

Of two prompts, where diffusers itself draws two at a time, one process draws what diffusers alone draws, to the
last bit; from an image each, where it draws from images and takes several. Two ranks, each a thread of this process
with a Predictor of its own, draw the same to rounding: a prompt or a branch of guidance each by `single`, by other
methods while all steps are synchronous, and then once more with a step that is not.
"""

import inspect
import pickle
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from lightning_diffpipe.comm.links import ProcessLinks
from lightning_diffpipe.comm.loopback import LoopbackLinks, LoopbackNetwork
from lightning_diffpipe.errors import DiffPipeError
from lightning_diffpipe.model_sources import open_source
from lightning_diffpipe.pipelines.one_step import condition_of, image_of
from lightning_diffpipe.predictor import Predictor
from lightning_diffpipe.sampling.methods import MethodOptions, fitted
from lightning_diffpipe.sampling.world import World
from tests.predictor.write_models import reason_of

from .pipelines import PIPELINES, build, prepared
from .qwen_processor import opened, small_references
from .train_pipelines import images_of

NUM_STEPS = 2
CPU = torch.device("cpu")
PROMPTS = {"prompt": ["a cat 1", "a dog, red"], "class_labels": [3, 5], None: [None, None]}
ENLARGED = 5e-3
"""Rounding of convolutions of one sample instead of two: 2e-3 with Kandinsky 3, which is 1e-12 in double."""
ROUNDED = 3e-4
"""Rounding that tiny denoisers enlarge: 1.3e-4 with Kandinsky 5 on some processors, 0 on others."""
DIVIDED = MethodOptions("single", data=2)
METHODS = {
    "single": MethodOptions("single"),
    "sequence": MethodOptions("sequence", further={"mode": "ring"}),
    "pipefusion": MethodOptions("pipefusion", num_patches=2, warmup_steps=NUM_STEPS),
    "distrifusion": MethodOptions("distrifusion", warmup_steps=NUM_STEPS),
    "guidance": MethodOptions("single", guidance=2, data=1),
}
NOTHING = dict.fromkeys(METHODS, "no")


class ThreadLinks(LoopbackLinks):
    """Links of a rank that is a thread, between which plain data travel as between processes."""

    def broadcast_object(self, make: Callable[[], Any]) -> Any:
        """What rank 0 makes; a copy on all others."""

        def packed() -> tuple[Any, bytes]:
            value = make()
            return value, pickle.dumps(value)

        value, data = super().broadcast_object(packed)
        return value if self.rank == 0 else pickle.loads(data)

    def gather_object(self, value: Any) -> list[Any]:
        """Values of all ranks, on all."""
        turn = next(self._turns[True, -1, "gathered"])
        for peer in range(self.num_ranks):
            self._network.put((self.rank, peer, "gathered", turn), value)
        sources = [(rank, self.rank, "gathered", turn) for rank in range(self.num_ranks)]
        return [self._network.take(source, "plain data") for source in sources]


class ThreadWorld(World):
    """Ranks that are threads of one process, which the watcher of its process has no business with.

    Where one raises an error, the network ends the others.
    """

    def enter(self, phase: str, works: bool = False) -> None:
        """Says nothing."""

    def agree(
        self, phase: str, make: Callable[[], Any], give_up: Callable[[], None] = lambda: None
    ) -> Any:
        """What `make` returns on this rank."""
        return make()

    def leave(self, error: BaseException) -> None:
        """Says nothing."""


@small_references()
@opened()
def measure(name: str, folder: Path) -> dict[str, str]:
    """By method, `yes`, or why not in a few words."""
    path = folder / "saved"
    build(name, folder / "words").save_pretrained(path)
    try:
        plain = prepared(DiffusionPipeline.from_pretrained(path))
    except AttributeError as error:
        return NOTHING | {"single": f"no: diffusers alone fails: {error}"}
    condition = condition_of(type(plain))
    takes = inspect.signature(type(plain).__call__).parameters
    is_one = condition == "prompt" and "list" not in str(takes["prompt"]).lower()

    def drawn_plainly(prompts: list[Any]) -> list[Tensor]:
        def conditions() -> dict[
            str, Any
        ]:  # new ones: some pipelines change the list of their prompts
            if condition is not None:
                return {condition: prompts[0] if is_one else list(prompts)}
            return {"batch_size": len(prompts)} if "batch_size" in takes else {}

        def draw(request: dict[str, Any]) -> Tensor:
            torch.manual_seed(0)
            generator = torch.Generator().manual_seed(0)
            return as_tensor(plain(**request, **conditions(), generator=generator)[0])

        return [draw(request) for request in requests_of(settings)]

    settings: dict[str, Any] = {}
    prompts, failure = PROMPTS[condition][: 1 if is_one else 2], None
    # Two prompts from an image each, or from one, or one prompt.
    for count, images in dict.fromkeys([(len(prompts), len(prompts)), (len(prompts), 1), (1, 1)]):
        prompts, settings = prompts[:count], settings_of(name, images)
        try:
            expected = drawn_plainly(prompts)
            break
        except Exception as error:
            failure = error
    else:
        return NOTHING | {"single": f"no: diffusers alone fails: {failure}"}
    assert expected[0].double().std() > 0.01, "an image of nothing"
    settings["prompts"], found = prompts, dict(NOTHING)
    for method in METHODS:
        found[method] = outcome(path, method, settings, expected)
        if found["single"] != "yes":
            break
    return found


def outcome(path: Path, method: str, settings: Mapping[str, Any], expected: list[Tensor]) -> str:
    """Whether a method draws what is expected while all steps are synchronous, and finite numbers after that."""
    torch.manual_seed(0)
    try:
        if method == "single":
            source = open_source(path, True, CPU, torch.float32)
            prepared(source._pipeline)
            predictor = Predictor(source, fitted(METHODS[method], 1), World.alone(CPU), CPU)
            drawn = [predictor(**request) for request in requests_of(settings)]
        else:
            drawn = drawn_by_two(path, METHODS[method], requests_of(settings))
    except DiffPipeError as error:
        return f"no: {reason_of(error) or error}"
    found = [as_tensor(each) for each in drawn]
    if method == "single":
        same = all(map(torch.equal, found, expected))
        if same and len(settings["prompts"]) > 1:
            torch.manual_seed(0)
            divided = drawn_by_two(path, DIVIDED, requests_of(settings)[:1])
            if not close(as_tensor(divided[0]), expected[0], ENLARGED):
                return "no: other images by two ranks"
    else:
        same = close(found[0], expected[0], ENLARGED if method == "guidance" else ROUNDED)
    assert all(each.isfinite().all() for each in found)
    assert not torch.equal(expected[0], expected[1])
    return "yes" if same else "no: other images"


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-4) -> bool:
    """Whether they differ by rounding, which a tiny denoiser may enlarge."""
    scale = max(1.0, expected.abs().max().item())
    return torch.allclose(found, expected, rtol=0, atol=tolerance * scale)


def requests_of(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One whose steps are all synchronous, and one with a step that is not."""
    return [{**settings, "num_inference_steps": NUM_STEPS + more} for more in (0, 1)]


def drawn_by_two(path: Path, options: MethodOptions, requests: list[dict[str, Any]]) -> list[Any]:
    """What two ranks draw, one request after the other."""
    world, axis = LoopbackNetwork(2), LoopbackNetwork(2)
    sources = [open_source(path, rank == 0, CPU, torch.float32) for rank in range(2)]
    prepared(sources[0]._pipeline)
    here = threading.local()

    def rank(links: LoopbackLinks) -> list[Any]:
        here.rank = links.rank
        own = ThreadWorld(ThreadLinks(world, links.rank), "gloo")
        predictor = Predictor(sources[links.rank], fitted(options, 2), own, CPU)
        return [predictor(**request) for request in requests]

    def connect(*_: Any, **__: Any) -> LoopbackLinks:
        return axis.links[here.rank]

    with mock.patch.object(ProcessLinks, "connect", connect):
        return world.run(rank)[0]


def settings_of(name: str, count: int = 1) -> dict[str, Any]:
    """Arguments of a call that draws tiny images or videos, with as many images to start from."""
    entry, cls = PIPELINES[name], getattr(diffusers, name)
    takes = inspect.signature(cls.__call__).parameters
    own = {"height": entry.pixels[-2], "width": entry.pixels[-1], "output_type": "pt"}
    if entry.edits:
        own[image_of(cls)] = images_of(name, count)
    return {n: v for n, v in own.items() if n in takes} | dict(entry.call) | dict(entry.drawn)


def as_tensor(drawn: Any) -> Tensor:
    """Images or videos in whatever a pipeline gives."""
    return (
        torch.stack(list(map(as_tensor, drawn)))
        if isinstance(drawn, list)
        else torch.as_tensor(drawn)
    )
