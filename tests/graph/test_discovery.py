"""Hooks on modules: those that a step puts and leaves are refused; those that were there change gradients."""

import pytest
from torch import nn
from torch.nn.modules.module import (
    register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
)

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph.probe import probe
from tests.graph.steps import Block, Tower, rows, step


def nothing(*arguments):
    """A hook of whatever kind."""


class Hooks(Tower):
    """Puts a hook on a block in its step, in one of several ways; may have a note of it before.

    Args:
        put: Is called in the step.
        **noted: The note, if there is one from the start.
    """

    def __init__(self, put, **noted):
        super().__init__()
        self.put = put
        vars(self).update(noted)

    def training_step(self, batch, batch_idx):
        self.put(self)
        return self.run(batch).pow(2).mean()


def unless_noted(name):
    """Puts a hook where no note says that there is one."""

    def put(root):
        if not getattr(root, name, False):
            setattr(root, name, True)
            root.blocks[1].register_forward_hook(nothing)

    return put


def noting(value):
    """Puts a hook, and writes a note that nobody reads."""

    def put(root):
        root._hooked = value
        root.blocks[1].register_forward_hook(nothing)

    return put


def replace_hook(root):
    if root.handle is not None:
        root.handle.remove()
    root.handle = root.blocks[1].register_forward_hook(nothing)


REFUSED = {
    "always": (lambda root: root.blocks[1].register_forward_hook(nothing), {}),
    "before a block": (lambda root: root.blocks[1].register_forward_pre_hook(nothing), {}),
    "on gradients": (lambda root: root.blocks[1].register_full_backward_hook(nothing), {}),
    "before gradients": (lambda root: root.blocks[1].register_full_backward_pre_hook(nothing), {}),
    "with a note that was False": (unless_noted("_hooked"), {"_hooked": False}),
    "with a note that was None": (unless_noted("_hooked"), {"_hooked": None}),
    "with a public note": (unless_noted("hooked"), {}),
    "with a note that is not read": (noting(True), {}),
    "with a note that says no": (noting(False), {}),
    "in place of the last one": (replace_hook, {"handle": None}),
}


@pytest.mark.parametrize("way", REFUSED)
@pytest.mark.parametrize("mode", ["fake", "real"])
def test_hooks_that_a_step_leaves_on_modules_are_refused(way, mode):
    """History: a hook's private note that was False before was put back, so that losses were halved twice."""
    put, noted = REFUSED[way]
    with pytest.raises(GraphError, match=r"puts a hook on blocks\.1, .* once, or remove them"):
        probe(Hooks(put, **noted), step, rows(), max_share=1 / 4, mode=mode)


class OfItsClass(Hooks):
    _hooked = False


class InLayer(Tower):
    class Hooked(Block):
        put = unless_noted("_hooked")

        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x):
            self.put()
            return self.blocks[1](super().forward(x))

    def __init__(self):
        super().__init__()
        self.blocks[2] = self.Hooked()


ALLOWED = {
    "removed at once": lambda: Hooks(lambda root: root.blocks[1].register_forward_hook(nothing).remove()),
    # As models of transformers do, whose note is new when they put hooks.
    "once and for all": lambda: Hooks(unless_noted("_hooked")),
    "once, by a note of the class": lambda: OfItsClass(unless_noted("_hooked")),
    "inside of a layer": InLayer,
}  # fmt: skip


@pytest.mark.parametrize("way", ALLOWED)
@pytest.mark.parametrize("mode", ["fake", "real"])
def test_hooks_that_are_put_once_and_for_all_are_not(way, mode):
    root = ALLOWED[way]()
    graph = probe(root, step, rows(), max_share=1 / 4, mode=mode)
    again = probe(root, step, rows(), max_share=1 / 4, mode=mode)
    assert graph.layer_names == again.layer_names
    assert sum(len(module._forward_hooks) for module in root.modules()) <= 1
    assert not [name for _, name in graph.left if name == "_hooked"]


@pytest.mark.parametrize(
    "register", [register_module_full_backward_hook, register_module_full_backward_pre_hook]
)
def test_hooks_on_gradients_of_all_modules_are_seen(register):
    """History: halves of a backward both ran one, as if nothing looked at gradients."""
    assert not probe(Tower(), step, rows()).changes_gradients
    handle = register(nothing)
    try:
        assert probe(Tower(), step, rows()).changes_gradients
    finally:
        handle.remove()
    assert not probe(Tower(), step, rows()).changes_gradients
