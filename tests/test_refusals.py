"""What cannot work on several stages is named before training."""

from functools import partial

import pytest
import torch
from torch import nn

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.refusals import refuse_optimizers


class Prodigy(torch.optim.AdamW):
    """Stands for prodigyopt's, which finds one learning rate from all gradients."""


class Ours(Prodigy):
    """Somebody's variant of it."""


class DAdaptAdam(torch.optim.Adam):
    """Stands for dadaptation's."""


class SAM(torch.optim.SGD):
    """Sharpness-aware: holds the optimizer it leads."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.base_optimizer = torch.optim.AdamW(self.param_groups)


class Lookahead(torch.optim.SGD):
    """Holds another optimizer, too, and is as harmless as that one."""

    def __init__(self, parameters, base=torch.optim.AdamW):
        super().__init__(parameters)
        self.base_optimizer = base(self.param_groups)


class Lamb(torch.optim.AdamW):
    """Stands for timm's, whose trust ratios are those of single parameters, and whose clipping is not."""

    def __init__(self, parameters, max_grad_norm=1.0):
        super().__init__([{"params": parameters, "max_grad_norm": max_grad_norm}])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torch.optim.LBFGS, "^LBFGS computes one step size"),
        (Prodigy, "^Prodigy computes one step size.*AdamW.*num_stages=1"),
        (Ours, "^Ours computes one step size"),
        (DAdaptAdam, "^DAdaptAdam computes one step size"),
        (SAM, "^SAM computes one step size"),
        (partial(Lookahead, base=Prodigy), "^Prodigy computes one step size"),
        (Lamb, r"^Lamb\(max_grad_norm=1\.0\) .*Trainer\(gradient_clip_val=1\.0\)"),
    ],
)
def test_optimizers_that_need_all_gradients_are_refused_on_several_stages(make, reason):
    """History: every stage took a step size of its own, and copies of shared weights drifted apart."""
    with pytest.raises(ConfigurationError, match=reason):
        refuse_optimizers([make([nn.Parameter(torch.zeros(2, 2))])])


def test_optimizers_that_treat_every_parameter_by_itself_are_not():
    parameters = [nn.Parameter(torch.zeros(2, 2))]
    ours = [Lookahead, partial(Lamb, max_grad_norm=None)]
    torchs = ("Adafactor", "AdamW", "SGD", "RMSprop", "Muon")  # Muon since 2.9
    plain = [getattr(torch.optim, name) for name in torchs if hasattr(torch.optim, name)]
    refuse_optimizers([make(parameters) for make in [*ours, *plain]])
