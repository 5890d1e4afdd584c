"""Optimization of all built-in modules: an optimizer, and learning rates that warm up, stay, and fall.

Some optimizers are here that libraries lack in a form that stages can use. D-Adaptation and Prodigy find one step
size from two sums over all parameters. A rank of a pipeline has those of its own stage, so sums of all ranks are
added before it is computed (`sum_over_ranks`, which the strategy calls). The host reads two numbers a step.

Sources:
    D-Adaptation: Defazio & Mishchenko (2023), https://arxiv.org/abs/2301.07733; settings as of dadaptation.
    Prodigy: Mishchenko & Defazio (2023), https://arxiv.org/abs/2306.06101; settings have the names of prodigyopt.
    Muon: Jordan et al. (2024), https://kellerjordan.github.io/posts/muon/
"""

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lightning_diffpipe.errors import ConfigurationError, require_choice, require_number
from lightning_diffpipe.graph.versions import plain_tensors
from lightning_diffpipe.runtime.optimizer_states import (
    may_be_divided,
    may_be_offloaded,
    switches_weights,
)

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
        make = self.optimizer or AdamW
        cls, fixed = (make.func, make.keywords) if isinstance(make, partial) else (make, {})
        settings = {"lr": self.lr, "betas": tuple(self.betas), "weight_decay": self.weight_decay}
        takes = {n: p.default for n, p in inspect.signature(cls).parameters.items()}
        free = takes.keys() - fixed
        if isinstance(takes.get("betas"), tuple) and len(takes["betas"]) != 2:
            free -= {"betas"}
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
            optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.eval())
        factor: Callable[[int], float] = lambda step: self.factor(step, num_steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


# ------------------------------------------------------------------------------------ optimizers


def _loss_of(closure: Callable[[], float] | None) -> float | None:
    """Calls the closure that computes gradients, if an optimizer is given one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _sum_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _sum(values: Tensor) -> Tensor:
    return values.sum(dtype=_sum_dtype(values.device))


class DAdaptAdam(Optimizer):
    """Adam with decoupled weight decay and the step size of D-Adaptation.

    It grows to what the distance to the solution asks for, which two sums over all parameters estimate.

    Args:
        params: As of any optimizer; groups have one learning rate, or 0.
        lr: A factor of the step size that is found; 1 unless training is unstable.
        betas: Averaging factors of gradients and of their squares.
        eps: Added to the root of the squares.
        weight_decay: Decoupled weight decay.
        use_bias_correction: Scale as Adam does in its first steps.
        d0: First estimate of the step size.
        growth_rate: Most that the estimate grows by in a step.

    Raises:
        ConfigurationError: A learning rate that is one of Adam's, or several.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        use_bias_correction: bool = False,
        d0: float = 1e-6,
        growth_rate: float = math.inf,
    ) -> None:
        require_number("d0", d0, above=0)
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        settings |= {"use_bias_correction": use_bias_correction, "growth_rate": growth_rate}
        estimate = {"d0": d0, "d": d0, "d_numerator": 0.0, "k": 0}
        super().__init__(params, settings | estimate)
        for group in self.param_groups:
            if group["lr"] not in (0, lr) or 0 < lr < 1e-2:
                raise ConfigurationError(
                    f"{type(self).__name__} finds one learning rate for all parameters, of which lr is a factor; "
                    f"got lr={group['lr']}{f' beside {lr}' if group['lr'] != lr else ''}: take lr=1"
                )
        self._counted: Collection[int] | None = None
        self._reduce: Callable[[Tensor], Tensor] | None = None

    def sum_over_ranks(
        self, counted: Iterable[nn.Parameter], reduce: Callable[[Tensor], Tensor]
    ) -> None:
        """Sums over ranks by `reduce` from now on; no other rank counts the parameters `counted`."""
        self._counted, self._reduce = {id(p) for p in counted}, reduce

    def _new_state(self, p: Tensor) -> dict[str, Tensor]:
        return {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq", "s")}

    def _accumulate(self, group: Mapping[str, Any], p: Tensor, rate: float) -> list[Tensor]:
        """Updates the state of a parameter by its gradient; returns what it adds to numerator and denominator."""
        state, gradient, (beta1, beta2) = self.state[p], p.grad, group["betas"]
        scaled = state["s"] / state["exp_avg_sq"].sqrt().add_(group["eps"])
        numerator = rate * _sum(gradient * scaled)
        state["exp_avg"].mul_(beta1).add_(gradient, alpha=rate * (1 - beta1))
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        beta3 = math.sqrt(beta2)
        state["s"].mul_(beta3).add_(gradient, alpha=rate * (1 - beta3))
        return [numerator, _sum(state["s"].abs())]

    def _estimated(
        self, group: Mapping[str, Any], numerator: float, denominator: float
    ) -> dict[str, float]:
        """Returns the values that groups keep after a step: step size `d`, numerator, and further ones."""
        beta3 = math.sqrt(group["betas"][1])
        numerator = beta3 * group["d_numerator"] + (1 - beta3) * numerator
        d, estimate = group["d"], numerator / ((1 - beta3) * denominator)
        return {"d": max(d, min(estimate, d * group["growth_rate"])), "d_numerator": numerator}

    def _update(self, group: Mapping[str, Any], p: Tensor, rate: float) -> None:
        state = self.state[p]
        p.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-1)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Estimates the distance to the solution, `d`, which scales the learning rate, and makes a step of Adam.

        A collective call with `sum_over_ranks`. Parameters without a gradient stay as they are.
        """
        loss = _loss_of(closure)
        first = self.param_groups[0]
        rate = first["d"] * max(group["lr"] for group in self.param_groups)
        if first["use_bias_correction"]:
            correction1, correction2 = (1 - beta ** (first["k"] + 1) for beta in first["betas"])
            rate *= math.sqrt(correction2) / correction1
        updated = [
            (group, p) for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        device = updated[0][1].device if updated else torch.device("cpu")
        sums = torch.zeros(2, dtype=_sum_dtype(device), device=device)
        for group, p in updated:
            if not self.state[p]:
                self.state[p].update(self._new_state(p))
            if group["lr"] == 0:
                continue
            added = torch.stack(self._accumulate(group, p, rate))
            if self._counted is None or id(p) in self._counted:
                sums += added
        if self._reduce is not None:
            sums = self._reduce(sums)
        numerator, denominator = sums.tolist()
        if denominator == 0:  # no gradient is anything but zero
            return loss
        if rate > 0:
            estimate = self._estimated(first, numerator, denominator)
            for group in self.param_groups:
                group.update(estimate)
        for group, p in updated:
            p.mul_(1 - group["weight_decay"] * rate)
            self._update(group, p, rate)
        for group in self.param_groups:
            group["k"] += 1
        return loss


class Prodigy(DAdaptAdam):
    """Prodigy, whose estimates grow faster than those of D-Adaptation.

    Args are those of `DAdaptAdam`, and:
        beta3: Averaging factor of the two sums; None for the square root of the second of `betas`.
        eps: Added to the root of the squares, times the step size.
        safeguard_warmup: Leave the learning rate out of the denominator, for long warm-ups.
        d_coef: Factor of the estimates; the setting for larger or smaller steps.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        beta3: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        use_bias_correction: bool = False,
        safeguard_warmup: bool = False,
        d0: float = 1e-6,
        d_coef: float = 1.0,
        growth_rate: float = math.inf,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, use_bias_correction, d0, growth_rate)
        beta3 = math.sqrt(betas[1]) if beta3 is None else beta3
        further = {"beta3": beta3, "d_coef": d_coef, "safeguard_warmup": safeguard_warmup}
        self.defaults |= further | {"d_max": d0}
        for group in self.param_groups:
            group |= self.defaults | group

    def _new_state(self, p: Tensor) -> dict[str, Tensor]:
        return super()._new_state(p) | {"p0": p.clone()}

    def _accumulate(self, group: Mapping[str, Any], p: Tensor, rate: float) -> list[Tensor]:
        state, gradient, d = self.state[p], p.grad, group["d"]
        beta1, beta2 = group["betas"]
        towards_solution = _sum(gradient * (state["p0"] - p))
        state["exp_avg"].mul_(beta1).add_(gradient, alpha=d * (1 - beta1))
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=d * d * (1 - beta2))
        s_rate = d / group["d0"] * (d if group["safeguard_warmup"] else rate)
        state["s"].mul_(group["beta3"]).add_(gradient, alpha=s_rate)
        return [d / group["d0"] * rate * towards_solution, _sum(state["s"].abs())]

    def _estimated(
        self, group: Mapping[str, Any], numerator: float, denominator: float
    ) -> dict[str, float]:
        numerator += group["beta3"] * group["d_numerator"]
        d, estimate = group["d"], group["d_coef"] * numerator / denominator
        d_max = max(group["d_max"], estimate)
        first = max(d, estimate) if d == group["d0"] else d
        d = min(d_max, first * group["growth_rate"])
        return {"d": d, "d_max": d_max, "d_numerator": numerator}

    def _update(self, group: Mapping[str, Any], p: Tensor, rate: float) -> None:
        state = self.state[p]
        spread = state["exp_avg_sq"].sqrt().add_(group["d"] * group["eps"])
        p.addcdiv_(state["exp_avg"], spread, value=-rate)


class Muon(Optimizer):
    """torch's Muon for matrices, and its AdamW for all other tensors, under one learning rate.

    Each group of parameters becomes up to two.

    Args:
        params: As of any optimizer.
        lr: Learning rate of both: steps of matrices have the size of AdamW's (`match_rms_adamw`).
        weight_decay: Weight decay of both.
        momentum: Muon's.
        ns_steps: Muon's steps to an orthogonal matrix.
        betas: AdamW's.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        self._parts: list[Optimizer] = []
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        defaults |= {"ns_steps": ns_steps, "betas": betas, "adjust_lr_fn": "match_rms_adamw"}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group for its matrices, and one for the rest, as far as there are some."""
        group = {**self.defaults, **param_group}
        params = group.pop("params")
        params = [params] if isinstance(params, Tensor) else list(params)
        for kind in (torch.optim.Muon, AdamW):
            of_kind = [p for p in params if (p.ndim == 2) == (kind is not AdamW)]
            parameters = inspect.signature(kind).parameters
            if of_kind:
                part = kind(of_kind, **{n: v for n, v in group.items() if n in parameters})
                self._parts.append(part)
                super().add_param_group(part.param_groups[0])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates all parameters that have a gradient."""
        loss = _loss_of(closure)
        # `load_state_dict` makes both again.
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.state, part.param_groups = self.state, [group]
            part.step()
        return loss
