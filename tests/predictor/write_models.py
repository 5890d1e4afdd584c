"""Writes the table of denoisers in `docs/sampling.md`: how every model of the zoo can be sampled.

    python -m tests.predictor.write_models

Each is a tiny model of the zoo that takes latents, in evaluation mode. *Patches*: the probe of PipeFusion and of
sequence parallelism admits it. *Bands*: two synchronous bands of DistriFusion give its prediction.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import diffusers
import torch

from lightning_diffpipe.errors import DiffPipeError
from lightning_diffpipe.sampling.distrifusion import emulate
from lightning_diffpipe.sampling.one_process import OneProcess
from lightning_diffpipe.sampling.probe import probe
from lightning_diffpipe.sampling.request import Request
from tests.zoo import CASES

PATH = Path(__file__).parents[2] / "docs" / "sampling.md"
START, STOP = "<!-- models: python -m tests.predictor.write_models -->", "<!-- end of models -->"


def request_of(case):
    """Two denoising steps of a zoo model on its own inputs, or None if it takes no latents."""
    torch.set_default_dtype(torch.float32)
    root, batch = case.build()
    root.eval()
    name = next((n for n in ("sample", "hidden_states", "x") if n in batch), None)
    if name is None or batch[name].dim() < 3 or not batch[name].is_floating_point():
        return None

    def denoise(latents, timestep):
        given = {**batch, name: latents}
        if "timestep" in batch:
            given["timestep"] = timestep.expand(len(latents)).to(batch["timestep"].dtype)
        prediction = root.outputs(given)[0]
        return prediction[:, : latents.shape[1]] if latents.dim() == 4 else prediction

    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(2)
    return Request(
        root.model, denoise, scheduler, scheduler.timesteps, batch[name], scale_input=False
    )


def outcome(run):
    """`yes`, or the first words of the refusal."""
    try:
        return "yes" if run() else "no: another prediction"
    except DiffPipeError as error:
        said = " ".join(str(error).split()).partition(";")[0].partition(": ")[0]
        return "no" if len(said) > 90 else f"no: {said}"
    except Exception as error:
        return f"no: {type(error).__name__}"


def row(case):
    request = request_of(case)
    if request is None:
        return None

    def bands():
        latents, _ = emulate(request, 2, mode="synchronous")
        expected = OneProcess().sample(request)
        return torch.allclose(latents, expected, rtol=1e-3, atol=1e-4)

    name, _, variant = case.name.partition(" ")
    cells = (f"`{name}` {variant}".rstrip(), outcome(lambda: probe(request)), outcome(bands))
    return "| " + " | ".join(cells) + " |"


def main(words):
    warnings.filterwarnings("ignore")
    diffusers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = []
    for name, case in sorted(CASES.items()):
        if case.reason is None and (not words or any(word in name for word in words)):
            try:
                line = row(case)
            except Exception as error:
                line = f"| `{name}` | not tried: {type(error).__name__} | |"
            if line is not None:
                rows.append(line)
                print(line, flush=True)
    if words:
        return
    patches = sum("| yes |" in line.replace("| yes | ", "| yes |", 1) for line in rows)
    table = [START, "", "| Model | Patches | Bands |", "|---|---|---|", *rows, "", STOP]
    text = PATH.read_text()
    before, after = text.partition(START)[0], text.partition(STOP)[2]
    PATH.write_text(before + "\n".join(table) + after)
    print(patches, len(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
