"""Verbs by name, and values that cannot be, refused by the name that the user gave them.

Hydra knows the types of the verbs' own settings (`settings.py`). What a `_target_` takes is in its signature: each
value below it is compared with the annotation of its argument, before anything is built. Further mistakes are found
by what is built; those errors name an argument, and get the name of its setting.
"""

from __future__ import annotations

import inspect
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


_POSITIVE = ("num_inference_steps", "height", "width", "timeout_s", "repeats", "budget_s", "max_share", "explain_s",
             "max_columns", "samples", "fps")  # fmt: skip
_SCALARS = (int, float, bool, str, type(None))
_LISTS = (list, tuple, set, frozenset, Sequence, Iterable)


@raised_by_all()
def refuse_values(config: DictConfig) -> None:
    """Refuses values of the wrong type, in all groups, and numbers out of range, before anything is built.

    Raises:
        ConfigurationError: One of them; names it as the user did.
    """
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
    for key, node in _built(config, ""):
        hints = _hints(node._target_)
        for name in hints.keys() & node.keys():
            if OmegaConf.is_missing(node, name):
                continue
            if not _fits(value := _plain(node, name), hints[name]):
                kind = re.sub(r"\b[a-z_]+(\.[a-z_]+)*\.", "", inspect.formatannotation(hints[name]))
                raise ConfigurationError(f"{key}.{name} must be {kind}; got {value!r}")


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
    values = {name: repr(_plain(node, name)) for name in settings}
    by_name = (n for n in values if re.search(rf"(?<![\w.]){re.escape(n)}(?!\w)", message))
    by_value = (n for n, value in values.items() if value.startswith("'") and value in message)
    name = next(by_name, None) or next(by_value, None)
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


def _fits(value: Any, hint: Any) -> bool:
    """Returns whether a plain value may be what an annotation says; where that is not known, it may."""
    kind, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in inner)
    if kind is Literal:
        return value in inner
    if value is None:
        return kind not in (*_SCALARS[:-1], *_LISTS, Path, dict)
    if isinstance(value, dict):  # which may say what to build
        return kind not in (*_SCALARS, *_LISTS, Path)
    if isinstance(value, list):
        return kind not in (*_SCALARS, Path, dict, Mapping) and all(
            any(_fits(each, part) for part in inner if part is not ...) or not inner
            for each in value
        )
    if kind in _SCALARS:
        return type(value) is kind or (kind is float and type(value) is int)
    return kind not in (*_LISTS, dict, Mapping)


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
