"""LoRA files at sampling: their low-rank products are added to weights as each rank reads its own.

    W + sum over files: scale * alpha / rank * B A        (rsLoRA: alpha / sqrt(rank))

So no rank holds more than its part of the denoiser, and nothing is computed besides in a step. What form a file has
(of peft, of Kohya's scripts, of diffusers before peft) is for the loader of the pipeline's class.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import logging
import math
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from lightning_diffpipe.errors import CheckpointError, ConfigurationError, require_number
from lightning_diffpipe.sampling.skeleton import ChangedWeights, Weights

_PAIRS = ((".lora_A.weight", ".lora_B.weight"), (".lora.down.weight", ".lora.up.weight"))
_BEFORE_PEFT = re.compile(r"(?:\.processor)?\.to_(q|k|v|out)_lora\.")
_SETTINGS = ("lora_alpha", "alpha_pattern", "use_rslora")
_LEFT_OUT = re.compile(
    "unsupported keys|currently unsupported|not (compatible|support)|filter (them )?out",
    re.IGNORECASE,
)
"""In what diffusers says of tensors that it leaves out, such as those of T5; not of those that are zero."""
_TEXT_ENCODER = re.compile(r"lora_te([23])_")
"""How names of Kohya's scripts begin for the second and third; of Flux, diffusers drops them in silence."""
MERGE = "save the trained module with save_pretrained(folder), which merges adapters"
_listening = threading.Lock()


def refuse_adapted(names: Collection[str], origin: str) -> None:
    """Refuses weights of a part with adapters where nothing says how to make these.

    Raises:
        CheckpointError: There are such weights.
    """
    if found := [name for name in names if ".base_layer." in name or ".lora_" in name]:
        raise CheckpointError(
            f"{origin} has weights of adapters ({found[0]}, and {len(found) - 1} more), but not their "
            "settings, so they would be lost; load it into a module with the same adapters "
            f"(module.load_state_dict), and then {MERGE}"
        )


class StoredLora:
    """One file, read whole; such files are small.

    Args:
        path: A file, or a folder with `pytorch_lora_weights.safetensors`.
        scale: Of its outputs.
        cls: The pipeline's class, which knows how such files are named.

    Raises:
        ConfigurationError: The pipeline takes no such files, or the scale is no number.
        CheckpointError: The file cannot be read, holds something else, or in part what diffusers leaves out.
    """

    def __init__(self, path: str | Path, scale: float, cls: Any) -> None:
        self.path = str(path)
        require_number(f"loras[{self.path!r}]", scale)
        if not hasattr(cls, "lora_state_dict"):
            raise ConfigurationError(f"{cls.__name__} of diffusers takes no LoRA; leave loras out")
        known = inspect.signature(cls.lora_state_dict).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in known.values())
        asked = {
            n: True for n in ("return_alphas", "return_lora_metadata") if n in known or takes_all
        }
        try:
            with messages_of_loaders() as messages:
                found = cls.lora_state_dict(self.path, local_files_only=True, **asked)
        except Exception as error:
            first: BaseException = error  # it says only that it cannot, and what it tried last
            while first.__context__ is not None:
                first = first.__context__
            said = dict.fromkeys(" ".join(str(e).split()).rstrip(".") for e in (error, first))
            raise CheckpointError(f"cannot read the LoRA {self.path}: {'; '.join(said)}") from error
        weights, *more = found if isinstance(found, tuple) else (found,)
        weights = {_as_layer_has_it(name): value for name, value in weights.items()}
        settings: dict[str, Any] = {}
        for each in (each for each in more if each):
            if not isinstance(each, Mapping):
                raise CheckpointError(f"{self.path} has settings that are no mapping: {each!r}")
            settings |= {_as_layer_has_it(name): value for name, value in each.items()}
        self._products: dict[str, tuple[Tensor, Tensor, float]] = {}
        others = set(weights)
        for down, up in _PAIRS:
            for name in (n for n in weights if n.endswith(down)):
                layer = name.removesuffix(down)
                if layer + up in weights:
                    a, b = weights[name], weights[layer + up]
                    if min(a.ndim, b.ndim) < 2 or not len(a) == b.shape[1] > 0:
                        raise CheckpointError(
                            f"{self.path} is damaged: the matrices of {layer} have the shapes {tuple(b.shape)} and "
                            f"{tuple(a.shape)}, which have no product"
                        )
                    self._products[layer] = a, b, scale * _factor(settings, layer, len(a))
                    others -= {name, layer + up}
        if not self._products:
            raise CheckpointError(
                f"{self.path} has no adapters ({', '.join(sorted(weights)[:3]) or 'nothing'}); a LoRA has pairs "
                "such as unet.mid_block.to_q.lora_A.weight and lora_B.weight"
            )
        self._refuse_left_out(cls.__name__, messages)
        if others:
            raise CheckpointError(
                f"{self.path} has {len(others)} tensors besides its {len(self._products)} pairs of low-rank "
                f"matrices, such as {min(others)}: magnitudes (DoRA), biases, whole weights or halves of pairs, "
                "which are not added here. Merge it, and open the result: pipeline.load_lora_weights(FILE); "
                "pipeline.fuse_lora(); pipeline.unload_lora_weights(); pipeline.save_pretrained(FOLDER)"
            )

    def _refuse_left_out(self, cls: str, said: Sequence[str]) -> None:
        """Raises CheckpointError if diffusers has not mapped all of the file, which it may say or not."""
        left_out = [message for message in said if _LEFT_OUT.search(message)]
        path = Path(self.path)
        path = path / "pytorch_lora_weights.safetensors" if path.is_dir() else path
        if path.suffix == ".safetensors" and path.is_file():
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # no mapping
                    encoder = _TEXT_ENCODER.match(name)
                    if encoder and f"text_encoder_{encoder[1]}" not in self.parts():
                        left_out += [name] if file.get_tensor(name).any() else []
        if left_out:
            raise CheckpointError(
                f"{cls} of diffusers leaves out a part of the LoRA {self.path}, which is not added here either: "
                f"{left_out[0][:400].rstrip('.')}; write the file without that part to draw as diffusers does"
            )

    def parts(self) -> set[str]:
        """Returns the parts of a pipeline that it has adapters of."""
        return {layer.partition(".")[0] for layer in self._products}

    def layers(self, part: str) -> set[str]:
        """Returns the layers of a part that have adapters."""
        return {n.partition(".")[2] for n in self._products if n.startswith(f"{part}.")}

    def require_fit(self, part: str, shapes: Mapping[str, Sequence[int]]) -> None:
        """Compares with the weights of a part, by name, with or without the `text_model` of older text encoders.

        Raises:
            CheckpointError: Layers are not there, or have other shapes.
        """
        for layer in self.layers(part):
            short = layer.removeprefix("text_model.")
            other = short if short != layer else f"text_model.{layer}"
            if f"{layer}.weight" not in shapes and f"{other}.weight" in shapes:
                self._products[f"{part}.{other}"] = self._products.pop(f"{part}.{layer}")
        layers = self.layers(part)
        unknown = sorted(layer for layer in layers if f"{layer}.weight" not in shapes)
        if unknown:
            raise CheckpointError(
                f"{self.path} is of another model: {len(unknown)} of the {len(layers)} layers that it changes in "
                f"the {part} are not there, such as {unknown[0]}"
            )
        for layer in sorted(layers):
            a, b, _ = self._products[f"{part}.{layer}"]
            changed, weight = (len(b), a[0].numel()), shapes[f"{layer}.weight"]
            if changed != (weight[0], math.prod(weight[1:])):
                raise CheckpointError(
                    f"{self.path} is of another model: it changes {part}.{layer} by {changed}, which has "
                    f"{tuple(weight)}"
                )

    def added(self, part: str, layer: str, weight: Tensor) -> Tensor:
        """Returns the weight of a layer with the product of its adapter, if there is one, in float32 at least."""
        product = self._products.get(f"{part}.{layer}")
        if product is None or not weight.is_floating_point():
            return weight
        a, b, scale = product
        change = (b.flatten(1).float() @ a.flatten(1).float()).reshape(weight.shape)
        wide = torch.promote_types(weight.dtype, torch.float32)
        return weight.to(wide) + scale * change.to(weight.device, wide)

    def digest(self, part: str, layer: str) -> str:
        """Returns what ranks compare of one product; nothing where there is none."""
        product = self._products.get(f"{part}.{layer}")
        if product is None:
            return ""
        data = b"".join(t.float().numpy().tobytes() for t in product[:2])
        return hashlib.sha256(data + str(product[2]).encode()).hexdigest()


@contextlib.contextmanager
def messages_of_loaders(printed_from: int | None = None) -> Iterator[list[str]]:
    """Collects what the loaders of diffusers say inside, also what they do not print.

    Args:
        printed_from: The lowest level of what they print; None leaves it as it is.
    """
    said: list[str] = []
    loaders, root = logging.getLogger("diffusers.loaders"), logging.getLogger("diffusers")
    here = threading.get_ident()
    with _listening:
        printed, before = loaders.getEffectiveLevel(), (loaders.level, loaders.propagate)
        printed = printed if printed_from is None else printed_from

        def note(record: logging.LogRecord) -> None:
            if record.thread == here:
                said.append(record.getMessage())
            if record.levelno >= printed:
                root.handle(record)

        handler = logging.Handler()
        handler.emit = note  # type: ignore[method-assign]
        loaders.addHandler(handler)
        loaders.setLevel(logging.INFO)
        loaders.propagate = False
        try:
            yield said
        finally:
            loaders.propagate = before[1]
            loaders.setLevel(before[0])
            loaders.removeHandler(handler)


def _as_layer_has_it(name: str) -> str:
    """Returns the name of a weight, or of its alpha, by that of its layer, which was another before peft.

    Example:
        >>> _as_layer_has_it("unet.mid_block.attn1.processor.to_out_lora.down.weight")
        'unet.mid_block.attn1.to_out.0.lora.down.weight'
        >>> _as_layer_has_it("text_encoder.layers.0.self_attn.to_q_lora.down.weight.alpha")
        'text_encoder.layers.0.self_attn.q_proj.alpha'
    """

    def layer(found: re.Match[str]) -> str:
        if name.startswith("text_encoder"):
            return f".{found[1]}_proj.lora."
        return f".to_{found[1]}{'.0' * (found[1] == 'out')}.lora."

    name = _BEFORE_PEFT.sub(layer, name).replace(".lora_linear_layer.", ".lora.")
    return name.replace(".lora.down.weight.alpha", ".alpha")


def _factor(settings: Mapping[str, Any], layer: str, rank: int) -> float:
    """Returns the factor of a layer's product, by its alpha, of Kohya's scripts, or peft's settings of its part."""
    part, _, name = layer.partition(".")
    own = {key: settings.get(f"{part}.{key}", settings.get(key)) for key in _SETTINGS}
    alpha = own["lora_alpha"]
    try:
        for pattern, value in dict(own["alpha_pattern"] or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", name):
                alpha = value
                break
        alpha = float(settings.get(f"{layer}.alpha", rank if alpha is None else alpha))
    except (TypeError, ValueError, RuntimeError, re.error) as error:
        raise CheckpointError(f"the alpha of {layer} in a LoRA cannot be read: {error}") from error
    return alpha / (math.sqrt(rank) if own["use_rslora"] else rank)


def read_loras(
    loras: Mapping[str | Path, float], cls: Any, parts: Collection[str]
) -> list[StoredLora]:
    """Reads all files.

    Raises:
        ConfigurationError: They are no mapping; see `StoredLora`, too.
        CheckpointError: See `StoredLora`, or a file changes parts that the pipeline does not have.
    """
    if not isinstance(loras, Mapping):
        raise ConfigurationError(f"loras must be a mapping of files to their scales; got {loras!r}")
    read = [StoredLora(path, scale, cls) for path, scale in loras.items()]
    for lora in read:
        if others := sorted(lora.parts() - set(parts)):
            raise CheckpointError(
                f"{lora.path} is of another model: it changes {', '.join(others)}, and {cls.__name__} here has "
                f"{', '.join(parts)}"
            )
    return read


def refuse_scales(given: Mapping[str, Any]) -> None:
    """Refuses a scale that pipelines hand to the layers of LoRAs, of which there are none in weights.

    Args:
        given: Arguments of the pipeline's call.

    Raises:
        ConfigurationError: There is one that would change the picture in diffusers.
    """
    for name, value in given.items():
        scale = value.get("scale", 1) if isinstance(value, Mapping) else 1
        if name.endswith("attention_kwargs") and scale != 1:
            raise ConfigurationError(
                f"{name} has scale={scale}, but LoRAs are added to the weights here, before any call: give each "
                f"its scale where the model is opened, loras={{FILE: {scale}}}, and leave it out of {name}"
            )


def adapted(
    weights: Weights, part: str, model: nn.Module, loras: Collection[StoredLora]
) -> Weights:
    """Returns the stored weights of a part with all files added; as they are if there is none.

    Raises:
        CheckpointError: A file is of another model.
    """
    shapes = {name: p.shape for name, p in model.named_parameters()}
    for lora in loras:
        lora.require_fit(part, shapes)
    return AdaptedWeights(weights, part, loras) if loras else weights


def add_to_others(parts: Mapping[str, Any], denoiser: str, loras: Collection[StoredLora]) -> None:
    """Adds to the weights of all parts that are here but the denoiser, as `add_to_part`."""
    adapted_parts = set().union(*(lora.parts() for lora in loras)) - {denoiser}
    for name in sorted(adapted_parts & parts.keys()):
        add_to_part(parts[name], name, loras)


def add_to_part(part: nn.Module, name: str, loras: Collection[StoredLora]) -> None:
    """Adds to the weights of a part that is in memory.

    Raises:
        CheckpointError: A file is of another model.
    """
    parameters = dict(part.named_parameters())
    for lora in loras:
        lora.require_fit(name, {n: p.shape for n, p in parameters.items()})
        for layer in lora.layers(name):
            weight = parameters[f"{layer}.weight"]
            weight.data = lora.added(name, layer, weight.data).to(weight.dtype)


class AdaptedWeights(ChangedWeights):
    """Stored weights of a part, with LoRA files added as they are read."""

    def __init__(self, weights: Weights, part: str, loras: Collection[StoredLora]) -> None:
        super().__init__(weights)
        self._part, self._loras = part, loras

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Reads some of them, one at a time."""
        for name, value in self._weights.read(names):
            for lora in self._loras:
                value = lora.added(self._part, name.removesuffix(".weight"), value)
            yield name, value

    def digests(self) -> dict[str, str]:
        """Returns the digests of each tensor and what is added to it."""
        return {
            name: digest
            + "".join(lora.digest(self._part, name.removesuffix(".weight")) for lora in self._loras)
            for name, digest in self._weights.digests().items()
        }
