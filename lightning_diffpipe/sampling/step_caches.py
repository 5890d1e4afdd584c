"""Step caches of diffusers, where ranks share blocks, tokens, patches or bands.

Problem: hooks of diffusers skip blocks or attention in steps that differ little from the step before. They are made
for one process, which computes all tokens of a step at once and sees the first block as well as the last one.

Idea: hooks stay those of diffusers, their state is exchanged. Before each call of the denoiser, every hook gets the
state of this call of a step, and of this patch. Ranks skip alike, as they decide by what all of them have:

    by the step                 pyramid attention broadcast, TaylorSeer, FasterCache, MagCache
    by a change of tokens       first block cache; sums over ranks that have some of the tokens, two numbers a step
    in stages of PipeFusion     the first rank decides, and a byte at the end of its message tells others; what the
                                last block returned comes back with the latents, as the first rank adds it

What is stored of all tokens is not that of a patch: numbers of steps go on, tensors do not. So the first step in
patches computes everything.

Source: hooks and configurations in `diffusers.hooks`, which name the papers.
"""

from __future__ import annotations

import contextlib
import copy
import textwrap
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_diffpipe.comm.links import Links, start_all_gather
from lightning_diffpipe.comm.packing import TensorShape
from lightning_diffpipe.errors import (
    ConfigurationError,
    LayoutError,
    is_out_of_memory,
    require_number,
)

# Names in `diffusers.hooks`, which imports transformers: not before a cache is asked for.
_APPLIED_BY = {
    "FirstBlockCacheConfig": "apply_first_block_cache",
    "MagCacheConfig": "apply_mag_cache",
    "PyramidAttentionBroadcastConfig": "apply_pyramid_attention_broadcast",
    "TaylorSeerCacheConfig": "apply_taylorseer_cache",
    "FasterCacheConfig": "apply_faster_cache",
}
_NAMES = {
    "first_block": "FirstBlockCacheConfig",
    "pyramid_attention": "PyramidAttentionBroadcastConfig",
    "taylor_seer": "TaylorSeerCacheConfig",
    "faster": "FasterCacheConfig",
}
_TIMESTEP = "current_timestep_callback"

DECISION = TensorShape((1,), torch.uint8)
"""Shape of `StepCache.decision`."""


def step_cache_named(cache: Any) -> Any:
    """Returns the configuration of a cache, from its name or from one; its timestep is put in while sampling.

    Raises:
        ConfigurationError: There is no such cache, or it has functions, which do not travel to other ranks.
    """
    if cache is None:
        return None
    from diffusers import hooks

    from lightning_diffpipe.sampling.skeleton import dtype_named

    if isinstance(cache, str) and cache in _NAMES:
        return getattr(hooks, _NAMES[cache])()
    if type(cache) not in [getattr(hooks, kind) for kind in _APPLIED_BY]:
        raise ConfigurationError(
            f"cache={textwrap.shorten(repr(cache), 80)}; choose {', '.join(_NAMES)}, or a configuration of "
            "diffusers: " + ", ".join(_APPLIED_BY)
        )
    cache = copy.copy(cache)
    if hasattr(cache, _TIMESTEP):
        setattr(cache, _TIMESTEP, None)
    for each in fields(cache):
        value = getattr(cache, each.name)
        if each.name.endswith("_dtype") and isinstance(value, str):
            setattr(cache, each.name, dtype_named(f"cache.{each.name}", value))
        elif "threshold" in each.name:
            require_number(f"cache.{each.name}", value, 0)
    named = next((f.name for f in fields(cache) if callable(getattr(cache, f.name))), None)
    if named:
        raise ConfigurationError(
            f"cache={type(cache).__name__} has a function as {named}, which does not travel to other ranks; leave "
            "it out, or sample with method=single and enable_cache of the denoiser"
        )
    return cache


def refuse_cache(cache: Any, method: str, num_ranks: int, compiled: bool) -> None:
    """Raises ConfigurationError for a cache that cannot work with a method, whatever the model is."""
    kind, reason = type(cache).__name__, ""
    if cache is None:
        return
    if compiled:
        reason = "graphs of compile=blocks have no place for what hooks decide in each step"
    elif method != "single" and kind == "FasterCacheConfig":
        if method == "pipefusion":
            reason = "it extrapolates from the two steps before, of which a patch has none at first"
        elif not cache.is_guidance_distilled:
            reason = "it halves the samples in some steps; set is_guidance_distilled=True if there is one branch"
    elif num_ranks > 1 and getattr(cache, "calibrate", False):
        reason = "ranks have a part of the tokens that it measures; calibrate on one rank"
    if reason:
        raise ConfigurationError(f"cache={kind} with method={method}: {reason}")


def refuse_cache_of(model: nn.Module, cache: Any) -> None:
    """Raises ConfigurationError for a cache whose hooks find nothing in a model; puts them in place to see."""
    if getattr(model, "is_cache_enabled", False):  # refused by requests, with the remedy
        return
    with StepCache(
        SimpleNamespace(model=model, cache=cache, halves=(), timesteps=torch.zeros(1))
    ).installed():
        pass


class StepCache:
    """The hooks of one request on one rank.

    Args:
        request: Its `cache` is the configuration; None has no hooks, and everything here does nothing.
        sharing: Links between ranks that compute the first block for some of the tokens or samples each.

    Attributes:
        hooked: Modules with hooks, by their names in the request's model, but for whole blocks.
    """

    def __init__(self, request: Any, sharing: Sequence[Links] = ()) -> None:
        self.config, self.hooked = copy.copy(request.cache), frozenset[str]()
        self._root = request.model
        self._model = getattr(request.model, "denoiser", request.model)
        self._sharing = [links for links in (*sharing, *request.halves) if links.num_ranks > 1]
        # On the host, so that no step waits for them.
        self._timesteps = [] if self.config is None else request.timesteps.tolist()
        self._step, self._patch, self._number = 0, None, -1
        self._hooks: list[Any] = []
        self._places: list[tuple[Any, str]] = []  # where hooks keep their state
        self._states: dict[Any, list[Any]] = {}
        self._current: Any = None
        self._head = self._tail = None
        if hasattr(self.config, _TIMESTEP):
            setattr(self.config, _TIMESTEP, lambda: self._timesteps[self._step])

    @contextlib.contextmanager
    def installed(self) -> Iterator[StepCache]:
        """Context in which all hooks are in place.

        Raises:
            ConfigurationError: diffusers finds nothing in this model that could be skipped.
        """
        if self.config is None:
            yield self
            return
        from diffusers import hooks

        before = {m: [*_hooks_of(m)] for m in self._model.modules()}
        plain = [m for m in before if not vars(m).keys() & {"_diffusers_hook", "forward"}]
        watch = self._model.register_forward_pre_hook(self._begin_call)
        try:
            try:
                apply = getattr(hooks, _APPLIED_BY[type(self.config).__name__])
                apply(self._model, self.config)
            except IndexError as error:  # there are no blocks
                raise self._unknown("none of its blocks is of a known kind") from error
            except ValueError as error:
                raise self._unknown(error) from error
            self._find(before)
            try:
                yield self
            except Exception as error:
                *_, (frame, _) = traceback.walk_tb(error.__traceback__)
                raised_in = str(frame.f_globals.get("__name__", ""))
                if is_out_of_memory(error) or not raised_in.startswith("diffusers.hooks."):
                    raise
                kind, model = type(self.config).__name__, type(self._model).__name__
                raise ConfigurationError(
                    f"cache={kind}: the hook of diffusers fails on what a {model} returns "
                    f"({textwrap.shorten(str(error), 100)}); say more in its configuration, such as "
                    "FasterCacheConfig's tensor_format=BCHW for images, or leave it out"
                ) from error
        finally:
            watch.remove()
            for module, names in before.items():
                for name in [n for n in _hooks_of(module) if n not in names]:
                    module._diffusers_hook.remove_hook(name, recurse=False)
            for module in plain:
                vars(module).pop("_diffusers_hook", None)
                vars(module).pop("forward", None)
            self._hooks.clear()
            self._states.clear()

    def _unknown(self, reason: object) -> ConfigurationError:
        kind, model = type(self.config).__name__, type(self._model).__name__
        return ConfigurationError(
            f"cache={kind}: diffusers cannot skip anything in a {model} ({reason}); leave it out"
        )

    def _find(self, before: Mapping[nn.Module, Sequence[str]]) -> None:
        """Finds the hooks that diffusers has added, and where they keep their state."""
        from diffusers.hooks.first_block_cache import FBCBlockHook, FBCHeadBlockHook
        from diffusers.hooks.mag_cache import MagCacheBlockHook, MagCacheHeadHook

        heads, tails = (FBCHeadBlockHook, MagCacheHeadHook), (FBCBlockHook, MagCacheBlockHook)
        names = {id(module): name for name, module in self._root.named_modules()}
        hooked = set()
        for module in self._model.modules():
            for hook in (x for n, x in _hooks_of(module).items() if n not in before[module]):
                self._hooks.append(hook)
                if isinstance(hook, heads):
                    self._head = hook, module
                elif isinstance(hook, tails) and hook.is_tail:
                    self._tail = hook, module
                    text_ends = getattr(module, "context_pre_only", False)
                    if isinstance(hook, FBCBlockHook) and text_ends:
                        raise self._unknown("its last block returns no text to be stored")
                state_managers = [x for x in vars(hook).values() if _is_manager(x)]
                state_places = [(x, "_state_cache") for x in state_managers] or [(hook, "state")]
                self._places += [p for p in state_places if p not in self._places]
                if not isinstance(hook, heads + tails):
                    hooked.add(names[id(module)])
        self.hooked = frozenset(hooked)
        if not self._hooks:
            raise self._unknown("none of its modules has a name that is looked for")
        if self._sharing and isinstance(self._head and self._head[0], FBCHeadBlockHook):
            hook = self._head[0]
            hook._should_compute_remaining_blocks = partial(self._has_changed, hook)

    def begin(self, step: int, patch: int | None = None) -> None:
        """Begins a step, of all tokens or of a patch; calls of the denoiser follow."""
        self._step, self._patch, self._number = step, patch, -1

    def _begin_call(self, *_: Any) -> None:
        self._number += 1
        self._select(self._number, self._patch)

    def _select(self, number: int, patch: int | None) -> None:
        """Gives every hook the state of a call of the denoiser in a step, and of a patch."""
        if self._current is not None:
            self._states[self._current] = [getattr(*place) for place in self._places]
        self._current = number, patch
        states = self._states.get(self._current)
        if states is None:
            # A patch goes on with the numbers of the synchronous steps before it, if there were any.
            synchronous = self._states.get((number, None))
            before = synchronous or [None] * len(self._places)
            owners = [owner for owner, _ in self._places]
            states = [_continued(*pair) for pair in zip(owners, before, strict=True)]
            for hook in self._hooks if synchronous else ():
                # A series needs terms of its own before it predicts anything.
                if hasattr(hook, "disable_cache_before_step"):
                    earliest = max(hook.disable_cache_before_step, self._step + 1)
                    hook.disable_cache_before_step = earliest
        for (owner, name), state in zip(self._places, states, strict=True):
            setattr(owner, name, state)
            if _is_manager(owner):
                from diffusers.hooks.hooks import CacheContext

                owner.set_context(CacheContext("step"))

    def _has_changed(self, hook: Any, residual: Tensor) -> bool:
        """Decides as the hook does, by the tokens of all ranks."""
        before = hook.state_manager.get_state().head_block_residual
        if before is None:
            return True
        with torch._C.DisableTorchFunction():
            sums = torch.stack([x.abs().double().sum() for x in (residual - before, before)])
            for links in self._sharing:
                shapes = [TensorShape.of(sums)] * links.num_ranks
                sums = torch.stack(start_all_gather(links, sums, shapes, "statistics")()).sum(0)
            changed, size = sums.tolist()
        return changed > hook.threshold * size

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Context in which modules run without their hooks, as when a model is probed."""
        active = [(hook.fn_ref, hook.fn_ref.forward) for hook in self._hooks]
        for reference, _ in active:
            reference.forward = reference.original_forward
        try:
            yield
        finally:
            for reference, forward in active:
                reference.forward = forward

    # --- stages -----------------------------------------------------------------------------------------

    def divide(self, block_names: Sequence[str], is_last: bool) -> str | None:
        """Makes the first stage store outputs of the last one; returns the name of the block with these, if any.

        Raises:
            LayoutError: Blocks are called before the first that may be skipped, or after the last.
        """
        if self._head is None or self._tail is None:
            return None
        ends = [self._root.get_submodule(block_names[i]) for i in (0, -1)]
        if ends != [self._head[1], self._tail[1]]:
            raise LayoutError(
                f"cache={type(self.config).__name__} skips some of the model's {len(block_names)} blocks only, and "
                "not the first or the last; stages need to know: take method=sequence or single"
            )
        if is_last:
            self._tail[0].is_tail = False
        return block_names[-1]

    def decision(self, device: torch.device) -> Tensor:
        """Returns whether the blocks after the first are computed in this call, as a tensor to send."""
        computes = self._head[0].state_manager.get_state().should_compute
        return torch.full((1,), computes, dtype=torch.uint8, device=device)

    def decide(self, decision: Tensor) -> None:
        """Sets the decision of the first rank on this one."""
        self._head[0].state_manager.get_state().should_compute = bool(decision.item())

    def store(self, number: int, patch: int | None, results: Any) -> None:
        """Stores the output of the last block, which another rank has computed, as its hook does on one rank.

        The hook runs with a block that returns this output.
        """
        hook, module = self._tail
        self._select(number, patch)
        reference = hook.fn_ref
        before, reference.original_forward = reference.original_forward, lambda *_, **__: results
        tokens = results[0] if isinstance(results, tuple) else results
        names = "hidden_states", "encoder_hidden_states", hook._metadata.hidden_states_argument_name
        try:
            hook.new_forward(module, **dict.fromkeys(names, tokens))
        finally:
            reference.original_forward = before


def _hooks_of(module: nn.Module) -> dict[str, Any]:
    return getattr(vars(module).get("_diffusers_hook"), "hooks", {})


def _is_manager(owner: Any) -> bool:
    from diffusers.hooks.hooks import StateManager

    return isinstance(owner, StateManager)


def _continued(owner: Any, state: Any) -> Any:
    """Returns a state of a hook with its numbers and no tensors; of a manager, the states of all its contexts."""
    if _is_manager(owner):
        make = partial(owner._state_cls, *owner._init_args, **owner._init_kwargs)
        return {name: _with_numbers(make(), earlier) for name, earlier in (state or {}).items()}
    return _with_numbers(type(owner.state)(), state)


def _with_numbers(new: Any, known: Any) -> Any:
    if known is not None:
        vars(new).update({n: x for n, x in vars(known).items() if isinstance(x, int | float)})
    return new
