"""Averaged weights (exponential moving average), where each rank averages only what it holds.

Denoisers sample better from averaged weights. Lightning's own averaging copies the whole module
before a strategy has divided it; here every rank averages the trained parameters that are resident
on it, under their fully qualified names. So nothing has to be copied, moved or agreed on, and a
checkpoint holds the same averages whichever strategy wrote it.

    average <- decay * average + (1 - decay) * weight,    decay = min(decay, (1 + n) / (10 + n))

after the n-th optimizer step. The averages take the place of the weights in validation and in
`averaged()`, which `SampleImages` uses.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph.placement import is_placeholder


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def _dtype_of_average(parameter: nn.Parameter) -> torch.dtype:
    # In half precision, small updates of an average would round to nothing.
    return torch.promote_types(parameter.dtype, torch.float32)


class EMA(L.Callback):
    """Averages the trained weights, exponentially over optimizer steps.

    Args:
        decay: Share of the old average kept at each optimizer step, once the run is long enough.

    Raises:
        ConfigurationError: `decay` is not in [0, 1).
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise ConfigurationError(f"decay must be in [0, 1), but is {decay}")
        self.decay = decay
        self.averages: dict[str, Tensor] = {}
        self._names: tuple[str, ...] = ()  # averaged, here or on another rank
        self._num_updates = 0
        self._last_step = 0
        self._restored: dict[str, Any] = {}
        self._weights: dict[str, Tensor] = {}  # in training, while the averages are in their place

    @property
    def state_key(self) -> str:
        """One EMA per trainer, whatever its decay, so that a run may go on with another one."""
        return "EMA"

    def bytes_factor(self, module: nn.Module) -> float:
        """Returns bytes of averages for each byte of a trained weight: 1 in float32, 2 in half precision.

        Example:
            >>> EMA().bytes_factor(nn.Linear(2, 2).bfloat16())
            2.0
        """
        trained = _trained(module).values()
        num_bytes = sum(p.numel() * _dtype_of_average(p).itemsize for p in trained)
        return num_bytes / max(sum(p.numel() * p.element_size() for p in trained), 1)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Forgets the averages of an earlier run: the module may be another one, or divided otherwise."""
        if stage == "fit":
            self.averages, self._names, self._num_updates = {}, (), 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Starts from the restored averages, or from the weights themselves."""
        self._last_step = trainer.global_step
        self._num_updates = self._restored.get("num_updates", 0)
        restored, trained = self._restored.get("averages", {}), _trained(pl_module)
        self._names = tuple(trained)
        is_resident = getattr(trainer.strategy, "is_resident", None)
        self.averages = {
            name: restored.get(name, parameter.detach()).to(
                parameter.device, _dtype_of_average(parameter), copy=True
            )
            for name, parameter in trained.items()
            if (is_resident(name) if is_resident else not is_placeholder(parameter))
        }
        self._restored = {}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Averages after each optimizer step; batches that only accumulate change nothing."""
        if trainer.global_step == self._last_step:
            return
        self._last_step = trainer.global_step
        decay = min(self.decay, (1 + self._num_updates) / (10 + self._num_updates))
        self._num_updates += 1
        if not self.averages:  # this rank's layers are frozen; of empty lists torch makes an error
            return
        weights = dict(pl_module.named_parameters())
        now = [weights[name].to(average.dtype) for name, average in self.averages.items()]
        torch._foreach_lerp_(list(self.averages.values()), now, 1 - decay)

    def _swap_in(self, module: nn.Module) -> None:
        weights = dict(module.named_parameters())
        # Of a module that is whole again this rank has averaged its own stage only.
        present = {name for name, weight in weights.items() if not is_placeholder(weight)}
        if missing := [n for n in self._names if n in present and n not in self.averages]:
            raise ConfigurationError(
                f"averages of {len(missing)} of {len(self._names)} weights, e.g. {missing[0]}, are on other ranks, "
                "so the module would be a mixture of averages and weights. Checkpoints saved while training "
                "(FinalCheckpoint, ModelCheckpoint) hold all of them: LatentDiffusion.from_checkpoint(path) takes "
                "them, and so does `diffpipe sample path=...`"
            )
        for name, average in self.averages.items():
            # Exchanging storage keeps the Parameter objects the optimizer knows.
            weight = weights[name]
            self._weights[name] = weight.data
            weight.data = average.to(weight.device, weight.dtype)

    def _swap_out(self, module: nn.Module) -> None:
        weights = dict(module.named_parameters())
        for name, data in self._weights.items():
            weights[name].data = data
        self._weights = {}

    @staticmethod
    @contextmanager
    def averaged_in(trainer: L.Trainer, module: nn.Module) -> Iterator[None]:
        """Puts the averages of a trainer's callback, if it has one, in the place of the weights; see `averaged`."""
        averages = [callback for callback in trainer.callbacks if isinstance(callback, EMA)]
        with averages[0].averaged(module) if averages else nullcontext():
            yield

    @contextmanager
    def averaged(self, module: nn.Module) -> Iterator[None]:
        """Context in which the module's weights are the averages.

        After a training in stages a rank has those of its own stage only; `from_checkpoint` has all.

        Raises:
            ConfigurationError: Some of the averages are on other ranks, but the weights are here.
        """
        if self._weights:  # validation is under way: they are in place already
            yield
            return
        self._swap_in(module)
        try:
            yield
        finally:
            self._swap_out(module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Validates the averages, within a training run."""
        # A later `trainer.validate` may have divided the module otherwise.
        if trainer.state.fn == TrainerFn.FITTING and not self._weights:
            self._swap_in(pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Goes back to the weights in training."""
        self._swap_out(pl_module)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Goes back to the weights in training also when a validation fails."""
        self._swap_out(pl_module)
        self._restored = {}

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Forgets averages that were read for a run that did not train, such as a validation."""
        self._restored = {}

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Completes the averages with those of the other ranks; every rank takes part."""
        gather = getattr(trainer.strategy, "gather_by_name", None)
        if gather is None or "callbacks" not in checkpoint or not self._names:
            return
        parameters, averages = dict(pl_module.named_parameters()), dict[str, Tensor]()
        for name in self._names:
            if name in self.averages:
                averages[name] = self.averages[name]
            else:  # on another rank: shape and dtype, no memory
                dtype = _dtype_of_average(parameters[name])
                averages[name] = torch.empty((), dtype=dtype).expand(parameters[name].shape)
        checkpoint["callbacks"][self.state_key]["averages"] = gather(averages)

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's averages by name, and how often they were updated."""
        return {"averages": dict(self.averages), "num_updates": self._num_updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the stored averages until training starts, when this rank's are known."""
        self._restored = state_dict
