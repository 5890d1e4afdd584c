"""Any diffusers pipeline in training, without a class for its model.

    images -> vae.encode -> latents, normalised by what the pipeline's own tail undoes
    latents + noise -> the pipeline's own call with one step (pipelines/one_step.py) -> prediction -> loss

Which conditions the denoiser gets, and in what layout, is up to the pipeline; what it shall predict, to its
scheduler.
"""

import inspect
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, Self, get_args

import diffusers
import numpy as np
import torch
from diffusers import DiffusionPipeline
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor, nn

from lightning_diffpipe.errors import (
    ConfigurationError,
    DiffPipeError,
    require_choice,
    require_number,
)
from lightning_diffpipe.modules.adapters import Lora
from lightning_diffpipe.modules.noise import Noise, noise_schedule_of
from lightning_diffpipe.modules.optimization import Optimization
from lightning_diffpipe.modules.part_files import (
    fetched,
    frozen_dtypes,
    load_for_training,
    read_index,
)
from lightning_diffpipe.modules.parts import PartsModule, warn_of_cut
from lightning_diffpipe.pipelines.one_step import OneStep, Tail, condition_of, spans_of
from lightning_diffpipe.pipelines.stand_ins import (
    decoding_in_own_precision,
    dtype_of,
    in_own_precision,
    replaying,
)
from lightning_diffpipe.pipelines.trial import find_tail
from lightning_diffpipe.quantization import quantizations_of, quantize_components
from lightning_diffpipe.sampling.loop import PipelineCall
from lightning_diffpipe.sampling.source import call_of, is_component, load_networks

Expert = Literal["high", "low", "both"]

_UNOPENED = (OSError, ValueError, TypeError, ImportError, AttributeError, SafetensorError)


class PipelineDiffusion(PartsModule):
    """A diffusers pipeline in training: its denoiser learns, everything else is frozen.

    `from_checkpoint` takes `pipeline_class=` where the pipeline is one of your own.

    A batch has `image`, `(B, 3, H, W)` in [-1, 1], or `video`, `(B, 3, F, H, W)`; and `caption`, B strings, or
    `class_labels`, B numbers, as the pipeline asks for. Sizes and crops that a pipeline tells its denoiser, such as
    `original_size` and `crops_coords_top_left` of SDXL, are those of each image where the batch has them,
    `(B, 2)`; otherwise, the pipeline's default. Pipelines that edit images learn from `condition`, the image
    before, `(B, 3, H, W)` in [0, 1], or from `references`, a list of one or several images of any size,
    `(B, h, w, 3)` each in 8 bits on the host. Pipelines that animate an image learn from videos, each of which
    begins with it; `condition` takes the place of the first frame where a batch has it. `mask` and `weight` say
    where and how much a loss counts (`noise.py`).

    Args:
        pipeline: A pipeline of diffusers, or one of your own derived from `DiffusionPipeline`, that samples from
            prompts or classes alone, or edits or animates images.
        caption_dropout: Share of the training samples that lose their caption, for guidance. Models of classes drop
            them themselves.
        condition_dropout: Share of the training samples that lose the image before, where the pipeline guides by
            it (`image_guidance_scale`); None takes 0.1, and none elsewhere. With equal shares half of them lose
            their caption, too.
        train_text_encoder: Train the text encoders along.
        optimization: Optimizer and learning rate.
        lora: Train adapters in place of the weights of the denoiser, and of text encoders that are trained.
        call: Further arguments of the pipeline's call, such as `{"max_sequence_length": 256}`, or `guidance_scale`
            for models that are told it.
        noise: Distribution of the trained times, and their weights in the loss.
        expert: Expert that is trained, of a pipeline with a denoiser for noisier times and one for the others (Wan
            2.2): `"high"`, `"low"`, or None for `"both"`. Then every sample goes through both, each at a time of
            its own, and their losses count by the shares of times they are for: the mean over all times.
        image_noise: Noise that is added to the image that is animated, with pixels in [-1, 1]: mean and deviation
            of the logarithm of its deviation, (-3.0, 0.5) in the training of CogVideoX. None for no noise.

    Attributes:
        steps: The calls of the pipeline that training runs, one for each denoiser.

    Raises:
        ConfigurationError: The pipeline cannot be trained by its own call; says why.

    Example:
        >>> module = PipelineDiffusion.from_pretrained("path/to/FLUX.1-dev")    # doctest: +SKIP
        >>> Trainer(devices=8, strategy="diffpipe").fit(module, data)           # doctest: +SKIP
        >>> module.save_pretrained("trained")                                   # doctest: +SKIP
    """

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        caption_dropout: float = 0.1,
        condition_dropout: float | None = None,
        train_text_encoder: bool = False,
        optimization: Optimization | None = None,
        lora: Lora | None = None,
        call: Mapping[str, Any] | None = None,
        noise: Noise | None = None,
        expert: Expert | None = None,
        image_noise: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        call = dict(call or {})
        require_number("caption_dropout", caption_dropout, 0, 1)
        denoisers = _denoisers_of(pipeline, expert)
        self.steps = tuple(OneStep(pipeline, call, denoiser) for denoiser in denoisers)
        for step in self.steps:
            step.note_tokens = warn_of_cut
        guides = self.step.guides_by_image
        if condition_dropout is None:
            condition_dropout = 0.1 if guides else 0.0
        require_number("condition_dropout", condition_dropout, 0, 1)
        if condition_dropout and not guides:
            raise ConfigurationError(
                f"condition_dropout={condition_dropout} trains guidance by the image before "
                f"(image_guidance_scale), which {self.step.name} does not have, so that nothing would be dropped; "
                "leave condition_dropout out"
            )
        if image_noise is not None:
            if not self.step.animates or len(image_noise) != 2:
                raise ConfigurationError(
                    f"image_noise={image_noise!r}: expected two numbers, such as [-3.0, 0.5], and a pipeline that "
                    f"animates an image, which {self.step.name} does{'' if self.step.animates else ' not'}; leave "
                    "it out for no noise"
                )
            image_noise = (float(image_noise[0]), float(image_noise[1]))
            for step in self.steps:
                step.image_noise = image_noise
        self.save_hyperparameters("caption_dropout", "condition_dropout", "train_text_encoder")
        self.save_hyperparameters("call", "expert", "image_noise")
        self.pipeline = pipeline
        components = {n: p for n, p in pipeline.components.items() if p is not None}
        self.part_names = tuple(components)
        for name, part in components.items():
            setattr(self, name, part)
        # Entries of `model_index.json` besides the components that are there: settings, and absent components.
        slots, config = pipeline.components, pipeline.config
        settings = {n: v for n, v in config.items() if n not in slots and not n.startswith("_")}
        absent = {name: [None, None] for name, part in slots.items() if part is None}
        self.pipeline_index = {"_class_name": type(pipeline).__name__, **settings, **absent}
        self.noise_schedule = noise_schedule_of(pipeline.scheduler, noise)
        self.optimization = optimization or Optimization()
        self.sampling: dict[str, Any] = {}
        self._tail: Tail | None = None
        self._trained_size: dict[str, int] = {}  # sampled by default
        trained = [n for n in components if train_text_encoder and n.startswith("text_encoder")]
        self.frozen_parts = tuple(
            name
            for name, part in components.items()
            if isinstance(part, nn.Module) and name not in (*denoisers, *trained)
        )
        self.freeze_parts()
        self.add_lora(lora, train_text_encoder, type(pipeline))

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        frozen_dtype: str | torch.dtype | Mapping[str, Any] | None = None,
        quantization: Any = None,
        pipeline_class: str | None = None,
        **kwargs: Any,
    ) -> Self:
        """Reads a diffusers folder or hub id.

        Args:
            path: Folder with `model_index.json`, or a hub id.
            frozen_dtype: As in `PartsModule.from_pretrained`.
            quantization: As in `PartsModule.from_pretrained`.
            pipeline_class: A pipeline of diffusers in the place of that which `model_index.json` names, for the
                same parts: `"LTXImageToVideoPipeline"` animates images with those of `LTXPipeline`.
            kwargs: Further arguments of `__init__`.

        Raises:
            ConfigurationError: There is no such folder, it cannot be opened, or its pipeline cannot be trained by
                its own call.
            CheckpointError: Weights are missing.
        """
        index = read_index(str(path))
        opened: Any = DiffusionPipeline
        if pipeline_class is not None:
            opened = _pipeline_class({"_class_name": pipeline_class}, "pipeline_class")
        condition_of(_pipeline_class(index, str(path)) if pipeline_class is None else opened)
        names = [name for name, entry in index.items() if is_component(entry)]
        dtypes = frozen_dtypes(frozen_dtype, names)
        quantizations = quantizations_of(quantization, names)

        def load(path: str, name: str, entry: Sequence[str]) -> Any:
            return load_for_training(path, name, entry, dtypes[name])

        try:
            folder = fetched(str(path))
            networks = load_networks(folder, index, load=load)
            pipeline = opened.from_pretrained(folder, **networks)
        except DiffPipeError:
            raise
        except _UNOPENED as error:
            reason = " ".join(str(error).split())
            raise ConfigurationError(
                f"diffusers and transformers cannot open {path}: {type(error).__name__}: {reason}"
            ) from error
        module = cls(pipeline, **kwargs)
        module.train_in_float32()
        quantize_components(quantizations, module.parts, every=isinstance(quantization, Mapping))
        module._note_base(path, networks)
        return module

    @classmethod
    def _assembled(
        cls, parts: Mapping[str, Any], index: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> Self:
        arguments = dict(arguments)
        kind = arguments.pop("pipeline_class", None) or _pipeline_class(index, "the checkpoint")
        expected = inspect.signature(kind.__init__).parameters
        entries = {name: index[name] for name in expected if name in index}
        absent = {name: None for name in expected if index.get(name) == [None, None]}
        return cls(kind(**{**entries, **absent, **parts}), **arguments)

    @property
    def edits_images(self) -> bool:  # type: ignore[override]
        """Whether batches may have references."""
        return self.step.image is not None

    @property
    def step(self) -> OneStep:
        """The first of `steps`."""
        return self.steps[0]

    @property
    def denoiser(self) -> nn.Module:
        """The part that is trained; the first of them, if there are two."""
        return getattr(self, self.step.denoiser)

    @property
    def denoisers(self) -> tuple[nn.Module, ...]:
        """All denoisers that are trained."""
        return tuple(getattr(self, step.denoiser) for step in self.steps)

    @property
    def tail(self) -> Tail:
        """The pipeline's operations on latents before decoding; determined at first use."""
        if self._tail is None:
            for step in self.steps:  # each learns of its times; the tail is the same
                self._tail = find_tail(step, self.parts)
        assert self._tail is not None
        return self._tail

    def setup(self, stage: str) -> None:
        """Determines the pipeline's tail before training, so that it is refused early."""
        super().setup(stage)
        self._tail = self.tail

    def encode(self, pixels: Tensor, sample: bool = True) -> Tensor:
        """Encodes images or videos as the pipeline's latents, fp32 and of about unit variance.

        Args:
            pixels: `(B, 3, H, W)` or `(B, 3, F, H, W)` in [-1, 1].
            sample: Sample the posterior where there is one, rather than take its mode.
        """
        if self.step.decoder is None:
            return pixels.float()
        tail, vae = self.tail, getattr(self, self.step.decoder)
        num_samples = len(pixels)
        if len(tail.axes) == pixels.ndim + 1:
            pixels = pixels.unsqueeze(2)  # an image is a video of one frame
        if tail.frames_apart:
            pixels = pixels.transpose(1, 2).flatten(0, 1)
        with in_own_precision(vae, pixels.device):
            encoded = vae.encode(pixels.to(dtype_of(vae)))
        posterior = getattr(encoded, "latent_dist", None)
        if posterior is not None:
            latents = posterior.sample() if sample else posterior.mode()
        else:
            latents = encoded.latents if hasattr(encoded, "latents") else encoded[0]
        return tail.undone(latents, num_samples)

    def require_size(self, height: int, width: int) -> None:
        """Raises ConfigurationError for images of a size, in pixels, that the pipeline's own check refuses."""
        self.step.check({"height": height, "width": width})

    def on_train_start(self) -> None:
        """Forgets the size of an earlier training."""
        super().on_train_start()
        self._trained_size = {}

    def on_train_batch_start(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        """Stores the size to sample while training: a pipeline's default may be many times that of the images.

        It is that of the first batch, as samples of several steps are to compare, and buckets change sizes.
        """
        super().on_train_batch_start(batch, batch_idx)
        self._trained_size = self._trained_size or _size_of(_pixels_of(batch))

    def losses(
        self, batch: Mapping[str, Any], generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Computes the loss of one batch.

        Raises:
            ConfigurationError: The batch lacks prompts, classes or images that the pipeline needs.
        """
        tail = self.tail  # first: finding it also finds out how the pipeline reads images
        step, pixels = self.step, _pixels_of(batch)
        is_training, conditions, keeps_image = generator is None, [], None  # validation has one
        further = {name: batch[name] for name in step.sizes if name in batch}
        if step.condition is not None:
            key = "caption" if step.condition == "prompt" else step.condition
            conditions = self._read(batch, key)
        if step.animates:
            self._require_frames(batch)
            batch = {"condition": (pixels[:, :, 0] + 1) / 2, **batch}
        if "references" in batch or (step.image is not None and step.needs_image):
            further[step.image] = image = self._image_of(batch)
            if step.animates and image.shape[-2:] != pixels.shape[-2:]:
                raise ConfigurationError(
                    f"{step.name} animates images of the size of their videos, here {tuple(pixels.shape[-2:])}, "
                    f"and those of the batch have {tuple(image.shape[-2:])}"
                )
        elif step.image is not None and "condition" in batch:
            further[step.image] = batch["condition"]
        if is_training and step.condition == "prompt":
            draws = [random.random() for _ in conditions]
            caption_dropout = self.hparams.caption_dropout
            conditions = [
                "" if draw < caption_dropout else caption
                for caption, draw in zip(conditions, draws, strict=True)
            ]
            keeps_image = self._keeps_image(draws) if step.guides_by_image else None
        schedule, clean = self.noise_schedule, self.encode(pixels, is_training)
        parts, losses = self.parts, []
        if len(self.steps) > 1:
            trained = [step.denoiser for step in self.steps]
            modules = {n: p for n, p in parts.items() if isinstance(p, nn.Module)}
            encoders = {n: part for n, part in modules.items() if n not in trained}
            # Encoders compute in the call of the first denoiser; those of the others take the same answers.
            stand_in_makers = {name: replaying(part) for name, part in encoders.items()}
        for step in self.steps:
            has_all_times = step.span == (0, math.inf)
            corrupted = schedule.corrupt(clean, generator, None if has_all_times else step.span)
            if len(self.steps) > 1:
                parts = self.parts | {name: make() for name, make in stand_in_makers.items()}
            inputs = corrupted.noisy, corrupted.timesteps, conditions, _size_of(pixels)
            prediction = step.predict(*inputs, tail, parts, further, keeps_image, generator)
            target = tail.predicted(corrupted.target)  # in the layout of predictions
            losses.append(schedule.losses(corrupted._replace(target=target), prediction, batch))
        if len(losses) == 1:
            return losses[0]
        # The mean over all times, of which each denoiser was trained on a share.
        shares = [schedule.share_of(step.span, clean.shape) for step in self.steps]
        loss = sum(share * each["loss"] for share, each in zip(shares, losses, strict=True))
        loss = loss / sum(shares)  # less than one where only some times are trained
        return {name: sum(each[name] for each in losses) for name in losses[0]} | {"loss": loss}

    def _require_frames(self, batch: Mapping[str, Any]) -> None:
        """Raises ConfigurationError unless a batch has videos of which an autoencoder takes every frame."""
        video = self._read(batch, "video", ", which begin with the image (data.num_frames)")
        ratio, num_frames = self.tail.temporal_ratio, video.shape[2]
        if ratio is not None and (num_frames - 1 < ratio or (num_frames - 1) % ratio):
            raise ConfigurationError(
                f"{self.step.name} samples videos of {ratio + 1}, {2 * ratio + 1}, {3 * ratio + 1}, ... frames, "
                f"and those of the batch have {num_frames}; take {max(1, num_frames // ratio) * ratio + 1} "
                "(data.num_frames)"
            )

    def _read(self, batch: Mapping[str, Any], name: str, note: str = "") -> Any:
        if name not in batch:
            raise ConfigurationError(
                f"{self.step.name} learns from batches with {name!r}{note}; this one has "
                + ", ".join(map(str, batch))
            )
        return batch[name]

    def _image_of(self, batch: Mapping[str, Any]) -> Any:
        """Returns the images of a batch that the pipeline edits, as `OneStep.predict` takes them."""
        step, references = self.step, batch.get("references")
        for each in references or ():
            if not isinstance(each, np.ndarray) or each.dtype != np.uint8 or each.shape[3:] != (3,):
                raise ConfigurationError(
                    f"{step.name} learns from references that are a list of numpy arrays, (B, h, w, 3) each in 8 "
                    f"bits; got {type(each).__name__} {tuple(getattr(each, 'shape', ()))} of "
                    f"{getattr(each, 'dtype', 'no type')}; the collate_fn of a DataLoader has to leave them so"
                )
        if step.reads_references:
            note = ", images that it edits, which metadata.jsonl names for each (data.references)"
            return self._read(batch, "references", note)
        if references is None:
            note = ", the images before, which a folder names in metadata.jsonl (data.condition)"
            return self._read(batch, "condition", note)
        return self._as_numbers(references)

    def _as_numbers(self, references: Sequence[Any]) -> Tensor:
        """Returns references for a pipeline that edits one image, `(B, 3, h, w)` in [0, 1]."""
        if len(references) > 1:
            raise ConfigurationError(
                f"{self.step.name} edits one image, and each sample has {len(references)} references; name one"
            )
        return torch.tensor(references[0], device=self.device).permute(0, 3, 1, 2).float() / 255

    def _keeps_image(self, draws: Sequence[float]) -> Tensor:
        """Returns 1 for samples that keep their image, 0 for others, `(B,)`, by the draws for their captions.

        Source:
            InstructPix2Pix, Brooks et al. (2023), section 3.2.1, https://arxiv.org/abs/2211.09800
        """
        caption, image = self.hparams.caption_dropout, self.hparams.condition_dropout
        start = min(caption - min(caption, image) / 2, 1 - image)
        kept = [float(not start <= draw < start + image) for draw in draws]
        return torch.tensor(kept).to(self.device, non_blocking=True)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context with all modules in evaluation mode, in which the autoencoder decodes in its own precision."""
        vae = self.step.decoder and getattr(self, self.step.decoder)
        with super().evaluating(), decoding_in_own_precision(vae) if vae else nullcontext():
            yield

    @property
    def samples_from(self) -> str:
        """Key of the batch with prompts or class numbers to sample from; for the callback SampleImages."""
        return "class_labels" if self.step.condition == "class_labels" else "caption"

    @property
    def samples_to_conditions(self) -> bool:
        """Whether sampling needs a condition with each prompt; for the callback SampleImages."""
        return self.step.needs_image

    @property
    def samples_one_by_one(self) -> bool:
        """Whether each prompt is sampled by a call of its own; for the callback SampleImages."""
        return self.step.animates

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Any],
        num_inference_steps: int = 25,
        guidance_scale: float | None = None,
        generator: torch.Generator | None = None,
        condition: Tensor | Sequence[Any] | None = None,
        **options: Any,
    ) -> Tensor:
        """Samples one image or video per prompt with the pipeline's own call, in this process.

        Args:
            prompts: Prompts or class numbers; of a model without either only their number counts.
            num_inference_steps: Denoising steps.
            guidance_scale: Strength of guidance, where there is one; that of `call`, or the pipeline's own, if not
                given.
            generator: Generator of the start noise.
            condition: The images to edit or animate, `(len(prompts), 3, H, W)` in [0, 1], or a list of references,
                `(len(prompts), h, w, 3)` each in 8 bits.
            options: Further arguments of the pipeline's call, such as `height` and `width`; those of the first
                batch trained on if not given, or else the pipeline's own.

        Returns:
            `(len(prompts), 3, H, W)` in [0, 1]; videos `(len(prompts), F, 3, H, W)`.
        """
        settings = {"guidance_scale": guidance_scale, "generator": generator, **options}
        settings["num_inference_steps"] = num_inference_steps
        calls = [(prompts, condition)]
        of_references = not isinstance(condition, Tensor | None)
        is_apart = self.samples_one_by_one and condition is not None
        if is_apart or (self.step.reads_references and of_references):
            of_row = lambda row: [x[row] for x in condition] if of_references else condition[row]
            rows = [slice(i, i + 1) for i in range(len(prompts))]
            calls = [(prompts[row], of_row(row)) for row in rows]
        progress = getattr(self.pipeline, "_progress_bar_config", {})
        self.pipeline.set_progress_bar_config(disable=True)
        try:
            with self.evaluating():
                sampled = [
                    self.pipeline(
                        **self.sampling_call(texts, condition=images, **settings).arguments
                    )[0]
                    for texts, images in calls
                ]
        finally:
            self.pipeline.set_progress_bar_config(**progress)
        images = [torch.stack(list(each)) if isinstance(each, list) else each for each in sampled]
        return images[0] if len(images) == 1 else torch.cat(images)

    def sampling_call(
        self,
        prompts: Sequence[Any],
        guidance_scale: float | None = None,
        condition: Tensor | Sequence[Any] | None = None,
        **settings: Any,
    ) -> PipelineCall:
        """Returns the pipeline's call that `sample` makes of these arguments, for samplers that run its loop."""
        guidance = {} if guidance_scale is None else {"guidance_scale": guidance_scale}
        values = {**self._trained_size, "batch_size": len(prompts), **self.hparams.call, **guidance}
        parameters = inspect.signature(self.pipeline.__call__).parameters
        arguments = {name: value for name, value in values.items() if name in parameters}
        arguments |= {**settings, "output_type": "pt"}
        if self.step.condition is not None:
            arguments[self.step.condition] = list(prompts)
        if condition is None:
            if self.step.needs_image:
                raise ConfigurationError(
                    f"{self.step.name} samples from an image; give condition, (prompts, 3, H, W) in [0, 1]"
                )
        elif self.step.reads_references and not isinstance(condition, Tensor):
            images = [Image.fromarray(each[0]) for each in condition]  # of one prompt
            arguments[self.step.image] = images if len(images) > 1 else images[0]
        else:
            image: Any = condition if isinstance(condition, Tensor) else self._as_numbers(condition)
            if self.step.animates:  # its processors may read images of 8 bits only
                image = VaeImageProcessor.numpy_to_pil(VaeImageProcessor.pt_to_numpy(image))[0]
            arguments[self.step.image] = image
        return call_of(self.pipeline, arguments, self.device)


def _denoisers_of(pipeline: DiffusionPipeline, expert: Expert | None) -> tuple[str, ...]:
    """Returns the names of the denoisers that are trained; raises ConfigurationError for experts it has not."""
    denoisers = tuple(spans_of(pipeline))
    if expert is None:
        return denoisers
    require_choice("expert", expert, get_args(Expert))
    if len(denoisers) == 1:
        raise ConfigurationError(
            f"expert={expert!r} is for pipelines with two denoisers, and {type(pipeline).__name__} has one, "
            f"{denoisers[0]}; leave it out"
        )
    return {"high": denoisers[:1], "low": denoisers[1:], "both": denoisers}[expert]


def _pixels_of(batch: Mapping[str, Any]) -> Tensor:
    return batch["video"] if "video" in batch else batch["image"]


def _size_of(pixels: Tensor) -> dict[str, int]:
    num_frames = pixels.shape[2] if pixels.ndim == 5 else 1
    return {"height": pixels.shape[-2], "width": pixels.shape[-1], "num_frames": num_frames}


def _pipeline_class(index: Mapping[str, Any], origin: str) -> type:
    name = index.get("_class_name")
    cls = getattr(diffusers, str(name), None)
    if cls is None:
        raise ConfigurationError(
            f"{origin} names the pipeline {name!r}, which diffusers {diffusers.__version__} does not have; give a "
            "pipeline of your own to PipelineDiffusion(pipeline), or pipeline_class to from_checkpoint"
        )
    return cls
