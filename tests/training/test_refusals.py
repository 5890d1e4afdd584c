"""What cannot work on several stages is named before training."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from lightning_diffpipe import DiffPipeStrategy
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph.versions import Versions
from lightning_diffpipe.runtime.optimizer_states import updates_independently
from lightning_diffpipe.training.refusals import (
    refuse_cuda_graphs,
    refuse_optimizers,
    refuse_untrainable,
    refusing_norms_of_a_stage,
)


@pytest.mark.parametrize(
    ("argument", "hint"),
    [("num_stage", "did you mean 'num_stages'\\?"), ("zero", "it has busy_timeout_s, .*, verify$")],
)
def test_arguments_that_the_strategy_lacks_are_answered_with_those_it_has(argument, hint):
    """History: it sent to its docstring."""
    with pytest.raises(ConfigurationError, match=f"no argument '{argument}'; {hint}"):
        DiffPipeStrategy(**{argument: 2})


def members(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


class StepSize(torch.optim.SGD):
    """Finds a step size from all gradients, as D-Adaptation, DoG and prodigyopt do."""

    def step(self, closure=None):
        loss = closure()
        for group in self.param_groups:
            group["lr"] = 1e-3 / (1 + sum(p.grad.square().sum().item() for p in members(self)))
        super().step()
        return loss


class LooksAhead(torch.optim.SGD):
    """Takes gradients where those of all parameters lead to, as sharpness-aware optimizers do."""

    def __init__(self, parameters, base=torch.optim.AdamW):
        super().__init__(parameters)
        self.base_optimizer = base(self.param_groups)

    def step(self, closure=None):
        loss = closure()
        norm = sum(p.grad.square().sum() for p in members(self)).sqrt()
        before = [p.detach().clone() for p in members(self)]
        for p in members(self):
            p.data.add_(0.05 * p.grad / norm)
        closure()
        for p, value in zip(members(self), before, strict=True):
            p.data.copy_(value)
        self.base_optimizer.step()
        return loss


class Lookahead(torch.optim.SGD):
    """Holds another optimizer, and is as harmless as that one."""

    def __init__(self, parameters, base=torch.optim.AdamW):
        super().__init__(parameters)
        self.base_optimizer = base(self.param_groups)

    def step(self, closure=None):
        return self.base_optimizer.step(closure)


class SAM(torch.optim.SGD):
    """Has a name that others have given to another thing."""


class Lamb(torch.optim.AdamW):
    """Stands for timm's, whose trust ratios are those of single parameters, and whose clipping is not."""

    def __init__(self, parameters, max_grad_norm=1.0):
        super().__init__([{"params": parameters, "max_grad_norm": max_grad_norm}])

    def step(self, closure=None):
        loss = closure()
        if bound := self.param_groups[0]["max_grad_norm"]:
            nn.utils.clip_grad_norm_(members(self), bound)
        super().step()
        return loss


class Rounding(torch.optim.SGD):
    """Draws random numbers, as optimizers do that round bfloat16 up or down."""

    def step(self, closure=None):
        loss = super().step(closure)
        for p in members(self):
            p.data.add_(1e-3 * torch.rand_like(p))
        return loss


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torch.optim.LBFGS, "^LBFGS computes one step size.*AdamW.*num_stages=1"),
        (StepSize, "^StepSize computes one step size"),
        (LooksAhead, "^LooksAhead computes one step size"),
        (partial(Lookahead, base=StepSize), "^Lookahead computes one step size"),
        (Lamb, r"^Lamb\(max_grad_norm=1\.0\) .*Trainer\(gradient_clip_val=1\.0\)"),
    ],
)
@pytest.mark.parametrize("number", [1, 3])
def test_optimizers_that_need_all_gradients_are_refused_on_several_stages(make, reason, number):
    """History: every stage took a step size of its own, and copies of shared weights drifted apart."""
    with pytest.raises(ConfigurationError, match=reason):
        refuse_optimizers([make([nn.Parameter(torch.zeros(2, 2)) for _ in range(number)])])


def test_optimizers_that_treat_every_parameter_by_itself_are_not():
    """History: they were told by parts of their names."""
    parameters = [nn.Parameter(torch.zeros(2, 2))]
    ours = [Lookahead, partial(Lamb, max_grad_norm=None), SAM, Rounding]
    torchs = ("Adafactor", "AdamW", "SGD", "RMSprop", "Muon")  # Muon since 2.9
    plain = [getattr(torch.optim, name) for name in torchs if hasattr(torch.optim, name)]
    refuse_optimizers([make(parameters) for make in [*ours, *plain]])
    assert updates_independently(Rounding(parameters)) is None


def with_gradients(*shapes):
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters


def test_norms_over_the_gradients_of_a_stage_are_refused_however_they_were_imported():
    """History: every stage was scaled by its own norm, and copies of shared weights drifted apart."""
    ours, theirs, foreign = with_gradients(2, 3), with_gradients(4), nn.Parameter(torch.zeros(5))
    refused = pytest.raises(ConfigurationError, match=r"of 2 parameters.*gradient_clip_val=\.\.\.")
    with refusing_norms_of_a_stage(ours):
        for clip in (clip_grad_norm_, nn.utils.clip_grad_norm_):
            with refused:
                clip(iter([*ours, foreign]), 0.1)
        with refused:
            nn.utils.get_total_norm([parameter.grad for parameter in ours])
        with refused:
            grad_norm(nn.ParameterList(ours), 2)
        assert clip_grad_norm_(theirs, 1.0) == 2
        assert clip_grad_norm_(foreign, 1.0) == 0
        clip_grad_value_(ours, 0.5)
    assert grad_norm(nn.ParameterList(theirs), 2)["grad_2.0_norm_total"] == pytest.approx(1, 1e-5)
    assert clip_grad_norm_(ours, 1.0) == nn.utils.get_total_norm([torch.full((5,), 0.5)])


def test_layers_without_sizes_are_named():
    """History: "Can't access the shape of an uninitialized parameter or buffer", while weights were compared."""
    module = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    with pytest.raises(ConfigurationError, match=r"1\.weight has no shape yet.*run that once"):
        refuse_untrainable(module)


def test_scripted_modules_can_be_looked_into():
    """History: dictionaries of their own, which `|` does not join and `*` does not list, ended the run."""
    module = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(2, 2))))
    with pytest.raises(ConfigurationError, match=r"0 is compiled by torch\.jit.*block\.compile"):
        refuse_untrainable(module)
    versions = Versions(module, ["0.0.weight"], [])
    with torch.no_grad():
        module[0][0].weight.zero_()
    assert versions.changed()


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"mode": "reduce-overhead"}, True),
        ({"mode": "max-autotune"}, True),
        ({"options": {"triton.cudagraphs": True}}, True),
        ({"mode": "max-autotune-no-cudagraphs"}, False),
        ({"backend": "eager"}, False),
        ({}, False),
    ],
)
def test_blocks_that_write_over_their_outputs_are_refused(options, refused, whole):
    """History: with mode="reduce-overhead" a microbatch got the activations of another one on GPUs."""
    blocks = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if whole:
        blocks[1] = torch.compile(blocks[1], **options)
    else:
        blocks[1].compile(**options)
    match = r"^1 is compiled with CUDA graphs .* take 'max-autotune-no-cudagraphs'"
    with pytest.raises(ConfigurationError, match=match) if refused else nullcontext():
        refuse_cuda_graphs(blocks)
