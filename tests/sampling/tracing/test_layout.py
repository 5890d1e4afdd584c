"""The layout found by tracing: who owns which token; and models it refuses, with the operator's name."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_diffpipe.errors import LayoutError
from lightning_diffpipe.graph.placement import place_parameters
from lightning_diffpipe.sampling.pipefusion.patch import Stages, resident_parameters
from lightning_diffpipe.sampling.request import Request
from lightning_diffpipe.sampling.tracing import glue
from lightning_diffpipe.sampling.tracing import layout as layouts
from lightning_diffpipe.sampling.tracing.layout import Part, Selection, TokenAxis, text_token
from lightning_diffpipe.sampling.tracing.marks import MIXED, UNREACHED, CodeWords, WithoutProducts
from lightning_diffpipe.sampling.tracing.probe import LayoutStore, fits, probe
from tests.sampling.models import MODELS, build, layout_of, request_for, scheduler_for


@pytest.mark.slow
def test_text_stands_in_front_of_the_image_in_flux():
    layout = layout_of("flux")
    owner = layout.blocks[0].attention[0].owner
    assert owner[:7].tolist() == [-2, -3, -4, -5, -6, -7, -8]  # text tokens 0 .. 6
    assert owner[7:].tolist() == list(range(96))
    assert layout.num_units == 96
    # streams of image and text, and both tables of rope
    assert {leaf: t.size for leaf, t in layout.blocks[0].inputs.items()} == {
        0: 96,
        1: 7,
        3: 103,
        4: 103,
    }


def test_text_stands_behind_the_image_in_sd3():
    layout = layout_of("sd3")
    owner = layout.blocks[0].attention[0].owner
    assert (owner[-7:] < 0).all()
    assert owner[:96].tolist() == [unit for unit in range(16) for _ in range(6)]
    assert layout.rows_per_unit == 2  # a token covers two rows


@pytest.mark.slow
def test_rows_of_a_video_are_strided_tokens():
    owner = layout_of("wan").blocks[0].attention[0].owner
    assert owner.tolist() == [unit for _ in range(3) for unit in range(8) for _ in range(6)]


def test_keys_of_cross_attention_belong_to_nobody_and_never_change():
    layout = layout_of("pixart")
    assert [tokens is None for tokens in layout.blocks[0].attention] == [False, True]
    inside = {name for call, name, _ in layout.constants if call == 2}
    assert inside == {f"transformer_blocks.2.attn2.to_{x}" for x in "kv"}


def test_text_that_changes_from_step_to_step_is_not_kept():
    layout = layout_of("sd3")
    assert not any(call >= 0 for call, _, _ in layout.constants)


def test_parameters_of_a_block_that_glue_reads():
    """DiT's last layer asks the first block for the embedding of its timestep."""
    layout = layout_of("dit")
    assert (
        "transformer_blocks.0.norm1.emb.timestep_embedder.linear_1.weight" in layout.glue_parameters
    )


@pytest.mark.slow
def test_a_block_that_cannot_do_without_text_gets_a_dummy():
    assert layout_of("qwen").dummy_text
    assert not layout_of("flux").dummy_text


@pytest.mark.parametrize("num_texts", [(5,), (1,), (2, 7), (8, 1, 3)])
@pytest.mark.parametrize("num_references", [0, 1, 16])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_ranks_that_share_tokens_are_fed_as_many_on_every_axis(
    num_texts, num_references, num_ranks
):
    """History: of images that follow their text the second rank was fed a token on one axis only."""
    total, units = sum(num_texts) + num_references, torch.arange(8)
    text = text_token(torch.arange(total))
    *streams, references = text.split([*num_texts, num_references])
    owners = [*streams, torch.cat([units, references])]
    block = layouts.Block("block", [], None, attention=[TokenAxis(-2, torch.cat([text, units]))])
    block.inputs = {leaf: TokenAxis(1, owner) for leaf, owner in enumerate(owners)}
    for tokens in block.axes:
        tokens.num_text, tokens.dummy_text = total, block.streams
    [attention], own = block.attention, []
    for rank, share in enumerate(torch.arange(8).chunk(num_ranks)):
        part = Part(range(int(share[0]), int(share[-1]) + 1), (rank, num_ranks))
        fed = [axis.owner[axis.input_of(part).index] for axis in block.inputs.values()]
        assert all(len(each) for each in fed)
        there = attention.owner[attention.input_of(part).index]
        assert sorted(torch.cat(fed).tolist()) == sorted(there.tolist())
        own += attention.own_in_input(part).take(there, 0).tolist()
    assert sorted(own) == sorted(attention.owner.tolist())


@pytest.mark.slow
def test_weights_do_not_matter():
    """Rank 0 probes before anything is loaded. A norm once made equal features those of any time."""
    tiny = build("pixart")
    embedder = tiny.model.adaln_single.emb.timestep_embedder
    embedder.act = nn.Sequential(
        nn.LayerNorm(embedder.linear_1.out_features, elementwise_affine=False), nn.SiLU()
    )
    expected = probe(request_for("pixart", tiny=tiny))
    place_parameters(tiny.model, (), "cpu")
    layout = probe(request_for("pixart", tiny=tiny))
    assert layout.readers == expected.readers
    assert layout.constants == expected.constants
    assert layout.step_constants == expected.step_constants
    assert all(p.isnan().all() for p in tiny.model.parameters())


@pytest.mark.parametrize("name", ["pixart", "dit"])
def test_a_rank_holds_its_share_of_the_blocks_and_what_is_shared(name):
    tiny = build(name)
    layout = layout_of(name)
    stages = Stages.split(layout, (1, 2, 3))
    sizes = {key: p.numel() for key, p in tiny.model.named_parameters()}
    blocks = sum(size for key, size in sizes.items() if key.startswith("transformer_blocks."))
    shared = sum(sizes.values()) - blocks + sum(sizes[key] for key in layout.glue_parameters)
    for rank in range(4):
        own = resident_parameters(tiny.model, layout, stages, rank)
        assert sum(sizes[key] for key in own) <= blocks / 4 + shared


def test_layouts_are_plain_data():
    layout = layout_of("sd3")
    again = pickle.loads(pickle.dumps(layout))
    part = Part(range(4), text=(0, 1))
    for block, copy in zip(layout.blocks, again.blocks, strict=True):
        assert block.shapes(part) == copy.shapes(part)
    assert len(pickle.dumps(layout)) < 20_000


def test_a_layout_fits_requests_of_its_shapes():
    tiny = build("sd3")
    layout = layout_of("sd3")
    request = request_for("sd3", tiny=tiny)
    assert fits(layout, request)
    request.latents = request.latents[..., :8]
    assert not fits(layout, request)


@pytest.mark.slow
def test_a_probe_keeps_no_activations(monkeypatch):
    """History: of the run on latents as they are, every result was kept twice; 40 GB of a large model."""
    kept_bytes, same = [], glue._same

    def held(calls):
        return sum(x.nbytes for call in calls.values() for x in (*call.results, *call.copies))

    def noting(*runs):
        kept_bytes.extend(map(held, runs))
        return same(*runs)

    monkeypatch.setattr(glue, "_same", noting)
    probe(request_for("pixart"))
    assert len(kept_bytes) == 4
    assert max(kept_bytes) == kept_bytes[0] > 0  # what does not depend on the latents


def as_data(layout):
    """All that a layout says, as text."""

    def axis(tokens):
        return None if tokens is None else (tokens.axis, tokens.owner.tolist())

    blocks = [
        (
            b.name, b.num_text, b.kind, b.input_samples, b.output_samples,
            {leaf: axis(t) for leaf, t in sorted(b.inputs.items())},
            {leaf: axis(t) for leaf, t in sorted(b.outputs.items())},
            [axis(t) for t in b.attention],
        )
        for b in layout.blocks
    ]  # fmt: skip
    rest = (layout.readers, layout.dummy_text, layout.cuts_samples, layout.rows_per_unit)
    kept = (layout.constants, layout.step_constants, sorted(layout.passed))
    return repr((blocks, rest, kept, sorted(layout.glue_parameters)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("pixart", "sd3") else pytest.mark.slow)
        for name in MODELS
    ],
)
def test_ink_alone_finds_what_numbers_would(name, monkeypatch):
    """Linear layers that multiply nothing carry NaN to the same places."""
    tiny = build(name)
    found = as_data(layout_of(name))
    monkeypatch.setattr(
        WithoutProducts, "_linear", lambda self, *args, **kwargs: F.linear(*args, **kwargs)
    )
    assert found == as_data(probe(request_for(name, tiny=tiny), tiny.axis))


def test_ink_goes_where_a_product_takes_it():
    x, weight = torch.randn(2, 5, 4), torch.randn(3, 4)
    x[0, 1, 2] = x[1, 4] = float("nan")
    expected = F.linear(x, weight)
    with WithoutProducts():
        assert torch.equal(F.linear(x, weight).isnan(), expected.isnan())
        broken = F.linear(x[0, :1], torch.full((3, 4), float("nan")))
    assert broken.isnan().all()
    with WithoutProducts(exactly=True):
        torch.testing.assert_close(F.linear(x, weight), expected, rtol=0, atol=0, equal_nan=True)
        assert F.linear(x[1, 4:], weight).isnan().all()


@pytest.mark.parametrize("n", [1, 2, 5, 70, 71, 300])
def test_code_words_name_one_index_or_none(n):
    words = CodeWords(n)
    assert words.decode(list(words.marks)).tolist() == list(range(n))
    assert words.decode(list(torch.zeros_like(words.marks))).eq(UNREACHED).all()
    if n > 1:
        both = words.marks[:, :1] | words.marks[:, 1:2]
        assert words.decode(list(both)).tolist() == [MIXED]


# ------------------------------------------------------------------------------------------ refusals


class Block(nn.Module):
    """Attention over rows and a linear layer; `mixes` says how it is spoilt."""

    def __init__(self, mixes: str | None = None):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.depthwise = nn.Conv1d(8, 8, 3, padding=1) if mixes == "convolution" else None
        self.registers = nn.Parameter(torch.randn(1, 2, 8)) if mixes == "registers" else None
        self.mixes = mixes

    def forward(self, x):
        if self.depthwise is not None:
            x = x + self.depthwise(x.mT).mT
        tokens = x
        if self.registers is not None:
            tokens = torch.cat([self.registers.expand(len(x), -1, -1), x], 1)
        q, k, v = self.qkv(tokens).unflatten(-1, (3, 1, 8)).permute(2, 0, 3, 1, 4)
        if self.mixes == "plain attention":
            attended = (q @ k.mT).softmax(-1) @ v
        else:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.mixes == "causal")
        return x + self.out(attended.squeeze(1)[:, -x.shape[1] :])


class Denoiser(nn.Module):
    def __init__(self, mixes: str | None = None):
        super().__init__()
        self.blocks = nn.ModuleList(Block(mixes) for _ in range(2))
        self.norm = nn.GroupNorm(2, 8) if mixes == "norm" else nn.Identity()
        self.shift = torch.ones(8) if mixes == "in place" else None

    def forward(self, x):
        y = x.flatten(2).mT
        for block in self.blocks:
            y = block(y)
            if self.shift is not None:
                y += self.shift
        return self.norm(y.mT.unflatten(2, x.shape[2:]))


def request_of(mixes):
    torch.manual_seed(0)
    model, scheduler = Denoiser(mixes).double(), scheduler_for("")
    latents = torch.randn(1, 8, 6, 4, dtype=torch.float64)
    return Request(model, lambda x, t: model(x) * t, scheduler, scheduler.timesteps, latents)


@pytest.mark.parametrize(
    ("mixes", "words"),
    [
        ("convolution", r"conv1d in blocks.0.depthwise \(Conv1d\)"),
        ("norm", r"group_norm in norm \(GroupNorm\)"),
        ("plain attention", r"in blocks.0 \(Block\)"),
        ("registers", "learned registers"),
    ],
)
def test_models_that_mix_rows_are_refused(mixes, words):
    with pytest.raises(LayoutError, match=words):
        probe(request_of(mixes))


def test_a_block_that_computes_otherwise_than_equal_ones_before_it_is_looked_at_itself():
    request = request_of(None)
    request.model.blocks.extend(Block() for _ in range(3))
    request.model.double().blocks[3].mixes = "plain attention"
    with pytest.raises(LayoutError, match="the model mixes rows of the latents"):
        probe(request)


def test_a_model_without_mixing_is_not():
    assert probe(request_of(None)).num_units == 6


def test_causal_attention_is_refused():
    from lightning_diffpipe.sampling.pipefusion import PipeFusion

    request = request_of("causal")
    with pytest.raises(LayoutError, match="attends causally"):
        PipeFusion(request.model, num_patches=2).sample(request)


def test_a_model_that_a_probe_does_not_survive_is_refused():
    """History: `sampler=auto` ended in the error, and named methods told it without a remedy."""
    with torch.inference_mode(), pytest.raises(LayoutError, match=r"probed this .* method=single"):
        LayoutStore().layout_for(request_of("in place"))


class Mixing:
    """Lets tokens read the one before, if it is told to."""

    is_on = False

    def __call__(self, x):
        return x + x.roll(1, 1) if self.is_on else x


def test_a_changed_attribute_of_a_processor_is_looked_at():
    """History: the layout of an earlier request was taken, as classes of processors were compared only."""
    request, layouts = request_of(None), LayoutStore()
    block = request.model.blocks[0]
    block.processor, plain = Mixing(), block.forward
    block.forward = lambda x: block.processor(plain(x))
    assert layouts.layout_for(request) is layouts.layout_for(request)
    block.processor.is_on = True
    with pytest.raises(LayoutError, match="mixes rows"):
        layouts.layout_for(request)


def test_a_denoiser_without_blocks():
    model = nn.Conv2d(4, 4, 1).double()
    latents, scheduler = torch.randn(1, 4, 6, 4, dtype=torch.float64), scheduler_for("")
    request = Request(model, lambda x, t: model(x), scheduler, scheduler.timesteps, latents)
    with pytest.raises(LayoutError, match="scaled_dot_product_attention"):
        probe(request)


def test_positions_are_copied_to_a_device_once():
    """History: every block of every patch waited until the GPU had done all work before it."""
    there, some = torch.empty(6, 2, device="meta"), Selection(6, torch.tensor([0, 2, 5]))
    assert some.take(there, 0).shape == (3, 2)
    first = some._index_on(there.device)
    assert first.is_meta
    assert some._index_on(there.device) is first
    assert torch.equal(some.take(torch.arange(6), 0), torch.tensor([0, 2, 5]))


@pytest.mark.parametrize("index", [[0, 1], [0, 2], []])
def test_rows_of_another_type_are_put_wherever_they_lie(index):
    """History: rows that do not follow each other were refused by torch."""
    x = torch.zeros(4, 2, dtype=torch.bfloat16)
    Selection(4, torch.tensor(index, dtype=torch.long)).put(x, 0, torch.ones(len(index), 2))
    assert x.sum() == 2 * len(index)
    assert x[index].all()


@pytest.mark.parametrize("index", [[*range(70), *range(75, 140)], [0, 1, 5], [2, 3], [], None])
@pytest.mark.parametrize("axis", [1, -2])
def test_positions_are_copied_wherever_they_lie(index, axis, monkeypatch):
    """Runs as they lie, if there are few; others by their index."""
    asked, index_on = [], Selection._index_on
    monkeypatch.setattr(Selection, "_index_on", lambda *given: asked.append(1) or index_on(*given))
    there = Selection(150, index if index is None else torch.tensor(index, dtype=torch.long))
    rows = range(150) if index is None else index
    x = torch.arange(2.0 * 150 * 3).view(2, 3, 150).transpose(1, 2)
    out = torch.empty(2, len(rows), 3)
    put = torch.zeros_like(x)
    there.take_into(out, x, axis)
    there.put(put, axis, out)
    assert bool(asked) == (index in ([0, 1, 5], []))
    assert torch.equal(out, x[:, rows])
    assert torch.equal(there.take(x, axis), out)
    assert torch.equal(put[:, rows], out)
    assert put.count_nonzero() == out.count_nonzero()
