"""How much of a device is used: the FLOPs a model needs per sample over what its devices could do.

    MFU = FLOPs per sample x samples per second / (peak FLOP/s of a device x devices)

Counted are matrix products, convolutions and attention, once: work that is done twice (activation
checkpointing) or on several ranks does not make the figure larger.

Source: model FLOPs utilization, Chowdhery et al. (2022), https://arxiv.org/abs/2204.02311
"""

from __future__ import annotations

import re

import torch

from lightning_diffpipe.graph.layer import LayerGraph
from lightning_diffpipe.profiling.device_model import DEVICES

_DTYPES = {"bf16": torch.bfloat16, "16": torch.float16}

# A driver's name is taken word by word: an RTX A1000 is no A100. The first that has all its words counts.
_BY_WORDS = (
    (("t4",), "t4"),
    (("v100", "pcie"), "v100_pcie"),
    (("v100",), "v100"),
    (("a10g",), "a10g"),
    (("rtx", "4090"), "rtx4090"),
    (("a100",), "a100"),  # the peak of its PCIe card is the same
    (("h100", "pcie"), "h100_pcie"),
    (("h100",), "h100"),
    (("h200",), "h200"),
    (("gh200",), "h200"),
)
_OTHERS = {"laptop", "mig", "grid", "nvl", "fhhl", "d", "max"}
"""Words of cards, or parts of them, whose peak is another one and not known here."""


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
    """Returns the vendor's peak of a device, None where it is not known, as for CPUs.

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
    """Looks a device up by the name its driver gives it; see `peak_flops`.

    Example:
        >>> peak_of_name("NVIDIA H100 80GB HBM3", "bf16-mixed"), peak_of_name("Radeon", "32-true")
        (989000000000000.0, None)
    """
    words = set(re.findall("[a-z0-9]+", name.lower()))
    if words & _OTHERS:
        return None
    known = next((DEVICES[key] for wanted, key in _BY_WORDS if words.issuperset(wanted)), None)
    if known is None:
        return None
    return known.peak_of(_DTYPES.get(precision.split("-")[0], torch.float32))
