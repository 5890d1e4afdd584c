"""What was written or replaced is noticed.

How float32 is rounded.
"""

import multiprocessing

import pytest
import torch
from torch import nn

from lightning_diffpipe.graph import versions
from lightning_diffpipe.graph import versions as versions_module
from lightning_diffpipe.graph.versions import Versions, circumstances, float32_precisions
from lightning_diffpipe.sampling.rehearsal import tolerance_of


def replaced(root):
    root.running_mean = torch.zeros(3)


def replaced_in_validation(root):
    with torch.inference_mode():
        root.running_mean = torch.zeros(3)


def averaged(root):
    """As averages of weights are often written; earlier nobody noticed, and encodings were stale."""
    root.weight.data.mul_(0.9).add_(1.0)


def pointed_elsewhere(root):
    root.weight.data = root.weight.data.clone()


@pytest.mark.parametrize(
    "change",
    [
        averaged,
        pointed_elsewhere,
        lambda root: root.weight.detach().zero_(),
        lambda root: root.running_mean.zero_(),
        replaced,
        replaced_in_validation,
    ],
)
def test_changes_are_noticed_until_they_are_noted(change):
    root = nn.BatchNorm1d(3)
    versions = Versions(root, {"weight"}, {"running_mean"})
    root.running_var.zero_()  # nobody watches it
    assert not versions.changed()
    change(root)
    assert versions.changed()
    versions.note()
    assert not versions.changed()


@pytest.mark.parametrize("num_accumulated", [1, 4])
def test_a_gpu_is_looked_at_until_the_optimizer_has_made_three_steps(num_accumulated, monkeypatch):
    """History: batches counted, so that under accumulation nobody looked when the first average was written."""
    root = nn.BatchNorm1d(3)
    monkeypatch.setattr(versions_module, "_waits_for", lambda tensor: True)
    versions = Versions(root, {"weight"}, set())
    noticed = []
    for _ in range(4):
        for batch in range(num_accumulated):
            assert not versions.changed()
            versions.note(before_update=batch == num_accumulated - 1)
        averaged(root)
        noticed.append(versions.changed())
        versions.note()
    assert noticed == [True, True, False, False]


def test_tensors_of_any_form_are_watched():
    """NaN, other dtypes, memory in another order, and tensors without elements or without memory of their own."""
    root = nn.Module()
    root.not_a_number = nn.Parameter(torch.full((3,), float("nan")))
    root.brief = nn.Parameter(torch.ones(40, dtype=torch.bfloat16))
    root.channels_last = nn.Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last))
    root.expanded = nn.Parameter(torch.zeros(()).expand(5))
    root.none = nn.Parameter(torch.zeros(0))
    names = {name for name, _ in root.named_parameters()}
    versions = Versions(root, names, set())
    assert not versions.changed()
    root.channels_last.data[1, 2, 3, 3] = (
        2  # the last of 96 elements: every sixth is compared, and not this one
    )
    assert not versions.changed()
    root.channels_last.data.mul_(2)
    assert versions.changed()


SETTINGS_OF_TF32 = (
    "torch.backends.fp32_precision = 'tf32'",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "torch.backends.cuda.matmul.allow_tf32 = True",
)


@pytest.mark.parametrize("setting", SETTINGS_OF_TF32)
def test_precision_is_known_by_whatever_name_it_was_set(setting):
    """No process can go back to torch's older names, so each setting has a fork of its own."""
    before = float32_precisions()

    def check():
        exec(setting)
        assert float32_precisions() != before, setting
        tolerance_of(nn.Linear(1, 1), torch.zeros(1), convolves_parts=True)
        circumstances()

    process = multiprocessing.get_context("fork").Process(target=check)
    process.start()
    process.join()
    assert process.exitcode == 0


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
