"""Frozen weights in 4 or 8 bits, made of the stored ones by each rank for its own layers, where it places them.

Until a weight is placed, it is the plain one that is mapped from its file: the step is probed, and equal weights
are told, as without quantization, and no rank quantizes what it does not run. Layers stay `nn.Linear`; their weight
becomes a tensor that knows how to multiply. Those of 8 bits are torchao's. Those of 4 bits are kept as `Linear4bit`
of bitsandbytes keeps them, and multiplied by its kernels; its module would be another one than that which is cut.
Both keep nothing but the quantized weight for the backward.

Source:
    QLoRA, Dettmers et al. (2023), section 3, https://arxiv.org/abs/2305.14314
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial, update_wrapper
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lightning_diffpipe.errors import ConfigurationError, is_out_of_memory
from lightning_diffpipe.graph.placement import (
    Quantizing,
    keep_notes,
    quantizations_noted,
    quantize_when_placed,
    replace_parameters,
)
from lightning_diffpipe.graph.versions import plain_tensors

_BLOCK, _NESTED_BLOCK = 64, 256  # weights that share a scale, scales that share one


@dataclass(frozen=True)
class Quantization:
    """Format in which the weight of a layer is quantized.

    Attributes:
        quantize: Returns the quantized weight of a layer, `(out, in)`, on the device of the plain one: a wrapper
            subclass of `Tensor` that `F.linear` takes, and that has `dequantize()` and `__tensor_flatten__`. The
            backward reads it as a saved tensor, so that layers can be recomputed over weights that have moved.
        num_bytes: Returns the size of the tensors of which the quantized weight consists, of a plain weight.
    """

    quantize: Callable[[Tensor], Tensor]
    num_bytes: Callable[[Tensor], int]


class QuantizedWeight(Tensor):
    """A frozen weight of a linear layer, `(out, in)`: packed tensors, and settings by which to multiply by them.

    Attributes:
        tensors: Tensors that represent the weight, such as packed values and scales, by name.
        settings: Further attributes of a subclass.
    """

    tensors: dict[str, Tensor]
    settings: dict[str, Any]

    @staticmethod
    def __new__(
        cls,
        tensors: Mapping[str, Tensor],
        settings: Mapping[str, Any],
        shape: torch.Size,
        dtype: torch.dtype,
    ) -> QuantizedWeight:
        """Wraps tensors, for a plain weight of this shape and type."""
        device = next(iter(tensors.values())).device
        wrapper = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        wrapper.tensors, wrapper.settings = dict(tensors), dict(settings)
        return wrapper

    def dequantize(self) -> Tensor:
        """Returns a plain weight."""
        raise NotImplementedError

    def multiplied(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the product of `x` and the weight, plus the bias."""
        return F.linear(x, self.dequantize().to(x.dtype), bias)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Multiplies by it in `F.linear`."""
        if func is F.linear:
            return _linear(*args, **kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Detaches, copies and moves.

        Raises:
            NotImplementedError: Something else is asked for.
        """
        weight, aten, options = args[0], torch.ops.aten, kwargs or {}
        if func in (aten.detach.default, aten.alias.default):
            alias = cls(weight.tensors, weight.settings, weight.shape, weight.dtype)
            # `module.cpu()` makes another parameter of it, which is where it was.
            keep_notes(weight, alias)
            return alias
        if func in (aten.clone.default, aten._to_copy.default):
            device, dtype = options.get("device"), options.get("dtype") or weight.dtype
            # A weight that is only to be dequantized to another type stays mapped from its file.
            is_same = func is aten._to_copy.default and dtype != weight.dtype
            copies = {
                n: (each if is_same else each.clone()).to(device)
                for n, each in weight.tensors.items()
            }
            return cls(copies, weight.settings, weight.shape, dtype)
        if func is aten.copy_.default and type(args[1]) is cls:
            for name, each in weight.tensors.items():
                each.copy_(args[1].tensors[name])
            return weight
        raise NotImplementedError(
            f"{func} of a quantized weight, which only linear layers multiply by"
        )

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Returns the names of the tensors, and the other values; see `torch.utils._python_dispatch`."""
        # A compiler compares the second value for equality.
        return list(self.tensors), (type(self), self.settings, self.shape, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], known: Any, *_: Any) -> QuantizedWeight:
        """Wraps tensors again."""
        cls, settings, shape, dtype = known
        return cls(inner, settings, shape, dtype)

    def __getattr__(self, name: str) -> Any:
        """Finds tensors, as `__tensor_flatten__` names them."""
        if name in (tensors := self.__dict__.get("tensors", {})):
            return tensors[name]
        raise AttributeError(name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Returns a text with the shape and type of the weight."""
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype}, {self.device})"


def _linear(input: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Multiplies as a linear layer does, under autocast in its type."""
    kind = input.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        input = input.to(torch.get_autocast_dtype(kind))
    return _Linear.apply(input, weight, None if bias is None else bias.to(input.dtype))


class _Linear(torch.autograd.Function):
    """Keeps the quantized weight for the backward, where kernels keep one that they have dequantized.

    As a saved tensor: a layer that is recomputed has another one by then, in another slot if it is streamed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return weight.multiplied(x, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        needs_x, _, needs_bias = ctx.needs_input_grad
        (weight,) = ctx.saved_tensors
        of_x = gradient @ weight.dequantize().to(gradient.dtype) if needs_x else None
        of_bias = gradient.flatten(0, -2).sum(0) if needs_bias else None
        return of_x, None, of_bias


class Weight4Bit(QuantizedWeight):
    """A weight in 4 bits, as bitsandbytes has it; `settings` are those of `QuantState.as_dict`."""

    @classmethod
    def of(cls, weight: Tensor, quant_type: str, compress_statistics: bool) -> Weight4Bit:
        """Quantizes a weight by bitsandbytes."""
        from bitsandbytes.functional import quantize_4bit

        options = {"quant_type": quant_type, "compress_statistics": compress_statistics}
        packed, state = quantize_4bit(weight.detach().contiguous(), blocksize=_BLOCK, **options)
        return cls._of_state(packed, state)

    @classmethod
    def stored(
        cls, packed: Tensor, state: Mapping[str, Tensor], compute_dtype: torch.dtype
    ) -> Weight4Bit:
        """Returns a weight that bitsandbytes has stored.

        Args:
            packed: The weight.
            state: Further stored tensors, such as scales, by the ends of their names.
            compute_dtype: Type in which layers multiply.
        """
        from bitsandbytes.functional import QuantState

        return cls._of_state(
            packed, QuantState.from_dict(dict(state), packed.device), compute_dtype
        )

    @classmethod
    def _of_state(
        cls, packed: Tensor, state: Any, compute_dtype: torch.dtype | None = None
    ) -> Weight4Bit:
        stored = state.as_dict() | {"compute_dtype": compute_dtype}
        if state.nested:  # a number there, for which a device would be waited
            stored["nested_offset"] = state.offset
        tensors = {name: each for name, each in stored.items() if isinstance(each, Tensor)}
        settings = {name: each for name, each in stored.items() if name not in tensors}
        return cls({"packed": packed, **tensors}, settings, state.shape, state.dtype)

    @property
    def _state(self) -> Any:
        """The `QuantState` that bitsandbytes computes with."""
        from bitsandbytes.functional import QuantState

        nested = None
        if "nested_absmax" in self.tensors:
            nested = QuantState(
                absmax=self.nested_absmax,
                blocksize=self.settings["nested_blocksize"],
                code=self.nested_quant_map,
                dtype=torch.float32,
            )
        return QuantState(
            absmax=self.absmax,
            shape=self.shape,
            code=self.quant_map,
            blocksize=self.settings["blocksize"],
            quant_type=self.settings["quant_type"],
            dtype=getattr(torch, self.settings["dtype"]),
            offset=self.tensors.get("nested_offset"),
            state2=nested,
        )

    def dequantize(self) -> Tensor:
        """Returns a plain weight."""
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(self.packed, self._state).to(self.dtype)

    def multiplied(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the product of `x` and the weight, plus the bias."""
        from bitsandbytes import matmul_4bit

        if x.dtype == torch.float64:  # for which there is no kernel
            return F.linear(x, self.dequantize().to(x.dtype), bias)
        dtype = self.settings["compute_dtype"] or x.dtype
        bias = None if bias is None else bias.to(dtype)
        product = matmul_4bit(x.to(dtype), self.packed.t(), bias=bias, quant_state=self._state)
        return product.to(x.dtype)


class Weight8Bit(QuantizedWeight):
    """A weight in 8 bits, as bitsandbytes stores it: whole numbers, and the largest value of each row.

    Its kernels also round inputs to 8 bits, but for columns with a large value, which they find among all inputs of
    a call: so the parts of a batch would not have the numbers of the whole. Here inputs are not rounded.
    """

    def dequantize(self) -> Tensor:
        """Returns a plain weight."""
        return self.packed.to(self.dtype).mul_(self.scales.mul(1 / 127).unsqueeze(1))


class WeightOnPaper(QuantizedWeight):
    """A weight without values, as large as a quantized one, that is dequantized by one operator."""

    @classmethod
    def of(cls, weight: Tensor, num_bytes: Callable[[Tensor], int]) -> WeightOnPaper:
        """Returns a weight of a size, on the device of the plain one."""
        packed = torch.empty(num_bytes(weight), dtype=torch.uint8, device=weight.device)
        return cls({"packed": packed}, {}, weight.shape, weight.dtype)

    def dequantize(self) -> Tensor:
        """Reads what is packed, and writes a plain weight."""
        # What is read counts as large as the storage.
        return self.packed.as_strided(self.shape, (0, 1)).to(self.dtype)


class TorchaoWeight(QuantizedWeight):
    """A weight that torchao has quantized."""

    @classmethod
    def of(cls, weight: Tensor, config: Any) -> TorchaoWeight:
        """Quantizes a weight by a configuration of torchao."""
        from torchao.quantization import quantize_

        layer = nn.Linear(1, 1, bias=False, device="meta")
        layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
        layer.out_features, layer.in_features = weight.shape
        quantize_(layer, config)
        # A layer gets a method of its own there, a cycle in which the weight would outlive this call.
        quantized = layer._parameters.pop("weight")
        return cls({"quantized": quantized.detach()}, {}, weight.shape, weight.dtype)

    def dequantize(self) -> Tensor:
        """Returns a plain weight."""
        return self.quantized.dequantize().to(self.dtype)

    def multiplied(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the product of `x` and the weight, plus the bias."""
        return F.linear(x, self.quantized, bias)


def torchao_weight(name: str, tensors: Mapping[str, Tensor], header: str) -> TorchaoWeight:
    """Returns a weight that torchao has stored.

    Args:
        name: Name of the weight.
        tensors: By their stored names.
        header: Entry of the weight in the header of the file.

    Raises:
        ValueError: torchao does not know such a weight.
    """
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    metadata = {name: header, "tensor_names": json.dumps([name])}
    weight = unflatten_tensor_state_dict(dict(tensors), metadata)[0][name]
    return TorchaoWeight({"quantized": weight}, {}, weight.shape, weight.dtype)


def has_quantized(part: Any) -> bool:
    """Returns whether a component has quantized weights."""
    return isinstance(part, nn.Module) and any(
        isinstance(weight, QuantizedWeight) for weight in part.parameters()
    )


class _OutputsApart:
    """Replaces `forward` of a block, so that its outputs share no memory where it is compiled."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        update_wrapper(self, forward)  # keeps inspect.signature(forward)
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._forward(*args, **kwargs)
        if not torch.compiler.is_compiling():
            return outputs
        return pytree.tree_map_only(Tensor, torch.clone, outputs)


def keep_outputs_apart(root: nn.Module) -> None:
    """Lets compiled blocks with quantized weights return copies, as torch compiles none whose outputs alias.

    The single blocks of Flux return two views of one tensor.
    """
    for module in root.modules():
        is_compiled = module._compiled_call_impl is not None
        is_done = isinstance(module.forward, _OutputsApart)
        if is_compiled and not is_done and (has_quantized(module) or quantizations_noted(module)):
            module.forward = _OutputsApart(module.forward)


def dequantize(part: nn.Module) -> None:
    """Makes the quantized weights of a component plain."""
    quantized = [p for p in part.parameters() if isinstance(p, QuantizedWeight)]
    plain: Any = {p: nn.Parameter(p.detach().dequantize(), False) for p in quantized}
    replace_parameters(part, plain)


def _in_4_bits(quant_type: str = "nf4", double: bool = True) -> Quantization:
    how = {"quant_type": quant_type, "compress_statistics": double}
    return Quantization(partial(Weight4Bit.of, **how), partial(_bytes_in_4_bits, double=double))


def _bytes_in_4_bits(weight: Tensor, double: bool) -> int:
    scales = math.ceil(weight.numel() / _BLOCK)
    # The 16 levels, and where scales are quantized, theirs and the mean of the scales, in single precision.
    nested = scales + 4 * math.ceil(scales / _NESTED_BLOCK) + 4 * 256 + 4
    return math.ceil(weight.numel() / 2) + 4 * 16 + (nested if double else 4 * scales)


def _in_8_bits(name: str, row_bytes: int) -> Quantization:
    return Quantization(
        partial(_by_torchao, name=name), partial(_bytes_in_8_bits, row_bytes=row_bytes)
    )


def _by_torchao(weight: Tensor, name: str) -> Tensor:
    import torchao.quantization

    return TorchaoWeight.of(weight, getattr(torchao.quantization, name)())


def _bytes_in_8_bits(weight: Tensor, row_bytes: int) -> int:
    return weight.numel() + row_bytes * weight.shape[0]


_NAMED = {
    "nf4": ("bitsandbytes", _in_4_bits),
    "int8": ("torchao", partial(_in_8_bits, "Int8WeightOnlyConfig", 5)),  # a scale, a zero point
    "float8": ("torchao", partial(_in_8_bits, "Float8WeightOnlyConfig", 4)),
}


def quantization_named(setting: Any, runs: bool = True) -> Quantization:
    """Returns the quantization that a setting names.

    Args:
        setting: `"nf4"` (bitsandbytes, with scales that are quantized, too), `"int8"` or `"float8"` (torchao,
            weights only), a configuration of torchao, or a `TorchAoConfig` or `BitsAndBytesConfig` with
            `load_in_4bit`, of diffusers or transformers; or a `Quantization` of your own.
        runs: Whether something is quantized, for which packages are needed; else weights become `WeightOnPaper`.

    Raises:
        ConfigurationError: There is no such quantization, or its package is missing.
    """
    real = _quantization(setting, runs)
    on_paper = partial(WeightOnPaper.of, num_bytes=real.num_bytes)
    return real if runs else replace(real, quantize=on_paper)


def _quantization(setting: Any, runs: bool) -> Quantization:
    from diffusers.quantizers.quantization_config import QuantizationConfigMixin
    from transformers.utils.quantization_config import QuantizationConfigMixin as OfTransformers

    if isinstance(setting, Quantization):
        return setting
    if isinstance(setting, str) and setting in _NAMED:
        package, make = _NAMED[setting]
        if runs and find_spec(package) is None:
            raise ConfigurationError(
                f"quantization={setting} needs the package {package}; run: pip install {package}"
            )
        return make()
    if getattr(setting, "load_in_4bit", False):
        return _in_4_bits(setting.bnb_4bit_quant_type, setting.bnb_4bit_use_double_quant)
    if isinstance(setting, QuantizationConfigMixin | OfTransformers):
        setting = getattr(setting, "quant_type", None)
    if find_spec("torchao") is not None:
        from torchao.core.config import AOBaseConfig

        if isinstance(setting, AOBaseConfig):
            quantize = partial(TorchaoWeight.of, config=setting)

            @cache
            def bytes_of(shape: torch.Size, dtype: torch.dtype) -> int:
                outline = torch.empty(shape, dtype=dtype, device="meta")
                return sum(plain.nbytes for plain in plain_tensors(quantize(outline)))

            return Quantization(quantize, lambda weight: bytes_of(weight.shape, weight.dtype))
    raise ConfigurationError(
        f"quantization={setting!r}; choose {', '.join(_NAMED)}, a configuration of torchao, or TorchAoConfig or "
        "BitsAndBytesConfig(load_in_4bit=True) of diffusers; or one of them for each component, such as "
        "{transformer: nf4, text_encoder_2: int8}"
    )


def quantizations_of(
    setting: Any, names: Collection[str], runs: bool = True
) -> dict[str, Quantization]:
    """Returns the quantization of each component, by name; before weights are read.

    Args:
        setting: As in `quantization_named`, for all components; such settings by names of components; or None.
        names: Of the components of a pipeline.
        runs: As in `quantization_named`.

    Raises:
        ConfigurationError: There is no such quantization or component.
    """
    if setting is None:
        return {}
    if not isinstance(setting, Mapping):
        return dict.fromkeys(names, quantization_named(setting, runs))
    if unknown := sorted(setting.keys() - set(names)):
        raise ConfigurationError(
            f"quantization names the component {unknown[0]!r}; this model has {', '.join(names)}"
        )
    chosen = {name: each for name, each in setting.items() if each is not None}
    return {name: quantization_named(each, runs) for name, each in chosen.items()}


def quantize_components(
    quantizations: Mapping[str, Quantization],
    components: Mapping[str, Any],
    trains: bool = True,
    every: bool = False,
) -> None:
    """Marks weights of linear layers to be quantized when they are placed; none of autoencoders.

    Those stay plain that a class keeps in float32 (`_keep_in_fp32_modules`), and those that other kinds of layers
    read, too, such as an embedding.

    Args:
        quantizations: By names of components.
        components: By their names.
        trains: Only frozen weights are, and there have to be some.
        every: In each of these components, as where a user has named them.

    Raises:
        ConfigurationError: There are no such weights.
    """
    weights = {
        name: [w for w in _linear_weights(part) if not (trains and w.requires_grad)]
        for name in quantizations
        if isinstance(part := components.get(name), nn.Module) and not hasattr(part, "decode")
    }
    without = [name for name in quantizations if not weights.get(name)]
    if trains and without and (every or len(without) == len(quantizations)):
        raise ConfigurationError(
            f"quantization of {', '.join(without)}: there is no frozen linear layer whose weight could be "
            "quantized. Autoencoders, and what is trained whole, stay plain: add adapters (lora), or leave it out"
        )
    for name, each in weights.items():
        for weight in each:
            quantize_when_placed(weight, quantizations[name])


def require_kernels(
    quantizations: Iterable[tuple[Quantizing, torch.dtype]], device: torch.device
) -> None:
    """Tries quantizations on a device with a small weight, before weights are read.

    Args:
        quantizations: Quantizations, with the types of weights.
        device: Device on which weights will be quantized.

    Raises:
        ConfigurationError: The device, or the package there, cannot quantize so or multiply by it.
    """
    for how, dtype in quantizations:
        small = torch.ones(256, 256, dtype=dtype, device=device)
        try:
            F.linear(small, how.quantize(small))
        except Exception as error:  # packages assert, import and raise all kinds
            if is_out_of_memory(error):
                raise
            raise ConfigurationError(
                f"{device} cannot quantize weights so, or multiply by them: {type(error).__name__}: "
                f"{' '.join(str(error).split())[:300]}. Choose another quantization, such as "
                f"{' or '.join(_NAMED)}, or device"
            ) from error


def _linear_weights(part: nn.Module) -> list[nn.Parameter]:
    """Returns the weights of a component that may be quantized; see `quantize_components`."""
    in_float32 = set(getattr(part, "_keep_in_fp32_modules", None) or ())
    linear = Counter(
        module.weight
        for name, module in part.named_modules()
        if type(module) is nn.Linear
        and not in_float32 & set(name.split("."))
        and not isinstance(module.weight, QuantizedWeight)  # stored so
    )
    readers = Counter(p for module in part.modules() for p in module._parameters.values())
    return [weight for weight, count in linear.items() if readers[weight] == count]
