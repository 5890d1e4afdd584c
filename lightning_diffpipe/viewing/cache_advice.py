"""Cache or fill, as a few lines beside a plan: what storing encodings would gain, cost, and how to do it."""

from __future__ import annotations

import math

from lightning_diffpipe.planning.caching import CacheAdvice
from lightning_diffpipe.viewing.units import percent, seconds, size


def cache_advice(advice: CacheAdvice) -> str:
    """The lines; see `planning/caching.py`."""
    lines = ["Cache or fill? Encodings of frozen layers can be stored instead of made anew."]
    if advice.cached:
        lines += _comparison(advice)
    if advice.computed:
        names = ", ".join(advice.computed)
        lines.append(
            f"  computed    {names}: follows noise or other random numbers, or is quicker to compute"
        )
    lines.append(f"  {_verdict(advice)}")
    return "\n".join(lines)


def _comparison(advice: CacheAdvice) -> list[str]:
    gain = advice.filled_step_s - advice.cached_step_s
    change = percent(abs(gain) / advice.filled_step_s) if advice.filled_step_s else "0%"
    disk = f"{size(advice.sample_bytes)} a sample"
    if advice.disk_bytes is not None:
        disk += f", {size(advice.disk_bytes)} in all"
    disk += f"; each rank reads {advice.disk_bytes_per_s / 1e6:g} MB/s (disk_bytes_per_s)"
    passes = advice.break_even_passes
    pays = "never" if math.isinf(passes) else f"from pass {math.floor(passes) + 1} over the data on"
    return [
        f"  as planned  {seconds(advice.filled_step_s)} a step",
        f"  stored      {seconds(advice.cached_step_s)} a step ({change} {'less' if gain >= 0 else 'more'}), "
        f"{seconds(advice.writing_s)} of it reading: {', '.join(advice.cached)}",
        f"  on disk     {disk}",
        f"  pays        {pays}",
    ]


def _verdict(advice: CacheAdvice) -> str:
    if not advice.cached:
        return "Nothing can be stored: fill bubbles."
    if not advice.use_cache:
        return "Not worth a disk: storing saves less than 2%."
    how = 'EncodingCache("encodings") among the callbacks, or diffpipe train callbacks=cached'
    doubt = (
        ""
        if advice.certain
        else "; the profile does not say whether encodings follow from the sample alone"
    )
    return (
        f"Worth it if samples come back unchanged (no random crops, captions not redrawn{doubt}):\n"
        f"  {how}"
    )
