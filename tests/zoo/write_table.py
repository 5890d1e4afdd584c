"""Writes `docs/models.md`: what came out for every model of the zoo.

    python -m tests.zoo.write_table              # all models, a few minutes
    python -m tests.zoo.write_table Flux Wan     # only rows whose name contains one of these
    python -m tests.zoo.write_table Pipeline     # only pipelines

Numbers of layers depend on the probe, error sizes on the machine; everything else is a fact. The
equivalence test compares all but the errors with what it measures.
"""

import math
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

import diffusers
import torch

from . import CASES, FAMILIES
from .case import Case
from .measure import Outcome, measure
from .pipelines import PIPELINES
from .sample_pipelines import METHODS
from .sample_pipelines import measure as sample
from .train_pipelines import Trained, editing_by_class, refused_by_class
from .train_pipelines import measure as train

PATH = Path(__file__).parents[2] / "docs" / "models.md"
COLUMNS = (
    "Model", "Parameters", "Layers", "Frozen", "Shared", "Probed on", "Samples apart", "Gradient error",
)  # fmt: skip
INTRODUCTION = """\
# Which models work

Written by `python -m tests.zoo.write_table` with diffusers {version}; `tests/test_equivalence.py`
keeps it true. {works} of the {total} denoiser classes of diffusers (transformers, U-Nets, ControlNets)
give the loss and the gradients of one process when they are cut into stages, {models} configurations
in all. No model needs code of its own; those missing fail for a reason outside this package.

Each row is a tiny model in double precision with all parameters perturbed, cut at random places into
two and three stages. Its loss is the same to the last bits (1e-12), and so is every gradient (1e-9).

- **Parameters**: of the tiny model that was tested.
- **Layers**: calls of modules between which it can be cut; **Frozen**: those that run in bubbles.
- **Shared**: trained parameters that two stages held at once; their gradients are summed.
- **Probed on**: *shapes* needs neither memory nor weights; *values* means that the control flow of the
  model depends on values, so that probing a model of full size needs its weights.
- **Samples apart**: *no* means that the loss of a batch is not the mean of the losses of its samples,
  so that splitting it into microbatches changes the result, with or without a pipeline. (The fusion
  transformer of ControlNet-Union attends from one sample of the batch to another.)
- **Gradient error**: largest deviation relative to the largest entry of a gradient, rounded up to a
  power of ten.

Which of them several ranks can *sample* together, and how, is in [a table](sampling_models.md#denoisers);
the Predictor runs the loops of diffusers' pipelines; the samplers themselves take latents and give latents.
"""


PIPELINE_COLUMNS = (
    "Pipeline", "Learns", "Frozen parts", "Gradient error", "Saved, samples the same",
    *(f"`{method}`" for method in METHODS),
)  # fmt: skip
PIPELINES_INTRODUCTION = """\
## Pipelines trained by their own call

`LatentDiffusion.from_pretrained(FOLDER)` and `diffpipe train model=pretrained model.path=FOLDER` run a pipeline's
own `__call__` with one step for training. {works} of {built} classes that sample from prompts or classes alone, or
from nothing, or that edit or animate an image, are trained so; `tests/test_pipelines.py` builds each in tiny, cuts
its step into two stages, compares loss and gradients with one process in double precision, writes it with
`save_pretrained`, opens that with diffusers alone, and samples with both from the same noise. The rest says what
cannot be followed.

`QwenImageEditPipeline` and `QwenImageEditPlusPipeline` learn from [references](pretrained.md#references), and
sample with those of one prompt; others that edit or animate images have one for each sample, and sample two at a
time where diffusers does.

The last columns say how the [Predictor](sampling.md) samples it, found by sampling two prompts at a time where
diffusers itself can. *Yes* under `single` is what diffusers alone samples, to the last bit, and to rounding where
two ranks sample a prompt each; under the other methods it is the same to rounding on two ranks, while all steps are
synchronous, and under `guidance` where each computes one branch (`guidance=2`). `single` samples {single} of them,
`sequence` {sequence}, `pipefusion` {pipefusion}, `distrifusion` {distrifusion}, one of these three {either}, and
halves of guidance {guidance}. Images are as tiny as denoisers, and some have too few rows. *Diffusers alone
fails* where its own call does, with {version}.
"""
EDITING_INTRODUCTION = """\
These {number} need an image besides, which a batch may have (`condition`), but are not built in tiny here. They
are trained if their call gives that image to the autoencoder, and to others as numbers only, and refused with the
reason otherwise:
"""
REFUSED_INTRODUCTION = """\
These {number} start from images, or sample from videos, embeddings or parts that a batch does not have. They are
refused before weights are read, with the argument's name; a LightningModule of your own trains their denoisers:
"""


def pipeline_row(name: str, trained: Trained, sampled: Mapping[str, str]) -> str:
    """One line of the table of pipelines; with the reason if it is refused."""
    cells = [f"`{name}`", f"refused: {trained.refusal}", "", "", ""]
    if not trained.refusal:
        cells[1:] = [
            trained.prediction,
            ", ".join(f"`{part}`" for part in trained.frozen),
            power_of_ten(trained.gradient_error),
            "yes" if trained.same else "no",
        ]
    return "| " + " | ".join([*cells, *sampled.values()]) + " |"


def training_facts(line: str) -> list[str]:
    """What a row says of training, without the error, which differs from machine to machine."""
    cells = line.removesuffix(" |").split(" | ")
    return cells[:3] + cells[4:5]


def sampling_facts(line: str) -> list[str]:
    """What a row says of sampling."""
    return line.removesuffix(" |").split(" | ")[5:]


def refused_pipelines() -> str:
    """The sentences on pipelines that are refused by their class, and on those that are not tried."""
    editing = [name for name in editing_by_class() if name not in PIPELINES]
    groups = {REFUSED_INTRODUCTION: refused_by_class(), EDITING_INTRODUCTION: editing}
    return "\n".join(
        introduction.format(number=len(names))
        + "\n"
        + ", ".join(f"`{name.removesuffix('Pipeline')}`" for name in names)
        + ".\n"
        for introduction, names in groups.items()
    )


def row(case: Case, outcome: Outcome | None) -> str:
    """One line of the table; with the reason if the model cannot be run."""
    class_name, _, variant = case.name.partition(" ")
    title = f"`{class_name}` {variant}".rstrip()
    if outcome is None:
        return f"| {title} | not tested: {case.reason} " + "| " * (len(COLUMNS) - 2) + "|"
    apart = {True: "yes", False: "no", None: "one sample"}[outcome.samples_apart]
    cells = (
        title, f"{outcome.num_parameters:,}", str(outcome.num_layers), str(outcome.num_frozen),
        str(outcome.num_shared), "values" if outcome.probed_on_values else "shapes", apart,
        power_of_ten(outcome.gradient_error),
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def power_of_ten(error: float) -> str:
    """An upper bound of an error that does not change with the machine's last bits.

    Example:
        >>> power_of_ten(3.2e-13), power_of_ten(0.0)
        ('1e-12', '0')
    """
    return f"1e{math.ceil(math.log10(error))}" if error > 0 else "0"


def facts(line: str) -> str:
    """A row without its error, which differs from machine to machine."""
    return line.rstrip(" |").rpartition("|")[0]


def table(rows: dict[str, str], pipeline_rows: dict[str, str]) -> str:
    """The whole page."""
    built = [case for case in CASES.values() if case.reason is None]
    lines = [
        INTRODUCTION.format(
            version=diffusers.__version__,
            works=len({case.class_name for case in built}),
            total=len({case.class_name for case in CASES.values()}),
            models=len(built),
        )
    ]
    for family, cases in FAMILIES.items():
        lines += [f"## {family}", "", "| " + " | ".join(COLUMNS) + " |"]
        lines += ["|" + "---|" * len(COLUMNS)]
        lines += [rows[case.name] for case in sorted(cases, key=lambda case: case.name)]
        lines.append("")
    works = sum("| refused: " not in line for line in pipeline_rows.values())
    cells = [sampling_facts(line) for line in pipeline_rows.values()]
    counts = {method: sum(row[i] == "yes" for row in cells) for i, method in enumerate(METHODS)}
    lines += [
        PIPELINES_INTRODUCTION.format(
            works=works,
            built=len(PIPELINES),
            version=diffusers.__version__,
            either=sum("yes" in row[1:4] for row in cells),
            **counts,
        ),
        "| " + " | ".join(PIPELINE_COLUMNS) + " |",
        "|" + "---|" * len(PIPELINE_COLUMNS),
        *(pipeline_rows[name] for name in sorted(PIPELINES)),
        "",
        refused_pipelines(),
    ]
    return "\n".join(lines)


def written_rows() -> dict[str, str]:
    """Rows of the page as it is, by name of the model."""
    lines = PATH.read_text().splitlines() if PATH.exists() else []
    titles = {row(case, None).split("|")[1]: name for name, case in CASES.items()}
    return {
        titles[key]: line
        for line in lines
        if (key := line.partition("|")[2].split("|")[0]) in titles
    }


def main(wanted: list[str]) -> None:
    """Measures the models asked for, and writes the page."""
    warnings.filterwarnings("ignore")
    diffusers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = written_rows()
    for name, case in CASES.items():
        if not wanted or any(word in name for word in wanted) or name not in rows:
            rows[name] = row(case, None if case.reason else measure(case))
            print(rows[name], flush=True)
    written = PATH.read_text().splitlines()
    trained = {
        name: line for line in written for name in PIPELINES if line.startswith(f"| `{name}` |")
    }
    for name in PIPELINES:
        if not wanted or any(word in name for word in wanted) or name not in trained:
            with tempfile.TemporaryDirectory() as folder:
                sampled = sample(name, Path(folder))
                trained[name] = pipeline_row(name, train(name, Path(folder)), sampled)
            print(trained[name], flush=True)
    PATH.write_text(table(rows, trained))


if __name__ == "__main__":
    main(sys.argv[1:])
