"""Memory of each rank while a large model is opened, trained, saved and sampled, beside the plan.

A Flux-shaped pipeline is written to a folder with random weights in bfloat16; each rank opens it, trains adapters
on a few batches, and samples. A thread reads RssAnon of Linux: what is mapped from a file does not count, since the
system can drop those pages and ranks share them.

    python benchmarks/memory/main.py --size 1e9 --json out.json

Where there are GPUs, one for each rank, what tensors take there counts instead, also where they are imitated:

    python -m tests.gpu_like benchmarks/memory/main.py --size 1e9

With `--limit` each process is refused more than so many GiB, of a GPU by its allocator, else by the kernel
(`RLIMIT_DATA`, as of `prlimit --data`): the same training on `--ranks` ranks, and in one process. 0 is no limit, to
see what they take.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import sys
import tempfile
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import lightning as L
import torch
import transformers
from torch import multiprocessing
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.harness import main, on_ranks
from lightning_diffpipe import DiffPipeStrategy
from lightning_diffpipe.callbacks import EncodingCache
from lightning_diffpipe.comm.watcher import watcher
from lightning_diffpipe.modules import Lora, PipelineDiffusion
from lightning_diffpipe.predictor import Predictor
from tests import gpu_like

gpu_like.install()
HAS_GPUS = torch.cuda.is_available()
GIB = 2**30
ranks_of_users = partial(on_ranks, keeps_memory=False)
SIZES = {
    "tiny": (32, 19, 38, 2),
    "1e8": (1024, 1, 2, 8),
    "3e8": (2048, 1, 2, 4),
    "1e9": (2048, 3, 8, 8),
    "3e9": (3072, 4, 13, 8),
}
"""By number of parameters, or of Flux' depth (`tiny`): width, double and single blocks of the transformer, layers
of the text encoder."""


class Peaks(threading.Thread):
    """The most memory of this process in each phase, in bytes: of its GPU, if it has one, else of the host.

    Args:
        field: Of /proc/self/status: `RssAnon`, anonymous memory, or `VmData`, which a limit counts.
    """

    def __init__(self, field: str) -> None:
        super().__init__(daemon=True)
        self.phase: str | None = None
        self.most: dict[str, int] = {}
        self._line = re.compile(rf"{field}:\s+(\d+)")

    def run(self) -> None:
        """Looks a hundred times a second."""
        while True:
            phase, now = self.phase or watcher.phase, self._bytes()
            self.most[phase] = max(now, self.most.get(phase, 0))
            time.sleep(0.01)

    def _bytes(self) -> int:
        if not HAS_GPUS:
            status = Path("/proc/self/status").read_text()
            return 1024 * int(self._line.search(status).group(1))
        most = torch.cuda.max_memory_allocated()  # since the last look
        torch.cuda.reset_peak_memory_stats()
        return most


def write_pipeline(folder: Path, size: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes a pipeline of Flux' classes in a type, made in it."""
    width, doubles, singles, layers = SIZES[size]
    head = min(width, 128)
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    letters = [chr(i) + end for i in range(97, 123) for end in ("", "</w>")]
    pieces = [*letters, "<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({p: i for i, p in enumerate(pieces)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    files = str(folder / "vocab.json"), str(folder / "merges.txt")
    clip = transformers.CLIPTextConfig(
        vocab_size=80, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=12, bos_token_id=52, eos_token_id=53, pad_token_id=53,
    )  # fmt: skip
    t5 = transformers.T5Config(
        vocab_size=384,
        d_model=width,
        d_kv=64,
        d_ff=5 * width // 2,
        num_layers=layers,
        num_heads=-(-width // 64),
    )
    diffusers.FluxPipeline(
        vae=diffusers.AutoencoderKL(
            block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=16, norm_num_groups=8, shift_factor=0.1,
        ),
        text_encoder=transformers.CLIPTextModel(clip),
        text_encoder_2=transformers.T5EncoderModel(t5),
        tokenizer=transformers.CLIPTokenizer(*files, model_max_length=12),
        tokenizer_2=transformers.ByT5Tokenizer(model_max_length=24),
        transformer=diffusers.FluxTransformer2DModel(
            in_channels=64, num_layers=doubles, num_single_layers=singles, attention_head_dim=head,
            num_attention_heads=width // head, joint_attention_dim=width, pooled_projection_dim=64,
            guidance_embeds=True, axes_dims_rope=(head // 8, head * 7 // 16, head * 7 // 16),
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    ).to(dtype).save_pretrained(folder)  # fmt: skip


def measure(
    rank: int,
    folder: str,
    world_size: int,
    precision: str,
    frozen_dtype: str | None = None,
    encode_first: bool = False,
    quantization: str | None = None,
    trains: str = "adapters",
    limit_gib: float | None = None,
) -> list[dict[str, Any]]:
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    if HAS_GPUS:
        torch.cuda.set_device(rank)
    peaks = Peaks("RssAnon" if limit_gib is None else "VmData")
    if limit_gib and HAS_GPUS:
        total = torch.cuda.get_device_properties(rank).total_memory
        torch.cuda.set_per_process_memory_fraction(limit_gib * GIB / total, rank)
    elif limit_gib:
        resource.setrlimit(resource.RLIMIT_DATA, (int(limit_gib * GIB),) * 2)
    peaks.phase = "opening"
    peaks.start()
    module = PipelineDiffusion.from_pretrained(
        folder,
        lora=Lora(rank=8) if trains == "adapters" else None,
        call={"max_sequence_length": 16},
        caption_dropout=0.0,
        frozen_dtype=frozen_dtype,
        quantization=quantization,
    )
    images = torch.randn(6, 3, 64, 64)
    data = [{"image": image, "caption": f"a cat {i}"} for i, image in enumerate(images)]
    peaks.phase = None
    trainer = L.Trainer(
        accelerator="gpu" if HAS_GPUS else "cpu", devices=world_size, max_steps=3, precision=precision,
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        strategy=DiffPipeStrategy(
            num_stages=world_size,
            num_microbatches=2,
            seed=0,
            profile="measure" if limit_gib is None else "flops",
        ),
        callbacks=[
            SaveAndPlan(f"{folder}/../trained.ckpt", peaks),
            *([EncodingCache(f"{folder}/../encodings", encode_first=True)] if encode_first else []),
        ],
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, 2))
    planned = SaveAndPlan.planned
    peaks.phase = "between"
    del module, trainer
    if limit_gib is None:
        peaks.phase = "opening to sample"
        with Predictor.from_pretrained(
            folder,
            method="pipefusion" if world_size > 1 else "single",
            device="cuda" if HAS_GPUS else "cpu",
            verify=False,
            quantization=quantization,
        ) as predictor:
            peaks.phase = "sampling"
            predictor(["a cat"], num_inference_steps=3, height=64, width=64, max_sequence_length=16)
    mine = {"planned": planned[rank], **peaks.most}
    everyone = [None] * world_size
    torch.distributed.all_gather_object(everyone, mine)
    return [
        {"rank": r, "phase": phase, "GiB": most / GIB}
        for r, numbers in enumerate(everyone)
        for phase, most in numbers.items()
    ]


class SaveAndPlan(L.Callback):
    """Saves at the end of training, and keeps what the plan says of memory."""

    planned: tuple[float, ...] = ()

    def __init__(self, path: str, peaks: Peaks) -> None:
        self.path, self.peaks = path, peaks

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves."""
        SaveAndPlan.planned = trainer.strategy.plan.planned.peak_memory_bytes
        self.peaks.phase = "saving"
        trainer.save_checkpoint(self.path)
        self.peaks.phase = "teardown"


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each rank and phase."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(arguments.folder or name) / "pipeline"
        if not (folder / "model_index.json").exists():
            if pid := os.fork():  # so that what it takes to make weights is not kept
                os.waitpid(pid, 0)
            else:
                write_pipeline(folder, arguments.size, getattr(torch, arguments.stored))
                os._exit(0)
        settings = (
            arguments.precision, arguments.frozen_dtype, arguments.encode_first, arguments.quantization,
            arguments.trains,
        )  # fmt: skip
        if arguments.limit is None:
            return ranks_of_users(arguments.ranks, measure, str(folder), arguments.ranks, *settings)
        return [
            row
            for ranks in (arguments.ranks, 1)
            for row in under_limit(ranks, arguments.limit, str(folder), settings)
        ]


def under_limit(
    ranks: int, limit_gib: float, folder: str, settings: tuple[Any, ...]
) -> list[dict[str, Any]]:
    """One row for each rank, or for the run that failed, each of whose processes has a limit, 0 for none."""
    row = {"ranks": ranks, "limit in GiB": limit_gib or "none"}
    try:
        rows = ranks_of_users(ranks, measure, folder, ranks, *settings, limit_gib)
    except (
        multiprocessing.ProcessRaisedException,
        multiprocessing.ProcessExitedException,
    ) as error:
        end = str(error).strip().splitlines()[-1]
        return [row | {"rank": "", "end": end, "planned": "", "training": "", "most": ""}]
    table = []
    for rank in range(ranks):
        taken = {r["phase"]: r["GiB"] for r in rows if r["rank"] == rank}
        known = {"planned": taken.pop("planned"), "training": taken["training"]}
        phase = max(taken, key=lambda phase: taken[phase])
        end = f"trained; most when {phase}"
        table.append(row | {"rank": rank, "end": end, **known, "most": taken[phase]})
    return table


def options(parser: argparse.ArgumentParser) -> None:
    """Adds what is trained, and how."""
    parser.add_argument(
        "--size", choices=SIZES, default="1e9", help="parameters of the transformer"
    )
    parser.add_argument("--folder", help="where the pipeline is kept for the next time")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit", type=float, help="GiB of each process, of its GPU if it has one")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument(
        "--frozen-dtype", help="float32: cast, so that frozen weights are anonymous"
    )
    parser.add_argument("--quantization", help="of frozen linear layers: int8")
    stored = ("bfloat16", "float32")
    parser.add_argument("--stored", choices=stored, default="bfloat16", help="type of the files")
    parser.add_argument(
        "--trains", choices=("adapters", "all"), default="adapters", help="all: without adapters"
    )
    parser.add_argument(
        "--encode-first", action="store_true", help="store all encodings before training"
    )


if __name__ == "__main__":
    main(run, __doc__, options)
