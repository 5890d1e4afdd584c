"""An optimizer, and learning rates that warm up, stay, and fall: the same for all built-in modules."""

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_diffpipe.errors import ConfigurationError, require_choice, require_number
from lightning_diffpipe.graph.versions import plain_tensors
from lightning_diffpipe.runtime.optimizer_offload import may_be_offloaded
from lightning_diffpipe.runtime.optimizer_sharding import may_be_divided, switches_weights

Decay = Literal["constant", "linear", "cosine", "cosine_with_restarts", "polynomial"]


@dataclass(frozen=True)
class Optimization:
    """Settings of a module's optimizer.

    Attributes:
        lr: Highest learning rate.
        betas: Averaging factors, of optimizers that take two.
        weight_decay: Weight decay, of optimizers that take it.
        warmup_steps: Steps in which the learning rate rises from zero.
        decay: Shape of the learning rate's decay at the end.
        decay_share: Share of all steps, at the end, in which it falls; 1 right after the warm-up.
        final_share: Learning rate of the last step, as a share of `lr`.
        num_cycles: Times that it falls, with `decay="cosine_with_restarts"`.
        power: Exponent of the remaining share of the decay, with `decay="polynomial"`.
        optimizer: A class, or a `partial` of one, whose arguments win over those above; None for torch's AdamW.
        groups: Other settings, by regular expressions, of parameters in whose names these are found, such as
            `{"text_encoder": {"lr": 1e-6}}`; the first one that is found counts.

    Raises:
        ConfigurationError: A value that cannot be, or that the optimizer does not take.
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.01
    warmup_steps: int = 100
    decay: Decay = "cosine"
    decay_share: float = 1.0
    final_share: float = 0.02
    num_cycles: int = 1
    power: float = 1.0
    optimizer: Callable[..., Optimizer] | None = None
    groups: Mapping[str, Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "warmup_steps", "decay_share", "final_share", "power"):
            require_number(name, getattr(self, name), 0)
        require_number("num_cycles", self.num_cycles, 1, whole=True)
        require_choice("decay", self.decay, get_args(Decay))
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigurationError(f"betas must be two numbers in [0, 1); got {self.betas}")
        groups = {
            f"groups {pattern!r}": further for pattern, further in (self.groups or {}).items()
        }
        for name, further in {"optimizer": {}, **groups}.items():
            tried = self._made([{"params": [nn.Parameter(torch.zeros(2, 2))], **further}], name)
            if unknown := further.keys() - tried.defaults:
                raise ConfigurationError(
                    f"{name}: {type(tried).__name__} has no {sorted(unknown)[0]!r}; it has "
                    + ", ".join(tried.defaults)
                )

    def _made(self, groups: list[dict[str, Any]], name: str = "optimizer") -> Optimizer:
        """Builds the optimizer; its errors begin with the name of the setting."""
        make = self.optimizer or torch.optim.AdamW
        cls, fixed = (make.func, make.keywords) if isinstance(make, partial) else (make, {})
        settings = {"lr": self.lr, "betas": tuple(self.betas), "weight_decay": self.weight_decay}
        free = inspect.signature(cls).parameters.keys() - fixed
        try:
            return make(groups, **{n: v for n, v in settings.items() if n in free})
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{name}: {error}") from error

    def state_bytes_factor(self) -> float:
        """Returns bytes of the optimizer's state for each byte of gradient, by a step of one matrix on the host.

        Adam's, if the optimizer cannot step there.

        Example:
            >>> Optimization(optimizer=partial(torch.optim.SGD, momentum=0.9)).state_bytes_factor()
            1.0
        """
        weight = nn.Parameter(torch.ones(512, 512))
        weight.grad = torch.ones_like(weight)
        optimizer = self._made([{"params": [weight]}])
        try:
            with torch.compiler.set_stance("force_eager"):
                if switches_weights(optimizer):
                    optimizer.train()
                optimizer.step()
        except (RuntimeError, NotImplementedError, AssertionError):  # made for GPUs alone
            return 2.0
        tensors = [each for each in optimizer.state[weight].values() if isinstance(each, Tensor)]
        num_bytes = sum(plain.nbytes for each in tensors for plain in plain_tensors(each))
        return round(num_bytes / weight.nbytes, 2)

    def may_be_shared(self) -> bool:
        """Returns whether ranks may share the optimizer's states, by steps of small parameters on the host."""
        return may_be_divided(self._tried())

    def may_be_offloaded(self) -> bool:
        """Returns whether the optimizer's states may be in host memory, likewise."""
        return may_be_offloaded(self._tried())

    def _tried(self) -> Optimizer:
        shapes = ((8, 8), (8,), (8, 8), (8,))
        return self._made([{"params": [nn.Parameter(torch.ones(shape)) for shape in shapes]}])

    def factor(self, step: int, num_steps: float) -> float:
        """Returns the learning rate, as a share of `lr`, after `step` of `num_steps` steps (inf if unknown)."""
        warmup = min(1.0, (step + 1) / max(self.warmup_steps, 1))
        if self.decay == "constant" or math.isinf(num_steps):
            return warmup
        decay_steps = max(1.0, self.decay_share * (num_steps - self.warmup_steps))
        done = min(1.0, max(0.0, 1 - (num_steps - step) / decay_steps))
        if self.decay in ("linear", "polynomial"):
            falling = (1 - done) ** (1 if self.decay == "linear" else self.power)
        else:
            cycles = self.num_cycles if self.decay == "cosine_with_restarts" else 1
            falling = (1 + math.cos(math.pi * (cycles * done % 1 if done < 1 else 1))) / 2
        return warmup * (self.final_share + (1 - self.final_share) * falling)

    def parameter_groups(self, module: nn.Module) -> list[dict[str, Any]]:
        """Returns the trained parameters, each in the first of `groups` whose pattern is in its name.

        Raises:
            ConfigurationError: Nothing is trained, or nothing that a pattern is found in.
        """
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not trained:
            raise ConfigurationError(f"{type(module).__name__} has no trainable parameter")
        groups = self.groups or {}
        members: dict[str, list[nn.Parameter]] = {pattern: [] for pattern in (*groups, "")}
        for name, parameter in trained.items():
            try:
                members[next(each for each in members if re.search(each, name))].append(parameter)
            except re.error as error:
                raise ConfigurationError(
                    f"groups: {error.pattern!r} is no regular expression: {error}"
                ) from error
        if unused := [pattern for pattern in groups if not members[pattern]]:
            raise ConfigurationError(
                f"groups: {unused[0]!r} is in the name of no parameter that is trained and in no group before; "
                f"names are such as {', '.join(list(trained)[:: max(1, len(trained) // 3)][:3])}"
            )
        return [
            {"params": parameters, **groups.get(pattern, {})}
            for pattern, parameters in members.items()
            if parameters
        ]

    def configure(self, module: L.LightningModule) -> dict[str, Any]:
        """Builds what `configure_optimizers` returns, over all trained parameters; raises as `parameter_groups`."""
        optimizer = self._made(self.parameter_groups(module))
        num_steps = module.trainer.estimated_stepping_batches
        if num_steps < 0:  # Lightning's max_steps for "no limit", with loaders without a length
            num_steps = math.inf
        # Outside of steps weights are the averages: for validation, samples, checkpoints.
        if switches_weights(optimizer):
            optimizer.register_step_post_hook(lambda stepped, *_: stepped.eval())
        factor: Callable[[int], float] = lambda step: self.factor(step, num_steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }
