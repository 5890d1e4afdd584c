"""One step of a diffusers pipeline's own `__call__`: how its denoiser is fed in training.

A pipeline knows how prompts become conditions, how latents are packed, what the denoiser is told of sizes,
guidance and time, and how its prediction is unpacked. All of that is in `__call__`:

    head   prompts -> tokenizers -> text encoders -> conditions;  noise -> latents, packed or not
    loop   denoiser(latents, timestep, conditions) -> prediction -> scheduler.step
    tail   latents -> unpacked -> vae.decode -> pictures

For training it is run with three things replaced, in a shallow copy of the pipeline:

    noise       the methods that draw it are given our noisy latents instead
    scheduler   has one step, with a timestep of ours for each sample; a pipeline that wants one number gets any,
                and the denoiser is told those of the samples, by a factor and an offset that three runs give
    tokenizers  pad to a fixed length, so that every microbatch has the same shapes

What the pipeline hands to `scheduler.step` is the prediction in the scheduler's own terms (epsilon, v, flow).
Where latents are packed by then, the prediction goes on in their place, and the tail unpacks it on its way to the
decoder. Text encoders and denoiser run inside the call as they are, so a strategy finds their layers there.

Sizes and crops, of which a call takes one for all samples, are told to the denoiser for each: two runs with other
numbers show in which of its arguments they stand.

Runs with constant latents tell what the tail does to latents before they are decoded: an order of axes, a factor
and an offset for each channel. The inverse normalises what the encoder gives.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.pipelines.stand_ins import (
    Captured,
    Clock,
    NoDecoder,
    NoDenoiser,
    OneTimestep,
    PaddingTokenizer,
    Place,
    ReplayedEncoder,
    SizedDenoiser,
    TimedDenoiser,
    TorchOfCall,
    checked_arguments,
)

DENOISERS = ("transformer", "unet", "prior")
"""Names under which pipelines register what is trained."""

_FIXED: dict[str, Any] = {
    "guidance_scale": 1.0,
    "pag_scale": 0.0,
    "sag_scale": 0.0,
    "use_resolution_binning": False,
    "decode_chunk_size": 2**16,
}
"""Arguments that mean one row for each sample, the size that is asked for, and decoding at once."""

_FRAMES = ("num_frames", "frames", "video_length")
"""Names under which pipelines take the number of frames."""

_PICTURES = ("image", "images", "video", "control_image", "mask_image")
"""Arguments of pipelines that go on from a picture, also by default none, unless annotated as optional."""

_SIZES = ("original_size", "crops_coords_top_left", "target_size")
"""Arguments that say of a picture, in two numbers, how it was scaled and cropped."""

_NEUTRAL = {"prompt": "", "class_labels": 0, None: None}
"""By the argument with a row for each sample: a value that any model takes."""

Draw = Callable[[Sequence[int]], Tensor]


@dataclass(frozen=True)
class Tail:
    """What a pipeline does to latents before they are decoded.

    Attributes:
        scale: Decoded is `scale * latents + shift`; `(1, C, 1, ...)` in the layout that is decoded, or a scalar.
        shift: See `scale`.
        axes: For every axis of what is decoded, that of the latents; None where one was inserted.
        num_axes: Axes of the latents, that of the samples included.
        patch: What is decoded has `patch` times the height and width of the latents, `1 / patch**2` of their
            channels; scale and shift are those of the latents' channels.
        frames_apart: The decoder takes each frame of a video as a picture. Axes are counted with frames as axis 1.
    """

    scale: Tensor
    shift: Tensor
    axes: tuple[int | None, ...]
    num_axes: int
    patch: int = 1
    frames_apart: bool = False

    def undone(self, decoded: Tensor, num_samples: int) -> Tensor:
        """Returns the fp32 latents whose tail this is; of an encoding, latents of about unit variance."""
        decoded = _patched(decoded.float(), self.patch)
        if self.scale.ndim and decoded.shape[1] != self.scale.shape[1]:
            raise ConfigurationError(
                f"latents of the pipeline have {self.scale.shape[1]} channels; got {decoded.shape[1]}"
            )
        shift, scale = (
            value.to(decoded.device, non_blocking=True) for value in (self.shift, self.scale)
        )
        values = (decoded - shift) / scale
        if self.frames_apart:
            values = values.unflatten(0, (num_samples, -1))
        there = [axis for axis in self.axes if axis is not None]
        values = values.squeeze(tuple(d for d, axis in enumerate(self.axes) if axis is None))
        values = values.permute(*sorted(range(len(there)), key=there.__getitem__))
        for axis in range(self.num_axes):
            values = values if axis in there else values.unsqueeze(axis)
        return values


class OneStep:
    """The call of a pipeline with one step, as a function of noisy latents, timesteps and prompts.

    Args:
        pipeline: A diffusers pipeline, or one of your own derived from `DiffusionPipeline`.
        arguments: Further arguments of its `__call__`, such as `max_sequence_length`, or the `guidance_scale` that
            a model is told (1 otherwise).

    Attributes:
        name: Of the pipeline's class.
        denoiser: Name of the part that is trained.
        decoder: Name of the part that decodes latents; None where pictures themselves are denoised.
        condition: The argument with a row for each sample, `"prompt"` or `"class_labels"`; None for models without.
        sizes: Arguments with two numbers that each sample may have of its own, such as `"original_size"`; without
            those that are given for all.

    Raises:
        ConfigurationError: The pipeline needs more than prompts or classes, has two denoisers, or takes no such
            argument.
    """

    def __init__(self, pipeline: Any, arguments: Mapping[str, Any] | None = None) -> None:
        self._pipeline = pipeline
        self._call = inspect.unwrap(type(pipeline).__call__)
        # Names alone: a module that is probed is copied, and a signature cannot be.
        self._parameters = tuple(inspect.signature(self._call).parameters)[1:]
        self.name = type(pipeline).__name__
        components = pipeline.components
        self.denoiser = self._only_denoiser(components)
        self.decoder = next(
            (n for n, p in components.items() if isinstance(p, nn.Module) and hasattr(p, "decode")),
            None,
        )
        self.condition = condition_of(type(pipeline))
        given = dict(arguments or {})
        if unknown := [name for name in given if name not in self._parameters]:
            raise ConfigurationError(
                f"{self.name} takes no {unknown[0]!r}; it takes {', '.join(self._parameters)}"
            )
        fixed = {name: value for name, value in _FIXED.items() if name in self._parameters}
        # Two steps, of which the scheduler knows one: some pipelines divide by half of their number.
        self._arguments = fixed | given | {"num_inference_steps": 2}
        # Guidance adds a part of the difference, which is none at 1 for most pipelines, for others at 0.
        self._unguided: list[dict[str, Any]] = [{}]
        if "guidance_scale" in fixed and "guidance_scale" not in given:
            self._unguided = [{"guidance_scale": 1.0}, {"guidance_scale": 0.0}]
        self._clock: Clock | None = None
        self._places: tuple[Place, ...] = ()
        self.sizes = tuple(n for n in _SIZES if n in self._parameters and n not in given)
        self._drawing = _methods_that_draw(type(pipeline))

    def predict(
        self,
        noisy: Tensor,
        timesteps: Tensor,
        conditions: Sequence[Any],
        pixels: Mapping[str, int],
        tail: Tail,
        parts: Mapping[str, Any],
        sizes: Mapping[str, Tensor],
    ) -> Tensor:
        """What the denoiser predicts, as the scheduler understands it, in the layout of the latents.

        Args:
            noisy: Noisy latents as the pipeline draws them, such as `(B, C, h, w)` or `(B, C, F, h, w)`.
            timesteps: In the scheduler's terms, `(B,)`.
            conditions: Prompts or class numbers, one for each sample.
            pixels: `height`, `width` and `num_frames`; what the pipeline does not take is left out.
            tail: From `find_tail`.
            parts: The pipeline's parts as they are now, by name.
            sizes: Numbers of each sample, `(B, 2)`, by an argument in `self.sizes`; of what is not given, all have
                the pipeline's default.

        Returns:
            fp32, of the shape of `noisy`.

        Raises:
            ConfigurationError: The pipeline draws latents of another shape for these pixels.
        """
        predicted: list[Tensor] = []

        def draw(shape: Sequence[int]) -> Tensor:
            if tuple(shape) != tuple(noisy.shape):
                told = {n: v for n, v in pixels.items() if n != "num_frames" or v > 1}
                size = ", ".join(f"{name}={number}" for name, number in told.items())
                raise ConfigurationError(
                    f"for {size} {self.name} draws latents {tuple(shape)}, but encodings of the batch are "
                    f"{tuple(noisy.shape)}; give pictures of a size that the model can draw"
                )
            return noisy

        def step(prediction: Tensor, sample: Tensor) -> Tensor:
            if sample.shape == noisy.shape:
                # A variance behind the mean, which schedulers take off, is not trained.
                predicted.append(prediction[:, : noisy.shape[1]].float())
                raise Captured
            return prediction

        def decode(latents: Tensor) -> None:
            predicted.append(tail.undone(latents, len(noisy)))

        if places := [place for place in self._places if place.argument in sizes]:
            sized = SizedDenoiser(parts[self.denoiser], places, sizes)
            parts = {**parts, self.denoiser: sized}
        self._run(draw, timesteps, conditions, pixels, parts, step, decode)
        if not predicted or predicted[0].shape != noisy.shape:
            got = tuple(predicted[0].shape) if predicted else "none"
            raise ConfigurationError(
                f"{self.name} gives no prediction of the shape of its latents {tuple(noisy.shape)}; got {got}"
            )
        return predicted[0]

    def find_tail(self, parts: Mapping[str, Any]) -> Tail:
        """Runs the call at its default size with stand-ins, to see what can be trained and how.

        Args:
            parts: The pipeline's parts by name. Its text encoders are called once, with an empty prompt; denoiser
                and decoder are not called.

        Raises:
            ConfigurationError: Training cannot follow: noise is drawn or the denoiser called several times in a
                step, samples cannot have timesteps of their own, latents are changed in a way that cannot be
                undone, or the pipeline expects something else of its scheduler.
        """
        refusals = []
        for one_time, arguments in itertools.product((False, True), self._unguided):
            self._arguments |= arguments
            self._clock = None
            try:
                with torch.no_grad():
                    trial = _Trial(self, parts)
                    if one_time:
                        self._clock = trial.clock()
                    trial.check_samples_apart()
                    self._places = trial.places()
                    return trial.tail()
            except ConfigurationError as refusal:
                refusals.append(refusal)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                refusal = ConfigurationError(
                    f"{self.name} cannot be trained by its own call: with one step at a timestep for each sample "
                    f"it ended in {type(error).__name__}: {error}"
                )
                refusal.__cause__ = error
                refusals.append(refusal)
        raise refusals[0]

    def _only_denoiser(self, components: Mapping[str, Any]) -> str:
        there = [
            name
            for name, part in components.items()
            if part is not None and name.rstrip("0123456789").rstrip("_") in DENOISERS
        ]
        if not there:
            raise ConfigurationError(
                f"{self.name} has no {', '.join(DENOISERS)} to train; it has {', '.join(components) or 'no parts'}"
            )
        if len(there) > 1:
            raise ConfigurationError(
                f"{self.name} has {len(there)} denoisers ({', '.join(there)}), each for a part of the time; train "
                "one of them in a pipeline that has no other"
            )
        return there[0]

    def _run(
        self,
        draw: Draw,
        timesteps: Tensor,
        conditions: Sequence[Any],
        pixels: Mapping[str, int],
        parts: Mapping[str, Any],
        on_step: Callable[[Tensor, Tensor], Tensor],
        on_decode: Callable[[Tensor], None],
    ) -> None:
        """Runs the call on a copy of the pipeline, until something raises `Captured` or it ends."""
        pipeline = copy.copy(self._pipeline)
        own = vars(pipeline)
        own.update(parts)
        told = timesteps
        if self._clock is not None:
            told = torch.tensor(self._clock.told, dtype=timesteps.dtype)
            own[self.denoiser] = TimedDenoiser(parts[self.denoiser], self._clock, timesteps)
        own["scheduler"] = OneTimestep(parts["scheduler"], told, on_step)
        own["_progress_bar_config"] = {"disable": True}
        for name, part in parts.items():
            if name.startswith("tokenizer") and part is not None:
                own[name] = PaddingTokenizer(part)
            elif hasattr(part, "num_conditions"):  # guidance as a part of its own
                own[name] = part.new(guidance_scale=1.0)
        if self.decoder is not None:
            own[self.decoder] = NoDecoder(parts[self.decoder], on_decode)
        methods = {name: _drawing_from(method, draw) for name, method in self._drawing.items()}
        call = methods.pop("__call__")
        for name, method in methods.items():
            is_static = isinstance(inspect.getattr_static(pipeline, name), staticmethod)
            own[name] = method if is_static else types.MethodType(method, pipeline)
        with contextlib.suppress(Captured):
            call(pipeline, **self._given(conditions, len(timesteps), pixels))

    def _given(
        self, conditions: Sequence[Any], num_samples: int, pixels: Mapping[str, int]
    ) -> dict[str, Any]:
        """The arguments of a call."""
        sizes = {**pixels, **dict.fromkeys(_FRAMES, pixels.get("num_frames"))}
        taken = {n: v for n, v in sizes.items() if v is not None and n in self._parameters}
        arguments = self._arguments | taken
        if self.condition is not None:
            arguments[self.condition] = conditions
        elif "batch_size" in self._parameters:
            arguments["batch_size"] = num_samples
        return arguments

    def check(self, pixels: Mapping[str, int]) -> None:
        """Raises ConfigurationError where the pipeline's own check refuses pictures of a size.

        Args:
            pixels: As in `predict`.
        """
        checked_arguments(self._pipeline, self._given([_NEUTRAL[self.condition]], 1, pixels))


def condition_of(cls: type) -> str | None:
    """The argument of a pipeline's call with a row for each sample; None if it needs none.

    Raises:
        ConfigurationError: It needs something else, such as a picture.
    """
    parameters = list(inspect.signature(cls.__call__).parameters.values())[1:]
    condition = next((p.name for p in parameters if p.name in _NEUTRAL), None)
    required = [
        p.name
        for p in parameters
        if (p.name in _PICTURES and types.NoneType not in get_args(p.annotation))
        or (p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
    ]
    if others := [name for name in required if name != condition]:
        raise ConfigurationError(
            f"{cls.__name__} draws from {', '.join(others)}, not from prompts or classes alone; train it with a "
            "LightningModule whose training_step calls its denoiser, which the strategy runs unchanged"
        )
    return condition


class _Trial:
    """Runs of a call in which nothing but its text encoders computes.

    Args:
        step: The call.
        parts: The pipeline's parts by name.
    """

    def __init__(self, step: OneStep, parts: Mapping[str, Any]) -> None:
        self._step = step
        self._denoiser = NoDenoiser(parts[step.denoiser])
        modules = {n: p for n, p in parts.items() if isinstance(p, nn.Module)}
        self._encoders = {
            name: ReplayedEncoder(part)
            for name, part in modules.items()
            if name not in (step.denoiser, step.decoder)
        }
        self._parts = {**parts, **self._encoders, step.denoiser: self._denoiser}
        parameter = next(modules[step.denoiser].parameters())
        self._device = parameter.device
        self._drawn: list[tuple[int, ...]] = []

    def _decoded(
        self,
        draw: Draw,
        times: Sequence[float] = (1.0,),
        sizes: Mapping[str, tuple[int, int]] | None = None,
    ) -> Tensor:
        """What reaches the decoder for latents that are drawn so."""
        self._drawn.clear()
        self._denoiser.calls.clear()
        for encoder in self._encoders.values():
            encoder.rewind()
        found: list[Tensor] = []

        def noted(shape: Sequence[int]) -> Tensor:
            self._drawn.append(tuple(shape))
            return draw(shape).to(self._device)

        def step(_: Tensor, sample: Tensor) -> Tensor:
            if self._step.decoder is None:
                found.append(sample)
            return sample

        discrete = "beta_schedule" in self._parts["scheduler"].config
        timesteps = torch.tensor(times, device=self._device)
        self._step._run(
            noted,
            timesteps.long() if discrete else timesteps,
            [_NEUTRAL[self._step.condition]] * len(times),
            sizes or {},
            self._parts,
            step,
            found.append,
        )
        counts = len(self._drawn), len(self._denoiser.calls), len(found)
        if counts != (1, 1, 1):
            raise ConfigurationError(
                f"in one step {self._step.name} draws noise {counts[0]} times, calls its denoiser {counts[1]} "
                f"times and decodes {counts[2]} times; training can follow pipelines that do each of them once"
            )
        return found[0].float()

    def clock(self) -> Clock:
        """Finds how the denoiser is told the time, from runs with one time for all samples.

        Raises:
            ConfigurationError: In no argument of its own, or not by a factor and an offset.
        """
        told, calls = (200.0, 500.0, 800.0), []
        for time in told:
            self._step._clock = Clock(time)
            self._decoded(torch.zeros, (time,) * 3)
            args, options = self._denoiser.calls[0]
            calls.append({**dict(enumerate(args)), **options})
        changed = [
            name for name, value in calls[0].items() if not _is_row(value, calls[2][name], 0, 0)
        ]
        values = [calls[i][changed[0]] for i in range(3)] if len(changed) == 1 else []
        if all(isinstance(v, Tensor) and v.shape in ((), (1,), (3,)) for v in values) and values:
            low, middle, high = (value.float() for value in values)
            factor = (high - low) / (told[2] - told[0])
            if torch.allclose(middle, (low + high) / 2, rtol=1e-3) and factor.unique().numel() == 1:
                offset = low - told[0] * factor
                return Clock(
                    told[1], changed[0], factor.flatten()[0].item(), offset.flatten()[0].item()
                )
        raise ConfigurationError(
            f"{self._step.name} does not tell its denoiser the time by one argument with a number for each sample; "
            f"of its arguments {', '.join(map(str, changed)) or 'none'} change with the time"
        )

    def check_samples_apart(self) -> None:
        """Compares what the denoiser is called with for three samples together and for each alone.

        Raises:
            ConfigurationError: A sample is given something else where it has company.
        """
        times, latents = (100.0, 500.0, 900.0), {}
        generator = torch.Generator().manual_seed(0)

        def draw(shape: Sequence[int]) -> Tensor:
            if len(shape) < 2 or shape[0] != 3:
                raise ConfigurationError(
                    f"for three samples {self._step.name} draws noise {tuple(shape)}; the first axis must be "
                    "that of the samples"
                )
            return latents.setdefault(0, torch.randn(tuple(shape), generator=generator))

        # The text encoders say first what they say to one.
        self._decoded(torch.zeros)
        self._decoded(draw, times)
        together = self._denoiser.calls[0]
        for i, time in enumerate(times):
            self._decoded(lambda _, i=i: latents[0][i : i + 1], (time,))
            if not _is_row(together, self._denoiser.calls[0], i, len(times)):
                raise ConfigurationError(
                    f"{self._step.name} gives its denoiser something else for a sample in a batch whose timesteps "
                    "differ than for that sample alone, so that it cannot be trained on batches"
                )

    def places(self) -> tuple[Place, ...]:
        """Where the denoiser is told sizes, from two runs with other numbers.

        Raises:
            ConfigurationError: In another way than by the numbers themselves.
        """
        if not self._step.sizes:
            return ()
        calls, told = [], []
        for first in (101, 201):  # which every precision can hold
            values = itertools.count(first, 2)
            told.append({name: (next(values), next(values)) for name in self._step.sizes})
            self._decoded(torch.zeros, sizes=told[-1])
            calls.append(pytree.tree_leaves(self._denoiser.calls[0]))
        of = {
            (told[0][name][i], told[1][name][i]): (name, i)
            for name in self._step.sizes
            for i in range(2)
        }
        places = []
        for leaf, (one, other) in enumerate(zip(*calls, strict=True)):
            if not isinstance(one, Tensor) or torch.equal(one, other):
                continue
            for column, pair in enumerate(zip(one.unbind(-1), other.unbind(-1), strict=True)):
                numbers = tuple(value.item() if value.numel() == 1 else None for value in pair)
                if numbers in of:
                    places.append(Place(leaf, column, *of[numbers]))
                elif not torch.equal(*pair):
                    raise ConfigurationError(
                        f"{self._step.name} does not tell its denoiser {', '.join(self._step.sizes)} by the "
                        "numbers themselves; give one value for all samples in `call` (model.call)"
                    )
        return tuple(places)

    def tail(self) -> Tail:
        """What happens to latents between the loop and the decoder.

        Raises:
            ConfigurationError: More than an order of axes, a factor and an offset for each channel.
        """
        if self._step.decoder is None:
            return Tail(torch.ones(()), torch.zeros(()), (0, 1, 2, 3), 4)
        unpatched = self._decoded(torch.zeros)
        drawn = self._drawn[0]
        patch = unpatched.shape[-1] // drawn[-1] if unpatched.ndim == len(drawn) == 4 else 1
        decoded = lambda draw: _patched(self._decoded(draw), patch)
        shift = _patched(unpatched, patch)
        scale = decoded(torch.ones) - shift
        refusal = ConfigurationError(
            f"between its loop and its decoder {self._step.name} turns latents {drawn} into {tuple(shift.shape)} "
            "by more than an order of axes, a factor and an offset for each channel; encodings cannot be normalised"
        )
        axes: list[int | None] = [None] * shift.ndim
        for axis in range(1, len(drawn)):
            if drawn[axis] > 1:
                values = (decoded(lambda s, a=axis: _positions(s, a)) - shift) / scale
                along = _axis_of(values)
                if along is None or axes[along] is not None or shift.shape[along] != drawn[axis]:
                    raise refusal
                axes[along] = axis
        inserted = [length for length, axis in zip(shift.shape, axes, strict=True) if axis is None]
        if any(n > 1 for n in inserted) or not (_is_per_channel(scale) and _is_per_channel(shift)):
            raise refusal
        frames_apart = axes[0] is not None
        if frames_apart and not self._is_sample_major(shift, scale):
            raise refusal
        channels = (slice(1), slice(None), *(slice(1),) * (shift.ndim - 2))
        return Tail(
            scale[channels].clone().cpu(),
            shift[channels].clone().cpu(),
            (0, *axes) if frames_apart else (0, *axes[1:]),
            len(drawn),
            patch,
            frames_apart,
        )

    def _is_sample_major(self, shift: Tensor, scale: Tensor) -> bool:
        """Whether frames that are decoded apart come sample by sample, here 0 and 1."""
        both = self._decoded(lambda shape: _positions(shape, 0), (1.0, 1.0))
        return torch.allclose(both, torch.cat([shift, shift + scale]), rtol=1e-3, atol=1e-5)


def _methods_that_draw(cls: type) -> dict[str, types.FunctionType]:
    """`__call__` and the methods of a pipeline that draw noise, without decorators such as `torch.no_grad`."""
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
    return any(name in code.co_names for name in ("randn_tensor", "randn")) or any(
        map(_draws, nested)
    )


def _drawing_from(method: types.FunctionType, draw: Draw) -> types.FunctionType:
    """The same method, whose `torch` and `randn_tensor` are others; nobody else sees that."""
    own = TorchOfCall(draw)
    names = {**method.__globals__, "randn_tensor": own.randn_tensor}
    if names.get("torch") is torch:
        names["torch"] = own
    twin = types.FunctionType(
        method.__code__, names, method.__name__, method.__defaults__, method.__closure__
    )
    twin.__kwdefaults__ = method.__kwdefaults__
    return twin


def _patched(decoded: Tensor, patch: int) -> Tensor:
    """Takes height and width of what is decoded to those of the latents."""
    return F.pixel_unshuffle(decoded, patch) if patch > 1 else decoded


def _positions(shape: Sequence[int], axis: int) -> Tensor:
    """A tensor whose entries are their positions along an axis."""
    along = [1] * len(shape)
    along[axis] = shape[axis]
    return torch.arange(float(shape[axis])).reshape(along).expand(tuple(shape)).clone()


def _axis_of(values: Tensor) -> int | None:
    """The axis along which entries are their positions, if there is one."""
    for axis, length in enumerate(values.shape):
        expected = _positions(values.shape, axis).to(values.device)
        if length > 1 and torch.allclose(values, expected, atol=0.05, rtol=1e-3):
            return axis
    return None


def _is_per_channel(values: Tensor) -> bool:
    """Whether entries depend on axis 1 alone."""
    channels = (slice(1), slice(None), *(slice(1),) * (values.ndim - 2))
    return torch.allclose(values, values[channels].expand_as(values), rtol=1e-4, atol=1e-6)


def _is_row(together: Any, alone: Any, index: int, count: int) -> bool:
    """Whether what one sample is given alone is its row, or its entry, of what several are given."""
    if isinstance(together, Tensor):
        if not isinstance(alone, Tensor):
            return False
        if together.ndim != alone.ndim:
            return False
        rows = [together]
        for axis, (length, rest) in enumerate(zip(together.shape, alone.shape, strict=True)):
            if length == count * rest:
                rows.append(together.narrow(axis, index * rest, rest))
        return any(row.shape == alone.shape and torch.allclose(row, alone) for row in rows)
    if isinstance(together, Mapping):
        return together.keys() == alone.keys() and all(
            _is_row(value, alone[key], index, count) for key, value in together.items()
        )
    if isinstance(together, list | tuple):
        if len(together) != len(alone) and len(together) == count:
            together = together[index : index + 1]
        return len(together) == len(alone) and all(
            _is_row(a, b, index, count) for a, b in zip(together, alone, strict=True)
        )
    return True
