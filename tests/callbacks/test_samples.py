from contextlib import contextmanager
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from diffusers import DiffusionPipeline
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, Logger
from PIL import Image
from torch.utils.data import DataLoader

from lightning_diffpipe.callbacks import EMA, FinalCheckpoint, SampleImages
from lightning_diffpipe.callbacks.monitor import num_samples
from lightning_diffpipe.callbacks.sample_images import image_grid
from lightning_diffpipe.errors import ConfigurationError
from tests.distributed.scenarios import quiet_trainer


class Painter(BoringModel):
    """Samples images of its first weight, so that one sees which weights were used."""

    def sample(self, prompts, num_inference_steps, guidance_scale, generator):
        grey = self.layer.weight[0, 0].sigmoid()
        return grey.expand(len(prompts), 3, 4, 4)


class Memory(Logger):
    name, version = "memory", 0

    def __init__(self):
        super().__init__()
        self.images, self.over_time, self.metrics = [], [], {}

    def log_image(self, key, images, step, caption):
        if key.endswith("_over_time"):
            self.over_time.append((key, step, images[0].size, caption))
        else:
            self.images.append((key, len(images), step, caption))

    def log_metrics(self, metrics, step):
        self.metrics |= metrics

    def log_hyperparams(self, *args, **kwargs):
        pass


def fit(tmp_path, callbacks, logger, module=None, data=None, ckpt_path=None, **kwargs):
    settings = {"max_steps": 6, "limit_val_batches": 0} | kwargs
    given = {"default_root_dir": tmp_path, "logger": logger, "callbacks": callbacks}
    trainer = quiet_trainer(**{"max_epochs": -1} | settings, **given)
    trainer.fit(module or Painter(), datamodule=data, ckpt_path=ckpt_path)
    return trainer


def test_images_come_every_few_optimizer_steps(tmp_path):
    logger = Memory()
    fit(tmp_path, [SampleImages(["a", "b"], every_n_steps=2)], logger, accumulate_grad_batches=2)
    assert logger.images == [("samples", 2, step, ["a", "b"]) for step in (2, 4, 6)]


class Clock(Painter):
    """Draws prompts as levels that rise with the step."""

    def sample(self, prompts, *args, **settings):
        levels = [10 * self.global_step + int(prompt) for prompt in prompts]
        return torch.tensor(levels)[:, None, None, None].expand(-1, 3, 4, 600) / 255


def test_drawings_stand_side_by_side_over_time_also_of_a_run_that_goes_on(tmp_path):
    """Eight of ten, the first and the latest among them; wide ones are made smaller."""
    logger, prompts = Memory(), [str(n) for n in range(9)]
    samples, steps = [SampleImages(prompts, every_n_steps=2)], {"max_steps": 8}
    fit(tmp_path, samples, logger, Clock(), **steps).save_checkpoint(tmp_path / "run.ckpt")
    resumed = {"ckpt_path": tmp_path / "run.ckpt", "max_steps": 20}
    trainer = fit(tmp_path, [SampleImages(prompts, 2)], logger, Clock(), **resumed)
    shown = [2, 4, 8, 10, 12, 14, 18, 20]
    assert logger.over_time[0] == ("samples_over_time", 2, (256, 18), ["steps 2"])
    said = "steps " + ", ".join(map(str, shown))
    assert logger.over_time[-1] == ("samples_over_time", 20, (8 * 256, 18), [said])
    grid = Image.open(tmp_path / "samples" / "over_time.png")
    levels = [[grid.getpixel((256 * x + 9, 2 * y + 1))[0] for x in range(8)] for y in range(9)]
    assert levels == [[10 * step + n for step in shown] for n in range(9)]
    # A run of its own begins anew.
    fit(tmp_path, [SampleImages(prompts, 2)], logger, Clock(), max_steps=2)
    assert logger.over_time[-1][-1] == ["steps 2"]
    assert trainer.state.finished


@pytest.mark.parametrize("every", [{"every_n_steps": 6}, {"every_n_steps": None}])
def test_images_come_in_every_fit(every, tmp_path):
    """History: kept for a second run, the callback did not draw the step that it had drawn last."""
    samples = SampleImages(["a"], **every)
    for _ in range(2):
        logger = Memory()
        validation = {"limit_val_batches": 1, "val_check_interval": 6}
        fit(tmp_path, [samples], logger, **(validation if every["every_n_steps"] is None else {}))
        assert [step for _, _, step, _ in logger.images] == [6]


def test_a_resumed_run_draws_its_own_steps_only(tmp_path):
    """History: the first of the batches that make a step drew again, over the image of the checkpoint's step."""
    trainer = fit(tmp_path, [], False, max_steps=2, accumulate_grad_batches=2)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    logger = Memory()
    resumed = {"ckpt_path": tmp_path / "half.ckpt", "accumulate_grad_batches": 2}
    fit(tmp_path, [SampleImages(["a"], every_n_steps=2)], logger, **resumed)
    assert [step for _, _, step, _ in logger.images] == [4, 6]


def test_images_come_with_every_validation_and_averaged_weights(tmp_path):
    logger, drawn = Memory(), []
    samples = SampleImages(["a"], every_n_steps=None)
    draw = samples.sample
    samples.sample = lambda trainer, module: drawn.append(draw(trainer, module)) or drawn[-1]
    settings = {"limit_val_batches": 1, "val_check_interval": 2, "max_steps": 4}
    ema, module = EMA(decay=0.5), Painter()
    trainer = fit(tmp_path, [ema, samples], logger, module, **settings)
    assert [step for _, _, step, _ in logger.images] == [2, 4]
    averaged = ema.averages["layer.weight"][0, 0].sigmoid()
    torch.testing.assert_close(drawn[-1].mean(), averaged)
    assert not torch.isclose(averaged, module.layer.weight[0, 0].sigmoid(), rtol=1e-4)
    assert trainer.state.finished


class Captioned(L.LightningDataModule):
    """Batches with captions, some of which may be held back."""

    def __init__(self, held_back=()):
        super().__init__()
        self.held_back = held_back

    def held_back_captions(self, count):
        return self.held_back[:count]

    def train_dataloader(self):
        batches = [{"x": torch.zeros(2, 32), "caption": [f"{i} a", f"{i} b"]} for i in range(6)]
        return DataLoader(batches, batch_size=None)


class CaptionedPainter(Painter):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch["x"], batch_idx)


@pytest.mark.parametrize(
    ("held_back", "drawn"),
    [(["a lighthouse"], ["a lighthouse"]), (["fog"] * 9, ["fog"] * 8), ([], ["0 a", "0 b"])],
)
def test_captions_of_the_data_are_drawn_where_nobody_says_what(tmp_path, held_back, drawn):
    """History: `diffpipe train` drew glyphs with everybody's model, whatever it was trained on."""
    logger = Memory()
    data = Captioned(held_back)
    samples = SampleImages(every_n_steps=3)
    fit(tmp_path, [samples], logger, CaptionedPainter(), data, log_every_n_steps=3)
    assert [captions for *_, captions in logger.images] == [drawn] * 2


def test_captions_are_taken_anew_in_every_fit_and_kept_by_a_run_that_goes_on(tmp_path):
    """History: a callback that was used again drew captions of the data before; a resumed run drew others."""
    logger, samples = Memory(), SampleImages(every_n_steps=2)
    for held_back in (["a lighthouse"], ["fog"]):
        data = Captioned(held_back)
        trainer = fit(tmp_path, [samples], logger, CaptionedPainter(), data, max_steps=2)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    # One more callback with other settings, whose state is another one.
    callbacks = [SampleImages(every_n_steps=2), SampleImages(["a"], every_n_steps=4)]
    data, resumed = Captioned(["a harbour"]), {"ckpt_path": tmp_path / "half.ckpt", "max_steps": 4}
    fit(tmp_path, callbacks, logger, CaptionedPainter(), data, **resumed)
    drawn = [(step, captions) for _, _, step, captions in logger.images]
    assert drawn == [(2, ["a lighthouse"]), (2, ["fog"]), (4, ["fog"]), (4, ["a"])]
    fit(tmp_path, callbacks[:1], logger, CaptionedPainter(), data, max_steps=2)
    assert logger.images[-1][-1] == ["a harbour"]


class Conditioned(Captioned):
    """Captions with conditions, held back or in batches."""

    def held_back_conditions(self, count):
        there = len(self.held_back_captions(count))
        return torch.full((there, 3, 4, 4), 0.5) if there else None

    def train_dataloader(self):
        batches = [
            {**batch, "condition": torch.full((2, 3, 4, 4), 0.25)}
            for batch in super().train_dataloader()
        ]
        return DataLoader(batches, batch_size=None)


class Follower(CaptionedPainter):
    """Draws what it is shown."""

    samples_to_conditions = True

    def sample(self, prompts, num_inference_steps, guidance_scale, generator, condition):
        assert len(condition) == len(prompts)
        return condition / 2


@pytest.mark.parametrize(("held_back", "shown"), [(["fog"] * 3, 0.5), ([], 0.25)])
def test_conditions_are_taken_with_their_captions_and_shown_above(tmp_path, held_back, shown):
    samples = SampleImages(every_n_steps=2)
    data, logger = Conditioned(held_back), CSVLogger(tmp_path, "csv", "")
    trainer = fit(tmp_path, [samples], logger, Follower(), data, max_steps=2)
    image = Image.open(tmp_path / "csv" / "samples" / "step_000002.png")
    columns = len(held_back) or 2
    assert image.size == (4 * columns, 8)
    levels = [image.getpixel((4 * columns - 1, y))[0] for y in (0, 7)]
    assert levels == [round(255 * shown), round(255 * shown / 2)]
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    again, other = SampleImages(every_n_steps=2), Conditioned(["fire"])
    resumed = {"ckpt_path": tmp_path / "half.ckpt", "max_steps": 4}
    fit(tmp_path, [again], False, Follower(), other, **resumed)
    assert again.prompts == samples.prompts
    assert again.conditions.equal(samples.conditions)


@pytest.mark.parametrize(
    ("module", "prompts"), [(Follower, ["0 a", "0 b"]), (CaptionedPainter, ["fog"])]
)
def test_captions_held_back_without_conditions_are_for_modules_that_draw_to_none(
    module, prompts, tmp_path
):
    samples, data = SampleImages(every_n_steps=2), Conditioned(["fog"])
    data.held_back_conditions = lambda count: None
    fit(tmp_path, [samples], False, module(), data, max_steps=2)
    assert samples.prompts == prompts
    assert (samples.conditions is None) == (module is CaptionedPainter)


class Classes(CaptionedPainter):
    """Draws class numbers."""

    samples_from = "class_labels"


def test_models_of_classes_draw_the_classes_of_the_data(tmp_path):
    """History: they were given captions, and the run ended in 'too many dimensions' at its first drawing."""
    logger, data = Memory(), Captioned(["fog"])
    batches = [{**batch, "class_labels": torch.tensor([3, 5])} for batch in data.train_dataloader()]
    data.train_dataloader = lambda: DataLoader(batches, batch_size=None)
    fit(tmp_path, [SampleImages(every_n_steps=6)], logger, Classes(), data)
    assert [captions for *_, captions in logger.images] == [[3, 5]]


@pytest.mark.parametrize(
    ("prompts", "module", "data", "message"),
    [
        (None, Painter(), None, "batches have no 'caption'; say which"),
        (None, Classes(), Captioned(), "batches have no 'class_labels'; say which"),
        (
            ["fog"],
            Follower(),
            Conditioned(["fog"]),
            "Follower samples to conditions, and prompts that",
        ),
        # History: after 500 steps it had no attribute 'sample'.
        (["a"], BoringModel(), None, r"sample\(prompts, .*BoringModel has none; write"),
    ],
)
def test_what_cannot_be_drawn_is_refused_when_training_begins(
    prompts, module, data, message, tmp_path
):
    with pytest.raises(ConfigurationError, match=message):
        fit(tmp_path, [SampleImages(prompts)], False, module, data)


def test_several_callbacks_write_into_folders_of_their_own(tmp_path):
    """History: each wrote over the images of the one before."""
    logger = Memory()
    callbacks = [SampleImages(["a"], 2), SampleImages(["b", "c"], 3)]
    fit(tmp_path, callbacks, logger)
    folders = [tmp_path / name for name in ("samples", "samples_2")]
    assert {key for key, *_ in logger.images} == {"samples", "samples_2"}
    found = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert found == [
        ["over_time.png", *(f"step_{n:06}.png" for n in steps)] for steps in ((2, 4, 6), (3, 6))
    ]


def test_frames_of_videos_lie_side_by_side(tmp_path):
    """History: a model of videos ended the run with its first drawing, in a ValueError."""
    painter, logger = Painter(), CSVLogger(tmp_path, "csv", "")
    greys = torch.linspace(0, 1, 15).view(1, 15, 1, 1, 1)
    painter.sample = lambda prompts, **settings: greys.expand(len(prompts), 15, 3, 4, 4)
    fit(tmp_path, [SampleImages(["a", "b"], 6)], logger, painter)
    image = Image.open(tmp_path / "csv" / "samples" / "step_000006.png")
    assert image.size == (8 * 4, 2 * 4)
    levels = [image.getpixel((x, 7))[0] for x in range(0, 32, 4)]
    assert levels == [round(255 * greys[0, i].item()) for i in range(0, 15, 2)]


def test_images_are_files_without_a_logger_that_takes_them(tmp_path):
    fit(tmp_path, [SampleImages(["a"] * 3, every_n_steps=3)], CSVLogger(tmp_path, "csv", ""))
    paths = sorted((tmp_path / "csv" / "samples").iterdir())
    assert [p.name for p in paths] == ["over_time.png", "step_000003.png", "step_000006.png"]
    assert Image.open(paths[-1]).size == (3 * 4, 4)


def test_further_arguments_are_those_of_the_modules_sample(tmp_path):
    painter, given = Painter(), []
    painter.sample = lambda prompts, **settings: given.append(settings) or torch.zeros(1, 3, 4, 4)
    fit(tmp_path, [SampleImages(["a"], 3, call={"height": 8, "width": 4})], False, painter)
    assert {(each["height"], each["width"]) for each in given} == {(8, 4)}


class OfHeight(DiffusionPipeline):
    def __call__(self, prompt=None, height=8):
        """Never called."""


@pytest.mark.parametrize(
    ("call", "pipeline", "message"),
    [
        ({"heigth": 8}, None, "got an unexpected keyword argument 'heigth'"),
        ({"generator": None}, None, "got multiple values for keyword argument 'generator'"),
        ({"heigth": 8}, OfHeight(), "OfHeight takes no 'heigth'; it takes "),
    ],
)
def test_arguments_that_cannot_be_are_named_before_training(call, pipeline, message, tmp_path):
    """History: the run ended when it sampled first, after hundreds of steps."""
    painter = Painter()
    painter.pipeline = pipeline
    painter.sample = lambda prompts, num_inference_steps, guidance_scale, generator: None
    if pipeline is not None:
        painter.sample = lambda prompts, **settings: None
    with pytest.raises(ConfigurationError, match=message):
        fit(tmp_path, [SampleImages(["a"], 3, call=call)], False, painter)


def test_a_divided_model_is_made_whole(tmp_path):
    samples, module, entered = SampleImages(["a"]), Painter(), []
    trainer = fit(tmp_path, [samples], False, module)

    @contextmanager
    def whole_model():
        entered.append(True)
        yield

    trainer.strategy.whole_model = whole_model
    samples.sample(trainer, module)
    assert entered == [True]


def test_a_grid_reads_like_a_page():
    greys = torch.linspace(0, 1, 3).view(3, 1, 1, 1).expand(3, 3, 1, 1)
    grid = image_grid(greys, columns=2)
    assert [grid.getpixel((x, y))[0] for y in (0, 1) for x in (0, 1)] == [0, 128, 255, 0]


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(5, 2),
        {"caption": ["a caption"] * 5, "image": torch.zeros(5, 2)},
        {"scale": 2.0, "image": torch.zeros(5, 2)},
        [torch.zeros(5)],
    ],
)
def test_samples_of_a_batch_are_counted(batch):
    """History: the first value of a batch was counted, be it a caption's letters or a number."""
    trainer = SimpleNamespace(strategy=None)
    assert num_samples(trainer, batch) == 5
    trainer.strategy = SimpleNamespace(last_step=SimpleNamespace(num_samples=7))
    assert num_samples(trainer, batch) == 7


def test_a_trial_run_writes_nothing(tmp_path):
    """History: `fast_dev_run` wrote a model of one batch over the final checkpoint of a real run."""
    painter, final = Painter(), tmp_path / "final.ckpt"
    final.write_text("of a real run")
    callbacks = [FinalCheckpoint(final), SampleImages(["a"], every_n_steps=1)]
    drawn = []
    painter.sample = lambda *args, **kwargs: drawn.append(1) or torch.zeros(1, 3, 4, 4)
    fit(tmp_path, callbacks, False, painter, fast_dev_run=True)
    assert drawn, "it is tried"
    assert final.read_text() == "of a real run"
    assert list(tmp_path.iterdir()) == [final]


def test_the_final_checkpoint_is_of_the_last_step(tmp_path):
    fit(tmp_path, [FinalCheckpoint(tmp_path / "deep" / "final.ckpt")], False)
    assert torch.load(tmp_path / "deep" / "final.ckpt", weights_only=True)["global_step"] == 6
