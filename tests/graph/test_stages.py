"""The stages of a pipeline add up to the step: same loss, same gradients, whatever the cuts.

In float64, with NaN in every dummy and every foreign parameter; parameters that start at zero are moved.
"""

import contextlib
import random

import numpy as np
import pytest
import torch
from torch import library

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph.cut import cut, uncut
from lightning_diffpipe.graph.probe import fold, probe
from lightning_diffpipe.graph.view import StageView
from tests.graph.emulate import (
    SEED,
    check_split,
    check_stages,
    emulate,
    intercepted,
    randomise,
    reference,
    relative_error,
    shared_parameters,
)
from tests.graph.steps import (
    BUILDERS,
    Block,
    Sequential,
    Skips,
    Tied,
    Tower,
    Twice,
    build,
    image_batch,
    rows,
    step,
)
from tests.rows import row
from tests.zoo import in_double

# The others run in tests/runtime/test_loopback.py, too.
CUT_HERE = {"SDXL", "LoRA", "dropout"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n in CUT_HERE else row(n) for n in BUILDERS])
def test_latent_diffusion(name):
    with in_double():
        graph = check_stages(build(name), image_batch())
    assert any(graph.layers[i].name.startswith("vae") for i in graph.frozen)


def test_a_plain_sequential():
    graph = check_stages(Sequential().double(), rows().double(), mode="fake")
    assert not graph.seeded  # dropout between layers is glue: numbers as in the plain step


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_and_checkpointing_inside_layers(dropout, checkpointing):
    root = Tower().double()
    for block in root.blocks:
        block.dropout.p = dropout

    def run(module, batch):
        if not checkpointing:
            return module.training_step(batch, 0)
        x = batch.clone().requires_grad_()
        for block in module.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
        return x.pow(2).mean()

    graph = probe(root, run, rows().double(), max_share=1 / 4)
    assert bool(graph.seeded) == (dropout > 0)
    expected = reference(root, step, rows().double(), SEED, graph)
    check_split(root, (graph, [2, 4]), run, rows().double(), SEED, expected)


@pytest.mark.parametrize("max_share", [1 / 4, 1 / 32])
def test_layers_that_are_recomputed_run_again_in_the_backward(max_share):
    """Blocks, or the layers in them; gradients are those of dropout's numbers in the forward."""
    root, calls = Tower().double(), []
    for block in root.blocks:
        block.dropout.p = 0.3
    graph = probe(root, step, rows().double(), max_share=max_share)
    loss, expected = reference(root, step, rows().double(), SEED, graph)
    names = frozenset(
        name for name in graph.layer_names if name.startswith(("blocks.1", "blocks.3"))
    )
    folded, _ = fold(root, step, rows().double(), graph, [])
    for name in names:
        module = root.get_submodule(name)
        forward = module.forward
        module.forward = lambda x, name=name, forward=forward: calls.append(name) or forward(x)
    with intercepted(root) as interception:
        view = StageView(root, folded, uncut(folded), interception, recomputed=names)
        run = view.forward(lambda: step(root, rows().double()), seed=SEED)
        assert sorted(calls) == sorted(names)
        run.backward()
    assert sorted(calls) == sorted([*names, *names])
    assert float(run.loss) == loss
    got = {name: parameter.grad for name, parameter in root.named_parameters()}
    assert relative_error(expected, got)[0] < 1e-12


@pytest.mark.parametrize("mode", ["fake", "real"])
def test_random_numbers_of_python_and_numpy(mode):
    class Jitter(Block):
        def forward(self, x):
            return super().forward(x) * (1 + random.random())

    class Jitters(Tower):
        block = Jitter

        def training_step(self, batch, batch_idx):
            return self.run(batch * np.random.rand()).pow(2).mean() * random.random()

    root, batch = Jitters().double(), rows().double()
    graph = probe(root, step, batch, max_share=1 / 4, mode=mode)
    assert graph.host_random
    assert len(graph.seeded) == 6
    expected = reference(root, step, batch, SEED, graph)
    random.seed(99)
    check_split(root, (graph, [2, 4]), step, batch, SEED, expected)
    assert random.random() == random.Random(99).random()


def noisy_kernel(name, argument):
    """A kernel of one's own, which draws where neither the dispatcher nor a tag tells."""

    def kernel(x, p):
        return x * torch.rand(x.shape, dtype=x.dtype) if p else x.clone()

    schema = f"(Tensor x, float {argument}) -> Tensor"
    operator = library.custom_op(f"diffpipe_tests::{name}", kernel, mutates_args=(), schema=schema)
    operator.register_fake(lambda x, p: torch.empty_like(x))
    operator.register_autograd(lambda context, gradient: (gradient, None))
    return operator


KERNELS = {
    name: noisy_kernel(*name) for name in [("dropping", "dropout_p"), ("noising", "strength")]
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fake", "real"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize("draws", [True, False])
@pytest.mark.parametrize("asks", ["nothing", "one number of torch"])
def test_kernels_of_ones_own_draw_from_a_stream_of_their_layer_or_are_refused(
    mode, kernel, folds, draws, asks
):
    """Dropout of flash attention drew from the stream of the glue, on the stage that ran it only."""

    class Noisy(Block):
        def forward(self, x):
            if asks != "nothing":
                torch.rand(())
            return KERNELS[kernel](super().forward(x), 0.5 * draws)

    class Noisies(Tower):
        block = Noisy

        def training_step(self, batch, batch_idx):
            return (self.run(batch) * torch.rand_like(batch)).pow(2).mean()

    root, batch = Noisies().double(), rows().double()
    graph = probe(root, step, batch, max_share=1 / 4, mode=mode)
    is_seen = asks != "nothing" or (draws and (mode == "real" or kernel[1] == "dropout_p"))
    assert len(graph.seeded) == 6 * is_seen
    complaint = r"blocks\.0 draws random numbers on the host.*torch\.rand"
    refused = pytest.raises(GraphError, match=complaint)
    with refused if draws and not is_seen else contextlib.nullcontext():
        pieces = fold(root, step, batch, graph, [2, 4]) if folds else (graph, [2, 4])
        expected = reference(root, step, batch, SEED, graph)
        check_split(root, pieces, step, batch, SEED, expected)


@pytest.mark.slow
def test_results_do_not_depend_on_folding_when_layers_draw():
    """Folded blocks seed the layers inside them, so that masks are those of the fine graph."""
    with in_double():
        root = build("dropout")
        randomise(root)
        graph = probe(root, step, image_batch(), max_share=1 / 24, mode="real")
        folded, positions = fold(root, step, image_batch(), graph, [])
        loss, _ = reference(root, step, image_batch(), SEED, graph)
        again, _ = reference(root, step, image_batch(), SEED, folded)
    assert len(folded.layers) < len(graph.layers)
    assert sum(layer.num_seeds for layer in folded.layers) == len(
        [name for name in graph.layer_names if name in graph.seeded]
    )
    assert again == loss
    assert positions == ()


@pytest.mark.parametrize(
    ("tower", "position", "names"),
    [(Tied, 3, {"blocks.0.linear.weight"}), (Twice, 6, {n for n, _ in Twice().named_parameters()})],
)
def test_tied_weights_and_layers_called_twice_are_shared_between_stages(tower, position, names):
    graph = check_stages(tower().double(), rows().double(), max_share=1 / 30)
    assert shared_parameters(graph, cut(graph, [position])) == dict.fromkeys(names, (0, 1))


def test_long_skips_pass_through_the_stages_between():
    graph = check_stages(Skips().double(), rows().double(), max_share=1 / 4)
    stages = cut(graph, [1, 3, 5]).stages
    assert stages[2].received == ((0, 0), (1, 0), (2, 0))
    assert (0, 0) not in stages[2].needed
    assert (0, 0) in stages[2].sent


@pytest.mark.slow
def test_locked_parameters_get_no_gradient():
    with in_double():
        root = build("ControlNet with a locked U-Net")
        randomise(root)
        graph = probe(root, step, image_batch(), mode="real")
        _, got = emulate(root, graph, [len(graph.path) // 2], step, image_batch(), SEED)
    assert {name.split(".")[0] for name in got} == {"controlnet"}
    assert graph.trained == set(got)
