"""`diffpipe sample` as a user calls it."""

import contextlib
import json
import os
import re
import sys
import weakref
from pathlib import Path

import av
import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from lightning_diffpipe import predictor
from lightning_diffpipe.cli import launch, sampling
from lightning_diffpipe.errors import ConfigurationError, DiffPipeError
from lightning_diffpipe.modules.latent_diffusion import as_pil
from tests.command import ROOT, call, run, run_on_forks, run_under_torchrun
from tests.data.folders import write_ratios
from tests.modules.tiny_parts import save_checkpoint, save_with_averages, tiny_cascade
from tests.rows import row


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sampler=pipefusion", "sampler.num_patchs=3"],
         "Could not override 'sampler.num_patchs'. To append to your config use +sampler.num_patchs=3"),
        (["trainer.devices=0"], "trainer.devices must be a whole number >= 1 and <= 1024; got 0"),
        (["trainer.accelerator=tpu"], "trainer.accelerator='tpu'; choose cpu, gpu or cuda"),
        (["dtype=float8"], "dtype='float8'; choose bfloat16, float16"),
        (["path=/nowhere.ckpt"], "there is no checkpoint /nowhere.ckpt"),
        (["width=wide"], "override width=wide: Value 'wide' of type 'str' could not be conv"),
        (["num_threads=0"], "num_threads must be a whole number >= 1 and <= 1024; got 0"),
        (["timeout_s=0"], "timeout_s must be a number > 0; got 0"),
        (["attention=fast"], "attention=fast: UNet2DConditionModel cannot: `backend='fast'` must be one of"),
        (["options={negative_prompt: x}"], "LatentDiffusion takes no 'negative_prompt'"),
        (["sampler=pipefusion", "sampler.guidance=2"], "cannot use 1 ranks as guidance=2"),
        # History: tracebacks; and images that could not be written when they had been drawn.
        (["trainer.devices=true"], "trainer.devices must be a whole number >= 1 and <= 1024; got True"),
        (["+sampler.ema=maybe"], "sampler.ema must be true or false; got 'maybe'"),
        (["sampler=pipefusion", "+sampler.verify=7"], "sampler.verify must be true or false; got 7"),
        (["cache={_target_: diffusers.FirstBlockCacheConfig, treshold: 1}"], "cache: Error in call to target"),
        (["output=null"], "output=null names no folder; leave it out for a new one"),
        (["options={prompts: [b]}"], "options.prompts is a setting of its own; write prompts="),
        (["options={self: 3}"], "options.self=3 is no argument of a pipeline"),
        (["options={3: 3}"], "options.3=3 is no argument of a pipeline"),
        (["options={output_type: np}"], "options.output_type is a setting of its own; write output_type=np"),
        # History: the warm-up never ended, and every step synchronous.
        (["sampler=pipefusion", "sampler.warmup_steps=auto", "+sampler.warmup_threshold=nan"],
         "sampler.warmup_threshold must be a number >= 0; got nan"),
    ],
)  # fmt: skip
def test_wrong_calls_are_refused_in_a_line(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, _, err = call(capsys, monkeypatch, "sample", "progress=false", *arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("stable_diffusion", ["height=30", "width=32"], "have to be divisible by 8 but are 30 and 32"),
        ("pixart", ["options={use_resolution_binning: false}", "num_patches=99"],
         "sampler.num_patches=99 is more than the 8 rows of tokens of these"),
        ("sd3", ["height=40", "width=32"], None),
        ("flux", ["num_patches=99"], None),  # packs latents: told when they are drawn
        ("wan", ["height=40"], "`height` and `width` have to be divisible by 16 but are 40 and"),
        ("dit", ["prompts=[1001]"], "1001 is none of the 1000 classes of this model"),
        ("stable_diffusion", ["options={negative_promt: x}"], "takes no 'negative_promt'; it takes prompt,"),
        ("stable_diffusion", ["images={image: there.png}"], "StableDiffusionPipeline takes no 'image'"),
        ("stable_diffusion", ["images={image: gone.png}"], "images.image=gone.png cannot be read: "),
        ("stable_diffusion", ["images={image: broken.png}"], "images.image=broken.png cannot be read: "),
        ("stable_diffusion", ["options={image: 3}", "images={image: there.png}"], "image is given twice, as"),
        ("stable_diffusion", ["pipeline_class=StableDiffusionImg2imgPipeline"], "is no pipeline of diffusers"),
        # History: the whole text encoder was printed, and lists of all parts, of the class and of the folder.
        ("stable_diffusion", ["pipeline_class=StableDiffusion3Pipeline"],
         "StableDiffusion3Pipeline needs text_encoder_2, text_encoder_3, tokenizer_2, tokenizer_3, transformer,"),
        ("stable_diffusion", ["output_type=png"], "output_type='png'; choose pil, np, pt or latent"),
        ("stable_diffusion", ["output_type=np", "report=true"], "report=true compares images, and"),
        ("wan", ["video_format=avi"], "video_format='avi'; choose mp4, gif or png"),
        ("wan", ["fps=0"], "fps must be a number > 0; got 0"),
        (None, ["vae_tiling=true"], "vae_tiling=... is of diffusers folders"),
        (None, ["pipeline_class=StableDiffusionPipeline"], "pipeline_class=... is of diffusers folders"),
    ],
)  # fmt: skip
def test_what_a_model_cannot_draw_is_refused_before_processes_start(
    model, arguments, message, folder_of, capsys, monkeypatch, tmp_path
):
    """History: sizes, options and patches were refused by processes that had started, after weights were read."""
    started = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sampling, "on_ranks", lambda *_: started.append(True))
    Image.new("RGB", (32, 32)).save("there.png")
    Path("broken.png").write_bytes(Path("there.png").read_bytes()[:50])
    settings = ["prompts=[a, b]", "trainer.devices=2", "sampler=distrifusion"]
    if model is not None:
        settings.append(f"path={folder_of(model)}")
    if "num_patches=99" in arguments:
        settings.append("sampler=pipefusion")
        arguments = [*arguments[:-1], "sampler.num_patches=99"]
    code, _, err = call(capsys, monkeypatch, "sample", *settings, *arguments)
    if message is None:
        assert (code or 0, started) == (0, [True])
    else:
        assert (code, started) == (2, [])
        assert message in err.splitlines()[-1]


@pytest.mark.parametrize("accelerator", ["cpu", "gpu"])
def test_kernels_of_gpus_are_not_tried_on_a_processor(
    accelerator, folder_of, capsys, monkeypatch, tmp_path
):
    """History: the process that starts those of ranks refused what only GPUs can do."""

    def lacking(types, device):
        raise ConfigurationError(f"{device} lacks it")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lightning_diffpipe.quantization.find_spec", lambda name: True)
    monkeypatch.setattr("lightning_diffpipe.sampling.source.require_kernels", lacking)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    settings = [f"path={folder_of('flux')}", "quantization=nf4", "prompts=[a]"]
    settings += [f"trainer.accelerator={accelerator}", "trainer.devices=2"]
    code, _, err = call(capsys, monkeypatch, "sample", *settings)
    says = {"cpu": "cpu lacks it", "gpu": "trainer.devices=2 GPUs, but this machine has 0"}
    assert code == 2
    assert says[accelerator] in err.splitlines()[-1]


@pytest.mark.slow
def test_a_cascade_is_drawn_by_the_command(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    module = tiny_cascade()
    save_checkpoint(module, tmp_path / "last.ckpt")
    settings = ["path=last.ckpt", "prompts=[a, b]", "num_inference_steps=2", "progress=false"]
    arguments = [*settings, "options={noise_level: 0.3}", "output=drawn"]
    code, _, err = call(capsys, monkeypatch, "sample", *arguments)
    assert not code, err
    generator = torch.Generator().manual_seed(0)
    expected = as_pil(module.sample(["a", "b"], 2, 4.0, generator, noise_level=0.3))
    for number, image in enumerate(expected):
        found = np.asarray(Image.open(tmp_path / "drawn" / f"00{number}.png"))
        assert (found == np.asarray(image)).all()
    monkeypatch.setattr(sampling, "on_ranks", lambda *_: pytest.fail("processes start"))
    for arguments, message in (
        (["sampler=distrifusion", "trainer.devices=2"], "sampler=distrifusion shares one denoiser"),
        (["options={noise_level: 3}"], "noise_level must be a number >= 0 and <= 1; got 3"),
    ):
        code, _, err = call(capsys, monkeypatch, "sample", *settings, *arguments)
        assert code == 2
        assert message in err.splitlines()[-1]


def test_a_size_that_a_pipeline_is_not_trained_at_is_refused_before_processes_start(
    folder_of, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    path = f"model.path={folder_of('sd3')}"
    write_ratios(tmp_path, 1)
    data = ["data=image_folder", f"data.folder={tmp_path}", "data.resolution=63"]
    code, _, err = call(capsys, monkeypatch, "train", "model=pretrained", path, *data)
    assert code == 2
    assert "have to be divisible by 4 but are 63 and 63" in err.splitlines()[-1]


@pytest.mark.slow
def test_one_process_draws_with_the_built_in_model(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    settings = ["num_inference_steps=2", "prompts=[digit four]", "output=out", "progress=false"]
    code, out, err = call(capsys, monkeypatch, "sample", "sampler=auto", *settings, "report=true")
    assert code == 0, err
    assert Image.open(tmp_path / "out" / "grid.png").size == (64, 64)
    assert "single, on one rank\nchosen        there is one rank\n" in out
    text = (tmp_path / "out" / "report.json").read_text()
    report = json.loads(text, parse_constant=pytest.fail)  # no Infinity, which is no JSON
    assert report["num_steps"] == 2
    assert "equal to the images of one process" in out
    assert report["psnr_db"] == [None]


@pytest.mark.slow
def test_a_comparison_that_fails_loses_nothing(capsys, monkeypatch, tmp_path):
    """History: the second model was loaded beside the first, and without it there was no report.json."""
    monkeypatch.chdir(tmp_path)
    first = []
    open_source = predictor.open_source

    def opened(*arguments, **options):
        source = open_source(*arguments, **options)
        first.extend(weakref.ref(p) for p in source.denoiser.parameters())
        return source

    def compare(*arguments):
        assert json.loads(Path("out/report.json").read_text())["num_steps"] == 2
        assert len(first) > 9
        alive = [parameter() for parameter in first if parameter() is not None]
        assert not alive, "the memory of the first model is free for the second"
        raise torch.OutOfMemoryError("out of memory\nand much besides")

    monkeypatch.setattr(predictor, "open_source", opened)
    monkeypatch.setattr(sampling, "_compare", compare)
    settings = ["num_inference_steps=2", "prompts=[digit four]", "output=out", "progress=false"]
    code, out, err = call(capsys, monkeypatch, "sample", *settings, "report=true")
    assert code == 0, err
    assert "one process   not compared: out of memory\n" in out
    assert json.loads(Path("out/report.json").read_text())["num_steps"] == 2


@pytest.mark.parametrize(
    ("num_ranks", "local", "threads"), [(2, None, 3), (16, "8", 1), (4, "2", 3), (8, None, 1)]
)
def test_processes_share_the_cores_they_may_use(monkeypatch, num_ranks, local, threads):
    """History: those of all machines, and of the whole machine: two hosts used half of theirs."""
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    launch.share_cores({"num_threads": None}, num_ranks)
    assert chosen == [threads]


@pytest.mark.parametrize(("parents", "threads"), [(6, 1), (48, 6)])
def test_processes_with_cores_of_their_own_use_them(monkeypatch, parents, threads):
    """History: cores that a launcher had given to each process were shared out once more."""
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    cores = lambda pid: set(range(parents if pid else 6))
    monkeypatch.setattr(os, "sched_getaffinity", cores, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    launch.share_cores({"num_threads": None}, 8)
    assert chosen == [threads]


GPUS = {
    "too few": (1, {}, False),
    "enough": (2, {}, True),
    "too few for torchrun": (1, {"LOCAL_WORLD_SIZE": "2"}, False),
    "half of them on each host": (1, {"LOCAL_WORLD_SIZE": "1"}, True),
    "its own for each task": (1, {"LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "3"}, True),
    "first rank of a silent launcher": (1, {"LOCAL_RANK": "0"}, True),
}


@pytest.mark.parametrize("name", GPUS)
def test_missing_gpus_are_noticed_before_anybody_waits(monkeypatch, name):
    """History: only ranks without a GPU noticed, and the others waited for them for two minutes."""
    present, launched, works = GPUS[name]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: present)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for variable, value in {**launched, **({"WORLD_SIZE": "2"} if launched else {})}.items():
        monkeypatch.setenv(variable, value)
    values = {"trainer": {"accelerator": "gpu", "devices": 2}}
    with contextlib.nullcontext() if works else pytest.raises(ConfigurationError, match="has 1"):
        launch.refuse_missing_gpus(values, 2)


@pytest.mark.slow
def test_several_images_of_a_prompt_are_all_written(capsys, monkeypatch, tmp_path, folder_of):
    """History: one for each prompt was written, then the command ended in a traceback."""
    monkeypatch.chdir(tmp_path)
    settings = [f"path={folder_of('stable_diffusion')}", "options={num_images_per_prompt: 2}"]
    settings += ["height=32", "width=32", "num_inference_steps=1", "report=true"]
    code, out, err = call(
        capsys, monkeypatch, "sample", *settings, "prompts=[a cat, a dog]", "output=out", "progress=false"
    )  # fmt: skip
    assert code == 0, err
    written = [line.split("/")[1] for line in out.splitlines() if line.startswith("out/00")]
    assert written == ["000.png  a cat", "001.png  a cat", "002.png  a dog", "003.png  a dog"]
    images = [Image.open(tmp_path / "out" / f"00{i}.png").tobytes() for i in range(4)]
    assert len(set(images)) == 4
    assert Image.open(tmp_path / "out" / "grid.png").size == (4 * 32, 32)
    assert len(json.loads((tmp_path / "out" / "report.json").read_text())["psnr_db"]) == 4


@pytest.mark.slow
def test_a_folder_that_is_drawn_into_again_keeps_nothing_of_the_run_before(
    capsys, monkeypatch, tmp_path
):
    """History: more images than were drawn, and the difference of others, lay beside the new ones."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "out"
    folder.mkdir()
    own = ["001.png", "999.png", "1000.png", "difference.png", "report.json", "grid.png", "000.png"]
    foreign = ["1.png", "001_mine.png", "001.jpg", "2026.png", "notes.txt"]
    for name in own + foreign:
        (folder / name).write_text("earlier")
    listed = [*own, "notes.txt", "../out/1.png"]  # nothing of that kind is written here
    (folder / "report.json").write_text(json.dumps({"files": listed}))
    settings = ["prompts=[a]", "num_inference_steps=1", "output=out", "progress=false"]
    code, _, err = call(capsys, monkeypatch, "sample", *settings)
    assert code == 0, err
    kept = {path.name for path in folder.iterdir() if path.name[0] != "."}
    assert kept == {"000.png", "grid.png", "report.json", *foreign}
    assert all((folder / name).read_text() == "earlier" for name in foreign)
    assert (folder / "grid.png").stat().st_size > len("earlier")


@pytest.mark.parametrize("report", [None, '{"files": ["000.png", "report.json"]}', "[1", "{}"])
def test_files_of_others_are_not_written_over(report, capsys, monkeypatch, tmp_path):
    """History: a folder of images to train on lost a thousand of them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "007.png").write_text("mine")
    if report is not None:
        (tmp_path / "report.json").write_text(report)
    code, _, err = call(capsys, monkeypatch, "sample", "prompts=[a]", "output=.", "progress=false")
    assert code == 2
    assert re.search(r"output=\. has [12] files .* \(007.png.*choose another folder", err)
    assert (tmp_path / "007.png").read_text() == "mine"


@pytest.mark.slow
def test_what_was_drawn_is_compared_with_the_same_weights(capsys, monkeypatch, tmp_path):
    """History: trained weights, asked for by ema=false, were compared with the averaged ones."""
    monkeypatch.chdir(tmp_path)
    save_with_averages("last.ckpt")
    settings = ["path=last.ckpt", "+sampler.ema=false", "num_inference_steps=2", "report=true"]
    settings += ["prompts=[a]", "output=out", "progress=false", "num_threads=1"]
    code, out, err = call(capsys, monkeypatch, "sample", *settings)
    assert code == 0, err
    assert "equal to the images of one process" in out
    assert "s a step on 1 thread\n" in out
    assert json.loads((tmp_path / "out" / "report.json").read_text())["one_process_threads"] == 1


def frames(size=(32, 16)):
    return [Image.new("RGB", size, (60 * n, 0, 200 - 60 * n)) for n in range(4)]


@pytest.mark.parametrize("ending", ["mp4", "gif"])
def test_a_video_is_read_back_as_it_was_drawn(ending, tmp_path):
    sampling._write(frames(), tmp_path / f"000.{ending}", 8)
    with av.open(str(tmp_path / f"000.{ending}")) as file:
        read = [frame.to_image() for frame in file.decode(video=0)]
    assert len(read) == 4
    for wanted, found in zip(frames(), read, strict=True):
        assert found.size == (32, 16)
        assert abs(np.asarray(found, float) - np.asarray(wanted, float)).mean() < 6


def test_a_video_of_odd_size_is_written_with_its_last_row_and_column_twice(tmp_path, capsys):
    """History: the encoder refused it, when all had been drawn."""
    values = {"prompts": ["a"], "output_type": "pil", "video_format": "mp4", "fps": 8}
    sampling._write_sampled([frames((33, 17))], values, tmp_path)
    assert "mp4 has even sizes, and frames are 33 x 17" in capsys.readouterr().out
    with av.open(str(tmp_path / "000.mp4")) as file:
        read = [np.asarray(frame.to_image(), float) for frame in file.decode(video=0)]
    for wanted, found in zip(frames((34, 18)), read, strict=True):
        assert found.shape == (18, 34, 3)
        assert abs(found - np.asarray(wanted, float)).mean() < 6


def test_all_images_are_written_though_their_reader_has_gone(tmp_path, monkeypatch):
    """History: `diffpipe sample | head -1` ended with a traceback, and without the second image."""
    reader, writer = os.pipe()
    os.close(reader)
    values = {"prompts": ["a", "b"], "output_type": "pil", "video_format": "mp4", "fps": 16}
    with monkeypatch.context() as patch, os.fdopen(writer, "w") as output:
        patch.setattr(sys, "stdout", output)
        names = sampling._write_sampled([Image.new("RGB", (8, 8))] * 2, values, tmp_path)
    assert [Image.open(tmp_path / name).size for name in names] == [(8, 8)] * 2


def test_a_video_that_cannot_be_written_is_named(tmp_path):
    values = {"prompts": ["a"], "output_type": "pil", "video_format": "mp4", "fps": 8}
    with pytest.raises(
        DiffPipeError, match=r"cannot write .*000.mp4: .*; take video_format=gif or png"
    ):
        sampling._write_sampled([frames()], values, tmp_path / "absent")


def test_a_video_without_an_encoder_is_refused_before_it_is_drawn(
    folder_of, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "av", None)
    code, _, err = call(capsys, monkeypatch, "sample", f"path={folder_of('wan')}")
    assert (code, "video_format=mp4 needs the package av; run: pip install" in err) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "settings", "files"),
    [
        ("stable_diffusion", ["output_type=np"], ["000.npy", "001.npy"]),
        ("stable_diffusion", ["output_type=latent", "vae_slicing=true"], ["000.pt", "001.pt"]),
        ("dit", ["prompts=[3,7]", "height=null", "width=null"], ["000.png", "001.png", "grid.png"]),
        ("wan", ["options={num_frames: 5}", "height=64", "vae_tiling=true"],
         ["000.mp4", "001.mp4", "grid.png"]),
        ("wan", ["options={num_frames: 5}", "height=64", "video_format=gif"],
         ["000.gif", "001.gif", "grid.png"]),
    ],
)  # fmt: skip
def test_each_type_of_output_has_its_files(
    model, settings, files, folder_of, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    common = ["height=32", "width=32", "num_inference_steps=2", "prompts=[a, b]", "output=out"]
    path = f"path={folder_of(model)}"
    code, _, err = call(capsys, monkeypatch, "sample", path, *common, "progress=false", *settings)
    assert code in (0, None), err
    assert sorted(each.name for each in Path("out").iterdir()) == sorted([*files, "report.json"])
    if files[0].endswith("pt"):
        latents = torch.load("out/000.pt")
        assert latents.shape == (4, 16, 16)
        assert latents.untyped_storage().nbytes() == latents.nbytes


def test_images_of_files_are_what_the_pipeline_is_given(folder_of, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    values = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    for name, value in zip("ab", values, strict=True):
        Image.fromarray(value).save(f"{name}.png")
    hole = np.zeros((32, 32), dtype=np.uint8)
    hole[8:24, 4:20] = 255
    Image.fromarray(hole).save("hole.png")
    path = folder_of("stable_diffusion")
    settings = [
        "pipeline_class=StableDiffusionInpaintPipeline",
        "num_inference_steps=4",
        f"path={path}",
    ]
    images = "images={image: [a.png, b.png], mask_image: hole.png}"
    common = ["height=32", "width=32", "prompts=[a, b]", "output=out", "progress=false"]
    code, _, err = call(
        capsys, monkeypatch, "sample", *settings, images, "options={strength: 0.8}", *common
    )
    assert code in (0, None), err
    pipeline = diffusers.StableDiffusionInpaintPipeline.from_pretrained(path)
    pipeline.set_progress_bar_config(disable=True)
    expected = pipeline(
        prompt=["a", "b"], image=[Image.open("a.png"), Image.open("b.png")],
        mask_image=Image.open("hole.png"), strength=0.8, num_inference_steps=4, guidance_scale=4.0,
        height=32, width=32, generator=torch.Generator().manual_seed(0),
    ).images  # fmt: skip
    for number, image in enumerate(expected):
        drawn = np.asarray(Image.open(f"out/00{number}.png"), int)
        assert abs(drawn - np.asarray(image, int)).max() <= 1


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("run", [run_on_forks, row(run)])
def test_two_processes_draw_and_report(run, tmp_path):
    settings = ["sampler=distrifusion", "trainer.devices=2", "num_inference_steps=3"]
    done = run("sample", *settings, "report=true", "output=out", "progress=false", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert Image.open(tmp_path / "out" / "difference.png").size == (4 * 64, 3 * 64)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert all(x is None or x > 40 for x in report["psnr_db"])  # all steps are synchronous
    assert set(report["bytes_sent"]) >= {"halo", "key_value", "prediction"}


def test_a_model_that_one_host_lacks_is_named_there(capsys, monkeypatch, tmp_path):
    """History: nothing was told, as the first process tells what all find."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "1")
    code, _, err = call(capsys, monkeypatch, "sample", "path=/nowhere", "progress=false")
    assert code == 2
    assert err.startswith("diffpipe sample: rank 1: '/nowhere' is neither")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("run", [run_on_forks, row(run_under_torchrun)])
def test_the_example_draws_on_two_processes(run, tmp_path):
    done = run("examples/sample_together.py", "--steps=2", f"--output={tmp_path}", cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "distrifusion, warmup_steps=4, on parallel=2" in done.stdout
    assert (tmp_path / "sample_1.png").exists()
