"""Optimizers that libraries lack in a form that stages can use: D-Adaptation, Prodigy, and Muon next to AdamW.

The first two find one step size from two sums over all parameters. A rank of a pipeline has those of its own stage,
so sums of all ranks are added before it is computed (`sum_over_ranks`, which the strategy calls). The host reads
two numbers a step.

Sources:
    D-Adaptation: Defazio & Mishchenko (2023), https://arxiv.org/abs/2301.07733; settings as of dadaptation.
    Prodigy: Mishchenko & Defazio (2023), https://arxiv.org/abs/2306.06101; settings have the names of prodigyopt.
    Muon: Jordan et al. (2024), https://kellerjordan.github.io/posts/muon/
"""

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lightning_diffpipe.errors import ConfigurationError, require_number


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
        """Updates a parameter, after weight decay."""
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
