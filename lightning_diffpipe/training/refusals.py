"""What cannot work with a pipeline, refused with its reason: before training starts, or else where it happens.

Silent wrongness is worse than a refusal: Lightning's weight averaging, for one, copies the module
before it is cut and would then average the weights of one stage into another, without any error.

Each function raises a ConfigurationError that says what cannot work, why, and what to do instead; a PlanError where
a plan was made for another module.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import dis
import functools
import inspect
import itertools
import logging
import traceback
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from lightning_diffpipe.errors import ConfigurationError, PlanError, raised_by_all
from lightning_diffpipe.graph.calltree import (
    has_backward_hooks,
    has_global_backward_hooks,
    is_compiled,
)
from lightning_diffpipe.graph.chains import Chains
from lightning_diffpipe.graph.cut import Cut
from lightning_diffpipe.graph.layer import Attribute, LayerGraph
from lightning_diffpipe.graph.placement import is_placeholder
from lightning_diffpipe.graph.probe import reprobe
from lightning_diffpipe.graph.side_effects import is_users, line_that_draws
from lightning_diffpipe.planning.instruction import ForwardNoGrad
from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.planning.schedule import Schedule
from lightning_diffpipe.training.patching import patched

_log = logging.getLogger(__name__)


def refuse_unsupported(trainer: Any, strategy: Any) -> None:
    """Refuses modules, callbacks and precisions that no pipeline can train with."""
    module = strategy.lightning_module
    if not module.automatic_optimization:
        raise ConfigurationError(
            "manual optimization (automatic_optimization=False) cannot be pipelined: the schedule runs "
            "forward and backward of all microbatches itself. Return the loss from training_step; instead of "
            "several optimizers give one a parameter group for each backbone, with its own learning rate"
        )
    if is_overridden("backward", module):
        raise ConfigurationError(
            f"{type(module).__name__}.backward is overridden, but the schedule has run every backward "
            "before Lightning would call it. Scale the loss in training_step instead"
        )
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        if is_param_in_hook_signature(getattr(module, name), "dataloader_iter", explicit=True):
            raise ConfigurationError(
                f"{type(module).__name__}.{name} takes dataloader_iter and fetches batches itself, but one rank "
                "of a pipeline loads for all, and a batch is cut before the step is run. Take (batch, batch_idx)"
            )
    several = not (strategy.world_size == 1 or strategy.is_one_stage)
    for callback in trainer.callbacks:
        if isinstance(callback, ModelPruning) and several:
            raise ConfigurationError(
                f"{type(callback).__name__} compares weights of all layers and puts masks on them, but a rank of a "
                "pipeline holds those of its own stage only. Prune after training, or train with num_stages=1"
            )
        if isinstance(callback, StochasticWeightAveraging) or (
            isinstance(callback, WeightAveraging) and several
        ):
            raise ConfigurationError(
                f"{type(callback).__name__} copies the module before it is cut into stages and would "
                "average weights of different stages. Use lightning_diffpipe.EMA"
                + (", or num_stages=1" if isinstance(callback, WeightAveraging) else "")
            )
        if isinstance(callback, BaseFinetuning):
            _refuse_unfreezing(callback, trainer.max_epochs)
    precision = strategy.precision_plugin
    if isinstance(precision, MixedPrecision) and precision.scaler is not None:
        raise ConfigurationError(
            "precision='16-mixed' needs one loss scale agreed by all stages, which is not supported; "
            "use precision='bf16-mixed' or '32-true'"
        )
    if strategy.root_device.type == "cuda":
        refuse_cuda_graphs(module)


def refuse_cuda_graphs(module: nn.Module) -> None:
    """Refuses blocks whose compiler records CUDA graphs."""
    for name, part in module.named_modules():
        for compiled in (part, part._compiled_call_impl):
            config = getattr(compiled, "get_compiler_config", dict)()
            if config and config.get("triton.cudagraphs"):
                raise ConfigurationError(
                    f"{name} is compiled with CUDA graphs (mode='reduce-overhead' or 'max-autotune'), which write "
                    "outputs of a call over those of the one before, but a pipeline needs those of several "
                    "microbatches until their backwards; leave the mode out, or take 'max-autotune-no-cudagraphs'"
                )


def _refuse_unfreezing(callback: BaseFinetuning, max_epochs: int | None) -> None:
    """Refuses callbacks that train what was frozen; else the run would end where they do, perhaps after days."""
    code = getattr(type(callback).finetune_function, "__code__", None)
    names = _names_in(code) if code else set()
    begin = getattr(callback, "unfreeze_backbone_at_epoch", 0)
    comes = max_epochs in (None, -1) or begin < max_epochs
    if comes and names & {"unfreeze_and_add_param_group", "make_trainable"}:
        raise ConfigurationError(
            f"{type(callback).__name__} unfreezes layers during training, but a plan that was made with them "
            "frozen computes no gradients for them. Train with them frozen (requires_grad_(False)) and without the "
            "callback, and then again with them trainable, from the checkpoint's weights"
        )


def refuse_on_several_ranks(trainer: Any, strategy: Any) -> None:
    """Refuses what one rank can train with, and several cannot.

    A checkpoint that would be collected from ranks of which one has just failed, or stands elsewhere; batch norms
    that look beyond a rank, at all ranks, most of which run other layers.
    """
    for callback in trainer.callbacks:
        option = "this callback" if isinstance(callback, OnExceptionCheckpoint) else ""
        if isinstance(callback, ModelCheckpoint) and callback.save_on_exception:
            option = "save_on_exception=True"
        if option:
            raise ConfigurationError(
                f"{type(callback).__name__} saves when training fails, but weights are divided over "
                f"{strategy.world_size} ranks, and when one fails the others stand in the middle of a step, so "
                f"that nothing whole can be saved. Leave out {option} and save while all is well: "
                "ModelCheckpoint(every_n_train_steps=...) or ModelCheckpoint(train_time_interval=...)"
            )
    for name, norm in strategy.lightning_module.named_modules():
        synchronized = strategy._layer_sync is not None or isinstance(norm, nn.SyncBatchNorm)
        if synchronized and norm.training and isinstance(norm, _BatchNorm):
            raise ConfigurationError(
                f"{name} ({type(norm).__name__}) would take its statistics over all {strategy.world_size} ranks "
                "(sync_batchnorm=True, or an nn.SyncBatchNorm), but ranks of a pipeline run other layers. Leave "
                "that out if statistics of a microbatch on one rank will do; else use nn.GroupNorm, or call "
                ".eval() of the norms before trainer.fit"
            )


def refuse_without_flush(trainer: Any, schedule: str) -> None:
    """Refuses what looks at gradients or weights of all stages at a time, with a schedule that does not flush."""
    from lightning_diffpipe.callbacks.ema import EMA
    from lightning_diffpipe.callbacks.monitor import PipelineMonitor

    remedy = "choose a schedule that flushes, such as 1f1b"
    if trainer.accumulate_grad_batches != 1:
        raise ConfigurationError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} with schedule={schedule}: every batch has "
            f"weights of its own, and its stages step as soon as it has come back. Leave it out and give "
            "larger batches, which pipedream_2bw cuts into microbatches"
        )
    by_value = trainer.gradient_clip_algorithm == "value"
    if trainer.gradient_clip_val and not by_value:
        raise ConfigurationError(
            f"gradient_clip_val={trainer.gradient_clip_val} clips by the norm over all stages, but with "
            f"schedule={schedule} they have gradients of different batches at a time. "
            f"Clip by value (gradient_clip_algorithm='value'), or {remedy}"
        )
    for callback in trainer.callbacks:
        if isinstance(callback, EMA):
            raise ConfigurationError(
                f"EMA averages the weights after every step, but with schedule={schedule} stages have weights of "
                f"different versions there; leave it out, or {remedy}"
            )
    module = trainer.lightning_module
    # The monitor looks at no gradients where there are none.
    others = [c for c in trainer.callbacks if not isinstance(c, PipelineMonitor)]
    hooks = {
        "configure_gradient_clipping": [module],
        "optimizer_step": [module],
        "on_before_optimizer_step": [module, *others],
    }
    for hook, owners in hooks.items():
        for owner in owners:
            if is_overridden(hook, owner):
                raise ConfigurationError(
                    f"{type(owner).__name__}.{hook} is overridden, but with schedule={schedule} each stage "
                    "steps inside of training_step, and Lightning's own step finds no gradients. Leave it out, "
                    f"or {remedy}"
                )


def refuse_averages(trainer: Any, module: nn.Module) -> None:
    """Refuses averages of weights that module or callbacks keep themselves, where there are several stages.

    They would average the placeholders of other ranks' weights, which are NaN, and nothing would show it until
    somebody looks at the checkpoint.
    """
    owners = [(f"{name}." if name else "", owner) for name, owner in module.named_modules()]
    owners += [(f"{type(c).__name__}.", c) for c in trainer.callbacks]
    for prefix, owner in owners:
        for name, value in _attributes(owner):
            classes = type(value).__mro__
            kinds = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in classes}
            named = any(k.endswith(_AVERAGING_NAMES) for k in kinds) or "ema_pytorch.EMA" in kinds
            has_shadows = "shadow_params" in getattr(value, "__dict__", ())
            if isinstance(value, AveragedModel) or named or has_shadows:
                raise ConfigurationError(
                    f"{prefix}{name} is a {type(value).__name__}, which averages weights, but in a pipeline a "
                    "rank holds the weights of its own stage only, so that the averages of all others "
                    "would become NaN, in checkpoints too. Leave it out (e.g. use_ema=False) and add the callback "
                    "lightning_diffpipe.EMA, which averages on every rank what lives there; or train with "
                    "num_stages=1"
                )


def refuse_copies(trainer: Any, pipeline: Any) -> None:
    """Refuses copies of weights by name that hold what stands for those of other ranks: NaN.

    They may be averages that a callback keeps, to be loaded into the module at the end.

    Raises:
        ConfigurationError: There are some; says where.
    """
    foreign = {n for n, p in pipeline.module.named_parameters() if is_placeholder(p)}
    owners = [("", pipeline.module), *((f"{type(c).__name__}.", c) for c in trainer.callbacks)]
    for prefix, owner in owners if foreign else ():
        for name, held in vars(owner).items():
            copies = _nan_copies(held, foreign) if name != "_parameters" else []
            if copies:
                raise ConfigurationError(
                    f"{prefix}{name} has a copy of {copies[0]}, which another rank holds, so that the copy is NaN, "
                    "as are those of all weights of other stages. Read weights on all ranks inside `with "
                    "self.trainer.strategy.whole_model():`; for averages add the callback lightning_diffpipe.EMA, "
                    "or train with num_stages=1"
                )


def _nan_copies(held: Any, names: Collection[str]) -> list[str]:
    found = {n: held[n] for n in names if n in held} if isinstance(held, dict) else {}
    copies = ((n, v) for n, v in found.items() if isinstance(v, Tensor) and not is_placeholder(v))
    return sorted(n for n, v in copies if v.numel() and bool(v.isnan().all()))


_AFTER_GRADIENTS = (
    "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad",
    "configure_gradient_clipping", "optimizer_step",
)  # fmt: skip
_DRAWING = {"rand", "rand_like", "randn", "randn_like", "normal", "normal_", "uniform_"}
_COMBINING = {"norm", "vector_norm", "sum", "sqrt", "max", "isnan", "isinf", "isfinite"}


def warn_of_gradients_looked_at(trainer: Any, module: nn.Module) -> None:
    """Warns of hooks that combine gradients, or draw numbers for them: a rank has those of its own stages."""
    for owner in (module, *trainer.callbacks):
        for hook, names in _hooks_of(type(owner)):
            looks = "grad_norm" in names or ("grad" in names and names & _COMBINING)
            if hook in _AFTER_GRADIENTS and looks and "gradient_norm" not in names:
                rank_zero_warn(
                    f"{type(owner).__name__}.{hook} seems to take norms or sums of gradients, or to look whether "
                    "they are finite, and a rank has those of its own stage only: what it logs, scales by or "
                    "decides is that of one stage. self.trainer.strategy.gradient_norm(), on all ranks, gives the "
                    "norm over all stages, and self.clip_gradients(optimizer, gradient_clip_val=...) clips by it"
                )
            if hook in _AFTER_GRADIENTS and "grad" in names and names & _DRAWING:
                rank_zero_warn(
                    f"{type(owner).__name__}.{hook} seems to change gradients by random numbers, and a rank draws "
                    "them for those of its own stage only: they are others than in one process, and copies of a "
                    "weight that two stages hold, such as a tied one, come apart. Give each weight a generator of "
                    'its own: torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))'
                )


_COUNTING = {"world_size", "get_world_size", "num_devices"}


def warn_of_ranks_counted(trainer: Any, module: nn.Module, num_pipelines: int) -> None:
    """Warns of code that counts ranks, such as to scale a learning rate: batches are of pipelines."""
    for owner in filter(None, (module, trainer.datamodule, *trainer.callbacks)):
        functions = (
            each for base in _classes_of_users(type(owner)) for each in vars(base).values()
        )
        for function in functions:
            is_code = isinstance(function, types.FunctionType)
            if is_code and (found := _names_in(function.__code__) & _COUNTING):
                rank_zero_warn(
                    f"{function.__qualname__} reads {min(found)}, which counts ranks: {trainer.world_size}. These "
                    f"are {num_pipelines} pipelines, and only a pipeline trains on batches of its own. Where a "
                    "learning rate, a loss or a batch is scaled with the number of processes, take "
                    'self.trainer.distributed_sampler_kwargs["num_replicas"]'
                )


def _hooks_of(kind: type) -> Iterator[tuple[str, set[str]]]:
    """Yields the hooks that a class of the user's runs, with names of attributes and globals in their code."""
    return ((hook, _names_in(code)) for hook, code in _code_of_hooks(kind))


def _code_of_hooks(kind: type) -> Iterator[tuple[str, types.CodeType]]:
    overridden: set[str] = set()
    for base in _classes_of_users(kind):
        for hook, function in vars(base).items():
            is_hook = hook.startswith("on_") or hook in _AFTER_GRADIENTS
            if is_hook and isinstance(function, types.FunctionType):
                if hook not in overridden:
                    yield hook, function.__code__
                if "super" not in _names_in(function.__code__):
                    overridden.add(hook)


def _classes_of_users(kind: type) -> Iterator[type]:
    """Yields those of a class and its bases that are neither ours nor of Lightning and torch."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in ("lightning", "lightning_diffpipe", "torch"):
            yield base


def _names_in(code: types.CodeType) -> set[str]:
    inner = (_names_in(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*inner)


@contextlib.contextmanager
def late_attributes_named(module: nn.Module, callbacks: Sequence[Any]) -> Iterator[None]:
    """Says, where a step that is run before training lacks what a hook sets, that hooks come later."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        for name, hook in _set_by_hooks((*callbacks, module)):
            missing, none = f"has no attribute '{name}'" in str(error), "NoneType" in str(error)
            if missing or (none and getattr(module, name, error) is None):
                with raised_by_all():
                    raise ConfigurationError(
                        f"training_step seems to read {name!r}, which {hook} sets, but the step is run before "
                        f"training, to look at its layers and to time them, and hooks come later ({error}). Set "
                        "it in __init__ or in setup to what the step can be run with, tensors as buffers; the hook "
                        "may change it then"
                    ) from error
        raise


def _set_by_hooks(owners: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Yields names of attributes that hooks set, of whatever object, and the hook."""
    for owner in owners:
        for hook, code in _code_of_hooks(type(owner)):
            for each in dis.get_instructions(code):
                if each.opname == "STORE_ATTR":
                    yield each.argval, f"{type(owner).__name__}.{hook}"


_LOG_IT = (
    "A rank runs layers of its own stage, on one microbatch after the other: what they give is NaN or missing "
    "elsewhere. Log it instead (self.log; trainer.callback_metrics has it on all ranks), or keep outputs['loss'] "
    "in on_train_batch_end"
)
_EQUAL_ON_ALL_RANKS = (int, bool, str, type(None))
_SIZED = (list, dict, set)


class ResultsForHooks:
    """Warns, once, of what hooks read and the step has left on this rank, which may have a part of it only.

        self.losses.append(loss.detach())      in the step, once for each microbatch, on the last stage only
        torch.stack(self.losses).mean()        in on_train_epoch_end, on all ranks

    Neither is an error where it is written. So after the first step, attributes that it has changed are looked for
    among the names in the code of hooks, and named.

    Args:
        module: The root, before its first batch.
        left: Attributes that the step sets between layers.
        callbacks: Of the trainer; those of Lightning and of this project read nothing of it.
    """

    def __init__(self, module: Any, left: frozenset[Attribute], callbacks: Sequence[Any]) -> None:
        self._module = module
        self._read = {
            name: f"{type(owner).__name__}.{hook}"
            for owner in (*callbacks, module)
            for hook, names in _hooks_of(type(owner))
            for name in names
            if owner is module or inspect.getattr_static(owner, name, None) is None  # else its own
        }
        self._left = sorted(name for owner, name in left if not owner and name in self._read)

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Runs the first step inside, and warns of what it leaves; in a list of losses on the last stage only."""
        before = self._sizes_now()
        yield
        held = vars(self._module)
        for name in self._left:
            if name not in held or type(held[name]) not in _EQUAL_ON_ALL_RANKS:
                self._say(name, "sets")
        for name, size in self._sizes_now().items():
            if before.get(name, size) != size:
                self._say(name, "puts something into")

    def _say(self, name: str, how: str) -> None:
        _log.warning(
            "training_step %s self.%s, and %s reads it. %s", how, name, self._read[name], _LOG_IT
        )

    def _sizes_now(self) -> dict[str, int]:
        held = {name: vars(self._module).get(name) for name in self._read}
        return {name: len(value) for name, value in held.items() if isinstance(value, _SIZED)}


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yields what an object holds, by name, and what its modules, lists and dictionaries hold."""
    held = {**vars(owner), **dict(vars(owner).get("_modules", {}).items())}
    for name, value in held.items():
        if name in ("_modules", "_parameters", "_buffers"):
            continue
        yield name, value
        if isinstance(value, dict):
            yield from ((f"{name}[{key!r}]", inner) for key, inner in value.items())
        elif isinstance(value, list | tuple):
            yield from ((f"{name}[{index}]", inner) for index, inner in enumerate(value))


_AVERAGING_NAMES = (".LitEma", ".ModelEma", ".ModelEmaV2", ".ModelEmaV3")
"""Of CompVis and timm; those of torch, diffusers, torch_ema and ema_pytorch are known otherwise."""


def refuse_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Refuses optimizers that look at all gradients at once, where there are several stages.

    Each rank's would see those of its own stage, take another step size or direction than the others', and
    move the copies of shared weights apart, without any error.
    """
    for optimizer in _with_wrapped(optimizers):
        name = type(optimizer).__name__
        kinds = [kind.__name__ for kind in type(optimizer).__mro__]
        # L-BFGS, learning-rate-free and sharpness-aware ones, whichever package they come from.
        if any(
            kind.endswith(("SAM", "DoG", "DoWG"))
            or any(part in kind for part in ("LBFGS", "Prodigy", "DAdapt"))
            for kind in kinds
        ):
            raise ConfigurationError(
                f"{name} computes one step size or direction from the gradients of all parameters, but in a "
                "pipeline a rank has those of its own stage only. Use an optimizer that treats every parameter "
                "by itself, such as AdamW, Adafactor, Lion or Muon; or train with num_stages=1, which takes "
                "num_replicas=N for N ranks"
            )
        clipped = [
            bound for group in optimizer.param_groups if (bound := group.get("max_grad_norm"))
        ]
        if clipped:
            raise ConfigurationError(
                f"{name}(max_grad_norm={clipped[0]}) scales gradients by a norm over all parameters, but in a "
                "pipeline a rank has the gradients of its own stage only. Turn it off (max_grad_norm=None, or 0) "
                f"and give Trainer(gradient_clip_val={clipped[0]}), which clips by the norm over all stages"
            )


def _with_wrapped(optimizers: Iterable[Optimizer]) -> Iterator[Optimizer]:
    """Yields optimizers, and those they hold (`Lookahead(AdamW(...))`)."""
    for optimizer in optimizers:
        yield optimizer
        yield from _with_wrapped(v for v in vars(optimizer).values() if isinstance(v, Optimizer))


@contextlib.contextmanager
def refusing_norms_of_a_stage(trained: Iterable[nn.Parameter]) -> Iterator[None]:
    """Refuses norms that torch takes over gradients of a rank that has those of its own stages only.

    A `clip_grad_norm_` of the user's own would scale every stage by another factor, and move the copies of shared
    weights apart, without any error.

    Args:
        trained: Parameters of this rank that get gradients, where there are several stages.
    """
    parameters = tuple(trained)
    total_norm = clip_grad._get_total_norm

    @functools.wraps(total_norm)
    def refuse(tensors: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        gradients = {id(p.grad) for p in parameters if p.grad is not None}
        num_known = sum(id(tensor) in gradients for tensor in tensors)
        if num_known:
            raise ConfigurationError(
                f"torch.nn.utils took a norm over the gradients of {num_known} parameters (clip_grad_norm_, "
                "get_total_norm), but in a pipeline a rank has those of its own stage only, so that each stage "
                "would be scaled by another factor. Clip by the norm over all stages, with "
                "Trainer(gradient_clip_val=...), or in a hook, on all ranks, with self.clip_gradients(optimizer, "
                "gradient_clip_val=...); self.trainer.strategy.gradient_norm() gives that norm"
            )
        return total_norm(tensors, *args, **kwargs)

    # `clip_grad_norm_`, whoever has imported it, looks the first of these up when it is called.
    with patched(clip_grad, _get_total_norm=refuse), patched(nn.utils, get_total_norm=refuse):
        yield


def refuse_arguments(arguments: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuses arguments the strategy does not have."""
    if "start_method" in arguments:
        raise ConfigurationError(
            f"start_method={arguments['start_method']!r} is not supported: spawned and forked processes "
            "return one stage only to the main process. Leave it out; processes are started by "
            "re-running your script, or by torchrun"
        )
    wrong, known = next(iter(arguments)), sorted(known)
    near = difflib.get_close_matches(wrong, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
    raise ConfigurationError(f"DiffPipeStrategy has no argument {wrong!r}; {hint}")


def refuse_own_generators(module: nn.Module, step: Any, batch: Any, graph: LayerGraph) -> None:
    """Refuses a step that was probed on a batch to draw random numbers that no seed of a microbatch governs."""
    name = min(graph.generators)
    line = line_that_draws(module, name, lambda: reprobe(module, step, batch, graph, any_form=True))
    raise ConfigurationError(
        f"{line} draws random numbers from {name}, which outlives the step. Every rank has its own copy, and draws "
        "from it at other times and more or less often than the next, so stages and frozen layers would see "
        "different numbers, and call other layers where they are coins. Draw from torch's, Python's or numpy's "
        "global generator, which is kept in step on all ranks (leave `generator=` out), or make one inside the "
        "step, seeded with a number from the global one"
    )


def warn_of_whole_compiled(module: nn.Module, graph: LayerGraph) -> None:
    """Warns if what is trained is hidden in one compiled module, which cannot be cut."""
    trained = [layer for layer in graph.layers if not layer.frozen]
    cost = sum(layer.cost_flops for layer in trained)
    for layer in trained:
        if 2 * layer.cost_flops > cost and is_compiled(module.get_submodule(layer.name)):
            rank_zero_warn(
                f"{layer.name} is compiled as a whole (torch.compile), so that nobody sees its layers, and "
                "no pipeline can be cut from it. Compile its blocks instead: "
                f"`for block in {layer.name.removesuffix('._orig_mod')}.<blocks>: block.compile()`"
            )


def warn_of_outputs(out: Any) -> bool:
    """Warns if a step returns more than its loss, which callbacks may be waiting for.

    Returns:
        Whether it did.
    """
    names = out if isinstance(out, Mapping) else ()
    further = [str(name) for name in names if name not in ("loss", "weight")]
    if further:
        rank_zero_warn(
            f"training_step returns {', '.join(map(repr, further))} beside the loss, but only the loss leaves a "
            "step: the rest is of a microbatch, and on one stage. Callbacks get {'loss': ...} as outputs; log what "
            "they need"
        )
    return bool(further)


def refuse_joined_chains(plan: PipelinePlan, chains: Chains | None) -> None:
    """Refuses a plan that runs backbones apart which this module trains together."""
    firsts = tuple(plan.first_layers[stage] for stage in plan.placement.first_stages)
    if chains and chains.starts != firsts:
        why = chains.joined_by or f"its backbones begin at layers {list(chains.starts)}"
        raise PlanError(
            f"the plan runs {len(firsts)} backbones in opposite directions, which begin at layers {list(firsts)}, "
            f"but not with this module: {why}"
        )


def refuse_stateful_glue(graph: LayerGraph, plan: PipelinePlan) -> None:
    """Refuses steps that change a buffer outside of layers, of which every stage would keep its own copy.

    On one rank every microbatch changes it, of which a warning tells: that is right for a count of samples.

    Raises:
        ConfigurationError: There are several ranks.
    """
    name = min(graph.glue_writes, default="")
    if name and plan.ranks_per_pipeline == 1 and plan.num_microbatches > 1:
        rank_zero_warn(
            f"training_step changes the buffer {name!r} outside of a layer, and runs for each of "
            f"{plan.num_microbatches} microbatches of a batch. If it is to change once for a batch, as a count of "
            "steps or an average, do that in on_train_batch_end, or take strategy.num_microbatches=1"
        )
    if name and plan.ranks_per_pipeline > 1:
        raise ConfigurationError(
            f"training_step changes the buffer {name!r} outside of a layer. Every stage has its own copy and "
            "runs a part of the step only, so stages would disagree from then on. Change it in "
            "on_train_batch_end from logged metrics, or in the forward of a module with parameters that "
            "owns it and is not cut"
        )


def refuse_backward_hooks(module: nn.Module, graph: LayerGraph, plan: PipelinePlan) -> None:
    """Refuses hooks that torch calls where gradients of a module's outputs and inputs meet, on no one stage.

    Raises:
        ConfigurationError: A layer, or a module around layers, has one, or all modules have, and there are several
            stages.
    """
    if len(plan.stages) > 1 and has_global_backward_hooks():
        raise ConfigurationError(
            "all modules have a backward hook (register_module_full_backward_hook), but gradients of what layers "
            "take and give may come from other stages, where it would not be called, or be given None. Remove it "
            "before training, put hooks on tensors in forward (h.register_hook), or train with num_stages=1"
        )
    for name, part in module.named_modules() if len(plan.stages) > 1 else ():
        around = any(f"{layer}.".startswith(f"{name}.") for layer in graph.path_names)
        if name and around and has_backward_hooks(part):
            raise ConfigurationError(
                f"{name} has a backward hook (register_full_backward_hook), but gradients of what it takes and "
                "gives may come from other stages, where it would not be called, or be given None. Put a hook on a "
                "tensor in its forward instead (h.register_hook), or train with num_stages=1"
            )


def refuse_written_weights(graph: LayerGraph, plan: PipelinePlan) -> None:
    """Refuses steps that change weights, themselves or in layers: for every microbatch, and on every stage."""
    if graph.glue_parameter_writes:
        raise ConfigurationError(
            f"training_step changes {len(graph.glue_parameter_writes)} parameters itself, e.g. "
            f"{min(graph.glue_parameter_writes)}, but it runs for every microbatch, on every stage, and before "
            "training to time its layers. Change them in on_train_batch_end, where "
            "self.trainer.strategy.is_resident(name); if they follow other weights (a momentum teacher, a target "
            "network), inside `with self.trainer.strategy.whole_model():`, on all ranks"
        )
    if plan.num_microbatches == 1 and plan.ranks_per_pipeline == 1:
        return
    for layer in graph.layers:
        if layer.written_parameters:
            raise ConfigurationError(
                f"the forward of {layer.name} changes the parameter {min(layer.written_parameters)!r}, but "
                "other microbatches, whose gradients are not there yet, have read it, and it would be changed for "
                "each of them. Compute with a changed copy (weight = normalize(self.weight)), and change the "
                "parameter itself in on_train_batch_start, where self.trainer.strategy.is_resident(name)"
            )


@contextlib.contextmanager
def foreign_writes_named(strategy: Any) -> Iterator[None]:
    """Says, where a hook writes to a weight that another rank holds, what it is that torch refuses to write to."""
    try:
        yield
    except RuntimeError as error:
        if strategy.division is None or "refers to a single memory location" not in str(error):
            raise
        walked = traceback.walk_tb(error.__traceback__)
        places = traceback.extract_tb(error.__traceback__)
        users = [
            (f, at) for (f, _), at in zip(walked, places, strict=True) if is_users(at.filename)
        ]
        if not users:
            raise
        frame, place = users[-1]
        named: list[Tensor] = []
        with contextlib.suppress(Exception):  # of the user's own properties, too
            named = _tensors_of(place.line or "", {**frame.f_globals, **frame.f_locals})
        is_foreign = any(map(is_placeholder, named))
        if not is_foreign and any(0 in tensor.stride() for tensor in named):
            raise  # an expanded tensor of the user's own
        raise ConfigurationError(
            f"{place.filename}:{place.lineno} ({place.line}) writes to a weight that another rank "
            "holds: here it has a shape, but neither memory nor values. Change weights where "
            "self.trainer.strategy.is_resident(name), or, if values of other ranks are read as well, on all ranks "
            "inside `with self.trainer.strategy.whole_model():`"
        ) from error


def _tensors_of(line: str, values: Mapping[str, Any]) -> list[Tensor]:
    """Returns the tensors that a line of Python names, itself or as attributes; none of a part of a statement."""

    def value_of(node: ast.AST) -> Any:
        if isinstance(node, ast.Attribute):
            return getattr(value_of(node.value), node.attr, None)
        return values.get(node.id) if isinstance(node, ast.Name) else None

    nodes = [n for n in ast.walk(ast.parse(line)) if isinstance(n, ast.Name | ast.Attribute)]
    return [value for value in map(value_of, nodes) if isinstance(value, Tensor)]


def refuse_unrunnable(schedule: Schedule, pieces: Cut) -> None:
    """Refuses a plan that forwards a stage without gradients that gets some, or the other way round."""
    for stage in schedule.placement.no_grad:
        if pieces.stages[stage].is_last or pieces.stages[stage].sent_gradients:
            raise PlanError(
                f"the plan has no backward for stage {stage}, but this module's gradients pass it; make a plan for "
                "this module, or leave strategy.plan out"
            )
    instructions = itertools.chain.from_iterable(schedule.programs)
    odd = next((i for i in instructions if isinstance(i, ForwardNoGrad)), None)
    if odd is not None and not schedule.placement.no_grad:
        raise PlanError(
            f"the plan has {odd}, a forward that keeps nothing for a backward, but its stages "
            'have "gradient": true; make a plan for this module, or leave strategy.plan out'
        )


def refuse_shared_weights(plan: PipelinePlan, graph: LayerGraph, pieces: Cut) -> None:
    """Refuses weights of samples, and parameters that two stages hold, where the pipeline is not flushed."""
    if not plan.runs_free:
        return
    name, remedy = plan.options.schedule, "choose a schedule that flushes, such as 1f1b"
    if graph.weighted:
        raise ConfigurationError(
            f'training_step returns a "weight" beside its loss, by which gradients are divided later, but with '
            f"schedule={name} stages step at different times; return a mean, or {remedy}"
        )
    holders: dict[str, int] = {}
    for stage in pieces.stages:
        for parameter in sorted(stage.parameters & graph.trained):
            if parameter in holders:
                raise ConfigurationError(
                    f"stages {holders[parameter]} and {stage.index} both train {parameter} (tied weights, a layer "
                    "that is called twice, or one that the step reads itself), but with "
                    f"schedule={name} each stage steps its own copy at another time, and they would come apart; "
                    f"{remedy}, or another num_stages"
                )
            holders[parameter] = stage.index


def refuse_untrainable(module: nn.Module) -> None:
    """Refuses a module of which nothing is trained, or whose layers do not know their sizes, or are scripts."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ConfigurationError(
                f"{name} has no shape yet, as its layer is a lazy one (nn.LazyLinear and the like): run that once "
                "before trainer.fit, or give its sizes"
            )
    for name, part in module.named_modules():
        trained = any(parameter.requires_grad for parameter in part.parameters())
        if isinstance(part, torch.jit.ScriptModule) and trained:
            raise ConfigurationError(
                f"{name} is compiled by torch.jit, inside of which nobody sees what a step reads; train the "
                "plain module, and compile its blocks with torch.compile (block.compile())"
            )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigurationError(
            f"{type(module).__name__} has no trainable parameters, so there is nothing to pipeline; "
            "check requires_grad, or use another strategy"
        )
