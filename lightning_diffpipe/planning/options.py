"""Options of the planner. `"auto"` leaves a choice to the search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Literal

from lightning_diffpipe.errors import ConfigurationError, require_choice, require_flags
from lightning_diffpipe.planning.codec import LARGEST, Node
from lightning_diffpipe.planning.schedule import ScheduleSpec
from lightning_diffpipe.planning.schedules import DEFAULT_SCHEDULE, SCHEDULES

Auto = Literal["auto"]

PARTITIONS = ("auto", "diffusionpipe", "pipedream", "minimax", "uniform", "parameters")
PARTITIONS_WITH_REPLICAS = ("diffusionpipe", "pipedream")
"""Partitions that distribute the ranks over the stages as well, so that every rank holds one stage."""

FILLINGS = ("none", "shares", "auto")

CHECKPOINTING = STREAMING = OPTIMIZER_OFFLOAD = ("auto", "none", "all")


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Wishes and limits of a plan. In a finished plan nothing is `"auto"` any more.

    Attributes:
        global_batch_size: Samples of one optimizer step, over all pipelines.
        num_stages: Stages of a pipeline. With a schedule such as `interleaved` a multiple of its ranks:
            each rank holds several.
        num_microbatches: Microbatches of one pipeline.
        num_replicas: Ranks of each stage: a number for all, or one number for each stage.
        data_parallel: Pipelines side by side, each with its part of the batch.
        schedule: A name of `SCHEDULES`, or `auto`.
        filling: Placement of frozen work. `none`: data-parallel on all ranks before the pipeline;
            `shares`: into the bubbles of the batch before, see `filling.py`.
        partition: Method that cuts layers into stages. `auto` tries what the simulator may find fastest;
            the others are baselines.
        frozen_splittable: Whether frozen layers may run for some samples of a microbatch only; False in the
            plan of a profile with an encoder that may not.
        frozen_group_size: Samples on which frozen layers run at a time. Ranks take whole groups, so small
            ones balance better and large ones run faster; `auto` weighs the two by the profile. A rank alone
            runs them on whole microbatches.
        encoding_ranks: Ranks of each pipeline that hold the frozen encoders, and run them: so many of the last
            ones. `auto`: all, or as few as have to for the plan to fit.
        optimizer_bytes_factor: Bytes of optimizer state for each byte of gradient; a number >= 0.
        averages_bytes_factor: Bytes of averaged weights for each byte of gradient, which every rank holds of all of
            its stages; a number >= 0.
        shard_optimizer: Whether the ranks that hold a stage, in all pipelines, share its optimizer state (ZeRO-1);
            `auto`: where a plan would not fit, or be slower, without.
        checkpointing: Layers that are recomputed in the backward instead of storing their activations: `none`;
            `all`; `auto`: those without which no plan would fit, or only slower ones. A finished plan has them in
            its stages.
        streaming: Layers whose frozen weights are in host memory, and are copied to the device for each run
            (see `streaming.py`): `none`; `all`; `auto`: those without which no plan would fit, also with
            recomputed layers, which all of these are.
        optimizer_offload: Whether optimizer states are in host memory, and come to the device bucket by bucket
            when they are updated: `none`; `all`; `auto`: where no plan would fit without.
        encode_first: Whether encodings are stored before training (`EncodingCache`), and encoders leave memory.

    Raises:
        ConfigurationError: A value that cannot be.
    """

    global_batch_size: int
    num_stages: int | Auto = "auto"
    num_microbatches: int | Auto = "auto"
    num_replicas: int | tuple[int, ...] | Auto = "auto"
    data_parallel: int | Auto = "auto"
    schedule: str = DEFAULT_SCHEDULE
    filling: str = "none"
    partition: str = "auto"
    frozen_splittable: bool = True
    frozen_group_size: int | Auto = "auto"
    encoding_ranks: int | Auto = "auto"
    optimizer_bytes_factor: float = 2.0
    averages_bytes_factor: float = 0.0
    shard_optimizer: bool | Auto = "auto"
    checkpointing: str = "auto"
    streaming: str = "auto"
    optimizer_offload: str = "auto"
    encode_first: bool = False

    def __post_init__(self) -> None:
        self._check_count("global_batch_size", self.global_batch_size, auto=False)
        counts = ("num_stages", "num_microbatches", "data_parallel", "frozen_group_size")
        for name in (*counts, "encoding_ranks"):
            self._check_count(name, getattr(self, name), auto=True)
        require_flags(frozen_splittable=self.frozen_splittable, encode_first=self.encode_first)
        replicas = self.num_replicas
        if replicas == ():
            raise ConfigurationError(
                "num_replicas names no stage: []; give a number for all stages, one for each, or 'auto'"
            )
        for count in replicas if isinstance(replicas, tuple) else (replicas,):
            self._check_count("num_replicas", count, auto=not isinstance(replicas, tuple))
        if isinstance(replicas, tuple) and self.num_stages not in ("auto", len(replicas)):
            raise ConfigurationError(
                f"num_replicas={replicas} names {len(replicas)} stages, "
                f"but num_stages={self.num_stages}"
            )
        for name in ("optimizer_bytes_factor", "averages_bytes_factor"):
            factor: object = getattr(self, name)
            good = isinstance(factor, (int, float)) and not isinstance(factor, bool)
            if not good or not 0 <= factor <= LARGEST:  # type: ignore[operator]
                raise ConfigurationError(
                    f"{name} must be a number >= 0, such as 2 for Adam; got {factor!r}"
                )
        if self.shard_optimizer != "auto" and not isinstance(self.shard_optimizer, bool):
            raise ConfigurationError(
                f"shard_optimizer must be true, false or 'auto'; got {self.shard_optimizer!r}"
            )
        for name, choices in (
            ("schedule", ("auto", *SCHEDULES)),
            ("filling", FILLINGS),
            ("partition", PARTITIONS),
            ("checkpointing", CHECKPOINTING),
            ("streaming", STREAMING),
            ("optimizer_offload", OPTIMIZER_OFFLOAD),
        ):
            require_choice(name, getattr(self, name), choices)
        if self.streaming == "all" and self.checkpointing == "none":
            raise ConfigurationError(
                "streaming=all copies weights for the backward again, which runs the forward again, but "
                "checkpointing=none; leave one of them out"
            )

        spec = SCHEDULES.get(self.schedule)
        if spec and spec.place and self.partition in PARTITIONS_WITH_REPLICAS:
            others = [name for name in PARTITIONS if name not in PARTITIONS_WITH_REPLICAS]
            raise ConfigurationError(
                f"partition={self.partition} gives every stage ranks of its own, schedule={spec.name} every rank "
                f"several stages; choose another schedule, or a partition of {', '.join(others)}"
            )

        if spec and not spec.flushes:
            self._check_without_flush(spec)

    def _check_without_flush(self, spec: ScheduleSpec) -> None:
        stages, microbatches, replicas = self.num_stages, self.num_microbatches, self.num_replicas
        if set(replicas if isinstance(replicas, tuple) else (replicas,)) - {"auto", 1}:
            raise ConfigurationError(
                f"schedule={spec.name} has one rank for each stage, but num_replicas={self.num_replicas}: replicas "
                "would take whole batches in turn, and none would have the gradients of all. Leave it out; "
                "data_parallel=N puts pipelines side by side"
            )
        if self.filling not in ("none", "auto"):
            raise ConfigurationError(
                f"schedule={spec.name} leaves no bubbles to fill, but filling={self.filling}; use auto or none"
            )
        if microbatches != "auto" and microbatches != 1 and not spec.accumulates:
            raise ConfigurationError(
                f"with schedule={spec.name} every batch is one microbatch, but num_microbatches={microbatches}; "
                "leave it out, or choose pipedream_2bw, where several make a batch"
            )
        if not isinstance(stages, int) or not isinstance(microbatches, int):
            return
        if spec.accumulates and not spec.takes(stages, microbatches):
            raise ConfigurationError(
                f"schedule={spec.name} needs num_microbatches >= num_stages - 1, so that the weights of the batch "
                f"before last are there when one begins; got {microbatches} for {stages} stages"
            )

    @staticmethod
    def _check_count(name: str, value: object, auto: bool) -> None:
        if auto and value == "auto":
            return
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST:
            choice = "a whole number >= 1 or 'auto'" if auto else "a whole number >= 1"
            raise ConfigurationError(f"{name} must be {choice}; got {value!r}")

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> PlanOptions:
        """Makes options of plain values; lists become tuples.

        Raises:
            ConfigurationError: An unknown or missing key, or a bad value.
        """
        return cls.from_node(Node(dict(values), "", ConfigurationError, "options"))

    @classmethod
    def from_node(cls, node: Node) -> PlanOptions:
        """Reads the JSON form."""
        node.check_keys(("global_batch_size",), tuple(f.name for f in fields(cls)))
        values = ((key, member.value) for key, member in node.members())
        return node.made(cls, **{k: tuple(v) if isinstance(v, list) else v for k, v in values})

    def to_dict(self) -> dict[str, object]:
        """Returns plain values, ready for JSON."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    to_plain = to_dict


def ranks_of_pipeline(
    num_stages: int | Auto, num_replicas: int | tuple[int, ...] | Auto
) -> int | None:
    """Returns the number of ranks of a pipeline, None where options do not fix it.

    Example:
        >>> ranks_of_pipeline("auto", (2, 1)), ranks_of_pipeline(2, 2), ranks_of_pipeline(2, "auto")
        (3, 4, None)
    """
    if isinstance(num_replicas, tuple):
        return sum(num_replicas)
    if num_replicas != "auto" and num_stages != "auto":
        return num_replicas * num_stages
    return None
