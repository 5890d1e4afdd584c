"""Forms of a step: the sequences of layer calls that a coin, a counter or a flag chooses between.

    random() < 0.5      a b c   or   a b c a b c        (self-conditioning: estimate first, or do not)

Which form a microbatch takes is known before any of its layers runs: the step's own code is run from the
microbatch's seed with a stub for every layer, to its end, as a layer may be called after all those of a known form.
Every rank does so from the same seed, and finds the same.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.cut import tail
from lightning_diffpipe.graph.interception import Interception, Site
from lightning_diffpipe.graph.layer import Attribute, Layer, LayerGraph
from lightning_diffpipe.graph.placement import has_own_tensors
from lightning_diffpipe.graph.side_effects import (
    Attributes,
    NoHooksWithoutGradients,
    generators_preserved,
    is_users,
)
from lightning_diffpipe.graph.step import StepCall
from lightning_diffpipe.graph.trial import untouched
from lightning_diffpipe.graph.view import DummyMemory, Stop, StubbedRun, View

StepForm = tuple[tuple[str, bool], ...]
"""The layers that a step calls, in order, each with whether gradients were on."""
_Pattern = Sequence[tuple[str, bool | None]]
_Line = tuple[str, int]
_Read = tuple[_Line, Any]


def names_of(form: StepForm) -> tuple[str, ...]:
    """Returns the modules of the layers of a form, in call order."""
    return tuple(name for name, _ in form)


@dataclass(frozen=True)
class Exemplar:
    """How to make a step take a form again: what its coins showed, what it had counted, and its arguments.

    Attributes:
        seed: Seed of the microbatch.
        arguments: Further arguments of the step, such as `batch_idx`.
        reads: The numbers that it took out of tensors before its last layer call (`bool(coin)`, `.item()`), in
            order, each with the line that did.
        host: It drew from `random` or `numpy.random`, too.
        counted: Attributes that count, as they were.
    """

    seed: int
    arguments: tuple[Any, ...] = ()
    reads: tuple[_Read, ...] = ()
    host: bool = False
    counted: tuple[tuple[Attribute, Any], ...] = ()

    @property
    def has_coins(self) -> bool:
        """Whether it read something that may have been a coin."""
        return self.host or bool(self.reads)

    def of_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the same step, whose coins always fall as they did; what else it draws is drawn."""

        def repeated(module: nn.Module, batch: Any, *_arguments: Any) -> Any:
            if self.host:
                rng.seed_host(self.seed)
            counters = Attributes(module, [name for name, _ in self.counted])
            repeats = _repeated(self.reads) if self.reads else contextlib.nullcontext()
            with counters.preserved(), repeats:
                counters.restore([value for _, value in self.counted])
                return step(module, batch, *self.arguments)

        return repeated


class FormView(View):
    """Recognises the forms of a step, for microbatches of one signature; other arguments are those of `View`.

    Args:
        lenient: Layers that were not called when the step was probed are run, instead of refused.
        bears_nan: The code after the last layer is known to run on NaN, too. Else runs end before it, and a form
            that begins with all calls of a known one is taken for that.

    Attributes:
        counted: What counters of the step (`LayerGraph.counters`) show after the batch whose form was found last.
    """

    def __init__(
        self,
        root: nn.Module,
        graph: LayerGraph,
        interception: Interception,
        memory: DummyMemory | None = None,
        lenient: bool = False,
        bears_nan: bool = False,
    ) -> None:
        super().__init__(
            root, graph, replace(tail(graph), needed=frozenset()), interception, memory
        )
        self._lenient = lenient
        self._goes_on = bears_nan and not graph.needs_values
        self._counters = Attributes(root, graph.counters)
        self.counted: list[Any] = []
        owners = {name.rpartition(".")[0] for name in graph.glue_writes}
        metrics = {name for name, module in root.named_modules() if has_own_tensors(module)}
        self._owners = [root.get_submodule(name) for name in sorted(owners | metrics)]

    def form_of(
        self, call: Callable[[], Any], seed: int, known: Collection[StepForm] = ()
    ) -> StepForm:
        """Returns the form of one microbatch; one of those that are known, or another.

        Args:
            call: Runs the user's step on it.
            seed: Seeds what the step draws between layers.
            known: Where a run ends before the code after the last layer, it does so where only one of these is
                possible, and complete; the graph's, if there are none. What the step changes is put back.

        Returns:
            The form; the only one that is known, if the step reads values, which dummies have not: a branch on one
            would go another way. Runs notice if it takes another.

        Raises:
            GraphError: The step calls a layer that it did not call when it was probed.
        """
        if self.graph.needs_values and len(known) < 2:
            return next(iter(known), tuple((name, True) for name in self.graph.layer_names))
        patterns: Collection[_Pattern] | None = None
        if not self._goes_on:
            patterns = known or [tuple((n, None) for n in self.graph.layer_names)]
        generators: Callable[[], Any] = contextlib.nullcontext
        if self.graph.generators:  # on one rank
            generators = partial(generators_preserved, self.root)
        with untouched(self.root, self._owners):
            with self.restored.preserved(), generators():
                form = self._walked(self._run(patterns), call, seed)
            if form is None:
                with untouched(self.root), self.restored.preserved(), generators():
                    form = self._walked(self._run(None), call, seed)
        assert form is not None
        return form

    def count(self) -> None:
        """Goes on to the next batch: counters show what they do after the batch whose form was found last."""
        if self.counted:
            self._counters.restore(self.counted)

    def _run(self, known: Collection[_Pattern] | None) -> _FormRun:
        return _FormRun(self, known, self._lenient, self._counters)

    def _walked(self, run: _FormRun, call: Callable[[], Any], seed: int) -> StepForm | None:
        with self.interception.running(run):
            rng.seed_all(seed, host=True)
            form = run.form_of(call)
        later = self.graph.counters.values()
        self.counted = [now + more for now, more in zip(run.counted, later, strict=True)]
        return form

    def exemplar(
        self, call: Callable[[], Any], seed: int, arguments: tuple[Any, ...] = ()
    ) -> tuple[StepForm, Exemplar]:
        """Finds the form of one microbatch, and how to make the step take it again; arguments as for `form_of`."""
        run, counted = self._run(None), self._counters.capture()
        with rng.preserved(host=True), self.restored.preserved():
            rng.seed_all(seed, host=True)
            before = rng.host_state()
            reads: list[tuple[int, _Read]] = []

            def note(take: Callable[[], Any]) -> Any:
                value = take()
                reads.append((run.num_calls, (_line(), value)))
                return value

            with _Numbers(note):
                form = self._walked(run, call, seed)
            assert form is not None
            host = rng.host_state() != before
            # Not of a step that is made to take a form again, which puts its counters back.
            if self._lenient:
                shown = zip(
                    self.graph.counters, self._counters.capture(), self.counted, strict=True
                )
                for (owner, name), value, expected in shown:
                    if value != expected:
                        raise GraphError(
                            f"the step sets {owner + '.' if owner else ''}{name} to {value} after its last layer, "
                            f"where stages that end earlier take it to be {expected}: it did not add the same "
                            "number as when it was probed. Set it before the first layer, or in "
                            "on_train_batch_end, on all ranks"
                        )
        before_last = tuple(read for position, read in reads if position < len(form))
        known = tuple(zip(self.graph.counters, counted, strict=True))
        return form, Exemplar(seed, arguments, before_last, host, known)


@dataclass(frozen=True)
class Forms:
    """The forms that a step took in some trials.

    Attributes:
        exemplars: Makes it take each of them again, the one with most calls first; it calls all layers.
        shares: How often each was taken.
        names: The layers that each calls.
        is_shared: All microbatches of a batch took the same.
        throws_coins: The step read something that may have been a coin, for each microbatch by itself.
    """

    exemplars: tuple[Exemplar, ...] = ()
    shares: tuple[float, ...] = (1.0,)
    names: tuple[tuple[str, ...], ...] = ()
    is_shared: bool = True
    throws_coins: bool = True

    @property
    def widest(self) -> Exemplar | None:
        """The exemplar of the form that is planned; None if there is one form only."""
        return self.exemplars[0] if len(self.exemplars) > 1 else None


_FEW, _MANY = 4, 32


def survey(
    root: nn.Module,
    step: Callable[..., Any],
    batch: Any,
    graph: LayerGraph,
    seed_of: Callable[[int, int], int],
    arguments: tuple[Any, ...] = (),
) -> tuple[StepForm, Forms]:
    """Finds forms of a step by trials, with the seeds of its first batches (`seed_of` a batch's microbatch).

    Takes milliseconds, and leaves the module, which is on the host, as it is. Of the arguments of the first batch
    the first is its number.

    Returns:
        The form with most calls, and all.

    Raises:
        GraphError: None of the forms calls all layers.
    """
    found: list[tuple[StepForm, Exemplar]] = []
    with Interception(root).installed() as interception, untouched(root):
        view = FormView(root, graph, interception, lenient=True)
        for trial in range(_MANY):
            number, microbatch = divmod(trial, 2)
            own = (arguments[0] + number, *arguments[1:]) if arguments else ()
            call = StepCall(step, root, batch, own, graph.batch_writes)
            found.append(view.exemplar(call, seed_of(number, microbatch), own))
            if microbatch:
                view.count()
            tossed = any(exemplar.has_coins for _, exemplar in found)
            tossed |= bool(graph.counters or graph.generators)
            if trial + 1 >= _FEW and not tossed and len({form for form, _ in found}) == 1:
                break
    return _of_trials(found)


def _of_trials(found: Sequence[tuple[StepForm, Exemplar]]) -> tuple[StepForm, Forms]:
    counts = Counter(form for form, _ in found)
    exemplars = dict(reversed(found))
    forms = sorted(counts, key=lambda form: (-len(form), -counts[form], form))
    known = {name for name, _ in forms[0]}
    for form in forms[1:]:
        if more := sorted({name for name, _ in form} - known):
            raise GraphError(
                f"the step takes {len(forms)} forms, none of which calls all layers: the one with most calls "
                f"({len(forms[0])}) does not call {more[0]}, which another does. Let one of them call all "
                "(multiply by 0 what shall not count), or move the branch inside the forward of one module"
            )
    batches = zip(found[::2], found[1::2], strict=False)
    is_shared = all(first[0] == second[0] for first, second in batches)
    return forms[0], Forms(
        tuple(exemplars[form] for form in forms),
        tuple(counts[form] / len(found) for form in forms),
        tuple(map(names_of, forms)),
        is_shared,
        any(exemplar.has_coins for _, exemplar in found) or not is_shared,
    )


class _FormRun(StubbedRun):
    """One walk through a step with a stub for every layer.

    Attributes:
        counted: What its counters showed at the latest call of a layer.
    """

    def __init__(
        self,
        view: View,
        known: Collection[_Pattern] | None,
        lenient: bool,
        counters: Attributes,
    ) -> None:
        super().__init__(view)
        self._counters, self.counted = counters, counters.capture()
        self._lenient, self._stops = lenient, known is not None
        self._calls: list[tuple[str, bool]] = []
        self._possible = list(known or ())
        self._layers: dict[str, list[Layer]] = defaultdict(list)
        for layer in view.graph.layers:
            self._layers[layer.name].append(layer)
        self._counts: dict[str, int] = defaultdict(int)

    @property
    def num_calls(self) -> int:
        """Layers that were called so far."""
        return len(self._calls)

    def form_of(self, call: Callable[[], Any]) -> StepForm | None:
        """Returns the form; None if it is none of those that are known."""
        hooks = NoHooksWithoutGradients() if self._view.graph.hooks else contextlib.nullcontext()
        with contextlib.suppress(Stop), torch.enable_grad(), hooks:
            call()
        self._view.dummy_memory.require_unwritten()
        return None if self._stops and not self._possible else tuple(self._calls)

    def call(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Notes the call of a layer, and hands out dummies."""
        name = site.name
        if name not in self._view.sites:
            return site.diffpipe_original(*args, **kwargs)
        self.counted = self._counters.capture()
        if name not in self._layers and self._lenient:
            self._calls.append((name, torch.is_grad_enabled()))
            return site.diffpipe_original(*args, **kwargs)
        if name not in self._layers:
            raise GraphError(
                f"the step calls {name}, which it did not call when it was probed, so that no rank was planned to "
                "run it. Let the step call it from the first batch on (multiply by 0 what shall not count yet), "
                "or move the branch inside the forward of one module"
            )
        count = self._counts[name]
        self._counts[name] = count + 1
        layer = self._layers[name][min(count, len(self._layers[name]) - 1)]
        for _ in range(layer.num_seeds):
            rng.draw_seed()
        position, has_grad = len(self._calls), torch.is_grad_enabled()
        self._calls.append((name, has_grad))
        fitting = ((name, has_grad),), ((name, None),)
        self._possible = [f for f in self._possible if f[position : position + 1] in fitting]
        if self._stops and not self._possible:
            raise Stop
        if len(self._possible) == 1 and len(self._possible[0]) == position + 1:
            raise Stop
        return self._stub(layer)


_TAKES_NUMBER = torch.ops.aten._local_scalar_dense.default


def _line() -> _Line:
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


class _Numbers(TorchDispatchMode):
    """Answers where a number is taken out of a tensor, of which steps make coins, given what takes it."""

    def __init__(self, answer: Callable[[Callable[[], Any]], Any]) -> None:
        super().__init__()
        self._answer = answer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        take = partial(func, *args, **(kwargs or {}))
        return self._answer(take) if func is _TAKES_NUMBER else take()


def _repeated(reads: Sequence[_Read]) -> _Numbers:
    """Gives lines that take numbers out of tensors those that were noted, also where tensors have none."""
    values: dict[_Line, deque[Any]] = defaultdict(deque)
    for line, value in reads:
        values[line].append(value)
    return _Numbers(lambda take: of_line.popleft() if (of_line := values[_line()]) else take())
