"""`diffpipe profile` and `diffpipe plan model=...`, in this process."""

from functools import partial

import pytest

from lightning_diffpipe import ModelProfile, PipelinePlan
from lightning_diffpipe.modules import on_paper
from lightning_diffpipe.modules.parts import built_in
from lightning_diffpipe.planning.profile import BackboneProfile, LayerProfile, Seconds
from tests import command
from tests.profiling.toys import tiny_configs


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    """Calls the command from an empty folder; returns its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    return partial(command.call, capsys, monkeypatch)


@pytest.fixture
def four_layers(monkeypatch):
    """Whatever is modelled has four equal layers."""
    second = Seconds.per_sample(1.0)
    layers = tuple(LayerProfile(name, second, second) for name in "abcd")
    backbones = (BackboneProfile("backbone", layers),)
    monkeypatch.setattr(on_paper, "modelled", lambda title, *_: ModelProfile(title, backbones))


@pytest.mark.slow
@pytest.mark.usefixtures("four_layers")
@pytest.mark.parametrize(
    ("settings", "device"),
    [
        (["cluster=8x_a100"], "a100"),
        (["cluster=2x8_a100"], "a100"),
        (["cluster=8x_h200"], "h200"),
        (["cluster=8x_h100"], "h100"),
        ([], "h100"),
        (["cluster=8x_h100", "model.device=t4"], "t4"),
    ],
)
def test_a_model_on_paper_is_timed_on_the_device_of_the_cluster(call, settings, device):
    """History: plans for A100 and H200 clusters were made of times of an H100."""
    code, out, err = call("plan", "model=sd21", "global_batch_size=16", "explain=false", *settings)
    assert code == 0, err
    assert f"modelled on {device};" in out


@pytest.mark.slow
def test_a_model_on_paper_is_modelled_planned_and_shown(call, monkeypatch, tmp_path):
    """A small one; recipes are planned with those that are well known."""
    monkeypatch.setattr(on_paper, "read_configs", lambda path: tiny_configs())
    code, out, _ = call(
        *("plan", "model=sd21", "model.device=a100", "cluster=8x_h100", "global_batch_size=64"),
        *("strategy.num_stages=4", "explain=false", "output=plan.json"),
    )
    assert code == 0
    assert out.startswith("sd21 at 64 in bfloat16, modelled on a100; sizes are exact")
    plan = PipelinePlan.from_json((tmp_path / "plan.json").read_text())
    assert (plan.num_stages, plan.options.global_batch_size) == (4, 64)
    assert plan.stages[-1].last_layer > 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "neither was given"),
        (["profile=p.json", "model=flux"], "both was given"),
        (["model=glyph_unet"], "this model can be measured"),
        (["model=flux", "model.device=b200"], "there is no device model 'b200'; choose one of t4"),
        (["model=flux", "model.path=flux3"], "there is no model 'flux3'"),
        (["model=flux", "cluster=9x_h100"], "8x_h100"),
    ],
)
def test_wrong_calls_are_refused_in_a_line(call, arguments, message):
    code, _, err = call("plan", "global_batch_size=8", *arguments)
    assert code == 2
    assert message in err


@pytest.mark.slow
@pytest.mark.skipif(not (built_in("glyphs") / "vae").exists(), reason="needs the built-in weights")
def test_a_model_is_profiled_and_planned(call, tmp_path):
    small = ["data.alphabets=[digits]", "data.faces=[sans]", "data.batch_size=4"]
    code, out, _ = call("profile", *small, "output=p.json", "budget_s=0.1", "progress=false")
    assert code == 0, out
    assert "layers of the path" in out
    profile = ModelProfile.from_json((tmp_path / "p.json").read_text())
    assert profile.name == "LatentDiffusion"
    assert {encoder.name for encoder in profile.encoders} == {"frozen vae", "frozen text_encoder"}
    code, out, _ = call("plan", "profile=p.json", "global_batch_size=8")
    assert code == 0
