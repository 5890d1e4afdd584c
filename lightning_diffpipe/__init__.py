"""Pipelines for diffusion models: a Lightning strategy that keeps every rank busy.

    import lightning as L
    import lightning_diffpipe                      # registers "diffpipe"

    trainer = L.Trainer(accelerator="gpu", devices=4, strategy="diffpipe")
    trainer.fit(module, datamodule)                # an ordinary LightningModule

The journey of a batch: `training_step` is probed once (`graph`), its layers are timed (`profiling`) and
cut into stages with a schedule (`planning`); then for every batch this rank's program of instructions
runs microbatch by microbatch (`runtime`), and Lightning steps the optimizer as always (`strategy`).
`docs/architecture.md` walks the same way with file names.

Importing this imports nothing else, neither torch nor Lightning, so that planning alone starts at once.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_diffpipe.callbacks import EMA as EMA
    from lightning_diffpipe.callbacks import BubbleFilling as BubbleFilling
    from lightning_diffpipe.callbacks import PipelineMonitor as PipelineMonitor
    from lightning_diffpipe.modules import ControlNetDiffusion as ControlNetDiffusion
    from lightning_diffpipe.modules import LatentDiffusion as LatentDiffusion
    from lightning_diffpipe.planning.plan import PipelinePlan as PipelinePlan
    from lightning_diffpipe.planning.profile import ModelProfile as ModelProfile
    from lightning_diffpipe.planning.search import find_plan as find_plan
    from lightning_diffpipe.planning.simulator import simulate as simulate
    from lightning_diffpipe.predictor import Predictor as Predictor
    from lightning_diffpipe.profiling import profile as profile
    from lightning_diffpipe.training.strategy import DiffPipeStrategy as DiffPipeStrategy

# Modules of the public names, which are imported when they are asked for.
_MODULE_OF = {
    "BubbleFilling": "callbacks",
    "EMA": "callbacks",
    "PipelineMonitor": "callbacks",
    "ControlNetDiffusion": "modules",
    "LatentDiffusion": "modules",
    "PipelinePlan": "planning.plan",
    "ModelProfile": "planning.profile",
    "find_plan": "planning.search",
    "simulate": "planning.simulator",
    "Predictor": "predictor",
    "profile": "profiling",
    "DiffPipeStrategy": "training.strategy",
}
_STRATEGIES = "lightning.pytorch.strategies"


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})


def _register(registry: Any) -> None:
    if "diffpipe" not in registry:
        registry.register(
            "diffpipe",
            lambda **arguments: __getattr__("DiffPipeStrategy")(**arguments),
            description="Trains diffusion models as a pipeline with frozen encoders shared by all ranks",
        )


class _RegistersAfterLightning(MetaPathFinder):
    """Registers the strategy after the first import of Lightning's strategies, wherever that is.

    It finds that one module, by the other finders, and adds to what its loader does.
    """

    _asks_others = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _STRATEGIES or self._asks_others:
            return None
        self._asks_others = True
        try:
            spec = find_spec(fullname)
        finally:
            self._asks_others = False
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                _register(module.StrategyRegistry)

            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


if _STRATEGIES in sys.modules:
    _register(import_module(_STRATEGIES).StrategyRegistry)
else:
    sys.meta_path.insert(0, _RegistersAfterLightning())
