"""Writes the table of denoisers in `docs/sampling_models.md`: how every model of the zoo can be sampled.

    python -m tests.predictor.write_models

Each is a tiny model of the zoo that takes latents, in evaluation mode, and all three columns are found by sampling.
*Patches*: two patches of PipeFusion, with keys and values of the step before, whose latents were the same, give
what one process gives. *Tokens*: so do two ranks of sequence parallelism. *Bands*: so do two synchronous bands of
DistriFusion. `test_mesh.py` runs some rows again.
"""

import re
import sys
import warnings
from pathlib import Path

import diffusers
import torch

from lightning_diffpipe.comm.loopback import LoopbackNetwork
from lightning_diffpipe.sampling.distrifusion import emulate
from lightning_diffpipe.sampling.pipefusion import PipeFusion, SequenceParallel
from lightning_diffpipe.sampling.request import OneProcess, Request
from tests.zoo import CASES

PATH = Path(__file__).parents[2] / "docs" / "sampling_models.md"
START, STOP = "<!-- models: python -m tests.predictor.write_models -->", "<!-- end of models -->"


def request_of(case):
    """Two denoising steps of a zoo model on its own inputs, or None if it takes no latents.

    The first step does not change the latents, so keys and values of the second are those of the first.
    """
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
    scheduler.set_timesteps(sigmas=[1.0, 1.0])
    scheduler.set_begin_index(0)
    return Request(
        root.model, denoise, scheduler, scheduler.timesteps, batch[name], scale_input=False
    )


REASONS = {
    "that are not one for each row": "times of branches",
    "mixes rows of the latents outside": "rows are mixed outside attention",
    "there is no rule for it": "{operator} has no rule",
    "computes something else than on": "other results",
    "an attention mask of shape": "a mask for each query",
    "but the latents have": "too few rows",
    "rows beyond its band, but": "too few rows",
    "of which a rank would own": "unequal text",
    "patches this model fails": "a block expects all tokens",
    "makes positions for all rows by itself": "positions of all rows",
    "it is not known which axes are those of the latents": "axes of its input are not known",
    "while it is probed this model fails": "fails while it is probed",
    "tokens are mixed on the way to attention": "rows are mixed before attention",
    "some tokens belong to no row": "rows are mixed outside attention",
    "no block of the model sends image tokens": "no attention to image tokens",
    "has the rows and columns of the latents": "its input has more rows than the latents",
    "brings rows of the latents together": "its loop mixes rows",
    "every step must look alike": "its steps differ",
    "calls attention more often than": "its call changes attention",
    "with a denoiser that predicts zeros": "its loop reads more of the denoiser than predictions",
    "takes each sample as a tensor of its own": "its denoiser takes samples as a list",
    "has no method `step`": "its scheduler has no `step`",
    "cannot load the pipeline": "diffusers alone cannot load it",
    "this request has one that can be divided": "one branch",
    "rows are treated by their place": "its call changes attention",
    "copies the first prediction": "its loop copies predictions",
    "rows of samples are not known": "samples otherwise than in rows",
}


def outcome(run):
    """`yes`, or why not in a few words."""
    try:
        return "yes" if run() else "no: other results"
    except Exception as error:
        reason = reason_of(error)
        return f"no: {reason}" if reason else "no"


def reason_of(error):
    """What an error says, in a few words, if they are known."""
    said = " ".join(str(error).split())
    operator = re.match(r"\w+", f"{said} ")[0]
    operator = "an operator" if operator == "an" else operator
    found = [words for part, words in REASONS.items() if part in said]
    return found[0].format(operator=operator) if found else None


def row(case):
    request = request_of(case)
    if request is None:
        return None

    def as_in_one_process(latents):
        return torch.allclose(latents, OneProcess().sample(request), rtol=1e-3, atol=1e-4)

    def patches():
        sampler = PipeFusion(request.model, num_patches=2, warmup_steps=1, verify=True)
        return as_in_one_process(sampler.sample(request))

    def tokens():
        requests = [request, request_of(case)]  # a model for each rank

        def rank(links):
            mine = requests[links.rank]
            return SequenceParallel(mine.model, links, mode="ring", verify=True).sample(mine)

        return as_in_one_process(LoopbackNetwork(2).run(rank)[0])

    def bands():
        return as_in_one_process(emulate(request, 2, mode="synchronous")[0])

    name, _, variant = case.name.partition(" ")
    cells = (f"`{name}` {variant}".rstrip(), *map(outcome, (patches, tokens, bands)))
    return "| " + " | ".join(cells) + " |"


def is_denoiser(case):
    """A ControlNet alone predicts residuals, not noise."""
    alone = "ControlNet" in case.name and " with " not in case.name
    return case.reason is None and (not alone or "XS" in case.name)


def main(words):
    warnings.filterwarnings("ignore")
    diffusers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = []
    for name, case in sorted(CASES.items()):
        if is_denoiser(case) and (not words or any(word in name for word in words)):
            line = row(case)
            if line is not None:
                rows.append(line)
                print(line, flush=True)
    if not words:
        PATH.write_text(with_table(PATH.read_text(), rows))


def with_table(text, rows):
    """The page with another table."""
    cells = [line.strip("| ").split(" | ") for line in rows]
    counts = [sum(cell[i] == "yes" for cell in cells) for i in (1, 2, 3)]
    either = sum("yes" in cell[1:] for cell in cells)
    summary = (
        f"Of {len(rows)} configurations, {counts[0]} can be sampled in patches, {counts[1]} with tokens "
        f"divided, {counts[2]} in bands, {either} in one of these ways."
    )
    table = [
        START,
        "",
        summary,
        "",
        "| Model | Patches | Tokens | Bands |",
        "|---|---|---|---|",
        *rows,
        "",
        STOP,
    ]
    return text.partition(START)[0] + "\n".join(table) + text.partition(STOP)[2]


if __name__ == "__main__":
    main(sys.argv[1:])
