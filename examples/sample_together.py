"""Samples prompts with all ranks, and says what it took.

    python examples/sample_together.py                                    # one process
    torchrun --nproc-per-node 2 examples/sample_together.py               # two: DistriFusion, the model is a U-Net
    torchrun --nproc-per-node 4 examples/sample_together.py --path FOLDER --method pipefusion

About 3 s on two CPU cores with the built-in model.
"""

import argparse
from pathlib import Path

from lightning_diffpipe import Predictor

PROMPTS = ["greek small letter alpha, serif bold", "digit four, mono"]


def main() -> None:
    """Runs on every rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", default="examples/glyphs")
    parser.add_argument("--method", default="distrifusion")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--output", type=Path, default=Path())
    arguments = parser.parse_args()
    with Predictor.from_pretrained(arguments.path, arguments.method, warmup_steps=4) as predictor:
        images = predictor(PROMPTS, num_inference_steps=arguments.steps, seed=0)
        if images is None:  # rank 0 has them
            return
        for number, image in enumerate(images):
            image.save(arguments.output / f"sample_{number}.png")
        print(predictor.report)


if __name__ == "__main__":
    main()
