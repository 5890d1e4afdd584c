"""Costs of schedules in tests, in ticks: a number for every stage, or one for each."""

from collections.abc import Sequence
from dataclasses import replace

from lightning_diffpipe.planning.simulator import in_ticks, simulate


def tick_costs(schedule, reduce=0, exchange=0, encode=1, holds_sender=False, **by_stage):
    """The costs of `in_ticks` with others in place of `forward`, `activation` ..., by the stage that reads them."""
    costs, count = in_ticks(schedule), schedule.num_microbatches

    def row(ticks, length):
        return tuple(ticks) if isinstance(ticks, Sequence) else (ticks,) * length

    tables = {
        f"{name}_s": tuple((ticks,) * count for ticks in row(value, schedule.num_stages))
        for name, value in by_stage.items()
    }
    return replace(
        costs,
        encode_s=row(encode, len(costs.encode_s)),
        all_reduce_s=(reduce,) * schedule.num_ranks,
        all_gather_s=exchange,
        holds_sender=holds_sender,
        **tables,
    )


def simulated(schedule, **ticks):
    return simulate(schedule, tick_costs(schedule, **ticks))
