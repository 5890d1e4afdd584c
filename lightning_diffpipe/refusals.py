"""What cannot work with a pipeline, refused before training starts, each with its reason.

Silent wrongness is worse than a refusal: Lightning's weight averaging, for one, copies the module
before it is cut and would then average the weights of one stage into another, without any error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_diffpipe.errors import ConfigurationError


def refuse_unsupported(trainer: Any, strategy: Any) -> None:
    """Checks module, callbacks, precision and what has been made already.

    Args:
        trainer: The trainer being set up.
        strategy: The strategy, connected to the module.

    Raises:
        ConfigurationError: Something cannot work; says what, why and what to do instead.
    """
    module = strategy.lightning_module
    if not module.automatic_optimization:
        raise ConfigurationError(
            "manual optimization (automatic_optimization=False) cannot be pipelined: the schedule runs "
            "forward and backward of all microbatches itself. Return the loss from training_step"
        )
    if is_overridden("backward", module):
        raise ConfigurationError(
            f"{type(module).__name__}.backward is overridden, but the schedule has run every backward "
            "before Lightning would call it. Scale the loss in training_step instead"
        )
    for callback in trainer.callbacks:
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise ConfigurationError(
                f"{type(callback).__name__} copies the module before it is cut into stages and would "
                "average weights of different stages. Use lightning_diffpipe.EMA"
            )
    precision = strategy.precision_plugin
    if isinstance(precision, MixedPrecision) and precision.scaler is not None:
        raise ConfigurationError(
            "precision='16-mixed' needs one loss scale agreed by all stages, which is not supported; "
            "use precision='bf16-mixed' or '32-true'"
        )
    if trainer.state.fn == TrainerFn.FITTING and strategy.world_size > 1:
        _refuse_early_loader(trainer)


def _refuse_early_loader(trainer: Any) -> None:
    """Refuses a loader that was made while nobody knew which ranks shall see the same samples."""
    if trainer.fit_loop._combined_loader is not None:
        raise ConfigurationError(
            "the training data loader was made before the pipeline was planned, so ranks of one pipeline "
            "would train on different samples, and the numbers of batches and steps are too small. "
            "trainer.estimated_stepping_batches makes it: ask for that in configure_optimizers or "
            "on_fit_start, not in setup or configure_model"
        )


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Names arguments the strategy does not have.

    Raises:
        ConfigurationError: Always.
    """
    if "start_method" in arguments:
        raise ConfigurationError(
            f"start_method={arguments['start_method']!r} is not supported: spawned and forked processes "
            "return one stage only to the main process. Leave it out; processes are started by "
            "re-running your script, or by torchrun"
        )
    raise ConfigurationError(
        f"DiffPipeStrategy has no argument {', '.join(map(repr, arguments))}; see its docstring"
    )
