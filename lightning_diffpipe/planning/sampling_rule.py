"""The rule of `method="auto"`: a method to sample a request, and a mesh of the ranks for it.

    samples     are divided first, as far as that is even: nothing is sent but final latents
    guidance    halves of the ranks compute a branch each, and exchange predictions
    the rest    of the ranks share what is left:
                    convolutions over rows (U-Nets)    distrifusion
                    fast links                         sequence, with heads spread over ranks (Ulysses)
                    slow links                         pipefusion, with two patches for each stage

With fewer than 8 steps only exact methods count, since stale activations need steps that differ little.
Where a rank has no room for all weights, the stages of PipeFusion divide them. What a model or a request
turns out not to work with is left out, and the next in this order is taken.
"""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass

MIN_STEPS = 8
"""With fewer denoising steps, only exact methods are taken."""
FAST_BYTES_PER_S = {"cuda": 100e9, "cpu": 0.1e9}
"""Bandwidth from which Ulysses spends less time on messages than on arithmetic, which in 16 bits is about
`3 h + p / 2` operations per byte for p tokens of width h. NVLink has it, PCI Express and networks have not."""
_ROOM = 0.8  # what weights may take of the memory; the rest is for activations
_APPROXIMATE = ("distrifusion", "pipefusion")


@dataclass(frozen=True, slots=True)
class SamplingCase:
    """The circumstances that decide about the method of a request.

    Attributes:
        num_samples: Samples that ranks can divide.
        num_branches: Branches of guidance that two halves of the ranks can compute, or 1.
        convolves: Whether the denoiser's convolutions read rows of neighbours, as those of U-Nets do.
        bandwidth_bytes_per_s: Bandwidth of the slowest links.
        weight_bytes: Bytes of the denoiser's weights that are yet to be loaded.
        memory_bytes: Bytes that every rank has left; None if that is no limit.
    """

    num_ranks: int
    num_samples: int
    num_branches: int
    num_steps: int
    convolves: bool
    bandwidth_bytes_per_s: float
    device: str = "cuda"
    weight_bytes: int = 0
    memory_bytes: int | None = None

    def has_room_for(self, num_bytes: float) -> bool:
        """Returns whether a rank can hold so many bytes of weights."""
        return self.memory_bytes is None or num_bytes <= _ROOM * self.memory_bytes


@dataclass(frozen=True, slots=True)
class SamplingChoice:
    """A method, with sizes of the axes of its mesh, and the patches of PipeFusion."""

    method: str
    data: int = 1
    guidance: int = 1
    parallel: int = 1
    sequence: int = 1
    num_patches: int | None = None

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the axes, the outermost first."""
        return {n: size for n, size in asdict(self).items() if n not in ("method", "num_patches")}


def ranked_choices(case: SamplingCase, num_patches: int | None = None) -> list[SamplingChoice]:
    """Returns all ways to sample a request, the one to take first; of PipeFusion with `num_patches`, if given.

    Example:
        >>> flux = SamplingCase(8, 1, 1, 28, convolves=False, bandwidth_bytes_per_s=300e9)
        >>> ranked_choices(flux)[0]
        SamplingChoice(method='sequence', data=1, guidance=1, parallel=1, sequence=8, num_patches=None)
    """
    is_fast = case.bandwidth_bytes_per_s >= FAST_BYTES_PER_S[case.device]
    has_few_steps = case.num_steps < MIN_STEPS
    order = ["pipefusion", "sequence", "distrifusion", "synchronous", "single"]
    if case.convolves:
        order = ["distrifusion", "synchronous", "pipefusion", "sequence", "single"]
    elif is_fast or has_few_steps:
        order = ["sequence", "pipefusion", "distrifusion", "synchronous", "single"]

    def preference(choice: SamplingChoice) -> tuple[float, ...]:
        is_approximate = choice.method in _APPROXIMATE and choice.num_patches != 1
        stages = choice.parallel if choice.method == "pipefusion" else 1
        return (
            has_few_steps and is_approximate,
            not case.has_room_for(case.weight_bytes / stages),
            case.num_ranks > 1 and set(choice.axes.values()) == {1},
            case.num_samples % choice.data > 0,
            -choice.data,
            -choice.guidance,
            choice.num_patches == 1,  # exact, and stages take turns
            order.index(choice.method),
            choice.sequence,
            -(choice.num_patches or 0),
        )

    return sorted(_choices(case, num_patches), key=preference)


def _choices(case: SamplingCase, num_patches: int | None) -> Iterator[SamplingChoice]:
    """Yields every method on every mesh of all ranks, and one rank alone."""
    yield SamplingChoice("single")
    sizes = [size for size in range(1, case.num_ranks + 1) if case.num_ranks % size == 0]
    for data, guidance, parallel in itertools.product(sizes, (1, 2), sizes):
        sequence, rest = divmod(case.num_ranks, data * guidance * parallel)
        if rest or data > case.num_samples or guidance > case.num_branches or not sequence:
            continue
        axes = data, guidance, parallel, sequence
        if parallel > 1:
            patches = {2 * parallel, parallel, 1} if num_patches is None else {num_patches}
            yield from (SamplingChoice("pipefusion", *axes, number) for number in patches)
        elif sequence > 1 or case.num_ranks > 1:
            yield SamplingChoice("sequence" if sequence > 1 else "single", *axes)
        if parallel > 1 == sequence:
            yield SamplingChoice("distrifusion", *axes)
            yield SamplingChoice("synchronous", *axes)


def reason_for(choice: SamplingChoice, case: SamplingCase) -> str:
    """Returns clauses that tell why the rule takes this.

    Example:
        >>> case = SamplingCase(4, 1, 2, 28, convolves=False, bandwidth_bytes_per_s=20e9)
        >>> reason_for(ranked_choices(case)[0], case)
        'pipefusion: halves of guidance, and links of 20 GB/s are slow (below 100)'
    """
    if case.num_ranks == 1:
        return "there is one rank"
    clauses = [f"{case.num_samples} samples are divided"] * (choice.data > 1)
    clauses += ["halves of guidance"] * (choice.guidance > 1)
    fast, speed = FAST_BYTES_PER_S[case.device], case.bandwidth_bytes_per_s
    if choice.method != "single":
        few = f"{case.num_steps} steps are too few for stale activations, which need {MIN_STEPS}"
        links = f"links of {speed / 1e9:.3g} GB/s are"
        if not case.has_room_for(case.weight_bytes):
            left = (case.memory_bytes or 0) / 1e9
            clauses.append(f"{left:.3g} GB left for {case.weight_bytes / 1e9:.3g} GB of weights")
        elif case.num_steps < MIN_STEPS:
            clauses.append(few)
        elif case.convolves:
            clauses.append("it convolves over rows")
        elif speed >= fast:
            clauses.append(f"{links} fast (from {fast / 1e9:g})")
        else:
            clauses.append(f"{links} slow (below {fast / 1e9:g})")
    return f"{choice.method}: {', and '.join(clauses) or 'on one rank'}"
