"""What was written or replaced is noticed."""

import pytest
import torch
from torch import nn

from lightning_diffpipe.graph.versions import Versions


def replaced(root):
    root.running_mean = torch.zeros(3)


def replaced_in_validation(root):
    with torch.inference_mode():
        root.running_mean = torch.zeros(3)


@pytest.mark.parametrize(
    "change",
    [
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
