"""Finds the verb, lets Hydra compose its config, and says errors in a line.

Hydra reads the arguments after the verb; the verb itself is hidden from Hydra while it parses, and
put back before the function runs, because Lightning starts further processes with `sys.argv`.
"""

import contextlib
import functools
import os
import re
import signal
import string
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException, ValidationError

from lightning_diffpipe.cli.launch import announce_loading, own_rank, print_to_nobody, quoted
from lightning_diffpipe.cli.values import (
    POSITIONS,
    VERBS,
    in_settings,
    refuse_settings,
    refuse_values,
)
from lightning_diffpipe.errors import ConfigurationError, DiffPipeError, raised_by_all

# Flags of Hydra that print something, and run nothing.
_PRINTED = {"--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i"}
# Verbs without processes and folders of runs, that shall answer at once.
_PRINTING = ("plan", "show", "diff", "data", "export")
_CONF = "lightning_diffpipe.conf"
_MISSING = object()


def _named(name: str, arguments: Sequence[str]) -> list[str]:
    """Gives arguments by position their names: `plan.json` becomes `plan=plan.json`.

    A `~` that the shell has left there, as after a name with a dot, is the user's home. Flags go last, as Hydra
    reads settings in one stretch only.
    """
    names, flags, settings = list(POSITIONS.get(name, ())), list(arguments), list[str]()
    parser = get_args_parser()
    parser.error = _refuse_flag  # type: ignore[method-assign]
    for argument in parser.parse_intermixed_args(arguments).overrides:
        flags.remove(argument)
        if names and ("=" not in argument or Path(argument).exists()):
            settings.append(f"{names.pop(0)}={quoted(argument)}")
        else:
            settings.append(re.sub(r"(?<==)~(?=/|$)", str(Path.home()), argument, count=1))
    return [*settings, *flags]


def _refuse_flag(message: str) -> NoReturn:
    raise ConfigurationError(f"{message}; settings have no dashes: trainer.max_steps=9")


def _run(name: str, arguments: Sequence[str]) -> None:
    """Lets Hydra compose the config of one verb from its arguments, and runs the verb."""
    _, function = VERBS[name]
    whole = list(sys.argv)
    started, failure = False, None

    @functools.wraps(function)
    def task(config: DictConfig) -> Any:
        nonlocal started, failure
        sys.argv, started = whole, True
        if own_rank():  # it may have composed its config a second later, and rank 0's folder counts
            with contextlib.suppress(OSError):  # the same folder, where something is
                Path(HydraConfig.get().runtime.output_dir).rmdir()
        try:
            refuse_settings(config, _expected(name), name)
            if "trainer" in config:
                announce_loading()
            refuse_values(config)
            return function(config)
        except InstantiationException as error:
            failure = in_settings(error, config)
        except (DiffPipeError, HydraException, OmegaConfBaseException) as error:
            # Past Hydra, which would print a line of its own for each process.
            failure = error

    quiet = ["hydra.output_subdir=null"] if own_rank() else []
    sys.argv = [whole[0], *quiet, *_named(name, arguments)]
    if not {"-m", "--multirun"}.isdisjoint(arguments):
        with raised_by_all():
            raise ConfigurationError(
                "--multirun begins a sweep in this one process; write a loop of the shell, for example: "
                "for lr in 1e-3 1e-4; do diffpipe train model.optimization.lr=$lr; done"
            )
    try:
        _call(name, task)
    except OSError as error:
        if started or error.filename is None or isinstance(error, HydraException):
            raise
        raise ConfigurationError(
            f"cannot begin a run: {error.strerror}: {error.filename}; its folder must be one that can be "
            "written, so choose another one with hydra.run.dir=FOLDER, or start elsewhere"
        ) from error
    except yaml.YAMLError as error:
        if started:
            raise
        raise ConfigurationError(f"cannot read a config: {' '.join(str(error).split())}") from error
    except ValueError as error:
        if started or isinstance(error, DiffPipeError | HydraException | OmegaConfBaseException):
            raise
        # Flags that do not go together, or the option of a group that is no name.
        raise ConfigurationError(f"{error} ({' '.join(arguments)})") from error
    finally:
        sys.argv = whole
    if failure is not None:
        raise failure


def _call(name: str, task: Callable[[DictConfig], Any]) -> None:
    """Calls a task with the config that `sys.argv` asks for, or prints the help of a verb."""
    flags = {argument for argument in sys.argv[1:] if argument.startswith("-")}
    settings = [argument for argument in sys.argv[1:] if argument not in flags]
    helps = bool(flags) and flags <= {"--help", "-h"}
    plain = name in _PRINTING and not flags and not any(s.startswith("hydra") for s in settings)
    if helps or plain:
        with _reader_may_leave(), hydra.initialize_config_module(_CONF, version_base="1.3"):
            # `hydra.main` would compose it twice.
            whole = hydra.compose(name, overrides=settings, return_hydra_config=True)
            HydraConfig.instance().set_config(whole)
            config = _without_hydra(whole)
            OmegaConf.set_struct(config, True)
            (_print_help if helps else task)(config)
    else:
        prints = name in _PRINTING or {f.partition("=")[0] for f in flags} & _PRINTED
        with _reader_may_leave() if prints else contextlib.nullcontext():
            hydra.main(version_base="1.3", config_path=f"pkg://{_CONF}", config_name=name)(task)()


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
    """Ends without a word if whoever reads what is printed has gone, such as `head`; with the code of SIGPIPE."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        print_to_nobody()
        sys.exit(141)


def _expected(name: str) -> DictConfig:
    """Returns the config of a verb without overrides, but with the groups it has only if they are chosen."""
    config = hydra.compose(name, return_hydra_config=True)
    options = config.hydra.runtime.choices
    chosen = [
        override
        for override in HydraConfig.get().overrides.task
        if options.get(override.partition("=")[0], "") is None
    ]
    return hydra.compose(name, overrides=chosen) if chosen else _without_hydra(config)


def _without_hydra(config: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])


def _print_help(config: DictConfig) -> None:
    """Prints the help of a verb as its config says, with the groups that it has."""
    choices = HydraConfig.get().runtime.choices
    groups = list[str]()
    for group in sorted(map(str, choices)):
        folder = files(_CONF) / group
        names = folder.iterdir() if folder.is_dir() else ()
        options = sorted(f.name.removesuffix(".yaml") for f in names if f.name.endswith(".yaml"))
        groups += [f"{group}: {', '.join(options)}\n"] if options else []
    template = string.Template(HydraConfig.get().help.template)
    print(template.substitute(APP_CONFIG_GROUPS="".join(groups), CONFIG=OmegaConf.to_yaml(config)))


def _explain(error: Exception) -> str:
    """Returns an error in one line; Hydra's without details of its own code."""
    if isinstance(error, InstantiationException) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, DiffPipeError):
        return str(error)
    if isinstance(error, OverrideParseException) and "=" in error.override:
        setting, _, value = error.override.partition("=")
        text = '["...", "..."]' if value.startswith("[") else f'"{value}"'
        return (
            f"cannot read {error.override}: put texts in quotes, and all in those of the shell: "
            f"'{setting}={text}'"
        )
    message = _said(error)
    if isinstance(error.__cause__, ValidationError):
        message += f": {_said(error.__cause__)}"
    key = re.search(r"full_key: ([\w.]*\.\w+)", str(error))
    message = f"{message} ({key[1]})" if key and key[1] not in message else message
    if lacking := re.match(r"(Could not override '(\w+)\.([\w.]+)')", message):
        options = [f"{lacking[2]}={option}" for option in _options_with(*lacking.groups()[1:])]
        if options:
            return (
                f"{lacking[1]}: it is a setting of {' or '.join(options[:3])}, which is not chosen"
            )
    if "primary config" in message:
        message += " --config-dir . searches this folder, too"
    if isinstance(error, MissingMandatoryValue) and "data.folder" in message:
        message += (
            "; it holds images or videos with captions: cat.txt next to cat.png, or metadata.jsonl with a line for "
            'each, such as {"file_name": "cat.png", "text": "a cat"}'
        )
    return message


def _options_with(group: str, setting: str) -> list[str]:
    """Returns the options of a group that have a setting."""
    folder, found = files(_CONF) / group, list[str]()
    for file in sorted(folder.iterdir(), key=str) if folder.is_dir() else ():
        if file.name.endswith(".yaml"):
            node = yaml.safe_load(file.read_text())
            for name in setting.split("."):
                node = node[name] if isinstance(node, dict) and name in node else _MISSING
            found += [] if node is _MISSING else [file.name.removesuffix(".yaml")]
    return found


def _said(error: Exception) -> str:
    text = re.split(r"\s*(?:Config search path|full_key|See https)", str(error))[0]
    return re.sub(r"^\w+ raised while resolving interpolation: ", "", " ".join(text.split()))


def _is_of_all_ranks(error: Exception) -> bool:
    """Returns whether rank 0 finds this error as well: all agreed on it, or it is in the arguments of all."""
    if isinstance(error.__cause__, DiffPipeError):  # raised while Hydra builds an object
        error = error.__cause__
    if isinstance(error, DiffPipeError):
        return error.is_of_all_ranks
    if isinstance(error, MissingConfigException):  # one host's folder may lack a file
        return False
    alike = (ConfigCompositionException, OverrideParseException, MissingMandatoryValue)
    return isinstance(error, alike)


def main() -> None:
    """Runs the `diffpipe` command; exits with 2 if it was called wrongly, with 130 if somebody ends it."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help", "help"):
        width = max(map(len, VERBS))
        lines = [f"  {verb:{width}}  {summary}" for verb, (summary, _) in VERBS.items()]
        with _reader_may_leave():
            print("diffpipe VERB [group=option] [key=value] ...", "", *lines, "", sep="\n")
            print("diffpipe VERB --help lists the groups and settings of a verb;")
            print("diffpipe VERB --cfg job prints the composed config without running it.")
        return
    if name not in VERBS:
        print(f"diffpipe: there is no verb {name!r}; verbs: {', '.join(VERBS)}", file=sys.stderr)
        sys.exit(2)
    # Modules of the user's own are looked for where the command is called, as `python -m` does.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    # Exceptions come to us whole, so that expected ones can be said in a line.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        _run(name, arguments)
    except (DiffPipeError, HydraException, OmegaConfBaseException) as error:
        rank = own_rank()
        if rank == 0 or not _is_of_all_ranks(error):  # else rank 0 says it for all
            who = f"rank {rank}: " if rank else ""
            print(f"diffpipe {name}: {who}{_explain(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # a terminal sends it to all processes
        if own_rank() == 0:
            print(f"\ndiffpipe {name}: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
