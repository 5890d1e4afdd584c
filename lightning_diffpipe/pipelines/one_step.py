"""One step of a diffusers pipeline's own `__call__`: how its denoiser is fed in training.

Conditions made of prompts, packed latents, the sizes, guidance and time that the denoiser is given, and the
unpacking of its prediction: all of that is code in the pipeline's `__call__`:

    head   prompts -> tokenizers -> text encoders -> conditions;  noise -> latents, packed or not
    loop   denoiser(latents, timestep, conditions) -> prediction -> scheduler.step
    tail   latents -> unpacked -> vae.decode -> images

For training it is run with four things replaced, in a shallow copy of the pipeline:

    noise       the methods that sample it are given our noisy latents instead, and return them as they are where
                they would mix the image that is animated into them
    scheduler   has one step, with a timestep of ours for each sample; a pipeline that wants one number gets any,
                and the denoiser is given those of the samples, by a factor and an offset that three runs give
    tokenizers  pad to a fixed length, so that every microbatch has the same shapes; so do processors, which read
                images with the prompts, and states of prompts that a pipeline gives its denoiser with a mask
    encoders    of prompts answer in the type of the denoiser, whatever they are stored in; those of the image that
                is animated take one for each sample (`encoding_first_frames`)

The pipeline passes `scheduler.step` the prediction in the scheduler's own terms (epsilon, v, flow).
Where latents are packed by then, the prediction goes on in their place, and the tail unpacks it on its way to the
decoder. Text encoders and denoiser run inside the call as they are, so a strategy finds their layers there.

Sizes and crops, of which a call takes one for all samples, are given to the denoiser for each: two runs with other
numbers show which of its arguments have them.
"""

import contextlib
import copy
import functools
import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self, get_args

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from PIL import Image
from torch import Tensor, nn
from transformers import BaseImageProcessor, ProcessorMixin

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.pipelines.stand_ins import (
    ArgumentPlace,
    Captured,
    Draw,
    Lockstep,
    OneFile,
    PaddingProcessor,
    PaddingTokenizer,
    StandIn,
    answering,
    checked_arguments,
    dropping_encoder,
    dtype_of,
    encoding_first_frames,
    first_frame_processor,
    in_type,
    no_decoder,
    of_length,
    one_timestep,
    per_sample,
    placed,
    repeated_once,
    tensor_processor,
    torch_of_call,
)

DENOISERS = ("transformer", "unet", "prior")
"""Names under which pipelines register what is trained."""

EXPERTS = ("transformer", "transformer_2")
"""Those of noisier times and of the others, in pipelines with `boundary_ratio`."""

_FIXED: dict[str, Any] = {
    "guidance_scale": 1.0,
    "true_cfg_scale": 1.0,
    "pag_scale": 0.0,
    "sag_scale": 0.0,
    "use_resolution_binning": False,
    "decode_chunk_size": 2**16,
    "_auto_resize": False,
}
"""Arguments that mean one row for each sample, the size that is asked for, and decoding at once."""

_FRAMES = ("num_frames", "frames", "video_length")
"""Names under which pipelines take the number of frames."""

_IMAGES = ("image", "images", "video", "control_image", "mask_image")
"""Arguments of pipelines that go on from an image, also by default none, unless annotated as optional."""

_NOT_EDITED = ("strength", "mask_image", "control_image", "controlnet", "adapter")
"""Arguments of pipelines whose image is not one to be edited, but to start from, or for another part."""

_SIZES = ("original_size", "crops_coords_top_left", "target_size")
"""Arguments that say of an image, in two numbers, how it was scaled and cropped."""

OTHERWISE = (
    "train its parts as another pipeline of diffusers that has the same (pipeline_class='...'), or its denoiser "
    "with a LightningModule whose training_step calls it"
)
"""What to do about a pipeline whose own call cannot be trained."""

TIME = "timesteps"

_NEUTRAL = {"prompt": "", "class_labels": 0, None: None}
"""By the argument with a row for each sample: a value that any model takes."""


@dataclass(frozen=True)
class Tail:
    """The operations of a pipeline on latents before they are decoded.

    Attributes:
        scale: The decoder's input is `scale * latents + shift`; `(1, C, 1, ...)` in its layout, or a scalar.
        axes: For every axis of the decoder's input, that of the latents; None where one was inserted.
        num_axes: Axes of the latents, that of the samples included.
        patch: The decoder's input has `patch` times the height and width of the latents, `1 / patch**2` of their
            channels; scale and shift are those of the latents' channels.
        frames_apart: The decoder takes each frame of a video as an image. Axes are counted with frames as axis 1.
        num_given: First frames of the latents that are those of the image that is animated, and not predicted.
        temporal_ratio: Frames of a video for each frame of the latents after the first, where an image is animated.
    """

    scale: Tensor
    shift: Tensor
    axes: tuple[int | None, ...]
    num_axes: int
    patch: int = 1
    frames_apart: bool = False
    num_given: int = 0
    temporal_ratio: int | None = None

    def predicted(self, latents: Tensor) -> Tensor:
        """Returns the frames of latents that the denoiser predicts."""
        if not self.num_given:
            return latents
        axis = self.axes[2]
        assert axis is not None
        return latents.narrow(axis, self.num_given, latents.shape[axis] - self.num_given)

    def undone(self, decoded: Tensor, num_samples: int) -> Tensor:
        """Inverts the tail: returns fp32 latents; of an encoding, latents of about unit variance.

        Raises:
            ConfigurationError: They have another number of channels.
        """
        decoded = patched(decoded.float(), self.patch)
        if self.scale.ndim and decoded.shape[1] != self.scale.shape[1]:
            raise ConfigurationError(
                f"latents of the pipeline have {self.scale.shape[1]} channels; got {decoded.shape[1]}"
            )
        on_device = lambda x: x.to(decoded.device, non_blocking=True)
        values = (decoded - on_device(self.shift)) / on_device(self.scale)
        if self.frames_apart:
            values = values.unflatten(0, (num_samples, -1))
        axes = [axis for axis in self.axes if axis is not None]
        values = values.squeeze(tuple(d for d, axis in enumerate(self.axes) if axis is None))
        values = values.permute(*sorted(range(len(axes)), key=axes.__getitem__))
        for axis in range(self.num_axes):
            values = values if axis in axes else values.unsqueeze(axis)
        return values


class StepInputs(NamedTuple):
    """Samples of a step, as `OneStep.predict` takes them."""

    noisy: Tensor
    timesteps: Tensor
    conditions: Sequence[Any]
    pixels: Mapping[str, int]
    tail: Tail

    def of(self, rows: slice) -> Self:
        """Returns the inputs of some samples."""
        selected = {n: getattr(self, n)[rows] for n in ("noisy", "timesteps", "conditions")}
        return self._replace(**selected)


class OneStep:
    """The call of a pipeline with one step, as a function of noisy latents, timesteps and prompts.

    Args:
        pipeline: A diffusers pipeline, or one of your own derived from `DiffusionPipeline`.
        arguments: Further arguments of its `__call__`, such as `max_sequence_length`, or the `guidance_scale` that
            a model is given (1 otherwise).
        denoiser: Name of the denoiser that is called, of those of `spans_of`; None for the first.

    Attributes:
        denoiser: Its name.
        span: The timesteps that it is for, from the first number on, below the second.
        decoder: Name of the part that decodes latents; None where images themselves are denoised.
        condition: The argument with a row for each sample, `"prompt"` or `"class_labels"`; None for models without.
        neutral: A value of `condition` that any model takes.
        arguments: Arguments of every call, guidance off.
        unguided: Ways to switch guidance off, of which `find_tail` keeps the first that works.
        time: The time given to a pipeline that takes one for all samples; None where it takes those of the samples.
        places: Places of sizes among the denoiser's arguments, and of the time if the pipeline takes one.
        refused_image: Reason for which training cannot follow the pipeline's use of the image, if it cannot.
        image: The argument with an image for each sample that the pipeline edits or animates; None without one.
        animates: Whether it samples videos that begin with the image.
        image_noise: Noise added to the image that it animates, as `encoding_first_frames` takes it.
        mixes_image: Whether a method of it mixes the image into the noise that it samples; in training it returns
            the noise alone.
        needs_image: Whether it needs an image.
        one_by_one: Whether its call is run for each sample.
        reads_references: Whether it passes the image to a processor, which reads it in 8 bits. Then it is
            `one_by_one`, as such pipelines read a list of images for those of one sample.
        reads_several: Whether a sample may have several images then.
        guides_by_image: Whether it can be guided by the difference that the image makes.
        note_tokens: As `PaddingTokenizer` takes it.
        sizes: Arguments with two numbers that each sample may have of its own, such as `"original_size"`; without
            those that are given for all.

    Raises:
        ConfigurationError: The pipeline needs more than prompts, classes or an image to edit, has two denoisers
            that are not for times of their own, or takes no such argument.
    """

    def __init__(
        self,
        pipeline: Any,
        arguments: Mapping[str, Any] | None = None,
        denoiser: str | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._call = inspect.unwrap(type(pipeline).__call__)
        # Names alone: a module that is probed is copied, and a signature cannot be.
        self._parameters = tuple(inspect.signature(self._call).parameters)[1:]
        self.name = type(pipeline).__name__
        components = pipeline.components
        spans = spans_of(pipeline)
        self.denoiser = denoiser or next(iter(spans))
        self.span = spans[self.denoiser]
        self._others = tuple(name for name in spans if name != self.denoiser)
        self.decoder = next(
            (n for n, p in components.items() if isinstance(p, nn.Module) and hasattr(p, "decode")),
            None,
        )
        self.condition = condition_of(type(pipeline))
        self.neutral = _NEUTRAL[self.condition]
        self.image = image_of(type(pipeline))
        self.needs_image = self.image in required_by(type(pipeline))
        self.one_by_one = self.reads_references = self.reads_several = False
        self.animates = self.needs_image and not {*_FRAMES}.isdisjoint(self._parameters)
        self.image_noise: tuple[float, float] | None = None
        self.mixes_image = False
        self.guides_by_image = self.needs_image and "image_guidance_scale" in self._parameters
        self.refused_image: ConfigurationError | None = None
        settings = dict(arguments or {})
        if unknown := [name for name in settings if name not in self._parameters]:
            raise ConfigurationError(
                f"{self.name} takes no {unknown[0]!r}; it takes {', '.join(self._parameters)}"
            )
        fixed = {name: value for name, value in _FIXED.items() if name in self._parameters}
        # Two steps, of which the scheduler knows one: some pipelines divide by half of their number.
        self.arguments = fixed | settings | {"num_inference_steps": 2}
        # Guidance adds a part of the difference, which is none at 1 for most pipelines, for others at 0.
        self.unguided: list[dict[str, Any]] = [{}]
        if "guidance_scale" in fixed and "guidance_scale" not in settings:
            default = inspect.signature(self._call).parameters["guidance_scale"].default
            scales = (None, 1.0, 0.0) if default is None else (1.0, 0.0)
            self.unguided = [{"guidance_scale": scale} for scale in scales]
        self.time: float | None = None
        self.places: tuple[ArgumentPlace, ...] = ()
        self.sizes = tuple(n for n in _SIZES if n in self._parameters and n not in settings)
        self.note_tokens: Callable[..., None] = lambda *_: None
        limit = inspect.signature(self._call).parameters.get("max_sequence_length")
        self._most_tokens = self.arguments.get("max_sequence_length", limit and limit.default)
        names = inspect.signature(components[self.denoiser].forward).parameters
        self._masks_states = any(n.endswith("_mask") and n[:-5] in names for n in names)
        self._drawing = _methods_that_draw(type(pipeline))
        encoders = {n: p for n, p in components.items() if n.startswith("text_encoder") and p}
        takes = {n: inspect.signature(p.forward).parameters for n, p in encoders.items()}
        self._generating = frozenset(n for n, names in takes.items() if "use_cache" in names)

    def predict(
        self,
        noisy: Tensor,
        timesteps: Tensor,
        conditions: Sequence[Any],
        pixels: Mapping[str, int],
        tail: Tail,
        parts: Mapping[str, Any],
        further: Mapping[str, Any],
        shown: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Returns the denoiser's prediction in the scheduler's terms: fp32, like `tail.predicted(noisy)`.

        Args:
            noisy: Noisy latents as the pipeline samples them, such as `(B, C, h, w)` or `(B, C, F, h, w)`.
            timesteps: In the scheduler's terms, `(B,)`.
            conditions: Prompts or class numbers, one for each sample.
            pixels: `height`, `width` and `num_frames`; those that the pipeline does not take are ignored.
            tail: From `find_tail` of `trial.py`.
            parts: The pipeline's parts as they are now, by name.
            further: Values with a row for each sample, by argument: `self.sizes`, `(B, 2)`, and `self.image`,
                `(B, 3, H, W)` in [0, 1], or a list of reference images, `(B, H, W, 3)` each in 8 bits on the host,
                where the pipeline `reads_references`.
            shown: 0 for samples whose image is dropped, `(B,)`.
            generator: Generator of noise and posterior of an image that is animated; None for the global one.

        Raises:
            ConfigurationError: The pipeline samples latents of another shape for these pixels, or edits images in a
                way that training cannot follow.
        """
        inputs = StepInputs(noisy, timesteps, conditions, pixels, tail)
        if self.image in further and self.refused_image is not None:
            raise self.refused_image
        parts = dict(parts)
        if shown is not None and self.decoder is not None:
            parts[self.decoder] = dropping_encoder(parts[self.decoder], shown)
        if self.one_by_one and self.image in further:
            num_references = len(further[self.image]) if self.reads_references else 1
            if num_references > 1 and not self.reads_several:
                raise ConfigurationError(
                    f"{self.name} edits one image, and each sample has {num_references} references; name one"
                )
            predicted = self._predicted_in_lockstep(inputs, parts, further, generator)
        else:
            predicted = self._predicted(inputs, parts, further, generator)
        if predicted is None or predicted.shape != tail.predicted(noisy).shape:
            got = "none" if predicted is None else tuple(predicted.shape)
            raise ConfigurationError(
                f"{self.name} gives no prediction of the shape of its latents {tuple(noisy.shape)}; got {got}"
            )
        return predicted

    def _predicted_in_lockstep(
        self,
        inputs: StepInputs,
        parts: Mapping[str, Any],
        further: Mapping[str, Any],
        generator: torch.Generator | None,
    ) -> Tensor | None:
        """Returns the predictions for samples of which the call takes one at a time."""
        vae = self.decoder
        encoders = [n for n in parts if n.startswith(("text_encoder", "image_encoder"))]
        lockstep = Lockstep(
            {n: parts[n] for n in (*encoders, self.denoiser) if parts[n] is not None},
            {} if vae is None else {vae: parts[vae]},
            {n: p for n, p in parts.items() if isinstance(p, ProcessorMixin)},
            getattr(self._pipeline, "image_processor", None),
            len(inputs.noisy),
        )
        while True:
            predicted = []
            for i, stand_ins in enumerate(lockstep.parts()):
                row = slice(i, i + 1)
                others = {n: value[row] for n, value in further.items() if n != self.image}
                if self.reads_references:
                    images = [Image.fromarray(image[i]) for image in further[self.image]]
                    others[self.image] = images if len(images) > 1 else images[0]
                else:
                    others[self.image] = further[self.image][row]
                known = {**parts, **stand_ins}
                predicted.append(self._predicted(inputs.of(row), known, others, generator))
            if not lockstep.answer():
                return None if None in predicted else torch.cat(predicted)

    def _predicted(
        self,
        inputs: StepInputs,
        parts: Mapping[str, Any],
        further: Mapping[str, Any],
        generator: torch.Generator | None = None,
    ) -> Tensor | None:
        """Returns the prediction of one run of the call; None if it ends before."""
        noisy, timesteps, conditions, pixels, tail = inputs
        predicted: list[Tensor] = []
        shape = tail.predicted(noisy).shape

        def draw(shape: Sequence[int]) -> Tensor:
            if tuple(shape) != tuple(noisy.shape):
                named = (f"{n}={v}" for n, v in pixels.items() if n != "num_frames" or v > 1)
                raise ConfigurationError(
                    f"for {', '.join(named)} {self.name} samples latents {tuple(shape)}, but encodings of the "
                    f"batch are {tuple(noisy.shape)}; give images of a size that the model can sample"
                )
            return noisy

        def step(prediction: Tensor, sample: Tensor) -> Tensor:
            if sample.shape in (noisy.shape, shape):
                # A variance after the mean, which schedulers take off, is not trained.
                predicted.append(prediction[:, : noisy.shape[1]].float())
                raise Captured
            return prediction

        decode = lambda latents: predicted.append(tail.undone(latents, len(noisy)))
        self.run(
            draw, timesteps, conditions, {**pixels, **further}, parts, step, decode,
            self.image_noise, generator,
        )  # fmt: skip
        if predicted and predicted[0].shape == noisy.shape:
            return tail.predicted(predicted[0])
        return predicted[0] if predicted else None

    def time_at(self, share: float) -> float:
        """Returns the integer timestep of the scheduler at a share of the span."""
        start = self.span[0]
        last = self._pipeline.scheduler.config.get("num_train_timesteps", 1000)
        return float(math.ceil(start + share * (min(self.span[1], last) - start)))

    def run(
        self,
        draw: Draw,
        timesteps: Tensor,
        conditions: Sequence[Any],
        further: Mapping[str, Any],
        parts: Mapping[str, Any],
        on_step: Callable[[Tensor, Tensor], Tensor],
        on_decode: Callable[[Tensor], None],
        image_noise: tuple[float, float] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Runs the call on a copy of the pipeline, until something raises `Captured` or it ends.

        Args:
            draw: Returns the noise for the call, by its shape.
            timesteps: Timestep of each sample, `(B,)`.
            conditions: Prompt, or class, of each sample.
            further: Further arguments of the call.
            parts: Components that take the place of the pipeline's in the copy, by name.
            on_step: Returns the next latents, given a prediction and the latents it was made from.
            on_decode: Is called with the input of the decoder.
            image_noise: See `encoding_first_frames`.
            generator: Generator of that noise.
        """
        pipeline = copy.copy(self._pipeline)
        # A class that knows where it runs: diffusers reads every module for that.
        cls, device = type(pipeline), property(lambda self: self.device_of_latents)
        pipeline.__class__ = type(cls.__name__, (cls,), {"_execution_device": device})
        dtype = dtype_of(parts[self.denoiser])
        loop_is_over, noises = False, list[Tensor]()

        def step(prediction: Tensor, sample: Tensor) -> Tensor:
            nonlocal loop_is_over
            loop_is_over = True
            return on_step(prediction, sample)

        def noise(shape: Sequence[int]) -> Tensor:
            # Noise that some pipelines add to latents before they are decoded: `find_tail` refuses these.
            if loop_is_over:
                return torch.randn(tuple(shape), device=timesteps.device)
            noises.append(draw(shape))
            return noises[-1]

        # Numbers that the pipeline takes once for all samples, and its denoiser is given for each.
        by_sample = {n: v for n, v in further.items() if n in self.sizes and isinstance(v, Tensor)}
        further = {n: v for n, v in further.items() if n not in by_sample}
        pipeline_times = timesteps
        if self.time is not None:
            # Compared with a boundary on the host, which knows its value; else computed with on the device.
            is_compared = self.span != (0.0, math.inf)
            place = "cpu" if is_compared else timesteps.device
            pipeline_times = torch.full((), self.time, dtype=timesteps.dtype, device=place)
            by_sample[TIME] = timesteps[:, None]
        readers = self._readers(parts, dtype)
        attributes = vars(pipeline)
        attributes.update(parts, device_of_latents=timesteps.device)
        # A pipeline may take the type of any of its denoisers for that of all; here only one of them computes.
        attributes.update({name: StandIn(parts[name], dtype=dtype) for name in self._others})
        attributes.update(readers, scheduler=one_timestep(parts["scheduler"], pipeline_times, step))
        attributes["_progress_bar_config"] = {"disable": True}
        attributes[self.denoiser] = self._denoiser_of(parts, by_sample, readers)
        if self.decoder is not None:
            encode, images = None, further.get(self.image)
            if self.animates and images is not None:
                vae = parts[self.decoder]
                encode = encoding_first_frames(vae, images, image_noise, generator)
                processors = {n: p for n, p in attributes.items() if hasattr(p, "preprocess_video")}
                attributes.update({n: first_frame_processor(p) for n, p in processors.items()})
                further = {**further, self.image: OneFile(images)}
            attributes[self.decoder] = no_decoder(parts[self.decoder], on_decode, encode)
        networks = [name for name, part in parts.items() if hasattr(part, "modules")]
        attributes.update({n: placed(attributes[n], timesteps.device) for n in networks})
        methods = {name: _drawing_from(method, noise) for name, method in self._drawing.items()}
        call = methods.pop("__call__")  # which is among them for every class
        for name, drawing in methods.items():
            method = _returning_noise(drawing, noises) if self.mixes_image else drawing
            is_static = isinstance(inspect.getattr_static(pipeline, name), staticmethod)
            attributes[name] = method if is_static else types.MethodType(method, pipeline)
        with contextlib.suppress(Captured):
            call(pipeline, **self._given(conditions, len(timesteps), further))

    def _readers(self, parts: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
        """Returns what stands in for the parts that read prompts and images, and for guidance, by name."""
        readers: dict[str, Any] = {}
        for name, part in parts.items():
            if part is None:
                continue
            if name.startswith("tokenizer"):
                readers[name] = PaddingTokenizer(part, self.note_tokens)
            elif isinstance(getattr(part, "real", part), ProcessorMixin) and self._most_tokens:
                readers[name] = PaddingProcessor(part, self._most_tokens, self.note_tokens)
            elif name.startswith("text_encoder"):
                encoder = part
                if dtype_of(part) not in (None, dtype):
                    encoder = answering(part, partial(in_type, dtype=dtype), dtype=dtype)
                if name in self._generating:
                    # Nobody reads the keys and values that such a model keeps for tokens to come.
                    encoder = StandIn(encoder, call=partial(encoder, use_cache=False))
                readers[name] = encoder
            elif name.startswith("image_encoder"):
                # Whose answers stay so where a pipeline repeats them for every prompt.
                once = partial(pytree.tree_map_only, Tensor, repeated_once)
                readers[name] = answering(part, once)
            elif isinstance(part, BaseImageProcessor):
                readers[name] = tensor_processor(part)
            elif hasattr(part, "num_conditions"):  # guidance as a part of its own
                readers[name] = copy.copy(part)  # a new one would log that guiders are experimental
                readers[name].guidance_scale = 1.0
        return readers

    def _denoiser_of(
        self, parts: Mapping[str, Any], by_sample: Mapping[str, Tensor], readers: Mapping[str, Any]
    ) -> Any:
        """Returns the denoiser that gets arguments of each sample, and states of prompts of one length."""
        denoiser = per_sample(parts[self.denoiser], self.places, by_sample)
        if not (self._most_tokens and self._masks_states):
            return denoiser
        processors = [part for part in readers.values() if isinstance(part, PaddingProcessor)]

        def length() -> int:
            return self._most_tokens + (processors[-1].num_image_tokens if processors else 0)

        return of_length(denoiser, length)

    def _given(
        self, conditions: Sequence[Any], num_samples: int, further: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns the arguments of the call."""
        further = {**further, **dict.fromkeys(_FRAMES, further.get("num_frames"))}
        if {"height", "width"} <= further.keys():
            further["max_area"] = further["height"] * further["width"]
        accepted = {n: v for n, v in further.items() if v is not None and n in self._parameters}
        arguments = self.arguments | accepted
        if self.condition is not None:
            arguments[self.condition] = conditions
        elif "batch_size" in self._parameters:
            arguments["batch_size"] = num_samples
        return arguments

    def check(self, pixels: Mapping[str, int]) -> None:
        """Raises ConfigurationError where the pipeline's own check refuses `pixels`, as of `predict`."""
        checked_arguments(self._pipeline, self._given([self.neutral], 1, pixels))


def patched(decoded: Tensor, patch: int) -> Tensor:
    """Reshapes the decoder's input to the height and width of the latents, with more channels."""
    return F.pixel_unshuffle(decoded, patch) if patch > 1 else decoded


def spans_of(pipeline: Any) -> dict[str, tuple[float, float]]:
    """Returns a pipeline's denoisers, each with the timesteps that it is for: from the first on, below the second.

    Raises:
        ConfigurationError: It has none, or several that are not for times of their own.

    Source:
        Wan 2.2, whose config has `boundary_ratio`: https://github.com/Wan-Video/Wan2.2
    """
    name, components = type(pipeline).__name__, pipeline.components
    denoisers = [
        part_name
        for part_name, part in components.items()
        if part is not None and part_name.rstrip("0123456789").rstrip("_") in DENOISERS
    ]
    if not denoisers:
        raise ConfigurationError(
            f"{name} has no {', '.join(DENOISERS)} to train; it has {', '.join(components) or 'no parts'}"
        )
    ratio = pipeline.config.get("boundary_ratio")
    if ratio is not None and set(denoisers) <= set(EXPERTS):
        if not 0 < ratio < 1:
            raise ConfigurationError(
                f"{name} has boundary_ratio={ratio}, and one of its denoisers no times; give one between 0 and 1"
            )
        boundary = ratio * pipeline.scheduler.config.num_train_timesteps
        spans = zip(EXPERTS, ((boundary, math.inf), (0.0, boundary)), strict=True)
        return {expert: span for expert, span in spans if expert in denoisers}
    if len(denoisers) > 1:
        raise ConfigurationError(
            f"{name} has {len(denoisers)} denoisers ({', '.join(denoisers)}), and no boundary_ratio, which says "
            "which times each is for; train one of them in a pipeline that has no other"
        )
    return {denoisers[0]: (0.0, math.inf)}


def condition_of(cls: type) -> str | None:
    """Returns the argument of a pipeline's call with a row for each sample; None if it needs none.

    Raises:
        ConfigurationError: It needs something else, such as an image to start from.
    """
    condition = next(
        (name for name in inspect.signature(cls.__call__).parameters if name in _NEUTRAL), None
    )
    accepted = (condition, image_of(cls))
    if others := [name for name in required_by(cls) if name not in accepted]:
        raise ConfigurationError(
            f"{cls.__name__} samples from {', '.join(others)}, not from prompts or classes alone; {OTHERWISE}"
        )
    return condition


def image_of(cls: type) -> str | None:
    """Returns the argument of a pipeline's call with an image for each sample to edit; None if it edits none."""
    functions = (cls.__call__, cls.__init__)
    takes = {name for each in functions for name in inspect.signature(each).parameters}
    return "image" if "image" in takes and not takes.intersection(_NOT_EDITED) else None


def required_by(cls: type) -> list[str]:
    """Returns the required arguments of a pipeline's call."""
    return [
        p.name
        for p in list(inspect.signature(cls.__call__).parameters.values())[1:]
        if (p.name in _IMAGES and types.NoneType not in get_args(p.annotation))
        or (p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
    ]


@functools.cache
def _methods_that_draw(cls: type) -> dict[str, types.FunctionType]:
    """Finds `__call__` and the methods that sample noise, without decorators such as `torch.no_grad`."""
    methods: dict[str, types.FunctionType] = {}
    for base in reversed(cls.__mro__):
        for name, member in vars(base).items():
            function = inspect.unwrap(member) if callable(member) else None
            if isinstance(function, types.FunctionType):
                methods[name] = function
    drawing = {name: method for name, method in methods.items() if _draws(method.__code__)}
    return drawing | {"__call__": methods["__call__"]}


def _draws(code: types.CodeType) -> bool:
    nested = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return not {"randn_tensor", "randn"}.isdisjoint(code.co_names) or any(map(_draws, nested))


def _drawing_from(method: types.FunctionType, draw: Draw) -> types.FunctionType:
    """Returns a copy of the method in which `torch` and `randn_tensor` take noise from `draw`."""
    stand_in = torch_of_call(draw)
    names = {**method.__globals__, "randn_tensor": stand_in.randn_tensor}
    if names.get("torch") is torch:
        names["torch"] = stand_in
    copied = types.FunctionType(
        method.__code__, names, method.__name__, method.__defaults__, method.__closure__
    )
    copied.__kwdefaults__ = method.__kwdefaults__
    return copied


def _returning_noise(method: Callable[..., Any], noises: Sequence[Tensor]) -> Callable[..., Any]:
    """Returns a method that gives its noise, appended to `noises`, in place of the first tensor of that shape."""

    def call(*args: Any, **options: Any) -> Any:
        before, answer = len(noises), method(*args, **options)
        for noise in noises[before:]:
            values = list(answer) if isinstance(answer, tuple) else [answer]
            place = next((i for i, x in enumerate(values) if x.shape == noise.shape), None)
            if place is not None:
                values[place] = noise.to(values[place])
                answer = tuple(values) if isinstance(answer, tuple) else values[0]
        return answer

    return call
