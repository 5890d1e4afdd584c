"""Values that cannot be, refused by the name that the user gave them.

What a `_target_` takes is in its signature: each value below it is compared with the annotation of its
argument, before anything is built. What a verb takes itself is in `SETTINGS`. Further mistakes are found by
what is built; those errors name an argument, and get the name of its setting.

Verbs register themselves here (`verb`), and have the files written and read here that a setting names.
"""

from __future__ import annotations

import inspect
import json
import math
import pkgutil
import re
import sysconfig
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

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
POSITIONS = {"show": ("plan",), "diff": ("before", "after")}


def verb(summary: str) -> Callable[[Callable[[DictConfig], Any]], Callable[[DictConfig], Any]]:
    """Registers a function as a verb of the command line.

    Args:
        summary: One line for `diffpipe --help`.
    """

    def register(function: Callable[[DictConfig], Any]) -> Callable[[DictConfig], Any]:
        VERBS[function.__name__] = (summary, function)
        return function

    return register


SETTINGS: dict[str, Any] = {
    "seed": int | None,
    "offline": bool,
    "num_threads": int | None,
    "progress": bool,
    "output": str | None,
    # train, demo
    "name": str | None,
    "output_dir": str,
    "ckpt_path": str | None,
    "save_to": str | None,
    "save_lora": str | None,
    "save_lora_names": dict | None,
    "save_dtype": str,
    # sample, demo
    "path": str,
    "prompts": list[str] | list[int],
    "num_inference_steps": int,
    "guidance_scale": float | None,
    "height": int | None,
    "width": int | None,
    "images": dict | None,
    "options": dict | None,
    "output_type": str,
    "video_format": str,
    "fps": int,
    "pipeline_class": str | None,
    "vae_tiling": bool,
    "vae_slicing": bool,
    "report": bool,
    "dtype": str,
    "variant": str | None,
    "loras": dict | None,
    "ip_adapters": dict | None,
    "base": str | None,
    "timeout_s": float,
    # profile
    "cluster_output": str,
    "sample_counts": list[int] | None,
    "repeats": int | None,
    "budget_s": float,
    "max_share": float,
    "precision": str,
    "device": str,
    # plan, show, diff
    "profile": str | None,
    "plan": str,
    "before": str,
    "after": str,
    "explain": bool,
    "explain_s": float,
    "as": str,
    "max_columns": int,
    "samples": int,
}
"""Settings of the verbs themselves; one name means one thing in all of them."""

_POSITIVE = {"num_inference_steps", "height", "width", "timeout_s", "repeats", "budget_s", "max_share", "explain_s",
             "max_columns", "samples", "num_threads", "fps"}  # fmt: skip
_MOST = {"seed": 2**32 - 1, "num_threads": 1024}  # more threads than a process may start end it
_SINGLE = (int, float, bool, str, Path, type(None), Literal)
_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
    dict: "a mapping",
    type(None): "null",
}
_PLURAL = {"a whole number": "whole numbers", "a number": "numbers", "a text": "texts"}
_LISTS = (list, tuple, set, frozenset, Sequence, Iterable)


@raised_by_all()
def refuse_values(config: DictConfig) -> None:
    """Refuses values of the wrong type, in all groups and settings, before anything is built.

    Raises:
        ConfigurationError: One of them; names it as the user did.
    """
    for name in SETTINGS.keys() & config.keys():
        if OmegaConf.is_missing(config, name):
            continue
        value = _plain(config, name)
        _refuse(name, value, SETTINGS[name])
        if name in _POSITIVE and value is not None and not 0 < value < math.inf:
            words = _words(SETTINGS[name])
            raise ConfigurationError(f"{name} must be {words}, and > 0; got {_written(value)}")
        if name == "sample_counts" and value is not None and (not value or min(value) < 1):
            raise ConfigurationError(
                f"{name} must be a list of whole numbers >= 1, such as [1,4,16], or null; got {value}"
            )
        if name in _MOST and value is not None:
            require_number(name, value, int(name in _POSITIVE), _MOST[name], whole=True)
    for key, node in _built(config, ""):
        hints = _hints(node._target_)
        for name in hints.keys() & node.keys():
            if not OmegaConf.is_missing(node, name):
                _refuse(f"{key}.{name}", _plain(node, name), hints[name])


@contextmanager
def named(arguments: Mapping[str, str]) -> Iterator[None]:
    """Gives arguments in errors the names of their settings.

    Args:
        arguments: Setting by argument: `{"num_stages": "strategy.num_stages"}`.
    """
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
        re.sub(pattern, lambda found: arguments[found[1]], message, count=1) if names else message
    )


def in_settings(error: InstantiationException, config: DictConfig) -> Exception:
    """Returns what went wrong when something was built, about the setting that it names.

    That of installed code becomes one of an argument that it names, or whose value; one of the user's code stays.
    """
    cause, found = error.__cause__, re.search(r"^full_key: (\S+)", str(error), re.MULTILINE)
    if found is None or not isinstance(cause, Exception):
        return error
    key = _origin(config, found[1])
    node = OmegaConf.select(config, key)
    if not OmegaConf.is_dict(node):
        return error
    settings = {str(name): f"{key}.{name}" for name in node if not str(name).startswith("_")}
    if isinstance(cause, DiffPipeError):
        cause.args = (with_settings(str(cause), settings), *cause.args[1:])
        return error
    if not all(is_of_library(f.filename) for f in traceback.extract_tb(cause.__traceback__)):
        return error
    message = " ".join(str(cause).split())
    values = {name: _written(_plain(node, name)) for name in settings}
    words = message.split()
    ways = (
        lambda name, value: re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", message),
        lambda name, value: value.strip("'") in words,
        lambda name, value: value.startswith("'") and value in message,
    )
    meant = (n for is_meant in ways for n, value in values.items() if is_meant(n, value))
    name = next(meant, None)
    about = f"{settings[name]}={values[name]}" if name else f"{key}: {type(cause).__name__}"
    refusal = ConfigurationError(f"{about}: {message}")
    refusal.__cause__ = cause
    return refusal


def is_of_library(path: str) -> bool:
    """Returns whether code was installed, with Python or as a package."""
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {Path(sysconfig.get_path(kind)) for kind in kinds}
    packaged = not {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)
    return path.startswith("<") or packaged or not folders.isdisjoint(Path(path).parents)


def _origin(config: DictConfig, key: str) -> str:
    """Returns where a node is that others point to: `strategy` for `trainer.strategy: ${strategy}`."""
    place, _, name = key.rpartition(".")
    parent = OmegaConf.select(config, place) if place else config
    if OmegaConf.is_dict(parent) and OmegaConf.is_interpolation(parent, name):
        pointed = re.fullmatch(r"\$\{([\w.]+)\}", str(parent._get_node(name)._value()))
        return pointed[1] if pointed else key
    return key


def _plain(config: DictConfig, name: str) -> Any:
    value = config[name]
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _built(config: Any, key: str) -> Iterator[tuple[str, DictConfig]]:
    """Yields what is to be built, and where it is; what a value points to has its own place."""
    if not OmegaConf.is_dict(config):
        return
    if isinstance(config.get("_target_"), str):
        yield key, config
    for name in config:
        if not OmegaConf.is_interpolation(config, name) and not OmegaConf.is_missing(config, name):
            yield from _built(config[name], f"{key}.{name}" if key else str(name))


def _hints(target: str) -> dict[str, Any]:
    """Returns the annotations of what a target takes; nothing of a target that cannot be found or read."""
    # Whoever builds it says what is wrong with it.
    with suppress(ImportError, AttributeError, NameError, TypeError, ValueError):
        function: Callable[..., Any] = pkgutil.resolve_name(target)
        owner = function if inspect.isclass(function) else getattr(function, "__self__", None)
        # A constructor by another name, such as `from_pretrained`, gives on what it does not know.
        makers = [m for m in (owner and owner.__init__, function) if inspect.isroutine(m)]
        found: dict[str, Any] = {}
        for maker in makers:
            hints, known = typing.get_type_hints(maker), inspect.signature(maker).parameters
            found |= {
                name: hints[name] | None if known[name].default is None else hints[name]
                for name in hints.keys() & known.keys()
            }
        return found
    return {}


def _refuse(setting: str, value: Any, hint: Any) -> None:
    if not _fits(value, hint):
        is_text = str in _parts(hint) and isinstance(value, int | float)
        cure = f"""; as a text: '{setting}="{value}"'""" if is_text else ""
        raise ConfigurationError(f"{setting} must be {_words(hint)}; got {_written(value)}{cure}")


def _parts(hint: Any) -> tuple[Any, ...]:
    """Returns what an annotation offers to choose from."""
    is_choice = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return (
        tuple(x for part in typing.get_args(hint) for x in _parts(part)) if is_choice else (hint,)
    )


def _kind(hint: Any) -> Any:
    return typing.get_origin(hint) or hint


def _fits(value: Any, hint: Any) -> bool:
    """Returns whether a plain value may be what an annotation says; where that is not known, it may."""
    parts = _parts(hint)
    known = any(_kind(part) in (*_SINGLE, *_LISTS, dict) for part in parts)
    if value is None or not (known or isinstance(value, list | dict)):
        return type(None) in parts or not known
    return any(_is(value, part) for part in parts)


def _is(value: Any, hint: Any) -> bool:
    """Returns whether a value may be what one annotation says; a mapping may say what to build."""
    kind = _kind(hint)
    if kind is Literal:
        return value in typing.get_args(hint)
    if isinstance(value, dict):
        return kind not in (*_SINGLE, *_LISTS)
    if isinstance(value, list):
        inner = [part for part in typing.get_args(hint) if part is not ...]
        if kind not in _LISTS:
            return kind not in (*_SINGLE, dict, Mapping)
        return not inner or all(any(_fits(v, part) for part in inner) for v in value)
    # Hydra reads digits as a number, and a path may be of digits.
    taken = {bool: bool, int: int, float: int | float, str: str, Path: object}
    return isinstance(value, taken.get(kind, ())) and (kind is bool or not isinstance(value, bool))


def _words(hint: Any) -> str:
    """Returns what an annotation asks for, in words; of several, those that can be written in a config."""
    parts = [part for part in _parts(hint) if part is not int or float not in _parts(hint)]
    words: list[str] = []
    for part in parts:
        kind = _kind(part)
        if kind is Literal:
            words += [repr(choice) for choice in typing.get_args(part)]
        elif kind in _LISTS:
            inner = {_words(each) for each in typing.get_args(part) if each is not ...}
            plural = [f"a list of {_PLURAL[word]}" for word in inner if word in _PLURAL]
            words += plural or ["a list"]
        elif kind in _WORDS:
            words += ["true", "false"] if kind is bool else [_WORDS[kind]]
    *others, last = dict.fromkeys(words) or [str(hint)]
    return f"{', '.join(others)} or {last}" if others else last


def _written(value: Any) -> str:
    """Returns a value as one would write it in a config."""
    if isinstance(value, float) and "e" in (short := f"{value:g}") and float(short) == value:
        return short.replace("e+", "e")
    return json.dumps(value) if isinstance(value, bool | None) else repr(value)


@contextmanager
def file_errors(verb: str, path: str) -> Iterator[None]:
    """Says in a line why a file that the user named cannot be read or written."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"cannot {verb} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"cannot {verb} {path}: it is not text; plans, profiles and clusters are JSON"
        ) from error


def require_writable(path: str | Path, called: str | None = None) -> None:
    """Finds out before long work whether its result can be written.

    Args:
        path: Of a file.
        called: What the error calls it; the path if not given.

    Raises:
        ConfigurationError: It cannot be written.
    """
    from lightning_diffpipe.files import check_writable

    with file_errors("write", called or str(path)):
        check_writable(Path(path))


def require_writable_folder(setting: str, path: str | None) -> None:
    """Finds out on rank 0 whether the folder of a setting can be written, which need not be there.

    Args:
        setting: Its name, for the error.
        path: Of the folder; None is no folder.

    Raises:
        ConfigurationError: It cannot be written.
    """
    if path is not None and own_rank() == 0:
        require_writable(Path(path) / "any", f"{setting}={path}")


def plain(config: DictConfig) -> dict[str, Any]:
    """Resolves a config to plain values.

    Raises:
        MissingMandatoryValue: The user has to say something more.
    """
    values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}
