"""Stand-ins for a pipeline's parts, with which its `__call__` runs for another purpose than an image.

A `StandIn` has some members of its own and passes on everything else, so that configs and types are those of the
real part. The functions below make those of training; `trial.py` makes further ones.
"""

import contextlib
import copy
import inspect
import itertools
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary, ref

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from PIL import Image
from torch import Tensor, nn
from transformers import BatchEncoding, BatchFeature

from lightning_diffpipe.errors import ConfigurationError

_TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"
Draw = Callable[[Sequence[int]], Tensor]
"""Gives the noise of a shape."""


class Captured(Exception):
    """Ends a call once the value that is looked for was captured."""


def checked_arguments(pipeline: Any, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Runs a pipeline's call until it has checked its arguments, which needs no weights.

    Returns:
        The checked arguments, by name; None where the call checks nothing, or fails before it does, as for lack of
        a part.

    Raises:
        ConfigurationError: The check fails; with its message.
    """
    checked: dict[str, Any] = {}
    copied = copy.copy(pipeline)

    def check(*values: Any, **named: Any) -> None:
        try:
            pipeline.check_inputs(*values, **named)
        except ValueError as error:
            raise ConfigurationError(f"{type(pipeline).__name__}: {error}") from error
        bound = inspect.signature(pipeline.check_inputs).bind(*values, **named)
        checked.update(bound.arguments)
        raise Captured

    copied.check_inputs = check
    try:
        copied(**arguments)
    except ConfigurationError:
        raise
    except Captured:
        return checked
    except Exception:  # without weights a call may fail in any way; with them it will say why
        return None
    return None


class StandIn:
    """A part, some members of which are replaced.

    Args:
        real: The part.
        members: Attributes and methods in place of its own; `call` is its `__call__`.
    """

    def __init__(self, real: Any, **members: Any) -> None:
        vars(self).update(members, _real=real)

    @property
    def real(self) -> Any:
        """The part."""
        return self._real

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not yet made, as in a deep copy
            raise AttributeError(name)
        return dtype_of(self._real) if name == "dtype" else getattr(self._real, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Calls the part."""
        return vars(self).get("call", self._real)(*args, **options)


_dtypes: WeakKeyDictionary[nn.Module, tuple[Any, ...]] = WeakKeyDictionary()


def dtype_of(part: Any) -> Any:
    """Returns the type of a part, cached until its first weight has another, as diffusers looks at every module."""
    if not isinstance(part, nn.Module):
        return getattr(part, "dtype", None)
    holder, name, first, dtype = _dtypes.get(part, (lambda: None, "", (), None))
    weight = getattr(holder(), "_parameters", {}).get(name)
    if getattr(weight, "dtype", None) != first:
        dtype = getattr(part, "dtype", None)
        for path, weight in itertools.islice(part.named_parameters(), 1):
            owner, _, name = path.rpartition(".")
            _dtypes[part] = ref(part.get_submodule(owner)), name, weight.dtype, dtype
    return dtype


class _Placed(StandIn):
    """A stand-in that passes for its part, as pipelines look for device and type among modules alone."""

    @property
    def __class__(self) -> Any:
        part = self._real
        while type(part) is StandIn:
            part = part.real
        return type(part)


def placed(real: Any, device: torch.device) -> StandIn:
    """Returns a part that tells diffusers its type, and the device of its inputs, without a look at its modules.

    Diffusers asks them in turn for a hook that moves weights, several times in a call: the first one has it.
    """
    record = types.SimpleNamespace
    hooks = {"group_offloading": record(config=record(onload_device=device))}

    def modules() -> Iterator[Any]:
        yield record(_diffusers_hook=record(get_hook=hooks.get))
        yield from real.modules()

    return _Placed(real, device=device, modules=modules)


def torch_of_call(draw: Draw) -> StandIn:
    """Returns the module `torch` as methods of a pipeline see it: noise is ours, and so are times of samples."""

    def randn_tensor(shape: Sequence[int], *_: Any, dtype: Any = None, **__: Any) -> Tensor:
        return draw(shape).to(dtype=dtype)

    def randn(*size: Any, dtype: Any = None, **_: Any) -> Tensor:
        return randn_tensor(size[0] if isinstance(size[0], tuple | list) else size, dtype=dtype)

    def tensor(data: Any, dtype: Any = None, device: Any = None, **options: Any) -> Tensor:
        times = data[0] if isinstance(data, list) and data else None
        # Of `[t]` and `[t] * n` the times of the samples, where `t` is them all.
        if isinstance(times, Tensor) and times.ndim and all(value is times for value in data):
            return times.to(device=device, dtype=dtype)
        if isinstance(data, Tensor):  # class numbers, which a list would read from the device
            return data.detach().clone().to(device=device, dtype=dtype)
        return torch.tensor(data, dtype=dtype, device=device, **options)

    return StandIn(torch, randn=randn, randn_tensor=randn_tensor, tensor=tensor)


def one_timestep(
    real: Any, timesteps: Tensor, on_step: Callable[[Tensor, Tensor], Tensor]
) -> StandIn:
    """Returns a scheduler with one step at given times, which scales and computes nothing.

    Args:
        real: The pipeline's scheduler.
        timesteps: One for each sample, `(B,)`.
        on_step: (prediction, sample) -> latents after the step.
    """

    # Pipelines look which arguments these methods take.
    def set_timesteps(
        num_inference_steps: Any = None,
        device: Any = None,
        timesteps: Any = None,
        sigmas: Any = None,
        mu: Any = None,
        **others: Any,
    ) -> None:
        pass

    def step(
        model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **options: Any
    ) -> Any:
        after = on_step(model_output, sample)
        if options.get("return_dict") is False:
            return (after, after)
        return types.SimpleNamespace(prev_sample=after, pred_original_sample=after)

    return StandIn(
        real,
        order=1,
        init_noise_sigma=1.0,
        # Only the scheduler knows it; what computes with it becomes NaN, and not wrong by a little.
        sigmas=(math.nan, math.nan),
        timesteps=timesteps[None],
        set_timesteps=set_timesteps,
        set_begin_index=lambda begin_index=0: None,
        scale_model_input=lambda sample, timestep=None: sample,
        step=step,
    )


class PaddingTokenizer(StandIn):
    """A tokenizer whose tensors have one length, and with which pipelines do not look for words that were cut off.

    Pipelines tokenize twice, the second time without a limit, and compare ids by value to warn of what was
    cut off. The second answer is shorter here than the first, so that there is nothing to compare.

    Args:
        real: The tokenizer.
        note: Is given it, the texts, its answer and the most tokens that it reads.
    """

    def __init__(self, real: Any, note: Callable[..., None]) -> None:
        super().__init__(real, _text=None, _answer=None, _length=None, _note=note)
        # `note` tells what is too long; the tokenizer's own warning, once for each, would come again in trial runs.
        getattr(real, "deprecation_warnings", {})[_TOO_LONG] = True

    def __call__(self, text: Any = None, *args: Any, **options: Any) -> Any:
        """Tokenizes."""
        if not options.get("truncation") and options.get("padding") == "longest":
            if text == self._text:
                return BatchEncoding({name: ids[:, :1] for name, ids in self._answer.items()})
        elif options.get("truncation") and options.get("padding") in (True, "longest"):
            options["padding"] = "max_length"
        self._text, self._answer = text, self._real(text, *args, **options)
        self._length = None
        if options.get("truncation"):
            self._length = options.get("max_length") or self._real.model_max_length
            texts = [text] if isinstance(text, str) else text
            self._note(self._real, texts, self._answer, self._length)
        return self._answer

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Returns the id of a token; raises ConfigurationError if truncation has cut a marker off a caption.

        The call would look for it in vain. Words of a caption are no markers, which the vocabulary lists as added.
        """
        ids = self._real.convert_tokens_to_ids(tokens)
        is_one = self._length is not None and isinstance(tokens, str)
        if is_one and tokens in self._real.get_added_vocab():
            texts = [self._text] if isinstance(self._text, str) else list(self._text)
            rows = torch.as_tensor(self._answer["input_ids"]).reshape(len(texts), -1)
            found = (rows == ids).sum(dim=1).tolist()
            cut = [n < text.count(tokens) for n, text in zip(found, texts, strict=True)]
            if any(cut):
                raise ConfigurationError(
                    f"{sum(cut)} of {len(texts)} captions are too long: with their template they have more "
                    f"than {self._length} tokens, and {tokens}, for which the call looks behind them, is cut off; "
                    "shorten them, or raise max_sequence_length of the call"
                )
        return ids


class PaddingProcessor(StandIn):
    """A processor of texts and images whose answers have one length for images of given sizes.

    Args:
        real: The processor.
        most_tokens: Maximum number of tokens, those of images not counted; further ones are cut off.
        note: As `PaddingTokenizer` takes it.

    Attributes:
        num_image_tokens: Tokens of the images, of the sample that has most of them.
    """

    def __init__(self, real: Any, most_tokens: int, note: Callable[..., None]) -> None:
        super().__init__(real, num_image_tokens=0, _most_tokens=most_tokens, _note=note)

    def __call__(self, text: Any = None, images: Any = None, **options: Any) -> Any:
        """Tokenizes texts, in which images take the place of their tokens."""
        answer = self._real(text=text, images=images, **options)
        ids = answer["input_ids"]
        self.num_image_tokens = int((ids == self._real.image_token_id).sum(1).max())
        missing = self._most_tokens + self.num_image_tokens - ids.shape[1]
        if missing < 0:
            uncut = types.SimpleNamespace(encodings=None)
            self._note(self._real.tokenizer, text, uncut, self._most_tokens)
        fill = {"input_ids": self._real.tokenizer.pad_token_id or 0}
        for name, value in answer.items():
            if isinstance(value, Tensor) and value.shape == ids.shape:
                answer[name] = F.pad(value, (0, missing), value=fill.get(name, 0))
        return answer


def in_own_precision(vae: Any, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Returns a context without autocast for an autoencoder that asks for it: by its config, or when it is read."""
    is_available = torch.amp.is_autocast_available(device.type)  # not so for models on paper
    is_enabled = is_available and torch.is_autocast_enabled(device.type)
    asks = getattr(vae, "computes_in_own_type", False) or getattr(vae.config, "force_upcast", False)
    if is_enabled and asks:
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def decoding_in_own_precision(vae: Any) -> contextlib.AbstractContextManager[Any]:
    """Context in which an autoencoder decodes latents in its own type, also if a pipeline gives it another one."""
    decode = vae.decode

    def decode_in_type(latents: Tensor, *args: Any, **options: Any) -> Any:
        with in_own_precision(vae, latents.device):
            return decode(latents.to(dtype_of(vae)), *args, **options)

    return mock.patch.object(vae, "decode", decode_in_type)


def answering(real: Any, change: Callable[[Any], Any], **members: Any) -> StandIn:
    """Returns a part whose answers are changed."""
    return StandIn(real, call=lambda *args, **options: change(real(*args, **options)), **members)


def of_length(real: Any, length: Callable[[], int]) -> StandIn:
    """Returns a denoiser whose states of prompts have one length for prompts of any length.

    Args:
        real: Computes.
        length: Gives the length. Longer states stay as they are, and so do those that no mask argument goes with.
    """

    def call(*args: Any, **options: Any) -> Any:
        for masked in [n for n in options if n.endswith("_mask") and n[:-5] in options]:
            states, mask = options[masked[:-5]], options[masked]
            missing = max(0, length() - states.shape[1])
            # Pipelines give None for a mask that is all ones: other operators, and so another call sequence.
            mask = states.new_ones(states.shape[:2], dtype=torch.long) if mask is None else mask
            options[masked[:-5]] = F.pad(states, (0, 0, 0, missing))
            options[masked] = F.pad(mask, (0, missing))
        return real(*args, **options)

    return StandIn(real, call=call)


def replaying(real: Any) -> Callable[[], StandIn]:
    """Returns a maker of stand-ins of an encoder: the first computes, later ones give its answers in turn."""
    answers: list[Any] = []

    def make() -> StandIn:
        number = itertools.count()

        def answer(compute: Callable[..., Any], *args: Any, **options: Any) -> Any:
            if (index := next(number)) == len(answers):
                answers.append(compute(*args, **options))
            return answers[index]

        methods = {"call": partial(answer, real)}
        if hasattr(real, "encode"):
            methods["encode"] = partial(answer, real.encode)
        return StandIn(real, **methods)

    return make


class Lockstep:
    """Parts of a pipeline whose call takes one sample, such that each is called once for several of them.

    The call is run for each sample up to the first part that computes, the part computes for all, and the call is
    run again up to the next one, with the answers so far. Arguments of a part have samples along axis 0, and lists
    an entry for each. What prepares images and texts does so once for each sample.

    Args:
        networks: Networks that are called, by name.
        encoders: Autoencoders whose `encode` is called; only the mode of its posterior is used.
        processors: Prepare texts and images.
        images: Prepares images, with `resize` and `preprocess`; None if nothing does.
        num_samples: Number of samples.
    """

    def __init__(
        self,
        networks: Mapping[str, Any],
        encoders: Mapping[str, Any],
        processors: Mapping[str, Any],
        images: Any,
        num_samples: int,
    ) -> None:
        self._networks, self._encoders, self._images = networks, encoders, images
        self._answers: list[list[Any]] = [[] for _ in range(num_samples)]
        self._asked: list[tuple[str, list[Any], Callable[..., Any], Any, Any]] = []
        methods = ("resize", "preprocess") if images is not None else ()
        self._prepared = [
            (
                {name: replaying(part) for name, part in processors.items()},
                {name: replaying(getattr(images, name)) for name in methods},
            )
            for _ in range(num_samples)
        ]

    def parts(self) -> Iterator[dict[str, Any]]:
        """Yields the stand-ins for a run of the call, sample by sample."""
        for answers, (processors, methods) in zip(self._answers, self._prepared, strict=True):
            asking = answers, iter(answers)
            parts: dict[str, Any] = {name: make() for name, make in processors.items()}
            for name, part in self._networks.items():
                call = partial(self._ask, name, part, *asking)
                parts[name] = StandIn(part, call=call, dtype=dtype_of(part))
            for name, part in self._encoders.items():
                mode = partial(
                    self._ask,
                    name,
                    lambda x, vae=part: encoding(vae)(x).latent_dist.mode(),
                    *asking,
                )
                encode = lambda pixels, mode=mode: posterior_of(mode(pixels))
                parts[name] = StandIn(part, encode=encode)
            if methods:
                stand_ins = {name: make() for name, make in methods.items()}
                parts["image_processor"] = StandIn(self._images, **stand_ins)
            yield parts

    def _ask(
        self, name: str, compute: Any, answers: Any, given: Any, *args: Any, **options: Any
    ) -> Any:
        for answer in given:
            return answer
        self._asked.append((name, answers, compute, args, options))
        raise Captured

    def answer(self) -> bool:
        """Computes a call that samples made in the last run, as one batch; returns whether there was one.

        Of several parts, as where a prompt alone has quoted words, the first is called, and the denoiser last.
        """
        *before, denoiser = self._networks
        order = [*before, *self._encoders, denoiser]
        first = min((name for name, *_ in self._asked), key=order.index, default=None)
        calls = [call for call in self._asked if call[0] == first]
        self._asked = []
        if not calls:
            return False
        args = [_joined(values) for values in zip(*(args for *_, args, _ in calls), strict=True)]
        options = {name: _joined([each[name] for *_, each in calls]) for name in calls[0][-1]}
        answer = calls[0][2](*args, **options)
        for index, (_, answers, *_) in enumerate(calls):
            rows = lambda x, index=index: x.chunk(len(calls))[index] if x.ndim else x
            answers.append(pytree.tree_map_only(Tensor, rows, answer))
        return True


def encoding(real: Any) -> Callable[..., Any]:
    """Returns the encoder of an autoencoder, in its own precision and type."""

    def encode(pixels: Tensor, *args: Any, **options: Any) -> Any:
        with in_own_precision(real, pixels.device):
            return real.encode(pixels.to(dtype_of(real)), *args, **options)

    return encode


@dataclass
class Certain:
    """A posterior without a spread.

    Attributes:
        mean: Its mode and every sample, `(B, ...)`.
    """

    mean: Tensor

    def mode(self) -> Tensor:
        """Returns the mean."""
        return self.mean

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Returns the mean, too."""
        return self.mean


def posterior_of(mode: Tensor) -> types.SimpleNamespace:
    """Returns an encoding of which only the mode is left."""
    return types.SimpleNamespace(latent_dist=types.SimpleNamespace(mode=lambda: mode))


def _joined(values: Sequence[Any]) -> Any:
    """Returns an argument for all samples, joined from those of each."""
    if isinstance(values[0], Tensor) and values[0].ndim:
        return torch.cat(list(values))
    if isinstance(values[0], list):
        return list(itertools.chain.from_iterable(values))
    return values[0]


def in_type(answer: Any, dtype: torch.dtype) -> Any:
    """Converts all floating-point tensors in an answer to a type."""
    return pytree.tree_map_only(
        Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, answer
    )


def no_decoder(
    real: Any, give: Callable[[Tensor], None], encode: Callable[..., Any] | None = None
) -> StandIn:
    """Returns an autoencoder that passes its input to `on_decode`, and ends the call.

    Args:
        real: Encodes by itself, unless `encode` does.
        give: Gets the latents that shall be decoded.
        encode: In the place of its own.
    """

    def decode(latents: Tensor, *_: Any, **__: Any) -> Any:
        give(latents)
        raise Captured

    # In float32, so that the pipeline does not round what it unpacks.
    return StandIn(real, decode=decode, encode=encode or encoding(real), dtype=torch.float32)


def encoding_first_frames(
    real: Any,
    images: Tensor,
    noise: tuple[float, float] | None,
    generator: torch.Generator | None = None,
) -> Callable[..., Any]:
    """Returns an `encode` for pipelines that animate one image, which are given one for each sample.

    Some encode them one after the other: then all are encoded at the first, and each gets its rows, so that the
    layers of the autoencoder see whole batches. Others repeat the encoding for every prompt: it stays as it is.

    Args:
        real: The autoencoder.
        images: Images to animate, `(B, 3, H, W)` in [0, 1].
        noise: Mean and deviation of the logarithm of the deviation of the noise that is added to the first frame,
            whose pixels are in [-1, 1]; None for no noise.
        generator: Generator of that noise and of samples of posteriors; None for the global one.
    """
    encode, answers, number = encoding(real), list[Any](), itertools.count()

    def with_noise(pixels: Tensor) -> Tensor:
        if noise is None:
            return pixels
        if pixels.ndim == 4:  # images, and not videos of which they are the first frame
            return with_noise(pixels[:, :, None])[:, :, 0]
        first = pixels[:, :, :1]
        normal = partial(torch.randn, generator=generator, device=pixels.device)
        spread = (noise[0] + noise[1] * normal(len(pixels))).exp()
        added = spread.to(first).view(-1, 1, 1, 1, 1) * normal(first.shape, dtype=first.dtype)
        return torch.cat([first + added, pixels[:, :, 1:]], 2)

    def encode_rows(pixels: Tensor, *args: Any, **options: Any) -> Any:
        if len(pixels) == len(images):
            posterior = encode(with_noise(pixels), *args, **options).latent_dist
        else:
            if not answers:
                whole = (2 * images - 1).to(pixels).reshape(len(images), *pixels.shape[1:])
                answers.append(encode(with_noise(whole), *args, **options).latent_dist)
            row, posterior = next(number), copy.copy(answers[0])
            rows = {
                n: x[row : row + 1] for n, x in vars(posterior).items() if isinstance(x, Tensor)
            }
            vars(posterior).update(rows)
        mode = lambda: repeated_once(posterior.mode())
        sample = lambda *_, **__: repeated_once(posterior.sample(generator))
        return types.SimpleNamespace(latent_dist=types.SimpleNamespace(mode=mode, sample=sample))

    return encode_rows


def first_frame_processor(real: Any) -> StandIn:
    """Returns a processor that takes images in [0, 1] to [-1, 1], and reads no values.

    Those of training have the size that is sampled. A run that asks which size that is has images of another one.
    """

    def preprocess(image: Tensor, height: int | None = None, width: int | None = None) -> Tensor:
        size = (height or image.shape[-2], width or image.shape[-1])
        pixels = image.real
        return 2 * (pixels if pixels.shape[-2:] == size else F.interpolate(pixels, size)) - 1

    return StandIn(
        real,
        preprocess=preprocess,
        resize=lambda image, *_, **__: image,
        calculate_default_height_width=lambda height, width, *_, **__: (height, width),
    )


class OneFile(StandIn):
    """Images, `(B, 3, H, W)`, that pass for one file where a pipeline asks for its type and size."""

    __class__ = property(lambda self: Image.Image)  # type: ignore[assignment]
    size = property(lambda self: self.shape[:-3:-1])


def repeated_once(rows: Tensor) -> Tensor:
    """Returns a tensor with a row for each sample that stays so where a pipeline repeats it for every prompt."""
    same = rows.view_as(rows)

    def repeat(count: int, *counts: int) -> Tensor:
        return rows.repeat(1 if count == len(rows) else count, *counts)

    vars(same)["repeat"] = repeat
    return same


def tensor_processor(real: Any) -> StandIn:
    """Returns an image processor that scales, crops and normalises tensors, `(B, 3, H, W)` in [0, 1].

    The real one reads images of 8 bits on the host, and rounds to these what it has scaled along one side, and then
    along the other.

    Source:
        `ImagingResample` of Pillow, https://github.com/python-pillow/Pillow/blob/main/src/libImaging/Resample.c
    """
    filters = {2: "bilinear", 3: "bicubic"}  # by the numbers of PIL

    def call(images: Tensor, **_: Any) -> BatchFeature:
        pixels = images.real.float()
        if real.do_resize:
            height, width = real.size.get("height"), real.size.get("width")
            if shortest := real.size.get("shortest_edge"):
                short = min(pixels.shape[-2:])
                height, width = (int(shortest * side / short) for side in pixels.shape[-2:])
            mode = filters.get(int(real.resample), "bicubic")
            for size in ((pixels.shape[-2], width), (height, width)):
                scaled = F.interpolate(pixels, size, mode=mode, antialias=True)
                pixels = (255 * scaled).round().clamp(0, 255) / 255
        if getattr(real, "do_center_crop", False):
            height, width = real.crop_size["height"], real.crop_size["width"]
            top, left = (pixels.shape[-2] - height) // 2, (pixels.shape[-1] - width) // 2
            pixels = pixels[..., top : top + height, left : left + width]
        if real.do_normalize:
            mean, std = (
                pixels.new_tensor(x)[:, None, None] for x in (real.image_mean, real.image_std)
            )
            pixels = (pixels - mean) / std
        return BatchFeature({"pixel_values": pixels})

    return StandIn(real, call=call, preprocess=call)


def is_followed(real: Any) -> bool:
    """Returns whether `tensor_processor` equals an image processor, but for rounding to 8 bits."""
    levels = torch.randint(256, (3, 80, 96), generator=torch.Generator().manual_seed(0)).byte()
    expected = real(images=[levels.permute(1, 2, 0).numpy()], return_tensors="pt")["pixel_values"]
    got = tensor_processor(real)(images=levels[None] / 255)["pixel_values"]
    return got.shape == expected.shape and bool((got - expected).abs().max() < 0.1)


def dropping_encoder(real: Any, shown: Tensor) -> StandIn:
    """Returns an autoencoder whose encodings of some samples are zeros, as a pipeline samples without an image.

    Args:
        real: The autoencoder, of whose posterior only the mode is used.
        shown: 1 for the samples whose encodings stay, 0 for the others, `(B,)`.
    """

    def encode(pixels: Tensor, *args: Any, **options: Any) -> Any:
        mode = real.encode(pixels, *args, **options).latent_dist.mode()
        return posterior_of(mode * shown.to(mode).view(-1, *[1] * (mode.ndim - 1)))

    return StandIn(real, encode=encode)


@dataclass(frozen=True)
class ArgumentPlace:
    """A place among a denoiser's arguments with a number that belongs to a sample, such as its image's height.

    Attributes:
        path: Path in `(args, options)` of the denoiser, as `given` has it: of lists before it the number of entries
            does not count, which may be that of the samples.
        argument: Argument of the pipeline's call that has the number.
        entry: Index of the number in that argument.
        column: Index along the last axis of the tensor; None if it has this number only, maybe for each token.
        factor: The denoiser is given `factor * number + offset`.
        offset: See `factor`.
        fixed: Number of some tokens that is not replaced: 0 for a first frame without noise; None if there is none.
    """

    path: pytree.KeyPath
    argument: str
    entry: int = 0
    column: int | None = None
    factor: float = 1.0
    offset: float = 0.0
    fixed: float | None = None


def given(args: Sequence[Any], options: Mapping[str, Any]) -> dict[pytree.KeyPath, Any]:
    """Returns the arguments of a denoiser by their paths in tuples, lists and mappings.

    Example:
        >>> for path, value in given((["a", "b"], "c"), {"sizes": {"height": 64}}).items():
        ...     print(pytree.keystr(path), value)
        [0][0][0] a
        [0][0][1] b
        [0][1] c
        [1]['sizes']['height'] 64
    """
    return dict(_flat((args, options))[0])


def _flat(tree: Any) -> tuple[list[tuple[pytree.KeyPath, Any]], pytree.TreeSpec]:
    # Outputs of transformers and diffusers, which are mappings, too, have no paths.
    return pytree.tree_flatten_with_path(tree, lambda node: type(node) not in (tuple, list, dict))


def per_sample(real: Any, places: Sequence[ArgumentPlace], values: Mapping[str, Tensor]) -> Any:
    """Returns a denoiser that takes numbers of each sample in place of the pipeline's, which are for all.

    Args:
        real: The denoiser.
        places: Places of the numbers among its arguments.
        values: The numbers, `(B, entries)`, by argument; the pipeline's own stay where there are none.
    """
    replaced = [place for place in places if place.argument in values]

    def call(*args: Any, **options: Any) -> Any:
        flat, structure = _flat((args, options))
        leaves = dict(flat)
        for place in replaced:
            numbers = place.factor * values[place.argument][:, place.entry] + place.offset
            # Pipelines that compare the time with a boundary have it on the host.
            of_all = leaves[place.path].to(numbers.device)
            numbers = numbers.to(of_all)
            if place.column is not None:
                columns = list(of_all.unbind(-1))
                columns[place.column] = numbers
                leaves[place.path] = torch.stack(columns, -1)
                continue
            numbers = numbers.view(-1, *[1] * (of_all.ndim - 1)).expand(-1, *of_all.shape[1:])
            if place.fixed is not None:
                numbers = torch.where(of_all == place.fixed, of_all, numbers)
            leaves[place.path] = numbers
        args, options = pytree.tree_unflatten(leaves.values(), structure)
        return real(*args, **options)

    return StandIn(real, call=call) if replaced else real
