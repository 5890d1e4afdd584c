"""How long does planning take? Random models on clusters up to 64 ranks, in pure Python.

python benchmarks/planner_speed/main.py --json planner_speed.json
"""

import argparse
import json
import platform
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_diffpipe.planning.cluster import Cluster, Link
from lightning_diffpipe.planning.cost import CostModel, LayerRun
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.profile import (
    BackboneProfile,
    EncoderLayerProfile,
    EncoderProfile,
    LayerProfile,
    ModelProfile,
    Seconds,
)
from lightning_diffpipe.planning.search import find_plan


@dataclass(frozen=True)
class Case:
    """One search; `memory_share` is the memory of a rank over what the whole model needs."""

    name: str
    num_layers: int
    num_ranks: int
    batch: int
    memory_share: float | None
    options: dict[str, object]


ALL: dict[str, object] = {"schedule": "auto"}
FILLING: dict[str, object] = {"filling": "auto"}

CASES = [
    Case(
        "60 layers, 8 ranks, S=8 M=16", 60, 8, 64, None, {"num_stages": 8, "num_microbatches": 16}
    ),
    Case("60 layers, 8 ranks", 60, 8, 64, None, {}),
    Case("60 layers, 8 ranks, too big for one", 60, 8, 64, 0.3, {}),
    Case("60 layers, 8 ranks, too big, all schedules", 60, 8, 64, 0.3, ALL),
    Case("200 layers, 64 ranks", 200, 64, 512, None, {}),
    Case("200 layers, 64 ranks, filling", 200, 64, 512, None, FILLING),
    Case("200 layers, 64 ranks, all schedules", 200, 64, 512, None, ALL),
    Case("200 layers, 64 ranks, all, filling", 200, 64, 512, None, ALL | FILLING),
    Case("200 layers, 64 ranks, too big for one", 200, 64, 512, 0.3, {}),
    Case("200 layers, 64 ranks, too big, filling", 200, 64, 512, 0.3, FILLING),
    Case("200 layers, 64 ranks, too big, all", 200, 64, 512, 0.3, ALL),
    Case("200 layers, 64 ranks, too big, all, filling", 200, 64, 512, 0.3, ALL | FILLING),
]


def random_model(num_layers: int) -> ModelProfile:
    """Layers of different times and sizes, and one frozen encoder."""
    rng = random.Random(1)

    def times(scale: float) -> Seconds:
        sample_s, overhead_s = rng.uniform(0.1, 1) * scale, rng.uniform(0, 0.3) * scale
        return Seconds.of({1: overhead_s + sample_s, 8: overhead_s + 8 * sample_s})

    def layer(number: int) -> LayerProfile:
        sizes = (rng.randint(1, 50), rng.randint(0, 50), rng.randint(1, 20), rng.randint(1, 20))
        return LayerProfile(f"layer{number}", times(1e-3), times(2e-3), None, *sizes)

    backbone = BackboneProfile("backbone", tuple(layer(i) for i in range(num_layers)))
    encoder = EncoderProfile("vae", (EncoderLayerProfile("whole", times(num_layers * 1e-3)),))
    return ModelProfile("random", (backbone,), (encoder,))


def run(case: Case) -> dict[str, object]:
    """Plans once; returns CPU seconds and what was found."""
    profile, link = random_model(case.num_layers), Link(1e6, 1e-5)
    model, whole = CostModel(profile, Cluster(case.num_ranks)), LayerRun(0, case.num_layers)
    need = model.resident_bytes(whole) + model.activation_bytes(whole, 1)
    memory = None if case.memory_share is None else int(case.memory_share * need)
    cluster = Cluster(case.num_ranks, 8, memory, link, link)
    start = time.process_time()
    plan = find_plan(profile, cluster, PlanOptions(case.batch, **case.options))  # type: ignore[arg-type]
    return {
        **asdict(case),
        "cpu_s": time.process_time() - start,
        "num_stages": plan.num_stages,
        "num_pipelines": plan.num_pipelines,
        "num_microbatches": plan.num_microbatches,
        "iteration_s": plan.planned.iteration_s,
        "no_bubble_limit_s": plan.planned.no_bubble_limit_s,
    }


def main() -> None:
    """Runs all cases, prints a table, writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    arguments = parser.parse_args()
    rows = []
    print(f"{'case':45} {'CPU s':>6}  plan")
    for case in CASES:
        row = run(case)
        rows.append(row)
        found = f"{row['num_pipelines']} x {row['num_stages']} stages, M={row['num_microbatches']}"
        print(f"{case.name:45} {row['cpu_s']:6.2f}  {found}", flush=True)
    if arguments.json:
        environment = {"python": platform.python_version(), "machine": platform.processor()}
        arguments.json.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
