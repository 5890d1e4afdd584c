"""Standing between a step and its modules without being noticed."""

import contextlib
import copy
import gc
import inspect
import pickle
import weakref

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_diffpipe.errors import ForeignLayerError, GraphError
from lightning_diffpipe.graph.cut import cut, uncut
from lightning_diffpipe.graph.interception import Interception, generator_name
from lightning_diffpipe.graph.placement import place_parameters
from lightning_diffpipe.graph.probe import fold, probe
from lightning_diffpipe.graph.view import StageView
from tests.graph.emulate import intercepted, reference
from tests.graph.steps import Block, Tower, rows, step


class Noisy(Tower):
    def training_step(self, batch, batch_idx):
        return self.run(batch + torch.randn_like(batch)).pow(2).mean()


def coarse(root, run=step):
    return probe(root, run, rows(), max_share=1 / 4)


def stage_view(root, graph, interception, positions=(), stage=0):
    return StageView(root, graph, cut(graph, positions).stages[stage], interception)


def check_refused(root, message, run=step, change=lambda: None, x=None, **stage):
    """A run of the step that is not what was probed, of a module that was changed since perhaps."""
    graph = coarse(root)
    change()
    with intercepted(root) as interception:
        view = stage_view(root, graph, interception, **stage)
        with pytest.raises(GraphError, match=message):
            view.forward(lambda: run(root, rows() if x is None else x), seed=1)


def test_a_module_looks_the_same_with_and_without():
    root = Noisy()
    keys, signature = list(root.state_dict()), inspect.signature(root.blocks[0].forward)
    x = rows()
    expected = root.run(x)
    with intercepted(root) as interception:
        interception.watch({f"blocks.{i}" for i in range(6)})
        assert list(root.state_dict()) == keys
        assert inspect.signature(root.blocks[0].forward) == signature
        assert torch.equal(root.run(x), expected)
    assert "forward" not in root.blocks[0].__dict__
    assert "log" not in root.__dict__


def test_copies_and_pickles_of_a_module_are_independent():
    """The forward of a copied wrapper would call the layers of the original."""
    root = Noisy()
    with intercepted(root) as interception:
        interception.watch({"blocks.0"})
        duplicate = copy.deepcopy(root.blocks[0])
        again = pickle.loads(pickle.dumps(root.blocks[0]))
    with torch.no_grad():
        root.blocks[0].linear.weight.zero_()
    for other in (duplicate, again):
        assert not torch.equal(other(rows()), root.blocks[0](rows()))
        assert other.forward.__self__ is other


def test_a_second_probe_sees_through_the_wrappers():
    root = Noisy()
    graph = coarse(root)
    with intercepted(root) as interception:
        interception.watch(graph.site_names)
        assert coarse(root) == graph
        assert probe(root, step, rows(), max_share=1 / 4, mode="real") == graph


def test_random_numbers_outside_a_step_do_not_notice_it():
    root = Noisy()
    graph = coarse(root)
    with intercepted(root) as interception:
        view = stage_view(root, graph, interception)
        torch.manual_seed(3)
        run = view.forward(lambda: step(root, rows()), seed=1)
        run.backward()
        assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(3)))
        torch.manual_seed(1)
    assert torch.equal(run.loss, step(root, rows()))


def test_foreign_layers_outside_a_step_name_their_owner():
    root = Noisy()
    with intercepted(root) as interception:
        here = {n for n, _ in root.named_parameters() if not n.startswith("blocks.3")}
        gone = place_parameters(root, here, "cpu")
        interception.refuse(dict.fromkeys(gone, "stage 1 (rank 1)"))
        root.blocks[2](rows())
        with pytest.raises(
            ForeignLayerError, match=r"blocks\.3\.linear .* live on stage 1 \(rank 1\)"
        ):
            root.run(rows())


class Skips(Tower):
    skip = False

    def training_step(self, batch, batch_idx):
        for block in self.blocks[1:] if self.skip else self.blocks:
            batch = block(batch)
        return batch.pow(2).mean()


def test_another_way_through_the_step_is_refused():
    root, message = Skips(), r"calls blocks\.1 as layer call 0, where blocks\.0 was to come"
    check_refused(root, message, change=lambda: setattr(root, "skip", True))


@pytest.mark.parametrize(
    ("message", "run"),
    [
        ("ended after 1 layer calls", {"run": lambda root, x: root.blocks[0](x), "positions": [3]}),
        (r"output 0 of blocks\.0 is torch.float32 \(3, 16\), the probe", {"x": rows(3)}),
        (r"stage 1 did not receive output 0 of blocks\.1", {"positions": [2], "stage": 1}),
    ],
)
def test_a_run_that_is_not_what_was_probed_is_refused(message, run):
    check_refused(Noisy(), message, **run)


def test_constants_that_vary_are_refused_where_they_are_made():
    class Counts(Block):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x), self.calls

    class Counted(Tower):
        block = Counts

        def training_step(self, batch, batch_idx):
            for block in self.blocks:
                batch, n = block(batch)
                batch = batch * n
            return batch.pow(2).mean()

    root, message = Counted(), r"output 1 of blocks\.0 is 1, the probe saw 2"
    check_refused(root, message, change=lambda: setattr(root.blocks[0], "calls", 0))


def test_unfreezing_parameters_later_is_refused():
    class Half(Tower):
        def __init__(self):
            super().__init__()
            self.blocks[0].requires_grad_(False)

    root = Half()
    graph = coarse(root)
    root.blocks[0].requires_grad_(True)
    with intercepted(root) as interception:
        view = StageView(root, graph, cut(graph, []).frozen, interception)
        with pytest.raises(GraphError, match="unfrozen since"):
            view.forward(lambda: step(root, rows()), seed=1)


def test_logging_is_recorded_on_the_last_stage_and_muted_on_the_others():
    class Logs(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(4)])

        def training_step(self, batch, batch_idx):
            for block in self.blocks:
                batch = block(batch)
                self.log("norm", batch.norm(), prog_bar=True)
            loss = batch.pow(2).mean()
            self.log_dict({"loss": loss})
            return {"loss": loss, "extra": batch}

    root = Logs()
    graph, seen, received = coarse(root), [], {}
    with intercepted(root) as interception:
        for stage in (0, 1):
            assert not seen, "muted on the first stage"
            run = stage_view(root, graph, interception, [2], stage).forward(
                lambda: step(root, rows()), seed=1, received=received, log=lambda *e: seen.append(e)
            )
            received = {k: t.detach() for k, t in run.outputs.items()}
    assert [(name, args[0] if name == "log" else list(args[0])) for name, args, _ in seen] == [
        ("log", "norm"), ("log", "norm"), ("log", "norm"), ("log", "norm"), ("log_dict", ["loss"]),
    ]  # fmt: skip
    assert seen[0][2] == {"prog_bar": True}
    assert torch.isfinite(torch.stack([args[1] for _, args, _ in seen[:4]])).all()
    assert seen[4][1][0]["loss"] == run.loss
    assert run.result["extra"].shape == (5, 16)


def test_hooks_of_the_last_own_layer_see_its_output_and_nothing_runs_after_it():
    class Glue(Tower):
        glue = ""

        def training_step(self, batch, batch_idx):
            for block in self.blocks:
                self.glue += "ran "
                batch = block(batch)
            return batch.pow(2).mean()

    root = Glue()
    graph = coarse(root)
    root.glue = ""
    seen = []
    with intercepted(root) as interception:
        view = stage_view(root, graph, interception, [2])
        view.forward(lambda: step(root, rows()), seed=1)
        assert root.glue == "ran ran "
        root.blocks[1].register_forward_hook(lambda *args: seen.append(args))
        view.forward(lambda: step(root, rows()), seed=1)
    assert len(seen) == 1
    assert torch.isfinite(seen[0][2]).all()


bound_early = checkpoint


def checkpoint_as_since_torch_2_14(monkeypatch):
    """There it calls code of another name, which takes what the function is given as two values."""
    module, older = torch.utils.checkpoint, torch.utils.checkpoint.__dict__[generator_name()]

    def generator(function, args, kwargs, *, preserve_rng_state):
        options = module.noop_context_fn, "default", False, True
        return older(function, preserve_rng_state, *options, *args, **kwargs)

    def newer(function, *args, use_reentrant, preserve_rng_state=True, **kwargs):
        if use_reentrant:
            return module.CheckpointFunction.apply(function, preserve_rng_state, *args)
        around = getattr(module, generator_name())(
            function, args, kwargs, preserve_rng_state=preserve_rng_state
        )
        next(around)
        out = function(*args, **kwargs)
        with contextlib.suppress(StopIteration):
            next(around)
        return out

    name = "_checkpoint_without_reentrant_generator_impl"
    monkeypatch.setattr(module, name, generator, raising=False)
    monkeypatch.setattr(module, "checkpoint", newer)
    monkeypatch.setitem(globals(), "bound_early", newer)


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_layers_become_checkpoints_of_layers(monkeypatch, reentrant, newer):
    """Also when the function was bound before anything was installed, as transformers does."""
    if newer and not generator_name().endswith("_impl"):
        checkpoint_as_since_torch_2_14(monkeypatch)

    class Checkpointed(Tower):
        def training_step(self, batch, batch_idx):
            batch = batch.clone().requires_grad_()
            for pair in (0, 2, 4):
                blocks = self.blocks[pair : pair + 2]
                run = lambda x, a=blocks[0], b=blocks[1]: b(a(x))
                batch = bound_early(run, batch, use_reentrant=reentrant)
            return batch.pow(2).mean()

    root = Checkpointed().double()
    calls = [0] * 6
    for index, block in enumerate(root.blocks):
        block.dropout.p = 0.3

        def counted(x, index=index, linear=block.linear):
            calls[index] += 1
            return nn.functional.linear(x, linear.weight, linear.bias)

        block.linear.forward = counted
    graph = probe(root, step, rows().double(), max_share=1 / 4)
    assert graph.trained == {n for n, _ in root.named_parameters()}
    calls[:] = [0] * 6
    with intercepted(root) as interception:
        view = stage_view(root, graph, interception, [2], 0)
        run = view.forward(lambda: step(root, rows().double()), seed=1)
        assert calls == [1, 1, 0, 0, 0, 0]
        run.backward({key: torch.ones_like(t) for key, t in run.outputs.items()})
        assert calls == [2, 2, 0, 0, 0, 0]


def test_recomputation_on_threads_of_autograd_finds_its_view():
    """On CUDA, backward runs in threads that inherit no context variables."""
    import threading

    root = Noisy()
    for block in root.blocks:
        block.dropout.p = 0.3
    graph = coarse(root)
    run_step = lambda: checkpoint(root.blocks[0], rows(), use_reentrant=False)
    with intercepted(root) as interception:
        run = stage_view(root, graph, interception).forward(lambda: step(root, rows()), seed=1)
        run._inside = True
        answers = []
        with interception.recomputed_by(run):
            thread = threading.Thread(target=lambda: answers.append(run_step()))
            thread.start()
            thread.join()
    assert answers[0].shape == (5, 16)


def test_folded_containers_checkpoint_inside_themselves():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Block(dropout=0.2), Block(dropout=0.2)

        def forward(self, x):
            for block in (self.a, self.b):
                x = checkpoint(block, x, use_reentrant=False)
            return x

    class Pairs(Tower):
        block = Pair
        num_blocks = 3

    root = Pairs().double()
    graph = probe(root, step, rows().double(), max_share=1 / 5)
    folded, _ = fold(root, step, rows().double(), graph, [])
    assert len(graph.layers) == 6
    assert [layer.num_seeds for layer in folded.layers] == [2, 2, 2]
    loss, expected = reference(root, step, rows().double(), 1, graph)
    again, got = reference(root, step, rows().double(), 1, folded)
    assert loss == again
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_containers_with_random_glue_stay_expanded():
    class Noise(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Block(), Block()

        def forward(self, x):
            return self.b(self.a(x) + torch.randn_like(x))

    class Noises(Tower):
        block = Noise
        num_blocks = 3

    root = Noises()
    graph = probe(root, step, rows(), max_share=1 / 5)
    folded, _ = fold(root, step, rows(), graph, [])
    assert folded.layer_names == graph.layer_names
    loss, _ = reference(root, step, rows(), 1)
    assert reference(root, step, rows(), 1, folded)[0] == loss


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fake", "real"])
def test_compiled_blocks_are_layers_of_their_own(mode):
    root = Tower()
    for block in root.blocks:
        block.compile(backend="eager")
    graph = probe(root, step, rows(), max_share=1 / 40, mode=mode)
    assert set(graph.layer_names) == {f"blocks.{i}" for i in range(6)}
    with intercepted(root) as interception:
        view = StageView(root, graph, uncut(graph), interception)
        assert torch.equal(
            view.forward(lambda: step(root, rows()), seed=1).loss, step(root, rows())
        )


def test_installing_twice_and_removing_is_safe():
    root = Tower()
    interception = Interception(root, {"blocks.0"})
    interception.install().install()
    interception.uninstall()
    interception.uninstall()
    assert "forward" not in root.blocks[0].__dict__


def test_what_two_threads_watch_is_released_by_the_last():
    """The first of two bands to end a step took the interception away from the other, now and then."""
    root = nn.Sequential(nn.Linear(2, 2))
    interception = Interception(root).install()
    first, second = (interception.also_watching({"0"}) for _ in range(2))
    first.__enter__()
    second.__enter__()
    assert "forward" in vars(root[0])
    first.__exit__(None, None, None)
    assert "forward" in vars(root[0])
    second.__exit__(None, None, None)
    assert "forward" not in vars(root[0])
    interception.uninstall()


def test_nothing_survives_a_step():
    root = Noisy()
    graph = coarse(root)
    with intercepted(root) as interception:
        view = stage_view(root, graph, interception)
        run = view.forward(lambda: step(root, rows()), seed=1)
        kept = [weakref.ref(run), weakref.ref(run.loss)]
        run.backward()
        gc.disable()
        del run
        alive = [ref() for ref in kept]
        gc.enable()
    assert alive == [None, None]
