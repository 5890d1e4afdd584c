"""Refusals, with the reason, of what cannot work with a pipeline: before training starts, or where it happens.

Silent wrongness is worse than a refusal: Lightning's weight averaging, for one, copies the module
before it is cut and would then average the weights of one stage into another, without any error.

Each function raises a ConfigurationError that says what cannot work, why, and what to do instead; a PlanError where
a plan was made for another module.
"""

import contextlib
import difflib
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import grads
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from lightning_diffpipe.comm.mesh import Mesh, gathered_objects
from lightning_diffpipe.errors import ConfigurationError, PlanError
from lightning_diffpipe.graph.call_sequences import Carried
from lightning_diffpipe.graph.calltree import (
    has_backward_hooks,
    has_global_backward_hooks,
    is_compiled,
)
from lightning_diffpipe.graph.chains import Chains
from lightning_diffpipe.graph.cut import Cut
from lightning_diffpipe.graph.layer import LayerGraph
from lightning_diffpipe.graph.probed_step import ProbedStep
from lightning_diffpipe.planning.instruction import ForwardNoGrad
from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.planning.schedule import Schedule
from lightning_diffpipe.planning.schedules import SCHEDULES
from lightning_diffpipe.runtime.optimizer_states import (
    may_be_divided,
    may_be_offloaded,
    switches_weights,
    updates_independently,
    with_wrapped,
)
from lightning_diffpipe.training.patching import patched
from lightning_diffpipe.training.plan_source import PipelineOptions

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
        step = getattr(module, name)  # None in place of one is none for Lightning
        if step and is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
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


@contextlib.contextmanager
def hooks_come_later() -> Iterator[None]:
    """Adds to errors of a step that is run before training that it may lack what a hook sets."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        error.add_note(
            "training_step is run before training, to find and time its layers, and hooks such as "
            "on_train_start come later. Set what it reads in __init__ or in setup, to what the step can be run "
            "with, tensors as buffers; a hook may change it then"
        )
        raise


def refuse_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Refuses optimizers that update a parameter by the gradients of others, where there are several stages.

    Each rank's would see those of its own stage, take another step size or direction than the others', and
    let the copies of shared weights differ, without any error. Those with `sum_over_ranks` add up what they need.
    """
    for optimizer in optimizers:
        if hasattr(optimizer, "sum_over_ranks") or updates_independently(optimizer) is not False:
            continue
        name = type(optimizer).__name__
        groups = (group for each in with_wrapped([optimizer]) for group in each.param_groups)
        clipped = [bound for group in groups if (bound := group.get("max_grad_norm"))]
        if clipped:
            raise ConfigurationError(
                f"{name}(max_grad_norm={clipped[0]}) scales gradients by a norm over all parameters, but in a "
                "pipeline a rank has the gradients of its own stage only. Turn it off (max_grad_norm=None, or 0) "
                f"and give Trainer(gradient_clip_val={clipped[0]}), which clips by the norm over all stages"
            )
        raise ConfigurationError(
            f"{name} computes one step size or direction from the gradients of several parameters, but in a "
            "pipeline a rank has those of its own stage only. Use an optimizer that treats every parameter "
            "by itself, such as AdamW, Adafactor, Lion, Muon or lightning_diffpipe.modules.Prodigy; or train "
            "with num_stages=1, which takes num_replicas=N for N ranks"
        )


def refuse_optimizers_without_flush(optimizers: Iterable[Optimizer], schedule: str) -> None:
    """Refuses optimizers that need all stages, or a pause between steps, with a schedule that does not flush."""
    for optimizer in with_wrapped(optimizers):
        switches = switches_weights(optimizer)
        if switches or hasattr(optimizer, "sum_over_ranks"):
            why = (
                "trains other weights than it ends with"
                if switches
                else "adds up sums of all stages"
            )
            raise ConfigurationError(
                f"{type(optimizer).__name__} {why}, but with schedule={schedule} each stage steps when its "
                "own batch has come back; choose a schedule that flushes, such as 1f1b, or AdamW"
            )


def refuse_undivided(optimizers: Iterable[Optimizer], mesh: Mesh) -> None:
    """Refuses optimizers whose states the plan divides over ranks, and that need all of them; collective."""
    if name := _one_that_fails(may_be_divided, optimizers, mesh):
        raise ConfigurationError(
            f"{name} computes steps from the gradients of several parameters, changes weights between steps, "
            "or cannot be tried on small copies, so the ranks that hold a stage cannot share its states "
            "(shard_optimizer=true, or a plan that says so). Take shard_optimizer=false, or an optimizer that "
            "treats every parameter by itself, such as AdamW, Adafactor or Lion"
        )


def refuse_kept_on_device(optimizers: Iterable[Optimizer], mesh: Mesh) -> None:
    """Refuses optimizers that would step otherwise with their states in host memory; collective."""
    if name := _one_that_fails(may_be_offloaded, optimizers, mesh):
        raise ConfigurationError(
            f"{name} computes steps from the gradients of several parameters, counts its steps, changes weights "
            "between steps, or cannot be tried on small copies, so its states cannot lie in host memory "
            "(optimizer_offload=all, or a plan that says so), where parameters are updated bucket by bucket. Take "
            "optimizer_offload=none, or an optimizer such as AdamW, Adafactor or Lion"
        )


def _one_that_fails(
    test: Callable[[Optimizer], bool], optimizers: Iterable[Optimizer], mesh: Mesh
) -> str | None:
    """Returns the class of an optimizer of some rank that fails a test, the same on all ranks; collective."""
    failed = [type(each).__name__ for each in optimizers if not test(each)]
    return min((n for each in gathered_objects(failed, mesh.world) for n in each), default=None)


@contextlib.contextmanager
def refusing_norms_of_a_stage(trained: Iterable[nn.Parameter]) -> Iterator[None]:
    """Refuses norms that torch takes over gradients of a rank that has those of its own stages only.

    A `clip_grad_norm_` of the user's own would scale every stage by another factor, and let the copies of shared
    weights differ, without any error.
    """
    parameters = tuple(trained)
    total_norm = clip_grad._get_total_norm

    def refuse_of(num_known: int, what: str) -> None:
        if num_known:
            raise ConfigurationError(
                f"{what} took a norm over the gradients of {num_known} parameters, but in a pipeline a rank has "
                "those of its own stage only, so that each stage would be scaled by another factor. Clip by the "
                "norm over all stages, with Trainer(gradient_clip_val=...), or in a hook, on all ranks, with "
                "self.clip_gradients(optimizer, gradient_clip_val=...); self.trainer.strategy.gradient_norm() "
                "gives that norm"
            )

    @functools.wraps(total_norm)
    def refuse(tensors: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        gradients = {id(p.grad) for p in parameters if p.grad is not None}
        num_gradients = sum(id(tensor) in gradients for tensor in tensors)
        refuse_of(num_gradients, "torch.nn.utils (clip_grad_norm_, get_total_norm)")
        return total_norm(tensors, *args, **kwargs)

    def refuse_float(order: Any) -> float:
        refuse_of(sum(p.grad is not None for p in parameters), "lightning's grad_norm")
        return float(order)

    # `clip_grad_norm_`, whoever has imported it, looks the first of these up when it is called; Lightning's
    # `grad_norm` the last, before anything else.
    with (
        patched(clip_grad, _get_total_norm=refuse),
        patched(nn.utils, get_total_norm=refuse),
        patched(grads, float=refuse_float),
    ):
        yield


def refuse_arguments(arguments: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuses arguments the strategy does not have."""
    if "start_method" in arguments:
        raise ConfigurationError(
            f"start_method={arguments['start_method']!r} is not supported: spawned and forked processes "
            "return one stage only to the main process. Leave it out; processes are started by "
            "re-running your script, or by torchrun"
        )
    wrong, names = next(iter(arguments)), sorted(names)
    near = difflib.get_close_matches(wrong, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names)}"
    raise ConfigurationError(f"DiffPipeStrategy has no argument {wrong!r}; {hint}")


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
    """Warns if a step returns more than its loss, which callbacks may wait for; returns whether it did."""
    names = out if isinstance(out, Mapping) else ()
    further = [str(name) for name in names if name not in ("loss", "weight")]
    if further:
        rank_zero_warn(
            f"training_step returns {', '.join(map(repr, further))} besides the loss, but only the loss leaves a "
            "step: the rest is of a microbatch, and on one stage. Callbacks get {'loss': ...} as outputs; log what "
            "they need"
        )
    return bool(further)


def refuse_one_chain(chains: Chains, options: PipelineOptions) -> None:
    """Refuses to run one backbone in opposite directions."""
    spec = SCHEDULES.get(options.schedule)
    if options.plan is None and spec and spec.opposite and len(chains.starts) == 1:
        raise ConfigurationError(
            f"schedule={options.schedule} runs backbones in opposite directions that know nothing of each other, "
            f"but in this step {chains.joined_by}"
        )


def refuse_ahead(plan: PipelinePlan, probed: ProbedStep) -> None:
    """Refuses a plan by which frozen layers run ahead, if they would get what was right for an earlier step."""
    runs_ahead = plan.ranks_per_pipeline > 1 and plan.options.filling != "none"
    if probed.sequences.moves_frozen and runs_ahead:
        raise PlanError(
            f"the plan has filling={plan.options.filling}, by which frozen layers run for later batches, but what "
            "they get follows the step (global_step, current_epoch or a counter); plan again with "
            "strategy.filling=none"
        )


def refuse_joined_chains(plan: PipelinePlan, chains: Chains) -> None:
    """Refuses a plan that runs backbones separately which this module trains together."""
    firsts = tuple(plan.first_layers[stage] for stage in plan.placement.first_stages)
    if chains.starts != firsts:
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


def refuse_carried_state(carried: Carried | None, plan: PipelinePlan) -> None:
    """Refuses steps that read what they have changed before, but for counters, which are put back.

    Ranks run the step for each microbatch, and to find what it calls, and for frozen layers: states would differ.

    Raises:
        ConfigurationError: There are several ranks; on one a warning tells of it.
    """
    if carried is None:
        return
    where = ", ".join(carried.names[:3]) or "a closure or the like, or it reads a clock"
    said = (
        f"training_step reads what an earlier run of it has changed ({where}), and runs for each of "
        f"{plan.num_microbatches} microbatches of a batch. What shall change once for a batch is changed in "
        "on_train_batch_end, or is a whole number in an attribute of the module that is set before training"
    )
    if plan.ranks_per_pipeline > 1:
        raise ConfigurationError(
            f"{said}. Ranks run it more or less often, so that stages would disagree"
        )
    if not carried.is_restored:
        rank_zero_warn(
            f"{said}. Runs before training have changed it, too, and could not put it back"
        )
    elif plan.num_microbatches > 1:
        rank_zero_warn(f"{said}; strategy.num_microbatches=1 helps, too")


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


def refuse_changing_step(graph: LayerGraph) -> None:
    """Refuses steps that change weights outside of layers: for every microbatch, and on every stage."""
    if graph.glue_parameter_writes:
        raise ConfigurationError(
            f"training_step changes {len(graph.glue_parameter_writes)} parameters itself, e.g. "
            f"{min(graph.glue_parameter_writes)}, but it runs for every microbatch, on every stage, and before "
            "training to time its layers. Change them in on_train_batch_end, where "
            "self.trainer.strategy.is_resident(name); if they follow other weights (a momentum teacher, a target "
            "network), inside `with self.trainer.strategy.whole_model():`, on all ranks"
        )


def refuse_written_weights(graph: LayerGraph, plan: PipelinePlan) -> None:
    """Refuses layers that change weights in their forward, where it runs more than once or on several ranks."""
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
            f'training_step returns a "weight" next to its loss, by which gradients are divided later, but with '
            f"schedule={name} stages step at different times; return a mean, or {remedy}"
        )
    holders: dict[str, int] = {}
    for stage in pieces.stages:
        for parameter in sorted(stage.parameters & graph.trained):
            if parameter in holders:
                raise ConfigurationError(
                    f"stages {holders[parameter]} and {stage.index} both train {parameter} (tied weights, a layer "
                    "that is called twice, or one that the step reads itself), but with "
                    f"schedule={name} each stage steps its own copy at another time, and they would diverge; "
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
