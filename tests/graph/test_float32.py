"""How float32 is rounded, by torch's newer and older names for it."""

from types import SimpleNamespace

import pytest
import torch

from lightning_diffpipe.graph import versions


@pytest.mark.parametrize(
    ("products", "convolutions", "on_host", "expected"),
    [
        (False, True, "highest", ("none", "tf32", "none")),
        (True, False, "medium", ("tf32", "none", "bf16")),
    ],
)
def test_torch_before_2_9_has_the_older_names_only(
    products, convolutions, on_host, expected, monkeypatch
):
    """History: every run ended there with "Unknown attribute fp32_precision"."""
    older = SimpleNamespace(
        cuda=SimpleNamespace(matmul=SimpleNamespace(allow_tf32=products)),
        cudnn=SimpleNamespace(allow_tf32=convolutions),
    )
    names = SimpleNamespace(backends=older, get_float32_matmul_precision=lambda: on_host)
    monkeypatch.setattr(versions, "torch", names)
    assert versions.float32_precisions() == expected


def test_the_newer_names_answer_here():
    assert len(versions.float32_precisions()) == 3
    assert hasattr(torch.backends, "fp32_precision")


@pytest.mark.parametrize(
    ("products", "convolutions", "convolves", "expected"),
    [
        ("none", "tf32", True, 2.0**-10),
        ("none", "tf32", False, 2.0**-23),
        ("tf32", "none", False, 2.0**-10),
        ("none", "none", True, 2.0**-23),
    ],
)
def test_float32_on_a_gpu_may_have_the_digits_of_tf32(
    products, convolutions, convolves, expected, monkeypatch
):
    """History: encoders whose convolutions rounded so, as they do by default, were said to mix samples."""
    monkeypatch.setattr(versions, "float32_precisions", lambda: (products, convolutions, "none"))
    gpu, host = torch.device("cuda"), torch.device("cpu")
    assert versions.rounding_of(torch.float32, gpu, convolves) == expected
    assert versions.rounding_of(torch.float32, host, convolves) == 2.0**-23
    assert versions.rounding_of(torch.bfloat16, gpu, convolves) == 2.0**-7
