"""Optimizers beside those of libraries, and what settings make of a module's parameters."""

import math
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import hydra
import pytest
import torch
from diffusers.optimization import get_scheduler
from omegaconf import OmegaConf
from torch import nn

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.modules import DAdaptAdam, Muon, Optimization, Prodigy

CONF = Path(__file__).parents[2] / "conf" / "optimizer"


def trained(make, num_steps, groups=None, dtype=torch.float64):
    """Weights after every step of a small regression, and the optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    x, y = torch.randn(16, 4, dtype=dtype), torch.randn(16, 3, dtype=dtype)
    optimizer = make(groups(model) if groups else list(model.parameters()))
    seen = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        seen.append(torch.cat([p.detach().flatten() for p in model.parameters()]).clone())
    return seen, optimizer


@pytest.mark.skipif(not find_spec("prodigyopt"), reason="needs prodigyopt")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weight_decay": 0.1, "betas": (0.9, 0.99)},
        {"use_bias_correction": True, "d_coef": 2.0},
        {"safeguard_warmup": True, "growth_rate": 1.3, "beta3": 0.9},
    ],
)
def test_prodigy_is_that_of_its_authors(settings):
    import prodigyopt

    ours, optimizer = trained(lambda p: Prodigy(p, **settings), 60)
    theirs, other = trained(lambda p: prodigyopt.Prodigy(p, **settings), 60)
    assert optimizer.param_groups[0]["d"] == pytest.approx(other.param_groups[0]["d"], rel=1e-9)
    assert optimizer.param_groups[0]["d"] > 1e-3
    torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), rtol=1e-9, atol=1e-10)


DADAPT = [
    {},
    {"weight_decay": 0.1, "betas": (0.9, 0.99)},
    {"use_bias_correction": True, "growth_rate": 1.3},
]


@pytest.mark.skipif(not find_spec("dadaptation"), reason="needs dadaptation")
@pytest.mark.parametrize("settings", DADAPT)
def test_d_adaptation_is_that_of_its_authors(settings):
    import dadaptation

    ours, optimizer = trained(lambda p: DAdaptAdam(p, **settings), 60)
    theirs, other = trained(lambda p: dadaptation.DAdaptAdam(p, decouple=True, **settings), 60)
    assert optimizer.param_groups[0]["d"] == pytest.approx(other.param_groups[0]["d"], rel=1e-9)
    torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("settings", DADAPT)
def test_d_adaptation_is_that_of_one_vector(settings):
    """Over one vector of all weights, of a quadratic function."""
    decay, growth = settings.get("weight_decay", 0.0), settings.get("growth_rate", math.inf)
    beta1, beta2 = settings.get("betas", (0.9, 0.999))
    matrix = torch.randn(12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gradient_at = lambda x: matrix.T @ (matrix @ x - 1)
    x, d, r, m, v, s = torch.ones(12, dtype=torch.float64), 1e-6, 0.0, *[0 * matrix[0]] * 3
    parts = [nn.Parameter(x[:5].clone()), nn.Parameter(x[5:].clone())]
    optimizer = DAdaptAdam([{"params": parts[:1]}, {"params": parts[1:]}], **settings)
    for k in range(60):
        g, rate = gradient_at(x), d
        if settings.get("use_bias_correction"):
            rate *= math.sqrt(1 - beta2 ** (k + 1)) / (1 - beta1 ** (k + 1))
        beta3 = math.sqrt(beta2)
        r = beta3 * r + (1 - beta3) * rate * (g @ (s / (v.sqrt() + 1e-8))).item()
        m = beta1 * m + (1 - beta1) * rate * g
        v = beta2 * v + (1 - beta2) * g * g
        s = beta3 * s + (1 - beta3) * rate * g
        d = max(d, min(r / ((1 - beta3) * s.abs().sum().item()), d * growth))
        x = x - decay * rate * x - m / (v.sqrt() + 1e-8)
        whole = gradient_at(torch.cat([p.detach() for p in parts]))
        parts[0].grad, parts[1].grad = whole[:5], whole[5:]
        optimizer.step()
        torch.testing.assert_close(torch.cat(list(parts)), x, rtol=1e-9, atol=1e-12)
    assert optimizer.param_groups[1]["d"] == pytest.approx(d, rel=1e-9)
    assert d > 3e-6


@pytest.mark.parametrize("optimizer", [Prodigy, DAdaptAdam])
def test_a_step_size_is_found_that_learns(optimizer):
    _, found = trained(optimizer, 200)
    assert 1e-3 < found.param_groups[0]["d"] < 1


def groups_of(model):
    """The two layers, of which one has less decay and the other a lower rate."""
    first, last = model[0], model[2]
    return [
        {"params": list(first.parameters()), "weight_decay": 0.0},
        {"params": list(last.parameters()), "lr": 1e-3},
    ]


def test_muon_is_torchs_for_matrices_and_adamw_for_the_rest():
    def both(groups):
        """Two optimizers of torch."""
        matrices, rest = (
            [{**g, "params": [p for p in g["params"] if (p.ndim == 2) == of]} for g in groups]
            for of in (True, False)
        )
        parts = (
            torch.optim.Muon(matrices, 1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, 1e-2, betas=(0.9, 0.95), weight_decay=0.1),
        )

        class Both:
            zero_grad = staticmethod(lambda: [part.zero_grad() for part in parts])
            step = staticmethod(lambda: [part.step() for part in parts])

        return Both

    expected, _ = trained(both, 5, groups_of)
    found, optimizer = trained(lambda p: Muon(p, lr=1e-2, weight_decay=0.1), 5, groups_of)
    assert all(map(torch.equal, found, expected))
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-2, 1e-3, 1e-3]


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("adamw", 2.0),
        ("adafactor", 0.0),
        ("prodigy", 4.0),
        ("dadapt_adam", 3.0),
        ("muon", 1.0),
        ("sgd", 1.0),
        ("lion", 1.0),
        ("schedule_free", 2.0),
        ("adamw_8bit", 0.52),
    ],
)
def test_memory_is_planned_for_the_state_that_an_optimizer_has(name, factor):
    config = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    made = config.pop("optimizer", None)
    if made and find_spec(made["_target_"].partition(".")[0]) is None:
        pytest.skip(f"needs {made['_target_']}")
    optimizer = made and hydra.utils.instantiate(made, _convert_="all")
    optimization = Optimization(optimizer=optimizer, **config)
    assert optimization.state_bytes_factor() == pytest.approx(factor, abs=0.02)


def parameters_by_rate(groups):
    return {(g.get("lr"), g.get("weight_decay")): len(g["params"]) for g in groups}


def test_groups_are_found_in_names_the_first_one_counting():
    model = nn.ModuleDict({"text_encoder": nn.Linear(2, 2), "unet": nn.Linear(2, 2)})
    model["unet"].weight.requires_grad_(False)
    groups = {"text_encoder.*weight": {"lr": 1e-6}, "bias$": {"weight_decay": 0.0}}
    found = Optimization(groups=groups).parameter_groups(model)
    assert parameters_by_rate(found) == {(1e-6, None): 1, (None, 0.0): 2}
    model["unet"].weight.requires_grad_(True)
    found = Optimization(groups=groups).parameter_groups(model)
    assert parameters_by_rate(found) == {(1e-6, None): 1, (None, 0.0): 2, (None, None): 1}
    with pytest.raises(
        ConfigurationError, match=r"groups: 'unett' is in the name of no parameter.*text_encoder"
    ):
        Optimization(groups={"unett": {"lr": 1.0}}).parameter_groups(model)
    with pytest.raises(ConfigurationError, match=r"groups: '\(' is no regular expression"):
        Optimization(groups={"(": {"lr": 1.0}}).parameter_groups(model)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"groups": {"unet": {"learning_rate": 1e-5}}}, "groups 'unet': AdamW has no 'learning_rate'; it has lr"),
        ({"optimizer": partial(torch.optim.SGD, momentum=-1)}, "optimizer: Invalid momentum value: -1"),
        ({"optimizer": partial(torch.optim.SGD, betas=3)}, "optimizer: .*unexpected keyword argument 'betas'"),
        ({"optimizer": Prodigy, "lr": 1e-4}, r"one learning rate.*got lr=0\.0001: take lr=1"),
        ({"optimizer": Prodigy, "lr": 1.0, "groups": {"a": {"lr": 0.5}}}, r"got lr=0\.5 beside 1\.0"),
        ({"decay": "exponential"}, "decay='exponential'; choose constant.*polynomial"),
        ({"num_cycles": 0}, "num_cycles must be"),
    ],
)  # fmt: skip
def test_wrong_settings_are_named_when_they_are_given(settings, reason):
    with pytest.raises(ConfigurationError, match=reason):
        Optimization(**settings)


@pytest.mark.parametrize("num_cycles", [1, 3])
@pytest.mark.parametrize(
    "decay", ["constant", "linear", "cosine", "cosine_with_restarts", "polynomial"]
)
def test_learning_rates_are_those_of_diffusers_schedules(decay, num_cycles):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    name = "constant_with_warmup" if decay == "constant" else decay
    expected = get_scheduler(name, optimizer, None, 8, 40, num_cycles, power=2.0).lr_lambdas[0]
    ours = Optimization(
        warmup_steps=8, decay=decay, final_share=0.0, num_cycles=num_cycles, power=2.0
    )
    for step in range(8, 40):
        assert ours.factor(step, 40) == pytest.approx(expected(step), abs=1e-6)
    assert ours.factor(40, 40) == (decay == "constant")


class ThreeBetas(torch.optim.SGD):
    def __init__(self, params, lr=1.0, betas=(0.98, 0.92, 0.99)):
        super().__init__(params, lr)
        self.betas = betas


def test_an_optimizer_of_three_betas_keeps_its_own():
    """History: those of Adam were given to Adan, which ended in an IndexError of its own."""
    module = nn.Linear(2, 2)
    made = Optimization(optimizer=ThreeBetas)._made([{"params": [module.weight]}])
    assert made.betas == (0.98, 0.92, 0.99)
