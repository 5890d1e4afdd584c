"""Pipelines with frozen weights in stored types, and a quantization that needs no package."""

import json
import sys

import pytest
import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file

from lightning_diffpipe.modules import Lora, Optimization, PipelineDiffusion
from lightning_diffpipe.modules.part_files import load_for_training, read_index
from lightning_diffpipe.quantization import Quantization, Weight8Bit
from lightning_diffpipe.sampling.source import load_networks


def store_in_8_bits(folder, says_so=True, layers="block"):
    """Quantizes matrices of blocks in a component's folder as bitsandbytes stores them: with a scale for each row.

    Returns:
        The plain weights that they stand for, by name.
    """
    [file] = folder.glob("*.safetensors")
    stored, plain = {}, {}
    for name, value in load_file(file).items():
        stored[name] = value
        if value.ndim == 2 and layers in name and "relative" not in name:
            # A power of two, so that values are the same in all types.
            scale = 127 * torch.exp2((value.float().abs().amax(1) / 127).log2().ceil())
            numbers = (value.float() / scale[:, None] * 127).round()
            stored[name] = numbers.to(torch.int8)
            stored[name.removesuffix("weight") + "SCB"] = scale
            plain[name] = (numbers * (scale / 127)[:, None]).to(value.dtype)
    save_file(stored, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if says_so:
        config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    return plain


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="asks the system what is mapped")


class Opened(PipelineDiffusion):
    """A pipeline as `from_pretrained` opens it."""

    def __init__(self, folder, lora):
        networks = load_networks(folder, read_index(folder), load=load_for_training, dtype=None)
        super().__init__(
            DiffusionPipeline.from_pretrained(folder, **networks),
            lora=Lora(rank=2) if lora else None,
            call={"max_sequence_length": 8} if "flux" in folder else {},
            caption_dropout=0.0,
            optimization=Optimization(lr=1e-2, warmup_steps=0, decay="constant"),
        )
        self.train_in_float32()

    def double(self):
        return self  # types are what is looked at


def in_8_bits(weight):
    """A weight of whole numbers, whose scales are powers of two, so that values are the same in all types."""
    weight = weight.detach()
    steps = torch.exp2((weight.abs().amax(1) / 127).log2().ceil())
    tensors = {
        "packed": (weight / steps[:, None]).round().to(torch.int8),
        "scales": 127 * steps.float(),
    }
    return Weight8Bit(tensors, {}, weight.shape, weight.dtype)


def bytes_in_8_bits(weight):
    return weight.numel() + 4 * weight.shape[0]


IN_8_BITS = Quantization(in_8_bits, bytes_in_8_bits)


class Rounded(torch.Tensor):
    """A weight of 4 bits and one scale: so coarse that losses tell whether it is in use."""

    @staticmethod
    def __new__(cls, levels, scale, dtype):
        made = torch.Tensor._make_wrapper_subclass(cls, levels.shape, dtype=dtype)
        made.levels, made.scale = levels, scale
        return made

    @classmethod
    def of(cls, weight):
        scale = weight.detach().abs().amax().float() / 7
        return cls((weight.detach() / scale).round().to(torch.int8), scale, weight.dtype)

    def dequantize(self):
        return (self.levels * self.scale).to(self.dtype)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.dequantize(), *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(args[0].levels, args[0].scale, args[0].dtype)
        raise NotImplementedError(str(func))

    def __tensor_flatten__(self):
        return ["levels", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner, dtype, *_):
        return Rounded(**inner, dtype=dtype)


ROUNDED = Quantization(Rounded.of, lambda weight: weight.numel() + 4)
