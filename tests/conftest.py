"""One torch thread, fixed seeds, and golden files that can be rewritten."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="offline", TOKENIZERS_PARALLELISM="false")

import lightning
import pytest
import torch

# Imported by the server of test processes only: it probes a module, and hides all objects from gc.
collect_ignore = ["warm.py"]


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files")


def pytest_report_header():
    return f"torch {torch.__version__}, lightning {lightning.__version__}"


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ.pop("PL_GLOBAL_SEED", None)


@pytest.fixture
def update_golden(request):
    return request.config.getoption("--update-golden")
