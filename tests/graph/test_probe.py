"""What the probe finds out, and what it leaves alone."""

import copy
import dataclasses
import functools
import itertools
import pickle
import random
import types
from contextvars import ContextVar

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.quasirandom import SobolEngine

from lightning_diffpipe.errors import ConfigurationError, GraphError
from lightning_diffpipe.graph.fakes import TrackedFakeMode
from lightning_diffpipe.graph.layer import TensorSpec
from lightning_diffpipe.graph.probe import fold, probe, probe_named, reprobe
from lightning_diffpipe.graph.step import batch_signature
from tests.graph.emulate import check_stages
from tests.graph.steps import Block, Tower, build, image_batch, rows, step
from tests.zoo import in_double

RAN = ContextVar("RAN")  # which no trial run restores


class Untrained(Tower):
    """A frozen encoder before the tower."""

    def __init__(self):
        super().__init__()
        self.encoder = Block().requires_grad_(False)

    def training_step(self, batch, batch_idx):
        return self.run(self.encoder(batch)).pow(2).mean()


def test_layers_are_the_cheapest_calls_that_are_fine_enough():
    coarse = probe(Untrained(), step, rows(), max_share=1 / 4)
    assert coarse.layer_names == ("encoder", *(f"blocks.{i}" for i in range(6)))
    fine = probe(Untrained(), step, rows(), max_share=1 / 40)
    assert fine.layer_names == ("encoder.linear", *(f"blocks.{i}.linear" for i in range(6)))
    assert [call.name for call in fine.calls] == ["encoder", *(f"blocks.{i}" for i in range(6))]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fake", "real"])
def test_layers_of_another_granularity_are_found_again_by_their_names(mode):
    """Whatever the probe chooses by itself: what it found finer or coarser follows from names alone."""
    by_share = [probe(Untrained(), step, rows(), max_share=1 / n, mode=mode) for n in (1, 4, 40)]
    assert len({graph.layer_names for graph in by_share}) > 1
    for known, wanted in itertools.product(by_share, repeat=2):
        found = probe_named(Untrained(), step, rows(), known, wanted.path_names)
        assert found.path_names == wanted.path_names
        assert [found.layers[i].name for i in found.frozen] == [
            known.layers[i].name for i in known.frozen
        ]
        if known is wanted:
            assert found.digest == wanted.digest


@pytest.mark.parametrize(
    "names",
    [
        [f"blocks.{i}" for i in range(5)],  # the last one would be glue
        [f"blocks.{i}" for i in range(7)],
        [*(f"blocks.{i}" for i in range(5)), "blocks.5.other"],
        [*(f"blocks.{i}" for i in range(5)), "blocks.5", "blocks.5.linear"],
        ["encoder", *(f"blocks.{i}" for i in range(6))],
    ],
)
def test_layers_of_another_module_are_not_found(names):
    graph = probe(Untrained(), step, rows())
    with pytest.raises(GraphError, match="the trained layers are others: "):
        probe_named(Untrained(), step, rows(), graph, names)


def test_reads_and_parameters_of_a_chain():
    graph = probe(Untrained(), step, rows(), max_share=1 / 4)
    assert [sorted(layer.reads) for layer in graph.layers] == [[]] + [[(i, 0)] for i in range(6)]
    assert graph.layers[3].parameters == {"blocks.2.linear.weight", "blocks.2.linear.bias"}
    assert graph.tail_reads == {(6, 0)}
    assert graph.frozen == (0,)
    assert graph.path == tuple(range(1, 7))


@pytest.mark.slow
def test_the_locked_half_of_a_controlnet_is_frozen_though_it_is_called_later():
    with in_double():
        graph = probe(build("ControlNet with a locked U-Net"), step, image_batch())
    frozen = {graph.layers[i].name.split(".")[1] for i in graph.frozen if i > graph.path[0]}
    assert {"time_embedding", "conv_in", "down_blocks", "mid_block"} <= frozen
    path = {".".join(graph.layers[i].name.split(".")[:2]) for i in graph.path}
    assert {"unet.up_blocks", "unet.conv_out"} <= path
    assert all(name.startswith("controlnet") for name in graph.trained)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_samples"),
    [
        ("Stable Diffusion", 2),
        ("dropout", 2),
        ("LoRA with dropout", 2),
        # Fake kernels choose other strides for one sample, and `randn_like` of a latent would draw other noise.
        ("Stable Diffusion", 1),
    ],
)
def test_fake_and_real_probes_agree(name, num_samples):
    with in_double():
        root = build(name)
        fake = probe(root, step, image_batch(num_samples))
        real = probe(root, step, image_batch(num_samples), mode="real")
    assert fake.mode == "fake"
    assert [layer.outputs for layer in fake.layers] == [layer.outputs for layer in real.layers]
    assert fake.digest == real.digest
    assert num_samples == 1 or fake == real  # norms of one sample cost otherwise


def test_a_graph_survives_pickling():
    graph = probe(Untrained(), step, rows())
    again = pickle.loads(pickle.dumps(graph))
    assert again == graph
    assert again.digest == graph.digest


@pytest.mark.parametrize("mode", ["fake", "real"])
def test_the_module_is_left_untouched(mode):
    class Stateful(Untrained):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(16)
            self.register_buffer("seen", torch.zeros(()))
            self.calls = 0

        def training_step(self, batch, batch_idx):
            self.seen += 1
            self.eval()
            self.train()
            random.random()
            return self.norm(self.run(self.encoder(batch + torch.randn_like(batch)))).pow(2).mean()

    root = Stateful()
    root.encoder.eval()
    before, keys = copy.deepcopy(root.state_dict()), [set(m.__dict__) for m in root.modules()]
    torch.manual_seed(5)
    random.seed(5)
    probe(root, step, rows(), mode=mode)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(5)))
    assert random.random() == random.Random(5).random()
    assert all(torch.equal(v, before[k]) for k, v in root.state_dict().items())
    assert not root.encoder.training
    assert [set(m.__dict__) for m in root.modules()] == keys
    assert all(p.grad is None for p in root.parameters())


class KeepsState(Untrained):
    """Changes buffers in its step and in a layer, in place and by assignment."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.counts = Counts()
        for name in ("in_place", "replaced", "last", "table"):
            self.register_buffer(name, torch.zeros(()))

    def training_step(self, batch, batch_idx):
        loss = self.counts(self.norm(self.run(batch))).pow(2).mean()
        self.in_place += 1
        self.replaced = self.replaced + 1
        self.last = loss.detach()
        self.table = torch.arange(3.0) * torch.tensor([1.0, 2.0, 3.0])  # alike wherever it is made
        return loss


class Counts(nn.Module):
    """A layer that replaces a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.linear(x)


@pytest.mark.parametrize("mode", ["fake", "real"])
def test_buffers_that_a_step_changes_are_noted(mode):
    """History: those changed outside of layers were not, nor the mean and variance of batch norm."""
    root = KeepsState()
    before, names = copy.deepcopy(root.state_dict()), set(root._buffers)
    graph = probe(root, step, rows(), max_share=1 / 4, mode=mode)
    assert graph.glue_writes == {"in_place", "replaced", "last"}
    written = {layer.name: layer.written_buffers for layer in graph.layers if layer.written_buffers}
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert written == {"norm": {f"norm.{s}" for s in statistics}, "counts": {"counts.calls"}}
    assert set(root._buffers) == names
    assert all(torch.equal(value, before[name]) for name, value in root.state_dict().items())
    root.norm.eval()
    assert "norm" not in {
        x.name for x in probe(root, step, rows(), mode=mode).layers if x.written_buffers
    }


def test_the_trainer_is_shared_with_the_copy_that_is_probed():
    class Asks(Untrained):
        def training_step(self, batch, batch_idx):
            assert self._trainer is trainer
            return super().training_step(batch, batch_idx)

    class Trainer:
        def __deepcopy__(self, memo):
            raise AssertionError("copied")

    root, trainer = Asks(), Trainer()
    root.__dict__["_trainer"] = trainer
    assert probe(root, step, rows()).mode == "fake"


def test_a_step_that_refuses_its_batch_is_not_blamed_for_reading_values(caplog):
    """History: a batch without conditions was refused, with the advice not to read values in the step."""

    class Refusing(Tower):
        def training_step(self, batch, batch_idx):
            raise ConfigurationError("batches have no 'condition'")

    with pytest.raises(ConfigurationError, match="no 'condition'"):
        probe(Refusing(), step, rows())
    assert not caplog.records


def test_a_module_that_cannot_be_copied_is_not_blamed_for_reading_values(caplog):
    root = Untrained()
    root.stream = (number for number in range(3))
    assert probe(root, step, rows()).mode.startswith("real (TypeError")
    (record,) = caplog.records
    message = record.getMessage()
    assert "the module cannot be copied (TypeError: cannot pickle 'generator' object" in message
    assert "Keep outside of it what cannot be" in message


def test_steps_that_need_values_are_probed_on_values(caplog):
    """With a word and the line: it once took hours and all memory of a host, and nothing said why."""

    class Looks(Untrained):
        def training_step(self, batch, batch_idx):
            timesteps = torch.arange(4)
            indices = [(timesteps == t).nonzero().item() for t in torch.arange(len(batch)) % 4]
            return super().training_step(batch * timesteps[indices][:, None], batch_idx)

    graph = probe(Looks(), step, rows())
    assert graph.mode.startswith("real (D")
    (record,) = caplog.records
    place = f"{__file__}:{Looks.training_step.__code__.co_firstlineno + 2})"
    assert record.levelname == "WARNING"
    assert place in record.getMessage()
    assert "sigmas[indices]" in record.getMessage()
    reprobe(Looks(), step, rows(3), graph)
    assert len(caplog.records) == 1


class Attends(nn.Module):
    def __init__(self, dropout_p: float) -> None:
        super().__init__()
        self.linear, self.dropout_p = nn.Linear(16, 16), dropout_p

    def forward(self, x):
        x = self.linear(x)[None, None]
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=self.dropout_p)[0, 0]


class NamesTheGlobalGenerator(Block):
    def forward(self, x):
        return super().forward(x + torch.randn(x.shape, generator=torch.default_generator))


@pytest.mark.parametrize("mode", ["fake", "real"])
@pytest.mark.parametrize(
    ("layer", "draws"),
    [
        (lambda: Block(dropout=0.1), True),
        (lambda: Block(dropout=0.0), False),
        (lambda: Block(dropout=0.1).eval(), False),
        (lambda: Attends(0.0), False),
        (lambda: Attends(0.1), True),
        (NamesTheGlobalGenerator, True),
    ],
)
def test_only_layers_that_draw_are_seeded(mode, layer, draws):
    """A seed drawn needlessly would change all numbers after it."""

    class Draws(Tower):
        def __init__(self):
            super().__init__()
            self.layer = layer()

        def training_step(self, batch, batch_idx):
            return self.run(self.layer(batch)).pow(2).mean()

    graph = probe(Draws(), step, rows(), mode=mode, max_share=1 / 2)
    assert graph.layers[0].name == "layer"
    assert graph.layers[0].draws_random == draws
    assert graph.seeded == ({"layer"} if draws else set())


def test_leaves_that_are_one_tensor_are_one_key():
    class Pair(Block):
        def forward(self, x):
            y = super().forward(x)
            return y, [y, y + 1]

    class Pairs(Tower):
        block = Pair

        def training_step(self, batch, batch_idx):
            for block in self.blocks:
                a, (b, c) = block(batch)
                batch = a + b + c
            return batch.pow(2).mean()

    graph = probe(Pairs(), step, rows(), max_share=1 / 4)
    assert graph.layers[0].tensor_keys == ((0, 0), (0, 2))
    assert graph.layers[1].reads == {(0, 0), (0, 2)}


class Encodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x, table):
        y = self.linear(x)
        return torch.cat([y, -y]), self.linear(table)


class Heads(Tower):
    """Two rows for a sample, and a table of as many rows as there are samples."""

    def __init__(self):
        super().__init__()
        self.encodes = Encodes().requires_grad_(False)

    def training_step(self, batch, batch_idx):
        y, table = self.encodes(batch, torch.ones(5, 16))
        return self.run(y + table.sum()).pow(2).mean()


def test_outputs_know_their_rows_per_sample():
    graph = probe(Heads(), step, rows(5), max_share=1 / 4)
    encodes = graph.layers[0]
    assert encodes.argument_rows == (1, 0)  # five rows of a table are no samples
    assert [spec.rows for spec in encodes.outputs] == [2, 0]


def test_another_batch_size_gives_the_same_layers():
    root = Untrained()
    graph = probe(root, step, rows(4))
    other = reprobe(root, step, rows(3), graph)
    assert other.layer_names == graph.layer_names
    assert other.signature == "float32[3, 16]" != graph.signature
    assert other.digest != graph.digest
    again = probe(root, step, rows(3), layer_names=graph.layer_names)
    assert again.layers == other.layers


class Varies(Untrained):
    """Skips a block for single samples."""

    def training_step(self, batch, batch_idx):
        blocks = self.blocks[1:] if len(batch) == 1 else self.blocks
        return functools.reduce(lambda x, block: block(x), blocks, batch).pow(2).mean()


class ReadsBuffers(Untrained):
    """One buffer feeds a frozen layer by way of glue, one the trained part, and one is only looked at in shape."""

    def __init__(self):
        super().__init__()
        for name in ("feeds", "weighs", "shape"):
            self.register_buffer(name, torch.ones(16))

    def training_step(self, batch, batch_idx):
        x = self.encoder(batch * torch.multinomial(self.feeds, 1) + torch.zeros_like(self.shape))
        return (self.run(x) * self.weighs).pow(2).mean()


@pytest.mark.parametrize("mode", ["fake", "real"])
def test_buffers_that_feed_layers_are_noted(mode):
    graph = probe(ReadsBuffers(), step, rows(), max_share=1 / 4, mode=mode)
    assert {name for i in graph.frozen for name in graph.layers[i].buffers} == {"feeds"}
    assert not any(graph.layers[i].buffers - {"feeds"} for i in graph.path)


class Picks(Untrained):
    """Takes rows of a trained table between layers, before a frozen encoder."""

    def __init__(self, pick):
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 16))
        self.encoder = Block().requires_grad_(False)
        self.pick = pick

    def training_step(self, x, i):
        picked = self.pick(self.table, x)
        return (self.run(x) + picked.sum() - self.encoder(x)).pow(2).mean()


def indices(x):
    return torch.arange(len(x), device=x.device) % 4


@pytest.mark.parametrize(
    ("pick", "frozen"),
    [
        (lambda table, x: table[indices(x)], True),
        (lambda table, x: table[indices(x), indices(x)], True),
        (lambda table, x: table[None, :, indices(x)], True),
        (lambda table, x: table[table > 0], False),
        (lambda table, x: table[(table > 0)[:, 0], 1], False),
    ],
)
def test_indices_are_no_values_that_python_sees_but_masks_are(pick, frozen):
    """History: after `table[i]` all layers counted as depending on the table, so that no encoder was frozen."""
    root = Picks(pick).double()
    graph = probe(root, step, rows().double(), max_share=1 / 4)
    assert graph.layers[-1].name == "encoder"
    assert graph.layers[-1].frozen == frozen
    assert ("table" in graph.layers[-1].parameters) != frozen
    check_stages(root, rows().double(), max_share=1 / 4, splits=(2,))


class SetsAttributes(Untrained):
    """Sets attributes for a while, for good, and in a layer."""

    def training_step(self, batch, batch_idx):
        self.encoder.eval()
        self.adapters, self.calls, self.unused = ["reference"], self.calls + 1, True
        x = self.encoder(batch)
        self.encoder.train()
        self.adapters, self.unused = ["default"], False
        self.blocks[2].linear.bias.requires_grad_(False)
        x = self.run(x)
        self.blocks[2].linear.bias.requires_grad = True
        return x.pow(2).mean()


@pytest.mark.parametrize("mode", ["fake", "real"])
def test_attributes_that_a_step_sets_are_noted(mode):
    root = SetsAttributes()
    root.adapters, root.calls, root.unused = ["default"], 0, False
    graph = probe(root, step, rows(), max_share=1 / 4, mode=mode)
    inner = {name for name, _ in root.encoder.named_modules(prefix="encoder")}
    toggled = {(name, "training") for name in inner} | {("", "adapters"), ("", "unused")}
    assert graph.toggled == toggled | {("blocks.2.linear.bias", "requires_grad")}
    assert graph.left == {("", "calls")}


class Continues(nn.Linear):
    """Adds what it gave for the part before, as convolutions of video autoencoders do, until that is deleted."""

    kept = None

    def clear(self):
        del self.kept
        self.kept = None

    def forward(self, x):
        before, self.kept = self.kept, super().forward(x)
        return self.kept if before is None else self.kept + before


class InParts(Untrained):
    """Encodes two parts, one after the other."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(Continues(16, 16)).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        assert self.encoder[0].kept is None, "a run before this one has left it"
        x = self.encoder(batch) + self.encoder(2 * batch)
        self.encoder[0].clear()
        return self.run(x).pow(2).mean()


@pytest.mark.parametrize("mode", ["fake", "real"])
def test_what_a_layer_keeps_between_its_calls_does_not_outlive_a_run_that_is_given_up(mode):
    """History: EasyAnimate's autoencoder failed in the run that followed, and on ranks as if never seen called."""
    root, batch = InParts().double(), rows().double()
    graph = check_stages(root, batch, 1 / 40, mode=mode)
    assert graph.leaky == {"encoder.0"}, "it is expanded in another run"
    folded, _ = fold(root, step, batch, graph, [3])
    assert not graph.watched
    assert not folded.watched


class Shifted(Block):
    """Has tensors of its own around its layer, as modulation tables of transformers."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(16))
        self.register_buffer("gain", torch.ones(16))

    def forward(self, x):
        return self.gain * super().forward(x + self.shift)


class OtherWeights(Untrained):
    block = Shifted
    others = ("blocks.1.shift", "blocks.1.gain", "blocks.1.linear.bias")

    def training_step(self, batch, batch_idx):
        estimate = torch.func.functional_call(
            self.blocks[1], {n.removeprefix("blocks.1."): torch.ones(16) for n in self.others}, (batch,)
        )  # fmt: skip
        return self.run(self.encoder(batch) + estimate).pow(2).mean()


@pytest.mark.parametrize("mode", ["fake", "real"])
@pytest.mark.parametrize("share", [1 / 4, 1 / 40])
def test_weights_in_whose_place_there_are_others_for_a_while_are_noted(share, mode):
    """History: those of a container whose layers are cut stayed in place where a frozen run paused."""
    root = OtherWeights()
    graph = probe(root, step, rows(), max_share=share, mode=mode)
    assert ("blocks.1.linear" in graph.layer_names) == (share == 1 / 40)
    assert graph.toggled == {tuple(name.rsplit(".", 1)) for name in root.others}


GENERATOR = torch.Generator()


class DrawsByItself(Untrained):
    """Draws from generators wherever they may be kept."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.unused = kind, torch.Generator()
        self.gen, self.host = torch.Generator(), {"numpy": np.random.default_rng(0)}
        self.sampler = types.SimpleNamespace(legacy=np.random.RandomState(0), own=random.Random(0))
        self.encoder.sobol = SobolEngine(1)

    def draw(self):
        if self.kind == "made inside":
            made = types.SimpleNamespace(generator=torch.Generator().manual_seed(1))
            made.itself = made
            return torch.rand(1, generator=made.generator)
        if self.kind == "global":
            return torch.rand(1, generator=torch.default_generator)
        kinds = {
            "gen": lambda: torch.rand(1, generator=self.gen),
            "elsewhere": lambda: torch.rand(1, generator=GENERATOR),
            "host['numpy']": lambda: self.host["numpy"].random(),
            "sampler.legacy": lambda: self.sampler.legacy.rand(),
            "sampler.own": lambda: self.sampler.own.random(),
            "encoder.sobol": lambda: self.encoder.sobol.draw(1),
        }
        return kinds[self.kind]()

    def training_step(self, batch, batch_idx):
        return super().training_step(batch + self.draw(), batch_idx)


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        *((kind, {kind}) for kind in ("gen", "host['numpy']", "sampler.legacy", "sampler.own")),
        ("encoder.sobol", {"encoder.sobol"}),
        ("elsewhere", {"a torch.Generator kept outside of the module"}),
        ("made inside", set()),
        ("global", set()),
    ],
)
@pytest.mark.parametrize("mode", ["auto", "real"])
def test_generators_that_outlive_the_step_are_found(kind, found, mode):
    """History: operators with a generator counted as drawing nothing, and those of numpy were not seen."""
    graph = probe(DrawsByItself(kind), step, rows(), max_share=1 / 4, mode=mode)
    assert graph.generators == found


def test_another_sequence_of_layers_is_refused():
    root = Varies()
    graph = probe(root, step, rows(4), max_share=1 / 4)
    with pytest.raises(GraphError, match=r"call 0 is blocks\.1, expected blocks\.0"):
        reprobe(root, step, rows(1), graph)
    with pytest.raises(GraphError, match="calls other layers"):
        probe(root, step, rows(1), layer_names=graph.layer_names)


def counting():
    """A module, and the sizes of the batches that its step was run on."""
    ran = []
    RAN.set(ran)

    class Counts(Heads):
        def training_step(self, batch, batch_idx):
            RAN.get().append(len(batch))
            return super().training_step(batch, batch_idx)

    return Counts(), ran


def test_folding_takes_sizes_with_one_sample_more_from_the_probe():
    root, ran = counting()
    graph = probe(root, step, rows(5), max_share=1 / 40)
    assert ran == [6, 5]
    folded, _ = fold(root, step, rows(5), graph, [3])
    assert ran[2:] == [5]
    encodes = folded.layers[0]
    assert (encodes.name, encodes.fine) == ("encodes", (0, 2))
    assert encodes.argument_rows == (1, 0)
    assert [spec.rows for spec in encodes.outputs] == [2, 0]
    measured, _ = fold(root, step, rows(5), dataclasses.replace(graph, of_more_samples=None), [3])
    assert ran[3:] == [5, 6]
    assert folded == measured


def test_batches_of_other_sizes_take_rows_per_sample_from_the_probe():
    root, ran = counting()
    graph = probe(root, step, rows(2), max_share=1 / 40)
    assert ran == [3, 2]
    for num_samples in (3, 5):  # what the probe has seen as one sample more, and more than that
        ran.clear()
        other = reprobe(root, step, rows(num_samples), graph)
        assert ran == [num_samples]
        unknown = dataclasses.replace(graph, of_more_samples=None)
        assert other == reprobe(root, step, rows(num_samples), unknown)
        assert ran[1:] == [num_samples, num_samples + 1]


def test_rows_per_sample_that_depend_on_more_than_the_number_of_samples_are_measured():
    """Pixels as rows: twice as many in images of twice the height, and a table that all samples share."""

    class Pixels(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.table = nn.Linear(4, 4).requires_grad_(False), nn.Embedding(9, 4)
            self.table.requires_grad_(False)
            self.head = nn.Linear(4, 4)

        def training_step(self, batch, batch_idx):
            table = self.table(torch.arange(batch.shape[1]))
            return self.head(self.encode(batch.flatten(0, 1)).view(batch.shape) + table).mean()

    root = Pixels()
    graph = probe(root, step, torch.randn(2, 3, 4))
    other = reprobe(root, step, torch.randn(4, 6, 4), graph)
    rows_of = lambda g: {la.name: (la.argument_rows, la.outputs[0].rows) for la in g.layers}
    assert rows_of(graph) == {"encode": ((3,), 3), "table": (None, 0), "head": ((1,), 1)}
    assert rows_of(other) == {"encode": ((6,), 6), "table": (None, 0), "head": ((1,), 1)}


class Remembers(nn.Module):
    """Encodes captions, and a memory of the batch or a table of two rows; or captions twice, at once."""

    at_once = False

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(4, 4).requires_grad_(False)
        self.table, self.head = (
            nn.Parameter(torch.randn(2, 4), requires_grad=False),
            nn.Linear(4, 4),
        )

    def training_step(self, batch, batch_idx):
        x, memory = batch["x"], batch.get("memory", self.table)
        if self.at_once:
            return self.head(self.encode(torch.cat([x, x])).sum(0)).mean()
        return self.head(self.encode(x)).mean() + self.encode(memory).mean()


@pytest.mark.parametrize(
    ("size", "other", "at_once"),
    [
        (4, {"x": torch.ones(2, 4), "memory": torch.ones(2, 4)}, False),
        (1, {"x": torch.ones(1, 4)}, True),
    ],
)
def test_batches_of_another_structure_or_sequence_are_measured_themselves(size, other, at_once):
    """Two rows of a table, or of a batch; two of one sample, or one of each of two: sizes do not tell."""
    root = Remembers()
    graph = probe(root, step, {"x": torch.ones(size, 4)})
    root.at_once = at_once
    found = reprobe(root, step, other, graph, any_sequence=True)
    alone = probe(root, step, other)
    rows_of = lambda g: [(la.argument_rows, la.outputs[0].rows) for la in g.layers]
    assert rows_of(found) == rows_of(alone)


def test_layers_called_once_for_each_sample_are_named_with_the_remedy():
    """History: the error spoke of a branch, which nobody who had called `vae.enable_slicing()` could find."""
    root = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def sliced(module, batch):
        return module[1](torch.cat([module[0](row) for row in batch.split(1)])).mean()

    graph = probe(root, sliced, torch.randn(2, 4))
    with pytest.raises(GraphError, match=r"0 is called 3 times, and 2 times .*disable_slicing"):
        reprobe(root, sliced, torch.randn(3, 4), graph)


def test_signatures_tell_shapes_but_not_values():
    assert batch_signature([torch.zeros(2), 3, "a"]) == batch_signature([torch.ones(2), 4, "b"])
    assert batch_signature([torch.zeros(2)]) != batch_signature([torch.zeros(3)])
    assert batch_signature({"a": 1, "b": None}) == batch_signature({"b": None, "a": 2})
    assert batch_signature(torch.zeros(2, 3).t()) != batch_signature(torch.zeros(3, 2))


def test_specs_describe_dense_layouts():
    tensor = torch.zeros(2, 4, 3, 3).to(memory_format=torch.channels_last)
    assert TensorSpec.of(tensor).stride == tensor.stride()
    assert TensorSpec.of(torch.zeros(1).expand(2, 3)).stride == (3, 1)
    part = tensor[:, ::2]
    assert TensorSpec.of(part).empty().stride() == torch.empty_like(part).stride()


VIEWS = {
    "view": lambda x: x.view(4, 2, 3), "t": lambda x: x.t(), "expand": lambda x: x[:, None].expand(4, 3, 6),
    "split": lambda x: x.split([2, 4], dim=1), "detach": lambda x: x.detach(), "real": torch.real,
    "as_strided": lambda x: x.as_strided((2, 3), (1, 2), 1),
    "unsafe": lambda x: torch.ops.aten._unsafe_view(x, [4, 2, 3]),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_of_fake_tensors_are_those_of_real_ones(view, dtype):
    mode, real = TrackedFakeMode(), torch.randn(6, 4, dtype=dtype).t()
    fake = mode.like(real)
    with mode:
        views = pytree.tree_leaves(view(fake))
    for one, other in zip(views, pytree.tree_leaves(view(real)), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert (one.storage_offset(), one.device) == (other.storage_offset(), other.device)
        assert one.untyped_storage()._cdata == fake.untyped_storage()._cdata


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_tensor_that_a_step_copies_is_of_its_mode():
    """History: the mode was copied, too, with weak references, which were freed twice: the process died.

    A metric of torchmetrics copies the states that it is made with.
    """
    mode = TrackedFakeMode()
    with mode:
        copied = copy.deepcopy(torch.zeros(3))
    assert copied.fake_mode is mode
