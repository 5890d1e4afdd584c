"""Frozen encoders in the bubbles: against our own unfilled pipeline, torch's, DeepSpeed's, DDP and FSDP2.

python benchmarks/bubble_filling/main.py --json out.json                     two real ranks
python benchmarks/bubble_filling/main.py --part long_layer --json out.json   whole shares or parts
python benchmarks/bubble_filling/main.py --part emulated --json out.json     2 to 8 sleeping ranks
python benchmarks/bubble_filling/main.py --part network --json out.json      over 1 Gbit/s (as root)
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.harness import environment, table

# Imported when asked for: every process of a benchmark imports this file.
PARTS = {
    "two_ranks": ("real", "two_ranks"),
    "long_layer": ("real", "long_layer"),
    "emulated": ("emulated", "run"),
    "network": ("network", "run"),
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, default="two_ranks")
    parser.add_argument(
        "--only", help="some cases, for example controlnet-2,controlnet-4; or 4 emulated ranks"
    )
    parser.add_argument("--systems", help="some systems besides filled and limit, for example DDP")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--rounds", type=int, default=6, help="counted turns of each system")
    parser.add_argument("--steps", type=int, default=6, help="steps of a turn, on two real ranks")
    arguments = parser.parse_args()
    where = environment()
    module, function = PARTS[arguments.part]
    part = importlib.import_module(f"benchmarks.bubble_filling.{module}")
    rows = getattr(part, function)(arguments)
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps({"environment": where, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
