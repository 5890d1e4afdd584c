"""Images sampled while training, so that a person sees what the loss does not say.

Under a pipeline the denoiser is divided, so that all ranks sample together, on the partition of the training, with
the averaged weights that each rank holds for its own layers. The start noise has its own generator, so training
goes on exactly as without images. A transformer is sampled by PipeFusion; what that refuses, such as a U-Net, layer
by layer, in lock step (`strategy.whole_model()`):

    all ranks     prompts -> text encoders -> start noise     in lock step, layers answered by who has them
    each rank     denoising steps through its own blocks      sampling/pipefusion/
    all ranks     latents -> autoencoder -> samples           in lock step

Blocks run on the ranks that train them. Layers between blocks, such as embeddings and the last
projection, runs on every rank under PipeFusion: ranks that lack it receive it while they sample. With one
patch the samples follow each other through the stages in shares, and nothing is approximated; with more, patches of
all samples do.
"""

import contextlib
import functools
import inspect
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.trainer.states import TrainerFn
from PIL import Image
from torch import Tensor, nn

from lightning_diffpipe.callbacks.ema import EMA
from lightning_diffpipe.callbacks.monitor import run_folder
from lightning_diffpipe.comm.links import ProcessLinks
from lightning_diffpipe.errors import ConfigurationError, GraphError, PartitionError, require_number
from lightning_diffpipe.graph.placement import filled_placeholders, is_placeholder, rounded
from lightning_diffpipe.graph.rng import derived_seed, isolated_random_numbers
from lightning_diffpipe.sampling.call import Call
from lightning_diffpipe.sampling.loop import PipelineCall
from lightning_diffpipe.sampling.pipefusion import PipeFusion, PipeFusionSetting
from lightning_diffpipe.sampling.pipefusion.patch import resident_parameters
from lightning_diffpipe.sampling.schedulers import random_states
from lightning_diffpipe.sampling.source import images_of, refuse_unknown
from lightning_diffpipe.sampling.tracing.layout import Layout
from lightning_diffpipe.training.pipeline import Pipeline

_log = logging.getLogger(__name__)
_NUM_CAPTIONS = 8
_NUM_FRAMES = 8  # at most, of a video
_NUM_COLUMNS = 8  # at most, of sampled steps side by side
_COLUMN_PIXELS = 256  # at most, their width


def image_grid(images: Tensor, columns: int = 8) -> Image.Image:
    """Lays images out in rows.

    Args:
        images: `(N, 3, H, W)` in [0, 1].
        columns: Images per row.

    Returns:
        One image of `columns * W` pixels width, filled up with black.
    """
    missing = -len(images) % columns
    padded = torch.cat([images, images.new_zeros(missing, *images.shape[1:])])
    rows, (_, channels, height, width) = len(padded) // columns, padded.shape
    grid = padded.reshape(rows, columns, channels, height, width).permute(0, 3, 1, 4, 2)
    pixels = (grid.reshape(rows * height, columns * width, channels) * 255).round().byte()
    return Image.fromarray(pixels.cpu().numpy())


def _tiles(path: Path, columns: int, height: int, width: int) -> Tensor:
    """Returns the images of a file of `image_grid`, `(N, 3, height, width)` in [0, 1]; none of another size."""
    pixels = torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1) / 255
    if pixels.shape[1] % height or pixels.shape[2] != columns * width:
        return pixels.new_empty(0, 3, height, width)
    lines = pixels.unflatten(2, (columns, width)).unflatten(1, (-1, height))
    return lines.permute(1, 3, 0, 2, 4).flatten(0, 1)


class SamplingCallback(L.Callback):
    """A callback that samples with the model in training; for subclasses.

    Args:
        num_inference_steps: Denoising steps.
        guidance_scale: Strength of classifier-free guidance.
        seed: Seed of the start noise.
        num_patches: Patches of PipeFusion, for a transformer under `strategy="diffpipe"`. With 1, the images follow
            each other through the stages, and are those of one process but for rounding. More patches keep ranks
            busy that sample fewer images than there are stages, and are not exact.
        call: Further arguments of the module's `sample`, such as `{"height": 768, "width": 512}`.

    Raises:
        ConfigurationError: A number is none that can be.
    """

    def __init__(
        self,
        num_inference_steps: int = 20,
        guidance_scale: float = 3.0,
        seed: int = 0,
        num_patches: int = 1,
        call: Mapping[str, Any] | None = None,
    ) -> None:
        require_number("num_inference_steps", num_inference_steps, 1, whole=True)
        require_number("guidance_scale", guidance_scale)
        require_number("seed", seed, whole=True)
        require_number("num_patches", num_patches, 1, whole=True)
        self.num_inference_steps = num_inference_steps
        self.guidance_scale = guidance_scale
        self.seed = seed
        self.num_patches = num_patches
        self.call = dict(call or {})
        self.samples_by_layers = False  # PipeFusion has refused the model, or its partition

    def require_sample(self, module: L.LightningModule) -> None:
        """Raises ConfigurationError for a module that cannot sample, or not with the arguments of `call`."""
        sample = getattr(module, "sample", None)
        if not callable(sample):
            raise ConfigurationError(
                f"{type(self).__name__} samples with the module's own sample(prompts, num_inference_steps, "
                f"guidance_scale, generator), and {type(module).__name__} has none; write one that returns images, "
                "(N, 3, H, W) in [0, 1], or leave the callback out"
            )
        try:
            condition = {"condition": None} if samples_to_conditions(module) else {}
            inspect.signature(sample).bind(None, **{**self._settings(0), **condition})
        except TypeError as error:
            raise ConfigurationError(
                f"{type(module).__name__}.sample does not take what {type(self).__name__} gives it with "
                f"call={self.call}: {error}"
            ) from None
        if (pipeline := getattr(module, "pipeline", None)) is not None:
            from diffusers import DiffusionPipeline  # seconds, for modules that have one

            if isinstance(pipeline, DiffusionPipeline):
                refuse_unknown(pipeline, self.call)

    def _settings(self, seed: int) -> dict[str, Any]:
        return dict(
            num_inference_steps=self.num_inference_steps,
            guidance_scale=self.guidance_scale,
            generator=torch.Generator().manual_seed(seed),
            **self.call,
        )

    @torch.no_grad()
    def sample_for(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        prompts: Sequence[Any],
        conditions: Tensor | list[Any] | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """Samples with the averaged weights, where there are any; by PipeFusion where stages allow it.

        Collective: pipelines side by side sample at the same time, each as many prompts as it likes.

        Args:
            trainer: Trainer of the module.
            module: Module in training.
            prompts: Texts or class numbers.
            conditions: Conditions, `(len(prompts), 3, H, W)` in [0, 1], or references, as batches have them.
            seed: Seed of the start noise; None for that of the callback.

        Returns:
            `(len(prompts), 3, H, W)` in [0, 1]; videos `(len(prompts), F, 3, H, W)`.
        """
        settings = self._settings(self.seed if seed is None else seed)
        if conditions is not None:
            settings["condition"] = conditions
        pipeline = getattr(trainer.strategy, "pipeline", None)
        one_by_one = isinstance(conditions, list) or getattr(module, "samples_one_by_one", False)
        by_layers = self.samples_by_layers or one_by_one or not hasattr(module, "sampling_call")
        whole_model = getattr(trainer.strategy, "whole_model", contextlib.nullcontext)
        with EMA.averaged_in(trainer, module), whole_model():
            if pipeline is not None and pipeline.plan.ranks_per_pipeline > 1 and not by_layers:
                with module.evaluating():
                    call = module.sampling_call(prompts, **settings)
                    images = sample_on_stages(pipeline, call, self.num_patches)
                if images is not None:
                    return torch.stack(images) if isinstance(images, list) else images
                self.samples_by_layers = True
            return module.sample(prompts, **settings)


class SampleImages(SamplingCallback):
    """Samples prompts every few steps, or at every validation: a PNG in the output folder, images for the logger.

    Both are called `samples`; those of a second such callback `samples_2`. `over_time.png`, for the logger
    `samples_over_time`, has a row for each prompt and a column for each of up to eight sampled steps over the run.

    Args:
        prompts: Texts or class numbers; None takes eight captions of the data: of those held back, if the data
            module has them (`held_back_captions`), or of the first batch, and of that class labels where
            the module says `samples_from = "class_labels"`. Conditions of a ControlNet are taken with them
            (`held_back_conditions`) where the module says `samples_to_conditions = True`, given to its `sample` as
            `condition`, and shown above the samples; so are `references` of pipelines that edit images.
        every_n_steps: Optimizer steps between two samplings; None samples at the end of every validation.
        sampling: Arguments of `SamplingCallback`. The start noise is the same each time, so that images compare.

    Raises:
        ConfigurationError: There is nothing to sample, or a number is none that can be.
    """

    def __init__(
        self,
        prompts: Sequence[str] | None = None,
        every_n_steps: int | None = 500,
        **sampling: Any,
    ) -> None:
        if isinstance(prompts, str) or (prompts is not None and not prompts):
            raise ConfigurationError(f"prompts must be a list of texts, or None; got {prompts!r}")
        if every_n_steps is not None:
            require_number("every_n_steps", every_n_steps, 1, whole=True)
        super().__init__(**sampling)
        self._named = None if prompts is None else list(prompts)
        self.prompts = self._named
        self.conditions: Tensor | list[Tensor] | None = None
        self.every_n_steps = every_n_steps
        self._last_step = 0
        self._steps: list[int] = []  # at which it has sampled
        self._restored: dict[str, Any] = {}

    @property
    def state_key(self) -> str:
        """A key for each of several in a trainer, by prompts and settings."""
        names = ("every_n_steps", "num_inference_steps", "guidance_scale", "seed", "call")
        settings = {name: getattr(self, name) for name in names}
        return self._generate_state_key(prompts=self._named, **settings)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Resets what was read for an earlier run, before a checkpoint of this one is read."""
        self._restored = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forgets an earlier run, and takes captions that are held back, if no prompts were given.

        A run that goes on keeps its prompts, whatever batch comes first now. The step after which it goes on was
        sampled when it was done. The validation after it may still come: checkpoints are saved before it, too.

        Raises:
            ConfigurationError: The module cannot sample, or needs conditions, which named prompts have not.
        """
        if type(self).sample is SampleImages.sample:
            self.require_sample(pl_module)
        if self._named is not None and samples_to_conditions(pl_module):
            raise ConfigurationError(
                f"{type(pl_module).__name__} samples to conditions, and prompts that are named have none; leave "
                "them out (callbacks.samples.prompts=null): captions of the data come with their own conditions"
            )
        self._last_step = 0 if self.every_n_steps is None else trainer.global_step
        self.prompts, self.conditions = self._named, None
        self.samples_by_layers = False
        restored, self._restored = self._restored, {}
        self._steps = list(restored.get("steps", []))
        if self.prompts is None and "prompts" in restored:
            self.prompts, self.conditions = restored["prompts"], restored.get("conditions")
        elif self.prompts is None:
            held_back = _held_back(trainer, pl_module) if trainer.is_global_zero else ([], None)
            self._take(trainer, pl_module, *held_back)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Takes captions of the first batch, if there are no others; raises ConfigurationError if it has none."""
        if self.prompts is None:
            captions, conditions = prompts_and_conditions(pl_module, batch)
            self._take(trainer, pl_module, captions, conditions)
        if self.prompts is None:
            raise ConfigurationError(
                f"SampleImages samples captions of the data, and batches have no {samples_from(pl_module)!r}; say "
                "which: prompts=[...] (callbacks.samples.prompts), or leave it out (callbacks.samples=null)"
            )

    def _take(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        captions: list[str],
        conditions: Tensor | list[Any] | None,
    ) -> None:
        """Takes prompts and conditions of rank 0, on all ranks: pipelines have other data, but sample together."""
        if not samples_to_conditions(module):
            conditions = None
        if isinstance(conditions, list):
            conditions = [torch.from_numpy(each[:_NUM_CAPTIONS]) for each in conditions]
        elif conditions is not None:  # in 8 bits, as checkpoints keep them
            conditions = (conditions[:_NUM_CAPTIONS].cpu().clamp(0, 1) * 255).round().byte()
        first = captions[:_NUM_CAPTIONS], conditions
        prompts, self.conditions = trainer.strategy.broadcast(first)
        self.prompts = prompts or None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any
    ) -> None:
        """Samples after every `every_n_steps`-th optimizer step."""
        if self.every_n_steps is not None and trainer.global_step % self.every_n_steps == 0:
            self._sample_once(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Samples at the end of a validation, if not every few steps."""
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if self.every_n_steps is None and fitting:
            self._sample_once(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Returns the steps at which images were sampled, and captions taken from the data."""
        state: dict[str, Any] = {"steps": list(self._steps)}
        if self._named is None and self.prompts is not None:
            state["prompts"] = self.prompts
        return state if self.conditions is None else {**state, "conditions": self.conditions}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the captions and the steps of the run that goes on."""
        self._restored = dict(state_dict)

    def _sample_once(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        step = trainer.global_step
        if step == self._last_step:  # accumulation: several batches, one step
            return
        self._last_step = step
        images = self.sample(trainer, pl_module)
        if trainer.fast_dev_run:  # tries everything and leaves the images of other runs alone
            return
        number = [c for c in trainer.callbacks if isinstance(c, SampleImages)].index(self)
        name = f"samples_{number + 1}" if number else "samples"
        # Asking for the folder is a collective operation, so all ranks ask.
        folder = (run_folder(trainer) or Path(trainer.default_root_dir)) / name
        self._steps.append(step)
        if not trainer.is_global_zero:
            return
        folder.mkdir(parents=True, exist_ok=True)
        rows, columns = self._rows(images)
        image_grid(torch.cat(rows), columns).save(folder / f"step_{step:06d}.png")
        grids = [image_grid(torch.stack(column), columns=1) for column in zip(*rows, strict=True)]
        steps, grid = self._over_time(folder, rows, columns)
        grid.save(folder / "over_time.png")
        caption = "steps " + ", ".join(map(str, steps))
        for logger in trainer.loggers:
            if hasattr(logger, "log_image"):
                logger.log_image(name, grids, step=step, caption=self.prompts)
                logger.log_image(f"{name}_over_time", [grid], step=step, caption=[caption])

    def _rows(self, images: Tensor) -> tuple[list[Tensor], int]:
        """Returns rows of images, conditions above their samples, and how many stand in a line."""
        if images.ndim == 5:  # videos: frames side by side
            num_frames = min(images.shape[1], _NUM_FRAMES)
            shown = torch.linspace(0, images.shape[1] - 1, num_frames).long()
            return [torch.cat(images[:, shown].unbind(1), -1)], 8 // num_frames
        if self.conditions is None:
            return [images], min(8, len(images))
        conditions = self.conditions
        if isinstance(conditions, Tensor):
            conditions = [conditions]
        else:  # references, of any shape
            channels_first = [each.permute(0, 3, 1, 2).float() for each in conditions]
            conditions = [F.interpolate(each, images.shape[-2:]) for each in channels_first]
        return [*(each.to(images) / 255 for each in conditions), images], len(images)

    def _over_time(
        self, folder: Path, rows: Sequence[Tensor], columns: int
    ) -> tuple[list[int], Image.Image]:
        """Returns steps, and an image with a column for each, after one of the conditions if there are any.

        The folder has the images of all steps so far; the latest has these rows, and so many samples in a line.
        """
        *conditions, images = rows
        height, width = images.shape[-2:]
        spread = torch.linspace(0, len(self._steps) - 1, min(len(self._steps), _NUM_COLUMNS))
        steps, shown = [], [condition.cpu() for condition in conditions]
        for step in [self._steps[place] for place in spread.round().long()]:
            path = folder / f"step_{step:06d}.png"
            tiles_of_step = _tiles(path, columns, height, width) if path.is_file() else images[:0]
            last = len(images) * len(rows)
            if len(tiles_of_step) >= last:  # else they were of another size, before the run went on
                steps, shown = [*steps, step], [*shown, tiles_of_step[last - len(images) : last]]
        tiles = torch.stack(shown, 1).flatten(0, 1)
        factor = min(1.0, _COLUMN_PIXELS / width)
        size = max(1, round(factor * height)), max(1, round(factor * width))
        return steps, image_grid(F.interpolate(tiles.float(), size, mode="area"), len(shown))

    def sample(self, trainer: L.Trainer, module: L.LightningModule) -> Tensor:
        """Samples the prompts; see `sample_for`."""
        assert self.prompts is not None, "captions are taken when training starts"
        conditions = self.conditions
        if isinstance(conditions, list):
            conditions = [each.numpy() for each in conditions]
        elif conditions is not None:
            conditions = conditions / 255
        return self.sample_for(trainer, module, self.prompts, conditions)


def _held_back(trainer: L.Trainer, module: L.LightningModule) -> tuple[list[str], Any]:
    """Returns captions that the data holds back, with conditions where the module needs them."""
    data, none = getattr(trainer, "datamodule", None), lambda count: None
    conditions = None
    if samples_to_conditions(module):
        conditions = getattr(data, "held_back_conditions", none)(_NUM_CAPTIONS)
        if conditions is None:  # the first batch has both
            return [], None
    if samples_from(module) != "caption":
        return [], None
    return getattr(data, "held_back_captions", none)(_NUM_CAPTIONS) or [], conditions


def prompts_and_conditions(module: L.LightningModule, batch: Any) -> tuple[list[Any], Any]:
    """Returns prompts of a batch, and conditions or references; of a video its first frame is the condition."""
    entries = batch if isinstance(batch, Mapping) else {}
    prompts = entries.get(samples_from(module), [])
    conditions = entries.get("references", entries.get("condition"))
    if conditions is None and "video" in entries:
        conditions = (entries["video"][:, :, 0] + 1) / 2
    return prompts.tolist() if isinstance(prompts, Tensor) else list(prompts), conditions


def samples_from(module: L.LightningModule) -> str:
    """Returns the key of a batch's prompts: captions, or class numbers for a module of classes."""
    return getattr(module, "samples_from", "caption")


def samples_to_conditions(module: L.LightningModule) -> bool:
    """Returns whether a module needs conditions; batches may have some for one that does not."""
    return getattr(module, "samples_to_conditions", False)


class _RefusedError(Exception):
    """PipeFusion cannot run on these stages; on all ranks."""


def sample_on_stages(pipeline: Pipeline, call: PipelineCall, num_patches: int) -> Any:
    """Samples with all ranks of a pipeline; collective, inside `Pipeline.relayed`.

    Args:
        pipeline: Pipeline in training.
        call: The call of a pipeline.
        num_patches: Patches of PipeFusion, which begins with a synchronous step. With 1 all steps are synchronous.

    Returns:
        What the call returns; None, with the reason in the log, where PipeFusion cannot do it on these stages.
    """
    sampler = StageSampler(pipeline, num_patches)
    try:
        with isolated_random_numbers(derived_seed(pipeline.seed, "sampling")):
            return images_of(call, sampler.sample)
    except _RefusedError as error:
        if pipeline.mesh.rank == 0:
            _log.info("samples are computed layer by layer, not by PipeFusion: %s", error)
        return None


class StageSampler:
    """Runs the denoising loop of one call; arguments as of `sample_on_stages`."""

    def __init__(self, pipeline: Pipeline, num_patches: int) -> None:
        self._pipeline, self._mesh, self._num_patches = pipeline, pipeline.mesh, num_patches
        self._names = {p: name for name, p in pipeline.module.named_parameters()}

    def sample(self, call: Call) -> Tensor:
        """Returns final latents on all ranks, or raises _RefusedError if PipeFusion cannot run on these stages."""
        layout, mesh = self._mesh.layout, self._mesh
        pipelines = [layout.pipeline_ranks(p) for p in range(layout.num_pipelines)]
        links = ProcessLinks.connect(
            pipelines, mesh.device, mesh.backend, mesh.timeout_s, patience_s=mesh.patience_s
        )
        try:
            with self._pipeline.alone():
                latents = self._sampled(call, links)
        except _RefusedError:
            links.disconnect()
            raise
        except BaseException:
            links.abandon()
            raise
        links.disconnect()
        return latents

    def _sampled(self, call: Call, links: ProcessLinks) -> Tensor:
        # Training would save for its backward what modules compute once for all calls, such as tables.
        call = replace(call, random_states=random_states(links.device))
        request = replace(call.request(call.pipeline.parts[call.denoiser]), infers=False)
        options: dict[str, Any] = {"num_patches": self._num_patches}
        options["split"] = functools.partial(self._positions, request.model)
        if self._num_patches == 1:
            rows = len(request.latents) * request.branches_in_batch
            options["warmup_steps"] = request.num_steps
            options["warmup_microbatches"] = min(links.num_ranks, rows)
        sampler = PipeFusion(request.model, links, **options)  # with its ControlNets
        try:
            if len(call.phases) > 1:
                raise ConfigurationError("its steps call denoisers in more than one way")
            if getattr(call.pipeline.pipeline, "self_conditioning", None) is not None:
                raise ConfigurationError(
                    "its first layers read its own estimate, which is made on the last rank"
                )
            if self._pipeline.plan.streamed:
                raise ConfigurationError("its stages do not hold the weights of streamed layers")
            call.refuse_steps("pipefusion")
            call.refuse_rows(1)
            setting = sampler.prepare(request)
        except (ConfigurationError, GraphError, PartitionError) as error:
            raise _RefusedError(str(error)) from error
        with self._everything_needed(request.model, setting):
            return sampler.sample(request, None, setting)

    def _positions(self, model: nn.Module, layout: Layout) -> tuple[int, ...]:
        """Returns where the stages of the training cut the blocks."""
        holders = []  # of each block, the ranks that have most of its weights
        for block in layout.block_names:
            weights = model.get_submodule(block).parameters()
            sizes = {self._names[p]: p.numel() for p in weights}
            counts = [
                sum(size for name, size in sizes.items() if name in resident)
                for resident in self._pipeline.residents
            ]
            holders.append([rank for rank, size in enumerate(counts) if size == max(counts)])
        # Replicas of a stage have the same blocks, and all ranks frozen ones: of ranges that fit, the most equal
        # ones, by the squares of their sizes.
        num_ranks, splits = self._mesh.layout.ranks_per_pipeline, {0: (0, list[int]())}
        for rank in range(num_ranks):
            longer = dict[int, tuple[int, list[int]]]()  # by the number of blocks given so far
            for start, (squares, positions) in splits.items():
                for stop in range(start + 1, len(holders) + 1):
                    if rank not in holders[stop - 1]:
                        break
                    candidate = squares + (stop - start) ** 2, [*positions, stop]
                    longer[stop] = min(longer.get(stop, candidate), candidate)
            splits = longer
        if len(holders) in splits:
            return tuple(splits[len(holders)][1][:-1])
        places = ", ".join(
            f"{len(list(blocks))} on rank {' and '.join(map(str, home))}"
            for home, blocks in itertools.groupby(holders)
        )
        raise PartitionError(
            f"its blocks lie, in order, {places}; PipeFusion needs a range of them on each of {num_ranks} ranks, "
            "in order"
        )

    @contextlib.contextmanager
    def _everything_needed(self, model: nn.Module, setting: PipeFusionSetting) -> Iterator[None]:
        """Loads all parameters that this rank runs inside: its own blocks, and the layers between blocks."""
        needed, parameters = list[set[str]](), dict(model.named_parameters())
        for rank in range(self._mesh.layout.ranks_per_pipeline):
            names = resident_parameters(model, setting.layout, setting.stages, rank)
            needed.append({self._names[parameters[name]] for name in names})
        residents = self._pipeline.residents
        missing = set[str]().union(*(n - have for n, have in zip(needed, residents, strict=True)))
        whole = dict(self._pipeline.values_of(n for n in self._names.values() if n in missing))
        here = needed[self._mesh.local_rank]
        absent = {p: whole[n] for p, n in self._names.items() if n in here and is_placeholder(p)}
        values = {p: rounded(p, v.to(p.device)) for p, v in absent.items()}
        with filled_placeholders(values), torch.no_grad():
            yield
