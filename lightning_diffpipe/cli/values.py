"""Verbs by name, and values that cannot be, refused by the name that the user gave them.

Types of the verbs' own settings are structured configs in Hydra's store, with which a verb's config begins
(`defaults: [settings_train, ...]`): Hydra refuses values of other types. Further mistakes are found by what is
built; those errors name an argument, and get the name of its setting.
"""

import json
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from lightning_diffpipe.cli.launch import own_rank
from lightning_diffpipe.errors import (
    ConfigurationError,
    DiffPipeError,
    raised_by_all,
    require_number,
)

VERBS: dict[str, tuple[str, Callable[[DictConfig], Any]]] = {}

# Settings that may be given by position: `diffpipe show plan.json`.
POSITIONS = {
    "show": ("plan",),
    "diff": ("before", "after"),
    "export": ("checkpoint", "output"),
}

_TEXT, _WHOLE = str | None, int | None
_PROCESS: dict[str, Any] = {"seed": _WHOLE, "offline": bool, "num_threads": _WHOLE}
TYPES: dict[str, dict[str, Any]] = {
    "train": {
        **_PROCESS,
        **dict.fromkeys(("name", "ckpt_path", "save_to", "lora_from", "save_lora"), _TEXT),
        **dict.fromkeys(("attention", "compile"), _TEXT),
        **{"output_dir": str, "save_dtype": str, "save_lora_every_n_steps": _WHOLE},
        "save_lora_keep_last": _WHOLE,
    },
    "sample": {
        **_PROCESS,
        **dict.fromkeys(("path", "output_type", "video_format"), str),
        **dict.fromkeys(("dtype", "pipeline_class", "base", "variant", "output"), _TEXT),
        **{"num_inference_steps": int, "fps": int, "height": _WHOLE, "width": _WHOLE},
        **{"guidance_scale": float | None, "timeout_s": float, "report": bool, "progress": bool},
        **{"busy_timeout_s": float | None, "vae_tiling": bool, "vae_slicing": bool},
        **{"quantization": Any},
        **{"decoding": str, "compile": _TEXT, "attention": _TEXT, "cache": Any},
    },
    "profile": {
        **_PROCESS,
        **{"output": _TEXT, "name": _TEXT, "cluster_output": str, "precision": str, "device": str},
        **{"sample_counts": list[int] | None, "repeats": _WHOLE, "budget_s": float},
        **{"max_share": float, "progress": bool},
    },
    "plan": {"profile": _TEXT, "output": _TEXT, "explain_s": float}
    | dict.fromkeys(("explain", "encode_first"), bool),
    "show": {"plan": str, "profile": _TEXT, "output": _TEXT, "max_columns": int, "samples": int},
    "data": {"tokenizer": _TEXT, "output": _TEXT, "samples": int},
    "diff": {"before": str, "after": str},
    "export": {"checkpoint": str, "output": str},
}
# Of the group `model`, where it is for `diffpipe plan`: arguments of `ModelOnPaper`.
_PAPER = {"path": _TEXT, "device": str, "dtype": str, "expert": _TEXT, "with_reference": bool}
_PAPER |= dict.fromkeys(("resolution", "num_frames", "lora_rank"), _WHOLE)

for _verb, _types in TYPES.items():
    _node = OmegaConf.structured(make_dataclass(_verb, _types.items()))
    OmegaConf.set_struct(_node, False)  # groups stand next to them
    ConfigStore.instance().store(name=f"settings_{_verb}", node=_node)
_paper = make_dataclass("paper", (_PAPER | {"call": Any, "quantization": Any}).items())
ConfigStore.instance().store(group="model", name="settings_on_paper", node=_paper)


def verb(summary: str) -> Callable[[Callable[[DictConfig], Any]], Callable[[DictConfig], Any]]:
    """Registers a function as a verb, with a line for `diffpipe --help`."""

    def register(function: Callable[[DictConfig], Any]) -> Callable[[DictConfig], Any]:
        VERBS[function.__name__] = (summary, function)
        return function

    return register


_POSITIVE = ("num_inference_steps", "height", "width", "timeout_s", "busy_timeout_s", "repeats",
             "budget_s", "max_share", "explain_s", "max_columns", "samples", "fps")  # fmt: skip


@raised_by_all()
def refuse_settings(config: DictConfig, expected: DictConfig, verb: str) -> None:
    """Raises ConfigurationError for settings that nothing would read, that are missing, or that are no group.

    Args:
        config: Config of a verb, as it was asked for; values to which its own settings refer may have any name.
        expected: Config of the verb without overrides.
        verb: Name of the verb.
    """
    for name in map(str, expected):
        if name not in config.keys():  # noqa: SIM118, as a value that must be given is not "in" it
            raise ConfigurationError(
                f"the setting {name} has been deleted; leave ~ out, and let a config of your own begin with "
                f"defaults: [{verb}, _self_]"
            )
        if OmegaConf.is_dict(expected._get_node(name)) and not OmegaConf.is_dict(
            config._get_node(name)
        ):
            raise ConfigurationError(
                f"{name}={config[name]} is no group of settings; leave it out, or take one that --help lists"
            )
    # A line for each value.
    text = json.dumps(OmegaConf.to_container(config), indent=0, default=str)
    names = [str(name) for name in expected]
    for name in map(str, config):
        # Anywhere in an interpolation, but for later names of a path.
        is_read = re.search(rf"\$\{{.*(?<![\w.])\.*{re.escape(name)}\b", text)
        if name not in names and not is_read:
            raise ConfigurationError(
                f"{name} changes nothing, as no setting has this name or refers to it; `diffpipe {verb} --help` "
                f"shows those of {', '.join(names)}"
            )


@raised_by_all()
def refuse_values(config: DictConfig) -> None:
    """Raises ConfigurationError for a number of a verb that is out of range, before anything is built."""
    for name in _POSITIVE:
        if config.get(name) is not None:
            require_number(name, config[name], above=0)
    for name, least, most in (("seed", 0, 2**32 - 1), ("num_threads", 1, 1024)):
        if config.get(name) is not None:
            require_number(name, config[name], least, most, whole=True)
    counts = config.get("sample_counts")
    if counts is not None and min(counts, default=0) < 1:
        raise ConfigurationError(
            f"sample_counts must be whole numbers >= 1, such as [1,4,16]; got {counts}"
        )


@contextmanager
def named(arguments: Mapping[str, str]) -> Iterator[None]:
    """Replaces arguments in errors by their settings, such as `{"num_stages": "strategy.num_stages"}`."""
    try:
        yield
    except DiffPipeError as error:
        error.args = (with_settings(str(error), arguments), *error.args[1:])
        raise


def with_settings(message: str, arguments: Mapping[str, str]) -> str:
    """Returns a message, with the first argument in it that has a value there under the name of its setting.

    Example:
        >>> with_settings("seed must be >= 0; got -1", {"seed": "strategy.seed"})
        'strategy.seed must be >= 0; got -1'
    """
    names = "|".join(map(re.escape, arguments))
    pattern = rf"(?<![\w.])({names})(?==| must | names | is | has |: )"
    return (
        re.sub(pattern, lambda match: arguments[match[1]], message, count=1) if names else message
    )


def in_settings(error: InstantiationException, config: DictConfig) -> Exception:
    """Returns the error of a constructor with the name of its setting, and the place if it is in user code."""
    cause, full_key = error.__cause__, re.search(r"^full_key: (\S+)", str(error), re.MULTILINE)
    if full_key is None or not isinstance(cause, Exception):
        return error
    key = full_key[1].replace("trainer.strategy", "strategy")  # to which it points
    if isinstance(cause, DiffPipeError):
        settings = {str(name): f"{key}.{name}" for name in OmegaConf.select(config, key) or ()}
        cause.args = (with_settings(str(cause), settings), *cause.args[1:])
        return error
    text = " ".join(f"{type(cause).__name__}: {cause}".removesuffix(": ").split())
    frames = traceback.extract_tb(cause.__traceback__)
    places = [f" ({f.filename}:{f.lineno})" for f in frames if not _is_of_library(f.filename)]
    refusal = ConfigurationError(f"{key}: {text}{places[-1] if places else ''}")
    refusal.__cause__ = cause
    return refusal


def _is_of_library(path: str) -> bool:
    """Returns whether code was installed, with Python or as a package."""
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {Path(sysconfig.get_path(kind)) for kind in kinds}
    packaged = not {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)
    return path.startswith("<") or packaged or not folders.isdisjoint(Path(path).parents)


@contextmanager
def file_errors(verb: str, path: str) -> Iterator[None]:
    """Turns errors of a file that the user named into a ConfigurationError of one line."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"cannot {verb} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"cannot {verb} {path}: it is not text; plans, profiles and clusters are JSON"
        ) from error


def require_writable(path: str | Path, called: str | None = None) -> None:
    """Raises ConfigurationError, before long work, if its result cannot be written; calls the path `called`."""
    from lightning_diffpipe.files import check_writable

    with file_errors("write", called or str(path)):
        check_writable(Path(path))


def require_writable_folder(setting: str, path: str | None) -> None:
    """Raises ConfigurationError on rank 0 if the folder of a setting, which need not exist, cannot be written."""
    if path is not None and own_rank() == 0:
        require_writable(Path(path) / "any", f"{setting}={path}")


class _Values(dict[str, Any]):
    """Values by the names of their settings, of which `~group.name` may have deleted some."""

    def __missing__(self, name: str) -> Any:
        raise ConfigurationError(f"the setting {name} has been deleted; leave ~ out")


def plain(config: DictConfig) -> dict[str, Any]:
    """Returns a config as plain values; raises MissingMandatoryValue if one has to be given."""
    values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(values, dict)
    return {str(k): _Values(v) if isinstance(v, dict) else v for k, v in values.items()}
