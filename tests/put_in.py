"""A plugin of pytest with which Lightning's own tests train with this project's strategy (docs/lightning_tests.md).

    cd pytorch-lightning/tests
    export PYTHONPATH=.:THIS_FOLDER
    python -m pytest -p put_in --timeout 60 tests_pytorch/{trainer,loops,callbacks}

In place of the strategy that a trainer chooses for one CPU stands one stage in one process. What a test asks for
by name stays.
"""

from typing import Any

from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from lightning_diffpipe import DiffPipeStrategy

_choose_strategy = _AcceleratorConnector._choose_strategy


def _choose_ours(connector: Any) -> Any:
    strategy = _choose_strategy(connector)
    if type(strategy) is SingleDeviceStrategy and strategy.root_device.type == "cpu":
        return DiffPipeStrategy(
            num_stages=1, num_replicas=1, num_microbatches=1, profile="flops", timeout_s=60
        )
    return strategy


def pytest_configure(config: Any) -> None:
    _AcceleratorConnector._choose_strategy = _choose_ours  # type: ignore[method-assign]
