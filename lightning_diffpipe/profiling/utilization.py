"""How much of a device is used: the FLOPs a model needs per sample over what its devices could do.

    MFU = FLOPs per sample x samples per second / (peak FLOP/s of a device x devices)

Counted are matrix products, convolutions and attention, once: work that is done twice (activation
checkpointing) or on several ranks does not make the figure larger.

Source: model FLOPs utilization, Chowdhery et al. (2022), https://arxiv.org/abs/2204.02311
"""

from __future__ import annotations

import torch

from lightning_diffpipe.graph.layer import LayerGraph
from lightning_diffpipe.profiling.device_model import DEVICES

_DTYPES = {"bf16": torch.bfloat16, "16": torch.float16}


def flops_per_sample(graph: LayerGraph) -> float:
    """FLOPs of one training step for one sample.

    A layer with trained weights costs three times its forward, one that only passes gradients on
    twice, a frozen layer once.

    Args:
        graph: The layers of a step, folded or not.
    """
    total = 0
    for layer in graph.layers:
        passes = 1 if layer.frozen else 3 if layer.parameters & graph.trained else 2
        total += passes * layer.cost_flops
    return total / (graph.num_samples or 1)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The vendor's peak of a device, None where it is not known, as for CPUs.

    Args:
        device: Where training runs.
        precision: Lightning's name of it, for example `"bf16-mixed"`.

    Returns:
        FLOP/s of dense matrix products; for single precision those of TF32, where the device has it.
    """
    if device.type != "cuda":
        return None
    return peak_of_name(torch.cuda.get_device_name(device), precision)


def peak_of_name(name: str, precision: str) -> float | None:
    """See `peak_flops`; by the name a driver gives the device.

    Example:
        >>> peak_of_name("NVIDIA H100 80GB HBM3", "bf16-mixed"), peak_of_name("Radeon", "32-true")
        (989000000000000.0, None)
    """
    plain = name.lower().replace(" ", "")
    known = next((model for key, model in DEVICES.items() if key in plain), None)
    if known is None:
        return None
    return known.peak_of(_DTYPES.get(precision.split("-")[0], torch.float32))
