"""`diffpipe sample`."""

import gc
import json
import math
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lightning_diffpipe.cli.launch import (
    is_launched,
    num_ranks_of,
    on_ranks,
    prepare,
    refuse_missing_gpus,
    say,
    share_cores,
)
from lightning_diffpipe.cli.values import named, plain, require_writable_folder, verb
from lightning_diffpipe.errors import (
    ConfigurationError,
    DiffPipeError,
    raised_by_all,
    require_choice,
    require_flags,
)
from lightning_diffpipe.files import write_atomically

_MAX_COLUMNS = 8
_REPORT, _GRID, _DIFFERENCE = "report.json", "grid.png", "difference.png"
_OURS = re.compile(r"\d{3,}\.(png|mp4|gif|npy|pt)|grid\.png|difference\.png|report\.json")
_OUTPUT_TYPES = {"pil": ".png", "np": ".npy", "pt": ".pt", "latent": ".pt"}
_SWITCHES = {"ema", "verify", "hide_unseen"}
_COMMON = ("compile", "decoding", "cache", "attention")
_ASKED = ("prompts", "num_inference_steps", "guidance_scale", "seed", "height", "width")


@verb("sample prompts with a trained model: diffpipe sample 'prompts=[\"digit four, serif\"]'")
def sample(config: DictConfig) -> Any:
    """Samples `prompts` with the model at `path` on `trainer.devices` processes, into `output`."""
    values = plain(config)
    num_ranks = num_ranks_of(values)
    _refuse_values(values)
    prepare(config)  # before anything is imported that may look for a network
    if isinstance(values["cache"], dict):
        with raised_by_all():
            values["cache"] = _cache(values["cache"])
    _refuse_request(values, num_ranks)
    values["options"] = _options(values)
    if "://" in values["path"]:
        from lightning_diffpipe.checkpoint_files import require_file

        require_file(values["path"])
    elif not is_launched():
        _refuse_by_model(values)
    require_writable_folder("output", values["output"])
    folder = Path(values["output"])
    numbered = (path.name for path in folder.glob("[0-9][0-9][0-9].*"))
    existing = {*filter(_OURS.fullmatch, numbered)}
    existing |= {name for name in (_REPORT, _GRID, _DIFFERENCE) if (folder / name).exists()}
    if foreign := sorted(existing - _written_earlier(folder)):
        with raised_by_all():
            raise ConfigurationError(
                f"output={folder} has {len(foreign)} files that might be written over and are not of an earlier "
                f"run ({', '.join(foreign[:3])}); choose another folder, or move them"
            )
    refuse_missing_gpus(values, num_ranks)
    share_cores(values, num_ranks)
    return on_ranks(num_ranks, lambda: _sample(values))


def _written_earlier(folder: Path) -> set[str]:
    """Returns the files of an earlier run of this command in a folder, by its report."""
    try:
        files = json.loads((folder / _REPORT).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return set()
    # Some other program's report may list some other program's files.
    return {name for name in map(str, files) if _OURS.fullmatch(name)}


@raised_by_all()
def _refuse_values(values: dict[str, Any]) -> None:
    """Refuses what no process could work with, before there are several."""
    from lightning_diffpipe.sampling.skeleton import dtype_named

    if values["output"] is None:
        raise ConfigurationError("output=null names no folder; leave it out for a new one")
    dtype_named("dtype", values["dtype"])
    accelerator = values["trainer"]["accelerator"]
    require_choice("trainer.accelerator", accelerator, ("cpu", "gpu", "cuda"))
    require_choice("output_type", values["output_type"], list(_OUTPUT_TYPES))
    require_choice("video_format", values["video_format"], ("mp4", "gif", "png"))
    if values["report"] and values["output_type"] != "pil":
        raise ConfigurationError(
            f"report=true compares images, and output_type={values['output_type']} has none; leave one out"
        )


def _cache(given: dict[str, Any]) -> Any:
    """Returns a configuration of diffusers by its `_target_`."""
    import hydra
    from hydra.errors import InstantiationException

    try:
        return hydra.utils.instantiate(given) or given
    except InstantiationException as error:
        raise ConfigurationError(f"cache: {error}") from error


def _options(values: dict[str, Any]) -> dict[str, Any]:
    """Returns further arguments of the pipeline's call, images too, or raises ConfigurationError."""
    for group in ("options", "images"):
        if not isinstance(values[group] or {}, dict):
            raise ConfigurationError(
                f"{group}={values[group]!r} is no mapping of arguments, such as {{image: photo.png}}"
            )
        for name, value in (values[group] or {}).items():
            if not str(name).isidentifier() or name == "self":
                raise ConfigurationError(f"{group}.{name}={value} is no argument of a pipeline")
            if name in (*_ASKED, "output_type"):
                raise ConfigurationError(
                    f"{group}.{name} is a setting of its own; write {name}={value}"
                )
    options = dict(values["options"] or {})
    for name, files in (values["images"] or {}).items():
        if name in options:
            raise ConfigurationError(f"{name} is given twice, as images.{name} and options.{name}")
        several = isinstance(files, list)
        images = [_opened(name, file) for file in (files if several else [files])]
        options[name] = images if several else images[0]
    if values["output_type"] != "pil":
        options["output_type"] = values["output_type"]
    return options


def _opened(name: str, file: Any) -> Any:
    from diffusers.utils import load_image

    try:
        return load_image(str(file))
    except Exception as error:  # whatever a decoder meets in a broken file
        raise ConfigurationError(f"images.{name}={file} cannot be read: {error}") from error


def _refuse_by_model(values: dict[str, Any]) -> None:
    """Raises ConfigurationError for what a model cannot sample by its files, before processes start."""
    import torch

    from lightning_diffpipe.model_sources import check_request, open_source
    from lightning_diffpipe.sampling.source import DiffusersFolder, Settings

    sampler, request, cpu = values["sampler"], _request(values), torch.device("cpu")
    vae = [each for each in ("tiling", "slicing") if values[f"vae_{each}"]]
    ema = sampler.get("ema", True)
    # Kernels of a GPU are tried by its rank.
    further = {"ema": ema, "vae": vae, "tries_kernels": values["trainer"]["accelerator"] == "cpu"}
    source = open_source(values["path"], False, cpu, **further, **_opening(values))
    options = {name: request.pop(name) for name in values["options"]}
    with named({"num_patches": "sampler.num_patches", "method": "sampler"}):
        settings = Settings(**request, options=options)
        check_request(source, settings, sampler["method"], sampler.get("num_patches"))
    makes_video = isinstance(source, DiffusersFolder) and source.samples_videos
    if makes_video and (values["output_type"], values["video_format"]) == ("pil", "mp4"):
        _require_encoder()


def _require_encoder() -> Any:
    try:
        import av
    except ImportError as error:
        raise ConfigurationError(
            "video_format=mp4 needs the package av; run: pip install 'lightning-diffpipe[video]', or take "
            "video_format=gif"
        ) from error
    return av


@raised_by_all()
def _refuse_request(values: dict[str, Any], num_ranks: int) -> None:
    """Raises ConfigurationError for what no model could be sampled with, before processes start."""
    from lightning_diffpipe.sampling.methods import MethodOptions, fitted
    from lightning_diffpipe.sampling.source import Settings

    switches = {n: values["sampler"][n] for n in _SWITCHES & values["sampler"].keys()}
    require_flags(**{f"sampler.{n}": x for n, x in switches.items() if x is not None})
    keys = {field.name for field in fields(MethodOptions)} - {"further", "mesh", "reason"}
    common = {name: values[name] for name in _COMMON}
    sampler = {name: value for name, value in values["sampler"].items() if name in keys}
    # None leaves out a part of the model; ema chooses weights.
    rest = {k: v for k, v in values["sampler"].items() if k not in {*keys, "ema"} and v is not None}
    with named({name: f"sampler.{name}" for name in values["sampler"]}):
        fitted(MethodOptions(**sampler, **common, further=rest), num_ranks)
    request_keys = ("num_inference_steps", "guidance_scale", "height", "width")
    Settings(values["prompts"], **{name: values.get(name) for name in request_keys})


def _sample(values: dict[str, Any]) -> Any:
    rank = int(os.environ.get("RANK", "0"))
    images, report = _sampled(values, rank)
    if rank:
        return None
    folder = Path(values["output"])
    folder.mkdir(parents=True, exist_ok=True)
    for name in _written_earlier(folder):  # which might be taken for images of this run
        (folder / name).unlink(missing_ok=True)

    def write_numbers(numbers: dict[str, Any]) -> None:
        text = json.dumps(numbers, indent=2, default=str, allow_nan=False)
        write_atomically(folder / _REPORT, text + "\n")

    files = [_REPORT, *_write_sampled(images, values, folder)]
    if values["output_type"] == "pil":
        files.append(_GRID)
        images = _as_images(images)
        _rows([images], min(_MAX_COLUMNS, len(images))).save(folder / _GRID)
        say(f"{folder / _GRID}  all of them")
    say(f"\n{report}")
    numbers = vars(report) | {"files": files}
    write_numbers(numbers)  # before what may fail, or be killed for memory
    if values["report"]:
        files.append(_DIFFERENCE)
        write_numbers(numbers | _compared(images, values, folder))
    return images


def _sampled(values: dict[str, Any], rank: int) -> tuple[list[Any] | None, Any]:
    """Returns images and report of the request, without the model, which is gone when this returns."""
    from tqdm import tqdm

    from lightning_diffpipe.predictor import Predictor

    common, hidden = _common(values), rank > 0 or not values["progress"]
    with (
        Predictor.from_pretrained(values["path"], **common, **values["sampler"]) as predictor,
        tqdm(unit="step", desc="denoising", disable=hidden) as bar,
    ):

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return predictor(**_request(values), on_step=advance), predictor.report


def _common(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `Predictor.from_pretrained` that are not the sampler's."""
    vae = {name: values[name] for name in ("vae_tiling", "vae_slicing", *_COMMON)}
    device = "cpu" if values["trainer"]["accelerator"] == "cpu" else "cuda"
    waits = {name: values[name] for name in ("timeout_s", "busy_timeout_s")}
    return _opening(values) | vae | waits | {"device": device}


def _opening(values: dict[str, Any]) -> dict[str, Any]:
    """Returns arguments by which a model is opened, here and by the Predictor."""
    from lightning_diffpipe.sampling.skeleton import dtype_named

    names = ("variant", "loras", "pipeline_class", "ip_adapters", "base", "quantization")
    return {name: values[name] for name in names} | {"dtype": dtype_named("dtype", values["dtype"])}


def _request(values: dict[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in _ASKED} | values["options"]


def _write_sampled(sampled: Any, values: dict[str, Any], folder: Path) -> list[str]:
    """Writes a file for each image, video or array; returns their names."""
    prompts, ending = values["prompts"], _OUTPUT_TYPES[values["output_type"]]
    if isinstance(sampled[0], list):
        ending = f".{values['video_format']}"
    per_prompt = max(1, len(sampled) // len(prompts))  # several with num_images_per_prompt
    names = [f"{number:03d}{ending}" for number in range(len(sampled))]
    for number, (name, each) in enumerate(zip(names, sampled, strict=True)):
        try:
            _write(each, folder / name, values["fps"])
        except Exception as error:  # of the encoder, the disk, or a size that no format takes
            raise DiffPipeError(
                f"cannot write {folder / name}: {type(error).__name__}: {error}"
                + ("; take video_format=gif or png" if ending == ".mp4" else "")
            ) from error
        if ending == ".mp4" and any(side % 2 for side in each[0].size):
            size = " x ".join(map(str, each[0].size))
            say(
                f"{folder / name}  last row or column twice: mp4 has even sizes, and frames are {size}"
            )
        say(f"{folder / name}  {prompts[min(number // per_prompt, len(prompts) - 1)]}")
    return names


def _write(sampled: Any, path: Path, fps: int) -> None:
    import numpy as np

    if path.suffix == ".npy":
        np.save(path, sampled)
    elif path.suffix == ".pt":
        import torch

        torch.save(sampled.cpu().clone(), path)  # of a row of a batch, without the others
    elif path.suffix == ".gif":
        # Times are whole hundredths of a second.
        sampled[0].save(
            path, save_all=True, append_images=sampled[1:], duration=round(1000 / fps), loop=0
        )
    elif path.suffix == ".mp4":
        av = _require_encoder()
        width, height = sampled[0].size
        missing = (0, height % 2), (0, width % 2), (0, 0)
        with av.open(str(path), "w") as file:
            stream = file.add_stream("libx264", rate=fps, options={"crf": "18"})
            stream.width, stream.height = width + width % 2, height + height % 2
            stream.pix_fmt = "yuv420p"  # which every player shows; a color is of two by two pixels
            for frame in sampled:
                pixels = np.pad(np.asarray(frame.convert("RGB")), missing, mode="edge")
                file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            file.mux(stream.encode())
    else:
        _as_images([sampled])[0].save(path)


def _as_images(sampled: list[Any]) -> list[Any]:
    """Returns images as they are; a video as its frames, side by side."""
    return [_rows([each], len(each)) if isinstance(each, list) else each for each in sampled]


def _rows(rows: list[list[Any]], columns: int) -> Any:
    """Lays images out like a page, each list on lines of its own."""
    from PIL import Image

    width, height = rows[0][0].size
    lines = [row[i : i + columns] for row in rows for i in range(0, len(row), columns)]
    page = Image.new("RGB", (width * columns, height * len(lines)))
    for y, line in enumerate(lines):
        for x, image in enumerate(line):
            page.paste(image, (x * width, y * height))
    return page


def _compared(images: list[Any], values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the figures of `_compare`; none, after printing why, if one process cannot sample the request."""
    import torch

    gc.collect()  # the first model, which is in cycles
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    try:
        return _compare(images, values, folder)
    except (DiffPipeError, RuntimeError, MemoryError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        say(f"{'one process':13} not compared: {reason}")
        return {}


def _compare(images: list[Any], values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Samples the request in this process alone, on as many threads; returns its seconds and the PSNRs."""
    import torch
    from PIL import Image

    from lightning_diffpipe.predictor import Predictor
    from lightning_diffpipe.sampling.report import difference, psnr

    ema, threads = values["sampler"].get("ema", True), torch.get_num_threads()
    alone = Predictor.from_pretrained(
        values["path"], "single", alone=True, ema=ema, **_common(values)
    )
    reference = alone(**_request(values))
    reference = _as_images(reference)
    pairs = list(zip(images, reference, strict=True))
    differences = [Image.fromarray(difference(a, b)) for a, b in pairs]
    page = _rows([list(images), reference, differences], min(_MAX_COLUMNS, len(images)))
    page.save(folder / _DIFFERENCE)
    decibels = [psnr(a, b) for a, b in pairs]
    seconds = f"{alone.report.step_s:.3g} s a step on {threads} thread{'s' if threads > 1 else ''}"
    distance = _how_far(decibels)
    say(f"{'one process':13} {distance} the images of one process, which takes {seconds}")
    numbers: dict[str, Any] = {
        "psnr_db": [None if math.isinf(x) else x for x in decibels],  # JSON has no infinity
        "one_process_step_s": alone.report.step_s,
        "one_process_threads": threads,  # another number may sum in another order, and change last bits
    }
    say(f"{folder / _DIFFERENCE}  this, one process, their difference times 8")
    return numbers


def _how_far(decibels: list[float]) -> str:
    """Returns a line about images by their PSNR; equal ones, whose PSNR is infinite, are counted separately.

    Example:
        >>> _how_far([41.0, math.inf, 40.0])
        'PSNR 40.50 dB, 1 of 3 equal, against'
    """
    different = [x for x in decibels if not math.isinf(x)]
    if not different:
        return "equal to"
    mean, equal = sum(different) / len(different), len(decibels) - len(different)
    return f"PSNR {mean:.2f} dB{f', {equal} of {len(decibels)} equal,' if equal else ''} against"
