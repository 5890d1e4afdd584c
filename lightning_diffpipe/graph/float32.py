"""How float32 is rounded inside products and convolutions, whichever of torch's names it was set by.

torch has two sets of names for this. Once the newer ones are used, the older ones (`allow_tf32`,
`get_float32_matmul_precision`) raise a RuntimeError when they are read; the newer ones always answer.
Before torch 2.9 there are the older ones only.
"""

from __future__ import annotations

import torch


def float32_precisions() -> tuple[str, str, str]:
    """Returns the precision of products on GPUs, of convolutions on GPUs, and of products on CPUs.

    Returns:
        Each "tf32" or "bf16" where inputs are rounded to that; "ieee" or "none" where they are not.

    Example:
        >>> float32_precisions()
        ('none', 'tf32', 'none')
    """
    backends = torch.backends
    if not hasattr(backends, "fp32_precision"):
        rounds = backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32
        products, convolutions = ("tf32" if tf32 else "none" for tf32 in rounds)
        on_host = torch.get_float32_matmul_precision()
        return products, convolutions, "bf16" if on_host == "medium" else "none"
    return (
        backends.cuda.matmul.fp32_precision,
        backends.cudnn.conv.fp32_precision,
        backends.mkldnn.matmul.fp32_precision,
    )


def rounding_of(dtype: torch.dtype, device: torch.device, convolves: bool = True) -> float:
    """Returns the distance from 1 to the next number of a type in products: that of TF32 for float32 on a GPU.

    Args:
        dtype: A type of numbers with a fraction.
        device: Where it is computed.
        convolves: Whether convolutions count, which may round to TF32 unless torch is told otherwise, and not only
            other products.
    """
    own = float(torch.finfo(dtype).eps)
    if device.type != "cuda" or dtype != torch.float32:
        return own
    products, convolutions, _ = float32_precisions()
    return 2.0**-10 if "tf32" in (products, convolutions if convolves else "") else own
