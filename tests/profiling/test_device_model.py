"""Peaks of devices by the names that drivers give them."""

import pytest
import torch
from torch import nn

from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.profiling.modelled import flops_per_sample, peak_of_name


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("Tesla T4", 65),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla V100-SXM3-32GB", 125),
        ("Tesla V100-PCIE-32GB", 112),
        ("NVIDIA A10G", 70),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("A100-SXM4-40GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
    ],
)
def test_half_precision_of_known_devices(name, teraflops):
    """History: any part of a name counted, and the card for a PCIe slot as the faster one."""
    assert peak_of_name(name, "16-mixed") == teraflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA RTX A1000 Laptop GPU",
        "NVIDIA RTX A1000",
        "NVIDIA T400 4GB",
        "NVIDIA T4G",
        "NVIDIA A10",
        "NVIDIA H20",
        "Tesla V100S-PCIE-32GB",
        "Tesla V100-FHHL-16GB",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4080",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "GRID A100-10C",
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "AMD Instinct MI300X",
        "",
    ],
)
def test_devices_that_are_not_known_have_no_peak(name):
    """History: an RTX A1000 counted as an A100, for the letters that their names share."""
    assert peak_of_name(name, "bf16-mixed") is None


def test_types_that_a_device_has_no_units_for_count_as_single_precision():
    assert peak_of_name("Tesla V100-PCIE-16GB", "bf16-mixed") == 14e12
    assert peak_of_name("NVIDIA H100 PCIe", "32-true") == 378e12


def test_layers_that_no_gradient_reaches_cost_their_forward_only():
    """History: an estimate under `no_grad` counted as trained, which doubled self-conditioning."""
    module, batch = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.ones(4, 8)

    def estimates_first(module, batch):
        with torch.no_grad():
            estimate = module(batch)
        return module(batch + estimate).mean()

    once = flops_per_sample(probe(module, lambda module, batch: module(batch).mean(), batch))
    assert flops_per_sample(probe(module, estimates_first, batch)) == once * 4 / 3
