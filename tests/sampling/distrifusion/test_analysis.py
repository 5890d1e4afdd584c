"""What is found out about models, and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import AttnProcessor
from torch import nn

from lightning_diffpipe.comm.loopback import LoopbackNetwork
from lightning_diffpipe.errors import ConfigurationError, GraphError
from lightning_diffpipe.sampling.distrifusion import DistriFusion, emulate
from lightning_diffpipe.sampling.distrifusion.analysis import (
    CallAnalysis,
    JointKeys,
    ModelCall,
    analyse,
)
from lightning_diffpipe.sampling.distrifusion.band_call import MODEL
from lightning_diffpipe.sampling.distrifusion.bands import Bands
from lightning_diffpipe.sampling.distrifusion.sampler import intercepted
from lightning_diffpipe.sampling.rehearsal import relative_error
from tests.sampling.distrifusion.models import (
    Inside,
    build,
    last_prediction,
    normal,
    request_for,
    request_of,
)


def analysis_of(name: str) -> CallAnalysis:
    """Of the first call of the model in the first step."""
    tiny, found = build(name), []

    class Look:
        checkpointing = checkpointed = False

        def call(self, site, args, kwargs):
            forward = site.diffpipe_original
            if not found and site.name == MODEL:
                found.append(analyse(ModelCall(interception, forward, args, kwargs, tiny.latents)))
            return forward(*args, **kwargs)

    with (
        torch.inference_mode(),
        intercepted(tiny.model) as interception,
        interception.running(Look()),
    ):
        tiny.denoise(tiny.model)(tiny.latents, torch.tensor(500))
    return found[0]


def test_a_unet_has_image_keys_text_keys_and_texts_that_stay():
    analysis = analysis_of("sd")
    assert analysis.unit == 4
    assert set(map(str, analysis.keys)) == {"None", str(JointKeys(0, 0))}
    assert len(analysis.constant) == 2 * analysis.keys.count(None)
    assert not analysis.sliced
    assert not analysis.embedders, "a convolution has no positions"


@pytest.mark.parametrize(
    ("name", "keys", "embedders", "num_sliced", "unit"),
    [
        ("sd3", {JointKeys(0, 7)}, {"model.pos_embed"}, 0, 2),
        ("flux", {JointKeys(7, 0)}, set(), 1, 1),
        ("pixart", {JointKeys(0, 0), None}, {"model.pos_embed"}, 0, 2),
        ("hunyuandit", {JointKeys(0, 0), None}, {"model.pos_embed"}, 2, 2),
    ],
)
def test_order_of_text_positions_and_sliced_arguments_are_found(
    name, keys, embedders, num_sliced, unit
):
    """These were declared by hand once: which text comes first, and which arguments grow with the rows."""
    analysis = analysis_of(name)
    assert set(analysis.keys) == keys
    assert set(analysis.embedders) == embedders
    assert len(analysis.sliced) == num_sliced
    assert analysis.unit == unit


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_texts_that_have_seen_the_image_are_no_constants(name):
    """Before the first joint attention are the layer that embeds the text and its query, key and value."""
    assert len(analysis_of(name).constant) == 4


@pytest.mark.slow
def test_residuals_of_every_resolution_are_sliced():
    assert len(analysis_of("controlled").sliced) == 7


class SqueezeExcite(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        x = self.conv(x)
        return x * x.mean((-2, -1), keepdim=True).sigmoid()


class Coordinates(nn.Module):
    """Adds the row's number, made of the shape: no value crosses rows, and only numbers can tell."""

    def forward(self, x):
        rows = torch.arange(x.shape[-2], dtype=x.dtype)[:, None]
        return torch.tanh(x + rows)


class Plainly(nn.Module):
    """Attention without torch's function for it."""

    def __init__(self):
        super().__init__()
        from diffusers.models.attention_processor import Attention

        self.attention = Attention(3, heads=1, dim_head=4, processor=AttnProcessor())

    def forward(self, x):
        return self.attention(x)


REFUSALS = {
    "squeeze and excite": (SqueezeExcite, r"mean\(\) mixes rows"),
    "coordinates": (Coordinates, "something else than on the whole: relative error"),
    # diffusers gives baddbmm memory that it does not read, which may hold NaN: then softmax is named.
    "attention by hand": (Plainly, r"(baddbmm|softmax)\(\) mixes rows"),
    "bilinear": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), "mixes rows"),
    "transposed": (lambda: nn.ConvTranspose2d(3, 3, 4, 2, 1), "conv_transpose2d mixes rows"),
    "volume": (lambda: _Volume(), "conv3d mixes rows"),
    "reflecting": (lambda: nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(3, 3, 3)), "mixes rows"),
    "batch norm": (lambda: nn.BatchNorm2d(3).eval(), "batch_norm mixes rows"),
    "roll": (lambda: _Roll(), "roll mixes rows"),
}


class _Roll(nn.Module):
    def forward(self, x):
        return torch.roll(x, 1, -2)


class _Volume(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(3, 3, 1)

    def forward(self, x):
        return self.conv(x[:, :, None])[:, :, 0]


@pytest.mark.parametrize("name", REFUSALS)
def test_operators_without_a_rule_are_refused_by_name(name):
    make, message = REFUSALS[name]
    with pytest.raises(GraphError, match=message):
        last_prediction(Inside(make().double()), [normal(1, 3, 16, 8)], 2)


class ByName(nn.Module):
    """A model that gives all arguments by name."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        h = F.conv2d(input=x, weight=self.conv.weight, bias=self.conv.bias, padding=1)
        h = F.group_norm(input=h, num_groups=2, weight=self.norm.weight, bias=self.norm.bias)
        q = h.flatten(2).mT[:, None]
        h = F.scaled_dot_product_attention(query=q, key=q, value=q)[:, 0].mT.view(h.shape)
        h = F.interpolate(input=F.avg_pool2d(input=h, kernel_size=2), scale_factor=2)
        return F.linear(input=h.movedim(1, -1), weight=self.out.weight).movedim(-1, 1)


def test_arguments_may_be_given_by_name():
    """History: a TypeError about a method of this package."""
    model, x = Inside(ByName().double()), normal(1, 3, 16, 8)
    found = last_prediction(model, [x], 2)
    assert relative_error(found, model(x).detach()) < 1e-12


@pytest.mark.parametrize("name", ["lumina2", "qwen"])
def test_models_that_make_positions_for_all_rows_by_themselves_are_refused(name):
    with pytest.raises(
        GraphError, match=r"on a band of \d+ of \d+ rows this model fails, .*: RuntimeError: "
    ):
        emulate(request_for(name), 2)


def test_sizes_that_do_not_fit_are_refused_with_numbers():
    tiny = build("sd")
    with pytest.raises(ConfigurationError, match="30 rows"):
        emulate(request_for("sd", tiny._replace(latents=normal(2, 4, 30, 8))), 2)
    with pytest.raises(ConfigurationError, match="use at most 8 ranks, or at least 36 rows"):
        emulate(request_for("sd", tiny), 9)
    wide = nn.Conv2d(3, 3, 11, padding=5).double()
    with pytest.raises(
        GraphError, match="reads 5 rows beyond its band, but the smallest band has 4 rows"
    ):
        last_prediction(Inside(wide), [normal(1, 3, 8, 8)], 2)
    with pytest.raises(ConfigurationError, match="choose a height of 8 or 12 rows"):
        Bands.split(10, 2, 4, 0)


class Hungry(nn.Module):
    """A convolution for which some calls are too large: plain ones, those with marks, or those on a band."""

    def __init__(self, too_large):
        super().__init__()
        self.conv, self.too_large = nn.Conv2d(3, 3, 3, padding=1).double(), too_large

    def forward(self, x):
        calls = "on a band" if x.shape[-2] < 16 else "marked" if x.isnan().any() else "plain"
        if calls in self.too_large:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return self.conv(x * 1.0)


def test_an_image_too_large_for_one_rank_is_not_compared(caplog):
    """History: every rank ran the model on all rows at once to compare, and ended where bands would have fitted."""
    model, x = Hungry({"plain"}), normal(1, 3, 16, 8)
    found = last_prediction(model, [x], 2)
    assert found.shape == x.shape
    assert (found - model.conv(x)).abs().max() < 1e-12
    assert [r.message for r in caplog.records if "are not compared" in r.message] == [
        "all rows of the latents do not fit into memory at once; bands are not compared with them"
    ], "by rank 0 alone"


def check_refusal(model, x, num_bands, error, message):
    """Finds that all bands refuse a model, in the same words."""

    def refusal_of(links):
        with pytest.raises(error, match=message) as refused:
            DistriFusion(model, links).sample(request_of(model, x))
        return str(refused.value)

    assert len(set(LoopbackNetwork(num_bands, timeout_s=5).run(refusal_of))) == 1


@pytest.mark.parametrize(
    ("too_large", "message"),
    [
        ("marked", "to be analysed on all rows at once than there is: .*; sample it with PipeFusion"),
        ("on a band", r"needs more memory on a band of 8 of 16 rows than there is: .*; take more stages or ranks"),
    ],
)  # fmt: skip
def test_too_little_memory_is_an_error_that_all_ranks_can_go_on_from(too_large, message):
    """History: an error of torch's broke off the Predictor, and method=auto did not take the next best."""
    check_refusal(Hungry({too_large}), normal(1, 3, 16, 8), 2, ConfigurationError, message)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Conv2d(3, 3, 9, padding=4),
        lambda: nn.Sequential(nn.ZeroPad2d(4), nn.Conv2d(3, 3, 9)),
    ],
)
def test_a_kernel_wider_than_the_smallest_band_is_refused_on_all_bands(make):
    """History: only small bands refused it, and large ones waited for them until the timeout."""
    model, x = Inside(make().double()), normal(1, 3, 11, 8)
    # Of 4, 4 and 3 rows.
    check_refusal(model, x, 3, GraphError, r"reads 4 rows .* the smallest band has 3 rows: use")
    found = last_prediction(model, [x], 2)  # of 6 and 5
    assert (found - model(x)).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "sync"}, "choose displaced, synchronous or naive"),
        ({"group_norm": "best"}, "choose predicted, corrected"),
        ({"warmup_steps": -1}, "warmup_steps must be .*; got -1"),
        ({"warmup_steps": "often"}, "warmup_steps='often'"),
        ({"calls_per_message": 0}, "calls_per_message must be a whole number >= 1; got 0"),
        ({"calls_per_message": "all"}, "calls_per_message must be .*; got 'all'"),
        (
            {"warmup_threshold": "0.1", "warmup_steps": "auto"},
            "warmup_threshold must be a number >= 0; got '0.1'",
        ),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ConfigurationError, match=message):
        last_prediction(SqueezeExcite(), [normal(1, 3, 16, 8)], 2, **options)


def test_steps_must_take_the_same_course():
    """What was sent in one step is read in the next, so both must make the same calls of the same shapes."""
    model = nn.Conv2d(3, 3, 3, padding=1).double()
    latents = [normal(1, 3, 16, 8), normal(1, 3, 16, 8), normal(1, 3, 16, 8) + 100]

    def more_calls(x, t):
        return model(model(x)) if x.mean() > 50 else model(x)

    with pytest.raises(GraphError, match="step 2 called the model 2 times, the first step 1 times"):
        last_prediction(model, latents, 2, more_calls, warmup_steps=1)

    class OtherCourse(nn.Module):
        def forward(self, x):
            return (
                F.group_norm(x, 1) if x.mean() > 50 else F.conv2d(x * 1.0, model.weight, padding=1)
            )

    with pytest.raises(GraphError, match=r"was halo of .* but is statistics"):
        last_prediction(OtherCourse(), latents, 2, warmup_steps=1, verify=False)
