"""Call sequences of a step: a coin, a counter or a flag chooses which layers it calls.

    random() < 0.5      a b c   or   a b c a b c        (self-conditioning: estimate first, or do not)

Some call the same layers and read other things between them, such as a term of the loss that a coin adds; those
that trials find count as sequences of their own.

That of a microbatch is known before any of its layers runs: the step's own code is run from the microbatch's seed
with a stub for every layer, to its end, as a layer may be called after all those of a known sequence. Every rank
does so from the same seed, and finds the same.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.calltree import tensors_in
from lightning_diffpipe.graph.cut import tail
from lightning_diffpipe.graph.interception import Interception, Site
from lightning_diffpipe.graph.layer import (
    CONSTANT_TYPES,
    Attribute,
    Layer,
    LayerGraph,
    storage_key,
)
from lightning_diffpipe.graph.placement import has_own_tensors
from lightning_diffpipe.graph.side_effects import (
    Attributes,
    NoHooksWithoutGradients,
    generators_preserved,
    is_users,
)
from lightning_diffpipe.graph.step import StepCall, loss_of
from lightning_diffpipe.graph.trial import plain_state, untouched
from lightning_diffpipe.graph.view import (
    DummyMemory,
    NumberMemory,
    Stop,
    StubbedRun,
    View,
    is_equal,
    not_probed,
)

_Read = tuple[int, Any]


class CallSequence(NamedTuple):
    """A call sequence of a step.

    Attributes:
        calls: The layers that it calls, in order, each with whether gradients were on.
        reads: Values the code between layers reads, outputs of layers and parameters, each with the number of calls
            before it. Empty unless steps with the same calls read different things.
    """

    calls: tuple[tuple[str, bool], ...]
    reads: frozenset[_Read] = frozenset()


Moment = Callable[[], contextlib.AbstractContextManager[Any]]
"""Inside, a trainer says that so much of training is over; gives the number of the batch."""

_Pattern = Sequence[tuple[str, bool | None]]
_Line = tuple[str, int]
_Number = tuple[_Line, Any]


def names_of(sequence: CallSequence) -> tuple[str, ...]:
    """Returns the modules of the layers of a call sequence, in order."""
    return tuple(name for name, _ in sequence.calls)


def probed_sequence(graph: LayerGraph) -> CallSequence:
    """Returns the call sequence that a graph was probed with, for a step that has no other."""
    return CallSequence(tuple((name, True) for name in graph.layer_names))


@dataclass(frozen=True)
class Replay:
    """The values with which a step has a call sequence again: of its coins, its counters and its arguments.

    Attributes:
        seed: Seed of the microbatch.
        arguments: Further arguments of the step, such as `batch_idx`.
        reads: The numbers that it took out of tensors before its last layer call (`bool(coin)`, `.item()`), and
            later out of random numbers, in order, each with the line that did.
        host: It sampled from `random` or `numpy.random` as well.
        counted: Attributes that count, as they were.
        tossed: It sampled from these, or took a number out of random numbers and of no layer.
        moment: Inside, what the step may read of its trainer is as it was.
    """

    seed: int
    arguments: tuple[Any, ...] = ()
    reads: tuple[_Number, ...] = ()
    host: bool = False
    counted: tuple[tuple[Attribute, Any], ...] = ()
    tossed: bool = False
    moment: Moment = contextlib.nullcontext

    def of_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the same step, whose coins always fall as they did; what else it samples is sampled."""

        def repeated(module: nn.Module, batch: Any, *_arguments: Any) -> Any:
            if self.host:
                rng.seed_host(self.seed)
            counters = Attributes(module, [name for name, _ in self.counted])
            repeats = _repeated(self.reads) if self.reads else contextlib.nullcontext()
            with counters.preserved(), repeats, self.moment():
                counters.restore([value for _, value in self.counted])
                return step(module, batch, *self.arguments)

        return repeated


_Trial = tuple[CallSequence, Replay]


class CallSequenceView(View):
    """Recognises the call sequences of a step, for microbatches of one signature; other arguments as of `View`.

    Args:
        lenient: Layers that were not called when the step was probed are run, instead of refused.
        bears_nan: The code after the last layer is known to run on NaN, too. Else runs end before it, and a
            sequence that begins with all calls of a known one is taken for that.
        by_reads: Distinguishes call sequences by what the code between layers reads, too.

    Attributes:
        counted: Counters of the step (`LayerGraph.counters`) after the latest batch.
        numbers_from_frozen: In runs frozen layers return numbers in place of NaN.
        frozen_values: Tensors, numbers and strings that the latest run gave to frozen layers, and that containers
            of nothing else returned.
        sums: Those of the tensors that the latest run gave to layers, with numbers, and its loss; for `carried`.
    """

    def __init__(
        self,
        root: nn.Module,
        graph: LayerGraph,
        interception: Interception,
        memory: DummyMemory | None = None,
        lenient: bool = False,
        bears_nan: bool = False,
        by_reads: bool = False,
    ) -> None:
        glue = replace(tail(graph), needed=frozenset())
        super().__init__(root, graph, glue, interception, memory)
        self._lenient = lenient
        self._goes_on = bears_nan and not graph.needs_values
        self.by_reads = by_reads and (lenient or self._goes_on)
        parameters = root.named_parameters() if self.by_reads else ()
        self.labels = {id(parameter): name for name, parameter in parameters}
        self._counters = Attributes(root, graph.counters)
        self.counted: list[Any] = []
        self.numbers_from_frozen, self.frozen_values = False, list[Any]()
        self.sums: list[Any] | None = None
        self.frozen = graph.frozen_calls
        owners = {name.rpartition(".")[0] for name in graph.glue_writes}
        metrics = {name for name, module in root.named_modules() if has_own_tensors(module)}
        self._owners = [root.get_submodule(name) for name in sorted(owners | metrics)]

    def sequence_of(
        self, call: StepCall, seed: int, known: Collection[CallSequence] = ()
    ) -> CallSequence:
        """Returns the call sequence of one microbatch; one of those that are known, or another.

        Args:
            call: Runs the user's step on it.
            seed: Seed of random numbers between layers.
            known: Where a run ends before the code after the last layer, it does so where only one of these is
                possible, and complete; the graph's, if there are none.

        Returns:
            The only one that is known, if the step reads values, which dummies have not; runs notice if it takes
            another.

        Raises:
            GraphError: The step calls a layer that it did not call when it was probed.
        """
        if self.graph.needs_values and len(known) < 2:
            return next(iter(known), probed_sequence(self.graph))
        patterns: Collection[_Pattern] | None = None
        if not self._goes_on:
            patterns = [sequence.calls for sequence in known]
            patterns = patterns or [tuple((n, None) for n in self.graph.layer_names)]
        generators: Callable[[], Any] = contextlib.nullcontext
        if self.graph.generators:  # on one rank
            generators = partial(generators_preserved, self.root)
        with untouched(self.root, self._owners):
            with self.restored.preserved(), generators():
                sequence = self._walked(self._run(patterns), call, seed)
            if sequence is None:
                with untouched(self.root), self.restored.preserved(), generators():
                    sequence = self._walked(self._run(None), call, seed)
        assert sequence is not None
        return sequence

    def extreme_sequence(
        self, call: StepCall, seed: int, sides: Sequence[bool]
    ) -> CallSequence | None:
        """Returns the call sequence with the smallest or largest random numbers (see `rng.Extremes` for `sides`).

        None on an error, and if the step samples by functions whose numbers cannot be replaced.
        """
        extremes = rng.Extremes(sides)
        sampling = rng.isolated_random_numbers(seed)
        with sampling, self.restored.preserved(), contextlib.suppress(Exception):
            with extremes:
                sequence = self._walked(self._run(None), call, seed)
            return sequence if extremes.sees_all else None
        return None

    def moves_frozen(self, call: StepCall, seed: int, moments: Sequence[Moment]) -> bool:
        """Returns whether frozen layers get other values at later moments, or when the step has counted on."""
        if not self.graph.frozen:
            return False
        self.interception.watch(self.frozen)
        self.numbers_from_frozen, values, now = True, list[list[Any]](), contextlib.nullcontext
        with self._counters.preserved():
            for moment in (now, now, *moments[:1], *moments[-1:]):
                with contextlib.suppress(Exception), moment():  # of any code, as above
                    self.record(call, seed)
                    values.append(self.frozen_values)
                self.count()
        self.numbers_from_frozen = False
        return not all(bool(are_equal(values[0], later)) for later in values[1:])

    def carried(self, call: StepCall, seed: int) -> tuple[Carried | None, bool]:
        """Returns the state that a run of the step reads of an equal one before, and whether runs change any.

        None without, or if a run fails. It is seen by arguments of layers and by the loss. Counters and generators
        of one's own are put back. For views with `NumberMemory`, as NaN would hide what enters after the first
        layer.
        """
        runs, states = list[tuple[CallSequence, list[Any]]](), list[dict[str, list[Any]]]()
        # As in stages, what the step leaves set remains.
        self.restored = Attributes(self.root, self.graph.toggled | self.graph.counters.keys())

        def run() -> None:
            self.sums = []
            with (
                generators_preserved(self.root),
                contextlib.suppress(Exception),
            ):  # of any code, as above
                sequence, _replay = self.record(call, seed)
                runs.append((sequence, self.sums))

        def are_alike() -> bool:
            (sequence, sums), (again, others) = runs[-2:]
            return sequence == again and bool(are_equal(sums, others))

        with untouched(self.root):
            for _ in range(3):  # the first may store what is computed once
                run()
                states.append(plain_state(self.root))
        _, before, after = states
        names = tuple(sorted(n for n in after if before.get(n) != after[n]))
        if len(runs) < 3 or are_alike():
            return None, bool(names)
        for _ in range(2):
            with untouched(self.root):
                run()
        return Carried(names, len(runs) == 5 and are_alike()), True

    @contextlib.contextmanager
    def counted_on(self) -> Iterator[int]:
        """Lets counters of the step show many batches more inside; a `Moment`."""
        with self._counters.preserved():
            self._counters.restore([count + _FAR for count in self._counters.capture()])
            yield 0

    def count(self) -> None:
        """Sets counters of the step to what they are after the latest batch."""
        if self.counted:
            self._counters.restore(self.counted)

    def _run(self, known: Collection[_Pattern] | None) -> _CallSequenceRun:
        return _CallSequenceRun(self, known, self._lenient, self._counters)

    def _walked(self, run: _CallSequenceRun, call: StepCall, seed: int) -> CallSequence | None:
        with self.interception.running(run), _Operators(run) if self.by_reads else _NOTHING:
            rng.seed_all(seed, host=True)
            sequence = run.sequence_of(call)
        self.frozen_values = run.frozen_values
        after_layers = self.graph.counters.values()  # what is added there
        self.counted = [n + added for n, added in zip(run.counted, after_layers, strict=True)]
        return sequence

    def record(self, call: StepCall, seed: int, arguments: tuple[Any, ...] = ()) -> _Trial:
        """Returns the call sequence of one microbatch, and its replay; arguments as for `sequence_of`."""
        run, counted = self._run(None), self._counters.capture()
        with rng.isolated_random_numbers(seed), self.restored.preserved():
            host_state = rng.host_state()
            reads: list[tuple[int, bool, _Number]] = []

            def note(take: Callable[[], Any]) -> Any:
                value = take()
                reads.append((run.num_calls, run.takes_coin, (_line(), value)))
                return value

            with _Operators(None, note):
                sequence = self._walked(run, call, seed)
            assert sequence is not None
            samples_on_host = rng.host_state() != host_state
            # Views that are not lenient run steps of replays, which put their counters back.
            if self._lenient:
                pair = self._counters.capture(), self.counted
                for (owner, name), value, expected in zip(self.graph.counters, *pair, strict=True):
                    if value != expected:
                        raise GraphError(
                            f"the step sets {owner + '.' if owner else ''}{name} to {value} after its last layer, "
                            f"where stages that end earlier take it to be {expected}: it did not add the same "
                            "number as when it was probed. Set it before the first layer, or in "
                            "on_train_batch_end, on all ranks"
                        )
        throws_coins = samples_on_host or any(is_coin for _, is_coin, _ in reads)
        # After the last layer only coins are known: what else is read there is made of dummies.
        known_reads = tuple(n for at, is_coin, n in reads if is_coin or at < len(sequence.calls))
        counters = tuple(zip(self.graph.counters, counted, strict=True))
        return sequence, Replay(
            seed, arguments, known_reads, samples_on_host, counters, throws_coins
        )


class Carried(NamedTuple):
    """State that a step reads in its next run.

    Attributes:
        is_restored: Runs that shall leave no trace put it back.
    """

    names: tuple[str, ...]
    is_restored: bool


@dataclass(frozen=True)
class CallSequences:
    """The call sequences of a step in some trials, the longest first, which calls all layers.

    Attributes:
        is_shared: All microbatches of a batch had the same.
        throws_coins: The step read something that may have been a coin, for each microbatch by itself.
        by_reads: Some call the same layers, and read other things between them.
        read: Parameters that the code between layers read in some of them, and not in others.
        moves_frozen: What frozen layers are given depends on how much of training is over.
        carried: What a run of the step reads of the one before, but for counters.
    """

    replays: tuple[Replay, ...] = ()
    shares: tuple[float, ...] = (1.0,)
    names: tuple[tuple[str, ...], ...] = ()
    is_shared: bool = True
    throws_coins: bool = True
    by_reads: bool = False
    read: frozenset[str] = frozenset()
    moves_frozen: bool = False
    carried: Carried | None = None

    def widest_of(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a step that takes its longest call sequence."""
        return self.widest.of_step(step) if self.widest else step

    @property
    def widest(self) -> Replay | None:
        """The replay of the sequence that is planned; None if there is only one."""
        return self.replays[0] if len(self.replays) > 1 else None


_FAR = 1000  # batches after which a step has all that it collects
_FEW, _MANY = 2, 32  # runs of a step whose calls nothing seems to change, and of others
_SIDES = ((False,), (True,), (False, True), (True, False))  # ways in which two coins may fall
MOST_SEQUENCES = 8
_NOTHING = contextlib.nullcontext()


def too_many_sequences(number: int) -> str:
    """Returns the message for a step with too many call sequences."""
    return (
        f"the step has {number} call sequences, that is, ways to call its layers, and {MOST_SEQUENCES} can be "
        "planned, as each is probed by itself. Let fewer coins choose what it calls, or move the branch inside the "
        "forward of one module"
    )


def survey(
    root: nn.Module,
    step: Callable[..., Any],
    batch: Any,
    graph: LayerGraph,
    seed_of: Callable[[int, int], int],
    arguments: tuple[Any, ...] = (),
    moments: Sequence[Moment] = (),
    runs_ahead: bool = True,
) -> tuple[CallSequence, CallSequences]:
    """Finds the call sequences of a step by trial runs with the seeds of its first batches.

    Three runs show whether one changes what later ones see, and if so as many at each of `moments`; then the step
    runs twice, and once at each moment. If it has compared random numbers, small and large ones replace them four
    times. If these runs call different layers, or the step has counters or generators of its own, 32 more follow,
    two microbatches of each of 16 batches, and two at each moment. The module is left as it was.

    Args:
        root: The module, on the host.
        step: The step.
        batch: One microbatch, which all trials get.
        graph: Graph of the step as probed.
        seed_of: Seed of a microbatch, by the numbers of its batch and of itself.
        arguments: Further arguments of the step for the first batch; the first of them is the batch's number.
        moments: Later moments of the training.
        runs_ahead: Frozen layers may run before the step of their batch; only then `moves_frozen` is looked for.

    Returns:
        The longest call sequence, and all of them.

    Raises:
        GraphError: None of the sequences calls all layers.
    """
    trials: list[_Trial] = []
    with Interception(root).installed() as interception, untouched(root):
        view = CallSequenceView(root, graph, interception, lenient=True, by_reads=True)

        def trial(number: int, microbatch: int) -> tuple[StepCall, int, tuple[Any, ...]]:
            shifted = (arguments[0] + number, *arguments[1:]) if arguments else ()
            call = StepCall(step, root, batch, shifted, graph.batch_writes)
            return call, seed_of(number, microbatch), shifted

        def later(moment: Moment, microbatch: int) -> list[_Trial]:
            # Any code may fail that looks up what is not there yet.
            with contextlib.suppress(Exception), moment() as number:
                sequence, replay = view.record(*trial(number, microbatch))
                return [(sequence, replace(replay, moment=moment))]
            return []

        numbers = CallSequenceView(root, graph, interception, NumberMemory(), lenient=True)
        carried, changes = numbers.carried(*trial(0, 0)[:2])
        for moment in (*moments, numbers.counted_on) if changes else ():  # it may read that later
            with contextlib.suppress(Exception), moment() as number:
                carried = carried or numbers.carried(*trial(number, 0)[:2])[0]
        moves_frozen = runs_ahead and view.moves_frozen(*trial(0, 0)[:2], moments)
        if not (graph.counters or graph.generators):
            trials = [view.record(*trial(number, 0)) for number in range(_FEW)]
            distinct: set[CallSequence | None] = {sequence for sequence, _ in trials}
            distinct.update(sequence for moment in moments for sequence, _ in later(moment, 0))
            for sides in _SIDES if any(replay.tossed for _, replay in trials) else ():
                if len(distinct) == 1:
                    distinct.add(view.extreme_sequence(*trial(0, 0)[:2], sides))
            if len(distinct) > 1:
                trials.clear()
        if not trials:
            for number, microbatch in itertools.product(range(_MANY // 2), range(2)):
                trials.append(view.record(*trial(number, microbatch)))
                if microbatch:  # the last of its batch
                    view.count()
            for moment in moments:
                pair = [*later(moment, 0), *later(moment, 1)]
                trials += pair if len(pair) == 2 else ()  # `_sequences_of_trials` compares pairs
    widest, sequences = _sequences_of_trials(trials)
    return widest, replace(sequences, moves_frozen=moves_frozen, carried=carried)


def _sequences_of_trials(trials: Sequence[_Trial]) -> tuple[CallSequence, CallSequences]:
    """Returns the longest call sequence, and all with their frequencies; see `survey`."""
    reads = [{value for _, value in sequence.reads} for sequence, _ in trials]
    read = set.union(*reads) - set.intersection(*reads)  # in some trials only
    counts = Counter(sequence for sequence, _ in trials)
    by_reads = len(counts) > (num_sequences := len({sequence.calls for sequence in counts}))
    if len(counts) > MOST_SEQUENCES >= num_sequences or not by_reads:  # too many to be probed
        by_reads = False
        trials = [(CallSequence(sequence.calls), replay) for sequence, replay in trials]
        counts = Counter(sequence for sequence, _ in trials)
    replays = dict(reversed(trials))
    sequences = sorted(counts, key=lambda f: (-len(f.calls), -len(f.reads), -counts[f]))
    widest_names = set(names_of(sequences[0]))
    for sequence in sequences[1:]:
        if more := sorted(set(names_of(sequence)) - widest_names):
            raise GraphError(
                f"the step has {len(sequences)} call sequences, none of which has all layers: the longest "
                f"({len(sequences[0].calls)}) does not call {more[0]}, which another does. Let one of them call "
                "all (multiply by 0 what shall not count), or move the branch inside the forward of one module"
            )
    batches = zip(trials[::2], trials[1::2], strict=False)
    is_shared = all(first[0] == second[0] for first, second in batches)
    return sequences[0], CallSequences(
        tuple(replays[sequence] for sequence in sequences),
        tuple(counts[sequence] / len(trials) for sequence in sequences),
        tuple(map(names_of, sequences)),
        is_shared,
        any(replay.tossed for _, replay in trials) or not is_shared,
        by_reads,
        frozenset(name for name in read if isinstance(name, str)),
    )


class _CallSequenceRun(StubbedRun):
    """One walk through a step with a stub for every layer.

    Attributes:
        counted: Counters at the latest call of a layer.
        takes_coin: The operator that runs takes a number out of random numbers, and of no layer.
    """

    def __init__(
        self,
        view: CallSequenceView,
        known: Collection[_Pattern] | None,
        lenient: bool,
        counters: Attributes,
    ) -> None:
        super().__init__(view)
        self.takes_coin, self._reads = False, set[_Read]()
        self._labels: dict[int, Any] = dict(view.labels)  # by object
        self._origins: dict[int, int] = {}  # by storage
        self._alive: list[Any] = []  # so that each is known by its address
        self._counters, self.counted = counters, counters.capture()
        self._lenient, self._stops = lenient, known is not None
        self._calls: list[tuple[str, bool]] = []
        self._possible = list(known or ())
        self._layers: dict[str, list[Layer]] = defaultdict(list)
        for layer in view.graph.layers:
            self._layers[layer.name].append(layer)
        self._counts: dict[str, int] = defaultdict(int)
        self._batch_keys: set[Any] = set()  # of memory that the batch has
        self.frozen_values: list[Any] = []

    @property
    def num_calls(self) -> int:
        """Layers that were called so far."""
        return len(self._calls)

    def sequence_of(self, call: StepCall) -> CallSequence | None:
        """Returns the call sequence; None if it is none of those that are known."""
        self._batch_keys = set(map(storage_key, tensors_in(call.batch)))
        hooks = NoHooksWithoutGradients() if self._view.graph.hooks else contextlib.nullcontext()
        with contextlib.suppress(Stop), torch.enable_grad(), hooks:
            out = call()
            self.see(out)
            self._sum(loss_of(out))
        self._view.dummy_memory.require_unwritten()
        if self._stops and not self._possible:
            return None
        return CallSequence(tuple(self._calls), frozenset(self._reads))

    def see(self, tree: Any) -> None:
        """Records outputs of layers and parameters among what the code between layers uses."""
        if self._view.by_reads and not self._inside:
            seen = (self._labels.get(id(leaf)) for leaf in pytree.tree_leaves(tree))
            self._reads.update((len(self._calls), label) for label in seen if label is not None)

    def _sum(self, tree: Any) -> None:
        """Records numbers and sums of tensors, to be compared with those of an equal run; objects may be new."""
        if self._view.sums is not None:
            leaves = pytree.tree_leaves(tree)
            self._view.sums += (x for x in leaves if isinstance(x, CONSTANT_TYPES))
            self._view.sums += (tensor.detach().sum() for tensor in tensors_in(tree))

    def log(self, method: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Mutes what is logged, and notes what it reads."""
        self.see((args, kwargs))

    def _stub(self, layer: Layer) -> Any:
        out = super()._stub(layer)
        if self._view.numbers_from_frozen and layer.frozen:
            out = pytree.tree_map_only(torch.Tensor, _numbers_like, out)
        if self._view.by_reads:
            self._alive.append(out)
            leaves = enumerate(pytree.tree_leaves(out))
            self._labels |= {id(tensor): (len(self._calls), leaf) for leaf, tensor in leaves}
            self._origins |= dict.fromkeys(map(storage_key, tensors_in(out)), _LAYER)
        return out

    def _note(self, tree: Any) -> None:
        # The batch stays as it is, and may be large; anything else the step may write in place later.
        self.frozen_values += (
            tensor if storage_key(tensor) in self._batch_keys else tensor.clone()
            for tensor in tensors_in(tree)
        )
        leaves = pytree.tree_leaves(tree)
        self.frozen_values += (leaf for leaf in leaves if isinstance(leaf, CONSTANT_TYPES))

    def ran(self, func: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Runs an operator, and follows what is made of random numbers alone: coins are taken out of that."""
        self.see((args, kwargs))
        kinds = [self._origins.get(storage_key(tensor), 0) for tensor in tensors_in((args, kwargs))]
        origin = max([*kinds, _SAMPLED if rng.draws(func, args, kwargs) else 0])
        self.takes_coin = func is _TAKES_NUMBER and origin == _SAMPLED
        out = run()
        if origin:
            self._alive.append(out)
            self._origins |= dict.fromkeys(map(storage_key, tensors_in(out)), origin)
        return out

    def call(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records the call of a layer, and returns dummies."""
        name = site.name
        if name not in self._view.sites:
            out = site.diffpipe_original(*args, **kwargs)
            if name in self._view.frozen:
                self._note(out)
            return out
        self.counted = self._counters.capture()
        self.see((args, kwargs))
        self._sum((args, kwargs))
        if name not in self._layers and self._lenient:
            self._calls.append((name, torch.is_grad_enabled()))
            self._inside = True
            try:
                return site.diffpipe_original(*args, **kwargs)
            finally:
                self._inside = False
        if name not in self._layers:
            raise not_probed(name)
        count = self._counts[name]
        self._counts[name] = count + 1
        layer = self._layers[name][min(count, len(self._layers[name]) - 1)]
        if layer.frozen:
            self._note((args, kwargs))
        # As its real call would, so that later numbers are the same.
        for _ in range(layer.num_seeds):
            rng.draw_seed()
        position, has_grad = len(self._calls), torch.is_grad_enabled()
        self._calls.append((name, has_grad))
        fitting = ((name, has_grad),), ((name, None),)  # None: with gradients or without
        self._possible = [f for f in self._possible if f[position : position + 1] in fitting]
        if self._stops and not self._possible:
            raise Stop
        if len(self._possible) == 1 and len(self._possible[0]) == position + 1:
            raise Stop
        return self._stub(layer)


def _numbers_like(dummy: torch.Tensor) -> torch.Tensor:
    if not dummy.is_floating_point():
        return dummy
    return torch.linspace(0.5, 1.5, dummy.numel(), device=dummy.device).to(dummy).view(dummy.shape)


def are_equal(some: Sequence[Any], others: Sequence[Any]) -> torch.Tensor:
    """Returns whether layers got the same, NaN included; waits for no GPU."""
    constants_equal, tensors = True, list[tuple[torch.Tensor, torch.Tensor]]()
    for a, b in zip(some, others, strict=False):  # other calls are seen as such
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape == b.shape:
            tensors.append((a, b))
        else:
            constants_equal = constants_equal and is_equal(a, b)
    equal = torch.tensor(constants_equal)
    for a, b in sorted(tensors, key=lambda pair: not pair[0].is_cpu):  # the host's first
        same = ((a == b) | ((a != a) & (b != b))).all()
        equal = equal.to(same.device, non_blocking=True) & same
    return equal


_SAMPLED, _LAYER = 1, 2  # what a value is made of: the larger one counts
_TAKES_NUMBER = torch.ops.aten._local_scalar_dense.default


def _line() -> _Line:
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


class _Operators(TorchDispatchMode):
    """Shows a run what operators read; answers where a number is taken out of a tensor, given what takes it."""

    def __init__(
        self, run: _CallSequenceRun | None, answer: Callable[[Callable[[], Any]], Any] | None = None
    ) -> None:
        super().__init__()
        self._run, self._answer = run, answer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        take = partial(func, *args, **(kwargs or {}))
        if self._run is not None:
            return self._run.ran(func, args, kwargs or {}, take)
        return self._answer(take) if self._answer and func is _TAKES_NUMBER else take()


def _repeated(reads: Sequence[_Number]) -> _Operators:
    """Gives lines that take numbers out of tensors those that were recorded, also where tensors have none."""
    values: dict[_Line, deque[Any]] = defaultdict(deque)
    for line, value in reads:
        values[line].append(value)
    answer = lambda take: of_line.popleft() if (of_line := values[_line()]) else take()
    return _Operators(None, answer)
