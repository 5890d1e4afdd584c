"""Runs of a pipeline's call with only its text encoders, which show training how to use the call.

Runs with constant latents show what the tail does to latents before they are decoded: an order of axes, a factor
and an offset for each channel. The inverse normalises what the encoder gives.

Other runs show how the denoiser is given times and sizes, whether samples are independent, and who sees an image.
"""

import copy
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils._pytree as pytree
from PIL import Image
from torch import Tensor, nn
from transformers import BaseImageProcessor, ProcessorMixin
from transformers.utils import ModelOutput

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.pipelines.one_step import OTHERWISE, TIME, OneStep, Tail, patched
from lightning_diffpipe.pipelines.stand_ins import (
    ArgumentPlace,
    Certain,
    Draw,
    StandIn,
    given,
    in_type,
    is_followed,
)

_NO_SIZE = (
    ". sample_size is None in the config of its {0}, of which many pipelines make the size of samples: set it to "
    "rows of latents, as {0}.register_to_config(sample_size=64) does"
)


def find_tail(step: OneStep, parts: Mapping[str, Any]) -> Tail:
    """Runs the call at its default size with stand-ins, and configures it for training.

    Args:
        step: The call; its `arguments`, `time`, `places` and attributes of the image are set.
        parts: The pipeline's parts by name. Its text encoders are called once, with an empty prompt; denoiser
            and decoder are not called.

    Raises:
        ConfigurationError: Training cannot follow: noise is sampled or the denoiser called several times in a
            step, samples cannot have timesteps of their own, latents are changed in a way that cannot be
            undone, or the pipeline expects something else of its scheduler.
    """
    refusals, config = [], getattr(parts[step.denoiser], "config", {})
    has_processor = step.image and any(isinstance(part, ProcessorMixin) for part in parts.values())
    # Whether samples go through the call one by one, and whether its images are references.
    ways = [(False, False)] + [(True, False)] * step.animates + [(True, True)] * bool(has_processor)
    needs_image = step.needs_image
    for way, one_time, arguments in itertools.product(ways, (False, True), step.unguided):
        step.one_by_one, of_references = way
        step.arguments |= arguments
        step.time, step.places, step.mixes_image = None, (), False
        step.reads_references, step.needs_image = of_references, needs_image or of_references
        try:
            with torch.no_grad():
                trial = Trial(step, parts)
                if one_time:
                    step.places = (trial.place_of_time(),)
                if of_references:
                    step.reads_several = Trial(step, parts).reads_several()
                elif not step.one_by_one:
                    trial.check_samples_apart()
                step.places += trial.places_of_sizes()
                step.refused_image = None if of_references else trial.refused_image()
                if step.needs_image and step.refused_image is not None:
                    raise step.refused_image
                tail = trial.tail()
                if len(tail.axes) == 5 and not tail.frames_apart:
                    _slice_where_needed(parts[step.decoder])
                return tail
        except ConfigurationError as refusal:
            refusals.append(refusal)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            refusal = ConfigurationError(
                f"{step.name} cannot be trained by its own call: with one step at a timestep for each sample "
                f"it ended in {type(error).__name__}: {error}"
                + f"; if that is a package, pip install {getattr(error, 'name', '')}"
                * isinstance(error, NameError)
                + _NO_SIZE.format(step.denoiser) * (config.get("sample_size", 0) is None)
                + f"; {OTHERWISE}"
            )
            refusal.__cause__ = error
            refusals.append(refusal)
    # With a processor, the first refusal of the runs with references, which are the last.
    raise refusals[-len(refusals) // len(ways) if has_processor else 0]


def _shape_of_encoding(decoder: Any, pixels: Tensor) -> torch.Size:
    """Returns the shape in which an autoencoder on paper encodes images."""
    dtype = next(decoder.parameters()).dtype
    return decoder.encode(pixels.to("meta", dtype)).latent_dist.mode().shape


def _slice_where_needed(decoder: Any) -> None:
    """Has an autoencoder of videos take samples one by one if it fails for several, as that of HunyuanVideo 1.5."""
    if getattr(decoder, "use_slicing", True):
        return
    outline, samples = _outline(decoder), torch.empty(2, 3, 1, 64, 64, device="meta")
    _shape_of_encoding(outline, samples[:1])
    try:
        _shape_of_encoding(outline, samples)
    except RuntimeError:
        decoder.enable_slicing()


def _outline(part: Any) -> Any:
    """Returns a copy on the meta device; no weight is copied."""
    states = [*part.parameters(), *part.buffers()]
    return copy.deepcopy(part, {id(tensor): tensor.to("meta") for tensor in states})


def encoding_means(decoder: Any) -> Callable[..., Any]:
    """Returns an `encode` that gives for each image its mean, in the shape of an encoding; nothing is computed."""
    outline = functools.cache(lambda: _outline(decoder))

    def encode(pixels: Tensor, *_: Any, **__: Any) -> Any:
        shape = _shape_of_encoding(outline(), pixels)
        means = pixels.flatten(1).mean(1).view(-1, *[1] * (len(shape) - 1)).expand(shape)
        return SimpleNamespace(latent_dist=Certain(means))

    return encode


class Trial:
    """Runs of a call in which only its text encoders compute."""

    def __init__(self, step: OneStep, parts: Mapping[str, Any]) -> None:
        self._step = step
        # Arguments of parts in the last run, and answers of text encoders by the number of samples.
        self._calls: dict[str, list[Any]] = defaultdict(list)
        self._answers: dict[str, list[tuple[int, Any]]] = defaultdict(list)
        modules = {n: part for n, part in parts.items() if isinstance(part, nn.Module)}
        self._encoders = [n for n in modules if n not in (step.denoiser, step.decoder)]
        self._parts = dict(parts)
        # What a pipeline computes is compared, so nothing may be rounded to the types of its parts.
        self._dtype = torch.promote_types(parts[step.denoiser].dtype, torch.float32)
        for name in self._encoders:
            replay = functools.partial(self._replayed, name, parts[name])
            self._parts[name] = StandIn(parts[name], call=replay, dtype=self._dtype)
        predict = functools.partial(self._zeros, parts[step.denoiser])
        denoiser = StandIn(parts[step.denoiser], call=predict, dtype=self._dtype)
        self._parts[step.denoiser] = denoiser
        if step.decoder is not None:
            self._parts[step.decoder] = self._recording(step.decoder, parts[step.decoder])
        self._device = next(iter(parts[step.denoiser].parameters())).device
        self._noise_shapes: list[tuple[int, ...]] = []

    def _zeros(self, denoiser: nn.Module, *args: Any, **options: Any) -> Any:
        """Answers for the denoiser."""
        self._calls[self._step.denoiser].append((args, options))
        tensors = [v for v in pytree.tree_leaves((args, options)) if isinstance(v, Tensor)]
        latents = max(tensors, key=lambda tensor: tensor.ndim)
        shape, config = list(latents.shape), denoiser.config
        if config.get("out_channels") and shape[1] == config.get("in_channels"):
            shape[1] = config["out_channels"]  # a variance after the mean, for one
        zeros = latents.new_zeros(shape)
        return (zeros,) if options.get("return_dict") is False else ModelOutput(sample=zeros)

    def _replayed(self, name: str, encoder: nn.Module, *args: Any, **options: Any) -> Any:
        """Answers for a text encoder, which computes in the first run only.

        All prompts must be the same: a run with more samples gets as many copies.
        """
        calls, answers = self._calls[name], self._answers[name]
        calls.append((args, options))
        tensors = [v for v in pytree.tree_leaves((args, options)) if isinstance(v, Tensor)]
        samples = len(tensors[0]) if tensors else 1
        if len(calls) > len(answers):
            answers.append((samples, in_type(encoder(*args, **options), self._dtype)))
        computed, answer = answers[len(calls) - 1]
        if computed == samples:
            return answer

        def repeat(x: Tensor) -> Tensor:
            return x[:1].expand(samples, *x.shape[1:]) if x.ndim and len(x) == computed else x

        return pytree.tree_map_only(Tensor, repeat, answer)

    def _recording(self, name: str, decoder: nn.Module) -> StandIn:
        """Returns an autoencoder that records what it encodes, in double precision.

        Kernels of lower precision sum in an order that depends on how many images there are. References, which a
        pipeline makes as large as its samples, are encoded as their means, and so are images of models on paper.
        """
        wide = functools.cache(lambda: copy.deepcopy(decoder).double())
        of_shapes, is_on_paper = encoding_means(decoder), next(decoder.parameters()).is_meta

        def encode(pixels: Tensor, *args: Any, **options: Any) -> Any:
            self._calls[name].append(pixels)
            if not (self._step.reads_references or is_on_paper):
                encoded = wide().encode(pixels.double(), *args, **options)
                if hasattr(encoded, "latent_dist"):  # samples of it would differ from run to run
                    encoded.latent_dist.std = torch.zeros_like(encoded.latent_dist.std)
                return encoded
            return of_shapes(pixels)

        return StandIn(decoder, encode=encode)

    @property
    def _given(self) -> Any:
        """The arguments of the denoiser in the last run."""
        return self._calls[self._step.denoiser][0]

    def _decoded(
        self,
        draw: Draw,
        times: Sequence[float] | None = None,
        further: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Returns the decoder's input for latents from `draw`, with further arguments of the call."""
        times = times or (self._step.time_at(0.001),)
        self._noise_shapes.clear()
        self._calls.clear()
        decoded: list[Tensor] = []

        def recorded(shape: Sequence[int]) -> Tensor:
            self._noise_shapes.append(tuple(shape))
            return draw(shape).to(self._device)

        def step(_: Tensor, sample: Tensor) -> Tensor:
            if self._step.decoder is None:
                decoded.append(sample)
            return sample

        discrete = "beta_schedule" in self._parts["scheduler"].config
        timesteps = torch.tensor(times, device=self._device)
        self._step.run(
            recorded,
            timesteps.long() if discrete else timesteps,
            [self._step.neutral] * len(times),
            self._image(torch.ones(len(times))) | self._size | dict(further or {}),
            self._parts,
            step,
            decoded.append,
        )
        counts = len(self._noise_shapes), len(self._calls[self._step.denoiser]), len(decoded)
        if counts != (1, 1, 1):
            raise ConfigurationError(
                f"in one step {self._step.name} samples noise {counts[0]} times, calls its denoiser {counts[1]} "
                f"times and decodes {counts[2]} times; training can follow pipelines that do each of them once: "
                + OTHERWISE
            )
        return decoded[0].float()

    @property
    def _size(self) -> dict[str, int]:
        """Pixels of videos whose first frame an autoencoder encodes: few of them, and several in latents."""
        return {"height": 64, "width": 64, "num_frames": 17} if self._step.animates else {}

    def _image(self, levels: Tensor) -> dict[str, Any]:
        """Makes images for a pipeline that cannot do without, one for each level in [0, 1].

        None is even: an autoencoder would divide what rounding makes of it by a variance of almost nothing.
        """
        if not self._step.needs_image:
            return {}
        pattern = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(0))
        images = levels[:, None, None, None] * pattern
        if not self._step.reads_references:
            return {self._step.image: images}
        in_8_bits = (images * 255).byte().permute(0, 2, 3, 1).numpy()
        files = [Image.fromarray(image) for image in in_8_bits]
        return {self._step.image: files if len(files) > 1 else files[0]}

    def reads_several(self) -> bool:
        """Returns whether a sample may have several images, by a run with two."""
        try:
            self._decoded(torch.zeros, further=self._image(torch.tensor([0.2, 0.9])))
        except torch.OutOfMemoryError:
            raise
        except Exception:  # of the pipeline, its processor or its networks
            return False
        return True

    def place_of_time(self) -> ArgumentPlace:
        """Determines the argument that gives the denoiser the time, by runs with one time for all samples.

        Raises:
            ConfigurationError: In no argument of its own, or not by a factor and an offset.
        """
        times, calls = tuple(map(self._step.time_at, (0.2, 0.5, 0.8))), []
        for time in times:
            self._step.time = time
            self._decoded(torch.zeros, (time,) * 3)
            calls.append(given(*self._given))
        changed = {
            path: [call[path] for call in calls]
            for path, value in calls[0].items()
            if not _is_row(value, calls[2][path], 0, 0)
        }
        path, values = next(iter(changed.items()), ((), ()))
        # One for each sample, or one for each of its tokens, all the same.
        if len(changed) == 1 and getattr(values[0], "shape", (0,))[:1] in ((), (1,), (3,)):
            is_time = values[0] != values[2]
            others, fixed = values[1][~is_time].unique(), None
            if len(others) == 1 and not (values[1][is_time] == others).any():
                fixed = others.item()  # tokens of a first frame, without noise
                values = [value[is_time] for value in values]
            low, middle, high = (value.float() for value in values)
            factor = (high - low) / (times[2] - times[0])
            on_line = low + factor * (times[1] - times[0])
            offset, (first, *_) = low - times[0] * factor, factor.flatten()
            is_line = torch.allclose(middle, on_line, rtol=1e-3) and bool((factor == first).all())
            if is_line and torch.allclose(offset, offset.flatten()[0], atol=1e-3):
                line = (x.flatten()[0].item() for x in (factor, offset))
                self._step.time = times[1]
                return ArgumentPlace(path, TIME, 0, None, *line, fixed)
        raise ConfigurationError(
            f"{self._step.name} does not tell its denoiser the time by one argument with a number for each sample; "
            f"{len(changed)} of those it gives change with the time"
        )

    def check_samples_apart(self) -> None:
        """Raises ConfigurationError unless each of three samples reaches the denoiser as it does by itself."""
        times, latents = tuple(map(self._step.time_at, (0.1, 0.5, 0.9))), {}
        generator = torch.Generator().manual_seed(0)

        def draw(shape: Sequence[int]) -> Tensor:
            if len(shape) < 2 or shape[0] != 3:
                raise ConfigurationError(
                    f"for three samples {self._step.name} samples noise {tuple(shape)}; the first axis must be "
                    "that of the samples"
                )
            return latents.setdefault(0, torch.randn(tuple(shape), generator=generator))

        # First for one sample, whose answers of the text encoders are then repeated.
        self._decoded(torch.zeros)
        levels = torch.tensor([0.2, 0.5, 0.9])
        self._decoded(draw, times, self._image(levels))
        together = self._given
        for i, time in enumerate(times):
            alone = slice(i, i + 1)
            self._decoded(lambda _, i=alone: latents[0][i], (time,), self._image(levels[alone]))
            if not _is_row(together, self._given, i, len(times)):
                raise ConfigurationError(
                    f"{self._step.name} gives its denoiser something else for a sample in a batch whose timesteps "
                    "differ than for that sample alone, so that it cannot be trained on batches"
                )

    def refused_image(self) -> ConfigurationError | None:
        """Returns the error if training cannot follow the use of the image, by runs with a black and a grey one."""
        step = self._step
        if step.image is None:
            return None
        if step.decoder is None:
            return ConfigurationError(f"{step.name} has no autoencoder for the image that it edits")
        encoded, shown = [], []
        try:
            for level in (0.0, 0.5):
                image = {step.image: torch.full((1, 3, 64, 64), level)}
                self._decoded(torch.zeros, further=image)
                # Of a video the first frame.
                calls = [x[:, :, 0] if x.ndim == 5 else x for x in self._calls[step.decoder]]
                encoded += [(each, 2 * level - 1) for each in calls]
                shown.append({name: self._calls[name].copy() for name in self._encoders})
        except Exception as error:
            return ConfigurationError(
                f"{step.name} cannot be trained to edit images: given one as numbers in [0, 1] it ended in "
                f"{type(error).__name__}: {error}"
            )
        processors = [p for p in self._parts.values() if isinstance(p, BaseImageProcessor)]
        seen_by = [n for n, calls in shown[0].items() if not _is_row(calls, shown[1][n], 0, 1)]
        if seen_by and not (processors and all(map(is_followed, processors))):
            return ConfigurationError(
                f"{step.name} shows the image that it edits to its {seen_by[0]}, too, which reads files and "
                "not numbers"
            )
        if len(encoded) != 2 or any(not torch.all(abs(p - x) < 0.01) for p, x in encoded):
            return ConfigurationError(
                f"{step.name} does not encode the image that it edits once, as numbers in [-1, 1]"
            )
        return None

    def places_of_sizes(self) -> tuple[ArgumentPlace, ...]:
        """Determines the arguments that give the denoiser sizes, by two runs with other numbers.

        Raises:
            ConfigurationError: It is told them in another way than by the numbers themselves.
        """
        if not self._step.sizes:
            return ()
        calls, sizes = [], []
        for first in (101, 201):  # which every precision can hold
            values = itertools.count(first, 2)
            sizes.append({name: (next(values), next(values)) for name in self._step.sizes})
            self._decoded(torch.zeros, further=sizes[-1])
            calls.append(given(*self._given))
        entries = itertools.product(self._step.sizes, range(2))
        of = {(sizes[0][name][i], sizes[1][name][i]): (name, i) for name, i in entries}
        places = []
        for path in calls[0]:
            pair = [call[path] for call in calls]
            if not isinstance(pair[0], Tensor) or torch.equal(*pair):
                continue
            for column, values in enumerate(zip(*(x.unbind(-1) for x in pair), strict=True)):
                if torch.equal(*values):
                    continue
                numbers = tuple(value.item() if value.numel() == 1 else None for value in values)
                if numbers not in of:
                    raise ConfigurationError(
                        f"{self._step.name} does not tell its denoiser {', '.join(self._step.sizes)} by the "
                        "numbers themselves; give one value for all samples in `call` (model.call)"
                    )
                places.append(ArgumentPlace(path, *of[numbers], column))
        return tuple(places)

    def tail(self) -> Tail:
        """Determines the pipeline's operations on latents between the loop and the decoder.

        Latents of zeros give the offset, ones the factor, and positions along each axis the order of the axes.

        Raises:
            ConfigurationError: More than an order of axes, a factor and an offset for each channel.
        """
        if self._step.decoder is None:
            return Tail(torch.ones(()), torch.zeros(()), (0, 1, 2, 3), 4)
        unpatched = self._decoded(torch.zeros)
        noise_shape = self._noise_shapes[0]
        patch = (
            unpatched.shape[-1] // noise_shape[-1] if unpatched.ndim == len(noise_shape) == 4 else 1
        )
        decoded = lambda draw: patched(self._decoded(draw), patch)
        shift = patched(unpatched, patch)
        scale, num_given = decoded(torch.ones) - shift, 0
        if self._step.animates:  # first frames of its latents may be given by the image
            all_frames = decoded
            is_given = [not frame.any() for frame in scale.unbind(2)]
            num_given = next((n for n, each in enumerate(is_given) if not each), 0)
            decoded = lambda draw: all_frames(draw)[:, :, num_given:]
            shift, scale = shift[:, :, num_given:], scale[:, :, num_given:]
        refusal = ConfigurationError(
            f"between its loop and its decoder {self._step.name} turns latents {noise_shape} into "
            f"{tuple(shift.shape)} by more than an order of axes, a factor and an offset for each channel; "
            "encodings cannot be normalised"
        )
        # For each axis of the decoder's input, that of the latents; None for one that the tail inserts.
        axes: list[int | None] = [None] * shift.ndim
        for axis in range(1, len(noise_shape)):
            if noise_shape[axis] > 1:
                values = (decoded(lambda s, a=axis: _positions(s, a)) - shift) / scale
                along = _axis_of(values - values.flatten()[0] if num_given else values)
                if along is None or axes[along] is not None:
                    raise refusal
                if shift.shape[along] + num_given * (along == 2) != noise_shape[axis]:
                    raise refusal
                axes[along] = axis
        inserted = [length for length, axis in zip(shift.shape, axes, strict=True) if axis is None]
        if any(n > 1 for n in inserted) or not (_is_per_channel(scale) and _is_per_channel(shift)):
            darker = self._image(torch.tensor([0.5]))
            if self._step.animates and not torch.allclose(
                self._decoded(torch.zeros, further=darker)[:, :, num_given:], shift
            ):
                if not self._step.mixes_image:  # once more, and the image is kept out of the noise
                    self._step.mixes_image = True
                    return self.tail()
                raise ConfigurationError(
                    f"{self._step.name} mixes the image that it animates into the noise that it starts from, and "
                    "not in the method that samples it, so that training cannot start from noisy videos alone; "
                    + OTHERWISE
                ) from refusal
            raise refusal
        frames_apart = axes[0] is not None
        if frames_apart:  # they must come sample by sample, here 0 and 1
            two_samples = self._decoded(lambda shape: _positions(shape, 0), (1.0, 1.0))
            expected = torch.cat([shift, shift + scale])
            if not torch.allclose(two_samples, expected, rtol=1e-3, atol=1e-5):
                raise refusal
        channels = (slice(1), slice(None), *(slice(1),) * (shift.ndim - 2))
        return Tail(
            scale[channels].clone().cpu(),
            shift[channels].clone().cpu(),
            (0, *axes) if frames_apart else (0, *axes[1:]),
            len(noise_shape),
            patch,
            frames_apart,
            num_given,
            self._temporal_ratio(axes),
        )

    def _temporal_ratio(self, axes: Sequence[int | None]) -> int | None:
        """Returns the frames of a video for each frame of its latents after the first; None without an image."""
        if not self._step.animates or (axis := axes[2]) is None:
            return None
        longer = self._noise_shapes[0][axis]
        self._decoded(torch.zeros, further={"num_frames": 9})
        growth = longer - self._noise_shapes[0][axis]
        return 8 // growth if growth else None  # another axis, where frames are decoded as images


def _positions(shape: Sequence[int], axis: int) -> Tensor:
    """Makes a tensor whose entries are their positions along an axis."""
    along = [1] * len(shape)
    along[axis] = shape[axis]
    return torch.arange(float(shape[axis])).reshape(along).expand(tuple(shape)).clone()


def _axis_of(values: Tensor) -> int | None:
    """Returns the axis along which entries equal their positions; None without one."""
    for axis, length in enumerate(values.shape):
        expected = _positions(values.shape, axis).to(values.device)
        if length > 1 and torch.allclose(values, expected, atol=0.05, rtol=1e-3):
            return axis
    return None


def _is_per_channel(values: Tensor) -> bool:
    """Returns whether entries depend on axis 1 alone."""
    channels = (slice(1), slice(None), *(slice(1),) * (values.ndim - 2))
    return torch.allclose(values, values[channels].expand_as(values), rtol=1e-4, atol=1e-6)


def _is_row(together: Any, alone: Any, index: int, count: int) -> bool:
    """Returns whether the arguments of one sample by itself are its row, or its entry, of those of several."""
    if isinstance(together, Tensor):
        if not isinstance(alone, Tensor) or together.ndim != alone.ndim:
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
