"""What is remembered of a frozen layer is found again for the same layer only."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from torch import nn

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph.layer import TensorSpec
from lightning_diffpipe.graph.memo import LayerMemo, keys_of
from lightning_diffpipe.graph.versions import module_digest
from tests.graph.steps import small_clip, small_vae


class InMemory(dict):
    """Entries in a dict."""

    read, write = dict.get, dict.__setitem__


class Scaled(nn.Module):
    """Scales by plain attributes, which no `repr` shows."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.scale, self.act, self.sizes = 2.0, F.gelu, [1, 2]

    def forward(self, x):
        return self.scale * self.act(self.inner(x))


def layer_of(name, x):
    """A layer of one tensor, one row for each sample."""
    _, spec = pytree.tree_flatten(x)
    rows = TensorSpec.of(x, rows=1)
    return SimpleNamespace(index=0, name=name, argument_rows=(1,), outputs=(rows,), spec=spec)


def call(memo, name, module, x):
    return memo.call(layer_of(name, x), module, (x,), {}, lambda: module(x))


@torch.no_grad()
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_layer_whose_weights_change_is_computed(name):
    """History: the hash was taken once in a run, so that a teacher's first encodings were read for ever."""
    module, store, x = Scaled(), InMemory(), torch.randn(2, 3)
    memo = LayerMemo(store, frozenset({"a"}))
    call(memo, "a", module, x)
    moved = module.inner.weight
    moved.data = moved.data.clone()
    assert torch.equal(call(memo, "a", module, x), module(x))
    assert memo.found["a"] == 2, "what is only moved is found"
    getattr(module.inner, name).add_(1)
    with pytest.warns(UserWarning, match="weights of a were changed during training"):
        assert torch.equal(call(memo, "a", module, x), module(x))
    assert torch.equal(call(memo, "a", module, x), module(x))
    assert len(store) == memo.found["a"] == 2


@torch.no_grad()
def test_every_layer_is_verified():
    """History: two calls were verified in all, which were those of the layers called first."""
    module, x = Scaled(), torch.randn(2, 3)
    memo = LayerMemo(InMemory(), frozenset({"a", "b"}), num_verified=1)
    for name in "ab":
        call(memo, name, module, x)
    module.act = F.relu  # something that no hash was asked about again
    for name in "ab":
        with pytest.raises(GraphError, match=f"the stored output of {name} differs"):
            call(memo, name, module, x)


def changed(**attributes):
    torch.manual_seed(0)
    module = Scaled()
    vars(module).update(attributes)
    return module_digest(module)


def test_settings_that_no_repr_shows_are_part_of_the_hash():
    """History: an encoder with another scale or attention read what was stored of the old one."""
    same = changed()
    assert changed() == same
    assert changed(name_or_path="elsewhere") == same
    assert changed(forward=object()) == same, "a wrapper around a method"
    for other in ({"scale": 3.0}, {"act": F.relu}, {"sizes": [2, 1]}, {"training": False}):
        assert changed(**other) != same, other


def test_code_and_the_version_of_its_library_are_part_of_the_hash(monkeypatch):
    module = Scaled()
    before = module_digest(module)
    monkeypatch.setattr("inspect.getsource", lambda code: "def forward(self, x): return x")
    assert module_digest(module) != before
    clip = small_clip()
    before = module_digest(clip)
    monkeypatch.setattr("transformers.__version__", "0.0.1")
    assert module_digest(clip) != before


def test_configs_and_attention_are_part_of_the_hash():
    """History: the config of a transformers model is no `Mapping` and was left out."""
    clip, vae = small_clip(), small_vae()
    before = module_digest(clip)
    clip.config.layer_norm_eps = 1e-3
    assert module_digest(clip) != before
    vae.set_attn_processor(AttnProcessor2_0())
    before = module_digest(vae)
    vae.set_attn_processor(AttnProcessor())
    assert module_digest(vae) != before


def test_constants_that_read_alike_in_a_row_differ():
    """History: (1, 12) and (11, 2) were hashed alike."""
    x = torch.zeros(1, 3)
    layer = SimpleNamespace(name="a", argument_rows=(1, None, None))
    first, second = (keys_of(layer, "", (x, *pair), {}) for pair in ((1, 12), (11, 2)))
    assert first != second


@torch.no_grad()
def test_a_buffer_set_in_validation_counts_as_changed():
    """History: an inference tensor has no version to ask for, and the next step ended in an error."""
    module, memo, x = (
        nn.BatchNorm1d(3).eval(),
        LayerMemo(InMemory(), frozenset({"norm"})),
        torch.ones(2, 3),
    )
    call(memo, "norm", module, x)
    with torch.inference_mode():
        module.running_mean = torch.ones(3)
    with pytest.warns(UserWarning, match="weights of norm were changed"):
        assert torch.equal(call(memo, "norm", module, x), module(x))
