"""Pipelines with frozen weights in stored types, and a quantization that needs no package."""

import sys

import pytest
import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline

from lightning_diffpipe.modules import Lora, Optimization, PipelineDiffusion
from lightning_diffpipe.modules.parts import load_for_training, read_index
from lightning_diffpipe.sampling.source import load_networks

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
